"""Writing one part: a Parquet file whose vectors are plain runs of bytes, laid down as they arrive.

A part is an ordinary Parquet file, arranged so that its vectors can be memory-mapped: PLAIN encoding, no
compression, one data page a column and row group, values aligned to 64 bytes, all columns required. The layout of a
row group is known before its values, so a vector is written once, straight from the tensor's memory to its final
place; page headers, repetition levels, scalar columns and the footer follow when the group or the file is closed.

A part appears under its own name only when it is complete and synced (`publish`).

Source: Apache Parquet format 2.10, `parquet.thrift` and `Encodings.md`.
"""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from numpy.typing import NDArray

from dualstore import thrift
from dualstore.bulk import PLAIN
from dualstore.schema import Column
from dualstore.spool import PAGE, Run, Spool, write_all
from dualstore.thrift import BINARY, I32, I64, LIST, STRUCT

__all__ = ["PartWriter", "arrow_schema", "group_rows_for", "sync_directory", "upper_norm"]

ALIGNMENT = 64
MAX_GROUP_ROWS = 16_384
GROUP_BYTES = 32 << 20
"""Aim for the widest vector column of a row group."""
_COPY_BYTES = 8 << 20
_MAGIC = b"PAR1"
_HEADER_ROOM = 128
"""More than a page header, definition levels and their lengths take."""

_PHYSICAL = {"int32": 1, "int64": 2, "float32": 4, "float64": 5, "float16": 7}
_FLOAT16_LOGICAL = 15
_PLAIN, _RLE = 0, 3
_REQUIRED, _REPEATED = 0, 2
_LIST_CONVERTED, _LIST_LOGICAL = 3, 3


def group_rows_for(columns: Sequence[Column]) -> int:
    """Rows of a full row group: a power of two, at most 16,384, the widest column about 32 MiB."""
    widest = max(column.row_bytes for column in columns)
    rows = max(1, min(MAX_GROUP_ROWS, GROUP_BYTES // widest))
    return 1 << rows.bit_length() - 1


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """The columns as Arrow types: vectors are fixed-size lists, nothing is nullable."""
    return pa.schema([pa.field(column.name, _arrow_type(column), nullable=False) for column in columns])


def _arrow_type(column: Column) -> pa.DataType:
    scalar = pa.from_numpy_dtype(np.dtype(column.dtype))
    return scalar if column.width is None else pa.list_(pa.field("element", scalar, nullable=False), column.width)


@dataclass
class _Chunk:
    """One vector column of the row group being written: where its values start and what is known of them."""

    column: Column
    values_at: int
    run: Run | None
    crc: int = 0
    max_square: float = 0.0

    @property
    def row_bytes(self) -> int:
        return self.column.row_bytes


@dataclass(frozen=True)
class Mark:
    """How far a part had come: see `PartWriter.mark`."""

    rows: int
    group_at: int
    filled: int
    groups: int
    vectors: list[_Chunk]
    states: list[tuple[int, float]]
    scalars: list[Mapping[str, NDArray[Any]]]
    pieces: int
    nonfinite: dict[str, int]


class PartWriter:
    """A part being written under a temporary name beside `path`.

    Memory held: the scalar columns of one row group and the footer; vectors go straight to the file.
    Not safe for several threads at once.
    """

    def __init__(self, path: Path, columns: Sequence[Column], spool: Spool | None = None) -> None:
        """Vectors go through `spool` where one is given."""
        self.path = path
        self.columns = tuple(columns)
        self.group_rows = group_rows_for(columns)
        self.rows = 0
        self.nonfinite = {column.name: 0 for column in columns if column.width is not None}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._spool = spool
        self._bulk = PLAIN if spool is None else spool.bulk
        self._scalars: list[Mapping[str, NDArray[Any]]] = []
        self._vectors: list[_Chunk] = []
        self._direct = self._file if spool is None else _open_direct(self._temporary, self._file)
        self._files = {self._file, self._direct}
        try:
            self._write(_MAGIC, 0)
            self._groups: list[list[thrift.Field]] = []
            self._norms: dict[str, list[float | None]] = {name: [] for name in self.nonfinite}
            self._open_group(len(_MAGIC))
        except BaseException:
            self.discard()
            raise

    @property
    def nonfinite_rows(self) -> int:
        """Vectors with NaN or infinity so far, all vector columns together."""
        return sum(self.nonfinite.values())

    def append(
        self,
        scalars: Mapping[str, NDArray[Any]],
        vectors: Mapping[str, NDArray[Any]],
        kept: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Adds n rows.

        Scalar columns have n values; they are kept and must not change. Vectors are (n, width), of the column's type; where
        `kept`, (n,), is given, they have more rows, and these are taken.
        Raises OSError where the disk is full; the part can then still be rolled back and finished.
        """
        total = len(next(iter(scalars.values())))
        done = 0
        while done < total:
            take = min(total - done, self.group_rows - self._filled)
            whole = take == total
            self._scalars.append(scalars if whole else {name: values[done : done + take] for name, values in scalars.items()})
            some = kept if kept is None or whole else kept[done : done + take]
            for chunk in self._vectors:
                values = vectors[chunk.column.name]
                self._add(chunk, values if whole or kept is not None else values[done : done + take], some)
            self._filled += take
            self.rows += take
            done += take
            if self._filled == self.group_rows:
                self._open_group(self._close_group())

    def mark(self) -> "Mark":
        """A point that `rollback` can return to, as long as the part is open."""
        states = [(chunk.crc, chunk.max_square) for chunk in self._vectors]
        return Mark(
            self.rows,
            self._group_at,
            self._filled,
            len(self._groups),
            self._vectors,
            states,
            self._scalars,
            len(self._scalars),
            dict(self.nonfinite),
        )

    def rollback(self, mark: "Mark") -> None:
        """Forgets all rows appended since `mark`, also after a failed append."""
        self.rows, self._group_at, self._filled = mark.rows, mark.group_at, mark.filled
        if self._vectors is not mark.vectors:
            self._drop_runs()
        self._vectors, self._scalars = mark.vectors, mark.scalars
        self.nonfinite = dict(mark.nonfinite)
        for chunk, (crc, max_square) in zip(mark.vectors, mark.states, strict=True):
            chunk.crc, chunk.max_square = crc, max_square
            if chunk.run is not None:
                chunk.run.seek(mark.filled * chunk.column.row_bytes)
        del self._scalars[mark.pieces :]
        del self._groups[mark.groups :]
        for norms in self._norms.values():
            del norms[mark.groups :]

    def finish(self) -> None:
        """Closes the last row group and writes the footer. Raises OSError where the disk is full."""
        end = self._close_group() if self._filled else self._group_at
        self._drop_runs()
        footer = self._footer()
        tail = footer + len(footer).to_bytes(4, "little") + _MAGIC
        self._write(tail, end)
        os.ftruncate(self._file, end + len(tail))

    def publish(self) -> None:
        """Syncs the finished part and gives it its name."""
        os.fsync(self._file)
        self._close_files()
        os.rename(self._temporary, self.path)
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """Gives the part up; nothing of it stays on disk."""
        self._drop_runs()
        self._close_files()
        self._temporary.unlink(missing_ok=True)

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _drop_runs(self) -> None:
        for chunk in self._vectors:
            if chunk.run is not None:
                chunk.run.drop()

    def _write(self, data: Any, at: int) -> None:
        view = memoryview(data).cast("B")
        if self._spool is None:
            write_all(self._file, view, at)
        else:
            self._spool.write(lambda: write_all(self._file, view, at))

    def _open_group(self, at: int) -> None:
        self._group_at = at
        self._filled = 0
        self._scalars, self._vectors = [], []
        for column in self.columns:
            if column.width is not None:
                values_at = _aligned(at + _levels_room(column, self.group_rows), ALIGNMENT if self._spool is None else PAGE)
                run = None if self._spool is None else Run(self._spool, self._file, self._direct, values_at)
                self._vectors.append(_Chunk(column, values_at, run))
                at = values_at + self.group_rows * column.row_bytes

    def _add(self, chunk: _Chunk, values: NDArray[Any], kept: NDArray[np.integer[Any]] | None) -> None:
        if chunk.run is None:
            rows = np.ascontiguousarray(values) if kept is None else values.take(kept, 0)
            self._write(rows, chunk.values_at + self._filled * chunk.column.row_bytes)
            self._see(chunk, rows)
        else:
            for rows in chunk.run.append_rows(values, kept):
                self._see(chunk, rows)

    def _see(self, chunk: _Chunk, values: NDArray[Any]) -> None:
        """Takes rows into checksum and norms."""
        chunk.crc = isal_zlib.crc32(values, chunk.crc)
        square = self._bulk.largest_square(values)
        if not square < np.inf:
            self.nonfinite[chunk.column.name] += int((~np.isfinite(values)).any(axis=1).sum())
            square = np.inf
        chunk.max_square = max(chunk.max_square, square)

    def _close_group(self) -> int:
        """Writes all of the group but the vectors; returns the offset behind it."""
        rows, at, metadata = self._filled, self._group_at, {}
        for chunk in self._vectors:
            column = chunk.column
            levels = _levels(column, rows)
            if chunk.run is not None:
                chunk.run.end()
            # A group that ends early leaves a gap before its later columns; they move up where that is worth it.
            nearest = _aligned(at + _levels_room(column, rows))
            worth = chunk.values_at - nearest > max(PAGE, rows * column.row_bytes // 8)
            values_at = nearest if worth else chunk.values_at
            behind, at = at, values_at + rows * column.row_bytes
            self._move(chunk.values_at, values_at, rows * column.row_bytes)
            crc = isal_zlib.crc32_combine(isal_zlib.crc32(levels), chunk.crc, rows * column.row_bytes)
            metadata[column.name] = self._write_head(column, rows, levels, behind, values_at, crc)
            self._norms[column.name].append(upper_norm(chunk.max_square, column.row_width))
        for column in (column for column in self.columns if column.width is None):
            values = np.concatenate([piece[column.name] for piece in self._scalars]).astype(column.dtype, copy=False)
            values_at = _aligned(at + _HEADER_ROOM)
            behind, at = at, values_at + values.nbytes
            self._write(values, values_at)
            head = self._write_head(column, rows, b"", behind, values_at, isal_zlib.crc32(values))
            metadata[column.name] = [*head, _statistics(values)]
        self._groups.append(self._group_metadata(rows, [metadata[column.name] for column in self.columns]))
        self._write(bytes(_aligned(at) - at), at)
        return _aligned(at)

    def _move(self, source: int, target: int, size: int) -> None:
        for done in range(0, size if source != target else 0, _COPY_BYTES):
            piece = os.pread(self._file, min(_COPY_BYTES, size - done), source + done)
            self._write(piece, target + done)

    def _write_head(self, column: Column, rows: int, levels: bytes, behind: int, values_at: int, crc: int) -> list[thrift.Field]:
        """Writes page header and levels so that they end where the values start; returns the column chunk's metadata."""
        count = rows * column.row_width
        size = len(levels) + rows * column.row_bytes
        page = [(1, I32, count), (2, I32, _PLAIN), (3, I32, _RLE), (4, I32, _RLE)]
        signed = crc - (1 << 32) if crc >> 31 else crc
        header = thrift.encode([(1, I32, 0), (2, I32, size), (3, I32, size), (4, I32, signed), (5, STRUCT, page)])
        at = values_at - len(levels) - len(header)
        self._write(bytes(at - behind) + header + levels, behind)
        return _chunk_metadata(column, count, at, len(header) + size)

    def _group_metadata(self, rows: int, chunks: list[list[thrift.Field]]) -> list[thrift.Field]:
        size = sum(fields[5][2] for fields in chunks)
        columns = [[(2, I64, fields[7][2]), (3, STRUCT, fields)] for fields in chunks]
        return [(1, LIST, (STRUCT, columns)), (2, I64, size), (3, I64, rows), (5, I64, self._group_at)]

    def _footer(self) -> bytes:
        schema = arrow_schema(self.columns)
        elements: list[list[thrift.Field]] = [[(4, BINARY, "schema"), (5, I32, len(self.columns))]]
        for column in self.columns:
            elements += _schema_elements(column)
        notes = {"ARROW:schema": base64.b64encode(schema.serialize().to_pybytes()).decode(), "dualstore": self._note()}
        pairs = [[(1, BINARY, key), (2, BINARY, value)] for key, value in notes.items()]
        orders: list[list[thrift.Field]] = [[(1, STRUCT, [])]] * len(self.columns)
        return thrift.encode(
            [
                (1, I32, 2),
                (2, LIST, (STRUCT, elements)),
                (3, I64, self.rows),
                (4, LIST, (STRUCT, self._groups)),
                (5, LIST, (STRUCT, pairs)),
                (6, BINARY, "dualstore"),
                (7, LIST, (STRUCT, orders)),
            ]
        )

    def _note(self) -> str:
        """What a reader may use but does not need: a bound of the vectors' norms for each row group."""
        return json.dumps({"max_norm": self._norms, "nonfinite_rows": self.nonfinite})


def sync_directory(path: Path) -> None:
    """Makes renames and new names in `path` durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_direct(path: Path, file: int) -> int:
    """The file opened for I/O past the page cache; `file` where the system has none for it."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (OSError, AttributeError):
        return file


def _aligned(offset: int, to: int = ALIGNMENT) -> int:
    return -(-offset // to) * to


def _levels(column: Column, rows: int) -> bytes:
    """Repetition and definition levels of `rows` full lists, run-length encoded, each with its length before it."""
    width = column.row_width
    repetition = _one_list(width) * rows if width > 1 else thrift.varint(rows << 1) + b"\0"
    definition = thrift.varint(rows * width << 1) + b"\1"
    return b"".join(len(runs).to_bytes(4, "little") + runs for runs in (repetition, definition))


def _one_list(width: int) -> bytes:
    """Repetition levels of one list: a 0, then ones."""
    return thrift.varint(1 << 1) + b"\0" + thrift.varint(width - 1 << 1) + b"\1"


def _levels_room(column: Column, rows: int) -> int:
    return _HEADER_ROOM + len(_one_list(column.row_width)) * rows


def upper_norm(square: float, width: int) -> float | None:
    """A bound of the norms of vectors whose float32 sums of squares are at most `square`; None where there is none."""
    if not np.isfinite(square):
        return None
    # Rounding errs by less than width * 2^-24 of the square; squares below 2^-126 may have been flushed to zero.
    return float(np.sqrt(square * (1.01 + width * 2.0**-24) + width * 2.0**-125))


def _chunk_metadata(column: Column, count: int, at: int, size: int) -> list[thrift.Field]:
    path = [column.name] if column.width is None else [column.name, "list", "element"]
    return [
        (1, I32, _PHYSICAL[column.dtype]),
        (2, LIST, (I32, [_PLAIN, _RLE])),
        (3, LIST, (BINARY, path)),
        (4, I32, 0),
        (5, I64, count),
        (6, I64, size),
        (7, I64, size),
        (9, I64, at),
    ]


def _statistics(values: NDArray[Any]) -> thrift.Field:
    """Smallest and largest value: what lets a reader pass over a row group whose steps it does not want."""
    return (12, STRUCT, [(3, I64, 0), (5, BINARY, values.max().tobytes()), (6, BINARY, values.min().tobytes())])


def _schema_elements(column: Column) -> list[list[thrift.Field]]:
    physical: list[thrift.Field] = [(1, I32, _PHYSICAL[column.dtype])]
    kind: list[thrift.Field] = []
    if column.dtype == "float16":  # two bytes of no type of their own, which are said to be a number
        physical, kind = [*physical, (2, I32, 2)], [(10, STRUCT, [(_FLOAT16_LOGICAL, STRUCT, [])])]
    if column.width is None:
        return [[*physical, (3, I32, _REQUIRED), (4, BINARY, column.name), *kind]]
    logical: list[thrift.Field] = [(_LIST_LOGICAL, STRUCT, [])]
    return [
        [
            (3, I32, _REQUIRED),
            (4, BINARY, column.name),
            (5, I32, 1),
            (6, I32, _LIST_CONVERTED),
            (10, STRUCT, logical),
        ],
        [(3, I32, _REPEATED), (4, BINARY, "list"), (5, I32, 1)],
        [*physical, (3, I32, _REQUIRED), (4, BINARY, "element"), *kind],
    ]

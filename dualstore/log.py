"""Reading parts: vectors as Arrow arrays over the mapped files, without a copy where the file allows it.

Where keys are stored as tokens, x is these numbers; or, of a log `over` some tokens, the vectors of their values alone.

A column of a row group is mapped when footer and page header show one PLAIN, uncompressed page without nulls (what
`part.PartWriter` writes); any other Parquet file of the same columns is decoded instead: same rows, slower.

Half precision ends here: what is read of it is in single precision, errors times their scale, and is not kept.
"""

import copy
import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dualstore import thrift
from dualstore.errors import DamagedError
from dualstore.half import as_read, needed
from dualstore.keys import units
from dualstore.schema import Column, PartName

KEPT_PARTS = 1000
"""A log of more parts maps them one at a time: the system bounds the number of mappings."""

_UNKNOWN = -2

__all__ = ["Group", "Log", "Mapping", "Part"]


@dataclass(frozen=True)
class Group:
    """One row group of a part."""

    part: "Part"
    index: int
    rows: int
    """That belong to the log: all, or the first of them."""
    first: int
    """Number of the group's first row in its log."""

    @property
    def stored_rows(self) -> int:
        """Rows in the file."""
        return int(self.part.metadata.row_group(self.index).num_rows)

    @property
    def max_norm(self) -> float | None:
        """A bound of the norms of the group's keys as the writer noted it; None where it is not known."""
        norms = self.part.note.get("max_norm", {}).get("x", [])
        return norms[self.index] if len(norms) == self.part.metadata.num_row_groups else None


class Part:
    """One Parquet file of a log, seen through its footer. Opening it reads nothing but the footer.

    Raises DamagedError where the file is not Parquet or lacks a column.
    """

    def __init__(self, path: Path, columns: Sequence[Column], *, keep: bool = False) -> None:
        """`keep` says whether the file stays mapped once it was."""
        self.path = path
        self._keep = keep
        self._mapping: Mapping | None = None
        self._over: tuple[NDArray[np.int64], str] | None = None
        self.columns = {column.name: column for column in columns}
        try:
            self.metadata = pq.read_metadata(path)
            self.schema = self.metadata.schema.to_arrow_schema()
            _ = self.leaves, self.metadata.created_by
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DamagedError(f"{path}: expected a Parquet file, found {_first_line(error)}; restore or delete it") from error
        for column in columns:
            self._check(column)
        rows = [self.metadata.row_group(index).num_rows for index in range(self.metadata.num_row_groups)]
        if sum(rows) != self.metadata.num_rows or min(rows, default=0) < 0:
            raise DamagedError(f"{path}: expected {self.metadata.num_rows} rows in its row groups, found {rows}")
        self.group_rows = rows
        """How many rows of each row group belong to the log, from its first on."""

    @property
    def rows(self) -> int:
        """Rows that belong to the log."""
        return sum(self.group_rows)

    @property
    def rank(self) -> int:
        """Of the writer, as the name says."""
        return PartName.of(self.path.name).rank

    def cut(self, last_step: int) -> None:
        """Leaves out the rows from the first one of a later step on: whole row groups by their statistics, of one it reads."""
        rows, ended = [], False
        for index, count in enumerate(self.group_rows):
            kept = 0 if ended else self._rows_until(index, count, last_step)
            ended = kept < count
            rows.append(kept)
        self.group_rows = rows

    def _rows_until(self, index: int, count: int, last_step: int) -> int:
        known = self.metadata.row_group(index).column(self.leaves["step"]).statistics
        if known is not None and known.has_min_max and known.max <= last_step:
            return count
        if not count or (known is not None and known.has_min_max and known.min > last_step):
            return 0
        # Not the part's own mapping, which keeps what it was asked for: of the whole group.
        later = Mapping(self).array(Group(self, index, count, 0), "step") > last_step
        return int(later.argmax()) if later.any() else count

    @cached_property
    def note(self) -> dict[str, Any]:
        """What the writer noted for readers; {} in foreign files."""
        if self.metadata.created_by != "dualstore":
            return {}  # a rewritten file may carry the note of the one it was made from
        try:
            note = json.loads((self.metadata.metadata or {})[b"dualstore"])
        except (KeyError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}

    def over(self, tokens: NDArray[np.int64], dtype: str) -> "Part":
        """See `Log.over`."""
        found = copy.copy(self)
        found._mapping, found._over = None, (tokens, dtype)
        return found

    def stored(self, name: str) -> str:
        """The column that has the values of `name`."""
        return "token" if name == "x" and "token" in self.columns else name

    def shown(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """The values of `name` from those of its column."""
        return values if name != "x" or self._over is None else units(values, *self._over)

    @property
    def mapping(self) -> "Mapping":
        """The mapped file. Mapping and unmapping costs a third of reading it from memory."""
        mapping = self._mapping or Mapping(self)
        if self._keep:
            self._mapping = mapping
        return mapping

    def _check(self, column: Column) -> None:
        index = self.schema.get_field_index(column.name)
        if index < 0:
            raise DamagedError(f"{self.path}: expected a column {column.name!r}, found {self.schema.names}")
        found = self.schema.field(index).type
        scalar = found if column.width is None else getattr(found, "value_type", None)
        fits = scalar == pa.from_numpy_dtype(np.dtype(column.dtype)) and (
            not pa.types.is_fixed_size_list(found) or found.list_size == column.width
        )
        if not fits:
            expected = column.dtype if column.width is None else f"lists of {column.width} {column.dtype}"
            raise DamagedError(f"{self.path}: column {column.name!r}: expected {expected}, found {found}")

    @cached_property
    def leaves(self) -> dict[str, int]:
        """Column name to leaf number in the file."""
        paths = [self.metadata.schema.column(i).path for i in range(len(self.metadata.schema))]
        return {path if path in self.schema.names else path.split(".")[0]: i for i, path in enumerate(paths)}


class Mapping:
    """The mapped bytes of one part and the arrays in them; arrays taken from it keep the mapping alive."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._found: dict[tuple[int, str], tuple[int, int] | None] = {}
        self._arrays: dict[tuple[int, str], NDArray[Any] | None] = {}
        self._places: dict[int, NDArray[Any]] = {}
        self._single = False
        try:
            with open(part.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError) as error:
            raise DamagedError(f"{part.path}: cannot be mapped: {_first_line(error)}") from error
        self._bytes = pa.py_buffer(self._map)

    def column(self, group: Group, name: str) -> pa.Array | None:
        """The column of a row group, as stored, as a zero-copy Arrow array; None where the file does not allow it."""
        self.advise(single=False)
        column = self.part.columns[name]
        span = self.span(group, column)
        if span is None:
            return None
        scalar = pa.from_numpy_dtype(np.dtype(column.dtype))
        values = pa.Array.from_buffers(scalar, group.rows * column.row_width, [None, self._bytes.slice(*span)])
        if column.width is None:
            return values
        return pa.FixedSizeListArray.from_arrays(values, column.width)

    def array(self, group: Group, name: str, rows: slice | NDArray[np.int64] = slice(None)) -> NDArray[Any]:
        """The column of a row group, or some rows of it, as numpy sees it, (rows,) or (rows, width).

        A view where it can be mapped and is not in half precision; decoded, as a whole, where it cannot be mapped.
        """
        stored = self.part.stored(name)
        views = {one: self._view(group, one) for one in needed([stored], self.part.columns)}
        mapped = {one: view[rows] for one, view in views.items() if view is not None}
        if len(mapped) == len(views):
            return self.part.shown(name, as_read([stored], mapped, self.part.columns)[stored])
        return np.concatenate([block[name] for _, block in self.blocks(group, [name], group.rows)])[rows]

    def raw(self, group: Group, name: str) -> NDArray[Any]:
        """The column of a row group as it is stored, half precision and all; decoded where it cannot be mapped."""
        view = self._view(group, name)
        if view is not None:
            return view
        return np.concatenate([block[name] for _, block in self._decoded(group, [name], group.rows)])

    def _view(self, group: Group, name: str) -> NDArray[Any] | None:
        self.advise(single=False)
        key = (group.index, name)
        if key not in self._arrays:
            found = self.column(group, name)
            self._arrays[key] = None if found is None else _as_numpy(found, self.part.columns[name])
        return self._arrays[key]

    def blocks(self, group: Group, names: Sequence[str], rows: int) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """Consecutive pieces of at most `rows` rows: (first row in the group, {column: array}).

        Mapped columns are views of the file; decoded ones, and those in half precision, are held one piece at a time.
        """
        stored = {name: self.part.stored(name) for name in names}
        columns = list(dict.fromkeys(stored.values()))
        for start, piece in self._stored_blocks(group, needed(columns, self.part.columns), rows):
            read = as_read(columns, piece, self.part.columns)
            yield start, {name: self.part.shown(name, read[column]) for name, column in stored.items()}

    def _stored_blocks(self, group: Group, names: Sequence[str], rows: int) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        found = {name: self._view(group, name) for name in names}
        arrays = {name: array for name, array in found.items() if array is not None}
        if len(arrays) < len(found):
            yield from self._decoded(group, list(found), rows)
            return
        for start in range(0, group.rows, rows):
            yield start, {name: array[start : start + rows] for name, array in arrays.items()}

    def places(self, size: int) -> NDArray[Any]:
        """The `size` bytes from each byte of the file on."""
        if size not in self._places:
            self._places[size] = np.ndarray(max(0, len(self._map) - size + 1), f"V{size}", self._map, strides=(1,))
        return self._places[size]

    def advise(self, *, single: bool) -> None:
        """Tells the system whether single rows are read next: it then reads nothing around them."""
        if single != self._single:
            self._map.madvise(mmap.MADV_RANDOM if single else mmap.MADV_NORMAL)
            self._single = single

    def prefetch(self, group: Group, name: str) -> None:
        """Asks the system to read the column of a row group soon, unless it seems to be in memory."""
        span = self.span(group, self.part.columns[self.part.stored(name)])
        if span is not None:
            descriptor = os.open(self.part.path, os.O_RDONLY)
            try:
                if not all(_in_memory(descriptor, at) for at in (span[0], sum(span) - 1)):
                    os.posix_fadvise(descriptor, span[0], span[1], os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def span(self, group: Group, column: Column) -> tuple[int, int] | None:
        """(offset, size) of the column of a row group in the file; None where it cannot be mapped."""
        key = (group.index, column.name)
        if key not in self._found:
            self._found[key] = self._values(group, column)
        return self._found[key]

    def _values(self, group: Group, column: Column) -> tuple[int, int] | None:
        """(offset, size) of the column's values in the file; None unless they are one plain run of bytes."""
        leaf = self.part.leaves[column.name]
        chunk = self.part.metadata.row_group(group.index).column(leaf)
        size = group.stored_rows * column.row_bytes
        start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        end = start + chunk.total_compressed_size
        if not 4 <= start < end <= self._bytes.size - 8 - self.part.metadata.serialized_size:
            raise DamagedError(f"{self.part.path}: column {column.name!r} of row group {group.index} lies outside the file")
        plain = chunk.compression == "UNCOMPRESSED" and not chunk.has_dictionary_page
        if not plain or (column.width is not None and not pa.types.is_fixed_size_list(self.part.schema.field(column.name).type)):
            return None
        page = memoryview(self._bytes).cast("B")[start:end]
        levels = self.part.metadata.schema.column(leaf)
        at = _page_values(page, chunk.num_values, levels.max_repetition_level, levels.max_definition_level)
        if at is None and (self.part.metadata.created_by == "dualstore" or _names_other_encoding(page, chunk.encodings)):
            where = f"{self.part.path}: row group {group.index}: column {column.name!r}"
            raise DamagedError(f"{where}: page header and footer contradict each other")
        if at is None or chunk.num_values != group.stored_rows * column.row_width or end - start - at != size:
            return None
        return start + at, size

    def _decoded(self, group: Group, names: Sequence[str], rows: int) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        start = 0
        try:
            with pq.ParquetFile(self.part.path) as file:
                for batch in file.iter_batches(rows, row_groups=[group.index], columns=list(names)):
                    some = batch.slice(0, group.rows - start)
                    if some.num_rows:
                        yield start, {name: self._decode(some.column(name), self.part.columns[name]) for name in names}
                    start += some.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DamagedError(f"{self.part.path}: row group {group.index}: {_first_line(error)}") from error
        if start != group.rows:
            raise DamagedError(f"{self.part.path}: row group {group.index}: expected {group.rows} rows, found {start}")

    def _decode(self, array: pa.Array, column: Column) -> NDArray[Any]:
        where = f"{self.part.path}: column {column.name!r}"
        if array.null_count:
            raise DamagedError(f"{where}: expected no nulls, found {array.null_count}")
        if column.width is None:
            return np.asarray(array.to_numpy(zero_copy_only=False))
        values = array.flatten()
        lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
        if values.null_count or lengths.tolist() != [column.width]:
            raise DamagedError(
                f"{where}: expected {column.width} values in every row, found {lengths.tolist()} and {values.null_count} nulls"
            )
        return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(-1, column.width)


class Log:
    """The rows of several parts, in the order of their file names. Holds footers only."""

    def __init__(self, paths: Sequence[Path], columns: Sequence[Column], last_step: int | None = None) -> None:
        """With `last_step`, rows of later steps are not part of the log."""
        self.columns = tuple(columns)
        self.parts = [Part(path, columns, keep=len(paths) <= KEPT_PARTS) for path in paths]
        if last_step is not None:
            for part in self.parts:
                part.cut(last_step)
            self.parts = [part for part in self.parts if part.rows]
        self._known_starts: dict[str, NDArray[np.int64]] = {}

    def over(self, tokens: NDArray[np.int64], dtype: str) -> "Log":
        """The same rows, whose keys, stored as tokens, are vectors of the values at some tokens alone, which must ascend."""
        found = Log([], self.columns)
        found.parts = [part.over(tokens, dtype) for part in self.parts]
        return found

    @property
    def key_bytes(self) -> int:
        """Bytes of a stored key."""
        return next(column.row_bytes for column in self.columns if column.name in ("x", "token"))

    @cached_property
    def rows(self) -> int:
        """Number of rows in all parts."""
        return sum(part.rows for part in self.parts)

    @cached_property
    def groups(self) -> list[Group]:
        """All row groups that hold rows, in order."""
        groups, first = [], 0
        for part in self.parts:
            for index, rows in enumerate(part.group_rows):
                if rows:
                    groups.append(Group(part, index, rows, first))
                first += rows
        return groups

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        return np.array([group.first for group in self.groups], np.int64)

    @cached_property
    def _part_of(self) -> NDArray[np.int64]:
        number = {part.path: number for number, part in enumerate(self.parts)}
        return np.array([number[group.part.path] for group in self.groups], np.int64)

    def between(self, first: int, end: int) -> list[Group]:
        """The row groups from row `first`, which begins one, up to row `end`."""
        low, high = np.searchsorted(self._firsts, [first, end])
        return self.groups[low:high]

    def spans(self, first: int, end: int) -> Iterator[tuple[Group, slice]]:
        """The rows from `first` up to `end` as slices of row groups; fewer where the log ends before."""
        for group in self.groups[max(0, int(np.searchsorted(self._firsts, first, side="right")) - 1) :]:
            if group.first >= end:
                return
            some = slice(max(0, first - group.first), min(group.rows, end - group.first))
            if some.start < some.stop:
                yield group, some

    def is_whole(self, first: int, rows: int) -> bool:
        """Whether a run of rows is one of whole row groups."""
        return sum(group.rows for group in self.between(first, first + rows)) == rows

    def take(self, names: Sequence[str], rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Values of some columns at the given row numbers, in their order."""
        owners = np.searchsorted(self._firsts, rows, side="right") - 1
        order = None
        if (owners[1:] < owners[:-1]).any():
            order = np.argsort(owners, kind="stable")
            owners, rows = owners[order], rows[order]
        local, of_part = rows - self._firsts[owners], self._part_of[owners]
        cuts = [0, *(np.flatnonzero(of_part[1:] != of_part[:-1]) + 1).tolist(), len(rows)]
        runs = [(self.parts[of_part[start]].mapping, slice(start, stop)) for start, stop in pairwise(cuts) if start < stop]
        for mapping, _ in runs:
            mapping.advise(single=True)
        stored = {name: self._stored(name) for name in names}
        kinds = {column.name: column for column in self.columns}
        wanted = [column for column in self.columns if column.name in needed(list(stored.values()), kinds)]
        out: dict[str, NDArray[Any]] = {}
        for size in {column.row_bytes for column in wanted}:
            alike = [column for column in wanted if column.row_bytes == size]
            for column, found in zip(alike, self._gathered(alike, runs, owners, local), strict=True):
                values = found.view(column.dtype).reshape((len(rows),) if column.width is None else (len(rows), column.width))
                if order is None:
                    out[column.name] = values
                else:
                    out[column.name] = np.empty_like(values)
                    out[column.name][order] = values
        read = as_read(list(stored.values()), out, kinds)
        return {name: self._shown(name, read[column]) for name, column in stored.items()}

    def _shown(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        return self.parts[0].shown(name, values) if self.parts else values

    def _stored(self, name: str) -> str:
        return "token" if name == "x" and any(column.name == "token" for column in self.columns) else name

    def _gathered(
        self,
        columns: Sequence[Column],
        runs: Sequence[tuple[Mapping, slice]],
        owners: NDArray[np.int64],
        local: NDArray[np.int64],
    ) -> NDArray[Any]:
        """The bytes of columns of one width, an array each, at rows `local` of the groups `owners`; runs are of one part each."""
        starts, size = np.array([self._starts(column, runs, owners) for column in columns]), columns[0].row_bytes
        found = np.empty(starts.shape, f"V{size}")
        if starts.min(initial=0) >= 0:
            at = starts + local * size
            for mapping, run in runs:
                found[:, run] = mapping.places(size)[at[:, run]]
            return found
        for mapping, run in runs:
            for owner in np.unique(owners[run]):
                mine = np.flatnonzero(owners == owner)
                for column, values in zip(columns, found, strict=True):
                    array = mapping.raw(self.groups[owner], column.name)[local[mine]]
                    values[mine] = array.view(found.dtype).reshape(-1)
        return found

    def _starts(self, column: Column, runs: Sequence[tuple[Mapping, slice]], owners: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in its file the column of each of some groups starts; negative where it cannot be mapped."""
        known = self._known_starts.setdefault(column.name, np.full(len(self.groups), _UNKNOWN))
        if (known[owners] == _UNKNOWN).any():
            for mapping, run in runs:
                for owner in np.unique(owners[run]):
                    span = mapping.span(self.groups[owner], column)
                    known[owner] = -1 if span is None else span[0]
        return known[owners]

    def by_part(self) -> Iterator[tuple[Part, int, list[Group]]]:
        """Each part with the number of its first row in the log and its row groups that hold rows."""
        groups, first = iter(self.groups), 0
        for part in self.parts:
            rows = part.rows
            mine: list[Group] = []
            while sum(group.rows for group in mine) < rows:
                mine.append(next(groups))
            yield part, first, mine
            first += rows

    def chunks(self, rows: int, groups: Sequence[Group] | None = None) -> Iterator[list[Group]]:
        """Runs of consecutive groups of one part, of about `rows` rows each; of some groups or all."""
        run: list[Group] = []
        for group in self.groups if groups is None else groups:
            if run and (run[0].part is not group.part or sum(g.rows for g in run) + group.rows > rows):
                yield run
                run = []
            run.append(group)
        if run:
            yield run


def _page_values(chunk: memoryview, count: int, repetition: int, definition: int) -> int | None:
    """Offset of the values in the bytes of a column chunk whose only page is plain; None otherwise.

    `count` is the number of values (nulls included) that the page must hold; the others are the column's highest levels.
    """
    decoder = thrift.Decoder(chunk)
    try:
        header = decoder.struct()
        if header.get(2) != header.get(3) or decoder.at + header[3] != len(chunk):
            return None
        if header[1] == 0:
            page, encoding = header[5], header[5][2]
            at = decoder.at
            for _ in range((repetition > 0) + (definition > 0)):
                at += 4 + struct.unpack_from("<I", chunk, at)[0]
        elif header[1] == 3:
            page, encoding = header[8], header[8][4]
            at = decoder.at + page[5] + page[6]
        else:
            return None
        return at if page[1] == count and encoding == 0 else None
    except (IndexError, KeyError, TypeError, struct.error):
        return None


def _names_other_encoding(chunk: memoryview, known: Sequence[str]) -> bool:
    """Whether the first page is split into bytes, as which any bytes can be read, though the footer does not say so."""
    try:
        header = thrift.Decoder(chunk).struct()
        return (header[5][2] if header[1] == 0 else header[8][4]) == 9 and "BYTE_STREAM_SPLIT" not in known
    except (IndexError, KeyError, TypeError):
        return False


def _in_memory(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # not in memory, or the file system cannot tell
        return False


def _as_numpy(array: pa.Array, column: Column) -> NDArray[Any]:
    values = array if column.width is None else array.values
    offset = values.offset
    data = np.frombuffer(values.buffers()[1], dtype=column.dtype, count=offset + len(values))[offset:]
    return data if column.width is None else data.reshape(-1, column.width)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

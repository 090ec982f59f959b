"""Files of the index: small tables derived from the parts of a log, believed only while they fit them.

The index may be deleted at any time and everything works without it, only slower. A file of it belongs to one part or to
several that follow each other, whose fingerprints it carries beside a checksum of its own; one that does not fit is left
aside with a warning.
"""

import json
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from numpy.typing import NDArray

from dualstore.errors import DamagedError, DualstoreWarning, StoreError
from dualstore.log import Log, Part
from dualstore.writer import write_whole

__all__ = ["LayerIndex", "fingerprint", "values"]

_FORMAT = 2
_NOTE = "dualstore"
"""Key of the metadata that say what the file belongs to."""
_HEAD_BYTES = 64
"""Of each column chunk: a page header is shorter."""


class LayerIndex:
    """The index of one layer: tables of some kinds that belong to parts of its log, as far as they fit them.

    A table is found by the first of its parts.
    """

    def __init__(self, folder: Path, log: Log) -> None:
        self.folder, self.log = folder, log
        self._tables: dict[tuple[Path, str], pa.Table | None] = {}
        self._warned = False
        self.kept: dict[str, Any] = {}
        """What readers made of tables, by kind; forgotten when the index changes."""

    def table(self, part: Part, kind: str, schema: pa.Schema, *, warn: bool = True) -> pa.Table | None:
        """The table that begins with a part; None where there is none. Warns once of files that do not fit."""
        key = (part.path, kind)
        if key not in self._tables:
            self._tables[key], problem = self._read(part, kind, schema)
            if problem and warn and not self._warned:
                self._warned = True
                text = f"{self._path(part, kind)}: the index is {problem} and left aside; rebuild it: dualstore index"
                warnings.warn(text, DualstoreWarning, stacklevel=2)
        return self._tables[key]

    def write(
        self,
        parts: Sequence[Part],
        kind: str,
        table: pa.Table,
        extra: Mapping[str, bytes] | None = None,
        *,
        after: int = 0,
    ) -> None:
        """Makes `table` that of some consecutive parts; `extra` goes with it as metadata.

        The first `after` of the parts are only those that it refers to. Raises StoreError where it cannot be written.
        """
        table = table.combine_chunks().replace_schema_metadata(extra)
        note = {"format": _FORMAT, "kind": kind, "after": after, "parts": len(parts)}
        note |= {"of": self._fingerprint(parts), "crc": _checksum(table)}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema.with_metadata({**(extra or {}), _NOTE: json.dumps(note)})) as writer:
            writer.write_table(table)
        part = parts[after]
        path = self._path(part, kind)
        try:
            write_whole(path, memoryview(sink.getvalue()))
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror}; everything works without it, slower") from error
        self._tables.pop((part.path, kind), None)
        self.kept.clear()

    def kinds(self, kind: str) -> set[tuple[str, str]]:
        """(stem of the first part, kind) of each file of `kind` or `kind-N`."""
        found = (path.stem.rpartition(".") for path in self.folder.glob(f"*.{kind}*.arrow"))
        return {(stem, name) for stem, _, name in found if name == kind or name.startswith(f"{kind}-")}

    def remove_others(self, kind: str, kept: Collection[tuple[str, str]]) -> None:
        """Removes files of `kind` or `kind-N` that are not among those to be kept."""
        for stem, name in self.kinds(kind) - set(kept):
            (self.folder / f"{stem}.{name}.arrow").unlink(missing_ok=True)

    def _path(self, part: Part, kind: str) -> Path:
        return self.folder / f"{part.path.stem}.{kind}.arrow"

    def _read(self, part: Part, kind: str, schema: pa.Schema) -> tuple[pa.Table | None, str]:
        """The table of a file, or None and what is wrong with the file, if there is one."""
        path = self._path(part, kind)
        try:
            if not path.exists():
                return None, ""
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_file(file).read_all()
            extra = dict(table.schema.metadata or {})
            table.validate()
            note = json.loads(extra.pop(_NOTE.encode()))
            table = table.replace_schema_metadata(extra)
            first = max(0, self.log.parts.index(part) - int(note["after"]))
            of = self._fingerprint(self.log.parts[first : first + int(note["parts"])])
            expected = {"format": _FORMAT, "kind": kind, "of": of, "crc": _checksum(table)}
            wrong = [name for name, value in expected.items() if note[name] != value]
            if not table.schema.equals(schema) or not _is_whole(table):
                wrong.append("columns")
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            return None, f"unreadable ({(str(error).splitlines() or [repr(error)])[0]})"
        if "of" in wrong and "crc" not in wrong:
            return None, "made from another state of its parts"
        return (None, f"damaged ({', '.join(wrong)})") if wrong else (table, "")

    def _fingerprint(self, parts: Sequence[Part]) -> str:
        found = [self._fingerprints[part.path] for part in parts]
        return found[0] if len(found) == 1 else sha256(",".join(found).encode()).hexdigest()

    @cached_property
    def _fingerprints(self) -> dict[Path, str]:
        return {part.path: fingerprint(part) for part in self.log.parts}


def values(table: pa.Table, name: str) -> NDArray[Any]:
    """A column of an index table as numpy sees it, (rows,) or (rows, width): a view of the mapped file."""
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if not pa.types.is_fixed_size_list(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=True))
    width = array.type.list_size
    return np.asarray(array.values.to_numpy(zero_copy_only=True)).reshape(-1, width)


def fingerprint(part: Part) -> str:
    """Tells a part from every other of its name: changes with its layout, the checksums of its pages and the rows that count.

    Pages of other writers may have no checksums; their files are told apart by the time of their last change, too.
    """
    try:
        with open(part.path, "rb") as file:
            state = os.fstat(file.fileno())
            tail = part.metadata.serialized_size + 8
            crc = isal_zlib.crc32(os.pread(file.fileno(), tail, state.st_size - tail))
            for index in range(part.metadata.num_row_groups):
                group = part.metadata.row_group(index)
                for leaf in part.leaves.values():
                    chunk = group.column(leaf)
                    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
                    crc = isal_zlib.crc32(os.pread(file.fileno(), _HEAD_BYTES, max(0, start)), crc)
    except OSError as error:
        raise DamagedError(f"{part.path}: cannot be read: {error.strerror}") from error
    changed = "" if part.metadata.created_by == "dualstore" else f"-{state.st_mtime_ns}"
    cut = "" if part.rows == part.metadata.num_rows else f"-{part.rows}"
    return f"{state.st_size}-{crc:08x}{changed}{cut}"


def _is_whole(table: pa.Table) -> bool:
    """Whether the columns are single arrays of full length without nulls."""
    arrays = [chunk for column in table.columns for chunk in column.chunks]
    lists = [array for array in arrays if pa.types.is_fixed_size_list(array.type)]
    full = all(len(array) == table.num_rows for array in arrays)
    full &= all(array.offset == 0 and len(array.values) == len(array) * array.type.list_size for array in lists)
    return full and not any(array.null_count for array in [*arrays, *(array.values for array in lists)])


def _checksum(table: pa.Table) -> int:
    extra = sorted((table.schema.metadata or {}).items())
    crc = isal_zlib.crc32(json.dumps([str(table.schema.remove_metadata()), table.num_rows]).encode())
    for buffer in [*(data for pair in extra for data in pair), *_buffers(table)]:
        crc = isal_zlib.crc32(buffer, crc)
    return int(crc)


def _buffers(table: pa.Table) -> Sequence[Any]:
    chunks = [chunk for column in table.columns for chunk in column.chunks]
    return [buffer for chunk in chunks for buffer in chunk.buffers() if buffer is not None]

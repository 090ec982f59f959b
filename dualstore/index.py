"""Files of the index: small tables derived from the parts of a log, believed only while they fit them.

The index may be deleted at any time and everything works without it, only slower. A file of it belongs to one part,
whose fingerprint it carries beside a checksum of its own; one that does not fit is left aside with a warning.
"""

import json
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
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

_FORMAT = 1
_NOTE = "dualstore"
"""Key of the metadata that say what the file belongs to."""
_HEAD_BYTES = 64
"""Of each column chunk: a page header is shorter."""


class LayerIndex:
    """The index of one layer: a table of some kind for each part of its log, as far as there is one that fits."""

    def __init__(self, folder: Path, log: Log) -> None:
        self.folder, self.log = folder, log
        self._tables: dict[tuple[Path, str], pa.Table | None] = {}
        self._warned = False
        self.kept: dict[str, Any] = {}
        """What readers made of tables, by kind; forgotten when the index changes."""

    def table(self, part: Part, kind: str, schema: pa.Schema) -> pa.Table | None:
        """The table of a part; None where there is none. Warns once of files that do not fit."""
        key = (part.path, kind)
        if key not in self._tables:
            self._tables[key] = self._read(part, kind, schema)
        return self._tables[key]

    def write(self, part: Part, kind: str, table: pa.Table, extra: Mapping[str, bytes] | None = None) -> None:
        """Makes `table` that of a part; `extra` goes with it as metadata. Raises StoreError where it cannot be written."""
        table = table.combine_chunks().replace_schema_metadata(extra)
        note = {"format": _FORMAT, "kind": kind, "part": self._fingerprint(part), "crc": _checksum(table)}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema.with_metadata({**(extra or {}), _NOTE: json.dumps(note)})) as writer:
            writer.write_table(table)
        path = self._path(part, kind)
        try:
            write_whole(path, memoryview(sink.getvalue()))
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror}; everything works without it, slower") from error
        self._tables.pop((part.path, kind), None)
        self.kept.clear()

    def remove_others(self, kind: str, kinds: Collection[str]) -> None:
        """Removes files of `kind` or `kind-N` that are not of one of these kinds and of a part of the log."""
        stems = {part.path.stem for part in self.log.parts}
        for path in self.folder.glob(f"*.{kind}*.arrow"):
            stem, _, found = path.stem.rpartition(".")
            if stem not in stems or found not in kinds:
                path.unlink(missing_ok=True)

    def _path(self, part: Part, kind: str) -> Path:
        return self.folder / f"{part.path.stem}.{kind}.arrow"

    def _read(self, part: Part, kind: str, schema: pa.Schema) -> pa.Table | None:
        path = self._path(part, kind)
        if not path.exists():
            return None
        try:
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_file(file).read_all()
            extra = dict(table.schema.metadata or {})
            table.validate()
            note = json.loads(extra.pop(_NOTE.encode()))
            table = table.replace_schema_metadata(extra)
            expected = {"format": _FORMAT, "kind": kind, "part": self._fingerprint(part), "crc": _checksum(table)}
            wrong = [name for name, value in expected.items() if note[name] != value]
            if not table.schema.equals(schema) or not _is_whole(table):
                wrong.append("columns")
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            self._warn(path, f"unreadable ({(str(error).splitlines() or [repr(error)])[0]})")
            return None
        if "part" in wrong and "crc" not in wrong:
            self._warn(path, "made from another state of its part")
        elif wrong:
            self._warn(path, f"damaged ({', '.join(wrong)})")
        return None if wrong else table

    def _fingerprint(self, part: Part) -> str:
        return self._fingerprints[part.path]

    @cached_property
    def _fingerprints(self) -> dict[Path, str]:
        return {part.path: fingerprint(part) for part in self.log.parts}

    def _warn(self, path: Path, what: str) -> None:
        if not self._warned:
            text = f"{path}: the index is {what} and left aside; rebuild it: dualstore index"
            warnings.warn(text, DualstoreWarning, stacklevel=2)
        self._warned = True


def values(table: pa.Table, name: str) -> NDArray[Any]:
    """A column of an index table as numpy sees it, (rows,) or (rows, width): a view of the mapped file."""
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if not pa.types.is_fixed_size_list(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=True))
    width = array.type.list_size
    return np.asarray(array.values.to_numpy(zero_copy_only=True)).reshape(-1, width)


def fingerprint(part: Part) -> str:
    """Tells a part from every other of its name: changes with its layout and with the checksums of its pages.

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
    return f"{state.st_size}-{crc:08x}{changed}"


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

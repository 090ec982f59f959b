"""Writing a store: parts of all layers that cover the same steps, and the part of `steps/` that commits them.

A flush closes the open part of every layer at a step's end, publishes them and then publishes the steps part of the
same name. What has no steps part is not part of the store, so a crash loses at most the steps since the last flush.
"""

import fcntl
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.numpy import save

from dualstore.bulk import PLAIN, Bulk
from dualstore.half import as_stored
from dualstore.part import Mark, PartWriter, sync_directory
from dualstore.schema import BLOCK_COLUMNS, Column, Layer, StoreInfo, pattern_columns, probe_columns, single
from dualstore.spool import Spool
from dualstore.steps import DEFAULTS, STEPS_SCHEMA

__all__ = ["SAMPLES_SCHEMA", "StoreWriter", "remove_left_ballast", "write_table", "write_whole"]

Columns = Mapping[str, NDArray[Any]]

FIRST_PART_BYTES = 256 << 20
"""Size of the first parts, all layers together; it doubles with each flush up to LAYER_PART_BYTES a layer."""
LAYER_PART_BYTES = 256 << 20

SPOOL_BYTES = 48 << 20
"""Memory for vectors on their way to the disk, all layers together."""

BALLAST_BYTES = 1 << 20
"""Disk space held back for each layer, besides what waits in memory: freed when the disk is full, so that open parts can
be closed."""

SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("task", pa.int32(), nullable=False),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("mime", pa.string(), nullable=False),
    ]
)


@dataclass
class _Step:
    """The step under way: how far each layer's part had come when it began, and the rows it has added since."""

    marks: dict[int, Mark] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)


@dataclass
class _Flush:
    """What is collected until the next flush."""

    planned_steps: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    taken: int = 0
    patterns: dict[int, PartWriter] = field(default_factory=dict)
    probes: dict[int, PartWriter] = field(default_factory=dict)
    blocks: PartWriter | None = None
    samples: list[pa.Table] = field(default_factory=list)

    @property
    def parts(self) -> list[PartWriter]:
        """All that are open."""
        return [*self.patterns.values(), *self.probes.values(), *([] if self.blocks is None else [self.blocks])]


class StoreWriter:
    """Writes a new store at `root`, whose folder must exist. One writer, one thread at a time; syncing is behind it.

    Of several processes that train together each has a writer of its own, for the same folder or another one; they need not
    know of each other. What the store has once is written by rank 0: `store.json` and the weights.

    Memory held: the scalar columns of one row group a layer, and samples until the next flush. After an OSError the
    store can still be flushed: it then ends with the last complete step.
    """

    def __init__(
        self,
        root: Path,
        info: StoreInfo,
        *,
        rank: int = 0,
        flush_s: float = 60.0,
        last_step: int = -1,
        sequence: int = 0,
        bulk: Bulk = PLAIN,
    ) -> None:
        """Goes on after `last_step` with parts numbered from `sequence` where the store has something already.

        What is done to every number of keys and errors is done by `bulk`.
        """
        assert 0 <= rank < info.ranks
        self.root, self.info, self.rank = root, info, rank
        self._flush_s = flush_s
        self._flushed_at = time.monotonic()
        self._sequence = sequence
        self._open, self._step = _Flush(), _Step()
        self._publisher = ThreadPoolExecutor(1, "dualstore-publish")
        self._publishing: Future[None] | None = None
        self.last_step = last_step
        """The last step written whole."""
        self.flushed_step = last_step
        """The last step that a flush has made part of the store."""
        self._nonfinite = 0
        self._failed: BaseException | None = None
        self._ballast = root / ballast_name(rank)
        self._spool = Spool(2 * len(info.layers), SPOOL_BYTES, self._free_ballast, bulk)
        self._begin()

    def _begin(self) -> None:
        """Takes the folder, which another recording may want at the same time, and disk space; leaves nothing where it fails."""
        self._held = open(self._ballast, "xb")  # noqa: SIM115 - locked until the writer is closed
        try:
            fcntl.lockf(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._held.fileno(), 0, self._spool.total_bytes + BALLAST_BYTES * (4 + len(self.info.layers)))
            self.save_info()
        except BaseException:
            self._free_ballast()
            self._held.close()
            raise

    @property
    def nonfinite_rows(self) -> int:
        """Keys and errors with NaN or infinity written so far."""
        return self._nonfinite + sum(part.nonfinite_rows for part in self._open.patterns.values())

    def row_bytes(self, layer: Layer) -> int:
        """Bytes that one pattern of a layer takes."""
        return _row_bytes(pattern_columns(layer, self.info.dtype))

    def add_patterns(
        self,
        layer: Layer,
        rows: Columns,
        x: NDArray[Any],
        e: NDArray[Any] | None,
        kept: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Adds patterns of the step under way: sample_id, position, label and task of each, keys and errors.

        Keys are (n,) int32 where the layer's are tokens; errors are left out where it has none. Those of a store in half
        precision are given in single precision. Where only some keys and errors are to be `kept`, these are their numbers; the
        other columns are those of the kept ones.

        Raises OSError where the disk is full; then nothing of the step is in the store.
        """
        number = layer.number
        try:
            part = self._open.patterns.get(number) or self._part(self._open.patterns, "patterns", layer, pattern_columns)
            if number not in self._step.marks:
                self._step.marks[number] = part.mark()
            count = len(x) if kept is None else len(kept)
            known = {"step": np.full(count, self.last_step + 1, np.int32), "slot": None, "duplicate": None, **self._coded(rows)}
            filled = {name: np.zeros(count, np.int32) if values is None else values for name, values in known.items()}
            arrays = {_key(layer): x} if e is None else {_key(layer): x, "e": e}
            if kept is not None:
                halved = self.info.dtype == "float16"
                arrays = {name: self._taken(v, kept) if halved or v.ndim == 1 else v for name, v in arrays.items()}
                kept = None if halved else kept
            part.append(*self._columns(filled, arrays, self.info.dtype), kept)
            self._step.rows[number] = self._step.rows.get(number, 0) + count
        except BaseException:
            self._free_ballast()
            self._drop_step()
            raise

    def drop_patterns(self, layer: Layer) -> None:
        """Forgets the patterns that the step under way has added to a layer."""
        mark = self._step.marks.pop(layer.number, None)
        self._step.rows.pop(layer.number, None)
        if mark is not None:
            self._open.patterns[layer.number].rollback(mark)

    def end_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Makes the added patterns one step; `groups` has its row of `steps/` for each parameter group.

        Where only a share of the patterns was added, the rows say so in "rates".
        """
        if self._step.rows and not self._open.planned_steps:
            self._open.planned_steps = self._plan()
        counts = [self._step.rows.get(layer.number, 0) for layer in self.info.layers]
        self.last_step += 1
        common = {**DEFAULTS, "step": self.last_step, "rows": counts}
        self._open.steps += [{**common, **group} for group in groups]
        self._open.taken += bool(self._step.rows)
        self._step = _Step()
        late = time.monotonic() - self._flushed_at > self._flush_s
        if self._open.taken >= self._open.planned_steps > 0 or late:
            self.flush()

    def write_probes(self, layer: Layer, rows: Columns, x: NDArray[Any], y: NDArray[Any], g: NDArray[Any] | None = None) -> None:
        """Adds probes of one layer; NaN stands for a g that was not recorded."""
        part = self._part(self._open.probes, "probes", layer, probe_columns)
        mark = part.mark()
        try:
            g = np.full_like(y, np.nan) if g is None else g
            part.append(*self._columns(self._coded(rows), {_key(layer): x, "y": y, "g": g}, single(self.info.dtype)))
        except BaseException:
            part.rollback(mark)
            raise

    def write_blocks(self, rows: Columns) -> None:
        """Adds what residual blocks did, columns as in BLOCK_COLUMNS; rows of later steps than the last do not count.

        They go to a part of their own, of which memory holds one row group, however many blocks a sample goes through.
        """
        if self._open.blocks is None:
            self._open.blocks = PartWriter(self.root / "blocks" / self._part_name(), BLOCK_COLUMNS)
        part = self._open.blocks
        mark = part.mark()
        try:
            part.append(self._coded(rows), {})
        except BaseException:
            part.rollback(mark)
            raise

    def write_samples(self, samples: pa.Table) -> None:
        """Adds samples, columns as in SAMPLES_SCHEMA."""
        task = pa.array(self._codes(samples.column("task").to_numpy()))
        self._open.samples.append(samples.set_column(1, SAMPLES_SCHEMA.field("task"), task))

    def write_weights(self, name: str, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Writes `weights/<name>.safetensors`; rank 0 does so for all."""
        if self.rank == 0:
            write_whole(self.root / "weights" / f"{name}.safetensors", save(dict(tensors)))

    def save_info(self, **changes: Any) -> None:
        """Writes `store.json`, or the `rank-R.json` of another rank, with some of its fields changed."""
        self.info = replace(self.info, **changes)
        write_whole(self.root / StoreInfo.file_name(self.rank), self.info.to_json().encode())

    def flush(self) -> None:
        """Makes all whole steps part of the store; syncing goes on behind the next ones. Not while a step is under way."""
        assert not self._step.rows
        done, self._open = self._open, _Flush()
        self._flushed_at = time.monotonic()
        parts = done.parts
        for part in [part for part in parts if not part.rows]:
            parts.remove(part)
            part.discard()
        try:
            if self._failed is not None:
                raise self._failed
            for part in parts:
                part.finish()
            self.wait()
        except BaseException as error:
            self._failed = error
            for part in parts:
                part.discard()
            raise
        self._nonfinite += sum(part.nonfinite_rows for part in done.patterns.values())
        self._publishing = self._publisher.submit(self._publish, self._part_name(), parts, done, self.last_step)
        self._sequence += 1

    def wait(self) -> None:
        """Waits until the last flush is on disk; raises what went wrong there."""
        if self._publishing is not None:
            publishing, self._publishing = self._publishing, None
            try:
                publishing.result()
            except BaseException as error:
                self._failed = error
                raise

    def close(self) -> None:
        """Flushes and syncs; a step under way is dropped. The writer cannot be used afterwards, whether or not this raises."""
        self._drop_step()
        try:
            self.flush()
            self.wait()
        finally:
            self._free_ballast()
            self._held.close()
            self._publisher.shutdown()
            for part in self._open.parts:
                part.discard()
            self._spool.close()

    def _plan(self) -> int:
        """How many steps like the one under way the open parts are meant to hold."""
        row_bytes = {layer.number: self.row_bytes(layer) for layer in self.info.layers}
        sizes = {number: rows * row_bytes[number] for number, rows in self._step.rows.items()}
        if not sum(sizes.values()):
            return 1 << 20
        largest = max(sizes, key=lambda number: sizes[number])
        total = FIRST_PART_BYTES << min(self._sequence, 32)
        each, group = self._step.rows[largest], self._open.patterns[largest].group_rows
        steps = max(1, min(total // sum(sizes.values()), LAYER_PART_BYTES // sizes[largest]))
        # Whole row groups: what follows the vectors that a group lacks at its end must move up.
        whole = steps * each // group * group
        short, lacking = divmod(whole, each)
        return steps if not whole else short if lacking <= group // 16 and short else short + 1

    def _part(self, parts: dict[int, PartWriter], folder: str, layer: Layer, columns: Any) -> PartWriter:
        if layer.number not in parts:
            path = self.root / folder / f"layer={layer.number}" / self._part_name()
            spool = self._spool if folder == "patterns" else None
            parts[layer.number] = PartWriter(path, columns(layer, self.info.dtype), spool)
        return parts[layer.number]

    def _part_name(self) -> str:
        return f"part-{self.rank}-{self._sequence:06d}.parquet"

    def _coded(self, rows: Columns) -> dict[str, NDArray[Any]]:
        """The rows with the codes that their tasks have in the store."""
        return dict(rows) if self.info.ranks == 1 else {**rows, "task": self._codes(rows["task"])}

    def _codes(self, tasks: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Codes in the store of places in the rank's own list of tasks: those of different ranks never meet."""
        return np.where(tasks < 0, tasks, tasks * self.info.ranks + self.rank).astype(np.int32)

    def _columns(self, scalars: Columns, arrays: Columns, dtype: str) -> tuple[Columns, Columns]:
        """Scalar and vector columns of rows with these keys, and errors where there are any, in a store of some dtype."""
        stored = as_stored(arrays, self._spool.bulk) if dtype == "float16" else arrays
        return {**scalars, **{k: v for k, v in stored.items() if v.ndim == 1}}, {k: v for k, v in stored.items() if v.ndim == 2}

    def _taken(self, rows: NDArray[Any], kept: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Some rows."""
        taken = np.empty((len(kept), *rows.shape[1:]), rows.dtype)
        self._spool.bulk.copy(rows, kept, taken)
        return taken

    def _drop_step(self) -> None:
        for layer in self.info.layers:
            self.drop_patterns(layer)

    def _free_ballast(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def _publish(self, name: str, parts: Sequence[PartWriter], done: _Flush, last_step: int) -> None:
        try:
            for part in parts:
                part.publish()
        except BaseException:
            for part in parts:
                part.discard()
            raise
        if done.samples:
            write_table(self.root / "samples" / name, pa.concat_tables(done.samples))
        if done.steps:
            # The steps part comes last: it is what makes the pattern parts of its name count.
            write_table(self.root / "steps" / name, pa.Table.from_pylist(done.steps, STEPS_SCHEMA))
        self.flushed_step = last_step


def ballast_name(rank: int) -> str:
    """The file that a rank holds, and has locked, while it writes."""
    return f".ballast-{rank}.tmp" if rank else ".ballast.tmp"


def remove_left_ballast(root: Path, rank: int) -> bool:
    """Removes what a rank that was killed has left; False where another process is still writing."""
    path = root / ballast_name(rank)
    if path.exists():
        with open(path, "r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return False
            path.unlink()
    return True


def _key(layer: Layer) -> str:
    """The column of a layer's keys."""
    return "token" if layer.keys == "token" else "x"


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Writes a small file so that it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")  # several may write the same file
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_table(path: Path, table: pa.Table) -> None:
    """Writes a table as one small Parquet file, whole or not at all."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_whole(path, sink.getvalue().to_pybytes())


def _row_bytes(columns: Sequence[Column]) -> int:
    return sum(column.row_bytes for column in columns)

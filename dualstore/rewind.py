"""Forgetting what a store has of the steps after one, so that a recording can go on from there.

The steps log is shortened first: it is what says which steps the store has. Should the rest not be done, rows that it no
longer knows are left, and rewinding once more removes them.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dualstore.errors import DamagedError
from dualstore.part import PartWriter, sync_directory
from dualstore.schema import BLOCK_COLUMNS, Column, StoreInfo, pattern_columns, probe_columns
from dualstore.writer import write_table

__all__ = ["last_sequence", "rewind", "written_by"]

_ROWS = 1024
_FOLDERS = ("steps", "patterns", "probes", "samples", "blocks")

_Kept = Callable[[pa.RecordBatch | pa.Table], pa.BooleanArray | pa.ChunkedArray]
"""Which rows stay, by the columns step and, of blocks, test_id."""


def rewind(root: Path, info: StoreInfo, step: int, rank: int = 0) -> None:
    """Removes everything after `step` that a rank wrote: steps, patterns, blocks, and probes of later weights.

    Memory: a thousand rows of a layer. Removes the index where anything was removed. Raises OSError, DamagedError.
    """
    shortened = [_cut_steps(path, step) for path in reversed(_parts(root / "steps", rank))]
    for layer in info.layers:
        for folder, columns, last in (
            ("patterns", pattern_columns(layer, info.dtype, info.format), step),
            ("probes", probe_columns(layer, info.dtype, info.format), step + 1),
        ):
            paths = _parts(root / folder / f"layer={layer.number}", rank)
            shortened += [_cut(path, columns, ["step"], _until(last)) for path in reversed(paths)]
    paths = _parts(root / "blocks", rank)
    shortened += [_cut(path, BLOCK_COLUMNS, ["step", "test_id"], _block_until(step)) for path in reversed(paths)]
    if any(shortened):
        shutil.rmtree(root / "index", ignore_errors=True)


def last_sequence(root: Path, rank: int = 0) -> int:
    """The largest number of a part that a rank has written; -1 for none."""
    return max((int(path.stem.split("-")[2]) for path in written_by(root, rank, "part-{}-*.parquet")), default=-1)


def written_by(root: Path, rank: int, form: str) -> Iterator[Path]:
    """Files of rows by a rank, named as `form` says; the other ranks may go on meanwhile, and remove the index and their own."""
    for folder in _FOLDERS:
        yield from (root / folder).rglob(form.format(rank))


def _parts(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"part-{rank}-*.parquet"))


def _cut_steps(path: Path, last: int) -> bool:
    with pq.ParquetFile(path) as file:
        table = file.read()
    kept = table.filter(pc.less_equal(table.column("step"), last))
    if kept.num_rows == table.num_rows:
        return False
    if kept.num_rows:
        write_table(path, kept)
    else:
        _remove(path)
    return True


def _until(last: int) -> _Kept:
    return lambda rows: pc.less_equal(rows.column("step"), last)


def _block_until(last: int) -> _Kept:
    """Rows of training up to a step, and those of test examples that were seen before the next one."""
    return lambda rows: pc.less_equal(rows.column("step"), pc.if_else(pc.equal(rows.column("test_id"), -1), last, last + 1))


def _cut(path: Path, columns: Sequence[Column], by: list[str], kept: _Kept) -> bool:
    """Leaves the rows of a part that are to stay, as its columns `by` say."""
    try:
        with pq.ParquetFile(path) as file:
            masks = [kept(file.read_row_group(group, columns=by)) for group in range(file.metadata.num_row_groups)]
            if all(pc.all(mask, min_count=0).as_py() for mask in masks):
                return False
            if not any(pc.any(mask, min_count=0).as_py() for mask in masks):
                _remove(path)
                return True
            part = PartWriter(path, columns)
            try:
                for batch in file.iter_batches(_ROWS):
                    _append(part, batch.filter(kept(batch)), columns)
                part.finish()
                part.publish()
            except BaseException:
                part.discard()
                raise
    except pa.ArrowException as error:
        raise DamagedError(f"{path}: expected a part of a store, found {str(error).splitlines()[0]}") from error
    return True


def _append(part: PartWriter, kept: pa.RecordBatch, columns: Sequence[Column]) -> None:
    if not kept.num_rows:
        return
    scalars = {c.name: kept.column(c.name).to_numpy() for c in columns if c.width is None}
    vectors = {
        c.name: np.ascontiguousarray(kept.column(c.name).flatten().to_numpy().reshape(-1, c.width))
        for c in columns
        if c.width is not None
    }
    part.append(scalars, vectors)


def _remove(path: Path) -> None:
    path.unlink()
    sync_directory(path.parent)

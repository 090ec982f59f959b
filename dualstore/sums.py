"""Sums of keys: what makes a total cost one small product instead of a scan.

A total of alpha is linear in the keys: `sum_t x_t . q = (sum_t x_t) . q`. The index keeps the sums of cells: the patterns
of one label and task among at most BUCKET_ROWS consecutive rows of one epoch. A question is answered from the cells that it
takes or leaves as a whole; the rows of the others are scanned.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
from numpy import ndarray

from dualstore.index import LayerIndex, values
from dualstore.log import Group, Mapping, Part
from dualstore.rows import Select, Selection
from dualstore.shapes import Bool, Float, Float64, Int32, Int64
from dualstore.steps import Steps

__all__ = ["Cells", "Rest", "build_sums", "read_cells"]

KIND = "sums"
BUCKET_ROWS = 8192
ROWS_PER_CELL = 64
"""A bucket of fewer rows for each cell is not summed up: its sums would be no smaller than its keys."""
_PIECE_ROWS = 512
_BATCH_CELLS = 4096
"""About how many cells are in memory at a time."""

_SCALARS = {"first": pa.int64(), "end": pa.int64(), "step_first": pa.int32(), "step_last": pa.int32(), "task": pa.int32(),
            "label": pa.int32(), "count": pa.int64(), "sign": pa.int8()}  # fmt: skip


@dataclass(frozen=True)
class Cells:
    """Cells of one layer: where their rows lie, and the sum of these rows' keys."""

    first: Int64[ndarray, " c"]
    """First row of the cell's bucket in the log."""
    end: Int64[ndarray, " c"]
    step_first: Int32[ndarray, " c"]
    step_last: Int32[ndarray, " c"]
    task: Int32[ndarray, " c"]
    label: Int32[ndarray, " c"]
    count: Int64[ndarray, " c"]
    sign: ndarray
    """1 where no element of a key is negative, -1 where none is positive, 0 otherwise."""
    sums: tuple[Float64[ndarray, "_ d"], ...]
    """Views of the files, whose rows are the cells in order."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def codes(self) -> Int64[ndarray, " c"]:
        """One number for task and label."""
        return _code(self.task, self.label)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(block.nbytes for block in self.sums)

    def finite(self) -> Bool[ndarray, " c"]:
        """Which sums are finite: the others do not tell what each of their rows adds."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.concatenate([np.isfinite(block.sum(axis=1)) for block in self.sums])

    def products(self, queries: Float[ndarray, "m d"]) -> Float64[ndarray, "c m"]:
        """The total of alpha over each cell."""
        columns = queries.T.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.concatenate([block @ columns for block in self.sums])

    def merged(self, group: Int64[ndarray, " c"], groups: int) -> Float64[ndarray, "g d"]:
        """Sums of the cells of each group; a cell whose group is -1 is left out."""
        totals = np.zeros((groups, self.sums[0].shape[1]))
        ends = np.cumsum([len(block) for block in self.sums])
        for block, end in zip(self.sums, ends, strict=True):
            mine = group[end - len(block) : end]
            np.add.at(totals, mine[mine >= 0], block[mine >= 0])
        return totals


def schema(width: int) -> pa.Schema:
    """Columns of the file of one part: rows are counted from the part's first."""
    vector = pa.list_(pa.field("element", pa.float64(), nullable=False), width)
    fields = [*_SCALARS.items(), ("sum", vector)]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


def build_sums(index: LayerIndex, steps: Steps, width: int, progress: Callable[[int], None] = lambda rows: None) -> None:
    """Writes the cells of every part that has none that fit; calls `progress` with each number of rows that is done.

    Memory: the sums of one part, at most an eighth of its keys' size divided by ROWS_PER_CELL, and a few hundred rows.
    """
    for part, first, groups in index.log.by_part():
        if index.table(part, KIND, schema(width), warn=False) is None:
            index.write([part], KIND, _sum_up(part, first, groups, steps, width))
        progress(part.rows)
    index.remove_others(KIND, {(part.path.stem, KIND) for part in index.log.parts})


def _sum_up(part: Part, first: int, groups: Sequence[Group], steps: Steps, width: int) -> pa.Table:
    """The cells of a part whose first row has the number `first`."""
    found = list(chain.from_iterable(_cells_of_group(group, group.first - first, steps) for group in groups))
    columns = [pa.array([scalars[name] for scalars, _ in found], kind) for name, kind in _SCALARS.items()]
    flat = pa.array(np.concatenate([np.zeros(0), *(total for _, total in found)]))
    vectors = pa.FixedSizeListArray.from_arrays(flat, type=schema(width).field("sum").type)
    return pa.table([*columns, vectors], schema=schema(width))


def _cells_of_group(group: Group, place: int, steps: Steps) -> Iterator[tuple[dict[str, int], ndarray]]:
    """Scalars and sum of the cells of a row group, whose first row is at `place` in its part."""
    mapping = group.part.mapping
    scalars = {name: mapping.array(group, name) for name in ("step", "task", "label")}
    for offset, block in mapping.blocks(group, ["x"], BUCKET_ROWS):
        step, task, label = (scalars[name][offset : offset + len(block["x"])] for name in ("step", "task", "label"))
        cuts = np.flatnonzero(np.diff(steps.epoch_of(step))) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(step)]):
            bucket = {"first": place + offset + low, "end": place + offset + high}
            bucket |= {"step_first": int(step[low:high].min()), "step_last": int(step[low:high].max())}
            for cell, total in _cells_of(block["x"][low:high], task[low:high], label[low:high]):
                yield bucket | cell, total


def _cells_of(keys: ndarray, task: Int32[ndarray, " n"], label: Int32[ndarray, " n"]) -> Iterator[tuple[dict[str, int], ndarray]]:
    codes, member = np.unique(_code(task, label), return_inverse=True)
    if len(codes) * ROWS_PER_CELL > len(keys):
        return
    order = np.argsort(member, kind="stable")
    ends = np.cumsum(np.bincount(member))
    for low, high in zip([0, *ends], ends, strict=False):
        rows = order[low:high]
        total, least, most = np.zeros(keys.shape[1]), np.inf, -np.inf
        for piece in np.split(rows, range(_PIECE_ROWS, len(rows), _PIECE_ROWS)):
            some = keys[piece]
            with np.errstate(over="ignore", invalid="ignore"):
                total += some.sum(axis=0, dtype=np.float64)
            least, most = min(least, some.min()), max(most, some.max())
        scalar = {"task": int(task[rows[0]]), "label": int(label[rows[0]]), "count": len(rows)}
        yield scalar | {"sign": 1 if least >= 0 else -1 if most <= 0 else 0}, total


def _code(task: ndarray, label: ndarray) -> Int64[ndarray, " n"]:
    code: ndarray = (task.astype(np.int64) << 32) + label
    return code


def read_cells(index: LayerIndex, width: int) -> Iterator[Cells]:
    """All cells of a layer that fit its log, some thousands at a time."""
    waiting: list[tuple[int, pa.Table]] = []
    for part, first, _ in index.log.by_part():
        table = index.table(part, KIND, schema(width))
        if table is not None and table.num_rows:
            waiting.append((first, table))
        if sum(table.num_rows for _, table in waiting) >= _BATCH_CELLS:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(found: Sequence[tuple[int, pa.Table]]) -> Cells:
    arrays = {name: np.concatenate([values(table, name) for _, table in found]) for name in _SCALARS}
    shift = np.repeat([first for first, _ in found], [table.num_rows for _, table in found])
    arrays |= {name: arrays[name] + shift for name in ("first", "end")}
    return Cells(**arrays, sums=tuple(values(table, "sum") for _, table in found))


class Rest:
    """Selects the rows that `select` chooses outside some cells. Holds 32 bytes a cell."""

    def __init__(self, select: Select) -> None:
        self._select = select
        self._cells: list[tuple[ndarray, ndarray, ndarray, ndarray]] = []

    def leave_out(self, cells: Cells, chosen: Bool[ndarray, " c"]) -> None:
        """Leaves out the rows of some of the cells; cells come in the order of the log."""
        self._cells.append((cells.first[chosen], cells.end[chosen], cells.codes[chosen], cells.count[chosen]))
        self.__dict__.pop("_joined", None)

    def __call__(self, mapping: Mapping, groups: Sequence[Group]) -> Selection:
        """The selection of consecutive groups; where nothing is left of them, they are not looked at."""
        left = [self._left(mapping, group) for group in groups]
        if not any(rows is None or rows.any() for rows in left):
            return Selection(np.zeros(0, np.int64), None)
        found = self._select(mapping, groups)
        if all(rows is None for rows in left):
            return found
        mask = np.concatenate([np.ones(g.rows, bool) if rows is None else rows for g, rows in zip(groups, left, strict=True)])
        return found.within(mask)

    @cached_property
    def _joined(self) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        """First row, end, code and count of the cells."""
        none = np.zeros(0, np.int64)
        first, end, code, count = (np.concatenate(found) for found in zip((none,) * 4, *self._cells, strict=True))
        return first, end, code, count

    def _left(self, mapping: Mapping, group: Group) -> Bool[ndarray, " n"] | None:
        """Which rows of a group are outside the cells; None for all."""
        firsts, ends, codes, counts = self._joined
        low, high = np.searchsorted(firsts, [group.first, group.first + group.rows])  # a bucket lies within a group
        if low == high:
            return None
        if counts[low:high].sum() == group.rows:  # its rows need not be looked at
            return np.zeros(group.rows, bool)
        mine = np.arange(low, high)
        code = _code(mapping.array(group, "task"), mapping.array(group, "label"))
        left = np.ones(group.rows, bool)
        for first in np.unique(firsts[mine]):
            bucket = mine[firsts[mine] == first]
            rows = slice(int(first) - group.first, int(ends[bucket[0]]) - group.first)
            left[rows] = ~np.isin(code[rows], codes[bucket])
        return left

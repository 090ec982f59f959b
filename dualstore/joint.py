"""The optimiser's logs of several ranks as one: what all of them have committed, step by step.

Every rank writes rows of its own for each step and parameter group. Together they are one row: settings are those of rank 0,
which all share; patterns and batch sizes add up; the loss is the mean, weighted by batch sizes, over the ranks that noted one;
a layer was idle where it was so for all.
"""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy import ndarray
from numpy.typing import NDArray

from dualstore.schema import PartName
from dualstore.shapes import Bool, Int64
from dualstore.steps import STEPS_SCHEMA, RankSteps, Steps

__all__ = ["join_steps"]

_NUMBERS = ("lr", "momentum", "dampening", "decay", "beta1", "beta2", "eps", "lr_decay", "clip")
_FLAGS = ("amsgrad", "centered", "decoupled", "nesterov", "maximize")
_CHECKSUMS = ("weights_crc", "state_crc")
_NEAR = 1e-6
"""How far, relative to their size, numbers of two ranks may be apart that are meant to be the same."""


def join_steps(paths: Sequence[Path], ranks: int, layers: int) -> Steps:
    """The steps that every rank has committed; no others are in the log.

    Held: one log, and a number for each step, layer and rank. Raises DamagedError as `Steps.read` does.
    """
    parts = [[path for path in paths if PartName.of(path.name).rank == rank] for rank in range(ranks)]
    keys = [_keys(Steps.read(mine).table) for mine in parts]
    common = reduce(np.intersect1d, keys)
    first = _rows_of(parts[0], common)
    sums, own = _Sums(len(common), layers), []
    for rank, mine in enumerate(parts):
        table = first if rank == 0 else _rows_of(mine, common)
        rows = sums.add(table)
        last = int(keys[rank][-1] >> 32) if len(keys[rank]) else -1
        own.append(RankSteps(last, rows[_first_groups(common)], _difference(first, table, rank)))
    return Steps(sums.joined(first), tuple(own))


def _keys(table: pa.Table) -> Int64[ndarray, " k"]:
    """Step and parameter group of each row, as one number; ascending, each once."""
    return np.unique(_key(table))


def _key(table: pa.Table) -> Int64[ndarray, " r"]:
    found: ndarray = (_column(table, "step").astype(np.int64) << 32) + _column(table, "group")
    return found


def _rows_of(paths: Sequence[Path], keys: Int64[ndarray, " k"]) -> pa.Table:
    """The row of each key, in their order."""
    table = Steps.read(paths).table
    found, rows = np.unique(_key(table), return_index=True)
    return table.take(pa.array(rows[np.searchsorted(found, keys)]))


def _first_groups(keys: Int64[ndarray, " k"]) -> Int64[ndarray, " s"]:
    """The first row of each step."""
    first: ndarray = np.unique(keys >> 32, return_index=True)[1]
    return first


class _Sums:
    """What the rows of some ranks come to; arrays by row of the joint log."""

    def __init__(self, count: int, layers: int) -> None:
        self._rows = np.zeros((count, layers), np.int64)
        self._idle = {name: np.ones((count, layers), bool) for name in ("idle", "idle_bias")}
        self._batch_size = np.zeros(count, np.int64)
        self._loss, self._weight = np.zeros(count), np.zeros(count)
        self._plain, self._noted = np.zeros(count), np.zeros(count)

    def add(self, table: pa.Table) -> Int64[ndarray, "k layers"]:
        """Adds a rank; returns how many patterns it wrote to each layer."""
        row, place, value = _items(table, "rows", self._rows.shape[1])
        rows = np.zeros_like(self._rows)
        rows[row, place] = value
        self._rows += rows
        for name, idle in self._idle.items():
            idle &= self._mask(table, name)
        size, loss = _column(table, "batch_size").astype(np.int64), _column(table, "loss")
        self._batch_size += size
        noted = ~np.isnan(loss)
        self._loss += np.where(noted, loss * size, 0)
        self._weight += np.where(noted, size, 0)
        self._plain += np.where(noted, loss, 0)
        self._noted += noted
        return rows

    def joined(self, first: pa.Table) -> pa.Table:
        """The joint log, with the settings of the first rank."""
        layers = self._rows.shape[1]
        with np.errstate(invalid="ignore", divide="ignore"):
            loss = np.where(self._weight > 0, self._loss / self._weight, self._plain / self._noted)
        columns = {"rows": _lists(np.ones_like(self._rows, bool), self._rows.reshape(-1))}
        columns |= {
            name: _lists(idle, np.tile(np.arange(layers), len(idle))[idle.reshape(-1)]) for name, idle in self._idle.items()
        }
        columns |= {"batch_size": pa.array(self._batch_size), "loss": pa.array(loss)}
        table = pa.table({name: columns.get(name, first.column(name)) for name in STEPS_SCHEMA.names})
        return table.cast(STEPS_SCHEMA)

    def _mask(self, table: pa.Table, name: str) -> Bool[ndarray, "k layers"]:
        row, _, value = _items(table, name)
        known = (value >= 0) & (value < self._rows.shape[1])
        mask = np.zeros(self._rows.shape, bool)
        mask[row[known], value[known]] = True
        return mask


def _items(table: pa.Table, name: str, most: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Row, place in the list and value of the items of a column of lists; of each list the first `most`."""
    lists = pa.concat_arrays([pa.array([], STEPS_SCHEMA.field(name).type), *table.column(name).chunks])
    value, count = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64), np.diff(lists.offsets.to_numpy())
    row = np.repeat(np.arange(len(count)), count)
    place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    kept = np.full(len(row), True) if most is None else place < most
    return row[kept], place[kept], value[kept]


def _lists(mask: Bool[ndarray, "k layers"], values: NDArray[np.int64]) -> pa.Array:
    """A list for each row of the mask, of as many values as are true in it."""
    offsets = np.append(0, np.cumsum(mask.sum(axis=1))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(np.int32)))


def _difference(first: pa.Table, other: pa.Table, rank: int) -> str:
    """The first setting or checksum that a rank has another of than rank 0; "" where there is none."""
    for name in (*_NUMBERS, *_FLAGS, *_CHECKSUMS):
        a, b = _column(first, name), _column(other, name)
        if name in _NUMBERS:
            apart = ~np.isclose(a, b, rtol=_NEAR, atol=0, equal_nan=True)
        else:
            apart = (a != b) & (name in _FLAGS or ((a >= 0) & (b >= 0)))
        if apart.any():
            at = int(apart.argmax())
            where = f"step {_column(first, 'step')[at]}, parameter group {_column(first, 'group')[at]}"
            return f"{where}: {name} is {a[at].item()!r} at rank 0 and {b[at].item()!r} at rank {rank}"
    return ""


def _column(table: pa.Table, name: str) -> ndarray:
    return np.asarray(table.column(name).to_numpy())

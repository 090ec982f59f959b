"""Rows gathered by equal keys: what comes again in every epoch, as the inputs of a first layer do, is multiplied once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from dualstore.log import Log
from dualstore.rows import Select
from dualstore.scan import Piece, pieces
from dualstore.shapes import Bool, Float, Int32, Int64

__all__ = ["Repeats", "gather_repeats"]

_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Repeats:
    """Keys that stand for several rows of one label; arrays by key."""

    row: Int64[ndarray, " u"]
    """Number in the log of the first row with the key."""
    label: Int32[ndarray, " u"]
    count: Int64[ndarray, " u"]

    def __len__(self) -> int:
        return len(self.row)


def gather_repeats(log: Log, select: Select, limit: int, other: Callable[[Piece, Int64[ndarray, " r"]], None]) -> Repeats:
    """Counts the selected rows by the first row of their sample, position and label, where their keys are the same bits.

    Rows that differ from it, or whose first would be one too many for `limit`, are given to `other` as places in a piece.
    Memory: 40 bytes a key, at most `limit` of them, and some blocks of rows.
    """
    names = np.zeros(0, np.int64)
    found = Repeats(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64))
    for piece in pieces(log, select, _BLOCK_ROWS):
        sample, position, label = (
            piece.mapping.array(piece.group, name)[piece.local] for name in ("sample_id", "position", "label")
        )
        name = _mixed(sample, position, label)
        fresh, at = np.unique(name, return_index=True)
        new = ~_known(names, fresh)
        if len(names) + new.sum() <= limit and new.any():
            places = np.searchsorted(names, fresh[new])
            names = np.insert(names, places, fresh[new])
            found = Repeats(
                np.insert(found.row, places, piece.group.first + piece.local[at[new]]),
                np.insert(found.label, places, label[at[new]]),
                np.insert(found.count, places, 0),
            )
        same = _known(names, name)
        slot = np.minimum(np.searchsorted(names, name), max(len(names) - 1, 0))
        mine = np.flatnonzero(same)
        # Samples of different names may share a mixed one; what counts is that key and label are the same.
        equal = found.label[slot[mine]] == label[mine]
        keys = piece.selected_keys(slice(None) if len(mine) == len(same) else mine)
        first = log.take(["x"], found.row[slot[mine]])["x"]
        same[mine] = equal & _same_bits(keys, first)
        np.add.at(found.count, slot[same], 1)
        if not same.all():
            other(piece, np.flatnonzero(~same))
    return found


def _mixed(sample: Int64[ndarray, " n"], position: Int32[ndarray, " n"], label: Int32[ndarray, " n"]) -> Int64[ndarray, " n"]:
    with np.errstate(over="ignore"):
        mixed: ndarray = (sample * 0x9E3779B1 + position) * 0x85EBCA77 + label
    return mixed


def _known(names: Int64[ndarray, " u"], asked: Int64[ndarray, " n"]) -> Bool[ndarray, " n"]:
    if not len(names):
        return np.zeros(len(asked), bool)
    found: ndarray = names[np.minimum(np.searchsorted(names, asked), len(names) - 1)] == asked
    return found


def _same_bits(keys: Float[ndarray, "n d"], others: Float[ndarray, "n d"]) -> Bool[ndarray, " n"]:
    kind = np.dtype(f"i{keys.dtype.itemsize}")
    same: ndarray = (np.ascontiguousarray(keys).view(kind) == np.ascontiguousarray(others).view(kind)).all(axis=1)
    return same

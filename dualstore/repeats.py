"""Rows of equal keys: what comes again in every epoch, as the inputs of a first layer do, is multiplied once.

The index notes for each row of a part in which keys come again the first row of the log whose key has the same bits.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy import ndarray

from dualstore.index import LayerIndex, values
from dualstore.kernels import exact_dots
from dualstore.log import Group, Log
from dualstore.rows import Select
from dualstore.scan import Piece, computed, pieces
from dualstore.shapes import Bool, Float, Float64, Int32, Int64

__all__ = ["Alphas", "Repeats", "build_repeats", "gather_repeats"]

KIND = "repeats"
SCHEMA = pa.schema([pa.field("first", pa.int64(), nullable=False)])
MOST_KEYS = 1 << 20
"""Keys that are looked for again: what is held of each takes 16 bytes."""
_BLOCK_ROWS = 4096
_TRIES = 4096
_SHARE = 8
"""Where fewer than one in so many of the first _TRIES rows that might come again do, a layer's keys do not."""


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


def build_repeats(index: LayerIndex, progress: Callable[[int], None] = lambda rows: None) -> None:
    """Notes where keys come again; for layers in which they hardly do, nothing.

    Memory: two numbers for each of at most MOST_KEYS keys, and one for each row of a part.
    """
    finder, done = _Finder(index.log), 0
    kept: set[tuple[str, str]] = set()
    for number, (part, start, groups) in enumerate(index.log.by_part()):
        table = index.table(part, KIND, SCHEMA, warn=False)
        own = np.arange(start, start + part.rows)
        firsts = own.copy() if table is None else values(table, "first")
        for group in groups:
            finder.look(group, firsts[group.first - start :][: group.rows], compare=table is None)
            progress(group.rows)
            done += group.rows
            if finder.hopeless:
                break
        if finder.hopeless:
            kept.clear()
            break
        if (firsts != own).any():
            kept.add((part.path.stem, KIND))
            if table is None:
                index.write(index.log.parts[: number + 1], KIND, pa.table({"first": firsts}, schema=SCHEMA), after=number)
    progress(index.log.rows - done)
    index.remove_others(KIND, kept)


class _Finder:
    """Finds for the rows of one group after another the first row of the same sample, position, label and key."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._names: Int64[ndarray, " u"] = np.zeros(0, np.int64)
        self._rows: Int64[ndarray, " u"] = np.zeros(0, np.int64)
        self._tried = self._equal = 0

    @property
    def hopeless(self) -> bool:
        """Whether keys hardly come again, as those behind a layer that learns."""
        return self._tried >= _TRIES and self._equal * _SHARE < self._tried

    def look(self, group: Group, firsts: Int64[ndarray, " n"], *, compare: bool) -> None:
        """Where keys are to be compared, sets `firsts`, the rows' own numbers, to those of equal keys."""
        mapping = group.part.mapping
        name = _mixed(*(mapping.array(group, column) for column in ("sample_id", "position", "label")))
        if not compare:
            found = int((firsts != np.arange(group.first, group.first + group.rows)).sum())
            self._tried, self._equal = self._tried + found, self._equal + found
        elif mapping.column(group, "x") is not None:
            again = np.flatnonzero(_known(self._names, name))
            for start in range(0, len(again), _BLOCK_ROWS):
                some = again[start : start + _BLOCK_ROWS]
                rows = self._rows[np.searchsorted(self._names, name[some])]
                same = _same_bits(mapping.array(group, "x", some), self._log.take(["x"], rows)["x"])
                firsts[some[same]] = rows[same]
                self._tried, self._equal = self._tried + len(some), self._equal + int(same.sum())
        if len(self._names) < MOST_KEYS:
            fresh, at = np.unique(name, return_index=True)
            new = np.flatnonzero(~_known(self._names, fresh))[: MOST_KEYS - len(self._names)]
            places = np.searchsorted(self._names, fresh[new])
            self._names = np.insert(self._names, places, fresh[new])
            self._rows = np.insert(self._rows, places, firsts[at[new]])


class Alphas:
    """Alphas of some queries at the rows of pieces: the bits of `exact_dots`; keys that are known to come again are read once.

    Held: row and alphas of each key that comes again.
    """

    def __init__(self, index: LayerIndex, queries: Float[ndarray, "m d"]) -> None:
        self._index, self._queries = index, queries
        self._starts = {part.path: start for part, start, _ in index.log.by_part()}
        self._rows: Int64[ndarray, " u"] = np.zeros(0, np.int64)
        self._alphas: Float64[ndarray, "m u"] = np.zeros((len(queries), 0))
        self.keys_read = self.index_bytes = 0

    def over(self, found: Iterable[Piece], threads: int) -> Iterator[tuple[Piece, Float64[ndarray, "m s"]]]:
        """Each piece with the alphas of its selected rows, in the order of the log."""
        for piece, alphas in computed(found, self._at_once, threads):
            self.keys_read += 0 if alphas is None else len(piece.local)
            yield piece, self._with_repeats(piece) if alphas is None else alphas

    def _at_once(self, piece: Piece) -> Float64[ndarray, "m s"] | None:
        """None where keys come again. Done by several threads."""
        return None if self._noted(piece) else self._products(piece.selected_keys(slice(None)))

    def _noted(self, piece: Piece) -> pa.Table | None:
        return self._index.table(piece.group.part, KIND, SCHEMA)

    def _products(self, keys: ndarray) -> Float64[ndarray, "m n"]:
        return np.stack([exact_dots(keys, query) for query in self._queries])

    def _with_repeats(self, piece: Piece) -> Float64[ndarray, "m s"]:
        start = self._starts[piece.group.part.path]
        numbers = piece.group.first + piece.local
        firsts = values(self._noted(piece), "first")[numbers - start]
        self.index_bytes += firsts.nbytes
        again = firsts != numbers
        alphas = np.empty((len(self._queries), len(numbers)))
        single = np.flatnonzero(~again)
        self.keys_read += len(single)
        alphas[:, single] = self._products(piece.selected_keys(single))
        alphas[:, again] = self._of_firsts(firsts[again])
        return alphas

    def _of_firsts(self, firsts: Int64[ndarray, " n"]) -> Float64[ndarray, "m n"]:
        new = np.unique(firsts[~_known(self._rows, firsts)])
        if len(new):
            self.keys_read += len(new)
            places = np.searchsorted(self._rows, new)
            found = self._products(self._index.log.take(["x"], new)["x"])
            self._rows, self._alphas = np.insert(self._rows, places, new), np.insert(self._alphas, places, found, axis=1)
        return self._alphas[:, np.searchsorted(self._rows, firsts)]


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

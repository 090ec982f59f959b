"""The streamed scan: every selected key is read once, in blocks within a memory budget."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

import numpy as np
from numpy import ndarray

from dualstore.keys import wide
from dualstore.log import Group, Log, Mapping
from dualstore.rows import Select, Selection
from dualstore.shapes import Float, Float64, Int32, Int64

__all__ = ["Options", "Piece", "block_rows_of", "computed", "pieces"]

T = TypeVar("T")

RUN_ROWS = 131_072
"""Rows whose filter is evaluated by one SQL statement."""
_SPARSE = 8
"""Keys are gathered before the product when fewer than one row in this many is selected."""

_QUEUED = 1
"""Pieces that wait for a thread: results are taken in order, and a thread that is ahead shall not stand still."""


@dataclass(frozen=True)
class Options:
    """How a scan works; never what it answers."""

    budget_bytes: int = 256 << 20
    """Anonymous memory that blocks, scores and candidates may take; mapped file pages are the system's."""
    threads: int = 2


@dataclass(frozen=True)
class Piece:
    """Selected rows of one row group, with their keys."""

    group: Group
    mapping: Mapping
    keys: Float[ndarray, "n d"] | Int32[ndarray, " n"]
    """A view of the file where possible; may hold rows that are not selected. Numbers where the log has tokens."""
    pick: Int64[ndarray, " s"] | None
    """Which rows of `keys` are selected; None for all."""
    local: Int64[ndarray, " s"]
    """Row number in the group of each selected row."""
    codes: Int64[ndarray, " s"] | None
    errors: Float[ndarray, "n o"] | None = None
    """The error of each of `keys`, where it was asked for."""

    def chosen(self, values: ndarray) -> ndarray:
        """Of values for each row of `keys`, those of the selected rows."""
        return values if self.pick is None else values[self.pick]

    def selected_keys(self, index: Int64[ndarray, " c"] | slice) -> Float[ndarray, "c d"] | Int32[ndarray, " c"]:
        """Keys of some of the selected rows."""
        return self.keys[index if self.pick is None else self.pick[index]]

    def selected_errors(self, index: Int64[ndarray, " c"] | slice) -> Float[ndarray, "c o"]:
        """Errors of some of the selected rows."""
        assert self.errors is not None
        return self.errors[index if self.pick is None else self.pick[index]]

    def wide(self) -> tuple[Int32[ndarray, " s"], ndarray, Float64[ndarray, "s o"]]:
        """Steps, keys and errors of all selected rows; vectors in double precision."""
        everything = slice(None)
        keys, errors = self.selected_keys(everything), self.selected_errors(everything)
        return self.steps(everything), wide(keys), errors.astype(np.float64)

    def steps(self, index: Int64[ndarray, " c"] | slice) -> Int32[ndarray, " c"]:
        """Steps of some of the selected rows."""
        found: ndarray = self.mapping.array(self.group, "step")[self.local[index]]
        return found


def pieces(log: Log, select: Select, block_rows: int, *, errors: bool = False) -> Iterator[Piece]:
    """All selected rows of a log in order, at most `block_rows` at a time; reads nothing where nothing is selected.

    With their errors if asked for.
    """
    names = ["x", "e"] if errors else ["x"]
    for run in log.chunks(RUN_ROWS):
        mapping = run[0].part.mapping
        selection = select(mapping, run)
        chosen = [group for group in run if _reaches(selection, group, run[0].first)]
        for group, following in zip_longest(chosen, chosen[1:]):
            if following is not None:
                for name in names:
                    mapping.prefetch(following, name)
            yield from _of_group(group, mapping, selection, group.first - run[0].first, block_rows, names)


def _reaches(selection: Selection, group: Group, first: int) -> bool:
    """Whether rows of a group are selected; `first` is the first row of its run."""
    if selection.rows is None:
        return True
    low, high = np.searchsorted(selection.rows, [group.first - first, group.first - first + group.rows])
    return bool(low < high)


def block_rows_of(budget_bytes: int, row_bytes: int, threads: int) -> int:
    """Rows of a piece such that all that `computed` and `pieces` hold at a time keeps within a budget."""
    return max(64, budget_bytes // (threads + _QUEUED + 2) // row_bytes // 64 * 64)


def computed(found: Iterable[Piece], work: Callable[[Piece], T], threads: int) -> Iterator[tuple[Piece, T]]:
    """Each piece and `work(piece)`, in order; done by `threads` threads, for which `_QUEUED` pieces lie ready."""
    with ThreadPoolExecutor(threads) as pool:
        waiting = deque[tuple[Piece, Future[T]]]()
        for piece in found:
            waiting.append((piece, pool.submit(work, piece)))
            if len(waiting) > threads + _QUEUED:
                first, result = waiting.popleft()
                yield first, result.result()
        for first, result in waiting:
            yield first, result.result()


def _of_group(
    group: Group, mapping: Mapping, selection: Selection, offset: int, block_rows: int, names: Sequence[str]
) -> Iterator[Piece]:
    """`offset` is the group's first row in its run."""
    if selection.rows is None:
        for start, arrays in mapping.blocks(group, names, block_rows):
            local = np.arange(start, start + len(arrays["x"]))
            usable = {name: _usable(array) for name, array in arrays.items()}
            yield Piece(group, mapping, usable["x"], None, local, None, usable.get("e"))
        return
    low, high = np.searchsorted(selection.rows, [offset, offset + group.rows])
    wanted = selection.rows[low:high] - offset
    for start, arrays in mapping.blocks(group, names, block_rows):
        a, b = np.searchsorted(wanted, [start, start + len(arrays["x"])])
        if a < b:
            read, pick = _narrowed(wanted[a:b] - start)
            codes = None if selection.codes is None else selection.codes[low + a : low + b]
            usable = {name: _usable(array[read]) for name, array in arrays.items()}
            yield Piece(group, mapping, usable["x"], pick, wanted[a:b], codes, usable.get("e"))


def _narrowed(wanted: ndarray) -> tuple[slice | ndarray, ndarray | None]:
    """The fewest rows worth reading for the wanted ones, and where those lie among them."""
    first, last = int(wanted[0]), int(wanted[-1]) + 1
    if last - first == len(wanted):
        return slice(first, last), None
    if len(wanted) * _SPARSE < last - first:
        return wanted, None
    return slice(first, last), wanted - first


def _usable(keys: ndarray) -> ndarray:
    # Files of other writers may start their values at any byte; BLAS wants aligned numbers.
    return np.require(keys, requirements="A")

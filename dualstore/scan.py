"""The streamed scan: every selected key is read once, in blocks within a memory budget, for all queries at once.

The top-k is exact although most products are taken in single precision: a row is dropped only when its fast product,
plus a bound of that product's rounding error, stays below the k-th best exact value; all others are computed again by
`kernels.exact_dots` and ranked by that value alone.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from dualstore.kernels import dots, error_bound, exact_dots
from dualstore.log import Group, Log, Mapping
from dualstore.part import upper_norm
from dualstore.rows import Selection, Selector
from dualstore.shapes import Bool, Float, Float64, Int64

__all__ = ["Options", "Piece", "Ranking", "pieces", "top_k"]

RUN_ROWS = 131_072
"""Rows whose filter is evaluated by one SQL statement."""
_SPARSE = 8
"""Keys are gathered before the product when fewer than one row in this many is selected."""


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
    keys: Float[ndarray, "n d"]
    """A view of the file where possible; may hold rows that are not selected."""
    pick: Int64[ndarray, " s"] | None
    """Which rows of `keys` are selected; None for all."""
    local: Int64[ndarray, " s"]
    """Row number in the group of each selected row."""
    codes: Int64[ndarray, " s"] | None

    def chosen(self, values: ndarray) -> ndarray:
        """Of values for each row of `keys`, those of the selected rows."""
        return values if self.pick is None else values[self.pick]

    def selected_keys(self, index: Int64[ndarray, " c"] | slice) -> Float[ndarray, "c d"]:
        """Keys of some of the selected rows."""
        return self.keys[index if self.pick is None else self.pick[index]]


def pieces(log: Log, select: Selector, block_rows: int) -> Iterator[Piece]:
    """All selected rows of a log in order, at most `block_rows` at a time; reads nothing where nothing is selected."""
    for run in log.chunks(RUN_ROWS):
        mapping = run[0].part.mapping
        selection = select(mapping, run)
        for index, group in enumerate(run):
            if index + 1 < len(run):
                mapping.prefetch(run[index + 1], "x")
            yield from _of_group(group, mapping, selection, group.first - run[0].first, block_rows)


def _of_group(group: Group, mapping: Mapping, selection: Selection, offset: int, block_rows: int) -> Iterator[Piece]:
    """`offset` is the group's first row in its run."""
    if selection.rows is None:
        for start, arrays in mapping.blocks(group, ["x"], block_rows):
            local = np.arange(start, start + len(arrays["x"]))
            yield Piece(group, mapping, _usable(arrays["x"]), None, local, None)
        return
    low, high = np.searchsorted(selection.rows, [offset, offset + group.rows])
    if low == high:
        return
    wanted = selection.rows[low:high] - offset
    for start, arrays in mapping.blocks(group, ["x"], block_rows):
        a, b = np.searchsorted(wanted, [start, start + len(arrays["x"])])
        if a < b:
            keys, pick = _narrowed(arrays["x"], wanted[a:b] - start)
            codes = None if selection.codes is None else selection.codes[low + a : low + b]
            yield Piece(group, mapping, _usable(keys), pick, wanted[a:b], codes)


def _narrowed(keys: ndarray, wanted: ndarray) -> tuple[ndarray, ndarray | None]:
    """The fewest keys worth reading for the wanted rows, and where those lie among them."""
    first, last = int(wanted[0]), int(wanted[-1]) + 1
    if last - first == len(wanted):
        return keys[first:last], None
    if len(wanted) * _SPARSE < last - first:
        return keys[wanted], None
    return keys[first:last], wanted - first


def _usable(keys: ndarray) -> ndarray:
    # Files of other writers may start their values at any byte; BLAS wants aligned numbers.
    return np.require(keys, requirements="A")


@dataclass(frozen=True)
class Ranking:
    """The best rows of every (query, group): sorted by query, group code and rank."""

    query: Int64[ndarray, " r"]
    code: Int64[ndarray, " r"]
    rank: Int64[ndarray, " r"]
    row: Int64[ndarray, " r"]
    alpha: Float64[ndarray, " r"]


def top_k(
    log: Log,
    queries: Float[ndarray, "m d"],
    k: int,
    select: Selector,
    *,
    largest: bool = True,
    options: Options | None = None,
) -> Ranking:
    """The k patterns with the largest (or smallest) alpha for each query and group; fewer where there are fewer.

    Order: alpha, then step, sample_id, position, then place in the log. Rows whose alpha is NaN are not ranked.
    Memory: the budget plus k rows for each query and group.
    """
    options = options or Options()
    signed = queries if largest else -queries
    bests = [_Best(query, k, options) for query in signed]
    itemsize = queries.dtype.itemsize
    row_bytes = 4 * len(queries) * (itemsize + 2) + 2 * queries.shape[1] * itemsize
    block_rows = max(64, options.budget_bytes // 2 // row_bytes // 64 * 64)
    scaled = np.stack([best.scaled for best in bests])
    with ThreadPoolExecutor(options.threads) as pool:
        for piece in pieces(log, select, block_rows):
            norm = _norm(piece)
            scores = None if norm is None else piece.chosen(dots(piece.keys, scaled, pool, options.threads))
            _offer(bests, piece, scores, norm)
    return _ranking(bests, 1.0 if largest else -1.0)


def _norm(piece: Piece) -> float | None:
    """A bound of the norms of the piece's keys; None where they overflow or are not finite."""
    if piece.group.max_norm is not None:
        return piece.group.max_norm
    with np.errstate(over="ignore", invalid="ignore"):
        return upper_norm(float(np.vecdot(piece.keys, piece.keys).max()), piece.keys.shape[1])


def _offer(bests: "list[_Best]", piece: Piece, scores: ndarray | None, norm: float | None) -> None:
    """Gives each query the rows that may be among its best."""
    if scores is None or norm is None or any(best.may_overflow(norm) for best in bests):
        for best in bests:
            best.add(piece, np.arange(len(piece.local)))
        return
    if piece.codes is not None:
        for best, column in zip(bests, scores.T, strict=True):
            best.add(piece, np.flatnonzero(column >= best.cuts(piece.codes, norm, column.dtype)))
        return
    cut = np.array([best.cut(column, norm) for best, column in zip(bests, scores.T, strict=True)], scores.dtype)
    hits = np.flatnonzero(scores.max(axis=0, initial=-np.inf) >= cut)
    for j in hits:
        bests[j].add(piece, np.flatnonzero(scores[:, j] >= cut[j]))


class _Best:
    """The best rows so far of one query, for each group."""

    def __init__(self, query: Float[ndarray, " d"], k: int, options: Options) -> None:
        self._query, self._k = query, k
        self._rescored_rows = max(1, options.budget_bytes // 4 // max(1, query.nbytes))
        peak = float(np.abs(query).max(initial=0.0))
        # A power of two is exact; it keeps products of tiny or huge queries inside the range of the fast kernel.
        self._scale = 2.0 ** min(1000, -int(np.frexp(peak)[1])) if peak > 0 else 1.0
        self.scaled = (query.astype(np.float64) * self._scale).astype(query.dtype)
        self._scaled_norm = float(np.linalg.norm(self.scaled.astype(np.float64))) * (1 + 1e-12)
        self._bound = error_bound(len(query), query.dtype)
        # What may underflow: in the fast product, and in alpha itself.
        self._tiny = len(query) * (float(np.finfo(query.dtype).tiny) + 2.0**-1074 * self._scale)
        none = np.zeros(0, np.int64)
        self.value: Float64[ndarray, " r"] = np.zeros(0)
        self.code, self.row, self._step, self._sample, self._position = none, none, none, none, none
        self._kth: Float64[ndarray, " g"] = np.full(1, -np.inf)

    def _error(self, norm: float) -> float:
        return self._bound * norm * self._scaled_norm + self._tiny * (1 + norm)

    def may_overflow(self, norm: float) -> bool:
        """Whether alpha may leave the range of float64, where infinities tie although the fast products do not."""
        return norm * self._scaled_norm >= 2.0**1023 * self._scale

    def cut(self, scores: Float[ndarray, " n"], norm: float) -> float:
        """No row of the block whose fast product is below this can be among the best."""
        error = self._error(norm)
        cut = self._kth[0] * self._scale - error
        if np.isneginf(cut) and len(scores) > self._k:
            cut = float(np.partition(scores, len(scores) - self._k)[len(scores) - self._k]) - 2 * error
        with np.errstate(over="ignore"):
            return float(np.nextafter(np.float64(cut).astype(scores.dtype), -np.inf, dtype=scores.dtype))

    def cuts(self, codes: Int64[ndarray, " n"], norm: float, dtype: np.dtype) -> Float[ndarray, " n"]:
        """`cut` for each row's own group."""
        self._grow(int(codes.max(initial=0)) + 1)
        with np.errstate(over="ignore"):
            cuts = (self._kth * self._scale - self._error(norm)).astype(dtype)
        lowered: ndarray = np.nextafter(cuts, -np.inf, dtype=dtype)[codes]
        return lowered

    def add(self, piece: Piece, index: Int64[ndarray, " c"]) -> None:
        """Scores some of the piece's selected rows exactly and keeps those that are among the best."""
        for start in range(0, len(index), self._rescored_rows):
            some = index[start : start + self._rescored_rows]
            self._merge(piece, some, exact_dots(piece.selected_keys(some), self._query))

    def _merge(self, piece: Piece, index: Int64[ndarray, " c"], values: Float64[ndarray, " c"]) -> None:
        codes = np.zeros(len(index), np.int64) if piece.codes is None else piece.codes[index]
        self._grow(int(codes.max(initial=0)) + 1)
        wanted = values >= self._kth[codes]  # False for NaN
        if not wanted.any():
            return
        local = piece.local[index[wanted]]
        ids = (piece.mapping.array(piece.group, name)[local] for name in ("step", "sample_id", "position"))
        found = (values[wanted], codes[wanted], local + piece.group.first, *ids)
        mine = (self.value, self.code, self.row, self._step, self._sample, self._position)
        value, code, row, step, sample, position = (np.concatenate(pair) for pair in zip(mine, found, strict=True))
        order = np.lexsort((row, position, sample, step, -value, code))
        order = order[_rank(code[order]) < self._k]
        self.value, self.code, self.row = value[order], code[order], row[order]
        self._step, self._sample, self._position = step[order], sample[order], position[order]
        last = _rank(self.code) == self._k - 1
        self._kth[self.code[last]] = self.value[last]

    def _grow(self, groups: int) -> None:
        if groups > len(self._kth):
            self._kth = np.concatenate([self._kth, np.full(max(groups, 2 * len(self._kth)) - len(self._kth), -np.inf)])


def _rank(codes: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    """Position of each element within its run of equal codes."""
    starts: Bool[ndarray, " n"] = np.ones(len(codes), dtype=bool)
    starts[1:] = codes[1:] != codes[:-1]
    first = np.maximum.accumulate(np.where(starts, np.arange(len(codes)), 0))
    return np.arange(len(codes)) - first


def _ranking(bests: list[_Best], sign: float) -> Ranking:
    queries = [np.full(len(best.row), index) for index, best in enumerate(bests)]
    return Ranking(
        query=np.concatenate(queries),
        code=np.concatenate([best.code for best in bests]),
        rank=np.concatenate([_rank(best.code) + 1 for best in bests]),
        row=np.concatenate([best.row for best in bests]),
        alpha=np.concatenate([best.value for best in bests]) * sign + 0.0,
    )

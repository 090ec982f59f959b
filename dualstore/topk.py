"""The patterns with the largest alpha for each query and group, by one scan for all queries.

The answer is exact although most products are taken in single precision: a row is dropped only when its fast product,
plus a bound of that product's rounding error, stays below the k-th best exact value; all others are computed again by
`kernels.exact_dots` and ranked by that value alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from dualstore.kernels import dots, error_bound, exact_dots
from dualstore.log import Log
from dualstore.part import upper_norm
from dualstore.rows import Selector
from dualstore.scan import Options, Piece, block_rows_of, computed, pieces
from dualstore.shapes import Bool, Float, Float64, Int64

__all__ = ["Ranking", "top_k"]

_PENDING = 64
"""Pairs of row and query that may wait to be ranked; while they wait, the k-th best alpha does not rise."""


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
    Memory: the budget plus some 2 k rows of numbers for each query and group.
    """
    options = options or Options()
    best = _Best(queries if largest else -queries, k, options)

    def products(piece: Piece) -> tuple[float | None, ndarray | None]:
        norm = _norm(piece)
        return norm, None if norm is None else piece.chosen(dots(piece.keys, best.scaled))

    # The keys if they have to be decoded; scores, cuts, hits, and the (row, query) pairs of the hits.
    row_bytes = queries.shape[1] * queries.itemsize + len(queries) * (2 * queries.itemsize + 25)
    block_rows = block_rows_of(options.budget_bytes * 3 // 4, row_bytes, options.threads)
    for piece, (norm, scores) in computed(pieces(log, select, block_rows), products, options.threads):
        if norm is None or scores is None or best.may_overflow(norm):
            best.add_all(piece)
        else:
            best.offer(piece, scores, norm)
    return best.ranking(1.0 if largest else -1.0)


def _norm(piece: Piece) -> float | None:
    """A bound of the norms of the piece's keys; None where they overflow or are not finite."""
    if piece.group.max_norm is not None:
        return piece.group.max_norm
    with np.errstate(over="ignore", invalid="ignore"):
        return upper_norm(float(np.vecdot(piece.keys, piece.keys).max()), piece.keys.shape[1])


class _Rows(NamedTuple):
    """Candidates, an array of each kind: what they are ranked by, and their place in the log."""

    query: Int64[ndarray, " r"]
    code: Int64[ndarray, " r"]
    value: Float64[ndarray, " r"]
    step: Int64[ndarray, " r"]
    sample: Int64[ndarray, " r"]
    position: Int64[ndarray, " r"]
    row: Int64[ndarray, " r"]


class _Best:
    """The best rows so far of each query and group."""

    def __init__(self, queries: Float[ndarray, "m d"], k: int, options: Options) -> None:
        self._queries, self._k = queries, k
        # Pairs that may wait: two copies of the key, the query as it is and in float64.
        self._pairs = max(1, options.budget_bytes // 4 // (24 * queries.shape[1] + 128))
        # A power of two is exact; it keeps products of tiny or huge queries inside the range of the fast kernel.
        exponents = np.frexp(np.abs(queries).max(axis=1, initial=0.0).astype(np.float64))[1]
        self._scale: Float64[ndarray, " m"] = 2.0 ** np.minimum(1000, -exponents.astype(np.int64))
        self.scaled = (queries.astype(np.float64) * self._scale[:, None]).astype(queries.dtype)
        self._scaled_norm = np.linalg.norm(self.scaled.astype(np.float64), axis=1) * (1 + 1e-12)
        self._bound = error_bound(queries.shape[1], queries.dtype)
        # What may underflow: in the fast product, and in alpha itself.
        self._tiny = queries.shape[1] * (float(np.finfo(queries.dtype).tiny) + 2.0**-1074 * self._scale)
        whole, real = np.zeros(0, np.int64), np.zeros(0)
        self._kept = _Rows(whole, whole, real, whole, whole, whole, whole)
        self._pending: list[tuple[ndarray, _Rows]] = []
        self._waiting = 0
        self._kth: Float64[ndarray, "m g"] = np.full((len(queries), 1), -np.inf)

    def _error(self, norm: float) -> Float64[ndarray, " m"]:
        error: ndarray = self._bound * norm * self._scaled_norm + self._tiny * (1 + norm)
        return error

    def may_overflow(self, norm: float) -> bool:
        """Whether an alpha may leave the range of float64, where infinities tie although the fast products do not."""
        with np.errstate(over="ignore"):
            return bool((norm * self._scaled_norm / self._scale >= 2.0**1023).any())

    def offer(self, piece: Piece, scores: Float[ndarray, "n m"], norm: float) -> None:
        """Takes in the selected rows that may be among the best: those whose fast product is not below the cut."""
        cuts = self._cuts(scores, norm) if piece.codes is None else self._cuts_of_groups(piece.codes, norm)
        with np.errstate(over="ignore"):
            lowered = np.nextafter(cuts.astype(scores.dtype), -np.inf, dtype=scores.dtype)
        hits = np.flatnonzero(scores >= lowered)
        if len(hits):
            self._add(piece, *np.divmod(hits, scores.shape[1]))

    def _cuts(self, scores: Float[ndarray, "n m"], norm: float) -> Float64[ndarray, " m"]:
        error, behind = self._error(norm), len(scores) - self._k
        cuts: ndarray = self._kth[:, 0] * self._scale - error
        new = np.flatnonzero(np.isneginf(cuts)) if behind > 0 else ()
        for j in new:
            cuts[j] = float(np.partition(scores[:, j], behind)[behind]) - 2 * error[j]
        return cuts

    def _cuts_of_groups(self, codes: Int64[ndarray, " n"], norm: float) -> Float64[ndarray, "n m"]:
        self._grow(int(codes.max(initial=0)) + 1)
        cuts: ndarray = (self._kth * self._scale[:, None] - self._error(norm)[:, None]).T[codes]
        return cuts

    def add_all(self, piece: Piece) -> None:
        """Takes in every selected row, whatever its fast product."""
        for j in range(len(self._queries)):
            self._add(piece, np.arange(len(piece.local)), np.full(len(piece.local), j))

    def _add(self, piece: Piece, index: Int64[ndarray, " c"], query: Int64[ndarray, " c"]) -> None:
        """Lets pairs of the piece's selected rows and queries wait to be ranked; ranks those that wait once there are enough."""
        for start in range(0, len(index), self._pairs):
            some, asked = index[start : start + self._pairs], query[start : start + self._pairs]
            local = piece.local[some]
            step, sample, position = (piece.mapping.array(piece.group, name)[local] for name in ("step", "sample_id", "position"))
            codes = np.zeros(len(some), np.int64) if piece.codes is None else piece.codes[some]
            keys = np.array(piece.selected_keys(some))  # a copy: what it is taken from may be large
            self._pending.append(
                (keys, _Rows(asked, codes, np.zeros(len(some)), step, sample, position, local + piece.group.first))
            )
            self._waiting += len(some)
            if not len(self._kept.row) or self._waiting > min(self._pairs, max(_PENDING, len(self._kept.row))):
                self._merge()

    def _merge(self) -> None:
        """Computes alpha for the rows that wait, and ranks them among the best."""
        new = _Rows(*map(np.concatenate, zip(*(rows for _, rows in self._pending), strict=True)))
        keys = np.concatenate([keys for keys, _ in self._pending])
        self._pending, self._waiting = [], 0
        values = exact_dots(keys, self._queries[0] if len(self._queries) == 1 else self._queries[new.query])
        self._grow(int(new.code.max(initial=0)) + 1)
        wanted = np.flatnonzero(values >= self._kth[new.query, new.code])  # false for NaN
        new = _Rows(*(field[wanted] for field in new._replace(value=values)))
        rows = _Rows(*map(np.concatenate, zip(self._kept, new, strict=True)))
        order = np.lexsort((rows.row, rows.position, rows.sample, rows.step, -rows.value, rows.code, rows.query))
        order = order[_rank(rows.query[order], rows.code[order]) < self._k]
        self._kept = rows = _Rows(*(field[order] for field in rows))
        last = _rank(rows.query, rows.code) == self._k - 1
        self._kth[rows.query[last], rows.code[last]] = rows.value[last]

    def _grow(self, groups: int) -> None:
        queries, now = self._kth.shape
        if groups > now:
            self._kth = np.concatenate([self._kth, np.full((queries, max(groups, 2 * now) - now), -np.inf)], axis=1)

    def ranking(self, sign: float) -> Ranking:
        """The answer; `sign` undoes that the queries were negated."""
        if self._pending:
            self._merge()
        rows = self._kept
        return Ranking(rows.query, rows.code, _rank(rows.query, rows.code) + 1, rows.row, rows.value * sign + 0.0)


def _rank(query: Int64[ndarray, " n"], code: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    """Position of each element within its run of equal queries and codes."""
    starts: Bool[ndarray, " n"] = np.ones(len(query), dtype=bool)
    starts[1:] = (query[1:] != query[:-1]) | (code[1:] != code[:-1])
    first = np.maximum.accumulate(np.where(starts, np.arange(len(query)), 0))
    return np.arange(len(query)) - first

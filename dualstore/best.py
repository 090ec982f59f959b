"""The best rows so far: what a scan or a search offers is ranked by its exact alpha, or dropped by a bound of it.

A row is dropped only when its product in single precision and the bound of that product's rounding error stay below the
k-th best exact value; all others are computed again by `kernels.exact_dots` and ranked by that value alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from dualstore.kernels import dots, error_bound, exact_dots
from dualstore.log import Log
from dualstore.part import upper_norm
from dualstore.scan import Options, Piece
from dualstore.scores import Score
from dualstore.shapes import Bool, Float, Float64, Int64

__all__ = ["Best", "Ranking", "rank_within"]

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


class _Rows(NamedTuple):
    """Candidates, an array of each kind: what they are ranked by, and their place in the log."""

    query: Int64[ndarray, " r"]
    code: Int64[ndarray, " r"]
    value: Float64[ndarray, " r"]
    step: Int64[ndarray, " r"]
    sample: Int64[ndarray, " r"]
    position: Int64[ndarray, " r"]
    row: Int64[ndarray, " r"]


class Best:
    """The best rows so far of each query and group."""

    def __init__(
        self,
        queries: Float[ndarray, "m d"],
        k: int,
        options: Options,
        floor: float | None = None,
        *,
        paired: bool = False,
        score: Score | None = None,
    ) -> None:
        """Only rows whose alpha is at least `floor` count. Where a score is given, rows are ranked by it instead of alpha.

        `paired` says that the second half of the queries are the negatives of the first and k rows are wanted of both
        together: what is below the k-th best of one is then of no use for the other.
        """
        self._queries, self.k, self._paired, self._score = queries, k, paired, score
        # Pairs that may wait: two copies of the key, the query as it is and in float64.
        self._pairs = max(1, options.budget_bytes // 4 // (24 * queries.shape[1] + 128))
        # A power of two is exact; it keeps products of tiny or huge queries inside the range of the fast kernel.
        exponents = np.frexp(np.abs(queries).max(axis=1, initial=0.0).astype(np.float64))[1]
        self._scale: Float64[ndarray, " m"] = 2.0 ** np.minimum(1000, -exponents.astype(np.int64))
        self.scaled = (queries.astype(np.float64) * self._scale[:, None]).astype(queries.dtype)
        self.scaled_norm = np.linalg.norm(self.scaled.astype(np.float64), axis=1) * (1 + 1e-12)
        self._bound = error_bound(queries.shape[1], queries.dtype)
        # What may underflow: in the fast product, and in alpha itself.
        self._tiny = queries.shape[1] * (float(np.finfo(queries.dtype).tiny) + 2.0**-1074 * self._scale)
        whole, real = np.zeros(0, np.int64), np.zeros(0)
        self._kept = _Rows(whole, whole, real, whole, whole, whole, whole)
        self._pending: list[tuple[ndarray, _Rows]] = []
        self._waiting = 0
        self._floor = -np.inf if floor is None else floor
        self._kth: Float64[ndarray, "m g"] = np.full((len(queries), 1), self._floor)
        """The k-th best alpha; the floor where there are fewer."""
        self._full: Bool[ndarray, "m g"] = np.zeros((len(queries), 1), bool)

    @property
    def _scaled_kth(self) -> Float64[ndarray, "m g"]:
        """The k-th best alpha as that of the scaled query; infinite where a floor is too large for that, and for any row."""
        with np.errstate(over="ignore"):
            found: ndarray = self._kth * self._scale[:, None]
        return found

    def _error(self, norm: float) -> Float64[ndarray, " m"]:
        error: ndarray = self._bound * norm * self.scaled_norm + self._tiny * (1 + norm)
        return error

    def may_overflow(self, norm: float) -> bool:
        """Whether an alpha may leave the range of float64, where infinities tie although the fast products do not."""
        with np.errstate(over="ignore"):
            return bool((norm * self.scaled_norm / self._scale >= 2.0**1023).any())

    def offer(self, piece: Piece, scores: Float[ndarray, "n m"], norm: float) -> None:
        """Takes in the selected rows that may be among the best: those whose fast product is not below the cut."""
        cuts = self._cuts(scores, norm) if piece.codes is None else self._cuts_of_groups(piece.codes, norm)
        with np.errstate(over="ignore"):
            lowered = np.nextafter(cuts.astype(scores.dtype), -np.inf, dtype=scores.dtype)
        hits = np.flatnonzero(scores >= lowered)
        if len(hits):
            self._add(piece, *np.divmod(hits, scores.shape[1]))

    def offer_valued(self, piece: Piece, scores: Float[ndarray, "n m"], norm: float) -> None:
        """The same where rows are ranked by a score: alpha times a value of the row's own."""
        assert self._score is not None
        value, off = self._score.estimates(piece.steps(slice(None)), piece.selected_errors(slice(None)))
        alpha, error = scores.astype(np.float64) / self._scale, self._error(norm) / self._scale
        with np.errstate(over="ignore", invalid="ignore"):
            found = alpha * value
            slack = (np.abs(alpha) + error) * off + np.abs(value) * error
            slack += 1e-15 * np.abs(found) + 1e-300  # what the last products round
            hits = np.flatnonzero(~(found + slack < self._cuts_of_scores(piece, found - slack)))
        if len(hits):
            self._add(piece, *np.divmod(hits, scores.shape[1]))

    def offer_traced(self, piece: Piece, values: Float64[ndarray, "n m"]) -> None:
        """The same where the true scores are known."""
        index, query = np.nonzero(values >= self._cuts_of_scores(piece, values))  # false for NaN
        if len(index):
            local = piece.local[index]
            codes = np.zeros(len(index), np.int64) if piece.codes is None else piece.codes[index]
            step, sample, position = (piece.mapping.array(piece.group, name)[local] for name in ("step", "sample_id", "position"))
            self._rank(_Rows(query, codes, values[index, query], step, sample, position, local + piece.group.first))

    def _cuts_of_scores(self, piece: Piece, least: Float64[ndarray, "n m"]) -> Float64[ndarray, "..."]:
        """What rows of a piece must reach, each of whose scores is at least `least`: (m,), or (n, m) where rows are grouped."""
        if piece.codes is not None:
            self.grow(int(piece.codes.max(initial=0)) + 1)
            of_groups: ndarray = self._kth.T[piece.codes]
            return of_groups
        cuts, behind = self._kth[:, 0].copy(), len(least) - self.k
        for j in np.flatnonzero(~self._full[:, 0]) if behind > 0 else ():
            known = np.where(np.isnan(least[:, j]), -np.inf, least[:, j])
            cuts[j] = max(cuts[j], np.partition(known, behind)[behind])
        return cuts

    def _cuts(self, scores: Float[ndarray, "n m"], norm: float) -> Float64[ndarray, " m"]:
        error, behind = self._error(norm), len(scores) - self.k
        cuts: ndarray = self._scaled_kth[:, 0] - error
        for j in np.flatnonzero(~self._full[:, 0]) if behind > 0 else ():
            cuts[j] = max(cuts[j], float(np.partition(scores[:, j], behind)[behind]) - 2 * error[j])
        return cuts

    def _cuts_of_groups(self, codes: Int64[ndarray, " n"], norm: float) -> Float64[ndarray, "n m"]:
        self.grow(int(codes.max(initial=0)) + 1)
        cuts: ndarray = (self._scaled_kth - self._error(norm)[:, None]).T[codes]
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
            values = np.ones(len(some))
            if self._score is not None:
                values = self._score.values(step, piece.selected_errors(some), asked)
            keys = np.array(piece.selected_keys(some))  # a copy: what it is taken from may be large
            self._pending.append((keys, _Rows(asked, codes, values, step, sample, position, local + piece.group.first)))
            self._waiting += len(some)
            if not len(self._kept.row) or self._waiting > min(self._pairs, max(_PENDING, len(self._kept.row))):
                self._merge()

    def _merge(self) -> None:
        """Computes alpha for the rows that wait, times their values, and ranks them among the best."""
        new = _Rows(*map(np.concatenate, zip(*(rows for _, rows in self._pending), strict=True)))
        keys = np.concatenate([keys for keys, _ in self._pending])
        self._pending, self._waiting = [], 0
        with np.errstate(over="ignore", invalid="ignore"):
            values = exact_dots(keys, self._queries_of(new.query)) * new.value + 0.0
        self.grow(int(new.code.max(initial=0)) + 1)
        wanted = np.flatnonzero(values >= self._kth[new.query, new.code])  # false for NaN
        self._rank(_Rows(*(field[wanted] for field in new._replace(value=values))))

    def _rank(self, new: _Rows) -> None:
        """Ranks rows among the best."""
        rows = _Rows(*map(np.concatenate, zip(self._kept, new, strict=True)))
        order = np.lexsort((rows.row, rows.position, rows.sample, rows.step, -rows.value, rows.code, rows.query))
        order = order[rank_within(rows.query[order], rows.code[order]) < self.k]
        self._kept = rows = _Rows(*(field[order] for field in rows))
        last = rank_within(rows.query, rows.code) == self.k - 1
        self._kth[rows.query[last], rows.code[last]] = rows.value[last]
        self._full[rows.query[last], rows.code[last]] = True
        if self._paired:
            half = len(self._queries) // 2
            self._kth = np.tile(np.maximum(self._kth[:half], self._kth[half:]), (2, 1))
            self._full = np.tile(self._full[:half] | self._full[half:], (2, 1))

    def add_rows(
        self,
        log: Log,
        rows: Int64[ndarray, " u"],
        member: Int64[ndarray, " p"],
        queries: Int64[ndarray, " p"],
        codes: Int64[ndarray, " u"],
    ) -> None:
        """Ranks pairs of a query and one of some rows of the log, whose group `codes` tells. Reads each row once."""
        if self._pending:
            self._merge()
        self.grow(int(codes.max(initial=0)) + 1)
        each = max(1, self._pairs // 2)
        order = np.argsort(member, kind="stable")
        best: list[tuple[ndarray, ndarray, ndarray]] = []
        for start in range(0, len(rows), each):
            low, high = np.searchsorted(member, [start, start + each], sorter=order)
            keys, mine = log.take(["x"], rows[start : start + each])["x"], order[low:high]
            mine = mine[self._near(keys, member[mine] - start, queries[mine], codes[member[mine]])]
            for some in np.split(mine, range(self._pairs, len(mine), self._pairs)):
                values = exact_dots(keys[member[some] - start], self._queries_of(queries[some]))
                wanted = np.flatnonzero(values >= self._kth[queries[some], codes[member[some]]])  # false for NaN
                best.append((values[wanted], member[some[wanted]], queries[some[wanted]]))
        if best:
            value, at, query = map(np.concatenate, zip(*best, strict=True))
            found = log.take(["step", "sample_id", "position"], rows[at])
            step, sample, position = (found[name] for name in ("step", "sample_id", "position"))
            self._rank(_Rows(query, codes[at], value, step, sample, position, rows[at]))

    def _queries_of(self, query: Int64[ndarray, " p"]) -> Float[ndarray, "... d"]:
        """The vector of each; one for all where there is but one."""
        found: ndarray = self._queries[0] if len(self._queries) == 1 else self._queries[query]
        return found

    def _near(
        self, keys: Float[ndarray, "c d"], member: Int64[ndarray, " p"], queries: Int64[ndarray, " p"], codes: Int64[ndarray, " p"]
    ) -> Int64[ndarray, " n"]:
        """Which pairs of key and query have a fast product that is not below the cut of the query and the key's group."""
        with np.errstate(over="ignore", invalid="ignore"):
            norm = upper_norm(float(np.vecdot(keys, keys).max(initial=0.0)), keys.shape[1])
            if norm is None or self.may_overflow(norm):
                return np.arange(len(member))
            error = self._error(norm)
            cuts = self._scaled_kth - error[:, None]
            scores = dots(keys, self.scaled)[member, queries].astype(np.float64)
            for j in np.flatnonzero(~self._full[:, 0]) if cuts.shape[1] == 1 else ():
                mine = scores if len(cuts) == 1 else scores[queries == j]
                if (behind := len(mine) - self.k) > 0:
                    cuts[j] = max(cuts[j, 0], float(np.partition(mine, behind)[behind]) - 2 * error[j])
            return np.flatnonzero(~(scores < cuts[queries, codes]))

    def cuts(self, norm: float = 0.0) -> Float64[ndarray, "m g"]:
        """The k-th best alpha of each query and group as that of the scaled query; the floor where there are fewer.

        Less what keys up to a norm may have lost of their alpha by underflow.
        """
        if self._pending:
            self._merge()
        cuts: ndarray = self._scaled_kth - self._tiny[:, None] * (1 + norm)
        return cuts

    def wanting(self) -> Int64[ndarray, " w"]:
        """The queries that have fewer than k rows, without groups."""
        if self._pending:
            self._merge()
        return np.flatnonzero(~self._full[:, 0])

    @property
    def bounded(self) -> bool:
        """Whether a floor says what is wanted even before k rows are known."""
        return self._floor > -np.inf

    def grow(self, groups: int) -> None:
        """Makes room for so many groups."""
        queries, now = self._kth.shape
        if groups > now:
            more = (queries, max(groups, 2 * now) - now)
            self._kth = np.concatenate([self._kth, np.full(more, self._floor)], axis=1)
            self._full = np.concatenate([self._full, np.zeros(more, bool)], axis=1)

    def ranking(self, sign: float) -> Ranking:
        """The answer; `sign` undoes that the queries were negated."""
        if self._pending:
            self._merge()
        rows = self._kept
        return Ranking(rows.query, rows.code, rank_within(rows.query, rows.code) + 1, rows.row, rows.value * sign + 0.0)


def rank_within(query: Int64[ndarray, " n"], code: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    """Position of each element within its run of equal queries and codes."""
    starts: Bool[ndarray, " n"] = np.ones(len(query), dtype=bool)
    starts[1:] = (query[1:] != query[:-1]) | (code[1:] != code[:-1])
    first = np.maximum.accumulate(np.where(starts, np.arange(len(query)), 0))
    return np.arange(len(query)) - first

"""The search of sketches for the best rows: bounds of all that a norm does not rule out, exact alphas in their order.

Either all sketches together, the most promising rows first, whose condition is looked at only then; or, where rows are
grouped or a condition leaves out too many, one sketch after the other with condition and group of all its rows.
"""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from dualstore.best import Best, rank_within
from dualstore.explain import Explain
from dualstore.log import Log
from dualstore.rows import Selector
from dualstore.scan import RUN_ROWS, Options
from dualstore.shapes import Float32, Int64
from dualstore.sketch import Asked, Projected, Sketch

__all__ = ["Search"]

_HEAD_ROWS = 512
"""Rows of each sketch, of the largest norms, that a search begins with."""
_FIRST_ROWS = 256
"""Rows of each query that are read together first; then four times as many."""
_MANY_ROWS = 4096
"""Rows that wait for a query before the best of them are read."""
_BLOCK_ROWS = 16_384
"""Rows that are bounded at once."""
_BLOCK_PAIRS = 131_072
"""Bounds that are looked at at once."""
_GATHER_COST = 16
"""How many times dearer than in a scan a row is that is read alone."""
_FEW_ROWS = 4096
"""Rows that are read alone without asking for the price."""
_PAIR_BYTES = 64
"""What a pair of row and query takes while it waits to be read."""


class Search:
    """A search for the best rows of all queries together: pairs of row and query, whose keys are gathered once."""

    def __init__(
        self, best: Best, log: Log, sketches: Sequence[Sketch], select: Selector, options: Options, explain: Explain
    ) -> None:
        self._best, self._log, self._select, self._explain = best, log, select, explain
        bases = {id(sketch.basis): sketch.basis for sketch in sketches}
        projected = {key: Projected.of(best.scaled, basis) for key, basis in bases.items()}
        self._asked = [Asked.of(sketch, projected[id(sketch.basis)]) for sketch in sketches]
        self._largest = max(sketch.largest for sketch in sketches)
        self._rows = sum(len(sketch.row) for sketch in sketches)
        self._seen: Int64[ndarray, " p"] = np.zeros(0, np.int64)
        """Pairs whose alpha was taken, or whose row the condition leaves out: query times rows of the log, plus row."""
        queries = len(best.scaled)
        self._held = max(1, options.budget_bytes // 4 // _PAIR_BYTES)
        """Pairs that may be in memory."""
        self._price = min(max(_FEW_ROWS, self._rows // _GATHER_COST) * queries, self._held)
        """Pairs that may be taken one by one before a scan costs less."""
        self._left = self._price
        self._block = max(1, min(_BLOCK_ROWS, _BLOCK_PAIRS // queries))

    def run(self) -> bool:
        """Whether `best` now holds the best rows of the sketches, too; if not, only a scan tells."""
        if self._best.may_overflow(self._largest):
            return False
        with self._explain.phase("search"):
            if not self._select.grouped and self._all_together():
                return True
            if self._select.grouped or not self._select.everywhere:
                return self._one_by_one()
        return False

    def _all_together(self) -> bool:
        head = max(1, min(_HEAD_ROWS, self._held // (len(self._asked) * len(self._best.scaled))))
        while not self._warm(head):
            if head >= self._rows or self._left <= 0 or head * len(self._asked) * len(self._best.scaled) > 4 * _BLOCK_PAIRS:
                return False
            head *= 8
        return self._finish()

    def _warm(self, head: int) -> bool:
        """Takes the most promising of the first `head` rows of each sketch; whether each query has a cut then."""
        queries = self._best.wanting()
        if not len(queries):
            return True
        bounds = np.concatenate([asked.bounds(0, head)[:, queries] for asked in self._asked])
        rows = np.concatenate([_numbers(asked.sketch, slice(0, head)) for asked in self._asked])
        self._count(len(rows))
        first = max(64, 2 * self._best.k) if self._select.everywhere else max(512, 8 * self._best.k)
        wanted = min(len(rows), max(first, first * head // _HEAD_ROWS), max(1, self._held // len(queries)))
        order = np.argpartition(-bounds, wanted - 1, axis=0)[:wanted]  # NaN comes last, and is looked at in the end
        row, query = rows[order].ravel(), np.broadcast_to(queries, order.shape).ravel()
        self._take(row, query)
        return self._best.bounded or not len(self._best.wanting())

    def _finish(self) -> bool:
        """Takes every pair whose bound is not below the query's k-th best alpha, the largest bounds first."""
        found: list[tuple[ndarray, ndarray, ndarray]] = []
        waiting, many = 0, _MANY_ROWS * len(self._best.scaled)
        for asked in self._asked:
            start, cuts = 0, self._best.cuts(self._largest)[:, 0]
            reach = asked.reach(cuts, self._best.scaled_norm)
            while start < reach:
                stop = min(reach, start + self._block)
                bounds = asked.bounds(start, stop)
                self._count(stop - start)
                at, query = np.divmod(np.flatnonzero(~(bounds < cuts)), len(cuts))
                found.append((_numbers(asked.sketch, start + at), query, bounds[at, query]))
                waiting, start = waiting + len(at), stop
                if waiting > many:
                    found = [self._sift(*map(np.concatenate, zip(*found, strict=True)))]
                    waiting = len(found[0][0])
                    if waiting > self._left:
                        return False
                    many = max(many, 2 * waiting)
                    cuts = self._best.cuts(self._largest)[:, 0]
                    reach = asked.reach(cuts, self._best.scaled_norm)
        if waiting > self._left:
            return False
        if found:
            row, query, bound = map(np.concatenate, zip(*found, strict=True))
            self._take_in_order(row, query, np.zeros_like(row), bound)
        return self._left >= 0

    def _sift(
        self, row: Int64[ndarray, " p"], query: Int64[ndarray, " p"], bound: Float32[ndarray, " p"]
    ) -> tuple[Int64[ndarray, " r"], Int64[ndarray, " r"], Float32[ndarray, " r"]]:
        """Takes the most promising of many pairs, which raises the cuts; returns those that are still not below them."""
        order = _by_promise(query, bound)
        row, query, bound = row[order], query[order], bound[order]
        now = rank_within(query, np.zeros_like(query)) < max(2 * self._best.k, _FIRST_ROWS)
        self._take(row[now], query[now])
        kept = np.flatnonzero(~now & ~(bound < self._best.cuts(self._largest)[query, 0]))
        return row[kept], query[kept], bound[kept]

    def _one_by_one(self) -> bool:
        self._left = self._price
        for asked in self._asked:
            sketch = asked.sketch
            codes = self._codes(sketch)
            places = np.flatnonzero(codes >= 0)
            present = np.flatnonzero(np.bincount(codes[places]))
            self._best.grow(int(present.max(initial=0)) + 1)
            if len(present) * self._best.k * len(self._best.scaled) > self._left:
                return False
            for start in range(0, len(places), self._block):
                some = places[start : start + self._block]
                cuts = self._best.cuts(self._largest)
                if some[0] >= asked.reach(cuts[:, present].min(axis=1), self._best.scaled_norm):
                    break
                bounds = asked.bounds_of(some)
                self._count(len(some))
                at, query = np.nonzero(~(bounds < cuts.T[codes[some]]))
                self._take_in_order(_numbers(sketch, some[at]), query, codes[some[at]], bounds[at, query])
                if self._left < 0:
                    return False
        return True

    def _codes(self, sketch: Sketch) -> Int64[ndarray, " n"]:
        """The group of each row of a sketch; -1 where the condition leaves it out."""
        codes = np.full(len(sketch.row), -1)
        for groups in self._log.chunks(RUN_ROWS, self._log.between(sketch.first, sketch.end)):
            selection = self._select(groups[0].part.mapping, groups)
            at = groups[0].first - sketch.first
            rows = slice(0, sum(group.rows for group in groups)) if selection.rows is None else selection.rows
            codes[at:][rows] = 0 if selection.codes is None else selection.codes
        ordered: ndarray = codes[sketch.row]
        return ordered

    def _take_in_order(
        self, row: Int64[ndarray, " p"], query: Int64[ndarray, " p"], code: Int64[ndarray, " p"], bound: Float32[ndarray, " p"]
    ) -> None:
        """Takes pairs of row and query by falling bound for as long as it is not below the cut of query and group."""
        bound = np.where(np.isnan(bound), np.float32(np.inf), bound)
        groups = int(code.max(initial=0)) + 1
        order = _by_promise(query * groups + code, bound)
        row, query, code, bound = row[order], query[order], code[order], bound[order]
        place, start = rank_within(query, code), 0
        size = max(2 * self._best.k, _FIRST_ROWS // groups)
        while self._left >= 0:
            now = (place >= start) & (place < start + size) & (bound >= self._best.cuts(self._largest)[query, code])
            if not now.any():
                break
            self._take(row[now], query[now], code[now] if self._select.grouped else None)
            start, size = start + size, 4 * size

    def _take(self, rows: Int64[ndarray, " p"], queries: Int64[ndarray, " p"], codes: Int64[ndarray, " p"] | None = None) -> None:
        """Ranks those of some pairs that are new and selected; where groups are given, all are selected."""
        pairs = queries * self._log.rows + rows
        new = ~np.isin(pairs, self._seen, assume_unique=True)  # each pair is brought once; to look is slow
        self._seen = np.concatenate([self._seen, pairs[new]])
        rows, queries = rows[new], queries[new]
        self._left -= len(rows)
        some, first, member = np.unique(rows, return_index=True, return_inverse=True)
        if codes is None:
            chosen = self._select.among(self._log, some)
            if chosen is not None:
                kept = chosen[member]
                queries, some, member = queries[kept], some[chosen], (np.cumsum(chosen) - 1)[member[kept]]
            codes = np.zeros(len(some), np.int64)
        else:
            codes = codes[new][first]
        self._explain.rows_read += len(some)
        self._best.add_rows(self._log, some, member, queries, codes)

    def _count(self, rows: int) -> None:
        self._explain.count("rows_bounded", rows)
        self._explain.index_bytes += rows * self._asked[0].sketch.row_bytes


def _numbers(sketch: Sketch, some: slice | ndarray) -> Int64[ndarray, " n"]:
    """Row numbers in the log of some rows of a sketch."""
    return sketch.first + sketch.row[some].astype(np.int64)


def _by_promise(group: Int64[ndarray, " p"], bound: Float32[ndarray, " p"]) -> Int64[ndarray, " p"]:
    """Orders by group, and by falling bound within; NaN counts as infinite.

    The bits of floats are ordered as they are, but for the sign; sorting one whole number is several times as fast as two keys.
    """
    bits = np.where(np.isnan(bound), np.float32(np.inf), bound).view(np.int32).astype(np.int64)
    rising = np.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    order: ndarray = np.argsort((group << 32) - rising)
    return order

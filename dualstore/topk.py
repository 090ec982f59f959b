"""The patterns with the largest alpha for each query and group: by a search of the sketches, or one scan for all queries.

The answer is exact although most products are taken in single precision, or not at all: a row is dropped only when a bound
of its alpha (its fast product and the bound of that product's rounding error, or what its sketch says) stays below the k-th
best exact value; all others are computed again by `kernels.exact_dots` and ranked by that value alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from dualstore.explain import Explain
from dualstore.kernels import dots, error_bound, exact_dots
from dualstore.log import Group, Log, Mapping
from dualstore.part import upper_norm
from dualstore.rows import Select, Selection, Selector
from dualstore.scan import Options, Piece, block_rows_of, computed, pieces
from dualstore.shapes import Bool, Float, Float64, Int64
from dualstore.sketch import Asked, Projected, Sketch

__all__ = ["Ranking", "top_k"]

_HEAD_ROWS = 512
"""Rows of each sketch, of the largest norms, that a search begins with."""
_FIRST_ROWS = 256
"""Rows of each query that are read together first; then four times as many."""
_BLOCK_ROWS = 16_384
"""Rows that are bounded at once."""
_GATHER_COST = 16
"""How many times dearer than in a scan a row is that is read alone."""
_FEW_ROWS = 4096
"""Rows that are read alone without asking for the price."""

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
    sketches: Sequence[Sketch] = (),
    explain: Explain | None = None,
) -> Ranking:
    """The k patterns with the largest (or smallest) alpha for each query and group; fewer where there are fewer.

    Order: alpha, then step, sample_id, position, then place in the log. Rows whose alpha is NaN are not ranked.
    Sketches, of any of the log's runs, save reading most keys; where they would not, everything is scanned.
    Memory: the budget plus some 2 k rows of numbers for each query and group.
    """
    options, sign = options or Options(), 1.0 if largest else -1.0
    explain = explain or Explain(queries.shape[1] * queries.itemsize, log.rows)
    signed = queries if largest else -queries
    if sketches and not select.grouped:
        best = _Best(signed, k, options)
        if sum(len(sketch.row) for sketch in sketches) < log.rows:
            _scan(best, log, _Outside(select, sketches), options, explain)
        if _Search(best, log, sketches, select, explain).run():
            return best.ranking(sign)
        explain.count("searches given up", 1)
    best = _Best(signed, k, options)
    _scan(best, log, select, options, explain)
    return best.ranking(sign)


class _Outside:
    """Selects, of the rows that `select` chooses, those of runs that have no sketch."""

    def __init__(self, select: Select, sketches: Sequence[Sketch]) -> None:
        self._select, self._known = select, {sketch.first for sketch in sketches}

    def __call__(self, mapping: Mapping, groups: Sequence[Group]) -> Selection:
        if groups[0].first in self._known:
            return Selection(np.zeros(0, np.int64), None)
        return self._select(mapping, groups)


def _scan(best: "_Best", log: Log, select: Select, options: Options, explain: Explain) -> None:
    def products(piece: Piece) -> tuple[float | None, ndarray | None]:
        norm = _norm(piece)
        return norm, None if norm is None else piece.chosen(dots(piece.keys, best.scaled))

    queries = best.scaled
    # The keys if they have to be decoded; scores, cuts, hits, and the (row, query) pairs of the hits.
    row_bytes = queries.shape[1] * queries.itemsize + len(queries) * (2 * queries.itemsize + 25)
    block_rows = block_rows_of(options.budget_bytes * 3 // 4, row_bytes, options.threads)
    with explain.phase("scan"):
        for piece, (norm, scores) in computed(pieces(log, select, block_rows), products, options.threads):
            explain.rows_read += len(piece.keys)
            if norm is None or scores is None or best.may_overflow(norm):
                best.add_all(piece)
            else:
                best.offer(piece, scores, norm)


def _norm(piece: Piece) -> float | None:
    """A bound of the norms of the piece's keys; None where they overflow or are not finite."""
    if piece.group.max_norm is not None:
        return piece.group.max_norm
    with np.errstate(over="ignore", invalid="ignore"):
        return upper_norm(float(np.vecdot(piece.keys, piece.keys).max()), piece.keys.shape[1])


class _Search:
    """The search of sketches for the best rows: bounds for all that a norm does not rule out, exact alphas in their order.

    All queries go together: pairs of row and query, whose keys are gathered once.
    """

    def __init__(self, best: "_Best", log: Log, sketches: Sequence[Sketch], select: Selector, explain: Explain) -> None:
        self._best, self._log, self._select, self._explain = best, log, select, explain
        bases = {id(sketch.basis): sketch.basis for sketch in sketches}
        projected = {key: Projected.of(best.scaled, basis) for key, basis in bases.items()}
        self._asked = [Asked.of(sketch, projected[id(sketch.basis)]) for sketch in sketches]
        self._largest = max(sketch.largest for sketch in sketches)
        self._rows = sum(len(sketch.row) for sketch in sketches)
        self._seen: Int64[ndarray, " p"] = np.zeros(0, np.int64)
        """Pairs whose alpha was taken, or whose row the condition leaves out: query times rows of the log, plus row."""
        self._budget = max(_FEW_ROWS, self._rows // _GATHER_COST) * len(best.scaled)
        """Pairs that may be taken one by one before a scan costs less."""

    def run(self) -> bool:
        """Whether `best` now holds the best rows of the sketches, too; if not, only a scan tells."""
        if self._best.may_overflow(self._largest):
            return False
        with self._explain.phase("search"):
            head = _HEAD_ROWS
            while not self._warm(head):
                if head >= self._rows or self._budget <= 0:
                    return False
                head *= 8
            return self._finish()

    def _warm(self, head: int) -> bool:
        """Takes the most promising of the first `head` rows of each sketch; whether each query has its k rows then."""
        queries = np.flatnonzero(np.isneginf(self._best.cuts()))
        if not len(queries):
            return True
        bounds = np.concatenate([asked.bounds(0, head)[:, queries] for asked in self._asked])
        rows = np.concatenate([_numbers(asked.sketch, slice(0, head)) for asked in self._asked])
        self._count(len(rows))
        first = max(64, 2 * self._best.k) if self._select.everywhere else max(512, 8 * self._best.k)
        wanted = min(len(rows), first * head // _HEAD_ROWS)
        order = np.argpartition(-bounds, wanted - 1, axis=0)[:wanted]  # NaN comes last, and is looked at in the end
        self._take(rows[order].ravel(), np.broadcast_to(queries, order.shape).ravel())
        return not np.isneginf(self._best.cuts()).any()

    def _finish(self) -> bool:
        """Takes every pair whose bound is not below the query's k-th best alpha, the largest bounds first."""
        cuts = self._best.cuts(self._largest)
        found: list[tuple[ndarray, ndarray, ndarray]] = []
        left = self._budget
        for asked in self._asked:
            reach = asked.reach(cuts, self._best.scaled_norm)
            for start in range(0, reach, _BLOCK_ROWS):
                stop = min(reach, start + _BLOCK_ROWS)
                bounds = asked.bounds(start, stop)
                self._count(stop - start)
                at, query = np.divmod(np.flatnonzero(~(bounds < cuts)), len(cuts))
                left -= len(at)
                if left < 0:
                    return False
                found.append((_numbers(asked.sketch, start + at), query, bounds[at, query]))
        if found:
            row, query, bound = map(np.concatenate, zip(*found, strict=True))
            bound = np.where(np.isnan(bound), np.inf, bound)
            order = np.lexsort((-bound, query))
            row, query, bound = row[order], query[order], bound[order]
            place, start, size = _rank(query, np.zeros_like(query)), 0, _FIRST_ROWS
            while True:
                now = (place >= start) & (place < start + size) & (bound >= self._best.cuts(self._largest)[query])
                if not now.any():
                    break
                self._take(row[now], query[now])
                start, size = start + size, 4 * size
        return True

    def _take(self, rows: Int64[ndarray, " p"], queries: Int64[ndarray, " p"]) -> None:
        """Ranks those of some pairs that are new and selected."""
        pairs = queries * self._log.rows + rows
        new = ~np.isin(pairs, self._seen)
        self._seen = np.concatenate([self._seen, pairs[new]])
        rows, queries = rows[new], queries[new]
        self._budget -= len(rows)
        some, member = np.unique(rows, return_inverse=True)
        chosen = self._select.among(self._log, some)
        if chosen is not None:
            kept = chosen[member]
            queries, some, member = queries[kept], some[chosen], (np.cumsum(chosen) - 1)[member[kept]]
        self._explain.rows_read += len(some)
        self._best.add_rows(self._log, some, member, queries)

    def _count(self, rows: int) -> None:
        self._explain.count("rows_bounded", rows)
        self._explain.index_bytes += rows * self._asked[0].sketch.row_bytes


def _numbers(sketch: Sketch, some: slice | ndarray) -> Int64[ndarray, " n"]:
    """Row numbers in the log of some rows of a sketch."""
    return sketch.first + sketch.row[some].astype(np.int64)


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
        self._queries, self.k = queries, k
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
        self._kth: Float64[ndarray, "m g"] = np.full((len(queries), 1), -np.inf)

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

    def _cuts(self, scores: Float[ndarray, "n m"], norm: float) -> Float64[ndarray, " m"]:
        error, behind = self._error(norm), len(scores) - self.k
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
        self._rank(_Rows(*(field[wanted] for field in new._replace(value=values))))

    def _rank(self, new: _Rows) -> None:
        """Ranks rows among the best."""
        rows = _Rows(*map(np.concatenate, zip(self._kept, new, strict=True)))
        order = np.lexsort((rows.row, rows.position, rows.sample, rows.step, -rows.value, rows.code, rows.query))
        order = order[_rank(rows.query[order], rows.code[order]) < self.k]
        self._kept = rows = _Rows(*(field[order] for field in rows))
        last = _rank(rows.query, rows.code) == self.k - 1
        self._kth[rows.query[last], rows.code[last]] = rows.value[last]

    def add_rows(self, log: Log, rows: Int64[ndarray, " u"], member: Int64[ndarray, " p"], queries: Int64[ndarray, " p"]) -> None:
        """Ranks pairs of a query and one of some rows of the log, without groups. Reads each row once."""
        if self._pending:
            self._merge()
        each = max(1, self._pairs // 2)
        order = np.argsort(member, kind="stable")
        best: list[tuple[ndarray, ndarray, ndarray]] = []
        for start in range(0, len(rows), each):
            low, high = np.searchsorted(member, [start, start + each], sorter=order)
            keys, mine = log.take(["x"], rows[start : start + each])["x"], order[low:high]
            mine = mine[self._near(keys, member[mine] - start, queries[mine])]
            for some in np.split(mine, range(self._pairs, len(mine), self._pairs)):
                values = exact_dots(keys[member[some] - start], self._queries[queries[some]])
                wanted = np.flatnonzero(values >= self._kth[queries[some], 0])  # false for NaN
                best.append((values[wanted], member[some[wanted]], queries[some[wanted]]))
        if best:
            value, at, query = map(np.concatenate, zip(*best, strict=True))
            found = log.take(["step", "sample_id", "position"], rows[at])
            step, sample, position = (found[name] for name in ("step", "sample_id", "position"))
            self._rank(_Rows(query, np.zeros_like(query), value, step, sample, position, rows[at]))

    def _near(
        self, keys: Float[ndarray, "c d"], member: Int64[ndarray, " p"], queries: Int64[ndarray, " p"]
    ) -> Int64[ndarray, " n"]:
        """Which pairs of key and query have a fast product that is not below the query's cut."""
        with np.errstate(over="ignore", invalid="ignore"):
            norm = upper_norm(float(np.vecdot(keys, keys).max(initial=0.0)), keys.shape[1])
            if norm is None or self.may_overflow(norm):
                return np.arange(len(member))
            cuts = self._kth[:, 0] * self._scale - self._error(norm)
            return np.flatnonzero(~(dots(keys, self.scaled)[member, queries].astype(np.float64) < cuts[queries]))

    def cuts(self, norm: float = 0.0) -> Float64[ndarray, " m"]:
        """The k-th best alpha of each query, without groups, as that of the scaled query; -inf where there are fewer.

        Less what keys up to a norm may have lost of their alpha by underflow.
        """
        if self._pending:
            self._merge()
        cuts: ndarray = self._kth[:, 0] * self._scale - self._tiny * (1 + norm)
        return cuts

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

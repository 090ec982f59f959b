"""The patterns with the largest alpha for each query and group: by a search of the sketches, or one scan for all queries.

The answer is exact although most products are taken in single precision, or not at all: see `best`.
"""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from dualstore.best import Best, Ranking, rank_within
from dualstore.explain import Explain
from dualstore.kernels import dots
from dualstore.log import Group, Log, Mapping
from dualstore.part import upper_norm
from dualstore.rows import Select, Selection, Selector
from dualstore.scan import Options, Piece, block_rows_of, computed, pieces
from dualstore.scores import Score, Traced
from dualstore.search import Search
from dualstore.shapes import Float
from dualstore.sketch import Sketch

__all__ = ["top_k"]


def top_k(
    log: Log,
    queries: Float[ndarray, "m d"],
    k: int,
    select: Selector,
    *,
    largest: bool = True,
    magnitude: bool = False,
    floor: float | None = None,
    options: Options | None = None,
    sketches: Sequence[Sketch] = (),
    score: Score | Traced | None = None,
    explain: Explain | None = None,
) -> Ranking:
    """The k patterns with the largest (or smallest) alpha for each query and group; fewer where there are fewer.

    Where a score is given it takes the place of alpha, and everything is scanned.

    With `magnitude`, those with the largest |alpha|; alpha keeps its sign. With a floor, only those whose alpha, or |alpha|,
    is at least that. Order: alpha, then step, sample_id, position, then place in the log. Rows whose alpha is NaN are not
    ranked. Sketches, of any segments of the log, save reading most keys; where they would not, everything is scanned.
    Memory: the budget plus some 2 k rows of numbers for each query and group.
    """
    assert largest or not (magnitude or floor is not None)
    options = options or Options()
    explain = explain or Explain(queries.shape[1] * queries.itemsize, log.rows)
    asked = np.concatenate([queries, -queries]) if magnitude else queries if largest else -queries
    score = None if score is None else score.ranked(largest=largest, magnitude=magnitude)
    best = _best(asked, k, options, floor, magnitude, score)
    searched = False
    if sketches and score is None:
        if sum(len(sketch.row) for sketch in sketches) < log.rows:
            _scan(best, log, _Outside(select, sketches), options, explain)
        searched = Search(best, log, sketches, select, options, explain).run()
        if not searched:
            explain.count("searches given up", 1)
    if not searched:
        best = _best(asked, k, options, floor, magnitude, score)
        if isinstance(score, Traced):
            _scan_traced(best, log, select, options, explain, score)
        else:
            _scan(best, log, select, options, explain, score)
    found = best.ranking(1.0 if largest else -1.0)
    return _folded(log, found, k, len(queries)) if magnitude else found


def _best(
    asked: Float[ndarray, "m d"], k: int, options: Options, floor: float | None, paired: bool, score: Score | Traced | None
) -> Best:
    return Best(asked, k, options, floor, paired=paired, score=score if isinstance(score, Score) else None)


def _scan_traced(best: Best, log: Log, select: Select, options: Options, explain: Explain, score: Traced) -> None:
    block_rows = block_rows_of(options.budget_bytes, 64 * len(score.columns), 1)
    with explain.phase("scan"):
        for piece in pieces(log, select, block_rows):
            explain.rows_read += len(piece.local)  # by the trace
            best.offer_traced(piece, score.all_of(piece))


def _folded(log: Log, both: Ranking, k: int, queries: int) -> Ranking:
    """The rows with the largest |alpha| from those with the largest alpha of some queries and of their negatives."""
    query, negative = both.query % queries, both.query >= queries
    kept = (both.alpha > 0) | ((both.alpha == 0) & ~negative)
    query, negative, code, row, size = (values[kept] for values in (query, negative, both.code, both.row, both.alpha))
    found = log.take(["step", "sample_id", "position"], row)
    order = np.lexsort((row, found["position"], found["sample_id"], found["step"], -size, code, query))
    rank = rank_within(query[order], code[order])
    order, rank = order[rank < k], rank[rank < k]
    alpha = np.where(negative[order], -size[order], size[order])
    return Ranking(query[order], code[order], rank + 1, row[order], alpha)


class _Outside:
    """Selects, of the rows that `select` chooses, those of row groups that have no sketch."""

    def __init__(self, select: Select, sketches: Sequence[Sketch]) -> None:
        self._select = select
        self._firsts = np.array([sketch.first for sketch in sketches])
        self._ends = np.array([sketch.end for sketch in sketches])

    def __call__(self, mapping: Mapping, groups: Sequence[Group]) -> Selection:
        outside = [not self._covers(group) for group in groups]
        if not any(outside):
            return Selection(np.zeros(0, np.int64), None)
        found = self._select(mapping, groups)
        return found if all(outside) else found.within(np.repeat(outside, [group.rows for group in groups]))

    def _covers(self, group: Group) -> bool:
        at = np.searchsorted(self._firsts, group.first, side="right") - 1
        return bool(at >= 0 and group.first < self._ends[at])


def _scan(best: Best, log: Log, select: Select, options: Options, explain: Explain, score: Score | None = None) -> None:
    def products(piece: Piece) -> tuple[float | None, ndarray | None]:
        norm = _norm(piece)
        return norm, None if norm is None else piece.chosen(dots(piece.keys, best.scaled))

    queries = best.scaled
    # The keys if they have to be decoded; scores, cuts, hits, and the (row, query) pairs of the hits.
    row_bytes = queries.shape[1] * queries.itemsize + len(queries) * (2 * queries.itemsize + 25)
    if score is not None:  # the errors; estimates, what they may be off, and what comes of both, in double precision
        row_bytes += next(column.as_read.row_bytes for column in log.columns if column.name == "e") + len(queries) * 64
    block_rows = block_rows_of(options.budget_bytes * 3 // 4, row_bytes, options.threads)
    with explain.phase("scan"):
        for piece, (norm, scores) in computed(pieces(log, select, block_rows, errors=score is not None), products, options.threads):
            explain.rows_read += len(piece.keys)
            if norm is None or scores is None or best.may_overflow(norm):
                best.add_all(piece)
            elif score is not None:
                best.offer_valued(piece, scores, norm)
            else:
                best.offer(piece, scores, norm)


def _norm(piece: Piece) -> float | None:
    """A bound of the norms of the piece's keys; None where they overflow or are not finite."""
    if piece.group.max_norm is not None:
        return piece.group.max_norm
    with np.errstate(over="ignore", invalid="ignore"):
        return upper_norm(float(np.vecdot(piece.keys, piece.keys).max()), piece.keys.shape[1])

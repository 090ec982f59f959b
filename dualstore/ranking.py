"""The patterns with the largest or smallest alpha, as an answer."""

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy import ndarray
from numpy.typing import ArrayLike

from dualstore.best import Ranking
from dualstore.errors import QueryError
from dualstore.explain import Explain
from dualstore.kernels import exact_dots
from dualstore.log import Log
from dualstore.probes import Queries
from dualstore.rates import sample_note
from dualstore.result import Result
from dualstore.rows import SHOWN_COLUMNS, Selector
from dualstore.schema import Layer
from dualstore.scores import Score, Traced
from dualstore.scoring import check_score, check_step, explained, find_score
from dualstore.sketch import read_sketches
from dualstore.topk import top_k

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["rank_patterns"]

_BLOCK_ROWS = 1024


def rank_patterns(
    store: "Store",
    layer: Layer,
    queries: Queries,
    *,
    top: int,
    bottom: bool,
    absolute: bool,
    min_alpha: Any,
    where: str | None,
    per: str | None,
    score: str,
    output: Any,
    gradient: ArrayLike | None,
    at_step: Any,
    pool: str | None,
) -> Result:
    """See `Store.query`."""
    if isinstance(top, bool) or not isinstance(top, int | np.integer) or top < 1:
        raise QueryError(f"top: expected a whole number of at least 1, found {top!r}")
    if bottom and (absolute or min_alpha is not None):
        raise QueryError("bottom: expected without absolute and min_alpha; ask sql for the relation `attention` instead")
    floor = None if min_alpha is None else _number(min_alpha)
    until = check_step(store, at_step)
    check_score(score, output, gradient)
    if score != "attention" and floor is not None:
        raise QueryError(f"min_alpha: expected with the score attention only, found {score}")
    select = Selector(store.labelling, where, per, until)
    pooled = queries if pool is None else queries.pooled(pool)
    valued = find_score(store, layer, queries, score, output, gradient, until, pool)  # last: it may replay the training
    queries = pooled
    index = store.index(layer, queries.tokens)
    log = index.log
    explain = Explain(log.key_bytes, log.rows)
    ranking = top_k(
        log,
        queries.vectors,
        int(top),
        select,
        largest=not bottom,
        magnitude=absolute,
        floor=floor,
        options=store.options,
        sketches=read_sketches(index, layer.d_in) if valued is None and layer.keys == "vector" else (),
        score=valued,
        explain=explain,
    )
    rows = store.labelling.take(log, ranking.row)
    columns: dict[str, Any] = {}
    if queries.column is not None:
        columns[queries.column] = queries.names[ranking.query]
    if per is not None and per.strip() not in SHOWN_COLUMNS:
        columns["group"] = pa.array([select.values[code] for code in ranking.code], select.value_type)
    columns |= {"rank": ranking.rank}
    columns |= {"alpha": ranking.alpha} if valued is None else _valued(log, queries, valued, ranking)
    columns |= {name: rows.column(name) for name in SHOWN_COLUMNS}
    columns["task"] = pa.array(rows.column("task").to_pylist(), pa.string())
    table = _by_group(pa.table(columns), ranking.query, per, select.values, ranking.code)
    by = "alpha" if valued is None else score
    shown = f"{'bottom' if bottom else 'top'} {top}" + (f" by |{by}|" if absolute else "" if valued is None else f" by {by}")
    shown += (f" per {per}" if per else "") + (f" where {where}" if where else "")
    shown += ("" if floor is None else f", at least {floor:g}") + ("" if until is None else f", after step {until}")
    notes: list[str] = []
    if valued is not None:
        sums = np.bincount(ranking.query, ranking.alpha, len(queries.vectors))
        notes = explained(store, layer, queries, valued, sums.tolist(), until)
    notes += sample_note([(layer, store.rates(layer))], "of the recorded patterns, which are a share of all")
    return Result(table, f"{shown} of {log.rows:,} patterns: {queries.title}", explain, notes)


def _valued(log: Log, queries: Queries, score: Score | Traced, ranking: Ranking) -> dict[str, ndarray]:
    """The score of ranked rows, alpha and, where the score is the product of alpha and a value, that value."""
    alpha, value = np.empty(len(ranking.row)), np.empty(len(ranking.row))
    for start in range(0, len(ranking.row), _BLOCK_ROWS):
        some = slice(start, start + _BLOCK_ROWS)
        found, asked = log.take(["step", "x", "e"], ranking.row[some]), ranking.query[some]
        alpha[some] = exact_dots(found["x"], queries.vectors[asked])
        if isinstance(score, Score):
            value[some] = score.values(found["step"], found["e"], asked)
    return {score.name: ranking.alpha, "alpha": alpha} | ({"value": value} if isinstance(score, Score) else {})


def _number(given: Any) -> float:
    if isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool):
        with suppress(OverflowError):
            if math.isfinite(given):
                return float(given)
    raise QueryError(f"min_alpha: expected a finite number, found {given!r}")


def _by_group(table: pa.Table, query: Any, per: str | None, values: list[Any], codes: Any) -> pa.Table:
    """Groups in the order of their values, NaN and NULL last; `top_k` numbers them as they appear."""
    if per is None:
        return table
    ordered = sorted(range(len(values)), key=lambda code: (values[code] is None, values[code] != values[code], values[code]))
    place = {code: rank for rank, code in enumerate(ordered)}
    order = np.lexsort((np.arange(len(codes)), np.array([place[code] for code in codes], np.int64), query))
    return table.take(pa.array(order))

"""The patterns with the largest or smallest alpha, as an answer."""

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dualstore.errors import QueryError
from dualstore.explain import Explain
from dualstore.probes import Queries
from dualstore.result import Result
from dualstore.rows import ROW_COLUMNS, Selector
from dualstore.schema import Layer
from dualstore.sketch import read_sketches
from dualstore.topk import top_k

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["rank_patterns"]


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
) -> Result:
    """See `Store.query`."""
    if isinstance(top, bool) or not isinstance(top, int | np.integer) or top < 1:
        raise QueryError(f"top: expected a whole number of at least 1, found {top!r}")
    if bottom and (absolute or min_alpha is not None):
        raise QueryError("bottom: expected without absolute and min_alpha; ask sql for the relation `attention` instead")
    floor = None if min_alpha is None else _number(min_alpha)
    select = Selector(store.labelling, where, per)
    index = store.index(layer)
    log = index.log
    explain = Explain(layer.d_in * queries.vectors.itemsize, log.rows)
    ranking = top_k(
        log,
        queries.vectors,
        int(top),
        select,
        largest=not bottom,
        magnitude=absolute,
        floor=floor,
        options=store.options,
        sketches=read_sketches(index, layer.d_in),
        explain=explain,
    )
    rows = store.labelling.take(log, ranking.row)
    columns: dict[str, Any] = {}
    if queries.column is not None:
        columns[queries.column] = queries.names[ranking.query]
    if per is not None and per.strip() not in ROW_COLUMNS:
        columns["group"] = pa.array([select.values[code] for code in ranking.code], select.value_type)
    columns |= {"rank": ranking.rank, "alpha": ranking.alpha}
    columns |= {name: rows.column(name) for name in ROW_COLUMNS}
    columns["task"] = pa.array(rows.column("task").to_pylist(), pa.string())
    table = _by_group(pa.table(columns), ranking.query, per, select.values, ranking.code)
    shown = f"{'bottom' if bottom else 'top'} {top}" + (" by |alpha|" if absolute else "") + (f" per {per}" if per else "")
    shown += (f" where {where}" if where else "") + ("" if floor is None else f", at least {floor:g}")
    return Result(table, f"{shown} of {log.rows:,} patterns: {queries.title}", explain)


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

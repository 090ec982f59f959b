"""Sums of alpha over groups of patterns."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy import ndarray
from numpy.typing import ArrayLike

from dualstore.errors import QueryError
from dualstore.explain import Explain
from dualstore.probes import Queries
from dualstore.rates import Rates, check_whole, sample_note
from dualstore.repeats import Alphas
from dualstore.result import Result
from dualstore.rows import Labelling, Select, Selector
from dualstore.scan import RUN_ROWS, block_rows_of, pieces
from dualstore.schema import Layer
from dualstore.scores import Score, Traced
from dualstore.scoring import check_score, check_step, explained, find_score, own_values
from dualstore.shapes import Bool, Float64
from dualstore.sums import Cells, Rest, read_cells

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["Wholes", "attention", "sum_groups", "sum_self"]

_OF_CELLS = (("label", "task"), ("epoch", "label", "task"), ("step", "epoch", "label", "task"))
"""Columns that rows of a cell share, or that its steps have; the fewest that a question is written in are used."""
_ROWS_PER_STEP = 4
"""Steps of cells are looked at one by one where their rows are so many times more."""
_HELD_BYTES = 32 << 20
"""So many bytes of the budget allow one query in a pass: half of them is what `Alphas` may hold."""


def attention(
    store: "Store",
    layer: Layer,
    queries: Queries,
    select: Select,
    explain: Explain | None = None,
    score: Score | Traced | None = None,
) -> Iterator[tuple[int, pa.Table]]:
    """Row columns and alpha of every selected pattern, a few thousand at a time, in the order of the log; and its score, if given.

    With several queries so many of these for each piece of the log, each with the number of its query; as many queries as the
    budget allows share a pass. All have the same bits as in a ranking. Held beside some pieces: what `Alphas` holds, for each
    query of a pass.
    """
    index, at_once, threads = store.index(layer, queries.tokens), _at_once(store), store.options.threads
    row_bytes = queries.vectors[:1].nbytes + 8 * min(at_once, len(queries.vectors))
    row_bytes += 0 if score is None else 2 * layer.d_out * queries.vectors.itemsize
    block_rows = block_rows_of(store.options.budget_bytes // 2, row_bytes, threads)
    for first in range(0, len(queries.vectors), at_once):
        alphas = Alphas(index, queries.vectors[first : first + at_once])
        for piece, found in alphas.over(pieces(index.log, select, block_rows, errors=score is not None), threads):
            rows = store.labelling.of_group(piece.mapping, piece.group).take(pa.array(piece.local))
            for number, alpha in enumerate(found, first):
                each = rows.append_column("alpha", pa.array(alpha))
                if score is not None:
                    each = each.append_column(score.name, pa.array(score.one(number).of(piece, alpha)))
                yield number, each
        if explain is not None:
            explain.rows_read += alphas.keys_read
            explain.index_bytes += alphas.index_bytes


def _at_once(store: "Store") -> int:
    """Queries that share a pass over the log."""
    return max(1, store.options.budget_bytes // _HELD_BYTES)


def sum_groups(
    store: "Store",
    asked: Sequence[tuple[Layer, Queries]],
    *,
    by: str,
    where: str | None,
    absolute: bool,
    score: str,
    output: Any,
    gradient: ArrayLike | None,
    at_step: Any,
    pool: str | None,
) -> Result:
    """See `Store.totals`. Where several layers are asked, by influence, the sum over them."""
    until = check_step(store, at_step)
    check_score(score, output, gradient)
    single, asked = asked, asked if pool is None else [(layer, queries.pooled(pool)) for layer, queries in asked]
    layer, queries = asked[0]
    from dualstore.database import Database  # DuckDB is slow to start

    select = Selector(store.labelling, where, None, until)
    name = queries.column or ""
    measure = "alpha" if score == "attention" else score
    keys = ", ".join(part for part in (name, by) if part)
    summed = f"abs({measure})" if absolute else measure
    rates = [store.rates(layer) for layer, _ in asked]
    sampled = any(found is not None for found in rates)
    summed += " / _rate" if sampled else ""
    database = Database(threads=store.options.threads)
    sums = _Sums(database, keys, f"coalesce(fsum({summed}), 0) AS total, CAST(coalesce(sum(_rows), 0) AS BIGINT) AS count")
    none = store.labelling.empty()
    for column in dict.fromkeys(("alpha", measure)):
        none = none.append_column(column, pa.array([], pa.float64()))
    none = _named(_rated(none, rates[0], sampled), name, 0)
    # An aggregate alone makes a row of none; one beside columns is refused by `select`.
    if by.strip() and (database.select(none, None, by).num_rows or database.has_window(by)):
        raise QueryError(f"expression {by!r}: expected values of a row by itself, found an aggregate or a window")
    if by.strip():
        database.check_stable(by, f"expression {by!r}")
    sums.add(none)
    # Last of what may be refused: it may replay the training.
    scores = [find_score(store, layer, queries, score, output, gradient, until, pool) for layer, queries in single]
    valued = scores[0]
    passes = math.ceil(len(queries.vectors) / _at_once(store)) * len(asked)
    explain = Explain(store.patterns(layer).key_bytes, store.patterns(layer).rows * passes)
    rest = Rest(select)
    if valued is None and layer.keys == "vector" and (not absolute or _one_signed(queries.vectors)):
        wholes = Wholes(database, store.labelling, select.where, by)
        for cells in read_cells(store.index(layer), layer.d_in) if wholes.possible else ():
            with explain.phase("index"):
                alphas, taken = _take(cells, wholes, rest, queries.vectors, rates[0], absolute=absolute)
                explain.index_bytes += cells.nbytes
                explain.count("cells", len(cells))
                rows = store.labelling.build(cells.step_first, cells.label, cells.task).filter(pa.array(taken))
                counts = pa.array(cells.count[taken])
                for index, number in enumerate(queries.names):
                    each = rows.append_column("alpha", pa.array(alphas[taken, index]))
                    sums.add(_named(_rated(each, rates[0], sampled), name, number), counts)
    with explain.phase("scan"):
        for (layer, queries), valued, rate in zip(asked, scores, rates, strict=True):
            for index, rows in attention(store, layer, queries, rest, explain, valued):
                sums.add(_named(_rated(rows, rate, sampled), name, queries.names[index]))
    with explain.phase("group"):
        table = sums.result(name)
    total = f"|{measure}|" if absolute else measure
    shown = (
        ("estimated " if sampled else "") + f"sum of {total}" + (f" by {by}" if by else "") + (f" where {where}" if where else "")
    )
    shown += "" if until is None else f", after step {until}"
    notes = [] if valued is None else explained(store, layer, queries, valued, None, until)
    layers = [layer for layer, _ in asked]
    notes += sample_note(list(zip(layers, rates, strict=True)), "estimated from a recorded share of the patterns")
    titles = "; ".join(queries.title for _, queries in asked)
    return Result(table, f"{shown}: {titles}", explain, notes)


def sum_self(store: "Store", layers: Sequence[Layer], *, top: int, where: str | None, at_step: Any) -> Result:
    """See `Store.self_influence`."""
    from dualstore.database import Database  # DuckDB is slow to start

    if isinstance(top, bool) or not isinstance(top, int | np.integer) or top < 1:
        raise QueryError(f"top: expected a whole number of at least 1, found {top!r}")
    until = check_step(store, at_step)
    database = Database(threads=store.options.threads)
    measures = "coalesce(fsum(own), 0) AS total, CAST(coalesce(sum(_rows), 0) AS BIGINT) AS count"
    sums = _Sums(database, "sample_id", measures)
    sums.add(store.labelling.empty().append_column("own", pa.array([], pa.float64())))
    explain = Explain(0, 0)
    for layer in layers:
        check_whole(store.path, layer, store.rates(layer), inexact=store.inexact)
    with explain.phase("scan"):
        for layer in layers:
            own = own_values(store, layer, until)
            select = Selector(store.labelling, where, None, until)
            block_rows = max(64, store.options.budget_bytes // 8 // (16 * (layer.key_width + layer.d_out)))
            for piece in pieces(store.patterns(layer), select, block_rows, errors=True):
                rows = store.labelling.of_group(piece.mapping, piece.group).take(pa.array(piece.local))
                rates = store.rates(layer)
                found = own(piece) if rates is None else own(piece) / rates.at(piece.steps(slice(None)))
                sums.add(rows.append_column("own", pa.array(found)))
    with explain.phase("group"):
        table = sums.result("")
        order = np.lexsort((table.column("sample_id").to_numpy(), -np.abs(table.column("total").to_numpy())))[:top]
        sample_id, own, count = table.take(pa.array(order)).columns
        label, task = _named_samples(store, layers, sample_id.to_pylist())
        columns = {"sample_id": sample_id, "label": label, "task": task, "self_influence": own, "count": count}
    names = ", ".join(f"{layer.number} ({layer.name})" for layer in layers)
    shown = f"top {top} by self-influence" + (f" where {where}" if where else "")
    shown += "" if until is None else f", after step {until}"
    note = "self_influence = sum of c |x|^2 |e|^2 over a sample's visits: what its own patterns did to the loss of its batch, "
    notes = [note + "to first order; below zero: they lowered it"]
    notes += sample_note([(layer, store.rates(layer)) for layer in layers], "estimated from a recorded share of the patterns")
    return Result(pa.table(columns), f"{shown}: layers {names}", explain, notes)


def _named_samples(store: "Store", layers: Sequence[Layer], samples: Sequence[int]) -> tuple[pa.Array, pa.Array]:
    """Label and task that each sample had at its first visit, at the first layer that it came to."""
    found: dict[int, tuple[int, int, str | None]] = {}
    for layer in layers:
        found = _first_visits(store, layer, [sample for sample in samples if sample not in found]) | found
    visits = [found[sample] for sample in samples]
    return pa.array([label for _, label, _ in visits], pa.int32()), pa.array([task for _, _, task in visits], pa.string())


def _first_visits(store: "Store", layer: Layer, samples: Sequence[int]) -> dict[int, tuple[int, int, str | None]]:
    """Step, label and task of the first visit of each sample that came to a layer."""
    first: dict[int, tuple[int, int, str | None]] = {}
    select = Selector(store.labelling, f"list_contains({list(samples)}, sample_id)", None)
    for groups in store.patterns(layer).chunks(RUN_ROWS) if samples else ():
        mapping = groups[0].part.mapping
        rows = store.labelling.table(mapping, groups).take(pa.array(select(mapping, groups).rows))
        columns = (rows.column(name).to_pylist() for name in ("sample_id", "step", "label", "task"))
        for sample, step, label, task in zip(*columns, strict=True):
            if sample not in first or step < first[sample][0]:  # another rank may have met it earlier
                first[sample] = (step, label, task)
        if len(first) == len(samples) and not store.steps.ranks:
            break
    return first


def _one_signed(queries: ndarray) -> bool:
    """Whether no query has elements of both signs."""
    return bool(((queries >= 0).all(axis=1) | (queries <= 0).all(axis=1)).all())


def _take(
    cells: Cells, wholes: "Wholes", rest: Rest, queries: ndarray, rates: Rates | None, *, absolute: bool
) -> tuple[Float64[ndarray, "c m"], Bool[ndarray, " c"]]:
    """Totals over the cells for each query, and which of them the question takes; `rest` is told what it need not scan."""
    taken, left = wholes(cells)
    alphas = cells.products(queries)
    usable = np.isfinite(alphas).all(axis=1)
    if absolute:  # where all keys have one sign and the query has, too, all alphas have
        usable &= cells.sign != 0
    if rates is not None:
        usable &= rates.even(cells.step_first, cells.step_last)
    taken = taken & usable
    rest.leave_out(cells, taken | left)
    return np.abs(alphas) if absolute else alphas, taken


def _rated(rows: pa.Table, rates: Rates | None, sampled: bool) -> pa.Table:
    """The rows with the rate at which they were recorded, where any rows of the question were sampled."""
    if not sampled:
        return rows
    found = np.ones(rows.num_rows) if rates is None else rates.at(rows.column("step").to_numpy())
    return rows.append_column("_rate", pa.array(found))


def _named(rows: pa.Table, name: str, number: Any) -> pa.Table:
    return rows.append_column(name, pa.array(np.full(rows.num_rows, number, np.int64))) if name else rows


class Wholes:
    """Which cells a condition and a grouping take as a whole, and which they leave."""

    def __init__(self, database: Any, labelling: Labelling, where: str | None, by: str) -> None:
        self._database, self._labelling, self._where, self._by = database, labelling, where, by
        self._columns: Sequence[str] = next((names for names in _OF_CELLS if self._answers(names)), ())

    @property
    def possible(self) -> bool:
        """Whether cells can be told apart at all: not where the question looks at samples, positions or alpha."""
        return bool(self._columns)

    def _answers(self, names: Sequence[str]) -> bool:
        """Whether condition and grouping are written in these columns alone."""
        try:
            self._groups(self._labelling.empty().select(names).append_column("_cell", pa.array([], pa.int64())))
        except QueryError:
            return False
        return True

    def __call__(self, cells: Cells) -> tuple[Bool[ndarray, " c"], Bool[ndarray, " c"]]:
        """Taken, as one group; left, all of its rows. What is neither must be looked at row by row."""
        count = np.ones(len(cells), np.int64)
        if "step" in self._columns:
            count += cells.step_last - cells.step_first
            if count.sum() * _ROWS_PER_STEP > cells.count.sum():
                return np.zeros(len(cells), bool), np.zeros(len(cells), bool)
        cell = np.repeat(np.arange(len(cells)), count)
        step = (cells.step_first[cell] + np.arange(len(cell)) - np.repeat(np.cumsum(count) - count, count)).astype(np.int32)
        rows = self._labelling.build(step, cells.label[cell], cells.task[cell]).select(self._columns)
        try:
            found = self._groups(rows.append_column("_cell", pa.array(cell)))
        except QueryError:  # of a label and step that no row has together; if rows have, the scan says so
            return np.zeros(len(cells), bool), np.zeros(len(cells), bool)
        of_cell = found.column("_cell").to_numpy()
        groups = np.bincount(of_cell, minlength=len(cells))
        chosen = np.bincount(of_cell, found.column("_rows").to_numpy(), len(cells))
        sure = np.ones(len(cells), bool)
        if "epoch" in self._columns and "step" not in self._columns:
            sure = self._labelling.steps.one_epoch(cells.step_first, cells.step_last)
        return sure & (groups == 1) & (chosen == count), sure & (groups == 0)

    def _groups(self, rows: pa.Table) -> pa.Table:
        by = f"_cell, {self._by}" if self._by else "_cell"
        return self._database.aggregate(self._database.select(rows, self._where, "*"), by, "count(*) AS _rows")


class _Sums:
    """Group sums of rows that arrive in pieces; holds one run of rows and one row a group."""

    def __init__(self, database: Any, by: str, measures: str) -> None:
        self._database, self._by, self._measures = database, by, measures
        self._rows: list[pa.Table] = []
        self._sums: list[pa.Table] = []

    def add(self, rows: pa.Table, counts: pa.Array | None = None) -> None:
        """Adds rows, each of which stands for `counts` rows, by default one. The first call checks the expressions."""
        counts = pa.array(np.ones(rows.num_rows, np.int64)) if counts is None else counts
        self._rows.append(rows.append_column("_rows", counts))
        if not self._sums or sum(table.num_rows for table in self._rows) >= RUN_ROWS:
            self._sums.append(self._database.aggregate(pa.concat_tables(self._rows), self._by, self._measures))
            self._rows = []
            if len(self._sums) == 1:
                self._check_names()
            self._sums = [self._merged()] if len(self._sums) > 16 else self._sums

    def _check_names(self) -> None:
        """Looks at the first sums, those of no rows: SQL does not tell names apart by their case."""
        names = [name.lower() for name in self._sums[0].column_names[:-2]]
        if {"total", "count"} & set(names):
            raise QueryError(f"expression {self._by!r}: a group cannot be called total or count")
        if len(set(names)) < len(names):
            raise QueryError(f"expression {self._by!r}: expected groups of different names, found {', '.join(names)}")
        if names:  # constants make a group of no rows
            self._sums[0] = self._sums[0].slice(0, 0)

    def result(self, first: str) -> pa.Table:
        """Group columns, total, count: ordered by the column `first` if there is one, total downwards, groups."""
        if self._rows:
            self._sums.append(self._database.aggregate(pa.concat_tables(self._rows), self._by, self._measures))
        groups = self._groups()
        order = [group for group in groups if group == _quoted(first)]
        order += ["total DESC", *(group for group in groups if group != _quoted(first))]
        return self._database.ordered(self._merged(), ", ".join(order))

    def _merged(self) -> pa.Table:
        measures = "coalesce(fsum(total), 0) AS total, CAST(sum(count) AS BIGINT) AS count"
        return self._database.aggregate(pa.concat_tables(self._sums), ", ".join(self._groups()), measures)

    def _groups(self) -> list[str]:
        return [_quoted(name) for name in self._sums[0].column_names[:-2]]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

"""Free SQL over the whole store: patterns, steps, samples, probes, and the attention of a chosen query."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dualstore.errors import DualstoreError, QueryError
from dualstore.probes import Queries
from dualstore.result import Result
from dualstore.rows import Selector
from dualstore.schema import Layer
from dualstore.scores import Score, Traced
from dualstore.totals import attention

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["run_sql"]


class _Attention:
    """The relation `attention`: computed anew whenever DuckDB reads it, a piece at a time."""

    def __init__(self, store: "Store", layer: Layer, queries: Queries, score: Score | Traced | None, until: int | None) -> None:
        self._store, self._layer, self._queries, self._score, self._until = store, layer, queries, score, until
        self.error: DualstoreError | None = None
        """What went wrong while DuckDB was reading."""
        empty = store.labelling.empty().append_column("alpha", pa.array([], pa.float64()))
        self._schema = (empty if score is None else empty.append_column(score.name, pa.array([], pa.float64()))).schema

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        reader = pa.RecordBatchReader.from_batches(self._schema, self._batches())
        return reader.__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterable[pa.RecordBatch]:
        select = Selector(self._store.labelling, None, None, self._until)
        try:
            for table in attention(self._store, self._layer, self._queries, select, score=self._score):
                yield from table.cast(self._schema).to_batches()
        except DualstoreError as error:
            self.error = error
            raise


def run_sql(
    store: "Store",
    text: str,
    layer: Layer | None,
    queries: Queries | None,
    score: Score | Traced | None = None,
    until: int | None = None,
) -> Result:
    """See `Store.sql`."""
    from dualstore.database import Database  # DuckDB is slow to start

    database = Database(budget_bytes=store.options.budget_bytes, threads=store.options.threads)
    names = store.labelling.tasks
    database.register("tasks", pa.table({"task": pa.array(range(len(names)), pa.int32()), "name": pa.array(names, pa.string())}))
    database.register("epochs", pa.table({"step": store.steps.numbers, "epoch": store.steps.epochs}))
    database.register("steps", store.steps.table)
    for folder, empty in _EMPTY.items():
        paths = store.part_paths(folder)
        if paths:
            mixed = {} if folder == "samples" else {"mixed": len({(layer.keys, layer.errors) for layer in store.layers}) > 1}
            last = {"last": store.last_step if store.cut else _NO_STEP} if folder == "patterns" else {}
            database.view(folder, folder, {"files": [_literal(path) for path in paths], **mixed, **last})
        else:
            database.register(folder, empty.empty_table())
    attended = None if layer is None or queries is None else _Attention(store, layer, queries, score, until)
    if attended is not None:
        database.register("attention", attended)
    try:
        return Result(database.run(text), "sql")
    except QueryError as error:
        if attended is None or attended.error is None:
            raise
        raise attended.error from error


_NO_STEP = (1 << 31) - 1
"""No step is later."""


def _literal(path: Path) -> str:
    """The path as a pattern that matches itself alone."""
    return re.sub(r"[\[*?]", r"[\g<0>]", str(path))


_ROW = [("step", pa.int32()), ("epoch", pa.int32()), ("sample_id", pa.int64()), ("position", pa.int32())]
_NAMED = [("label", pa.int32()), ("task", pa.string())]
_SAMPLER = [("slot", pa.int32()), ("duplicate", pa.int32())]
_PROBE = [("layer", pa.int32()), ("test_id", pa.int64()), ("position", pa.int32()), ("step", pa.int32())]
_VECTOR = pa.list_(pa.float32())
_VECTORS = [("x", _VECTOR), ("y", _VECTOR), ("g", _VECTOR)]
_TOKEN = ("token", pa.int32())
_EMPTY = {
    "patterns": pa.schema([("layer", pa.int32()), *_ROW, *_NAMED, *_SAMPLER, ("x", _VECTOR), ("e", _VECTOR), _TOKEN]),
    "probes": pa.schema([*_PROBE, *_NAMED, ("predicted", pa.int32()), *_VECTORS, _TOKEN]),
    "samples": pa.schema([("sample_id", pa.int64()), *reversed(_NAMED), ("payload", pa.binary()), ("mime", pa.string())]),
}
"""What stands for a relation whose folder holds no part yet."""

"""Free SQL over the whole store: patterns, steps, samples, probes, blocks, and the attention of a chosen query."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    from dualstore.database import Database
    from dualstore.store import Store

__all__ = ["block_columns", "relate_folder", "run_sql", "start_database"]


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
            for _, table in attention(self._store, self._layer, self._queries, select, score=self._score):
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
    database = start_database(store)
    database.register("epochs", pa.table({"step": store.steps.numbers, "epoch": store.steps.epochs}))
    database.register("steps", store.steps.table)
    for folder in _EMPTY:
        relate_folder(database, store, folder)
    attended = None if layer is None or queries is None else _Attention(store, layer, queries, score, until)
    if attended is not None:
        database.register("attention", attended)
    try:
        return Result(database.run(text), "sql")
    except QueryError as error:
        if attended is None or attended.error is None:
            raise
        raise attended.error from error


def start_database(store: "Store") -> "Database":
    """A database within the store's budget that knows the names of its tasks and blocks."""
    from dualstore.database import Database  # DuckDB is slow to start

    database = Database(budget_bytes=store.options.budget_bytes, threads=store.options.threads)
    database.register("tasks", _numbered("task", store.labelling.tasks))
    database.register("block_names", _numbered("block", store.info_file.blocks))
    return database


def relate_folder(database: "Database", store: "Store", folder: str) -> None:
    """Gives the database the relation of all parts of a folder. Raises DamagedError where one cannot be read."""
    paths = store.part_paths(folder)
    if not paths:
        database.register(folder, _EMPTY[folder].empty_table())
        return
    files = {"files": [_literal(path) for path in paths]}
    database.view(folder, folder, files | {name: value(store) for name, value in _ASKED.get(folder, {}).items()})


def block_columns() -> pa.Table:
    """No rows of the relation `blocks`: its columns."""
    return _EMPTY["blocks"].empty_table()


def _numbered(number: str, names: Sequence[str | None]) -> pa.Table:
    return pa.table({number: pa.array(range(len(names)), pa.int32()), "name": pa.array(names, pa.string())})


def _is_mixed(store: "Store") -> bool:
    """Whether layers differ in their columns."""
    return len({(layer.keys, layer.errors) for layer in store.layers}) > 1


_NO_STEP = (1 << 31) - 1
"""No step is later."""

_ASKED: Mapping[str, Mapping[str, Callable[["Store"], Any]]] = {
    "patterns": {"mixed": _is_mixed, "last": lambda store: store.last_step if store.cut else _NO_STEP},
    "probes": {"mixed": _is_mixed},
    "blocks": {"last": lambda store: store.last_step},
}
"""What the statement of a folder asks for besides its files."""


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
    "blocks": pa.schema(
        [
            *(("step", pa.int32()), ("block", pa.int32()), ("name", pa.string()), ("sample_id", pa.int64())),
            *(("test_id", pa.int64()), ("slot", pa.int32()), *_NAMED),
            *((name, pa.float64()) for name in ("norm", "change", "increment", "nsi")),
            ("rank", pa.int32()),
        ]
    ),
}
"""What stands for a relation whose folder holds no part yet."""

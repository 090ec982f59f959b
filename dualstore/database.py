"""The one place that speaks to DuckDB: filters, groups, joins and free SQL over rows that others provide."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from typing import Any

import duckdb
import pyarrow as pa

from dualstore.errors import DamagedError, QueryError

__all__ = ["Database"]


class Database:
    """An in-memory DuckDB connection. `python_enable_replacements` is off: SQL sees what was registered, nothing else."""

    def __init__(self, *, budget_bytes: int | None = None, threads: int | None = None) -> None:
        """With a budget, one of its own, which may be given relations and views; else one that shares its workers."""
        if budget_bytes is None:
            self._connection = _instance(threads).cursor()
        else:
            self._connection = _connect(threads, memory_limit=f"{max(budget_bytes, 64 << 20) >> 20}MiB")

    def register(self, name: str, rows: Any) -> None:
        """Makes `rows`, an Arrow table or anything with `__arrow_c_stream__`, the relation `name`."""
        self._connection.register(name, rows)

    def view(self, name: str, statement: str, parameters: Mapping[str, Any]) -> None:
        """Makes the statement of `dualstore/sql/<statement>.sql` the view `name`. Raises DamagedError where it cannot be read."""
        try:
            self._connection.sql(read_sql(statement), params=dict(parameters)).create_view(name)
        except duckdb.Error as error:
            raise DamagedError(f"{name}: {_reason(error)}; restore the file or delete it") from error

    def narrow(self, name: str, of: str, conditions: Sequence[str]) -> None:
        """Makes the rows of a relation that meet all conditions, which have been checked, the view `name`."""
        relation = self._connection.view(of)
        for condition in conditions:
            relation = relation.filter(condition)
        relation.create_view(name)

    def answer(self, statement: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        """The result of the statement of `dualstore/sql/<statement>.sql`. Raises QueryError with DuckDB's first line."""
        try:
            return self._connection.sql(read_sql(statement), params=dict(parameters or {})).to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(f"{statement}: {_reason(error)}") from error

    def run(self, text: str) -> pa.Table:
        """The result of free SQL; may be interrupted. Raises QueryError with DuckDB's first line."""
        with ThreadPoolExecutor(1) as pool:  # where signals reach us, DuckDB does not look for them
            running = pool.submit(self._run, text)
            try:
                return running.result()
            except BaseException:
                self._connection.interrupt()
                raise

    def _run(self, text: str) -> pa.Table:
        try:
            found = self._connection.sql(text)
            return pa.table({}) if found is None else found.to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(f"SQL: {_reason(error)}; relations: {', '.join(self._relations())}") from error

    def select(self, rows: pa.Table, where: str | None, expressions: str) -> pa.Table:
        """`SELECT expressions FROM rows WHERE where`, in the order of `rows`."""
        try:
            relation = self._connection.from_arrow(rows)
            if where is not None:
                relation = relation.filter(where)
            return relation.project(expressions).to_arrow_table()
        except duckdb.Error as error:
            asked = f"condition {where!r}" if where is not None else f"expression {expressions!r}"
            raise QueryError(_explain(error, asked, rows)) from error

    def check(self, rows: pa.Table, expression: str, *, condition: bool) -> None:
        """Raises QueryError unless the expression is one value of each row by itself; a condition must be true or false."""
        what = f"{'condition' if condition else 'expression'} {expression!r}"
        try:
            relation = self._connection.from_arrow(rows)
            relation.filter(expression if condition else f"({expression}\n) IS NULL")  # refuses aggregates and windows
            found = relation.project(f"({expression}\n)").to_arrow_table().schema.field(0).type
        except duckdb.Error as error:
            raise QueryError(_explain(error, what, rows)) from error
        if pa.types.is_nested(found) or (condition and not (pa.types.is_boolean(found) or pa.types.is_null(found))):
            raise QueryError(f"{what}: expected {'true or false' if condition else 'one value'}, found {found}; {_columns(rows)}")
        self.check_stable(expression, what)

    def has_window(self, expressions: str) -> bool:
        """Whether a window function is among the expressions: it would see one run of rows at a time."""
        return '"class":"WINDOW"' in self._parsed(expressions)

    def check_stable(self, expressions: str, what: str) -> None:
        """Raises QueryError where an expression has another value each time: it is computed for one run of rows at a time."""
        called = set(re.findall(r'"function_name":"([^"]+)"', self._parsed(expressions)))
        found = self._connection.execute(read_sql("unstable_functions"), {"names": sorted(called)}).fetchall() if called else []
        if found:
            raise QueryError(f"{what}: expected the same value whenever it is computed, found {found[0][0]}()")

    def _parsed(self, expressions: str) -> str:
        ((found,),) = self._connection.execute("SELECT json_serialize_sql($text)", {"text": f"SELECT {expressions}"}).fetchall()
        return str(found)

    def aggregate(self, rows: pa.Table, by: str, measures: str) -> pa.Table:
        """`SELECT by, measures FROM rows GROUP BY by`, in no particular order."""
        expressions = f"{by}\n, {measures}" if by else measures
        try:
            return self._connection.from_arrow(rows).aggregate(expressions).to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(_explain(error, f"expression {by!r}", rows)) from error

    def ordered(self, rows: pa.Table, order: str) -> pa.Table:
        """`SELECT * FROM rows ORDER BY order`."""
        return self._connection.from_arrow(rows).order(order).to_arrow_table()

    def _relations(self) -> Sequence[str]:
        found = self._connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal ORDER BY 1").fetchall()
        return [name for (name,) in found]


def _connect(threads: int | None, **settings: Any) -> duckdb.DuckDBPyConnection:
    given = {} if threads is None else {"threads": threads}
    return duckdb.connect(config={"python_enable_replacements": False, **given, **settings})


@cache
def _instance(threads: int | None) -> duckdb.DuckDBPyConnection:
    """Starting a DuckDB takes longer than most questions."""
    return _connect(threads)


def read_sql(name: str) -> str:
    """The statement in `dualstore/sql/<name>.sql`."""
    return files("dualstore.sql").joinpath(f"{name}.sql").read_text()


def _explain(error: duckdb.Error, asked: str, rows: pa.Table) -> str:
    return f"{asked}: {_reason(error)}; {_columns(rows)}"


def _columns(rows: pa.Table) -> str:
    return "columns: " + ", ".join(name for name in rows.column_names if not name.startswith("_"))


def _reason(error: duckdb.Error) -> str:
    return (str(error).splitlines() or ["unknown error"])[0]

"""An answer: an Arrow table that shows itself in a terminal or a notebook and turns into what the user works with."""

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dualstore.explain import Explain

if TYPE_CHECKING:
    import polars

__all__ = ["Result", "format_value"]

_SHOWN_ROWS = 100


class Result:
    """Rows of an answer, in order. `title` says what was asked, `explain` what it cost, `notes` what it means."""

    def __init__(self, table: pa.Table, title: str, explain: Explain | None = None, notes: Sequence[str] = ()) -> None:
        names = list(table.column_names)
        if len(set(names)) < len(names):
            table = table.rename_columns(_distinct(names))
        self.table = table
        self.title = title
        self.explain = explain
        self.notes = tuple(notes)
        """What its numbers mean, in a sentence each."""

    @property
    def columns(self) -> list[str]:
        """Column names."""
        return list(self.table.column_names)

    def to_arrow(self) -> pa.Table:
        """The answer as an Arrow table."""
        return self.table

    def to_polars(self) -> "polars.DataFrame":
        """The answer as a Polars data frame."""
        import polars  # slow to start; a command-line query does without it

        return polars.DataFrame(self.table)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One flat dict a row."""
        return _dicts(self.table)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_dicts())

    def __repr__(self) -> str:
        rows = [[format_value(value) for value in row.values()] for row in self._shown()]
        widths = [max(map(len, column)) for column in zip(self.columns, *rows, strict=True)]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in [self.columns, *rows]]
        return "\n".join([self.title, *lines, *self._omitted(), *self.notes])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        rows = (
            "<tr>" + "".join(f"<td>{html.escape(format_value(value))}</td>" for value in row.values()) + "</tr>"
            for row in self._shown()
        )
        caption = html.escape(" ".join([self.title, *self._omitted()]))
        table = f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        return table + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)

    def _shown(self) -> list[dict[str, Any]]:
        return _dicts(self.table.slice(0, min(_SHOWN_ROWS, len(self))))

    def _omitted(self) -> list[str]:
        left = len(self) - _SHOWN_ROWS
        return [f"… and {left} more rows"] if left > 0 else []


def _dicts(table: pa.Table) -> list[dict[str, Any]]:
    columns = [_values(column) for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: pa.ChunkedArray) -> list[Any]:
    """The column as Python has it; as text where Python has no such value, as times beyond the year 9999."""
    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        values = [None if value is None else str(value) for value in column.cast(pa.string()).to_pylist()]
    return values


def _distinct(names: list[str]) -> list[str]:
    """The names, those that were there before with a number behind them."""
    found: list[str] = []
    for name in names:
        number, free = 1, name
        while free in found:
            free, number = f"{name}_{number}", number + 1
        found.append(free)
    return found


def format_value(value: Any) -> str:
    """A cell as a person reads it: six significant digits, nothing for null, the size of long bytes."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes) and len(value) > 32:
        return f"{len(value)} bytes"
    if isinstance(value, list) and len(value) > 8:
        return f"[{', '.join(map(format_value, value[:3]))}, … {len(value)} values]"
    return str(value)

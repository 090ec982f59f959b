"""Printing answers: table, JSON or CSV on standard output."""

import base64
import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from typing import Any

import click

from dualstore.result import Result, format_value

__all__ = ["print_explain", "print_object", "print_result", "print_table", "progress_bar", "progress_bars"]


def print_result(result: Result, output: str, percent: Sequence[str] = ()) -> None:
    """Prints rows: a table with its title, a JSON list of flat objects, or CSV. `percent` names shares to show in %."""
    if output == "json":
        click.echo(json.dumps([_plain_row(row) for row in result], ensure_ascii=False))
    elif output == "csv":
        _print_csv([result.columns, *([_cell(value) for value in row.values()] for row in result)])
    else:
        rows = [[_percent(value) if name in percent else format_value(value) for name, value in row.items()] for row in result]
        print_table(result.title, result.columns, rows)
        for note in result.notes:
            click.echo(note)


def print_explain(result: Result) -> None:
    """Prints what an answer cost, on standard error."""
    if result.explain is not None:
        for name, value in result.explain.to_dict().items():
            click.echo(f"{name.replace('_', ' ')}: {format_value(value)}", err=True)


def print_object(values: Mapping[str, Any], output: str) -> bool:
    """Prints one object as JSON, or as CSV of its names and values; returns whether that was asked."""
    if output == "json":
        click.echo(json.dumps(_plain(values), ensure_ascii=False))
    elif output == "csv":
        _print_csv([list(values), [_cell(value) for value in values.values()]])
    return output in ("json", "csv")


def _print_csv(rows: Sequence[Sequence[Any]]) -> None:
    plain = csv.writer(sys.stdout, lineterminator="\n")
    quoted = csv.writer(sys.stdout, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:  # a lone carriage return ends a line for many readers, but is not quoted by itself
        (quoted if any(isinstance(value, str) and "\r" in value for value in row) else plain).writerow(row)


def _cell(value: Any) -> Any:
    """A value as CSV has it: nested ones are JSON."""
    return json.dumps(_plain(value), ensure_ascii=False) if isinstance(value, list | dict) else _plain(value)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; as wide as it needs where the output is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(_is_number(row[index]) for row in rows)
        table.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(80, _width(columns, rows)))
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)
    console.print()


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, from the first step on."""
    with progress_bars() as show:
        yield partial(show, what)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars on standard error, one for each thing that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=None)
            bar.start()
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 3 for column in zip(columns, *rows, strict=True)) + 3


def _is_number(text: str) -> bool:
    return re.fullmatch(r"|-?[\d,]+(\.\d+)?(e[+-]\d+)?( %)?|-?inf|nan", text) is not None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """The value as JSON has it: NaN and infinity are null, bytes are base64, what JSON lacks is text."""
    if isinstance(value, Decimal):  # sums of whole numbers, too
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, Mapping):
        return _plain_row(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, str | int | bool) else str(value)

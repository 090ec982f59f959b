"""Options that several commands share."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import numpy as np

import dualstore
from dualstore.errors import QueryError
from dualstore.store import MAX_THREADS

if TYPE_CHECKING:
    from dualstore.experiments.experiment import Request

__all__ = [
    "Finite",
    "budget_options",
    "experiment_options",
    "explain_option",
    "inexact_option",
    "layer_of",
    "memory_option",
    "open_from",
    "output_option",
    "pool_option",
    "query_options",
    "query_vector",
    "request_of",
    "score_of",
    "score_options",
    "store_option",
    "where_option",
]


class Finite(click.FloatRange):
    """A number in a range; NaN, which is in none, is refused, and so is infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


F = TypeVar("F", bound=Callable[..., Any])


def _stack(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


store_option = click.option(
    "--store", type=click.Path(path_type=Path), default="store", envvar="DUALSTORE_STORE", show_default=True,
    help="The store's folder; also $DUALSTORE_STORE.",
)  # fmt: skip

output_option = _stack(
    click.option("--json", "output", flag_value="json", help="Print JSON."),
    click.option("--csv", "output", flag_value="csv", help="Print CSV."),
    click.option("--table", "output", flag_value="table", default=True, help="Print a table (the default)."),
)

memory_option = click.option(
    "--memory", "memory_mb", type=click.IntRange(1, 1 << 24), default=256, show_default=True,
    help="Memory in MB that may be taken; mapped file pages are the system's.",
)  # fmt: skip

budget_options = _stack(
    memory_option,
    click.option("--threads", type=click.IntRange(1, MAX_THREADS), default=2, show_default=True,
                 help="Threads for products of several queries."),
)  # fmt: skip

query_options = _stack(
    click.option("--test-id", "test_ids", type=int, multiple=True, help="A recorded test example; may be given several times."),
    click.option(
        "--vector", type=click.Path(path_type=Path), help="A .npy file with the query, (d,) or (m, d), instead of --test-id."
    ),
    click.option("--layer", required=True, help="Layer number or name."),
    click.option("--position", type=int, help="Position of the test example's row at this layer; by default the last."),
)

explain_option = click.option("--explain", is_flag=True, help="Say on standard error what the answer cost: path, bytes, times.")

score_options = _stack(
    click.option("--score", type=click.Choice(["attention", "contribution", "influence"]), default="attention", show_default=True,
                 help="What counts: alpha; what the pattern adds to an output; its effect on the probe's loss."),
    click.option("--output", "output_of", help="With --score contribution: output number, predicted or label."),
    click.option("--at-step", type=int, help="The memory as it was after this step."),
)  # fmt: skip

inexact_option = click.option(
    "--inexact",
    is_flag=True,
    help="Take an optimiser that is not known for plain SGD; estimate what needs patterns that were not recorded.",
)

pool_option = click.option("--pool", type=click.Choice(["mean", "sum"]), help="Of the scores for all queries, instead of each.")

where_option = click.option("--where", help="SQL condition on step, epoch, sample_id, position, label, task, slot, duplicate.")


experiment_options = _stack(
    click.option("--data", type=click.Path(path_type=Path),
                 help="Folder with the data; also $DUALSTORE_DATA. By default images are downloaded."),
    click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True),
    click.option("--scale", type=Finite(min=0, min_open=True, max=1), default=1.0, show_default=True,
                 help="Share of the widths and of the data, for a quick look."),
    click.option("--steps", type=click.IntRange(min=1), help="Optimiser steps, of each phase."),
    click.option("--full", is_flag=True, help="As many steps as the paper has; language models have fewer by default."),
    click.option("--batch-size", type=click.IntRange(min=1)),
    click.option("--lr", type=Finite(min=0), help="Learning rate."),
    click.option("--momentum", type=Finite(min=0)),
    click.option("--clip", type=Finite(min=0), help="Largest gradient norm; 0 for no clipping."),
    click.option("--hidden", type=click.IntRange(1, 1 << 20), help="Width of the hidden layers."),
    click.option("--images", type=click.IntRange(min=1), help="Training images of each set."),
)  # fmt: skip


def request_of(options: dict[str, Any]) -> "Request":
    """What `experiment_options` ask for; what was not given stays as the experiment has it."""
    from dualstore.experiments.experiment import Request  # brings DuckDB

    common = {name: options.pop(name) for name in ("data", "seed", "scale", "full")}
    return Request(**common, changes={name: value for name, value in options.items() if value is not None})


def open_from(store: Path, memory_mb: int = 256, threads: int = 2, inexact: bool = False) -> dualstore.Store:
    """The store a command works on."""
    return dualstore.open(store, budget_bytes=memory_mb << 20, threads=threads, inexact=inexact)


def query_vector(test_ids: tuple[int, ...], vector: Path | None) -> dict[str, Any]:
    """`test_id` or `x` of a question, as the library takes them."""
    if vector is None:
        return {"test_id": test_ids[0] if len(test_ids) == 1 else list(test_ids) or None}
    if test_ids:
        raise click.UsageError("give --test-id or --vector, not both")
    try:
        return {"x": np.load(vector, allow_pickle=False)}
    except Exception as error:  # numpy lets through whatever its parsers of headers and archives raise
        raise QueryError(f"{vector}: expected a .npy file of numbers, found {error or type(error).__name__}") from error


def score_of(score: str, output_of: str | None, at_step: int | None) -> dict[str, Any]:
    """Score, output and step of a question, as the library takes them."""
    output: int | str | None = output_of
    if output_of is not None and output_of.removeprefix("-").isdecimal() and len(output_of) < 10:
        output = int(output_of)
    return {"score": score, "output": output, "at_step": at_step}


def layer_of(text: str) -> int | str:
    """A layer as the library takes it: digits are a number."""
    return int(text) if text.isdecimal() and len(text) < 10 else text

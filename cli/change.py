"""What the network would be with other memories: reweigh."""

from pathlib import Path
from typing import Any

import click
import numpy as np

from dualstore.coefficients import Average
from dualstore.errors import QueryError

from .options import budget_options, inexact_option, open_from, output_option, store_option, where_option
from .output import print_result

__all__ = ["reweigh"]

_MOST_FACTORS = 10_000


@click.command()
@store_option
@click.option("--gain", "given", multiple=True, metavar="COLUMN=VALUE:FACTOR",
              help="Factor on the memories of a group, e.g. task=mnist:1.7 or label=3:0; with --evaluate also "
                   "START:STOP:STEP, e.g. task=mnist:1.0:2.0:0.1. May be given several times.")  # fmt: skip
@click.option("--with-initial", is_flag=True, help="The one gain's factor holds for the initial weights, too.")
@where_option
@click.option("--at-step", type=int, help="The weights as they were after this step.")
@click.option("--average", metavar="ema:DECAY | swa:EVERY",
              help="The mean of the weights along training instead: exponential, or of every so many steps.")  # fmt: skip
@click.option("--from", "first", type=click.IntRange(min=0), default=0, show_default=True, help="First step of the --average.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the weights of all recorded layers, as safetensors.")
@click.option("--evaluate", is_flag=True, help="Show the accuracy on the recorded probes.")
@inexact_option
@budget_options
@output_option
def reweigh(store: Path, given: tuple[str, ...], with_initial: bool, where: str | None, at_step: int | None,
            average: str | None, first: int, out: Path | None, evaluate: bool, inexact: bool, memory_mb: int, threads: int,
            output: str) -> None:  # fmt: skip
    """The weights as if groups of memories had been masked (factor 0) or amplified, without training.

    Say what to do with them: --out, --evaluate or both.
    """
    if out is None and not evaluate:
        raise click.UsageError("give --out FILE, --evaluate or both")
    if first and average is None:
        raise click.UsageError("--from is the first step of an --average; give that, too")
    gains: dict[str, dict[str, Any]] = {}
    for text in given:
        expression, value, factors = _gain(text)
        if value in gains.setdefault(expression, {}):
            raise click.UsageError(f"--gain {expression}={value} is given twice")
        gains[expression][value] = factors
    if out is not None and any(len(factors) > 1 for values in gains.values() for factors in values.values()):
        raise click.UsageError("--out wants one factor for each --gain; several are for --evaluate alone")
    opened = open_from(store, memory_mb, threads, inexact)
    how: dict[str, Any] = {"where": where, "at_step": at_step, "with_initial": with_initial}
    how["average"] = None if average is None else _average(average, first)
    if evaluate:
        print_result(opened.evaluate(gains, **how), output, percent=("accuracy",))
    if out is not None:
        opened.write_weights(out, gains={name: {v: f[0] for v, f in values.items()} for name, values in gains.items()}, **how)
        click.echo(f"weights of {len(opened.layers)} layers: {out}", err=evaluate)


def _gain(text: str) -> tuple[str, str, list[float]]:
    """(expression, value, factors) of COLUMN=VALUE:FACTOR or COLUMN=VALUE:START:STOP:STEP."""
    expression, equals, rest = text.partition("=")
    for count in (3, 1):
        value, *numbers = rest.rsplit(":", count)
        try:
            found = [float(number) for number in numbers]
        except ValueError:
            continue
        if equals and expression.strip() and len(found) == count and value and np.isfinite(found).all():
            return expression.strip(), value, found if count == 1 else _sweep(text, *found)
    raise QueryError(f"gain {text!r}: expected COLUMN=VALUE:FACTOR or COLUMN=VALUE:START:STOP:STEP, e.g. task=mnist:1.7")


def _sweep(text: str, start: float, stop: float, step: float) -> list[float]:
    count = (stop - start) / step if step else np.inf
    if not 0 <= count < _MOST_FACTORS:
        raise QueryError(f"gain {text!r}: expected a STEP that leads from START to STOP in at most {_MOST_FACTORS:,} steps")
    return [round(start + number * step, 12) for number in range(int(count + 1e-9) + 1)]


def _average(text: str, first: int) -> Average:
    kind, _, number = text.partition(":")
    try:
        if kind == "ema":
            return Average(first, decay=float(number))
        if kind == "swa":
            return Average(first, int(number))
    except ValueError:
        pass
    raise QueryError(f"average {text!r}: expected ema:DECAY or swa:EVERY, e.g. ema:0.999 or swa:100")

"""Layers of which only a share of the patterns was recorded: at which rate in each step, and what sums make of it.

A pattern that was kept with probability r stands for 1/r patterns: a sum in which each counts 1/r times is, on average, that
over all patterns. Single patterns and their scores are exact all the same.

Source: Horvitz and Thompson 1952, the estimator of a total from a sample with unequal probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy import ndarray

from dualstore.errors import DamagedError, InexactError
from dualstore.schema import Layer
from dualstore.shapes import Bool, Float64, Int32, Int64
from dualstore.steps import Steps

__all__ = ["Rates", "check_whole", "rates_of", "sample_note"]


@dataclass(frozen=True)
class Rates:
    """The rates of one layer; by step number, ascending."""

    numbers: Int32[ndarray, " s"]
    rates: Float64[ndarray, " s"]
    rows: Int64[ndarray, " s"]
    """Patterns that were recorded."""

    def at(self, steps: Int32[ndarray, " n"]) -> Float64[ndarray, " n"]:
        """The rate of each of the given steps; 1 for those that are not in the log."""
        place = np.minimum(np.searchsorted(self.numbers, steps), len(self.numbers) - 1)
        found: ndarray = np.where(self.numbers[place] == steps, self.rates[place], 1.0)
        return found

    def even(self, first: Int32[ndarray, " n"], last: Int32[ndarray, " n"]) -> Bool[ndarray, " n"]:
        """Whether all steps from `first`, which has patterns, to `last` that have any have one rate."""
        with_rows = np.flatnonzero(self.rows)
        numbers, changes = self.numbers[with_rows], np.cumsum(np.diff(self.rates[with_rows], prepend=1.0) != 0)
        changes = np.append(changes, -1)  # of steps that have none
        start, end = np.searchsorted(numbers, first), np.searchsorted(numbers, last, side="right")
        found: ndarray = changes[start] == changes[end - 1]
        return found

    @cached_property
    def constant(self) -> bool:
        """Whether all patterns were recorded at one rate, so that sums of them are off by one factor."""
        return len(np.unique(self.rates[self.rows > 0])) <= 1

    @property
    def share(self) -> float:
        """Which part of the patterns was recorded, as far as the rates tell."""
        mine = self.rows > 0
        return float(self.rows.sum() / (self.rows[mine] / self.rates[mine]).sum()) if mine.any() else float(self.rates.mean())


def rates_of(steps: Steps, layer: Layer, index: int, layers: int) -> Rates | None:
    """The rates of the layer that is the `index`-th of some; None where all of its patterns were recorded.

    Raises DamagedError for what is no rate.
    """
    rates = steps.rates(index) if steps.sampled else np.ones(0)
    if (rates == 1).all():
        return None
    rows = steps.rows_per_step(layers)[:, index]
    wrong = np.flatnonzero(~((rates >= 0) & (rates <= 1)) | ((rates == 0) & (rows > 0)))
    if len(wrong):
        step, rate = steps.numbers[wrong[0]], rates[wrong[0]]
        where = f"steps: step {step}: rates: layer {layer.number} ({layer.name})"
        raise DamagedError(f"{where}: expected a share up to 1, above 0 where patterns are, found {rate}")
    return Rates(steps.numbers, rates, rows)


def check_whole(path: object, layer: Layer, rates: Rates | None, *, inexact: bool) -> None:
    """Raises InexactError where sums over all patterns are asked of a share of them, unless they may be estimated."""
    if rates is not None and not inexact:
        raise InexactError(
            f"{path}: layer {layer.number} ({layer.name}): this needs all patterns, and {rates.share:.1%} were recorded; "
            "attention, contributions and influence work all the same; inexact=True or --inexact estimates it from those"
        )


def sample_note(asked: Sequence[tuple[Layer, Rates | None]], text: str) -> list[str]:
    """A sentence that says of which layers only a share was recorded, "{text}: 25.0 % of layer 0 (name)"; none for others."""
    shares = [f"{rates.share:.1%} of layer {layer.number} ({layer.name})" for layer, rates in asked if rates is not None]
    return [f"{text}: {', '.join(shares)}"] if shares else []

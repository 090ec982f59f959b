"""Which of the patterns that arrive are stored: shares of them, positions, and no padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy import ndarray

from dualstore.capture.names import Named
from dualstore.errors import RecordError
from dualstore.schema import Layer
from dualstore.shapes import Bool, Float, Int64

__all__ = ["Choice"]


@dataclass(frozen=True)
class Choice:
    """What is stored of a layer's patterns."""

    share: float
    """Each pattern with this probability."""
    every: int
    """At one step in so many."""
    positions: tuple[int, ...] | None
    """Places of each call, counted from behind where negative; None for all."""

    @property
    def rate(self) -> float:
        """The share of patterns, at random, that a recorded step stands for."""
        return self.share / self.every

    def kept(
        self, named: Named, e: Float[ndarray, "n o"], each: int, random: np.random.Generator
    ) -> "tuple[Int64[ndarray, ' k'] | None, dict[str, ndarray]]":
        """The rows of a call to store, None for all, and their columns; `each` is the number of positions of every sample.

        Rows labelled as ignored whose error is zero are padding: nothing of them is in the weights.
        """
        found: Bool[ndarray, " n"] | None = None
        if self.positions is not None and each > 1:
            found = np.tile(np.isin(np.arange(each), [p % each for p in self.positions if -each <= p < each]), len(e) // each)
        if self.share < 1:
            found = _both(found, random.random(len(e)) < self.share)
        if len(named.padding):
            there = e[named.padding].any(axis=1)
            if found is None and not there.any():
                return named.others
            reached = np.ones(len(e), bool)
            reached[named.padding] = there
            found = _both(found, reached)
        if found is None or found.all():
            return None, named.columns
        kept = np.flatnonzero(found)
        return kept, named.of(kept)

    @classmethod
    def of(cls, layer: Layer, share: Any, every: Any, positions: Any) -> "Choice":
        """What the options of a recording mean for one layer. Raises RecordError."""
        if isinstance(share, Mapping):
            share = next((value for pattern, value in share.items() if _names(pattern, layer)), 1.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise RecordError(f"share: expected a number above 0 and at most 1, or one for each name of layers, found {share!r}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise RecordError(f"every: expected a whole number of at least 1, found {every!r}")
        whole = positions is None or (
            isinstance(positions, Sequence) and len(positions) and all(isinstance(p, int) for p in positions)
        )
        if not whole:
            raise RecordError(f"positions: expected whole numbers, as in [-1] for the last one, found {positions!r}")
        return cls(float(share), every, None if positions is None else tuple(positions))


def _names(pattern: Any, layer: Layer) -> bool:
    if not isinstance(pattern, str):
        raise RecordError(f"share: expected names of layers, with * and ?, found {pattern!r}")
    return fnmatchcase(layer.name, pattern)


def _both(first: Bool[ndarray, " n"] | None, second: Bool[ndarray, " n"]) -> Bool[ndarray, " n"]:
    return second if first is None else first & second

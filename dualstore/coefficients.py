"""What the optimiser made of each step's gradient: the factors of the exact dual form.

For torch.optim.SGD with any momentum, dampening, Nesterov, coupled weight decay, schedule, global-norm clipping and
gradient accumulation, the weights after the last step are

    W_T = a W_0 + q b_0 + sum_s c_s sum_{i in step s} e_i x_i^T

with scalars a, q and one scalar c_s a step (b_0: the momentum buffer that training started with, if any). They follow
from one pass backwards over the steps that the parameter took.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), section 3, for plain SGD; the adjoint of the update rule in
the documentation of torch.optim.SGD for the rest.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from dualstore.schema import Layer
from dualstore.shapes import Bool, Float64, Int32, Int64
from dualstore.steps import Steps

__all__ = ["Average", "Coefficients", "When", "entering", "last_step", "sgd_coefficients"]


@dataclass(frozen=True)
class Average:
    """A mean of the weights after some steps: `first`, and every `every`-th from there to `last`.

    With a decay it is the exponential one of torch.optim.swa_utils.AveragedModel, which begins as a copy of the first; without,
    all count the same.
    """

    first: int = 0
    every: int = 1
    decay: float | None = None
    last: int | None = None

    def shares(self, numbers: Int32[ndarray, " s"]) -> Float64[ndarray, " s"]:
        """By how much the weights after each step enter the mean; they add up to 1."""
        behind = numbers.astype(np.int64) - self.first
        chosen = np.flatnonzero((behind >= 0) & (behind % self.every == 0))
        chosen = chosen if self.last is None else chosen[numbers[chosen] <= self.last]
        shares, count = np.zeros(len(numbers)), len(chosen)
        if self.decay is None:
            shares[chosen] = 1 / max(1, count)
        else:
            shares[chosen] = (1 - self.decay) * self.decay ** np.arange(count - 1, -1, -1.0)
            shares[chosen[:1]] = self.decay ** (count - 1)
        return shares


When = Average | int | None
"""Which weights are meant: those after a step, None for the last, or a mean."""


def last_step(when: When) -> int | None:
    """The last step that the weights depend on, None for the last of all."""
    return when.last if isinstance(when, Average) else when


def entering(
    numbers: Int32[ndarray, " s"], idle: Bool[ndarray, " s"], when: When
) -> tuple[Int64[ndarray, " t"], Float64[ndarray, " t"], float]:
    """The steps that the parameter took, as places in `numbers`; what its values after each, and the first one, count."""
    if isinstance(when, Average):
        shares = when.shares(numbers)
    else:
        shares = (numbers == (numbers.max(initial=0) if when is None else when)).astype(np.float64)
    until = last_step(when)
    taken = np.flatnonzero(~idle & (True if until is None else numbers <= until))
    of = np.searchsorted(taken, np.arange(len(numbers)), side="right") - 1
    after = np.bincount(of[of >= 0], shares[of >= 0], len(taken)).astype(np.float64)
    return taken, after, float(shares[of < 0].sum()) if len(numbers) else 1.0


@dataclass(frozen=True)
class Coefficients:
    """c of every step for one parameter, and the factors of what it started with."""

    steps: Int32[ndarray, " s"]
    """Step numbers, ascending."""
    c: Float64[ndarray, " s"]
    """Factor of the step's error signals; 0 where the parameter took no step."""
    initial: float
    """a, the factor of the initial weights: below 1 under weight decay."""
    buffer: float
    """q, the factor of the momentum buffer that training started with."""

    def at(self, steps: Int32[ndarray, " n"]) -> Float64[ndarray, " n"]:
        """C for each step number; 0 for steps that are not in the log."""
        if not len(self.steps):
            return np.zeros(len(steps))
        index = np.minimum(np.searchsorted(self.steps, steps), len(self.steps) - 1)
        found: ndarray = np.where(self.steps[index] == steps, self.c[index], 0.0)
        return found


def sgd_coefficients(
    steps: Steps, layer: Layer, group: int, *, buffered: bool = False, until: When = None, kind: str = "weight"
) -> Coefficients:
    """Coefficients of the "weight" or "bias" of `layer`, which belongs to parameter group `group`.

    Those of the weights after step `until`, by default after the last one, or of a mean of weights; later steps have 0.
    `buffered` says whether a momentum buffer existed before the first recorded step. A parameter of no group (-1) was
    not trained: all c are 0.
    """
    numbers = steps.numbers
    c = np.zeros(len(numbers))
    if group < 0:
        return Coefficients(numbers, c, 1.0, 0.0)
    columns = steps.group(group)
    taken, after, start = entering(numbers, steps.idle(layer.number, kind), until)
    with_momentum = [int(s) for s in taken if columns["momentum"][s] != 0]
    first = with_momentum[0] if with_momentum and not buffered else -1
    p, q = 0.0, 0.0
    for s, share in zip(taken[::-1], after[::-1], strict=True):
        c[s], p, q = _back_one(p + float(share), q, {name: column[s] for name, column in columns.items()}, fresh=bool(s == first))
    return Coefficients(numbers, c, p + start, q)


def _back_one(p: float, q: float, step: dict[str, Any], *, fresh: bool) -> tuple[float, float, float]:
    """(c, p, q) before one step, where p and q are the factors of weights and momentum buffer after it."""
    lr, momentum = float(step["lr"]), float(step["momentum"])
    # torch fills a new buffer with the whole gradient; dampening acts from the second step on.
    kept = 1.0 if fresh else 1.0 - float(step["dampening"])
    if momentum == 0:
        c, q_before = -lr * p, q
    elif step["nesterov"]:
        through_buffer = q - lr * momentum * p
        c, q_before = kept * through_buffer - lr * p, momentum * through_buffer
    else:
        through_buffer = q - lr * p
        c, q_before = kept * through_buffer, momentum * through_buffer
    sign = -1.0 if step["maximize"] else 1.0
    return float(step["clip"]) * sign * c, p + float(step["decay"]) * c, q_before

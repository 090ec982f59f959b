"""Exact values under Adam and its family, by replaying the preconditioner from the stored rows.

Adam, AdamW, AMSGrad, RMSprop and Adagrad divide the gradient G_s of a step element by element by a D_s that depends on
the gradients until then. With all D_s known the update is linear again, but the factor of a step is a matrix:

    W_T = P o W_0 + Q o m_0 + sum_s C_s o G_s        G_s = sum_{i in step s} e_i x_i^T, o element by element

so a pattern's contribution to output j is e_t[j] sum_i C_s[j, i] x_t[i] x[i]: there is no one alpha with the exact property.
A first pass over the steps replays what D_s depends on and keeps its state now and then; then, from the last step to the
first, each stretch is replayed once more, and C_s follows from P and Q as in `coefficients`. Rows of W are independent of
each other: as many are done at a time as the budget allows.

Source: the update rules in the documentation of torch.optim; their adjoint.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from dualstore.coefficients import When, entering
from dualstore.errors import DamagedError
from dualstore.keys import add_products, wide
from dualstore.log import Log
from dualstore.ranks import shares
from dualstore.schema import Layer
from dualstore.shapes import Float64, Int64
from dualstore.sharing import Some, Source, whole_sources

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["ADAPTIVE", "Stretch", "walk"]

ADAPTIVE = ("Adam", "AdamW", "RMSprop", "Adagrad")
"""Optimisers of torch whose preconditioner can be replayed; Adam and AdamW with amsgrad, too."""

_STATE = {
    "Adam": {"moment": "exp_avg", "square": "exp_avg_sq", "largest": "max_exp_avg_sq"},
    "RMSprop": {"moment": "momentum_buffer", "square": "square_avg", "mean": "grad_avg"},
    "Adagrad": {"square": "sum"},
}
"""What torch calls the arrays of a state."""


@dataclass(frozen=True)
class Stretch:
    """The patterns that a rank wrote in one step at one layer, and the factors of some rows of the weight for them."""

    source: Source
    """The layer: the one that is asked, or one that shares its weight."""
    first: int
    """Number of the first pattern in its log."""
    outputs: Int64[ndarray, " b"]
    """Which rows of the weight."""
    x: ndarray
    """(n, i), or (n,) tokens, as the asked layer sees them; so is `e`, (n, b)."""
    e: ndarray
    factor: Float64[ndarray, "b i"]
    """C_s"""
    rate: float = 1.0
    """The share of the step's patterns that was recorded: in sums these count 1 / rate times."""

    @property
    def change(self) -> Float64[ndarray, "b i"]:
        """What the patterns add to the weight."""
        return self.change_by(slice(None))

    def change_by(self, some: ndarray | slice) -> Float64[ndarray, "b i"]:
        """What some of the patterns add to the weight."""
        total = np.zeros_like(self.factor)
        add_products(total, self.e[some], self.x[some])
        total *= self.factor / self.rate
        return total


@dataclass
class _State:
    """What an optimiser knows of some rows of a parameter, (b, i) each; None where nothing depends on it."""

    step: int
    """Steps that the parameter has taken."""
    weight: ndarray | None
    moment: ndarray | None
    square: ndarray
    largest: ndarray | None
    mean: ndarray | None

    def copy(self) -> "_State":
        return copy.deepcopy(self)


def walk(
    store: "Store",
    layer: Layer,
    kind: str,
    until: When,
    outputs: Int64[ndarray, " o"],
    inputs: Int64[ndarray, " i"] | None = None,
) -> Iterator[Stretch | Float64[ndarray, "b i"]]:
    """For some outputs of a layer after another: the stretches of all steps up to `until`, the last first.

    After them comes what is left of the initial state of these outputs, P o W_0 + Q o m_0. `kind` is "weight", of which only
    some `inputs` may be looked at, or "bias", whose key is 1; where it is the sum of several, factors and state are those of
    the sum. Outputs and inputs ascend. Memory: half the budget, but at least some square roots of the number of steps for one
    row.
    """
    group = layer.weight_group if kind == "weight" else layer.bias_group
    sources = whole_sources(store, layer) if kind == "weight" else whole_sources(store, layer)[:1]
    looked: Some = slice(None) if inputs is None or kind == "bias" else inputs
    start, times = _start(store, layer, kind).of(slice(None), looked), 1.0 if kind == "weight" else float(len(layer.bias_places))
    taken, after, first_share = entering(store.steps.numbers, store.steps.idle(layer.number, kind), until)
    if group < 0:
        yield times * start.weight[outputs]
        return
    columns = store.steps.group(group)
    settings = [{name: column[s] for name, column in columns.items()} for s in taken.tolist()]
    rows = _Together([(source, _Rows(store, source.layer, kind)) for source in sources], looked)
    pace = max(1, math.isqrt(len(taken)))
    state_bytes = 8 * start.weight.shape[1] * (5 * (len(taken) // pace + 2) + pace)
    each = max(1, store.options.budget_bytes // 2 // state_bytes)
    for begin in range(0, len(outputs), each):
        some = outputs[begin : begin + each]
        replay = _Replay(store.info_file.optimizer, settings, start.of(some, slice(None)), some, times)
        yield from replay.run(rows, taken, after, first_share, pace)


@dataclass(frozen=True)
class _Start:
    """The parameter and the optimiser's state of it before the first step, as matrices; a bias is one column."""

    weight: ndarray
    arrays: dict[str, ndarray]
    step: int

    def of(self, outputs: Some, inputs: Some) -> "_Start":
        arrays = {name: array[outputs][:, inputs] for name, array in self.arrays.items()}
        return _Start(self.weight[outputs][:, inputs], arrays, self.step)


def _start(store: "Store", layer: Layer, kind: str) -> _Start:
    tensors, name = store.tensors("initial"), f"{layer.name}.{kind}"
    shape = (layer.d_out, layer.d_in) if kind == "weight" else (layer.d_out, 1)
    if kind == "bias" and not layer.bias:
        return _Start(np.zeros(shape), {}, 0)

    def found(key: str) -> ndarray:
        tensor = tensors.get(key)
        if tensor is None or tensor.size != shape[0] * shape[1]:
            shown = "nothing" if tensor is None else tensor.shape
            raise DamagedError(f"{store.path}: weights: expected {key!r} of {shape[0] * shape[1]} values, found {shown}")
        wide: ndarray = tensor.astype(np.float64).reshape(shape)
        return wide

    kept = _STATE["Adam" if store.info_file.optimizer == "AdamW" else store.info_file.optimizer]
    arrays = {ours: found(f"{name}.{theirs}") for ours, theirs in kept.items() if f"{name}.{theirs}" in tensors}
    return _Start(found(name), arrays, int(tensors.get(f"{name}.step", np.zeros(1)).reshape(-1)[0]))


class _Replay:
    """Some rows of one parameter on their way through training, forwards and back."""

    def __init__(
        self, optimizer: str, settings: Sequence[dict[str, Any]], start: _Start, outputs: Int64[ndarray, " b"], times: float
    ) -> None:
        """`times` says how many parameters move alike, whose sum is asked."""
        self._rule: Callable[[_State, dict[str, Any], ndarray], ndarray]
        self._rule = {"RMSprop": _rmsprop, "Adagrad": _adagrad}.get(optimizer, _adam)
        self._back = {"RMSprop": _rmsprop_back, "Adagrad": _adagrad_back}.get(optimizer, _adam_back)
        self._settings, self._start, self._outputs, self._times = settings, start, outputs, times
        zeros = np.zeros_like(start.weight)
        # Decay in the gradient makes D_s depend on the weights, which depend on the first moment.
        coupled = any(now["decay"] != 0 and not now["decoupled"] for now in settings)
        amsgrad, centered = (any(now[name] for now in settings) for name in ("amsgrad", "centered"))
        needs = {"moment": coupled, "largest": amsgrad, "mean": centered, "square": True}
        kept = {name: start.arrays.get(name, zeros).copy() if needed else None for name, needed in needs.items()}
        self._state = _State(start.step, start.weight.copy() if coupled else None, **kept)  # type: ignore[arg-type]

    def run(
        self, rows: "_Together", taken: Int64[ndarray, " s"], after: Float64[ndarray, " s"], first_share: float, pace: int
    ) -> Iterator[Stretch | ndarray]:
        """See `walk`."""
        kept = []
        for at, number in enumerate(taken.tolist()):
            if at % pace == 0:
                kept.append(self._state.copy())
            self._forward(at, rows, number)
        p, q = np.zeros_like(self._start.weight), np.zeros_like(self._start.weight)
        for begin in range((len(taken) - 1) // pace * pace, -1, -pace) if len(taken) else ():
            self._state = kept.pop()
            stretch = range(begin, min(begin + pace, len(taken)))
            first_step, divided = self._state.step, [self._forward(at, rows, int(taken[at])) for at in stretch]
            for at in reversed(stretch):
                now = self._settings[at]
                factor, p, q = self._back(p + after[at], q, divided.pop(), now, first_step + at - begin + 1)
                sign = -self._times if now["maximize"] else self._times
                for source, first, x, e, rate in rows.read(int(taken[at]), self._outputs):
                    yield Stretch(source, first, self._outputs, x, e, float(now["clip"]) * sign * factor, rate)
        left = (p + first_share) * self._start.weight + q * self._start.arrays.get("moment", np.zeros_like(q))
        yield self._times * left

    def _forward(self, at: int, rows: "_Together", number: int) -> ndarray:
        """Takes a step; returns its D_s."""
        now = self._settings[at]
        gradient = np.zeros_like(self._start.weight)
        for _, _, x, e, rate in rows.read(number, self._outputs):
            add_products(gradient, e, x, None if rate == 1 else np.full(len(x), 1 / rate))
        gradient *= float(now["clip"]) * (-1.0 if now["maximize"] else 1.0)
        if self._state.weight is not None and not now["decoupled"]:
            gradient += now["decay"] * self._state.weight
        self._state.step += 1
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return self._rule(self._state, now, gradient)


# The rules of torch.optim: D of a step, with the state moved on


def _adam(state: _State, now: dict[str, Any], gradient: ndarray) -> ndarray:
    beta1, beta2, lr = now["beta1"], now["beta2"], now["lr"]
    state.square *= beta2
    state.square += (1 - beta2) * gradient * gradient
    square = state.square
    if now["amsgrad"]:
        assert state.largest is not None
        square = np.maximum(state.largest, square, out=state.largest)
    divided: ndarray = 1 / (np.sqrt(square) / math.sqrt(1 - beta2**state.step) + now["eps"])
    if state.weight is not None and state.moment is not None:
        if now["decoupled"]:
            state.weight *= 1 - lr * now["decay"]
        state.moment *= beta1
        state.moment += (1 - beta1) * gradient
        state.weight -= lr / (1 - beta1**state.step) * divided * state.moment
    return divided


def _rmsprop(state: _State, now: dict[str, Any], gradient: ndarray) -> ndarray:
    alpha = now["beta2"]
    state.square *= alpha
    state.square += (1 - alpha) * gradient * gradient
    square = state.square
    if now["centered"]:
        assert state.mean is not None
        state.mean += (1 - alpha) * (gradient - state.mean)
        square = square - state.mean * state.mean
    divided: ndarray = 1 / (np.sqrt(square) + now["eps"])
    if state.weight is not None and state.moment is not None:
        if now["momentum"] > 0:
            state.moment *= now["momentum"]
            state.moment += divided * gradient
            state.weight -= now["lr"] * state.moment
        else:
            state.weight -= now["lr"] * divided * gradient
    return divided


def _adagrad(state: _State, now: dict[str, Any], gradient: ndarray) -> ndarray:
    state.square += gradient * gradient
    divided: ndarray = 1 / (np.sqrt(state.square) + now["eps"])
    if state.weight is not None:
        state.weight -= _decayed(now, state.step) * divided * gradient
    return divided


# Their adjoints: (C without clipping and sign, P, Q) before a step, where p and q are the factors of weight and first moment
# after it


def _adam_back(p: ndarray, q: ndarray, divided: ndarray, now: dict[str, Any], step: int) -> tuple[ndarray, ndarray, ndarray]:
    beta1, lr, decay = now["beta1"], now["lr"], now["decay"]
    through = q - lr / (1 - beta1**step) * divided * p
    factor = (1 - beta1) * through
    return factor, p * (1 - lr * decay) if now["decoupled"] else p + decay * factor, beta1 * through


def _rmsprop_back(p: ndarray, q: ndarray, divided: ndarray, now: dict[str, Any], step: int) -> tuple[ndarray, ndarray, ndarray]:
    if now["momentum"] > 0:
        through = q - now["lr"] * p
        factor, q = divided * through, now["momentum"] * through
    else:
        factor = -now["lr"] * divided * p
    return factor, p + now["decay"] * factor, q


def _adagrad_back(p: ndarray, q: ndarray, divided: ndarray, now: dict[str, Any], step: int) -> tuple[ndarray, ndarray, ndarray]:
    factor = -_decayed(now, step) * divided * p
    return factor, p + now["decay"] * factor, q


def _decayed(now: dict[str, Any], step: int) -> float:
    return float(now["lr"]) / (1 + (step - 1) * float(now["lr_decay"]))


class _Together:
    """The patterns of all layers that share a parameter, as the one that is asked sees them, one step at a time."""

    def __init__(self, rows: Sequence[tuple[Source, "_Rows"]], inputs: Some) -> None:
        self._rows, self._inputs = rows, inputs

    def read(self, number: int, outputs: Int64[ndarray, " b"]) -> Iterator[tuple[Source, int, ndarray, ndarray, float]]:
        """For each layer and rank the row number of the first pattern in the step, some of x and e, and which share they are."""
        for source, rows in self._rows:
            wanted = np.arange(source.layer.d_out)[source.errors(outputs, self._inputs)]
            for first, x, e in rows.read(number, wanted):
                yield source, first, *source.seen(source.keys(x, outputs, self._inputs), e), rows.rate(number)


class _Rows:
    """The patterns of a layer, one step at a time; steps must be in order, as each rank writes them."""

    def __init__(self, store: "Store", layer: Layer, kind: str) -> None:
        self._log: Log = store.patterns(layer)
        self._layer, self._kind, self._path = layer, kind, store.path
        index, ranks = store.layers.index(layer), store.steps.rows_by_rank(len(store.layers))
        self._counts = [counts[:, index] for counts in ranks]
        self._shares = shares(self._log, len(ranks))
        self._ends = [first + np.cumsum(counts) for (first, _), counts in zip(self._shares, self._counts, strict=True)]
        rates = store.rates(layer)
        self._rates = None if rates is None else np.where(sum(self._counts) > 0, rates.rates, 1.0)

    def rate(self, number: int) -> float:
        """The share of the patterns of the step in this place that was recorded; 1 where there are none."""
        return 1.0 if self._rates is None else float(self._rates[number])

    def read(self, number: int, outputs: Int64[ndarray, " b"]) -> list[tuple[int, ndarray, ndarray]]:
        """Row number of the first, x and some of e in float64, of what each rank has of the step in this place of the steps log."""
        return [self._read(rank, number, outputs) for rank in range(len(self._counts))]

    def _read(self, rank: int, number: int, outputs: Int64[ndarray, " b"]) -> tuple[int, ndarray, ndarray]:
        begin, behind = self._shares[rank]
        end = int(self._ends[rank][number])
        first = end - int(self._counts[rank][number])
        found: list[tuple[ndarray, ndarray]] = []
        for group, some in self._log.spans(first, end):
            mapping = group.part.mapping
            e = mapping.array(group, "e", some)[:, outputs].astype(np.float64)
            x = wide(mapping.array(group, "x", some)) if self._kind == "weight" else np.ones((len(e), 1))
            found.append((x, e))
        if end > behind or sum(len(x) for x, _ in found) != end - first:
            of = f", rank {rank}" if len(self._counts) > 1 else ""
            expected = f"expected {self._counts[rank].sum()} patterns, as the steps log says"
            raise DamagedError(
                f"{self._path}: layer {self._layer.number} ({self._layer.name}){of}: {expected}, found {behind - begin}; "
                "look with dualstore verify"
            )
        width = self._layer.d_in if self._kind == "weight" else 1
        if len(found) == 1:
            return first, *found[0]
        found = found or [(np.zeros((0, width)), np.zeros((0, len(outputs))))]
        return first, np.concatenate([x for x, _ in found]), np.concatenate([e for _, e in found])

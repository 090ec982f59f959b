"""Weights as if the memories of some groups of patterns had been masked or amplified.

    W(gains) = a W_0 + q b_0 + sum_g gain_g dW_g        dW_g = sum_{t in g} c_t e_t x_t^T, the bias with x = 1

One pass over the log gives dW_g of every group that a gain names; weights for any gains follow without another.

Source: Gershman, Fiete, Irie 2025 (arXiv 2501.02950), the follow-up experiment on continual learning.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy import ndarray

from dualstore.adaptive import Stretch, walk
from dualstore.coefficients import Average, When, last_step
from dualstore.errors import QueryError
from dualstore.keys import add_products, through, wide
from dualstore.log import Log
from dualstore.probes import ProbeRows
from dualstore.rates import sample_note
from dualstore.result import Result
from dualstore.rows import Selector
from dualstore.scan import block_rows_of, pieces
from dualstore.schema import Layer
from dualstore.sharing import whole_sources
from dualstore.weights import Affine, coefficients_of, initial_of, replayed, temporary

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["Gain", "evaluate", "gains_of", "reweigh"]

_ROWS = 2048
"""Probes that pass through the network at once."""
_FIT = 1e-4
"""How far, relative to the largest, a layer's recorded inputs may be from the activation of the outputs before."""


@dataclass(frozen=True)
class Gain:
    """One factor, or several to be tried, for the patterns where an SQL expression has a value."""

    expression: str
    value: Any
    """Text is compared with the expression's value as text, a number with it as a number; None is NULL."""
    factors: tuple[float, ...]


@dataclass(frozen=True)
class _Memory:
    """What one layer's weights consist of."""

    initial: Affine
    changes: dict[tuple[bool, ...], Affine]
    """The change by the patterns for which just these gains count."""

    def under(self, factors: Sequence[float], *, with_initial: bool) -> Affine:
        """The weights with one factor for each gain."""
        first = factors[0] if with_initial else 1.0
        weight, bias = first * self.initial.weight, first * self.initial.bias
        for counts, change in self.changes.items():
            factor = math.prod(factor for factor, here in zip(factors, counts, strict=True) if here)
            weight, bias = weight + factor * change.weight, bias + factor * change.bias
        return Affine(weight, bias)


def gains_of(given: Mapping[str, Mapping[Any, Any]] | None) -> list[Gain]:
    """Gains from `{expression: {value: factor}}`; a factor may be a list to be tried. Raises QueryError."""
    found = []
    for expression, values in (given or {}).items():
        if not isinstance(values, Mapping) or not isinstance(expression, str) or not expression.strip():
            raise QueryError(f"gains: expected {{expression: {{value: factor}}}}, found {expression!r}: {values!r}")
        for value, factor in values.items():
            factors = factor if isinstance(factor, list | tuple | np.ndarray) else [factor]
            if not len(factors) or not all(_is_number(one) for one in factors):
                raise QueryError(f"gains: {expression} = {value}: expected a finite factor, found {factor!r}")
            plain = value.item() if isinstance(value, np.generic) else value
            found.append(Gain(expression, plain, tuple(float(one) for one in factors)))
    return found


def reweigh(
    store: "Store", layers: Sequence[Layer], gains: Sequence[Gain], *, where: str | None, until: When, with_initial: bool
) -> list[Affine]:
    """See `Store.weights`; for several layers, each gain with its only factor."""
    if any(len(gain.factors) > 1 for gain in gains):
        raise QueryError("gains: expected one factor for each value, found several; evaluate tries several")
    factors = [gain.factors[0] for gain in gains]
    return [
        memory.under(factors, with_initial=with_initial) for memory in _memories(store, layers, gains, where, until, with_initial)
    ]


def evaluate(store: "Store", gains: Sequence[Gain], *, where: str | None, until: When, with_initial: bool) -> Result:
    """See `Store.evaluate`."""
    for layer in store.layers:
        whole_sources(store, layer)  # refuses layers without errors
    network = _Network(store)
    memories = list(_memories(store, store.layers, gains, where, until, with_initial))
    tried = list(itertools.product(*(gain.factors for gain in gains)))
    rows: dict[str, list[Any]] = {name: [] for name in (*_columns(gains), "task", "probes", "accuracy")}
    for factors in tried:
        right = network.right([memory.under(factors, with_initial=with_initial) for memory in memories])
        for task in sorted(set(network.tasks.tolist())):
            mine = network.tasks == task
            known = store.labelling.names[task] if task >= 0 else None
            for name, value in (*zip(_columns(gains), factors, strict=True), ("task", known), ("probes", int(mine.sum())),
                                ("accuracy", float(right[mine].mean()))):  # fmt: skip
                rows[name].append(value)
    types = {"task": pa.string(), "probes": pa.int64()}
    table = pa.table({name: pa.array(values, types.get(name, pa.float64())) for name, values in rows.items()})
    shown = "accuracy on the recorded probes" + (" with W_0 scaled, too" if with_initial else "")
    shown += (f" where {where}" if where else "") + ("" if until is None else f", {_named(until)}")
    notes = [f"activations between the layers, as the probes show: {', '.join(network.named) or 'none'}"]
    notes += sample_note([(layer, store.rates(layer)) for layer in store.layers], "estimated from a recorded share of the patterns")
    return Result(table, shown, notes=notes)


def _named(until: When) -> str:
    """How a title calls weights that are not the last ones."""
    if not isinstance(until, Average):
        return f"after step {until}"
    kind = "the mean of the weights" if until.decay is None else f"the exponential mean (decay {until.decay:g}) of the weights"
    every = "each step" if until.every == 1 else f"every {until.every} steps"
    return f"{kind} after {every} from {until.first}" + ("" if until.last is None else f" to {until.last}")


def _columns(gains: Sequence[Gain]) -> list[str]:
    return [f"{gain.expression}={gain.value}" for gain in gains]


def _memories(
    store: "Store", layers: Sequence[Layer], gains: Sequence[Gain], where: str | None, until: When, with_initial: bool
) -> Iterator[_Memory]:
    """One pass over the log of each layer, and those of layers that share its weight.

    Raises QueryError at the end for a gain whose value no pattern of any layer has.
    """
    if with_initial and len(gains) != 1:
        raise QueryError(f"with_initial: expected one gain, whose factor W_0 gets, too; found {len(gains)}")
    missing = set(range(len(gains)))
    for layer in layers:
        memory = _memory(store, layer, gains, where, until)
        missing -= {number for counts in memory.changes for number, here in enumerate(counts) if here}
        yield memory
    for gain in [gains[number] for number in sorted(missing)]:
        known = _known(store, layers[0], gain.expression, where, last_step(until))
        which = "no pattern" + (" that counts" if where is not None or until is not None else "")
        raise QueryError(f"gain {gain.expression}={gain.value}: {which} has this value; there are {known}")


def _memory(store: "Store", layer: Layer, gains: Sequence[Gain], where: str | None, until: When) -> _Memory:
    whole_sources(store, layer)  # refuses what lacks errors or patterns
    counts = [f"CASE WHEN {_condition(gain)} THEN '1' ELSE '0' END" for gain in gains]
    for gain in gains:  # an expression that is wrong is named as it was given
        Selector(store.labelling, None, gain.expression)
    select = Selector(store.labelling, where, f"concat({', '.join(counts)})" if gains else "''", last_step(until))
    if replayed(store):
        initial, changes = _replayed_changes(store, layer, select, until)
    else:
        initial, changes = _changes(store, layer, select, until)
    found = {tuple(here == "1" for here in select.values[code]): change for code, change in changes.items()}
    return _Memory(initial, found)


def _changes(store: "Store", layer: Layer, select: Selector, until: When) -> tuple[Affine, dict[int, Affine]]:
    """What is left of the initial weights, and the change by the patterns of each group of a selection."""
    factors = {kind: coefficients_of(store, layer, kind, until) for kind in ("weight", "bias")}
    initial = Affine(*(initial_of(store, layer, kind, found) for kind, found in factors.items()))
    changes: dict[int, Affine] = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for source in whole_sources(store, layer):
            rates = store.rates(source.layer)
            block_rows = block_rows_of(store.options.budget_bytes, 16 * (source.layer.key_width + source.layer.d_out), 1)
            for piece in pieces(store.patterns(source.layer), select, block_rows, errors=True):
                assert piece.codes is not None
                for code in np.unique(piece.codes).tolist():
                    mine = np.flatnonzero(piece.codes == code)
                    keys, steps = source.keys(piece.selected_keys(mine), slice(None), slice(None)), piece.steps(mine)
                    x, e = source.seen(wide(keys), piece.selected_errors(mine))
                    often = 1.0 if rates is None else 1 / rates.at(steps)
                    change = changes.setdefault(code, _nothing(layer))
                    add_products(change.weight, e, x, factors["weight"].at(steps) * often)
                    if source.own:
                        change.bias[...] += (factors["bias"].at(steps) * often) @ e
    return initial, changes


def _replayed_changes(store: "Store", layer: Layer, select: Selector, until: When) -> tuple[Affine, dict[int, Affine]]:
    """The same where the optimiser is replayed. 4 bytes for each pattern lie in a temporary file."""
    codes_of = {source.layer.number: _codes(store.patterns(source.layer), select) for source in whole_sources(store, layer)}
    changes: dict[int, Affine] = {code: _nothing(layer) for code in range(len(select.values))}
    initial, outputs = _nothing(layer), np.arange(layer.d_out)
    for kind, start in (("weight", initial.weight), ("bias", initial.bias[:, None])):
        done = 0
        for part in walk(store, layer, kind, until, outputs):
            if not isinstance(part, Stretch):
                start[done : done + len(part)] = part
                done += len(part)
                continue
            some = codes_of[part.source.layer.number][part.first : part.first + len(part.x)]
            for code in np.unique(some[some >= 0]).tolist():
                change, mine = changes[code], some == code
                total = change.weight if kind == "weight" else change.bias[:, None]
                total[part.outputs] += part.change_by(mine)
    return initial, changes


def _codes(log: Log, select: Selector) -> ndarray:
    """The group of each row of a log; -1 where it does not count."""
    codes = temporary((log.rows,), np.int32)
    codes[:] = -1
    for piece in pieces(log, select, 1 << 20):
        codes[piece.group.first + piece.local] = piece.codes
    return codes


def _nothing(layer: Layer) -> Affine:
    return Affine(np.zeros((layer.d_out, layer.d_in)), np.zeros(layer.d_out))


def _known(store: "Store", layer: Layer, expression: str, where: str | None, until: int | None) -> str:
    """The first few values of an expression, as text."""
    select = Selector(store.labelling, where, expression, until)
    for source in whole_sources(store, layer):
        for groups in store.patterns(source.layer).chunks(1 << 17):
            select(groups[0].part.mapping, groups)
    named = {None: "NULL", True: "true", False: "false"}
    values = sorted(named[value] if value is None or isinstance(value, bool) else str(value) for value in select.values)
    return ", ".join(values[:12]) + (f" and {len(values) - 12} more" if len(values) > 12 else "")


def _condition(gain: Gain) -> str:
    """SQL that tells the patterns for which a gain counts."""
    expression, value = f"({gain.expression}\n)", gain.value
    if value is None:
        return f"{expression} IS NULL"
    if isinstance(value, bool):
        return f"CAST({expression} AS VARCHAR) = '{str(value).lower()}'"
    if isinstance(value, int | float):
        return f"TRY_CAST({expression} AS DOUBLE) = CAST({_quoted(repr(float(value)))} AS DOUBLE)"
    null = f" OR {expression} IS NULL" if value == "NULL" else ""
    return f"(CAST({expression} AS VARCHAR) = {_quoted(str(value))}{null})"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool) and math.isfinite(value)


_ACTIVATIONS: dict[str, Callable[[ndarray], ndarray]] = {
    "none": lambda y: y,
    "ReLU": lambda y: np.maximum(y, 0),
    "tanh": np.tanh,
    "sigmoid": lambda y: 1 / (1 + np.exp(-y)),
    "leaky ReLU": lambda y: np.where(y > 0, y, 0.01 * y),
    "ELU": lambda y: np.where(y > 0, y, np.expm1(np.minimum(y, 0))),
    "SiLU": lambda y: y / (1 + np.exp(-y)),
    "GELU": lambda y: y * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(y / math.sqrt(2))),
    "GELU (tanh)": lambda y: 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
    "softplus": lambda y: np.logaddexp(y, 0),
}


class _Network:
    """The recorded layers as a chain: the input of each is the activation of the output before, as the probes show."""

    def __init__(self, store: "Store") -> None:
        self._rows = [ProbeRows.of(store.probes(layer)) for layer in store.layers]
        first = self._rows[0]
        labels, tasks = first.scalars("label"), first.scalars("task")
        if not len(first.row) or not (labels >= 0).any():
            raise QueryError(f"{store.path}: accuracy needs recorded probes with labels: rec.probe(test_id, label)")
        self.named = [self._activation(store, number) for number in range(1, len(store.layers))]
        self._activations = [_ACTIVATIONS[name] for name in self.named]
        self._kept = np.flatnonzero(labels >= 0)
        self._labels, self.tasks = labels[self._kept], store.labelling.named(tasks[self._kept])

    def _activation(self, store: "Store", number: int) -> str:
        """The activation before a layer. Raises QueryError where the probes show none of those that are known."""
        before, after = self._rows[number - 1], self._rows[number]
        names = [f"{layer.number} ({layer.name})" for layer in store.layers[number - 1 : number + 1]]
        same = np.array_equal(before.test_id, after.test_id) and np.array_equal(before.position, after.position)
        follows = store.layers[number].keys == "vector" and store.layers[number - 1].d_out == store.layers[number].d_in
        if same and follows:
            some = np.unique(np.linspace(0, len(before.row) - 1, min(64, len(before.row))).astype(int))
            y, x = before.select(some).vectors("y").astype(np.float64), after.select(some).vectors("x").astype(np.float64)
            with np.errstate(over="ignore"):
                errors = {name: float(np.abs(apply(y) - x).max()) for name, apply in _ACTIVATIONS.items()}
            best = min(errors, key=lambda name: errors[name])
            if errors[best] <= _FIT * max(float(np.abs(x).max()), 1e-30):
                return best
        raise QueryError(
            f"{store.path}: accuracy under gains needs a chain of layers; the probes of layers {' and '.join(names)} fit none of "
            f"{', '.join(_ACTIVATIONS)}; write the weights with reweigh and evaluate them in the model itself"
        )

    def right(self, weights: Sequence[Affine]) -> ndarray:
        """Which probes the network would answer with their label."""
        found = [self._predict(start, weights) for start in range(0, len(self._kept), _ROWS)]
        answers: ndarray = np.concatenate(found) == self._labels
        return answers

    def _predict(self, start: int, weights: Sequence[Affine]) -> ndarray:
        some = self._kept[start : start + _ROWS]
        x = wide(self._rows[0].select(some).vectors("x"))
        for layer, apply in zip(weights, [*self._activations, _ACTIVATIONS["none"]], strict=True):
            with np.errstate(over="ignore"):
                x = apply(through(x, layer.weight) + layer.bias)
        found: ndarray = x.argmax(axis=1)
        return found

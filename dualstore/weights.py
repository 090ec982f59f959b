"""Weights: those that training started and ended with, and those rebuilt from the log.

W_T = a W_0 + q b_0 + sum_t c_t e_t x_t^T       b_T the same with x = 1
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dualstore.adaptive import ADAPTIVE, Stretch, walk
from dualstore.coefficients import Coefficients, When, last_step, sgd_coefficients
from dualstore.errors import DamagedError, InexactError, StoreError
from dualstore.keys import add_products, through, wide
from dualstore.schema import Layer
from dualstore.shapes import Float64, Int64
from dualstore.sharing import Some, Source, sources_of, whole_sources
from dualstore.writer import write_whole

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = [
    "Affine",
    "Dual",
    "Tensors",
    "coefficients_of",
    "initial_of",
    "lent",
    "rebuild",
    "rebuild_bias",
    "replayed",
    "save_weights",
    "temporary",
    "trained",
]

_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Affine:
    """y = W x + b in float64; b is zero where the layer has none, and the sum where it has several."""

    weight: Float64[ndarray, "o i"]
    bias: Float64[ndarray, " o"]

    @property
    def joined(self) -> Float64[ndarray, "o i1"]:
        """[W | b]."""
        return np.column_stack([self.weight, self.bias])


@dataclass(frozen=True)
class Dual:
    """A layer as its memory sees it."""

    initial: Affine
    """a W_0 + q b_0: what is left of the state that training started with."""
    change: Affine
    """The sum over all patterns, also those of layers that share the weight."""
    outputs: Float64[ndarray, "p o"]
    """For some queries: sum_t c_t alpha_t e_t, the same change seen as attention."""

    @property
    def rebuilt(self) -> Affine:
        """The weights after the last step."""
        return Affine(self.initial.weight + self.change.weight, self.initial.bias + self.change.bias)


def rebuild(
    store: "Store",
    layer: Layer,
    queries: Float64[ndarray, "p i"],
    until: When = None,
    outputs: Int64[ndarray, " o"] | None = None,
    inputs: Int64[ndarray, " i"] | None = None,
) -> Dual:
    """The layer's weights from initial weights and rows, in one pass over its log, and its response to `queries`.

    As they were after step `until`, by default after the last one; of some of the layer's outputs and inputs, which ascend, by
    default all. Of a layer of which only a share of the patterns was recorded they are estimates, and refused unless the store
    is opened for that.

    Memory: two matrices of the weights' size in float64 and one block of rows. Raises InexactError where the
    optimiser's coefficients are not known.
    """
    sources = whole_sources(store, layer)
    if replayed(store):
        return _replay(store, layer, queries, until, np.arange(layer.d_out) if outputs is None else outputs, inputs)
    parts = {kind: coefficients_of(store, layer, kind, until) for kind in ("weight", "bias")}
    start = Affine(*(initial_of(store, layer, kind, found) for kind, found in parts.items()))
    chosen, looked = _chosen(outputs, inputs)
    start = Affine(start.weight[chosen][:, looked], start.bias[chosen])
    change = Affine(np.zeros_like(start.weight), np.zeros_like(start.bias))
    attended = np.zeros((len(start.bias), len(queries)))
    with np.errstate(invalid="ignore", over="ignore"):  # recorded NaN and infinity show in the residual
        for source in sources:
            for steps, x, e in _rows(store, source, until, chosen, looked):
                c = parts["weight"].at(steps)
                add_products(change.weight, e, x, c)
                add_products(attended, e, through(x, queries), c)
                if source.own:
                    change.bias[...] += parts["bias"].at(steps) @ e
    return Dual(start, change, attended.T)


def lent(
    store: "Store", layer: Layer, queries: Float64[ndarray, "p i"], until: When, outputs: Some, inputs: Some
) -> Float64[ndarray, "p o"]:
    """What the patterns of layers that share a layer's weight add to its response to queries. Not of an optimiser `replayed`."""
    found = np.zeros((len(np.arange(layer.d_out)[outputs]), len(queries)))
    c = coefficients_of(store, layer, "weight", until)
    for source in sources_of(store, layer)[1:]:
        for steps, x, e in _rows(store, source, until, outputs, inputs):
            add_products(found, e, through(x, queries), c.at(steps))
    return found.T


def _chosen(outputs: Int64[ndarray, " o"] | None, inputs: Int64[ndarray, " i"] | None) -> tuple[Some, Some]:
    return slice(None) if outputs is None else outputs, slice(None) if inputs is None else inputs


def replayed(store: "Store") -> bool:
    """Whether a step's factor is a matrix, which is to be replayed (`adaptive`), instead of a coefficient.

    Raises InexactError where neither is known, unless the store was opened to take any optimiser for plain SGD.
    """
    if not store.info_file.exact and not store.inexact:
        known = ", ".join(("SGD", *ADAPTIVE))
        raise InexactError(
            f"{store.path}: values need the optimiser's factors: known for {known} of torch, not for {store.info_file.optimizer}; "
            "attention (query, totals, votes) is exact all the same; inexact=True or --inexact takes it for plain SGD"
        )
    return store.info_file.exact and store.info_file.optimizer in ADAPTIVE


def _replay(
    store: "Store",
    layer: Layer,
    queries: Float64[ndarray, "p i"],
    until: When,
    outputs: Int64[ndarray, " o"],
    inputs: Int64[ndarray, " i"] | None,
) -> Dual:
    """See `rebuild`."""
    weight, bias = (_replay_one(store, layer, kind, until, outputs, inputs) for kind in ("weight", "bias"))
    start, change = (Affine(w, b[:, 0]) for w, b in zip(weight, bias, strict=True))
    return Dual(start, change, queries @ change.weight.T)


def _replay_one(
    store: "Store", layer: Layer, kind: str, until: When, outputs: Int64[ndarray, " o"], inputs: Int64[ndarray, " i"] | None = None
) -> tuple[ndarray, ndarray]:
    """What is left of the initial state of a parameter, and its change by all patterns."""
    width = 1 if kind == "bias" else layer.d_in if inputs is None else len(inputs)
    initial, change, done = np.zeros((len(outputs), width)), np.zeros((len(outputs), width)), 0
    for part in walk(store, layer, kind, until, outputs, inputs):
        if isinstance(part, Stretch):
            change[done : done + len(part.outputs)] += part.change
        else:
            initial[done : done + len(part)] = part
            done += len(part)
    return initial, change


def rebuild_bias(store: "Store", layer: Layer, until: When) -> Float64[ndarray, " o"]:
    """The bias after step `until`, where the optimiser is `replayed`."""
    initial, change = _replay_one(store, layer, "bias", until, np.arange(layer.d_out))
    found: ndarray = (initial + change)[:, 0]
    return found


def coefficients_of(store: "Store", layer: Layer, kind: str, until: When = None) -> Coefficients:
    """Coefficients of the layer's "weight" or "bias" after step `until`, by default the last.

    Where the bias is the sum of several parameters, all of which move by the same, those of the sum, by the mean of them.
    Raises InexactError where they are not known. Not of an optimiser that is `replayed`.
    """
    assert not replayed(store)
    buffered = f"{layer.name}.{kind}.momentum_buffer" in store.tensors("initial")
    group = layer.weight_group if kind == "weight" else layer.bias_group
    one = sgd_coefficients(store.steps, layer, group, buffered=buffered, until=until, kind=kind)
    times = 1 if kind == "weight" else len(layer.bias_places)
    return one if times <= 1 else replace(one, c=times * one.c, initial=times * one.initial, buffer=times * one.buffer)


def initial_of(store: "Store", layer: Layer, kind: str, found: Coefficients) -> ndarray:
    """What is left of the layer's first weight or bias, a W_0 + q b_0 in float64; zeros for a bias that it lacks.

    Raises DamagedError where the file does not have it.
    """
    start = store.tensors("initial")
    name, shape = f"{layer.name}.{kind}", (layer.d_out, layer.d_in) if kind == "weight" else (layer.d_out,)
    if kind == "bias" and not layer.bias:
        return np.zeros(shape)
    initial = _tensor(start, name, shape, store) * found.initial
    buffer = start.get(f"{name}.momentum_buffer")
    return initial if buffer is None else initial + found.buffer * buffer.astype(np.float64)


class Tensors(Mapping[str, NDArray[Any]]):
    """Tensors of a safetensors file by name; each is read when it is asked for.

    Raises StoreError where the file is missing, DamagedError where it is unreadable.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise StoreError(
                f"{path}: expected the weights of the recording, found no file; an unfinished recording has no final ones"
            )
        self._path = path
        self._names = frozenset(self._read(lambda file: file.keys()))

    def _read(self, what: Callable[[Any], Any]) -> Any:
        try:
            with safe_open(self._path, "numpy") as file:
                return what(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedError(f"{self._path}: expected a safetensors file, found {error}") from error

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        found: ndarray = self._read(lambda file: file.get_tensor(name))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def save_weights(path: Path, tensors: dict[str, NDArray[np.generic]]) -> None:
    """Writes tensors as safetensors, whole or not at all. Raises StoreError."""
    if not path.name:
        raise StoreError(f"{str(path)!r}: expected the name of a file to write")
    try:
        write_whole(path, save(tensors))
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}; choose another place") from error


def temporary(shape: tuple[int, ...], dtype: Any = np.float64) -> ndarray:
    """Zeros in a file that goes when the array goes."""
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile(prefix="dualstore-") as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def trained(store: "Store", layer: Layer, name: str = "final") -> Affine:
    """The layer's weights as the network had them, "initial" or "final"."""
    found = store.tensors(name)
    weight = _tensor(found, f"{layer.name}.weight", (layer.d_out, layer.d_in), store)
    if not layer.bias:
        return Affine(weight, np.zeros(layer.d_out))
    # The file has the mean of several biases.
    return Affine(weight, len(layer.bias_places) * _tensor(found, f"{layer.name}.bias", (layer.d_out,), store))


def _tensor(found: Tensors, name: str, shape: tuple[int, ...], store: "Store") -> ndarray:
    tensor = found.get(name)
    if tensor is None or tensor.shape != shape:
        shown = "nothing" if tensor is None else tensor.shape
        raise DamagedError(f"{store.path}: weights: expected {name!r} of shape {shape}, found {shown}")
    return tensor.astype(np.float64)


def _rows(store: "Store", source: Source, until: When, outputs: Some, inputs: Some) -> Iterator[tuple[ndarray, ndarray, ndarray]]:
    """(steps, x, e) of all patterns up to a step at least, as the asked layer sees them, some of x and e in float64.

    Errors are over their rates.
    """
    until, errors, rates = last_step(until), source.errors(outputs, inputs), store.rates(source.layer)
    for group in store.patterns(source.layer).groups:
        for _, block in group.part.mapping.blocks(group, ["step", "x", "e"], _BLOCK_ROWS):
            if until is not None and len(block["step"]) and block["step"][0] > until:
                break  # of this group; those of other ranks may begin with earlier steps
            x, e = source.keys(block["x"], outputs, inputs), wide(block["e"][:, errors])
            e = e if rates is None else e / rates.at(block["step"])[:, None]
            yield block["step"], *source.seen(wide(x), e)

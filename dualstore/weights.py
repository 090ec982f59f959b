"""Weights: those that training started and ended with, and those rebuilt from the log.

W_T = a W_0 + q b_0 + sum_t c_t e_t x_t^T       b_T the same with x = 1
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dualstore.coefficients import Coefficients, sgd_coefficients
from dualstore.errors import DamagedError, InexactError, StoreError
from dualstore.schema import Layer
from dualstore.shapes import Float64

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["Affine", "Dual", "read_weights", "rebuild"]

_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Affine:
    """y = W x + b in float64; b is zero where the layer has none."""

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
    """The sum over all patterns."""
    outputs: Float64[ndarray, "p o"]
    """For some queries: sum_t c_t alpha_t e_t, the same change seen as attention."""

    @property
    def rebuilt(self) -> Affine:
        """The weights after the last step."""
        return Affine(self.initial.weight + self.change.weight, self.initial.bias + self.change.bias)


def rebuild(store: "Store", layer: Layer, queries: Float64[ndarray, "p i"], until: int | None = None) -> Dual:
    """The layer's weights from initial weights and rows, in one pass over its log, and its response to `queries`.

    As they were after step `until`, by default after the last one.

    Memory: two matrices of the weights' size in float64 and one block of rows. Raises InexactError where the
    optimiser's coefficients are not known.
    """
    if not store.info_file.exact:
        raise InexactError(
            f"{store.path}: values need the optimiser's coefficients: known for torch.optim.SGD, "
            f"not for {store.info_file.optimizer}; "
            "attention (query, totals, votes) is exact all the same"
        )
    start = store.tensors("initial")
    parts = {}
    for kind, group, shape in (
        ("weight", layer.weight_group, (layer.d_out, layer.d_in)),
        ("bias", layer.bias_group, (layer.d_out,)),
    ):
        name = f"{layer.name}.{kind}"
        if kind == "weight" or layer.bias:
            _tensor(start, name, shape, store)
        buffer = start.get(f"{name}.momentum_buffer")
        coefficients = sgd_coefficients(store.steps, layer, group, buffered=buffer is not None, until=until)
        parts[kind] = (coefficients, _initial(start, name, shape, coefficients, buffer))
    change = Affine(np.zeros((layer.d_out, layer.d_in)), np.zeros(layer.d_out))
    outputs = np.zeros((len(queries), layer.d_out))
    with np.errstate(invalid="ignore", over="ignore"):  # recorded NaN and infinity show in the residual
        for steps, x, e in _rows(store, layer, until):
            scaled = e * parts["weight"][0].at(steps)[:, None]  # (rows, o)
            change.weight[...] += scaled.T @ x
            change.bias[...] += parts["bias"][0].at(steps) @ e
            outputs += (queries @ x.T) @ scaled
    return Dual(Affine(parts["weight"][1], parts["bias"][1]), change, outputs)


def read_weights(path: Path) -> dict[str, NDArray[np.generic]]:
    """Tensors by name. Raises StoreError where the file is missing, DamagedError where it is unreadable."""
    if not path.is_file():
        raise StoreError(f"{path}: expected the weights of the recording, found no file; an unfinished recording has no final ones")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(f"{path}: expected a safetensors file, found {error}") from error


def trained(store: "Store", layer: Layer, name: str = "final") -> Affine:
    """The layer's weights as the network had them, "initial" or "final"."""
    found = store.tensors(name)
    weight = _tensor(found, f"{layer.name}.weight", (layer.d_out, layer.d_in), store)
    bias = _tensor(found, f"{layer.name}.bias", (layer.d_out,), store) if layer.bias else np.zeros(layer.d_out)
    return Affine(weight, bias)


def _tensor(found: dict[str, NDArray[np.generic]], name: str, shape: tuple[int, ...], store: "Store") -> ndarray:
    if name not in found or found[name].shape != shape:
        shown = found[name].shape if name in found else "nothing"
        raise DamagedError(f"{store.path}: weights: expected {name!r} of shape {shape}, found {shown}")
    return found[name].astype(np.float64)


def _initial(
    start: dict[str, NDArray[np.generic]], name: str, shape: tuple[int, ...], found: Coefficients, buffer: ndarray | None
) -> ndarray:
    if name not in start:
        return np.zeros(shape)
    initial = start[name].astype(np.float64) * found.initial
    return initial if buffer is None else initial + found.buffer * buffer.astype(np.float64)


def _rows(store: "Store", layer: Layer, until: int | None) -> Iterator[tuple[ndarray, ndarray, ndarray]]:
    """(steps, x, e) of all patterns up to a step at least, x and e in float64."""
    for group in store.patterns(layer).groups:
        for _, block in group.part.mapping.blocks(group, ["step", "x", "e"], _BLOCK_ROWS):
            if until is not None and len(block["step"]) and block["step"][0] > until:
                return
            yield block["step"], block["x"].astype(np.float64), block["e"].astype(np.float64)

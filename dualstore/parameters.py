"""From the matrices of layers back to the parameters of the model that they are made of."""

import math
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from numpy import ndarray

from dualstore.errors import DamagedError, DualstoreWarning
from dualstore.schema import Layer, Place
from dualstore.shapes import Bool, Float64
from dualstore.weights import Affine

__all__ = ["parameters_of"]


def parameters_of(layers: Sequence[Layer], weights: Sequence[Affine]) -> dict[str, ndarray]:
    """The model's parameters by name, in their own shapes, from the weights of layers in float64.

    Where a layer's bias is the sum of several parameters, the first has all of it and the others are zero: the outputs are the
    same. A parameter that the layers do not cover whole is left out, with a warning.
    """
    found: dict[str, _Parameter] = {}
    for layer, affine in zip(layers, weights, strict=True):
        for place, matrix in (*_weights(layer, affine.weight), *_biases(layer, affine.bias)):
            found.setdefault(place.parameter, _Parameter(place, matrix)).put(layer, place, matrix)
    for name, parameter in found.items():
        if not parameter.covered.all():
            rows = f"{int((~parameter.covered).sum())} of {len(parameter.covered)} rows belong to no recorded layer"
            warnings.warn(f"parameter {name!r}: {rows}; it is left out", DualstoreWarning, stacklevel=3)
    return {name: parameter.values.reshape(parameter.shape) for name, parameter in found.items() if parameter.covered.all()}


class _Parameter:
    """One parameter, all dimensions beyond the first flattened, and which of its rows are known."""

    def __init__(self, place: Place, matrix: Float64[ndarray, "r c"]) -> None:
        rows = len(matrix) if place.rows is None else place.rows[1]
        self.shape = (rows, matrix.shape[1]) if place.shape is None else place.shape
        self.values = np.zeros((self.shape[0], math.prod(self.shape[1:])))
        self.covered: Bool[ndarray, " r"] = np.zeros(self.shape[0], bool)

    def put(self, layer: Layer, place: Place, matrix: Float64[ndarray, "r c"]) -> None:
        rows = slice(*(place.rows or (0, len(self.values))))
        if self.values[rows].shape != matrix.shape:
            where = f"layer {layer.number} ({layer.name}): place in {place.parameter!r}"
            raise DamagedError(f"{where}: expected {matrix.shape}, found {self.values[rows].shape}; correct store.json")
        self.values[rows], self.covered[rows] = matrix, True


def _weights(layer: Layer, weight: Float64[ndarray, "o i"]) -> Iterator[tuple[Place, ndarray]]:
    """Each place of a weight with its matrix, as the parameter has it; those behind one of unknown width are the last."""
    column = 0
    for place in layer.weight_places:
        matrix = weight[:, column : column + _width(place, layer.d_in - column)]
        column += matrix.shape[1]
        yield place, matrix.T if place.transposed else matrix


def _width(place: Place, left: int) -> int:
    """Columns of a layer's matrix that a place takes: all that are left where it does not say its shape."""
    if place.shape is None:
        return left
    if not place.transposed:
        return math.prod(place.shape[1:])
    return place.shape[0] if place.rows is None else place.rows[1] - place.rows[0]


def _biases(layer: Layer, bias: Float64[ndarray, " o"]) -> Iterator[tuple[Place, ndarray]]:
    for number, place in enumerate(layer.bias_places):
        values = bias[:, None] if number == 0 else np.zeros((len(bias), 1))
        yield place if place.shape is not None else _line(place, len(bias)), values


def _line(place: Place, size: int) -> Place:
    """The place of a bias, whose parameter has one dimension, with its shape."""
    return Place(place.parameter, place.rows, shape=(size if place.rows is None else place.rows[1],))

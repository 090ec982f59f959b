"""Layers that share a weight: whose patterns move it, and how these look from the layer that is asked.

The patterns of all layers that name the same places of the model's parameters add to the same numbers. Where one of them has
the matrix turned round, as an embedding tied to an output layer has, key and error of its patterns change places:
(e x^T)^T = x e^T.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numpy import ndarray

from dualstore.errors import DamagedError, InexactError
from dualstore.keys import values_of
from dualstore.rates import check_whole
from dualstore.schema import Layer
from dualstore.shapes import Int64

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["Some", "Source", "sources_of", "whole_sources", "without_errors"]

Some = Int64[ndarray, " _"] | slice
"""Which rows or columns of a weight, ascending."""


@dataclass(frozen=True)
class Source:
    """A layer whose patterns move the weight of the layer that is asked."""

    layer: Layer
    own: bool = True
    """Whether it is that layer itself."""
    turned: bool = False
    """Whether its matrix is that of the other turned round."""

    def errors(self, outputs: Some, inputs: Some) -> Some:
        """Which values of an error matter for some elements of the asked layer's weight."""
        return inputs if self.turned else outputs

    def keys(self, x: ndarray, outputs: Some, inputs: Some) -> ndarray:
        """The values of keys that matter. Raises DamagedError for a token that the layer does not have."""
        if x.ndim == 1 and len(x) and not 0 <= x.min() <= x.max() < self.layer.d_in:
            known = f"expected tokens from 0 to {self.layer.d_in - 1}, found {x.min()} to {x.max()}"
            raise DamagedError(f"layer {self.layer.number} ({self.layer.name}): {known}; restore the part")
        return values_of(x, outputs if self.turned else inputs)

    def seen(self, x: ndarray, e: ndarray) -> tuple[ndarray, ndarray]:
        """Key and error as the asked layer would have them."""
        return (e, x) if self.turned else (x, e)


def sources_of(store: "Store", layer: Layer) -> tuple[Source, ...]:
    """The layers whose patterns move a layer's weight, itself first.

    Raises InexactError where one of them was recorded without errors: there are no values then.
    """
    lacking = without_errors(store, layer)
    if lacking is not None:
        raise InexactError(
            f"{store.path}: {lacking}: expected errors for a score other than attention and for weights, found keys only"
        )
    return _sharing(store, layer)


def whole_sources(store: "Store", layer: Layer) -> tuple[Source, ...]:
    """`sources_of`, for sums over all of their patterns.

    Raises InexactError also where only a share of one's patterns was recorded, unless the store is opened to estimate them.
    """
    found = sources_of(store, layer)
    for source in found:
        check_whole(store.path, source.layer, store.rates(source.layer), inexact=store.inexact)
    return found


def without_errors(store: "Store", layer: Layer) -> str | None:
    """Which of the layers that move a layer's weight has no errors, in words."""
    for source in _sharing(store, layer):
        if not source.layer.errors:
            shared = "" if source.own else f", and shares the weight of layer {layer.number} ({layer.name})"
            return f"layer {source.layer.number} ({source.layer.name}) was recorded without errors (keys_only){shared}"
    return None


def _sharing(store: "Store", layer: Layer) -> tuple[Source, ...]:
    others = [other for other in store.layers if other.number != layer.number and _place(other) == _place(layer)]
    turned = [other.weight_places[0].transposed != layer.weight_places[0].transposed for other in others]
    return Source(layer), *(Source(other, own=False, turned=round_) for other, round_ in zip(others, turned, strict=True))


def _place(layer: Layer) -> list[tuple[str, tuple[int, int] | None]]:
    return [(place.parameter, place.rows) for place in layer.weight_places]

"""One probe: the inputs and outputs of the layers for some test examples, and the gradients of their losses."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualstore.capture.blocks import BlockCall
from dualstore.capture.names import AnyClaim, Names, labels_of
from dualstore.capture.taps import Rows, Tap, keys_of, vectors_of
from dualstore.errors import RecordError
from dualstore.schema import NO_LABEL, Layer, single

__all__ = ["Probe", "source_of"]

_Vectors = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


class Probe:
    """Layer inputs and outputs of one `probe()` context."""

    def __init__(self, names: Names, predicted: Any, loss: Callable[[Any], torch.Tensor] | None) -> None:
        self.names, self._loss = names, loss
        self._given = None if predicted is None else labels_of(predicted, len(names.ids), "probe(): predicted")
        self._output: torch.Tensor | None = None
        self._outcome: Any = None
        """The model's output as it gave it."""
        self._seen: list[_Seen] = []
        self.blocks: list[BlockCall] = []
        """Calls of residual blocks."""

    def see(self, tap: Tap, x: torch.Tensor, output: torch.Tensor) -> None:
        """Takes one call of recorded layers."""
        # Copies: a layer that works in place after this one would change them.
        x, y = x.detach().clone(), output.detach().clone()
        leading, samples = tap.leading(x, y), len(self.names.ids)
        if tap.is_shared(x, leading, samples):
            self._see_shared(tap, math.prod(leading), tap.rows(x, y))
            return
        claims = [self.names.claim(layer.number, layer.name, leading) for layer in tap.layers]
        seen = self.see_rows(tap.layers, claims, tap.rows(x, y))
        if self._loss is not None and output.requires_grad:
            source_of(output).register_hook(lambda gradient: seen.take([g for _, g in tap.rows(x, gradient.detach().clone())]))

    def _see_shared(self, tap: Tap, rows: int, found: Sequence[Rows]) -> None:
        """Takes a call for all examples together, as if each had made it; its gradient is that of all and is not taken apart."""
        samples = len(self.names.ids)
        claims = [self.names.claim(layer.number, layer.name, (samples, rows)) for layer in tap.layers]
        each = [(k.reshape(rows, *k.shape[k.ndim - (layer.keys == "vector") :]), y.reshape(rows, -1)) for layer, (k, y) in
                zip(tap.layers, found, strict=True)]  # fmt: skip
        self.see_rows(tap.layers, claims, [(k.expand(samples, *k.shape), y.expand(samples, *y.shape)) for k, y in each])

    def see_rows(self, layers: Sequence[Layer], claims: Sequence[AnyClaim], rows: Sequence[Rows]) -> "_Seen":
        """Takes keys and outputs of layers; their gradients may follow."""
        self._seen.append(_Seen(layers, claims, rows))
        return self._seen[-1]

    @property
    def wants_gradients(self) -> bool:
        """Whether a loss was given."""
        return self._loss is not None

    def see_output(self, output: Any) -> None:
        """Takes what the model gave."""
        self._outcome = output
        first = output[0] if isinstance(output, tuple | list) and output else getattr(output, "logits", output)
        if isinstance(first, torch.Tensor) and first.ndim > 1 and first.shape[-1] > 1:
            self._output = first

    def differentiate(self, weights: Sequence[torch.Tensor]) -> None:
        """Takes the gradients of the loss at the outputs that were seen; nothing is added to those of the weights."""
        if self._loss is None or not self._seen:
            return
        if not weights:
            raise RecordError("probe(): loss: no parameter of the model requires a gradient")
        if self._outcome is None:
            raise RecordError("probe(): loss: expected a call of the model itself inside `with rec.probe(...):`, found none")
        with torch.enable_grad():
            losses: Any = self._loss(self._outcome)
            if not isinstance(losses, torch.Tensor) or losses.shape != (len(self.names.ids),) or not losses.requires_grad:
                what = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
                what += " that does not depend on the weights" if getattr(losses, "requires_grad", True) is False else ""
                raise RecordError(
                    f"probe(): loss: expected {len(self.names.ids)} losses, one for each id, found {what}; "
                    'losses of torch give them with reduction="none"'
                )
            torch.autograd.grad(losses.sum(), weights, allow_unused=True)
        self._outcome = None

    def columns(self, step: int, dtype: str) -> "dict[int, tuple[dict[str, NDArray[Any]], *_Vectors]]":
        """Scalar columns, x, y and g of each layer; g is NaN where no loss was given or none depends on the layer."""
        if not self._seen:
            raise RecordError("probe(): no recorded layer was called; call the model inside `with rec.probe(...):`")
        dtype = single(dtype)
        found: dict[int, list[dict[str, NDArray[Any]]]] = {}
        for seen in self._seen:
            for layer, claim, (x, y), g in seen.each():
                columns = dict(claim.named().columns)
                ids = columns.pop("sample_id")
                rows = {"test_id": ids, **columns, "step": np.full(len(ids), step, np.int32), "predicted": self._predicted(claim)}
                rows |= {"x": keys_of(x, layer, dtype), "y": vectors_of(y, dtype), "g": vectors_of(g, dtype)}
                found.setdefault(layer.number, []).append(rows)
        joined = {n: {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]} for n, pieces in found.items()}
        return {n: (columns, columns.pop("x"), columns.pop("y"), columns.pop("g")) for n, columns in joined.items()}

    def _predicted(self, claim: AnyClaim) -> NDArray[Any]:
        values = self._given
        if values is None and self._output is not None and len(self._output) == len(self.names.ids):
            values = self._output.argmax(-1).cpu().numpy().astype(np.int32)
        if values is None or not claim.fits(values):
            return np.full(claim.rows, NO_LABEL, np.int32)
        return claim.spread(values)


class _Seen:
    """Layers that were called together: whose rows, keys and outputs, and the gradients once they are known."""

    def __init__(self, layers: Sequence[Layer], claims: Sequence[AnyClaim], rows: Sequence[Rows]) -> None:
        self._layers, self._claims, self._rows = layers, claims, rows
        self._gradients = [torch.full_like(y, float("nan")) for _, y in rows]

    def take(self, gradients: Sequence[torch.Tensor]) -> None:
        """Takes the gradient at each layer's output."""
        self._gradients = list(gradients)

    def each(self) -> Iterator[tuple[Layer, AnyClaim, Rows, torch.Tensor]]:
        """Layer, claim, keys and outputs, gradients."""
        return zip(self._layers, self._claims, self._rows, self._gradients, strict=True)


def source_of(output: torch.Tensor) -> torch.Tensor:
    """The tensor whose gradient is that of a layer's output, also where operations in place follow."""
    base = output._base  # of a view, an operation in place moves the history to its base
    return base if base is not None and base.numel() == output.numel() and base.requires_grad else output

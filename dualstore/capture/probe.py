"""One probe: the inputs and outputs of the layers for some test examples, and the gradients of their losses."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualstore.capture.names import Claim, Names, labels_of
from dualstore.errors import RecordError
from dualstore.schema import NO_LABEL, Layer

__all__ = ["Probe", "source_of", "vectors_of"]

_Vectors = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


class Probe:
    """Layer inputs and outputs of one `probe()` context."""

    def __init__(self, names: Names, predicted: Any, loss: Callable[[Any], torch.Tensor] | None) -> None:
        self._names, self._loss = names, loss
        self._given = None if predicted is None else labels_of(predicted, len(names.ids), "probe(): predicted")
        self._output: torch.Tensor | None = None
        self._outcome: Any = None
        """The model's output as it gave it."""
        self._seen: list[tuple[Layer, Claim, torch.Tensor, torch.Tensor]] = []
        self._gradients: dict[int, torch.Tensor] = {}
        """By place in `_seen`."""

    def see(self, layer: Layer, x: torch.Tensor, output: torch.Tensor) -> None:
        """Takes one call of a recorded layer."""
        claim = self._names.claim(layer.number, layer.name, x.shape)
        # Copies: a layer that works in place after this one would change them.
        if self._loss is not None and output.requires_grad:
            source_of(output).register_hook(partial(self._see_gradient, len(self._seen)))
        self._seen.append((layer, claim, x.detach().clone(), output.detach().clone()))

    def _see_gradient(self, place: int, gradient: torch.Tensor) -> None:
        self._gradients[place] = gradient.detach().clone()

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
            if not isinstance(losses, torch.Tensor) or losses.shape != (len(self._names.ids),) or not losses.requires_grad:
                what = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
                what += " that does not depend on the weights" if getattr(losses, "requires_grad", True) is False else ""
                raise RecordError(
                    f"probe(): loss: expected {len(self._names.ids)} losses, one for each id, found {what}; "
                    'losses of torch give them with reduction="none"'
                )
            torch.autograd.grad(losses.sum(), weights, allow_unused=True)
        self._outcome = None

    def columns(self, step: int, dtype: str) -> "dict[int, tuple[dict[str, NDArray[Any]], *_Vectors]]":
        """Scalar columns, x, y and g of each layer; g is NaN where no loss was given or none depends on the layer."""
        if not self._seen:
            raise RecordError("probe(): no recorded layer was called; call the model inside `with rec.probe(...):`")
        found: dict[int, list[dict[str, NDArray[Any]]]] = {}
        for place, (layer, claim, x, y) in enumerate(self._seen):
            g = self._gradients.get(place, torch.full_like(y, float("nan")))
            columns = dict(claim.columns())
            ids = columns.pop("sample_id")
            rows = {"test_id": ids, **columns, "step": np.full(len(ids), step, np.int32), "predicted": self._predicted(claim)}
            rows |= {name: vectors_of(tensor, dtype) for name, tensor in (("x", x), ("y", y), ("g", g))}
            found.setdefault(layer.number, []).append(rows)
        joined = {n: {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]} for n, pieces in found.items()}
        return {n: (columns, columns.pop("x"), columns.pop("y"), columns.pop("g")) for n, columns in joined.items()}

    def _predicted(self, claim: Claim) -> NDArray[Any]:
        values = self._given
        if values is None and self._output is not None and len(self._output) == len(self._names.ids):
            values = self._output.argmax(-1).cpu().numpy().astype(np.int32)
        if values is None or values.shape not in (claim.leading, claim.leading[:1]):
            return np.full(int(np.prod(claim.leading)), NO_LABEL, np.int32)
        return claim.spread(values)


def source_of(output: torch.Tensor) -> torch.Tensor:
    """The tensor whose gradient is that of a layer's output, also where operations in place follow."""
    base = output._base  # of a view, an operation in place moves the history to its base
    return base if base is not None and base.numel() == output.numel() and base.requires_grad else output


def vectors_of(tensor: torch.Tensor, dtype: str) -> NDArray[Any]:
    """(rows, width) of the store's type; the tensor's own memory where it already is that."""
    if tensor.ndim == 2 and tensor.device.type == "cpu" and tensor.is_contiguous() and str(tensor.dtype) == f"torch.{dtype}":
        return tensor.detach().numpy()  # nothing to be done, and four calls fewer
    plain = tensor.detach().reshape(-1, tensor.shape[-1]).to("cpu", getattr(torch, dtype)).contiguous()
    return plain.numpy()

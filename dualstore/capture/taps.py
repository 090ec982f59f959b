"""Where rows come from: for each kind of module, how one call and the gradient of its output become keys and errors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from dualstore.capture import convolution
from dualstore.capture.functional import Use
from dualstore.schema import Layer, Place

__all__ = ["ConvolutionTap", "EmbeddingTap", "LinearTap", "ProjectionTap", "Rows", "Tap", "keys_of", "vectors_of"]

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys (n, ..., d_in), or tokens (n, ...), and what belongs to the outputs (n, ..., d_out); n samples, then positions."""


class Tap(ABC):
    """A call that gives rows to some layers."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)

    @abstractmethod
    def leading(self, x: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
        """Samples and positions of a call."""

    @abstractmethod
    def rows(self, x: torch.Tensor, values: torch.Tensor) -> list[Rows]:
        """For each layer its keys and its part of `values`, which are outputs or their gradients."""

    def is_shared(self, x: torch.Tensor, leading: Sequence[int], samples: int) -> bool:
        """Whether the call is one for all of so many samples, as that of a table of positions, spread over them afterwards."""
        return leading[0] == 1 != samples and len(leading) > 1

    def errors(self, x: torch.Tensor, gradient: torch.Tensor) -> list[Rows]:
        """For each layer its keys and errors."""
        return self.rows(x, gradient)


class LinearTap(Tap):
    """A module that multiplies its input by its one weight: nn.Linear, and Conv1D of transformers."""

    def leading(self, x: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
        """All dimensions but the last."""
        return tuple(x.shape[:-1]) or (1,)

    def rows(self, x: torch.Tensor, values: torch.Tensor) -> list[Rows]:
        """Input and output are rows as they are."""
        return [(x, values)]


class ConvolutionTap(Tap):
    """A convolution: the patterns are the places of its output, a layer for each group of channels."""

    def __init__(self, layers: Sequence[Layer], module: nn.Module) -> None:
        super().__init__(layers)
        self._module: Any = module

    def leading(self, x: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
        """Samples, and places in row-major order."""
        places = len(self._module.kernel_size)
        samples = 1 if output.ndim == places + 1 else len(output)
        return samples, math.prod(output.shape[-places:])

    def rows(self, x: torch.Tensor, values: torch.Tensor) -> list[Rows]:
        """What the kernel sees at each place, and all channels there."""
        return list(zip(convolution.keys_of(self._module, x), convolution.errors_of(self._module, values), strict=True))


class EmbeddingTap(Tap):
    """A table of vectors: its keys are the numbers of the rows that are looked up."""

    def __init__(self, layers: Sequence[Layer], module: nn.Embedding) -> None:
        super().__init__(layers)
        self._padding, self._by_count = module.padding_idx, module.scale_grad_by_freq

    def leading(self, x: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
        """The input's own dimensions."""
        return tuple(x.shape) or (1,)

    def rows(self, x: torch.Tensor, values: torch.Tensor) -> list[Rows]:
        """Tokens and vectors."""
        return [(x, values)]

    def is_shared(self, x: torch.Tensor, leading: Sequence[int], samples: int) -> bool:
        """Also of positions 0, 1, ... alone, without a dimension of samples."""
        if len(leading) > 1 or leading[0] == 1:
            return super().is_shared(x, leading, samples)
        return leading[0] != samples or bool(x.equal(torch.arange(samples, dtype=x.dtype, device=x.device)))

    def errors(self, x: torch.Tensor, gradient: torch.Tensor) -> list[Rows]:
        """The gradient as it reaches the table: nothing for padding, and shared by equal tokens where the module says so."""
        if self._padding is not None:
            gradient = gradient * (x != self._padding).unsqueeze(-1)
        if self._by_count:
            _, place, count = torch.unique(x, return_inverse=True, return_counts=True)
            gradient = gradient / count[place].unsqueeze(-1)
        return [(x, gradient)]


class ProjectionTap(Tap):
    """A product with some rows of a weight of nn.MultiheadAttention: queries, keys and values may come out of one."""

    def __init__(self, recorded: Sequence[tuple[Layer, Place]], use: Use) -> None:
        """The layers whose rows took part."""
        super().__init__([layer for layer, _ in recorded])
        self._places = [place for _, place in recorded]
        # Not the output: what waits for its gradient must not keep it alive.
        self._parameter, self._rows, self._samples = use.parameter, use.rows, use.samples

    def leading(self, x: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
        """Samples, then places in the sequence."""
        return tuple(self._use(x).keys().shape[:-1])

    def rows(self, x: torch.Tensor, values: torch.Tensor) -> list[Rows]:
        """The same input for all, and their parts of the output."""
        use = self._use(x)
        return [(use.keys(), use.part(values, place.rows)) for place in self._places]

    def _use(self, x: torch.Tensor) -> Use:
        return Use(self._parameter, self._rows, x, x, self._samples)


def keys_of(keys: torch.Tensor, layer: Layer, dtype: str) -> NDArray[Any]:
    """Keys as they are stored: vectors, or tokens."""
    if layer.keys == "vector":
        return vectors_of(keys, dtype)
    return keys.detach().reshape(-1).to("cpu", torch.int32).numpy()


def vectors_of(tensor: torch.Tensor, dtype: str) -> NDArray[Any]:
    """(rows, width) of the store's type; the tensor's own memory where it already is that."""
    if tensor.is_cpu and tensor.dtype is getattr(torch, dtype) and tensor.is_contiguous():  # nothing to be done: a call or two
        array: NDArray[Any] = tensor.detach().numpy()
        return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])
    plain = tensor.detach().reshape(-1, tensor.shape[-1]).to("cpu", getattr(torch, dtype)).contiguous()
    return plain.numpy()

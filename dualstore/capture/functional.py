"""Multiplications by a parameter that no module of its own does: attention multiplies by its projections itself.

They all go through `torch.nn.functional.linear`. While anyone watches, that name means a function which does the same and
tells the watchers; nothing else changes, and it means the old one again when the last has gone.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from dualstore.capture.maps import Map
from dualstore.schema import Place

__all__ = ["LinearWatch", "Use", "maps_of", "slow_path"]


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One multiplication by some rows of a watched parameter."""

    parameter: torch.Tensor
    rows: tuple[int, int]
    """First row of the parameter and the one behind the last: self-attention takes those of q, k and v at once."""
    x: torch.Tensor
    """What was multiplied, as it was given."""
    output: torch.Tensor
    """What came of it, for a hook on its gradient."""
    samples: int | None
    """Inside attention the number of samples: there they change fastest, whatever `batch_first` says. None elsewhere."""

    def covers(self, rows: tuple[int, int] | None) -> bool:
        """Whether these rows of the parameter, all of them for None, took part."""
        first, behind = rows or (0, self.parameter.shape[0])
        return self.rows[0] <= first and behind <= self.rows[1]

    def keys(self) -> torch.Tensor:
        """(samples, positions, d_in): x, by sample and place in the sequence; a view where that is possible."""
        return self._by_sample(self.x.detach())

    def part(self, values: torch.Tensor, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """(samples, positions, d_out) of the output or of its gradient, for some rows of the parameter that it covers."""
        first, behind = rows or self.rows
        return self._by_sample(values.detach()[..., first - self.rows[0] : behind - self.rows[0]])

    def _by_sample(self, values: torch.Tensor) -> torch.Tensor:
        leading, width = values.shape[:-1], values.shape[-1]
        if self.samples is None:
            samples = leading[0] if leading else 1
            return values.reshape(samples, leading[1:].numel(), width)
        positions = leading.numel() // max(1, self.samples)
        return values.reshape(positions, self.samples, width).transpose(0, 1)


class LinearWatch:
    """Tells `seen` of every multiplication by one of some parameters, from now on until `close()`.

    A parameter is known by identity, as it is or as a view of some of its rows; code that torch.compile has compiled is
    not seen. Calls come on the thread that multiplies, before the output is handed on; an error of `seen` ends the call.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], seen: Callable[[Use], None]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._seen = seen
        _watch(self)

    def close(self) -> None:
        """Ends it; may be called again."""
        _unwatch(self)

    def see(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, samples: int | None) -> None:
        """Tells of one multiplication where it is by a watched parameter."""
        found = self._find(weight)
        if found is not None:
            self._seen(Use(*found, x, output, samples))

    def _find(self, weight: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]] | None:
        """The parameter that a weight is, or is some rows of, and which."""
        if not isinstance(weight, torch.Tensor):
            return None
        with torch._C.DisableTorchFunction():  # modes and subclasses are not to see these questions
            if id(weight) in self._parameters:
                return weight, (0, weight.shape[0])
            parameter = self._parameters.get(id(weight._base))
            rows = None if parameter is None else _rows_within(weight, parameter)
        return None if parameter is None or rows is None else (parameter, rows)


def _rows_within(view: torch.Tensor, parameter: torch.Tensor) -> tuple[int, int] | None:
    """Which rows of a parameter a view of it consists of; None where it is cut otherwise."""
    if view.ndim != 2 or parameter.ndim != 2 or view.stride() != parameter.stride() or view.shape[1] != parameter.shape[1]:
        return None
    first, rest = divmod(int(view.storage_offset() - parameter.storage_offset()), parameter.stride(0))
    return None if rest else (first, first + view.shape[0])


class _Patch:
    """Our functions in the place of two of torch.nn.functional, from its making until `end()`."""

    def __init__(self) -> None:
        self.watches: tuple[LinearWatch, ...] = ()
        """Replaced, never changed: multiplications on other threads go through it."""
        self._inside = threading.local()
        """`samples` of the attention that this thread is in."""
        self._linear, self._attention = F.linear, F.multi_head_attention_forward
        self._ours = self._multiply, self._attend
        F.linear, F.multi_head_attention_forward = self._ours

    def end(self) -> None:
        """Puts the functions back. One that someone else has put around ours stays, and ours only passes on."""
        if F.linear is self._ours[0]:
            F.linear = self._linear
        if F.multi_head_attention_forward is self._ours[1]:
            F.multi_head_attention_forward = self._attention

    def _multiply(self, input: Any, weight: Any, bias: Any = None, **others: Any) -> Any:
        output = self._linear(input, weight, bias, **others)
        if torch.compiler.is_compiling():
            return output
        for watch in self.watches:
            watch.see(input, weight, output, getattr(self._inside, "samples", None))
        return output

    def _attend(self, query: torch.Tensor, *others: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._attention(query, *others, **named)
        outer = getattr(self._inside, "samples", None)
        self._inside.samples = query.shape[1] if query.ndim == 3 else 1  # (positions, samples, width)
        try:
            return self._attention(query, *others, **named)
        finally:
            self._inside.samples = outer


_LOCK = threading.Lock()
_PATCHES: list[_Patch] = []
"""The one in place while anyone watches: one for all, as torch.nn.functional is."""


def _watch(watch: LinearWatch) -> None:
    with _LOCK:
        if not _PATCHES:
            _PATCHES.append(_Patch())
        _PATCHES[0].watches = (*_PATCHES[0].watches, watch)


def _unwatch(watch: LinearWatch) -> None:
    with _LOCK:
        for patch in tuple(_PATCHES):
            patch.watches = tuple(other for other in patch.watches if other is not watch)
            if not patch.watches:
                _PATCHES.remove(patch)
                patch.end()


@contextmanager
def slow_path() -> Iterator[None]:
    """Inside, attention and encoder layers of torch do every multiplication by itself, also without gradients.

    Their fast path, one kernel for a whole layer, shows none of them.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def maps_of(module: nn.MultiheadAttention) -> list[Map]:
    """The projections q, k, v and out of an attention module, wherever their weights lie."""
    width, together = module.embed_dim, module.in_proj_weight is not None
    found = []
    for place, (name, d_in) in enumerate((("q", width), ("k", module.kdim), ("v", module.vdim))):
        rows = (place * width, (place + 1) * width)
        weight = Place("in_proj_weight", rows) if together else Place(f"{name}_proj_weight")
        biases = () if module.in_proj_bias is None else (Place("in_proj_bias", rows),)
        found.append(Map(name, d_in, width, (weight,), biases))
    biases = () if module.out_proj.bias is None else (Place("out_proj.bias"),)
    return [*found, Map("out", width, width, (Place("out_proj.weight"),), biases)]

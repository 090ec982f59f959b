"""What happens to a gradient between backward and the optimiser's step: clipping, unscaling, zeroing, editing.

A few hundred elements of each layer's gradient are copied when autograd has accumulated it, and compared with the same
elements when the step is taken. A global factor (`clip_grad_norm_`, GradScaler's unscaling) shows as one ratio;
anything else as a remainder. Copies stay on the parameter's device; comparing them is the writer's work.
"""

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

__all__ = ["Audit", "Change", "GradientWatch", "common_factor", "lost", "sample_of"]

_ROWS, _COLUMNS = 16, 32
"""Block of a weight's gradient that is compared; scattered elements would cost a cache miss each."""
_SEEN = (torch.float32, torch.float64)
"""Types of which numpy can see the memory."""
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-9}
"""What rounding may leave of a gradient, relative to the sum of its products' sizes; half precision leaves more."""
_EDITED = 1e-2
"""A remainder above this share of the gradient is an edit, not the rounding of half precision."""


Sample = NDArray[Any] | torch.Tensor
"""Elements of a gradient: an array where numpy can see the gradient's memory, which is several times as fast."""


class Change:
    """Some elements of one gradient as backward left them and as they are now; None where there is no gradient."""

    def __init__(self, before: Sample | None, now: Sample | None) -> None:
        self.before, self.now = before, now

    @property
    def known(self) -> bool:
        """Whether there was a gradient then and is one now."""
        return self.before is not None and self.now is not None

    @cached_property
    def products(self) -> tuple[float, float, float]:
        """Now . now, now . before and before . before; zeros where one is missing."""
        if self.before is None or self.now is None:
            return 0.0, 0.0, 0.0
        before, now = _wide(self.before), _wide(self.now)
        return float(now @ now), float(now @ before), float(before @ before)


def lost(changes: Sequence[Change]) -> bool:
    """Whether backward left nothing in a layer's gradients, or what it left has been thrown away: None, or zeros."""
    there = [change.products for change in changes if change.known]
    # All are squares; NaN is neither equal to 0 nor lost.
    return not there or (all(p[0] == 0 for p in there) and any(p[2] != 0 for p in there))


def common_factor(changes: Iterable[Change]) -> tuple[float, bool]:
    """The one factor that the gradients of a parameter group were multiplied by, and whether they changed otherwise.

    The factor is 1 where all sampled elements are zero.
    """
    products = [change.products for change in changes]
    now_now, now_before, before_before = (sum(p[i] for p in products) for i in range(3))
    if not before_before > 0:
        return 1.0, now_now > 0
    left = now_now - now_before * now_before / before_before
    return now_before / before_before, left > _EDITED**2 * now_now


def _wide(sample: Sample) -> NDArray[Any]:
    plain = sample if isinstance(sample, np.ndarray) else sample.to("cpu", torch.float64).numpy()
    return plain.astype(np.float64, copy=False)


class Audit:
    """What the rows of a layer add up to in one step, at the elements of the weight's gradient that are watched."""

    def __init__(self) -> None:
        self._total: NDArray[Any] | float = 0.0
        self._size: NDArray[Any] | float = 0.0
        self._rounding = 0.0

    def add(self, x: NDArray[Any], e: NDArray[Any], dtype: torch.dtype) -> None:
        """Adds some rows, as they are stored; the layer multiplied in `dtype`."""
        rows, columns = _block(e.shape[1], x.shape[1])
        errors, keys = e[:, rows].T.astype(np.float64), x[:, columns].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            self._total = self._total + errors @ keys
            self._size = self._size + np.abs(errors) @ np.abs(keys)
        stored = torch.float64 if e.dtype == np.float64 else torch.float32
        self._rounding = max(self._rounding, _ROUNDING.get(dtype, 3e-2), _ROUNDING[stored])

    def left(self, change: Change) -> float:
        """The share of the gradient that the rows do not explain; 0 where that may be rounding or cannot be told."""
        if change.before is None or not isinstance(self._total, np.ndarray) or not isinstance(self._size, np.ndarray):
            return 0.0
        found = _wide(change.before)
        if found.size != self._total.size:
            return 0.0
        missing = float(np.linalg.norm(found - self._total.reshape(-1)))
        size = float(np.linalg.norm(found))
        # NaN is no finding: what is not finite is noticed elsewhere.
        return missing / size if size > 0 and missing > self._rounding * float(np.linalg.norm(self._size)) else 0.0


class GradientWatch:
    """Watches the gradients of some parameters from backward to step."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._before: dict[int, Sample] = {}
        self._asked: set[int] = set()
        """Parameters that a backward pass under way has been asked about."""
        self._handles: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(self._accumulated) for p in parameters]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def change(self, parameter: torch.Tensor) -> Change:
        """What became of a gradient since backward."""
        before = self._before.get(id(parameter))
        if parameter.grad is None:
            return Change(before, None)
        return Change(before, sample_of(parameter.grad, whole=before is not None and len(before) == parameter.numel()))

    def begins(self, parameter: torch.Tensor) -> bool:
        """Whether an error that arrives now belongs to another backward pass than the gradient that is there.

        True once for each pass.
        """
        if id(parameter) not in self._before or id(parameter) in self._asked:
            return False
        self._asked.add(id(parameter))
        return True

    def forget(self) -> None:
        """Forgets all samples, once the step has used the gradients."""
        self._before.clear()
        self._asked.clear()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._asked.discard(id(parameter))
        if parameter.grad is not None:
            before = sample_of(parameter.grad)
            # Sparse inputs may leave the block without a gradient; then all of it is compared.
            self._before[id(parameter)] = before if before.any() else sample_of(parameter.grad, whole=True)


def sample_of(gradient: torch.Tensor, *, whole: bool = False) -> Sample:
    """A copy of a bias's gradient, or of a block of rows in the middle of a weight's; or of the parameter itself."""
    seen: Any = gradient.detach() if gradient.requires_grad else gradient
    if gradient.dtype in _SEEN and gradient.is_cpu:
        seen = seen.numpy()
    if not whole and seen.ndim == 2:
        seen = seen[_block(*seen.shape)]
    copied: Sample = seen.flatten() if isinstance(seen, np.ndarray) else seen.reshape(-1).clone()
    return copied


@cache
def _block(rows: int, columns: int) -> tuple[slice, slice]:
    middle = columns // 2
    return slice(None, None, -(-rows // _ROWS)), slice(max(0, middle - _COLUMNS // 2), middle + _COLUMNS // 2)

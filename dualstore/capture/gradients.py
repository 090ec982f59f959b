"""What happens to a gradient between backward and the optimiser's step: clipping, unscaling, zeroing, editing.

A few hundred elements of each layer's gradient are copied when autograd has accumulated it, and compared with the same
elements when the step is taken. A global factor (`clip_grad_norm_`, GradScaler's unscaling) shows as one ratio;
anything else as a remainder. Copies stay on the parameter's device; comparing them is the writer's work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from dualstore.schema import Place

__all__ = ["Audit", "Change", "GradientWatch", "Matrix", "common_factor", "lost"]

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

    def __init__(self, before: Sample | None, now: Sample | None, row: int | None = None, local: Sample | None = None) -> None:
        """`row` is that of the gradient, where it is not the block that is looked at; `local` what this rank alone brought."""
        self.before, self.now, self.row = before, now, row
        self.local = before if local is None else local

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


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix, or a bias, among the parameters of a model."""

    parameter: torch.Tensor
    place: Place

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same place of the parameter itself, or of what has its shape: (rows, columns), or (rows,)."""
        found: torch.Tensor = self._inside(tensor.to_dense() if tensor.is_sparse else tensor)
        return found

    def sample(self, tensor: torch.Tensor, row: int | None = None) -> Sample:
        """A copy of some elements of the place: a block of rows in the middle, or one row, or all of a bias or a number."""
        seen: Any = tensor.detach()
        if seen.is_sparse:
            seen = seen.to_dense()
        if seen.is_cpu and seen.dtype in _SEEN:
            seen = seen.numpy()
        if seen.ndim:
            seen = self._inside(seen)
        if seen.ndim == 2:
            seen = seen[_block(*seen.shape)] if row is None else seen[row]
        copied: Sample = seen.flatten() if isinstance(seen, np.ndarray) else seen.reshape(-1).clone()
        return copied

    def _inside(self, whole: Any) -> Any:
        """The place in an array or a tensor."""
        found = whole if self.place.rows is None else whole[slice(*self.place.rows)]
        if found.ndim > 2:
            found = found.reshape(len(found), -1)
        return found.swapaxes(0, 1) if self.place.transposed and found.ndim == 2 else found


class Audit:
    """What the rows of a weight add up to in one step, at the elements of its gradient that are watched."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """The weight's `shape`, (d_out, d_in)."""
        self._shape, self._block = shape, _block(*shape)
        self._total: NDArray[Any] | float = 0.0
        self._size: NDArray[Any] | float = 0.0
        self._rounding = 0.0

    def add(self, x: NDArray[Any], e: NDArray[Any], dtype: torch.dtype, *, turned: bool = False) -> None:
        """Adds some rows, as they are stored; the layer multiplied in `dtype`.

        Keys may be tokens. Where the layer has the weight the other way round (`turned`), keys and errors change places.
        """
        outer, inner = (x, e) if turned else (e, x)
        errors = _columns(outer, self._block[0], self._shape[0]).T
        keys = _columns(inner, self._block[1], self._shape[1])
        with np.errstate(over="ignore", invalid="ignore"):
            self._total = self._total + _product(errors, keys)
            self._size = self._size + _product(np.abs(errors), np.abs(keys))
        stored = torch.float64 if e.dtype == np.float64 else torch.float32
        self._rounding = max(self._rounding, _ROUNDING.get(dtype, 3e-2), _ROUNDING[stored])

    def left(self, change: Change) -> float:
        """The share of the gradient that the rows do not explain; 0 where that may be rounding or cannot be told."""
        if change.local is None or not isinstance(self._total, np.ndarray) or not isinstance(self._size, np.ndarray):
            return 0.0
        found = _wide(change.local)
        if change.row is not None or found.size != self._total.size:
            return 0.0
        missing = float(np.linalg.norm(found - self._total.reshape(-1)))
        size = float(np.linalg.norm(found))
        # NaN is no finding: what is not finite is noticed elsewhere.
        return missing / size if size > 0 and missing > self._rounding * float(np.linalg.norm(self._size)) else 0.0


def _product(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[Any]:
    """The product of two matrices, by PyTorch: threads of numpy's BLAS would spin beside those of training long after it."""
    product: NDArray[Any] = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
    return product


def _columns(values: NDArray[Any], some: slice, width: int) -> NDArray[np.float64]:
    """Some columns of vectors, or of the unit vectors that tokens stand for."""
    if values.ndim == 2:
        return values[:, some].astype(np.float64)
    chosen: NDArray[np.float64] = (values[:, None] == np.arange(width)[some]).astype(np.float64)
    return chosen


class GradientWatch:
    """Watches the gradients of some matrices from backward to step."""

    def __init__(self, matrices: Sequence[Matrix], *, averaged: bool = False) -> None:
        """`averaged` says whether gradients become those of all ranks once a backward pass has ended."""
        self._averaged, self._passing = averaged, set[Matrix]()
        """The matrices whose gradients a backward pass under way has brought."""
        self._local: dict[Matrix, Sample] = {}
        self._before: dict[Matrix, tuple[Sample, int | None]] = {}
        self._asked: set[Matrix] = set()
        """Matrices that a backward pass under way has been asked about."""
        of: dict[int, list[Matrix]] = {}
        for matrix in matrices:
            of.setdefault(id(matrix.parameter), []).append(matrix)
        self._handles: list[RemovableHandle] = [
            some[0].parameter.register_post_accumulate_grad_hook(partial(self._accumulated, some)) for some in of.values()
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def change(self, matrix: Matrix) -> Change:
        """What became of a gradient since backward."""
        before, row = self._before.get(matrix, (None, None))
        gradient = matrix.parameter.grad
        now = None if gradient is None else matrix.sample(gradient, row)
        return Change(before, now, row, self._local.get(matrix))

    def begins(self, matrix: Matrix) -> bool:
        """Whether an error that arrives now belongs to another backward pass than the gradient that is there.

        True once for each pass.
        """
        if matrix not in self._before or matrix in self._asked:
            return False
        self._asked.add(matrix)
        return True

    def forget(self, matrices: Sequence[Matrix]) -> None:
        """Forgets the samples of some matrices, once a step has used their gradients."""
        for matrix in matrices:
            self._before.pop(matrix, None)
            self._local.pop(matrix, None)
            self._asked.discard(matrix)

    def _accumulated(self, matrices: Sequence[Matrix], parameter: torch.Tensor) -> None:
        self._asked.difference_update(matrices)
        if parameter.grad is None:
            return
        for matrix in matrices:
            before, row = matrix.sample(parameter.grad), None
            if parameter.ndim > 1 and not before.any():
                # Sparse inputs may leave the block without a gradient; then the largest row is compared.
                row = int(matrix.of(parameter.grad).detach().abs().amax(1).argmax())
                before = matrix.sample(parameter.grad, row)
            self._before[matrix] = before, row
        if self._averaged:
            self._await_average(matrices)

    def _await_average(self, matrices: Sequence[Matrix]) -> None:
        """What other ranks add arrives at the end of the pass: DistributedDataParallel waits for it in a callback of its own."""
        engine: Any = torch.autograd.Variable._execution_engine
        if not self._passing:
            # A callback that is made by another one comes after all that are there.
            engine.queue_callback(lambda: engine.queue_callback(self._see_average))
        self._passing.update(matrices)
        self._local |= {matrix: self._before[matrix][0] for matrix in matrices}

    def _see_average(self) -> None:
        for matrix in self._passing:
            gradient = matrix.parameter.grad
            if gradient is not None:
                row = self._before[matrix][1]
                self._before[matrix] = matrix.sample(gradient, row), row
        self._passing.clear()


@cache
def _block(rows: int, columns: int) -> tuple[slice, slice]:
    middle = columns // 2
    return slice(None, None, -(-rows // _ROWS)), slice(max(0, middle - _COLUMNS // 2), middle + _COLUMNS // 2)

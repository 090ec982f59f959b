"""Bulk work by PyTorch: on the training thread with all threads that it trains with, which wait meanwhile.

On the writer's thread PyTorch works alone (`capture/background.py`).
"""

import torch
from numpy import ndarray

from dualstore.bulk import Bulk
from dualstore.shapes import Float32

__all__ = ["TorchBulk"]


class TorchBulk(Bulk):
    """`Bulk` by PyTorch; arrays that it cannot share the memory of are left to numpy."""

    def copy(self, rows: ndarray, kept: ndarray | None, out: ndarray) -> None:
        """As of `Bulk`."""
        source = _shared(rows)
        if source is None:
            super().copy(rows, kept, out)
        elif kept is None:
            torch.from_numpy(out).copy_(source)
        else:
            torch.index_select(source, 0, torch.from_numpy(kept), out=torch.from_numpy(out))

    def largest_square(self, rows: ndarray) -> float:
        """As of `Bulk`."""
        source = _shared(rows)
        if source is None:
            return super().largest_square(rows)
        wide = source.float() if source.dtype == torch.float16 else source
        norm = float(torch.linalg.vector_norm(wide, dim=1).max())
        return norm * norm

    def largest(self, rows: Float32[ndarray, "n d"]) -> Float32[ndarray, " n"]:
        """As of `Bulk`."""
        source = _shared(rows)
        return super().largest(rows) if source is None else source.abs().amax(1).numpy()

    def half(self, rows: Float32[ndarray, "n d"], factors: Float32[ndarray, " n"] | None = None) -> ndarray:
        """As of `Bulk`."""
        source = _shared(rows)
        if source is None:
            return super().half(rows, factors)
        scaled = source if factors is None else source * torch.from_numpy(factors)[:, None]
        return scaled.half().numpy()


def _shared(rows: ndarray) -> torch.Tensor | None:
    """A tensor of the same memory, where PyTorch can have one."""
    if not rows.flags.writeable:  # PyTorch would warn
        return None
    try:
        return torch.from_numpy(rows)
    except (TypeError, ValueError):
        return None

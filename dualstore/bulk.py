"""What recording does to every number: copying, measuring and halving rows; here with numpy, on one thread.

Beside the disk that is most of what recording costs. A recorder has PyTorch do it (`capture/threads.py`).
"""

import numpy as np
from numpy import ndarray

from dualstore.shapes import Float32

__all__ = ["PLAIN", "Bulk", "to_half", "to_single"]

_TILE = 1 << 15
"""Numbers that are converted at once."""


class Bulk:
    """Work on many rows at once. Whatever does it, the results are the same bits, of `largest_square` up to rounding."""

    def copy(self, rows: ndarray, kept: ndarray | None, out: ndarray) -> None:
        """Copies rows (n, d), or those of them with the numbers `kept`, (k,), to `out`, (n, d) or (k, d)."""
        if kept is None:
            out[...] = rows
        else:
            np.take(rows, kept, 0, out=out, mode="clip")  # any other mode copies once more

    def largest_square(self, rows: ndarray) -> float:
        """The largest squared norm of rows, (n, d) with n > 0, in single precision at least; not finite where a number is not."""
        wide = to_single(rows) if rows.dtype == np.float16 else rows
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.vecdot(wide, wide).max())

    def largest(self, rows: Float32[ndarray, "n d"]) -> Float32[ndarray, " n"]:
        """The size of each row's largest number; not finite where one is not."""
        largest: ndarray = np.maximum(rows.max(axis=1), -rows.min(axis=1))
        return largest

    def half(self, rows: Float32[ndarray, "n d"], factors: Float32[ndarray, " n"] | None = None) -> ndarray:
        """Rows, (n, d), times powers of two, rounded to half precision, ties to even; from 65520 on it is infinity."""
        if factors is None:
            return to_half(np.ascontiguousarray(rows))
        with np.errstate(under="ignore"):
            return to_half(rows * factors[:, None])


PLAIN = Bulk()

# numpy's own casts branch at every zero: behind a ReLU they take ten times as long as these passes over numbers in cache.


def to_half(values: Float32[ndarray, "n d"]) -> ndarray:
    """The nearest numbers in half precision, ties to even; the bits of numpy's cast."""
    found = np.empty(values.shape, np.float16)
    step = max(1, _TILE // max(1, values.shape[1]))
    for start in range(0, len(values), step):
        some, out = values[start : start + step], found[start : start + step]
        bits = some.view(np.int32)
        size = bits & 0x7FFFFFFF
        if size.max(initial=0) >= _TOO_LARGE:
            with np.errstate(over="ignore", invalid="ignore"):
                out[:] = some
            continue
        tiny = size < _LEAST_NORMAL
        # Beside 0.5 the last digit of single precision is that of half precision below its normal numbers.
        rounded = (size.view(np.float32) + np.float32(0.5)).view(np.int32) - _ONE_HALF
        size += (size >> 13 & 1) + 0xFFF
        size >>= 13
        size -= 112 << 10
        rounded -= size
        rounded *= tiny
        size += rounded  # rounded where tiny
        size |= bits >> 16 & -0x8000
        out.view(np.int16)[...] = size
    return found


_TOO_LARGE, _LEAST_NORMAL, _ONE_HALF = 0x477FF000, 0x38800000, 0x3F000000
"""Bits in single precision of 65520, which becomes infinite, of 2^-14 and of 0.5."""


def to_single(stored: ndarray) -> Float32[ndarray, "n d"]:
    """Numbers in half precision, (n, d), in single: exactly."""
    found = np.empty(stored.shape, np.float32)
    step, up = max(1, _TILE // max(1, stored.shape[1])), np.float32(2.0**112)
    flushed = np.float32(2.0**-149) * up == 0  # this thread takes subnormal numbers for zero
    for start in range(0, len(stored), step):
        some, out = stored[start : start + step], found[start : start + step]
        bits = out.view(np.int32)
        np.left_shift(some.view(np.int16), 13, out=bits, dtype=np.int32)
        bits &= ~0x70000000  # digits and exponent at their places in single precision, 112 too low
        out *= up
        if flushed or not max(out.max(initial=0), -out.min(initial=0)) < _BEYOND:
            out[:] = some
    return found


_BEYOND = 65536.0
"""What infinity and NaN become at least by their digits."""

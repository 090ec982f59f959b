"""Half precision: what stored numbers are from errors, and what readers see of stored numbers.

A row of errors has a scale of its own, a power of two, so that error = scale * e: its largest error lies in [1, 2) * 2^14 after
scaling, and none of a row flushes to zero unless it is below 2^-39 of that one, whatever the errors of other rows are. Being
powers of two, scales cost no digit: a stored error is its number rounded to 11 binary digits, and is read without rounding.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy import ndarray

from dualstore.schema import Column
from dualstore.shapes import Float32

__all__ = ["as_read", "as_stored", "needed", "to_single"]

_TOP = 15
"""The largest error of a row lies below 2^_TOP after scaling: rounding it up stays below 65504, where half precision ends."""
_TILE = 1 << 15
"""Numbers that are converted at once."""
_LEAST = -126
"""Exponent of the smallest scale, the smallest normal number in single precision."""
_MOST = 128 - _TOP
"""Exponent of the largest scale: that of the largest number in single precision."""
_BELOW_TOP = np.nextafter(np.float16(2.0**_TOP), np.float16(0))


def as_stored(arrays: Mapping[str, ndarray]) -> dict[str, ndarray]:
    """Keys and errors as stored: x, (n, d), and e, (n, o), in half precision, with e its scale, (n,), in single.

    Tokens are stored as they are. Keys beyond 65504 become infinite; NaN and infinity stay what they are. Rows of zeros have
    the scale 1.
    """
    found = {name: _to_half(np.ascontiguousarray(values)) if name == "x" else values for name, values in arrays.items()}
    if "e" in arrays:
        found["scale"], found["e"] = _scaled(arrays["e"])
    return found


def _scaled(e: Float32[ndarray, "n o"]) -> tuple[ndarray, ndarray]:
    """The scale of each row of errors, and the errors divided by it."""
    largest = np.maximum(e.max(axis=1), -e.min(axis=1))
    odd = ~np.isfinite(largest)
    if odd.any():
        largest[odd] = np.where(np.isfinite(e[odd]), np.abs(e[odd]), 0).max(axis=1)
    exponent = np.where(largest > 0, np.maximum(np.frexp(largest)[1] - _TOP, _LEAST), 0)
    one = np.float32(1)
    with np.errstate(under="ignore"):
        stored = _to_half(e * np.ldexp(one, -exponent)[:, None])
    top = exponent == _MOST
    if top.any():  # rounded up, the largest error would be 2^128
        stored[top] = np.where(np.isinf(stored[top]), stored[top], np.clip(stored[top], -_BELOW_TOP, _BELOW_TOP))
    return np.ldexp(one, exponent), stored


# numpy's own casts branch at every zero: behind a ReLU they take ten times as long as these passes over numbers in cache.


def _to_half(values: Float32[ndarray, "n d"]) -> ndarray:
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


def needed(names: Sequence[str], columns: Mapping[str, Column]) -> list[str]:
    """The stored columns from which some columns are read."""
    scaled = "e" in names and "scale" in columns and "scale" not in names
    return [*names, "scale"] if scaled else list(names)


def as_read(names: Sequence[str], stored: Mapping[str, ndarray], columns: Mapping[str, Column]) -> dict[str, ndarray]:
    """Columns as readers see them, from those that were `needed`: half precision in single, errors times their scale.

    Memory: a copy in single precision of those in half precision; the others are what they were.
    """
    found = {name: stored[name] for name in names}
    with np.errstate(invalid="ignore", over="ignore"):  # of NaN, and of infinite errors
        for name in names:
            if columns[name].dtype == "float16":
                found[name] = to_single(stored[name])
                if name == "e":
                    found[name] *= stored["scale"][:, None]
    return found

"""Half precision: what stored numbers are from errors, and what readers see of stored numbers.

A row of errors has a scale of its own, a power of two, so that error = scale * e: its largest error lies in [1, 2) * 2^14 after
scaling, and none of a row flushes to zero unless it is below 2^-39 of that one, whatever the errors of other rows are. Being
powers of two, scales cost no digit: a stored error is its number rounded to 11 binary digits, and is read without rounding.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy import ndarray

from dualstore.bulk import PLAIN, Bulk, to_single
from dualstore.schema import Column
from dualstore.shapes import Float32

__all__ = ["as_read", "as_stored", "needed"]

_TOP = 15
"""The largest error of a row lies below 2^_TOP after scaling: rounding it up stays below 65504, where half precision ends."""
_LEAST = -126
"""Exponent of the smallest scale, the smallest normal number in single precision."""
_MOST = 128 - _TOP
"""Exponent of the largest scale: that of the largest number in single precision."""
_BELOW_TOP = np.nextafter(np.float16(2.0**_TOP), np.float16(0))


def as_stored(arrays: Mapping[str, ndarray], bulk: Bulk = PLAIN) -> dict[str, ndarray]:
    """Keys and errors as stored: x, (n, d), and e, (n, o), in half precision, with e its scale, (n,), in single.

    Tokens are stored as they are. Keys beyond 65504 become infinite; NaN and infinity stay what they are. Rows of zeros have
    the scale 1. The work is done by `bulk`.
    """
    found = {name: bulk.half(values) if name == "x" else values for name, values in arrays.items()}
    if "e" in arrays:
        found["scale"], found["e"] = _scaled(arrays["e"], bulk)
    return found


def _scaled(e: Float32[ndarray, "n o"], bulk: Bulk) -> tuple[ndarray, ndarray]:
    """The scale of each row of errors, and the errors divided by it."""
    largest = bulk.largest(e)
    odd = ~np.isfinite(largest)
    if odd.any():
        largest[odd] = np.where(np.isfinite(e[odd]), np.abs(e[odd]), 0).max(axis=1)
    exponent = np.where(largest > 0, np.maximum(np.frexp(largest)[1] - _TOP, _LEAST), 0)
    one = np.float32(1)
    stored = bulk.half(e, np.ldexp(one, -exponent))
    top = exponent == _MOST
    if top.any():  # rounded up, the largest error would be 2^128
        stored[top] = np.where(np.isinf(stored[top]), stored[top], np.clip(stored[top], -_BELOW_TOP, _BELOW_TOP))
    return np.ldexp(one, exponent), stored


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

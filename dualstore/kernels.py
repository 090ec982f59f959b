"""Dot products: the exact one that defines alpha, and fast ones with a bound of their error.

`exact_dots` multiplies in float64 and adds by halving, an order that depends on the vectors' length alone. Every
operation is one IEEE float64 operation, so the bits of alpha are the same for any block, thread count and machine.
"""

from typing import Any

import numpy as np
from numpy import ndarray

from dualstore.shapes import Float, Float64

__all__ = ["dots", "error_bound", "exact_dots"]

_EXACT_ROWS = 128
"""Rows that `exact_dots` works on at once: 128 x 800 float64 stay in the second-level cache."""
_SMALL_VECTOR_PRODUCT = 32_768
_SMALL_PRODUCT = 500_000
"""Multiplications of a tile: with one query, with several."""
_PANEL_ROWS = 1024


def exact_dots(keys: Float[ndarray, "n d"], query: Float[ndarray, "... d"]) -> Float64[ndarray, " n"]:
    """Alpha of each key: the float64 dot product with `query`, (d,) for all keys or (n, d) for one each."""
    rows, width = keys.shape
    out = np.empty(rows)
    work = np.empty((min(rows, _EXACT_ROWS), width))
    factor = query.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, rows, _EXACT_ROWS):
            piece = keys[start : start + _EXACT_ROWS]
            sums = work[: len(piece)]
            np.multiply(piece, factor if factor.ndim == 1 else factor[start : start + len(piece)], out=sums)
            _halve(sums)
            out[start : start + len(piece)] = sums[:, 0] + 0.0 if width else 0.0  # one zero, not two
    return out


def _halve(sums: Float64[ndarray, "n d"]) -> None:
    """Adds each row up into its first element: the last half onto the first, until one is left."""
    width = sums.shape[1]
    while width > 1:
        half = width // 2
        sums[:, :half] += sums[:, width - half : width]
        width -= half


def error_bound(width: int, dtype: Any) -> float:
    """B with |dots(x, q) - exact_dots(x, q)| <= b |x| |q|, for any order of summation and with or without FMA.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5: gamma_d = d u / (1 - d u).
    """
    unit = float(np.finfo(dtype).eps) / 2
    # The exact value has roundings of its own, one for the product and one a halving; one more is for the comparison.
    roundings = width + width.bit_length() + 2
    return roundings * unit / (1 - roundings * unit)


def dots(keys: Float[ndarray, "n d"], queries: Float[ndarray, "m d"]) -> Float[ndarray, "n m"]:
    """All products in the keys' own precision, off by at most `error_bound`."""
    rows, width = keys.shape
    out = np.empty((rows, len(queries)), keys.dtype)
    columns = np.ascontiguousarray(queries.T)
    step = _tile_rows(width, len(queries))
    whole = rows // step * step
    with np.errstate(over="ignore", invalid="ignore"):
        for part, tile in ((slice(0, whole), step), (slice(whole, rows), rows - whole)):
            if tile:
                count = (part.stop - part.start) // tile
                tiles, found = keys[part].reshape(count, tile, width), out[part].reshape(count, tile, len(queries))
                if len(queries) == 1:
                    np.matmul(tiles, columns[:, 0], out=found[:, :, 0])
                else:
                    np.matmul(tiles, columns, out=found)
    return out


def _tile_rows(width: int, queries: int) -> int:
    # BLAS does products this small without its own threads, which would wait for each other when the scan has some,
    # and without packing the keys first: twice as fast for 16 queries (bench/scan_speed.py).
    rows = _SMALL_VECTOR_PRODUCT // max(1, width) if queries == 1 else _SMALL_PRODUCT // max(1, width * queries)
    return 1 << rows.bit_length() - 1 if rows >= 8 else _PANEL_ROWS

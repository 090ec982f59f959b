"""Dot products: the exact one that defines alpha, fast ones with a bound of their error, and double precision ones.

`exact_dots` multiplies in float64 and adds by halving, an order that depends on the vectors' length alone. Every
operation is one IEEE float64 operation, so the bits of alpha are the same for any block, thread count and machine.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy import ndarray

from dualstore.shapes import Float, Float64

__all__ = ["dots", "dots64", "error_bound", "exact_dots"]

_EXACT_ROWS = 128
"""Rows that `exact_dots` works on at once: 128 x 800 float64 stay in the second-level cache."""
_SMALL_PRODUCT = 500_000
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


def dots(
    keys: Float[ndarray, "n d"], queries: Float[ndarray, "m d"], pool: ThreadPoolExecutor, threads: int
) -> Float[ndarray, "n m"]:
    """All products in the keys' own precision, off by at most `error_bound`."""
    out = np.empty((len(keys), len(queries)), keys.dtype)
    step = _tile_rows(queries.size)
    with np.errstate(over="ignore", invalid="ignore"):
        if len(queries) == 1:
            np.dot(keys, queries[0], out=out[:, 0])  # bound by memory; BLAS brings its own threads
        else:
            columns = np.ascontiguousarray(queries.T)
            _split(len(keys), step, pool, threads, lambda a, b: _tiles(keys[a:b], columns, step, out[a:b]))
    return out


def _tile_rows(query_size: int) -> int:
    # Products this small are done by OpenBLAS without packing the keys first and without its own threads:
    # twice as fast for 16 queries, and a few queries are what one pass usually carries (bench/scan_speed.py).
    rows = _SMALL_PRODUCT // max(1, query_size)
    return 1 << rows.bit_length() - 1 if rows >= 8 else _PANEL_ROWS


def _tiles(keys: Float[ndarray, "n d"], columns: Float[ndarray, "d m"], step: int, out: Float[ndarray, "n m"]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        whole = len(keys) // step * step
        tiles = keys[:whole].reshape(whole // step, step, keys.shape[1])
        np.matmul(tiles, columns, out=out[:whole].reshape(whole // step, step, out.shape[1]))
        np.matmul(keys[whole:], columns, out=out[whole:])


def dots64(
    keys: Float[ndarray, "n d"], queries: Float64[ndarray, "m d"], pool: ThreadPoolExecutor, threads: int
) -> Float64[ndarray, "n m"]:
    """All products in float64: equal to `exact_dots` up to the order of summation."""
    out = np.empty((len(keys), len(queries)))
    columns = np.ascontiguousarray(queries.T)

    def piece(start: int, stop: int) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            for a in range(start, stop, _EXACT_ROWS):
                b = min(stop, a + _EXACT_ROWS)
                np.matmul(keys[a:b].astype(np.float64), columns, out=out[a:b])

    _split(len(keys), _EXACT_ROWS, pool, threads, piece)
    return out


def _split(rows: int, step: int, pool: ThreadPoolExecutor, threads: int, work: Callable[[int, int], None]) -> None:
    """Calls work(start, stop) over `rows` in `threads` pieces whose borders are multiples of `step`."""
    size = max(step, -(-rows // (threads * step)) * step)
    if size >= rows:
        work(0, rows)
        return
    list(pool.map(lambda start: work(start, min(rows, start + size)), range(0, rows, size)))

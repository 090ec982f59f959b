"""Products with keys, also with those that are stored as the number of their only 1: the zeros are never written out.

The keys of n patterns are n vectors, (n, d), or n tokens, (n,): unit vectors of d values. A token of -1 is a key of zeros.
"""

import numpy as np
from numpy import ndarray

from dualstore.shapes import Float, Int64

__all__ = ["add_products", "places", "square", "through", "units", "values_of", "wide"]


def places(tokens: ndarray, known: Int64[ndarray, " u"]) -> Int64[ndarray, " n"]:
    """Where each token is among some that ascend; -1 where it is not."""
    if not len(known):
        return np.full(len(tokens), -1)
    at = np.minimum(np.searchsorted(known, tokens), len(known) - 1)
    found: ndarray = np.where(known[at] == tokens, at, -1)
    return found


def units(tokens: ndarray, known: Int64[ndarray, " u"], dtype: str) -> Float[ndarray, "n u"]:
    """The keys of tokens, of which only the values at some `known` ones are looked at."""
    at = places(tokens, known)
    keys = np.zeros((len(at), len(known)), dtype)
    mine = np.flatnonzero(at >= 0)
    keys[mine, at[mine]] = 1
    return keys


def values_of(keys: ndarray, some: Int64[ndarray, " b"] | slice) -> ndarray:
    """Keys of which some values, in ascending places, are left."""
    if keys.ndim > 1:
        found: ndarray = keys[:, some]
        return found
    return keys if isinstance(some, slice) else places(keys, some)


def wide(keys: ndarray) -> ndarray:
    """Vectors in double precision; tokens as they are."""
    return keys.astype(np.float64) if keys.ndim > 1 else keys


def square(keys: ndarray) -> ndarray:
    """Keys with each value squared."""
    return np.square(keys) if keys.ndim > 1 else keys


def through(keys: ndarray, matrix: Float[ndarray, "o i"]) -> Float[ndarray, "n o"]:
    """The product of each key with each row of a matrix."""
    if keys.ndim > 1:
        found: ndarray = keys @ matrix.T
        return found
    found = matrix.T[keys]
    found[keys < 0] = 0
    return found


def add_products(total: Float[ndarray, "o i"], e: ndarray, x: ndarray, factors: Float[ndarray, " n"] | None = None) -> None:
    """Adds the sum of e x^T over n pairs, each times its factor; one of the two may be tokens."""
    if factors is not None:
        e, x = (e * factors[:, None], x) if e.ndim > 1 else (e, x * factors[:, None])
    if e.ndim > 1 and x.ndim > 1:
        total += e.T @ x
    elif e.ndim > 1:
        add_products(total.T, x, e)
    else:
        order = np.argsort(e, kind="stable")[np.count_nonzero(e < 0) :]
        if len(order):
            rows, first = np.unique(e[order], return_index=True)
            total[rows] += np.add.reduceat(x[order], first, axis=0)

"""Dot products: the bits of alpha depend on the two vectors alone, and the fast products keep within their bound."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

from dualstore.kernels import dots, error_bound, exact_dots
from tests import reference

WIDTHS = [1, 2, 3, 8, 31, 100, 784, 3000]
KINDS = ["normal", "positive", "cancelling", "graded", "denormal", "zeros"]
DTYPES = ["float32", "float64"]


def vectors(kind: str, rows: int, width: int, dtype: Any, seed: int) -> ndarray:
    """Vectors whose products are hard in one way each."""
    rng = np.random.default_rng([seed, rows, width])
    x = rng.normal(size=(rows, width))
    if kind == "positive":
        x = np.abs(x) + 1
    elif kind == "cancelling":
        half = width // 2
        x[:, width - half :] = -x[:, :half] * (1 + 1e-7 * x[:, width - half :])
        x *= 1e6
    elif kind == "graded":
        x *= 10.0 ** rng.uniform(-15, 15, (rows, width))
    elif kind == "denormal":
        x *= 4 * float(np.finfo(dtype).smallest_subnormal)
    elif kind == "zeros":
        x *= rng.random((rows, width)) < 0.1
    return x.astype(dtype)


def query_like(kind: str, width: int, dtype: Any, seed: int) -> ndarray:
    """A query for `vectors`: of ones where the keys cancel against themselves."""
    if kind in ("cancelling", "positive"):
        return np.ones(width, dtype)
    return vectors(kind, 1, width, dtype, seed + 1)[0]


def magnitudes(keys: ndarray, query: ndarray) -> ndarray:
    """The sums of |x q|."""
    return reference.alphas(np.abs(keys), np.abs(query))


def norms(x: ndarray) -> ndarray:
    return np.array([math.hypot(*row.tolist()) for row in x])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_dots_keep_within_a_few_roundings_of_the_true_sum(kind: str, width: int, dtype: str) -> None:
    keys, query = vectors(kind, 5, width, dtype, 0), query_like(kind, width, dtype, 0)
    wrong = np.abs(exact_dots(keys, query) - reference.alphas(keys, query))
    assert (wrong <= (math.log2(width) + 2) * 2.0**-53 * magnitudes(keys, query)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0, *WIDTHS[:-1]])
def test_exact_dots_add_by_halving(width: int, dtype: str) -> None:
    keys, query = vectors("graded", 7, width, dtype, 1), vectors("graded", 1, width, dtype, 2)[0]
    # Adding 0.0 makes one zero of the two.
    assert (exact_dots(keys, query) + 0.0).tobytes() == (reference.halved(keys, query) + 0.0).tobytes()


@pytest.mark.parametrize("width", [1, 3, 64, 257])
def test_products_of_whole_numbers_are_the_true_ones(width: int) -> None:
    rng = np.random.default_rng(width)
    keys, query = rng.integers(-9, 10, (40, width)), rng.integers(-9, 10, width)
    assert exact_dots(keys.astype(np.float32), query.astype(np.float32)).tolist() == (keys @ query).tolist()


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 400),
    width=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    seed=st.integers(0, 99),
)
def test_the_bits_of_alpha_are_the_same_however_the_rows_are_split(
    rows: int, width: int, dtype: str, kind: str, cuts: list[int], seed: int
) -> None:
    keys, query = vectors(kind, rows, width, dtype, seed), vectors(kind, 1, width, dtype, seed + 1)[0]
    borders = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    pieces = [exact_dots(keys[a:b], query) for a, b in pairwise(borders)]
    assert np.concatenate(pieces).tobytes() == exact_dots(keys, query).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 7, 16, 33, 784])
def test_the_bits_of_alpha_are_the_same_wherever_the_keys_lie(width: int, dtype: str) -> None:
    keys, query = vectors("graded", 300, width, dtype, 3), vectors("graded", 1, width, dtype, 4)[0]
    expected = exact_dots(keys, query).tobytes()
    for offset in range(1, 9):
        moved = np.frombuffer(b"\0" * offset + keys.tobytes(), np.uint8)[offset:].view(dtype).reshape(keys.shape)
        assert exact_dots(moved, query).tobytes() == expected
    assert exact_dots(np.asfortranarray(keys), query).tobytes() == expected
    assert exact_dots(np.repeat(keys, 2, axis=0)[::2], query).tobytes() == expected
    assert exact_dots(np.repeat(keys, 2, axis=1)[:, ::2], query).tobytes() == expected
    assert exact_dots(keys[::-1], query)[::-1].tobytes() == expected


def test_a_query_for_each_key_gives_the_same_bits_as_one_for_all() -> None:
    keys, queries = vectors("normal", 300, 33, "float32", 5), vectors("normal", 300, 33, "float32", 6)
    single = np.concatenate([exact_dots(keys[i : i + 1], queries[i]) for i in range(len(keys))])
    assert exact_dots(keys, queries).tobytes() == single.tobytes()


def test_swapping_the_signs_of_the_query_swaps_only_the_sign_of_alpha() -> None:
    keys, query = vectors("graded", 200, 50, "float32", 7), vectors("graded", 1, 50, "float32", 8)[0]
    assert exact_dots(keys, -query).tolist() == (-exact_dots(keys, query)).tolist()


def test_keys_that_are_not_finite_give_what_float64_gives() -> None:
    keys = np.array([[np.inf, 1], [-np.inf, 1], [np.nan, 1], [np.inf, -np.inf], [3e38, 3e38]], np.float32)
    np.testing.assert_array_equal(
        exact_dots(keys, np.array([1, 1], np.float32)), [np.inf, -np.inf, np.nan, np.nan, 2 * float(keys[4, 0])]
    )
    np.testing.assert_array_equal(exact_dots(keys[:1], np.array([0, 1], np.float32)), [np.nan])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_bound_is_what_the_analysis_gives(dtype: str) -> None:
    unit = float(np.finfo(dtype).eps) / 2
    for width in (0, 1, 784, 3000):
        assert width * unit < error_bound(width, dtype) < 1.01 * (width + 20) * unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_fast_products_keep_within_their_bound(kind: str, width: int, dtype: str) -> None:
    keys = vectors(kind, 40, width, dtype, 9)
    hard = query_like(kind, width, dtype, 9)
    # Keys that are equal, opposite and equal in size to the query: where |x q| adds up to all of |x| |q|.
    keys[:3] = [hard, -hard, np.abs(hard)]
    queries = np.stack([hard, *vectors("normal", 3, width, dtype, 10)])
    # What underflows is lost whatever the magnitude of the rest; the scan allows for it in the same way.
    lost = width * float(np.finfo(dtype).tiny)
    for count in (1, 2, 4):
        found = dots(keys, queries[:count]).astype(np.float64)
        assert found.shape == (40, count)
        for j in range(count):
            allowed = error_bound(width, dtype) * norms(keys) * norms(queries[j : j + 1]) + lost
            assert (np.abs(found[:, j] - exact_dots(keys, queries[j])) <= allowed).all()


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 2500),
    count=st.integers(1, 40),
    width=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_products_of_whole_numbers_are_exact_for_every_shape(rows: int, count: int, width: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys, queries = rng.integers(-9, 10, (rows, width)), rng.integers(-9, 10, (count, width))
    expected = keys @ queries.T
    np.testing.assert_array_equal(dots(keys.astype(dtype), queries.astype(dtype)), expected)


def test_fast_products_cover_every_row_of_large_batches() -> None:
    rng = np.random.default_rng(0)
    keys, queries = rng.integers(-3, 4, (5000, 800)), rng.integers(-3, 4, (70, 800))
    expected = (keys.astype(np.float64) @ queries.T.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(dots(keys.astype(np.float32), queries.astype(np.float32)), expected)


def test_fast_products_of_empty_vectors_are_zero() -> None:
    for count in (1, 3):
        assert dots(np.zeros((5, 0), np.float32), np.zeros((count, 0), np.float32)).tolist() == [[0.0] * count] * 5


def test_fast_products_of_unbounded_keys_do_not_warn() -> None:
    keys = np.array([[3e38, 3e38], [np.inf, -np.inf], [np.nan, 0]] * 100, np.float32)
    for count in (1, 4):
        queries = np.full((count, 2), 3e38, np.float32)
        assert not np.isfinite(dots(keys, queries)).any()

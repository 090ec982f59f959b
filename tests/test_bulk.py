"""Work on many rows: numpy's and PyTorch's do the same, also for what PyTorch cannot share the memory of."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

from dualstore.bulk import Bulk
from dualstore.capture.threads import TorchBulk

BULKS = [Bulk(), TorchBulk()]
DTYPES = [np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8]


def locked(rows: ndarray) -> ndarray:
    rows.flags.writeable = False
    return rows


PLACED: dict[str, Callable[[ndarray], ndarray]] = {
    "one after another": lambda rows: rows,
    "by columns": np.asfortranarray,
    "with gaps": lambda rows: np.repeat(rows, 2, axis=1)[:, ::2],
    "backwards": lambda rows: np.ascontiguousarray(rows[::-1])[::-1],
    "read only": locked,
}
"""Ways in which rows may lie in memory."""


def any_bits(dtype: type, shape: tuple[int, int], seed: int) -> ndarray:
    """Random bits: NaNs of every payload among them."""
    size = np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] * size), np.uint8).view(dtype)


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bulk", BULKS)
@settings(max_examples=5, deadline=None)
@given(count=st.integers(0, 600), width=st.sampled_from([1, 3, 130]), share=st.floats(0, 1), seed=st.integers(0, 100))
def test_rows_are_copied_bit_by_bit(bulk: Bulk, dtype: type, placed: str, count: int, width: int, share: float, seed: int) -> None:
    plain = any_bits(dtype, (count, width), seed)
    rows = PLACED[placed](plain.copy())
    kept = np.flatnonzero(np.random.default_rng(seed).random(count) < share)
    for some in (None, kept):
        wanted = plain if some is None else plain[some]
        out = np.zeros_like(wanted)
        bulk.copy(rows, some, out)
        assert out.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("bulk", BULKS)
def test_values_without_a_width_are_taken_as_rows_are(bulk: Bulk) -> None:
    out = np.zeros(3, np.int32)
    bulk.copy(np.arange(10, dtype=np.int32), np.array([0, 7, 9]), out)
    assert out.tolist() == [0, 7, 9]


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bulk", BULKS)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (1, 50_000), (300, 7), (400, 513)])
def test_the_largest_square_is_that_of_the_longest_row(bulk: Bulk, dtype: type, placed: str, count: int, width: int) -> None:
    rows = np.random.default_rng(count + width).normal(size=(count, width)).astype(dtype)
    wanted = np.square(rows.astype(np.longdouble)).sum(axis=1).max()
    precision = np.finfo(np.promote_types(dtype, np.float32)).eps
    assert abs(bulk.largest_square(PLACED[placed](rows)) - wanted) <= width * precision * wanted


@pytest.mark.parametrize("bulk", BULKS)
def test_a_square_beyond_all_numbers_is_infinite(bulk: Bulk) -> None:
    assert bulk.largest_square(np.full((2, 1), 1e281)) == np.inf


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bulk", BULKS)
def test_a_number_that_is_not_finite_shows(bulk: Bulk, odd: float) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        rows = np.ones((5, 9), dtype)
        rows[3, 2] = odd
        assert not np.isfinite(bulk.largest_square(rows))
    rows = np.ones((5, 9), np.float32)
    rows[3, 2] = odd
    assert np.isfinite(bulk.largest(rows)).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("bulk", BULKS)
def test_numbers_are_halved_to_the_same_bits(bulk: Bulk, placed: str) -> None:
    rows = any_bits(np.float32, (500, 77), 3)
    rows[np.isnan(rows)] = np.float32(2.0**-24 * 1.5)  # a tie below the normal numbers
    factors = 2.0 ** np.random.default_rng(0).integers(-100, 100, 500).astype(np.float32)
    with np.errstate(all="ignore"):
        wanted, scaled = rows.astype(np.float16), (rows * factors[:, None]).astype(np.float16)
    given = PLACED[placed](rows.copy())
    assert np.array_equal(bulk.half(given).view(np.uint16), wanted.view(np.uint16))
    with np.errstate(all="ignore"):
        assert np.array_equal(bulk.half(given, factors).view(np.uint16), scaled.view(np.uint16))
    assert np.array_equal(bulk.largest(given), np.abs(rows).max(axis=1))


def test_every_tie_is_rounded_to_the_even_number() -> None:
    below = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    above = np.append(below[1:], 65536.0)
    ties = ((below + above) / 2).astype(np.float32)[:, None]
    with np.errstate(over="ignore"):
        wanted = ties.astype(np.float16).view(np.uint16)
    for bulk in BULKS:
        assert np.array_equal(bulk.half(ties).view(np.uint16), wanted)
        assert not (bulk.half(ties).view(np.uint16) & 1).any()


def test_rows_of_a_tensor_that_trains_are_work_as_any_others() -> None:
    tensor = torch.ones(3, 4, requires_grad=True)
    assert TorchBulk().largest_square(tensor.detach().numpy()) == 4.0

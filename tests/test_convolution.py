"""Convolutions as linear maps: their rows add up to torch's own gradients and outputs, whatever the settings."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualstore.capture.convolution import Convolution, errors_of, keys_of, maps_of

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
torch.set_num_threads(1)
KINDS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
MODES = ("zeros", "reflect", "replicate", "circular")


def convolution(dims: int, *args: Any, dtype: torch.dtype = torch.float64, **kwargs: Any) -> Convolution:
    torch.manual_seed(5)
    return KINDS[dims](*args, **kwargs, dtype=dtype)


def called(module: Convolution, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, output and the gradient of the output of one call; the parameters have got their gradients."""
    torch.manual_seed(6)
    x = torch.randn(*shape, dtype=module.weight.dtype)
    y = module(x)
    e = torch.randn_like(y)
    y.backward(e)
    return x, y.detach(), e


def assert_exact(module: Convolution, shape: Sequence[int], tolerance: float = 1e-12) -> None:
    """Every map's output and gradients, from the keys and errors, are those of torch."""
    x, y, e = called(module, shape)
    rows = list(zip(maps_of(module), keys_of(module, x), errors_of(module, e), errors_of(module, y), strict=True))
    parameters = dict(module.named_parameters())
    for one, keys, errors, outputs in rows:
        assert keys.shape[:2] == errors.shape[:2]
        assert (keys.shape[2], errors.shape[2]) == (one.d_in, one.d_out)
        (place,) = one.weight
        taken = slice(*place.rows) if place.rows else slice(None)
        weight, gradient = module.weight[taken].flatten(1), module.weight.grad[taken].flatten(1)
        bias = module.bias[taken] if one.biases else torch.zeros(one.d_out, dtype=y.dtype)
        close(torch.einsum("nlo,nli->oi", errors, keys), gradient, tolerance)
        close(keys @ weight.T + bias, outputs, tolerance)
        for bias_place in one.biases:
            close(errors.sum((0, 1)), parameters[bias_place.parameter].grad[taken], tolerance)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 10)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Convolution, list[int]]:
    """A convolution of any settings and the shape of an input that it takes."""
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    each = st.integers(1, 3)
    sizes = [draw(st.integers(4, 7)) for _ in range(dims)]
    kernel = [draw(st.integers(1, 2 if dims == 3 else 3)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) if size < 3 else 1 for size in kernel]
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    strides = [1] * dims if padding == "same" else [draw(each) for _ in range(dims)]
    module = convolution(
        dims,
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=strides,
        padding=[draw(st.integers(0, 2)) for _ in range(dims)] if padding == "numbers" else padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(MODES)),
    )
    leading = [] if draw(st.booleans()) else [draw(each)]
    return module, [*leading, module.in_channels, *sizes]


@settings(max_examples=150, deadline=None)
@given(calls())
def test_rows_of_any_convolution_add_up_to_its_gradients(call: tuple[Convolution, list[int]]) -> None:
    assert_exact(*call)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_an_even_kernel_keeps_the_size_by_one_more_behind(dims: int, mode: str) -> None:
    module = convolution(dims, 2, 3, 4, padding="same", padding_mode=mode, dilation=1)
    assert_exact(module, (2, 2, *[5] * dims))


def test_rows_in_single_precision_are_as_exact_as_that_is() -> None:
    assert_exact(convolution(2, 4, 6, 3, padding=1, groups=2, dtype=torch.float32), (3, 4, 6, 5), 1e-5)


def test_keys_are_the_columns_of_unfold() -> None:
    module = convolution(2, 3, 2, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2))
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    columns = torch.nn.functional.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 2), stride=(2, 1))
    (keys,) = keys_of(module, x)
    assert torch.equal(keys, columns.transpose(1, 2))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_chosen_places_are_those_of_all(dims: int, groups: int) -> None:
    module = convolution(dims, 4, 2, 2, stride=2, padding=1, groups=groups)
    x, _, e = called(module, (3, 4, *[5] * dims))
    chosen = torch.tensor([4, 0, 3**dims - 1] if dims > 1 else [2, 0, 1])
    for some, every in zip(keys_of(module, x, chosen), keys_of(module, x), strict=True):
        assert torch.equal(some, every[:, chosen])
    for some, every in zip(errors_of(module, e, chosen), errors_of(module, e), strict=True):
        assert torch.equal(some, every[:, chosen])


def test_no_chosen_place_and_no_sample_give_no_row() -> None:
    module = convolution(2, 2, 4, 3, groups=2)
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    assert [keys.shape for keys in keys_of(module, x, torch.tensor([], dtype=torch.int64))] == [(2, 0, 9)] * 2
    assert [keys.shape for keys in keys_of(module, x[:0])] == [(0, 9, 9)] * 2
    assert [errors.shape for errors in errors_of(module, module(x[:0]))] == [(0, 9, 2)] * 2


def test_half_precision_stays_and_nothing_needs_a_gradient() -> None:
    module = convolution(1, 2, 2, 3, padding=1, padding_mode="circular", dtype=torch.bfloat16)
    x = torch.randn(2, 2, 5, dtype=torch.bfloat16, requires_grad=True)
    (keys,), (errors,) = keys_of(module, x), errors_of(module, module(x))
    assert keys.dtype == errors.dtype == torch.bfloat16
    assert not keys.requires_grad
    assert not errors.requires_grad

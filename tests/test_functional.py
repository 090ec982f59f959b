"""Multiplications by parameters inside attention: seen, named and added up to torch's own gradients."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dualstore.capture.functional import LinearWatch, Use, maps_of, slow_path
from dualstore.capture.maps import Map
from dualstore.schema import Place

torch.set_num_threads(1)
LINEAR, ATTENTION = F.linear, F.multi_head_attention_forward


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    yield
    assert F.linear is LINEAR
    assert F.multi_head_attention_forward is ATTENTION
    assert torch.backends.mha.get_fastpath_enabled()


def attention(*args: Any, dtype: torch.dtype = torch.float64, **kwargs: Any) -> nn.MultiheadAttention:
    torch.manual_seed(7)
    module = nn.MultiheadAttention(*args, **kwargs, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():  # torch starts biases at zero
            parameter.normal_(std=0.5)
    return module


def sequence(*shape: int, seed: int = 8, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def maps_within(model: nn.Module) -> dict[str, tuple[str, Map]]:
    """Every map of every attention module by its full name, with the name of the module."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            found |= {f"{name}.{one.suffix}".strip("."): (name, one) for one in maps_of(module)}
    return found


class Rows:
    """Keys, outputs and errors of every map of a model's attention modules, in the order of their calls."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.maps = model, maps_within(model)
        self.keys: dict[str, list[torch.Tensor]] = {name: [] for name in self.maps}
        self.outputs: dict[str, list[torch.Tensor]] = {name: [] for name in self.maps}
        self.errors: dict[str, list[torch.Tensor]] = {name: [] for name in self.maps}
        self.uses: list[Use] = []

    @contextmanager
    def taken(self) -> Iterator["Rows"]:
        with closing(LinearWatch([self.parameter(name)[0] for name in self.maps], self._see)):
            yield self

    def parameter(self, name: str) -> tuple[nn.Parameter, tuple[int, int] | None]:
        return self._at(name, self.maps[name][1].weight[0])

    def _at(self, name: str, place: Place) -> tuple[nn.Parameter, tuple[int, int] | None]:
        return self.model.get_parameter(f"{self.maps[name][0]}.{place.parameter}".strip(".")), place.rows

    def _see(self, use: Use) -> None:
        self.uses.append(use)
        for name in self.maps:
            parameter, rows = self.parameter(name)
            if parameter is not use.parameter or not use.covers(rows):
                continue
            self.keys[name].append(use.keys())
            self.outputs[name].append(use.part(use.output, rows))
            if use.output.requires_grad:
                use.output.register_hook(lambda e, name=name, use=use, rows=rows: self.errors[name].append(use.part(e, rows)))

    def assert_exact(self, tolerance: float = 1e-12) -> None:
        """Each map's gradients and outputs are what its rows say."""
        for name, (_, one) in self.maps.items():
            weight, gradient = self._parts(*self.parameter(name))
            assert (one.d_out, one.d_in) == weight.shape
            added = sum(torch.einsum("nlo,nli->oi", e, x) for e, x in zip(self.errors[name], self.keys[name], strict=True))
            close(added, gradient, tolerance)
            bias = torch.zeros(one.d_out, dtype=weight.dtype)
            if one.biases:
                bias, gradient = self._parts(*self._at(name, one.biases[0]))
                close(sum(e.sum((0, 1)) for e in self.errors[name]), gradient, tolerance)
            for x, y in zip(self.keys[name], self.outputs[name], strict=True):
                close(x @ weight.T + bias, y, tolerance)

    def _parts(self, parameter: nn.Parameter, rows: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        taken = slice(*rows) if rows else slice(None)
        assert parameter.grad is not None
        return parameter.detach()[taken], parameter.grad[taken]


def close(found: Any, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=10 * tolerance)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without bias": {"bias": False},
    "batch first": {"batch_first": True},
    "bias of keys and values": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"kdim": 5, "vdim": 3},
    "other widths, batch first, without bias": {"kdim": 5, "vdim": 3, "batch_first": True, "bias": False},
    "dropout": {"dropout": 0.3},
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without weights": {"need_weights": False},
    "masks": {"attn_mask": torch.ones(4, 5).triu(2).bool(), "key_padding_mask": torch.arange(15).reshape(3, 5) % 5 > 3},
    "every head": {"average_attn_weights": False},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rows_of_cross_attention_add_up_to_its_gradients(settings: dict[str, Any], call: dict[str, Any]) -> None:
    module = attention(6, 2, **settings)
    turned = module.batch_first
    query, key, value = sequence(4, 3, 6), sequence(5, 3, module.kdim, seed=9), sequence(5, 3, module.vdim, seed=10)
    given = [x.transpose(0, 1) if turned else x for x in (query, key, value)]
    with Rows(module).taken() as rows:
        found, _ = module(*given, **call)
        found.backward(sequence(*found.shape, seed=11))
    rows.assert_exact()
    for name, x in zip("qkv", (query, key, value), strict=True):
        assert torch.equal(rows.keys[name][0], x.transpose(0, 1))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_self_attention_is_one_product_but_three_maps(weights: bool, turned: bool) -> None:
    module, x = attention(6, 2, batch_first=turned), sequence(4, 3, 6)
    with Rows(module).taken() as rows:
        found, _ = module(x, x, x, need_weights=weights)
        found.backward(sequence(*found.shape, seed=11))
    assert [use.rows for use in rows.uses] == [(0, 18), (0, 6)]
    rows.assert_exact()
    by_sample = x if turned else x.transpose(0, 1)
    assert all(torch.equal(rows.keys[name][0], by_sample) for name in "qkv")
    # The output's rows belong to the samples and places that the input's do.
    assert torch.equal(rows.outputs["out"][0], found if turned else found.transpose(0, 1))


def test_encoder_decoder_attention_takes_k_and_v_together() -> None:
    module, x, memory = attention(6, 2), sequence(4, 3, 6), sequence(5, 3, 6, seed=9)
    with Rows(module).taken() as rows:
        module(x, memory, memory)[0].square().sum().backward()
    assert [use.rows for use in rows.uses] == [(0, 6), (6, 18), (0, 6)]
    rows.assert_exact()


@pytest.mark.parametrize("turned", [False, True])
def test_a_sequence_alone_is_one_sample(turned: bool) -> None:
    module, x = attention(6, 2, batch_first=turned), sequence(4, 6)
    with Rows(module).taken() as rows:
        module(x, x, x)[0].square().sum().backward()
    rows.assert_exact()
    assert rows.keys["q"][0].shape == rows.keys["out"][0].shape == (1, 4, 6)


def test_recomputed_attention_is_seen_with_its_gradients_once() -> None:
    module, x = attention(6, 2), sequence(4, 3, 6).requires_grad_()
    with Rows(module).taken() as rows:
        checkpoint(lambda x: module(x, x, x)[0].square(), x, use_reentrant=True).sum().backward()
    assert [use.output.requires_grad for use in rows.uses] == [False, False, True, True]
    assert [len(errors) for errors in rows.errors.values()] == [1] * 4
    rows.keys = {name: keys[1:] for name, keys in rows.keys.items()}
    rows.outputs = {name: outputs[1:] for name, outputs in rows.outputs.items()}
    rows.assert_exact()


def test_rows_in_single_precision_are_as_exact_as_that_is() -> None:
    module, x = attention(6, 2, dtype=torch.float32), sequence(4, 3, 6, dtype=torch.float32)
    with Rows(module).taken() as rows:
        module(x, x, x)[0].square().sum().backward()
    rows.assert_exact(1e-5)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_a_transformer_add_up_to_its_gradients(first: bool, turned: bool) -> None:
    torch.manual_seed(1)
    kwargs: dict[str, Any] = {"norm_first": first, "batch_first": turned, "dtype": torch.float64}
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoderLayer(6, 2, 7, 0.2, **kwargs),
            "decoder": nn.TransformerDecoderLayer(6, 2, 7, 0.2, **kwargs),
        }
    )
    with Rows(model).taken() as rows:
        memory = model["encoder"](sequence(*((3, 5, 6) if turned else (5, 3, 6))))
        model["decoder"](sequence(*((3, 4, 6) if turned else (4, 3, 6)), seed=2), memory).square().sum().backward()
    assert len(rows.maps) == 12
    rows.assert_exact()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_layers_show_their_products_off_the_fast_path_only() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 7, batch_first=True, dtype=torch.float64), 2).eval()
    x, padding = sequence(3, 4, 6), torch.arange(12).reshape(3, 4) % 4 > 2
    for grad_off in (torch.no_grad, torch.inference_mode):
        with Rows(model).taken() as rows, grad_off():
            fast = model(x, src_key_padding_mask=padding)
            assert not rows.uses
            with slow_path():
                slow = model(x, src_key_padding_mask=padding)
            assert len(rows.uses) == 4
        assert all(len(outputs) == 1 for outputs in rows.outputs.values())
        close(slow[~padding], fast[~padding], 1e-12)


def test_the_fast_path_comes_back_after_an_error_and_stays_off_where_it_was() -> None:
    with pytest.raises(ValueError, match="inside"), slow_path():
        raise ValueError("inside")
    assert torch.backends.mha.get_fastpath_enabled()
    with slow_path():
        with slow_path():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()


def test_any_module_that_multiplies_by_its_own_parameter_is_seen() -> None:
    weight = nn.Parameter(sequence(5, 4))
    seen: list[Use] = []
    with closing(LinearWatch([weight], seen.append)):
        F.linear(input=sequence(2, 3, 4), weight=weight, bias=None)
        F.linear(sequence(4), weight[1:4])
    assert [(use.rows, use.keys().shape, use.part(use.output).shape) for use in seen] == [
        ((0, 5), (2, 3, 4), (2, 3, 5)),
        ((1, 4), (1, 1, 4), (1, 1, 3)),
    ]
    assert seen[0].samples is None
    assert seen[0].covers((2, 3))
    assert seen[0].covers(None)
    assert not seen[1].covers((0, 2))
    assert not seen[1].covers(None)


def test_what_is_no_run_of_rows_passes_by() -> None:
    weight, other, x = nn.Parameter(sequence(4, 4)), nn.Parameter(sequence(4, 4)), sequence(2, 4)
    seen: list[Use] = []
    with closing(LinearWatch([weight], seen.append)):
        for matrix in (other, weight.T, weight[::2], weight.detach(), weight * 1, weight.clone()):
            assert torch.equal(F.linear(x, matrix), LINEAR(x, matrix))
        assert torch.equal(F.linear(x[:, :2], weight[:, 1:3]), LINEAR(x[:, :2], weight[:, 1:3]))
        assert torch.equal(F.linear(x, weight[1]), LINEAR(x, weight[1]))
        nn.Linear(4, 3, dtype=torch.float64)(x)
    assert not seen


def test_several_watchers_come_and_go_in_any_order() -> None:
    weights, seen = [nn.Parameter(sequence(2, 3)) for _ in range(3)], []
    watches = [LinearWatch([weight], lambda use, n=n: seen.append(n)) for n, weight in enumerate(weights)]
    for gone in (1, 0, 2):
        for weight in weights:
            F.linear(sequence(1, 3), weight)
        watches[gone].close()
        watches[gone].close()
        seen.append("closed")
    assert seen == [0, 1, 2, "closed", 0, 2, "closed", 2, "closed"]


def test_an_error_in_a_watcher_ends_the_call_and_the_next_one_is_named_rightly() -> None:
    module, x = attention(6, 2), sequence(4, 3, 6)
    samples: list[Any] = []

    def fail(use: Use) -> None:
        samples.append(use.samples)
        if use.parameter is module.in_proj_weight:
            raise ValueError("refused")

    with closing(LinearWatch([module.in_proj_weight, module.out_proj.weight], fail)):
        with pytest.raises(ValueError, match="refused"):
            module(x, x, x)
        module.out_proj(x)
    assert samples == [3, None]


def test_each_thread_is_in_an_attention_of_its_own() -> None:
    module = attention(6, 2)
    samples: dict[int, set[int | None]] = {}
    start = threading.Barrier(4)

    def run(size: int) -> None:
        start.wait()
        for _ in range(20):
            x = sequence(4, size, 6)
            module(x, x, x)

    def see(use: Use) -> None:
        samples.setdefault(threading.get_ident(), set()).add((use.samples, use.keys().shape[0]))

    with closing(LinearWatch([module.in_proj_weight, module.out_proj.weight], see)):
        threads = [threading.Thread(target=run, args=(size,)) for size in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(sorted, samples.values())) == [[(size, size)] for size in range(1, 5)]


def test_a_function_put_around_ours_keeps_working_when_we_are_gone() -> None:
    weight, seen, calls = nn.Parameter(sequence(2, 3)), [], []
    watch = LinearWatch([weight], seen.append)
    ours = F.linear

    def theirs(*args: Any) -> torch.Tensor:
        calls.append(len(args))
        return ours(*args)

    F.linear = theirs
    watch.close()
    assert F.linear is theirs
    assert torch.equal(F.linear(sequence(1, 3), weight), LINEAR(sequence(1, 3), weight))
    with closing(LinearWatch([weight], seen.append)):
        F.linear(sequence(1, 3), weight)
    assert F.linear is theirs
    assert len(seen) == 1
    F.linear = LINEAR
    F.multi_head_attention_forward = ATTENTION


def test_modes_and_subclasses_of_tensors_see_what_they_saw_before() -> None:
    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.called: list[Any] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.called.append(function)
            return function(*args, **(kwargs or {}))

    weight, x, seen = nn.Parameter(sequence(4, 4)), sequence(2, 4), []
    with Names() as before:
        F.linear(x, weight)
        F.linear(x, weight[:2])
    with closing(LinearWatch([weight], lambda use: seen.append(use.rows))), Names() as after:
        F.linear(x, weight)
        F.linear(x, weight[:2])
    assert after.called == before.called
    assert seen == [(0, 4), (0, 2)]


def test_autocast_multiplies_in_half_precision_as_without_us() -> None:
    module, x = attention(6, 2, dtype=torch.float32), sequence(4, 3, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x, x, x)[0]
        with Rows(module).taken() as rows:
            found = module(x, x, x)[0]
    assert torch.equal(found, expected)
    assert found.dtype == rows.outputs["q"][0].dtype == torch.bfloat16
    assert rows.keys["q"][0].dtype == torch.float32


def test_gradients_and_random_numbers_are_those_of_a_run_without_us() -> None:
    module, x = attention(6, 2, dropout=0.5), sequence(4, 3, 6)

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(3)
        module.zero_grad()
        module(x, x, x)[0].square().sum().backward()
        return [torch.rand(1), *(parameter.grad.clone() for parameter in module.parameters())]

    plain = trained()
    with Rows(module).taken():
        watched = trained()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_gives_the_same_with_and_without_us() -> None:
    module, x = attention(6, 2), sequence(4, 3, 6)
    expected = module(x, x, x)[0]
    with Rows(module).taken():
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        close(compiled(x, x, x)[0], expected, 1e-12)
    close(compiled(x, x, x)[0], expected, 1e-12)
    torch._dynamo.reset()

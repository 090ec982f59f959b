"""LSTM and GRU run again in steps: their rows are those of a plain loop, and add up to the fused kernel's gradients."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dualstore.capture.recurrent import Recurrent, Rerun, keys_at_hand, maps_of, obstacle
from dualstore.errors import RecordError

torch.set_num_threads(1)
LENGTHS = [4, 6, 1, 4]
"""Of the sequences of a packed batch, which are not in order."""
FORMS = ("by time", "by sample", "alone", "packed", "packed in order")
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def recurrent(kind: str, *, dtype: torch.dtype = torch.float64, **kwargs: Any) -> Recurrent:
    torch.manual_seed(4)
    return getattr(nn, kind)(3, 4, dtype=dtype, **kwargs)


def given_to(module: Recurrent, form: str) -> tuple[Any, list[torch.Tensor]]:
    """An input of some form, and the sequences in it by sample."""
    torch.manual_seed(5)
    lengths = {"alone": [6], "packed": LENGTHS, "packed in order": sorted(LENGTHS)[::-1]}.get(form, [5, 5, 5])
    sequences = [torch.randn(length, module.input_size, dtype=module.weight_ih_l0.dtype) for length in lengths]
    if form.startswith("packed"):
        return pack_sequence(sequences, enforce_sorted=form == "packed in order"), sequences
    return (sequences[0] if form == "alone" else torch.stack(sequences, 0 if module.batch_first else 1)), sequences


def state_for(module: Recurrent, samples: int, form: str) -> Any:
    torch.manual_seed(6)
    shape = [module.num_layers * (2 if module.bidirectional else 1), samples, module.hidden_size]
    shape = shape[::2] if form == "alone" else shape
    parts = tuple(torch.randn(shape, dtype=module.weight_ih_l0.dtype) for _ in range(parts_of(module)))
    return parts if isinstance(module, nn.LSTM) else parts[0]


def parts_of(module: Recurrent) -> int:
    return 2 if isinstance(module, nn.LSTM) else 1


def tensors_of(output: Any, state: Any) -> list[torch.Tensor]:
    """What a module gave, as tensors."""
    data = output.data if isinstance(output, PackedSequence) else output
    return [data, *(state if isinstance(state, tuple) else (state,))]


def loop(module: Recurrent, sequences: Sequence[torch.Tensor], state: Any) -> tuple[dict[Any, list[torch.Tensor]], Any, Any]:
    """The plain loop, a sample and a step at a time: (key, output, shift) by (map, sample, position), outputs and final states.

    A shift is a zero added to what a map gives; its gradient is the map's error.
    """
    names = [one.suffix for one in maps_of(module)]
    rows: dict[Any, list[torch.Tensor]] = {}
    outputs, finals = [], []
    of = dict(module.named_parameters())

    def linear(name: str, sample: int, t: int, key: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        shift = torch.zeros(len(weight), dtype=key.dtype, requires_grad=True)
        plain = weight @ key + (0 if bias is None else bias)
        rows[names.index(name), sample, t] = [key, plain, shift]
        return plain + shift

    for sample, x in enumerate(sequences):
        below, ends = list(x), []
        for layer in range(module.num_layers):
            sides = []
            for end in ("", "_reverse") if module.bidirectional else ("",):
                suffix = f"l{layer}{end}"
                w_h, w_x = of[f"weight_hh_{suffix}"], of[f"weight_ih_{suffix}"]
                b_h, b_x = of.get(f"bias_hh_{suffix}"), of.get(f"bias_ih_{suffix}")
                h, *c = [part[len(ends)][sample] for part in state]
                side: list[Any] = [None] * len(below)
                for t in range(len(below))[:: -1 if end else 1]:
                    if isinstance(module, nn.LSTM):
                        bias = None if b_h is None else b_h + b_x
                        gates = linear(suffix, sample, t, torch.cat([h, below[t]]), torch.cat([w_h, w_x], 1), bias)
                        i, f, g, o = gates.chunk(4)
                        c = [f.sigmoid() * c[0] + i.sigmoid() * g.tanh()]
                        h = o.sigmoid() * c[0].tanh()
                    else:
                        of_h = linear(f"hh_{suffix}", sample, t, h, w_h, b_h).chunk(3)
                        of_x = linear(f"ih_{suffix}", sample, t, below[t], w_x, b_x).chunk(3)
                        r, z = (of_h[0] + of_x[0]).sigmoid(), (of_h[1] + of_x[1]).sigmoid()
                        h = (1 - z) * (of_x[2] + r * of_h[2]).tanh() + z * h
                    side[t] = h
                sides.append(side)
                ends.append((h, *c))
            below = [torch.cat(parts) for parts in zip(*sides, strict=True)]
        outputs.append(torch.stack(below))
        finals.append(ends)
    final = [torch.stack([torch.stack([end[part] for end in ends]) for ends in finals], 1) for part in range(parts_of(module))]
    return rows, outputs, final


def plain_rows(module: Recurrent, sequences: Sequence[torch.Tensor], state: Any, weights: Any) -> list[list[Row]]:
    """(key, output, error) of each map, by sample and position; `weights` give a number for each output and final state."""
    if state is None:
        shape = (module.num_layers * (2 if module.bidirectional else 1), len(sequences), module.hidden_size)
        state = [torch.zeros(shape, dtype=sequences[0].dtype)] * parts_of(module)
    else:
        state = [part if part.ndim == 3 else part[:, None] for part in (state if isinstance(state, tuple) else (state,))]
    rows, outputs, final = loop(module, sequences, state)
    loss = sum((values * weights(place)).sum() for place, values in enumerate([torch.cat(outputs), *final]))
    ordered = sorted(rows)
    errors = torch.autograd.grad(loss, [rows[name][2] for name in ordered])
    found: list[list[Row]] = [[] for _ in maps_of(module)]
    for name, error in zip(ordered, errors, strict=True):
        found[name[0]].append((rows[name][0].detach(), rows[name][1].detach(), error))
    return found


def numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype).sin().reshape(like.shape)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_exact(module: Recurrent, form: str, *, carried: bool, of: Sequence[bool], tolerance: float = 1e-12) -> None:
    """The rows of one call add up to the module's own gradients, and its outputs are those of the module.

    `of` says which of the outputs and final states have a gradient.
    """
    x, sequences = given_to(module, form)
    state = state_for(module, len(sequences), form) if carried else None
    tensors = tensors_of(*module(x, state))
    gradients = [numbers(tensor) if there else None for tensor, there in zip(tensors, of, strict=True)]
    module.zero_grad()
    chosen = [pair for pair in zip(tensors, gradients, strict=True) if pair[1] is not None]
    torch.autograd.backward([tensor for tensor, _ in chosen], [gradient for _, gradient in chosen])
    before = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}

    rerun = Rerun(module, x, state)
    for found, expected in zip([rerun.output, *rerun.state], tensors, strict=True):
        close(found, expected.detach(), tolerance)
    last: Any = gradients[1:] if isinstance(module, nn.LSTM) else gradients[1]
    parameters = dict(module.named_parameters())
    rows = zip(maps_of(module), rerun.keys(), rerun.outputs(), rerun.errors(gradients[0], last), strict=True)
    for one, keys, outputs, errors in rows:
        names = [place.parameter for place in one.weight]
        weight = torch.cat([parameters[name].detach() for name in names], 1)
        assert weight.shape == (one.d_out, one.d_in)
        assert keys.shape == (len(rerun.samples), one.d_in)
        close(errors.T @ keys, torch.cat([before[name] for name in names], 1), 10 * tolerance)
        bias = sum((parameters[place.parameter].detach() for place in one.biases), torch.zeros(one.d_out, dtype=keys.dtype))
        close(outputs, keys @ weight.T + bias, tolerance)
        for place in one.biases:
            close(errors.sum(0), before[place.parameter], 10 * tolerance)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, before[name])
    names = [(n, t) for n, sequence in enumerate(sequences) for t in range(len(sequence))]
    assert list(zip(rerun.samples.tolist(), rerun.positions.tolist(), strict=True)) == names


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["LSTM", "GRU"]))
    module = recurrent(
        kind,
        num_layers=draw(st.integers(1, 3)),
        bidirectional=draw(st.booleans()),
        bias=draw(st.booleans()),
        batch_first=draw(st.booleans()),
    )
    of = draw(st.lists(st.booleans(), min_size=1 + parts_of(module), max_size=1 + parts_of(module)).filter(any))
    # A layer that nothing depends on has no gradient at all; the output depends on every one.
    return {"module": module, "form": draw(st.sampled_from(FORMS)), "carried": draw(st.booleans()), "of": [True, *of[1:]]}


@settings(max_examples=120, deadline=None)
@given(cases())
def test_rows_of_any_module_and_input_add_up_to_its_gradients(case: dict[str, Any]) -> None:
    assert_exact(case.pop("module"), case.pop("form"), **case)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_gradients_may_come_through_the_final_states_alone(kind: str) -> None:
    module = recurrent(kind, num_layers=2, bidirectional=True)
    assert_exact(module, "packed", carried=True, of=[False, *[True] * parts_of(module)])
    assert_exact(module, "by time", carried=True, of=[False, True, *[False] * (parts_of(module) - 1)])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_rows_in_single_precision_are_as_exact_as_that_is(kind: str) -> None:
    module = recurrent(kind, num_layers=2, bidirectional=True, dtype=torch.float32)
    assert_exact(module, "packed", carried=True, of=[True] * (1 + parts_of(module)), tolerance=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_each_row_is_that_of_a_plain_loop(kind: str, both: bool, carried: bool, form: str) -> None:
    module = recurrent(kind, num_layers=2, bidirectional=both, batch_first=form == "by sample")
    x, sequences = given_to(module, form)
    state = state_for(module, len(sequences), form) if carried else None
    rerun = Rerun(module, x, state)
    width = module.hidden_size * (2 if both else 1)
    by_sample = numbers(torch.empty(sum(map(len, sequences)), width, dtype=torch.float64))
    of_states = [numbers(part if part.ndim == 3 else part[:, None]) for part in rerun.state]
    expected = plain_rows(module, sequences, state, lambda place: by_sample if place == 0 else of_states[place - 1])
    pieces = list(by_sample.split([len(sequence) for sequence in sequences]))
    if form.startswith("packed"):
        gradient = pack_sequence(pieces, enforce_sorted=form == "packed in order").data
    else:
        gradient = pieces[0] if form == "alone" else torch.stack(pieces, 0 if module.batch_first else 1)
    states: Any = [part if form != "alone" else part[:, 0] for part in of_states]
    errors = rerun.errors(gradient, states if kind == "LSTM" else states[0])
    for rows, *found in zip(expected, rerun.keys(), rerun.outputs(), errors, strict=True):
        for one, each in zip(found, zip(*rows, strict=True), strict=True):
            close(one, torch.stack(each))


def test_maps_are_described_without_a_call() -> None:
    lstm = [(m.suffix, m.d_in, m.d_out) for m in maps_of(recurrent("LSTM", num_layers=2, bidirectional=True))]
    assert lstm == [("l0", 7, 16), ("l0_reverse", 7, 16), ("l1", 12, 16), ("l1_reverse", 12, 16)]
    gru = maps_of(recurrent("GRU", num_layers=2))
    assert [(m.suffix, m.d_in, m.d_out) for m in gru] == [("hh_l0", 4, 12), ("ih_l0", 3, 12), ("hh_l1", 4, 12), ("ih_l1", 4, 12)]
    (one,) = maps_of(recurrent("LSTM"))
    assert [place.parameter for place in (*one.weight, *one.biases)] == ["weight_hh_l0", "weight_ih_l0", "bias_ih_l0", "bias_hh_l0"]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_errors_of_sums_are_sums_of_errors(kind: str) -> None:
    module = recurrent(kind, num_layers=2)
    x, sequences = given_to(module, "by time")
    rerun = Rerun(module, x)
    output, state = rerun.output, [None] * (parts_of(module) - 1)
    of_output = rerun.errors(numbers(output))
    of_state = rerun.errors(None, [numbers(rerun.state[0]), *state])
    both = rerun.errors(numbers(output), [numbers(rerun.state[0]), *state])
    for one, other, together in zip(of_output, of_state, both, strict=True):
        close(one + other, together)
    assert all(not e.any() and len(e) == sum(map(len, sequences)) for e in rerun.errors(None))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_rows_are_those_of_the_weights_that_are_given(kind: str) -> None:
    module = recurrent(kind)
    x, _ = given_to(module, "by time")
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    before = Rerun(module, x).errors(numbers(module(x)[0]))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    after = Rerun(module, x, weights=weights).errors(numbers(module(x)[0]))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_rows_can_be_taken_in_the_middle_of_backward(kind: str) -> None:
    module = recurrent(kind, num_layers=2)
    x, _ = given_to(module, "by time")
    found: list[torch.Tensor] = []
    output, _ = module(x)
    output.register_hook(lambda e: found.extend(Rerun(module, x).errors(e)))
    output.square().sum().backward()
    for one, errors, keys in zip(maps_of(module), found, Rerun(module, x).keys(), strict=True):
        close(errors.T @ keys, torch.cat([module.get_parameter(place.parameter).grad for place in one.weight], 1))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("form", ["by time", "by sample", "alone"])
@pytest.mark.parametrize("carried", [False, True])
def test_keys_at_hand_are_those_of_a_run_and_the_modules_own_states(kind: str, form: str, carried: bool) -> None:
    module = recurrent(kind, batch_first=form == "by sample", dtype=torch.float32)
    x, sequences = given_to(module, form)
    state = state_for(module, len(sequences), form) if carried else None
    output, _ = module(x, state)
    found = keys_at_hand(module, x, state, output)
    assert found is not None
    for keys, expected in zip(found, Rerun(module, x, state).keys(), strict=True):
        close(keys, expected, 1e-6)
    outputs = output.detach()[None] if form == "alone" else output.detach().transpose(0, int(form == "by time"))
    states = found[0][:, : module.hidden_size].reshape(len(sequences), -1, module.hidden_size)
    assert torch.equal(states[:, 1:], outputs[:, :-1])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_keys_are_not_at_hand_where_the_output_does_not_tell_them(kind: str) -> None:
    for form, options in (("packed", {}), ("by time", {"num_layers": 2}), ("by time", {"bidirectional": True})):
        module = recurrent(kind, **options)
        x, _ = given_to(module, form)
        output, _ = module(x)
        assert keys_at_hand(module, x, None, output.data) is None
    module = recurrent(kind)
    x, _ = given_to(module, "by time")
    assert keys_at_hand(module, x, None, module(x)[0].half()) is None


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("grad_off", [torch.no_grad, torch.inference_mode])
def test_a_query_needs_no_gradients(kind: str, grad_off: Any) -> None:
    module = recurrent(kind, num_layers=2, bidirectional=True)
    x, _ = given_to(module, "packed")
    expected = Rerun(module, x)
    with grad_off():
        rerun = Rerun(module, x, differentiable=False)
    assert not any(tensor.requires_grad for tensor in (*rerun.keys(), *rerun.outputs(), rerun.output, *expected.errors(None)))
    for found, same in zip((*rerun.keys(), *rerun.outputs()), (*expected.keys(), *expected.outputs()), strict=True):
        assert torch.equal(found, same)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_autocast_and_random_numbers_are_left_alone(kind: str) -> None:
    module = recurrent(kind, dtype=torch.float32)
    x, _ = given_to(module, "by time")
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        rerun = Rerun(module, x.bfloat16())
        errors = rerun.errors(rerun.output.bfloat16())
    assert torch.equal(torch.rand(1), expected)
    assert {tensor.dtype for tensor in (*rerun.keys(), *rerun.outputs(), *errors)} == {torch.float32}


class Doubled(nn.LSTM):
    def forward(self, x: Any, hx: Any = None) -> Any:
        return super().forward(2 * x, hx)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_dropout_between_layers_is_an_obstacle_while_it_is_active(kind: str) -> None:
    module = recurrent(kind, num_layers=2, dropout=0.5)
    x, _ = given_to(module, "by time")
    with pytest.raises(RecordError, match=f"{kind}: .* dropout=0.5 between its layers .* put nn.Dropout between modules instead"):
        Rerun(module, x)
    assert obstacle(module.eval()) is None
    close(Rerun(module, x).output, module(x)[0].detach())


def test_what_cannot_be_run_again_says_why() -> None:
    assert "proj_size=2" in str(obstacle(nn.LSTM(3, 4, proj_size=2)))
    assert "its forward is not that of torch" in str(obstacle(Doubled(3, 4)))
    assert obstacle(recurrent("LSTM")) is None
    module = recurrent("GRU")
    nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    assert "remove the parametrization" in str(obstacle(module))

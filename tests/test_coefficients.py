"""The coefficients of the dual form: against torch.optim.SGD, a forward loop in numpy and a closed form."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dualstore.coefficients import Coefficients, sgd_coefficients
from dualstore.errors import DamagedError
from dualstore.schema import Layer
from dualstore.steps import DEFAULTS, STEPS_SCHEMA, Steps

Array = NDArray[np.float64]

LAYER = Layer(number=1, name="layer", kind="Linear", d_in=3, d_out=2, bias=False, weight_group=0, bias_group=-1)
PLAIN = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "decay": 0.0, "nesterov": False, "maximize": False, "clip": 1.0}
MOMENTA = {
    "none": [0.0],
    "constant": [0.9],
    "from zero": [0.0, 0.0, 0.9],
    "to zero": [0.9, 0.8, 0.0],
    "to zero and back": [0.9, 0.0, 0.0, 0.6],
}


@dataclass(frozen=True)
class Course:
    """What an optimiser was told: settings and raw gradient of every step, and the state that it started with."""

    settings: Sequence[dict[str, Any]]
    gradients: Sequence[Array]
    idle: Sequence[bool]
    weight: Array
    buffer: Array | None

    @property
    def coefficients(self) -> Coefficients:
        rows = [{**PLAIN, **row} for row in self.settings]
        return sgd_coefficients(steps_of(rows, self.idle), LAYER, 0, buffered=self.buffer is not None)

    @property
    def dual(self) -> Array:
        """Weights in the dual form: a W_0 + q b_0 + sum_s c_s G_s."""
        found = self.coefficients
        total = found.initial * self.weight
        if self.buffer is not None:
            total = total + found.buffer * self.buffer
        return sum((c * gradient for c, gradient in zip(found.c, self.gradients, strict=True)), total)


def steps_of(rows: Sequence[dict[str, Any]], idle: Sequence[bool], *, groups: Sequence[int] = (0,)) -> Steps:
    """The steps log of these settings; `idle` says where LAYER was passed over."""
    common = {"epoch": 0, "batch_size": 1, "loss": 0.0, "rows": [0, 0], **DEFAULTS}
    values = [
        {**common, "step": step, "group": group, "idle": [LAYER.number] if passed else [0], "idle_bias": [], **row}
        for step, (row, passed) in enumerate(zip(rows, idle, strict=True))
        for group in groups
    ]
    return Steps(pa.Table.from_pylist(values, STEPS_SCHEMA))


def forward(course: Course) -> Array:
    """The update rule of the documentation of torch.optim.SGD, one step after the other."""
    weight, buffer = course.weight, course.buffer
    for row, gradient, passed in zip(course.settings, course.gradients, course.idle, strict=True):
        if passed:
            continue
        now = {**PLAIN, **row}
        g = now["clip"] * gradient * (-1 if now["maximize"] else 1) + now["decay"] * weight
        if now["momentum"] != 0:
            buffer = g if buffer is None else now["momentum"] * buffer + (1 - now["dampening"]) * g
            g = g + now["momentum"] * buffer if now["nesterov"] else buffer
        weight = weight - now["lr"] * g
    return weight


def in_torch(course: Course, *, foreach: bool) -> Array:
    """The same steps taken by torch.optim.SGD in float64."""
    parameter = torch.nn.Parameter(torch.from_numpy(course.weight.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=foreach)
    if course.buffer is not None:
        optimizer.state[parameter]["momentum_buffer"] = torch.from_numpy(course.buffer.copy())
    names = {"decay": "weight_decay"}
    for row, gradient, passed in zip(course.settings, course.gradients, course.idle, strict=True):
        now = {**PLAIN, **row}
        parameter.grad = None if passed else torch.from_numpy(now.pop("clip") * gradient)
        optimizer.param_groups[0].update({names.get(name, name): value for name, value in now.items() if name != "clip"})
        optimizer.step()
    return parameter.detach().numpy()


def course(steps: int, settings_of_step: Any, *, idle: Sequence[int] = (), buffered: bool = False, seed: int = 0) -> Course:
    random = np.random.default_rng(seed)
    return Course(
        settings=[settings_of_step(step) for step in range(steps)],
        gradients=list(random.normal(size=(steps, 2, 3))),
        idle=[step in idle for step in range(steps)],
        weight=random.normal(size=(2, 3)),
        buffer=random.normal(size=(2, 3)) if buffered else None,
    )


def assert_equal(found: Array, expected: Array) -> None:
    assert np.linalg.norm(found - expected) <= 1e-12 * max(1.0, np.linalg.norm(expected))


@pytest.mark.parametrize("momenta", MOMENTA.values(), ids=MOMENTA)
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
@pytest.mark.parametrize("idle", [(), (0, 3, 7)], ids=["always", "pauses"])
@pytest.mark.parametrize("buffered", [False, True], ids=["fresh", "resumed"])
def test_every_variant_of_sgd_is_the_sum_of_its_gradients(
    momenta: list[float], nesterov: bool, idle: tuple[int, ...], buffered: bool
) -> None:
    knobs = itertools.product([0.0, 0.3], [0.0, 0.05], [False, True], [False, True], [False, True])
    for dampening, decay, maximize, scheduled, clipped in knobs:

        def one(step: int, fixed: tuple[Any, ...] = (dampening, decay, maximize, scheduled, clipped)) -> dict[str, Any]:
            dampening, decay, maximize, scheduled, clipped = fixed
            return {
                "lr": 0.1 / (1 + step) if scheduled else 0.1,
                "momentum": momenta[min(step // 2, len(momenta) - 1)],
                "dampening": dampening,
                "decay": decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "clip": 1 / (1 + step % 3) if clipped else 1.0,
            }

        taken = course(8, one, idle=idle, buffered=buffered)
        found = taken.dual
        assert_equal(found, in_torch(taken, foreach=scheduled))
        assert_equal(found, forward(taken))


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "lr": st.floats(0.0, 0.5),
                "momentum": st.sampled_from([0.0, 0.5, 0.99]),
                "dampening": st.sampled_from([0.0, 0.5, 1.0]),
                "decay": st.sampled_from([0.0, 0.1]),
                "nesterov": st.booleans(),
                "maximize": st.booleans(),
                "clip": st.floats(0.0, 1.0),
            }
        ),
        min_size=1,
        max_size=10,
    ),
    idle=st.sets(st.integers(0, 9)),
    buffered=st.booleans(),
)
def test_settings_that_change_at_every_step_are_followed(rows: list[dict[str, Any]], idle: set[int], buffered: bool) -> None:
    taken = course(len(rows), rows.__getitem__, idle=sorted(idle), buffered=buffered)
    assert_equal(taken.dual, forward(taken))


def test_constant_momentum_has_the_closed_form_of_a_geometric_sum() -> None:
    found = course(20, lambda step: {"lr": 0.1, "momentum": 0.9}).coefficients
    ages = 20 - np.arange(20)
    np.testing.assert_allclose(found.c, -0.1 * (1 - 0.9**ages) / (1 - 0.9), rtol=1e-13)
    assert found.initial == 1.0


def test_plain_sgd_has_minus_the_learning_rate() -> None:
    found = course(3, lambda step: {"lr": 0.1 * (step + 1)}).coefficients
    np.testing.assert_allclose(found.c, [-0.1, -0.2, -0.3], rtol=1e-15)
    assert (found.initial, found.buffer) == (1.0, 0.0)


def test_a_step_that_the_parameter_sat_out_has_coefficient_zero() -> None:
    found = course(4, lambda step: {"momentum": 0.9}, idle=(1, 3)).coefficients
    assert found.c[1] == found.c[3] == 0
    assert found.c[0] == pytest.approx(-0.1 * 1.9)
    assert found.c[2] == pytest.approx(-0.1)


def test_a_parameter_that_never_took_a_step_keeps_its_weights() -> None:
    taken = course(3, lambda step: {"momentum": 0.9, "decay": 0.1}, idle=(0, 1, 2), buffered=True)
    np.testing.assert_array_equal(taken.dual, taken.weight)


def test_a_parameter_of_no_group_has_coefficients_of_zero() -> None:
    found = sgd_coefficients(steps_of([PLAIN] * 3, [False] * 3), LAYER, -1)
    np.testing.assert_array_equal(found.c, np.zeros(3))
    assert (found.initial, found.buffer) == (1.0, 0.0)


def test_an_empty_log_keeps_weights_and_buffer_apart() -> None:
    found = sgd_coefficients(steps_of([], []), LAYER, 0, buffered=True)
    assert (len(found.c), found.initial, found.buffer) == (0, 1.0, 0.0)
    np.testing.assert_array_equal(found.at(np.array([0, 3], np.int32)), [0.0, 0.0])


def test_coefficients_are_looked_up_by_step_and_zero_for_steps_not_in_the_log() -> None:
    found = course(3, lambda step: {"lr": 0.1 * (step + 1)}).coefficients
    np.testing.assert_allclose(found.at(np.array([2, 0, 7, 2, -1], np.int32)), [-0.3, -0.1, 0, -0.3, 0])


@pytest.mark.parametrize("buffered", [False, True], ids=["fresh", "resumed"])
def test_weights_after_an_earlier_step_are_those_of_a_training_that_ended_there(*, buffered: bool) -> None:
    settings = {"momentum": 0.9, "decay": 0.05, "dampening": 0.2}
    whole = course(8, lambda step: {**settings, "lr": 0.1 / (1 + step)}, idle=(2, 5), buffered=buffered)
    steps = steps_of([{**PLAIN, **row} for row in whole.settings], whole.idle)
    for last in range(8):
        kept = {name: getattr(whole, name)[: last + 1] for name in ("settings", "gradients", "idle")}
        short = replace(whole, **kept)
        found, expected = sgd_coefficients(steps, LAYER, 0, buffered=buffered, until=last), short.coefficients
        assert (found.initial, found.buffer) == (expected.initial, expected.buffer)
        np.testing.assert_array_equal(found.c, np.pad(expected.c, (0, 7 - last)))


def test_each_parameter_group_has_coefficients_of_its_own() -> None:
    common = {"epoch": 0, "batch_size": 1, "loss": 0.0, "rows": [0], "idle": [], "idle_bias": [], **DEFAULTS}
    rows = [{**common, **PLAIN, "step": s, "group": g, "lr": 0.1 + g} for s in range(2) for g in (1, 0)]
    steps = Steps(pa.Table.from_pylist(rows, STEPS_SCHEMA).sort_by([("step", "ascending"), ("group", "ascending")]))
    np.testing.assert_allclose(sgd_coefficients(steps, LAYER, 0).c, [-0.1, -0.1])
    np.testing.assert_allclose(sgd_coefficients(steps, LAYER, 1).c, [-1.1, -1.1])


def test_a_step_without_the_parameter_group_is_reported() -> None:
    steps = steps_of([PLAIN] * 3, [False] * 3)
    with pytest.raises(DamagedError, match="one row of parameter group 4 for each step, found 0"):
        sgd_coefficients(steps, LAYER, 4)

"""From backward to step: which rows count, which factor they got, and which changes are noticed."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualstore
from dualstore.capture.gradients import Change, GradientWatch, Matrix, common_factor
from dualstore.errors import DualstoreWarning
from dualstore.schema import Place

torch.set_num_threads(1)
EDITED = "gradients of parameter group 0 were changed before the step other than by one factor"

X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(12, 4).sin()
Y = torch.arange(12) % 3
EVERY = list(range(12))

Zero = Callable[[nn.Module, torch.optim.Optimizer], None]


def mlp(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6, bias=bias), nn.ReLU(), nn.Linear(6, 3, bias=bias)).double()


def loss_of(model: nn.Module, rows: Sequence[int]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(X[rows]), Y[rows])


class Run:
    """A recording of a model on rows of X; `store` closes and opens it."""

    def __init__(self, path: Path, model: nn.Module, *, queue_bytes: int = 0, **settings: Any) -> None:
        self.path, self.model = path, model
        self.optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.5, "momentum": 0.9, **settings})
        self.recorder = dualstore.record(model, self.optimizer, path, dtype="float64", queue_bytes=queue_bytes)

    def backward(self, rows: Sequence[int], *, scale: float = 1.0) -> None:
        with self.recorder.batch(rows, Y[rows]):
            (loss_of(self.model, rows) * scale).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def store(self) -> dualstore.Store:
        self.recorder.close()
        return dualstore.open(self.path)


def assert_exact(store: dualstore.Store) -> None:
    found = store.verify()
    assert found.problems == []
    assert found.ok


def rows_of(store: dualstore.Store, layer: int = 0) -> list[tuple[int, int]]:
    """(step, sample_id) of every pattern of a layer, in order."""
    found = store.sql(f"SELECT step, sample_id FROM patterns WHERE layer = {layer} ORDER BY step, sample_id")
    return [(row["step"], row["sample_id"]) for row in found]


def clips(store: dualstore.Store) -> list[float]:
    return [row["clip"] for row in store.sql('SELECT clip FROM steps ORDER BY step, "group"')]


def tensors(*values: Sequence[float]) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def test_the_common_factor_of_equal_gradients_is_one() -> None:
    before, now = tensors([1.0, -2.0], [1.0, -2.0])
    assert common_factor([Change(before, now)]) == (1.0, False)


@pytest.mark.parametrize("factor", [0.25, 1e-8, 65536.0, -3.0])
def test_the_common_factor_is_that_of_all_gradients_together(factor: float) -> None:
    first, second = tensors([1.0, -2.0, 0.0], [5.0, 1.0])
    found, edited = common_factor([Change(first, first * factor), Change(second, second * factor)])
    assert found == pytest.approx(factor, rel=1e-15)
    assert not edited


def test_gradients_that_changed_by_different_factors_were_edited() -> None:
    first, second = tensors([1.0, -2.0], [5.0, 1.0])
    assert common_factor([Change(first, first * 0.5), Change(second, second * 0.6)])[1]
    assert common_factor([Change(first, first + 0.1)])[1]
    assert common_factor([Change(first, first * torch.tensor([1.0, 0.9]))])[1]


def test_the_rounding_of_half_precision_is_no_edit() -> None:
    before = torch.linspace(-1, 1, 100)
    assert not common_factor([Change(before, before.mul(0.3).bfloat16().float())])[1]


def test_gradients_that_are_zero_have_the_factor_one() -> None:
    zero, one = tensors([0.0, 0.0], [1.0, 0.0])
    assert common_factor([]) == (1.0, False)
    assert common_factor([Change(zero, zero), Change(None, None), Change(None, zero), Change(zero, None)]) == (1.0, False)
    assert common_factor([Change(zero, one)]) == (1.0, True)


def test_the_watch_sees_what_backward_left_and_what_is_there_now() -> None:
    layer = nn.Linear(100, 40)
    weight, bias = Matrix(layer.weight, Place("weight")), Matrix(layer.bias, Place("bias"))
    watch = GradientWatch([weight, bias])
    layer(torch.ones(2, 100)).square().sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    factor, edited = common_factor([watch.change(weight), watch.change(bias)])
    assert 0 < factor < 0.1
    assert not edited
    watch.forget([weight, bias])
    assert watch.change(bias).before is None
    watch.close()
    layer(torch.ones(2, 100)).sum().backward()
    assert watch.change(bias).before is None


ZEROS: dict[str, Zero] = {
    "optimizer, none": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer, zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model, none": lambda model, optimizer: model.zero_grad(),
    "model, zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(parameter, "grad", None) for parameter in model.parameters()],
}


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
@pytest.mark.parametrize("queue_bytes", [0, 1 << 20], ids=["inline", "queue"])
def test_a_backward_pass_whose_gradients_are_thrown_away_leaves_no_rows(tmp_path: Path, zero: Zero, queue_bytes: int) -> None:
    run = Run(tmp_path / "store", mlp(), queue_bytes=queue_bytes)
    run.backward([0, 1])
    run.step()
    run.backward([2, 3, 4])
    zero(run.model, run.optimizer)
    run.backward([5])
    run.step()
    run.backward([6, 7])
    zero(run.model, run.optimizer)
    store = run.store()
    assert rows_of(store, 0) == rows_of(store, 1) == [(0, 0), (0, 1), (1, 5)]
    assert_exact(store)


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_gradients_may_be_thrown_away_within_one_batch(tmp_path: Path, zero: Zero) -> None:
    run = Run(tmp_path / "store", mlp())
    for _ in range(2):
        with run.recorder.batch([0, 1, 2], Y[:3]):
            loss_of(run.model, [0, 1, 2]).backward()
            zero(run.model, run.optimizer)
            loss_of(run.model, [0, 1, 2]).backward()
        run.step()
    store = run.store()
    assert rows_of(store) == [(step, sample) for step in range(2) for sample in range(3)]
    assert_exact(store)


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_a_layer_called_twice_keeps_both_calls_after_gradients_were_thrown_away(tmp_path: Path, zero: Zero) -> None:
    torch.manual_seed(0)
    again, last = nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.Sequential(again, nn.Tanh(), again, nn.Tanh(), last).double()
    run = Run(tmp_path / "store", model)
    run.backward([0, 1])
    zero(run.model, run.optimizer)
    run.backward([2])
    run.backward([3])
    run.step()
    store = run.store()
    assert rows_of(store, 0) == [(0, 2), (0, 2), (0, 3), (0, 3)]
    assert rows_of(store, 1) == [(0, 2), (0, 3)]
    assert_exact(store)


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_a_layer_whose_weight_has_a_gradient_of_zeros_is_watched_by_its_bias(tmp_path: Path, zero: Zero) -> None:
    model = nn.Linear(4, 3).double()
    run = Run(tmp_path / "store", model)
    nothing = torch.zeros(2, 4, dtype=torch.float64)
    for sample in range(3):
        with run.recorder.batch([sample, sample + 10]):
            model(nothing).square().sum().backward()
        if sample == 1:
            zero(run.model, run.optimizer)
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        run.step()
    store = run.store()
    assert rows_of(store) == [(0, 0), (0, 10), (1, 2), (1, 12)]
    assert max(clips(store)) < 1
    assert_exact(store)


def test_micro_batches_of_one_step_all_count(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp(), weight_decay=0.01)
    for _ in range(3):
        for rows in ([0, 1, 2, 3, 4], [5], [6, 7]):
            run.backward(rows, scale=len(rows) / 8)
        run.step()
    store = run.store()
    assert rows_of(store) == [(step, sample) for step in range(3) for sample in range(8)]
    assert [row["batch_size"] for row in store.sql("SELECT batch_size FROM steps")] == [8, 8, 8]
    assert_exact(store)


def test_the_same_rows_may_come_twice_in_one_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp())
    run.backward([0, 1])
    run.backward([0, 1])
    run.step()
    store = run.store()
    assert rows_of(store) == [(0, 0), (0, 0), (0, 1), (0, 1)]
    assert_exact(store)


def test_two_backward_passes_through_one_graph_count_twice(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp())
    with run.recorder.batch([0, 1]):
        loss = loss_of(run.model, [0, 1])
        loss.backward(retain_graph=True)
        loss.backward()
    run.step()
    store = run.store()
    assert rows_of(store) == [(0, 0), (0, 0), (0, 1), (0, 1)]
    assert_exact(store)


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e3], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_clipping_by_norm_is_the_factor_of_its_step(tmp_path: Path, max_norm: float, bias: bool) -> None:
    run = Run(tmp_path / "store", mlp(bias=bias))
    expected = []
    for start in range(0, 12, 4):
        run.backward(EVERY[start : start + 4])
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)
        expected.append(min(1.0, max_norm / (float(norm) + 1e-6)))
        run.step()
    store = run.store()
    assert clips(store) == pytest.approx(expected, rel=1e-12)
    assert_exact(store)


def test_clipping_after_accumulation_is_one_factor(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp())
    for _ in range(2):
        run.backward(EVERY[:4])
        run.backward(EVERY[4:])
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.step()
    assert_exact(run.store())


def sparse_run(tmp_path: Path) -> Run:
    return Run(tmp_path / "store", nn.Linear(200, 3, bias=False).double())


def backward_of_sparse_input(run: Run) -> None:
    x = torch.zeros(4, 200, dtype=torch.float64)
    x[:, :4] = X[:4]
    with run.recorder.batch([0, 1, 2, 3]):
        run.model(x).square().sum().backward()


def test_clipping_is_seen_where_an_input_is_sparse_and_there_is_no_bias(tmp_path: Path) -> None:
    run = sparse_run(tmp_path)
    for _ in range(2):
        backward_of_sparse_input(run)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-2)
        run.step()
    store = run.store()
    assert max(clips(store)) < 1
    assert_exact(store)


def test_gradients_thrown_away_are_seen_where_an_input_is_sparse_and_there_is_no_bias(tmp_path: Path) -> None:
    run = sparse_run(tmp_path)
    for _ in range(2):
        backward_of_sparse_input(run)
        run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.step()
    store = run.store()
    assert rows_of(store) == []
    assert_exact(store)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_that_a_grad_scaler_skips_does_not_exist(tmp_path: Path, fused: bool) -> None:
    run = Run(tmp_path / "store", mlp(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        rows = EVERY[2 * step : 2 * step + 2]
        with run.recorder.batch(rows):
            loss = loss_of(run.model, rows) * (torch.inf if step == 2 else 1.0)
            scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    store = run.store()
    assert rows_of(store) == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 6), (2, 7), (3, 8), (3, 9)]
    assert clips(store) == [1 / 1024, 1 / 1024, 1 / 1024, 1 / 1024]
    assert_exact(store)


def test_a_grad_scaler_may_unscale_before_clipping(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        with run.recorder.batch(EVERY):
            scaler.scale(loss_of(run.model, EVERY)).backward()
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    store = run.store()
    assert max(clips(store)) < 1 / 1024
    assert_exact(store)


@pytest.mark.parametrize("named", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("in_place", [False, True], ids=["", "gradients worked on in place"])
def test_a_closure_that_the_optimiser_calls_is_recorded(tmp_path: Path, named: bool, in_place: bool) -> None:
    run = Run(tmp_path / "store", mlp(), foreach=in_place, nesterov=in_place)
    for step in range(3):

        def closure(rows: Sequence[int] = EVERY[4 * step : 4 * step + 4]) -> torch.Tensor:
            run.optimizer.zero_grad()
            with run.recorder.batch(rows):
                loss = loss_of(run.model, rows)
                loss.backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
            return loss

        loss = run.optimizer.step(closure=closure) if named else run.optimizer.step(closure)
        assert loss is not None
    store = run.store()
    assert rows_of(store) == [(sample // 4, sample) for sample in EVERY]
    assert_exact(store)


def test_a_step_without_a_backward_pass_counts_with_no_rows(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp(), weight_decay=0.1)
    run.backward([0, 1])
    run.step()
    run.optimizer.step()  # every gradient is None: nothing moves
    run.backward([2])
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.step()  # every gradient is zero: momentum and decay move
    store = run.store()
    assert rows_of(store) == [(0, 0), (0, 1), (2, 2)]
    assert store.last_step == 3
    assert [row["idle"] for row in store.sql("SELECT idle FROM steps ORDER BY step")] == [[], [0, 1], [], []]
    assert_exact(store)


@pytest.mark.parametrize("none", [True, False], ids=["none", "zeros"])
def test_a_layer_that_is_frozen_on_the_way_stops_being_recorded(tmp_path: Path, none: bool) -> None:
    run = Run(tmp_path / "store", mlp())
    for step in range(4):
        if step == 2:
            run.model[2].requires_grad_(False)
        run.backward([step])
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=none)
    store = run.store()
    assert rows_of(store, 0) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert rows_of(store, 1) == [(0, 0), (1, 1)]
    assert_exact(store)


def test_a_bias_that_is_frozen_on_the_way_takes_no_rows_from_its_weight(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp())
    for step in range(4):
        if step == 2:
            run.model[2].bias.requires_grad_(False)
        run.backward([step])
        run.step()
    run.recorder.close()
    assert rows_of(dualstore.open(run.path), 1) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def value_clip(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def decay_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(parameter.detach(), alpha=0.1)


def decay_of_weights_alone(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach(), alpha=0.1)


def noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(torch.randn_like(parameter))


def clip_each(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        assert parameter.grad is not None
        parameter.grad.mul_(1 / (1 + number))


@pytest.mark.parametrize("edit", [value_clip, decay_by_hand, decay_of_weights_alone, noise, clip_each])
def test_gradients_edited_before_the_step_are_warned_about_once_and_verify_says_so(
    tmp_path: Path, edit: Callable[[nn.Module], None]
) -> None:
    run = Run(tmp_path / "store", mlp())

    def train() -> dualstore.Store:
        for _ in range(3):
            run.backward(EVERY)
            edit(run.model)
            run.step()
        return run.store()

    with pytest.warns(DualstoreWarning, match=EDITED) as warned:
        store = train()
    assert len(warned) == 1
    assert [problem for problem in store.info()["problems"] if EDITED in problem]
    found = store.verify()
    assert not found.ok
    assert any(EDITED in problem for problem in found.problems)
    assert any("weight residual" in problem for problem in found.problems)


def test_gradients_of_an_earlier_step_that_were_not_zeroed_are_found_by_verify(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp())
    for _ in range(2):
        run.backward(EVERY)
        run.optimizer.step()
    assert not run.store().verify().ok


def test_a_gradient_from_a_forward_pass_that_was_not_seen_is_warned_about(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp())
    nn.functional.linear(X, run.model[0].weight, run.model[0].bias).square().sum().backward()
    with pytest.warns(DualstoreWarning, match="layer '0' has a gradient but its forward pass was not seen"):
        run.step()
    found = run.store().verify()
    assert not found.ok
    assert any("forward pass was not seen" in problem for problem in found.problems)


def test_a_gradient_asked_for_with_autograd_and_never_used_leaves_no_rows(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", mlp())
    x = X[:3].clone().requires_grad_()
    with run.recorder.batch([0, 1, 2]):
        torch.autograd.grad(run.model(x).sum(), x)
    run.optimizer.step()
    run.backward([4])
    run.step()
    store = run.store()
    assert rows_of(store) == [(1, 4)]
    assert_exact(store)


@pytest.mark.parametrize("queue_bytes", [0, 1 << 20], ids=["inline", "queue"])
def test_errors_are_stored_as_backward_delivered_them_before_clipping(tmp_path: Path, queue_bytes: int) -> None:
    model = nn.Linear(4, 3).double()
    run = Run(tmp_path / "store", model, queue_bytes=queue_bytes)
    expected = []
    for row in range(6):
        with run.recorder.batch([row]):
            y = model(X[row])  # no batch dimension: the error is the bias's gradient
            y.retain_grad()
            y.square().sum().backward()
            assert y.grad is not None
            expected.append(y.grad.numpy().copy())
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        run.step()
    store = run.store()
    found = store.sql("SELECT e FROM patterns ORDER BY step")
    np.testing.assert_array_equal(np.array([row["e"] for row in found]), np.array(expected))
    assert_exact(store)


BLAS = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "2"  # also where there is one core
import numpy as np
threads = os.listdir("/proc/self/task")[1:]  # those that numpy's BLAS has begun
import torch
import dualstore

def busy():
    return [open(f"/proc/self/task/{thread}/schedstat").read().split()[0] for thread in threads]

x = torch.linspace(-1, 1, 1 << 18).sin().reshape(2048, 128)
model = torch.nn.Linear(128, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with dualstore.record(model, optimizer, sys.argv[1], audit_every=1, index=False) as recorder:
    before = busy()
    for _ in range(3):
        with recorder.batch(range(2048)):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.flush()
    recorded = busy()
np.ones((2000, 2000)) @ np.ones((2000, 2000))
print(len(threads), recorded == before, busy() == before)
"""


def test_an_audit_leaves_the_threads_of_numpy_asleep(tmp_path: Path) -> None:
    """They would spin beside those of training, for tens of milliseconds after each product."""
    found = subprocess.run([sys.executable, "-c", BLAS, tmp_path / "store"], capture_output=True, text=True, check=True).stdout
    assert found in ("1 True False\n", "0 True True\n"), found  # 0: a numpy with another BLAS

"""Recording whole training runs: the rows are those of a recording by hand, they rebuild the weights, training stays the same."""

import copy
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualstore
from dualstore import writer
from dualstore.errors import DualstoreWarning, InexactError, RecordError

torch.set_num_threads(1)

Array = NDArray[Any]

X = torch.linspace(-2, 2, 64, dtype=torch.float64).reshape(16, 4).sin()
Y = torch.arange(16) % 3
BATCHES = [list(range(7)), list(range(7, 14)), [14, 15]]
"""An epoch, the last batch smaller."""

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def mlp(*, bias: bool = True, inplace: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6, bias=bias), nn.ReLU(inplace), nn.Linear(6, 5, bias=bias), nn.ReLU(inplace), nn.Linear(5, 3, bias=bias)
    ).double()


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.3, **settings})


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def square(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(
    recorder: dualstore.Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    x: torch.Tensor = X,
    epochs: int = 2,
    loss: Loss = cross_entropy,
    max_norm: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    none: bool = True,
) -> None:
    """An ordinary loop; leaves the model probed at its end."""
    for rows in [rows for _ in range(epochs) for rows in BATCHES]:
        with recorder.batch(rows, Y[rows], task="t") as batch:
            found = loss(model, x[rows], Y[rows])
            batch.loss = found.detach()
            found.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)
        if scheduler is not None:
            scheduler.step()
    model.eval()
    with recorder.probe([100, 101, 102], Y[:3]):
        model(x[:3])


def table(path: Path, folder: str) -> pa.Table:
    """All parts of a folder of the store, as pyarrow reads them."""
    return pa.concat_tables([pq.ParquetFile(part).read() for part in sorted((path / folder).glob("part-*.parquet"))])


def column(rows: pa.Table, name: str) -> Array:
    return np.array(rows.column(name).to_pylist())


def replay(path: Path, layer: dict[str, Any], kind: str) -> Array:
    """Final weight or bias of a layer, from nothing but the store's files: gradients from rows, then SGD step by step."""
    start = load_file(path / "weights" / "initial.safetensors")
    value, buffer = start[f"{layer['name']}.{kind}"], start.get(f"{layer['name']}.{kind}.momentum_buffer")
    group, rows = layer[f"{kind}_group"], table(path, f"patterns/layer={layer['number']}")
    steps, e = column(rows, "step"), column(rows, "e")
    x = column(rows, "x") if layer["keys"] == "vector" else np.eye(layer["d_in"])[column(rows, "token")]
    for now in sorted(table(path, "steps").to_pylist(), key=lambda row: row["step"]):
        if now["group"] != group or layer["number"] in now["idle" if kind == "weight" else "idle_bias"]:
            continue
        mine = steps == now["step"]
        summed = np.zeros(value.shape)
        if mine.any():
            summed = e[mine].T @ x[mine] if kind == "weight" else e[mine].sum(0)
        gradient = now["clip"] * (-1 if now["maximize"] else 1) * summed + now["decay"] * value
        if now["momentum"] != 0:
            buffer = gradient if buffer is None else now["momentum"] * buffer + (1 - now["dampening"]) * gradient
            gradient = gradient + now["momentum"] * buffer if now["nesterov"] else buffer
        value = value - now["lr"] * gradient
    return value


def relative(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-300))


def assert_exact(path: Path) -> dualstore.Store:
    """The store proves itself, and so does a replay that shares no code with it."""
    store = dualstore.open(path)
    found = store.verify()
    assert found.problems == []
    assert found.ok
    for check in found.layers:
        assert check.weight_residual is not None
        assert check.weight_residual <= 1e-11
        assert check.output_residual is None or check.output_residual <= 1e-11
    probed = (path / "probes").exists()
    assert [check.output_residual is not None for check in found.layers] == [probed] * len(found.layers)
    final = load_file(path / "weights" / "final.safetensors")
    for layer in json.loads((path / "store.json").read_text())["layers"]:
        for kind in ("weight", "bias"):
            if layer[f"{kind}_group"] >= 0:
                expected = final[f"{layer['name']}.{kind}"]
                # The bias of attention's keys has no gradient but rounding's.
                assert relative(replay(path, layer, kind), expected) <= 1e-12 or np.abs(expected).max() < 1e-15
    return store


def record_double(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dualstore.Store:
    """Records `train` in float64 and proves the store."""
    with dualstore.record(model, optimizer, path, dtype="float64") as recorder:
        train(recorder, model, optimizer, **options)
    return assert_exact(path)


# Rebuilding the weights


@pytest.mark.parametrize(("foreach", "max_norm"), [(False, None), (True, 0.2)], ids=["one by one", "foreach, clipped"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "maximize": True, "lr": 0.01},
    ],
    ids=lambda settings: " ".join(settings) or "plain",
)
def test_every_variant_of_sgd_is_rebuilt(tmp_path: Path, settings: dict[str, Any], max_norm: float | None, foreach: bool) -> None:
    model = mlp()
    store = record_double(tmp_path / "store", model, sgd(model, foreach=foreach, **settings), max_norm=max_norm)
    assert store.info()["rows"] == 3 * 2 * 16


def test_schedules_of_learning_rate_and_momentum_are_rebuilt(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
    store = record_double(tmp_path / "store", model, optimizer, scheduler=scheduler)
    rates = [row["lr"] for row in store.sql("SELECT lr FROM steps ORDER BY step")]
    assert len(set(rates)) == 6


def test_a_momentum_buffer_from_before_the_recording_is_rebuilt(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.9, dampening=0.3)
    for _ in range(2):
        cross_entropy(model, X, Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    record_double(tmp_path / "store", model, optimizer, max_norm=0.5)
    assert "0.bias.momentum_buffer" in load_file(tmp_path / "store" / "weights" / "initial.safetensors")


@pytest.mark.parametrize("none", [True, False], ids=["none", "zeros"])
def test_uneven_micro_batches_are_rebuilt(tmp_path: Path, none: bool) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.9)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        for _ in range(3):
            for rows in BATCHES:
                with recorder.batch(rows, Y[rows]):
                    (cross_entropy(model, X[rows], Y[rows]) * len(rows) / 16).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=none)
    store = assert_exact(tmp_path / "store")
    assert [row["batch_size"] for row in store.sql("SELECT batch_size FROM steps ORDER BY step")] == [16, 16, 16]


def test_groups_of_weights_and_biases_with_settings_of_their_own_are_rebuilt(tmp_path: Path) -> None:
    model = mlp()
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": biases, "lr": 0.3, "momentum": 0.5}, {"params": weights, "lr": 0.1, "weight_decay": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    store = record_double(tmp_path / "store", model, optimizer, max_norm=0.3)
    assert {(layer.weight_group, layer.bias_group) for layer in store.layers} == {(1, 0)}


def test_groups_clipped_one_by_one_are_rebuilt(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 0.1}], lr=0.3)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        for rows in BATCHES:
            with recorder.batch(rows):
                cross_entropy(model, X[rows], Y[rows]).backward()
            nn.utils.clip_grad_norm_(model[0].parameters(), 0.01)
            nn.utils.clip_grad_norm_(model[2:].parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_exact(tmp_path / "store")


class Branches(nn.Module):
    """Uses its second layer only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(hidden)) if self.both else hidden)


@pytest.mark.parametrize("none", [True, False], ids=["none", "zeros"])
def test_a_layer_that_is_unused_in_some_steps_is_rebuilt(tmp_path: Path, none: bool) -> None:
    model = Branches().double()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
    used = [False, True, False, False, True, True, False]
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        for step, model.both in enumerate(used):
            with recorder.batch([2 * step, 2 * step + 1]):
                cross_entropy(model, X[2 * step : 2 * step + 2], Y[:2]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=none)
    store = assert_exact(tmp_path / "store")
    steps = {row["step"] for row in store.sql("SELECT step FROM patterns WHERE layer = 1")}
    assert steps == {1, 4, 5}


def test_a_frozen_bias_is_rebuilt_as_it_was(tmp_path: Path) -> None:
    model = mlp()
    model[2].bias.requires_grad_(False)
    before = model[2].bias.clone()
    store = record_double(tmp_path / "store", model, sgd(model, momentum=0.9, weight_decay=0.1))
    assert [layer.bias_group for layer in store.layers] == [0, -1, 0]
    assert torch.equal(model[2].bias, before)


def test_a_bias_that_the_optimiser_does_not_have_is_rebuilt_as_it_was(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.ndim == 2], lr=0.3)
    store = record_double(tmp_path / "store", model, optimizer, max_norm=0.1)
    assert [layer.bias_group for layer in store.layers] == [-1, -1, -1]


def test_layers_without_bias_are_rebuilt(tmp_path: Path) -> None:
    model = mlp(bias=False)
    store = record_double(tmp_path / "store", model, sgd(model, momentum=0.9), max_norm=0.1)
    assert not any(layer.bias for layer in store.layers)


def test_a_frozen_layer_is_not_recorded(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    store = record_double(tmp_path / "store", model, sgd(model))
    assert [layer.name for layer in store.layers] == ["2", "4"]
    assert store.info()["unrecorded"] == []


class Twice(nn.Module):
    """Calls its first layer twice in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.again(torch.tanh(self.again(x)))))


def test_a_module_called_twice_is_rebuilt_with_two_positions(tmp_path: Path) -> None:
    model = Twice().double()
    store = record_double(tmp_path / "store", model, sgd(model, momentum=0.9), max_norm=0.3)
    found = store.sql("SELECT position, count(*) AS n FROM patterns WHERE layer = 0 GROUP BY position ORDER BY position")
    assert found.to_dicts() == [{"position": 0, "n": 32}, {"position": 1, "n": 32}]


class Tied(nn.Module):
    """Two modules of one weight."""

    def __init__(self, *, bias: bool, tied_bias: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)
        self.two.weight = self.one.weight
        if tied_bias:
            self.two.bias = self.one.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "shared bias"])
def test_modules_that_share_their_weight_are_one_layer(tmp_path: Path, bias: bool) -> None:
    model = Tied(bias=bias, tied_bias=bias).double()
    store = record_double(tmp_path / "store", model, sgd(model, momentum=0.9))
    assert [(layer.name, store.patterns(layer).rows) for layer in store.layers] == [("one", 64)]


def test_modules_that_share_their_weight_but_not_their_bias_are_named_as_inexact(tmp_path: Path) -> None:
    model = Tied(bias=True, tied_bias=False).double()
    optimizer = sgd(model, momentum=0.9)
    with (
        pytest.warns(DualstoreWarning, match="modules that share its weight have biases of their own"),
        pytest.warns(DualstoreWarning, match=r"two\.bias"),
        dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder,
    ):
        train(recorder, model, optimizer)
    layer = json.loads((tmp_path / "store" / "store.json").read_text())["layers"][0]
    assert relative(replay(tmp_path / "store", layer, "weight"), model.one.weight.detach().numpy()) <= 1e-12
    found = dualstore.open(tmp_path / "store").verify()
    assert not found.ok
    assert found.problems


@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_longer_inputs_are_rebuilt_with_a_row_for_each_position(tmp_path: Path, inplace: bool, bias: bool) -> None:
    model = mlp(inplace=inplace, bias=bias)
    x = torch.stack([X, X.flip(0), X * 2], 1)  # (16, 3, 4)
    store = record_double(tmp_path / "store", model, sgd(model, momentum=0.9), x=x, loss=square, max_norm=0.1)
    found = store.sql("SELECT layer, position, count(*) AS n FROM patterns GROUP BY layer, position")
    assert {(row["layer"], row["position"]): row["n"] for row in found} == {(n, p): 32 for n in range(3) for p in range(3)}


@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
def test_samples_without_a_batch_dimension_are_rebuilt(tmp_path: Path, inplace: bool) -> None:
    model = mlp(inplace=inplace)
    optimizer = sgd(model, momentum=0.9)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        for row in range(5):
            with recorder.batch([row]):
                model(X[row]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert assert_exact(tmp_path / "store").info()["rows"] == 15


def test_activations_changed_in_place_are_rebuilt(tmp_path: Path) -> None:
    model = mlp(inplace=True)
    record_double(tmp_path / "store", model, sgd(model, momentum=0.9), max_norm=0.1)


class Checkpointed(nn.Module):
    """Computes its first layers anew on the way back."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last, self.reentrant = mlp()[:4], nn.Linear(5, 3).double(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.last(self.inner(x))
        return self.last(checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_activation_checkpointing_is_rebuilt(tmp_path: Path, reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    store = record_double(tmp_path / "store", model, sgd(model, momentum=0.9), max_norm=0.2)
    assert [store.patterns(layer).rows for layer in store.layers] == [32, 32, 32]
    assert {row["position"] for row in store.sql("SELECT DISTINCT position FROM patterns")} == {0}


def test_nested_modules_are_named_by_their_path(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))), nn.ModuleDict({"h": nn.Linear(4, 3)})["h"]
    )
    store = record_double(tmp_path / "store", model.double(), sgd(model))
    assert [layer.name for layer in store.layers] == ["0.0", "0.1.1", "1"]


def test_a_model_that_is_one_layer_is_rebuilt(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).double()
    store = record_double(tmp_path / "store", model, sgd(model, momentum=0.9))
    assert [layer.name for layer in store.layers] == ["model"]
    assert [row["predicted"] for row in store.sql("SELECT predicted FROM probes ORDER BY test_id")] == model(X[:3]).argmax(
        1
    ).tolist()


def test_a_batch_within_a_batch_names_its_own_rows(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).double()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        with recorder.batch([1, 2], task="outer"):
            first = model(X[:2]).square().sum()
            with recorder.batch([7], task="inner"):
                second = model(X[2:3]).square().sum()
            third = model(X[3:5]).square().sum()
            (first + second + third).backward()
        optimizer.step()
    found = assert_exact(tmp_path / "store").sql("SELECT sample_id, position, task FROM patterns ORDER BY sample_id, position")
    assert [tuple(row.values()) for row in found] == [
        (1, 0, "outer"),
        (1, 1, "outer"),
        (2, 0, "outer"),
        (2, 1, "outer"),
        (7, 0, "inner"),
    ]


def test_a_recording_in_float32_is_within_its_limit(tmp_path: Path) -> None:
    model = mlp(inplace=True).float()
    optimizer = sgd(model, lr=0.05, momentum=0.9, weight_decay=0.01)
    with dualstore.record(model, optimizer, tmp_path / "store") as recorder:
        train(recorder, model, optimizer, x=X.float(), epochs=20, max_norm=0.5)
    found = dualstore.open(tmp_path / "store").verify()
    assert found.problems == []
    for check in found.layers:
        assert check.weight_residual is not None
        assert check.output_residual is not None
        assert 0 < check.weight_residual <= 1e-5
        assert 0 < check.output_residual <= 1e-5


def test_a_model_in_float32_is_not_judged_by_the_precision_of_a_store_in_float64(tmp_path: Path) -> None:
    model = mlp().float()
    optimizer = sgd(model, lr=0.05, momentum=0.9)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        train(recorder, model, optimizer, x=X.float())
    assert dualstore.open(tmp_path / "store").verify().problems == []


# Training is left alone, and rows are what they should be


def noisy_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 3),
    )


def noisy_run(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: dualstore.Recorder | None) -> list[float]:
    """Losses of some steps with clipping, accumulation and dropout."""
    torch.manual_seed(9)
    losses = []
    for rows in BATCHES * 4:
        for some in (rows[:3], rows[3:]):
            if not some:
                continue
            if recorder is None:
                loss = cross_entropy(model, X[some].float(), Y[some])
                loss.backward()
            else:
                with recorder.batch(some, Y[some]) as batch:
                    loss = cross_entropy(model, X[some].float(), Y[some])
                    batch.loss = loss.detach()
                    loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("queue_bytes", [0, 1 << 20], ids=["inline", "queue"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}], ids=["plain", "nesterov"])
def test_training_is_bit_identical_with_and_without_recording(tmp_path: Path, settings: dict[str, Any], queue_bytes: int) -> None:
    plain, recorded = noisy_model(), noisy_model()
    expected = noisy_run(plain, sgd(plain, **settings), None)
    optimizer = sgd(recorded, **settings)
    with pytest.warns(DualstoreWarning, match="not recorded"):
        recorder = dualstore.record(recorded, optimizer, tmp_path / "store", queue_bytes=queue_bytes)
    with recorder:
        losses = noisy_run(recorded, optimizer, recorder)
    assert losses == expected
    for one, other in zip(plain.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(one, other)
    assert dualstore.open(tmp_path / "store").verify().ok


def test_training_goes_on_untouched_after_the_recording(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        train(recorder, model, optimizer)
    cross_entropy(model, X, Y).backward()
    optimizer.step()
    assert dualstore.open(tmp_path / "store").last_step == 5
    assert not any(module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def record_by_hand(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[tuple[list[Array], list[Array], float]]:
    """For each step of `train`, every layer's inputs and dL/dy, and the loss."""
    steps = []
    for rows in BATCHES * 2:
        inputs, outputs = [], []
        x = X[rows]
        for module in model:
            y = module(x)
            if isinstance(module, nn.Linear):
                y.retain_grad()
                inputs.append(x.detach().numpy().copy())
                outputs.append(y)
            x = y
        loss = nn.functional.cross_entropy(x, Y[rows])
        loss.backward()
        steps.append((inputs, [y.grad.numpy().copy() for y in outputs], loss.item()))
        optimizer.step()
        optimizer.zero_grad()
    return steps


@pytest.mark.parametrize("queue_bytes", [0, 1 << 20], ids=["inline", "queue"])
def test_rows_equal_a_recording_by_hand(tmp_path: Path, queue_bytes: int) -> None:
    model = mlp()
    by_hand = copy.deepcopy(model)
    optimizer = sgd(model, momentum=0.9)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=queue_bytes) as recorder:
        train(recorder, model, optimizer)
    expected = record_by_hand(by_hand, sgd(by_hand, momentum=0.9))
    ids = [sample for rows in BATCHES * 2 for sample in rows]
    for layer in range(3):
        rows = table(tmp_path / "store", f"patterns/layer={layer}")
        np.testing.assert_array_equal(column(rows, "x"), np.concatenate([inputs[layer] for inputs, _, _ in expected]))
        np.testing.assert_array_equal(column(rows, "e"), np.concatenate([errors[layer] for _, errors, _ in expected]))
        assert column(rows, "sample_id").tolist() == ids
        assert column(rows, "label").tolist() == Y[ids].tolist()
        assert column(rows, "step").tolist() == np.repeat(np.arange(6), [7, 7, 2] * 2).tolist()
        assert not column(rows, "task").any()
        assert not column(rows, "position").any()
    steps = table(tmp_path / "store", "steps")
    assert column(steps, "loss").tolist() == [loss for _, _, loss in expected]
    assert column(steps, "batch_size").tolist() == [7, 7, 2] * 2
    assert column(steps, "epoch").tolist() == [0, 0, 0, 1, 1, 1]
    assert column(steps, "lr").tolist() == [0.3] * 6
    assert column(steps, "momentum").tolist() == [0.9] * 6


def test_float32_rows_are_the_tensors_themselves(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store") as recorder, recorder.batch(range(16)):
        y = model(X.float())
        y.retain_grad()
        y.square().mean().backward()
        optimizer.step()
    rows = table(tmp_path / "store", "patterns/layer=0")
    np.testing.assert_array_equal(column(rows, "x").astype(np.float32), X.float().numpy())
    assert y.grad is not None
    np.testing.assert_array_equal(column(rows, "e").astype(np.float32), y.grad.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_stored_exactly_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 3).to(dtype)
    optimizer = sgd(model)
    x = X.to(dtype)
    with dualstore.record(model, optimizer, tmp_path / "store") as recorder, recorder.batch(range(16)):
        model(x).float().square().mean().backward()
        optimizer.step()
    rows = table(tmp_path / "store", "patterns/layer=0")
    np.testing.assert_array_equal(column(rows, "x"), x.double().numpy())


def test_the_input_may_be_given_by_name(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).double()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder, recorder.batch(range(16)):
        model(input=X).square().mean().backward()
        optimizer.step()
    assert assert_exact(tmp_path / "store").info()["rows"] == 16


@pytest.mark.parametrize("queue_bytes", [0, 1 << 20])
def test_the_caller_may_fill_the_same_input_again(tmp_path: Path, queue_bytes: int) -> None:
    model = nn.Linear(4, 3).double()
    optimizer = sgd(model)
    buffer = torch.empty(2, 4, dtype=torch.float64)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=queue_bytes) as recorder:
        for row in range(0, 16, 2):
            with recorder.batch([row, row + 1]):
                model(buffer.copy_(X[row : row + 2])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_exact(tmp_path / "store")
    rows = table(tmp_path / "store", "patterns/layer=0")
    np.testing.assert_array_equal(column(rows, "x"), X.numpy())


@pytest.fixture
def every_warning() -> Iterator[None]:
    """Lets torch give each of its warnings more than once."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize(
    "loss",
    [2.5, torch.tensor(2.5), torch.tensor(2.5, requires_grad=True), np.float32(2.5)],
    ids=["float", "tensor", "graph", "numpy"],
)
def test_a_loss_may_be_a_number_or_a_tensor(tmp_path: Path, loss: Any) -> None:
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store") as recorder:
        with recorder.batch([0]) as batch:
            model(X[:1].float()).sum().backward()
            batch.loss = loss
        optimizer.step()
    assert column(table(tmp_path / "store", "steps"), "loss").tolist() == [2.5]


def test_the_loss_of_a_step_is_the_mean_of_its_batches_and_nan_where_none_is_given(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store") as recorder:
        for losses in ([1.0, 2.0], [None]):
            for value in losses:
                with recorder.batch([0]) as batch:
                    model(X[:1].float()).sum().backward()
                    if value is not None:
                        batch.loss = value
            optimizer.step()
            optimizer.zero_grad()
    first, second = column(table(tmp_path / "store", "steps"), "loss").tolist()
    assert first == 1.5
    assert np.isnan(second)


def test_what_was_flushed_is_on_disk_and_readable_while_recording_goes_on(tmp_path: Path) -> None:
    for queue_bytes in (0, 1 << 20):
        path = tmp_path / str(queue_bytes)
        model = mlp()
        optimizer = sgd(model)
        with dualstore.record(model, optimizer, path, dtype="float64", queue_bytes=queue_bytes) as recorder:
            for step, rows in enumerate(BATCHES):
                with recorder.batch(rows):
                    cross_entropy(model, X[rows], Y[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.flush()
                with pytest.warns(DualstoreWarning, match=f"unfinished; it is complete up to step {step}"):
                    store = dualstore.open(path)
                assert store.info()["rows"] == 3 * sum(map(len, BATCHES[: step + 1]))
        assert_exact(path)


# What is not recorded


class Mixed(nn.Module):
    """Convolution, embedding, norm and attention around one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.embed, self.norm = nn.Conv2d(1, 2, 2), nn.Embedding(5, 4), nn.LayerNorm(4)
        self.attend, self.fc = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))  # (n, s, 4)
        x = x + self.attend(x, x, x)[0]
        return self.fc(x.mean(1)) + nn.functional.pad(self.conv(x[:, None]).mean((2, 3)), (0, 1))


def test_parameters_that_are_not_recorded_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixed().double()
    optimizer = sgd(model)
    left = r"these parameters train but are not recorded: norm\.weight, norm\.bias \(6\.02 % of what is trained\)"
    with pytest.warns(DualstoreWarning, match=left):
        recorder = dualstore.record(model, optimizer, tmp_path / "store", dtype="float64")
    with recorder:
        train(recorder, model, optimizer, x=torch.arange(48).reshape(16, 3) % 5)
    store = assert_exact(tmp_path / "store")
    assert store.info()["unrecorded"] == ["norm.weight", "norm.bias"]
    names = ["conv", "embed", "attend.q", "attend.k", "attend.v", "attend.out", "fc"]
    assert [layer.name for layer in store.layers] == names


class LanguageModel(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def test_what_else_uses_a_recorded_weight_is_named(tmp_path: Path) -> None:
    model = LanguageModel().double()
    optimizer = sgd(model)
    with pytest.warns(DualstoreWarning, match=r"not recorded: embed\.weight"):
        recorder = dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", layers=["head"])
    with recorder, pytest.warns(DualstoreWarning, match="'head': .* % of its gradient at step 0 does not come from recorded rows"):
        train(recorder, model, optimizer, x=torch.arange(16) % 5)
    store = dualstore.open(tmp_path / "store")
    assert store.info()["unrecorded"] == ["embed.weight"]
    assert not store.verify().ok


def penalised(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = model[2].weight  # type: ignore[index]
    return cross_entropy(model, x, y) + 0.1 * weight.square().sum()


def used_twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model, x, y) + (x[:, :1] @ model[2].weight[:1]).mean()  # type: ignore[index]


def hooked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = model[2].weight  # type: ignore[index]
    if not weight._backward_hooks:
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return cross_entropy(model, x, y)


@pytest.mark.parametrize("loss", [penalised, used_twice, hooked])
@pytest.mark.parametrize("queue_bytes", [0, 1 << 20], ids=["inline", "queue"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_gradient_that_recorded_rows_do_not_explain_is_found(
    tmp_path: Path, loss: Loss, queue_bytes: int, dtype: torch.dtype
) -> None:
    model = mlp().to(dtype)
    kind = str(dtype).removeprefix("torch.")
    optimizer = sgd(model)
    recorder = dualstore.record(model, optimizer, tmp_path / "store", dtype=kind, queue_bytes=queue_bytes)
    match = (
        r"layer '2': [0-9.e+]+ % of its gradient at step 0 does not come from recorded rows: a penalty on the weight in the loss"
    )
    with pytest.warns(DualstoreWarning, match=match) as found, recorder:
        train(recorder, model, optimizer, x=X.to(dtype), loss=loss)
    assert len(found) == 1
    store = dualstore.open(tmp_path / "store")
    assert len(store.info()["problems"]) == 1
    assert not store.verify().ok
    with dualstore.record(model, optimizer, tmp_path / "unaudited", dtype=kind, audit_every=0) as recorder:
        train(recorder, model, optimizer, x=X.to(dtype), loss=loss)
    assert dualstore.open(tmp_path / "unaudited").info()["problems"] == []


def test_a_weight_that_is_changed_by_hand_is_found(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", audit_every=1) as recorder:
        train(recorder, model, optimizer)
        with torch.no_grad():
            model[2].weight.mul_(0.9)
        model.train()
        with pytest.warns(DualstoreWarning, match="layer '2': its weight was changed between steps other than by the optimiser"):
            train(recorder, model, optimizer)
    assert not dualstore.open(tmp_path / "store").verify().ok


def test_a_store_of_less_precision_than_the_training_is_no_finding(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float32", audit_every=1) as recorder:
        train(recorder, model, optimizer)
    assert dualstore.open(tmp_path / "store").verify().ok


def test_weights_that_become_nan_are_no_finding_of_a_change(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).bfloat16()
    optimizer = sgd(model)
    recorder = dualstore.record(model, optimizer, tmp_path / "store", audit_every=1)

    def spoil() -> None:
        for _ in range(3):
            with recorder.batch(range(16)):
                (model(X.bfloat16()).sum() * float("nan")).backward()
            optimizer.step()

    with recorder, pytest.warns(DualstoreWarning, match="NaN or infinity among the recorded keys or errors") as found:
        spoil()
    assert not [str(one.message) for one in found if "changed between steps" in str(one.message)]


def test_a_layer_that_begins_to_train_later_is_named(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", audit_every=1) as recorder:
        train(recorder, model, optimizer)
        model[0].requires_grad_(True)
        model.train()
        with pytest.warns(DualstoreWarning, match=r"0\.(weight|bias) trains since the recording began") as found:
            train(recorder, model, optimizer)
    assert len(found) == 2  # weight and bias, once each
    assert not dualstore.open(tmp_path / "store").verify().ok


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1),
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    ],
    ids=["nesterov", "decay", "adam"],
)
def test_a_weight_or_a_bias_alone_may_be_frozen_in_mid_training(
    tmp_path: Path, kind: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    model = mlp()
    optimizer = make(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        for frozen in (False, True, False):
            getattr(model[2], kind).requires_grad_(not frozen)
            model.train()
            train(recorder, model, optimizer)
    found = dualstore.open(tmp_path / "store").verify()
    assert found.ok, found.problems
    assert max(check.weight_residual or 0 for check in found.layers) <= 1e-12


def test_a_frozen_parameter_that_keeps_its_gradient_is_named(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.9)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", audit_every=1) as recorder:
        train(recorder, model, optimizer, none=False)
        model[2].bias.requires_grad_(False)
        model.train()
        with pytest.warns(DualstoreWarning, match="layer '2': a parameter is frozen but keeps its gradient"):
            train(recorder, model, optimizer, none=False)


def test_the_loss_of_a_probe_may_recompute_the_model_within_a_batch(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return found

    model = Checkpointed().eval()
    optimizer = sgd(model)
    loss = nn.CrossEntropyLoss(reduction="none")
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        with recorder.batch(range(16)):
            with recorder.probe(range(3), Y[:3], loss=lambda y: loss(y, Y[:3])):
                model(X[:3])
            model(X).square().mean().backward()
        optimizer.step()
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    assert (store.info()["rows"], len(probes(tmp_path / "store"))) == (16, 3)


def test_the_loss_of_a_probe_wants_the_model_and_something_that_trains(tmp_path: Path) -> None:
    model = mlp().eval()
    loss = nn.CrossEntropyLoss(reduction="none")
    with dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64") as recorder:
        with (
            pytest.raises(RecordError, match="loss: expected a call of the model itself"),
            recorder.probe([1], Y[:1], loss=lambda y: loss(y, Y[:1])),
        ):
            model[0](X[:1])
        model.requires_grad_(False)
        with (
            pytest.raises(RecordError, match="loss: no parameter of the model requires a gradient"),
            recorder.probe([1], Y[:1], loss=lambda y: loss(y, Y[:1])),
        ):
            model(X[:1])


def test_a_gradient_clipped_by_value_is_no_finding_of_the_rows(tmp_path: Path) -> None:
    """Rows explain what autograd accumulated; that it was changed after is seen for itself."""
    model = mlp()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", audit_every=1) as recorder:
        with recorder.batch(range(16)):
            model(X).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        with pytest.warns(DualstoreWarning, match="gradients of parameter group 0 were changed before the step") as found:
            optimizer.step()
    assert len(found) == 1


def test_a_parameter_outside_the_model_is_mentioned(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.warns(DualstoreWarning, match="not recorded: a parameter outside the model"):
        dualstore.record(model, optimizer, tmp_path / "store").close()


class Scaled(nn.Linear):
    """A linear layer with a forward pass of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_layers_whose_weight_is_computed_are_not_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(Scaled(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3)).double()
    optimizer = sgd(model)
    with pytest.warns(DualstoreWarning, match=r"0\.weight, 0\.bias, 1\.bias, 1\.parametrizations"):
        recorder = dualstore.record(model, optimizer, tmp_path / "store", dtype="float64")
    with recorder:
        train(recorder, model, optimizer)
    assert [layer.name for layer in assert_exact(tmp_path / "store").layers] == ["2"]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.NAdam(m.parameters()),
        lambda m: torch.optim.Adamax(m.parameters()),
        lambda m: torch.optim.Rprop(m.parameters()),
    ],
)
def test_attention_works_under_other_optimisers_and_values_are_refused(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    model = mlp()
    optimizer = make(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        train(recorder, model, optimizer)
    store = dualstore.open(tmp_path / "store")
    name = type(optimizer).__name__
    assert (store.info()["optimizer"], store.info()["exact"]) == (name, False)
    best = store.query(test_id=100, layer=0, top=1).to_dicts()[0]
    assert best["alpha"] == pytest.approx(float((X @ X[0]).max()))
    assert sum(row["count"] for row in store.totals(test_id=100, layer=1, by="label")) == 32
    found = store.verify()
    assert not found.ok
    assert found.problems == [f"values are not exact under {name}; residuals are those of plain SGD"]
    assert [check.rows for check in found.layers] == [32] * 3
    assert all(check.weight_residual is not None and check.weight_residual > 1e-3 for check in found.layers)
    with pytest.raises(InexactError, match=f"not for {name}"):
        dualstore.weights.rebuild(store, store.layers[0], np.zeros((0, 4)))
    ask: dict[str, Any] = {"test_id": 100, "layer": 2, "score": "contribution", "output": 1}
    with pytest.raises(InexactError, match=f"not for {name}"):
        store.query(**ask)
    assert f"NOT exact, {name} is taken for plain SGD" in dualstore.open(tmp_path / "store", inexact=True).query(**ask).notes[0]


class Doubled(torch.optim.SGD):
    """Not what torch.optim.SGD does."""


def test_a_subclass_of_sgd_is_another_optimiser(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    dualstore.record(model, Doubled(model.parameters(), lr=0.1), tmp_path / "store").close()
    assert not dualstore.open(tmp_path / "store").info()["exact"]


# Probes


def probes(path: Path) -> list[dict[str, Any]]:
    names = "layer, test_id, position, step, label, task, predicted, x, y, g"
    return dualstore.open(path).sql(f"SELECT {names} FROM probes ORDER BY layer, test_id, position, step").to_dicts()


@pytest.mark.parametrize("queue_bytes", [0, 1 << 20], ids=["inline", "queue"])
def test_a_probe_has_input_output_prediction_label_and_step_of_every_layer(tmp_path: Path, queue_bytes: int) -> None:
    model = mlp(inplace=True)
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=queue_bytes) as recorder:
        train(recorder, model, optimizer, epochs=1)
    first, second = (torch.relu(model[0](X[:3])), model[2](torch.relu(model[0](X[:3]))))
    expected = [(X[:3], model[0](X[:3])), (first, second), (torch.relu(second), model(X[:3]))]
    rows = probes(tmp_path / "store")
    assert [(row["layer"], row["test_id"], row["position"]) for row in rows] == [
        (n, t, 0) for n in range(3) for t in (100, 101, 102)
    ]
    assert {row["step"] for row in rows} == {3}
    assert [row["label"] for row in rows[:3]] == [0, 1, 2]
    assert [row["predicted"] for row in rows[:3]] == model(X[:3]).argmax(1).tolist()
    for layer, (x, y) in enumerate(expected):
        some = rows[3 * layer : 3 * layer + 3]
        np.testing.assert_array_equal(np.array([row["x"] for row in some]), x.detach().numpy())
        np.testing.assert_array_equal(np.array([row["y"] for row in some]), y.detach().numpy())


def test_a_probe_replaces_an_earlier_one_of_the_same_id(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).double().eval()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        with recorder.probe([1, 2]):
            model(X[:2])
        with recorder.batch(range(16)):
            model(X).square().mean().backward()
        optimizer.step()
        with recorder.probe([2]):
            model(X[5:6])
        with recorder.probe([2]):
            model(X[6:7])
    store = dualstore.open(tmp_path / "store")
    assert store.info()["probes"] == 2
    best = store.query(test_id=2, layer=0, top=1).to_dicts()[0]["alpha"]
    assert best == pytest.approx(float((X @ X[6]).max()))
    check = store.verify().layers[0]
    assert check.output_residual is not None
    assert check.output_residual <= 1e-11


def test_probes_from_before_the_last_step_do_not_count_against_the_final_weights(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).double().eval()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        with recorder.probe([1, 2]):
            model(X[:2])
        with recorder.batch(range(16)):
            model(X).square().mean().backward()
        optimizer.step()
    found = dualstore.open(tmp_path / "store").verify()
    assert found.ok
    assert found.layers[0].output_residual is None


def test_probes_of_longer_inputs_have_positions(tmp_path: Path) -> None:
    model = mlp().eval()
    optimizer = sgd(model)
    recorder = dualstore.record(model, optimizer, tmp_path / "store", dtype="float64")
    with recorder, recorder.probe([5, 6], [[1, 2], [0, 1]], task=["a", "b"]):
        y = model(X[:4].reshape(2, 2, 4))
    rows = probes(tmp_path / "store")[:4]
    names = ("test_id", "position", "label", "task", "predicted")
    expected = y.argmax(-1).reshape(-1).tolist()
    assert [tuple(row[name] for name in names) for row in rows] == [
        (5, 0, 1, "a", expected[0]),
        (5, 1, 2, "a", expected[1]),
        (6, 0, 0, "b", expected[2]),
        (6, 1, 1, "b", expected[3]),
    ]
    np.testing.assert_array_equal(np.array([row["x"] for row in rows]), X[:4].numpy())


class Wrapped(nn.Module):
    """Gives its output in some package."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.wrap = nn.Linear(4, 3).double(), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.fc(x))


@pytest.mark.parametrize(
    ("wrap", "known"),
    [
        (lambda y: (y, "more"), True),
        (lambda y: [y], True),
        (lambda y: SimpleNamespace(logits=y), True),
        (lambda y: (y.sum(), y), False),
        (lambda y: {"out": y}, False),
        (lambda y: y.sum(), False),
        (lambda y: y[:, :1], False),
        (lambda y: y[:2], False),
        (lambda y: (), False),
        (lambda y: None, False),
    ],
    ids=["tuple", "list", "logits", "loss first", "dict", "scalar", "one value", "fewer rows", "empty", "nothing"],
)
def test_a_prediction_is_taken_from_the_output_where_there_is_one(
    tmp_path: Path, wrap: Callable[[torch.Tensor], Any], known: bool
) -> None:
    model = Wrapped(wrap).eval()
    with dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64") as recorder, recorder.probe([1, 2, 3]):
        model(X[:3])
    expected = model.fc(X[:3]).argmax(1).tolist() if known else [-1] * 3
    assert [row["predicted"] for row in probes(tmp_path / "store")] == expected


def test_a_prediction_may_be_given(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).double().eval()
    with dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64") as recorder:
        with recorder.probe([1, 2], predicted=[9, 8]):
            model(X[:2])
        with pytest.raises(RecordError, match=r"probe\(\): predicted: expected 2 labels"), recorder.probe([1, 2], predicted=[9]):
            model(X[:2])
    assert [row["predicted"] for row in probes(tmp_path / "store")] == [9, 8]


def test_a_probe_runs_without_gradients_and_leaves_no_rows(tmp_path: Path) -> None:
    model = mlp().eval()
    with dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64") as recorder:
        with recorder.batch([1, 2, 3]), recorder.probe([1, 2, 3]):
            assert not model(X[:3]).requires_grad
        model(X[:3])  # outside batch(), but nothing comes back
    assert dualstore.open(tmp_path / "store").info()["rows"] == 0


@pytest.mark.parametrize("inplace", [False, True])
def test_a_probe_with_a_loss_records_its_gradient_at_every_output(tmp_path: Path, *, inplace: bool) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=inplace), nn.Linear(5, 3)).double().eval()
    with dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64") as recorder:
        kept = [torch.full_like(p, 7.0) for p in model.parameters()]
        for p, grad in zip(model.parameters(), kept, strict=True):
            p.grad = grad.clone()
        loss = nn.CrossEntropyLoss(reduction="none")
        with recorder.probe(range(6), Y[:6], loss=lambda output: loss(output, Y[:6])):
            model(X[:6])
        for p, grad in zip(model.parameters(), kept, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, grad)
        with recorder.probe([7]):
            model(X[7:8])
    hidden = model[0](X[:6]).detach().requires_grad_()
    output = model[2](hidden.clamp(min=0)).detach().requires_grad_()
    loss(model[2](hidden.clamp(min=0)), Y[:6]).sum().backward()
    loss(output, Y[:6]).sum().backward()
    rows = probes(tmp_path / "store")
    for layer, expected in ((0, hidden.grad), (1, output.grad)):
        assert expected is not None
        found = np.array([row["g"] for row in rows if row["layer"] == layer])
        np.testing.assert_allclose(found[:6], expected.numpy(), rtol=1e-12, atol=1e-15)
        assert np.isnan(found[6]).all()


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (lambda y: y.sum(), r"a tensor of shape \(\)"),
        (lambda y: y, r"a tensor of shape \(2, 3\)"),
        (lambda y: y.detach().sum(1), r"a tensor of shape \(2,\) that does not depend on the weights"),
        (lambda y: 3.0, "float"),
    ],
    ids=["sum", "outputs", "detached", "number"],
)
def test_a_probe_wants_one_loss_for_each_row(tmp_path: Path, loss: Callable[[torch.Tensor], Any], shown: str) -> None:
    model = mlp().eval()
    recorder = dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64")
    match = f"probe\\(\\): loss: expected 2 losses, one for each id, found {shown}; "
    with recorder, pytest.raises(RecordError, match=match), recorder.probe([1, 2], loss=loss):
        model(X[:2])
    assert dualstore.open(tmp_path / "store").info()["probes"] == 0


def test_a_transformer_layer_is_probed_in_spite_of_its_fast_path(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).double().eval()
    with pytest.warns(DualstoreWarning, match="not recorded"):
        recorder = dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64")
    with recorder, recorder.probe([1, 2]):
        model(X[:6].reshape(2, 3, 4))
    assert len(probes(tmp_path / "store")) == 2 * 3 * 6


def test_a_probe_in_training_mode_is_warned_about(tmp_path: Path) -> None:
    model = mlp()
    warning = r"training mode: dropout and batch norm are active; call model.eval\(\) first"
    recorder = dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64")
    with recorder, pytest.warns(DualstoreWarning, match=warning), recorder.probe([1, 2]):
        model(X[:2])
    assert len(probes(tmp_path / "store")) == 6


def test_a_probe_that_does_not_call_the_model_is_refused(tmp_path: Path) -> None:
    model = mlp().eval()
    with dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64") as recorder:
        with pytest.raises(RecordError, match="no recorded layer was called; call the model inside"), recorder.probe([1, 2]):
            pass
        with (
            pytest.raises(RecordError, match=r"one for each id of probe\(\), found samples and positions \(3,\)"),
            recorder.probe([1, 2]),
        ):
            model(X[:3])
        with pytest.raises(ZeroDivisionError), recorder.probe([1, 2]):
            raise ZeroDivisionError
        with recorder.probe([1, 2]):
            model(X[:2])
    assert dualstore.open(tmp_path / "store").info()["probes"] == 2


# What is refused, and what is warned about


@pytest.mark.parametrize("made", [False, True], ids=["new folder", "empty folder"])
@pytest.mark.parametrize("name", [".ballast.tmp", "store.json", "initial.safetensors"])
def test_where_recording_cannot_start_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, made: bool
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    whole, allocate = writer.write_whole, os.posix_fallocate

    def write(path: Path, data: bytes) -> None:
        if path.name == name:
            raise full
        whole(path, data)

    def reserve(*arguments: int) -> None:
        if name == ".ballast.tmp":
            raise full
        allocate(*arguments)

    monkeypatch.setattr(writer, "write_whole", write)
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    path = tmp_path / "store"
    if made:
        path.mkdir()
    model = nn.Linear(2, 2)
    with pytest.raises(RecordError, match="recording cannot start: No space left on device"):
        dualstore.record(model, sgd(model), path)
    assert list(tmp_path.rglob("*")) == [path] * made


def test_two_recordings_that_start_at_once_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    first = dualstore.record(model, sgd(model), tmp_path)
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(()))  # as the second saw it before the first wrote
    with pytest.raises(RecordError, match="File exists"):
        dualstore.record(other, sgd(other), tmp_path)
    monkeypatch.undo()
    first.close()
    assert dualstore.open(tmp_path).info()["status"] == "complete"


def test_a_folder_with_files_and_a_file_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("full", "file"):
        with pytest.raises(RecordError, match=f"{name}: expected no folder or an empty one, found other files"):
            dualstore.record(model, sgd(model), tmp_path / name)
    assert (tmp_path / "full" / "mine.txt").read_text() == (tmp_path / "file").read_text() == "precious"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_a_store_is_never_recorded_over(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    (tmp_path / "a" / "b").mkdir(parents=True)
    dualstore.record(model, sgd(model), tmp_path / "a" / "b").close()
    dualstore.record(model, sgd(model), str(tmp_path / "new" / "deep")).close()
    with pytest.raises(RecordError, match="choose another path or remove it first"):
        dualstore.record(model, sgd(model), tmp_path / "a" / "b")


def test_a_model_without_a_trained_linear_layer_is_refused(tmp_path: Path) -> None:
    frozen = nn.Linear(4, 3).requires_grad_(False)
    other = nn.Linear(4, 3)
    for model, optimizer in ((nn.LayerNorm(4), None), (frozen, sgd(other)), (other, sgd(nn.Linear(4, 3)))):
        with pytest.raises(RecordError, match="at least one linear layer that the optimiser trains, found none"):
            dualstore.record(model, optimizer or sgd(model), tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "double", ""])
def test_dtypes_other_than_three_are_refused(tmp_path: Path, dtype: str) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(RecordError, match=f"dtype: expected 'float16', 'float32' or 'float64', found {dtype!r}"):
        dualstore.record(model, sgd(model), tmp_path / "store", dtype=dtype)
    assert not (tmp_path / "store").exists()


def test_a_closed_recorder_takes_nothing_more(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    recorder = dualstore.record(model, sgd(model), tmp_path / "store")
    recorder.close()
    recorder.close()
    uses: Sequence[Callable[[], Any]] = [
        lambda: recorder.batch([1]).__enter__(),
        lambda: recorder.probe([1]).__enter__(),
        lambda: recorder.samples([1], [1], ["text"]),
        recorder.flush,
    ]
    for use in uses:
        with pytest.raises(RecordError, match="the recorder is closed; its store is finished"):
            use()


@pytest.mark.parametrize("queue_bytes", [0, 1 << 20], ids=["inline", "queue"])
def test_a_gradient_outside_batch_is_refused(tmp_path: Path, queue_bytes: int) -> None:
    model = nn.Linear(4, 3)
    with dualstore.record(model, sgd(model), tmp_path / "store", queue_bytes=queue_bytes):
        loss = model(X.float()).sum()
        with pytest.raises(RecordError, match=r"layer 'model': a gradient arrived for a forward pass outside batch\(\)"):
            loss.backward()


def test_backward_may_follow_after_the_batch(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        with recorder.batch(range(16)):
            loss = cross_entropy(model, X, Y)
        loss.backward()
        optimizer.step()
    assert_exact(tmp_path / "store")


def test_a_flush_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        recorder.flush()
        with recorder.batch(range(16)):
            cross_entropy(model, X, Y).backward()
        with pytest.raises(RecordError, match=r"a step is under way; call it after optimizer.step\(\)"):
            recorder.flush()
        optimizer.step()
        recorder.flush()
    assert assert_exact(tmp_path / "store").info()["rows"] == 48


@pytest.mark.parametrize("queue_bytes", [0, 1 << 20], ids=["inline", "queue"])
@pytest.mark.parametrize("odd", [np.nan, np.inf], ids=str)
def test_rows_that_are_not_finite_are_recorded_counted_and_warned_about_once(tmp_path: Path, queue_bytes: int, odd: float) -> None:
    model = mlp()
    optimizer = sgd(model)
    x = X.clone()
    x[3, 1] = odd

    def run() -> None:
        with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=queue_bytes) as recorder:
            for rows in ([8, 9], [0, 3], [10]):
                with recorder.batch(rows, Y[rows]):
                    cross_entropy(model, x[rows], Y[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(DualstoreWarning, match="NaN or infinity among the recorded keys or errors since step 1") as warned:
        run()
    assert len(warned) == 1
    store = dualstore.open(tmp_path / "store")
    keys, errors = (column(table(tmp_path / "store", "patterns/layer=0"), name) for name in ("x", "e"))
    np.testing.assert_array_equal(keys, x[[8, 9, 0, 3, 10]].numpy())
    counted = int((~np.isfinite(keys)).any(1).sum() + (~np.isfinite(errors)).any(1).sum())
    assert counted > 1
    assert store.info()["layers"][0]["nonfinite_rows"] == counted
    found = store.verify()
    assert not found.ok
    assert any("weight residual nan" in problem for problem in found.problems)


def test_rows_thrown_away_are_not_counted_as_not_finite(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        with recorder.batch([0, 1]):
            (cross_entropy(model, X[:2], Y[:2]) * np.inf).backward()
        optimizer.zero_grad()
        with recorder.batch([0, 1]):
            cross_entropy(model, X[:2], Y[:2]).backward()
        optimizer.step()
    store = assert_exact(tmp_path / "store")
    assert [layer["nonfinite_rows"] for layer in store.info()["layers"]] == [0, 0, 0]


def test_an_id_list_of_another_length_than_the_batch_is_refused(tmp_path: Path) -> None:
    model = mlp()
    with dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64") as recorder:
        for ids in ([1], range(17)):
            expected = r"layer '0': expected an input of \d+ samples, .* give one id for each row"
            with pytest.raises(RecordError, match=expected), recorder.batch(ids):
                model(X)


def test_a_batch_of_no_rows_is_a_step_of_no_rows(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.9)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        for rows in ([0, 1], [], [2]):
            with recorder.batch(rows, rows):
                model(X[rows]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    store = assert_exact(tmp_path / "store")
    assert (store.last_step, store.info()["rows"]) == (2, 9)


@pytest.mark.parametrize("epoch", [True, 2**31], ids=repr)
def test_an_epoch_that_is_no_whole_number_is_refused_and_costs_no_step(tmp_path: Path, epoch: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path / "store") as recorder:
        with recorder.batch([0]):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(RecordError, match="epoch: expected a whole number within 32 bits"), recorder.batch([0], epoch=epoch):
            pass
    assert dualstore.open(tmp_path / "store").last_step == 0


@pytest.mark.parametrize("task", ["\ud800", 5, 1.5], ids=repr)
def test_a_task_that_is_no_name_is_refused(tmp_path: Path, task: Any) -> None:
    model = nn.Linear(2, 2)
    with (
        dualstore.record(model, sgd(model), tmp_path / "store") as recorder,
        pytest.raises(RecordError, match="task"),
        recorder.batch([0], task=task),
    ):
        pass


@pytest.mark.parametrize("argument", ["flush_s='a'", "flush_s=None", "queue_bytes='a'", "maker=b'x'", "audit_every='a'"])
def test_arguments_of_other_types_are_refused_before_anything_is_made(tmp_path: Path, argument: str) -> None:
    """In a process of its own, where no test tool looks at types first."""
    code = f"""
import dualstore, torch
model = torch.nn.Linear(2, 2)
dualstore.record(model, torch.optim.SGD(model.parameters()), "store", {argument})
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"RecordError: {argument.split('=')[0]}: expected a" in found.stderr
    assert not (tmp_path / "store").exists()


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RecordError, match="recording cannot start: File name too long"):
        dualstore.record(model, sgd(model), tmp_path / ("x" * 300))


def test_a_loss_may_be_missing_but_must_be_a_number(tmp_path: Path) -> None:
    for loss in (None, "abc", torch.ones(3)):
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        recorder = dualstore.record(model, optimizer, tmp_path / str(loss)[:3])
        with recorder.batch([0]) as batch:
            batch.loss = loss
            model(torch.ones(1, 2)).sum().backward()
        if loss is None:
            optimizer.step()
            recorder.close()
        else:
            with pytest.raises(RecordError, match=r"batch\.loss: expected one number, found"):
                optimizer.step()


def test_samples_may_be_half_precision_tensors_that_need_gradients(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with dualstore.record(model, sgd(model), tmp_path / "store") as recorder:
        recorder.samples([0], [0], torch.ones(1, 2, 2, dtype=torch.bfloat16))
        recorder.samples([1], [0], [torch.ones(2, 2, requires_grad=True)])
        with pytest.raises(RecordError, match="texts that can be written as UTF-8"):
            recorder.samples([2], [0], ["\ud800"])
    assert dualstore.open(tmp_path / "store").info()["samples"] == 2

"""Gains: weights and accuracy under them against weights combined by hand from snapshots of the network in training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualstore
from dualstore.errors import QueryError
from dualstore.gains import _ACTIVATIONS

RANDOM = torch.Generator().manual_seed(1)
X = torch.rand(120, 7, generator=RANDOM, dtype=torch.float64)
Y = (X[:, :4].argmax(1)).long()
FIRST, SECOND = (torch.isin(Y, torch.tensor(labels)).nonzero()[:, 0] for labels in ((0, 1), (2, 3)))
Weights = dict[str, np.ndarray]


def copied(model: nn.Module) -> Weights:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def train(path: Path, model: nn.Module, *, probes: bool = True) -> list[Weights]:
    """One task after the other by plain SGD; the weights before, between and after."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    kept = [copied(model)]
    with dualstore.record(model, optimizer, path, dtype="float64") as recorder:
        for task, rows in (("first", FIRST), ("second", SECOND)):
            for start in range(0, 60, 6):
                ids = rows[torch.arange(start, start + 6) % len(rows)]
                with recorder.batch(ids, Y[ids], task=task):
                    nn.functional.cross_entropy(model(X[ids]), Y[ids]).backward()
                optimizer.step()
                optimizer.zero_grad()
            kept.append(copied(model))
        model.eval()
        if probes:
            with recorder.probe(range(120), Y, task=["first" if y < 2 else "second" for y in Y.tolist()]):
                model(X)
    return kept


def mlp(activation: nn.Module | None = None, *, bias: bool = True) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(7, 9, bias=bias), activation or nn.ReLU(), nn.Linear(9, 4, bias=bias)).double()


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_and_accuracy_under_gains_are_those_combined_by_hand(tmp_path: Path, *, with_initial: bool, bias: bool) -> None:
    model = mlp(bias=bias)
    start, middle, end = train(tmp_path / "store", model)
    store = dualstore.open(tmp_path / "store")
    betas = [0.0, 0.5, 1.0, 1.5, 3.0]
    found = store.evaluate({"task": {"first": betas}}, with_initial=with_initial).to_dicts()
    for beta in betas:
        first = beta if with_initial else 1.0
        hand = {name: first * start[name] + beta * (middle[name] - start[name]) + end[name] - middle[name] for name in start}
        for number, name in ((0, "0"), (1, "2")):
            weights = store.weights(number, gains={"task": {"first": beta}}, with_initial=with_initial)
            np.testing.assert_allclose(weights.weight, hand[f"{name}.weight"], rtol=1e-11, atol=1e-14)
            np.testing.assert_allclose(weights.bias, hand.get(f"{name}.bias", np.zeros(len(weights.bias))), rtol=1e-11, atol=1e-14)
        model.load_state_dict({name: torch.from_numpy(value) for name, value in hand.items()})
        right = (model(X).argmax(1) == Y).numpy()
        for task, mine in (("first", (Y < 2).numpy()), ("second", (Y >= 2).numpy())):
            row = next(row for row in found if row["task=first"] == beta and row["task"] == task)
            assert (row["probes"], row["accuracy"]) == (mine.sum(), right[mine].mean())


def test_gains_multiply_and_a_condition_masks_the_rest(tmp_path: Path) -> None:
    start, _, _ = train(tmp_path / "store", mlp())
    store = dualstore.open(tmp_path / "store")
    gains = {"label": {0: 2.0, 3: 0}, "step % 2": {1: -1.5}}
    found = store.weights(1, gains=gains, where="step < 15", at_step=17)
    c = dualstore.weights.coefficients_of(store, store.layers[1], "weight", 17)
    expected = start["2.weight"] * c.initial
    bias = start["2.bias"].copy()
    for row in store.sql("SELECT * FROM patterns WHERE layer = 1").to_dicts():
        gain = {0: 2.0, 3: 0}.get(row["label"], 1.0) * (-1.5 if row["step"] % 2 else 1)
        if row["step"] < 15:
            expected = expected + gain * c.c[row["step"]] * np.outer(row["e"], row["x"])
            bias = bias + gain * c.c[row["step"]] * np.array(row["e"])
    np.testing.assert_allclose(found.weight, expected, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(found.bias, bias, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("expression", "value", "same"),
    [
        ("label = 1", True, "true"),
        ("step < 10", False, "false"),
        ("label", 1.0, "1"),
        ("label", np.int64(1), "1"),
        ("label / 2", 0.5, "0.5"),
        ("nullif(task, 'first')", None, "NULL"),
    ],
)
def test_values_may_be_given_as_python_has_them(store: dualstore.Store, expression: str, value: Any, same: str) -> None:
    found = store.weights(1, gains={expression: {value: 3.0}})
    assert not np.array_equal(found.weight, store.weights(1).weight)
    np.testing.assert_array_equal(found.weight, store.weights(1, gains={expression: {same: 3.0}}).weight)


def test_any_budget_gives_the_same_weights(tmp_path: Path) -> None:
    _, _, end = train(tmp_path / "store", mlp())
    for budget in (1 << 20, 1 << 28):
        found = dualstore.open(tmp_path / "store", budget_bytes=budget).weights("2")
        np.testing.assert_allclose(found.weight, end["2.weight"], rtol=1e-12)
        np.testing.assert_allclose(found.bias, end["2.bias"], rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "activation"),
    [("ReLU", nn.ReLU()), ("tanh", nn.Tanh()), ("sigmoid", nn.Sigmoid()), ("leaky ReLU", nn.LeakyReLU()), ("ELU", nn.ELU()),
     ("SiLU", nn.SiLU()), ("GELU", nn.GELU()), ("GELU (tanh)", nn.GELU("tanh")), ("softplus", nn.Softplus()),
     ("none", nn.Identity())],
)  # fmt: skip
def test_the_probes_show_the_activation_between_layers(tmp_path: Path, name: str, activation: nn.Module) -> None:
    assert set(_ACTIVATIONS) >= {name}
    model = mlp(activation)
    train(tmp_path / "store", model)
    found = dualstore.open(tmp_path / "store").evaluate({})
    assert found.notes == (f"activations between the layers, as the probes show: {name}",)
    right = (model(X).argmax(1) == Y).numpy()
    assert [row["task"] for row in found] == ["first", "second"]
    for row, mine in zip(found, (Y < 2, Y >= 2), strict=True):
        assert row["accuracy"] == right[mine.numpy()].mean()


class Parallel(nn.Module):
    """No chain."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7).double(), nn.Linear(7, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).sin()) + x[:, :4]


def test_a_network_whose_probes_show_no_known_chain_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "store", Parallel())
    with pytest.raises(QueryError, match=r"chain of layers; the probes of layers 0 \(a\) and 1 \(b\) fit none of none, ReLU, .*"):
        dualstore.open(tmp_path / "store").evaluate({})


def test_accuracy_needs_probes_with_labels(tmp_path: Path) -> None:
    train(tmp_path / "store", mlp(), probes=False)
    with pytest.raises(QueryError, match="accuracy needs recorded probes with labels"):
        dualstore.open(tmp_path / "store").evaluate({})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dualstore.Store:
    path = tmp_path_factory.mktemp("gains") / "store"
    train(path, mlp())
    return dualstore.open(path)


@pytest.mark.parametrize(
    ("gains", "how", "match"),
    [
        ({"task": {"third": 1}}, {}, "gain task=third: no pattern has this value; there are first, second$"),
        ({"label": {7: 1}}, {}, "gain label=7: no pattern has this value; there are 0, 1, 2, 3$"),
        ({"lable": {7: 1}}, {}, "expression 'lable': .*; columns: step, "),
        ({"task": {"first": "much"}}, {}, "gains: task = first: expected a finite factor, found 'much'"),
        ({"task": {"first": float("nan")}}, {}, "expected a finite factor, found nan"),
        ({"task": {"first": []}}, {}, r"expected a finite factor, found \[\]"),
        ({"task": 2}, {}, r"gains: expected \{expression: \{value: factor\}\}, found 'task': 2"),
        ({"task": {"first": [1, 2]}}, {}, "expected one factor for each value, found several"),
        ({"task": {"first": 1, "second": 2}}, {"with_initial": True}, "with_initial: expected one gain, .*; found 2"),
        ({}, {"with_initial": True}, "with_initial: expected one gain, .*; found 0"),
        ({}, {"at_step": 99}, "at_step: expected a step of the run, 0 to 19; found 99"),
        ({"label": {3: 0}}, {"where": "label < 2"}, "no pattern that counts has this value; there are 0, 1$"),
        ({"label = 1": {"yes": 0}}, {}, "no pattern has this value; there are false, true$"),
        ({}, {"average": "ema"}, "average: expected a dualstore.Average, found 'ema'"),
        ({}, {"average": dualstore.Average(every=3_000_000_000)}, "every >= 1"),
        ({}, {"average": dualstore.Average(first=20)}, "average: expected 0 <= first <= last <= 19"),
        ({}, {"average": dualstore.Average(first=9), "at_step": 8}, "average: expected 0 <= first <= last <= 19"),
        ({}, {"average": dualstore.Average(every=0)}, "every >= 1"),
        ({}, {"average": dualstore.Average(decay=1.0)}, "a decay from 0 to below 1 or none"),
        ({}, {"where": "nothing = 1"}, "condition 'nothing = 1'"),
    ],
)
def test_gains_that_make_no_sense_are_refused_in_one_line(
    store: dualstore.Store, gains: Any, how: dict[str, Any], match: str
) -> None:
    with pytest.raises(QueryError, match=match) as raised:
        store.weights(1, gains=gains, **how)
    assert "\n" not in str(raised.value)

"""Adam and its family: values against the network itself, and against a forward run with the preconditioner held fixed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy import ndarray
from torch import nn

import dualstore
from dualstore.errors import DamagedError, InexactError, QueryError

WIDTH, HIDDEN, OUT = 6, 5, 3
RANDOM = torch.Generator().manual_seed(2)
X = torch.randn(60, WIDTH, generator=RANDOM, dtype=torch.float64)
Y = torch.randint(0, OUT, (60,), generator=RANDOM)

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "Adam, decay in the gradient": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1, betas=(0.8, 0.95)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, eps=1e-3),
    "AMSGrad, decay": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, weight_decay=0.05),
    "AMSGradW, maximize": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005),
    "RMSprop, momentum": lambda p: torch.optim.RMSprop(p, lr=0.002, momentum=0.9, alpha=0.9),
    "RMSprop, all": lambda p: torch.optim.RMSprop(p, lr=0.002, momentum=0.8, centered=True, weight_decay=0.1, maximize=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adagrad, all": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.2),
}
WeightsOf = dict[str, ndarray]


def copied(model: nn.Module) -> WeightsOf:
    return {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}


def train(
    path: Path, make: Maker, steps: int = 40, *, dtype: torch.dtype = torch.float64, before: int = 0, odd: bool = True
) -> list[WeightsOf]:
    """Records a training; returns the weights before it and after each step.

    `before` steps are taken unrecorded. `odd`: parameter groups of their own, a schedule from zero, clipping, an idle layer.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT)).to(dtype)
    named = dict(model.named_parameters())
    groups: Any = [{"params": [p for n, p in named.items() if n.endswith("weight")]},
                   {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0}]  # fmt: skip
    optimizer = make(groups if odd else model.parameters())
    x = X.to(dtype)

    def backward(step: int) -> torch.Tensor:
        ids = torch.arange(step * 7, step * 7 + 9) % 60
        if odd and step % 5 == 4:  # the first layer has no gradient
            return nn.functional.cross_entropy(model[2](model[:2](x[ids]).detach()), Y[ids])
        return nn.functional.cross_entropy(model(x[ids]), Y[ids])

    def finish(step: int) -> None:
        if odd:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.01 * min(step, 4) / (1 + number + 0.05 * step)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(before):
        backward(step).backward()
        finish(step)
    kept = [copied(model)]
    with dualstore.record(model, optimizer, path, dtype=str(dtype).removeprefix("torch."), index=False) as recorder:
        for step in range(before, before + steps):
            ids = torch.arange(step * 7, step * 7 + 9) % 60
            with recorder.batch(ids, Y[ids], task="even" if step % 2 == 0 else "odd"):
                backward(step).backward()
            finish(step)
            kept.append(copied(model))
        model.eval()
        with recorder.probe(range(5), Y[:5], loss=lambda y: nn.functional.cross_entropy(y, Y[:5], reduction="none")):
            model(x[:5])
    return kept


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("odd", [False, True], ids=["plain", "odd"])
def test_weights_and_outputs_follow_from_the_rows(tmp_path: Path, name: str, *, odd: bool) -> None:
    train(tmp_path / "store", MAKERS[name], 300, odd=odd)
    found = dualstore.open(tmp_path / "store").verify()
    assert found.ok, found.problems
    for layer in found.layers:
        assert layer.weight_residual is not None
        assert layer.output_residual is not None
        assert layer.weight_residual <= 1e-12
        assert layer.output_residual <= 1e-12


@pytest.mark.parametrize("name", MAKERS)
def test_single_precision_training_is_followed_to_its_own_rounding(tmp_path: Path, name: str) -> None:
    train(tmp_path / "store", MAKERS[name], 300, dtype=torch.float32, odd=False)
    found = dualstore.open(tmp_path / "store").verify()
    assert found.ok, found.problems
    for layer in found.layers:
        assert layer.weight_residual is not None
        assert layer.weight_residual <= 1e-5


@pytest.mark.parametrize("name", MAKERS)
def test_a_training_that_goes_on_from_another_is_followed_too(tmp_path: Path, name: str) -> None:
    train(tmp_path / "store", MAKERS[name], 30, before=11)
    found = dualstore.open(tmp_path / "store").verify()
    assert found.ok, found.problems
    assert max(layer.weight_residual or 0 for layer in found.layers) <= 1e-12


@pytest.mark.parametrize("name", ["Adam", "Adam, decay in the gradient", "AMSGradW, maximize", "RMSprop, all", "Adagrad, all"])
@pytest.mark.parametrize("budget", [1 << 20, 1 << 28])
def test_weights_as_of_any_step_are_those_of_then(tmp_path: Path, name: str, budget: int) -> None:
    kept = train(tmp_path / "store", MAKERS[name])
    store = dualstore.open(tmp_path / "store", budget_bytes=budget)
    for step in (0, 4, 5, 26, 39):
        for number, layer in ((0, "0"), (1, "2")):
            found = store.weights(number, at_step=step)
            np.testing.assert_allclose(found.weight, kept[step + 1][f"{layer}.weight"], rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(found.bias, kept[step + 1][f"{layer}.bias"], rtol=1e-10, atol=1e-12)


def test_few_rows_of_the_weight_at_a_time_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "store", MAKERS["Adam, decay in the gradient"])
    store = dualstore.open(tmp_path / "store")
    asked = {"layer": 0, "test_id": 1, "score": "influence", "top": 500}
    weights, ranked = store.weights(0), store.query(**asked).to_dicts()  # type: ignore[arg-type]
    monkeypatch.setattr(store, "options", dualstore.scan.Options(1, 1))
    again = store.weights(0)
    np.testing.assert_allclose(again.weight, weights.weight, rtol=1e-12)
    np.testing.assert_allclose(again.bias, weights.bias, rtol=1e-12)
    found = store.query(**asked).to_dicts()  # type: ignore[arg-type]
    np.testing.assert_allclose([row["influence"] for row in found], [row["influence"] for row in ranked], rtol=1e-9, atol=1e-18)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AMSGrad, decay", "RMSprop, all"])
@pytest.mark.parametrize(
    ("mean", "steps"),
    [
        (dualstore.Average(decay=0.9), range(40)),
        (dualstore.Average(first=7, every=3, decay=0.5), range(7, 40, 3)),
        (dualstore.Average(first=10, every=5), range(10, 40, 5)),
        (dualstore.Average(last=20), range(21)),
        (dualstore.Average(first=39), [39]),
    ],
    ids=["ema", "late ema", "swa", "until", "last"],
)
def test_means_of_the_weights_are_those_of_torch(tmp_path: Path, name: str, mean: dualstore.Average, steps: Any) -> None:
    make = MAKERS.get(name, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01))
    kept = train(tmp_path / "store", make)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(mean.decay) if mean.decay is not None else None
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT)).double()
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
    for step in steps:
        model.load_state_dict({key: torch.from_numpy(value) for key, value in kept[step + 1].items()})
        averaged.update_parameters(model)
    store = dualstore.open(tmp_path / "store")
    expected = copied(averaged.module)
    for number, layer in ((0, "0"), (1, "2")):
        found = store.weights(number, average=mean)
        np.testing.assert_allclose(found.weight, expected[f"{layer}.weight"], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.bias, expected[f"{layer}.bias"], rtol=1e-10, atol=1e-12)


class Fixed:
    """One layer's weight under Adam, step by step, its preconditioner held fixed: a linear function of the gradients."""

    def __init__(self, store: dualstore.Store, number: int) -> None:
        layer = store.layers[number]
        rows = store.sql(f"SELECT step, sample_id, label, task, x, e FROM patterns WHERE layer = {number}").to_dicts()
        self.rows = rows
        self.steps = store.steps.group(layer.weight_group)
        self.idle = store.steps.idle(number)
        self.start = store.tensors("initial")[f"{layer.name}.weight"]
        self.divided: list[ndarray] = []
        self.weight = self._run(np.ones(len(rows)), learn=True)

    def under(self, gains: ndarray) -> ndarray:
        """The weight after the last step with each pattern's gradient times its gain."""
        return self._run(gains, learn=False)

    def _run(self, gains: ndarray, *, learn: bool) -> ndarray:
        weight, moment, square, taken = self.start.copy(), 0 * self.start, 0 * self.start, 0
        for step in range(len(self.idle)):
            if self.idle[step]:
                continue
            now, taken = {name: column[step] for name, column in self.steps.items()}, taken + 1
            gradient = now["clip"] * sum(
                (g * np.outer(r["e"], r["x"]) for g, r in zip(gains, self.rows, strict=True) if r["step"] == step), 0 * weight
            )
            if learn:
                square = now["beta2"] * square + (1 - now["beta2"]) * (gradient + now["decay"] * weight) ** 2
                self.divided.append(1 / (np.sqrt(square / (1 - now["beta2"] ** taken)) + now["eps"]))
            moment = now["beta1"] * moment + (1 - now["beta1"]) * (gradient + now["decay"] * weight)
            weight = weight - now["lr"] / (1 - now["beta1"] ** taken) * self.divided[taken - 1] * moment
        return weight


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> tuple[dualstore.Store, list[WeightsOf]]:
    path = tmp_path_factory.mktemp("adam") / "store"
    kept = train(path, MAKERS["Adam, decay in the gradient"], 16)
    return dualstore.open(path), kept


@pytest.mark.parametrize("number", [0, 1])
def test_scores_are_what_the_weight_lacks_without_a_pattern(adam: tuple[dualstore.Store, list[WeightsOf]], number: int) -> None:
    store, kept = adam
    fixed = Fixed(store, number)
    name = f"{store.layers[number].name}.weight"
    np.testing.assert_allclose(fixed.weight, kept[-1][name], rtol=1e-11)
    probe = store.sql(f"SELECT x, g FROM probes WHERE layer = {number} AND test_id = 3").to_dicts()[0]
    x, g = np.array(probe["x"]), np.array(probe["g"])
    asked = {"test_id": 3, "layer": number, "top": 500}
    contributions = store.query(**asked, score="contribution", output=1).to_dicts()  # type: ignore[arg-type]
    influences = {(r["step"], r["sample_id"]): r for r in store.query(**asked, score="influence")}  # type: ignore[arg-type]
    assert len(contributions) == len(fixed.rows)
    assert [r["contribution"] for r in contributions] == sorted((r["contribution"] for r in contributions), reverse=True)
    of_pattern = {(r["step"], r["sample_id"]): r for r in contributions}
    for place, row in list(enumerate(fixed.rows))[::5]:
        gains = np.ones(len(fixed.rows))
        gains[place] = 0
        lack = fixed.weight - fixed.under(gains)
        key = (row["step"], row["sample_id"])
        assert of_pattern[key]["contribution"] == pytest.approx(float(lack[1] @ x), rel=1e-8, abs=1e-12)
        assert of_pattern[key]["alpha"] == pytest.approx(float(np.array(row["x"]) @ x), rel=1e-12)
        assert influences[key]["influence"] == pytest.approx(float(g @ lack @ x), rel=1e-8, abs=1e-12)
        assert "value" not in of_pattern[key]


@pytest.mark.parametrize("number", [0, 1])
def test_answers_of_all_kinds_come_from_the_same_scores(adam: tuple[dualstore.Store, list[WeightsOf]], number: int) -> None:
    store, _ = adam
    asked: dict[str, Any] = {"test_id": 3, "layer": number, "score": "contribution", "output": 2}
    rows = store.query(**asked, top=500).to_dicts()
    least = sorted(rows, key=lambda row: (row["contribution"], row["step"], row["sample_id"]))
    assert store.query(**asked, top=500, bottom=True).to_dicts() == [row | {"rank": n + 1} for n, row in enumerate(least)]
    sizes = sorted(rows, key=lambda row: (-abs(row["contribution"]), row["step"], row["sample_id"]))[:7]
    found = store.query(**asked, top=7, absolute=True).to_dicts()
    assert [row["contribution"] for row in found] == [row["contribution"] for row in sizes]
    best = store.query(**asked, top=2, per="label", where="task = 'odd'").to_dicts()
    expected = [[row for row in rows if row["label"] == label and row["task"] == "odd"][:2] for label in range(OUT)]
    assert [(row["step"], row["sample_id"]) for row in best] == [(r["step"], r["sample_id"]) for some in expected for r in some]
    totals = {row["label"]: row["total"] for row in store.totals(**asked)}
    for label, total in totals.items():
        assert total == pytest.approx(sum(row["contribution"] for row in rows if row["label"] == label), rel=1e-11)
    again = store.sql("SELECT contribution FROM attention ORDER BY contribution DESC LIMIT 3", **asked).to_dicts()
    assert [row["contribution"] for row in again] == [row["contribution"] for row in rows[:3]]
    several = store.query(**asked | {"test_id": [3, 1]}, top=3).to_dicts()
    assert [row["contribution"] for row in several[:3]] == [row["contribution"] for row in rows[:3]]


@pytest.mark.parametrize("step", [7, None])
def test_contributions_and_what_is_left_of_the_start_are_the_output(
    adam: tuple[dualstore.Store, list[WeightsOf]], step: int | None
) -> None:
    store, kept = adam
    weights = kept[-1 if step is None else step + 1]
    for number, layer in ((0, "0"), (1, "2")):
        x = np.array(store.sql(f"SELECT x FROM probes WHERE layer = {number} AND test_id = 2").to_dicts()[0]["x"])
        found = store.totals(test_id=2, layer=number, by="", score="contribution", output=1, at_step=step)
        whole, bias = float(weights[f"{layer}.weight"][1] @ x), weights[f"{layer}.bias"][1]
        assert f"output 1 of test 2: {whole + bias:.6g} = {whole - found.to_dicts()[0]['total']:.6g} from" in found.notes[1]


@pytest.mark.parametrize("number", [0, 1])
def test_gains_are_those_of_a_run_with_the_preconditioner_held_fixed(
    adam: tuple[dualstore.Store, list[WeightsOf]], number: int
) -> None:
    store, _ = adam
    fixed = Fixed(store, number)
    factors = [(1.7 if row["task"] == "odd" else 1.0) * (0 if row["label"] == 2 else 1) for row in fixed.rows]
    found = store.weights(number, gains={"task": {"odd": 1.7}, "label": {2: 0}})
    np.testing.assert_allclose(found.weight, fixed.under(np.array(factors)), rtol=1e-10, atol=1e-13)


def test_accuracy_without_gains_is_that_of_the_network(adam: tuple[dualstore.Store, list[WeightsOf]]) -> None:
    store, kept = adam
    hidden = np.maximum(X[:5].numpy() @ kept[-1]["0.weight"].T + kept[-1]["0.bias"], 0)
    right = (hidden @ kept[-1]["2.weight"].T + kept[-1]["2.bias"]).argmax(1) == Y[:5].numpy()
    assert store.evaluate({"task": {"odd": 1.0}}).to_dicts()[0]["accuracy"] == right.mean()


def test_self_influence_is_that_of_a_pattern_on_its_own_loss(adam: tuple[dualstore.Store, list[WeightsOf]]) -> None:
    store, _ = adam
    fixed = Fixed(store, 1)
    expected: dict[int, float] = {}
    for place, row in enumerate(fixed.rows):
        gains = np.ones(len(fixed.rows))
        gains[place] = 0
        own = float(np.array(row["e"]) @ (fixed.weight - fixed.under(gains)) @ np.array(row["x"]))
        expected[row["sample_id"]] = expected.get(row["sample_id"], 0.0) + own
    found = store.self_influence(1, top=100).to_dicts()
    assert {row["sample_id"] for row in found} == set(expected)
    for row in found:
        assert row["self_influence"] == pytest.approx(expected[row["sample_id"]], rel=1e-8, abs=1e-13)


@pytest.mark.parametrize("how", [{"where": "nothing = 1"}, {"pool": "median"}, {"score": "value"}, {"at_step": 99}])
def test_what_is_refused_is_refused_before_the_training_is_replayed(
    adam: tuple[dualstore.Store, list[WeightsOf]], monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    store, _ = adam
    monkeypatch.setattr("dualstore.scoring.walk", lambda *_: pytest.fail("replayed"))
    for ask in (store.query, store.totals):
        with pytest.raises(QueryError):
            ask(**{"test_id": [1, 2], "layer": 0, "score": "influence", **how})  # type: ignore[operator]


def test_an_optimiser_of_a_class_of_its_own_is_not_taken_for_its_base(tmp_path: Path) -> None:
    class Mine(torch.optim.Adam):
        pass

    train(tmp_path / "store", lambda p: Mine(p), 3)
    with pytest.raises(InexactError, match="known for SGD, Adam, AdamW, RMSprop, Adagrad of torch, not for Mine"):
        dualstore.open(tmp_path / "store").weights(0)


def test_rows_that_do_not_fit_the_steps_are_an_error(tmp_path: Path) -> None:
    train(tmp_path / "store", MAKERS["Adam"], 3)
    part = next((tmp_path / "store" / "patterns" / "layer=0").glob("*.parquet"))
    part.unlink()
    with pytest.raises(DamagedError, match=r"layer 0 \(0\): expected 27 patterns, as the steps log says, found 0"):
        dualstore.open(tmp_path / "store").weights(0)

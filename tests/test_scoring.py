"""Contributions, influence and time travel against the network itself: weights kept at every step of a real training."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

import dualstore
from dualstore.errors import InexactError, QueryError, StoreError
from tests import reference
from tests.reference import Rows, write_store

STEPS, WIDTH, OUT = 12, 6, 3
RANDOM = torch.Generator().manual_seed(5)
X = torch.randn(40, WIDTH, generator=RANDOM, dtype=torch.float64)
Y = torch.randint(0, OUT, (40,), generator=RANDOM)
TEST_X, TEST_Y = X[:8] + 0.1, Y[:8]


@dataclass(frozen=True)
class Run:
    """A recorded training, and what the network was before and after each step."""

    store: dualstore.Store
    weights: list[dict[str, np.ndarray]]
    """Before the first step, then after each."""
    inputs: dict[int, np.ndarray]
    """Of the test examples, at each layer after the last step."""
    outputs: dict[int, np.ndarray]
    gradients: dict[int, np.ndarray]


def copied(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Momentum, decay of the weights but not of the biases, a schedule and clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, OUT)).double()
    named = dict(model.named_parameters())
    groups = [{"params": [p for n, p in named.items() if n.endswith("weight")], "weight_decay": 0.02},
              {"params": [p for n, p in named.items() if n.endswith("bias")], "lr": 0.05}]  # fmt: skip
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    path = tmp_path_factory.mktemp("scores") / "store"
    weights = [copied(model)]
    with dualstore.record(model, optimizer, path, dtype="float64") as recorder:
        for step in range(STEPS):
            ids = torch.arange(step * 7, step * 7 + 10) % 40
            with recorder.batch(ids, Y[ids], task="a" if step % 2 else "b"):
                nn.functional.cross_entropy(model(X[ids]), Y[ids]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.8)
            for group in optimizer.param_groups:
                group["lr"] *= 0.97
            optimizer.step()
            optimizer.zero_grad()
            weights.append(copied(model))
        model.eval()
        with recorder.probe(range(8), TEST_Y, loss=lambda y: nn.functional.cross_entropy(y, TEST_Y, reduction="none")):
            model(TEST_X)
        with recorder.probe([9], [1]):
            model(TEST_X[:1])
    hidden = model[0](TEST_X).detach().requires_grad_()
    output = model[2](hidden.tanh()).detach().requires_grad_()
    for y in (model[2](hidden.tanh()), output):
        nn.functional.cross_entropy(y, TEST_Y, reduction="sum").backward()
    assert hidden.grad is not None
    assert output.grad is not None
    return Run(
        dualstore.open(path),
        weights,
        {0: TEST_X.numpy(), 1: hidden.detach().tanh().numpy()},
        {0: hidden.detach().numpy(), 1: output.detach().numpy()},
        {0: hidden.grad.numpy(), 1: output.grad.numpy()},
    )


def names_of(layer: int) -> tuple[str, str]:
    return ("0.weight", "0.bias") if layer == 0 else ("2.weight", "2.bias")


@pytest.mark.parametrize("layer", [0, 1])
def test_initial_weights_contributions_and_bias_are_the_output(run: Run, layer: int) -> None:
    weight, bias = names_of(layer)
    for test in range(8):
        x, y = run.inputs[layer][test], run.outputs[layer][test]
        found = run.store.totals(test_id=test, layer=layer, by="", score="contribution", output=1)
        everything = found.to_dicts()[0]["total"]
        start = float(found.notes[1].split(" = ")[1].split(" from")[0])
        assert start + everything + run.weights[-1][bias][1] == pytest.approx(y[1], rel=1e-5)
        assert everything == pytest.approx(float(run.weights[-1][weight][1] @ x) - start, rel=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("step", [0, 3, STEPS - 1, None])
def test_contributions_as_of_any_step_change_the_weights_of_that_step(run: Run, layer: int, step: int | None) -> None:
    """W_S - a W_0 for every S: the sums of the contributions of unit queries, which are its elements."""
    weight, _ = names_of(layer)
    width = run.inputs[layer].shape[1]
    with np.errstate(all="ignore"):
        coefficients = dualstore.weights.coefficients_of(run.store, run.store.layers[layer], "weight", step)
    expected = run.weights[STEPS if step is None else step + 1][weight] - coefficients.initial * run.weights[0][weight]
    for output in range(expected.shape[0]):
        found = run.store.totals(np.eye(width), layer=layer, by="", score="contribution", output=output, at_step=step)
        assert [row["query"] for row in found] == list(range(width))
        np.testing.assert_allclose([row["total"] for row in found], expected[output], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("layer", [0, 1])
def test_influences_add_up_to_the_gradient_along_the_way_of_the_weights(run: Run, layer: int) -> None:
    weight, _ = names_of(layer)
    coefficients = dualstore.weights.coefficients_of(run.store, run.store.layers[layer], "weight")
    change = run.weights[-1][weight] - coefficients.initial * run.weights[0][weight]
    for test in range(8):
        slope = np.outer(run.gradients[layer][test], run.inputs[layer][test])
        total = run.store.totals(test_id=test, layer=layer, by="", score="influence").to_dicts()[0]["total"]
        assert total == pytest.approx(float((slope * change).sum()), rel=1e-11)


def patterns(run: Run, layer: int) -> list[dict[str, Any]]:
    columns = "step, sample_id, position, label, task, x, e"
    order = "ORDER BY step, sample_id, position"
    return run.store.sql(f"SELECT {columns} FROM patterns WHERE layer = {layer} {order}").to_dicts()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("score", ["contribution", "influence"])
@pytest.mark.parametrize("step", [4, None])
@pytest.mark.parametrize("how", [{}, {"bottom": True}, {"absolute": True}, {"where": "task = 'a'"}, {"per": "label"}])
def test_query_totals_and_sql_agree_with_the_formula(
    run: Run, layer: int, score: str, step: int | None, how: dict[str, Any]
) -> None:
    rows = [row for row in patterns(run, layer) if step is None or row["step"] <= step]
    rows = [row for row in rows if "where" not in how or row["task"] == "a"]
    c = dualstore.weights.coefficients_of(run.store, run.store.layers[layer], "weight", step).at
    asked = {"score": score, "at_step": step, "test_id": 2, "layer": layer} | ({"output": 2} if score == "contribution" else {})
    for row in rows:
        alpha = reference.halved(np.array([row["x"]]), run.inputs[layer][2])[0] + 0.0
        inner = row["e"][2] if score == "contribution" else reference.halved(np.array([row["e"]]), run.gradients[layer][2])[0]
        row["alpha"], row["value"] = alpha, float(c(np.array([row["step"]], np.int32))[0]) * inner
        row["score"] = row["alpha"] * row["value"]
    sign = 1 if "bottom" in how else -1
    rows.sort(key=lambda row: (sign * (abs(row["score"]) if "absolute" in how else row["score"]), row["step"], row["sample_id"]))
    groups = sorted({row["label"] for row in rows}) if "per" in how else [None]
    expected = [row for group in groups for row in [r for r in rows if group is None or r["label"] == group][:4]]
    found = run.store.query(top=4, **asked, **how).to_dicts()
    assert [(row["step"], row["sample_id"]) for row in found] == [(row["step"], row["sample_id"]) for row in expected]
    for name, column in ((score, "score"), ("alpha", "alpha"), ("value", "value")):
        np.testing.assert_allclose([row[name] for row in found], [row[column] for row in expected], rtol=1e-12)
    if not how:
        totals = {row["label"]: row["total"] for row in run.store.totals(by="label", **asked)}
        for label, total in totals.items():
            assert total == pytest.approx(sum(row["score"] for row in rows if row["label"] == label), rel=1e-11)
        text = f"SELECT step, sample_id, {score} FROM attention ORDER BY {score} DESC LIMIT 4"
        again = run.store.sql(text, **asked).to_dicts()
        assert [list(row.values()) for row in again] == [[row["step"], row["sample_id"], row[score]] for row in found]


def test_attention_as_of_a_step_is_that_of_the_patterns_until_then(run: Run) -> None:
    for step in (0, 5):
        asked = {"test_id": 1, "layer": 1}
        assert run.store.query(**asked, at_step=step).table == run.store.query(**asked, where=f"step <= {step}").table
        assert run.store.totals(**asked, at_step=step).table == run.store.totals(**asked, where=f"step <= {step}").table
        both = run.store.query(**asked, at_step=step, where="label = 1 OR label = 2").to_dicts()
        assert {row["label"] for row in both} <= {1, 2}
        assert max(row["step"] for row in both) <= step


def test_the_output_that_is_meant_may_be_the_prediction_or_the_label(run: Run) -> None:
    predicted = run.outputs[1].argmax(1)
    for name, output in (("predicted", int(predicted[3])), ("label", int(TEST_Y[3]))):
        found = run.store.query(test_id=3, layer=1, score="contribution", output=name)
        assert found.table == run.store.query(test_id=3, layer=1, score="contribution", output=output).table
        assert f"output {output} of test 3: {run.outputs[1][3][output]:.6g} = " in found.notes[1]
        shown = sum(row["contribution"] for row in found)
        assert f"the rows shown carry {shown:.6g}, {100 * shown / run.outputs[1][3][output]:.1f} % of the output" in found.notes[1]


@pytest.mark.parametrize("name", ["predicted", "label"])
def test_a_hidden_layer_does_not_predict_whatever_its_largest_output_is(run: Run, name: str) -> None:
    for test in range(8):
        with pytest.raises(QueryError, match=r"layer that predicts, and layer 0 \(0\) is not"):
            run.store.query(test_id=test, layer=0, score="contribution", output=name)


def test_a_test_that_is_given_twice_is_asked_once(run: Run) -> None:
    for asked in ({"score": "influence"}, {}):
        twice = run.store.totals(test_id=[3, 1, 3], layer=1, **asked)  # type: ignore[arg-type]
        assert twice.table == run.store.totals(test_id=[3, 1], layer=1, **asked).table  # type: ignore[arg-type]
        again = run.store.query(test_id=[3, 1, 3], layer=1, top=2, **asked)  # type: ignore[arg-type]
        assert again.table == run.store.query(test_id=[3, 1], layer=1, top=2, **asked).table  # type: ignore[arg-type]


def test_several_queries_have_outputs_and_gradients_of_their_own(run: Run) -> None:
    together = run.store.query(test_id=[4, 2], layer=1, score="contribution", output="label", top=3).to_dicts()
    alone = [run.store.query(test_id=test, layer=1, score="contribution", output="label", top=3).to_dicts() for test in (4, 2)]
    assert [{name: value for name, value in row.items() if name != "test_id"} for row in together] == alone[0] + alone[1]
    gradients = run.gradients[1][:2]
    given = run.store.totals(run.inputs[1][:2], layer=1, score="influence", gradient=gradients).to_dicts()
    probed = run.store.totals(test_id=[0, 1], layer=1, score="influence").to_dicts()
    np.testing.assert_allclose([row["total"] for row in given], [row["total"] for row in probed], rtol=1e-11)


@pytest.mark.parametrize("budget", [1 << 20, 70 << 20, 256 << 20])
@pytest.mark.parametrize("asked", [{}, {"absolute": True}, {"score": "influence"}, {"score": "contribution", "output": "label"}])
@pytest.mark.parametrize("by", ["label", "sample_id", "alpha > 0, label"])
def test_totals_of_several_queries_are_those_of_each(run: Run, by: str, asked: dict[str, Any], budget: int) -> None:
    """In one pass, in two, or in one each."""
    store = dualstore.open(run.store.path, budget_bytes=budget)
    together = store.totals(test_id=[4, 2, 7], layer=1, by=by, **asked).to_dicts()
    for test in (4, 2, 7):
        alone = store.totals(test_id=test, layer=1, by=by, **asked).to_dicts()
        assert [
            {name: value for name, value in row.items() if name != "test_id"} for row in together if row["test_id"] == test
        ] == alone
    assert {row["test_id"] for row in together} == {2, 4, 7}


@pytest.mark.parametrize("pool", ["mean", "sum"])
@pytest.mark.parametrize("score", ["attention", "contribution", "influence"])
@pytest.mark.parametrize("step", [5, None])
def test_a_pool_is_the_mean_or_sum_of_what_each_query_gets(run: Run, pool: str, score: str, step: int | None) -> None:
    asked: dict[str, Any] = {"layer": 1, "score": score, "at_step": step}
    if score == "contribution":
        asked["output"] = "label"
    name = "alpha" if score == "attention" else score
    each = [{(r["step"], r["sample_id"]): r[name] for r in run.store.query(test_id=test, top=500, **asked)} for test in (0, 3, 5)]
    share = 3 if pool == "mean" else 1
    expected = {key: sum(found[key] for found in each) / share for key in each[0]}
    found = run.store.query(test_id=[0, 3, 5], pool=pool, top=500, **asked).to_dicts()
    assert {(row["step"], row["sample_id"]) for row in found} == set(expected)
    for row in found:
        assert row[name] == pytest.approx(expected[row["step"], row["sample_id"]], rel=1e-10, abs=1e-15)
    assert [row[name] for row in found] == sorted((row[name] for row in found), reverse=True)
    total = run.store.totals(test_id=[0, 3, 5], pool=pool, by="", **asked).to_dicts()
    assert list(total[0]) == ["total", "count"]
    assert total[0]["total"] == pytest.approx(sum(expected.values()), rel=1e-9, abs=1e-13)
    assert total[0]["count"] == len(expected)


def test_influence_can_be_summed_over_the_layers(run: Run) -> None:
    each = [run.store.totals(test_id=[1, 2], layer=layer, by="label", score="influence").to_dicts() for layer in (0, 1)]
    both = run.store.totals(test_id=[1, 2], layer=None, by="label", score="influence").to_dicts()
    assert len(both) == len(each[0])
    for row in both:
        parts = [part for found in each for part in found if (part["test_id"], part["label"]) == (row["test_id"], row["label"])]
        assert row["total"] == pytest.approx(sum(part["total"] for part in parts), rel=1e-11)
        assert row["count"] == sum(part["count"] for part in parts)
    for how in ({"test_id": 1}, {"x": np.ones(5), "score": "influence"}):
        with pytest.raises(QueryError, match="layer: expected one; only the influence"):
            run.store.totals(layer=None, **how)  # type: ignore[arg-type]


def test_verify_as_of_a_step_checks_the_probes_of_then(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, OUT).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        for step in range(6):
            model.train()
            with recorder.batch(range(40)):
                model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                model.eval()
                with recorder.probe(range(8)):
                    model(TEST_X)
    store = dualstore.open(tmp_path / "store")
    for step, checked in ((3, True), (2, False), (None, False)):
        found = store.verify(at_step=step)
        assert found.ok, found.problems
        residual = found.layers[0].output_residual
        assert (residual is not None) == checked
        assert residual is None or residual <= 1e-12
        assert (found.layers[0].weight_residual is None) == (step is not None)
    with pytest.raises(QueryError, match="at_step: expected a step of the run, 0 to 5; found 6"):
        store.verify(at_step=6)


@pytest.mark.parametrize("layer", [0, "2", None])
@pytest.mark.parametrize("step", [3, None])
def test_self_influence_is_that_of_each_pattern_on_its_own_loss(run: Run, layer: int | str | None, step: int | None) -> None:
    expected: dict[int, list[float]] = {}
    for number in {0: [0], "2": [1], None: [0, 1]}[layer]:
        c = dualstore.weights.coefficients_of(run.store, run.store.layers[number], "weight", step).c
        for row in patterns(run, number):
            if row["label"] != 1 and (step is None or row["step"] <= step):
                own = c[row["step"]] * np.square(row["x"]).sum() * np.square(row["e"]).sum()
                expected.setdefault(row["sample_id"], []).append(own)
    order = sorted(expected, key=lambda sample: -abs(sum(expected[sample])))[:6]
    found = run.store.self_influence(layer, top=6, where="label <> 1", at_step=step).to_dicts()
    assert [row["sample_id"] for row in found] == order
    for row in found:
        assert row["self_influence"] == pytest.approx(sum(expected[row["sample_id"]]), rel=1e-11)
        assert row["count"] == len(expected[row["sample_id"]])
        assert row["label"] == int(Y[row["sample_id"]])
    with pytest.raises(QueryError, match="top: expected a whole number of at least 1, found 0"):
        run.store.self_influence(top=0)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"score": "value"}, "score: expected attention, contribution or influence, found 'value'"),
        ({"output": 1}, "output: expected with the score contribution only, found score 'attention'"),
        ({"score": "influence", "output": 1}, "output: expected with the score contribution only"),
        ({"gradient": [1, 2, 3]}, "gradient: expected with the score influence only"),
        ({"score": "contribution"}, r"output: expected a number from 0 to 2 at layer 1 \(2\), predicted or label, found none"),
        ({"score": "contribution", "output": 3}, "output: expected a number from 0 to 2 .*, found 3"),
        ({"score": "contribution", "output": -1}, "output: expected a number from 0 to 2 .*, found -1"),
        ({"score": "contribution", "output": True}, "output: expected a number from 0 to 2 .*, found True"),
        ({"score": "contribution", "output": "first"}, "output: expected a number from 0 to 2 .*, found 'first'"),
        (
            {"score": "contribution", "output": "label", "layer": 0},
            r"the layer that predicts, and layer 0 \(0\) is not",
        ),
        ({"score": "influence", "test_id": 9}, r"influence needs the gradient of a loss .* record them with rec.probe\(..., loss"),
        ({"score": "influence", "gradient": [1, 2]}, "gradient: expected 1 x 3 numbers"),
        ({"score": "influence", "gradient": [[1, 2, 3], [4]]}, "gradient: expected numbers, found "),
        ({"score": "influence", "gradient": torch.zeros(3, requires_grad=True)}, "gradient: expected numbers, found "),
        ({"score": "influence", "gradient": [1, 2, np.inf]}, "gradient at layer .*: expected finite float64 numbers"),
        ({"at_step": STEPS}, f"at_step: expected a step of the run, 0 to {STEPS - 1}; found {STEPS}"),
        ({"at_step": -1}, "at_step: expected a step of the run"),
        ({"at_step": 1.5}, "at_step: expected a step of the run"),
        ({"pool": "median"}, "pool: expected mean or sum, found 'median'"),
        ({"score": "influence", "min_alpha": 1}, "min_alpha: expected with the score attention only"),
    ],
)
def test_questions_that_make_no_sense_are_refused_in_one_line(run: Run, asked: dict[str, Any], match: str) -> None:
    with pytest.raises(QueryError, match=match) as raised:
        run.store.query(**{"test_id": 1, "layer": 1, **asked})
    assert "\n" not in str(raised.value)


def test_a_vector_has_neither_prediction_nor_loss(run: Run) -> None:
    x = run.inputs[1][0]
    with pytest.raises(QueryError, match="'label' needs a recorded test example"):
        run.store.query(x, layer=1, score="contribution", output="label")
    with pytest.raises(QueryError, match="a vector has no loss; give its gradient at the layer's output"):
        run.store.query(x, layer=1, score="influence")
    with pytest.raises(QueryError, match="paper: expected with the score attention only"):
        run.store.totals(x, layer=1, score="contribution", output=1, paper=True)
    with pytest.raises(QueryError, match="expected a layer and a query with score"):
        run.store.sql("SELECT 1", score="contribution", output=1)


def test_values_of_an_optimiser_that_is_not_known_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, OUT).double()
    optimizer = torch.optim.Rprop(model.parameters())
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        with recorder.batch(range(40)):
            model(X).square().mean().backward()
        optimizer.step()
    with pytest.raises(InexactError, match="not for Rprop"):
        dualstore.open(tmp_path / "store").query(X[0].numpy(), layer=0, score="contribution", output=1)


def test_a_store_without_initial_weights_or_gradients_has_no_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = Rows(np.arange(9, dtype=np.int32), np.arange(9), *(np.zeros(9, np.int32) for _ in range(3)), rng.normal(size=(9, 4)),
                rng.normal(size=(9, 2)))  # fmt: skip
    probe = {name: np.zeros(1, np.int64) for name in ("test_id", "position", "step", "label", "task", "predicted")}
    probe |= {"x": rng.normal(size=(1, 4)), "y": np.ones((1, 2))}
    write_store(tmp_path, [rows], probes=[{name: v if v.ndim > 1 else v.astype(np.int64 if name == "test_id" else np.int32)
                                           for name, v in probe.items()}])  # fmt: skip
    store = dualstore.open(tmp_path)
    with pytest.raises(StoreError, match=r"initial.safetensors: expected the weights of the recording"):
        store.query(test_id=0, layer=0, score="contribution", output=1)
    (tmp_path / "weights").mkdir()
    save_file({"layer0.weight": np.zeros((2, 4))}, tmp_path / "weights" / "initial.safetensors")
    text = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps(text | {"format": 1}))
    with pytest.raises(QueryError, match="influence needs the gradient of a loss"):
        dualstore.open(tmp_path).query(test_id=0, layer=0, score="influence")


def test_a_sample_that_came_to_a_later_layer_only_has_its_name_from_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def rows_of(step: list[int], label: int) -> Rows:
        steps, zeros = np.array(step, np.int32), np.zeros(len(step), np.int32)
        x, e = rng.normal(size=(len(step), 3)), rng.normal(size=(len(step), 2))
        return Rows(steps, steps.astype(np.int64) + 5, zeros, zeros + label, zeros, x, e)

    write_store(tmp_path, [rows_of([0], 1), rows_of([0, 1], 2)], tasks=("t",))
    (tmp_path / "weights").mkdir()
    save_file({}, tmp_path / "weights" / "initial.safetensors")
    found = {row["sample_id"]: (row["label"], row["count"]) for row in dualstore.open(tmp_path).self_influence()}
    assert found == {5: (1, 2), 6: (2, 1)}

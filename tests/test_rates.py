"""Layers of which a share was recorded: sums count each pattern 1 / rate times, and what needs all patterns is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy import ndarray
from safetensors.numpy import save

import dualstore
from dualstore import part, sums
from dualstore.errors import DamagedError, InexactError
from dualstore.rates import Rates
from dualstore.store import Store
from dualstore.writer import write_whole
from tests.reference import Rows, write_store

STEPS = 12
LR = 0.1
VECTOR = np.linspace(-1, 1, 5)


def make_rows(count: int, seed: int, steps: ndarray) -> Rows:
    """Rows whose products and sums are exact."""
    rng = np.random.default_rng(seed)
    return Rows(
        step=np.sort(rng.choice(steps, count)).astype(np.int32),
        sample_id=rng.integers(0, 9, count),
        position=np.zeros(count, np.int32),
        label=rng.integers(0, 3, count).astype(np.int32),
        task=rng.integers(0, 2, count).astype(np.int32),
        x=rng.integers(-8, 9, (count, 5)).astype(np.float32) / 4,
        e=rng.integers(-8, 9, (count, 3)).astype(np.float32) / 8,
    )


KINDS: dict[str, ndarray] = {
    "constant": np.full(STEPS, 0.25),
    "changing": np.array([1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125, 1.0]),
    "every third step": np.where(np.arange(STEPS) % 3 == 0, 1 / 3, 0.0),
}
"""Of the first layer; all patterns of the second were recorded."""


def probes_of(seed: int) -> dict[str, ndarray]:
    rng, numbers = np.random.default_rng(seed), np.arange(6)
    found: dict[str, ndarray] = {name: (numbers % 3).astype(np.int32) for name in ("label", "predicted", "task")}
    found |= {"test_id": numbers, "position": np.zeros(6, np.int32), "step": np.full(6, STEPS, np.int32)}
    return found | {
        "x": rng.normal(size=(6, 5)).astype(np.float32),
        **{n: rng.normal(size=(6, 3)).astype(np.float32) for n in "yg"},
    }


def write(path: Path, layers: list[Rows], rates: ndarray) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, "MAX_GROUP_ROWS", 64)
        write_store(path, layers, tasks=("a", "b"), probes=[probes_of(n) for n in range(len(layers))], flush_every=5,
                    epoch_of_step=lambda step: step // 6, rates=lambda step: [float(rates[step])])  # fmt: skip
    rng = np.random.default_rng(3)
    for name in ("initial", "final"):
        weights = {f"layer{n}.weight": rng.normal(size=(3, 5)).astype(np.float32) for n in range(len(layers))}
        write_whole(path / "weights" / f"{name}.safetensors", save(weights))
    return path


def layers_of(rates: ndarray, count: int = 700) -> list[Rows]:
    whole = make_rows(count, 2, np.arange(STEPS))
    return [make_rows(count, 1, np.flatnonzero(rates)), whole]


@pytest.fixture(scope="module", params=list(KINDS))
def sampled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows, ndarray]:
    """A store, the rows of its first layer and the rate at which each was recorded."""
    rates = KINDS[request.param]
    layers = layers_of(rates)
    path = write(tmp_path_factory.mktemp("rates") / "store", layers, rates)
    return path, layers[0], rates[layers[0].step]


def opened(path: Path, *, inexact: bool = False) -> Store:
    return dualstore.open(path, inexact=inexact)


def by_label(values: ndarray, rows: Rows) -> dict[int, float]:
    return {label: float(values[rows.label == label].sum()) for label in range(3)}


def alphas(rows: Rows) -> ndarray:
    return rows.x.astype(np.float64) @ VECTOR.astype(np.float32).astype(np.float64)


SCORES: list[tuple[dict[str, Any], Any]] = [
    ({}, lambda rows: alphas(rows)),
    ({"absolute": True}, lambda rows: np.abs(alphas(rows))),
    ({"score": "contribution", "output": 1}, lambda rows: -LR * alphas(rows) * rows.e[:, 1]),
    ({"score": "influence", "gradient": [1.0, -2.0, 0.5]}, lambda rows: -LR * alphas(rows) * (rows.e @ [1.0, -2.0, 0.5])),
]


@pytest.mark.parametrize("indexed", [False, True], ids=["scan", "index"])
@pytest.mark.parametrize(("how", "values"), SCORES, ids=["attention", "absolute", "contribution", "influence"])
def test_totals_divide_each_patterns_part_by_its_rate(
    sampled: tuple[Path, Rows, ndarray], monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], values: Any, *, indexed: bool
) -> None:
    path, rows, rates = sampled
    store = opened(path)
    if indexed:
        monkeypatch.setattr(sums, "ROWS_PER_CELL", 4)
        monkeypatch.setattr(sums, "BUCKET_ROWS", 32)
        store.build_index()
    found = store.totals(VECTOR, layer=0, by="label", **how)
    expected = by_label(values(rows) / rates, rows)
    assert {row["label"]: row["total"] for row in found} == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert {row["label"]: row["count"] for row in found} == {n: int((rows.label == n).sum()) for n in range(3)}
    assert found.title.startswith("estimated sum of")
    assert any(note.startswith("estimated from a recorded share of the patterns: ") for note in found.notes)
    if indexed and not how:
        assert "index" in found.explain.path  # type: ignore[union-attr]


def test_totals_of_a_layer_that_was_recorded_whole_are_exact(sampled: tuple[Path, Rows, ndarray]) -> None:
    found = opened(sampled[0]).totals(VECTOR, layer=1, by="label")
    assert found.title.startswith("sum of alpha")
    assert found.notes == ()


def test_totals_over_all_layers_divide_by_the_rate_of_each(sampled: tuple[Path, Rows, ndarray]) -> None:
    path, rows, rates = sampled
    found = opened(path).totals(test_id=2, layer=None, by="", score="influence")
    expected = 0.0
    for number, (mine, rate) in enumerate(((rows, rates), (make_rows(700, 2, np.arange(STEPS)), np.ones(700)))):
        x, g = (probes_of(number)[name][2].astype(np.float64) for name in ("x", "g"))
        expected += float((-LR * (mine.x @ x) * (mine.e @ g) / rate).sum())
    assert found.to_dicts() == [{"total": pytest.approx(expected, rel=1e-11), "count": 1400}]
    assert found.title.startswith("estimated sum of influence")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rates=st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), min_size=STEPS, max_size=STEPS), seed=st.integers(0, 99))
def test_any_rates_give_the_same_totals_with_and_without_an_index(
    tmp_path_factory: pytest.TempPathFactory, rates: list[float], seed: int
) -> None:
    given_rates = np.array(rates)
    if not given_rates.any():
        given_rates[seed % STEPS] = 0.25
    rows = make_rows(200, seed, np.flatnonzero(given_rates))
    path = write(tmp_path_factory.mktemp("any") / "store", [rows], given_rates)
    expected = by_label(alphas(rows) / given_rates[rows.step], rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "ROWS_PER_CELL", 2)
        patch.setattr(sums, "BUCKET_ROWS", 16)
        for _ in range(2):
            found = opened(path).totals(VECTOR, layer=0, by="label")
            assert {row["label"]: row["total"] for row in found} == pytest.approx(expected, rel=1e-12, abs=1e-12)
            opened(path).build_index()


@pytest.mark.parametrize("layer", [0, 1])
def test_votes_count_each_pattern_as_often_as_it_stands_for(tmp_path: Path, layer: int) -> None:
    rates = KINDS["changing"]
    layers = [make_rows(400, 5, np.arange(STEPS)), make_rows(400, 6, np.arange(STEPS))]
    path = tmp_path / "store"
    write_store(path, layers, probes=[probes_of(0), probes_of(1)], rates=lambda step: [float(rates[step])] * 2)
    rows, probes = layers[layer], probes_of(layer)
    products = rows.x.astype(np.float64) @ probes["x"].astype(np.float64).T / rates[rows.step][:, None]
    products = np.abs(products) if layer == 0 else products
    totals = np.array([products[rows.label == label].sum(axis=0) for label in range(3)])
    right = float((totals.argmax(axis=0) == probes["label"]).mean())
    for _ in range(2):
        found = opened(path).votes(layer=layer)
        assert found.to_dicts()[0]["target_accuracy"] == right
        assert found.notes[0].startswith("estimated from a recorded share")
        opened(path).build_index()


def test_a_query_ranks_what_was_recorded_and_says_that_it_is_a_share(sampled: tuple[Path, Rows, ndarray]) -> None:
    path, rows, rates = sampled
    share = len(rows) / (1 / rates).sum()
    found = opened(path).query(VECTOR, layer=0, top=3)
    assert found.table.column("alpha").to_pylist() == sorted(alphas(rows), reverse=True)[:3]
    assert found.notes == (f"of the recorded patterns, which are a share of all: {share:.1%} of layer 0 (layer0)",)
    assert opened(path).query(VECTOR, layer=1, top=3).notes == ()


def test_a_contribution_as_of_a_step_is_ranked_without_what_would_need_all_patterns(sampled: tuple[Path, Rows, ndarray]) -> None:
    found = opened(sampled[0]).query(VECTOR, layer=0, top=3, score="contribution", output=1, at_step=6)
    assert len(found.notes) == 2
    assert found.notes[1].startswith("of the recorded patterns")


NEED_ALL: dict[str, Any] = {
    "weights": lambda store: store.weights(0),
    "gains": lambda store: store.weights(0, gains={"label": {1: 0}}),
    "write": lambda store: store.write_weights(store.path / "made.safetensors"),
    "self": lambda store: store.self_influence(),
}


@pytest.mark.parametrize("what", NEED_ALL)
def test_what_needs_all_patterns_is_refused(sampled: tuple[Path, Rows, ndarray], what: str) -> None:
    path = sampled[0]
    with pytest.raises(InexactError, match=rf"^{re.escape(str(path))}: layer 0 \(layer0\): this needs all patterns, and [^\n]*$"):
        NEED_ALL[what](opened(path))


def test_the_accuracy_under_gains_is_refused_or_said_to_be_estimated(tmp_path: Path) -> None:
    path = write(tmp_path / "store", layers_of(KINDS["constant"])[:1], KINDS["constant"])
    with pytest.raises(InexactError, match="this needs all patterns"):
        opened(path).evaluate({"label": {1: 0}})
    found = opened(path, inexact=True).evaluate({"label": {1: 0}})
    assert found.notes[-1] == "estimated from a recorded share of the patterns: 25.0% of layer 0 (layer0)"


def test_weights_are_estimated_where_that_is_asked_for(sampled: tuple[Path, Rows, ndarray]) -> None:
    path, rows, rates = sampled
    store = opened(path, inexact=True)
    x, e = rows.x.astype(np.float64), rows.e.astype(np.float64) / rates[:, None]
    initial = store.tensors("initial")["layer0.weight"].astype(np.float64)
    with pytest.warns(dualstore.DualstoreWarning, match="estimated from a recorded share"):
        found = store.weights(0)
    assert np.allclose(found.weight, initial - LR * e.T @ x, rtol=1e-12, atol=1e-12)
    kept = rows.label != 1
    with pytest.warns(dualstore.DualstoreWarning, match="estimated from a recorded share"):
        found = store.weights(0, gains={"label": {1: 0}})
    assert np.allclose(found.weight, initial - LR * e[kept].T @ x[kept], rtol=1e-12, atol=1e-12)


def test_self_influence_is_estimated_where_that_is_asked_for(sampled: tuple[Path, Rows, ndarray]) -> None:
    path, rows, rates = sampled
    found = opened(path, inexact=True).self_influence(layer=0, top=20)
    own = -LR * np.square(rows.x.astype(np.float64)).sum(axis=1) * np.square(rows.e.astype(np.float64)).sum(axis=1) / rates
    expected = {sample: float(own[rows.sample_id == sample].sum()) for sample in range(9)}
    assert {row["sample_id"]: row["self_influence"] for row in found} == pytest.approx(expected, rel=1e-12)
    assert found.notes[-1].startswith("estimated from a recorded share")


def test_verify_counts_the_rows_and_does_not_claim_a_proof(sampled: tuple[Path, Rows, ndarray]) -> None:
    path, rows, rates = sampled
    found = opened(path).verify()
    share = len(rows) / (1 / rates).sum()
    assert not found.ok
    mine = [problem for problem in found.problems if "layer 0" in problem]
    assert mine == [f"layer 0 (layer0): {share:.1%} of the patterns were recorded, from which its weights cannot be proven"]
    check = found.layers[0]
    assert (check.rows, check.weight_residual, check.output_residual) == (len(rows), None, None)
    assert check.recorded == pytest.approx(share)
    assert found.layers[1].weight_residual is not None
    assert found.layers[1].recorded == 1


def test_info_says_which_share_was_recorded(sampled: tuple[Path, Rows, ndarray]) -> None:
    path, rows, rates = sampled
    assert [layer["recorded"] for layer in opened(path).info()["layers"]] == [pytest.approx(len(rows) / (1 / rates).sum()), 1.0]


def test_a_share_of_nothing_is_told_by_the_rates_alone() -> None:
    none = Rates(np.arange(4, dtype=np.int32), np.full(4, 0.25), np.zeros(4, np.int64))
    assert none.share == 0.25


@pytest.mark.parametrize("rate", [1.5, -0.5, float("nan"), 0.0])
def test_what_is_no_rate_is_an_error(tmp_path: Path, rate: float) -> None:
    rows = make_rows(40, 1, np.arange(STEPS))
    first = int(rows.step[0])
    write_store(tmp_path / "store", [rows], rates=lambda step: [rate if step == first else 1.0])
    with pytest.raises(DamagedError, match=rf"^steps: step {first}: rates: layer 0 \(layer0\): expected a share [^\n]*$"):
        opened(tmp_path / "store").query(VECTOR, layer=0, top=1)


def test_an_adaptive_optimiser_needs_all_patterns_for_values(tmp_path: Path) -> None:
    path = write(tmp_path / "store", layers_of(KINDS["constant"]), KINDS["constant"])
    text = (path / "store.json").read_text()
    (path / "store.json").write_text(text.replace('"optimizer": "SGD"', '"optimizer": "Adam"'))
    with pytest.raises(InexactError, match="this needs all patterns"):
        opened(path).query(VECTOR, layer=0, top=3, score="contribution", output=1)
    assert len(opened(path).query(VECTOR, layer=0, top=3)) == 3


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_estimates_are_those_of_a_whole_store_whose_errors_are_over_their_rates(tmp_path: Path, optimizer: str) -> None:
    rates = KINDS["changing"]
    rows = make_rows(300, 4, np.arange(STEPS))
    over = Rows(**{**vars(rows), "e": rows.e / rates[rows.step][:, None].astype(np.float32)})
    stores = [write(tmp_path / "sampled", [rows], rates), write(tmp_path / "whole", [over], np.ones(STEPS))]
    for path in stores:
        text = (path / "store.json").read_text()
        (path / "store.json").write_text(text.replace('"optimizer": "SGD"', f'"optimizer": "{optimizer}"'))
    sampled, whole = (opened(path, inexact=True) for path in stores)
    for gains in (None, {"label": {1: 0.5}}):
        with pytest.warns(dualstore.DualstoreWarning, match="estimated"):
            found = sampled.weights(0, gains=gains)
        assert np.allclose(found.weight, whole.weights(0, gains=gains).weight, rtol=1e-12, atol=1e-12)
    asked: dict[str, Any] = {"layer": 0, "by": "label", "score": "contribution", "output": 1}
    totals = [{row["label"]: row["total"] for row in store.totals(VECTOR, **asked)} for store in (sampled, whole)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-12, abs=1e-12)
    notes = sampled.query(VECTOR, layer=0, score="contribution", output=1).notes
    assert any("from all patterns" in note for note in notes) == (optimizer == "SGD")


def test_parts_keep_their_size_where_steps_between_have_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualstore.writer.FIRST_PART_BYTES", 1 << 12)
    monkeypatch.setattr("dualstore.writer.LAYER_PART_BYTES", 1 << 12)
    rows = make_rows(600, 1, np.arange(2, 60, 3))
    write_store(tmp_path / "store", [rows], rates=lambda step: [1 / 3 if step % 3 == 2 else 0.0])
    assert len(list((tmp_path / "store" / "patterns" / "layer=0").iterdir())) > 5

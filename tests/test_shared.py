"""Weights that several layers share, and biases that are sums: against torch itself."""

import re
from pathlib import Path

import numpy as np
import pytest
from numpy import ndarray

import dualstore
from tests.language import OPTIMIZERS, matrices, train

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("before", [0, 5])
def test_weights_and_outputs_follow_from_the_rows_of_all_layers_that_share_them(
    tmp_path: Path, name: str, *, tied: bool, before: int
) -> None:
    train(tmp_path, name, tied=tied, steps=100, before=before)
    found = dualstore.open(tmp_path).verify()
    assert found.ok, found.problems
    residuals = [value for layer in found.layers for value in (layer.weight_residual, layer.output_residual)]
    assert None not in residuals
    assert max(value for value in residuals if value is not None) <= 1e-12


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_as_of_a_step_are_those_of_then(tmp_path: Path, name: str) -> None:
    told, store = train(tmp_path, name), dualstore.open(tmp_path)
    for step in (0, 11, 12, 29):
        expected = matrices(told.kept[step + 1])
        for layer in store.layers:
            found = store.weights(layer.number, at_step=step)
            np.testing.assert_allclose(found.weight, expected[f"{layer.name}.weight"], **CLOSE)
            times = len(layer.bias_places)
            bias = times * expected[f"{layer.name}.bias"] if times else np.zeros(layer.d_out)
            np.testing.assert_allclose(found.bias, bias, **CLOSE)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_few_rows_of_a_shared_weight_at_a_time_give_the_same(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, name)
    store = dualstore.open(tmp_path)
    whole = [store.weights(number) for number in (0, 2)]
    monkeypatch.setattr(store, "options", dualstore.scan.Options(1, 1))
    for number, expected in zip((0, 2), whole, strict=True):
        np.testing.assert_allclose(store.weights(number).weight, expected.weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gains_reach_the_patterns_of_every_layer_that_shares_the_weight(tmp_path: Path, name: str) -> None:
    train(tmp_path, name)
    store = dualstore.open(tmp_path)
    plain, without, doubled = (store.weights(2, gains=gains).weight for gains in (None, {"label": {1: 0}}, {"label": {1: 2}}))
    assert np.abs(plain - without).max() > 1e-3
    np.testing.assert_allclose(doubled - plain, plain - without, **CLOSE)
    np.testing.assert_allclose(store.weights(0, gains={"label": {1: 0}}).weight, without.T, **CLOSE)
    masked = [store.weights(2, where=f"label = {label}").weight for label in range(3)]
    start = store.weights(2, where="label = 9").weight
    np.testing.assert_allclose(start + sum(found - start for found in masked), plain, **CLOSE)


def test_gains_of_a_shared_weight_are_those_of_torch_under_plain_momentum(tmp_path: Path) -> None:
    told = train(tmp_path, "SGD")
    c, last = factors(30), told.kept[0]["emb.weight"].copy()
    for number, turned in ((0, True), (2, False)):
        rows = told.rows[number]
        for step, label, x, e in zip(*(rows[key] for key in ("step", "label", "x", "e")), strict=True):
            factor = c[step] * (3 if label == 1 else 1)
            if turned:
                last[x] += factor * e
            else:
                last += factor * np.outer(e, x)
    found = dualstore.open(tmp_path).weights("head", gains={"label": {1: 3}})
    np.testing.assert_allclose(found.weight, last, **CLOSE)


def factors(steps: int, lr: float = 0.3, momentum: float = 0.9) -> ndarray:
    """Factors of the steps under momentum without decay, in closed form."""
    return -lr * (1 - momentum ** (steps - np.arange(steps))) / (1 - momentum)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at_step", [None, 13])
@pytest.mark.parametrize("layer", [0, 2])
def test_what_an_output_consists_of_says_what_the_other_layer_gives(
    tmp_path: Path, name: str, at_step: int | None, layer: int
) -> None:
    told = train(tmp_path, name)
    store = dualstore.open(tmp_path)
    found = store.query(layer=layer, test_id=4, score="contribution", output=1, top=10_000, at_step=at_step)
    number = r" (-?[0-9.]+(?:e-?[0-9]+)?)"
    text, number = found.notes[1], r"(-?[0-9.]+(?:e-?[0-9]+)?)"
    said = [
        f": {number} =",
        f"= {number} from the initial",
        f"{number} from all patterns",
        f"{number} from those of",
        f"{number} bias",
    ]
    total, start, own, other, bias = (float(re.findall(pattern, text)[0]) for pattern in said)
    assert f"from those of {2 - layer} ({['emb', 'mix', 'head'][2 - layer]}), which shares the weight" in text
    np.testing.assert_allclose(start + own + other + bias, total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own, sum(row["contribution"] for row in found), rtol=1e-4, atol=1e-5)
    kept = told.kept[-1 if at_step is None else at_step + 1]
    (x,) = store.sql(f"SELECT x, token FROM probes WHERE layer = {layer} AND test_id = 4 ORDER BY position DESC LIMIT 1")
    weight = kept["emb.weight"]
    value = weight[x["token"], 1] if layer == 0 else weight[1] @ x["x"] + kept["head.bias"][1]
    np.testing.assert_allclose(total, value, rtol=1e-4, atol=1e-5)

"""Layers recorded without errors: attention is all there is of them, and the rest is refused in a line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import dualstore
from dualstore.errors import DualstoreWarning, InexactError
from dualstore.store import Store
from tests.language import train

MESSAGE = r"layer 0 \(emb\) was recorded without errors \(keys_only\): expected errors for .*, found keys only"


@pytest.fixture(scope="module", params=["SGD", "AdamW"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """A store whose embedding has no errors, and one of the same run that has them."""
    paths = [tmp_path_factory.mktemp("stores") / kind for kind in ("keys", "whole")]
    for path, errors in zip(paths, (False, True), strict=True):
        train(path, request.param, tied=False, errors=errors)
    return dualstore.open(paths[0]), dualstore.open(paths[1])


def test_attention_is_that_of_a_layer_with_errors(pair: tuple[Store, Store]) -> None:
    for number in (0, 1):
        found, expected = (store.query(test_id=[3, 4], layer=number, per="label", top=30).to_dicts() for store in pair)
        assert found == expected
        found, expected = (store.totals(test_id=3, layer=number, by="task").to_dicts() for store in pair)
        assert found == expected
        text = "SELECT * FROM attention WHERE label = 1"
        found, expected = (store.sql(text, layer=number, test_id=3).to_dicts() for store in pair)
        assert found == expected
    assert pair[0].votes().to_dicts() == pair[1].votes().to_dicts()
    (row,) = pair[0].sql("SELECT count(e) AS e, count(token) AS token FROM patterns WHERE layer = 0").to_dicts()
    assert row == {"e": 0, "token": 360}


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.query(test_id=3, layer=0, score="contribution", output=1),
        lambda store: store.query(test_id=3, layer=0, score="influence"),
        lambda store: store.totals(test_id=3, layer=None, score="influence"),
        lambda store: store.totals(test_id=[3, 4], layer=0, score="influence", pool="mean"),
        lambda store: store.sql("SELECT 1 FROM attention", test_id=3, layer=0, score="influence"),
        lambda store: store.self_influence(),
        lambda store: store.weights(0),
        lambda store: store.evaluate({"label": {1: [0, 1]}}),
        lambda store: store.weights("emb", gains={"label": {1: 0}}),
    ],
)
def test_values_are_refused(pair: tuple[Store, Store], ask: Any) -> None:
    with pytest.raises(InexactError, match=MESSAGE):
        ask(pair[0])


def test_values_of_the_other_layers_are_there(pair: tuple[Store, Store]) -> None:
    found, expected = (store.query(test_id=3, layer=1, score="influence").to_dicts() for store in pair)
    assert found == expected
    np.testing.assert_array_equal(pair[0].weights(2).weight, pair[1].weights(2).weight)


def test_values_of_a_layer_that_shares_the_weight_are_refused(tmp_path: Path) -> None:
    train(tmp_path, "SGD", tied=True, errors=False)
    store = dualstore.open(tmp_path)
    message = r"layer 0 \(emb\) was recorded without errors \(keys_only\), and shares the weight of layer 2 \(head\)"
    with pytest.raises(InexactError, match=message):
        store.weights(2)
    found = store.verify()
    assert found.ok, found.problems
    assert ["shares the weight" in layer.note for layer in found.layers] == [False, False, True]


def test_verify_says_that_nothing_can_be_proven(pair: tuple[Store, Store]) -> None:
    found = pair[0].verify()
    assert found.ok, found.problems
    first, *others = found.layers
    assert (first.weight_residual, first.output_residual, first.rows) == (None, None, 360)
    assert first.note == "layer 0 (emb) was recorded without errors (keys_only): its values cannot be proven"
    assert all(layer.weight_residual is not None and layer.weight_residual < 1e-12 and not layer.note for layer in others)


def test_parameters_of_other_layers_are_written(pair: tuple[Store, Store], tmp_path: Path) -> None:
    with pytest.warns(DualstoreWarning, match=r"layer 0 \(emb\) was recorded without errors .* its parameters are left out"):
        pair[0].write_weights(tmp_path / "w.safetensors")
    assert set(load_file(tmp_path / "w.safetensors")) == {"a", "b", "b_1", "b_2", "head.weight", "head.bias"}


def test_a_layer_of_vectors_may_lack_errors_too(tmp_path: Path) -> None:
    train(tmp_path, "SGD", tied=False, errors=False, dense=True)
    store = dualstore.open(tmp_path)
    assert store.verify().ok
    store.build_index()
    assert store.query(test_id=4, layer=0, top=3).to_dicts()[0]["alpha"] == 1
    with pytest.raises(InexactError, match=MESSAGE):
        store.query(test_id=3, layer=0, score="contribution", output=1)

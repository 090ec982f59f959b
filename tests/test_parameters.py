"""From weights of layers back to the parameters of the model: turned round, in rows of larger ones, side by side."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import dualstore
from dualstore.errors import DamagedError, DualstoreWarning
from dualstore.parameters import parameters_of
from dualstore.schema import Layer, Place
from dualstore.weights import Affine
from tests.language import OPTIMIZERS, train


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_written_weights_are_the_parameters_of_the_model(tmp_path: Path, name: str) -> None:
    told = train(tmp_path / "store", name)
    dualstore.open(tmp_path / "store").write_weights(tmp_path / "w.safetensors")
    found, last = load_file(tmp_path / "w.safetensors"), told.kept[-1]
    assert set(found) == set(last)
    for parameter in ("emb.weight", "a", "b", "head.bias"):
        np.testing.assert_allclose(found[parameter], last[parameter], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found["b_1"], last["b_1"] + last["b_2"], rtol=1e-10, atol=1e-12)
    assert not found["b_2"].any()


def test_rows_of_a_larger_parameter_are_put_together() -> None:
    whole = np.random.default_rng(0).normal(size=(9, 2, 2))
    bias = np.arange(9.0)
    places = [((3 * n, 3 * n + 3), Place("in.weight", (3 * n, 3 * n + 3), shape=(9, 2, 2))) for n in range(3)]
    layers = [
        Layer(n, f"q{n}", "Linear", 4, 3, True, 0, 0, weight=(place,), biases=(Place("in.bias", rows, shape=(9,)),))
        for n, (rows, place) in enumerate(places)
    ]
    parts = [Affine(whole[slice(*rows)].reshape(3, 4), bias[slice(*rows)]) for rows, _ in places]
    found = parameters_of(layers, parts)
    assert set(found) == {"in.weight", "in.bias"}
    np.testing.assert_array_equal(found["in.weight"], whole)
    np.testing.assert_array_equal(found["in.bias"], bias)


def test_a_parameter_that_is_not_covered_whole_is_left_out_with_a_warning() -> None:
    place = Place("in.weight", (3, 6), shape=(9, 2))
    layer = Layer(0, "k", "Linear", 2, 3, False, 0, -1, weight=(place,))
    with pytest.warns(DualstoreWarning, match=r"'in.weight': 6 of 9 rows belong to no recorded layer; it is left out"):
        assert parameters_of([layer], [Affine(np.ones((3, 2)), np.zeros(3))]) == {}


def test_columns_of_parameters_side_by_side_are_taken_apart() -> None:
    weight = np.random.default_rng(1).normal(size=(3, 7))
    places = (Place("hh", shape=(3, 3)), Place("ih", transposed=True, shape=(4, 3)))
    layer = Layer(0, "cell", "LSTM", 7, 3, True, 0, 0, weight=places, biases=(Place("b_ih"), Place("b_hh")))
    found = parameters_of([layer], [Affine(weight, np.arange(3.0))])
    np.testing.assert_array_equal(found["hh"], weight[:, :3])
    np.testing.assert_array_equal(found["ih"], weight[:, 3:].T)
    assert found["b_ih"].tolist() == [0, 1, 2]
    assert found["b_hh"].tolist() == [0, 0, 0]


def test_a_place_of_another_shape_is_damage() -> None:
    layer = Layer(0, "fc", "Linear", 2, 3, False, 0, -1, weight=(Place("w", shape=(4, 2)),))
    with pytest.raises(DamagedError, match=r"layer 0 \(fc\): place in 'w': expected \(3, 2\), found \(4, 2\); correct store.json"):
        parameters_of([layer], [Affine(np.ones((3, 2)), np.zeros(3))])

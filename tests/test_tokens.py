"""Layers of tokens: every answer is that of a store which has the same keys as vectors, and of a few lines of numpy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy import ndarray

import dualstore
from dualstore import keys
from dualstore.errors import DamagedError, QueryError
from dualstore.schema import Layer, StoreInfo
from dualstore.store import Store
from dualstore.writer import StoreWriter
from tests.language import OPTIMIZERS, TOKENS, WIDTH, train
from tests.reference import group_row

RARE = 9
"""A token that never comes."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Store, Store]]:
    """For each optimiser the store and its twin of vectors."""
    found = {}
    for name in OPTIMIZERS:
        paths = [tmp_path_factory.mktemp("stores") / kind for kind in ("tokens", "vectors")]
        for path, dense in zip(paths, (False, True), strict=True):
            train(path, name, tied=True, dense=dense)
        found[name] = (dualstore.open(paths[0]), dualstore.open(paths[1]))
    return found


def assert_same(found: dualstore.Result, expected: dualstore.Result) -> None:
    assert found.columns == expected.columns
    assert found.title.split(":")[0] == expected.title.split(":")[0]
    assert found.notes == expected.notes
    for got, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            assert got[name] == (pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value), (got, wanted)


def vectors(tokens: Any) -> ndarray:
    return np.eye(TOKENS)[tokens]


QUESTIONS: list[dict[str, Any]] = [
    {},
    {"bottom": True},
    {"absolute": True, "top": 500},
    {"where": "task = 'odd' AND sample_id > 5", "top": 7},
    {"per": "label", "top": 3},
    {"per": "step // 7", "where": "label <> 1", "top": 2, "at_step": 20},
    {"min_alpha": 0.5, "top": 1000},
]
VALUED: list[dict[str, Any]] = [
    {"score": "contribution", "output": 1},
    {"score": "contribution", "output": 3, "bottom": True, "where": "label = 2", "top": 5},
    {"score": "contribution", "output": 0, "absolute": True, "per": "label", "top": 4, "at_step": 17},
    {"score": "influence", "top": 9},
    {"score": "influence", "absolute": True, "per": "task"},
]


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
@pytest.mark.parametrize("asked", [3, RARE, [5, 3, 5], [0]], ids=str)
def test_a_query_by_tokens_is_that_by_their_vectors(stores: dict[str, Any], question: dict[str, Any], asked: Any) -> None:
    tokens, twin = stores["SGD"]
    assert_same(tokens.query(asked, layer=0, **question), twin.query(vectors(asked), layer=0, **question))


@pytest.mark.parametrize("question", QUESTIONS + VALUED, ids=str)
@pytest.mark.parametrize("name", ["SGD, all", "AdamW"])
@pytest.mark.parametrize("asked", [4, [4, 2, 7]], ids=str)
def test_a_query_by_probes_is_that_by_their_vectors(
    stores: dict[str, Any], name: str, question: dict[str, Any], asked: Any
) -> None:
    for position in (0, None):
        found, expected = (s.query(test_id=asked, layer=0, position=position, **question) for s in stores[name])
        assert_same(found, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pool", ["mean", "sum"])
@pytest.mark.parametrize("score", [{}, {"score": "influence"}, {"score": "contribution", "output": 2}], ids=str)
def test_pooled_questions_are_those_of_vectors(stores: dict[str, Any], name: str, pool: str, score: dict[str, Any]) -> None:
    found, expected = (s.query(test_id=[1, 5, 6], layer=0, pool=pool, top=30, **score) for s in stores[name])
    assert_same(found, expected)
    found, expected = (s.totals(test_id=[1, 5, 6], layer=0, pool=pool, **score) for s in stores[name])
    assert_same(found, expected)


def test_alpha_is_one_where_the_token_is_the_same_and_ties_are_in_the_order_of_the_log(tmp_path: Path) -> None:
    told, store = train(tmp_path, "SGD"), dualstore.open(tmp_path)
    rows = told.rows[0]
    order = np.lexsort((rows["position"], rows["sample_id"], rows["step"], -(rows["x"] == 3).astype(int)))[:60]
    found = store.query(3, layer="emb", top=60).to_dicts()
    for name in ("step", "sample_id", "position"):
        assert [row[name] for row in found] == rows[name][order].tolist()
    assert [row["alpha"] for row in found] == (rows["x"][order] == 3).astype(float).tolist()


TOTALS: list[dict[str, Any]] = [
    {"by": "label"},
    {"by": "", "where": "label = 1"},
    {"by": "task, step // 10", "absolute": True},
    {"by": "sample_id", "score": "influence"},
    {"by": "label", "score": "contribution", "output": 2, "at_step": 9},
]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("budget", [1 << 20, 1 << 28])
def test_totals_sql_and_self_influence_are_those_of_vectors(stores: dict[str, Any], name: str, budget: int) -> None:
    pair = [dualstore.open(store.path, budget_bytes=budget) for store in stores[name]]
    for question in TOTALS:
        assert_same(*(store.totals(test_id=[2, 6], layer=0, **question) for store in pair))
    assert_same(*(store.totals(test_id=3, layer=None, by="label", score="influence") for store in pair))
    text = "SELECT label, sum(alpha) AS a, sum(influence) AS i FROM attention GROUP BY label ORDER BY label"
    assert_same(*(store.sql(text, layer=0, test_id=3, score="influence") for store in pair))
    assert_same(*(store.self_influence() for store in pair))
    assert_same(*(store.votes() for store in pair))
    assert_same(*(store.votes(where="step > 20 AND label <> 0") for store in pair))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_under_gains_are_those_of_vectors(stores: dict[str, Any], name: str) -> None:
    for options in ({}, {"gains": {"label": {1: 0.3}}, "with_initial": True}, {"gains": {"task": {"odd": 2}}, "at_step": 12},
                    {"average": dualstore.Average(first=4, every=3)}):  # fmt: skip
        found, expected = (store.weights(0, **options) for store in stores[name])  # type: ignore[arg-type]
        np.testing.assert_allclose(found.weight, expected.weight, rtol=1e-11, atol=1e-13)


def test_accuracy_under_gains_begins_with_the_rows_of_the_table(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    layers = (
        Layer(0, "emb", "Embedding", 6, 3, False, 0, -1, keys="token"),
        Layer(1, "fc", "Linear", 3, 4, False, 0, -1),
    )
    start = {"emb.weight": random.normal(size=(3, 6)), "fc.weight": random.normal(size=(4, 3))}
    x, e = random.integers(0, 6, 40).astype(np.int32), [random.normal(size=(40, width)) for width in (3, 4)]
    hidden, label = random.normal(size=(40, 3)), (np.arange(40) % 4).astype(np.int32)
    zero = np.zeros(40, np.int32)
    writer = StoreWriter(tmp_path, StoreInfo(layers, "float64", "SGD", True))
    writer.write_weights("initial", start)
    for layer, key, error in zip(layers, (x, hidden), e, strict=True):
        writer.add_patterns(layer, {"sample_id": np.arange(40), "position": zero, "label": label, "task": zero}, key, error)
    writer.end_step([group_row(0)])
    known = np.arange(6, dtype=np.int32)
    between = start["emb.weight"].T
    for layer, key, y in zip(layers, (known, between), (between, between @ start["fc.weight"].T), strict=True):
        rows = {"test_id": np.arange(6), "position": 0 * known, "step": 0 * known, "label": known % 4, "task": 0 * known}
        writer.write_probes(layer, {**rows, "predicted": 0 * known}, key, y)
    writer.close()
    writer.save_info(status="complete")
    for row in dualstore.open(tmp_path).evaluate({"label": {1: [0.0, 1.0, 5.0]}}):
        factors = np.where(label == 1, row["label=1"], 1.0)[:, None]
        table = start["emb.weight"] - 0.1 * (factors * e[0]).T @ np.eye(6)[x]
        weight = start["fc.weight"] - 0.1 * (factors * e[1]).T @ hidden
        assert row["accuracy"] == pytest.approx(((weight @ table).argmax(axis=0) == known % 4).mean())


def test_patterns_and_probes_have_a_column_for_tokens(tmp_path: Path) -> None:
    told, store = train(tmp_path, "SGD"), dualstore.open(tmp_path)
    found = store.sql("SELECT token, e, x FROM patterns WHERE layer = 0 ORDER BY step, sample_id, position").to_dicts()
    rows = told.rows[0]
    order = np.lexsort((rows["position"], rows["sample_id"], rows["step"]))
    assert [row["token"] for row in found] == rows["x"][order].tolist()
    assert all(row["x"] is None and len(row["e"]) == WIDTH for row in found)
    counts = "SELECT layer, count(x) AS x, count(token) AS token FROM {} GROUP BY layer ORDER BY layer"
    assert [tuple(row.values()) for row in store.sql(counts.format("patterns"))] == [(0, 0, 360), (1, 180, 0), (2, 180, 0)]
    assert [tuple(row.values()) for row in store.sql(counts.format("probes"))] == [(0, 0, 22), (1, 11, 0), (2, 11, 0)]
    assert [layer["keys"] for layer in store.info()["layers"]] == ["token", "vector", "vector"]


def test_there_is_nothing_of_tokens_to_be_indexed(tmp_path: Path) -> None:
    train(tmp_path, "SGD")
    store = dualstore.open(tmp_path)
    done: list[tuple[int, int]] = []
    before = store.totals(test_id=3, layer=0).to_dicts()
    store.build_index(lambda *rows: done.append(rows))
    assert done[-1] == (3 * 720, 3 * 720)
    assert not (tmp_path / "index" / "layer=0").exists()
    assert store.totals(test_id=3, layer=0).to_dicts() == before
    explain = store.query(test_id=3, layer=0).explain
    assert explain is not None
    assert explain.to_dict()["path"] == "scan"
    assert explain.to_dict()["bytes_read"] == 4 * 360


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (-1, r"layer 0 \(emb\): expected tokens from 0 to 10, found -1"),
        ([3, TOKENS], "expected tokens from 0 to 10, found 11"),
        (2.5, "expected a token, a whole number from 0 to 10, or a list of them, found 2.5"),
        ([1.0, 2.0], r"found float64 of shape \(2,\)"),
        (True, "whole number from 0 to 10, or a list of them, found True"),
        ("3", "found '3'"),
        ([], r"of shape \(0,\)"),
        ([[1, 2]], r"of shape \(1, 2\)"),
        ([[1], [1, 2]], "expected tokens"),
    ],
)
def test_what_is_no_token_is_refused(stores: dict[str, Any], asked: Any, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        stores["SGD"][0].query(asked, layer=0)


def test_a_token_that_the_layer_does_not_have_is_damage(tmp_path: Path) -> None:
    train(tmp_path, "SGD")
    text = (tmp_path / "store.json").read_text().replace(f'"d_in": {TOKENS}', '"d_in": 5', 1)
    (tmp_path / "store.json").write_text(text)
    found = dualstore.open(tmp_path).verify()
    assert not found.ok
    store = dualstore.open(tmp_path)
    with pytest.raises(DamagedError, match=r"layer 0 \(emb\): expected tokens from 0 to 4, found 0 to 8"):
        store.weights(2)


@pytest.mark.parametrize("seed", range(5))
def test_products_with_tokens_are_those_with_their_vectors(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens, wide = random.integers(-1, 6, 20), random.normal(size=(20, 4))
    plain = np.vstack([np.eye(6), np.zeros(6)])[tokens]
    matrix, factors = random.normal(size=(3, 6)), random.normal(size=20)
    np.testing.assert_allclose(keys.through(tokens, matrix), plain @ matrix.T)
    for e, x, expected in (
        (wide, tokens, (wide * factors[:, None]).T @ plain),
        (tokens, wide, (plain * factors[:, None]).T @ wide),
    ):
        total = np.ones(expected.shape)
        keys.add_products(total, e, x, factors)
        np.testing.assert_allclose(total, 1 + expected, rtol=1e-12, atol=1e-14)
    known = np.array([1, 4])
    np.testing.assert_array_equal(keys.units(tokens, known, "float64"), plain[:, known])
    np.testing.assert_array_equal(keys.units(keys.values_of(tokens, known), np.arange(2), "float64"), plain[:, known])

"""Keys that come again: each is read once, its alphas are the same bits, and what is noted of it is believed while it fits."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy import ndarray

import dualstore
from dualstore import repeats, totals
from dualstore.store import Store
from tests.reference import Rows, write_store


def store_of(path: Path, rows: Rows, **settings: Any) -> Store:
    write_store(path, [rows, rows], tasks=("a", "b"), **settings)
    return dualstore.open(path)


def answers(store: Store, query: ndarray, by: str, where: str | None, absolute: bool) -> dict[Any, tuple[float, int]]:
    """Total and count of each group."""
    found = store.totals(query, layer=1, by=by, where=where, absolute=absolute).to_dicts()
    return {tuple(row.values())[:-2]: (row["total"], row["count"]) for row in found}


def assert_same(found: dict[Any, tuple[float, int]], expected: dict[Any, tuple[float, int]]) -> None:
    """Equal counts, and totals but for the order of their summation."""
    assert found.keys() == expected.keys()
    for group, (total, count) in expected.items():
        assert found[group] == (pytest.approx(total, rel=1e-12), count)


QUERY = np.array([1, -2, 0.5], np.float32)


def visits(count: int, epochs: int, seed: int, *, drift: float = 0.0) -> Rows:
    """Rows of `count` samples, each seen once an epoch with the same key, unless keys drift."""
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(count) for _ in range(epochs)])
    keys = rng.normal(size=(count, 3)).astype(np.float32)
    total = count * epochs
    return Rows(
        step=(np.arange(total) // 20).astype(np.int32),
        sample_id=order * 7 - 50,
        position=np.zeros(total, np.int32),
        label=(order % 3).astype(np.int32),
        task=(order % 2).astype(np.int32),
        x=keys[order] + (drift * np.arange(total)[:, None]).astype(np.float32),
        e=np.zeros((total, 1), np.float32),
    )


@pytest.mark.parametrize("by", ["label", "sample_id", "step // 7", "alpha > 0", ""])
@pytest.mark.parametrize("where", [None, "step > 9", "sample_id % 2 = 0 AND step < 20", "false"])
def test_keys_that_come_again_are_read_once(tmp_path: Path, by: str, where: str | None) -> None:
    rows = visits(90, 6, 0)
    store = store_of(tmp_path / "store", rows, flush_every=4)
    expected = answers(store, QUERY, by, where, True)
    sql = "SELECT step, sample_id, alpha FROM attention ORDER BY ALL"
    alphas = store.sql(sql, layer=1, x=QUERY).to_dicts()
    store.build_index()
    assert list((tmp_path / "store" / "index" / "layer=1").glob("*.repeats.arrow"))
    found = store.totals(QUERY, layer=1, by=by, where=where, absolute=True)
    assert found.explain is not None
    assert found.explain.rows_read <= 200  # of 540
    assert_same(answers(store, QUERY, by, where, True), expected)
    assert store.sql(sql, layer=1, x=QUERY).to_dicts() == alphas  # the very bits


@pytest.mark.parametrize("budget", [1 << 20, 1 << 28])
def test_several_queries_have_alphas_of_their_own(tmp_path: Path, budget: int) -> None:
    store = store_of(tmp_path / "store", visits(90, 6, 0), flush_every=4)
    store.build_index()
    store = dualstore.open(store.path, budget_bytes=budget)
    queries = np.stack([QUERY, -QUERY, QUERY[::-1]])
    found = store.totals(queries, layer=1, by="sample_id").to_dicts()
    for number, query in enumerate(queries):
        alone = store.totals(query, layer=1, by="sample_id").to_dicts()
        assert [{"query": number, **row} for row in alone] == [row for row in found if row["query"] == number]


def test_the_log_is_passed_once_for_several_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path / "store", visits(90, 6, 0), flush_every=4)
    passes = []
    whole = totals.pieces
    monkeypatch.setattr(totals, "pieces", lambda *args, **named: passes.append(args) or whole(*args, **named))
    store.totals(np.stack([QUERY] * 8), layer=1, by="sample_id")
    assert len(passes) == 1


@pytest.mark.parametrize("change", ["earlier part", "own part", "damaged", "gone"])
def test_what_is_noted_of_repeats_is_believed_only_with_all_parts_it_refers_to(tmp_path: Path, change: str) -> None:
    rows = visits(90, 6, 0)
    store = store_of(tmp_path / "store", rows, flush_every=4)
    store.build_index()
    files = sorted((tmp_path / "store" / "index" / "layer=1").glob("*.repeats.arrow"))
    parts = sorted((tmp_path / "store" / "patterns" / "layer=1").iterdir())
    if change == "damaged":
        data = bytearray(files[0].read_bytes())
        data[len(data) // 2] ^= 0x10
        files[0].write_bytes(data)
    elif change == "gone":
        files[0].unlink()
    else:
        part = parts[0] if change == "earlier part" else parts[-1]
        with pq.ParquetFile(part) as file:
            table = file.read()
        values = table.column("x").to_pylist()
        values[3] = [5.0, 6.0, 7.0]
        column = table.schema.get_field_index("x")
        changed = table.set_column(column, table.schema.field("x"), pa.array(values, table.schema.field("x").type))
        pq.write_table(changed, part, compression="none", use_dictionary=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = dualstore.open(tmp_path / "store")
        found = answers(opened, QUERY, "sample_id", None, True)
        shutil.rmtree(tmp_path / "store" / "index")
        expected = answers(dualstore.open(tmp_path / "store"), QUERY, "sample_id", None, True)
    assert_same(found, expected)


def test_keys_that_drift_are_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_TRIES", 30)
    store = store_of(tmp_path / "store", visits(90, 6, 0, drift=1e-3), flush_every=4)
    store.build_index()
    assert not list((tmp_path / "store" / "index").rglob("*.repeats.arrow"))
    some = visits(90, 6, 0)
    some.x[300:] += 1  # learnt late: what was noted before goes away, too
    other = store_of(tmp_path / "other", some, flush_every=4)
    other.build_index()
    expected = answers(other, QUERY, "label", None, True)
    shutil.rmtree(tmp_path / "other" / "index")
    assert_same(answers(other, QUERY, "label", None, True), expected)


def test_only_so_many_keys_are_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_KEYS", 40)
    store = store_of(tmp_path / "store", visits(90, 6, 0), flush_every=4)
    expected = answers(store, QUERY, "label", None, True)
    store.build_index()
    found = store.totals(QUERY, layer=1, by="label", absolute=True)
    assert found.explain is not None
    assert 90 + 40 < found.explain.rows_read < 540
    assert_same(answers(store, QUERY, "label", None, True), expected)

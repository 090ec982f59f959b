"""Row columns beyond the names of a pattern: slot and duplicate in conditions and groups, with and without an index."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import dualstore
from dualstore.errors import QueryError
from dualstore.store import Store
from tests import reference
from tests.reference import Rows, write_store

RANDOM = np.random.default_rng(3)
ROWS = Rows(
    step=np.repeat(np.arange(5), 40).astype(np.int32),
    sample_id=RANDOM.integers(0, 50, 200),
    position=np.zeros(200, np.int32),
    label=RANDOM.integers(0, 3, 200).astype(np.int32),
    task=np.zeros(200, np.int32),
    x=RANDOM.integers(-3, 4, (200, 6)).astype(np.float32),
    e=np.ones((200, 2), np.float32),
    slot=np.tile(np.arange(40), 5).astype(np.int32),
    duplicate=(RANDOM.random(200) < 0.2).astype(np.int32),
)
QUERY = np.arange(1, 7, dtype=np.float32)
NONE = np.zeros(0, np.int32)
ALPHA = ROWS.x.astype(np.float64) @ QUERY


@pytest.fixture(params=["scan", "index"])
def store(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    write_store(tmp_path / "store", [ROWS], tasks=("t",), flush_every=2)
    store = dualstore.open(tmp_path / "store")
    if request.param == "index":
        monkeypatch.setattr("dualstore.sums.ROWS_PER_CELL", 1)
        store.build_index()
    return store


def test_duplicates_can_be_left_out_of_totals_and_be_a_group(store: Store) -> None:
    kept = ROWS.duplicate == 0
    found = {row["label"]: (row["total"], row["count"]) for row in store.totals(QUERY, layer=0, where="duplicate = 0")}
    assert found == {n: (ALPHA[kept & (ROWS.label == n)].sum(), (kept & (ROWS.label == n)).sum()) for n in range(3)}
    both = {row["duplicate"]: row["total"] for row in store.totals(QUERY, layer=0, by="duplicate")}
    assert both == {0: ALPHA[kept].sum(), 1: ALPHA[~kept].sum()}
    for asked in ({"by": "label", "where": "duplicate = 0"}, {"by": "slot"}, {"by": "duplicate + 1 AS n, label"}):
        explain = store.totals(QUERY, layer=0, **asked).explain  # type: ignore[arg-type]
        assert explain is not None
        assert not explain.counts, "cells do not know of slots and duplicates"


def test_slots_and_duplicates_filter_a_ranking_but_are_not_shown(store: Store) -> None:
    kept = (ROWS.slot < 20) & (ROWS.duplicate == 0)
    best = reference.top_k(ROWS, QUERY, 7, kept=kept)
    found = store.query(QUERY, layer=0, top=7, where="slot < 20 AND duplicate = 0")
    assert [(row["step"], row["sample_id"], row["alpha"]) for row in found] == [
        (ROWS.step[i], ROWS.sample_id[i], ALPHA[i]) for i in best
    ]
    assert found.columns == ["rank", "alpha", "step", "epoch", "sample_id", "position", "label", "task"]
    grouped = store.query(QUERY, layer=0, top=1, per="duplicate").to_dicts()
    assert [row["group"] for row in grouped] == [0, 1]


def test_sql_knows_slots_and_duplicates(store: Store) -> None:
    text = "SELECT sum(duplicate)::INT AS n, max(slot) AS last FROM {}"
    for relation in ("patterns", "attention"):
        found = store.sql(text.format(relation), layer=0, x=QUERY).to_dicts()
        assert found == [{"n": ROWS.duplicate.sum(), "last": 39}]


def test_a_store_of_an_earlier_format_has_neither(tmp_path: Path) -> None:
    write_store(tmp_path, [replace(ROWS, slot=NONE, duplicate=NONE)], tasks=("t",))
    for part in (tmp_path / "patterns").rglob("*.parquet"):
        pq.write_table(pq.ParquetFile(part).read().drop_columns(["slot", "duplicate"]), part)
    info = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps(info | {"format": 2}))
    store = dualstore.open(tmp_path)
    assert sum(row["total"] for row in store.totals(QUERY, layer=0)) == ALPHA.sum()
    for column in ("slot", "duplicate"):
        with pytest.raises(QueryError, match=f"{column}.*columns: step, epoch, sample_id, position, label, task$"):
            store.query(QUERY, layer=0, where=f"{column} = 0")
    assert store.sql("SELECT DISTINCT slot, duplicate FROM patterns").to_dicts() == [{"slot": None, "duplicate": None}]
    assert "slot" not in store.sql("SELECT * FROM attention", layer=0, x=QUERY).columns

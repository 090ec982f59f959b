"""Sketches: every bound holds, searches read few keys of data that lies near a subspace, and give up where they would not."""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

import dualstore
from dualstore import sketch
from dualstore.errors import DualstoreWarning
from dualstore.index import LayerIndex
from dualstore.log import Log
from dualstore.sketch import Asked, Projected, build_sketches, read_sketches
from dualstore.store import Store
from tests.reference import Rows, write_store

KINDS = ["low rank", "normal", "graded", "huge", "tiny", "nonfinite", "zeros", "one direction", "repeated"]


def make_keys(kind: str, count: int, width: int, seed: int) -> ndarray:
    rng = np.random.default_rng([seed, count, width])
    x = rng.normal(size=(count, width))
    if kind == "low rank":
        x = np.abs(rng.normal(size=(count, 2))) @ np.abs(rng.normal(size=(2, width))) + 1e-3 * x
    if kind == "graded":
        x *= 10.0 ** rng.uniform(-6, 6, (count, width))
    if kind == "huge":
        x *= 1e30
    if kind == "tiny":
        x *= 1e-40
    if kind == "nonfinite":
        x[rng.random((count, width)) < 0.05] = rng.choice([np.nan, np.inf, -np.inf])
    if kind == "zeros":
        x *= rng.random((count, 1)) < 0.5
    if kind == "one direction":
        x = rng.normal(size=(count, 1)) * x[:1]
    if kind == "repeated":
        x = x[rng.integers(0, 3, count)]
    return x


def rows_of(x: ndarray, steps: int = 8) -> Rows:
    count = len(x)
    rng = np.random.default_rng(count)
    return Rows(
        step=np.sort(np.append(np.arange(steps), rng.integers(0, steps, count - steps))).astype(np.int32),
        sample_id=rng.integers(0, 50, count),
        position=np.zeros(count, np.int32),
        label=rng.integers(0, 3, count).astype(np.int32),
        task=np.zeros(count, np.int32),
        x=x,
        e=np.zeros((count, 1), x.dtype),
    )


def store_of(path: Path, x: ndarray, **options: Any) -> Store:
    with np.errstate(all="ignore"):
        write_store(path, [rows_of(x)], tasks=("t",), **options)
    return dualstore.open(path)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    asked=st.sampled_from(KINDS[:3] + KINDS[6:]),
    count=st.integers(8, 120),
    width=st.sampled_from([1, 2, 7, 40, 130]),
    values=st.sampled_from([1, 3, 25]),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 99),
)
def test_no_alpha_is_above_its_bound(
    tmp_path_factory: pytest.TempPathFactory, kind: str, asked: str, count: int, width: int, values: int, dtype: Any, seed: int
) -> None:
    path = tmp_path_factory.mktemp("bounds") / "store"
    with np.errstate(all="ignore"):
        keys = make_keys(kind, count, width, seed).astype(dtype)
    queries = np.concatenate([make_keys(asked, 3, width, seed + 1), keys[:2]]).astype(dtype)
    queries = np.nan_to_num(queries, nan=1.0, posinf=1.0, neginf=-1.0)
    queries = queries / np.maximum(np.abs(queries).max(axis=1, keepdims=True), np.finfo(dtype).tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sketch, "_KEY_VALUES", values)
        patch.setattr(sketch, "_TILE_ROWS", 16)
        store = store_of(path, keys)
        index = store.index(store.layer(0))
        build_sketches(index, width, 1 << 28)
        (found,) = read_sketches(index, width)
    shutil.rmtree(path)
    bounds = Asked.of(found, Projected.of(queries, found.basis)).bounds(0, count)
    with np.errstate(all="ignore"):
        alphas = keys[found.row].astype(np.longdouble) @ queries.T.astype(np.longdouble)
        norms = np.sqrt(np.square(keys[found.row].astype(np.longdouble)).sum(axis=1))
    assert not (bounds < alphas).any()
    assert not (found.norm < norms).any()
    assert (np.diff(found.norm[np.isfinite(found.norm)]) <= 0).all()
    if kind == "low rank" and width >= 40 and values < 25:
        sizes = norms[:, None] * np.linalg.norm(queries, axis=1)
        assert (np.abs(bounds - alphas) <= 0.02 * sizes)[sizes > 0].mean() > 0.9  # or the bound would be true and useless


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of 60 values: two coordinates, 300 rows a segment."""
    monkeypatch.setattr(sketch, "SEGMENT_BYTES", 300 * 20)
    monkeypatch.setattr("dualstore.part.MAX_GROUP_ROWS", 64)


def fields(found: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in found.to_dicts()]


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("order", [{}, {"bottom": True}, {"absolute": True}, {"min_alpha": 40.0}, {"per": "label"}], ids=str)
@pytest.mark.parametrize("where", [None, "label = 1", "step > 5 AND sample_id < 3", "false"])
@pytest.mark.parametrize("top", [1, 20, 500])
def test_a_search_gives_the_rows_of_the_scan(tmp_path: Path, top: int, where: str | None, order: dict[str, Any]) -> None:
    keys = make_keys("low rank", 2000, 60, 0).astype(np.float32)
    store = store_of(tmp_path / "store", keys, flush_every=3)
    queries = np.abs(np.random.default_rng(5).normal(size=(4, 60))).astype(np.float32)
    asked: dict[str, Any] = {"layer": 0, "top": top, "where": where, **order}
    single, several = fields(store.query(queries[0], **asked)), fields(store.query(queries, **asked))
    store.build_index()
    assert fields(store.query(queries[0], **asked)) == single
    assert fields(store.query(queries, **asked)) == several


def test_a_search_reads_few_keys_and_says_so(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", make_keys("low rank", 30_000, 60, 0).astype(np.float32), flush_every=3)
    query = np.ones(60, np.float32)
    scan = store.query(query, layer=0, top=5).explain
    store.build_index()
    found = store.query(query, layer=0, top=5).explain
    assert scan is not None
    assert found is not None
    assert (scan.path, scan.rows_read) == ("scan", 30_000)
    assert found.path == "index and scan"
    assert found.rows_read < 300
    assert found.to_dict()["share"] < 0.2
    for asked in ({"per": "label"}, {"absolute": True}, {"min_alpha": found.key_bytes / 4, "top": 3}, {"where": "label = 1"}):
        cost = store.query(query, layer=0, **{"top": 5, **asked}).explain  # type: ignore[arg-type]
        assert cost is not None
        assert cost.rows_read < 1000


def test_a_search_that_would_read_most_keys_gives_up(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).choice([-1.0, 1.0], (100_000, 30)).astype(np.float32)  # all of one norm, in no subspace
    store = store_of(tmp_path / "store", keys)
    query = np.random.default_rng(1).normal(size=30)
    expected = fields(store.query(query, layer=0))
    store.build_index()
    found = store.query(query, layer=0)
    assert fields(found) == expected
    assert found.explain is not None
    assert found.explain.counts["searches given up"] == 1


def test_segments_share_a_basis_until_the_keys_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query is projected once for all segments whose keys lie alike."""
    monkeypatch.setattr(sketch, "SEGMENT_BYTES", 400 * 20)
    alike = make_keys("low rank", 800, 60, 0)
    other = make_keys("low rank", 400, 60, 9)[:, ::-1]
    rows = rows_of(np.concatenate([alike, other]).astype(np.float32), steps=12)
    rows.step = np.repeat(np.arange(12), 100).astype(np.int32)
    write_store(tmp_path / "store", [rows], flush_every=4)
    store = dualstore.open(tmp_path / "store")
    store.build_index()
    found = read_sketches(store.index(store.layer(0)), 60)
    assert len(found) == 3
    assert found[0].basis is found[1].basis
    assert found[1].basis is not found[2].basis


def sketched(path: Path, count: int = 900) -> tuple[Store, list[Path]]:
    """A store with its index, and the files of the sketches in the order of the log."""
    store = store_of(path, make_keys("low rank", count, 60, 0).astype(np.float32), flush_every=3)
    store.build_index()
    return store, sorted((path / "index" / "layer=0").glob("*.sketch-*.arrow"))


QUERY = np.ones(60, np.float32)


def scanned(store: Store, **asked: Any) -> list[tuple[Any, ...]]:
    """The answer without an index."""
    hidden = store.path / "index"
    hidden.rename(store.path / "aside")
    found = fields(dualstore.open(store.path).query(QUERY, layer=0, **asked))
    (store.path / "aside").rename(hidden)
    return found


@pytest.mark.usefixtures("small_segments")
def test_a_segment_may_reach_over_parts_and_begin_within_one(tmp_path: Path) -> None:
    store, files = sketched(tmp_path / "store")
    assert [path.name.split(".")[0][-1] for path in files] == ["0", "0", "1", "2"]
    spans = [(found.first, found.end) for found in read_sketches(store.index(store.layer(0)), 60)]
    assert spans[0][0] == 0
    assert spans[-1][1] == 900
    assert all(end == first for (_, end), (first, _) in pairwise(spans))


@pytest.mark.usefixtures("small_segments")
def test_a_small_budget_makes_small_segments(tmp_path: Path) -> None:
    store, files = sketched(tmp_path / "store")
    index = store.index(store.layer(0))
    build_sketches(index, 60, 5 * 64 * 20)
    spans = [(found.first, found.end) for found in read_sketches(index, 60)]
    assert len(spans) > len(files)
    assert max(end - first for first, end in spans) == 64
    assert fields(store.query(QUERY, layer=0)) == scanned(store)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("per", [None, "label"])
def test_segments_without_a_sketch_are_scanned_beside_the_search(tmp_path: Path, per: str | None) -> None:
    store, files = sketched(tmp_path / "store")
    expected = scanned(store, top=30, per=per)
    files[1].unlink()
    found = dualstore.open(tmp_path / "store").query(QUERY, layer=0, top=30, per=per)
    assert fields(found) == expected
    assert found.explain is not None
    assert set(found.explain.seconds) == {"scan", "search"}


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_sketch_is_left_aside(tmp_path: Path, how: str) -> None:
    store, files = sketched(tmp_path / "store")
    expected = scanned(store)
    data = bytearray(files[1].read_bytes())
    if how == "truncated":
        del data[-500:]
    else:
        data[len(data) // 2] ^= 1
    files[1].write_bytes(data)
    opened = dualstore.open(tmp_path / "store")
    with pytest.warns(DualstoreWarning, match=r"sketch-\d+\.arrow: the index is"):
        assert fields(opened.query(QUERY, layer=0)) == expected
    opened.build_index()
    found = dualstore.open(tmp_path / "store").query(QUERY, layer=0)
    assert found.explain is not None
    assert set(found.explain.seconds) == {"search"}


@pytest.mark.usefixtures("small_segments")
def test_new_parts_make_the_last_segment_longer(tmp_path: Path) -> None:
    """What is before it stays as it is; what fits no longer goes away."""
    store, _ = sketched(tmp_path / "store")
    steps = sorted((tmp_path / "store" / "steps").glob("*.parquet"))
    last = tmp_path / "store" / "patterns" / "layer=0" / steps[-1].name
    kept = last.read_bytes()
    last.unlink()
    before = dualstore.open(tmp_path / "store")
    before.build_index()
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store" / "index" / "layer=0").glob("*.sketch-*")}
    last.write_bytes(kept)
    after = dualstore.open(tmp_path / "store")
    after.build_index()
    now = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store" / "index" / "layer=0").glob("*.sketch-*")}
    assert len(set(files.items()) & set(now.items())) == len(files) - 1
    assert [found.end for found in read_sketches(after.index(after.layer(0)), 60)][-1] == 900
    assert fields(after.query(QUERY, layer=0)) == scanned(store)


@pytest.mark.usefixtures("small_segments")
def test_segments_that_overlap_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a build leaves them that was stopped half way."""
    store, files = sketched(tmp_path / "store")
    old = {path: path.read_bytes() for path in files[1:]}
    monkeypatch.setattr(sketch, "SEGMENT_BYTES", 1 << 20)
    dualstore.open(tmp_path / "store").build_index()
    assert not files[1].exists()
    for path, data in old.items():
        path.write_bytes(data)
    opened = dualstore.open(tmp_path / "store")
    assert [(found.first, found.end) for found in read_sketches(opened.index(opened.layer(0)), 60)] == [(0, 900)]
    assert fields(opened.query(QUERY, layer=0, top=50)) == scanned(store, top=50)


def test_files_that_cannot_be_mapped_are_not_sketched(tmp_path: Path) -> None:
    store, _ = sketched(tmp_path / "store")
    part = tmp_path / "store" / "patterns" / "layer=0" / "part-0-000001.parquet"
    pq.write_table(pq.read_table(part), part, compression="zstd")
    store = dualstore.open(tmp_path / "store")
    store.build_index()
    names = sorted(path.name for path in (tmp_path / "store" / "index" / "layer=0").glob("*sketch*"))
    assert names == ["part-0-000000.sketch-0.arrow", "part-0-000002.sketch-0.arrow"]
    assert fields(store.query(QUERY, layer=0)) == scanned(store)


def test_an_empty_layer_has_no_sketch(tmp_path: Path) -> None:
    index = LayerIndex(tmp_path, Log([], ()))
    build_sketches(index, 5, 1 << 28)
    assert read_sketches(index, 5) == []

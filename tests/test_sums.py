"""The index of sums: totals from it are those of the scan, for any cells, keys and conditions, and damage is seen."""

import errno
import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy import ndarray

import dualstore
from dualstore import sums, totals
from dualstore.errors import DualstoreWarning, QueryError, StoreError
from dualstore.store import Store
from dualstore.sums import read_cells
from tests.reference import Rows, write_store

TASKS = ("a", "b")
SMALL = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = ("mixed", "positive", "negative", "huge", "nonfinite", "zero")


def make_rows(count: int, labels: int, kind: str, seed: int, steps: int = 12, width: int = 3) -> Rows:
    rng = np.random.default_rng(seed)
    x = rng.integers(-4, 5, (count, width)).astype(np.float32)
    if kind in ("positive", "negative"):
        x = np.abs(x) * (1 if kind == "positive" else -1)
    if kind == "huge":
        x *= np.float32(1e30)
    if kind == "zero":
        x[:] = 0
    if kind == "nonfinite":
        x[rng.integers(0, count, 3), rng.integers(0, width, 3)] = rng.choice([np.nan, np.inf, -np.inf], 3)
    step = np.sort(np.append(np.arange(steps), rng.integers(0, steps, count - steps))).astype(np.int32)
    return Rows(
        step=step,
        sample_id=rng.integers(0, 9, count),
        position=np.zeros(count, np.int32),
        label=rng.integers(-1, labels, count).astype(np.int32),
        task=rng.integers(-1, 2, count).astype(np.int32),
        x=x,
        e=np.zeros((count, 1), np.float32),
    )


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 64 rows, cells of any size, batches of a few cells."""
    monkeypatch.setattr("dualstore.part.MAX_GROUP_ROWS", 64)
    monkeypatch.setattr(sums, "ROWS_PER_CELL", 0)
    monkeypatch.setattr(sums, "_BATCH_CELLS", 20)
    monkeypatch.setattr(totals, "_ROWS_PER_STEP", 1)


def store_of(path: Path, rows: Rows, **settings: Any) -> Store:
    with np.errstate(all="ignore"):
        write_store(path, [rows, rows], tasks=TASKS, **settings)
    return dualstore.open(path)


def answers(store: Store, query: ndarray, by: str, where: str | None, absolute: bool) -> dict[Any, tuple[float, int]]:
    found = store.totals(query, layer=1, by=by, where=where, absolute=absolute).to_arrow()
    groups = zip(*(column.to_pylist() for column in found.columns[:-2]), strict=True) if found.num_columns > 2 else [()]
    return dict(zip(groups, zip(found["total"].to_pylist(), found["count"].to_pylist(), strict=True), strict=True))


@SMALL
@given(
    count=st.integers(12, 300),
    labels=st.sampled_from([0, 1, 3, 40]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 9),
    bucket=st.sampled_from([7, 64, 8192]),
    rows_per_cell=st.sampled_from([0, 2]),
    period=st.sampled_from([1, 5, 100]),
    by=st.sampled_from(
        ["label", "task, label", "epoch", "step // 3 AS third, task", "step", "sample_id", "", "label, sample_id % 2"]
    ),
    where=st.sampled_from(
        [None, "label > 0", "epoch = 1", "step < 5", "step % 2 = 0 AND task = 'a'", "sample_id = 3", "task IS NULL"]
    ),
    absolute=st.booleans(),
    signs=st.sampled_from([-1, 0, 1]),
)
def test_totals_from_the_index_are_those_of_the_scan(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    labels: int,
    kind: str,
    seed: int,
    bucket: int,
    rows_per_cell: int,
    period: int,
    by: str,
    where: str | None,
    absolute: bool,
    signs: int,
) -> None:
    rows = make_rows(count, labels, kind, seed)
    path = tmp_path_factory.mktemp("sums") / "store"
    store = store_of(path, rows, epoch_of_step=lambda step: step // period, flush_every=5)
    query = np.random.default_rng(seed).integers(-3, 4, 3).astype(np.float32)
    query = query if signs == 0 else np.abs(query) * np.float32(signs)
    expected = answers(store, query, by, where, absolute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "BUCKET_ROWS", bucket)
        patch.setattr(sums, "ROWS_PER_CELL", rows_per_cell)
        store.build_index()
    found = answers(store, query, by, where, absolute)
    shutil.rmtree(path)
    assert found.keys() == expected.keys()
    size = np.nansum(np.abs(rows.x[np.isfinite(rows.x).all(1)].astype(np.float64)) @ np.abs(query))
    for group, (total, rows_counted) in expected.items():
        assert found[group][1] == rows_counted
        np.testing.assert_allclose(found[group][0], total, rtol=1e-12, atol=1e-12 * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [None, "step < 7", "sample_id < 4", "label <> 1"])
def test_votes_from_the_index_are_those_of_the_scan(tmp_path: Path, kind: str, where: str | None) -> None:
    rows = make_rows(400, 3, kind, 3)
    rng = np.random.default_rng(1)
    numbers = np.arange(50)
    probe = {name: rng.integers(0, 3, 50).astype(np.int32) for name in ("label", "predicted", "task")}
    probe |= {"test_id": numbers, "position": np.zeros(50, np.int32), "step": np.zeros(50, np.int32)}
    probe |= {"x": rng.integers(-3, 4, (50, 3)).astype(np.float32), "y": np.zeros((50, 1), np.float32)}
    store = store_of(tmp_path / "store", rows, flush_every=3, probes=[probe, probe])
    expected = store.votes(where=where).to_dicts()
    store.build_index()
    assert store.votes(where=where).to_dicts() == expected


def test_cells_hold_the_sums_of_their_rows(tmp_path: Path) -> None:
    rows = make_rows(300, 3, "mixed", 0)
    store = store_of(tmp_path / "store", rows, epoch_of_step=lambda step: step // 4, flush_every=5)
    store.build_index()
    seen = np.zeros(300, int)
    for cells in read_cells(store.index(store.layer(1)), 3):
        values = np.concatenate(cells.sums)
        for i in range(len(cells)):
            bucket = np.arange(cells.first[i], cells.end[i])
            mine = bucket[(rows.label[bucket] == cells.label[i]) & (rows.task[bucket] == cells.task[i])]
            assert len(mine) == cells.count[i]
            assert np.array_equal(values[i], rows.x[mine].sum(axis=0, dtype=np.float64))
            assert set(rows.step[mine]) <= set(range(cells.step_first[i], cells.step_last[i] + 1))
            assert len(set(rows.step[mine] // 4)) == 1
            seen[mine] += 1
    assert (seen == 1).all()


def test_what_an_answer_cost_is_told(tmp_path: Path) -> None:
    rows = make_rows(640, 2, "mixed", 0)
    rows.x[:, 0] = np.arange(640)  # no key comes again
    store = store_of(tmp_path / "store", rows, flush_every=6)
    scan = store.totals(np.ones(3), layer=1).explain
    assert scan is not None
    assert scan.to_dict() | {"path": "scan", "rows_read": 640, "bytes_read": 640 * 12, "share": 1.0} == scan.to_dict()
    store.build_index()
    paths = {}
    for where in (None, "step < 3", "sample_id = 1"):
        found = store.totals(np.ones(3), layer=1, where=where).explain
        assert found is not None
        paths[where] = found.path
        if where is None:
            assert found.rows_read == 0
            assert found.counts["cells"] == sum(len(cells) for cells in read_cells(store.index(store.layer(1)), 3))
    assert paths == {None: "index", "step < 3": "index and scan", "sample_id = 1": "scan"}
    magnitude = store.totals(np.ones(3), layer=1, absolute=True).explain
    assert magnitude is not None
    assert magnitude.rows_read > 0


def test_only_parts_that_are_new_are_indexed(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", make_rows(300, 2, "mixed", 0), flush_every=3)
    files = sorted((tmp_path / "store" / "patterns" / "layer=0").iterdir())
    kept = tmp_path / "kept"
    for folder in (0, 1):
        for file in files[2:]:
            kept.mkdir(exist_ok=True)
            shutil.move(tmp_path / "store" / "patterns" / f"layer={folder}" / file.name, kept / f"{folder}-{file.name}")
    store.build_index()
    folder = tmp_path / "store" / "index" / "layer=0"
    first = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.sums.arrow")}
    assert len(first) == 2
    for file in kept.iterdir():
        shutil.move(file, tmp_path / "store" / "patterns" / f"layer={file.name[0]}" / file.name[2:])
    store.build_index()
    second = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.sums.arrow")}
    assert len(second) == len(files)
    assert first.items() <= second.items()


def damaged(path: Path, how: str) -> None:
    if how == "deleted":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "empty":
        data.clear()
    elif how == "truncated":
        del data[len(data) // 2 :]
    else:
        at = {
            "flipped in the footer": len(data) - 40,
            "flipped in the middle": len(data) // 2,
            "flipped in the sums": len(data) * 2 // 3,
        }[how]
        data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    "how", ["deleted", "empty", "truncated", "flipped in the footer", "flipped in the middle", "flipped in the sums"]
)
def test_a_damaged_file_is_left_aside_and_rebuilt(tmp_path: Path, how: str) -> None:
    store = store_of(tmp_path / "store", make_rows(300, 2, "mixed", 0), flush_every=3)
    expected = store.totals([1, 2, 3], layer=0).to_dicts()
    store.build_index()
    file = tmp_path / "store" / "index" / "layer=0" / "part-0-000001.sums.arrow"
    whole = file.read_bytes()
    damaged(file, how)
    opened = dualstore.open(tmp_path / "store")
    if how == "deleted":
        assert opened.totals([1, 2, 3], layer=0).to_dicts() == expected
    else:
        with pytest.warns(DualstoreWarning, match=r"part-0-000001\.sums\.arrow: the index is .*; rebuild it: dualstore index"):
            assert opened.totals([1, 2, 3], layer=0).to_dicts() == expected
    opened.build_index()
    assert file.read_bytes() == whole
    found = dualstore.open(tmp_path / "store").totals([1, 2, 3], layer=0)
    assert found.to_dicts() == expected
    assert found.explain is not None
    assert found.explain.path == "index"


def test_no_flipped_bit_changes_an_answer(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", make_rows(20, 1, "mixed", 0))
    expected = store.totals([1, 2, 3], layer=0).to_dicts()
    store.build_index()
    file = tmp_path / "store" / "index" / "layer=0" / "part-0-000000.sums.arrow"
    whole = file.read_bytes()
    for at in {*range(0, len(whole), 13), *range(len(whole) - 250, len(whole))}:
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        file.write_bytes(data)
        opened = dualstore.open(tmp_path / "store")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a bit that nothing depends on may be flipped unseen
            assert opened.totals([1, 2, 3], layer=0).to_dicts() == expected, at


@pytest.mark.parametrize("change", ["keys", "labels", "fewer rows"])
def test_an_index_of_another_part_of_the_same_name_is_left_aside(tmp_path: Path, change: str) -> None:
    rows = make_rows(100, 2, "mixed", 0)
    store_of(tmp_path / "old", rows).build_index()
    if change == "keys":
        rows.x[50, 0] += 1
    elif change == "labels":
        rows.label[50] = 1 - rows.label[50]
    else:
        rows = make_rows(99, 2, "mixed", 0)
    expected = store_of(tmp_path / "new", rows).totals([1, 2, 3], layer=0).to_dicts()
    shutil.copytree(tmp_path / "old" / "index", tmp_path / "new" / "index")
    opened = dualstore.open(tmp_path / "new")
    with pytest.warns(DualstoreWarning, match="made from another state of its part"):
        assert opened.totals([1, 2, 3], layer=0).to_dicts() == expected


def test_the_index_of_a_copied_store_is_good(tmp_path: Path) -> None:
    store_of(tmp_path / "store", make_rows(300, 2, "mixed", 0)).build_index()
    shutil.copytree(tmp_path / "store", tmp_path / "copy", copy_function=shutil.copyfile)
    found = dualstore.open(tmp_path / "copy").totals([1, 2, 3], layer=0).explain
    assert found is not None
    assert found.path == "index"


def test_a_part_of_another_writer_is_told_apart_by_its_time(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", make_rows(100, 2, "mixed", 0))
    part = tmp_path / "store" / "patterns" / "layer=0" / "part-0-000000.parquet"
    pq.write_table(pq.read_table(part), part)
    dualstore.open(tmp_path / "store").build_index()
    os.utime(part, ns=(1, 1))
    with pytest.warns(DualstoreWarning, match="made from another state"):
        dualstore.open(tmp_path / "store").totals([1, 2, 3], layer=0)
    assert store.layers


def test_files_of_parts_that_are_gone_are_removed(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", make_rows(300, 2, "mixed", 0), flush_every=3)
    store.build_index()
    (tmp_path / "store" / "patterns" / "layer=0" / "part-0-000001.parquet").unlink()
    dualstore.open(tmp_path / "store").build_index()
    assert not (tmp_path / "store" / "index" / "layer=0" / "part-0-000001.sums.arrow").exists()
    assert (tmp_path / "store" / "index" / "layer=1" / "part-0-000001.sums.arrow").exists()


def test_an_index_that_cannot_be_written_says_so_and_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path / "store", make_rows(300, 2, "mixed", 0), flush_every=3)

    def full(source: Path, target: Path) -> None:
        if "000001" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match="cannot be written: No space left on device; everything works without it"):
        store.build_index()
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "store" / "index").rglob("*.*")) == ["part-0-000000.sums.arrow"]
    assert len(store.totals([1, 2, 3], layer=0)) > 0


def test_the_file_is_plain_arrow(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", make_rows(300, 2, "positive", 0))
    store.build_index()
    with pa.ipc.open_file(tmp_path / "store" / "index" / "layer=0" / "part-0-000000.sums.arrow") as file:
        table = file.read_all()
    assert table["count"].to_numpy().sum() <= 300
    assert set(table["sign"].to_pylist()) == {1}


@pytest.mark.parametrize(
    "asked", [{"by": "CAST((step % 2) * label * 300 AS TINYINT) AS z"}, {"where": "CAST((step % 2) * label * 300 AS TINYINT) = 0"}]
)
def test_an_expression_may_fail_where_no_row_is(tmp_path: Path, asked: dict[str, str]) -> None:
    """Label 1 comes in even steps alone: the expression fits all rows, but not every label in every step."""
    rows = make_rows(600, 2, "mixed", 0)
    rows.label[:] = np.where(rows.step % 2 == 0, 1, 0)
    store = store_of(tmp_path / "store", rows)
    expected = store.totals([1, 2, 3], layer=1, **asked).to_dicts()  # type: ignore[arg-type]
    store.build_index()
    assert store.totals([1, 2, 3], layer=1, **asked).to_dicts() == expected  # type: ignore[arg-type]
    rows.label[:] = 1
    other = store_of(tmp_path / "other", rows)
    other.build_index()
    with pytest.raises(QueryError, match=r"^(?!.*_cell).*300"):
        other.totals([1, 2, 3], layer=1, **asked)  # type: ignore[arg-type]


def test_two_threads_may_build_the_same_index(tmp_path: Path) -> None:
    store_of(tmp_path / "store", make_rows(600, 2, "mixed", 0), flush_every=2)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(dualstore.open(tmp_path / "store").build_index) for _ in range(4)]:
            done.result()
    assert not [path for path in (tmp_path / "store" / "index").rglob("*") if path.suffix == ".tmp"]


def test_an_index_that_cannot_be_looked_at_is_left_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path / "store", make_rows(300, 2, "mixed", 0))
    expected = store.totals([1, 2, 3], layer=1).to_dicts()
    store.build_index()

    def refused(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.warns(DualstoreWarning, match="the index is unreadable"):
        assert dualstore.open(tmp_path / "store").totals([1, 2, 3], layer=1).to_dicts() == expected

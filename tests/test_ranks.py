"""Stores of several ranks answer as the same rows of a single one do, up to the last step that all have committed."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy import ndarray
from torch import nn

import dualstore
from dualstore.capture.resume import ids_of_last_epoch
from dualstore.errors import DamagedError, DualstoreWarning, StoreError
from dualstore.log import Log
from dualstore.ranks import in_the_way, tasks_by_code
from dualstore.rewind import last_sequence, rewind
from dualstore.schema import Layer, PartName, StoreInfo, pattern_columns
from dualstore.steps import Steps
from dualstore.store import Store
from dualstore.writer import StoreWriter
from tests.reference import group_row
from tests.split import split_store, together

torch.set_num_threads(1)

STEPS, BATCH = 12, 9
RANDOM = torch.Generator().manual_seed(4)
X = torch.randn(40, 6, generator=RANDOM, dtype=torch.float64)
Y = torch.randint(0, 3, (40,), generator=RANDOM)
TEST_Y = torch.arange(8) % 3
MAKERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "Adam, decay in the gradient": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def record(path: Path, name: str) -> Path:
    """A training with clipping, two tasks and, at some steps, an idle first layer; parts of five steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    optimizer = MAKERS[name](model.parameters())
    with dualstore.record(model, optimizer, path, dtype="float64", index=False) as recorder:
        for step in range(STEPS):
            ids = torch.arange(step * 7, step * 7 + BATCH) % 40
            with recorder.batch(ids, Y[ids], task="even" if step % 2 == 0 else "odd", epoch=step // 5) as batch:
                hidden = model[:2](X[ids])
                loss = nn.functional.cross_entropy(model[2](hidden.detach() if step % 5 == 4 else hidden), Y[ids])
                batch.loss = loss.detach()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.8)
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                recorder.flush()
        model.eval()
        each = nn.CrossEntropyLoss(reduction="none")
        for task, some in (("even", slice(0, 5)), ("odd", slice(5, 8))):
            with recorder.probe(range(8)[some], TEST_Y[some], task=task, loss=lambda y, some=some: each(y, TEST_Y[some])):  # type: ignore[misc]
                model(X[some] + 0.1)
    return path


@pytest.fixture(scope="module", params=MAKERS)
def source(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return record(tmp_path_factory.mktemp("source") / "store", request.param)


@pytest.fixture(scope="module")
def sgd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("source") / "store", "SGD")


def answers(store: Store, *, probes: bool = True) -> dict[str, Any]:
    """What a store says to questions of every kind, in rows whose order means nothing unless they have a rank."""
    found: dict[str, Any] = {}
    query = np.linspace(-1, 1, 6)
    for where in (None, "task = 'odd' AND epoch < 2"):
        found[f"top {where}"] = store.query(query, layer=0, top=7, where=where)
        found[f"size {where}"] = store.query(query, layer=0, top=7, where=where, absolute=True)
        for by in ("label", "epoch, task", "sample_id"):
            found[f"totals {by} {where}"] = store.totals(query, layer=0, by=by, where=where)
    found["per"] = store.query([query, -query], layer=0, top=3, per="task")
    found["contribution"] = store.query(query, layer=0, top=5, score="contribution", output=1, bottom=True)
    found["contributions"] = store.totals(query[:5], layer=1, by="task", score="contribution", output=2)
    found["then"] = store.totals(query, layer=0, by="task", score="contribution", output=0, at_step=min(3, store.last_step))
    found["self"] = store.self_influence(top=50)
    found["steps"] = store.sql("SELECT step, epoch, lr, clip, batch_size, loss, rows, idle, idle_bias FROM steps")
    found["patterns"] = store.sql("SELECT layer, task, label, count(*) AS n, sum(step) AS s FROM patterns GROUP BY ALL")
    found["attention"] = store.sql("SELECT task, sum(alpha) AS total FROM attention GROUP BY ALL", layer=0, x=query)
    if probes:
        found["votes"] = store.votes()
        found["test"] = store.query(test_id=[2, 6], layer=1, top=4, score="influence", bottom=True)
        found["pooled"] = store.totals(test_id=range(8), layer=None, by="task", score="influence", pool="mean")
        found["accuracy"] = store.evaluate({"task": {"odd": [0.0, 2.0]}})
    return {name: sorted(result.to_dicts(), key=_named) for name, result in found.items()} | _weights(store)


def _named(row: dict[str, Any]) -> str:
    return repr([value for value in row.values() if not isinstance(value, float)])


def _weights(store: Store) -> dict[str, ndarray]:
    steps = {0, store.last_step // 2, store.last_step}
    found = {f"W{layer} {step}": store.weights(layer, at_step=step).joined for layer in (0, 1) for step in steps}
    found |= {f"gains {layer}": store.weights(layer, gains={"task": {"even": 0.5}}).joined for layer in (0, 1)}
    average = dualstore.Average(decay=0.9)
    return found | {f"average {layer}": store.weights(layer, average=average).joined for layer in (0, 1)}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        if isinstance(wanted, ndarray):
            np.testing.assert_allclose(found[name], wanted, rtol=1e-11, atol=1e-13, err_msg=name)
            continue
        assert len(found[name]) == len(wanted), name
        for row, other in zip(found[name], wanted, strict=True):
            assert row == {name: _nearly(value) for name, value in other.items()}, name


def _nearly(value: Any) -> Any:
    return pytest.approx(value, rel=1e-10, abs=1e-12, nan_ok=True) if isinstance(value, float) else value


owners = st.lists(st.integers(0, 2), min_size=BATCH, max_size=BATCH).map(np.array)
flush_points = st.lists(st.sets(st.integers(0, STEPS - 1)), min_size=3, max_size=3)
MANY = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], phases=[Phase.generate])
"""An example takes a second; to shrink one would take minutes."""


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_answer_as_a_single_process(
    source: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, *, indexed: bool
) -> None:
    monkeypatch.setattr("dualstore.sums.ROWS_PER_CELL", 1)
    folders = split_store(source, tmp_path, np.arange(BATCH) % ranks, ranks, [{2, 7}, {0, 1, 5}, {9}])
    store, single = dualstore.open(together(folders, tmp_path / "store")), dualstore.open(source)
    if indexed:
        store.build_index()
    assert_same(answers(store), answers(single))
    found = store.verify()
    assert found.ok, found.problems
    assert found.rows == single.verify().rows
    assert max(layer.weight_residual or 0 for layer in found.layers) <= 1e-12
    assert store.info()["ranks"] == ranks


@given(owner=owners, flushes=flush_points)
@MANY
def test_rows_may_be_dealt_out_and_flushed_in_any_way(
    sgd: Path, tmp_path_factory: pytest.TempPathFactory, owner: ndarray, flushes: Any
) -> None:
    path = tmp_path_factory.mktemp("dealt")
    store = dualstore.open(together(split_store(sgd, path, owner, 3, flushes), path / "store"))
    assert_same(answers(store), answers(dualstore.open(sgd)))
    assert store.verify().ok


@given(flushes=flush_points, rank=st.integers(0, 2), last=st.integers(0, STEPS - 1))
@MANY
def test_of_a_killed_rank_the_steps_that_all_have_are_left(
    source: Path, tmp_path_factory: pytest.TempPathFactory, flushes: Any, rank: int, last: int
) -> None:
    path = tmp_path_factory.mktemp("killed")
    folders = split_store(source, path, np.arange(BATCH) % 3, 3, flushes, {rank: last})
    until = max((step for step in flushes[rank] if step <= last), default=-1)
    with pytest.warns(DualstoreWarning, match="complete" if until < 0 else f"complete up to step {until}; rank"):
        store = dualstore.open(together(folders, path / "store"))
    assert store.last_step == until
    assert store.info_file.status == "recording"
    alone = split_store(source, path / "alone", np.zeros(BATCH, int), 1, [{until}], {0: until})[0]
    with pytest.warns(DualstoreWarning, match="unfinished"):
        single = dualstore.open(alone)
    assert store.info()["rows"] == single.info()["rows"]
    if until < 0:
        assert store.totals(np.ones(6), layer=0).to_dicts() == []
        return
    for indexed in (False, True):
        if indexed:
            store.build_index()
        assert_same(answers(store, probes=False), answers(single, probes=False))
    found = store.verify(at_step=until)
    assert found.ok, found.problems
    assert any("complete up to step" in problem for problem in store.verify().problems) == store.cut


# Writing

LAYER = Layer(0, "fc", "Linear", 3, 2, False, 0, -1)
INFO = StoreInfo((LAYER,), "float32", "SGD", exact=True, ranks=2)


def write_steps(writer: StoreWriter, steps: int, *, rows: int = 4, task: int = 0, first: int = 0) -> None:
    """Steps whose keys and sample ids tell rank and step."""
    for step in range(first, first + steps):
        numbers = np.arange(rows)
        scalars = {"sample_id": numbers + 100 * writer.rank, "label": np.full(rows, writer.rank, np.int32)}
        scalars |= {"position": np.zeros(rows, np.int32), "task": np.full(rows, task, np.int32)}
        x = np.full((rows, 3), step + 100 * writer.rank, np.float32)
        writer.add_patterns(LAYER, scalars, x, np.ones((rows, 2), np.float32))
        writer.end_step([group_row(0)])


def finish(writer: StoreWriter, **changes: Any) -> None:
    writer.close()
    writer.save_info(**{"status": "complete", **changes})


def write(path: Path, *, ranks: int = 2, steps: int = 3, **changes: Any) -> Path:
    """A store in which every rank is done with the same steps."""
    path.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        writer = StoreWriter(path, replace(INFO, ranks=ranks), rank=rank)
        write_steps(writer, steps)
        finish(writer, **changes)
    return path


def set_info(path: Path, rank: int, **values: Any) -> None:
    file = path / StoreInfo.file_name(rank)
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_ranks_begin_in_any_order_and_each_once(tmp_path: Path) -> None:
    second = StoreWriter(tmp_path, INFO, rank=1)
    with pytest.raises(StoreError, match=r"not a store \(it has only rank-1.json"):
        dualstore.open(tmp_path)
    with pytest.raises(FileExistsError, match=r".ballast-1.tmp"):
        StoreWriter(tmp_path, INFO, rank=1)
    first = StoreWriter(tmp_path, INFO)
    write_steps(second, 2)
    write_steps(first, 1)
    for writer in (first, second):
        writer.flush()
        writer.wait()
    with pytest.warns(DualstoreWarning, match=r"up to step 0; rank 0 at step 0 \(recording\); rank 1 at step 1 \(recording\)"):
        assert dualstore.open(tmp_path).info()["rows"] == 8
    write_steps(first, 1)
    finish(first)
    finish(second)
    assert dualstore.open(tmp_path).info()["rows"] == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["patterns", "rank-1.json", "steps", "store.json"]


def test_a_rank_goes_on_by_its_own_files(tmp_path: Path) -> None:
    """The others may be going on, too: what they have may vanish, be half cut or be of new steps."""
    write(tmp_path)
    dualstore.open(tmp_path).build_index()
    for path in tmp_path.glob("*/*/part-1-*"):
        path.write_bytes(b"half cut")
    (tmp_path / "index" / "part-0-000009.parquet").touch()
    steps = Steps.read(sorted(tmp_path.glob("steps/part-0-*")))
    assert np.concatenate([*ids_of_last_epoch(tmp_path, INFO, steps, 0)]).tolist() == [0, 1, 2, 3] * 3
    assert last_sequence(tmp_path, 0) == 0
    rewind(tmp_path, INFO, 0, 0)
    assert np.concatenate([*ids_of_last_epoch(tmp_path, INFO, steps, 0)]).tolist() == [0, 1, 2, 3]


def test_weights_are_those_of_rank_0(tmp_path: Path) -> None:
    for rank in (1, 0):
        writer = StoreWriter(tmp_path, INFO, rank=rank)
        writer.write_weights("initial", {"fc.weight": np.full((2, 3), rank, np.float32)})
        writer.close()
        assert (tmp_path / "weights").exists() == (rank == 0)


def test_tasks_that_ranks_meet_in_different_orders_keep_their_names(tmp_path: Path) -> None:
    lists = [("a", "b"), ("b", "c", "a"), ()]
    assert tasks_by_code([replace(INFO, tasks=names) for names in lists]) == ("a", "b", None, "b", "c", None, None, "a", None)
    assert tasks_by_code([INFO, None]) == ()
    for rank, names in enumerate(lists[:2]):
        writer = StoreWriter(tmp_path, INFO, rank=rank)
        for number, _ in enumerate(names):
            write_steps(writer, 1, task=number)
        write_steps(writer, 3 - len(names), task=-1)
        finish(writer, tasks=names)
    store = dualstore.open(tmp_path)
    assert store.info()["tasks"] == ["a", "b", "c"]
    expected = {"a": 8, "b": 8, "c": 4, None: 4}
    assert {row["task"]: row["count"] for row in store.totals([1, 1, 1], layer=0, by="task")} == expected
    found = store.sql("SELECT task, count(*) AS n FROM patterns GROUP BY task").to_dicts()
    assert {row["task"]: row["n"] for row in found} == expected
    assert {row["group"] for row in store.query([1, 1, 1], layer=0, per="task || '!'")} == {"a!", "b!", "c!", None}


# Where a recording may begin


def test_a_rank_begins_beside_others_of_its_training_only(tmp_path: Path) -> None:
    assert in_the_way(tmp_path / "new", 1, INFO) is None
    assert in_the_way(tmp_path, 1, INFO) is None
    writers = [StoreWriter(tmp_path, INFO, rank=rank) for rank in range(2)]
    single = replace(INFO, ranks=1)
    for writer in writers:
        write_steps(writer, 2)
        writer.flush()
        write_steps(writer, 1)  # lies in the folder under a temporary name
        writer.wait()
    third = replace(INFO, ranks=3)
    assert in_the_way(tmp_path, 0, single) is not None
    assert in_the_way(tmp_path, 0, INFO) is not None
    assert in_the_way(tmp_path, 1, INFO) is not None
    assert in_the_way(tmp_path, 2, third) == tmp_path / "rank-1.json", "another number of ranks"
    for rank, writer in enumerate(writers):
        set_info(tmp_path, rank, ranks=3)
        writer.write_weights("initial", {})
    assert in_the_way(tmp_path, 2, third) is None
    assert in_the_way(tmp_path, 2, replace(third, dtype="float64")) is not None
    for writer in writers:
        finish(writer, ranks=3)
    assert in_the_way(tmp_path, 2, third) == tmp_path / "rank-1.json", "a store that is finished"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_has_left_is_in_its_own_way(tmp_path: Path, rank: int) -> None:
    writer = StoreWriter(tmp_path / "one", INFO, rank=rank) if (tmp_path / "one").mkdir() is None else None
    assert writer is not None
    write_steps(writer, 1)
    writer.flush()
    writer.wait()
    (tmp_path / "one" / StoreInfo.file_name(rank)).unlink()
    (tmp_path / "one" / (".ballast.tmp" if rank == 0 else f".ballast-{rank}.tmp")).unlink()
    assert in_the_way(tmp_path / "one", rank, INFO) == tmp_path / "one" / "patterns"
    assert in_the_way(tmp_path / "one", 1 - rank, INFO) is None
    (tmp_path / "one" / "note.txt").write_text("mine")
    assert in_the_way(tmp_path / "one", 1 - rank, INFO) == tmp_path / "one" / "note.txt"
    assert in_the_way(tmp_path / "one" / "note.txt", rank, INFO) == tmp_path / "one" / "note.txt"
    writer.close()


# Reading


def test_parts_are_in_the_order_of_ranks_and_flushes() -> None:
    names = ["part-10-000000.parquet", "part-2-1000000.parquet", "part-2-999999.parquet", "part-0-000001.parquet", "part-x.parquet"]
    ordered = sorted(names, key=PartName.of)
    assert ordered == [names[4], names[3], names[2], names[1], names[0]]


def test_equal_rows_are_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    for rank in range(12):
        tmp_path.mkdir(exist_ok=True)
        writer = StoreWriter(tmp_path, replace(INFO, ranks=12), rank=rank)
        scalars = {"sample_id": np.zeros(1, np.int64), "label": np.full(1, rank, np.int32), "position": np.zeros(1, np.int32)}
        scalars["task"] = np.full(1, -1, np.int32)
        writer.add_patterns(LAYER, scalars, np.ones((1, 3), np.float32), np.ones((1, 2), np.float32))
        writer.end_step([group_row(0)])
        finish(writer)
    assert [row["label"] for row in dualstore.open(tmp_path).query([1, 1, 1], layer=0)] == list(range(12))


def test_the_first_visit_of_a_sample_may_be_at_any_rank(tmp_path: Path) -> None:
    for rank, steps in enumerate(((5, 7), (7, 5))):
        writer = StoreWriter(tmp_path, INFO, rank=rank)
        writer.write_weights("initial", {"fc.weight": np.zeros((2, 3), np.float32)})
        for step, sample in enumerate(steps):
            scalars = {"sample_id": np.array([sample]), "label": np.array([10 * rank + step], np.int32)}
            scalars |= {"position": np.zeros(1, np.int32), "task": np.full(1, -1, np.int32)}
            writer.add_patterns(LAYER, scalars, np.ones((1, 3), np.float32), np.ones((1, 2), np.float32))
            writer.end_step([group_row(0)])
        finish(writer)
    found = {row["sample_id"]: row["label"] for row in dualstore.open(tmp_path).self_influence()}
    assert found == {5: 0, 7: 10}


def test_of_a_test_example_that_ranks_probed_the_last_one_counts(tmp_path: Path) -> None:
    for rank in range(2):
        writer = StoreWriter(tmp_path, INFO, rank=rank)
        write_steps(writer, 2)
        names = ("position", "label", "task", "predicted")
        scalars = {"test_id": np.array([4]), "step": np.array([2 - rank], np.int32)} | {n: np.zeros(1, np.int32) for n in names}
        writer.write_probes(LAYER, scalars, np.full((1, 3), rank, np.float32), np.zeros((1, 2), np.float32))
        finish(writer)
    store = dualstore.open(tmp_path)
    assert {row["alpha"] for row in store.query(test_id=4, layer=0)} == {0.0}
    assert store.info()["probes"] == 1


def test_what_the_ranks_say_is_put_together(tmp_path: Path) -> None:
    write(tmp_path, ranks=3, problems=("all saw this",))
    set_info(tmp_path, 1, problems=["all saw this", "one saw this"], status="interrupted")
    store = dualstore.open(tmp_path)
    assert store.info_file.problems == ("all saw this", "rank 1: one saw this")
    assert store.info_file.status == "interrupted"
    assert store.info()["endings"] == ["ranks 0, 2 at step 2 (complete)", "rank 1 at step 2 (interrupted)"]


def test_ranks_that_contradict_each_other_are_damage(tmp_path: Path) -> None:
    write(tmp_path)
    set_info(tmp_path, 1, dtype="float64")
    with pytest.raises(DamagedError, match=r"rank-1.json: expected dtype 'float32', as rank 0 has, found 'float64'"):
        dualstore.open(tmp_path)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, "2", None, True, 1 << 40])
def test_a_number_of_ranks_that_cannot_be_is_damage(tmp_path: Path, ranks: Any) -> None:
    write(tmp_path)
    set_info(tmp_path, 0, ranks=ranks)
    with pytest.raises(DamagedError, match=r"store.json: expected the fields of a store, found .*ranks"):
        dualstore.open(tmp_path)


# Rows of steps that not all ranks have


def behind(path: Path, *, close: bool = True) -> tuple[StoreWriter, StoreWriter]:
    """Rank 0 has seven steps, rank 1 three, in row groups of eight rows, two steps each."""
    path.mkdir(exist_ok=True)
    writers = StoreWriter(path, INFO), StoreWriter(path, INFO, rank=1)
    writers[0].write_weights("initial", {"fc.weight": np.zeros((2, 3), np.float32)})
    for writer, steps in zip(writers, (7, 3), strict=True):
        write_steps(writer, steps)
        if close:
            finish(writer)
        else:
            writer.flush()
            writer.wait()
    return writers


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualstore.part.MAX_GROUP_ROWS", 8)


def rewrite(part: Path, how: str) -> None:
    """The part as another program would have written it."""
    options: dict[str, Any] = {
        "zstd": {"compression": "zstd"},
        "no statistics": {"compression": "none", "use_dictionary": False, "write_statistics": False},
        "one group": {"compression": "zstd", "row_group_size": 1000},
    }[how]
    pq.write_table(pq.ParquetFile(part).read(), part, **{"row_group_size": 8, **options})


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("how", ["own", "zstd", "no statistics", "one group"])
def test_rows_of_later_steps_are_not_part_of_a_log(tmp_path: Path, how: str) -> None:
    writer = StoreWriter(tmp_path, replace(INFO, ranks=1))
    write_steps(writer, 7)
    writer.close()
    (path,) = (tmp_path / "patterns" / "layer=0").iterdir()
    if how != "own":
        rewrite(path, how)
    for last in range(-1, 9):
        log = Log([path], pattern_columns(LAYER, "float32"), last)
        expected = [step for step in range(7) for _ in range(4) if step <= last]
        assert log.rows == len(expected)
        assert [step for group in log.groups for step in group.part.mapping.array(group, "step")] == expected
        for group in log.groups:
            blocks = list(group.part.mapping.blocks(group, ["step", "x"], 3))
            assert [start for start, _ in blocks] == list(range(0, group.rows, 3))
            assert np.concatenate([block["x"] for _, block in blocks])[:, 0].tolist() == expected[group.first :][: group.rows]
        assert log.take(["step"], np.arange(log.rows))["step"].tolist() == expected
        assert sum(part.rows for part, _, _ in log.by_part()) == log.rows


@pytest.mark.usefixtures("small_groups")
def test_an_index_that_was_built_before_more_steps_were_whole_is_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualstore.sums.ROWS_PER_CELL", 1)
    first, second = behind(tmp_path, close=False)
    with pytest.warns(DualstoreWarning, match="up to step 2"):
        early = dualstore.open(tmp_path)
    early.build_index()
    assert sum(row["count"] for row in early.totals([1, 1, 1], layer=0)) == 2 * 3 * 4
    write_steps(second, 4, first=3)
    for writer in (first, second):
        finish(writer)
    store = dualstore.open(tmp_path)
    with pytest.warns(DualstoreWarning, match="another state of its parts"):
        found = store.totals([1, 1, 1], layer=0).to_dicts()
    assert {row["label"]: (row["count"], row["total"]) for row in found} == {0: (28, 3 * 4 * 21), 1: (28, 3 * 4 * (21 + 700))}
    store.build_index()
    assert store.totals([1, 1, 1], layer=0).to_dicts() == found
    assert store.query([1, 1, 1], layer=0, top=3).to_dicts()[0]["alpha"] == 318


def test_ranks_that_ended_at_different_steps_are_named(tmp_path: Path) -> None:
    behind(tmp_path)
    with pytest.warns(
        DualstoreWarning, match=r"the ranks ended at different steps; .* step 2; rank 0 at step 6 \(complete\); rank 1"
    ):
        store = dualstore.open(tmp_path)
    (problem,) = store.verify().problems
    assert problem.startswith("rank 0 at step 6 (complete), rank 1 at step 2 (complete): the store is complete up to step 2")
    assert store.verify(at_step=1).ok


# Proving


def problems(path: Path) -> list[str]:
    return dualstore.open(path).verify(at_step=2).problems


def table_of(path: Path) -> pa.Table:
    return pq.ParquetFile(path).read()


def test_rows_that_a_rank_lacks_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    part = tmp_path / "patterns/layer=0/part-1-000000.parquet"
    pq.write_table(table_of(part).slice(1), part)
    assert any("layer 0 (fc), rank 1: step 0: expected 4 rows, found 3; 1 steps differ" in text for text in problems(tmp_path))


def test_a_part_of_a_rank_that_is_none_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    part = tmp_path / "patterns/layer=0/part-1-000000.parquet"
    shutil.copy(part, part.with_name("part-7-000000.parquet"))
    assert any("part-7-000000.parquet: expected parts of ranks 0 to 1, found one of rank 7" in text for text in problems(tmp_path))


def test_settings_of_ranks_that_differ_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    part = tmp_path / "steps/part-1-000000.parquet"
    table = table_of(part)
    pq.write_table(table.set_column(table.schema.get_field_index("lr"), "lr", pa.array([0.1, 0.3, 0.1])), part)
    assert (
        "steps: step 1, parameter group 0: lr is 0.1 at rank 0 and 0.3 at rank 1; ranks of one training have the same"
        in problems(tmp_path)
    )


def test_steps_that_a_rank_lacks_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    part = tmp_path / "steps/part-1-000000.parquet"
    pq.write_table(table_of(part).filter(pa.array([True, False, True])), part)
    found = problems(tmp_path)
    assert "steps: expected every step from 0 to 2, found 2" in found
    assert any("rows of steps that the optimiser's log lacks" in text for text in found)

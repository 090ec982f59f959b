"""writer: a store holds whole steps, the same ones in every layer, whatever happens to the disk or the process."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import dualstore
from dualstore import part, writer
from dualstore.errors import DualstoreWarning
from dualstore.log import Log, Mapping
from dualstore.schema import Layer, StoreInfo
from dualstore.store import Store
from dualstore.writer import SAMPLES_SCHEMA, StoreWriter, write_table, write_whole
from tests.faults import FullDisk
from tests.reference import group_row

LAYERS = (Layer(0, "first", "Linear", 300, 2, True, 0, 0), Layer(1, "second", "Linear", 2, 4, False, 0, -1))
INFO = StoreInfo(LAYERS, "float32", "SGD", exact=True)
GROUP = group_row(0)

Rows = dict[str, NDArray[Any]]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of 8 rows and buffers of a page, so that a few steps fill several; a small reserve, no waiting for the disk."""
    monkeypatch.setattr(part, "MAX_GROUP_ROWS", 8)
    monkeypatch.setattr(writer, "SPOOL_BYTES", 1 << 12)
    monkeypatch.setattr(writer, "BALLAST_BYTES", 1 << 12)
    monkeypatch.setattr(os, "fsync", lambda file: None)


def rows_of(step: int, layer: Layer) -> Rows:
    """The patterns of a step, three to five of them, told apart by their values."""
    rows = 3 + step % 3
    rng = np.random.default_rng([step, layer.number])
    made: Rows = {
        "sample_id": np.arange(rows, dtype=np.int64) + 100 * step,
        "position": np.zeros(rows, np.int32),
        "label": np.full(rows, step % 10, np.int32),
        "task": np.full(rows, -1, np.int32),
    }
    for name, width in (("x", layer.d_in), ("e", layer.d_out)):
        made[name] = rng.standard_normal((rows, width)).astype(np.float32)
    return made


def add(store: StoreWriter, layer: Layer, rows: Rows) -> None:
    scalars = {name: rows[name] for name in ("sample_id", "position", "label", "task")}
    store.add_patterns(layer, scalars, rows["x"], rows["e"])


def write_step(store: StoreWriter) -> None:
    """The next step, each layer's rows in two pieces."""
    step = store.last_step + 1
    for layer in LAYERS:
        rows = rows_of(step, layer)
        add(store, layer, {name: values[:2] for name, values in rows.items()})
        add(store, layer, {name: values[2:] for name, values in rows.items()})
    store.end_step([GROUP])


def write_probe(store: StoreWriter, number: int) -> None:
    for layer in LAYERS:
        scalars = {name: np.full(2, number, np.int32) for name in ("position", "step", "label", "task", "predicted")}
        rows = np.full((2, layer.d_in), number, np.float32), np.full((2, layer.d_out), number, np.float32)
        store.write_probes(layer, {"test_id": np.array([2 * number, 2 * number + 1]), **scalars}, *rows)


def samples_of(number: int) -> pa.Table:
    return pa.table([[number], [-1], [3], [b"some bytes"], ["text/plain"]], schema=SAMPLES_SCHEMA)


def rows_in(log: Log) -> Rows:
    found: dict[str, list[NDArray[Any]]] = {column.name: [] for column in log.columns}
    for group in log.groups:
        mapping = Mapping(group.part)
        for name, arrays in found.items():
            arrays.append(mapping.array(group, name))
    return {name: np.concatenate(arrays) if arrays else np.zeros(0, np.int32) for name, arrays in found.items()}


def assert_holds(store: Store, steps: int) -> None:
    """The store has these first steps, bit for bit, in every layer and in `steps/`, and nothing else."""
    assert store.steps.numbers.tolist() == list(range(steps))
    assert store.last_step == steps - 1
    for layer in LAYERS:
        found = rows_in(store.patterns(layer))
        made = [rows_of(step, layer) for step in range(steps)]
        expected = {name: np.concatenate([rows[name] for rows in made]) for name in (made[0] if made else {})}
        assert found["step"].tolist() == [step for step, rows in enumerate(made) for _ in rows["x"]]
        assert all(found[name].tobytes() == values.tobytes() for name, values in expected.items())
    counts = [[len(rows_of(step, layer)["x"]) for layer in LAYERS] for step in range(steps)]
    assert store.steps.rows_per_step(len(LAYERS)).tolist() == counts


def open_unfinished(path: Path) -> Store:
    with pytest.warns(DualstoreWarning, match="the recording is unfinished"):
        return dualstore.open(path)


def temporary_files(path: Path) -> list[str]:
    return [
        found.name for found in path.rglob("*") if found.is_file() and (found.name.endswith(".tmp") or found.name.startswith("."))
    ]


def names_in(path: Path, folder: str) -> list[str]:
    return sorted(found.name for found in (path / folder).glob("part-*.parquet"))


# Steps and flushes


def test_a_store_gives_back_what_was_written(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    for step in range(12):
        write_step(store)
        if step % 5 == 4:
            store.flush()
    store.close()
    store.save_info(status="complete")
    assert_holds(dualstore.open(tmp_path), 12)
    assert (store.last_step, store.flushed_step) == (11, 11)
    assert temporary_files(tmp_path) == []


def test_the_parts_of_a_flush_cover_the_same_steps_in_every_layer(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    for step in range(12):
        write_step(store)
        if step in (0, 4, 5):
            store.flush()
    store.close()
    names = names_in(tmp_path, "steps")
    assert names == [f"part-0-{number:06d}.parquet" for number in range(4)]
    covered = [np.unique(pq.read_table(tmp_path / "steps" / name).column("step").to_numpy()).tolist() for name in names]
    assert covered == [[0], [1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11]]
    for layer in LAYERS:
        folder = tmp_path / "patterns" / f"layer={layer.number}"
        assert names_in(tmp_path, f"patterns/layer={layer.number}") == names
        assert [np.unique(pq.ParquetFile(folder / name).read(["step"]).column(0)).tolist() for name in names] == covered


def test_the_rank_is_in_the_name_of_every_part(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, replace(INFO, ranks=4), rank=3)
    write_step(store)
    store.close()
    assert {found.name for found in tmp_path.rglob("*.parquet")} == {"part-3-000000.parquet"}


def test_a_layer_without_rows_in_a_flush_has_no_part_there(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    write_step(store)
    store.flush()
    add(store, LAYERS[0], rows_of(1, LAYERS[0]))
    add(store, LAYERS[1], {name: values[:0] for name, values in rows_of(1, LAYERS[1]).items()})
    store.end_step([GROUP])
    store.flush()
    write_step(store)
    store.close()
    store.save_info(status="complete")
    assert names_in(tmp_path, "patterns/layer=1") == ["part-0-000000.parquet", "part-0-000002.parquet"]
    found = dualstore.open(tmp_path)
    assert found.steps.rows_per_step(2).tolist() == [[3, 3], [4, 0], [5, 5]]
    assert np.unique(rows_in(found.patterns(LAYERS[1]))["step"]).tolist() == [0, 2]
    assert temporary_files(tmp_path) == []


def test_a_step_without_any_rows_is_a_step(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    store.end_step([GROUP])
    store.close()
    store.save_info(status="complete")
    found = dualstore.open(tmp_path)
    assert found.steps.numbers.tolist() == [0]
    assert [found.patterns(layer).rows for layer in LAYERS] == [0, 0]


def test_a_store_of_no_steps_opens(tmp_path: Path) -> None:
    StoreWriter(tmp_path, INFO).close()
    with pytest.warns(DualstoreWarning, match="no step of it is complete"):
        store = dualstore.open(tmp_path)
    assert_holds(store, 0)


def test_a_step_under_way_at_the_end_is_dropped(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    for _ in range(4):
        write_step(store)
    add(store, LAYERS[0], rows_of(4, LAYERS[0]))
    store.close()
    store.save_info(status="complete")
    assert_holds(dualstore.open(tmp_path), 4)


def test_parts_grow_by_doubling_up_to_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 32 + (300 + 2) * 4, 32 + (2 + 4) * 4
    step_bytes = 4 * sum(row_bytes)
    monkeypatch.setattr(writer, "FIRST_PART_BYTES", 2 * step_bytes)
    monkeypatch.setattr(writer, "LAYER_PART_BYTES", 16 * 4 * max(row_bytes))
    store = StoreWriter(tmp_path, INFO)
    for _ in range(2 + 4 + 8 + 16 + 16 + 5):
        for layer in LAYERS:
            add(store, layer, {name: values[:4] for name, values in rows_of(1, layer).items()})
        store.end_step([GROUP])
    store.close()
    sizes = [pq.read_metadata(tmp_path / "steps" / name).num_rows for name in names_in(tmp_path, "steps")]
    assert sizes == [2, 4, 8, 16, 16, 5]


def test_a_part_ends_with_a_whole_row_group_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FIRST_PART_BYTES", 7 * 3 * (24 + 302 * 4 + 24 + 6 * 4))
    store = StoreWriter(tmp_path, INFO)
    for _ in range(20):
        for layer in LAYERS:
            add(store, layer, {name: values[:3] for name, values in rows_of(1, layer).items()})
        store.end_step([GROUP])
    store.close()
    first = pq.read_metadata(tmp_path / "patterns" / "layer=0" / "part-0-000000.parquet")
    assert [first.row_group(group).num_rows for group in range(first.num_row_groups)] == [8, 8, 2]


def test_a_flush_comes_when_its_time_is_over(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO, flush_s=0.0)
    for _ in range(3):
        write_step(store)
    store.wait()
    assert store.flushed_step == 2
    assert len(names_in(tmp_path, "steps")) == 3
    store.close()


def test_steps_are_in_the_store_when_the_flush_has_been_waited_for(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    for _ in range(3):
        write_step(store)
    assert store.flushed_step == -1
    store.flush()
    store.wait()
    assert store.flushed_step == 2
    write_step(store)
    with pytest.warns(DualstoreWarning, match="it is complete up to step 2"):
        assert_holds(dualstore.open(tmp_path), 3)
    store.close()


def test_patterns_that_were_dropped_are_not_in_the_store(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    write_step(store)
    for layer in LAYERS:
        add(store, layer, rows_of(17, layer))  # more rows than are left of the row group
        add(store, layer, rows_of(17, layer))
    store.drop_patterns(LAYERS[1])
    add(store, LAYERS[1], rows_of(1, LAYERS[1]))
    store.drop_patterns(LAYERS[0])
    add(store, LAYERS[0], rows_of(1, LAYERS[0]))
    store.end_step([GROUP])
    store.close()
    store.save_info(status="complete")
    assert_holds(dualstore.open(tmp_path), 2)


def test_dropping_patterns_of_a_layer_that_has_none_does_nothing(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    store.drop_patterns(LAYERS[0])
    write_step(store)
    store.drop_patterns(LAYERS[0])
    write_step(store)
    store.close()
    store.save_info(status="complete")
    assert_holds(dualstore.open(tmp_path), 2)


def test_a_step_all_of_whose_patterns_were_dropped_has_none(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    for layer in LAYERS:
        add(store, layer, rows_of(0, layer))
        store.drop_patterns(layer)
    store.end_step([GROUP])
    store.close()
    store.save_info(status="complete")
    found = dualstore.open(tmp_path)
    assert found.steps.rows_per_step(2).tolist() == [[0, 0]]
    assert list((tmp_path / "patterns").rglob("*.parquet")) == []


def test_rows_that_are_not_finite_are_counted_once(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    rows = rows_of(0, LAYERS[0])
    rows["x"][1, 1], rows["e"][0, 0] = np.nan, np.inf
    add(store, LAYERS[0], rows)
    store.drop_patterns(LAYERS[0])
    assert store.nonfinite_rows == 0
    add(store, LAYERS[0], rows)
    store.end_step([GROUP])
    assert store.nonfinite_rows == 2
    store.flush()
    assert store.nonfinite_rows == 2
    store.close()


def test_probes_samples_and_weights_are_written_with_the_next_flush(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    tensors = {"first.weight": np.arange(600, dtype=np.float32).reshape(2, 300)}
    store.write_weights("initial", tensors)
    for number in range(3):
        write_probe(store, number)
        store.write_samples(samples_of(number))
    assert names_in(tmp_path, "samples") == names_in(tmp_path, "probes/layer=0") == []
    write_step(store)
    store.close()
    store.save_info(status="complete")
    found = dualstore.open(tmp_path)
    assert [rows_in(found.probes(layer))["test_id"].tolist() for layer in LAYERS] == [[0, 1, 2, 3, 4, 5]] * 2
    assert np.array_equal(rows_in(found.probes(LAYERS[1]))["y"][:, 0], [0, 0, 1, 1, 2, 2])
    (samples,) = found.part_paths("samples")
    assert pq.read_table(samples).equals(pa.concat_tables(map(samples_of, range(3))))
    assert np.array_equal(found.tensors("initial")["first.weight"], tensors["first.weight"])


def test_store_json_says_what_is_known(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    assert StoreInfo.read(tmp_path) == INFO
    store.save_info(tasks=("mnist",), status="interrupted")
    assert StoreInfo.read(tmp_path).tasks == ("mnist",)
    store.close()
    assert dualstore.open(tmp_path).info_file.status == "interrupted"


def test_disk_space_is_held_back_while_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BALLAST_BYTES", 1 << 16)
    store = StoreWriter(tmp_path, INFO)
    (ballast,) = (found for found in tmp_path.iterdir() if found.name.endswith(".tmp"))
    assert ballast.stat().st_blocks * 512 >= 1 << 16
    store.close()
    assert not ballast.exists()


# What belongs to the store


def test_the_steps_part_is_what_makes_a_flush_part_of_the_store(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    for step in range(9):
        write_step(store)
        if step % 3 == 2:
            store.flush()
    store.close()
    (tmp_path / "steps" / "part-0-000002.parquet").unlink()
    with pytest.warns(DualstoreWarning, match=rf"{tmp_path}: the recording is unfinished; it is complete up to step 5"):
        found = dualstore.open(tmp_path)
    assert names_in(tmp_path, "patterns/layer=0")[2:] == ["part-0-000002.parquet", "part-0-000003.parquet"][:1]
    assert_holds(found, 6)


def test_parts_without_any_steps_part_do_not_count(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    for _ in range(3):
        write_step(store)
    store.close()
    (tmp_path / "steps" / "part-0-000000.parquet").unlink()
    with pytest.warns(DualstoreWarning, match="no step of it is complete"):
        found = dualstore.open(tmp_path)
    assert_holds(found, 0)


def test_a_store_opened_while_it_is_recorded_stays_as_it_was(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, INFO)
    for _ in range(3):
        write_step(store)
    store.flush()
    store.wait()
    found = open_unfinished(tmp_path)
    for _ in range(3):
        write_step(store)
    store.flush()
    store.wait()
    assert_holds(found, 3)
    assert_holds(open_unfinished(tmp_path), 6)
    store.close()


# A disk that fails


def record(path: Path, steps: int = 3, flush_every: int = 2) -> tuple[StoreWriter, int, list[OSError]]:
    """Writes steps until the disk fails, then closes. Returns the writer, how many steps were whole, and what was raised."""
    path.mkdir()
    store = StoreWriter(path, INFO)
    whole, raised = 0, []
    try:
        for step in range(steps):
            for layer in LAYERS:
                add(store, layer, rows_of(step, layer))
            whole += 1
            store.end_step([GROUP])
            if whole % flush_every == 0:
                store.flush()
    except OSError as error:
        raised.append(error)
    try:
        store.close()
    except OSError as error:
        raised.append(error)
    return store, whole, raised


Outage = Callable[[int, int, bool], bool]
"""Whether a write fails: its number, that of the first that does, and whether the reserve is still there."""

OUTAGES: dict[str, Outage] = {
    "for one write": lambda call, place, reserve: call == place,
    "until the reserve is freed": lambda call, place, reserve: call >= place and reserve,
    "from then on": lambda call, place, reserve: call >= place,
}


@pytest.mark.parametrize("outage", OUTAGES)
def test_a_full_disk_leaves_a_store_of_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outage: str) -> None:
    """Full at places all over a recording: the error is raised, the first steps are there, all if the reserve was enough."""
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, lambda call: False)
        record(tmp_path / "all")
    for place in np.unique(np.linspace(1, disk.calls, 10, dtype=int)).tolist():
        path = tmp_path / f"{place}"

        def fails(call: int, place: int = place, path: Path = path) -> bool:
            return OUTAGES[outage](call, place, (path / ".ballast.tmp").exists())

        with monkeypatch.context() as patch:
            FullDisk(patch, fails)
            store, whole, raised = record(path)
        assert temporary_files(path) == []
        found = open_unfinished(path)
        assert_holds(found, found.last_step + 1)
        assert store.flushed_step == found.last_step
        assert all(error.errno == errno.ENOSPC for error in raised)
        assert raised or found.last_step == 2
        if outage == "until the reserve is freed":
            assert found.last_step + 1 == whole


FAILING = ["fsync", "rename", "replace"]


def fail(monkeypatch: pytest.MonkeyPatch, name: str, place: int) -> list[int]:
    """Lets the call number `place` of `os.<name>` fail. Returns a list that grows by one with each call."""
    honest = getattr(os, name)
    calls: list[int] = []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == place:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return honest(*arguments)

    monkeypatch.setattr(os, name, failing)
    return calls


@pytest.mark.parametrize("name", FAILING)
def test_a_flush_that_fails_behind_the_steps_leaves_a_store_of_whole_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Syncing and renaming fail at one call, whichever it is: the error is raised, and the store is that of the flush before."""
    with monkeypatch.context() as patch:
        calls = fail(patch, name, 0)
        record(tmp_path / "all")
    left = {}
    for place in range(3, len(calls) + 1):
        path = tmp_path / f"{place}"
        with monkeypatch.context() as patch:
            fail(patch, name, place)
            _, _, raised = record(path)
        found = open_unfinished(path)
        assert_holds(found, found.last_step + 1)
        assert [error.errno for error in raised][:1] == [errno.EIO]
        if temporary_files(path):
            left[place] = temporary_files(path)
    assert left == {}


def test_an_interrupted_store_holds_nothing_of_a_flush_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreWriter(tmp_path, INFO)
    write_step(store)
    store.flush()
    store.wait()
    write_step(store)
    with monkeypatch.context() as patch:
        fail(patch, "replace", 1)  # the steps part, after the parts of both layers
        store.flush()
        with pytest.raises(OSError, match="Input/output error"):
            store.wait()
    with suppress(OSError):
        store.close()
    store.save_info(status="interrupted")
    assert store.flushed_step == 0
    assert_holds(dualstore.open(tmp_path), 1)


def test_steps_after_a_flush_that_failed_do_not_leave_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreWriter(tmp_path, INFO)
    write_step(store)
    with monkeypatch.context() as patch:
        fail(patch, "replace", 1)
        store.flush()
        with pytest.raises(OSError, match="Input/output error"):
            store.wait()
    with suppress(OSError):
        write_step(store)
    with suppress(OSError):
        store.close()
    found = open_unfinished(tmp_path)
    assert_holds(found, found.last_step + 1)


def test_closing_again_after_an_error_is_the_same_error_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who records closes once more when closing failed."""
    store = StoreWriter(tmp_path, INFO)
    write_step(store)
    with monkeypatch.context() as patch:
        fail(patch, "replace", 1)
        with pytest.raises(OSError, match="Input/output error"):
            store.close()
    with suppress(OSError):
        store.close()
    assert store.flushed_step == open_unfinished(tmp_path).last_step == -1


def test_a_probe_that_failed_leaves_no_half_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write of the second probe fails, whichever it is: its rows are there whole or not at all."""
    for place in range(1, 4):
        path = tmp_path / f"{place}"
        path.mkdir()
        store = StoreWriter(path, INFO)
        write_step(store)
        write_probe(store, 0)
        with monkeypatch.context() as patch, suppress(OSError):
            FullDisk(patch, lambda call, place=place: call == place)  # type: ignore[misc]
            write_probe(store, 1)
        store.close()
        store.save_info(status="complete")
        for layer in LAYERS:
            log = dualstore.open(path).probes(layer)
            rows = rows_in(log)
            assert len(rows["x"]) in (2, 4)
            assert {name: len(values) for name, values in rows.items()} == dict.fromkeys(rows, len(rows["x"]))
            assert [pq.read_table(found.path, page_checksum_verification=True).num_rows for found in log.parts] == [len(rows["x"])]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_small_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / "folder" / "file"
    write_whole(path, b"old")
    with monkeypatch.context() as patch:
        fail(patch, name, 1)
        with pytest.raises(OSError, match="Input/output error"):
            write_whole(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_table_is_written_as_one_parquet_file(tmp_path: Path) -> None:
    write_table(tmp_path / "samples" / "part.parquet", samples_of(7))
    assert pq.read_table(tmp_path / "samples" / "part.parquet").equals(samples_of(7))


# Processes that end


RECORDER = """
    import sys
    from pathlib import Path
    from tests.test_writer import INFO, StoreWriter, part, write_step, writer

    part.MAX_GROUP_ROWS, writer.SPOOL_BYTES = 8, 1 << 12
    store = StoreWriter(Path(sys.argv[1]), INFO)
    {prepare}
    try:
        while True:
            write_step(store)
            if store.last_step % {flush_every} == 0:
                store.flush()
                store.wait()
            print(store.flushed_step, flush=True)
    finally:
        store.close()
"""


def start(path: Path, prepare: str = "", flush_every: int = 1000) -> "subprocess.Popen[str]":
    """A process that records steps without end and says up to which one they are flushed."""
    script = textwrap.dedent(RECORDER).format(prepare=prepare, flush_every=flush_every)
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_killed_while_recording_leaves_a_readable_store(tmp_path: Path) -> None:
    process = start(tmp_path, flush_every=5)
    assert process.stdout is not None
    said = [int(line) for line in itertools.islice(process.stdout, 23)]
    process.send_signal(signal.SIGKILL)
    later = [int(line) for line in process.stdout]
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    found = open_unfinished(tmp_path)
    assert found.info_file.status == "recording"
    assert found.last_step >= max(said + later) >= 20
    assert_holds(found, found.last_step + 1)


def test_a_file_that_may_not_grow_ends_the_recording_with_the_last_flush(tmp_path: Path) -> None:
    """The system's own limit on the size of a file, which the parts of a store reach as they double."""
    prepare = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); writer.FIRST_PART_BYTES = 10_000"
    process = start(tmp_path, prepare)
    said, complaint = process.communicate(timeout=60)
    assert "OSError: [Errno 27] File too large" in complaint
    found = open_unfinished(tmp_path)
    assert_holds(found, found.last_step + 1)
    assert found.last_step >= int(said.splitlines()[-1]) > 0
    assert temporary_files(tmp_path) == []
    assert max(path.stat().st_size for path in tmp_path.rglob("*.parquet")) > 30_000

"""Writing beside training: the queue, both ways of writing give one store, and what a failure or a crash leaves."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import dualstore
from dualstore.capture.background import QUEUE_BYTES, Background, Inline, begin_work
from dualstore.errors import DualstoreWarning, RecordError
from dualstore.part import PartWriter

torch.set_num_threads(1)
WAYS = {"inline": 0, "queue": 1 << 20}
STEPS = 8

X = torch.linspace(-2, 2, 48, dtype=torch.float64).reshape(12, 4).sin()
Y = torch.arange(12) % 3


def waiting(job: Callable[[], Any]) -> threading.Thread:
    """A thread that runs the job."""
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_inline_runs_a_job_at_once() -> None:
    done: list[int] = []
    inline = Inline()
    inline.put(lambda: done.append(1), 10**12)
    assert done == [1]
    with pytest.raises(OSError, match="No space"):
        inline.put(fail, 0)
    inline.drain()
    inline.abandon()
    inline.close()


def test_jobs_run_in_order_on_one_thread() -> None:
    done: list[tuple[int, int]] = []
    background = Background(1 << 20)
    for number in range(200):
        background.put(lambda number=number: done.append((number, threading.get_ident())), number)
    background.close()
    assert [number for number, _ in done] == list(range(200))
    assert {thread for _, thread in done} != {threading.get_ident()}
    assert len({thread for _, thread in done}) == 1


@pytest.mark.parametrize(
    ("queue_bytes", "cores", "device", "expected"),
    [
        (None, 1, "cpu", 0),
        (None, 2, "cpu", QUEUE_BYTES),
        (None, 1, "meta", QUEUE_BYTES),
        (0, 2, "meta", 0),
        (1000, 1, "cpu", 1000),
    ],
)
def test_a_thread_writes_where_a_core_is_free_for_one(
    monkeypatch: pytest.MonkeyPatch, queue_bytes: int | None, cores: int, device: str, expected: int
) -> None:
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    work = begin_work(queue_bytes, [torch.zeros(1), torch.zeros(1, device=device)])
    assert (work._limit if isinstance(work, Background) else 0) == expected
    work.close()


def test_the_thread_has_pytorch_work_alone_and_other_threads_keep_theirs() -> None:
    """A second team of OpenMP threads would put those of training to sleep between any two operations."""
    cores, numbers, large = torch.get_num_threads(), list[int](), torch.ones(1 << 20)
    torch.set_num_threads(2)
    try:
        background = Background(1)
        for _ in range(2):  # the first operation of a thread may change its number
            background.put(lambda: numbers.append(torch.get_num_threads() + int(large.mul(0).sum())), 0)
        background.close()
        mine = torch.get_num_threads()
        later = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        torch.set_num_threads(cores)
    assert (numbers, mine) == ([1, 1, 2], 2)


def test_put_waits_while_the_bound_is_reached() -> None:
    go, done = threading.Event(), threading.Event()
    background = Background(100)
    background.put(go.wait, 60)
    background.put(lambda: None, 40)
    blocked = waiting(lambda: (background.put(lambda: None, 1), done.set()))
    assert not done.wait(0.1)
    go.set()
    assert done.wait(10)
    blocked.join(10)
    background.close()


def test_a_job_larger_than_the_bound_waits_until_it_is_alone() -> None:
    go, done = threading.Event(), threading.Event()
    background = Background(100)
    background.put(go.wait, 1)
    waiting(lambda: (background.put(lambda: None, 10**9), done.set()))
    assert not done.wait(0.1)
    go.set()
    assert done.wait(10)
    background.close()


def test_a_job_that_is_done_is_let_go_of() -> None:
    class Payload:
        """Something whose end can be seen."""

        def __del__(self) -> None:
            gone.set()

        def write(self) -> None:
            """Nothing."""

    gone = threading.Event()
    background = Background(100)
    background.put(Payload().write, 1)
    assert gone.wait(10)
    background.close()


@pytest.mark.parametrize("size", [0, 7])
def test_drain_waits_for_every_job_also_for_those_without_bytes(size: int) -> None:
    done: list[int] = []
    background = Background(100)
    for number in range(3):
        background.put(lambda number=number: (time.sleep(0.02), done.append(number)), size)
    background.drain()
    assert done == [0, 1, 2]
    background.close()


@pytest.mark.parametrize("size", [0, 7])
def test_the_first_error_surfaces_everywhere_and_ends_the_work(size: int) -> None:
    done: list[int] = []
    go = threading.Event()
    background = Background(100)
    background.put(go.wait, size)
    background.put(fail, size)
    background.put(lambda: done.append(1), size)
    go.set()
    with pytest.raises(OSError, match="No space"):
        background.drain()
    with pytest.raises(OSError, match="No space"):
        background.put(lambda: done.append(2), size)
    with pytest.raises(OSError, match="No space"):
        background.close()
    assert done == []


def test_an_error_wakes_a_put_that_waits() -> None:
    go, woken = threading.Event(), threading.Event()
    background = Background(100)
    background.put(lambda: (go.wait(), fail()), 100)

    def put() -> None:
        with pytest.raises(OSError, match="No space"):
            background.put(lambda: None, 100)
        woken.set()

    waiting(put)
    go.set()
    assert woken.wait(10)
    background.abandon()


def test_abandon_runs_nothing_more_and_ends_the_thread() -> None:
    go = threading.Event()
    done: list[int] = []
    background = Background(1000)
    background.put(go.wait, 1)
    for number in range(5):
        background.put(lambda number=number: done.append(number), 1)
    ending = waiting(background.abandon)

    def put_until_refused() -> None:
        while True:
            background.put(lambda: None, 0)
            time.sleep(0.001)

    with pytest.raises(RuntimeError, match="abandoned"):
        put_until_refused()
    go.set()
    ending.join(10)
    assert not ending.is_alive()
    assert done == []
    background.abandon()


# Both ways of writing


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()


def step(recorder: dualstore.Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step, on rows that are its own."""
    rows = [number % 12, (number + 5) % 12, (number + 7) % 12][: 1 + number % 3]
    with recorder.batch(rows, Y[rows], task=f"task {number % 2}") as batch:
        loss = nn.functional.cross_entropy(model(X[rows]), Y[rows])
        batch.loss = loss.detach()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    optimizer.zero_grad()


def run(path: Path, *, flush_every: int = 3, steps: int = STEPS, **options: Any) -> None:
    """Records a run with everything that a store may hold."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with dualstore.record(model, optimizer, path, dtype="float64", **options) as recorder:
        for number in range(steps):
            step(recorder, model, optimizer, number)
            if (number + 1) % flush_every == 0:
                recorder.flush()
        recorder.samples(range(12), Y, [f"text {number}" for number in range(12)])
        model.eval()
        with recorder.probe([1, 2], Y[:2], loss=lambda y: nn.functional.cross_entropy(y, Y[:2], reduction="none")):
            model(X[:2])


def tables(store: dualstore.Store) -> dict[str, list[dict[str, Any]]]:
    """All that a store holds, in the order of the log."""
    found: dict[str, list[dict[str, Any]]] = {"steps": store.steps.table.to_pylist()}
    for folder in ("patterns", "samples", "probes"):
        found[folder] = []
        for path in store.part_paths(folder):
            rows = pq.ParquetFile(path, page_checksum_verification=True).read().to_pylist()
            found[folder] += [{"folder": path.parent.name, **row} for row in rows]
        found[folder].sort(key=lambda row: row["folder"])
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What an undisturbed run leaves."""
    path = tmp_path_factory.mktemp("whole") / "store"
    run(path)
    return tables(dualstore.open(path))


def opened(path: Path) -> dualstore.Store:
    """The store, complete or not."""
    status = re.search(r'"status": "(\w+)"', (path / "store.json").read_text())
    assert status is not None
    if status[1] != "recording":
        return dualstore.open(path)
    with pytest.warns(DualstoreWarning, match="the recording is unfinished"):
        return dualstore.open(path)


def assert_prefix(store: dualstore.Store, whole: dict[str, list[dict[str, Any]]], last: int) -> None:
    """The store ends with this step and has the rows of the undisturbed run up to it."""
    assert store.last_step == last
    found = tables(store)
    for name in ("patterns", "steps"):
        assert found[name] == [row for row in whole[name] if row["step"] <= last]


@pytest.mark.parametrize("queue_bytes", [0, 1, 1 << 20, 1 << 30])
@pytest.mark.parametrize("flush_every", [1, 1000])
def test_all_ways_of_writing_leave_the_same_store(
    tmp_path: Path, whole: dict[str, list[dict[str, Any]]], queue_bytes: int, flush_every: int
) -> None:
    run(tmp_path / "store", queue_bytes=queue_bytes, flush_every=flush_every)
    store = dualstore.open(tmp_path / "store")
    assert tables(store) == whole
    assert store.verify().problems == []
    assert not list((tmp_path / "store").rglob(".*"))


def test_the_clock_flushes_too(tmp_path: Path, whole: dict[str, list[dict[str, Any]]]) -> None:
    run(tmp_path / "store", flush_every=1000, flush_s=0.0)
    assert len(list((tmp_path / "store" / "steps").iterdir())) >= STEPS
    assert tables(dualstore.open(tmp_path / "store")) == whole


class Disk:
    """Stands before os.pwrite: full from one call on, for good or until the space held back is freed."""

    def __init__(self, store: Path, *, full_at: int | None, for_good: bool) -> None:
        self._store, self._full_at, self._for_good = store, full_at, for_good
        self._write = os.pwrite
        self.calls = 0

    def pwrite(self, file: int, data: Any, at: int) -> int:
        self.calls += 1
        if self._full_at is not None and self.calls >= self._full_at and (self._for_good or list(self._store.glob(".ballast*"))):
            fail()
        return self._write(file, data, at)


@pytest.mark.parametrize("queue_bytes", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("for_good", [False, True], ids=["ballast helps", "for good"])
@pytest.mark.parametrize("flush_every", [2, 1000], ids=["flushes", "one flush"])
def test_a_full_disk_ends_the_run_and_leaves_a_store_up_to_the_step_it_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, list[dict[str, Any]]],
    queue_bytes: int,
    for_good: bool,
    flush_every: int,
) -> None:
    real = os.pwrite
    counted = Disk(tmp_path / "all", full_at=None, for_good=False)
    monkeypatch.setattr(os, "pwrite", counted.pwrite)
    run(tmp_path / "all", queue_bytes=queue_bytes, flush_every=flush_every)
    monkeypatch.setattr(os, "pwrite", real)
    ended = set()
    for full_at in np.linspace(1, counted.calls, 5, dtype=int):
        path = tmp_path / str(full_at)
        monkeypatch.setattr(os, "pwrite", Disk(path, full_at=full_at, for_good=for_good).pwrite)
        reason = None
        try:
            run(path, queue_bytes=queue_bytes, flush_every=flush_every)
        except RecordError as error:
            reason = str(error)
        monkeypatch.setattr(os, "pwrite", real)
        store = opened(path)
        if reason is None:  # the space held back was enough to end the run
            assert not for_good
            assert_prefix(store, whole, STEPS - 1)
            continue
        assert reason.startswith(f"{path}: writing failed: No space left on device; recording has stopped")
        said = re.search(r"complete up to step (\d+)$", reason)
        assert (said is None) == reason.endswith("without a complete step")
        assert_prefix(store, whole, int(said[1]) if said else -1)
        ended.add(store.last_step)
    assert ended
    assert flush_every > STEPS or len(ended) > 1


@pytest.mark.parametrize("queue_bytes", WAYS.values(), ids=WAYS)
def test_a_full_disk_costs_no_step_before_the_one_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, list[dict[str, Any]]], queue_bytes: int
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    path = tmp_path / "store"
    recorder = dualstore.record(model, optimizer, path, dtype="float64", queue_bytes=queue_bytes)
    for number in range(4):
        step(recorder, model, optimizer, number)
    recorder._background.drain()
    monkeypatch.setattr(dualstore.part.PartWriter, "append", lambda *_: fail())

    def go_on() -> None:
        for number in range(4, STEPS):
            step(recorder, model, optimizer, number)
        recorder.close()

    with pytest.raises(RecordError, match=f"^{re.escape(str(path))}: writing failed: No space left.* complete up to step 3$"):
        go_on()
    monkeypatch.undo()
    assert_prefix(dualstore.open(path), whole, 3)


@pytest.mark.parametrize("queue_bytes", WAYS.values(), ids=WAYS)
def test_rows_whose_steps_could_not_be_written_are_not_part_of_the_store(
    tmp_path: Path, whole: dict[str, list[dict[str, Any]]], queue_bytes: int
) -> None:
    path = tmp_path / "store"
    path.mkdir()
    blocked = path / "steps" / "part-0-000001.parquet"
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    recorder = dualstore.record(model, optimizer, path, dtype="float64", queue_bytes=queue_bytes)
    blocked.mkdir(parents=True)  # the second steps part cannot take its name

    def train() -> None:
        for number in range(STEPS):
            step(recorder, model, optimizer, number)
            if number % 3 == 2:
                recorder.flush()

    with pytest.raises(RecordError, match=r"writing failed: Is a directory; .* complete up to step 2$"):
        train()
    blocked.rmdir()
    assert_prefix(opened(path), whole, 2)


def test_a_recorder_whose_writing_failed_is_closed_and_training_may_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=0) as recorder:
        step(recorder, model, optimizer, 0)
        monkeypatch.setattr(dualstore.part.PartWriter, "append", lambda *_: fail())
        with pytest.raises(RecordError, match="writing failed"):
            step(recorder, model, optimizer, 1)
        monkeypatch.undo()
        with pytest.raises(RecordError, match="the recorder is closed"), recorder.batch([1]):
            pass
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()
    assert dualstore.open(tmp_path / "store").last_step == 0


# What a run that ends early leaves


@pytest.mark.parametrize("queue_bytes", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("where", ["between steps", "before the step"])
def test_an_exception_in_the_loop_leaves_an_interrupted_store_that_verifies(
    tmp_path: Path, whole: dict[str, list[dict[str, Any]]], queue_bytes: int, where: str
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def train() -> None:
        with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=queue_bytes) as recorder:
            for number in range(5):
                step(recorder, model, optimizer, number)
            if where == "before the step":
                with recorder.batch([1, 2]):
                    model(X[:2]).sum().backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    store = dualstore.open(tmp_path / "store")
    assert store.info()["status"] == "interrupted"
    assert store.verify().problems == []
    assert_prefix(store, whole, 4)


def test_an_exception_is_not_hidden_by_a_writer_that_fails_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def train() -> None:
        with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
            step(recorder, model, optimizer, 0)
            monkeypatch.setattr(dualstore.part.PartWriter, "finish", lambda *_: fail())
            raise ZeroDivisionError

    with pytest.warns(DualstoreWarning, match="writing failed: No space left on device"), pytest.raises(ZeroDivisionError):
        train()
    monkeypatch.undo()
    assert opened(tmp_path / "store").last_step == -1


SCRIPT = """
import sys, time
import torch
import dualstore
from tests.test_background import mlp, step

for path, queue_bytes in zip(sys.argv[1:], (0, 1 << 20)):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    recorder = dualstore.record(model, optimizer, path, dtype="float64", queue_bytes=queue_bytes)
    for number in range(8):
        step(recorder, model, optimizer, number)
        if number == 5:
            recorder.flush()
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_run_leaves_a_store_up_to_its_last_flush(tmp_path: Path, whole: dict[str, list[dict[str, Any]]]) -> None:
    paths = [tmp_path / name for name in WAYS]
    command = [sys.executable, "-c", SCRIPT, *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[1]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    for path in paths:
        with pytest.warns(DualstoreWarning, match="the recording is unfinished; it is complete up to step 5"):
            store = dualstore.open(path)
        assert_prefix(store, whole, 5)
        found = store.verify()
        assert not found.ok
        assert all("an unfinished recording has no final ones" in problem for problem in found.problems)
        keys = [row["x"] for row in tables(store)["patterns"] if row["folder"] == "layer=0"]
        best = store.query(X[0].numpy(), layer=0, top=1).to_dicts()[0]
        assert best["alpha"] == pytest.approx(float((np.array(keys) @ X[0].numpy()).max()))


def test_a_crash_between_rows_and_steps_leaves_the_rows_out(tmp_path: Path, whole: dict[str, list[dict[str, Any]]]) -> None:
    run(tmp_path / "store")
    path = tmp_path / "store"
    text = (path / "store.json").read_text().replace('"complete"', '"recording"')
    (path / "store.json").write_text(text)
    sorted((path / "steps").iterdir())[-1].unlink()
    store = opened(path)
    assert_prefix(store, whole, 5)


# What changes while it waits


class Gate:
    """Holds every write back, or every call of another function, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any = os, name: str = "pwrite") -> None:
        self.opened = threading.Event()
        held = getattr(owner, name)

        def waits(*arguments: Any) -> Any:
            self.opened.wait(10)
            return held(*arguments)

        monkeypatch.setattr(owner, name, waits)


def test_an_input_changed_in_place_before_it_is_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    recorder = dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=1 << 20, audit_every=0)
    gate = Gate(monkeypatch)

    def train() -> None:
        for _ in range(2):
            x = X.clone().requires_grad_()
            state = x * 2  # made by autograd, so the recorder does not copy it
            with recorder.batch(range(12)):
                model(state).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state.detach_().zero_()
        gate.opened.set()
        recorder.close()

    with pytest.raises(RecordError, match="layer 'model': its input was changed in place") as caught:
        train()
    assert "make the change on a copy" in str(caught.value)
    assert dualstore.open(tmp_path / "store").last_step == 0


def test_an_error_changed_in_place_before_it_is_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    recorder = dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=1 << 20, audit_every=0)
    gate = Gate(monkeypatch)
    given = torch.ones(12, 3, dtype=torch.float64)

    def train() -> None:
        for _ in range(2):
            with recorder.batch(range(12)):
                model(X).backward(given)
            optimizer.step()
            optimizer.zero_grad()
        given.zero_()
        gate.opened.set()
        recorder.close()

    with pytest.raises(RecordError, match="layer 'model': its error was changed in place"):
        train()
    assert dualstore.open(tmp_path / "store").last_step <= 0


KEYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the parameter": lambda parameter: parameter,
    "a view of it": lambda parameter: parameter[None].expand(3, 2, 4),
}


@pytest.mark.parametrize("shown", KEYS.values(), ids=KEYS)
def test_what_is_learned_may_be_the_input_and_change_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = nn.Linear(4, 3).double()
    learned = X[:2].clone().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    gate, seen = Gate(monkeypatch, PartWriter, "append"), []
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=1 << 20, audit_every=0) as recorder:
        for _ in range(3):
            x = shown(learned)
            seen.append(x.detach().clone().reshape(-1, 4).numpy())
            with recorder.batch(range(len(x))):
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                learned.sub_(0.1)
        gate.opened.set()
    store = dualstore.open(tmp_path / "store")
    assert store.verify().problems == []
    np.testing.assert_array_equal([row["x"] for row in tables(store)["patterns"]], np.concatenate(seen))


def test_gradients_may_be_changed_before_the_errors_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3, bias=False).double()
    added = torch.zeros(12, 3, dtype=torch.float64, requires_grad=True)  # its gradient is the error, number for number
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    gate = Gate(monkeypatch, PartWriter, "append")
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=1 << 20, audit_every=0) as recorder:
        for _ in range(3):
            with recorder.batch(range(12)):
                (model(X) + added).square().sum().backward()
            nn.utils.clip_grad_norm_([*model.parameters(), added], 0.1)
            optimizer.step()
            optimizer.zero_grad()
            added.grad = None
        gate.opened.set()
    assert dualstore.open(tmp_path / "store").verify().problems == []


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_input_of_a_recurrence_may_be_filled_again_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, layers: int
) -> None:
    model = kind(4, 3, num_layers=layers, batch_first=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    gate, buffer = Gate(monkeypatch, PartWriter, "append"), torch.empty(2, 3, 4, dtype=torch.float64)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=1 << 20, audit_every=0) as recorder:
        for _ in range(3):
            with recorder.batch(range(2)):
                model(buffer.copy_(torch.rand(2, 3, 4)))[0].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            buffer.fill_(float("nan"))
        gate.opened.set()
    assert dualstore.open(tmp_path / "store").verify().problems == []


@pytest.mark.filterwarnings("ignore:max_bytes")
def test_a_limit_of_bytes_counts_what_waits_to_be_written(tmp_path: Path) -> None:
    found = []
    for name, queue_bytes in WAYS.items():
        model = nn.Linear(400, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        limits: dict[str, Any] = {"queue_bytes": queue_bytes, "max_bytes": 200_000}
        recorder = dualstore.record(model, optimizer, tmp_path / name, dtype="float64", **limits)
        for _ in range(30):
            with recorder.batch(range(12)):
                model(torch.ones(12, 400, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.close()
        found.append(dualstore.open(tmp_path / name).info()["rows"])
    assert found[0] == found[1] > 0


def test_the_queue_holds_no_more_than_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    size = X.nbytes + 12 * 3 * 8
    recorder = dualstore.record(model, optimizer, tmp_path / "store", dtype="float64", queue_bytes=3 * size, audit_every=0)
    gate = Gate(monkeypatch)
    taken: list[int] = []

    def train() -> None:
        for number in range(10):
            with recorder.batch(range(12)):
                model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(number)

    training = waiting(train)
    deadline = time.monotonic() + 10
    while len(taken) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    training.join(0.1)
    assert training.is_alive()
    assert len(taken) == 3
    gate.opened.set()
    training.join(10)
    recorder.close()
    assert dualstore.open(tmp_path / "store").info()["rows"] == 120


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    run(tmp_path / "store", queue_bytes=1 << 20)
    assert set(threading.enumerate()) <= before


def test_parts_written_beside_training_are_the_same_bytes(tmp_path: Path) -> None:
    for name, queue_bytes in WAYS.items():
        run(tmp_path / name, queue_bytes=queue_bytes)
    for part in sorted((tmp_path / "inline" / "patterns").rglob("*.parquet")):
        other = tmp_path / "queue" / part.relative_to(tmp_path / "inline")
        assert part.read_bytes() == other.read_bytes()
        assert pa.Table.equals(pq.ParquetFile(part).read(), pq.ParquetFile(other).read())

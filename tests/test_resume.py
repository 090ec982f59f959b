"""Resuming: a recording that goes on from a checkpoint is that of a run that was never interrupted."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualstore
from dualstore.errors import RecordError

torch.set_num_threads(1)

X = torch.linspace(-2, 2, 256, dtype=torch.float64).reshape(64, 4).sin()
Y = torch.arange(64) % 3
BATCHES = torch.arange(64).split(8)
"""Of one epoch."""

Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True),
}


class Run:
    """A model, its optimiser and the steps to train it."""

    def __init__(self, make: Make = OPTIMIZERS["momentum"]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
        self.optimizer = make(self.model)

    def record(self, path: Path, **options: Any) -> dualstore.Recorder:
        return dualstore.record(self.model, self.optimizer, path, dtype="float64", **options)

    def train(self, recorder: dualstore.Recorder, start: int, end: int) -> None:
        """The batches from number `start` on, over as many epochs as it takes."""
        for number in range(start, end):
            rows = BATCHES[number % len(BATCHES)]
            with recorder.batch(rows, Y[rows], task="t"):
                nn.functional.cross_entropy(self.model(X[rows]), Y[rows]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> tuple[Any, Any]:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, state: tuple[Any, Any]) -> "Run":
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(copy.deepcopy(state[1]))
        return self


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    text = "SELECT layer, step, epoch, sample_id, label, task, x, e FROM patterns ORDER BY ALL"
    return dualstore.open(path).sql(text).to_arrow().to_pylist()


def whole(path: Path, make: Make, steps: int) -> list[Any]:
    run = Run(make)
    with run.record(path) as recorder:
        run.train(recorder, 0, steps)
    return rows_of(path)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("saved", "reached"), [(5, 5), (5, 13), (11, 12), (0, 6)])
def test_a_resumed_recording_is_that_of_a_run_that_was_never_interrupted(
    tmp_path: Path, name: str, saved: int, reached: int
) -> None:
    make = OPTIMIZERS[name]
    expected = whole(tmp_path / "whole", make, 20)
    run = Run(make)
    recorder = run.record(tmp_path / "store")
    run.train(recorder, 0, saved)
    recorder.flush()
    state = run.state()
    run.train(recorder, saved, reached)
    recorder.close()
    again = Run(make).load(state)
    with again.record(tmp_path / "store", resume=True) as recorder:
        assert recorder.steps == saved
        again.train(recorder, saved, 20)
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    assert max(check.weight_residual or 0 for check in store.verify().layers) < 1e-12
    assert rows_of(tmp_path / "store") == expected
    assert store.steps.numbers.tolist() == list(range(20))
    assert store.steps.epochs.tolist() == [step // 8 for step in range(20)]


def test_a_store_may_be_resumed_several_times_and_within_a_part(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole", OPTIMIZERS["momentum"], 30)
    run, states = Run(), {}
    recorder = run.record(tmp_path / "store")
    for start in range(0, 24, 4):
        run.train(recorder, start, start + 4)
        states[start + 4] = run.state()
    recorder.close()
    for saved, until in ((20, 22), (8, 21), (12, 13), (12, 30)):
        again = Run().load(states[saved])
        with again.record(tmp_path / "store", resume=True) as recorder:
            again.train(recorder, saved, until)
    assert rows_of(tmp_path / "store") == expected
    assert dualstore.open(tmp_path / "store").verify().ok


def test_a_killed_recording_is_resumed_from_its_last_flush(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole", OPTIMIZERS["momentum"], 20)
    run = Run()
    recorder = run.record(tmp_path / "store")
    run.train(recorder, 0, 9)
    recorder.flush()
    state = run.state()
    run.train(recorder, 9, 14)
    recorder._writing.writer._spool.close()  # what a killed process leaves: open parts, and the ballast without its lock
    recorder._writing.writer._held.close()
    recorder._detach()
    assert list((tmp_path / "store").rglob("*.tmp"))
    again = Run().load(state)
    with again.record(tmp_path / "store", resume=True) as recorder:
        again.train(recorder, 9, 20)
    assert rows_of(tmp_path / "store") == expected
    assert not list((tmp_path / "store").rglob("*.tmp"))


def test_a_store_that_another_process_writes_is_not_resumed(tmp_path: Path) -> None:
    run = Run()
    recorder = run.record(tmp_path / "store")
    run.train(recorder, 0, 4)
    recorder.flush()
    recorder._detach()
    recorder._writing.writer._held.close()
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / "store" / ".ballast.tmp")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        again = Run().load(run.state())
        resuming(tmp_path / "store", again, "another process is recording into it; end that first")
        other.communicate("\n")
    with again.record(tmp_path / "store", resume=True) as recorder:
        again.train(recorder, 4, 6)
    assert dualstore.open(tmp_path / "store").verify().ok


def test_probes_of_later_weights_are_forgotten(tmp_path: Path) -> None:
    run = Run()
    with run.record(tmp_path / "store") as recorder:
        for step in range(6):
            run.train(recorder, step, step + 1)
            with recorder.probe([step, 100]):
                run.model(X[:2])
            if step == 2:
                state = run.state()
    again = Run().load(state)
    with again.record(tmp_path / "store", resume=True) as recorder:
        again.train(recorder, 3, 4)
    found = dualstore.open(tmp_path / "store").sql("SELECT DISTINCT test_id, step FROM probes ORDER BY ALL").to_dicts()
    assert [(row["test_id"], row["step"]) for row in found] == [(0, 1), (1, 2), (2, 3), (100, 1), (100, 2), (100, 3)]


def test_the_index_is_that_of_the_resumed_store(tmp_path: Path) -> None:
    run = Run()
    with run.record(tmp_path / "store") as recorder:
        run.train(recorder, 0, 8)
        state = run.state()
        run.train(recorder, 8, 16)
    again = Run().load(state)
    with again.record(tmp_path / "store", resume=True) as recorder:
        again.train(recorder, 8, 12)
    store = dualstore.open(tmp_path / "store")
    found = store.totals(np.ones(4), layer=0, by="epoch").to_dicts()
    keys = [row for row in rows_of(tmp_path / "store") if row["layer"] == 0]  # type: ignore[call-overload]
    for row in found:
        expected = sum(sum(key["x"]) for key in keys if key["epoch"] == row["epoch"])  # type: ignore[call-overload]
        assert row["total"] == pytest.approx(expected, abs=1e-12)
    assert sum(row["count"] for row in found) == len(keys)


def resuming(path: Path, run: Run, message: str, **options: Any) -> None:
    before = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    with pytest.raises(RecordError, match=re.escape(message)):
        run.record(path, resume=True, **options)
    assert {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()} == before


def test_what_does_not_fit_the_store_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path, run = tmp_path / "store", Run()
    with run.record(path) as recorder:
        run.train(recorder, 0, 4)
        early = run.state()
        run.train(recorder, 4, 8)
    last = run.state()
    resuming(tmp_path / "none", Run(), "no store there")
    other = Run().load(last)
    with torch.no_grad():
        other.model[0].weight[0, 0] += 1
    resuming(path, other, "the model's weights are those of no step that the store has whole, up to step 7")
    half = Run()
    half.model.load_state_dict(early[0])
    resuming(path, half, "the model's weights are those after step 3, but the optimiser's state is not")
    wider = Run()
    wider.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    wider.optimizer = OPTIMIZERS["momentum"](wider.model)
    resuming(path, wider, "layer 1: the store has '2' (Linear, 6 to 3, ")
    resuming(path, Run(OPTIMIZERS["AdamW"]), "optimizer: the store has SGD, found AdamW")
    resuming(path, Run().load(last), "layer 0: the store has '0'", layers=["2"])
    assert dualstore.open(path).verify().ok


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"keys_only": True, "dtype": "float32"}, {"dtype": "float64"}])
def test_stores_of_tokens_half_precision_and_bare_keys_are_resumed(tmp_path: Path, options: dict[str, Any]) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(recorder: dualstore.Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, start: int, end: int) -> None:
        for step in range(start, end):
            rows = torch.arange(step, step + 4)
            with recorder.batch(rows, rows % 3):
                nn.functional.cross_entropy(model(rows % 9), rows % 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = made()
    with dualstore.record(model, optimizer, tmp_path / "whole", **options) as recorder:
        train(recorder, model, optimizer, 0, 9)
    model, optimizer = made()
    with dualstore.record(model, optimizer, tmp_path / "store", **options) as recorder:
        train(recorder, model, optimizer, 0, 4)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(recorder, model, optimizer, 4, 7)
    model, optimizer = made()
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    with dualstore.record(model, optimizer, tmp_path / "store", resume=True, **options) as recorder:
        assert recorder.steps == 4
        train(recorder, model, optimizer, 4, 9)
    text = "SELECT * EXCLUDE (slot) FROM patterns ORDER BY ALL"
    whole, store = dualstore.open(tmp_path / "whole"), dualstore.open(tmp_path / "store")
    assert store.sql(text).to_dicts() == whole.sql(text).to_dicts()
    assert store.verify().ok

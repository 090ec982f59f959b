"""Doing an experiment again: trains or reuses its stores, measures them, and puts the numbers beside the paper's."""

import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dualstore
from dualstore.errors import DualstoreError
from dualstore.experiments.catalogue import COMPARISONS, EXPERIMENTS
from dualstore.experiments.experiment import Experiment, Request, plain
from dualstore.experiments.figures import draw_examples
from dualstore.experiments.findings import Measured, Reproduction, Run, compare, join
from dualstore.summary import bytes_below
from dualstore.writer import write_whole

__all__ = ["reproduce", "train"]

Progress = Callable[[str, int, int], None]
"""Called with (what is done, steps done, steps in all)."""


def train(name: str, path: Path, request: Request, progress: Progress) -> dict[str, float]:
    """Trains and records an experiment, indexes the store, and returns the seconds of both and what only training knows."""
    experiment = EXPERIMENTS[name]
    settings = experiment.settings(request)
    started = time.perf_counter()
    found = experiment.train(path, settings, request, lambda done, total: progress(f"training {name}", done, total))
    trained = time.perf_counter()
    dualstore.open(path).build_index(lambda done, total: progress("indexing", done, total))
    return {"train_s": trained - started, "index_s": time.perf_counter() - trained, **found}


def reproduce(
    name: str, folder: Path, runs: int | None, request: Request, progress: Progress, *, keep: bool = False
) -> Reproduction:
    """The numbers of several runs, by default as many as the experiment says, with the seeds from the request's on.

    A run whose numbers are in `folder` for the same settings is not done again, and one whose store is there is not trained again.
    Stores are removed once their numbers are taken, unless they are to be kept; one at a time is on disk then.
    """
    parts = [EXPERIMENTS[part] for part in COMPARISONS.get(name, (name,))]
    folder.mkdir(parents=True, exist_ok=True)
    requests = [replace(request, seed=request.seed + number) for number in range(runs or parts[0].runs)]
    settings = {part.name: plain(part.settings(request)) for part in parts}
    found = [join({part.name: _run(part, folder, one, progress, keep=keep) for part in parts}) for one in requests]
    result = Reproduction(
        experiment=name,
        settings=settings,
        machine=_machine(),
        date=datetime.now(UTC).date().isoformat(),
        runs=found,
        findings=compare(found, parts[0].published),
        remarks=(*parts[0].remarks, *_scaled_remark(request)),
        reference=parts[0].reference,
    )
    write_whole(folder / f"{name}.json", result.to_json().encode())
    return result


def _run(experiment: Experiment, folder: Path, request: Request, progress: Progress, *, keep: bool) -> Run:
    """One run: from its numbers, from its store, or done now."""
    path = folder / f"{experiment.name}-{request.seed}"
    with _alone(path):
        return _run_alone(experiment, path, request, progress, keep=keep)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps others from the same run: they would take its store for one that was left behind."""
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise DualstoreError(
                f"{path}: another process is at this run; wait for it, or choose another folder with --out"
            ) from error
        try:
            yield
        finally:
            Path(file.name).unlink(missing_ok=True)


def _run_alone(experiment: Experiment, path: Path, request: Request, progress: Progress, *, keep: bool) -> Run:
    settings = plain(experiment.settings(request))
    notes = path.with_name(f"{path.name}.json")
    known = _known(notes)
    if known and known.get("settings") != settings:
        raise DualstoreError(
            f"{notes}: expected a run with these settings, found one with others; choose another folder with --out, or remove it"
        )
    if "run" in known:
        return _noted(notes, known["run"])
    if path.exists() and not known:
        raise DualstoreError(f"{path}: expected a store that an earlier reproduction made, found another; choose another --out")
    cost = known.get("cost")
    if not isinstance(cost, dict) or not path.exists():
        shutil.rmtree(path, ignore_errors=True)
        _note(notes, {"settings": settings, "cost": None})
        cost = train(experiment.name, path, request, progress)
        _note(notes, {"settings": settings, "cost": cost})
    run = _measured(experiment, path, request, cost)
    if experiment.examples:
        draw_examples(experiment.examples(dualstore.open(path)), path.with_name(f"{path.name}.png"))
    _note(notes, {"settings": settings, "run": asdict(run)})
    if not keep:
        shutil.rmtree(path)
    return run


def _known(notes: Path) -> dict[str, Any]:
    """What is noted of a run. Raises DualstoreError where that is something else."""
    try:
        found = json.loads(notes.read_text()) if notes.exists() else {}
    except (OSError, ValueError) as error:
        raise DualstoreError(f"{notes}: expected the notes of a run, found {error}; remove it, or choose another --out") from error
    if not isinstance(found, dict):
        raise DualstoreError(
            f"{notes}: expected the notes of a run, found {type(found).__name__}; choose another folder with --out"
        )
    return found


def _noted(notes: Path, found: Any) -> Run:
    """The run that is noted. Raises DualstoreError where that is something else."""
    try:
        return Run.from_dict(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DualstoreError(f"{notes}: expected the numbers of a run, found something else ({error!r}); remove it") from error


def _note(notes: Path, found: dict[str, Any]) -> None:
    write_whole(notes, json.dumps(found, indent=1, ensure_ascii=False).encode())


def _measured(experiment: Experiment, path: Path, request: Request, cost: dict[str, float]) -> Run:
    store = dualstore.open(path)
    started = time.perf_counter()
    measured = experiment.measure(store, experiment.settings(request), request)
    seconds = time.perf_counter() - started
    info = store.info()
    index = bytes_below(path / "index")
    keys = sum(layer["rows"] * layer["d_in"] for layer in info["layers"] if layer["keys"] == "vector")
    width = {"float16": 2, "float32": 4, "float64": 8}[info["dtype"]]
    sizes = {"rows": info["rows"], "bytes": info["bytes"] - index, "index_bytes": index, "key_bytes": keys * width}
    numbers = {name: cost[name] for name in experiment.reported} | measured.numbers
    plain_ones = [*(name for name in experiment.reported if name not in experiment.shares), *measured.plain]
    return Run(request.seed, Measured(numbers, measured.tables, plain_ones), {**cost, "measure_s": seconds, **sizes})


def _scaled_remark(request: Request) -> list[str]:
    changed = [f"{name} = {value}" for name, value in request.changes.items()]
    found = [f"scaled to {request.scale:g} of the widths and the data"] if request.scale != 1 else []
    return [*found, f"settings changed: {', '.join(changed)}"] if changed else found


def _machine() -> str:
    """The machine in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores {platform.machine()}, {memory:.0f} GiB, Python {platform.python_version()}"

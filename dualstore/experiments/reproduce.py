"""Doing an experiment again: trains or reuses its stores, measures them, and puts the numbers beside the paper's."""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dualstore
from dualstore.errors import DualstoreError
from dualstore.experiments import image_findings, images, published
from dualstore.experiments.findings import Measured, Published, Reproduction, Run, compare
from dualstore.store import Store

__all__ = ["EXPERIMENTS", "Experiment", "Request", "reproduce", "train"]

Progress = Callable[[str, int, int], None]
"""Called with (what is done, steps done, steps in all)."""


@dataclass(frozen=True)
class Request:
    """How an experiment is to be run; what is left out is as the experiment has it."""

    seed: int = 0
    scale: float = 1.0
    """Share of the widths, and of the data, for a quick look."""
    data: Path | None = None
    """Folder of the data; by default $DUALSTORE_DATA."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the experiment, by name."""


@dataclass(frozen=True)
class Experiment:
    """One of the papers' experiments."""

    name: str
    settings: Callable[[Request], Any]
    """The settings that a request comes to: a frozen dataclass."""
    train: Callable[[Path, Any, Request, Callable[[int, int], None]], dict[str, float]]
    """Records a store at a path; returns what only training knows, by name."""
    measure: Callable[[Store], Measured]
    published: Mapping[str, Published]
    remarks: tuple[str, ...]
    """Where the experiment differs from the paper's, and why."""
    reference: Mapping[str, str]
    """What the papers' own implementation takes: see `Reproduction.costs`."""


def train(name: str, path: Path, request: Request, progress: Progress) -> dict[str, float]:
    """Trains and records an experiment, indexes the store, and returns the seconds of both and what only training knows."""
    experiment = EXPERIMENTS[name]
    settings = experiment.settings(request)
    started = time.perf_counter()
    found = experiment.train(path, settings, request, lambda done, total: progress(f"training {name}", done, total))
    trained = time.perf_counter()
    dualstore.open(path).build_index(lambda done, total: progress("indexing", done, total))
    return {"train_s": trained - started, "index_s": time.perf_counter() - trained, **found}


def reproduce(name: str, folder: Path, runs: int, request: Request, progress: Progress, *, keep: bool = False) -> Reproduction:
    """The numbers of several runs, with the seeds from the request's on.

    A run whose numbers are in `folder` for the same settings is not done again, and one whose store is there is not trained again.
    Stores are removed once their numbers are taken, unless they are to be kept; one at a time is on disk then.
    """
    experiment = EXPERIMENTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    requests = [replace(request, seed=request.seed + number) for number in range(runs)]
    found = [_run(experiment, folder, one, progress, keep=keep) for one in requests]
    settings = {key: value for key, value in _plain(experiment.settings(request)).items() if key != "seed"}
    result = Reproduction(
        experiment=name,
        settings=settings,
        machine=_machine(),
        date=datetime.now(UTC).date().isoformat(),
        runs=found,
        findings=compare(found, experiment.published),
        remarks=(*experiment.remarks, *_scaled_remark(request)),
        reference=experiment.reference,
    )
    (folder / f"{name}.json").write_text(result.to_json())
    return result


def _run(experiment: Experiment, folder: Path, request: Request, progress: Progress, *, keep: bool) -> Run:
    """One run: from its numbers, from its store, or done now."""
    settings = _plain(experiment.settings(request))
    path = folder / f"{experiment.name}-{request.seed}"
    notes = path.with_name(f"{path.name}.json")
    known = json.loads(notes.read_text()) if notes.exists() else {}
    if known and known["settings"] != json.loads(json.dumps(settings)):
        raise DualstoreError(
            f"{notes}: expected a run with these settings, found one with others; choose another folder with --out, or remove it"
        )
    if "run" in known:
        return Run.from_dict(known["run"])
    if path.exists() and not known:
        raise DualstoreError(f"{path}: expected a store that an earlier reproduction made, found another; choose another --out")
    cost = known.get("cost")
    if cost is None:
        shutil.rmtree(path, ignore_errors=True)
        notes.write_text(json.dumps({"settings": settings, "cost": None}))
        cost = train(experiment.name, path, request, progress)
        notes.write_text(json.dumps({"settings": settings, "cost": cost}))
    run = _measured(experiment, path, request.seed, cost)
    notes.write_text(json.dumps({"settings": settings, "run": asdict(run)}, indent=1, ensure_ascii=False))
    if not keep:
        shutil.rmtree(path)
    return run


def _measured(experiment: Experiment, path: Path, seed: int, cost: dict[str, float]) -> Run:
    store = dualstore.open(path)
    started = time.perf_counter()
    measured = experiment.measure(store)
    seconds = time.perf_counter() - started
    info = store.info()
    index = sum(file.stat().st_size for file in (path / "index").rglob("*") if file.is_file())
    keys = sum(layer["rows"] * layer["d_in"] for layer in info["layers"] if layer["keys"] == "vector")
    width = {"float16": 2, "float32": 4, "float64": 8}[info["dtype"]]
    sizes = {"rows": info["rows"], "bytes": info["bytes"] - index, "index_bytes": index, "key_bytes": keys * width}
    return Run(seed, measured, {**cost, "measure_s": seconds, **sizes})


def _scaled_remark(request: Request) -> list[str]:
    changed = [f"{name} = {value}" for name, value in request.changes.items()]
    found = [f"scaled to {request.scale:g} of the widths and the data"] if request.scale != 1 else []
    return [*found, f"settings changed: {', '.join(changed)}"] if changed else found


def _plain(settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return found


def _machine() -> str:
    """The machine in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores {platform.machine()}, {memory:.0f} GiB, Python {platform.python_version()}"


def _changed(name: str, settings: Any, request: Request) -> Any:
    """Settings with a request's seed and changes. Raises DualstoreError for those that the experiment does not have."""
    unknown = sorted(set(request.changes) - {one.name for one in fields(settings)})
    if unknown:
        raise DualstoreError(
            f"{name}: has no setting {', '.join(unknown)}; there are {', '.join(one.name for one in fields(settings))}"
        )
    return replace(settings.scaled(request.scale) if request.scale != 1 else settings, seed=request.seed, **request.changes)


# The experiments


def _image_settings(name: str) -> Callable[[Request], images.Settings]:
    def settings(request: Request) -> images.Settings:
        changes = dict(request.changes)
        if "steps" in changes:
            changes["epochs"] = 0
        if isinstance(changes.get("hidden"), int):
            changes["hidden"] = tuple(changes["hidden"] for _ in images.PLANS[name].settings.hidden)
        found: images.Settings = _changed(name, images.PLANS[name].settings, replace(request, changes=changes))
        return found

    return settings


def _train_images(name: str) -> Callable[[Path, Any, Request, Callable[[int, int], None]], dict[str, float]]:
    def train_one(
        path: Path, settings: images.Settings, request: Request, progress: Callable[[int, int], None]
    ) -> dict[str, float]:
        phases = images.phases_of(images.PLANS[name], settings, request.data)
        report = images.run_phases(path, phases, settings, progress=progress, maker="dualstore train")
        return {
            f"accuracy on {task} after phase {number + 1}": share
            for number, found in enumerate(report.accuracy)
            for task, share in found.items()
        }

    return train_one


_IN_MEMORY = {"of it keys, GB": "as much, in memory", "index, GB": "none: every query scans all keys"}
_COMMON = (
    "the random numbers are not the paper's: seeds, initial weights and order of the images differ",
    "the paper keeps 40,053 training images of each set but does not say which; here the first ones",
)


def _image_experiment(
    name: str, measure: Callable[[Store], Measured], numbers: Mapping[str, Published], remarks: Sequence[str]
) -> Experiment:
    return Experiment(name, _image_settings(name), _train_images(name), measure, numbers, tuple(remarks), _IN_MEMORY)


EXPERIMENTS = {
    one.name: one
    for one in (
        _image_experiment("mnist", image_findings.measure_mnist, published.MNIST, _COMMON),
        _image_experiment(
            "joint",
            image_findings.measure_joint,
            published.JOINT,
            (
                *_COMMON,
                "the paper shows examples and no numbers; shares of attention are means over the first "
                f"{image_findings.ASKED} test images of each set, at the first layer of {image_findings.ASKED_SIZES}",
            ),
        ),
        _image_experiment(
            "continual",
            image_findings.measure_continual,
            published.CONTINUAL,
            (
                *_COMMON,
                f"of misclassified test images the first {2 * image_findings.ASKED} are looked at, at the first layer "
                f"{image_findings.ASKED_SIZES}",
            ),
        ),
        _image_experiment(
            "beta",
            image_findings.measure_beta,
            published.BETA,
            (
                "the paper has one seed, 0, of another library: how much is forgotten depends on the initial weights",
                "with W_0 left alone beta 2.0 brings the task back whatever the seed",
            ),
        ),
    )
}
"""All of them, by name."""

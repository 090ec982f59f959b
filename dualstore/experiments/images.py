"""Image classifiers: the three runs of Irie et al. 2022, the one of Gershman et al. 2025, and the demo's.

An ordinary training loop around the public recording API; it doubles as an example.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), section 4 and its public code for the settings; Gershman, Fiete,
Irie 2025 (arXiv 2501.02950) for `beta`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dualstore.capture import Recorder, record
from dualstore.datasets import ImageSet, load_idx

__all__ = ["PLANS", "Data", "Phase", "Plan", "Report", "Settings", "phases_of", "prepare", "run_phases"]

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(frozen=True)
class Settings:
    """What a run is trained with; the defaults are those of the paper's runs."""

    steps: int = 5000
    """Steps of each phase."""
    epochs: int = 0
    """Where not 0, each phase takes so many epochs instead."""
    batch_size: int = 128
    lr: float = 3e-3
    momentum: float = 0.9
    clip: float = 1.0
    """Largest global norm of the gradients; 0 for no clipping."""
    hidden: tuple[int, ...] = (800, 800)
    """Widths of the hidden layers."""
    outputs: int = 10
    bias: bool = True
    shuffle: bool = True
    """A fresh permutation each epoch, without its last, smaller batch; else the order of the files, all of it."""
    images: int = 40_053
    """Training images of each set."""
    test_images: int = 10_000
    seed: int = 0

    def scaled(self, share: float) -> "Settings":
        """With a share of the widths and images, for a quick look."""
        return replace(
            self,
            hidden=tuple(max(1, round(width * share)) for width in self.hidden),
            images=max(1, round(self.images * share)),
            test_images=max(1, round(self.test_images * share)),
        )


@dataclass(frozen=True)
class Plan:
    """An experiment: which images, in which order."""

    settings: Settings
    sequential: bool = False
    """One set after the other instead of both at once."""
    sets: tuple[str, ...] = ("mnist", "fashion-mnist")
    classes: tuple[tuple[int, ...], ...] = ()
    """For each set those that are used; none for all."""
    standardised: bool = True


PLANS = {
    "mnist": Plan(Settings(), sets=("mnist",)),
    "joint": Plan(Settings()),
    "continual": Plan(Settings(steps=3000), sequential=True),
    "beta": Plan(
        Settings(epochs=5, lr=6e-4, momentum=0.0, clip=0.0, hidden=(64,), outputs=4, bias=False, shuffle=False, images=60_000),
        sequential=True,
        classes=((0, 1), (2, 3)),
        standardised=False,
    ),
}
"""The papers' experiments."""


@dataclass(frozen=True)
class Data:
    """Tensors of one image set as the network sees them, and the names of its rows."""

    task: str
    images: torch.Tensor
    """(n, pixels), standardised with the training images' mean and standard deviation, or in [0, 1]."""
    labels: torch.Tensor
    ids: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    test_ids: torch.Tensor
    pictures: torch.Tensor
    """(n, height, width) bytes of the training images, for a report to show."""


@dataclass(frozen=True)
class Phase:
    """A stretch of training on the union of some data sets."""

    data: Sequence[Data]
    steps: int


@dataclass(frozen=True)
class Report:
    """Test accuracy of every task after every phase, in 0..1."""

    accuracy: list[dict[str, float]]


def phases_of(plan: Plan, settings: Settings, folder: Path | None = None) -> list[Phase]:
    """What a plan trains on, its IDX files from `folder` (see `datasets.load_idx`)."""
    sets = [
        prepare(
            load_idx(name, folder),
            task=name.removesuffix("-mnist"),
            number=number,
            kept=settings.images,
            tested=settings.test_images,
            classes=plan.classes[number] if plan.classes else None,
            standardised=plan.standardised,
        )
        for number, name in enumerate(plan.sets)
    ]
    return [Phase(some, _steps_of(some, settings)) for some in ([[data] for data in sets] if plan.sequential else [sets])]


def _steps_of(data: Sequence[Data], settings: Settings) -> int:
    rows = sum(len(one.ids) for one in data)
    return settings.epochs * len(_batches(rows, settings)) if settings.epochs else settings.steps


def prepare(
    images: ImageSet,
    *,
    task: str,
    number: int = 0,
    kept: int | None = None,
    tested: int | None = None,
    classes: Sequence[int] | None = None,
    standardised: bool = True,
) -> Data:
    """The tensors of an image set: its first `kept` training and `tested` test images, or those of them of some classes.

    `number` keeps the ids of several sets in one store apart: they start at number * 10^6, test ids at number * 10^5.
    """
    train, labels = _chosen(images.train[:kept], images.train_labels[:kept], classes)
    test, test_labels = _chosen(images.test[:tested], images.test_labels[:tested], classes)
    mean, std = (float(train.float().mean()), float(train.float().std())) if standardised else (0.0, 255.0)
    return Data(
        task=task,
        images=((train.float() - mean) / std).flatten(1),
        labels=labels,
        ids=torch.arange(len(train)) + number * 1_000_000,
        test_images=((test.float() - mean) / std).flatten(1),
        test_labels=test_labels,
        test_ids=torch.arange(len(test)) + number * 100_000,
        pictures=train,
    )


def _chosen(pictures: np.ndarray, labels: np.ndarray, classes: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    mine = slice(None) if classes is None else np.isin(labels, classes)
    return torch.from_numpy(pictures[mine].copy()), torch.from_numpy(labels[mine].copy())


def run_phases(path: Path, phases: Sequence[Phase], settings: Settings, *, progress: Progress, maker: str = "") -> Report:
    """Trains pixels-hidden-outputs through the phases, records everything at `path`, probes all test images at the end.

    The index is left to the caller, who may want to show how it grows.
    """
    torch.manual_seed(settings.seed)
    sets = list({data.task: data for phase in phases for data in phase.data}.values())
    model = _mlp(sets[0].images.shape[1], settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    total, done = sum(phase.steps for phase in phases), 0
    accuracy = []
    with record(model, optimizer, path, index=False, maker=maker) as recorder:
        for phase in phases:
            _train(recorder, model, optimizer, phase, settings, lambda step, done=done: progress(done + step, total))  # type: ignore[misc]
            done += phase.steps
            accuracy.append({data.task: _accuracy(model, data) for data in sets})
        for data in sets:
            recorder.samples(data.ids, data.labels, data.pictures, task=data.task)
            _probe(recorder, model, data)
    return Report(accuracy)


def _mlp(pixels: int, settings: Settings) -> nn.Module:
    widths = (pixels, *settings.hidden, settings.outputs)
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(widths):
        layers += [nn.Linear(d_in, d_out, bias=settings.bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _train(
    recorder: Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    phase: Phase,
    settings: Settings,
    progress: Callable[[int], None],
) -> None:
    images, labels, ids = (torch.cat([getattr(data, name) for data in phase.data]) for name in ("images", "labels", "ids"))
    tasks = np.repeat([data.task for data in phase.data], [len(data.ids) for data in phase.data])
    step = 0
    while step < phase.steps:
        for chosen in _batches(len(ids), settings):
            with recorder.batch(sample_id=ids[chosen], label=labels[chosen], task=tasks[chosen].tolist()) as batch:
                loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
                batch.loss = loss.detach()
                loss.backward()
            if settings.clip:
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            progress(step)
            if step == phase.steps:
                break


def _batches(rows: int, settings: Settings) -> Sequence[torch.Tensor]:
    """The batches of one epoch."""
    if not settings.shuffle:
        return list(torch.arange(rows).split(settings.batch_size))
    whole = max(1, rows // settings.batch_size)
    return list(torch.randperm(rows).split(min(settings.batch_size, rows))[:whole])


@torch.no_grad()
def _accuracy(model: nn.Module, data: Data) -> float:
    return float((model(data.test_images).argmax(1) == data.test_labels).float().mean())


def _probe(recorder: Recorder, model: nn.Module, data: Data) -> None:
    model.eval()
    for rows in torch.arange(len(data.test_ids)).split(1000):
        labels = data.test_labels[rows]
        loss = partial(nn.functional.cross_entropy, target=labels, reduction="none")
        with recorder.probe(test_id=data.test_ids[rows], label=labels, task=data.task, loss=loss):
            model(data.test_images[rows])

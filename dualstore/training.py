"""The runs that dualstore brings along: the paper's three image experiments and the demo.

An ordinary training loop around the public recording API; it doubles as an example.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), section 4 and its public code for the settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dualstore.capture import Recorder, record
from dualstore.datasets import ImageSet

__all__ = ["Data", "Phase", "Report", "Settings", "prepare", "run_phases"]

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

KEPT_TRAINING_IMAGES = 40_053
"""Training images of each set that the paper's runs use."""


@dataclass(frozen=True)
class Settings:
    """What a run is trained with; the defaults are the paper's."""

    steps: int = 5000
    """Steps of each phase."""
    batch_size: int = 128
    lr: float = 3e-3
    momentum: float = 0.9
    clip: float = 1.0
    """Largest global norm of the gradients; 0 for no clipping."""
    hidden: int = 800
    seed: int = 0


@dataclass(frozen=True)
class Data:
    """Tensors of one image set as the network sees them, and the names of its rows."""

    task: str
    images: torch.Tensor
    """(n, pixels), standardised with the training images' mean and standard deviation."""
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


def prepare(images: ImageSet, *, task: str, number: int = 0, kept: int | None = KEPT_TRAINING_IMAGES) -> Data:
    """The tensors of an image set.

    `number` keeps the ids of several sets in one store apart: they start at number * 10^6, test ids at number * 10^5.
    """
    train = torch.from_numpy(images.train[:kept].copy())
    mean, std = float(train.float().mean()), float(train.float().std())

    def standardised(pictures: torch.Tensor) -> torch.Tensor:
        return ((pictures.float() - mean) / std).flatten(1)

    return Data(
        task=task,
        images=standardised(train),
        labels=torch.from_numpy(images.train_labels[:kept].copy()),
        ids=torch.arange(len(train)) + number * 1_000_000,
        test_images=standardised(torch.from_numpy(images.test.copy())),
        test_labels=torch.from_numpy(images.test_labels.copy()),
        test_ids=torch.arange(len(images.test)) + number * 100_000,
        pictures=train,
    )


def run_phases(path: Path, phases: Sequence[Phase], settings: Settings, *, progress: Progress, maker: str = "") -> Report:
    """Trains pixels-hidden-hidden-10 through the phases, records everything at `path`, probes all test images at the end.

    The index is left to the caller, who may want to show how it grows.
    """
    torch.manual_seed(settings.seed)
    sets = list({data.task: data for phase in phases for data in phase.data}.values())
    model = _mlp(sets[0].images.shape[1], settings.hidden)
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


def _mlp(pixels: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


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
        order = torch.randperm(len(ids))  # a fresh permutation each epoch; its last, smaller batch is left out
        for chosen in order.split(min(settings.batch_size, len(ids)))[: max(1, len(ids) // settings.batch_size)]:
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

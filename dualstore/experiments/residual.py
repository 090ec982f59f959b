"""Small residual networks whose steps x_{l+1} = x_l + f(x_l) * F are recorded block by block, and their training on grey images.

Three ways to choose the step size F: 1 (ResNet), a gate that sees f(x) alone (SENet), and one that sees where the step comes from
and where it would lead (StepNet). Pre-activation, so that nothing works on the sum.

Source: Huang et al. 2023 (arXiv 2308.09939), StepNet; He et al. 2016 (arXiv 1603.05027), pre-activation; Hu et al. 2018
(arXiv 1709.01507), squeeze and excitation.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dualstore.capture import Recorder, record
from dualstore.datasets import ImageSet
from dualstore.errors import DualstoreError, DualstoreWarning
from dualstore.experiments.images import Data, prepare
from dualstore.shapes import Float

__all__ = ["VARIANTS", "Block", "Report", "ResidualNet", "Settings", "train"]

VARIANTS = ("resnet", "senet", "stepnet")
"""How the step size F is chosen: 1, by f(x), by x + f(x) and x."""

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

CLASSES = 10
SQUEEZE = 4
"""By how much a gate's hidden layer is narrower than the block."""
_AT_ONCE = 500
"""Test images that go through the network together."""


@dataclass(frozen=True)
class Settings:
    """What a run is trained with."""

    variant: str = "resnet"
    """One of VARIANTS."""
    width: int = 16
    """Channels of the first stage; the others have two and four times as many."""
    depth: int = 3
    """Blocks of each of three stages."""
    steps: int = 1500
    batch_size: int = 64
    lr: float = 0.1
    """At the beginning; it falls to zero along a cosine."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    evaluations: int = 10
    """How often, evenly over training, the blocks are probed; the last time at its end."""
    probes: int = 500
    """Test images that are probed each time."""
    images: int | None = None
    """Training images; None for all."""
    seed: int = 0

    def check(self) -> None:
        """Raises DualstoreError for a value that means nothing."""
        if self.variant not in VARIANTS:
            raise DualstoreError(f"variant: expected one of {', '.join(VARIANTS)}, found {self.variant!r}")
        for name in ("width", "depth", "steps", "batch_size", "evaluations", "probes"):
            if getattr(self, name) < 1:
                raise DualstoreError(f"{name}: expected a number of 1 or more, found {getattr(self, name)!r}")


@dataclass(frozen=True)
class Report:
    """What a run came to."""

    accuracy: float
    """On all test images, in 0..1."""
    parameters: int
    """Of the network."""


class Plain(nn.Module):
    """F = 1."""

    def forward(self, x: Float[torch.Tensor, "n c h w"], f: Float[torch.Tensor, "n c h w"]) -> Float[torch.Tensor, "n c h w"]:
        """The step, f times F."""
        return f


class Excitation(nn.Module):
    """F for each channel from what f has there on average."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = _gate(channels, channels)

    def forward(self, x: Float[torch.Tensor, "n c h w"], f: Float[torch.Tensor, "n c h w"]) -> Float[torch.Tensor, "n c h w"]:
        """The step, f times F."""
        size: torch.Tensor = self.gate(f.mean((2, 3)))  # (n, c)
        return f * size[:, :, None, None]


class Adaptor(nn.Module):
    """F = A(x + f, x) for each channel, from what the coarse next state and the present one have there on average."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = _gate(2 * channels, channels)

    def forward(self, x: Float[torch.Tensor, "n c h w"], f: Float[torch.Tensor, "n c h w"]) -> Float[torch.Tensor, "n c h w"]:
        """The step, f times F."""
        present, added = x.mean((2, 3)), f.mean((2, 3))  # (n, c), (n, c)
        size: torch.Tensor = self.gate(torch.cat([present + added, present], 1))  # (n, c)
        return f * size[:, :, None, None]


def _gate(inputs: int, channels: int) -> nn.Module:
    """A small network with outputs in (0, 1)."""
    hidden = max(1, channels // SQUEEZE)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, channels), nn.Sigmoid())


def _step_size(variant: str, channels: int) -> nn.Module:
    return Plain() if variant == "resnet" else Excitation(channels) if variant == "senet" else Adaptor(channels)


class Block(nn.Module):
    """x + f(x) * F; where the shape changes S x + f(x) * F, with S a convolution of one pixel."""

    def __init__(self, channels: int, to: int, stride: int, variant: str) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, to, 3, stride, padding=1, bias=False)),
            *(nn.BatchNorm2d(to), nn.ReLU(), nn.Conv2d(to, to, 3, padding=1, bias=False)),
        )
        same = channels == to and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, to, 1, stride, bias=False)
        self.scaled = _step_size(variant, to)

    def forward(self, x: Float[torch.Tensor, "n c h w"]) -> Float[torch.Tensor, "n d i j"]:
        """The next state."""
        state: torch.Tensor = self.shortcut(x)  # (n, d, i, j)
        found: torch.Tensor = state + self.scaled(state, self.branch(x))
        return found


class ResidualNet(nn.Module):
    """A convolution, three stages of blocks, and a linear layer on the mean over all pixels."""

    def __init__(self, variant: str, width: int, depth: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.stages = nn.Sequential(
            *(_stage(before, after, depth, variant) for before, after in zip([width, *widths], widths, strict=False))
        )
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Float[torch.Tensor, "n 1 h w"]) -> Float[torch.Tensor, "n classes"]:
        """Logits."""
        x = self.norm(self.stages(self.stem(images))).relu()
        found: torch.Tensor = self.head(x.mean((2, 3)))
        return found


def _stage(channels: int, to: int, depth: int, variant: str) -> nn.Sequential:
    """Blocks of one width, of which the first halves the picture where that changes."""
    first = Block(channels, to, 1 if channels == to else 2, variant)
    return nn.Sequential(first, *(Block(to, to, 1, variant) for _ in range(depth - 1)))


def train(path: Path, images: ImageSet, settings: Settings, *, progress: Progress, maker: str = "") -> Report:
    """Trains a network, recording its blocks and its last layer at `path`; probes the blocks along the way.

    Networks of the same seed see the same batches. The index is left to the caller. Raises DualstoreError for wrong settings,
    RecordError where the store cannot be written.
    """
    settings.check()
    data, shape = prepare(images, task=images.name, kept=settings.images), images.train.shape[1:]
    torch.manual_seed(settings.seed)
    model = ResidualNet(settings.variant, settings.width, settings.depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    with _head_alone():
        recorder = record(model, optimizer, path, layers=["head"], blocks=[Block], branch="branch", index=False, maker=maker)
    with recorder:
        _train(recorder, model, optimizer, data, shape, settings, progress)
        recorder.samples(data.ids, data.labels, data.pictures, task=data.task)
    return Report(_accuracy(model, data, shape), sum(parameter.numel() for parameter in model.parameters()))


@contextmanager
def _head_alone() -> Iterator[None]:
    """That other parameters train unrecorded is no news here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "these parameters train but are not recorded", DualstoreWarning)
        yield


def _train(
    recorder: Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    shape: tuple[int, ...],
    settings: Settings,
    progress: Progress,
) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    probed = {settings.steps * (i + 1) // settings.evaluations for i in range(settings.evaluations)}
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(1, settings.steps + 1):
        if len(order) < settings.batch_size:  # a fresh permutation; the last, smaller batch is left out
            order = torch.randperm(len(data.ids), generator=generator)
        chosen, order = order[: settings.batch_size], order[settings.batch_size :]
        with recorder.batch(sample_id=data.ids[chosen], label=data.labels[chosen], task=data.task) as batch:
            loss = nn.functional.cross_entropy(model(_pictures(data.images[chosen], shape)), data.labels[chosen])
            batch.loss = loss.detach()
            loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step in probed:
            _probe(recorder, model, data, shape, settings.probes)
        progress(step, settings.steps)


def _probe(recorder: Recorder, model: nn.Module, data: Data, shape: tuple[int, ...], count: int) -> None:
    model.eval()
    for rows in torch.arange(min(count, len(data.test_ids))).split(_AT_ONCE):
        with recorder.probe(test_id=data.test_ids[rows], label=data.test_labels[rows], task=data.task):
            model(_pictures(data.test_images[rows], shape))
    model.train()


@torch.no_grad()
def _accuracy(model: nn.Module, data: Data, shape: tuple[int, ...]) -> float:
    model.eval()
    predicted = torch.cat([model(_pictures(some, shape)).argmax(1) for some in data.test_images.split(_AT_ONCE)])
    return float((predicted == data.test_labels).float().mean())


def _pictures(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Images of one channel of pixels in a row."""
    found: torch.Tensor = flat.unflatten(1, (1, *shape))  # (n, 1, height, width)
    return found

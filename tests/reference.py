"""The slow, obvious versions that every fast path is compared with: numpy and a few lines each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from dualstore.schema import Layer, StoreInfo
from dualstore.steps import DEFAULTS
from dualstore.writer import StoreWriter


@dataclass
class Rows:
    """All patterns of one layer, in the order of the log."""

    step: ndarray
    sample_id: ndarray
    position: ndarray
    label: ndarray
    task: ndarray
    x: ndarray
    e: ndarray
    epoch: ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    slot: ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    duplicate: ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        """Slots and duplicates are 0 where they are not given."""
        for name in ("slot", "duplicate"):
            if not len(getattr(self, name)):
                setattr(self, name, np.zeros(len(self.step), np.int32))

    def __len__(self) -> int:
        return len(self.step)


def alphas(keys: ndarray, query: ndarray) -> ndarray:
    """Correctly rounded float64 dot products."""
    return np.array([math.fsum(float(a) * float(b) for a, b in zip(key, query, strict=True)) for key in keys])


def top_k(rows: Rows, query: ndarray, k: int, *, largest: bool = True, kept: ndarray | None = None) -> list[int]:
    """Row numbers of the k best, ordered by alpha, step, sample_id, position, place. Keys should give exact products."""
    values = alphas(rows.x, query) * (1 if largest else -1)
    chosen = [i for i in range(len(rows)) if (kept is None or kept[i]) and not math.isnan(values[i])]
    chosen.sort(key=lambda i: (-values[i], rows.step[i], rows.sample_id[i], rows.position[i], i))
    return chosen[:k]


def write_store(
    path: Path,
    layers: Sequence[Rows],
    *,
    tasks: Sequence[str] = (),
    epoch_of_step: Any = lambda step: 0,
    probes: Sequence[dict[str, ndarray]] | None = None,
    flush_every: int | None = None,
    status: str = "complete",
    dtype: str | None = None,
    rates: Any = lambda step: [],
) -> None:
    """A store of the given rows, written by `StoreWriter`; steps must run from 0 without gaps in every layer.

    Of the rows' dtype unless another is given.

    `probes` has for each layer test_id, position, step, label, task, predicted, x, y, and may have g.
    """
    path.mkdir(parents=True, exist_ok=True)
    infos = tuple(Layer(n, f"layer{n}", "Linear", rows.x.shape[1], rows.e.shape[1], False, 0, -1) for n, rows in enumerate(layers))
    writer = StoreWriter(path, StoreInfo(infos, dtype or str(layers[0].x.dtype), "SGD", True, tasks=tuple(tasks)))
    for step in range(max((int(rows.step.max()) for rows in layers if len(rows)), default=-1) + 1):
        for info, rows in zip(infos, layers, strict=True):
            mine = rows.step == step
            if mine.any():
                scalars = {
                    "sample_id": rows.sample_id[mine].astype(np.int64),
                    "position": rows.position[mine].astype(np.int32),
                    "label": rows.label[mine].astype(np.int32),
                    "task": rows.task[mine].astype(np.int32),
                }
                scalars |= {name: getattr(rows, name)[mine].astype(np.int32) for name in ("slot", "duplicate")}
                writer.add_patterns(info, scalars, np.ascontiguousarray(rows.x[mine]), np.ascontiguousarray(rows.e[mine]))
        writer.end_step([group_row(int(epoch_of_step(step))) | {"rates": rates(step)}])
        if flush_every and (step + 1) % flush_every == 0:
            writer.flush()
    for info, probe in zip(infos, probes or [], strict=False):
        scalars = {name: probe[name] for name in ("test_id", "position", "step", "label", "task", "predicted")}
        writer.write_probes(info, scalars, probe["x"], probe["y"], probe.get("g"))
    writer.close()
    writer.save_info(status=status)


def group_row(epoch: int) -> dict[str, Any]:
    """What `StoreWriter.end_step` is told of a parameter group."""
    return {
        "group": 0,
        "epoch": epoch,
        "lr": 0.1,
        "momentum": 0.0,
        "dampening": 0.0,
        "decay": 0.0,
        **DEFAULTS,
        "nesterov": False,
        "maximize": False,
        "clip": 1.0,
        "batch_size": 1,
        "loss": 0.5,
        "idle": [],
        "idle_bias": [],
    }


def halved(keys: ndarray, query: ndarray) -> ndarray:
    """The very bits of alpha: float64 products, the last half added onto the first until one is left."""
    with np.errstate(over="ignore", invalid="ignore"):
        products = [[np.float64(a) * np.float64(b) for a, b in zip(key, query, strict=True)] for key in keys]
        return np.array([_halve(terms) for terms in products], np.float64)


def _halve(terms: list[Any]) -> Any:
    while len(terms) > 1:
        half = len(terms) // 2
        kept, last = terms[: len(terms) - half], terms[len(terms) - half :]
        terms = [term + last[i] if i < half else term for i, term in enumerate(kept)]
    return terms[0] if terms else 0.0


def ranked(rows: Rows, values: ndarray, k: int, *, largest: bool = True, kept: ndarray | None = None) -> list[int]:
    """Row numbers of the k best of the given values; NaN is not ranked. Order as in `top_k`."""
    signed = values if largest else -values
    chosen = [i for i in range(len(rows)) if (kept is None or kept[i]) and not math.isnan(signed[i])]
    chosen.sort(key=lambda i: (-signed[i], rows.step[i], rows.sample_id[i], rows.position[i], i))
    return chosen[:k]


def stiffness(
    rows: dict[str, ndarray], m1: Sequence[float], m2: Sequence[float], names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What `Store.stiffness` gives for rows of blocks: of each step and M, and of each step and block."""
    nsi = rows["increment"] / rows["norm"]
    steps, blocks = [], []
    for step in sorted(set(rows["step"].tolist())):
        mine = (rows["step"] == step) & np.isfinite(nsi)
        keys = list(zip(rows["test_id"], rows["sample_id"], rows["slot"], strict=True))
        paths = [
            nsi[mine & np.array([key == one for key in keys])] for one in sorted({k for k, m in zip(keys, mine, strict=True) if m})
        ]
        common = {"step": step, "trajectories": len(paths), "nsi": np.mean([path.mean() for path in paths])}
        common["tns"] = np.mean([path.max() * (path.max() / path.mean() - 1) for path in paths])
        for a in m1:
            for b in m2:
                stiff = [path >= max(path.mean() * (1 + a), b) for path in paths]
                shares = {"stiff": np.mean([some.any() for some in stiff]), "ratio": np.mean([some.mean() for some in stiff])}
                steps.append({**common, "m1": a, "m2": b, **shares})
        for block, name in enumerate(names):
            here = nsi[mine & (rows["block"] == block)]
            if len(here):
                blocks.append({"step": step, "block": block, "name": name, "nsi": here.mean(), "count": len(here)})
    return steps, blocks

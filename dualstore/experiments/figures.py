"""Figures of what was reproduced, beside what was published."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dualstore.errors import DualstoreWarning
from dualstore.experiments.findings import Finding, Reproduction
from dualstore.experiments.image_examples import BEST, Example, Match, Retrieval
from dualstore.experiments.residual_findings import DEPTH, OVER_M, OVER_TRAINING

__all__ = ["draw", "draw_examples"]

_Panel = tuple[str, float, Callable[[Any], None]]
"""A title, a height in inches, and what draws on a matplotlib Axes."""
_TALL = 3.2
_WIDE = 25
"""From so many % on, bars are drawn on an axis of 100."""


def draw(found: Reproduction, folder: Path) -> list[Path]:
    """Draws an experiment's figure as PNG into a folder; returns it and those that its runs left there.

    Warns and draws none without matplotlib (the extra `report`).
    """
    panels = {"beta": _curves, "stiffness": _stiffness}.get(found.experiment, _bars)(found)
    heights = [height for _, height, _ in panels]
    figure = _figure(7.5, sum(heights))
    if figure is None:
        return []
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, _, draw_one) in zip(rows, panels, strict=True):
        draw_one(axes)
        axes.set_title(title, loc="left", fontsize=10)
    path = folder / f"{found.experiment}.png"
    figure.savefig(path, dpi=130)
    left = (folder / f"{name}-{run.seed}.png" for name in found.settings for run in found.runs)
    return [path, *(one for one in left if one.exists())]


def draw_examples(examples: Sequence[Example], path: Path) -> None:
    """Draws test images and what they retrieve as a PNG; as `draw` without matplotlib."""
    figure = _figure(11.0, sum(1.5 * len(example.retrievals) + 0.4 for example in examples)) if examples else None
    if figure is None:
        return
    parts = figure.subfigures(len(examples), squeeze=False)[:, 0]
    for part, example in zip(parts, examples, strict=True):
        task, label = example.group
        part.suptitle(f"test image {example.test_id}: {task} {label}, predicted {example.predicted}", fontsize=10)
        columns = part.subplots(len(example.retrievals), BEST + 3, squeeze=False, width_ratios=[*[1] * (BEST + 1), 3, 3])
        for row, retrieval in zip(columns, example.retrievals, strict=True):
            _draw_retrieval(row, example, retrieval)
    figure.savefig(path, dpi=130)


def _figure(width: float, height: float) -> Any:
    """Of so many inches; warns and returns None without matplotlib."""
    try:
        from matplotlib.figure import Figure  # optional
    except ImportError:
        warnings.warn("figures need matplotlib; install it with: pip install 'dualstore[report]'", DualstoreWarning, stacklevel=3)
        return None
    return Figure(figsize=(width, height), layout="constrained")


def _draw_retrieval(row: Any, example: Example, retrieval: Retrieval) -> None:
    """The test image, its best training images, the largest alpha of each class, and the class totals."""
    first, *matches, curves, bars = row
    first.imshow(example.pixels, cmap="gray")
    first.set_title(f"layer {retrieval.layer}", fontsize=8)
    for axes, match in zip(matches, retrieval.best, strict=False):
        _draw_match(axes, match)
    for axes in (first, *matches):
        axes.set_axis_off()
    tasks = list(dict.fromkeys(task for task, _ in retrieval.totals))
    for place, (group, total) in enumerate(retrieval.totals.items()):
        color, alphas = f"C{tasks.index(group[0])}", retrieval.largest.get(group, np.empty(0))
        curves.plot(place + 0.9 * np.arange(len(alphas)) / max(1, len(alphas)), alphas, color=color)
        bars.bar(place, total, color=color)
    for number, task in enumerate(tasks):
        curves.plot([], [], color=f"C{number}", label=task)
    curves.legend(fontsize=6)
    curves.set_title("largest alpha of each class", fontsize=8)
    bars.set_title("totals" + (" of |alpha|" if retrieval.layer == 0 else " of alpha"), fontsize=8)
    for axes, shift in ((curves, 0.45), (bars, 0.0)):
        axes.set_xticks(shift + np.arange(len(retrieval.totals)), [label for _, label in retrieval.totals], fontsize=6)
        axes.tick_params(axis="y", labelsize=6)


def _draw_match(axes: Any, match: Match) -> None:
    from matplotlib.image import imread  # optional

    axes.imshow(imread(io.BytesIO(match.png)), cmap="gray")
    task, label = match.group
    axes.set_title(f"{task} {label}: {match.alpha:.4g}", fontsize=7)


def _bars(found: Reproduction) -> list[_Panel]:
    """A panel for each group of shares: what stands before the colon of their names."""
    groups: dict[str, list[Finding]] = {}
    for finding in found.findings:
        if finding.share:
            groups.setdefault(finding.name.split(":")[0] if ":" in finding.name else "accuracy", []).append(finding)
    return [(title, 0.9 + 0.4 * len(some), partial(_draw_bars, findings=some)) for title, some in groups.items()]


def _draw_bars(axes: Any, *, findings: Sequence[Finding]) -> None:
    """Ours and the paper's, in %."""
    names = [finding.name.split(":")[-1].strip() for finding in findings]
    places = list(range(len(findings)))[::-1]
    ours = [100 * finding.mean for finding in findings]
    theirs = [(place, finding.paper) for place, finding in zip(places, findings, strict=True) if finding.paper]
    shift = 0.2 if theirs else 0.0
    axes.barh([place + shift for place in places], ours, 0.38, xerr=[100 * (f.std or 0) for f in findings], label="ours")
    if theirs:
        axes.barh([place - 0.2 for place, _ in theirs], [100 * paper.mean for _, paper in theirs], 0.38,
                  xerr=[100 * (paper.std or 0) for _, paper in theirs], label="paper")  # fmt: skip
        axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlim(0, 100 if max(ours) > _WIDE else None)  # rates of few % would not show
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("%", fontsize=8)


def _curves(found: Reproduction) -> list[_Panel]:
    """One panel: accuracy on the first task by the factor on its memories."""
    return [("accuracy on the first task, by the factor on its memories", _TALL, partial(_draw_curves, findings=found.findings))]


def _draw_curves(axes: Any, *, findings: Sequence[Finding]) -> None:
    for suffix, label in ((", on W_0 too", "W_0 scaled, too"), ("", "W_0 as it is")):
        points = [
            (float(match[1]), finding) for finding in findings if (match := re.fullmatch(rf"beta ([\d.]+){suffix}", finding.name))
        ]
        if not points:
            continue
        betas = [beta for beta, _ in points]
        (line,) = axes.plot(betas, [100 * finding.mean for _, finding in points], marker="o", label=label)
        low, high = ([100 * end(finding.ours) for _, finding in points] for end in (min, max))
        axes.fill_between(betas, low, high, color=line.get_color(), alpha=0.15)
        theirs = [(beta, 100 * finding.paper.mean) for beta, finding in points if finding.paper]
        if theirs:
            axes.plot(*zip(*theirs, strict=True), "k--", label="paper (W_0 scaled, too)")
    axes.set_xlabel("beta", fontsize=8)
    axes.set_ylabel("%", fontsize=8)
    axes.legend(fontsize=8)


def _stiffness(found: Reproduction) -> list[_Panel]:
    """The index along depth, the ratio over M, and the total over training, of each network; of the first run."""
    tables, names = found.runs[0].measured.tables, list(found.settings)
    wanted = ((DEPTH, "block", "nsi"), (OVER_M, "m1", "ratio"), (OVER_TRAINING, "step", "tns"))
    return [
        (table, _TALL, partial(_draw_lines, {name: tables[f"{name}: {table}"] for name in names}, x, y)) for table, x, y in wanted
    ]


def _draw_lines(lines: dict[str, list[dict[str, Any]]], x: str, y: str, axes: Any) -> None:
    for name, rows in lines.items():
        axes.plot([row[x] for row in rows], [row[y] for row in rows], marker="o", markersize=3, label=name)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=8)

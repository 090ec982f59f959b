"""Figures of what was reproduced, beside what was published."""

import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dualstore.errors import DualstoreWarning
from dualstore.experiments.findings import Finding, Reproduction
from dualstore.experiments.residual_findings import DEPTH, OVER_M, OVER_TRAINING

__all__ = ["draw"]

_Panel = tuple[str, float, Callable[[Any], None]]
"""A title, a height in inches, and what draws on a matplotlib Axes."""
_TALL = 3.2


def draw(found: Reproduction, folder: Path) -> list[Path]:
    """Draws an experiment's figures as PNG into a folder; warns and draws none without matplotlib (the extra `report`)."""
    try:
        from matplotlib.figure import Figure  # optional
    except ImportError:
        warnings.warn("figures need matplotlib; install it with: pip install 'dualstore[report]'", DualstoreWarning, stacklevel=2)
        return []
    panels = {"beta": _curves, "stiffness": _stiffness}.get(found.experiment, _bars)(found)
    heights = [height for _, height, _ in panels]
    figure = Figure(figsize=(7.5, sum(heights)), layout="constrained")
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, _, draw_one) in zip(rows, panels, strict=True):
        draw_one(axes)
        axes.set_title(title, loc="left", fontsize=10)
    path = folder / f"{found.experiment}.png"
    figure.savefig(path, dpi=130)
    return [path]


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
    axes.barh([place + 0.2 for place in places], ours, 0.38, xerr=[100 * (f.std or 0) for f in findings], label="ours")
    theirs = [(place, finding.paper) for place, finding in zip(places, findings, strict=True) if finding.paper]
    if theirs:
        axes.barh([place - 0.2 for place, _ in theirs], [100 * paper.mean for _, paper in theirs], 0.38,
                  xerr=[100 * (paper.std or 0) for _, paper in theirs], label="paper")  # fmt: skip
        axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlim(0, 100)
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

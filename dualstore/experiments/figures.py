"""Figures of what was reproduced, beside what was published."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualstore.errors import DualstoreWarning
from dualstore.experiments.findings import Finding, Reproduction

__all__ = ["draw"]


def draw(found: Reproduction, folder: Path) -> list[Path]:
    """Draws an experiment's figures as PNG into a folder; warns and draws none without matplotlib (the extra `report`)."""
    try:
        from matplotlib.figure import Figure  # optional
    except ImportError:
        warnings.warn("figures need matplotlib; install it with: pip install 'dualstore[report]'", DualstoreWarning, stacklevel=2)
        return []
    panels = _curves(found.findings) if found.experiment == "beta" else _bars(found.findings)
    figure = Figure(figsize=(7, 3.4 * len(panels)), layout="constrained")
    for axes, (title, draw_one, findings) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        draw_one(axes, findings)
        axes.set_title(title, loc="left", fontsize=10)
    path = folder / f"{found.experiment}.png"
    figure.savefig(path, dpi=130)
    return [path]


def _bars(findings: Sequence[Finding]) -> list[tuple[str, Any, list[Finding]]]:
    """A panel for each group of shares: what stands before the colon of their names."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.share:
            groups.setdefault(finding.name.split(":")[0] if ":" in finding.name else "accuracy", []).append(finding)
    return [(title, _draw_bars, some) for title, some in groups.items()]


def _draw_bars(axes: Any, findings: Sequence[Finding]) -> None:
    """Ours and the paper's, in %."""
    names = [finding.name.split(":")[-1].strip() for finding in findings]
    places = list(range(len(findings)))[::-1]
    ours = [100 * finding.mean for finding in findings]
    axes.barh([place + 0.2 for place in places], ours, 0.38, xerr=[100 * (f.std or 0) for f in findings], label="ours")
    theirs = [(place, finding.paper) for place, finding in zip(places, findings, strict=True) if finding.paper]
    if theirs:
        axes.barh([place - 0.2 for place, _ in theirs], [100 * paper.mean for _, paper in theirs], 0.38,
                  xerr=[100 * (paper.std or 0) for _, paper in theirs], label="paper")  # fmt: skip
        axes.legend(fontsize=8)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlim(0, 100)
    axes.set_xlabel("%", fontsize=8)


def _curves(findings: Sequence[Finding]) -> list[tuple[str, Any, list[Finding]]]:
    """One panel: accuracy on the first task by the factor on its memories."""
    return [("accuracy on the first task, by the factor on its memories", _draw_curves, list(findings))]


def _draw_curves(axes: Any, findings: Sequence[Finding]) -> None:
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

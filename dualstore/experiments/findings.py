"""What is measured on the stores of an experiment, over several runs, beside what was published."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Finding", "Measured", "Published", "Reproduction", "Rows", "Run", "compare", "join"]

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Published:
    """A number of a paper: mean and, where it gives one, standard deviation over its runs; shares in 0..1."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Measured:
    """What one store shows: numbers by name, shares in 0..1 but for the `plain` ones, and tables by title."""

    numbers: dict[str, float]
    tables: dict[str, Rows] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    """Names of numbers that are no shares."""


@dataclass(frozen=True)
class Run:
    """One training run: its seed, what its store shows, and what it cost (seconds, bytes, counts)."""

    seed: int
    measured: Measured
    cost: dict[str, float]

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Run":
        """The run that `asdict` made this of."""
        return cls(found["seed"], Measured(**found["measured"]), dict(found["cost"]))


@dataclass(frozen=True)
class Finding:
    """One number: ours in every run, and the published one."""

    name: str
    ours: tuple[float, ...]
    paper: Published | None = None
    share: bool = True
    """Whether it is one, in 0..1."""

    @property
    def mean(self) -> float:
        """Over the runs."""
        return statistics.fmean(self.ours)

    @property
    def std(self) -> float | None:
        """Over the runs, of the sample; None for a single one."""
        return statistics.stdev(self.ours) if len(self.ours) > 1 else None

    @property
    def off(self) -> float | None:
        """Our mean less the published one."""
        return None if self.paper is None else self.mean - self.paper.mean

    @property
    def agrees(self) -> bool | None:
        """Whether that is within 0.02, or two published standard deviations where these are more; None without a paper's number."""
        if self.paper is None or self.off is None:
            return None
        return abs(self.off) <= max(0.02, 2 * (self.paper.std or 0.0)) + 1e-9

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        paper = {} if self.paper is None else {"paper": self.paper.mean, "paper_std": self.paper.std, "agrees": self.agrees}
        return {"name": self.name, "mean": self.mean, "std": self.std, "runs": list(self.ours), **paper}


@dataclass(frozen=True)
class Reproduction:
    """An experiment done again: its numbers beside the paper's, what each run shows and costs, and why it differs."""

    experiment: str
    settings: dict[str, Any]
    machine: str
    date: str
    runs: Sequence[Run]
    findings: Sequence[Finding]
    remarks: Sequence[str]
    reference: Mapping[str, str]
    """What the reference implementation takes, by the name that ours has in `costs`."""

    def costs(self) -> list[list[str]]:
        """What a run costs and what the reference implementation does: (what, ours, theirs), means of the runs."""
        mean = {name: statistics.fmean(run.cost[name] for run in self.runs) for name in self.runs[0].cost}
        rows = [
            ("training and recording, s", f"{mean['train_s']:.0f}"),
            ("index, s", f"{mean['index_s']:.0f}"),
            ("taking the numbers, s", f"{mean['measure_s']:.0f}"),
            ("patterns, all layers", f"{mean['rows']:,.0f}"),
            ("store, GB", f"{mean['bytes'] / 1e9:.2f}"),
            ("of it keys, GB", f"{mean['key_bytes'] / 1e9:.2f}"),
            ("index, GB", f"{mean['index_bytes'] / 1e9:.2f}"),
        ]
        return [[name, ours, self.reference.get(name, "")] for name, ours in rows]

    def to_json(self) -> str:
        """All of it; numbers that are not finite are null."""
        plain = {
            "experiment": self.experiment,
            "settings": self.settings,
            "machine": self.machine,
            "date": self.date,
            "findings": [finding.to_dict() for finding in self.findings],
            "remarks": list(self.remarks),
            "reference": dict(self.reference),
            "runs": [asdict(run) for run in self.runs],
        }
        return json.dumps(_finite(plain), indent=1, ensure_ascii=False)


def join(parts: Mapping[str, Run]) -> Run:
    """Runs of several networks with one seed as one: names of numbers and tables begin with the network's, costs add up."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    numbers, tables, plain, cost = dict[str, float](), dict[str, Rows](), list[str](), dict[str, float]()
    for name, run in parts.items():
        numbers |= {f"{name}: {what}": value for what, value in run.measured.numbers.items()}
        tables |= {f"{name}: {what}": rows for what, rows in run.measured.tables.items()}
        plain += [f"{name}: {what}" for what in run.measured.plain]
        for what, value in run.cost.items():
            cost[what] = cost.get(what, 0.0) + value
    return Run(next(iter(parts.values())).seed, Measured(numbers, tables, plain), cost)


def compare(runs: Sequence[Run], published: Mapping[str, Published]) -> list[Finding]:
    """The numbers that all runs have, in the order of the first one."""
    names = [name for name in runs[0].measured.numbers if all(name in run.measured.numbers for run in runs)]
    plain = set(runs[0].measured.plain)
    return [
        Finding(name, tuple(run.measured.numbers[name] for run in runs), published.get(name), name not in plain) for name in names
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""What an experiment is: how it is trained, what is measured on its store, and what was published."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dualstore.errors import DualstoreError
from dualstore.experiments.findings import Measured, Published
from dualstore.experiments.image_examples import Example
from dualstore.store import Store

__all__ = ["Experiment", "Progress", "Request", "changed", "plain"]

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(frozen=True)
class Request:
    """How an experiment is to be run; what is left out is as the experiment has it."""

    seed: int = 0
    scale: float = 1.0
    """Share of the widths, and of the data, for a quick look."""
    full: bool = False
    """As many steps as the paper has, where the experiment has fewer."""
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
    train: Callable[[Path, Any, Request, Progress], dict[str, float]]
    """Records a store at a path; returns what only training knows, by name."""
    measure: Callable[[Store, Any, Request], Measured]
    examples: Callable[[Store], list[Example]] | None = None
    """Test images to be drawn with what they retrieve."""
    published: Mapping[str, Published] = field(default_factory=dict)
    reported: tuple[str, ...] = ()
    """What training knows and the store does not, that is shown with what was measured."""
    shares: tuple[str, ...] = ()
    """Those of it that are shares, in 0..1."""
    remarks: tuple[str, ...] = ()
    """Where the experiment differs from the paper's, and why."""
    reference: Mapping[str, str] = field(default_factory=dict)
    """What the papers' own implementation takes: see `Reproduction.costs`."""
    runs: int = 5
    """By default."""


def changed(name: str, settings: Any, request: Request) -> Any:
    """Settings with a request's seed and changes. Raises DualstoreError for those that the experiment does not have."""
    known = [one.name for one in fields(settings)]
    unknown = sorted(set(request.changes) - set(known))
    if unknown:
        raise DualstoreError(f"{name}: has no setting {', '.join(unknown)}; there are {', '.join(known)}")
    return replace(settings, seed=request.seed, **request.changes)


def plain(settings: Any) -> dict[str, Any]:
    """Settings as JSON has them."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return found

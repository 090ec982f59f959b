"""The experiments by name: their settings, training, measures, and where they differ from the papers'."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dualstore.experiments import image_findings, images, published
from dualstore.experiments.experiment import Experiment, Progress, Request, changed
from dualstore.experiments.findings import Measured, Published
from dualstore.store import Store

__all__ = ["EXPERIMENTS"]

# Images


def _image_experiment(
    name: str, measure: Callable[[Store], Measured], numbers: Mapping[str, Published], remarks: Sequence[str]
) -> Experiment:
    plan = images.PLANS[name]

    def settings(request: Request) -> images.Settings:
        changes = dict(request.changes)
        if "steps" in changes:
            changes["epochs"] = 0
        if isinstance(changes.get("hidden"), int):
            changes["hidden"] = (changes["hidden"],) * len(plan.settings.hidden)
        first = plan.settings.scaled(request.scale) if request.scale != 1 else plan.settings
        found: images.Settings = changed(name, first, replace(request, changes=changes))
        return found

    def train(path: Path, settings: images.Settings, request: Request, progress: Progress) -> dict[str, float]:
        phases = images.phases_of(plan, settings, request.data)
        report = images.run_phases(path, phases, settings, progress=progress, maker="dualstore train")
        return {
            f"accuracy on {task} after phase {number + 1}": share
            for number, found in enumerate(report.accuracy)
            for task, share in found.items()
        }

    return Experiment(name, settings, train, lambda store, *_: measure(store), numbers, tuple(remarks), _IN_MEMORY)


_IN_MEMORY = {"of it keys, GB": "as much, in memory", "index, GB": "none: every query scans all keys"}
_COMMON = (
    "the random numbers are not the paper's: seeds, initial weights and order of the images differ",
    "the paper keeps 40,053 training images of each set but does not say which; here the first ones",
)
_IMAGES = (
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

EXPERIMENTS = {one.name: one for one in _IMAGES}
"""All of them, by name."""

"""The experiments by name: their settings, training, measures, and where they differ from the papers'."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dualstore.datasets import load_idx
from dualstore.experiments import (
    image_examples,
    image_findings,
    images,
    language,
    language_findings,
    published,
    residual,
    residual_findings,
    texts,
    transformer,
)
from dualstore.experiments.experiment import Experiment, Progress, Request, changed
from dualstore.experiments.findings import Measured, Published
from dualstore.store import Store

__all__ = ["COMPARISONS", "EXPERIMENTS"]

# Images


def _image_experiment(
    name: str,
    measure: Callable[[Store], Measured],
    numbers: Mapping[str, Published],
    remarks: Sequence[str],
    examples: Callable[[Store], list[image_examples.Example]] | None = None,
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

    return Experiment(
        name,
        settings,
        train,
        lambda store, *_: measure(store),
        examples=examples,
        published=numbers,
        remarks=tuple(remarks),
        reference=_IN_MEMORY,
    )


_IN_MEMORY = {"of it keys, GB": "as much, in memory", "index, GB": "none: every query scans all keys"}
_COMMON = (
    "the random numbers are not the paper's: seeds, initial weights and order of the images differ",
    "the paper keeps 40,053 training images of each set but does not say which; here the first ones",
)
_IMAGES = (
    _image_experiment("mnist", image_findings.measure_mnist, published.MNIST, _COMMON, image_examples.mnist_examples),
    _image_experiment(
        "joint",
        image_findings.measure_joint,
        published.JOINT,
        (
            *_COMMON,
            "the paper shows examples and no numbers; shares of attention are means over the first "
            f"{image_findings.ASKED} test images of each set, at the first layer of {image_findings.ASKED_SIZES}",
        ),
        image_examples.joint_examples,
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
        image_examples.continual_examples,
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

# Texts

_PERPLEXITIES = ("perplexity of held-out passages before training", "perplexity of held-out passages after training")


def _language_experiment(
    name: str, default: language.Settings, load: Callable[[Path | None], texts.Corpus], section: str, reference: Mapping[str, str]
) -> Experiment:
    def settings(request: Request) -> language.Settings:
        first = language.full(default) if request.full else default
        found: language.Settings = changed(name, first if request.scale == 1 else language.scaled(first, request.scale), request)
        return found

    def train(path: Path, settings: language.Settings, request: Request, progress: Progress) -> dict[str, float]:
        report = language.train(path, _corpus(load, request), settings, progress=progress, maker="dualstore train")
        return {
            **dict(zip(_PERPLEXITIES, (report.perplexity_before, report.perplexity_after), strict=True)),
            "epochs": report.epochs,
        }

    return Experiment(
        name,
        settings,
        train,
        lambda store, _, request: language_findings.measure_language(store, _corpus(load, request), section),
        reported=_PERPLEXITIES,
        remarks=(
            f"{default.steps:,} steps of {default.batch_size} streams by default where the paper has {default.paper_steps:,} of "
            f"{default.paper_batch_size}; --full does them all",
            *_OF_LANGUAGE,
            _WIKITEXT if name == "wikitext" else _FABLES,
        ),
        reference=reference,
        runs=1,
    )


def _corpus(load: Callable[[Path | None], texts.Corpus], request: Request) -> texts.Corpus:
    corpus = load(request.data)
    return texts.scaled(corpus, request.scale) if request.scale != 1 else corpus


_OF_LANGUAGE = (
    "the paper shows examples and no rates; a place of the text that comes again in later epochs counts as one",
    "test passages are the ends of long sections, which are not trained on",
    f"totals over visits are taken for {language_findings.TOTALS} passages only, as each is multiplied with all keys",
)
_FABLES = "a passage of a fable is its last 101 characters: many of them ask at the full stop before a closing quotation mark"
_WIKITEXT = (
    "WikiText-2's text for training is not used: trained on its test.txt, asked with passages of it that are not trained on and "
    "with passages of valid.txt, whose articles are others: these count for next tokens only"
)


def _transformer() -> Experiment:
    name = "transformer"

    def settings(request: Request) -> transformer.Settings:
        first = transformer.DEFAULT if request.scale == 1 else transformer.DEFAULT.scaled(request.scale)
        found: transformer.Settings = changed(name, first, request)
        return found

    def train(path: Path, settings: transformer.Settings, request: Request, progress: Progress) -> dict[str, float]:
        losses = transformer.train(path, _corpus(texts.load_aesop, request), settings, progress=progress, maker="dualstore train")
        return dict(zip(_PERPLEXITIES, map(math.exp, losses), strict=True))

    def measure(store: Store, settings: transformer.Settings, request: Request) -> Measured:
        blocks = transformer.blocks_of(settings)
        return language_findings.measure_transformer(store, _corpus(texts.load_aesop, request), blocks, settings.heads)

    remarks = (
        "the paper describes both levels of retrieval and trains no transformer: size and training are ours",
        "the projections of a block see the same input, so alpha is the same for all three; they differ in their errors",
        *_OF_LANGUAGE[:2],
        _FABLES,
    )
    return Experiment(name, settings, train, measure, reported=_PERPLEXITIES, remarks=remarks, runs=1)


_SCANNED = {"index, GB": "none: every query scans all keys"}
_TEXTS = (
    _language_experiment("aesop", language.AESOP, texts.load_aesop, "fable", _SCANNED),
    _language_experiment(
        "wikitext",
        language.WIKITEXT,
        texts.load_wikitext,
        "article",
        {**_SCANNED, "of it keys, GB": "102 for 10,000 steps, of the LSTM alone"},
    ),
    _transformer(),
)

# Residual networks


def _residual_experiment(variant: str) -> Experiment:
    def settings(request: Request) -> residual.Settings:
        default, share = residual.Settings(variant=variant), request.scale
        if share != 1:
            width = max(residual.SQUEEZE, round(default.width * share))
            default = replace(
                default, width=width, images=max(1, round(_FASHION * share)), probes=max(1, round(default.probes * share))
            )
        found: residual.Settings = changed(variant, default, request)
        return found

    def train(path: Path, settings: residual.Settings, request: Request, progress: Progress) -> dict[str, float]:
        images = load_idx("fashion-mnist", request.data)
        report = residual.train(path, images, settings, progress=progress, maker="dualstore train")
        return {"test accuracy": report.accuracy, "parameters": float(report.parameters)}

    return Experiment(
        variant,
        settings,
        train,
        lambda store, *_: residual_findings.measure_residual(store),
        reported=("test accuracy",),
        shares=("test accuracy",),
        remarks=(
            "the paper trains large networks on CIFAR and ImageNet; these are small, on Fashion-MNIST, with one budget for all",
            "it claims an order, not these numbers: networks with attention above the plain one, StepNet highest, in accuracy and "
            "in total neural stiffness",
        ),
        runs=3,
    )


_FASHION = 60_000
"""Training images of Fashion-MNIST."""
_NETWORKS = tuple(_residual_experiment(variant) for variant in residual.VARIANTS)

EXPERIMENTS = {one.name: one for one in (*_IMAGES, *_TEXTS, *_NETWORKS)}
"""All of them, by name."""
COMPARISONS = {"stiffness": residual.VARIANTS}
"""What is reproduced with several of them side by side."""

"""Runs that dualstore brings along: demo and train."""

import json
import shutil
from pathlib import Path
from typing import Any

import click

import dualstore
from dualstore.errors import StoreError
from dualstore.result import format_value

from .look import print_info, print_verification
from .options import experiment_options, open_from, request_of, store_option
from .output import print_result, print_table, progress_bar, progress_bars

__all__ = ["demo", "train"]

_DEMO = "dualstore demo"
# The catalogue has them, too; to read it would bring torch.
_EXPERIMENTS = ["mnist", "joint", "continual", "beta", "aesop", "wikitext", "transformer", "resnet", "senet", "stepnet"]
_EXAMPLE = "SELECT sample_id, sum(alpha) AS total FROM attention GROUP BY ALL ORDER BY total DESC LIMIT 5"


@click.command()
@store_option
@click.option("--steps", type=click.IntRange(min=1), default=1800, show_default=True, help="Optimiser steps.")
def demo(store: Path, steps: int) -> None:
    """Train a small network on scikit-learn's digits, record it, and ask it a few questions.

    Replaces a store that an earlier demo made, never another one.
    """
    _clear_demo(store)
    from dualstore.datasets import load_digits  # these bring torch
    from dualstore.experiments.images import Phase, Settings, prepare, run_phases

    digits = prepare(load_digits(), task="digits")
    settings = Settings(steps=steps, batch_size=32, lr=0.02, hidden=(64, 64))
    with progress_bar("training on digits, recording every step") as progress:
        run_phases(store, [Phase([digits], settings.steps)], settings, progress=progress, maker=_DEMO)
    opened = _indexed(store)
    print_info(opened.info())
    print_result(opened.query(test_id=42, layer=1, top=20), "table")
    print_result(opened.totals(test_id=42, layer=1), "table")
    print_result(opened.votes(), "table", percent=("target_accuracy", "output_accuracy"))
    print_verification(opened.verify().to_dict())
    _suggest(store, 42, (1, 2))


@click.command()
@click.argument("experiment", type=click.Choice(_EXPERIMENTS))
@store_option
@experiment_options
def train(experiment: str, store: Path, **options: Any) -> None:
    """Train and record one of the papers' experiments."""
    from dualstore.experiments.reproduce import train as run  # brings torch

    with progress_bars() as progress:
        found = run(experiment, store, request_of(options), progress)
    opened = open_from(store)
    print_info(opened.info())
    print_table(f"training {experiment}", ["what", "found"], [[name, format_value(value)] for name, value in found.items()])
    asked = [layer.number for layer in opened.layers if layer.keys == "vector"][-2:]
    _suggest(store, 0, (asked[0], asked[-1]))


def _clear_demo(store: Path) -> None:
    """Removes the store of an earlier demo; refuses anything else that is not an empty place."""
    if not store.exists() or (store.is_dir() and not any(store.iterdir())):
        return
    try:
        maker: Any = json.loads((store / "store.json").read_text())["maker"]
    except (OSError, ValueError, KeyError, TypeError):
        maker = None
    if maker != _DEMO or store.is_symlink():
        raise StoreError(
            f"{store}: expected no store or one that an earlier demo made, found something else; choose another place with --store"
        )
    shutil.rmtree(store)


def _indexed(store: Path) -> dualstore.Store:
    """The store, opened, its index built."""
    opened = open_from(store)
    with progress_bar("indexing") as progress:
        opened.build_index(progress)
    return opened


def _suggest(store: Path, test_id: int, layers: tuple[int, int]) -> None:
    where = "" if str(store) == "store" else f" --store {store}"
    first, second = layers
    click.echo("Try next:")
    for command in (
        f"dualstore query --test-id {test_id} --layer {first} --top 20{where}",
        f"dualstore query --test-id {test_id} --layer {second} --per label --top 3{where}",
        f"dualstore totals --test-id {test_id} --layer {second} --by epoch,label{where}",
        f'dualstore sql "{_EXAMPLE}" --test-id {test_id} --layer {first}{where}',
        f"dualstore verify{where}",
    ):
        click.echo(f"  {command}")

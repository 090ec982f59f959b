"""Runs that dualstore brings along: demo and train."""

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dualstore
from dualstore.errors import StoreError

from .look import print_info, print_verification
from .options import Finite, open_from, store_option
from .output import print_result, print_table, progress_bar

if TYPE_CHECKING:
    from dualstore.training import Report

__all__ = ["demo", "train"]

_DEMO = "dualstore demo"
_EXAMPLE = "SELECT sample_id, sum(alpha) AS total FROM attention GROUP BY ALL ORDER BY total DESC LIMIT 5"
_SETTINGS = (
    click.option("--steps", type=click.IntRange(min=1), help="Steps of each phase; default 5000, continual 3000."),
    click.option("--batch-size", type=click.IntRange(min=1), default=128, show_default=True),
    click.option("--lr", type=Finite(min=0), default=3e-3, show_default=True, help="Learning rate."),
    click.option("--momentum", type=Finite(min=0), default=0.9, show_default=True),
    click.option("--clip", type=Finite(min=0), default=1.0, show_default=True, help="Largest gradient norm; 0 for no clipping."),
    click.option("--hidden", type=click.IntRange(1, 1 << 20), default=800, show_default=True, help="Width of both hidden layers."),
    click.option("--images", type=click.IntRange(min=1), default=40_053, show_default=True, help="Training images of each set."),
    click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True),
)


@click.command()
@store_option
@click.option("--steps", type=click.IntRange(min=1), default=1800, show_default=True, help="Optimiser steps.")
def demo(store: Path, steps: int) -> None:
    """Train a small network on scikit-learn's digits, record it, and ask it a few questions.

    Replaces a store that an earlier demo made, never another one.
    """
    _clear_demo(store)
    from dualstore.datasets import load_digits  # these bring torch
    from dualstore.training import Phase, Settings, prepare, run_phases

    digits = prepare(load_digits(), task="digits", kept=None)
    settings = Settings(steps=steps, batch_size=32, lr=0.02, hidden=64)
    with progress_bar("training on digits, recording every step") as progress:
        run_phases(store, [Phase([digits], settings.steps)], settings, progress=progress, maker=_DEMO)
    opened = _indexed(store)
    print_info(opened.info())
    print_result(opened.query(test_id=42, layer=1, top=20), "table")
    print_result(opened.totals(test_id=42, layer=1), "table")
    print_result(opened.votes(), "table", percent=("target_accuracy", "output_accuracy"))
    print_verification(opened.verify().to_dict())
    _suggest(store, 42)


@click.command()
@click.argument("run", type=click.Choice(["mnist", "joint", "continual"]))
@store_option
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Folder with the IDX files; also $DUALSTORE_DATA. By default they are downloaded.",
)
def train(run: str, store: Path, data: Path | None, steps: int | None, batch_size: int, lr: float, momentum: float,
          clip: float, hidden: int, images: int, seed: int) -> None:  # fmt: skip
    """Train and record one of the paper's image runs: MNIST, MNIST and Fashion-MNIST jointly, or one after the other."""
    from dualstore.datasets import load_idx  # these bring torch
    from dualstore.training import Phase, Settings, prepare, run_phases

    settings = Settings(steps or (3000 if run == "continual" else 5000), batch_size, lr, momentum, clip, hidden, seed)
    sets = [prepare(load_idx("mnist", data), task="mnist", kept=images)]
    if run != "mnist":
        sets.append(prepare(load_idx("fashion-mnist", data), task="fashion", number=1, kept=images))
    phases = [Phase([found], settings.steps) for found in sets] if run == "continual" else [Phase(sets, settings.steps)]
    started = time.monotonic()
    with progress_bar(f"training {run}, recording every step") as progress:
        report = run_phases(store, phases, settings, progress=progress, maker="dualstore train")
    print_info(_indexed(store).info())
    _print_report(report, time.monotonic() - started)
    _suggest(store, 42)


for _option in reversed(_SETTINGS):
    train = _option(train)


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


def _print_report(report: "Report", seconds: float) -> None:
    tasks = list(report.accuracy[-1])
    rows = [[f"{index + 1}", *(f"{100 * found[task]:.2f} %" for task in tasks)] for index, found in enumerate(report.accuracy)]
    print_table(f"test accuracy after each phase ({seconds:.0f} s in all)", ["phase", *tasks], rows)


def _suggest(store: Path, test_id: int) -> None:
    where = "" if str(store) == "store" else f" --store {store}"
    click.echo("Try next:")
    for command in (
        f"dualstore query --test-id {test_id} --layer 1 --top 20{where}",
        f"dualstore query --test-id {test_id} --layer 2 --per label --top 3{where}",
        f"dualstore totals --test-id {test_id} --layer 2 --by epoch,label{where}",
        f'dualstore sql "{_EXAMPLE}" --test-id {test_id} --layer 1{where}',
        f"dualstore verify{where}",
    ):
        click.echo(f"  {command}")

"""Looking at a store as a whole, and after it: info, verify, index, merge."""

import sys
from pathlib import Path
from typing import Any

import click

import dualstore

from .options import budget_options, memory_option, open_from, output_option, store_option
from .output import print_object, print_table, progress_bar

__all__ = ["index", "info", "merge", "print_info", "print_verification", "verify"]


@click.command()
@store_option
@output_option
def info(store: Path, output: str) -> None:
    """What the store holds: layers, counts, sizes, optimiser, and what was not recorded."""
    found = open_from(store).info()
    if not print_object(found, output):
        print_info(found)


@click.command()
@store_option
@click.option(
    "--probes", type=click.IntRange(min=0), default=8, show_default=True, help="How many recorded outputs to rebuild at each layer."
)
@click.option("--at-step", type=int, help="Check the memory as it was after this step against the probes recorded then.")
@budget_options
@output_option
def verify(store: Path, probes: int, at_step: int | None, memory_mb: int, threads: int, output: str) -> None:
    """Prove the store against the network: weights rebuilt from rows, outputs, row counts, checksums.

    Exit code 1 where it does not prove itself.
    """
    found = open_from(store, memory_mb, threads).verify(probes=probes, at_step=at_step).to_dict()
    if not print_object(found, output):
        print_verification(found)
    sys.exit(0 if found["ok"] else 1)


@click.command()
@store_option
@memory_option
def index(store: Path, memory_mb: int) -> None:
    """Build the index, or what is missing of it: query, totals and votes then read hardly anything of the log.

    About 5 % of the keys' size, below index/ in the store; it may be deleted at any time. Recording builds it at its end.
    """
    _build_index(store, memory_mb)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("folders", metavar="IN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--index/--no-index", "indexed", default=True, show_default=True, help="Build the index afterwards.")
@memory_option
def merge(out: Path, folders: tuple[Path, ...], memory_mb: int, *, indexed: bool) -> None:
    """Make one store OUT of what the processes of a training recorded into folders of their own.

    Every rank must be there once. Files are linked where that can be, else copied; the folders stay as they are.
    """
    dualstore.merge_stores(out, folders)
    if indexed:
        _build_index(out, memory_mb)
    click.echo(f"store of {len(folders)} folders: {out}")


def _build_index(store: Path, memory_mb: int) -> None:
    opened = open_from(store, memory_mb)
    with progress_bar("indexing") as progress:
        opened.build_index(progress)


def print_info(found: dict[str, Any]) -> None:
    """The table of `dualstore info`."""
    values = {name: value for name, value in found.items() if name not in ("layers", "bytes")}
    shown = {"size": _bytes(found["bytes"])} | values
    rows = [[name.replace("_", " "), _listed(value)] for name, value in shown.items() if value not in ([], "")]
    print_table(f"store {found['path']}", ["what", "value"], rows)
    columns = ["layer", "name", "kind", "d_in", "d_out", "rows", "recorded", "parts", "size", "nonfinite_rows"]
    layers = [layer | {"size": _bytes(layer["bytes"]), "recorded": f"{layer['recorded']:.1%}"} for layer in found["layers"]]
    print_table("layers", columns, [[_listed(layer[name]) for name in columns] for layer in layers])


def print_verification(found: dict[str, Any]) -> None:
    """The table of `dualstore verify`."""
    columns = ["layer", "name", "rows", "weight_residual", "output_residual"]
    rows = [[_listed(layer[name]) for name in columns] for layer in found["layers"]]
    verdict = "exact: the store rebuilds the network" if found["ok"] else "NOT proven"
    print_table(f"verify: {found['rows']:,} rows, {verdict}", columns, rows)
    for layer in found["layers"]:
        if layer["note"]:
            click.echo(f"note: {layer['note']}")
    for problem in found["problems"]:
        click.echo(f"problem: {problem}")


def _listed(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.2e}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"

"""An experiment of the papers done again: reproduce."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualstore.result import format_value

from .options import experiment_options, request_of
from .output import print_table, progress_bars

if TYPE_CHECKING:
    from dualstore.experiments.findings import Finding, Reproduction

__all__ = ["reproduce"]

# The catalogue has them, too; to read it would bring torch.
_EXPERIMENTS = ["mnist", "joint", "continual", "beta", "aesop", "wikitext", "transformer", "stiffness"]


@click.command()
@click.argument("experiment", type=click.Choice(_EXPERIMENTS))
@click.option("--runs", type=click.IntRange(min=1), help="Runs, with seeds from --seed on; default 5, of texts 1, stiffness 3.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="reproduction",
    show_default=True,
    help="Folder for numbers, figures and, while they are needed, stores.",
)
@click.option("--keep", is_flag=True, help="Keep the stores.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@experiment_options
def reproduce(experiment: str, runs: int | None, out: Path, keep: bool, as_json: bool, **options: Any) -> None:  # fmt: skip
    """Do an experiment of the papers again and show its numbers beside theirs.

    Numbers of runs that are in the folder already are used, and so are stores; what is there for other settings is refused.
    """
    from dualstore.experiments.figures import draw  # brings torch, and matplotlib
    from dualstore.experiments.reproduce import reproduce as run

    with progress_bars() as progress:
        found = run(experiment, out, runs, request_of(options), progress, keep=keep)
    figures = draw(found, out)
    if as_json:
        click.echo(found.to_json())
        return
    _print(found)
    click.echo(f"Numbers: {out / experiment}.json" + (f"; figures: {', '.join(map(str, figures))}" if figures else ""))


def _print(found: "Reproduction") -> None:
    seeds = f"{len(found.runs)} runs, seeds {found.runs[0].seed} to {found.runs[-1].seed}" if len(found.runs) > 1 else "one run"
    rows = [[finding.name, _ours(finding), _paper(finding), _off(finding)] for finding in found.findings]
    print_table(f"{found.experiment}: {seeds}; shares in %", ["what", "ours", "paper", "ours - paper"], rows)
    for title, some in found.runs[0].measured.tables.items():
        if some:
            print_table(
                f"{title} (seed {found.runs[0].seed})", list(some[0]), [list(map(format_value, row.values())) for row in some]
            )
    print_table("what it cost, mean of the runs", ["what", "ours", "reference implementation"], found.costs())
    for finding in found.findings:
        if finding.agrees is False:
            click.echo(f"differs: {finding.name}: {_ours(finding)} beside {_paper(finding)}")
    for remark in found.remarks:
        click.echo(f"note: {remark}")


def _ours(finding: "Finding") -> str:
    spread = "" if finding.std is None else f" +- {_scaled(finding, finding.std)}"
    return f"{_scaled(finding, finding.mean)}{spread}"


def _paper(finding: "Finding") -> str:
    if finding.paper is None:
        return ""
    spread = "" if finding.paper.std is None else f" +- {_scaled(finding, finding.paper.std)}"
    return f"{_scaled(finding, finding.paper.mean)}{spread}"


def _off(finding: "Finding") -> str:
    return "" if finding.off is None else f"{'+' if finding.off >= 0 else ''}{_scaled(finding, finding.off)}"


def _scaled(finding: "Finding", value: float) -> str:
    return f"{100 * value:.1f}" if finding.share else f"{value:.4g}"

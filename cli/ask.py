"""Questions: query, totals, votes, self, stiffness, sql."""

from pathlib import Path
from typing import Any

import click

from .options import (
    Finite,
    budget_options,
    explain_option,
    inexact_option,
    layer_of,
    open_from,
    output_option,
    pool_option,
    query_options,
    query_vector,
    score_of,
    score_options,
    store_option,
    where_option,
)
from .output import print_explain, print_result

__all__ = ["query", "self_influence", "sql", "stiffness", "totals", "votes"]

_SAME_AS_TOP = 0


@click.command()
@store_option
@query_options
@click.option(
    "--top", type=click.IntRange(min=1), default=20, show_default=True, help="How many patterns, for each query and group."
)
@click.option("--bottom", is_flag=False, flag_value=_SAME_AS_TOP, type=click.IntRange(min=0), metavar="[N]",
              help="The smallest alpha instead: N of them, or as many as --top.")  # fmt: skip
@click.option("--abs", "absolute", is_flag=True, help="The largest |alpha| instead.")
@click.option("--min-alpha", type=Finite(), help="Only patterns whose alpha, or |alpha| with --abs, is at least this.")
@where_option
@click.option("--per", help="SQL expression: the best of each of its values, e.g. label.")
@score_options
@pool_option
@inexact_option
@explain_option
@budget_options
@output_option
def query(store: Path, test_ids: tuple[int, ...], vector: Path | None, layer: str, position: int | None, top: int,
          bottom: int | None, absolute: bool, min_alpha: float | None, where: str | None, per: str | None, score: str,
          output_of: str | None, at_step: int | None, pool: str | None, inexact: bool, explain: bool,
          memory_mb: int, threads: int, output: str) -> None:  # fmt: skip
    """The training patterns with the largest alpha, whose key is most like the query; or with the largest --score.

    Exact and ordered: ties by step, sample_id, position.
    """
    result = open_from(store, memory_mb, threads, inexact).query(
        layer=layer_of(layer), position=position, top=bottom or top, bottom=bottom is not None, absolute=absolute,
        min_alpha=min_alpha, where=where, per=per,
        pool=pool, **score_of(score, output_of, at_step), **query_vector(test_ids, vector),
    )  # fmt: skip
    print_result(result, output)
    if explain:
        print_explain(result)


@click.command()
@store_option
@query_options
@click.option(
    "--by", default="label", show_default=True, help="SQL expressions to group by, e.g. label,task or 'epoch // 2 AS half'."
)
@click.option("--abs", "absolute", is_flag=True, help="Sum |alpha|.")
@click.option("--paper", is_flag=True, help="The paper's rule: |alpha| at the first layer, alpha at the others.")
@where_option
@score_options
@pool_option
@inexact_option
@explain_option
@budget_options
@output_option
def totals(store: Path, test_ids: tuple[int, ...], vector: Path | None, layer: str, position: int | None, by: str,
           absolute: bool, paper: bool, where: str | None, score: str, output_of: str | None, at_step: int | None,
           pool: str | None, inexact: bool, explain: bool, memory_mb: int, threads: int, output: str) -> None:  # fmt: skip
    """Sums of alpha, or of another --score, over groups of training patterns, largest first.

    With --score influence, --layer all sums over the layers.
    """
    result = open_from(store, memory_mb, threads, inexact).totals(
        layer=None if layer == "all" else layer_of(layer), position=position, by=by, absolute=absolute, paper=paper, where=where,
        pool=pool, **score_of(score, output_of, at_step), **query_vector(test_ids, vector),
    )  # fmt: skip
    print_result(result, output)
    if explain:
        print_explain(result)


@click.command("self")
@store_option
@click.option("--layer", help="Layer number or name; by default the sum over all.")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="How many samples.")
@where_option
@click.option("--at-step", type=int, help="The memory as it was after this step.")
@inexact_option
@budget_options
@output_option
def self_influence(store: Path, layer: str | None, top: int, where: str | None, at_step: int | None, inexact: bool,
                   memory_mb: int, threads: int, output: str) -> None:  # fmt: skip
    """The training samples that did most to their own loss: mislabelled, rare or memorised ones."""
    chosen = None if layer is None else layer_of(layer)
    opened = open_from(store, memory_mb, threads, inexact)
    print_result(opened.self_influence(chosen, top=top, where=where, at_step=at_step), output)


@click.command()
@store_option
@click.option("--layer", help="Layer number or name; by default all.")
@where_option
@budget_options
@output_option
def votes(store: Path, layer: str | None, where: str | None, memory_mb: int, threads: int, output: str) -> None:
    """How well the label with the largest total predicts, over all probes: the paper's table."""
    chosen = None if layer is None else layer_of(layer)
    result = open_from(store, memory_mb, threads).votes(chosen, where=where)
    print_result(result, output, percent=("target_accuracy", "output_accuracy"))


@click.command()
@store_option
@click.option("--m1", type=Finite(min=0), multiple=True, default=(0.5,), show_default=True,
              help="Threshold relative to a trajectory's mean index; may be given several times.")  # fmt: skip
@click.option("--m2", type=Finite(min=0), multiple=True, default=(0.0,), show_default=True,
              help="Threshold of the index itself; may be given several times.")  # fmt: skip
@click.option("--where", help="SQL condition on step, block, name, sample_id, test_id, label, task, nsi and the other columns.")
@click.option("--training", is_flag=True, help="Of the rows from training, also where there are probes.")
@click.option("--blocks", is_flag=True, help="The mean index of each block instead.")
@budget_options
@output_option
def stiffness(store: Path, m1: tuple[float, ...], m2: tuple[float, ...], where: str | None, memory_mb: int, threads: int,
              output: str, *, training: bool, blocks: bool) -> None:  # fmt: skip
    """How unevenly residual blocks change the features: total neural stiffness, and shares of stiff blocks at --m1, --m2.

    Needs a store that was recorded with blocks=[...].
    """
    found = open_from(store, memory_mb, threads).stiffness(m1=m1, m2=m2, where=where, training=training)
    print_result(found.blocks if blocks else found.steps, output)


@click.command()
@click.argument("text", metavar="SQL")
@store_option
@click.option("--layer", help="With a query: layer of the relation `attention`.")
@click.option("--test-id", type=int, help="Query of the relation `attention`: a recorded test example.")
@click.option("--vector", type=click.Path(path_type=Path), help="Query of the relation `attention`: a .npy file.")
@click.option("--position", type=int, help="Position of the test example's row; by default the last.")
@score_options
@inexact_option
@budget_options
@output_option
def sql(text: str, store: Path, layer: str | None, test_id: int | None, vector: Path | None, position: int | None,
        score: str, output_of: str | None, at_step: int | None, inexact: bool, memory_mb: int, threads: int,
        output: str) -> None:  # fmt: skip
    """SQL over patterns, steps, samples, probes, blocks and, for a chosen layer and query, attention."""
    asked: dict[str, Any] = query_vector(() if test_id is None else (test_id,), vector)
    chosen = None if layer is None else layer_of(layer)
    result = open_from(store, memory_mb, threads, inexact).sql(
        text, layer=chosen, position=position, **score_of(score, output_of, at_step), **asked
    )
    print_result(result, output)

"""Stiffness: how unevenly the blocks of a residual network, taken as steps along an ODE, change what goes through them.

Source: Huang et al. 2023 (arXiv 2308.09939): Neural Stiffness Index, stiffness phenomenon, Total Neural Stiffness, ratio.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualstore.errors import QueryError
from dualstore.relations import block_columns, relate_folder, start_database
from dualstore.result import Result

if TYPE_CHECKING:
    from dualstore.database import Database
    from dualstore.store import Store

__all__ = ["Stiffness", "measure_stiffness"]

_PROBED, _TRAINED = "test_id <> -1", "test_id = -1"
_INDEXED = "isfinite(nsi)"


@dataclass(frozen=True)
class Stiffness:
    """What `Store.stiffness` found."""

    steps: Result
    """How stiff the trajectories of each step are, in all and at each M: tns, stiff, ratio."""
    blocks: Result
    """The mean index of each block at each step."""


def measure_stiffness(
    store: "Store", *, m1: float | Sequence[float], m2: float | Sequence[float], where: str | None, training: bool
) -> Stiffness:
    """See `Store.stiffness`."""
    thresholds = {"m1": _thresholds("m1", m1), "m2": _thresholds("m2", m2)}
    database = start_database(store)
    relate_folder(database, store, "blocks")
    if where is not None:
        database.check(block_columns(), where, condition=True)
    probed = _takes_probes(store, database, training=training)
    database.narrow("indexed", "blocks", [_PROBED if probed else _TRAINED, *([] if where is None else [where]), _INDEXED])
    title = f"{'test examples' if probed else 'training'}{'' if where is None else f', where {where}'}"
    return Stiffness(
        Result(database.answer("stiffness", thresholds), f"stiffness of trajectories: {title}"),
        Result(database.answer("block_stiffness"), f"mean stiffness index of blocks: {title}"),
    )


def _takes_probes(store: "Store", database: "Database", *, training: bool) -> bool:
    """Whether the rows of probes are meant. Raises QueryError where there are none that could be."""
    kinds = [row["probed"] for row in database.answer("block_rows").to_pylist() if row["count"]]
    probed = True in kinds and not training
    if probed not in kinds:
        kind = " from training" if kinds else ""
        raise QueryError(
            f"{store.path}: expected rows of residual blocks{kind}, found none; record them with record(..., blocks=[...])"
        )
    return probed


def _thresholds(name: str, given: float | Sequence[float]) -> list[float]:
    """One or several as a list. Raises QueryError."""
    found = [given] if isinstance(given, int | float) else list(given)
    if not found or not all(isinstance(one, int | float) and math.isfinite(one) and one >= 0 for one in found):
        raise QueryError(f"{name}: expected one or several numbers of 0 or more, found {given!r}")
    return [float(one) for one in found]

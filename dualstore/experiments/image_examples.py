"""Single test images beside what they retrieve, as the paper's figures show them.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), figures of section 4: the best training images of each layer, the 500
largest alpha of each class, and the class totals.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from dualstore.experiments.findings import Rows
from dualstore.shapes import Float64
from dualstore.store import Store

__all__ = ["Example", "Group", "Match", "Retrieval", "continual_examples", "joint_examples", "mnist_examples"]

BEST = 3
LARGEST = 500

Group = tuple[str, int]
"""A task and one of its labels."""


@dataclass(frozen=True)
class Match:
    """A training image among the best of a test image, at the visit that ranks highest."""

    sample_id: int
    group: Group
    alpha: float
    png: bytes


@dataclass(frozen=True)
class Retrieval:
    """What a test image retrieves at one layer."""

    layer: int
    best: list[Match]
    """Distinct ones, best first; those among the `LARGEST` best patterns."""
    largest: dict[Group, Float64[ndarray, " n"]]
    """The largest alpha of each task and label, largest first, at most `LARGEST`."""
    totals: dict[Group, float]
    """Sums of alpha, at the first layer of |alpha|; in the order of tasks and labels."""


@dataclass(frozen=True)
class Example:
    """A test image, and what it retrieves at each layer."""

    test_id: int
    group: Group
    predicted: int
    pixels: Float64[ndarray, "height width"]
    """As the network saw it."""
    retrievals: list[Retrieval]


def mnist_examples(store: Store) -> list[Example]:
    """The first test image that the network gets right, and the first that it gets wrong."""
    (task,) = store.info_file.tasks
    return _examples(store, [_first(store, task, right=right) for right in (True, False)])


def joint_examples(store: Store) -> list[Example]:
    """The first test image of each task that the network gets right."""
    return _examples(store, [_first(store, task, right=True) for task in store.info_file.tasks])


def continual_examples(store: Store) -> list[Example]:
    """The first test image of the first task that the network no longer gets right, and the first right one of the second."""
    first, second = store.info_file.tasks
    return _examples(store, [_first(store, first, right=False), _first(store, second, right=True)])


def _first(store: Store, task: str, *, right: bool) -> Rows:
    """None or one probe, with its vector at the first layer."""
    text = (
        f"SELECT test_id, task, label, predicted, x FROM probes WHERE layer = {store.layers[0].number} AND task = '{task}' "
        f"AND predicted {'=' if right else '<>'} label ORDER BY test_id LIMIT 1"
    )
    return store.sql(text).to_dicts()


def _examples(store: Store, chosen: Iterable[Rows]) -> list[Example]:
    shape = _shape(store)
    return [
        Example(
            test_id=row["test_id"],
            group=(row["task"], row["label"]),
            predicted=row["predicted"],
            pixels=np.array(row["x"], np.float64).reshape(shape),
            retrievals=[_retrieval(store, layer.number, row["test_id"]) for layer in store.layers],
        )
        for rows in chosen
        for row in rows
    ]


def _shape(store: Store) -> tuple[int, int]:
    """(height, width) of the images, from the header of the first PNG."""
    header = store.sql("SELECT payload FROM samples ORDER BY sample_id LIMIT 1").to_dicts()[0]["payload"][16:24]
    width, height = (int(size) for size in np.frombuffer(header, ">u4"))
    return height, width


def _retrieval(store: Store, layer: int, test_id: int) -> Retrieval:
    rows = store.query(layer=layer, test_id=test_id, top=LARGEST, per="concat(task, ' ', label)").to_dicts()
    alphas: dict[Group, list[float]] = {}
    for row in rows:
        alphas.setdefault((row["task"], row["label"]), []).append(row["alpha"])
    totals = {
        (row["task"], row["label"]): row["total"]
        for row in store.totals(layer=layer, test_id=test_id, by="task, label", paper=True)
    }
    order = sorted(totals, key=lambda group: (store.info_file.tasks.index(group[0]), group[1]))
    return Retrieval(
        layer=layer,
        best=_best(store, sorted(rows, key=lambda row: (-row["alpha"], row["step"], row["sample_id"]))),
        largest={group: np.array(found) for group, found in alphas.items()},
        totals={group: totals[group] for group in order},
    )


def _best(store: Store, ranked: Rows) -> list[Match]:
    visits: dict[int, dict[str, Any]] = {}
    for row in ranked[:LARGEST]:  # behind them, a class that was cut off could have a better one
        visits.setdefault(row["sample_id"], row)
    best = dict(list(visits.items())[:BEST])
    listed = ", ".join(map(str, best)) or "NULL"
    pictures = store.sql(f"SELECT sample_id, payload FROM samples WHERE sample_id IN ({listed})")
    pngs = {row["sample_id"]: row["payload"] for row in pictures}
    return [Match(number, (row["task"], row["label"]), row["alpha"], pngs[number]) for number, row in best.items()]

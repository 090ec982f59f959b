"""Both levels of retrieval in a transformer: over the context of a query token, and over training at each projection.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), section 5: query, key and value projections are linear layers, so
their outputs are attention over training patterns; softmax attention retrieves once more, over the context.
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from dualstore.errors import QueryError
from dualstore.experiments.passages import Match, retrieve
from dualstore.experiments.texts import Corpus, marked
from dualstore.shapes import Float64
from dualstore.store import Store

__all__ = ["PROJECTIONS", "Attended", "context_weights", "levels"]

PROJECTIONS = ("q", "k", "v")


@dataclass(frozen=True)
class Attended:
    """A context token that one head of the query token attends to."""

    head: int
    rank: int
    position: int
    """In the context."""
    weight: float
    """Softmax weight; those of a head add up to 1."""
    text: str
    """Around it; the token itself in [[ ]]."""


def levels(
    store: Store, corpus: Corpus, test_id: int, block: str, heads: int, *, top: int = 3, window: int = 20
) -> tuple[list[Attended], dict[str, list[Match]]]:
    """For the last token of a passage's context: what each head attends to, and what each projection's weight retrieves."""
    weights = context_weights(store, test_id, block, heads)
    tokens = corpus.passages[test_id].tokens
    attended = []
    for head, row in enumerate(weights):
        order = np.lexsort((np.arange(len(row)), -row))[:top]
        attended += [
            Attended(head, rank, int(place), float(row[place]), marked(corpus, tokens, int(place), window))
            for rank, place in enumerate(order, 1)
        ]
    return attended, {name: retrieve(store, corpus, test_id, f"{block}.{name}", top=top, window=window) for name in PROJECTIONS}


def context_weights(store: Store, test_id: int, block: str, heads: int) -> Float64[ndarray, "heads n"]:
    """Softmax weights of the last recorded token over all n of its context, from the recorded outputs of q and k.

    `block` is the attention module's name, whose layers are `block.q` and `block.k`. Raises QueryError for an unknown test id.
    """
    queries, keys = (_outputs(store, test_id, f"{block}.{name}") for name in ("q", "k"))
    width = queries.shape[1] // heads
    q, k = queries[-1].reshape(heads, width), keys.reshape(len(keys), heads, width)
    scores = np.einsum("hd,nhd->hn", q, k) / np.sqrt(width)
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Float64[ndarray, "heads n"] = raised / raised.sum(axis=1, keepdims=True)
    return found


def _outputs(store: Store, test_id: int, layer: str) -> Float64[ndarray, "n d"]:
    """Recorded outputs of a layer at all positions of a test example."""
    number = store.layer(layer).number
    rows = store.sql(f"SELECT y FROM probes WHERE layer = {number} AND test_id = {int(test_id)} ORDER BY position").to_dicts()
    if not rows:
        raise QueryError(f"{store.path}: no test {test_id} at layer {layer!r}")
    return np.array([row["y"] for row in rows], np.float64)

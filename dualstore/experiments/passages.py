"""What a passage retrieves: places of the training text, repeats folded, and how often they are of its own section.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), section 4.3: the best places with their text, and totals over all
visits of a place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from dualstore.errors import QueryError
from dualstore.experiments.texts import Corpus, marked
from dualstore.shapes import Float64, Int32, Int64
from dualstore.store import Store

__all__ = ["Match", "agreement", "retrieve", "retrieve_by_total"]

_AT_ONCE = 64
"""Passages asked in one pass."""
_COUNTS = "SELECT sample_id, count(*) AS patterns, max(position) + 1 AS length FROM patterns WHERE layer = {} GROUP BY ALL"
_PROBES = (
    "SELECT test_id, label, predicted FROM probes WHERE layer = {} "
    "QUALIFY row_number() OVER (PARTITION BY test_id ORDER BY step DESC, position DESC) = 1 ORDER BY test_id"
)
"""The last token of each."""


@dataclass(frozen=True)
class Match:
    """A place of the training text that a passage retrieved."""

    rank: int
    place: int
    """Of the token in the corpus."""
    score: float
    """The best alpha of its visits, or the total of all of them."""
    visits: int
    """Of how many visits that consists: those among the best patterns, or all."""
    section: str
    following: str
    """The next token."""
    text: str
    """Around it; the token itself in [[ ]]."""


@dataclass(frozen=True)
class _Visits:
    """How often each chunk of the text was trained on."""

    length: int
    of_chunk: Int64[ndarray, " c"]

    @property
    def most(self) -> int:
        """Visits of the chunk that came most often."""
        return int(self.of_chunk.max(initial=0))

    def share(self, values: Int32[ndarray, "_"]) -> Float64[ndarray, "_"]:
        """Share of the patterns that have each value, from the value of every place."""
        weights = np.repeat(self.of_chunk, self.length)
        shares: Float64[ndarray, " k"] = np.bincount(values[: len(weights)], weights) / weights.sum()
        return shares


@dataclass(frozen=True)
class _Places:
    """The best distinct places of one passage, in order."""

    places: Int64[ndarray, " k"]
    scores: Float64[ndarray, " k"]
    visits: Int64[ndarray, " k"]


def retrieve(
    store: Store,
    corpus: Corpus,
    test_id: int,
    layer: int | str = "lstm.l0",
    *,
    top: int = 3,
    window: int = 20,
    bottom: bool = False,
) -> list[Match]:
    """The places with the largest alpha, or with `bottom` the smallest; visits of one place in several epochs are one.

    Counted are the visits among the patterns that rank high enough to hold `top` places for sure, whatever repeats.
    """
    visits = _visits(store, layer)
    return _shown(corpus, _best(store, corpus, [test_id], layer, top, visits, bottom=bottom)[0], window)


def retrieve_by_total(
    store: Store, corpus: Corpus, test_id: int, layer: int | str = "lstm.l0", *, top: int = 3, window: int = 20
) -> list[Match]:
    """The places with the largest sum of alpha over all visits."""
    return _shown(corpus, _best_totals(store, corpus, [test_id], layer, top, _visits(store, layer))[0], window)


def agreement(store: Store, corpus: Corpus, layer: int | str = "lstm.l0", *, top: int = 3, totals: int = 16) -> dict[str, Any]:
    """How often retrieved places are of the passage's section, and are followed by its next token, over all probed passages.

    Ranked by the best alpha (`best`), by the total of all visits (`total`, for `totals` evenly spaced passages only, as each is
    multiplied with all keys; None for 0), by the smallest alpha (`smallest`), and what a pattern taken at random gives on
    average (`random`). Each has the number of `passages` and of those whose section is `known`, the rate of places of the same
    `section` over these, and over all the rates of places that the true `next` token and the `predicted` one follow.

    No passage was trained on: its text is not in the corpus' stream. Raises QueryError where the store is of another text.
    """
    visits, probes = _visits(store, layer), store.sql(_PROBES.format(store.layer(layer).number)).to_dicts()
    probes = [probe for probe in probes if probe["test_id"] < len(corpus.passages)]
    if not probes:
        raise QueryError(f"{store.path}: expected probes of passages of {corpus.name}, found none; record it with that text")
    ids = [probe["test_id"] for probe in probes]
    asked = _Asked(
        np.array([corpus.passages[number].section for number in ids]),
        np.array([probe["label"] for probe in probes]),
        np.array([probe["predicted"] for probe in probes]),
    )
    some = np.unique(np.linspace(0, len(ids) - 1, min(totals, len(ids))).astype(np.int64))
    by_total = _best_totals(store, corpus, [ids[number] for number in some], layer, top, visits)
    return {
        "top": top,
        "best": asked.rates(corpus, _best(store, corpus, ids, layer, top, visits)),
        "total": asked.some(some).rates(corpus, by_total) if by_total else None,
        "smallest": asked.rates(corpus, _best(store, corpus, ids, layer, top, visits, bottom=True)),
        "random": asked.expected(corpus, visits),
    }


@dataclass(frozen=True)
class _Asked:
    """What places are compared with: of each passage the section, -1 for another text's, the next token and the predicted one."""

    sections: Int64[ndarray, " p"]
    following: Int64[ndarray, " p"]
    predicted: Int64[ndarray, " p"]

    def some(self, chosen: Int64[ndarray, " s"]) -> "_Asked":
        """Some of the passages."""
        return _Asked(self.sections[chosen], self.following[chosen], self.predicted[chosen])

    def rates(self, corpus: Corpus, found: Sequence[_Places]) -> dict[str, Any]:
        """Shares of the places found."""
        same = [corpus.section_of[one.places] == section for one, section in zip(found, self.sections, strict=True) if section >= 0]
        after = [corpus.tokens[one.places + 1] for one in found]
        next_, predicted = (
            [tokens == token for tokens, token in zip(after, wanted, strict=True)] for wanted in (self.following, self.predicted)
        )
        return {**self._counts, "section": _mean(same), "next": _mean(next_), "predicted": _mean(predicted)}

    def expected(self, corpus: Corpus, visits: _Visits) -> dict[str, Any]:
        """The rates of a pattern taken at random, exactly: from the shares of sections and next tokens among the patterns."""
        sections = np.append(visits.share(corpus.section_of), np.zeros(len(corpus.sections)))
        tokens = np.append(visits.share(corpus.tokens[1:]), np.zeros(len(corpus.vocabulary)))
        known = self.sections[self.sections >= 0]
        return {
            **self._counts,
            "section": _mean([sections[known]]),
            "next": _mean([tokens[self.following]]),
            "predicted": _mean([tokens[self.predicted]]),
        }

    @property
    def _counts(self) -> dict[str, Any]:
        return {"passages": len(self.sections), "known": int((self.sections >= 0).sum())}


def _visits(store: Store, layer: int | str) -> _Visits:
    rows = store.sql(_COUNTS.format(store.layer(layer).number)).to_arrow()
    ids, patterns, lengths = (rows.column(name).to_numpy() for name in ("sample_id", "patterns", "length"))
    length = int(lengths.max(initial=1))
    counts = np.zeros(int(ids.max(initial=-1)) + 1, np.int64)
    counts[ids] = patterns // length
    return _Visits(length, counts)


def _best(
    store: Store, corpus: Corpus, ids: Sequence[int], layer: int | str, top: int, visits: _Visits, *, bottom: bool = False
) -> list[_Places]:
    """By the best alpha, for each passage. So many patterns hold `top` places even if the first ones are all visits of a few."""
    depth = (top - 1) * visits.most + 1
    found = []
    for first in range(0, len(ids), _AT_ONCE):
        some = list(ids[first : first + _AT_ONCE])
        rows = store.query(test_id=some, layer=layer, top=depth, bottom=bottom).to_arrow()
        whose = np.full(rows.num_rows, some[0]) if len(some) == 1 else rows.column("test_id").to_numpy()
        places, scores = _places(corpus, rows, visits), rows.column("alpha").to_numpy()
        found += [_folded(places[whose == number], scores[whose == number], top) for number in some]
    return found


def _folded(places: Int64[ndarray, " r"], scores: Float64[ndarray, " r"], top: int) -> _Places:
    """The first `top` distinct places of a ranking, with the score of the first visit and the number of visits."""
    distinct, firsts, counts = np.unique(places, return_index=True, return_counts=True)
    order = firsts.argsort()[:top]
    return _Places(distinct[order], scores[firsts[order]], counts[order])


def _best_totals(store: Store, corpus: Corpus, ids: Sequence[int], layer: int | str, top: int, visits: _Visits) -> list[_Places]:
    """By the sum of alpha, for each passage."""
    if not ids:
        return []
    rows = store.totals(layer=layer, test_id=[*ids], by="sample_id, position, label").to_arrow()  # the largest of each first
    whose = np.full(rows.num_rows, ids[0]) if len(ids) == 1 else rows.column("test_id").to_numpy()
    best = [rows.take(np.flatnonzero(whose == number)[:top]) for number in ids]
    return [_Places(_places(corpus, one, visits), one.column("total").to_numpy(), one.column("count").to_numpy()) for one in best]


def _places(corpus: Corpus, rows: Any, visits: _Visits) -> Int64[ndarray, " r"]:
    """Places of patterns in the corpus, which must be the one that was trained on."""
    ids, positions, labels = (rows.column(name).to_numpy() for name in ("sample_id", "position", "label"))
    places: Int64[ndarray, " r"] = ids * visits.length + positions
    if (places + 1 >= len(corpus.tokens)).any() or (corpus.tokens[places + 1] != labels).any():
        raise QueryError(f"{corpus.name}: expected the text that the store was recorded with, found another one; load the same")
    return places


def _shown(corpus: Corpus, found: _Places, window: int) -> list[Match]:
    columns = (found.places.tolist(), found.scores.tolist(), found.visits.tolist())
    return [_match(corpus, rank, *row, window) for rank, row in enumerate(zip(*columns, strict=True), 1)]


def _match(corpus: Corpus, rank: int, place: int, score: float, visits: int, window: int) -> Match:
    section, following = corpus.sections[corpus.section_of[place]], corpus.vocabulary[corpus.tokens[place + 1]]
    return Match(rank, place, score, visits, section, following, marked(corpus, corpus.tokens, place, window))


def _mean(parts: Sequence[ndarray]) -> float:
    """NaN of nothing."""
    return float(np.concatenate(parts).mean()) if sum(map(len, parts)) else float("nan")

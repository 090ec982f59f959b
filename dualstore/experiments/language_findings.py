"""What the stores of the language models show: which places of the text a passage retrieves, and how often they fit it.

Claims are measured against two controls: a pattern taken at random, and those with the smallest attention.
"""

from collections.abc import Sequence

from dualstore.experiments.attention import PROJECTIONS, levels
from dualstore.experiments.findings import Measured, Rows
from dualstore.experiments.passages import Match, agreement, retrieve, retrieve_by_total
from dualstore.experiments.texts import Corpus, marked
from dualstore.store import Store

__all__ = ["measure_language", "measure_transformer"]

TOP = 3
SHOWN = 3
"""Passages whose matches are shown with their text."""
TOTALS = 8
"""Passages whose totals over all visits are taken: each is multiplied with all keys."""
_RANKINGS = {
    "best": f"top {TOP} by attention",
    "total": f"top {TOP} by total over visits",
    "smallest": f"{TOP} smallest",
    "random": "at random",
}


def measure_language(store: Store, corpus: Corpus, section: str) -> Measured:
    """Of an LSTM and its output layer: rates of matches that share the passage's section, or its next token; and passages.

    `section` is what sections are called: "fable" or "article".
    """
    found = Measured({})
    for layer, totals in (("lstm.l0", TOTALS), ("output", 0)):
        _add_rates(found, store, corpus, layer, section, totals)
    for test_id in _some_probes(store, corpus):
        matches = {
            "attention": retrieve(store, corpus, test_id, "lstm.l0", top=TOP),
            "total": retrieve_by_total(store, corpus, test_id, "lstm.l0", top=TOP),
        }
        found.tables[_title(corpus, test_id)] = [row for by, some in matches.items() for row in _rows("by", by, some)]
    return found


def measure_transformer(store: Store, corpus: Corpus, blocks: Sequence[str], heads: int) -> Measured:
    """Of each block the rates of `measure_language`; and for some passages both levels of retrieval side by side."""
    found = Measured({})
    for block in blocks:  # its projections have the same keys and queries, so one stands for all
        _add_rates(found, store, corpus, f"{block}.{PROJECTIONS[0]}", "fable", 0, shown=f"{block}.{{{','.join(PROJECTIONS)}}}")
    for test_id in _some_probes(store, corpus):
        for block in blocks:
            attended, retrieved = levels(store, corpus, test_id, block, heads, top=TOP)
            rows = [{"level": f"context, head {one.head}", "rank": one.rank, "score": one.weight, "visits": None, "from": "",
                     "text": _one_line(one.text)} for one in attended]  # fmt: skip
            rows += [row for name, some in retrieved.items() for row in _rows("level", f"training, W_{name.upper()}", some)]
            found.tables[f"{block}: {_title(corpus, test_id)}"] = rows
    return found


def _add_rates(
    found: Measured, store: Store, corpus: Corpus, layer: str, section: str, totals: int, shown: str | None = None
) -> None:
    """Of a layer, under a name."""
    rates, name = agreement(store, corpus, layer, top=TOP, totals=totals), shown or layer
    for kind, what in (("section", f"same {section}"), ("next", "same next token"), ("predicted", "predicted next token")):
        for ranking, words in _RANKINGS.items():
            if rates[ranking] is not None:
                found.numbers[f"{name}, {what}: {words}"] = rates[ranking][kind]
    over = f"{name}, same {section}: {_RANKINGS['best']} over random, times"
    found.numbers[over] = rates["best"]["section"] / rates["random"]["section"] if rates["random"]["section"] else float("nan")
    found.plain.append(over)


def _some_probes(store: Store, corpus: Corpus) -> list[int]:
    """Evenly spaced ones."""
    layer = store.layers[-1].number
    ids = [row["test_id"] for row in store.sql(f"SELECT DISTINCT test_id FROM probes WHERE layer = {layer} ORDER BY test_id")]
    ids = [number for number in ids if number < len(corpus.passages)]
    count = min(SHOWN, len(ids))
    return [ids[(2 * place + 1) * len(ids) // (2 * count)] for place in range(count)]


def _title(corpus: Corpus, test_id: int) -> str:
    passage = corpus.passages[test_id]
    text = _one_line(marked(corpus, passage.tokens[:-1], len(passage.tokens) - 2, 19))
    following = _one_line(corpus.vocabulary[passage.tokens[-1]])
    return f"passage {test_id} ({passage.source}, {passage.title}): {text} -> {following}"


def _rows(column: str, name: str, matches: Sequence[Match]) -> Rows:
    return [
        {column: name, "rank": match.rank, "score": match.score, "visits": match.visits, "from": match.section,
         "text": _one_line(match.text)}
        for match in matches
    ]  # fmt: skip


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")

"""The language models: rows that map back to the text, and passages that retrieve what brute force retrieves."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import dualstore
from dualstore.errors import QueryError
from dualstore.experiments import language
from dualstore.experiments.language import AESOP, WIKITEXT, Report, Settings, train
from dualstore.experiments.passages import agreement, retrieve, retrieve_by_total
from dualstore.experiments.streams import probed
from dualstore.experiments.texts import Corpus, Passage, batches
from dualstore.store import Store

WORDS, LENGTH, PASSAGES = 12, 10, 9
SETTINGS = replace(
    AESOP, steps=25, batch_size=4, length=LENGTH, embedding=6, projection=8, hidden=8, lr=0.01, passages=PASSAGES, dropout=0.1
)


def text(size: int = 205) -> Corpus:
    """A text in three sections; the passages are of two of them and of none."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, WORDS, size).astype(np.int32)
    section_of = np.repeat(np.arange(3, dtype=np.int32), [size // 2, size // 4, size - size // 2 - size // 4])
    windows = random.integers(0, WORDS, (12, 21)).astype(np.int32)
    sections = [0, 0, 0, 2, 2, 2, 2, 0, 2, -1, -1, -1]
    titles = ["one", "two", "three"]
    passages = [
        Passage(window, number, "held-out" if number >= 0 else "valid", titles[number] if number >= 0 else "other")
        for window, number in zip(windows, sections, strict=True)
    ]
    return Corpus("random", tokens, [chr(97 + n) for n in range(WORDS)], titles, section_of, passages, "", "a note")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Corpus, Report]:
    """A store with a little more than five epochs of five steps."""
    path, seen, corpus = tmp_path_factory.mktemp("language") / "store", [], text()
    report = train(path, corpus, SETTINGS, progress=lambda done, total: seen.append((done, total)), maker="test")
    assert seen == [(step, 25) for step in range(1, 26)]
    return dualstore.open(path), corpus, report


@cache
def rows_of(store: Store, layer: str, columns: str = "*") -> dict[str, np.ndarray]:
    table = store.sql(
        f"SELECT {columns} FROM patterns WHERE layer = {store.layer(layer).number} ORDER BY step, sample_id, position"
    )
    return {name: np.array(table.to_arrow().column(name).to_pylist()) for name in table.to_arrow().column_names}


def test_the_store_is_whole_and_the_report_says_what_was_done(recorded: tuple[Store, Corpus, Report]) -> None:
    store, _, report = recorded
    assert store.verify().ok
    assert [layer.name for layer in store.layers] == ["embedding", "projection", "lstm.l0", "output"]
    assert not any(layer.errors for layer in store.layers)
    assert (report.steps, report.epochs, report.note) == (25, 5.0, "a note")
    assert report.perplexity_before == math.exp(report.loss_before)
    assert abs(report.loss_before - math.log(WORDS)) < 0.3
    assert report.loss_after != report.loss_before


def test_every_row_is_at_its_place_of_the_text(recorded: tuple[Store, Corpus, Report]) -> None:
    store, corpus, _ = recorded
    rows = rows_of(store, "embedding")
    places = rows["sample_id"] * LENGTH + rows["position"]
    np.testing.assert_array_equal(rows["token"], corpus.tokens[places])
    for layer in store.layers:
        mine = rows_of(store, layer.name, "step, epoch, sample_id, position, label, task")
        for name in ("step", "sample_id", "position", "task"):
            np.testing.assert_array_equal(mine[name], rows[name])
        np.testing.assert_array_equal(mine["label"], corpus.tokens[places + 1])
        tasks = [corpus.sections[corpus.section_of[number * LENGTH]] for number in mine["sample_id"]]
        names = store.sql("SELECT DISTINCT task FROM patterns").to_dicts()
        assert {row["task"] for row in names} == set(tasks)
        assert mine["task"].tolist() == tasks
    assert len(rows["step"]) == 5 * sum(chunks.tokens.size for chunks in batches(corpus, 4, LENGTH))
    assert rows["epoch"].tolist() == (rows["step"] // 5).tolist()


def test_keys_of_the_lstm_go_on_from_chunk_to_chunk(recorded: tuple[Store, Corpus, Report]) -> None:
    store, _, _ = recorded
    lstm, output = rows_of(store, "lstm.l0"), rows_of(store, "output")
    key_of = {
        key: x for *key, x in zip(lstm["step"], lstm["sample_id"], lstm["position"], lstm["x"], strict=True) for key in [tuple(key)]
    }
    for step, number, position, h in zip(output["step"], output["sample_id"], output["position"], output["x"], strict=True):
        after = (step, number, position + 1) if position + 1 < LENGTH else (step + 1, number + 1, 0)
        if after in key_of and after[0] // 5 == step // 5:
            np.testing.assert_array_equal(key_of[after][:8], h)
    first = [x for (step, _, position), x in key_of.items() if step % 5 == 0 and position == 0]
    assert len(first) == 20
    assert not np.concatenate([x[:8] for x in first]).any()


def test_probes_are_one_row_a_passage_and_the_last_token_of_its_context(recorded: tuple[Store, Corpus, Report]) -> None:
    store, corpus, _ = recorded
    chosen = probed(corpus, SETTINGS)
    assert chosen.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 11]
    rows = store.sql("SELECT test_id, label, task, position, x FROM probes WHERE layer = 1 ORDER BY test_id").to_dicts()
    assert [row["test_id"] for row in rows] == chosen.tolist()
    assert [row["label"] for row in rows] == [int(corpus.passages[number].tokens[-1]) for number in chosen]
    assert [row["task"] for row in rows] == [
        corpus.passages[number].title if corpus.passages[number].section >= 0 else "valid" for number in chosen
    ]
    tokens = {int(corpus.passages[number].tokens[-2]): tuple(row["x"]) for number, row in zip(chosen, rows, strict=True)}
    for number, row in zip(chosen, rows, strict=True):
        assert tokens[int(corpus.passages[number].tokens[-2])] == tuple(row["x"])
    assert len(set(tokens.values())) == len(tokens)


def test_samples_are_the_text_of_chunks(recorded: tuple[Store, Corpus, Report]) -> None:
    store, corpus, _ = recorded
    rows = store.sql("SELECT sample_id, task, payload FROM samples ORDER BY sample_id").to_dicts()
    assert len(rows) == 20
    assert bytes(rows[7]["payload"]).decode() == "".join(corpus.vocabulary[token] for token in corpus.tokens[70:80])


def brute(store: Store, corpus: Corpus, layer: str, test_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Of every pattern, in the order of coming: alpha with one passage, and its place."""
    rows = rows_of(store, layer)
    number = store.layer(layer).number
    (probe,) = store.sql(f"SELECT x FROM probes WHERE layer = {number} AND test_id = {test_id}").to_dicts()
    return rows["x"] @ np.array(probe["x"], np.float64), rows["sample_id"] * LENGTH + rows["position"]


def best(alpha: np.ndarray, places: np.ndarray, top: int, visits: int) -> list[tuple[int, float, int]]:
    """Place, best alpha and visits of the first distinct places of the ranking."""
    order = np.argsort(-alpha, kind="stable")[: (top - 1) * visits + 1]
    found: dict[int, tuple[float, int]] = {}
    for row in order:
        score, count = found.get(int(places[row]), (float(alpha[row]), 0))
        found[int(places[row])] = (score, count + 1)
    return [(place, *pair) for place, pair in found.items()][:top]


@pytest.mark.parametrize("layer", ["lstm.l0", "output"])
@pytest.mark.parametrize("top", [1, 3, 5])
def test_retrieved_places_are_those_of_brute_force(recorded: tuple[Store, Corpus, Report], layer: str, top: int) -> None:
    store, corpus, _ = recorded
    for test_id in probed(corpus, SETTINGS).tolist():
        alpha, places = brute(store, corpus, layer, test_id)
        for sign in (1, -1):
            found = retrieve(store, corpus, test_id, layer, top=top, bottom=sign < 0)
            expected = best(sign * alpha, places, top, 5)
            assert [(m.place, m.visits) for m in found] == [(place, count) for place, _, count in expected]
            np.testing.assert_allclose([m.score for m in found], [sign * score for _, score, _ in expected], rtol=1e-9)
            assert [m.rank for m in found] == list(range(1, top + 1))


def test_totals_are_those_of_brute_force(recorded: tuple[Store, Corpus, Report]) -> None:
    store, corpus, _ = recorded
    for test_id in (0, 4, 11):
        alpha, places = brute(store, corpus, "lstm.l0", test_id)
        totals = np.bincount(places, alpha)
        expected = np.argsort(-totals, kind="stable")[:3]
        found = retrieve_by_total(store, corpus, test_id, "lstm.l0")
        assert [match.place for match in found] == expected.tolist()
        assert [match.visits for match in found] == [5, 5, 5]
        np.testing.assert_allclose([match.score for match in found], totals[expected], rtol=1e-9)


def test_a_match_shows_the_text_around_its_token(recorded: tuple[Store, Corpus, Report]) -> None:
    store, corpus, _ = recorded
    letters = "".join(corpus.vocabulary[token] for token in corpus.tokens)
    for match in retrieve(store, corpus, 0, window=4, top=5):
        place = match.place
        assert match.text == f"{letters[max(0, place - 4) : place]}[[{letters[place]}]]{letters[place + 1 : place + 5]}"
        assert match.following == letters[place + 1]
        assert match.section == corpus.sections[corpus.section_of[place]]


def test_agreement_is_that_of_brute_force(recorded: tuple[Store, Corpus, Report]) -> None:
    store, corpus, _ = recorded
    found = agreement(store, corpus)
    probes = store.sql("SELECT test_id, label, predicted FROM probes WHERE layer = 2 ORDER BY test_id").to_dicts()
    assert found["top"] == 3
    for name, sign in (("best", 1), ("smallest", -1), ("total", 0)):
        section, following, predicted = [], [], []
        for probe in probes:
            alpha, places = brute(store, corpus, "lstm.l0", probe["test_id"])
            if sign:
                chosen = [place for place, *_ in best(sign * alpha, places, 3, 5)]
            else:
                chosen = np.argsort(-np.bincount(places, alpha), kind="stable")[:3].tolist()
            own = corpus.passages[probe["test_id"]].section
            section += [corpus.section_of[place] == own for place in chosen if own >= 0]
            following += [corpus.tokens[place + 1] == probe["label"] for place in chosen]
            predicted += [corpus.tokens[place + 1] == probe["predicted"] for place in chosen]
        expected = {
            "passages": 9,
            "known": 7,
            "section": np.mean(section),
            "next": np.mean(following),
            "predicted": np.mean(predicted),
        }
        assert found[name] == pytest.approx(expected)
    rows = rows_of(store, "lstm.l0")
    sections = corpus.section_of[rows["sample_id"] * LENGTH + rows["position"]]
    owns = [corpus.passages[probe["test_id"]].section for probe in probes]
    assert found["random"] == pytest.approx(
        {
            "passages": 9,
            "known": 7,
            "section": np.mean([(sections == own).mean() for own in owns if own >= 0]),
            "next": np.mean([(rows["label"] == probe["label"]).mean() for probe in probes]),
            "predicted": np.mean([(rows["label"] == probe["predicted"]).mean() for probe in probes]),
        }
    )
    assert agreement(store, corpus, totals=0)["total"] is None
    assert agreement(store, corpus, totals=2)["total"]["passages"] == 2


def test_another_text_is_refused(recorded: tuple[Store, Corpus, Report]) -> None:
    store, corpus, _ = recorded
    other = replace(corpus, tokens=np.roll(corpus.tokens, 1))
    for ask in (retrieve, retrieve_by_total):
        with pytest.raises(QueryError, match="random: expected the text that the store was recorded with, found another one"):
            ask(store, other, 0)
    with pytest.raises(QueryError, match="expected probes of passages of random, found none"):
        agreement(store, replace(corpus, passages=[]))


@pytest.mark.parametrize("settings", [AESOP, WIKITEXT])
def test_settings_are_the_papers_and_can_be_shrunk(settings: Settings) -> None:
    assert language.full(settings).steps == settings.paper_steps > settings.steps
    assert language.full(settings).hidden == settings.hidden
    small = language.scaled(settings, 0.1)
    assert small.hidden == round(0.1 * settings.hidden)
    assert (small.projection is None) == (settings.projection is None)
    assert language.scaled(settings, 1.0) == settings

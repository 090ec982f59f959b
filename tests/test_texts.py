"""Texts: sections, what is held out, streams whose ids tell the place in the corpus, and files that are not what they should be."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dualstore.errors import DualstoreError
from dualstore.experiments.texts import WINDOW, Corpus, batches, chunk_count, load_aesop, load_wikitext, scaled, text_of

LONG = "a stone fell on the road and the old hen ran off to tell the king that the sky was about to come down\n" * 20


def write_aesop(folder: Path) -> Path:
    fables = {"  The Long One": LONG, "The Plain Title": "a short one\n\nwith a moral\n", "  Another": "x" + LONG}
    (folder / "aesop.txt").write_text("\n\n\n".join(f"{title}\n\n\n{text}" for title, text in fables.items()))
    return folder


def article(title: str, words: int, kind: str = "w") -> str:
    body = " ".join(f"{kind}{place % 50}" for place in range(words))
    return f" \n = {title} = \n \n {body} \n \n = = Part = = \n \n more of it \n = 1 / s = \n"


def write_wikitext(folder: Path) -> Path:
    (folder / "test.txt").write_text(article("First", 1300) + article("<unk>", 30) + article("<unk>", 700))
    (folder / "valid.txt").write_text(article("Other", 200, "v") + article("Small", 20) + article("Last", 300))
    return folder


def test_fables_are_sections_with_their_titles(tmp_path: Path) -> None:
    corpus = load_aesop(write_aesop(tmp_path))
    assert corpus.sections == ["The Long One", "The Plain Title", "Another"]
    short = text_of(corpus, corpus.tokens[corpus.section_of == 1])
    assert short == "\n\n\nThe Plain Title\n\n\na short one\n\nwith a moral"
    assert corpus.tokens.dtype == corpus.section_of.dtype == np.int32


def test_articles_are_sections_of_words_and_equal_titles_get_numbers(tmp_path: Path) -> None:
    corpus = load_wikitext(write_wikitext(tmp_path))
    assert corpus.sections == ["First", "<unk>", "<unk> (2)"]
    assert "test.txt" in corpus.note
    words = text_of(corpus, corpus.tokens[corpus.section_of == 1]).split()
    assert words[:8] == ["<eos>", "=", "<unk>", "=", "<eos>", "<eos>", "w0", "w1"]
    assert words[-5:] == ["=", "1", "/", "s", "="]  # a line of that form inside a text is no title


def test_ends_of_long_sections_are_held_out(tmp_path: Path) -> None:
    corpus = load_aesop(write_aesop(tmp_path))
    assert [(passage.section, passage.source) for passage in corpus.passages] == [(0, "held-out"), (2, "held-out")]
    for passage in corpus.passages:
        assert passage.title == corpus.sections[passage.section]
        trained = text_of(corpus, corpus.tokens[corpus.section_of == passage.section])
        assert len(passage.tokens) == WINDOW
        assert (trained + text_of(corpus, passage.tokens)).endswith(LONG.strip("\n"))


def test_passages_of_the_other_text_have_no_section_and_its_words_may_be_unknown(tmp_path: Path) -> None:
    corpus = load_wikitext(write_wikitext(tmp_path))
    other = [passage for passage in corpus.passages if passage.source == "valid"]
    assert [(passage.title, passage.section) for passage in other] == [("Other", -1), ("Last", -1)]
    assert text_of(corpus, other[0].tokens).split()[:8] == ["<eos>", "=", "<unk>", "=", "<eos>", "<eos>", "<unk>", "<unk>"]


def test_a_share_keeps_the_first_sections_and_their_passages(tmp_path: Path) -> None:
    whole = load_wikitext(write_wikitext(tmp_path))
    some = scaled(whole, 0.34)
    assert some.sections == ["First"]
    assert set(some.section_of.tolist()) == {0}
    assert [(p.section, p.source) for p in some.passages] == [(0, "held-out"), (-1, "valid")]
    assert len(scaled(whole, 0.0).sections) == 1
    assert text_of(scaled(whole, 1.0), whole.tokens) == text_of(whole, whole.tokens)


def numbered(tokens: int) -> Corpus:
    zeros = np.zeros(tokens, np.int32)
    return Corpus("numbers", np.arange(tokens, dtype=np.int32), [str(n) for n in range(tokens)], ["all"], zeros, [], " ")


@pytest.mark.parametrize(("tokens", "batch_size", "length"), [(101, 2, 10), (131, 4, 10), (25, 9, 6), (7, 3, 6), (500, 1, 7)])
def test_ids_tell_the_place_of_every_token_and_each_comes_once(tokens: int, batch_size: int, length: int) -> None:
    corpus = numbered(tokens)
    found = list(batches(corpus, batch_size, length))
    for chunks in found:
        places = chunks.ids[:, None] * length + np.arange(length)
        np.testing.assert_array_equal(chunks.tokens, places)
        np.testing.assert_array_equal(chunks.following, places + 1)
    ids = np.concatenate([chunks.ids for chunks in found])
    assert sorted(ids.tolist()) == list(range(chunk_count(corpus, length)))
    for before, after in pairwise(found):  # streams go on where they were
        np.testing.assert_array_equal(after.ids, before.ids[: len(after.ids)] + 1)


def test_a_text_shorter_than_a_chunk_is_refused() -> None:
    with pytest.raises(DualstoreError, match=r"numbers: expected more than 10 tokens, found 10; use shorter chunks"):
        next(batches(numbered(10), 2, 10))


def test_files_are_found_in_a_folder_of_the_texts_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aesop").mkdir()
    write_aesop(tmp_path / "aesop")
    monkeypatch.setenv("DUALSTORE_DATA", str(tmp_path))
    assert load_aesop().name == "aesop"
    with pytest.raises(DualstoreError, match=r"expected test\.txt there or in wikitext-2/, found neither; put it there, or give"):
        load_wikitext()
    monkeypatch.delenv("DUALSTORE_DATA")
    with pytest.raises(DualstoreError, match=r"aesop: expected a folder with aesop\.txt or aesop/aesop\.txt, found none"):
        load_aesop()


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    for file, load in (("aesop.txt", load_aesop), ("test.txt", load_wikitext)):
        (tmp_path / file).write_text("nothing\nof the kind\n")
        (tmp_path / "valid.txt").write_text("nothing")
        with pytest.raises(DualstoreError, match=rf"{file}: expected (fables|articles).*, found no"):
            load(tmp_path)
        (tmp_path / file).write_bytes(b"\xff\xfe\xfa")
        with pytest.raises(DualstoreError, match=rf"{file}: expected a text in UTF-8, found"):
            load(tmp_path)


@pytest.mark.parametrize(("name", "load", "sections"), [("aesop", load_aesop, 82), ("wikitext-2", load_wikitext, 60)])
def test_nothing_held_out_of_the_real_texts_is_trained_on(data_folder: Path, name: str, load: type, sections: int) -> None:
    if not (data_folder / name).is_dir():
        pytest.skip(f"needs {name} in $DUALSTORE_DATA or ../shared/data")
    corpus: Corpus = load(data_folder)  # type: ignore[assignment]
    assert len(corpus.sections) == len(set(corpus.sections)) == sections
    held = [passage for passage in corpus.passages if passage.section >= 0]
    assert len({passage.section for passage in held}) > sections // 2
    trained = corpus.tokens.tobytes()
    for passage in corpus.passages:
        assert trained.find(passage.tokens[:-1].tobytes()) < 0

"""The texts of the paper's language models: training streams in sections, and passages that are kept from training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy import ndarray

from dualstore.datasets import data_folder
from dualstore.errors import DualstoreError
from dualstore.shapes import Int32, Int64

__all__ = ["Chunks", "Corpus", "Passage", "batches", "chunk_count", "load_aesop", "load_wikitext", "marked", "scaled", "text_of"]

WINDOW = 101
"""Tokens of a passage: a context of 100 and what follows it."""
HELD_SHARE = 0.08
"""Of each section, at its end."""
LEAST_WINDOWS = 6
"""A section has passages where it is at least so many windows long."""
_UNKNOWN, _END = "<unk>", "<eos>"
_BORDER = "\n\n\n"
"""Before each fable."""


@dataclass(frozen=True, eq=False)
class Passage:
    """Consecutive tokens that were not trained on; the last one is what is to be predicted."""

    tokens: Int32[ndarray, " w"]
    section: int
    """Number of the section whose end it is from; -1 for one of another text."""
    source: str
    """"held-out" for one of the training text, "valid" for one of another text."""
    title: str
    """Of the section, or of the other text's."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A training text as one stream of tokens, and passages beside it."""

    name: str
    tokens: Int32[ndarray, " n"]
    vocabulary: Sequence[str]
    """What each token says."""
    sections: Sequence[str]
    """Titles of fables or articles; where one comes again, with a number."""
    section_of: Int32[ndarray, " n"]
    """Number of the section of every token."""
    passages: Sequence[Passage]
    glue: str
    """Between tokens in a text."""
    note: str = ""
    """What a reader of results should know of the text."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """The next chunk of each stream: `ids * length + position` is the place of a token in the corpus."""

    ids: Int64[ndarray, " b"]
    tokens: Int32[ndarray, "b length"]
    following: Int32[ndarray, "b length"]
    """The token after each."""


def load_aesop(folder: Path | None = None) -> Corpus:
    """Aesop's fables by character, from aesop.txt in `folder` or $DUALSTORE_DATA, there itself or in aesop/.

    A title is a line with at least two blank ones on each side. Raises DualstoreError where the file is missing or has none.
    """
    path = _find("aesop", "aesop.txt", folder)
    lines = _read(path).splitlines()
    titles = [number for number in range(len(lines)) if _is_fable(lines, number)]
    if not titles:
        raise DualstoreError(f"{path}: expected fables, each with a title between two blank lines, found no title")
    bounds = zip(titles, [*titles[1:], len(lines)], strict=True)
    texts = [_BORDER + "\n".join(lines[first:last]).strip("\n") for first, last in bounds]
    vocabulary = sorted(set("".join(texts)))
    number_of = {letter: number for number, letter in enumerate(vocabulary)}
    sections = [np.array([number_of[letter] for letter in text], np.int32) for text in texts]
    return _corpus("aesop", [lines[number].strip() for number in titles], sections, vocabulary, "")


def load_wikitext(folder: Path | None = None) -> Corpus:
    """WikiText-2 by word, from test.txt and valid.txt in `folder` or $DUALSTORE_DATA, there themselves or in wikitext-2/.

    The training stream is the text for testing. Passages are ends of its articles and the first tokens of each article of the
    text for validation, whose words are unknown where the other has none of them. Raises DualstoreError where a file is
    missing or has no article.
    """
    titles, articles = _articles(_find("wikitext-2", "test.txt", folder))
    others, more = _articles(_find("wikitext-2", "valid.txt", folder))
    vocabulary = sorted({_UNKNOWN, _END}.union(*articles))
    number_of = {word: number for number, word in enumerate(vocabulary)}
    unknown = number_of[_UNKNOWN]
    sections, foreign = (
        [np.array([number_of.get(word, unknown) for word in text], np.int32) for text in texts] for texts in (articles, more)
    )
    note = "trained on WikiText-2's test.txt, asked with passages of it that were kept from training and of valid.txt"
    corpus = _corpus("wikitext-2", titles, sections, vocabulary, " ", note)
    pairs = [(title, text) for title, text in zip(others, foreign, strict=True) if len(text) >= WINDOW]
    valid = [Passage(text[:WINDOW], -1, "valid", title) for title, text in pairs]
    return replace(corpus, passages=[*corpus.passages, *valid])


def scaled(corpus: Corpus, share: float) -> Corpus:
    """The first share of the sections, at least one, and of the passages what is of them or of another text."""
    count = max(1, round(share * len(corpus.sections)))
    kept = corpus.section_of < count
    foreign = [passage for passage in corpus.passages if passage.section < 0]
    foreign = foreign[: max(1, round(share * len(foreign)))]
    return replace(
        corpus,
        tokens=corpus.tokens[kept],
        sections=corpus.sections[:count],
        section_of=corpus.section_of[kept],
        passages=[*(passage for passage in corpus.passages if 0 <= passage.section < count), *foreign],
    )


def text_of(corpus: Corpus, tokens: Sequence[int] | Int32[ndarray, " n"]) -> str:
    """What tokens say."""
    return corpus.glue.join(corpus.vocabulary[token] for token in tokens)


def marked(corpus: Corpus, tokens: Int32[ndarray, " n"], place: int, window: int) -> str:
    """What the tokens around a place say, at most `window` on each side; the one at the place in [[ ]]."""
    before, after = tokens[max(0, place - window) : place], tokens[place + 1 : place + 1 + window]
    return corpus.glue.join([text_of(corpus, before), f"[[{corpus.vocabulary[tokens[place]]}]]", text_of(corpus, after)])


def chunk_count(corpus: Corpus, length: int) -> int:
    """Whole chunks of the stream whose tokens all have one that follows."""
    return (len(corpus.tokens) - 1) // length


def batches(corpus: Corpus, batch_size: int, length: int) -> Iterator[Chunks]:
    """One epoch: the text is cut into `batch_size` streams of consecutive chunks, of which each batch has the next ones.

    Every chunk comes once. The first streams are one chunk longer where the chunks do not come out even: the last batch is then
    of these alone. Raises DualstoreError where the text is shorter than one chunk.
    """
    count = chunk_count(corpus, length)
    if count < 1:
        raise DualstoreError(f"{corpus.name}: expected more than {length} tokens, found {len(corpus.tokens)}; use shorter chunks")
    streams = np.array_split(np.arange(count), min(batch_size, count))  # the longer ones come first
    for turn in range(len(streams[0])):
        ids = np.array([stream[turn] for stream in streams if turn < len(stream)])
        places = ids[:, None] * length + np.arange(length)  # (b, length)
        yield Chunks(ids, corpus.tokens[places], corpus.tokens[places + 1])


def _corpus(
    name: str, titles: Sequence[str], sections: Sequence[Int32[ndarray, "_"]], vocabulary: Sequence[str], glue: str, note: str = ""
) -> Corpus:
    """Sections in a row, without the windows at their ends that are held out."""
    titles = _distinct(titles)
    held = [_held(len(section)) for section in sections]
    passages = []
    for number, (section, count) in enumerate(zip(sections, held, strict=True)):
        windows = section[len(section) - count * WINDOW :].reshape(count, WINDOW)
        passages += [Passage(window, number, "held-out", titles[number]) for window in windows]
    trained = [section[: len(section) - count * WINDOW] for section, count in zip(sections, held, strict=True)]
    section_of = np.repeat(np.arange(len(trained), dtype=np.int32), [len(section) for section in trained])
    return Corpus(name, np.concatenate(trained), vocabulary, titles, section_of, passages, glue, note)


def _held(tokens: int) -> int:
    """Windows at the end of a section that are not trained on."""
    return max(1, int(HELD_SHARE * tokens / WINDOW)) if tokens >= LEAST_WINDOWS * WINDOW else 0


def _articles(path: Path) -> tuple[list[str], list[list[str]]]:
    """Titles and words of the articles. Each begins with the end of a line and has none, nor blank ones, at its own end."""
    lines = _read(path).splitlines()
    starts = [number for number in range(len(lines)) if _is_article(lines, number)]
    if not starts:
        raise DualstoreError(f"{path}: expected articles that begin with a line ' = Title = ' between blank ones, found none")
    bounds = zip(starts, [*starts[1:], len(lines)], strict=True)
    texts = ["\n".join(lines[first:last]).strip(" \n").split("\n") for first, last in bounds]
    words = [[word for line in text for word in (_END, *line.split())] for text in texts]
    return [lines[number].strip(" =") for number in starts], words


def _is_fable(lines: Sequence[str], number: int) -> bool:
    return bool(lines[number].strip()) and all(_is_blank(lines, number + step) for step in (-2, -1, 1, 2))


def _is_article(lines: Sequence[str], number: int) -> bool:
    parts = lines[number].split()
    titled = len(parts) > 2 and parts[0] == parts[-1] == "=" and parts[1] != "=" != parts[-2]
    return titled and _is_blank(lines, number - 1) and _is_blank(lines, number + 1)


def _is_blank(lines: Sequence[str], number: int) -> bool:
    """Whether there is nothing in a line, which may be outside the text."""
    return not 0 <= number < len(lines) or not lines[number].strip()


def _distinct(titles: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for title in titles:
        seen[title] = seen.get(title, 0) + 1
        found.append(title if seen[title] == 1 else f"{title} ({seen[title]})")
    return found


def _find(name: str, file: str, folder: Path | None) -> Path:
    """Like `datasets.load_idx`: in a folder or $DUALSTORE_DATA, there itself or in a folder named like the text."""
    given = data_folder(folder)
    if given is None:
        raise DualstoreError(f"{name}: expected a folder with {file} or {name}/{file}, found none; give --data or $DUALSTORE_DATA")
    for path in (given / name / file, given / file):
        if path.is_file():
            return path
    raise DualstoreError(f"{given}: expected {file} there or in {name}/, found neither; put it there, or give --data")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DualstoreError(f"{path}: expected a text in UTF-8, found {error}") from error

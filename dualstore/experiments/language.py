"""The paper's two language models: an LSTM trained on contiguous streams of a text, with the keys of all layers recorded.

An ordinary training loop around the public recording API.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), section 4 and its public code for the settings.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy import ndarray
from torch import nn

from dualstore.capture import Recorder, record
from dualstore.experiments.texts import Corpus, batches, chunk_count, text_of
from dualstore.shapes import Int64

__all__ = ["AESOP", "WIKITEXT", "Report", "Settings", "full", "probed", "scaled", "train"]

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""
_State = tuple[torch.Tensor, torch.Tensor] | None
"""h and c of an LSTM; None for zeros."""
_ROWS = 32
"""Passages at a time: the outputs of a batch by word are large."""


@dataclass(frozen=True)
class Settings:
    """What a run is trained with."""

    steps: int
    """By default as many as two cores do in about ten minutes."""
    paper_steps: int
    batch_size: int
    """Streams."""
    length: int
    """Tokens of a chunk, through which gradients flow back."""
    lr: float
    weight_decay: float
    clip: float
    """Largest global norm of the gradients."""
    embedding: int
    projection: int | None
    """Width of a linear layer between embedding and LSTM; None for no such layer."""
    hidden: int
    dropout: float
    seed: int = 0
    passages: int = 128
    """How many to probe, at most; evenly spaced over all of them."""
    dtype: str = "float16"
    """Of the stored keys."""


AESOP = Settings(234, 5_000, 64, 100, lr=1e-3, weight_decay=1e-7, clip=1.0, embedding=64, projection=1024, hidden=1024, dropout=0.0)
"""By character; model and optimiser are the paper's."""
WIKITEXT = Settings(
    180, 10_000, 128, 100, lr=3e-3, weight_decay=1e-7, clip=0.3, embedding=200, projection=None, hidden=200, dropout=0.5
)
"""By word; model and optimiser are the paper's."""


@dataclass(frozen=True)
class Report:
    """How well the model predicts passages of its text that it was not trained on."""

    steps: int
    epochs: float
    seconds: float
    loss_before: float
    """Mean cross entropy of a token, in nats."""
    loss_after: float
    note: str
    """What a reader should know of the text."""

    @property
    def perplexity_before(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss_after)


def full(settings: Settings) -> Settings:
    """The same with the paper's number of steps."""
    return replace(settings, steps=settings.paper_steps)


def scaled(settings: Settings, share: float) -> Settings:
    """The same with all widths shrunk to a share, for quick looks."""
    projection = None if settings.projection is None else _width(settings.projection, share)
    return replace(
        settings,
        embedding=_width(settings.embedding, share),
        projection=projection,
        hidden=_width(settings.hidden, share),
    )


def train(path: Path, corpus: Corpus, settings: Settings, *, progress: Progress, maker: str = "") -> Report:
    """Trains a model on the corpus and records the keys of all its layers at `path`, then probes the held-out passages.

    A pattern's `sample_id * length + position` is its token's place in the corpus, its label the next token, its task the
    section in which its chunk begins. The query of a probe, whose test_id is the passage's number, is the input at the last
    token of its context. The layers are `embedding`, `projection` if there is one, `lstm.l0` and `output`. The index is left to
    the caller, who may want to show how it grows.
    """
    torch.manual_seed(settings.seed)
    model = _Model(len(corpus.vocabulary), settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    started, before = time.monotonic(), _loss(model, corpus)
    with record(model, optimizer, path, keys_only=True, dtype=settings.dtype, index=False, maker=maker) as recorder:
        _train(recorder, model, optimizer, corpus, settings, progress)
        _store_texts(recorder, corpus, settings.length)
        model.eval()
        for numbers in _split(probed(corpus, settings)):
            _probe(recorder, model, corpus, numbers)
    epochs = settings.steps / sum(1 for _ in batches(corpus, settings.batch_size, settings.length))
    return Report(settings.steps, epochs, time.monotonic() - started, before, _loss(model, corpus), corpus.note)


def probed(corpus: Corpus, settings: Settings) -> Int64[ndarray, " p"]:
    """Numbers of the passages that are probed, evenly spaced."""
    count = len(corpus.passages)
    return np.unique(np.linspace(0, count - 1, min(count, settings.passages)).astype(np.int64)) if count else np.zeros(0, np.int64)


class _Model(nn.Module):
    def __init__(self, words: int, settings: Settings) -> None:
        super().__init__()
        width = settings.projection or settings.embedding
        self.embedding = nn.Embedding(words, settings.embedding)
        self.projection = nn.Linear(settings.embedding, width) if settings.projection else nn.Identity()
        self.dropout = nn.Dropout(settings.dropout)
        self.lstm = nn.LSTM(width, settings.hidden, batch_first=True)
        self.output = nn.Linear(settings.hidden, words)

    def forward(self, tokens: torch.Tensor, state: _State = None) -> tuple[torch.Tensor, _State]:
        """Logits (b, length, words) and the state behind the last token."""
        found, state = self.lstm(self.dropout(self.projection(self.embedding(tokens))), state)
        return self.output(found), state


def _train(
    recorder: Recorder, model: _Model, optimizer: torch.optim.Optimizer, corpus: Corpus, settings: Settings, progress: Progress
) -> None:
    step = 0
    while step < settings.steps:
        state: _State = None  # an epoch begins with the beginnings of the streams
        for chunks in batches(corpus, settings.batch_size, settings.length):
            state = None if state is None else tuple(part[:, : len(chunks.ids)].detach() for part in state)  # type: ignore[assignment]
            tasks = [corpus.sections[corpus.section_of[start]] for start in chunks.ids * settings.length]
            tokens, following = (torch.from_numpy(part).long() for part in (chunks.tokens, chunks.following))
            with recorder.batch(sample_id=chunks.ids, label=chunks.following, task=tasks) as batch:
                logits, state = model(tokens, state)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
                batch.loss = loss.detach()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            progress(step, settings.steps)
            if step == settings.steps:
                break


def _store_texts(recorder: Recorder, corpus: Corpus, length: int) -> None:
    starts = np.arange(chunk_count(corpus, length)) * length
    texts = [text_of(corpus, corpus.tokens[start : start + length]) for start in starts]
    sections = corpus.section_of[starts]
    recorder.samples(starts // length, sections, texts, task=[corpus.sections[number] for number in sections])


@torch.no_grad()
def _probe(recorder: Recorder, model: _Model, corpus: Corpus, numbers: Int64[ndarray, "_"]) -> None:
    """Each context from a fresh state; only its last token is asked with, so that a probe is one row a layer."""
    passages = [corpus.passages[number] for number in numbers]
    tokens = torch.from_numpy(np.stack([passage.tokens for passage in passages])).long()  # (p, window)
    tasks = [passage.title if passage.section >= 0 else passage.source for passage in passages]
    _, state = model(tokens[:, :-2])
    with recorder.probe(test_id=numbers, label=tokens[:, -1], task=tasks):
        model(tokens[:, -2:-1], state)


@torch.no_grad()
def _loss(model: _Model, corpus: Corpus) -> float:
    """Mean cross entropy over the held-out passages of the text itself; NaN without any."""
    training = model.training
    model.eval()
    held = [passage.tokens for passage in corpus.passages if passage.section >= 0]
    total = 0.0
    for numbers in _split(np.arange(len(held))):
        tokens = torch.from_numpy(np.stack([held[number] for number in numbers])).long()
        logits, _ = model(tokens[:, :-1])
        total += len(tokens) * float(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    model.train(training)
    return total / len(held) if held else math.nan


def _split(numbers: Int64[ndarray, " n"]) -> list[Int64[ndarray, "_"]]:
    return [numbers[first : first + _ROWS] for first in range(0, len(numbers), _ROWS)]


def _width(width: int, share: float) -> int:
    return max(4, round(share * width))

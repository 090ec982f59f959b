"""The paper's two language models: an LSTM trained on contiguous streams of a text, with the keys of all layers recorded.

An ordinary training loop around the public recording API.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), section 4 and its public code for the settings.
"""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy import ndarray
from torch import nn

from dualstore.capture import Recorder, record
from dualstore.experiments.experiment import Progress
from dualstore.experiments.streams import held_out_loss, in_pieces, probed, store_texts, titles_of, train_on
from dualstore.experiments.texts import Corpus, batches
from dualstore.shapes import Int64

__all__ = ["AESOP", "WIKITEXT", "Report", "Settings", "full", "scaled", "train"]

_State = tuple[torch.Tensor, torch.Tensor] | None
"""h and c of an LSTM; None for zeros."""


@dataclass(frozen=True)
class Settings:
    """What a run is trained with."""

    steps: int
    """By default as many as two cores do in about ten minutes."""
    paper_steps: int
    batch_size: int
    """Streams."""
    paper_batch_size: int
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


AESOP = Settings(
    500, 5_000, 16, 64, 100, lr=1e-3, weight_decay=1e-7, clip=1.0, embedding=64, projection=1024, hidden=1024, dropout=0.0
)
"""By character; model and optimiser are the paper's. In the same time, more steps of fewer streams bring it further."""
WIKITEXT = Settings(
    1000, 10_000, 16, 128, 100, lr=3e-3, weight_decay=1e-7, clip=0.3, embedding=200, projection=None, hidden=200, dropout=0.5
)
"""By word; as above."""


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
    """The same with the paper's number of steps and streams."""
    return replace(settings, steps=settings.paper_steps, batch_size=settings.paper_batch_size)


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
    started, before = time.monotonic(), held_out_loss(model, corpus)
    with record(model, optimizer, path, keys_only=True, dtype=settings.dtype, index=False, maker=maker) as recorder:
        train_on(recorder, model, optimizer, corpus, settings, progress)
        store_texts(recorder, corpus, settings.length)
        model.eval()
        for numbers in in_pieces(probed(corpus, settings)):
            _probe(recorder, model, corpus, numbers)
    epochs = settings.steps / sum(1 for _ in batches(corpus, settings.batch_size, settings.length))
    return Report(settings.steps, epochs, time.monotonic() - started, before, held_out_loss(model, corpus), corpus.note)


class _Model(nn.Module):
    def __init__(self, words: int, settings: Settings) -> None:
        super().__init__()
        width = settings.projection or settings.embedding
        self.embedding = nn.Embedding(words, settings.embedding)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)  # as the paper's code: torch's own would outweigh the state in each key
        self.projection = nn.Linear(settings.embedding, width) if settings.projection else nn.Identity()
        self.dropout = nn.Dropout(settings.dropout)
        self.lstm = nn.LSTM(width, settings.hidden, batch_first=True)
        self.output = nn.Linear(settings.hidden, words)

    def forward(self, tokens: torch.Tensor, state: _State = None) -> tuple[torch.Tensor, _State]:
        """Logits (b, length, words) and the state behind the last token."""
        found, state = self.lstm(self.projection(self.dropout(self.embedding(tokens))), state)
        return self.output(found), state


@torch.no_grad()
def _probe(recorder: Recorder, model: _Model, corpus: Corpus, numbers: Int64[ndarray, "_"]) -> None:
    """Each context from a fresh state; only its last token is asked with, so that a probe is one row a layer."""
    tokens = torch.from_numpy(np.stack([corpus.passages[number].tokens for number in numbers])).long()  # (p, window)
    _, state = model(tokens[:, :-2])
    with recorder.probe(test_id=numbers, label=tokens[:, -1], task=titles_of(corpus, numbers)):
        model(tokens[:, -2:-1], state)


def _width(width: int, share: float) -> int:
    return max(4, round(share * width))

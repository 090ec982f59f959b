"""Training any language model on the contiguous streams of a text, with the samples named by their place in it."""

import math
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy import ndarray
from torch import nn

from dualstore.capture import Recorder
from dualstore.experiments.experiment import Progress
from dualstore.experiments.texts import Corpus, batches, chunk_count, text_of
from dualstore.shapes import Int64

__all__ = ["Streams", "held_out_loss", "in_pieces", "probed", "store_texts", "titles_of", "train_on"]

_ROWS = 32
"""Passages at a time: the outputs of a batch by word are large."""


@runtime_checkable
class Streams(Protocol):
    """What settings of such a training have."""

    @property
    def steps(self) -> int:
        """Of the optimiser."""

    @property
    def batch_size(self) -> int:
        """Streams."""

    @property
    def length(self) -> int:
        """Tokens of a chunk, through which gradients flow back."""

    @property
    def clip(self) -> float:
        """Largest global norm of the gradients."""

    @property
    def passages(self) -> int:
        """How many to probe, at most."""


def train_on(
    recorder: Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    settings: Streams,
    progress: Progress,
) -> None:
    """Trains a model that gives (logits, state) for (tokens, state); a state is a tuple of (layers, streams, ...), or None."""
    step = 0
    while step < settings.steps:
        state: Any = None  # an epoch begins with the beginnings of the streams
        for chunks in batches(corpus, settings.batch_size, settings.length):
            state = None if state is None else tuple(part[:, : len(chunks.ids)].detach() for part in state)
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


def store_texts(recorder: Recorder, corpus: Corpus, length: int) -> None:
    """Stores the text of each chunk as the sample that its patterns are of."""
    starts = np.arange(chunk_count(corpus, length)) * length
    texts = [text_of(corpus, corpus.tokens[start : start + length]) for start in starts]
    sections = corpus.section_of[starts]
    recorder.samples(starts // length, sections, texts, task=[corpus.sections[number] for number in sections])


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus) -> float:
    """Mean cross entropy over the held-out passages of the text itself; NaN without any."""
    training = model.training
    model.eval()
    held = [passage.tokens for passage in corpus.passages if passage.section >= 0]
    total = 0.0
    for numbers in in_pieces(np.arange(len(held))):
        tokens = torch.from_numpy(np.stack([held[number] for number in numbers])).long()
        logits, _ = model(tokens[:, :-1])
        total += len(tokens) * float(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    model.train(training)
    return total / len(held) if held else math.nan


def probed(corpus: Corpus, settings: Streams) -> Int64[ndarray, " p"]:
    """Numbers of the passages that are probed, evenly spaced."""
    count = len(corpus.passages)
    return np.unique(np.linspace(0, count - 1, min(count, settings.passages)).astype(np.int64)) if count else np.zeros(0, np.int64)


def titles_of(corpus: Corpus, numbers: Int64[ndarray, "_"]) -> list[str]:
    """For each passage its section's title, or where it is from."""
    passages = [corpus.passages[number] for number in numbers]
    return [passage.title if passage.section >= 0 else passage.source for passage in passages]


def in_pieces(numbers: Int64[ndarray, " n"]) -> list[Int64[ndarray, "_"]]:
    """So many at a time as a batch may have."""
    return [numbers[first : first + _ROWS] for first in range(0, len(numbers), _ROWS)]

"""A small causal transformer on a text, whose query, key and value projections are recorded.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), section 5, describes both levels of retrieval; size and training
are ours.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dualstore.capture import Recorder, record
from dualstore.experiments.experiment import Progress
from dualstore.experiments.streams import held_out_loss, in_pieces, probed, store_texts, titles_of, train_on
from dualstore.experiments.texts import Corpus
from dualstore.shapes import Int64

__all__ = ["DEFAULT", "Settings", "blocks_of", "train"]


@dataclass(frozen=True)
class Settings:
    """What a run is trained with."""

    steps: int = 500
    """From here on it learns the fables by heart: passages that are held out get worse."""
    batch_size: int = 16
    length: int = 100
    """Tokens of a chunk, which is also the context."""
    lr: float = 1e-3
    weight_decay: float = 1e-7
    clip: float = 1.0
    width: int = 64
    heads: int = 4
    blocks: int = 2
    seed: int = 0
    passages: int = 64
    """How many to probe, at most."""
    dtype: str = "float16"
    """Of the stored keys."""

    def scaled(self, share: float) -> "Settings":
        """With a share of the width."""
        return replace(self, width=max(1, round(self.width * share / self.heads)) * self.heads)


DEFAULT = Settings()


def blocks_of(settings: Settings) -> list[str]:
    """Names of the attention modules."""
    return [f"blocks.{number}.self_attn" for number in range(settings.blocks)]


def train(path: Path, corpus: Corpus, settings: Settings, *, progress: Progress, maker: str = "") -> tuple[float, float]:
    """Trains on chunks of the corpus, records the keys of all projections, and probes passages at every token of their context.

    Patterns are named as `language.train` names them. Returns the mean cross entropy of held-out passages before and after.
    """
    torch.manual_seed(settings.seed)
    model = _Model(len(corpus.vocabulary), settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    before = held_out_loss(model, corpus)
    layers = [f"{block}.{name}" for block in blocks_of(settings) for name in ("q", "k", "v")]
    with record(model, optimizer, path, layers=layers, keys_only=True, dtype=settings.dtype, index=False, maker=maker) as recorder:
        train_on(recorder, model, optimizer, corpus, settings, progress)
        store_texts(recorder, corpus, settings.length)
        model.eval()
        for numbers in in_pieces(probed(corpus, settings)):
            _probe(recorder, model, corpus, numbers)
    return before, held_out_loss(model, corpus)


class _Model(nn.Module):
    def __init__(self, words: int, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.embedding, self.places = nn.Embedding(words, width), nn.Embedding(settings.length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, settings.heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(settings.blocks)
        )
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, state: None = None) -> tuple[torch.Tensor, None]:
        """Logits (b, length, words); there is no state behind the last token."""
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.output(self.norm(x)), None


@torch.no_grad()
def _probe(recorder: Recorder, model: nn.Module, corpus: Corpus, numbers: Int64[np.ndarray, "_"]) -> None:
    tokens = torch.from_numpy(np.stack([corpus.passages[number].tokens for number in numbers])).long()  # (p, window)
    with recorder.probe(test_id=numbers, label=tokens[:, 1:], task=titles_of(corpus, numbers)):
        model(tokens[:, :-1])

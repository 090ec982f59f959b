"""What does recording a language model cost? GPT-2 of two layers (d = 128, sequences of 128), two batches of 8 a step, AdamW.

Blocks of steps of two equal models in turns, one of them recorded: whole, in half precision, keys alone, a tenth of the rows.
Losses are asserted equal. The time of a step includes what writing keeps of it; closing the store is shown apart.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import machine, work_folder
from transformers import GPT2Config, GPT2LMHeadModel

import dualstore

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "float16": {"dtype": "float16"},
    "keys only": {"keys_only": True},
    "a tenth of the rows": {"share": 0.1},
}
BLOCKS, STEPS, LENGTH = 8, 10, 128
TOKENS = torch.randint(0, 256, (64, LENGTH), generator=torch.Generator().manual_seed(0))
FOLLOWING = torch.nn.functional.pad(TOKENS[:, 1:], (0, 1), value=-100)


class Loop:
    """A training loop, recorded or not."""

    def __init__(self, path: Path | None, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.recorder = None if path is None else dualstore.record(self.model, self.optimizer, path, index=False, **options)
        self.losses: list[float] = []
        self.done = 0

    def block(self) -> float:
        """Seconds of some steps."""
        start = time.perf_counter()
        for _ in range(STEPS):
            for micro in range(2):
                ids = (torch.arange(8) + 8 * (2 * self.done + micro)) % len(TOKENS)
                if self.recorder is None:
                    self._backward(ids)
                else:
                    with self.recorder.batch(sample_id=ids, label=FOLLOWING[ids]):
                        self._backward(ids)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
        return time.perf_counter() - start

    def _backward(self, ids: torch.Tensor) -> None:
        loss = self.model(input_ids=TOKENS[ids], labels=TOKENS[ids]).loss / 2
        loss.backward()
        self.losses.append(float(loss.detach()))


def main() -> None:
    print(machine())
    for name, options in KINDS.items():
        with work_folder() as folder:
            alone, recorded = Loop(None, {}), Loop(folder / "store", options)
            alone.block(), recorded.block()
            pairs = [(alone.block(), recorded.block()) for _ in range(BLOCKS)]
            assert alone.losses == recorded.losses
            assert recorded.recorder is not None
            start = time.perf_counter()
            recorded.recorder.close()
            closing = time.perf_counter() - start
            size = sum(part.stat().st_size for part in (folder / "store" / "patterns").rglob("*.parquet"))
        ratios = sorted(b / a for a, b in pairs)
        steps = (BLOCKS + 1) * STEPS
        a, b = (statistics.median(times) / STEPS * 1e3 for times in zip(*pairs, strict=True))
        print(
            f"{name}: {a:.0f} ms a step alone, {b:.0f} ms recorded, ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}); {size / steps / 1e6:.1f} MB a step; closing {closing:.2f} s after {steps} steps"
        )


if __name__ == "__main__":
    main()

"""What does recording a language model cost? GPT-2 of two layers (d = 128, sequences of 128), two batches of 8 a step, AdamW.

Blocks of steps of two equal models in turns, one of them recorded: whole, whole by a thread of its own, in half precision, keys
alone, a tenth of the rows; training takes all cores, and all but one where the line says that a core is free (then the recorder
has a thread of its own, too).
Losses are asserted equal. The time of a step includes what writing keeps of it; closing the store is shown apart. The last line
is what no recorder can do without: beside the second model as many bytes as the whole recording has are copied and written.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, work_folder
from transformers import GPT2Config, GPT2LMHeadModel

import dualstore
from dualstore.capture.background import QUEUE_BYTES
from dualstore.capture.threads import TorchBulk
from dualstore.spool import Run, Spool
from dualstore.writer import SPOOL_BYTES

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole, by a thread of its own": {"queue_bytes": QUEUE_BYTES},
    "float16": {"dtype": "float16"},
    "keys only": {"keys_only": True},
    "a tenth of the rows": {"share": 0.1},
}
FREE = "whole, a core free"
BLOCKS, STEPS, LENGTH = 12, 10, 128
TOKENS = torch.randint(0, 256, (64, LENGTH), generator=torch.Generator().manual_seed(0))
FOLLOWING = torch.nn.functional.pad(TOKENS[:, 1:], (0, 1), value=-100)


def gpt2() -> GPT2LMHeadModel:
    """The model, always the same."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Loop:
    """A training loop, recorded or not."""

    def __init__(self, path: Path | None, options: dict[str, Any]) -> None:
        self.model = gpt2()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.recorder = None if path is None else dualstore.record(self.model, self.optimizer, path, index=False, **options)
        self.losses: list[float] = []
        self.done = 0

    def block(self) -> float:
        """Milliseconds of a step, over some steps: what is written behind a step falls into the next ones."""
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
        return (time.perf_counter() - start) / STEPS * 1e3

    def _backward(self, ids: torch.Tensor) -> None:
        loss = self.model(input_ids=TOKENS[ids], labels=TOKENS[ids]).loss / 2
        loss.backward()
        self.losses.append(float(loss.detach()))


class Bytes(Loop):
    """A training loop that has so many bytes copied and written after every backward pass, of nothing in particular."""

    def __init__(self, path: Path, count: int) -> None:
        super().__init__(None, {})
        self._spool = Spool(1, SPOOL_BYTES, lambda: None, TorchBulk())
        self._files = os.open(path, os.O_RDWR | os.O_CREAT), os.open(path, os.O_WRONLY | os.O_DIRECT)
        self._run = Run(self._spool, *self._files, 0)
        self._rows = np.random.default_rng(0).normal(size=(count // 512, 128)).astype(np.float32)

    def _backward(self, ids: torch.Tensor) -> None:
        super()._backward(ids)
        for _ in self._run.append_rows(self._rows):
            pass

    def close(self) -> None:
        """Ends the writing."""
        self._run.end()
        self._spool.close()
        for file in self._files:
            os.close(file)


def compared(name: str, alone: Loop, other: Loop) -> str:
    """What a step of either takes, in turns."""
    alone.block(), other.block()
    times = np.array([(alone.block(), other.block()) for _ in range(BLOCKS)])
    assert alone.losses == other.losses
    (a, b), ratios = np.median(times, axis=0), np.sort(times[:, 1] / times[:, 0])
    return (
        f"{name}: {a:.0f} ms a step alone, {b:.0f} ms so, ratio {np.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
        f"of the means {times[:, 1].mean() / times[:, 0].mean():.2f}"
    )


def main() -> None:
    print(machine())
    sizes, cores = {}, torch.get_num_threads()
    for name, options in {**KINDS, FREE: {}}.items():
        torch.set_num_threads(max(1, cores - 1) if name == FREE else cores)
        with work_folder() as folder:
            recorded = Loop(folder / "store", options)
            found = compared(name, Loop(None, {}), recorded)
            assert recorded.recorder is not None
            start = time.perf_counter()
            recorded.recorder.close()
            closing = time.perf_counter() - start
            size = sum(part.stat().st_size for part in (folder / "store" / "patterns").rglob("*.parquet"))
            sizes[name] = size / recorded.done
        print(f"{found}; {sizes[name] / 1e6:.1f} MB a step; closing {closing:.2f} s after {recorded.done} steps", flush=True)
    torch.set_num_threads(cores)
    with work_folder() as folder:
        written = Bytes(folder / "bytes", int(sizes["whole"] / 2))
        print(compared("as many bytes as the whole, copied and written", Loop(None, {}), written))
        written.close()


if __name__ == "__main__":
    main()

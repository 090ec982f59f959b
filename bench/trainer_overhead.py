"""What does the callback for transformers' Trainer cost? GPT-2 of two layers (d = 128, sequences of 128), 3 epochs of 40 steps.

A step is two batches of 8, AdamW. The same training alone and recorded whole, in turns, each a new one from the same weights;
losses are asserted equal, and every row is there in the end. The time of a training has everything in it: beginning, steps and
closing with all syncs. That of its steps is from the end of the first to the end of the last.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, work_folder
from language_overhead import LENGTH, gpt2
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

import dualstore.hf

EPOCHS, EXAMPLES = 3, 640
LINES = [
    {"input_ids": line, "labels": line}
    for line in torch.randint(0, 256, (EXAMPLES, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
]


class Clock(TrainerCallback):  # type: ignore[misc]
    """When steps end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes the time."""
        self.times.append(time.perf_counter())


def train(folder: Path, store: Path | None) -> tuple[float, float, float]:
    """Seconds of the whole training, milliseconds of a step, and its loss."""
    clock = Clock()
    callbacks: list[Any] = [clock] if store is None else [clock, dualstore.hf.RecorderCallback(store, index=False)]
    arguments = TrainingArguments(
        str(folder / "checkpoints"), use_cpu=True, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        num_train_epochs=EPOCHS, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, logging_strategy="no",
        save_strategy="no", seed=3,
    )  # fmt: skip
    trainer = Trainer(gpt2(), arguments, train_dataset=LINES, data_collator=default_data_collator, callbacks=callbacks)
    start = time.perf_counter()
    loss = trainer.train().training_loss
    whole = time.perf_counter() - start
    return whole, (clock.times[-1] - clock.times[0]) / (len(clock.times) - 1) * 1e3, loss


def pair(number: int) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """A training alone and one recorded, one after the other."""
    with work_folder() as folder:
        store = folder / "store"
        if number % 2:
            recorded, alone = train(folder, store), train(folder, None)
        else:
            alone, recorded = train(folder, None), train(folder, store)
        (seen,) = (
            dualstore.open(store).sql("SELECT count(DISTINCT (epoch, sample_id)) AS n FROM patterns WHERE layer = 2").to_dicts()
        )
        assert seen["n"] == EPOCHS * EXAMPLES, seen
    assert alone[2] == recorded[2]
    return alone, recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    pairs, cores = parser.parse_args().pairs, torch.get_num_threads()
    print(machine())
    for free in (0, 1):
        torch.set_num_threads(max(1, cores - free))
        times = np.array([pair(number) for number in range(pairs + 1)])[1:]  # the first one warms up
        print(f"training on {torch.get_num_threads()} of {cores} cores:")
        for column, what in ((0, "seconds of the whole training"), (1, "milliseconds a step")):
            alone, recorded = times[:, 0, column], times[:, 1, column]
            ratios = np.sort(recorded / alone)
            print(
                f"  {what}: alone {np.median(alone):.4g}, recorded {np.median(recorded):.4g}, ratio {np.median(ratios):.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f}), of the means {recorded.mean() / alone.mean():.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

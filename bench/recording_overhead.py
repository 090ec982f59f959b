"""What does recording cost? The paper's MNIST run with and without it, in turns, in one process.

Two measures: whole runs (store closed and synced included), one after the other in pairs; and blocks of steps of two
identical models in turns, which a machine whose speed drifts disturbs less. Losses are asserted equal first.
"""

import statistics
import time
from pathlib import Path

import numpy as np
import torch
from common import anonymous_bytes, arguments, machine, work_folder
from torch import nn

import dualstore
from dualstore.datasets import load_idx
from dualstore.experiments.images import Data, prepare


class Loop:
    """The run's training loop, recorded or not."""

    def __init__(self, data: Data, path: Path | None) -> None:
        torch.manual_seed(0)
        self.data = data
        self.model = nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=3e-3, momentum=0.9)
        self.recorder = None if path is None else dualstore.record(self.model, self.optimizer, path, index=False)
        self.losses: list[float] = []

    def step(self, chosen: torch.Tensor) -> None:
        """One step, the same with and without recording."""
        if self.recorder is None:
            self._backward(chosen)
        else:
            with self.recorder.batch(sample_id=self.data.ids[chosen], label=self.data.labels[chosen], task="mnist"):
                self._backward(chosen)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, chosen: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(self.model(self.data.images[chosen]), self.data.labels[chosen])
        loss.backward()
        self.losses.append(float(loss.detach()))

    def close(self) -> None:
        """Ends the recording, if there is one."""
        if self.recorder is not None:
            self.recorder.close()


def batches(count: int, rows: int) -> list[torch.Tensor]:
    """The same batches for every run."""
    generator = torch.Generator().manual_seed(1)
    found: list[torch.Tensor] = []
    while len(found) < count:
        found += torch.randperm(rows, generator=generator).split(128)[: rows // 128]
    return found[:count]


def whole_runs(data: Data, folder: Path, steps: int, pairs: int) -> list[float]:
    """Ratios of recorded to plain wall time."""
    ratios = []
    for pair in range(pairs):
        chosen = batches(steps, len(data.ids))
        wall, losses = {}, {}
        for name in ("plain", "recorded") if pair % 2 == 0 else ("recorded", "plain"):
            start = time.perf_counter()
            loop = Loop(data, folder / f"run{pair}" if name == "recorded" else None)
            for some in chosen:
                loop.step(some)
            loop.close()
            wall[name], losses[name] = time.perf_counter() - start, loop.losses
        assert losses["plain"] == losses["recorded"], "recording changed the training"
        ratios.append(wall["recorded"] / wall["plain"])
        print(
            f"  pair {pair + 1}: plain {wall['plain']:.2f} s, recorded {wall['recorded']:.2f} s, ratio {ratios[-1]:.3f}", flush=True
        )
        _remove(folder / f"run{pair}")
    return ratios


def in_turns(data: Data, folder: Path, blocks: int, size: int) -> list[float]:
    """Ratios of blocks of steps, in turns."""
    plain, recorded = Loop(data, None), Loop(data, folder / "turns")
    chosen = batches(blocks * size, len(data.ids))
    ratios, peak, before = [], 0, anonymous_bytes()
    for block in range(blocks):
        wall = []
        for loop in (plain, recorded):
            start = time.perf_counter()
            for some in chosen[block * size : (block + 1) * size]:
                loop.step(some)
            wall.append(time.perf_counter() - start)
        ratios.append(wall[1] / wall[0])
        peak = max(peak, anonymous_bytes())
    recorded.close()
    assert plain.losses == recorded.losses, "recording changed the training"
    print(f"  anonymous memory of the process grew by {(peak - before) / 2**20:.0f} MiB while recording")
    _remove(folder / "turns")
    return ratios[1:]


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=60)
    options = parser.parse_args()
    data = prepare(load_idx("mnist", options.data), task="mnist")
    print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    with work_folder() as folder:
        print(f"blocks of 20 steps in turns, {options.blocks} of each:")
        turns = in_turns(data, folder, options.blocks, 20)
        print(f"  median ratio {statistics.median(turns):.3f}, quartiles {np.percentile(turns, [25, 75]).round(3).tolist()}")
        print(f"whole runs of {options.steps} steps:")
        ratios = whole_runs(data, folder, options.steps, options.pairs)
        print(f"  median ratio {statistics.median(ratios):.3f} of {sorted(round(r, 3) for r in ratios)}")


if __name__ == "__main__":
    main()

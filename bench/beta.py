"""Does amplifying the memories of a forgotten task bring it back? The experiment of Gershman, Fiete, Irie 2025 (arXiv 2501.02950).

784-64-4 without biases, plain SGD: MNIST digits 0 and 1, then Fashion-MNIST classes 2 and 3. Accuracy on the first task from
the store alone, for every factor beta, is asserted equal to 0.1 point to that of weights combined by hand from snapshots
taken during training; beside it what was published.
"""

from pathlib import Path

import numpy as np
import torch
from common import arguments, machine, work_folder
from torch import nn

import dualstore
from dualstore.datasets import ImageSet, load_idx

BETAS = [round(1 + 0.1 * number, 1) for number in range(11)]
PUBLISHED = [9.13, 28.65, 55.51, 77.73, 89.22, 94.52, 97.26, 98.53, 99.10, 99.48, None]
EPOCHS, BATCH, LR = 5, 128, 6e-4
Weights = dict[str, torch.Tensor]
Images = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    print(machine(), f"torch {torch.__version__}")
    tasks = [chosen(load_idx("mnist", options.data), (0, 1)), chosen(load_idx("fashion-mnist", options.data), (2, 3))]
    curves: dict[bool, list[list[float]]] = {False: [], True: []}
    for seed in range(options.seeds):
        with work_folder() as folder:
            for with_initial, curve in one(folder / "store", tasks, seed).items():
                curves[with_initial].append(curve)
    for with_initial, found in curves.items():
        print(
            f"accuracy on MNIST 0/1 after Fashion 2/3, %, beta on the first task's memories{' and on W_0' if with_initial else ''}"
        )
        print("  beta   " + "  ".join(f"{beta:5.1f}" for beta in BETAS))
        if with_initial:
            print("  paper  " + "  ".join("    -" if value is None else f"{value:5.2f}" for value in PUBLISHED))
        for seed, curve in enumerate(found):
            print(f"  seed {seed} " + "  ".join(f"{value:5.2f}" for value in curve))


def chosen(images: ImageSet, labels: tuple[int, int]) -> tuple[Images, Images]:
    """Training and test images of two classes, in [0, 1] and in the order of the files."""

    def some(pictures: np.ndarray, of: np.ndarray) -> Images:
        mine = np.isin(of, labels)
        return torch.from_numpy(pictures[mine].astype(np.float32) / 255).flatten(1), torch.from_numpy(of[mine].astype(np.int64))

    return some(images.train, images.train_labels), some(images.test, images.test_labels)


def one(path: Path, tasks: list[tuple[Images, Images]], seed: int) -> dict[bool, list[float]]:
    """Accuracy on the first task in % for every beta, without and with W_0 scaled."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 64, bias=False), nn.ReLU(), nn.Linear(64, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    snapshots = [copied(model)]
    (test, test_labels), name = tasks[0][1], ("first", "second")
    with dualstore.record(model, optimizer, path, index=False) as recorder:
        for number, ((images, labels), _) in enumerate(tasks):
            for _ in range(EPOCHS):
                for ids in torch.arange(len(images)).split(BATCH):
                    with recorder.batch(ids + number * 1_000_000, labels[ids], task=name[number]):
                        nn.functional.cross_entropy(model(images[ids]), labels[ids]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            snapshots.append(copied(model))
        model.eval()
        with recorder.probe(range(len(test)), test_labels, task="first"):
            model(test)
    store = dualstore.open(path)
    found, off = {}, 0.0
    for with_initial in (False, True):
        rows = store.evaluate({"task": {"first": BETAS}}, with_initial=with_initial)
        found[with_initial] = [100 * row["accuracy"] for row in rows]
        by_hand = [hand(model, snapshots, beta, with_initial, test, test_labels) for beta in BETAS]
        off = max(off, *(abs(a - b) for a, b in zip(found[with_initial], by_hand, strict=True)))
    assert off <= 0.1, off
    alone = 100 * accuracy(model, snapshots[1], test, test_labels)
    print(f"seed {seed}: from the store as by hand to {off:.2f} points; first task alone {alone:.2f} %")
    return found


def copied(model: nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}


def hand(model: nn.Module, snapshots: list[Weights], beta: float, with_initial: bool, x: torch.Tensor, y: torch.Tensor) -> float:
    start, middle, end = snapshots
    first = beta if with_initial else 1.0
    mixed = {name: first * start[name] + beta * (middle[name] - start[name]) + end[name] - middle[name] for name in start}
    return 100 * accuracy(model, mixed, x, y)


@torch.no_grad()
def accuracy(model: nn.Module, weights: Weights, x: torch.Tensor, y: torch.Tensor) -> float:
    model.load_state_dict(weights)
    return float((model(x).argmax(1) == y).double().mean())


if __name__ == "__main__":
    main()

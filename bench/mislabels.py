"""Does self-influence find mislabelled training samples? A tenth of the labels of 10,000 MNIST images are flipped.

Area under the ROC curve of ranking by: self-influence summed over a sample's visits, at all layers and at the last; the
sample's loss at the end of training; captum's TracInCP self-influence from checkpoints, likewise; random numbers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from captum.influence import TracInCP, TracInCPFast
from common import arguments, machine, work_folder
from torch import nn
from torch.utils.data import TensorDataset

import dualstore
from dualstore.datasets import load_idx

IMAGES, FLIPPED, BATCH, CHECKPOINTS = 10_000, 0.1, 64, 5
Weights = dict[str, torch.Tensor]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(machine(), f"torch {torch.__version__}")
    mnist, rng = load_idx("mnist", options.data), np.random.default_rng(options.seed)
    x = torch.from_numpy(mnist.train[:IMAGES].astype(np.float32) / 255).flatten(1)
    labels = mnist.train_labels[:IMAGES]
    wrong = rng.permutation(IMAGES) < FLIPPED * IMAGES
    y = torch.from_numpy(np.where(wrong, (labels + rng.integers(1, 10, IMAGES)) % 10, labels))
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    checkpoints: list[Weights] = []
    with work_folder() as folder:
        train(model, x, y, options, folder / "store", checkpoints)
        store = dualstore.open(folder / "store")
        scores = {
            "self-influence, all layers": by_sample(store.self_influence(top=IMAGES)),
            "self-influence, last layer": by_sample(store.self_influence(1, top=IMAGES)),
        }
    with torch.no_grad():
        scores["loss at the end"] = nn.functional.cross_entropy(model(x), y, reduction="none").numpy()
        accuracy = float((model(x).argmax(1) == y).double().mean())
    scores["TracInCP, all parameters"] = captums(TracInCP, model, checkpoints, x, y)
    scores["TracInCPFast, last layer"] = captums(TracInCPFast, model, checkpoints, x, y)
    scores["random"] = rng.normal(size=IMAGES)
    print(f"784-128-10, {options.epochs} epochs of {BATCH}, lr {options.lr}; fits {100 * accuracy:.1f} % of the labels")
    print("area under the ROC curve")
    for name, found in scores.items():
        print(f"  {name:26s} {area(found, wrong):.4f}")


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, options: Any, path: Path, checkpoints: list[Weights]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    with dualstore.record(model, optimizer, path, index=False) as recorder:
        for epoch in range(options.epochs):
            for ids in torch.randperm(IMAGES).split(BATCH):
                with recorder.batch(ids, y[ids], epoch=epoch):
                    nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
                optimizer.step()
                optimizer.zero_grad()
            if (epoch + 1) % max(1, options.epochs // CHECKPOINTS) == 0:
                checkpoints.append({name: value.clone() for name, value in model.state_dict().items()})


def by_sample(found: dualstore.Result) -> np.ndarray:
    scores = np.zeros(IMAGES)
    for row in found:
        scores[row["sample_id"]] = abs(row["self_influence"])
    return scores


def captums(kind: Any, model: nn.Module, checkpoints: list[Weights], x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    final = {"final_fc_layer": model[2]} if kind is TracInCPFast else {"sample_wise_grads_per_batch": True}  # type: ignore[index]

    def load(model: nn.Module, weights: Weights) -> float:
        model.load_state_dict(weights)
        return 1.0

    found = kind(
        model=model,
        train_dataset=TensorDataset(x, y),
        checkpoints=checkpoints,
        checkpoints_load_func=load,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        batch_size=100,
        **final,
    ).self_influence()
    return np.asarray(found)


def area(scores: np.ndarray, wrong: np.ndarray) -> float:
    """Of the ROC curve: how often a wrong label has the larger score (Mann-Whitney)."""
    ranks = scores.argsort().argsort() + 1.0
    positive = int(wrong.sum())
    return float((ranks[wrong].sum() - positive * (positive + 1) / 2) / (positive * (len(wrong) - positive)))


if __name__ == "__main__":
    main()

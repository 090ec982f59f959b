"""Does influence tell what leaving a sample out would do? Against real retraining on scikit-learn's digits.

For some training samples the network is trained again from the same seed in the same order, their terms dropped from the
loss; the truth is by how much the loss of each test example changes. Rank correlation (Spearman) with it of: influence summed
over a sample's visits, at all layers and at the last; captum's TracInCP from checkpoints, likewise; random numbers.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from captum.influence import TracInCP, TracInCPFast
from common import machine, work_folder
from torch import nn
from torch.utils.data import TensorDataset

import dualstore
from dualstore.datasets import load_digits

BATCH, TESTS, CHECKPOINTS = 32, 60, 10
each_loss = nn.CrossEntropyLoss(reduction="none")
Weights = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200, help="training samples that are left out, one after the other")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(machine(), f"torch {torch.__version__}")
    digits = load_digits()
    x, y, test_x, test_y = (
        torch.from_numpy(array) for array in (digits.train, digits.train_labels, digits.test, digits.test_labels)
    )
    x, test_x = (images.flatten(1).double() / 255 for images in (x, test_x))
    test_x, test_y = test_x[:TESTS], test_y[:TESTS]
    chosen = np.random.default_rng(options.seed).choice(len(x), options.samples, replace=False)

    def train(left_out: int | None, path: Path | None = None, kept: list[Weights] | None = None) -> nn.Module:
        return trained(x, y, test_x, test_y, options, left_out, path, kept)

    with work_folder() as folder:
        checkpoints: list[Weights] = []
        model = train(None, folder / "store", checkpoints)
        store = dualstore.open(folder / "store")
        base = losses(model, test_x, test_y)
        truth = np.array([losses(train(int(sample)), test_x, test_y) - base for sample in chosen])
        ours = {layer: influences(store, layer, chosen) for layer in range(len(store.layers))}
        scores = {
            "influence, all layers": -np.sum(list(ours.values()), axis=0),
            "influence, last layer": -ours[len(store.layers) - 1],
            "TracInCP, all parameters": captums(TracInCP, model, checkpoints, x, y, test_x, test_y)[:, chosen].T,
            "TracInCPFast, last layer": captums(TracInCPFast, model, checkpoints, x, y, test_x, test_y)[:, chosen].T,
            "random": np.random.default_rng(1).normal(size=truth.shape),
        }
    right = float((model(test_x).argmax(1) == test_y).double().mean())
    shown = f"digits, 64-32-10, {options.steps} steps of {BATCH}, lr {options.lr}, seed {options.seed}"
    print(f"{shown}; test accuracy {100 * right:.1f} %")
    print(f"Spearman correlation with leaving out {options.samples} samples:")
    print(f"  {'on the mean loss of':26s} {TESTS} test examples; on each, mean")
    for name, found in scores.items():
        single = [spearman(found[:, test], truth[:, test]) for test in range(TESTS)]
        print(f"  {name:26s} {spearman(found.mean(1), truth.mean(1)):6.3f}  {np.mean(single):6.3f}")


def trained(
    x: torch.Tensor,
    y: torch.Tensor,
    test_x: torch.Tensor,
    test_y: torch.Tensor,
    options: argparse.Namespace,
    left_out: int | None,
    path: Path | None,
    kept: list[Weights] | None,
) -> nn.Module:
    """The network after training, without one sample's terms of the loss if asked; recorded at `path` if given."""
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    recorder = None if path is None else dualstore.record(model, optimizer, path, dtype="float64", index=False)
    order: list[torch.Tensor] = []
    for step in range(options.steps):
        order = order or list(torch.randperm(len(x)).split(BATCH))
        ids = order.pop()
        if kept is not None and step % (options.steps // CHECKPOINTS) == 0:
            kept.append({name: value.clone() for name, value in model.state_dict().items()})

        def backward(ids: torch.Tensor = ids) -> None:
            (each_loss(model(x[ids]), y[ids])[ids != (-1 if left_out is None else left_out)].sum() / len(ids)).backward()

        if recorder is None:
            backward()
        else:
            with recorder.batch(ids, y[ids]):
                backward()
        optimizer.step()
        optimizer.zero_grad()
    if recorder is not None:
        model.eval()
        with recorder.probe(range(len(test_x)), test_y, loss=lambda output: each_loss(output, test_y)):
            model(test_x)
        recorder.close()
    return model


@torch.no_grad()
def losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    return each_loss(model(x), y).numpy()


def influences(store: dualstore.Store, layer: int, chosen: Sequence[int]) -> np.ndarray:
    """(samples, tests): the influence of each sample's patterns on each test example's loss at one layer."""
    place = {int(sample): number for number, sample in enumerate(chosen)}
    found = np.zeros((len(chosen), TESTS))
    for row in store.totals(test_id=list(range(TESTS)), layer=layer, by="sample_id", score="influence"):
        if row["sample_id"] in place:
            found[place[row["sample_id"]], row["test_id"]] = row["total"]
    return found


def captums(
    kind: Callable[..., TracInCP | TracInCPFast],
    model: nn.Module,
    checkpoints: list[Weights],
    x: torch.Tensor,
    y: torch.Tensor,
    test_x: torch.Tensor,
    test_y: torch.Tensor,
) -> np.ndarray:
    """(tests, samples) of captum, positive where a sample lowered the loss."""
    final = {"final_fc_layer": model[2]} if kind is TracInCPFast else {}  # type: ignore[index]
    last = {name: value.clone() for name, value in model.state_dict().items()}

    def load(model: nn.Module, weights: Weights) -> float:
        model.load_state_dict(weights)
        return 1.0

    found = kind(
        model=model,
        train_dataset=TensorDataset(x, y),
        checkpoints=checkpoints,
        checkpoints_load_func=load,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        batch_size=256,
        **final,
        **({} if final else {"sample_wise_grads_per_batch": True}),
    ).influence((test_x, test_y))
    model.load_state_dict(last)
    return np.asarray(found)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Of values without ties."""
    ranks = [values.argsort().argsort().astype(np.float64) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()

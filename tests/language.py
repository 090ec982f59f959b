"""A small language model whose output layer may share its weight with the embedding, trained and recorded by hand.

    h = tanh(A E[first] + B^T E[second] + b_1 + b_2)        y = h W^T + c,   W = E where they are tied

The embedding is a layer of tokens, A and B^T side by side are one layer with two biases, W is one of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import nn

from dualstore.schema import Layer, Place, StoreInfo
from dualstore.steps import DEFAULTS
from dualstore.writer import StoreWriter

TOKENS, WIDTH, BATCH = 11, 4, 6
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
    "SGD, all": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.8, "weight_decay": 0.02, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.005, "momentum": 0.8}),
}


class Language(nn.Module):
    """See the module."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(TOKENS, WIDTH, dtype=torch.float64)
        self.a, self.b = (nn.Parameter(0.5 * torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(2))
        self.b_1, self.b_2 = (nn.Parameter(torch.randn(WIDTH, dtype=torch.float64)) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, dtype=torch.float64)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, pairs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and outputs of each layer for pairs of tokens, (n, 2); the embedding has two rows for each."""
        embedded = self.emb(pairs)
        joint = embedded.flatten(1)
        mixed = joint[:, :WIDTH] @ self.a.T + joint[:, WIDTH:] @ self.b + (self.b_1 + self.b_2)
        hidden = torch.tanh(mixed)
        return [(pairs.flatten(), embedded), (joint, mixed), (hidden, self.head(hidden))]


@dataclass
class Told:
    """What a training did: all rows of each layer, and the parameters before it and after each step."""

    rows: list[dict[str, ndarray]]
    kept: list[dict[str, ndarray]]


def layers_of(*, tied: bool, errors: bool = True, dense: bool = False) -> tuple[Layer, ...]:
    """The layers of the model; `errors` of the embedding, and `dense` for its keys as vectors."""
    shape = (TOKENS, WIDTH)
    table = (Place("emb.weight", transposed=True, shape=shape),)
    mix = (Place("a", shape=(WIDTH, WIDTH)), Place("b", transposed=True, shape=(WIDTH, WIDTH)))
    head = (Place("emb.weight" if tied else "head.weight"),)
    return (
        Layer(0, "emb", "Embedding", TOKENS, WIDTH, False, 0, -1, keys="vector" if dense else "token", errors=errors, weight=table),
        Layer(1, "mix", "LSTM", 2 * WIDTH, WIDTH, True, 0, 0, weight=mix, biases=(Place("b_1"), Place("b_2"))),
        Layer(2, "head", "Linear", WIDTH, TOKENS, True, 0, 0, weight=head),
    )


def matrices(values: dict[str, ndarray]) -> dict[str, ndarray]:
    """Weights of the layers from values of the parameters, or of their states; of several biases the mean."""
    bias = (values["b_1"] + values["b_2"]) / 2
    found = {"emb.weight": values["emb.weight"].T, "mix.weight": np.hstack([values["a"], values["b"].T]), "mix.bias": bias}
    head = values.get("head.weight", values["emb.weight"])
    return {name: np.ascontiguousarray(v) for name, v in {**found, "head.weight": head, "head.bias": values["head.bias"]}.items()}


def train(
    path: Path, name: str, *, tied: bool = True, steps: int = 30, before: int = 0, errors: bool = True, dense: bool = False
) -> Told:
    """Records a training by an optimiser of OPTIMIZERS, after `before` steps that are not recorded.

    With `dense`, the keys of the embedding are recorded as vectors.
    """
    torch.manual_seed(3)
    model = Language(tied=tied)
    make, settings = OPTIMIZERS[name]
    optimizer = make(model.parameters(), **settings)
    layers = layers_of(tied=tied, errors=errors, dense=dense)
    for step in range(before):
        _backward(model, step)
        optimizer.step()
    path.mkdir(parents=True, exist_ok=True)
    writer = StoreWriter(path, StoreInfo(layers, "float64", make.__name__, True, tasks=("even", "odd")))
    states = {key: {n: optimizer.state[p][key].numpy() for n, p in model.named_parameters()} for key in _arrays(optimizer)}
    first = matrices(_values(model))
    for key, found in states.items():
        first |= {f"{layer}.{key}": values for layer, values in matrices(found).items()}
    taken = np.array([float(before)])
    writer.write_weights("initial", first | ({f"{n}.step": taken for n in matrices(_values(model))} if before else {}))
    told = Told([_nothing(layer) for layer in layers], [_values(model)])
    for step in range(before, before + steps):
        found = _backward(model, step)
        scalars = _scalars(step)
        for layer, (x, e) in zip(layers, found, strict=True):
            mine = {key: values if layer.number == 0 else values[::2] for key, values in scalars.items()}
            writer.add_patterns(layer, mine, _stored(layer, x), e if layer.errors else None)
            _tell(told.rows[layer.number], {"step": np.full(len(x), step - before), **mine, "x": x, "e": e})
        optimizer.step()
        writer.end_step([_group(optimizer)])
        if step % 12 == 11:
            writer.flush()
        told.kept.append(_values(model))
    writer.write_weights("final", matrices(_values(model)))
    _probe(model, writer, layers, steps)
    writer.close()
    writer.save_info(status="complete")
    return told


def _backward(model: Language, step: int) -> list[tuple[ndarray, ndarray]]:
    """Keys and errors of each layer at a step, whose gradients are the parameters' then."""
    random = torch.Generator().manual_seed(step)
    pairs = torch.randint(0, TOKENS - 2, (BATCH, 2), generator=random)  # the last two tokens never come
    model.zero_grad()
    found = model(pairs)
    for _, y in found:
        y.retain_grad()
    nn.functional.cross_entropy(found[-1][1], pairs.sum(1) % TOKENS).backward()
    return [(_key(x), y.grad.reshape(-1, y.shape[-1]).numpy().copy()) for x, y in found if y.grad is not None]


def _key(x: torch.Tensor) -> ndarray:
    found = x.detach().numpy()
    return found.astype(np.int32) if found.ndim == 1 else np.ascontiguousarray(found)


def _probe(model: Language, writer: StoreWriter, layers: tuple[Layer, ...], steps: int) -> None:
    pairs = torch.tensor([[n, (3 * n) % TOKENS] for n in range(TOKENS)])
    found = model(pairs)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(found[-1][1], pairs[:, 0], reduction="sum"), [y for _, y in found])
    for layer, (x, y), g in zip(layers, found, gradients, strict=True):
        y, g = (v.detach().reshape(-1, layer.d_out).numpy().copy() for v in (y, g))
        each = len(y) // len(pairs)
        whole = np.full(len(y), steps, np.int32)
        rows = {"test_id": np.repeat(np.arange(TOKENS), each), "position": np.tile(np.arange(each, dtype=np.int32), TOKENS)}
        rows |= {"step": whole, "label": np.repeat(pairs[:, 0].numpy() % 3, each).astype(np.int32), "task": 0 * whole}
        rows |= {"predicted": np.repeat(found[-1][1].detach().numpy().argmax(1) % 3, each).astype(np.int32)}
        writer.write_probes(layer, rows, _stored(layer, _key(x)), y, g)


def _stored(layer: Layer, x: ndarray) -> ndarray:
    return np.eye(layer.d_in)[x] if x.ndim == 1 and layer.keys == "vector" else x


def _scalars(step: int) -> dict[str, ndarray]:
    """Of the embedding's rows: two for each sample."""
    sample = np.repeat((np.arange(BATCH) * 5 + step * 7) % 40, 2)
    position = np.tile(np.arange(2, dtype=np.int32), BATCH)
    task = np.full(2 * BATCH, step % 2, np.int32)
    return {"sample_id": sample, "position": position, "label": (sample % 3).astype(np.int32), "task": task}


def _group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    now, adam = optimizer.param_groups[0], isinstance(optimizer, torch.optim.AdamW)
    betas = now.get("betas", (0.0, now.get("alpha", 0.0)))
    values = {name: now.get(name, 0.0) for name in ("lr", "momentum", "dampening", "eps")}
    flags = {name: bool(now.get(name, False)) for name in ("nesterov", "maximize", "amsgrad", "centered")}
    other = {"clip": 1.0, "batch_size": BATCH, "loss": 0.5, "idle": [], "idle_bias": [], "group": 0, "epoch": 0}
    own = {"decay": now["weight_decay"], "beta1": betas[0], "beta2": betas[1], "decoupled": adam}
    return {**DEFAULTS, **values, **flags, **other, **own}


def _values(model: nn.Module) -> dict[str, ndarray]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def _arrays(optimizer: torch.optim.Optimizer) -> list[str]:
    states = list(optimizer.state.values())
    return [name for name, value in states[0].items() if torch.is_tensor(value) and value.ndim] if states else []


def _nothing(layer: Layer) -> dict[str, ndarray]:
    x = np.zeros(0, np.int32) if layer.kind == "Embedding" else np.zeros((0, layer.d_in))
    none = {name: np.zeros(0, np.int64) for name in ("step", "sample_id", "position", "label", "task")}
    return {**none, "x": x, "e": np.zeros((0, layer.d_out))}


def _tell(rows: dict[str, ndarray], more: dict[str, ndarray]) -> None:
    rows.update({name: np.concatenate([rows[name], values]) for name, values in more.items()})

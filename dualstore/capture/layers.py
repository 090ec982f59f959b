"""Which layers of a model are recorded, and what trains without being recorded."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from dualstore.schema import Layer

__all__ = ["Found", "find_layers"]


@dataclass(frozen=True)
class Found:
    """The recorded layers with the modules that feed them, and the names of parameters that train unrecorded."""

    layers: tuple[Layer, ...]
    modules: dict[int, list[nn.Linear]]
    """Layer number to its modules: several where modules share one weight."""
    unrecorded: tuple[str, ...]


def find_layers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Found:
    """Every nn.Linear of `model` whose weight the optimiser trains, in the order of `named_modules`."""
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"] if p.requires_grad}
    layers: list[Layer] = []
    modules: dict[int, list[nn.Linear]] = {}
    numbers: dict[int, int] = {}
    recorded: set[int] = set()
    for name, module in _linears(model):
        if id(module.weight) in numbers:  # a weight shared by two modules is one layer
            modules[numbers[id(module.weight)]].append(module)
            continue
        if id(module.weight) not in groups:
            continue
        number = numbers[id(module.weight)] = len(layers)
        modules[number] = [module]
        layers.append(_layer(number, name, module, groups))
        recorded |= {id(module.weight), id(module.bias)}
    names = {id(p): name for name, p in model.named_parameters()}
    unrecorded = [names.get(p, "a parameter outside the model") for p in groups if p not in recorded]
    seen = {id(module) for some in modules.values() for module in some}
    for name, module in model.named_modules():  # what else uses a recorded weight, an embedding tied to the last layer say
        if id(module) not in seen:
            unrecorded += [f"{name}.{key}" for key, p in module._parameters.items() if id(p) in recorded and p is not None]
    return Found(tuple(layers), modules, tuple(unrecorded))


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    # MultiheadAttention multiplies by its projections' weights itself; hooks on them never fire.
    inside = {id(m) for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules()}
    return [(name, m) for name, m in model.named_modules() if _is_plain_linear(m) and id(m) not in inside]


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes x W^T + b with W itself a parameter."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not parametrize.is_parametrized(module)
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and not isinstance(module.weight, UninitializedParameter)
    )


def _layer(number: int, name: str, module: nn.Linear, groups: dict[int, int]) -> Layer:
    bias: Any = module.bias
    return Layer(
        number=number,
        name=name or "model",
        kind="Linear",
        d_in=module.in_features,
        d_out=module.out_features,
        bias=bias is not None,
        weight_group=groups[id(module.weight)],
        bias_group=-1 if bias is None else groups.get(id(bias), -1),
    )

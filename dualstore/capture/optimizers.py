"""What an optimiser's step is recorded as: its settings, whether it took place, and what it left."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualstore.capture.gradients import Matrix, Sample
from dualstore.capture.layers import Recorded

__all__ = ["Mark", "is_exact", "named", "settings_of", "skipped", "state_of"]

_EXACT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


def is_exact(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether the optimisers' coefficients are known: all must be of one class."""
    return len({type(one) for one in optimizers}) == 1 and type(optimizers[0]) in _EXACT


def named(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """The optimisers' classes, each once."""
    return "+".join(dict.fromkeys(type(one).__name__ for one in optimizers))


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of `steps/` that the optimiser's parameter group sets."""
    betas = group.get("betas", (0.0, group.get("alpha", 0.0)))
    return {
        "lr": float(group.get("lr", float("nan"))),
        "momentum": float(group.get("momentum", 0.0)),
        "dampening": float(group.get("dampening", 0.0)),
        "decay": float(group.get("weight_decay", 0.0)),
        "beta1": float(betas[0]),
        "beta2": float(betas[1]),
        "eps": float(group.get("eps", 0.0)),
        "lr_decay": float(group.get("lr_decay", 0.0)),
        "amsgrad": bool(group.get("amsgrad", False)),
        "centered": bool(group.get("centered", False)),
        "decoupled": bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))),
        "nesterov": bool(group.get("nesterov", False)),
        "maximize": bool(group.get("maximize", False)),
    }


def skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimiser passed the step over because GradScaler found infinity: such a step does not exist."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def state_of(optimizers: Sequence[torch.optim.Optimizer], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the optimisers know of a parameter, by name."""
    states = [one.state[parameter] for one in optimizers if parameter in one.state]
    return {
        name: torch.as_tensor(value)
        for state in states
        for name, value in sorted(state.items())
        if isinstance(value, torch.Tensor | int | float)
    }


class Mark:
    """Some elements of the recorded weights and of the optimiser's state of them: what a checkpoint is recognised by."""

    def __init__(self, recorded: Sequence[Recorded], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.weights_by_layer = [one.weights[0].sample(one.weights[0].parameter) for one in recorded]
        biases = [matrix for one in recorded for matrix in one.watched[1:]]
        self._biases = [matrix.sample(matrix.parameter) for matrix in biases]
        watched = [matrix for one in recorded for matrix in one.watched]
        self._states = [sample for matrix in watched for sample in _samples_of_state(optimizers, matrix)]

    @property
    def weights_crc(self) -> int:
        """Of the elements of the weights."""
        return _crc([*self.weights_by_layer, *self._biases])

    @property
    def state_crc(self) -> int:
        """Of the elements of the state."""
        return _crc(self._states)


def _samples_of_state(optimizers: Sequence[torch.optim.Optimizer], matrix: Matrix) -> Iterator[Sample]:
    for value in state_of(optimizers, matrix.parameter).values():
        yield matrix.sample(value)


def _crc(samples: Sequence[Sample]) -> int:
    found = 0
    for sample in samples:
        plain = sample if isinstance(sample, np.ndarray) else _plain(sample)
        found = zlib.crc32(plain.tobytes(), found)
    return found


def _plain(sample: torch.Tensor) -> NDArray[Any]:
    """As numpy has it: the same bytes wherever the model is."""
    found: NDArray[Any] = (sample.float() if sample.dtype in (torch.bfloat16, torch.float16) else sample).cpu().numpy()
    return found

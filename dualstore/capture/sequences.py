"""One call of an LSTM or GRU while its layers are recorded: when its rows can be had, and whose they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.rnn import PackedSequence

from dualstore.capture.layers import Recorded
from dualstore.capture.names import AnyClaim, Names
from dualstore.capture.probe import Probe
from dualstore.capture.recurrent import Recurrent, Rerun, places_of
from dualstore.schema import Layer

__all__ = ["SequenceCall"]


@dataclass(frozen=True)
class SequenceCall:
    """What went in; the run that gives the rows is made when errors arrive, with the weights of then.

    Autograd sees to it that input and weights are still those of the call, or ends with an error of its own.
    """

    module: Recurrent
    recorded: dict[int, Recorded]
    """By number of the map inside the module."""
    x: torch.Tensor | PackedSequence
    state: Any
    outputs: tuple[torch.Tensor, ...]
    """The output's data and the final states."""

    @classmethod
    def of(cls, module: Recurrent, recorded: dict[int, Recorded], args: Any, kwargs: Any, output: Any) -> "SequenceCall":
        """The call that a forward hook sees."""
        given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        sequence, final = output
        data = sequence.data if isinstance(sequence, PackedSequence) else sequence
        return cls(
            module, recorded, given["input"], given.get("hx"), (data, *((final,) if isinstance(final, torch.Tensor) else final))
        )

    @property
    def layers(self) -> list[Layer]:
        """The recorded layers."""
        return [one.layer for one in self.recorded.values()]

    @property
    def rows(self) -> int:
        """Patterns of each layer."""
        return self.outputs[0].shape[:-1].numel()

    def on_error(self, then: Callable[[Rerun, list[torch.Tensor]], None]) -> None:
        """Calls `then` with the run and the errors of all maps whenever a backward pass has brought gradients."""
        there = [place for place, tensor in enumerate(self.outputs) if tensor.requires_grad]
        if there:
            waiting = _Waiting(self.module, self.x, self.state, there, len(self.outputs), then)
            register_multi_grad_hook([self.outputs[place] for place in there], waiting)

    def probe(self, probe: Probe) -> None:
        """Shows a probe the keys, the outputs and, where it wants them, the gradients."""
        run = Rerun(self.module, self.x, self.state, differentiable=probe.wants_gradients)
        keys, outputs = run.keys(), run.outputs()
        rows = [(keys[place], outputs[place]) for place in self.recorded]
        seen, places = probe.see_rows(self.layers, self.claims(probe.names), rows), list(self.recorded)
        if probe.wants_gradients:
            self.on_error(lambda run, errors: seen.take([errors[place] for place in places]))

    def claims(self, names: Names) -> list[AnyClaim]:
        """Whose the rows are, for each layer."""
        if isinstance(self.x, PackedSequence):
            samples, positions, _ = (part.cpu().numpy() for part in places_of(self.x))
            count = int(self.x.batch_sizes[0])
            return [names.claim_scattered(layer.number, layer.name, samples, positions, count) for layer in self.layers]
        if self.x.ndim == 2:
            leading = (1, self.x.shape[0])
        else:
            leading = (self.x.shape[0], self.x.shape[1]) if self.module.batch_first else (self.x.shape[1], self.x.shape[0])
        return [names.claim(layer.number, layer.name, leading) for layer in self.layers]


class _Waiting:
    """What a hook holds until gradients arrive: not the outputs, which hold the hook."""

    def __init__(
        self,
        module: Recurrent,
        x: torch.Tensor | PackedSequence,
        state: Any,
        there: Sequence[int],
        count: int,
        then: Callable[[Rerun, list[torch.Tensor]], None],
    ) -> None:
        self._module, self._x, self._state, self._there, self._count, self._then = module, x, state, there, count, then

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        given: list[torch.Tensor | None] = [None] * self._count
        for place, gradient in zip(self._there, gradients, strict=True):
            given[place] = gradient
        run = Rerun(self._module, self._x, self._state)
        self._then(run, run.errors(given[0], given[1:]))

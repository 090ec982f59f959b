"""One call of an LSTM or GRU while its layers are recorded: when its rows can be had, and whose they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.rnn import PackedSequence

from dualstore.capture.layers import Recorded
from dualstore.capture.names import AnyClaim, Names
from dualstore.capture.probe import Probe
from dualstore.capture.recurrent import Recurrent, Rerun, keys_at_hand, places_of
from dualstore.capture.taps import Rows
from dualstore.schema import Layer

__all__ = ["Arrived", "SequenceCall"]


@dataclass(frozen=True)
class SequenceCall:
    """What went in; the rows are computed when errors arrive, with the weights of then.

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

    def on_error(self, then: "Callable[[Arrived], None]") -> None:
        """Calls `then` with what has arrived whenever a backward pass has brought gradients."""
        there = [place for place, tensor in enumerate(self.outputs) if tensor.requires_grad]
        if there:
            output = self.outputs[0].detach()  # not the output itself, which holds the hook
            arrived = partial(Arrived, self.module, list(self.recorded), self.x, self.state, output, output._version)
            hook = partial(_hand_on, arrived, there, len(self.outputs), then)
            register_multi_grad_hook([self.outputs[place] for place in there], hook)

    def probe(self, probe: Probe) -> None:
        """Shows a probe the keys, the outputs and, where it wants them, the gradients."""
        run = Rerun(self.module, self.x, self.state, differentiable=probe.wants_gradients)
        keys, outputs = run.keys(), run.outputs()
        rows = [(keys[place], outputs[place]) for place in self.recorded]
        seen = probe.see_rows(self.layers, self.claims(probe.names), rows)
        if probe.wants_gradients:
            self.on_error(lambda arrived: seen.take([e for _, e in arrived.rows(errors=True)]))

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


@dataclass(frozen=True)
class Arrived:
    """A call whose gradients have arrived."""

    module: Recurrent
    places: Sequence[int]
    """Numbers of the recorded maps."""
    x: torch.Tensor | PackedSequence
    state: Any
    output: torch.Tensor
    version: int
    """Of the output as the module gave it."""
    gradients: Sequence[torch.Tensor | None]
    """Of the output and of each final state."""

    def rows(self, *, errors: bool) -> list[Rows]:
        """Keys and errors of the recorded maps; without `errors`, of no width, nothing is run again where the keys are at hand."""
        unchanged = self.output._version == self.version
        keys = keys_at_hand(self.module, self.x, self.state, self.output) if unchanged else None
        if keys is not None and not errors:
            return [(keys[place], keys[place].new_empty(len(keys[place]), 0)) for place in self.places]
        run = Rerun(self.module, self.x, self.state)
        keys, found = keys or run.keys(), run.errors(self.gradients[0], self.gradients[1:])
        return [(keys[place], found[place]) for place in self.places]


def _hand_on(
    arrived: Callable[..., Arrived],
    there: Sequence[int],
    count: int,
    then: Callable[[Arrived], None],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """What the hook does with the gradients of the outputs that are `there`."""
    given = dict(zip(there, gradients, strict=True))
    then(arrived(gradients=[given.get(place) for place in range(count)]))

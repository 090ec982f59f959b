"""Rows of nn.LSTM and nn.GRU, which are one kernel each: the recurrence is run again in steps, and gradients pulled through.

All sequences are handled as packed ones: rows by time step, of those samples that are that long.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dualstore.capture.maps import Map
from dualstore.errors import RecordError
from dualstore.schema import Place

__all__ = ["Recurrent", "Rerun", "keys_at_hand", "maps_of", "obstacle", "places_of"]

Recurrent = nn.LSTM | nn.GRU
Tensors = tuple[torch.Tensor, ...]


def maps_of(module: Recurrent) -> list[Map]:
    """The linear maps of every layer and direction, in the order of the module's parameters.

    An LSTM's multiplies [h; x], the state before the step and the input, for the gates i, f, g, o. A GRU has two, of h and of x,
    for the gates r, z, n: r scales what n gets from h, so their errors differ.
    """
    return [one for place, suffix in enumerate(_suffixes(module)) for one in _maps_at(module, place, suffix)]


def obstacle(module: Recurrent) -> str | None:
    """Why the module's rows cannot be computed, and what to do about it; None where they can."""
    names = [place.parameter for one in maps_of(module) for place in (*one.weight, *one.biases)]
    if type(module).forward not in (nn.LSTM.forward, nn.GRU.forward):
        return "its forward is not that of torch; use nn.LSTM or nn.GRU itself"
    if module.proj_size:
        return f"its states are projected (proj_size={module.proj_size}); use a proj_size of 0"
    if module.dropout and module.num_layers > 1 and module.training:
        return f"dropout={module.dropout} between its layers draws masks that nobody sees; put nn.Dropout between modules instead"
    if not all(isinstance(module._parameters.get(name), nn.Parameter) for name in names):
        return "its weights are computed from other parameters; remove the parametrization"
    return None


def keys_at_hand(
    module: Recurrent, x: torch.Tensor | PackedSequence, state: Any, output: torch.Tensor
) -> list[torch.Tensor] | None:
    """(rows, d_in) of each map, as `Rerun.keys` gives them but with the module's own states to the bit, and without running it.

    The state before a step is the output of the step before, where there is one layer in one direction. None where the
    output does not tell: several layers or directions, packed sequences, another type than that of the weights.
    """
    if isinstance(x, PackedSequence) or module.num_layers > 1 or module.bidirectional:
        return None
    if not x.dtype == output.dtype == module.weight_ih_l0.dtype:
        return None
    x, output, time = x.detach(), output.detach(), int(module.batch_first and x.ndim == 3)
    first = output.narrow(time, 0, 1)
    initial = next((part.detach().transpose(0, time) for part in _parts(state)), torch.zeros_like(first))
    before = torch.cat([initial, output.narrow(time, 0, output.shape[time] - 1)], time)
    if x.ndim == 3 and not module.batch_first:
        before, x = before.transpose(0, 1), x.transpose(0, 1)
    keys = [torch.cat([before, x], -1)] if isinstance(module, nn.LSTM) else [before, x]
    return [part.reshape(-1, part.shape[-1]) for part in keys]


class Rerun:
    """One call of a module, run again: the keys, outputs and errors of its maps, each a list in the order of `maps_of`.

    Rows are ordered by sample and then by position; padding of packed sequences has none. Gradients of parameters are left alone.

    Args:
        x: the input of the call, in any form that the module takes: batched or not, packed or not.
        state: the initial state that was given, if one was.
        weights: the parameters by name as they were in the call; by default as they are.
        differentiable: whether errors will be asked for. The steps' intermediate results are then kept, as long as this is.

    Computes in the type of the weights, with no autocast. Raises RecordError where `obstacle` has a reason.
    """

    def __init__(
        self,
        module: Recurrent,
        x: torch.Tensor | PackedSequence,
        state: Any = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        differentiable: bool = True,
    ) -> None:
        reason = obstacle(module)
        if reason is not None:
            raise RecordError(f"{type(module).__name__}: expected one whose recurrence can be run again, found that {reason}")
        self._module, self._differentiable = module, differentiable
        self._weights = {name: weight.detach() for name, weight in (weights or dict(module.named_parameters())).items()}
        self._x, packed = x, _packed(module, x)
        self._sizes: list[int] = packed.batch_sizes.tolist()
        self.samples, self.positions, self._order = places_of(packed)
        """(rows,) each: place in the batch, and time step."""
        self._inputs: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        """What entered each layer and direction, and its states before each step; (rows, width), by time."""
        self._projected: list[torch.Tensor] = []
        """What the gates of each layer and direction got of the input, and of the biases; errors are gradients of this."""
        inputs = packed.data.detach().to(self._weights["weight_ih_l0"].dtype)
        with torch.set_grad_enabled(differentiable), _no_autocast(inputs):
            self._run(inputs, self._initial(state, inputs))

    @property
    def output(self) -> torch.Tensor:
        """The module's output; its data where it is packed."""
        return self._output.detach()

    @property
    def state(self) -> Tensors:
        """The module's final states: (h,) of a GRU, (h, c) of an LSTM."""
        return tuple(part.detach() for part in self._final)

    def keys(self) -> list[torch.Tensor]:
        """(rows, d_in) of each map."""
        pairs = zip(self._before, self._inputs, strict=True)
        if isinstance(self._module, nn.LSTM):
            return [self._by_sample(torch.cat(pair, 1)) for pair in pairs]
        return [self._by_sample(part) for pair in pairs for part in pair]

    @torch.no_grad()
    def outputs(self) -> list[torch.Tensor]:
        """(rows, d_out) of each map: W x + b before any gate."""
        found = []
        for place, projected in enumerate(self._projected):
            hidden = self._hidden(place)
            found += [projected + hidden] if isinstance(self._module, nn.LSTM) else [hidden, projected]
        return [self._by_sample(part.detach()) for part in found]

    def errors(self, output: torch.Tensor | None, state: Any = None) -> list[torch.Tensor]:
        """(rows, d_out) of each map, from gradients of the output (its data where it is packed) and of the final states.

        States are given as the module returns them; any may be None. May be called again: errors of sums are sums of errors.
        """
        pairs = zip((self._output, *self._final), (output, *_parts(state)), strict=False)
        given = [(value, gradient.to(value.dtype)) for value, gradient in pairs if gradient is not None]
        found: Sequence[torch.Tensor | None] = [None] * len(self._projected)
        if given:
            values, gradients = zip(*given, strict=True)
            with _no_autocast(self._output):
                found = torch.autograd.grad(values, self._projected, gradients, retain_graph=True, allow_unused=True)
        errors = [torch.zeros_like(p) if e is None else e for p, e in zip(self._projected, found, strict=True)]
        if isinstance(self._module, nn.GRU):
            errors = [part for place, e in enumerate(errors) for part in (self._hidden_error(place, e), e)]
        return [self._by_sample(e.detach()) for e in errors]

    def _run(self, inputs: torch.Tensor, initial: Tensors) -> None:
        """Runs all layers, each in one direction or both."""
        finals, directions = [], 2 if self._module.bidirectional else 1
        for first in range(0, self._module.num_layers * directions, directions):
            outputs = []
            for place in range(first, first + directions):
                output, final = self._run_one(place, inputs, tuple(part[place] for part in initial))
                outputs.append(output)
                finals.append(final)
            inputs = torch.cat(outputs, 1)  # (rows, directions * hidden)
        self._output = _unpacked(self._module, self._x, inputs, len(self._sizes))
        self._final = tuple(self._as_returned(torch.stack(parts)) for parts in zip(*finals, strict=True))

    def _run_one(self, place: int, inputs: torch.Tensor, initial: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Output (rows, hidden) and final states (samples, hidden) of one layer in one direction."""
        suffix, lstm = _suffixes(self._module)[place], isinstance(self._module, nn.LSTM)
        weight, bias = self._weights[f"weight_hh_{suffix}"].T, self._weights.get(f"bias_hh_{suffix}")
        projected = nn.functional.linear(inputs, self._weights[f"weight_ih_{suffix}"], self._weights.get(f"bias_ih_{suffix}"))
        if lstm and bias is not None:
            projected = projected + bias
        if self._differentiable and not projected.requires_grad:
            projected.requires_grad_()
        order = range(len(self._sizes))[:: -1 if suffix.endswith("_reverse") else 1]
        steps, before, after = projected.split(self._sizes), [initial[0]] * len(order), [initial[0]] * len(order)
        states, ended = tuple(part[: self._sizes[order[0]]] for part in initial), []
        for t in order:
            states, rest = _resized(states, initial, self._sizes[t])
            ended += rest
            before[t] = states[0].detach()
            states = _lstm(steps[t], states, weight) if lstm else _gru(steps[t], states, weight, bias)
            after[t] = states[0]
        self._inputs.append(inputs.detach())
        self._before.append(torch.cat(before))
        self._projected.append(projected)
        return torch.cat(after), tuple(torch.cat(parts) for parts in zip(states, *reversed(ended), strict=True))

    def _hidden(self, place: int) -> torch.Tensor:
        """What the gates got of the states before each step: with the biases in a GRU, without them in an LSTM."""
        suffix = _suffixes(self._module)[place]
        bias = None if isinstance(self._module, nn.LSTM) else self._weights.get(f"bias_hh_{suffix}")
        return nn.functional.linear(self._before[place], self._weights[f"weight_hh_{suffix}"], bias)

    @torch.no_grad()
    def _hidden_error(self, place: int, e: torch.Tensor) -> torch.Tensor:
        """Errors of a GRU's map of h: those of its map of x, but for n scaled by r."""
        width = self._module.hidden_size
        reset = (self._projected[place] + self._hidden(place))[:, :width].sigmoid()
        return torch.cat([e[:, : 2 * width], e[:, 2 * width :] * reset], 1)

    def _initial(self, state: Any, inputs: torch.Tensor) -> Tensors:
        """(layers * directions, samples, hidden), samples in the order of the packed sequence, of h and in an LSTM of c."""
        if state is None:
            zeros = inputs.new_zeros(len(_suffixes(self._module)), self._sizes[0], self._module.hidden_size)
            return (zeros, zeros) if isinstance(self._module, nn.LSTM) else (zeros,)
        parts = [part.detach().to(inputs.dtype) for part in _parts(state)]
        if isinstance(self._x, PackedSequence) and self._x.sorted_indices is not None:
            parts = [part.index_select(1, self._x.sorted_indices) for part in parts]
        return tuple(part if part.ndim == 3 else part.unsqueeze(1) for part in parts)

    def _as_returned(self, state: torch.Tensor) -> torch.Tensor:
        """A final state with the samples in the order of the batch."""
        if not isinstance(self._x, PackedSequence):
            return state if self._x.ndim == 3 else state.squeeze(1)
        order = self._x.unsorted_indices
        return state if order is None else state.index_select(1, order)

    def _by_sample(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self._order)


def _suffixes(module: Recurrent) -> list[str]:
    """By layer and direction, as in the names of the parameters."""
    ends = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{end}" for layer in range(module.num_layers) for end in ends]


def _maps_at(module: Recurrent, place: int, suffix: str) -> list[Map]:
    directions, hidden = 2 if module.bidirectional else 1, module.hidden_size
    width = module.input_size if place < directions else directions * hidden
    of_h, of_x = Place(f"weight_hh_{suffix}"), Place(f"weight_ih_{suffix}")
    bias_h, bias_x = [(Place(f"bias_{kind}_{suffix}"),) if module.bias else () for kind in ("hh", "ih")]
    if isinstance(module, nn.LSTM):
        return [Map(suffix, hidden + width, 4 * hidden, (of_h, of_x), (*bias_x, *bias_h))]
    return [
        Map(f"hh_{suffix}", hidden, 3 * hidden, (of_h,), bias_h),
        Map(f"ih_{suffix}", width, 3 * hidden, (of_x,), bias_x),
    ]


def _lstm(projected: torch.Tensor, states: Tensors, weight: torch.Tensor) -> Tensors:
    """One step. Source: documentation of torch.nn.LSTM."""
    h, c = states
    i, f, g, o = torch.addmm(projected, h, weight).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(projected: torch.Tensor, states: Tensors, weight: torch.Tensor, bias: torch.Tensor | None) -> Tensors:
    """One step. Source: documentation of torch.nn.GRU."""
    (h,) = states
    hidden = h @ weight if bias is None else torch.addmm(bias, h, weight)
    of_x, of_h = projected.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (of_x[0] + of_h[0]).sigmoid(), (of_x[1] + of_h[1]).sigmoid()
    n = (of_x[2] + r * of_h[2]).tanh()
    return (n + z * (h - n),)


def _resized(states: Tensors, initial: Tensors, size: int) -> tuple[Tensors, list[Tensors]]:
    """States of the first `size` samples: those that begin here join with their initial ones. Then those that ended before."""
    there = states[0].shape[0]
    if size < there:
        return tuple(part[:size] for part in states), [tuple(part[size:] for part in states)]
    if size > there:
        states = tuple(torch.cat([part, first[there:size]]) for part, first in zip(states, initial, strict=True))
    return states, []


def _packed(module: Recurrent, x: torch.Tensor | PackedSequence) -> PackedSequence:
    if isinstance(x, PackedSequence):
        return x
    by_time = x.unsqueeze(1) if x.ndim == 2 else x.transpose(0, 1) if module.batch_first else x
    return PackedSequence(by_time.flatten(0, 1), torch.full((by_time.shape[0],), by_time.shape[1]))


def _unpacked(module: Recurrent, x: torch.Tensor | PackedSequence, rows: torch.Tensor, steps: int) -> torch.Tensor:
    """Rows by time in the form of the output that belongs to x."""
    if isinstance(x, PackedSequence) or x.ndim == 2:
        return rows
    by_time = rows.reshape(steps, rows.shape[0] // steps, rows.shape[1])
    return by_time.transpose(0, 1) if module.batch_first else by_time


def places_of(packed: PackedSequence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample and position of each row, ordered by them, and the order that makes it so."""
    sizes = packed.batch_sizes
    positions = torch.arange(len(sizes)).repeat_interleave(sizes)
    slots = torch.arange(len(positions)) - (sizes.cumsum(0) - sizes)[positions]
    if packed.sorted_indices is not None:
        slots = packed.sorted_indices.cpu()[slots]
    order = (slots * len(sizes) + positions).argsort()
    device = packed.data.device
    return slots[order].to(device), positions[order].to(device), order.to(device)


def _parts(state: Any) -> Iterable[Any]:
    return () if state is None else (state,) if isinstance(state, torch.Tensor) else state


def _no_autocast(like: torch.Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, enabled=False)

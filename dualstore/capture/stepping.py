"""Following optimisers: what they are about to do to the gradients, and when all of them have done it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from dualstore.capture.gradients import GradientWatch
from dualstore.capture.layers import Found, Recorded
from dualstore.capture.notes import Notes
from dualstore.capture.optimizers import Mark, settings_of, skipped
from dualstore.capture.writing import Taken
from dualstore.schema import Layer

__all__ = ["Stepper"]


class Stepper:
    """Looks at every step of some optimisers; a step of the store is one of each.

    `end` is called when all of them have taken it, `skip` with the layers of one that passed it over; `audited` tells whether to
    look closely.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Found,
        optimizers: Sequence[torch.optim.Optimizer],
        watch: GradientWatch,
        notes: Notes,
        *,
        end: Callable[[], None],
        skip: Callable[[Sequence[Layer]], None],
        audited: Callable[[], bool],
    ) -> None:
        self._model, self._found, self._optimizers, self._watch, self._notes = model, found, optimizers, watch, notes
        self._end, self._skip, self._audited = end, skip, audited
        self._taken = Taken()
        self._stepped: list[torch.optim.Optimizer] = []
        """Optimisers that have taken their part of the step under way."""
        self._known = {id(p) for one in optimizers for group in one.param_groups for p in group["params"] if p.requires_grad}
        self.left: Mark | None = None
        """Some elements of the weights as the optimisers left them, to be compared at the next step."""

    def hook(self, hooks: ExitStack) -> None:
        """Begins to look, until `hooks` are closed."""
        for optimizer in self._optimizers:
            hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
        hooks.callback(self._watch.close)

    def take(self) -> Taken | None:
        """What the optimisers that stepped were about to do; None where none has. A new step begins."""
        if not self._stepped:
            return None
        taken, self._taken, self._stepped = self._taken, Taken(), []
        still = [layer.number for layer in self._found.layers if layer.number not in taken.changes]
        taken.idle, taken.idle_bias = sorted([*taken.idle, *still]), sorted([*taken.idle_bias, *still])
        return taken

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if optimizer in self._stepped:
            self._end()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimiser
        if closure is None:
            self._look(optimizer)
            return None

        def looked() -> Any:  # after the step the optimiser may have worked in place on the gradients
            loss = closure()
            self._look(optimizer)
            return loss

        return ((args[0], looked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": looked})

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        """What an optimiser is about to do."""
        if self.left is not None:
            self._look_at_weights(self.left)
        if self._audited():
            self._look_for_others(optimizer)
        taken = self._taken
        taken.scales |= dict.fromkeys(self._groups_of(optimizer), getattr(optimizer, "grad_scale", None))
        for recorded in self._moved_by(optimizer):
            number, watched = recorded.layer.number, recorded.watched
            taken.changes[number] = [self._watch.change(matrix) for matrix in watched]
            self._watch.forget(watched)
            taken.idle += [number] if watched[0].parameter.grad is None else []
            taken.idle_bias += [number] if watched[-1].parameter.grad is None else []
        taken.groups = [settings_of(one, group) for one in self._optimizers for group in one.param_groups]

    def _groups_of(self, optimizer: torch.optim.Optimizer) -> range:
        """The numbers of its parameter groups among those of all."""
        first = sum(len(one.param_groups) for one in self._optimizers[: self._optimizers.index(optimizer)])
        return range(first, first + len(optimizer.param_groups))

    def _moved_by(self, optimizer: torch.optim.Optimizer) -> list[Recorded]:
        """The layers whose weight an optimiser trains."""
        groups = self._groups_of(optimizer)
        return [recorded for recorded in self._found.recorded if recorded.layer.weight_group in groups]

    def _look_at_weights(self, left: Mark) -> None:
        """Notes weights that something else than the optimiser has changed."""
        for recorded, was in zip(self._found.recorded, left.weights_by_layer, strict=True):
            now = recorded.weights[0].sample(recorded.weights[0].parameter)
            if isinstance(now, torch.Tensor) or isinstance(was, torch.Tensor):
                same = torch.equal(torch.as_tensor(now).nan_to_num(), torch.as_tensor(was).nan_to_num())
            else:
                same = np.array_equal(now, was, equal_nan=True)
            if not same:
                self._notes.problem(
                    f"layer {recorded.layer.name!r}: its weight was changed between steps other than by the optimiser; "
                    "its values will not be exact"
                )
        self.left = None

    def _look_for_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes parameters that have begun to train, or whose gradient stays although they no longer do."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._known:
                    name = next((n for n, p in self._model.named_parameters() if p is parameter), "a parameter outside the model")
                    self._notes.problem(f"{name} trains since the recording began and is not recorded", once=id(parameter))
        for recorded in self._found.recorded:
            parameters = [matrix.parameter for matrix in recorded.watched]
            frozen = [not p.requires_grad for p in parameters]
            if any(frozen) and not all(frozen) and any(p.grad is not None and not p.requires_grad for p in parameters):
                self._notes.problem(
                    f"layer {recorded.layer.name!r}: a parameter is frozen but keeps its gradient, which the optimiser goes on "
                    "using; its values will not be exact: set the gradient to None"
                )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if skipped(optimizer):
            layers = [recorded.layer for recorded in self._moved_by(optimizer)]
            for layer in layers:
                self._taken.forget(layer.number)
            self._skip(layers)
            return
        self._stepped.append(optimizer)
        if len(self._stepped) == len(self._optimizers):
            self._end()

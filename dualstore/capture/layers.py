"""Which layers of a model are recorded, and what trains without being recorded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from dualstore.capture import convolution, functional, recurrent
from dualstore.capture.convolution import Convolution
from dualstore.capture.gradients import Matrix
from dualstore.capture.maps import Map
from dualstore.capture.recurrent import Recurrent
from dualstore.capture.taps import ConvolutionTap, EmbeddingTap, LinearTap, Tap
from dualstore.errors import RecordError
from dualstore.schema import Layer, Place

__all__ = ["Chosen", "Found", "Recorded", "find_layers", "no_match"]

Chosen = Sequence[str | type] | None
"""Names of layers or modules, with * and ?, and types of modules; None for all that can be recorded."""

_SHOWN = 12
"""Names that a message lists."""


@dataclass(frozen=True)
class Recorded:
    """A recorded layer among the parameters of its model."""

    layer: Layer
    weights: tuple[Matrix, ...]
    biases: tuple[Matrix, ...]

    @property
    def watched(self) -> list[Matrix]:
        """What of its gradients is looked at: of the first weight, and of the first bias where that is trained."""
        return [self.weights[0], *(self.biases[:1] if self.layer.bias_group >= 0 else ())]

    def tensors(self, values_of: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[str, NDArray[Any]]:
        """Weight and bias as the layer has them, of some tensors that belong to the parameters; nothing where there is none."""
        found = {}
        weights = [(matrix, values_of(matrix.parameter)) for matrix in self.weights]
        biases = [(matrix, values_of(matrix.parameter)) for matrix in self.biases]
        for kind, some in (("weight", weights), ("bias", biases)):
            there = [_array(value if value.ndim == 0 else matrix.of(value)) for matrix, value in some if value is not None]
            if there and len(there) == len(some):
                joined = np.concatenate(there, axis=1) if there[0].ndim == 2 else np.mean(there, axis=0, dtype=there[0].dtype)
                found[kind] = np.ascontiguousarray(joined)
        return found


@dataclass(frozen=True)
class Found:
    """The recorded layers, what feeds them, and the names of parameters that train unrecorded."""

    recorded: tuple[Recorded, ...] = ()
    taps: tuple[tuple[nn.Module, Tap], ...] = ()
    """Modules whose calls give rows."""
    projections: dict[nn.Module, tuple[Recorded, ...]] = field(default_factory=dict)
    """Attention modules, which multiply by their weights themselves, and their layers."""
    recurrences: dict[Recurrent, dict[int, Recorded]] = field(default_factory=dict)
    """LSTM and GRU modules and their layers, by the number of the map inside."""
    unrecorded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Those of `unrecorded` that nobody left out on purpose, with reasons."""
    share: float = 0.0
    """Of the trained parameters that of `missing`."""
    mixed: tuple[str, ...] = ()
    """Layers whose modules share the weight but have biases of their own."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The recorded layers by number."""
        return tuple(recorded.layer for recorded in self.recorded)


@dataclass(frozen=True)
class _Draft:
    """A layer before it is known whether it is recorded."""

    name: str
    kind: str
    weights: tuple[Matrix, ...]
    biases: tuple[Matrix, ...]
    keys: Any = "vector"


def find_layers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], chosen: Chosen = None, *, errors: bool = True
) -> Found:
    """The layers of `model` that can be recorded, are chosen and trained, in the order of `named_modules`.

    Raises RecordError where a choice names nothing, or a weight has no memory.
    """
    finder = _Finder(model, optimizers, errors=errors)
    modules = [(name, module) for name, module in model.named_modules() if not finder.is_inside(module)]
    drafts = [(name, module, finder.drafts(name, module)) for name, module in modules]
    names = [draft.name for _, _, some in drafts for draft in some]
    matched: set[Any] = set()
    for name, module, some in drafts:
        mine = [draft for draft in some if chosen is None or _chooses(chosen, name, module, draft.name, matched)]
        if isinstance(module, Convolution) and mine:
            mine = some  # its groups share one weight
        finder.add(name, module, mine, some)
    for pattern in chosen or ():
        if pattern not in matched:
            _refuse(pattern, names, [name for name, _ in modules])
    return finder.found()


def _chooses(chosen: Sequence[str | type], name: str, module: nn.Module, layer: str, matched: set[Any]) -> bool:
    """Whether a layer is chosen; notes by what."""
    by = [
        one
        for one in chosen
        if (isinstance(module, one) if isinstance(one, type) else fnmatchcase(name, one) or fnmatchcase(layer, one))
    ]
    matched.update(by)
    return bool(by)


def _refuse(pattern: Any, layers: Sequence[str], modules: Sequence[str]) -> None:
    what = "is no layer that can be recorded" if pattern in modules else "matches no layer of the model that can be recorded"
    raise no_match("layers", pattern, what, layers)


def no_match(option: str, pattern: Any, what: str, names: Sequence[str]) -> RecordError:
    """The error for a choice that names nothing: with the names that are near, or those that there are."""
    shown = pattern.__name__ if isinstance(pattern, type) else repr(pattern)
    near = get_close_matches(pattern, names, 3, 0.5) if isinstance(pattern, str) else []
    known = ", ".join(near or names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN and not near else "")
    return RecordError(f"{option}: {shown} {what}; " + (f"near are {known}" if near else f"there are {known or 'none'}"))


class _Finder:
    """Goes through the modules of a model."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, errors: bool) -> None:
        self._model, self._errors = model, errors
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._trained = {id(p): p for group in groups for p in group["params"] if p.requires_grad}
        self._groups = {id(p): index for index, group in enumerate(groups) for p in group["params"] if p.requires_grad}
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._inside = {id(m) for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules() if m is not a}
        self._recorded: list[Recorded] = []
        self._known: dict[tuple[int, Place], Recorded] = {}
        self._taps: list[tuple[nn.Module, Tap]] = []
        self._projections: dict[nn.Module, tuple[Recorded, ...]] = {}
        self._recurrences: dict[Recurrent, dict[int, Recorded]] = {}
        self._reasons: dict[int, str] = {}
        self._mixed: list[str] = []
        self._left_out: set[int] = set()
        """Parameters of layers that were not chosen."""

    def is_inside(self, module: nn.Module) -> bool:
        """Whether a module is part of nn.MultiheadAttention, which never calls it."""
        return id(module) in self._inside

    def drafts(self, name: str, module: nn.Module) -> list[_Draft]:
        """What of a module could be recorded, trained or not."""
        if isinstance(module, nn.MultiheadAttention):
            return self._of_maps(name, module, functional.maps_of(module))
        if isinstance(module, nn.LSTM | nn.GRU):
            reason = recurrent.obstacle(module)
            if reason is None:
                return self._of_maps(name, module, recurrent.maps_of(module))
            self._reasons |= {id(p): f" ({reason})" for p in module.parameters()}
        if isinstance(module, Convolution) and _is_plain(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return self._of_maps(name, module, convolution.maps_of(module))
        if _is_plain(module, (nn.Embedding,)):
            return [replace(self._plain(name, module, transposed=True), keys="token")]
        if _is_plain(module, (nn.Linear,)) or _is_conv1d(module):
            return [self._plain(name, module, transposed=_is_conv1d(module))]
        return []

    def _plain(self, name: str, module: Any, *, transposed: bool) -> _Draft:
        """The layer of a module that has one weight."""
        biases = () if getattr(module, "bias", None) is None else (Place("bias"),)
        return self._of_maps(name, module, [Map("", 0, 0, (Place("weight", None, transposed),), biases)])[0]

    def add(self, name: str, module: nn.Module, chosen: Sequence[_Draft], drafts: Sequence[_Draft]) -> None:
        """Takes the chosen layers of a module, as far as they are trained."""
        self._left_out |= {id(m.parameter) for draft in drafts if draft not in chosen for m in (*draft.weights, *draft.biases)}
        found = [(draft, self._take(draft)) for draft in chosen]
        taken = tuple(recorded for _, recorded in found if recorded is not None)
        layers = [recorded.layer for recorded in taken]
        if not taken:
            return
        if isinstance(module, nn.MultiheadAttention):
            self._projections[module] = taken
        elif isinstance(module, nn.LSTM | nn.GRU):
            self._recurrences[module] = {drafts.index(draft): one for draft, one in found if one is not None}
        elif isinstance(module, nn.Embedding):
            self._taps.append((module, EmbeddingTap(layers, module)))
        elif isinstance(module, Convolution):
            self._taps.append((module, ConvolutionTap(layers, module)))
        else:
            self._taps.append((module, LinearTap(layers)))

    def found(self) -> Found:
        """What was taken and what was not."""
        covered = {id(m.parameter) for recorded in self._recorded for m in (*recorded.weights, *recorded.biases)}
        rest = [p for p in self._trained if p not in covered]
        unrecorded = [self._names.get(p, "a parameter outside the model") for p in rest]
        missing = [p for p in rest if p not in self._left_out]
        named = [self._names.get(p, "a parameter outside the model") + self._reasons.get(p, "") for p in missing]
        others = list(self._other_uses(covered))
        total = sum(p.numel() for p in self._trained.values())
        share = sum(self._trained[p].numel() for p in missing) / total if total else 0.0
        found = (tuple(self._recorded), tuple(self._taps), self._projections, self._recurrences)
        return Found(*found, (*unrecorded, *others), (*named, *others), share, tuple(self._mixed))

    def _other_uses(self, covered: set[int]) -> Iterator[str]:
        """What else uses a recorded weight: a module of a kind that is not recorded, or was not chosen."""
        seen = {module for module, _ in self._taps} | set(self._projections) | set(self._recurrences)
        for name, module in self._model.named_modules():
            if module not in seen and not self.is_inside(module):
                yield from (f"{name}.{key}" for key, p in module._parameters.items() if p is not None and id(p) in covered)

    def _take(self, draft: _Draft) -> Recorded | None:
        """The layer of a draft; one for all modules that have its weight in the same way, None where it is not trained."""
        groups = {self._groups.get(id(matrix.parameter), -1) for matrix in draft.weights}
        if min(groups) < 0 or len(groups) > 1:
            return None
        weight = draft.weights[0]
        shape = [matrix.of(matrix.parameter).shape for matrix in draft.weights]
        known = self._known.get((id(weight.parameter), weight.place))
        if known is not None:
            if [id(m.parameter) for m in known.biases] != [id(m.parameter) for m in draft.biases]:
                self._mixed.append(known.layer.name)
            return known
        for matrix in (*draft.weights, *draft.biases):
            if matrix.parameter.is_meta:
                raise RecordError(f"layer {draft.name!r}: its {matrix.place.parameter} is on the meta device; give it memory first")
        layer = Layer(
            number=len(self._recorded),
            name=draft.name,
            kind=draft.kind,
            d_in=sum(columns for _, columns in shape),
            d_out=shape[0][0],
            bias=bool(draft.biases),
            weight_group=groups.pop(),
            bias_group=self._groups.get(id(draft.biases[0].parameter), -1) if draft.biases else -1,
            keys=draft.keys,
            errors=self._errors,
            weight=tuple(matrix.place for matrix in draft.weights),
            biases=tuple(matrix.place for matrix in draft.biases),
        )
        recorded = self._known[id(weight.parameter), weight.place] = Recorded(layer, draft.weights, draft.biases)
        self._recorded.append(recorded)
        return recorded

    def _matrix(self, parameter: torch.Tensor, place: Place) -> Matrix:
        name = self._names.get(id(parameter), "a parameter outside the model")
        plain = parameter.ndim == 2 and place.rows is None
        return Matrix(parameter, replace(place, parameter=name, shape=None if plain else tuple(parameter.shape)))

    def _of_maps(self, name: str, module: nn.Module, maps: Sequence[Map]) -> list[_Draft]:
        """A layer for each linear map of a module, in the model's own names."""
        found = []
        for one in maps:
            weights, biases = (
                tuple(self._matrix(module.get_parameter(place.parameter), place) for place in places)
                for places in (one.weight, one.biases)
            )
            found.append(_Draft(".".join(filter(None, (name, one.suffix))) or "model", type(module).__name__, weights, biases))
        return found


def _is_plain(module: nn.Module, kinds: tuple[type, ...]) -> bool:
    """Whether the module computes what its kind does, with a weight that is itself a parameter."""
    kind = next((kind for kind in kinds if isinstance(module, kind)), None)
    return kind is not None and type(module).forward is kind.forward and _has_weight(module)  # type: ignore[attr-defined]


def _is_conv1d(module: nn.Module) -> bool:
    """Whether the module is what transformers calls Conv1D: a linear layer whose weight is turned round."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D") and _has_weight(module)


def _has_weight(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    plain = isinstance(weight, nn.Parameter) and not isinstance(weight, UninitializedParameter) and weight.is_floating_point()
    return plain and not parametrize.is_parametrized(module)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    wide = tensor.detach().cpu()
    return (wide if wide.dtype in (torch.float32, torch.float64) else wide.float()).contiguous().numpy().copy()

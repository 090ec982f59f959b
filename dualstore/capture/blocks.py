"""Residual blocks, x_{l+1} = x_l + f(x_l): norms of their input, of what they add to it and of f, for each call and sample.

Norms and not the vectors: a block's input has tens of thousands of numbers, of which a stiffness index needs three.

Source: Huang et al. 2023 (arXiv 2308.09939), the Neural Stiffness Index.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dualstore.capture.layers import Chosen, no_match
from dualstore.capture.names import Names
from dualstore.errors import RecordError

__all__ = ["Block", "BlockCall", "BlockWatch", "Norms", "find_blocks"]


@dataclass(frozen=True, eq=False)
class Block:
    """A residual block of the model."""

    number: int
    """Among those that are recorded, in the order of `named_modules`."""
    name: str
    module: nn.Module
    branch: nn.Module | None
    """The module inside that computes f; None where what the block adds is taken for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Norms:
    """What one call of a block did to each sample: Euclidean norms over all other dimensions, (n,) each."""

    norm: torch.Tensor
    """|x_l|"""
    change: torch.Tensor
    """|x_{l+1} - x_l|; NaN where the shapes differ."""
    increment: torch.Tensor
    """|f(x_l)|; NaN where its shape is not that of x_l, or the branch was not called."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCall:
    """One call of a block, and whose rows it gives."""

    number: int
    names: Names
    norms: Norms

    @classmethod
    def of(cls, block: Block, norms: Norms, names: Names, *, probed: bool) -> "BlockCall":
        """Raises RecordError where there is not one sample for each id, or a test example has no id of its own."""
        if len(norms.norm) != len(names.ids):
            raise RecordError(
                f"block {block.name!r}: expected an input of {len(names.ids)} samples, one for each id of {names.where}, "
                f"found {len(norms.norm)}; give one id for each row of the batch"
            )
        if probed and (names.ids < 0).any():
            raise RecordError(f"{names.where}: with blocks= expected test ids of 0 or more, found {names.ids.min()}")
        return cls(block.number, names, norms)

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        return 3 * self.norms.norm.nbytes

    def columns(self, step: int, *, probed: bool) -> dict[str, NDArray[Any]]:
        """Columns as in BLOCK_COLUMNS; the ids are those of test examples where these were `probed`."""
        names = self.names
        count = len(names.ids)
        nobody, first = np.full(count, -1), names.first_slot
        return {
            "step": np.full(count, step, np.int32),
            "block": np.full(count, self.number, np.int32),
            "sample_id": nobody if probed else names.ids,
            "test_id": names.ids if probed else nobody,
            "slot": np.zeros(count, np.int32) if probed else np.arange(first, first + count, dtype=np.int32),
            "label": names.labels.reshape(count, -1)[:, 0] if count else names.labels.reshape(-1),
            "task": names.tasks,
            **{name: _wide(getattr(self.norms, name)) for name in ("norm", "change", "increment")},
        }


def find_blocks(model: nn.Module, chosen: Chosen, branch: str | None) -> tuple[Block, ...]:
    """The modules of `model` that are `chosen` by name or type, in the order of `named_modules`.

    Raises RecordError where a choice names nothing or a block has no submodule `branch`.
    """
    modules = [(name, module) for name, module in model.named_modules() if name]
    for pattern in chosen or ():
        if not any(_is_chosen([pattern], name, module) for name, module in modules):
            raise no_match("blocks", pattern, "matches no module of the model", [name for name, _ in modules])
    found = [(name, module) for name, module in modules if _is_chosen(chosen or (), name, module)]
    return tuple(Block(number, name, module, _branch_of(name, module, branch)) for number, (name, module) in enumerate(found))


def _is_chosen(chosen: Sequence[str | type], name: str, module: nn.Module) -> bool:
    return any(isinstance(module, one) if isinstance(one, type) else fnmatchcase(name, one) for one in chosen)


def _branch_of(name: str, module: nn.Module, branch: str | None) -> nn.Module | None:
    if branch is None:
        return None
    try:
        return module.get_submodule(branch)
    except AttributeError as error:
        known = ", ".join(child for child, _ in module.named_children()) or "none"
        raise RecordError(
            f"block {name!r}: expected a submodule {branch!r}, its branch, found {known}; "
            "give blocks= and branch= as the model names them"
        ) from error


@dataclass(slots=True, eq=False)
class _Open:
    """A call under way."""

    x: torch.Tensor
    norm: torch.Tensor
    increment: torch.Tensor | None = None


class BlockWatch:
    """Measures the calls of some blocks, while that is `wanted`, and tells `see` of each: block, norms and output."""

    def __init__(
        self, blocks: Sequence[Block], *, wanted: Callable[[], bool], see: Callable[[Block, Norms, torch.Tensor], None]
    ) -> None:
        self._blocks, self._wanted, self._see = blocks, wanted, see
        self._open: dict[int, _Open] = {}
        """By number; a call that ends with an error stays until the next one."""

    def hook(self, hooks: ExitStack) -> None:
        """Begins to look, until `hooks` are closed."""
        for block in self._blocks:
            hooks.callback(block.module.register_forward_pre_hook(partial(self._begin, block), with_kwargs=True).remove)
            hooks.callback(block.module.register_forward_hook(partial(self._end, block)).remove)
            if block.branch is not None:
                hooks.callback(block.branch.register_forward_hook(partial(self._branched, block)).remove)

    def _begin(self, block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._wanted():
            self._open.pop(block.number, None)
            return
        x = _tensor(block, "input", args[0] if args else next(iter(kwargs.values()), None))
        with torch.no_grad():
            # A copy: the block may work on its input in place.
            self._open[block.number] = _Open(x.detach().clone(), _norms(x.detach()))

    def _branched(self, block: Block, module: nn.Module, args: Any, output: Any) -> None:
        call = self._open.get(block.number)
        if call is not None:
            f = _tensor(block, "branch's output", _first(output))
            with torch.no_grad():  # now, for the block may add to it in place
                call.increment = _norms(f.detach()) if f.shape == call.x.shape else None

    def _end(self, block: Block, module: nn.Module, args: Any, output: Any) -> None:
        call = self._open.pop(block.number, None)
        if call is None:
            return
        y = _tensor(block, "output", _first(output))
        with torch.no_grad():
            unknown = torch.full_like(call.norm, float("nan"))
            change = _norms(y.detach() - call.x) if y.shape == call.x.shape else unknown
        increment = change if block.branch is None else unknown if call.increment is None else call.increment
        self._see(block, Norms(call.norm, change, increment), y)


def _first(output: Any) -> Any:
    """Blocks of transformers give several things, the next state first."""
    return output[0] if isinstance(output, tuple | list) and output else output


def _tensor(block: Block, what: str, found: Any) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or not found.ndim or not found.is_floating_point():
        shown = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise RecordError(f"block {block.name!r}: expected its {what} to be a tensor of numbers, one row a sample, found {shown}; "
                          "choose blocks= that take and give the state of each sample")  # fmt: skip
    return found


def _norms(values: torch.Tensor) -> torch.Tensor:
    """The norm of each sample, (n,); of half precision in single, whose range its squares need."""
    flat = values.flatten(1) if values.ndim > 1 else values.unsqueeze(1)  # (n, numbers of a sample)
    half = values.dtype in (torch.float16, torch.bfloat16)
    found: torch.Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float32 if half else None)
    return found


def _wide(norms: torch.Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = norms.cpu().to(torch.float64).numpy()
    return found

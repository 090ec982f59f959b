"""Keys and errors of convolutions: a linear map for each group, applied at every place of the output."""

from typing import Any

import torch
from torch import nn

from dualstore.capture.maps import Map
from dualstore.schema import Place

__all__ = ["Convolution", "errors_of", "keys_of", "maps_of"]

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def maps_of(module: Convolution) -> list[Map]:
    """The map of each group; its matrix is that group's rows of the weight, all further dimensions flattened."""
    each, groups = module.out_channels // module.groups, module.groups
    found = []
    for group in range(groups):
        rows = None if groups == 1 else (group * each, (group + 1) * each)
        biases = () if module.bias is None else (Place("bias", rows),)
        suffix = "" if groups == 1 else f"g{group}"
        found.append(Map(suffix, module.weight.shape[1:].numel(), each, (Place("weight", rows),), biases))
    return found


def keys_of(module: Convolution, x: torch.Tensor, chosen: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What each group multiplies by its matrix: (n, places, d_in) for each group, from an input (n, C, ...) or (C, ...).

    Places are those of the output in row-major order; `chosen` (places,) takes some of them, by number, and no memory is
    spent on the others.
    """
    dims = len(module.kernel_size)
    found = []
    for windows in _windows(module, x).chunk(module.groups, 1):  # (n, c, *places, *kernel)
        if chosen is None:
            ordered = windows.movedim(1, dims + 1)  # (n, *places, c, *kernel)
        else:
            some: Any = (slice(None), slice(None), *torch.unravel_index(chosen, windows.shape[2 : dims + 2]))
            ordered = windows[some].transpose(1, 2)  # (n, places, c, *kernel)
        leading = ordered.shape[1 : -dims - 1]
        found.append(ordered.reshape(len(windows), leading.numel(), ordered.shape[-dims - 1 :].numel()))
    return found


def errors_of(module: Convolution, e: torch.Tensor, chosen: torch.Tensor | None = None) -> list[torch.Tensor]:
    """(n, places, d_out) for each group, from the gradient (n, C, ...) or (C, ...) of the output; views of it.

    An output instead of a gradient gives what the map of the group gives at each place.
    """
    flat = _batched(module, e.detach()).flatten(2)  # (n, C, places)
    some = flat if chosen is None else flat.index_select(2, chosen)
    return [group.transpose(1, 2) for group in some.chunk(module.groups, 1)]


def _batched(module: Convolution, x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(0) if x.ndim == len(module.kernel_size) + 1 else x


def _windows(module: Convolution, x: torch.Tensor) -> torch.Tensor:
    """(n, C, *places, *kernel): what the kernel covers at each place; a view of the padded input."""
    windows = _padded(module, _batched(module, x.detach()))
    for dim, (size, stride, dilation) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
        windows = windows.unfold(dim + 2, (size - 1) * dilation + 1, stride)[..., ::dilation]
    return windows


def _padded(module: Convolution, x: torch.Tensor) -> torch.Tensor:
    sides = [side for pair in reversed(_padding(module)) for side in pair]  # the last dimension comes first
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return nn.functional.pad(x, sides, mode) if any(sides) else x


def _padding(module: Convolution) -> list[tuple[int, int]]:
    """What is added before and after each dimension."""
    if not isinstance(module.padding, str):
        return [(size, size) for size in module.padding]
    if module.padding == "valid":
        return [(0, 0) for _ in module.kernel_size]
    # The same size as the input; where the kernel is even, one more behind.
    totals = [dilation * (size - 1) for size, dilation in zip(module.kernel_size, module.dilation, strict=True)]
    return [(total // 2, total - total // 2) for total in totals]

"""Hooks and torch.compile: what was compiled before a hook was put on would never call it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["forget_compiled", "outside"]

Hook = TypeVar("Hook", bound=Callable[..., Any])


def forget_compiled() -> None:
    """Has everything compiled anew when it is called next, with the hooks that are there then.

    torch.compile takes for granted that a module's hooks stay as they are; which functions use a model it does not say. So all of
    them are compiled again.
    """
    torch.compiler.reset()


def outside(hook: Hook) -> Hook:
    """The hook as one that is called as it is, between compiled pieces; with `fullgraph=True` torch's error says why not."""
    kept: Hook = torch.compiler.disable(hook, reason="dualstore records what passes here; compile without fullgraph=True")
    return kept

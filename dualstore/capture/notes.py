"""What is noticed while recording: problems that make values inexact, and notices that are only said."""

import warnings
from collections import deque
from typing import Any

from dualstore.errors import DualstoreWarning

__all__ = ["Notes", "warn"]


class Notes:
    """Problems, which the store keeps, and notices; said on the training thread, whoever notices them."""

    def __init__(self, problems: tuple[str, ...] = ()) -> None:
        self.problems = list(problems)
        self._noted: set[Any] = set(problems)
        self._unsaid: deque[str] = deque()

    def problem(self, text: str, once: Any = None) -> None:
        """Notes a problem, one for each `once`, by default one for each text."""
        key = text if once is None else once
        if key not in self._noted:
            self._noted.add(key)
            self.problems.append(text)
            self._unsaid.append(text)

    def notice(self, text: str) -> None:
        """Notes something that is no problem."""
        self._unsaid.append(text)

    def say(self) -> None:
        """Warns of what was noticed since it was called last."""
        while self._unsaid:
            warn(self._unsaid.popleft())


def warn(text: str) -> None:
    """Warns the user."""
    warnings.warn(text, DualstoreWarning, stacklevel=3)

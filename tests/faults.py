"""Faults that tests bring about: disks that refuse to write."""

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest


class FullDisk:
    """A disk that is full at some writes: stands for `os.pwrite`, counts the calls and fails those it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
        self.calls = 0
        self._write, self._fails = os.pwrite, fails
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, *arguments: Any) -> int:
        self.calls += 1
        if self._fails(self.calls):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(*arguments)

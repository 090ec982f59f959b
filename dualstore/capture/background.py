"""The writer's thread: takes finished steps off the training loop's hands, within a bound of bytes."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

__all__ = ["QUEUE_BYTES", "Background", "Inline", "begin_work"]

QUEUE_BYTES = 64 << 20
"""Bound of the memory of what waits to be written, where a thread of its own writes it."""


class Inline:
    """Runs jobs at once, on the thread that brings them."""

    def put(self, job: Callable[[], None], size: int) -> None:
        """Runs the job."""
        job()

    def drain(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing waits."""

    def abandon(self) -> None:
        """Nothing waits."""


class Background:
    """Runs jobs in order on one thread. `put` waits while more than `limit_bytes` are under way.

    On that thread PyTorch works alone. Were it to call on others, there would be more OpenMP threads than cores, and those of
    training would sleep, no longer spin, between any two operations: its steps took a fifth longer (bench/writer_threads.py).

    The first job that fails ends the work: its error is raised by the next `put` or `close`, later jobs are not run.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._jobs: deque[tuple[Callable[[], None], int] | None] = deque()
        self._waiting_jobs = self._waiting_bytes = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="dualstore-writer", daemon=True)
        self._thread.start()
        cores = torch.get_num_threads()
        self.put(_work_alone, 0)
        self.drain()
        torch.set_num_threads(cores)  # for threads to come; those that are there keep numbers of their own

    def put(self, job: Callable[[], None], size: int) -> None:
        """Hands over a job that keeps `size` bytes alive; one larger than the limit waits until it is alone."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._waiting_bytes or self._waiting_bytes + size <= self._limit)
            self._raise()
            self._jobs.append((job, size))
            self._waiting_jobs += 1
            self._waiting_bytes += size
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until all jobs are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._waiting_jobs)
            self._raise()

    def close(self) -> None:
        """Waits for all jobs and ends the thread. Raises the error that a job ended with."""
        with self._changed:
            self._jobs.append(None)
            self._changed.notify_all()
        self._thread.join()
        self._raise()

    def abandon(self) -> None:
        """Ends the thread without running the jobs that wait."""
        with self._changed:
            self._error = self._error or RuntimeError("abandoned")
        with suppress(Exception):
            self.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs))
                item = self._jobs.popleft()
            if item is None:
                return
            job, size = item
            try:
                if self._error is None:
                    job()
            except Exception as error:
                self._error = error
            del job, item
            with self._changed:
                self._waiting_jobs -= 1
                self._waiting_bytes -= size
                self._changed.notify_all()


def begin_work(queue_bytes: int | None, parameters: Iterable[torch.Tensor]) -> Background | Inline:
    """What runs a recording's jobs; by default a thread where a core is free for one.

    That is where `parameters` are on an accelerator or PyTorch has fewer threads than there are cores. Otherwise all of its
    threads wait while one works for the recorder, and beside them it works at half speed (bench/language_overhead.py).
    """
    if queue_bytes is None:
        free = torch.get_num_threads() < _cores() or any(not parameter.is_cpu for parameter in parameters)
        queue_bytes = QUEUE_BYTES if free else 0
    return Background(queue_bytes) if queue_bytes else Inline()


def _cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _work_alone() -> None:
    """Has PyTorch use this thread alone for what it is asked on it."""
    torch.get_num_threads()  # what a thread asks first makes it take over the number of all
    torch.set_num_threads(1)

"""Writing large runs of bytes cheaply: through page-aligned buffers, past the page cache, on a thread of their own.

Filling the page cache costs a training loop on the CPU more than everything else that recording does
(bench/recording_overhead.py). Where a file system has no direct I/O the same buffers are written the ordinary way.
"""

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualstore.bulk import PLAIN, Bulk

__all__ = ["PAGE", "Run", "Spool", "write_all"]

PAGE = 4096
MAX_BUFFER_BYTES = 4 << 20
PIECE_BYTES = 512 << 10
"""Rows are copied in pieces that stay in a core's cache for what is done with them next."""
_SPARE = 6
"""Buffers beyond one for each run: those that are being written. Layers of one size fill theirs at the same time."""


class Spool:
    """Buffers for up to `runs` runs at once, `limit_bytes` in all, and the thread that writes full ones.

    `on_full` is called once when the disk is full and should free some space; the write is then tried again and the
    error raised by the next `append` of any run. Rows are copied by `bulk`.
    """

    def __init__(self, runs: int, limit_bytes: int, on_full: Callable[[], None], bulk: Bulk = PLAIN) -> None:
        count = runs + _SPARE
        self.buffer_bytes = max(PAGE, min(MAX_BUFFER_BYTES, limit_bytes // count // PAGE * PAGE))
        self.total_bytes = count * self.buffer_bytes
        self.error: OSError | None = None
        self.bulk = bulk
        self._left = count
        self._on_full = on_full
        self._free: list[mmap.mmap] = []
        """The last one given back is taken first: the caches still hold it."""
        self._jobs: deque[tuple[Run, mmap.mmap, int] | None] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="dualstore-spool", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread once all buffers are written."""
        with self._changed:
            self._jobs.append(None)
            self._changed.notify_all()
        self._thread.join()

    def take(self) -> mmap.mmap:
        """A buffer; waits until one is free."""
        with self._changed:
            if self._left and not self._free:
                self._left -= 1
                return mmap.mmap(-1, self.buffer_bytes)
            self._changed.wait_for(lambda: self._free)
            return self._free.pop()

    def give(self, buffer: mmap.mmap) -> None:
        """Takes a buffer back."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def submit(self, run: "Run", buffer: mmap.mmap, at: int) -> None:
        """Writes a full buffer at offset `at` of the run's file, soon."""
        with self._changed:
            run.waiting += 1
            self._jobs.append((run, buffer, at))
            self._changed.notify_all()

    def wait(self, run: "Run") -> None:
        """Waits until all submitted buffers of a run are written."""
        with self._changed:
            self._changed.wait_for(lambda: not run.waiting)

    def write(self, write: Callable[[], None]) -> None:
        """Calls `write`; when the disk is full, frees some space, tries again and remembers the error."""
        try:
            write()
        except OSError as error:
            first = self.error is None
            self.error = self.error or error
            if not first or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._on_full()
            write()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs)
                job = self._jobs.popleft()
            if job is None:
                return
            run, buffer, at = job
            try:
                self.write(lambda run=run, buffer=buffer, at=at: run.write_direct(memoryview(buffer), at))  # type: ignore[misc]
            except OSError as error:
                run.error = error
            with self._changed:
                run.waiting -= 1
                self._free.append(buffer)
                self._changed.notify_all()


class Run:
    """A run of bytes that grows from offset `at`, a multiple of PAGE, of an open file."""

    def __init__(self, spool: Spool, file: int, direct: int, at: int) -> None:
        self._spool, self._file, self._direct, self._at = spool, file, direct, at
        self._buffer: mmap.mmap | None = None
        self._start = 0
        """Bytes before the buffer's first; always whole buffers."""
        self._fill = 0
        self.waiting = 0
        self.error: OSError | None = None
        """What a buffer of this run could not be written for, even after space was freed."""

    def append(self, data: memoryview) -> None:
        """Adds bytes. Raises OSError where the disk was full at this or an earlier write of any run."""
        while data:
            buffer, room = self._room()
            size = min(len(data), room)
            buffer[self._fill : self._fill + size] = data[:size]
            self._advance(buffer, size)
            data = data[size:]

    def append_rows(self, rows: NDArray[Any], kept: NDArray[np.integer[Any]] | None = None) -> Iterator[NDArray[Any]]:
        """Adds rows (n, width), or those of them that are kept; yields each piece as soon as it is copied, as (k, width).

        A piece is a view that is valid until the next one is asked for. Raises OSError as `append` does.
        """
        done, width = 0, rows.shape[1]
        count, row_bytes = len(rows) if kept is None else len(kept), width * rows.itemsize
        while done < count:
            buffer, room = self._room()
            size = min(count - done, room // row_bytes, max(1, PIECE_BYTES // row_bytes))
            some = slice(done, done + max(1, size))
            source, chosen = (rows[some], None) if kept is None else (rows, kept[some])
            if size:
                piece = np.frombuffer(buffer, rows.dtype, size * width, self._fill).reshape(size, width)
                self._spool.bulk.copy(source, chosen, piece)
                yield piece
                self._advance(buffer, piece.nbytes)
            else:  # a row that the buffer's end parts
                piece = np.ascontiguousarray(source if chosen is None else source[chosen])
                self.append(piece.reshape(-1).data.cast("B"))
                yield piece
            done += max(1, size)

    def _room(self) -> tuple[mmap.mmap, int]:
        """The buffer that is being filled, and the bytes left in it."""
        if self._spool.error is not None:
            raise self._spool.error
        if self._buffer is None:
            self._buffer = self._spool.take()
        return self._buffer, self._spool.buffer_bytes - self._fill

    def _advance(self, buffer: mmap.mmap, size: int) -> None:
        """Counts bytes that were put into the buffer; a full one is handed on."""
        self._fill += size
        if self._fill == self._spool.buffer_bytes:
            self._spool.submit(self, buffer, self._at + self._start)
            self._buffer, self._start, self._fill = None, self._start + self._fill, 0

    def seek(self, length: int) -> None:
        """Goes back to `length` bytes; what follows is written over."""
        if length >= self._start:
            self._fill = length - self._start
            if self._buffer is not None or not self._fill:
                return
        self._spool.wait(self)
        self._start = length // self._spool.buffer_bytes * self._spool.buffer_bytes
        self._fill = length - self._start
        if self._fill:
            self._buffer = self._buffer or self._spool.take()
            os.preadv(self._file, [memoryview(self._buffer)[: self._fill]], self._at + self._start)

    def end(self) -> None:
        """Writes what is left. Raises OSError where any byte of the run could not be written."""
        self._spool.wait(self)
        if self._buffer is not None:
            rest = memoryview(self._buffer)[: self._fill]
            self._spool.write(lambda: write_all(self._file, rest, self._at + self._start))
        self.drop()
        if self.error is not None:
            raise self.error

    def drop(self) -> None:
        """Gives the buffer back without writing it."""
        self._spool.wait(self)
        if self._buffer is not None:
            self._spool.give(self._buffer)
            self._buffer = None

    def write_direct(self, data: memoryview, at: int) -> None:
        """Writes a whole buffer past the page cache where that works."""
        try:
            write_all(self._direct, data, at)
        except OSError as error:
            if error.errno != errno.EINVAL or self._direct == self._file:
                raise
            self._direct = self._file  # the file system opens files for direct I/O but does not do it
            write_all(self._file, data, at)


def write_all(file: int, data: memoryview, at: int) -> None:
    """Writes all of `data` at offset `at`."""
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done

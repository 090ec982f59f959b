"""What an answer cost: the path taken, what was read of the keys, and the time of each phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Explain"]


@dataclass
class Explain:
    """Grows while a question is answered; `to_dict` says it in plain values."""

    key_bytes: int
    """Size of one key."""
    rows: int
    """Patterns of the layer, times the passes that a scan takes."""
    index_bytes: int = 0
    rows_read: int = 0
    """Keys read from the log."""
    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def count(self, name: str, number: int) -> None:
        """Adds to a number that belongs to one path only."""
        self.counts[name] = self.counts.get(name, 0) + number

    @property
    def path(self) -> str:
        """ "scan", "index" or "index and scan"."""
        if not self.index_bytes:
            return "scan"
        return "index and scan" if self.rows_read else "index"

    def to_dict(self) -> dict[str, Any]:
        """path, counts, rows_read, bytes_read, share of the bytes that a scan reads, seconds of each phase."""
        read, whole = self.index_bytes + self.rows_read * self.key_bytes, self.rows * self.key_bytes
        seconds = {f"seconds_{name}": round(value, 6) for name, value in self.seconds.items()}
        share = read / whole if whole else 0.0
        return {"path": self.path, **self.counts, "rows_read": self.rows_read, "bytes_read": read, "share": share, **seconds}

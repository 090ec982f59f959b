"""How much a recording will write, before it does."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dualstore.capture.choice import Choice
from dualstore.capture.notes import warn
from dualstore.writer import StoreWriter

__all__ = ["Estimate"]


@dataclass(frozen=True)
class Estimate:
    """What a recording is expected to take."""

    rows_per_step: dict[str, int]
    """Patterns of each layer, of a step of one batch that is recorded whole."""
    bytes_per_step: int
    """On average over all steps."""
    total_bytes: int | None
    """Of the whole training, where its number of steps was given."""
    free_bytes: int
    """On the disk of the store."""

    @classmethod
    def of(cls, writer: StoreWriter, rows: Mapping[int, int], choices: Sequence[Choice], steps: int | None) -> "Estimate":
        """Of steps that bring `rows` patterns to each layer; says it on standard error."""
        layers = [layer for layer in writer.info.layers if layer.number in rows]
        each = sum(rows[layer.number] * writer.row_bytes(layer) * choices[layer.number].rate for layer in layers)
        total = None if steps is None else int(each * steps)
        named = {layer.name: rows[layer.number] for layer in layers}
        found = cls(named, int(each), total, shutil.disk_usage(writer.root).free)
        print(f"dualstore: {found}", file=sys.stderr)
        if total is not None and total > found.free_bytes:
            warn(f"{writer.root}: recording {steps} steps takes about {total:,} bytes, the disk has {found.free_bytes:,} left")
        return found

    def __str__(self) -> str:
        whole = "" if self.total_bytes is None else f", {_shown(self.total_bytes)} in all"
        rows = ", ".join(f"{name} {count:,}" for name, count in self.rows_per_step.items())
        return f"{_shown(self.bytes_per_step)} a step{whole}; {_shown(self.free_bytes)} free; patterns a step: {rows}"


def _shown(size: int) -> str:
    """Bytes in the largest unit that leaves a number above 1."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"

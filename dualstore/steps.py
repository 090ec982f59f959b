"""The optimiser's log: one row a step and parameter group, with what the step did to gradients and weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dualstore.errors import DamagedError

__all__ = ["STEPS_SCHEMA", "Steps"]

STEPS_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("lr", pa.float64(), nullable=False),
        pa.field("momentum", pa.float64(), nullable=False),
        pa.field("dampening", pa.float64(), nullable=False),
        pa.field("decay", pa.float64(), nullable=False),
        pa.field("nesterov", pa.bool_(), nullable=False),
        pa.field("maximize", pa.bool_(), nullable=False),
        pa.field("clip", pa.float64(), nullable=False),
        pa.field("batch_size", pa.int32(), nullable=False),
        pa.field("loss", pa.float64(), nullable=False),
        pa.field("rows", pa.list_(pa.int32()), nullable=False),
        pa.field("idle", pa.list_(pa.int32()), nullable=False),
    ]
)
"""`rows[k]` is the number of patterns of layer k in the step; `idle` lists the layers that had no gradient."""


@dataclass(frozen=True)
class Steps:
    """The rows of all `steps/` parts in step order. Held whole: a few hundred bytes a step, nothing per pattern."""

    table: pa.Table

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Steps":
        """Raises DamagedError where a part cannot be read or lacks a column."""
        tables = [STEPS_SCHEMA.empty_table()]
        for path in paths:
            try:
                tables.append(pq.read_table(path).select(STEPS_SCHEMA.names).cast(STEPS_SCHEMA))
            except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise DamagedError(f"{path}: expected the columns of a steps part, found {reason}") from error
        return cls(pa.concat_tables(tables).sort_by([("step", "ascending"), ("group", "ascending")]))

    @cached_property
    def numbers(self) -> NDArray[np.int32]:
        """The step numbers, ascending, each once."""
        return np.unique(self._column("step"))

    @cached_property
    def _first_rows(self) -> NDArray[np.int64]:
        return np.unique(self._column("step"), return_index=True)[1]

    def epoch_of(self, steps: NDArray[np.int32]) -> NDArray[np.int32]:
        """Epoch of each step number; -1 for steps that are not in the log."""
        if not len(self.numbers):
            return np.full(len(steps), -1, np.int32)
        epochs = self._column("epoch")[self._first_rows]
        at = np.minimum(np.searchsorted(self.numbers, steps), len(self.numbers) - 1)
        found: NDArray[np.int32] = np.where(self.numbers[at] == steps, epochs[at], -1).astype(np.int32)
        return found

    @cached_property
    def epochs(self) -> pa.Table:
        """step and epoch, one row a step."""
        return self.table.select(["step", "epoch"]).take(pa.array(self._first_rows))

    def group(self, group: int) -> dict[str, NDArray[Any]]:
        """Scalar columns of one parameter group, in step order. Raises DamagedError where a step lacks the group."""
        mine = self.table.filter(pa.array(self._column("group") == group))
        if not np.array_equal(_numpy(mine, "step"), self.numbers):
            raise DamagedError(f"steps: expected one row of parameter group {group} for each step, found {mine.num_rows}")
        return {name: _numpy(mine, name) for name in STEPS_SCHEMA.names if name not in ("rows", "idle")}

    def rows_per_step(self, layers: int) -> NDArray[np.int64]:
        """(steps, layers): how many patterns each step wrote to each layer."""
        lists = self.table.column("rows").take(pa.array(self._first_rows)).to_pylist()
        counts = np.zeros((len(lists), layers), np.int64)
        for row, found in zip(counts, lists, strict=True):
            row[: len(found)] = found
        return counts

    def idle(self, layer: int) -> NDArray[np.bool_]:
        """For each step number whether the layer had no gradient, so that the optimiser passed it over."""
        lists = self.table.column("idle").take(pa.array(self._first_rows)).to_pylist()
        return np.array([layer in found for found in lists], dtype=bool)

    def _column(self, name: str) -> NDArray[Any]:
        return _numpy(self.table, name)


def _numpy(table: pa.Table, name: str) -> NDArray[Any]:
    return np.asarray(table.column(name).to_numpy())

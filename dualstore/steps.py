"""The optimiser's log: one row a step and parameter group, with what the step did to gradients and weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray
from numpy.typing import NDArray

from dualstore.errors import DamagedError
from dualstore.shapes import Bool, Float64, Int32, Int64

__all__ = ["DEFAULTS", "STEPS_SCHEMA", "RankSteps", "Steps"]

STEPS_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("lr", pa.float64(), nullable=False),
        pa.field("momentum", pa.float64(), nullable=False),
        pa.field("dampening", pa.float64(), nullable=False),
        pa.field("decay", pa.float64(), nullable=False),
        pa.field("beta1", pa.float64(), nullable=False),
        pa.field("beta2", pa.float64(), nullable=False),
        pa.field("eps", pa.float64(), nullable=False),
        pa.field("lr_decay", pa.float64(), nullable=False),
        pa.field("amsgrad", pa.bool_(), nullable=False),
        pa.field("centered", pa.bool_(), nullable=False),
        pa.field("decoupled", pa.bool_(), nullable=False),
        pa.field("nesterov", pa.bool_(), nullable=False),
        pa.field("maximize", pa.bool_(), nullable=False),
        pa.field("clip", pa.float64(), nullable=False),
        pa.field("batch_size", pa.int32(), nullable=False),
        pa.field("loss", pa.float64(), nullable=False),
        pa.field("rows", pa.list_(pa.int32()), nullable=False),
        pa.field("idle", pa.list_(pa.int32()), nullable=False),
        pa.field("idle_bias", pa.list_(pa.int32()), nullable=False),
        pa.field("rates", pa.list_(pa.float64()), nullable=False),
        pa.field("weights_crc", pa.int64(), nullable=False),
        pa.field("state_crc", pa.int64(), nullable=False),
    ]
)
"""`rows[k]` is the number of patterns of layer k in the step; `idle` lists the layers whose weight had no gradient, and
`idle_bias` those whose bias had none.

`rates[k]` is the share of the patterns of layer k that was recorded, 1 where the list is empty. The checksums are of some
elements of the recorded weights, and of the optimiser's state of them, as the step left them; -1 where they are not known.

beta1, beta2 (of RMSprop: its alpha), eps, lr_decay, amsgrad, centered and decoupled (weight decay) belong to the adaptive
optimisers; 0 and false elsewhere.
"""
DEFAULTS: dict[str, Any] = {
    "beta1": 0.0,
    "beta2": 0.0,
    "eps": 0.0,
    "lr_decay": 0.0,
    "amsgrad": False,
    "centered": False,
    "decoupled": False,
    "rates": [],
    "weights_crc": -1,
    "state_crc": -1,
}
"""What columns are that say nothing: those of adaptive optimisers, which stores of format 1 lack, and those of format 3."""
_LISTS = ("rows", "idle", "idle_bias", "rates")


@dataclass(frozen=True)
class RankSteps:
    """What is particular to one of several ranks whose logs are joined."""

    last_step: int
    """The last one that it has committed, -1 for none."""
    rows: Int64[ndarray, "s layers"]
    """How many patterns it wrote to each layer in each joint step."""
    difference: str
    """Where its settings or weights are not those of rank 0, in words; "" for nowhere."""


@dataclass(frozen=True)
class Steps:
    """The rows of all `steps/` parts. Held whole: a few hundred bytes a step, nothing for each pattern."""

    table: pa.Table
    """Columns as in STEPS_SCHEMA, in the order of the parts; joined where there are several ranks."""
    ranks: tuple[RankSteps, ...] = ()
    """Of the ranks, where there are several."""

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Steps":
        """Raises DamagedError where a part cannot be read or lacks a column."""
        return cls(pa.concat_tables([STEPS_SCHEMA.empty_table(), *map(_read_part, paths)]))

    @cached_property
    def _order(self) -> Int64[ndarray, " r"]:
        """Row numbers by step and group."""
        order: ndarray = np.lexsort((_numpy(self.table, "group"), _numpy(self.table, "step")))
        return order

    @cached_property
    def _first_rows(self) -> Int64[ndarray, " s"]:
        """The first row of each step."""
        first: ndarray = self._order[np.unique(self._column("step"), return_index=True)[1]]
        return first

    @cached_property
    def numbers(self) -> Int32[ndarray, " s"]:
        """The step numbers, ascending, each once."""
        found: ndarray = _numpy(self.table, "step")[self._first_rows]
        return found

    @cached_property
    def epochs(self) -> Int32[ndarray, " s"]:
        """The epoch of each step number."""
        found: ndarray = _numpy(self.table, "epoch")[self._first_rows]
        return found

    def epoch_of(self, steps: Int32[ndarray, " n"]) -> Int32[ndarray, " n"]:
        """Epoch of each of the given steps; -1 for those that are not in the log."""
        if not len(self.numbers):
            return np.full(len(steps), -1, np.int32)
        at = np.minimum(np.searchsorted(self.numbers, steps), len(self.numbers) - 1)
        found: ndarray = np.where(self.numbers[at] == steps, self.epochs[at], np.int32(-1))
        return found

    def one_epoch(self, first: Int32[ndarray, " n"], last: Int32[ndarray, " n"]) -> Bool[ndarray, " n"]:
        """Whether all steps from `first` to `last` are in the log and of one epoch."""
        start, end = np.searchsorted(self.numbers, first), np.searchsorted(self.numbers, last, side="right")
        epochs = np.append(np.cumsum(np.diff(self.epochs, prepend=self.epochs[:1]) != 0), -1)
        found: ndarray = (end - start == last.astype(np.int64) - first + 1) & (epochs[start] == epochs[end - 1])
        return found

    def group(self, group: int) -> dict[str, NDArray[Any]]:
        """Scalar columns of one parameter group, in step order. Raises DamagedError where a step lacks the group."""
        mine = self._column("group") == group
        found = {name: self._column(name)[mine] for name in STEPS_SCHEMA.names if name not in _LISTS}
        if not np.array_equal(found["step"], self.numbers):
            raise DamagedError(f"steps: expected one row of parameter group {group} for each step, found {mine.sum()}")
        return found

    def rows_per_step(self, layers: int) -> Int64[ndarray, "s layers"]:
        """How many patterns each step wrote to each layer."""
        counts = np.zeros((len(self.numbers), layers), np.int64)
        for row, found in zip(counts, self._lists("rows"), strict=True):
            row[: len(found)] = found[:layers]
        return counts

    def rows_by_rank(self, layers: int) -> list[Int64[ndarray, "s layers"]]:
        """`rows_per_step` of each rank."""
        return [own.rows for own in self.ranks] or [self.rows_per_step(layers)]

    def idle(self, layer: int, kind: str = "weight") -> Bool[ndarray, " s"]:
        """For each step number whether the layer's weight or bias had no gradient, so that the optimiser passed it over."""
        return np.array([layer in found for found in self._lists("idle" if kind == "weight" else "idle_bias")], dtype=bool)

    @cached_property
    def sampled(self) -> bool:
        """Whether of any layer and step only a share of the patterns was recorded."""
        found = self.table.column("rates").combine_chunks()
        return bool((found.flatten().to_numpy(zero_copy_only=False) != 1).any())

    def rates(self, layer: int) -> Float64[ndarray, " s"]:
        """For each step number the share of the layer's patterns that was recorded."""
        return np.array([found[layer] if layer < len(found) else 1.0 for found in self._lists("rates")], np.float64)

    def marks(self) -> tuple[Int64[ndarray, " s"], Int64[ndarray, " s"]]:
        """For each step number the checksums of the weights and of the optimiser's state after it; -1 where not known."""
        weights, state = (_numpy(self.table, name)[self._first_rows] for name in ("weights_crc", "state_crc"))
        return weights, state

    def _lists(self, name: str) -> list[list[Any]]:
        lists = self.table.column(name).to_pylist()
        return [lists[row] for row in self._first_rows]

    def _column(self, name: str) -> NDArray[Any]:
        found: ndarray = _numpy(self.table, name)[self._order]
        return found


def _read_part(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:  # `pq.read_table` would import pyarrow.dataset first
            table = file.read()
        for name, value in DEFAULTS.items():
            if name not in table.column_names:
                field = STEPS_SCHEMA.field(name)
                table = table.append_column(field, pa.array([value] * table.num_rows, field.type))
        if "idle_bias" not in table.column_names and "idle" in table.column_names:  # format 1 had one list for both
            table = table.append_column("idle_bias", table.column("idle"))
        table = table.select(STEPS_SCHEMA.names)
        return table if table.schema.equals(STEPS_SCHEMA) else table.cast(STEPS_SCHEMA)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DamagedError(f"{path}: expected the columns of a steps part, found {reason}") from error


def _numpy(table: pa.Table, name: str) -> NDArray[Any]:
    return np.asarray(table.column(name).to_numpy())

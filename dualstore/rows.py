"""What is known of a pattern besides its vectors, as the relation that filters and groups are written against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy import ndarray

from dualstore.errors import QueryError
from dualstore.log import Group, Log, Mapping
from dualstore.schema import FORMAT
from dualstore.shapes import Bool, Int64
from dualstore.steps import Steps

__all__ = ["ROW_COLUMNS", "SHOWN_COLUMNS", "Labelling", "Select", "Selection", "Selector"]

_NAN = float("nan")
"""Stands for every NaN of a group expression: one group, not one for each run of rows."""

ROW_COLUMNS = ("step", "epoch", "sample_id", "position", "label", "task", "slot", "duplicate")
"""Columns that `where` and group expressions may use; the last two since format 3."""

SHOWN_COLUMNS = ROW_COLUMNS[:6]
"""Columns that an answer shows of each pattern."""

_STORED: dict[str, Any] = {"step": np.int32, "sample_id": np.int64, "position": np.int32, "label": np.int32, "task": np.int32}
_SINCE_3: dict[str, Any] = {"slot": np.int32, "duplicate": np.int32}


@dataclass(frozen=True)
class Labelling:
    """Turns the stored numbers into the row columns: adds the epoch, names the task."""

    steps: Steps
    tasks: tuple[str | None, ...]
    """The name of every task code; several codes may have the same, and some none."""
    format: int = FORMAT
    """Of the store."""

    @cached_property
    def _stored(self) -> dict[str, Any]:
        """The stored columns that the row columns come from, and their types."""
        return _STORED if self.format < 3 else _STORED | _SINCE_3

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of tasks, each once."""
        return tuple(dict.fromkeys(name for name in self.tasks if name is not None))

    @cached_property
    def _places(self) -> ndarray:
        """The place in `names` of every task code, and at the end -1 for those without a name."""
        place = {name: number for number, name in enumerate(self.names)}
        return np.array([*(-1 if name is None else place[name] for name in self.tasks), -1], np.int32)

    def named(self, task: ndarray) -> ndarray:
        """The place in `names` of each of some task codes; -1 for none."""
        found: ndarray = self._places[np.where((task < 0) | (task >= len(self.tasks)), -1, task)]
        return found

    def table(self, mapping: Mapping, groups: Sequence[Group]) -> pa.Table:
        """The row columns of consecutive groups; all but epoch and task are views of the file."""
        return pa.concat_tables([self.of_group(mapping, group) for group in groups])

    def take(self, log: Log, rows: Int64[ndarray, " n"]) -> pa.Table:
        """The row columns of the given row numbers, in their order."""
        columns = log.take(list(self._stored), rows)
        return self.build(**{name: columns[name] for name in self._stored})

    def of_group(self, mapping: Mapping, group: Group) -> pa.Table:
        """The row columns of one row group."""
        return self.build(**{name: mapping.array(group, name) for name in self._stored})

    def empty(self) -> pa.Table:
        """No rows."""
        return self.build(**{name: np.zeros(0, dtype) for name, dtype in self._stored.items()})

    def build(self, step: ndarray, label: ndarray, task: ndarray, **others: ndarray) -> pa.Table:
        """The row columns of stored numbers; those that are not given, because they do not matter, are 0."""
        place = self.named(task)
        names = pa.DictionaryArray.from_arrays(pa.array(place, mask=place < 0), pa.array(self.names, pa.string()))
        columns = {"step": step, "epoch": self.steps.epoch_of(step), "label": label, "task": names, **others}
        found = {name: columns.get(name) for name in ROW_COLUMNS if name in columns or name in self._stored}
        zeros = {name: np.zeros(len(step), self._stored[name]) for name, values in found.items() if values is None}
        return pa.table({name: pa.array(values) for name, values in (found | zeros).items()})


@dataclass(frozen=True)
class Selection:
    """Which rows of a run of groups take part, and to which group of the question each belongs."""

    rows: Int64[ndarray, " n"] | None
    """Ascending row numbers relative to the run's first row; None for all."""
    codes: Int64[ndarray, " n"] | None
    """Index into `Selector.values` for each selected row; None where nothing is grouped."""

    def within(self, mask: Bool[ndarray, " n"]) -> "Selection":
        """Of the selected rows those where `mask`, which has all rows of the run, is true."""
        if self.rows is None:
            return Selection(np.flatnonzero(mask), None)
        kept = mask[self.rows]
        return Selection(self.rows[kept], None if self.codes is None else self.codes[kept])


Select = Callable[[Mapping, Sequence[Group]], Selection]
"""Chooses among the rows of consecutive groups of one part."""


class Selector:
    """Evaluates `where` and `per`, two SQL expressions over the row columns, for one run of groups after another.

    Raises QueryError where an expression is wrong, before any row is read.
    """

    def __init__(self, labelling: Labelling, where: str | None, per: str | None, until: int | None = None) -> None:
        """With `until`, only rows up to that step."""
        self._labelling, self._per = labelling, per
        both = where if until is None else f"step <= {until}" if where is None else f"({where}\n) AND step <= {until}"
        self.where = both
        """The whole condition."""
        self.values: list[Any] = [] if per else [None]
        """The distinct values of `per` in order of appearance."""
        self.value_type: pa.DataType = pa.null()
        """Arrow type of `values`."""
        self._codes: dict[Any, int] = {}
        self._all = both is None and per is None
        if not self._all:
            from dualstore.database import Database  # DuckDB is slow to start; most questions do without

            self._database = Database()
            for expression, condition in ((where, True), (per, False)):
                if expression is not None:
                    self._database.check(labelling.empty(), expression, condition=condition)
            self._select(labelling.empty())

    def __call__(self, mapping: Mapping, groups: Sequence[Group]) -> Selection:
        """The selection of consecutive groups."""
        if self._all:
            return Selection(None, None)
        found = self._select(self._labelling.table(mapping, groups))
        rows = found.column("_row").to_numpy()
        if self._per is None:
            return Selection(rows, None)
        encoded = self._encoded(found.column("_group").combine_chunks())
        codes = np.array([self._code(value) for value in encoded.dictionary.to_pylist()], np.int64)
        return Selection(rows, codes[encoded.indices.to_numpy()])

    @property
    def grouped(self) -> bool:
        """Whether rows belong to groups of the question."""
        return self._per is not None

    @property
    def everywhere(self) -> bool:
        """Whether no row is left out."""
        return self.where is None

    def among(self, log: Log, rows: Int64[ndarray, " n"]) -> Bool[ndarray, " n"] | None:
        """Which of some row numbers are selected; None for all."""
        if self.where is None:
            return None
        chosen = np.zeros(len(rows), bool)
        chosen[self._select(self._labelling.take(log, rows)).column("_row").to_numpy()] = True
        return chosen

    def _encoded(self, groups: pa.Array) -> pa.DictionaryArray:
        try:
            plain = groups.cast(groups.type.value_type) if pa.types.is_dictionary(groups.type) else groups
            encoded = plain.dictionary_encode(null_encoding="encode")
            encoded.dictionary.to_pylist()
        except (pa.ArrowException, NotImplementedError, OverflowError, ValueError) as error:
            raise QueryError(
                f"expression {self._per!r}: values of type {groups.type} cannot be grouped; cast them to text"
            ) from error
        return encoded

    def _select(self, table: pa.Table) -> pa.Table:
        numbered = table.append_column("_row", pa.array(np.arange(table.num_rows)))
        group = "" if self._per is None else f', ({self._per}\n) AS "_group"'
        found = self._database.select(numbered, self.where, "_row" + group)
        if self._per is not None:
            kind = found.schema.field("_group").type
            self.value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
        return found

    def _code(self, value: Any) -> int:
        if isinstance(value, float):
            value = _NAN if value != value else value + 0.0  # one zero, not two
        if value not in self._codes:
            self._codes[value] = len(self.values)
            self.values.append(value)
        return self._codes[value]

"""What lies in a store: names, columns, layers and the contents of `store.json`.

The words are those of the README's format specification; every other module takes them from here.
"""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from dualstore.errors import DamagedError, StoreError

__all__ = [
    "BLOCK_COLUMNS",
    "DTYPES",
    "FORMAT",
    "Column",
    "Layer",
    "PartName",
    "Place",
    "StoreInfo",
    "pattern_columns",
    "probe_columns",
    "single",
]

FORMAT = 3
"""Version of the disk layout. A reader refuses stores whose format is higher.

Format 1 had no g in probes, and no columns of adaptive optimisers in steps; until format 2 there were plain linear layers only.
"""

DTYPES = ("float16", "float32", "float64")
"""Of stored keys and errors."""

MOST_RANKS = 1 << 16

Status = Literal["recording", "interrupted", "complete"]

_PART_NAME = re.compile(r"part-(\d+)-(\d+)\.parquet")

NO_LABEL = -1
"""Label of a pattern, probe or sample that has none; also the task code and prediction of one without."""
IGNORED = -100
"""Label of a position that no loss counts, as losses of torch have it."""


def single(dtype: str) -> str:
    """The type that numbers of a type are read as, and queries rounded to: half precision is read as single, exactly."""
    return "float32" if dtype == "float16" else dtype


@dataclass(frozen=True)
class Column:
    """One column of a part: scalars, or vectors of `width` values a row. No value is ever null."""

    name: str
    dtype: str
    width: int | None = None

    @property
    def row_width(self) -> int:
        """Values a row."""
        return 1 if self.width is None else self.width

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.row_width * np.dtype(self.dtype).itemsize

    @property
    def as_read(self) -> "Column":
        """The column as readers see it: half precision as single."""
        return replace(self, dtype=single(self.dtype))


class PartName(NamedTuple):
    """The name of a part; parts are read in this order."""

    rank: int
    """Of the writer."""
    sequence: int
    name: str

    @classmethod
    @lru_cache(1 << 16)
    def of(cls, name: str) -> "PartName":
        """What a file name says; other programs may call their parts otherwise."""
        found = _PART_NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2]), name) if found else cls(0, -1, name)


@dataclass(frozen=True)
class Place:
    """A matrix among the parameters of a model: some rows of one, all further dimensions flattened into columns."""

    parameter: str
    """Its name in the model."""
    rows: tuple[int, int] | None = None
    """First row and the one behind the last; None for all."""
    transposed: bool = False
    """Whether the matrix is that of the parameter turned round, as in Conv1D of transformers or in an embedding."""
    shape: tuple[int, ...] | None = None
    """Of the whole parameter; None where it is the matrix itself."""


@dataclass(frozen=True)
class Layer:
    """One recorded linear map, y = W x + b with W of shape (d_out, d_in)."""

    number: int
    name: str
    kind: str
    d_in: int
    d_out: int
    bias: bool
    weight_group: int
    """Index of the weight's parameter group in the optimiser."""
    bias_group: int
    """Index of the bias's parameter group; -1 where there is none or it is not trained."""
    keys: Literal["vector", "token"] = "vector"
    """Whether x is stored as such, or as the number of its only 1 among zeros."""
    errors: bool = True
    """Whether errors are stored: without them there is attention, but no value."""
    weight: tuple[Place, ...] = ()
    """What W consists of, side by side; by default the parameter NAME.weight."""
    biases: tuple[Place, ...] = ()
    """What b is the sum of; by default NAME.bias, where there is one."""

    @property
    def key_width(self) -> int:
        """Values that a stored key has."""
        return 1 if self.keys == "token" else self.d_in

    @property
    def weight_places(self) -> tuple[Place, ...]:
        """`weight`, also of a store that does not say it."""
        return self.weight or (Place(f"{self.name}.weight"),)

    @property
    def bias_places(self) -> tuple[Place, ...]:
        """`biases`, also of a store that does not say it."""
        return (self.biases or (Place(f"{self.name}.bias"),)) if self.bias else ()

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Layer":
        """The layer of plain values as in `store.json`. Raises TypeError or ValueError."""
        found = cls(**{**values, **{name: _places(values.get(name, ())) for name in ("weight", "biases")}})
        numbers = (found.number, found.d_in, found.d_out, found.weight_group, found.bias_group)
        if not all(type(n) is int for n in numbers) or min(found.d_in, found.d_out) < 1 or not isinstance(found.name, str):
            raise ValueError(str(values))
        if found.keys not in ("vector", "token") or type(found.errors) is not bool:
            raise ValueError(f"keys {found.keys!r}, errors {found.errors!r}")
        return found


def _places(found: Any) -> tuple[Place, ...]:
    """Places of plain values. Raises TypeError or ValueError."""
    places = tuple(Place(**{**place, **{name: _whole_numbers(place.get(name)) for name in ("rows", "shape")}}) for place in found)
    for place in places:
        pair = place.rows is None or len(place.rows) == 2
        if not isinstance(place.parameter, str) or type(place.transposed) is not bool or not pair:
            raise ValueError(str(place))
    return places


def _whole_numbers(found: Any) -> tuple[int, ...] | None:
    """Several of plain values, or none. Raises TypeError or ValueError."""
    numbers = None if found is None else tuple(found)
    if not all(type(n) is int for n in numbers or ()):
        raise ValueError(str(numbers))
    return numbers


def pattern_columns(layer: Layer, dtype: str, written: int = FORMAT) -> tuple[Column, ...]:
    """Columns of `patterns/layer=K`, in file order, in a store of format `written`."""
    columns = [
        Column("step", "int32"),
        Column("position", "int32"),
        Column("sample_id", "int64"),
        Column("label", "int32"),
        Column("task", "int32"),
    ]
    if written >= 3:
        columns += [Column("slot", "int32"), Column("duplicate", "int32")]
    columns.append(_key(layer, dtype))
    if layer.errors:
        columns += [Column("scale", "float32")] if dtype == "float16" else []
        columns.append(Column("e", dtype, layer.d_out))
    return tuple(columns)


def _key(layer: Layer, dtype: str) -> Column:
    return Column("token", "int32") if layer.keys == "token" else Column("x", dtype, layer.d_in)


def probe_columns(layer: Layer, dtype: str, written: int = FORMAT) -> tuple[Column, ...]:
    """Columns of `probes/layer=K`, in file order, in a store of format `written`. They are never stored in half precision."""
    dtype = single(dtype)
    columns = (
        Column("test_id", "int64"),
        Column("position", "int32"),
        Column("step", "int32"),
        Column("label", "int32"),
        Column("task", "int32"),
        Column("predicted", "int32"),
        _key(layer, dtype),
        Column("y", dtype, layer.d_out),
    )
    return columns if written < 2 else (*columns, Column("g", dtype, layer.d_out))


BLOCK_COLUMNS = (
    Column("step", "int32"),
    Column("block", "int32"),
    Column("sample_id", "int64"),
    Column("test_id", "int64"),
    Column("slot", "int32"),
    Column("label", "int32"),
    Column("task", "int32"),
    Column("norm", "float64"),
    Column("change", "float64"),
    Column("increment", "float64"),
)
"""Columns of `blocks`, in file order: a row for each call of a residual block and sample, x_l to x_{l+1} = x_l + f(x_l).

norm is |x_l|, change |x_{l+1} - x_l|, increment |f(x_l)|; NaN where shapes differ. test_id is -1 in training, sample_id in probes.
"""


@dataclass(frozen=True)
class StoreInfo:
    """The contents of `store.json`, which rank 0 writes, or of the `rank-R.json` of another rank."""

    layers: tuple[Layer, ...]
    dtype: str
    optimizer: str
    exact: bool
    """Whether the optimiser's coefficients are known, so that values can be given."""
    status: Status = "recording"
    tasks: tuple[str, ...] = ()
    """Task names of a rank; a row's task code is index * ranks + rank, -1 for none."""
    unrecorded: tuple[str, ...] = ()
    """Parameters that train but whose layers are not recorded."""
    problems: tuple[str, ...] = ()
    """What was noticed while recording that makes values inexact."""
    created: str = ""
    maker: str = ""
    """What wrote the store, so that a program replaces only what it made itself."""
    format: int = FORMAT
    mixed: bool = False
    """Whether layers multiplied in half precision: then the gradients themselves are rounded to that."""
    ranks: int = 1
    """Processes that write the store."""
    blocks: tuple[str, ...] = ()
    """Names of the residual blocks that `blocks` has rows of, by number."""
    other: dict[str, Any] = field(default_factory=dict)
    """Keys of `store.json` that this version does not know; kept."""

    @property
    def precision(self) -> str:
        """The type that keys, errors and queries have in memory."""
        return single(self.dtype)

    def layer(self, number: int) -> Layer:
        """The layer with this number. Raises KeyError."""
        return {layer.number: layer for layer in self.layers}[number]

    def to_json(self) -> str:
        """The text of `store.json`."""
        values = asdict(self)
        other = values.pop("other")
        return json.dumps({"dualstore": "store", **other, **values}, indent=2) + "\n"

    @staticmethod
    def file_name(rank: int) -> str:
        """Where a rank keeps its own."""
        return "store.json" if rank == 0 else f"rank-{rank}.json"

    @classmethod
    def read(cls, path: Path, rank: int = 0) -> "StoreInfo":
        """`store.json` of the store at `path`, or that of another rank.

        Raises StoreError where there is no store or its format is newer, DamagedError where the file is unreadable.
        """
        file = path / cls.file_name(rank)
        if not path.is_dir():
            raise StoreError(f"{path}: no store there; record one with dualstore.record(...) or `dualstore demo`")
        if not file.is_file():
            others = sorted(other.name for other in path.glob("rank-*.json"))
            found = f"only {', '.join(others)}, of a training in several processes" if others else "no store.json"
            advice = "join the folders of all ranks: dualstore merge" if others else "give the folder that a recording wrote"
            raise StoreError(f"{path}: not a store (it has {found}); {advice}")
        try:
            values = json.loads(file.read_text())
            kind, found = values.pop("dualstore"), values["format"]
            if kind != "store" or type(found) is not int or found < 1:
                raise ValueError(f"dualstore {kind!r} of format {found!r}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{file}: expected a dualstore store.json, found {error!r}") from error
        if found > FORMAT:
            raise StoreError(f"{file}: format {found!r} is newer than {FORMAT}, the newest this dualstore reads; upgrade it")
        return cls._checked(file, values)

    @classmethod
    def _checked(cls, file: Path, values: dict[str, Any]) -> "StoreInfo":
        known = {name: values.pop(name) for name in cls.__dataclass_fields__ if name in values and name != "other"}
        try:
            known["layers"] = tuple(map(Layer.of, known["layers"]))
            for name in ("tasks", "unrecorded", "problems", "blocks"):
                if not isinstance(known.get(name, []), list):
                    raise ValueError(f"{name} {known[name]!r}")
                known[name] = tuple(known.get(name, ()))
            return cls(**known, other=values)._with_values()
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{file}: expected the fields of a store, found {error!r}") from error

    def _with_values(self) -> "StoreInfo":
        """Itself. Raises ValueError where a field has a value it cannot have."""
        names = (*self.tasks, *self.unrecorded, *self.problems, *self.blocks, self.optimizer)
        if not all(isinstance(name, str) for name in names) or not type(self.exact) is type(self.mixed) is bool:
            raise ValueError(f"names {names}, exact {self.exact!r}, mixed {self.mixed!r}")
        if self.dtype not in DTYPES or self.status not in get_args(Status):
            raise ValueError(f"dtype {self.dtype!r}, status {self.status!r}")
        if type(self.ranks) is not int or not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks {self.ranks!r}")
        return self

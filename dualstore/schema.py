"""What lies in a store: names, columns, layers and the contents of `store.json`.

The words are those of the README's format specification; every other module takes them from here.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from dualstore.errors import DamagedError, StoreError

__all__ = ["FORMAT", "Column", "Layer", "StoreInfo", "pattern_columns", "probe_columns"]

FORMAT = 2
"""Version of the disk layout. A reader refuses stores whose format is higher.

Format 1 had no g in probes, and no columns of adaptive optimisers in steps.
"""

Status = Literal["recording", "interrupted", "complete"]

NO_LABEL = -1
"""Label of a pattern, probe or sample that has none; also the task code and prediction of one without."""


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


@dataclass(frozen=True)
class Layer:
    """One recorded linear layer, y = W x + b with W of shape (d_out, d_in)."""

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


def pattern_columns(layer: Layer, dtype: str) -> tuple[Column, ...]:
    """Columns of `patterns/layer=K`, in file order."""
    return (
        Column("step", "int32"),
        Column("position", "int32"),
        Column("sample_id", "int64"),
        Column("label", "int32"),
        Column("task", "int32"),
        Column("x", dtype, layer.d_in),
        Column("e", dtype, layer.d_out),
    )


def probe_columns(layer: Layer, dtype: str, written: int = FORMAT) -> tuple[Column, ...]:
    """Columns of `probes/layer=K`, in file order, in a store of format `written`."""
    columns = (
        Column("test_id", "int64"),
        Column("position", "int32"),
        Column("step", "int32"),
        Column("label", "int32"),
        Column("task", "int32"),
        Column("predicted", "int32"),
        Column("x", dtype, layer.d_in),
        Column("y", dtype, layer.d_out),
    )
    return columns if written < 2 else (*columns, Column("g", dtype, layer.d_out))


@dataclass(frozen=True)
class StoreInfo:
    """The contents of `store.json`."""

    layers: tuple[Layer, ...]
    dtype: str
    optimizer: str
    exact: bool
    """Whether the optimiser's coefficients are known, so that values can be given."""
    status: Status = "recording"
    tasks: tuple[str, ...] = ()
    """Task names; a row's task code is the index, -1 for none."""
    unrecorded: tuple[str, ...] = ()
    """Parameters that train but whose layers are not recorded."""
    problems: tuple[str, ...] = ()
    """What was noticed while recording that makes values inexact."""
    created: str = ""
    maker: str = ""
    """What wrote the store, so that a program replaces only what it made itself."""
    format: int = FORMAT
    other: dict[str, Any] = field(default_factory=dict)
    """Keys of `store.json` that this version does not know; kept."""

    def layer(self, number: int) -> Layer:
        """The layer with this number. Raises KeyError."""
        return {layer.number: layer for layer in self.layers}[number]

    def to_json(self) -> str:
        """The text of `store.json`."""
        values = asdict(self)
        other = values.pop("other")
        return json.dumps({"dualstore": "store", **other, **values}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> "StoreInfo":
        """`store.json` of the store at `path`.

        Raises StoreError where there is no store or its format is newer, DamagedError where the file is unreadable.
        """
        file = path / "store.json"
        if not path.is_dir():
            raise StoreError(f"{path}: no store there; record one with dualstore.record(...) or `dualstore demo`")
        if not file.is_file():
            raise StoreError(f"{path}: not a store (it has no store.json); give the folder that a recording wrote")
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
            known["layers"] = tuple(Layer(**layer) for layer in known["layers"])
            for name in ("tasks", "unrecorded", "problems"):
                if not isinstance(known.get(name, []), list):
                    raise ValueError(f"{name} {known[name]!r}")
                known[name] = tuple(known.get(name, ()))
            return cls(**known, other=values)._with_values()
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{file}: expected the fields of a store, found {error!r}") from error

    def _with_values(self) -> "StoreInfo":
        """Itself. Raises ValueError where a field has a value it cannot have."""
        for layer in self.layers:
            numbers = (layer.number, layer.d_in, layer.d_out, layer.weight_group, layer.bias_group)
            if not all(type(n) is int for n in numbers) or min(layer.d_in, layer.d_out) < 1 or not isinstance(layer.name, str):
                raise ValueError(str(layer))
        names = (*self.tasks, *self.unrecorded, *self.problems, self.optimizer)
        if not all(isinstance(name, str) for name in names) or type(self.exact) is not bool:
            raise ValueError(f"names {names}, exact {self.exact!r}")
        if self.dtype not in ("float32", "float64") or self.status not in get_args(Status):
            raise ValueError(f"dtype {self.dtype!r}, status {self.status!r}")
        return self

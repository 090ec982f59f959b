"""steps: the optimiser's log, put together from parts in any order; parts that lack something are an error."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualstore.errors import DamagedError
from dualstore.steps import DEFAULTS, STEPS_SCHEMA, Steps
from dualstore.writer import write_table


def row_of(step: int, group: int = 0, **changed: Any) -> dict[str, Any]:
    """One row of `steps/`, its numbers made from step and group so that a mix-up shows."""
    row = {
        "step": step,
        "group": group,
        "epoch": step // 4,
        "lr": 0.1 / (step + 1) + group,
        "momentum": 0.9,
        "dampening": 0.0,
        "decay": 1e-4 * group,
        **DEFAULTS,
        "nesterov": step % 2 == 0,
        "maximize": False,
        "clip": 1.0,
        "batch_size": 10 + step,
        "loss": float(step),
        "rows": [step, 2 * step],
        "idle": [1] if step % 3 == 0 else [],
        "idle_bias": [1] if step % 3 == 0 else [],
    }
    return row | changed


def table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), STEPS_SCHEMA)


def write(path: Path, *parts: Sequence[dict[str, Any]]) -> list[Path]:
    paths = [path / "steps" / f"part-0-{number:06d}.parquet" for number in range(len(parts))]
    for file, rows in zip(paths, parts, strict=True):
        write_table(file, table_of(rows))
    return paths


def steps_of(path: Path, *parts: Sequence[dict[str, Any]]) -> Steps:
    return Steps.read(write(path, *parts))


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# Reading


def test_the_rows_of_all_parts_are_one_log(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [row_of(0), row_of(1)], [row_of(2)], [row_of(3), row_of(4)])
    assert steps.numbers.tolist() == [0, 1, 2, 3, 4]
    assert steps.numbers.dtype == np.int32
    assert steps.table.num_rows == 5


def test_a_log_without_parts_is_empty() -> None:
    steps = Steps.read([])
    assert steps.numbers.tolist() == []
    assert steps.epoch_of(numbers(0, 7)).tolist() == [-1, -1]
    assert steps.rows_per_step(3).shape == (0, 3)
    assert steps.idle(0).shape == (0,)
    assert {name: len(values) for name, values in steps.group(0).items()}["lr"] == 0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations([(step, group) for step in range(4) for group in range(2)]), cut=st.integers(0, 8))
def test_the_order_of_parts_and_rows_does_not_matter(tmp_path: Path, order: list[tuple[int, int]], cut: int) -> None:
    rows = [row_of(step, group) for step, group in order]
    steps = steps_of(tmp_path, rows[:cut], rows[cut:])
    assert steps.numbers.tolist() == [0, 1, 2, 3]
    assert steps.rows_per_step(2).tolist() == [[0, 0], [1, 2], [2, 4], [3, 6]]
    for group in range(2):
        expected = [row_of(step, group) for step in range(4)]
        found = steps.group(group)
        assert {name: values.tolist() for name, values in found.items()} == {
            name: [row[name] for row in expected] for name in found
        }


# Epochs


def test_the_epoch_of_each_step_is_found(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [row_of(step) for step in range(10)])
    found = steps.epoch_of(numbers(9, 0, 4, 3, 4))
    assert found.tolist() == [2, 0, 1, 0, 1]
    assert found.dtype == np.int32
    assert steps.epoch_of(numbers()).tolist() == []


def test_a_step_that_is_not_in_the_log_has_epoch_minus_one(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [row_of(2), row_of(3), row_of(7)])
    assert steps.epoch_of(numbers(-1, 0, 1, 2, 4, 6, 7, 8, 2**31 - 1)).tolist() == [-1, -1, -1, 0, -1, -1, 1, -1, -1]


def test_epochs_may_go_back(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [row_of(0, epoch=5), row_of(1, epoch=0), row_of(2, epoch=-1), row_of(3, epoch=2**31 - 1)])
    assert steps.epoch_of(numbers(0, 1, 2, 3)).tolist() == [5, 0, -1, 2**31 - 1]


# Rows and idle layers


def test_the_patterns_of_each_step_and_layer_are_counted(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [row_of(0, rows=[3, 0]), row_of(1, rows=[]), row_of(2, rows=[2**31 - 1, 1])])
    assert steps.rows_per_step(2).tolist() == [[3, 0], [0, 0], [2**31 - 1, 1]]
    assert steps.rows_per_step(3).tolist() == [[3, 0, 0], [0, 0, 0], [2**31 - 1, 1, 0]]
    assert steps.rows_per_step(2).dtype == np.int64


def test_several_parameter_groups_do_not_multiply_the_patterns(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [row_of(step, group, rows=[4]) for step in range(3) for group in range(3)])
    assert steps.numbers.tolist() == [0, 1, 2]
    assert steps.rows_per_step(1).tolist() == [[4], [4], [4]]


def test_idle_layers_are_those_without_a_gradient(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [row_of(0, idle=[0, 2]), row_of(1, idle=[]), row_of(2, idle=[2])])
    assert [steps.idle(layer).tolist() for layer in range(3)] == [[True, False, False], [False] * 3, [True, False, True]]
    assert steps.idle(0).dtype == bool


# Parameter groups


def test_the_settings_of_a_parameter_group_are_in_step_order(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [row_of(step, group) for step in range(5) for group in range(2)])
    found = steps.group(1)
    assert found["lr"].tolist() == [0.1 / (step + 1) + 1 for step in range(5)]
    assert found["nesterov"].tolist() == [True, False, True, False, True]
    assert [found[name].dtype.name for name in ("lr", "nesterov", "batch_size")] == ["float64", "bool", "int32"]
    assert set(found) == set(STEPS_SCHEMA.names) - {"rows", "idle", "idle_bias", "rates"}


def test_values_that_are_not_finite_come_back(tmp_path: Path) -> None:
    found = steps_of(tmp_path, [row_of(0, loss=float("nan"), clip=float("inf"))]).group(0)
    assert np.isnan(found["loss"]).all()
    assert np.isposinf(found["clip"]).all()


@pytest.mark.parametrize(
    "rows",
    [
        [row_of(0), row_of(1), row_of(1, 1)],
        [row_of(0)],
        [row_of(0, 1), row_of(0), row_of(0, 1)],
        [row_of(0, 2)],
    ],
    ids=["missing in a step", "missing in all", "twice in a step", "another group only"],
)
def test_a_step_without_its_row_of_a_parameter_group_is_an_error(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    steps = steps_of(tmp_path, rows)
    with pytest.raises(DamagedError, match="steps: expected one row of parameter group 1 for each step, found"):
        steps.group(1)


# Parts of others, and parts that are not what they should be


@pytest.mark.parametrize("options", [{"compression": "snappy"}, {"compression": None, "use_dictionary": False}])
def test_parts_that_another_program_wrote_are_read(tmp_path: Path, options: dict[str, Any]) -> None:
    """Columns in another order, nullable, of types that hold the same values, and one more."""
    rows = [row_of(step) for step in range(4)]
    table = pa.Table.from_pylist([{"note": "text", **row} for row in rows])
    path = tmp_path / "part-0-000000.parquet"
    pq.write_table(table.select([*reversed(STEPS_SCHEMA.names), "note"]), path, **options)
    steps = Steps.read([path])
    assert steps.table.schema.equals(STEPS_SCHEMA)
    assert steps.table.to_pylist() == rows


def test_parts_below_a_folder_named_like_a_column_are_read(tmp_path: Path) -> None:
    """Parquet readers take `name=value` folders for columns; a store may lie in one."""
    steps = steps_of(tmp_path / "step=7" / "epoch=x" / "lr=0.5", [row_of(0), row_of(1)])
    assert steps.numbers.tolist() == [0, 1]
    assert steps.group(0)["lr"].tolist() == [row_of(0)["lr"], row_of(1)["lr"]]


def naming(path: Path, text: str = "") -> str:
    """A pattern that an error about the file matches: its name first, all in one line."""
    return rf"\A{re.escape(str(path))}: expected the columns of a steps part, found [^\n]*{text}[^\n]*\Z"


def test_a_part_of_format_1_has_no_columns_of_adaptive_optimisers(tmp_path: Path) -> None:
    path = tmp_path / "part-0-000000.parquet"
    table = table_of([row_of(0), row_of(1)])
    pq.write_table(table.drop_columns([*DEFAULTS, "idle_bias"]), path)
    assert Steps.read([path]).table.equals(table)


@pytest.mark.parametrize("name", [name for name in STEPS_SCHEMA.names if name not in (*DEFAULTS, "idle_bias")])
def test_a_part_that_lacks_a_column_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "part-0-000000.parquet"
    pq.write_table(table_of([row_of(0)]).drop_columns([name]), path)
    with pytest.raises(DamagedError, match=naming(path, name)):
        Steps.read([path])


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("step", pa.array([None], pa.int32())),
        ("step", pa.array([2**40])),
        ("step", pa.array(["one"])),
        ("lr", pa.array([None], pa.float64())),
        ("rows", pa.array([None], pa.list_(pa.int32()))),
        ("rows", pa.array([3])),
    ],
    ids=["null", "too large", "text", "null rate", "null list", "number for a list"],
)
def test_a_part_with_a_column_of_other_values_is_an_error(tmp_path: Path, name: str, column: pa.Array) -> None:
    path = tmp_path / "part-0-000000.parquet"
    table = table_of([row_of(0)])
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), path)
    with pytest.raises(DamagedError, match=naming(path)):
        Steps.read([path])


@pytest.mark.parametrize("content", [b"", b"text\n" * 10, b"PAR1PAR1", b"PAR1" + bytes(100) + b"\x10\x00\x00\x00PAR1"])
def test_a_part_that_is_not_parquet_is_an_error(tmp_path: Path, content: bytes) -> None:
    good, bad = tmp_path / "part-0-000000.parquet", tmp_path / "part-0-000001.parquet"
    write_table(good, table_of([row_of(0)]))
    bad.write_bytes(content)
    with pytest.raises(DamagedError, match=naming(bad)):
        Steps.read([good, bad])


def test_a_part_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [row_of(step) for step in range(5)])
    data = path.read_bytes()
    for size in range(0, len(data), 211):
        path.write_bytes(data[:size])
        with pytest.raises(DamagedError, match=naming(path)):
            Steps.read([path])


def test_a_part_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=naming(tmp_path / "missing.parquet")):
        Steps.read([tmp_path / "missing.parquet"])

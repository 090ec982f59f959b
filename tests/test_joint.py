"""Logs of several ranks as one: each number against a slow, obvious sum over the ranks."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualstore.errors import DamagedError
from dualstore.joint import join_steps
from dualstore.steps import STEPS_SCHEMA, Steps
from dualstore.writer import write_table
from tests.reference import group_row

LAYERS = 3
Row = dict[str, Any]


def row_of(step: int, group: int = 0, **changed: Any) -> Row:
    return {**group_row(step // 2), "step": step, "group": group, "rows": [1, 2, 3], **changed}


def write(path: Path, *ranks: list[Row]) -> list[Path]:
    """A part of each rank's rows, those of odd steps in one of their own, unless there are none."""
    paths = []
    for rank, rows in enumerate(ranks):
        for sequence in (0, 1):
            some = [row for row in rows if row["step"] % 2 == sequence]
            if some:
                paths.append(path / f"part-{rank}-{sequence:06d}.parquet")
                write_table(paths[-1], pa.Table.from_pylist(some, STEPS_SCHEMA))
    return paths


def join(path: Path, *ranks: list[Row]) -> Steps:
    return join_steps(write(path, *ranks), len(ranks), LAYERS)


def reference(ranks: list[list[Row]]) -> list[Row]:
    """Settings of rank 0 and sums over all, for the steps and groups that every rank has."""
    found = []
    for first in sorted(ranks[0], key=lambda row: (row["step"], row["group"])):
        same = [[row for row in rows if (row["step"], row["group"]) == (first["step"], first["group"])] for rows in ranks]
        if all(same):
            rows = [some[0] for some in same]
            noted = [(row["loss"], row["batch_size"]) for row in rows if not math.isnan(row["loss"])]
            size = sum(weight for _, weight in noted)
            joint = {
                "rows": [sum(row["rows"][layer] for row in rows) for layer in range(LAYERS)],
                "batch_size": sum(row["batch_size"] for row in rows),
                "loss": math.nan if not size else sum(loss * weight for loss, weight in noted) / size,
            }
            for name in ("idle", "idle_bias"):
                joint[name] = [layer for layer in range(LAYERS) if all(layer in row[name] for row in rows)]
            found.append({**first, **joint})
    return found


layers = st.lists(st.integers(0, LAYERS - 1), unique=True)
losses = st.one_of(st.just(math.nan), st.floats(-5, 5))
counts = st.lists(st.integers(0, 9), min_size=LAYERS, max_size=LAYERS)
own = st.fixed_dictionaries({"rows": counts, "idle": layers, "idle_bias": layers, "loss": losses, "batch_size": st.integers(1, 50)})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), ranks=st.integers(2, 4))
def test_a_joint_log_is_the_sum_of_those_of_the_ranks(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, ranks: int
) -> None:
    rows = []
    for _ in range(ranks):
        steps = data.draw(st.integers(0, 4))
        rows.append([row_of(step, group, **data.draw(own)) for step in range(steps) for group in range(2)])
    steps = join(tmp_path_factory.mktemp("joint"), *rows)
    expected = reference(rows)
    assert steps.numbers.tolist() == sorted({row["step"] for row in expected})
    assert [own.last_step for own in steps.ranks] == [max((row["step"] for row in some), default=-1) for some in rows]
    for row, wanted in zip(steps.table.to_pylist(), expected, strict=True):
        assert row.pop("loss") == pytest.approx(wanted.pop("loss"), nan_ok=True)
        assert row == wanted
    for some, counts in zip(rows, steps.rows_by_rank(LAYERS), strict=True):
        assert counts.tolist() == [row["rows"] for row in some if row["group"] == 0 and row["step"] in steps.numbers]


def test_losses_are_weighted_by_the_sizes_of_their_batches(tmp_path: Path) -> None:
    steps = join(tmp_path, [row_of(0, loss=1.0, batch_size=30)], [row_of(0, loss=2.0, batch_size=10)], [row_of(0, loss=math.nan)])
    assert steps.group(0)["loss"].tolist() == [1.25]
    assert steps.group(0)["batch_size"].tolist() == [41]


def test_batches_of_no_sample_have_a_mean_loss_all_the_same(tmp_path: Path) -> None:
    steps = join(tmp_path, [row_of(0, loss=1.0, batch_size=0)], [row_of(0, loss=2.0, batch_size=0)])
    assert steps.group(0)["loss"].tolist() == [1.5]


def test_a_list_that_is_too_short_or_too_long_counts_as_far_as_there_are_layers(tmp_path: Path) -> None:
    steps = join(tmp_path, [row_of(0, rows=[4], idle=[0, 7, -1])], [row_of(0, rows=[1, 1, 1, 9], idle=[0, 7])])
    assert steps.rows_per_step(LAYERS).tolist() == [[5, 1, 1]]
    assert steps.table.column("idle").to_pylist() == [[0]]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"lr": 0.2}, "step 3, parameter group 0: lr is 0.1 at rank 0 and 0.2 at rank 1"),
        ({"clip": 0.5}, "clip is 1.0 at rank 0 and 0.5 at rank 1"),
        ({"nesterov": True}, "nesterov is False at rank 0 and True at rank 1"),
        ({"weights_crc": 8}, "weights_crc is 7 at rank 0 and 8 at rank 1"),
        ({"lr": 0.1 * (1 + 1e-9)}, ""),
        ({"weights_crc": -1, "loss": 3.0, "batch_size": 8, "epoch": 9}, ""),
    ],
)
def test_settings_that_ranks_do_not_share_are_named(tmp_path: Path, changed: Row, text: str) -> None:
    first = [row_of(step, weights_crc=7) for step in range(5)]
    steps = join(tmp_path, first, [row | changed if row["step"] == 3 else row for row in first])
    assert steps.ranks[0].difference == ""
    assert steps.ranks[1].difference.endswith(text)
    assert bool(steps.ranks[1].difference) == bool(text)


def test_a_step_that_one_rank_lacks_is_not_in_the_log(tmp_path: Path) -> None:
    steps = join(tmp_path, [row_of(step) for step in range(5)], [row_of(step) for step in (0, 1, 3, 4)])
    assert steps.numbers.tolist() == [0, 1, 3, 4]


def test_a_part_that_is_damaged_is_named(tmp_path: Path) -> None:
    paths = write(tmp_path, [row_of(0)], [row_of(0)])
    paths[1].write_bytes(b"PAR1 and no more")
    with pytest.raises(DamagedError, match=r"part-1-000000.parquet: expected the columns of a steps part"):
        join_steps(paths, 2, LAYERS)

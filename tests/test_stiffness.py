"""Stiffness: the SQL gives what a slow reference gives, the closed form is the integral, the command prints it."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from dualstore.cli import commands
from numpy import ndarray

import dualstore
from dualstore.errors import QueryError
from dualstore.schema import StoreInfo
from dualstore.writer import StoreWriter
from tests.reference import Rows, stiffness, write_store

BLOCKS = ("stage.0", "stage.1", "shape", "stage.2")


def block_rows(seed: int, steps: int, samples: int, *, probed: bool = False) -> dict[str, ndarray]:
    """Rows of four blocks, of which one changes the shape; numbers that divide to different indexes."""
    rng = np.random.default_rng(seed)
    step, block, one = (a.reshape(-1) for a in np.meshgrid(range(steps), range(4), range(samples), indexing="ij"))
    increment = rng.gamma(2.0, 1.0, len(step))
    increment[block == 2] = np.nan
    ids, nobody = one % 7 if not probed else one, np.full(len(step), -1)
    return {
        "step": step.astype(np.int32),
        "block": block.astype(np.int32),
        "sample_id": (nobody if probed else ids).astype(np.int64),
        "test_id": (ids if probed else nobody).astype(np.int64),
        "slot": (one * 0 if probed else one).astype(np.int32),
        "label": (ids % 3).astype(np.int32),
        "task": np.zeros(len(step), np.int32),
        "norm": rng.uniform(1, 3, len(step)),
        "change": increment * 0.5,
        "increment": increment,
    }


def write(path: Path, *parts: dict[str, ndarray], steps: int = 3) -> Path:
    """A store of some steps with rows of blocks, each in a part of its own."""
    names = np.arange(steps, dtype=np.int32)
    keys = np.ones((steps, 2), np.float32)
    write_store(path, [Rows(names, names, names * 0, names, names * 0, keys, keys)], tasks=["t"])
    info = replace(StoreInfo.read(path), blocks=BLOCKS)
    (path / "store.json").write_text(info.to_json())
    for sequence, rows in enumerate(parts):
        writer = StoreWriter(path, info, last_step=steps - 1, sequence=sequence + 1)
        writer.write_blocks(rows)
        writer.close()
    return path


def assert_rows(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted)
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            assert row[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12)), name


@pytest.mark.parametrize("where", [None, "label = 1", "block <> 0 AND step > 0"])
@pytest.mark.parametrize("training", [False, True])
def test_measures_are_those_of_the_reference(tmp_path: Path, training: bool, where: str | None) -> None:
    rows, probes = block_rows(0, 3, 20), block_rows(1, 4, 9, probed=True)
    store = dualstore.open(write(tmp_path / "store", rows, probes))
    kept = probes if not training else rows
    mask = {None: kept["step"] >= 0, "label = 1": kept["label"] == 1}.get(where, (kept["block"] != 0) & (kept["step"] > 0))
    chosen = {name: values[mask] for name, values in kept.items()}
    found = store.stiffness(m1=[0.0, 0.5, 1], m2=[0, 0.8], where=where, training=training)
    steps, blocks = stiffness(chosen, [0.0, 0.5, 1.0], [0.0, 0.8], BLOCKS)
    assert_rows(found.steps.to_dicts(), steps)
    assert_rows(found.blocks.to_dicts(), blocks)
    assert all(row["stiff"] == 1 for row in found.steps if row["m1"] == row["m2"] == 0)


def test_the_closed_form_is_the_integral_over_all_thresholds(tmp_path: Path) -> None:
    rows = block_rows(2, 1, 50, probed=True)
    store = dualstore.open(write(tmp_path / "store", rows))
    nsi = (rows["increment"] / rows["norm"]).reshape(4, 50)[[0, 1, 3]]
    most, mean = nsi.max(0), nsi.mean(0)
    m1, m2 = np.linspace(0, (most / mean - 1).max(), 1001), np.linspace(0, most.max(), 1001)
    # P(some block is stiff) at the middle of each cell of a fine grid
    middle1, middle2 = (m1[1:] + m1[:-1]) / 2, (m2[1:] + m2[:-1]) / 2
    share = sum((h >= m * (1 + middle1))[:, None] & (h >= middle2)[None] for h, m in zip(most, mean, strict=True)) / 50
    integral = share.sum() * (m1[1] - m1[0]) * (m2[1] - m2[0])
    assert store.stiffness().steps.to_dicts()[0]["tns"] == pytest.approx(integral, rel=2e-3)
    grid = store.stiffness(m1=middle1[:3].tolist(), m2=middle2[[10, 500]].tolist()).steps.to_dicts()
    assert [row["stiff"] for row in grid] == pytest.approx(share[:3][:, [10, 500]].reshape(-1).tolist())


def test_blocks_that_do_nothing_are_not_stiff_in_all(tmp_path: Path) -> None:
    rows = block_rows(3, 1, 4, probed=True)
    rows["increment"] = np.where(np.isnan(rows["increment"]), np.nan, 0.0)
    found = dualstore.open(write(tmp_path / "store", rows)).stiffness(m2=0.1).steps.to_dicts()
    assert [(row["tns"], row["stiff"], row["nsi"]) for row in found] == [(0, 0, 0)]


def test_samples_of_the_same_id_are_trajectories_of_their_own(tmp_path: Path) -> None:
    store = dualstore.open(write(tmp_path / "store", block_rows(4, 3, 20)))
    assert {row["trajectories"] for row in store.stiffness().steps} == {20}


def test_ranks_that_name_no_samples_are_kept_apart(tmp_path: Path) -> None:
    rows = block_rows(5, 3, 6)
    rows["sample_id"][:] = -1
    path = write(tmp_path / "store", rows)
    part = next((path / "blocks").iterdir())
    part.with_name("part-1-000000.parquet").write_bytes(part.read_bytes())
    store = dualstore.open(path)
    assert {row["rank"] for row in store.sql("SELECT DISTINCT rank FROM blocks")} == {0, 1}
    assert {row["trajectories"] for row in store.stiffness().steps} == {12}


def test_the_relation_names_blocks_and_tasks(tmp_path: Path) -> None:
    store = dualstore.open(write(tmp_path / "store", block_rows(6, 4, 5), block_rows(7, 5, 2, probed=True)))
    found = store.sql("SELECT * FROM blocks ORDER BY step, block, test_id, slot")
    assert {(row["block"], row["name"], row["task"]) for row in found} == {(n, name, "t") for n, name in enumerate(BLOCKS)}
    # rows of steps that the store does not have do not count: the last step is 2, and test examples may be seen behind it
    counts = store.sql("SELECT test_id >= 0 AS probed, max(step) AS last, count(*) AS count FROM blocks GROUP BY 1 ORDER BY 1")
    assert counts.to_dicts() == [{"probed": False, "last": 2, "count": 60}, {"probed": True, "last": 3, "count": 32}]
    empty = dualstore.open(write(tmp_path / "empty")).sql("SELECT * FROM blocks")
    assert empty.columns == found.columns
    assert empty.table.schema == found.table.schema


def test_without_rows_the_error_says_how_to_record_them(tmp_path: Path) -> None:
    store = dualstore.open(write(tmp_path / "store"))
    with pytest.raises(QueryError, match=r"expected rows of residual blocks, found none; record them with record\(..., blocks="):
        store.stiffness()
    probed = dualstore.open(write(tmp_path / "probed", block_rows(8, 1, 2, probed=True)))
    with pytest.raises(QueryError, match="expected rows of residual blocks from training, found none"):
        probed.stiffness(training=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"m1": -1}, "m1: expected one or several numbers of 0 or more, found -1"),
        ({"m2": []}, "m2: expected one or several numbers"),
        ({"m2": [float("nan")]}, "m2: expected one or several numbers"),
        ({"where": "colour = 1"}, r"condition 'colour = 1'.*colour.*columns: step, block, name, sample_id"),
        ({"where": "sum(nsi) > 1"}, r"condition 'sum\(nsi\) > 1'"),
        ({"where": "step"}, "expected true or false"),
    ],
)
def test_wrong_questions_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    store = dualstore.open(write(tmp_path / "store", block_rows(9, 1, 2)))
    with pytest.raises(QueryError, match=message):
        store.stiffness(**options)


def test_a_condition_that_nothing_meets_gives_no_rows(tmp_path: Path) -> None:
    found = dualstore.open(write(tmp_path / "store", block_rows(10, 1, 2))).stiffness(where="label = 99")
    assert len(found.steps) == len(found.blocks) == 0


def test_the_command_prints_what_the_library_gives(tmp_path: Path) -> None:
    path = write(tmp_path / "store", block_rows(11, 3, 4), block_rows(12, 4, 3, probed=True))
    store = dualstore.open(path)

    def call(*words: str) -> str:
        found = CliRunner().invoke(commands, ["stiffness", "--store", str(path), *words], catch_exceptions=False)
        assert found.exit_code == 0, found.output
        return found.stdout

    asked = ("--m1", "0", "--m1", "0.5", "--m2", "0.25")
    assert json.loads(call(*asked, "--json")) == store.stiffness(m1=[0, 0.5], m2=0.25).steps.to_dicts()
    assert json.loads(call("--blocks", "--json")) == store.stiffness().blocks.to_dicts()
    rows = list(csv.DictReader(io.StringIO(call("--training", "--where", "step < 2", "--csv"))))
    assert [row["trajectories"] for row in rows] == ["4", "4"]
    assert "stiffness of trajectories: test examples" in call()
    failed = CliRunner().invoke(commands, ["stiffness", "--store", str(path), "--m1", "-1"])
    assert failed.exit_code == 2

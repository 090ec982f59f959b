"""The command line through its real entry point: answers in every format, errors in one line, exit codes."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import dualstore
from dualstore import Average
from tests.reference import Rows, write_store

SCRIPT = Path(sys.executable).with_name("dualstore")
LABELS = 3


def call(
    *words: str | Path, folder: Path | None = None, code: int = 0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `dualstore` and checks its exit code."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DUALSTORE")} | (env or {})
    found = subprocess.run([SCRIPT, *map(str, words)], cwd=folder, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == code, f"{words}: {found.returncode}\n{found.stdout}\n{found.stderr}"
    return found


def fails(*words: str | Path, match: str, code: int = 1, folder: Path | None = None) -> None:
    """Runs a command that must fail with one line that holds `match`."""
    found = call(*words, code=code, folder=folder)
    assert not found.stdout
    assert match in found.stderr, found.stderr
    if code == 1:
        assert found.stderr.startswith("error: ")
        assert len(found.stderr.splitlines()) == 1, found.stderr


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 60 patterns, small whole numbers, with probes 0..4."""
    path = tmp_path_factory.mktemp("cli") / "store"
    generator = np.random.default_rng(0)
    layers, probes = [], []
    for width in (4, 6):
        step = np.repeat(np.arange(10), 6)
        rows = Rows(
            step=step,
            sample_id=generator.integers(0, 12, 60),
            position=np.zeros(60, np.int32),
            label=generator.integers(0, LABELS, 60),
            task=np.where(step < 5, 0, 1),
            x=generator.integers(-3, 4, (60, width)).astype(np.float32),
            e=generator.normal(size=(60, 2)).astype(np.float32),
        )
        layers.append(rows)
        ids = np.arange(5)
        labels = (ids % LABELS).astype(np.int32)
        probe = {"test_id": ids, "position": labels * 0, "step": labels * 0, "label": labels, "task": labels * 0}
        probe |= {"predicted": np.zeros(5, np.int32), "x": generator.integers(-3, 4, (5, width)).astype(np.float32)}
        probes.append(probe | {"y": np.zeros((5, 2), np.float32)})
    write_store(path, layers, tasks=["old", "new"], epoch_of_step=lambda step: step // 4, probes=probes)
    return path


def parsed(*words: str | Path) -> Any:
    """Standard output as JSON."""
    return json.loads(call(*words, "--json").stdout)


def test_query_gives_flat_objects_with_the_promised_names(store: Path) -> None:
    found = parsed("query", "--store", store, "--test-id", "2", "--layer", "1", "--top", "7")
    assert [row["rank"] for row in found] == [1, 2, 3, 4, 5, 6, 7]
    assert list(found[0]) == ["rank", "alpha", "step", "epoch", "sample_id", "position", "label", "task"]
    assert found == dualstore.open(store).query(test_id=2, layer=1, top=7).to_dicts()


def test_abs_and_min_alpha_are_those_of_the_library(store: Path) -> None:
    ask = ("query", "--store", store, "--test-id", "2", "--layer", "1", "--abs", "--min-alpha", "0.5")
    found = parsed(*ask)
    assert found == dualstore.open(store).query(test_id=2, layer=1, absolute=True, min_alpha=0.5).to_dicts()
    assert found
    assert all(abs(row["alpha"]) >= 0.5 for row in found)
    fails(*ask, "--bottom", match="bottom: expected without")
    call(*ask[:-1], "nan", code=2)


def test_bottom_takes_a_number_or_the_one_of_top(store: Path) -> None:
    bare = parsed("query", "--store", store, "--test-id", "2", "--layer", "1", "--top", "3", "--bottom")
    numbered = parsed("query", "--store", store, "--test-id", "2", "--layer", "1", "--bottom", "3")
    assert bare == numbered == dualstore.open(store).query(test_id=2, layer=1, top=3, bottom=True).to_dicts()


def test_where_and_per_reach_the_library(store: Path) -> None:
    where = "task = 'new' AND epoch >= 1"
    found = parsed(
        "query", "--store", store, "--test-id", "0", "--layer", "layer0", "--where", where, "--per", "label", "--top", "2"
    )
    assert found == dualstore.open(store).query(test_id=0, layer=0, where=where, per="label", top=2).to_dicts()
    assert {row["task"] for row in found} == {"new"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small recorded training, with weights and a loss of its probes."""
    path = tmp_path_factory.mktemp("cli") / "trained"
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.arange(30) % LABELS
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, LABELS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with dualstore.record(model, optimizer, path) as recorder:
        for step in range(8):
            with recorder.batch(range(30), y, task="new" if step > 3 else "old"):
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with recorder.probe(range(30), y, loss=lambda out: nn.functional.cross_entropy(out, y, reduction="none")):
            model(x)
    return path


def test_scores_and_steps_reach_the_library(trained: Path) -> None:
    library = dualstore.open(trained)
    ask = ("--store", trained, "--test-id", "2", "--layer", "1")
    for words, how in (
        (("--score", "contribution", "--output", "2"), {"score": "contribution", "output": 2}),
        (
            ("--score", "contribution", "--output", "label", "--at-step", "5"),
            {"score": "contribution", "output": "label", "at_step": 5},
        ),
        (("--score", "influence"), {"score": "influence"}),
        (("--at-step", "3"), {"at_step": 3}),
    ):
        assert parsed("query", *ask, *words) == library.query(test_id=2, layer=1, **how).to_dicts()
        assert parsed("totals", *ask, *words) == library.totals(test_id=2, layer=1, **how).to_dicts()
        count = "SELECT count(*) AS n FROM attention"
        assert parsed("sql", count, *ask, *words) == library.sql(count, test_id=2, layer=1, **how).to_dicts()
    shown = call("query", *ask, "--score", "contribution", "--output", "predicted", "--top", "2").stdout.splitlines()
    assert shown[-2].startswith("contribution = alpha * value")
    assert shown[-1].startswith("output ")
    assert "% of the output" in shown[-1]
    fails("query", *ask, "--score", "contribution", "--output", "9", match="output: expected a number from 0 to 2")
    fails("query", *ask, "--score", "contribution", "--output", "-1", match="found -1")
    fails("totals", *ask, "--at-step", "8", match="at_step: expected a step of the run, 0 to 7; found 8")
    call("query", *ask, "--score", "value", code=2)


def test_self_reaches_the_library(trained: Path) -> None:
    library = dualstore.open(trained)
    assert parsed("self", "--store", trained, "--top", "4") == library.self_influence(top=4).to_dicts()
    found = parsed("self", "--store", trained, "--layer", "1", "--where", "label = 1", "--at-step", "2")
    assert found == library.self_influence(1, where="label = 1", at_step=2).to_dicts()


def test_reweigh_writes_weights_and_shows_accuracy(trained: Path, tmp_path: Path) -> None:
    library = dualstore.open(trained)
    found = parsed("reweigh", "--store", trained, "--gain", "task=new:0:1:0.5", "--evaluate", "--with-initial")
    assert found == library.evaluate({"task": {"new": [0, 0.5, 1]}}, with_initial=True).to_dicts()
    assert [row["task=new"] for row in found] == [0, 0.5, 1]
    for words, mean in ((("ema:0.5",), Average(decay=0.5)), (("swa:2", "--from", "3"), Average(first=3, every=2))):
        found = parsed("reweigh", "--store", trained, "--evaluate", "--average", *words)
        assert found == library.evaluate({}, average=mean).to_dicts()
    fails("reweigh", "--store", trained, "--evaluate", "--average", "mean", match="expected ema:DECAY or swa:EVERY")
    fails("reweigh", "--store", trained, "--evaluate", "--average", "swa:0", match="every >= 1")
    out = tmp_path / "weights.safetensors"
    call("reweigh", "--store", trained, "--gain", "task=new:-2.5", "--gain", "label=1:0", "--at-step", "6", "--out", out)
    written = load_file(out)
    assert list(written) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    expected = library.weights(1, gains={"task": {"new": -2.5}, "label": {1: 0}}, at_step=6)
    np.testing.assert_array_equal(written["2.weight"], expected.weight.astype(np.float32))
    np.testing.assert_array_equal(written["2.bias"], expected.bias.astype(np.float32))


@pytest.mark.parametrize(
    "gain", ["task", "task=new", "task=new:", "task=:1", "=new:1", "task=new:x", "task=new:nan", "task=new:0:1"]
)
def test_a_gain_that_is_not_one_is_refused_in_one_line(trained: Path, gain: str) -> None:
    fails("reweigh", "--store", trained, "--gain", gain, "--evaluate", match="gain ")


def test_reweigh_says_what_is_missing(trained: Path, tmp_path: Path) -> None:
    ask = ("reweigh", "--store", trained)
    call(*ask, "--gain", "task=new:1", code=2)
    call(*ask, "--gain", "task=new:1", "--gain", "task=new:2", "--evaluate", code=2)
    call(*ask, "--gain", "task=new:1:2:1", "--out", tmp_path / "w", code=2)
    call(*ask, "--evaluate", "--from", "3", code=2)
    fails(*ask, "--gain", "task=newer:1", "--evaluate", match="no pattern has this value; there are new, old")
    for sweep in ("1:2:0", "2:1:0.1", "0:1:1e-9"):
        fails(*ask, "--gain", f"task=new:{sweep}", "--evaluate", match="expected a STEP that leads from START to STOP")
    fails(*ask, "--gain", "task=new:1", "--out", "", match="expected the name of a file to write")
    fails(*ask, "--evaluate", "--average", "swa:3000000000", match="average: expected")
    fails("query", "--store", trained, "--test-id", "2", "--layer", "1", "--score", "contribution", "--output", "1" * 5000,
          match="output: expected a number from 0 to 2")  # fmt: skip
    (tmp_path / "file").touch()
    fails(*ask, "--gain", "task=new:1", "--out", tmp_path / "file" / "w", match="cannot be written")


def test_several_test_ids_and_vectors_answer_in_one_pass(store: Path, tmp_path: Path) -> None:
    found = parsed("query", "--store", store, "--test-id", "0", "--test-id", "3", "--layer", "0", "--top", "1")
    assert [row["test_id"] for row in found] == [0, 3]
    np.save(tmp_path / "q.npy", np.ones((2, 4)))
    found = parsed("query", "--store", store, "--vector", tmp_path / "q.npy", "--layer", "0", "--top", "1")
    assert [row["query"] for row in found] == [0, 1]


def test_totals_votes_and_sql_speak_json_and_csv(store: Path) -> None:
    found = parsed("totals", "--store", store, "--test-id", "1", "--layer", "1", "--by", "label, task")
    assert list(found[0]) == ["label", "task", "total", "count"]
    assert sum(row["count"] for row in found) == 60
    votes = parsed("votes", "--store", store)
    assert list(votes[0]) == ["layer", "prediction", "probes", "target_accuracy", "output_accuracy"]
    assert [(row["layer"], row["prediction"]) for row in votes] == [(0, "right"), (0, "wrong"), (1, "right"), (1, "wrong")]
    text = call("totals", "--store", store, "--test-id", "1", "--layer", "1", "--by", "label, task", "--csv").stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [float(row["total"]) for row in rows] == [row["total"] for row in found]
    counted = parsed("sql", "SELECT count(*) AS n, NULL AS nothing, 'NaN'::DOUBLE AS bad FROM patterns", "--store", store)
    assert counted == [{"n": 120, "nothing": None, "bad": None}]
    attended = parsed("sql", "SELECT sum(alpha) AS total FROM attention", "--store", store, "--layer", "1", "--test-id", "1")
    assert attended[0]["total"] == pytest.approx(sum(row["total"] for row in found))


def test_abs_and_paper_reach_the_library(store: Path) -> None:
    opened = dualstore.open(store)
    for layer in (0, 1):
        asked = ("totals", "--store", store, "--test-id", "1", "--layer", str(layer))
        assert parsed(*asked, "--abs") == opened.totals(test_id=1, layer=layer, absolute=True).to_dicts()
        assert parsed(*asked, "--paper") == opened.totals(test_id=1, layer=layer, absolute=layer == 0).to_dicts()


def test_a_file_that_vanishes_while_the_bytes_are_counted_is_left_out(store: Path, tmp_path: Path) -> None:
    held = dualstore.open(shutil.copytree(store, tmp_path / "store"))
    expected = sum(path.stat().st_size for path in held.path.rglob("*") if path.is_file())
    (held.path / ".gone.tmp").symlink_to("nowhere")  # there in the folder, and no longer when it is looked at
    assert held.info()["bytes"] == expected


def test_info_is_one_object_and_verify_fails_on_a_store_without_weights(store: Path) -> None:
    info = parsed("info", "--store", store)
    assert info["rows"] == 120
    assert [layer["name"] for layer in info["layers"]] == ["layer0", "layer1"]
    found = json.loads(call("verify", "--store", store, "--json", code=1).stdout)
    assert not found["ok"]
    assert list(found) == ["ok", "layers", "rows", "problems"]
    assert "weights" in found["problems"][0]
    assert list(found["layers"][0]) == ["layer", "name", "rows", "weight_residual", "output_residual", "note", "recorded"]
    assert "problem: " in call("verify", "--store", store, code=1).stdout


def test_tables_show_every_column_and_a_title(store: Path) -> None:
    text = call("query", "--store", store, "--test-id", "2", "--layer", "1", "--top", "3").stdout
    assert text.startswith("top 3 of 60 patterns: test 2, layer 1 (layer1)")
    for name in ("rank", "alpha", "step", "epoch", "sample_id", "position", "label", "task"):
        assert name in text
    assert "votes" in call("votes", "--store", store).stdout


def test_the_store_comes_from_the_environment_or_is_named_store(store: Path) -> None:
    assert call("info", env={"DUALSTORE_STORE": str(store)}).stdout == call("info", "--store", store).stdout
    assert call("info", "--store", "store", folder=store.parent).stdout == call("info", folder=store.parent).stdout


def test_more_than_there_is_gives_what_there_is(store: Path) -> None:
    assert len(parsed("query", "--store", store, "--test-id", "2", "--layer", "1", "--top", "1000000")) == 60


def test_wrong_questions_end_with_one_line(store: Path, tmp_path: Path) -> None:
    query = ("query", "--store", store, "--layer", "1")
    fails(*query, "--test-id", "77", match="test id 77 was not recorded")
    fails("query", "--store", store, "--test-id", "1", "--layer", "9", match="no layer 9; there are 0 (layer0), 1 (layer1)")
    fails(*query, "--test-id", "1", "--where", "colour = 1", match="colour")
    fails(*query, "--test-id", "1", "--where", "label = ", match="syntax error")
    fails(*query, match="expected either a vector x or a test_id, found neither")
    fails("sql", "SELEKT 1", "--store", store, match="syntax error")
    fails("sql", "SELECT * FROM attention", "--store", store, match="attention")
    np.save(tmp_path / "q.npy", np.ones(5))
    fails(*query, "--vector", tmp_path / "q.npy", match="expected 6 values")
    np.save(tmp_path / "nan.npy", np.full(6, np.nan))
    fails(*query, "--vector", tmp_path / "nan.npy", match="NaN")
    (tmp_path / "text.npy").write_text("hello")
    fails(*query, "--vector", tmp_path / "text.npy", match="expected a .npy file")
    fails(*query, "--vector", tmp_path / "none.npy", match="none.npy")


def test_wrong_usage_exits_with_two(store: Path) -> None:
    fails("query", "--store", store, "--test-id", "1", "--layer", "1", "--top", "0", match="--top", code=2)
    fails("query", "--store", store, "--test-id", "one", "--layer", "1", match="--test-id", code=2)
    fails("query", "--store", store, "--test-id", "1", match="--layer", code=2)
    fails("quarry", match="No such command", code=2)
    fails("train", "cifar", match="cifar", code=2)


def test_places_without_a_store_are_named(tmp_path: Path) -> None:
    fails("info", "--store", tmp_path / "none", match="no store there")
    (tmp_path / "other").mkdir()
    fails("info", "--store", tmp_path / "other", match="not a store")
    (tmp_path / "other" / "store.json").write_text('{"dualstore": "store", "format": 99}')
    fails("info", "--store", tmp_path / "other", match="format 99 is newer")


def test_an_unfinished_store_answers_with_a_warning(store: Path, tmp_path: Path) -> None:
    rows = Rows(*(np.zeros(8, np.int64) for _ in range(5)), np.ones((8, 2), np.float32), np.ones((8, 1), np.float32))
    write_store(tmp_path / "store", [rows], status="recording")
    found = call("info", "--store", tmp_path / "store", "--json")
    assert found.stderr.startswith("warning: ")
    assert "complete up to step 0" in found.stderr
    assert json.loads(found.stdout)["status"] == "recording"


def test_stiffness_without_rows_of_blocks_says_how_to_record_them(store: Path) -> None:
    fails("stiffness", "--store", store, match="expected rows of residual blocks, found none; record them with record(..., blocks=")


def test_help_is_there_for_every_command() -> None:
    names = [line.split()[0] for line in call("--help").stdout.split("Commands:")[1].splitlines() if line.strip()]
    first = ["demo", "index", "info", "merge", "query", "reproduce", "reweigh", "self", "sql", "stiffness"]
    assert names == [*first, "totals", "train", "verify", "votes"]
    for name in names:
        assert ("--store" in call(name, "--help").stdout) == (name not in ("merge", "reproduce"))
    assert "dualstore" in call("--version").stdout


def test_the_demo_replaces_its_own_store(tmp_path: Path) -> None:
    for _ in range(2):
        assert "exact: the store rebuilds the network" in call("demo", "--store", tmp_path / "s", "--steps", "20").stdout


def test_the_demo_never_replaces_what_it_did_not_make(store: Path, tmp_path: Path) -> None:
    fails("demo", "--store", store, match="found something else")
    (tmp_path / "notes.txt").write_text("mine")
    fails("demo", "--store", tmp_path, match="found something else")
    fails("demo", "--store", tmp_path / "notes.txt", match="found something else")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (store / "store.json").exists()


def test_index_is_built_and_explain_says_that_it_was_used(store: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(store, tmp_path / "store")
    ask = ("totals", "--store", copy, "--test-id", "2", "--layer", "1", "--json", "--explain")
    before = call(*ask)
    assert "path: scan" in before.stderr
    assert not call("index", "--store", copy).stdout
    after = call(*ask)
    assert "share: " in after.stderr
    assert after.stdout == before.stdout
    names = ["part-0-000000.sketch-0.arrow", "part-0-000000.sums.arrow"]
    assert [path.name for path in sorted((copy / "index").glob("*/*"))] == names * 2
    query = call("query", "--store", copy, "--test-id", "2", "--layer", "1", "--top", "3", "--json", "--explain")
    assert "rows bounded: " in query.stderr
    fails("index", "--store", tmp_path / "none", match="no store there")


def test_csv_quotes_what_ends_a_line_and_writes_nested_values_as_json(store: Path) -> None:
    text = "SELECT 'a\rb' AS r, [1, NULL] AS list, sum(step) AS whole FROM patterns"
    rows = subprocess.run([SCRIPT, "sql", text, "--store", store, "--csv"], capture_output=True, check=True).stdout.decode()
    found = list(csv.reader(io.StringIO(rows, newline="")))
    assert found[1][:2] == ["a\rb", "[1, null]"]
    assert found[1][2] == str(2 * 6 * 45)
    assert parsed("sql", "SELECT sum(step) AS whole FROM patterns", "--store", store) == [{"whole": 540}]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY\x01\x00\x10\x00{'descr': ((((((\n"])
def test_a_vector_file_that_is_none_is_refused(store: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    fails("query", "--store", store, "--layer", "0", "--vector", tmp_path / "x.npy", match="x.npy: expected a .npy file")


@pytest.mark.parametrize(
    "words",
    [
        ("train", "mnist", "--lr", "-1"),
        ("train", "mnist", "--lr", "nan"),
        ("train", "mnist", "--clip", "inf"),
        ("train", "mnist", "--seed", "9" * 20),
        ("train", "mnist", "--hidden", "9" * 12),
        ("sql", "SELECT 1", "--threads", "1000000"),
        ("sql", "SELECT 1", "--memory", "9" * 20),
    ],
    ids=" ".join,
)
def test_numbers_out_of_range_are_wrong_usage(words: tuple[str, ...]) -> None:
    fails(*words, match="Invalid value", code=2)


def test_a_layer_of_many_digits_is_a_name(store: Path) -> None:
    fails("query", "--store", store, "--layer", "9" * 5000, "--test-id", "1", match="no layer")


def test_output_that_the_terminal_cannot_show_is_escaped(store: Path) -> None:
    found = call("sql", "SELECT 'ü' AS name", "--store", store, "--csv", env={"PYTHONIOENCODING": "ascii"})
    assert "\\xfc" in found.stdout


def test_a_closed_output_is_an_error_in_one_line(store: Path) -> None:
    command = f'"{SCRIPT}" info --store "{store}" >&-'
    found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr == "error: standard output is closed; nothing to print to\n"

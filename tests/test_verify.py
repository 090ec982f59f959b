"""Proving a store: a sound one has no problems, and every kind of damage is named without an exception."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

import dualstore
from dualstore.errors import DamagedError
from dualstore.verify import LIMITS, Verification

torch.set_num_threads(1)

X = torch.linspace(-2, 2, 48, dtype=torch.float64).reshape(12, 4).sin()
Y = torch.arange(12) % 3
PART = "patterns/layer=0/part-0-000001.parquet"
"""Holds steps 3 to 5 of layer 0."""


def record(path: Path, *, dtype: str = "float64") -> None:
    """Six steps of 12 rows in two parts a layer, probed at the end."""
    torch.manual_seed(1)
    kind = getattr(torch, dtype)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    with dualstore.record(model, optimizer, path, dtype=dtype) as recorder:
        for step in range(6):
            with recorder.batch(range(12), Y, task="t"):
                nn.functional.cross_entropy(model(X.to(kind)), Y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                recorder.flush()
        model.eval()
        with recorder.probe(range(20, 26), Y[:6]):
            model(X[:6].to(kind))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store to copy, never to change."""
    path = tmp_path_factory.mktemp("sound") / "store"
    record(path)
    return path


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    """A store that may be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "store"))


def problems(path: Path, *, probes: int = 8) -> list[str]:
    """What verify names in a store that must not pass."""
    found = dualstore.open(path).verify(probes=probes)
    assert not found.ok
    assert [check.layer for check in found.layers] == [0, 1]
    json.dumps(found.to_dict())
    return found.problems


def named(found: list[str], *words: str) -> bool:
    """Whether one problem has all the words."""
    return any(all(word in problem for word in words) for problem in found)


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Replaces a part by what pyarrow writes of its changed rows."""
    pq.write_table(change(pq.ParquetFile(path).read()), path)


def with_values(table: pa.Table, name: str, change: Callable[[list[Any]], Any]) -> pa.Table:
    """The table with a column changed as a list."""
    values = table.column(name).to_pylist()
    change(values)
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def values_at(path: Path, column: str) -> tuple[int, int]:
    """Offset and size of a column's values in a part of one row group."""
    metadata = pq.read_metadata(path)
    leaves = {metadata.schema.column(i).path.split(".")[0]: i for i in range(len(metadata.schema))}
    chunk = metadata.row_group(0).column(leaves[column])
    width = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}[chunk.physical_type]
    end = chunk.data_page_offset + chunk.total_compressed_size
    return end - chunk.num_values * width, chunk.num_values * width


def flip(path: Path, at: int) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sound_store_proves_itself(tmp_path: Path, dtype: str) -> None:
    record(tmp_path / "store", dtype=dtype)
    found = dualstore.open(tmp_path / "store").verify()
    assert found.ok
    assert found.problems == []
    assert found.rows == 144
    assert [(check.layer, check.name, check.rows) for check in found.layers] == [(0, "0", 72), (1, "2", 72)]
    for check in found.layers:
        assert check.weight_residual is not None
        assert check.output_residual is not None
        assert max(check.weight_residual, check.output_residual) <= LIMITS[dtype]


def test_the_verification_turns_into_plain_values(sound: Path) -> None:
    found = dualstore.open(sound).verify().to_dict()
    assert found["ok"] is True
    assert json.loads(json.dumps(found)) == found
    assert set(found["layers"][0]) == {"layer", "name", "rows", "weight_residual", "output_residual", "note", "recorded"}
    empty = Verification()
    empty.problem("odd")
    assert empty.to_dict() == {"ok": False, "layers": [], "rows": 0, "problems": ["odd"]}


@pytest.mark.parametrize("probes", [0, 1, 5, 100])
def test_any_number_of_probes_may_be_checked(sound: Path, probes: int) -> None:
    found = dualstore.open(sound).verify(probes=probes)
    assert found.ok
    assert all((check.output_residual is None) == (probes == 0) for check in found.layers)


def test_a_store_without_steps_proves_itself(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    dualstore.record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "store").close()
    found = dualstore.open(tmp_path / "store").verify()
    assert found.problems == []
    assert found.layers[0].weight_residual == 0


@pytest.mark.parametrize("column", ["step", "position", "sample_id", "label", "task", "x", "e"])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_a_changed_value_does_not_match_its_checksum(copied: Path, column: str, place: float) -> None:
    start, size = values_at(copied / PART, column)
    flip(copied / PART, start + int(place * (size - 1)))
    assert named(problems(copied), PART, "damaged")


@pytest.mark.parametrize("column", ["test_id", "position", "step", "label", "predicted", "x", "y"])
def test_a_changed_value_of_a_probe_does_not_match_its_checksum(copied: Path, column: str) -> None:
    (part,) = (copied / "probes" / "layer=1").iterdir()
    flip(part, values_at(part, column)[0])
    assert named(problems(copied), str(part), "damaged")


@pytest.mark.parametrize("name", ["x", "e"])
def test_a_changed_value_without_a_checksum_shows_in_the_residual(copied: Path, name: str) -> None:
    def change(values: list[Any]) -> None:
        values[7][0] += 1e-6

    rewrite(copied / PART, lambda table: with_values(table, name, change))
    assert named(problems(copied), "layer 0 (0): weight residual")


def test_labels_do_not_matter_to_the_weights(copied: Path) -> None:
    def swap(values: list[Any]) -> None:
        values[0], values[1] = values[1], values[0]

    for name in ("label", "sample_id", "task"):
        rewrite(copied / PART, lambda table, name=name: with_values(table, name, swap))
    found = dualstore.open(copied).verify()
    assert found.problems == []


def test_a_part_that_another_writer_wrote_is_as_good(copied: Path) -> None:
    rewrite(copied / PART, lambda table: table)
    assert dualstore.open(copied).verify().problems == []


def test_a_missing_part_is_named_by_its_steps(copied: Path) -> None:
    (copied / PART).unlink()
    found = problems(copied)
    assert named(found, "layer 0 (0): step 3: expected 12 rows, found 0; 3 steps differ")
    assert named(found, "layer 0 (0): weight residual")
    assert not named(found, "layer 1 (2)")


def test_a_missing_layer_is_named(copied: Path) -> None:
    shutil.rmtree(copied / "patterns" / "layer=1")
    assert named(problems(copied), "layer 1 (2): step 0: expected 12 rows, found 0; 6 steps differ")


def test_missing_rows_are_named(copied: Path) -> None:
    rewrite(copied / PART, lambda table: table.slice(2))
    assert named(problems(copied), "layer 0 (0): step 3: expected 12 rows, found 10; 1 steps differ")


def test_a_part_that_is_there_twice_is_named(copied: Path) -> None:
    shutil.copy(copied / PART, copied / "patterns" / "layer=0" / "part-1-000001.parquet")
    found = problems(copied)
    assert named(found, "part-1-000001.parquet", "rows are not in step order; a part may be there twice")
    assert named(found, "layer 0 (0): step 3: expected 12 rows, found 24; 3 steps differ")


def test_rows_out_of_order_are_named(copied: Path) -> None:
    rewrite(copied / PART, lambda table: table.take(pa.array(range(table.num_rows - 1, -1, -1))))
    assert named(problems(copied), PART, "rows are not in step order")


def test_rows_of_steps_that_are_not_in_the_log_are_named(copied: Path) -> None:
    (copied / "steps" / "part-0-000001.parquet").unlink()
    found = problems(copied)
    assert named(found, PART, "36 rows of steps that the optimiser's log lacks")
    assert named(found, "weight residual")


@pytest.mark.parametrize("left", [0, 3, 100, 0.5, -1])
def test_a_truncated_part_is_named(copied: Path, left: float) -> None:
    data = (copied / PART).read_bytes()
    (copied / PART).write_bytes(data[: int(left * len(data)) if isinstance(left, float) else left])
    assert named(problems(copied), PART)


def test_a_part_that_is_something_else_is_named(copied: Path) -> None:
    (copied / PART).write_text("not Parquet at all")
    assert named(problems(copied), PART, "expected a Parquet file")


@pytest.mark.parametrize("name", ["x", "e", "step"])
def test_a_part_without_a_column_is_named(copied: Path, name: str) -> None:
    rewrite(copied / PART, lambda table: table.drop_columns([name]))
    assert named(problems(copied), PART, f"expected a column {name!r}")


def test_vectors_of_another_width_are_named(copied: Path) -> None:
    def shorten(values: list[Any]) -> None:
        values[:] = [value[:3] for value in values]

    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index("x")
        values = table.column("x").to_pylist()
        shorten(values)
        return table.set_column(index, "x", pa.array(values, pa.list_(pa.float64(), 3)))

    rewrite(copied / PART, change)
    assert named(problems(copied), PART, "column 'x'")


def test_nulls_are_named(copied: Path) -> None:
    def change(table: pa.Table) -> pa.Table:
        values = table.column("x").to_pylist()
        values[5] = None
        return table.set_column(table.schema.get_field_index("x"), "x", pa.array(values, pa.list_(pa.float64())))

    rewrite(copied / PART, change)
    assert named(problems(copied), PART, "null")


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.31), ("momentum", 0.0), ("decay", 0.5), ("clip", 0.9), ("nesterov", True), ("maximize", True)]
)
def test_an_edited_step_shows_in_the_residual_of_every_layer(copied: Path, name: str, value: Any) -> None:
    def change(values: list[Any]) -> None:
        values[1] = value

    rewrite(copied / "steps" / "part-0-000001.parquet", lambda table: with_values(table, name, change))
    found = problems(copied)
    assert named(found, "layer 0 (0): weight residual")
    assert named(found, "layer 1 (2): weight residual")
    assert named(found, "layer 0 (0): output residual")


def test_a_step_that_is_said_to_be_idle_shows_in_the_residual_of_its_layer(copied: Path) -> None:
    def change(values: list[Any]) -> None:
        values[0] = [1]

    rewrite(copied / "steps" / "part-0-000000.parquet", lambda table: with_values(table, "idle", change))
    found = problems(copied)
    assert named(found, "layer 1 (2): weight residual")
    assert not named(found, "layer 0 (0)")


@pytest.mark.parametrize("rows", [[12], [12, 11], []], ids=str)
def test_an_edited_number_of_rows_is_named(copied: Path, rows: list[int]) -> None:
    def change(values: list[Any]) -> None:
        values[2] = rows

    rewrite(copied / "steps" / "part-0-000001.parquet", lambda table: with_values(table, "rows", change))
    assert named(problems(copied), "layer 1 (2): step 5: expected ")


def test_a_missing_step_is_named(copied: Path) -> None:
    rewrite(copied / "steps" / "part-0-000000.parquet", lambda table: table.slice(1))
    found = problems(copied)
    assert named(found, "steps: expected every step from 0 to 5, found 5")
    assert named(found, "12 rows of steps that the optimiser's log lacks")


def test_a_step_that_is_there_twice_is_named(copied: Path) -> None:
    shutil.copy(copied / "steps" / "part-0-000000.parquet", copied / "steps" / "part-1-000000.parquet")
    assert named(problems(copied), "steps: expected one row of parameter group 0 for each step")


def test_an_interrupted_store_counts_its_rows_and_says_once_what_it_lacks(copied: Path) -> None:
    (copied / "weights" / "final.safetensors").unlink()
    found = dualstore.open(copied).verify()
    assert [(layer.rows, layer.weight_residual) for layer in found.layers] == [(72, None), (72, None)]
    assert len(found.problems) == 1
    assert "final.safetensors: expected the weights" in found.problems[0]


@pytest.mark.parametrize("name", ["initial", "final"])
def test_missing_weights_are_named(copied: Path, name: str) -> None:
    (copied / "weights" / f"{name}.safetensors").unlink()
    assert named(problems(copied), f"{name}.safetensors: expected the weights of the recording, found no file")


@pytest.mark.parametrize("name", ["initial", "final"])
@pytest.mark.parametrize("left", [0, 4, 50, -5], ids=str)
def test_damaged_weights_are_named(copied: Path, name: str, left: int) -> None:
    file = copied / "weights" / f"{name}.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert named(problems(copied), f"{name}.safetensors: expected a safetensors file")


@pytest.mark.parametrize("name", ["initial", "final"])
def test_changed_weights_show_in_the_residual_of_their_layer(copied: Path, name: str) -> None:
    file = copied / "weights" / f"{name}.safetensors"
    tensors = load_file(file)
    tensors["2.weight"][1, 1] += 1e-6
    save_file(tensors, file)
    found = problems(copied)
    assert named(found, "layer 1 (2): weight residual")
    assert not named(found, "layer 0 (0)")


@pytest.mark.parametrize("name", ["initial", "final"])
def test_weights_that_lack_a_tensor_or_have_another_shape_are_named(copied: Path, name: str) -> None:
    file = copied / "weights" / f"{name}.safetensors"
    tensors = load_file(file)
    tensors["0.weight"] = np.zeros((2, 2))
    del tensors["2.bias"]
    save_file(tensors, file)
    found = problems(copied)
    assert named(found, "expected '0.weight' of shape (6, 4), found (2, 2)")
    assert named(found, "expected '2.bias' of shape (3,), found nothing")


def test_a_changed_output_of_a_probe_shows_in_the_residual(copied: Path) -> None:
    def change(values: list[Any]) -> None:
        values[3][0] += 1e-6

    (part,) = (copied / "probes" / "layer=0").iterdir()
    rewrite(part, lambda table: with_values(table, "y", change))
    assert named(problems(copied), "layer 0 (0): output residual")


def test_a_damaged_probe_part_does_not_keep_the_weights_from_being_proved(copied: Path) -> None:
    (part,) = (copied / "probes" / "layer=0").iterdir()
    part.write_bytes(part.read_bytes()[:-10])
    assert named(problems(copied), str(part), "expected a Parquet file")
    check = dualstore.open(copied).verify().layers[1]
    assert check.weight_residual is not None


def test_one_damaged_layer_does_not_keep_the_others_from_being_proved(copied: Path) -> None:
    (copied / PART).write_bytes(b"")
    found = dualstore.open(copied).verify()
    assert not found.ok
    assert found.layers[0].weight_residual is None
    assert found.layers[1].weight_residual is not None
    assert found.layers[1].weight_residual <= 1e-11


def test_what_was_noticed_while_recording_is_repeated(copied: Path) -> None:
    file = copied / "store.json"
    values = json.loads(file.read_text())
    values["problems"] = ["something odd"]
    file.write_text(json.dumps(values))
    assert problems(copied) == ["while recording: something odd"]


def test_a_note_of_norms_that_would_hide_rows_from_a_query_is_named(copied: Path) -> None:
    data = (copied / PART).read_bytes()
    note = json.loads(pq.read_metadata(copied / PART).metadata[b"dualstore"])
    bound = json.dumps(note["max_norm"]["x"][0]).encode()
    (copied / PART).write_bytes(data.replace(bound, b"0." + b"0" * (len(bound) - 3) + b"1"))
    assert named(problems(copied), PART, "norm")


def test_a_truncated_log_of_steps_is_refused_when_the_store_is_opened(copied: Path) -> None:
    part = copied / "steps" / "part-0-000001.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(DamagedError, match=r"part-0-000001\.parquet: expected the columns of a steps part"):
        dualstore.open(copied)


def test_no_single_flipped_bit_of_a_part_raises_or_changes_weights_unnoticed(sound: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sound, tmp_path / "store"))
    whole = (path / PART).read_bytes()
    random = np.random.default_rng(0)
    tail = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    places = {*random.integers(0, len(whole), 30).tolist(), *random.integers(tail, len(whole), 50).tolist()}
    columns = {name: values_at(path / PART, name) for name in ("step", "x", "e")}
    for place in sorted(places):
        (path / PART).write_bytes(whole)
        flip(path / PART, place)
        found = dualstore.open(path).verify(probes=0)
        inside = any(start <= place < start + size for start, size in columns.values())
        assert not (inside and found.ok), place


def test_an_adaptive_optimiser_may_leave_more_of_its_rounding_but_no_more_than_that(tmp_path: Path) -> None:
    """A pattern that is missing shows all the same."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(64, 4)
    with dualstore.record(model, optimizer, tmp_path / "store") as recorder:
        for step in range(100):
            ids = torch.arange(step, step + 16) % 64
            with recorder.batch(ids):
                (model(x[ids]) - x[ids, :3].tanh()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    limit = dualstore.verify._limits(store, store.layers[0])[0]
    assert 1e-5 < limit <= 1e-4
    whole, start = store.weights(0).weight, store.tensors("initial")["model.weight"]
    without = store.weights(0, where="NOT (step = 50 AND sample_id = 57)").weight
    assert np.linalg.norm(without - whole) > 5 * limit * np.linalg.norm(whole - start)

"""schema: store.json comes back as it was written; one that is missing, foreign, newer or damaged is a one-line error."""

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dualstore
from dualstore.errors import DamagedError, StoreError
from dualstore.schema import FORMAT, Column, Layer, Place, StoreInfo, pattern_columns, probe_columns

SCALARS = ["step", "position", "sample_id", "label", "task", "slot", "duplicate"]
LAYER = Layer(0, "fc1", "Linear", 784, 100, bias=True, weight_group=0, bias_group=1)
INFO = StoreInfo(
    layers=(LAYER, replace(LAYER, number=3, name="fc2", d_in=100, d_out=10, bias=False, bias_group=-1)),
    dtype="float64",
    optimizer="SGD",
    exact=True,
    status="interrupted",
    tasks=("mnist", "fashion"),
    unrecorded=("conv.weight",),
    problems=("gradients of parameter group 0 were changed",),
    created="2026-01-02T03:04:05+00:00",
    maker="a test",
)


def write(path: Path, text: str | bytes) -> Path:
    file = path / "store.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def changed(**values: Any) -> str:
    """The text of a good store.json with some fields changed; None takes a field out."""
    fields = json.loads(INFO.to_json()) | values
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def naming(path: Path, text: str = "") -> str:
    """A pattern that an error about the file matches: its name first, all in one line."""
    return rf"\A{re.escape(str(path))}: [^\n]*{text}[^\n]*\Z"


# What is written is read


def test_a_store_json_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, INFO.to_json())
    assert StoreInfo.read(tmp_path) == INFO


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tasks=st.lists(st.text(max_size=8), max_size=4), name=st.text(max_size=20), created=st.text(max_size=8))
def test_names_of_any_letters_come_back(tmp_path: Path, tasks: list[str], name: str, created: str) -> None:
    info = replace(INFO, tasks=tuple(tasks), layers=(replace(LAYER, name=name),), created=created)
    write(tmp_path, info.to_json())
    assert StoreInfo.read(tmp_path) == info


def test_the_first_field_says_that_it_is_a_store() -> None:
    fields = json.loads(INFO.to_json())
    assert next(iter(fields.items())) == ("dualstore", "store")
    assert fields["format"] == FORMAT
    assert fields["layers"][1]["d_in"] == 100


def test_fields_that_this_version_does_not_know_are_kept(tmp_path: Path) -> None:
    write(tmp_path, changed(later={"a": [1, 2]}, note="text"))
    info = StoreInfo.read(tmp_path)
    assert info.other == {"later": {"a": [1, 2]}, "note": "text"}
    write(tmp_path, replace(info, status="complete").to_json())
    assert StoreInfo.read(tmp_path) == replace(INFO, status="complete", other=info.other)


def test_fields_that_may_be_left_out_have_their_defaults(tmp_path: Path) -> None:
    write(tmp_path, changed(status=None, tasks=None, unrecorded=None, problems=None, created=None, maker=None))
    info = StoreInfo.read(tmp_path)
    assert (info.status, info.tasks, info.unrecorded, info.problems, info.created, info.maker) == ("recording", (), (), (), "", "")


def test_layers_are_found_by_their_number() -> None:
    assert INFO.layer(3).name == "fc2"
    with pytest.raises(KeyError, match="1"):
        INFO.layer(1)


# Columns


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_columns_of_patterns_and_probes_have_the_widths_of_the_layer(dtype: str) -> None:
    patterns = pattern_columns(LAYER, dtype)
    probes = probe_columns(LAYER, dtype)
    assert [column.name for column in patterns] == [*SCALARS, "x", "e"]
    assert [column.name for column in probes] == ["test_id", "position", "step", "label", "task", "predicted", "x", "y", "g"]
    widths = [784, 100, 784, 100, 100]
    assert [(column.width, column.dtype) for column in (*patterns[-2:], *probes[-3:])] == [(width, dtype) for width in widths]
    assert {column.dtype for column in (*patterns[:-2], *probes[:-3])} == {"int32", "int64"}
    assert probe_columns(LAYER, dtype, 1) == probes[:-1]
    assert pattern_columns(LAYER, dtype, 2) == (*patterns[:5], *patterns[-2:])


def test_half_precision_has_a_scale_beside_errors_and_none_in_probes() -> None:
    patterns = pattern_columns(LAYER, "float16")
    assert [(column.name, column.dtype) for column in patterns[-3:]] == [("x", "float16"), ("scale", "float32"), ("e", "float16")]
    assert probe_columns(LAYER, "float16") == probe_columns(LAYER, "float32")


def test_tokens_stand_for_keys_and_errors_may_be_left_out() -> None:
    tokens = replace(LAYER, keys="token", errors=False)
    assert [column.name for column in pattern_columns(tokens, "float16")] == [*SCALARS, "token"]
    assert [column.name for column in probe_columns(tokens, "float32")][-3:] == ["token", "y", "g"]


def test_layers_come_back_with_the_places_of_their_weights(tmp_path: Path) -> None:
    places = (Place("lstm.weight_hh_l0"), Place("lstm.weight_ih_l0", (4, 8), True, (12, 3)))
    layer = replace(LAYER, weight=places, biases=(Place("b_ih"), Place("b_hh")))
    write(tmp_path, replace(INFO, layers=(layer,)).to_json())
    (found,) = StoreInfo.read(tmp_path).layers
    assert found == layer
    assert (found.weight_places, found.bias_places) == (places, layer.biases)
    assert (LAYER.weight_places, LAYER.bias_places) == ((Place("fc1.weight"),), (Place("fc1.bias"),))
    assert replace(LAYER, bias=False).bias_places == ()


def test_the_bytes_of_a_row_follow_from_type_and_width() -> None:
    columns = [Column("a", "int32"), Column("b", "int64"), Column("c", "float32", 5), Column("d", "float64", 1)]
    assert [(column.row_width, column.row_bytes) for column in columns] == [(1, 4), (1, 8), (5, 20), (1, 8)]


# Stores that are not there, foreign, newer or damaged


def test_a_missing_folder_is_an_error_that_says_how_to_make_a_store(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match=naming(path, "no store there; record one")) as raised:
            StoreInfo.read(path)
        assert not isinstance(raised.value, DamagedError)


def test_a_folder_without_store_json_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=naming(tmp_path, "not a store .*no store.json")):
        StoreInfo.read(tmp_path)
    (tmp_path / "store.json").mkdir()
    with pytest.raises(StoreError, match=naming(tmp_path, "not a store .*no store.json")):
        StoreInfo.read(tmp_path)


DAMAGED: dict[str, str | bytes] = {
    "empty": "",
    "cut short": INFO.to_json()[:100],
    "text": "not JSON\nat all\n",
    "not text": b"\xff\xfe\x00\x01" * 20,
    "a list": "[1, 2]",
    "a number": "3",
    "nothing": "null",
    "an empty object": "{}",
    "foreign": '{"name": "another program", "version": 1}',
    "no format": changed(format=None),
    "nested without end": "[" * 100_000,
    "no layers": changed(layers=None),
    "no dtype": changed(dtype=None),
    "no optimizer": changed(optimizer=None),
    "no exactness": changed(exact=None),
    "layers that are a number": changed(layers=3),
    "layers that are names": changed(layers=["fc1"]),
    "a layer without a width": changed(layers=[{"number": 0, "name": "fc1", "kind": "Linear"}]),
    "tasks that are a number": changed(tasks=3),
}


@pytest.mark.parametrize("content", DAMAGED)
def test_a_store_json_that_cannot_be_read_is_damaged(tmp_path: Path, content: str) -> None:
    file = write(tmp_path, DAMAGED[content])
    with pytest.raises(DamagedError, match=naming(file, "expected .*, found ")):
        StoreInfo.read(tmp_path)


@pytest.mark.parametrize("kind", ["index", "", 1, ["store"], {}])
def test_a_file_that_says_it_is_something_else_is_not_called_newer(tmp_path: Path, kind: Any) -> None:
    file = write(tmp_path, changed(dualstore=kind))
    with pytest.raises(StoreError, match=naming(file)) as raised:
        StoreInfo.read(tmp_path)
    assert "newer" not in str(raised.value)


@pytest.mark.parametrize("content", [changed(format=FORMAT + 1), changed(format=99, layers=None, later=1)])
def test_a_newer_format_is_refused_and_not_called_damaged(tmp_path: Path, content: str) -> None:
    file = write(tmp_path, content)
    with pytest.raises(StoreError, match=naming(file, rf"format \d+ is newer than {FORMAT}, .*; upgrade it")) as raised:
        StoreInfo.read(tmp_path)
    assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize("found", ["1", 1.5, [1], True, 0, -1])
def test_a_format_that_is_no_version_is_damaged(tmp_path: Path, found: Any) -> None:
    file = write(tmp_path, changed(format=found))
    with pytest.raises(DamagedError, match=naming(file)):
        StoreInfo.read(tmp_path)


def with_layer(**values: Any) -> str:
    return changed(layers=[json.loads(INFO.to_json())["layers"][0] | values])


WRONG = {
    "status": changed(status="half"),
    "type": changed(dtype="text"),
    "type of vectors": changed(dtype="int32"),
    "number for a type": changed(dtype=4),
    "text for exactness": changed(exact="yes"),
    "text for tasks": changed(tasks="mnist"),
    "numbers for tasks": changed(tasks=[1, 2]),
    "text for a width": with_layer(d_in="784"),
    "no width": with_layer(d_in=None),
    "width of nothing": with_layer(d_in=0),
    "number for a name": with_layer(name=3),
}


def test_a_field_with_a_value_it_cannot_have_is_damaged(tmp_path: Path) -> None:
    """Read by a process of its own, as the type checks that go with tests would find some of them."""
    for place, content in WRONG.items():
        (tmp_path / place).mkdir()
        write(tmp_path / place, content)
    script = """
        import sys
        from pathlib import Path
        from dualstore.schema import StoreInfo

        for path in sorted(Path(sys.argv[1]).iterdir()):
            try:
                StoreInfo.read(path)
                print("no error")
            except Exception as error:
                print(type(error).__name__, error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    found = dict(zip(sorted(WRONG), done.stdout.splitlines(), strict=True))
    assert {
        place: line for place, line in found.items() if not line.startswith(f"DamagedError {tmp_path / place / 'store.json'}: ")
    } == {}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_store_json_with_bytes_changed_is_read_or_an_error_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(INFO.to_json().encode())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    file = write(tmp_path, bytes(content))
    message = ""
    try:
        StoreInfo.read(tmp_path)
    except StoreError as error:
        message = str(error)
    assert not message or re.match(naming(file), message)


def test_opening_says_the_same(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=naming(tmp_path / "missing", "no store there")):
        dualstore.open(tmp_path / "missing")
    file = write(tmp_path, "{")
    with pytest.raises(DamagedError, match=naming(file)):
        dualstore.open(tmp_path)

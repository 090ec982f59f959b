"""Half precision: errors of any size survive, every reader sees the same numbers, answers are those of a twin.

The twin is a store in single precision of the numbers that were kept.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray
from safetensors.numpy import load_file, save
from torch import nn

import dualstore
from dualstore import part
from dualstore.half import as_read, as_stored
from dualstore.schema import Layer, pattern_columns
from dualstore.store import Store
from dualstore.verify import LIMITS
from dualstore.writer import StoreWriter, write_whole
from tests import reference
from tests.reference import Rows, write_store

torch.set_num_threads(1)

LAYER = Layer(0, "layer0", "Linear", 6, 3, False, 0, -1)
COLUMNS = {column.name: column for column in pattern_columns(LAYER, "float16")}
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def kept(x: ndarray, e: ndarray) -> dict[str, ndarray]:
    """What is read of keys and errors that were stored."""
    return as_read(["x", "e"], as_stored({"x": x, "e": e}), COLUMNS)


def same(a: ndarray, b: ndarray) -> bool:
    """Whether two arrays have the same numbers; NaN is NaN."""
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


# What is stored


def errors_of(sizes: list[float], width: int, seed: int) -> ndarray:
    """A row of errors of about each size; elements of a row differ by up to 2^-30 from each other."""
    rng = np.random.default_rng(seed)
    spread = 2.0 ** -rng.integers(0, 31, (len(sizes), width))
    return (np.array(sizes)[:, None] * spread * rng.uniform(-1, 1, (len(sizes), width))).astype(np.float32)


@settings(max_examples=200, deadline=None)
@given(
    exponents=st.lists(st.floats(-30, 30), min_size=1, max_size=8), width=st.integers(1, 40), seed=st.integers(0, 1000)
)  # fmt: skip
def test_errors_of_any_size_keep_eleven_binary_digits_of_the_largest_of_their_row(
    exponents: list[float], width: int, seed: int
) -> None:
    e = errors_of([10.0**exponent for exponent in exponents], width, seed)
    found = kept(e, e)["e"]
    assert found.dtype == np.float32
    largest = np.abs(e).max(axis=1, keepdims=True).astype(np.float64)
    off = np.abs(found.astype(np.float64) - e)
    assert (off <= 2.0**-11 * largest).all()
    tiny = np.abs(e) <= 2.0**-24 * largest
    assert (off[~tiny] <= 2.0**-11 * np.abs(e)[~tiny]).all()
    assert (found[~tiny] != 0).all()


@pytest.mark.parametrize("largest", [2.0**-149, 2.0**-140, 2.0**-126, 2.0**-112, 1.0, 2.0**112, 2.0**127, 3.4028235e38])
def test_no_error_of_single_precision_is_too_small_or_too_large(largest: float) -> None:
    e = np.array([[largest, -largest, largest / 3, 0.0]], np.float32)
    stored = as_stored({"x": e, "e": e})
    assert stored["scale"].dtype == np.float32
    assert 2.0**-126 <= stored["scale"][0] <= 2.0**113
    assert np.frexp(stored["scale"])[0] == 0.5
    assert (np.abs(kept(e, e)["e"].astype(np.float64) - e) <= 2.0**-11 * np.float64(np.float32(largest))).all()


def test_the_largest_error_of_a_row_lies_below_where_half_precision_ends() -> None:
    e = errors_of([10.0**exponent for exponent in range(-30, 31)], 20, 0)
    largest = np.abs(as_stored({"x": e, "e": e})["e"]).max(axis=1)
    assert (largest >= 2.0**14).all()
    assert (largest <= 2.0**15).all()


def test_rows_of_zeros_have_scale_one() -> None:
    stored = as_stored(dict.fromkeys("xe", np.zeros((2, 3), np.float32)))
    assert stored["scale"].tolist() == [1.0, 1.0]
    assert not stored["e"].any()


def test_nan_and_infinity_stay_what_they_are_and_the_rest_of_their_row_is_kept() -> None:
    e = np.array([[np.nan, 1e-9, 0], [np.inf, -3e8, 1], [-np.inf, np.nan, np.inf], [3e38, -np.inf, 0]], np.float32)
    found = kept(e, e)["e"]
    assert np.array_equal(np.isfinite(found), np.isfinite(e))
    assert np.array_equal(np.where(np.isfinite(e), 0, found), np.where(np.isfinite(e), 0, e), equal_nan=True)
    assert np.allclose(np.where(np.isfinite(e), found, 0), np.where(np.isfinite(e), e, 0), rtol=2.0**-11, atol=0)


def test_keys_are_rounded_to_the_nearest_and_those_too_large_are_infinite() -> None:
    x = np.array([[1 + 2.0**-11, 65504, 65520, -1e9, 2.0**-24, 2.0**-26]], np.float32)
    found = kept(x, x)["x"]
    assert found.tolist() == [[1.0, 65504.0, np.inf, -np.inf, 2.0**-24, 0.0]]


def test_every_number_of_half_precision_is_read_exactly() -> None:
    found = as_read(["x"], {"x": EVERY_HALF[:, None]}, COLUMNS)["x"]
    sign, exponent, digits = np.arange(1 << 16) >> 15, np.arange(1 << 16) >> 10 & 31, np.arange(1 << 16) & 1023
    finite = np.where(exponent > 0, (1024 + digits) * 2.0 ** (exponent - 25), digits * 2.0**-24)
    expected = np.where(sign, -1, 1) * np.where(exponent < 31, finite, np.where(digits > 0, np.nan, np.inf))
    assert np.array_equal(found[:, 0], expected.astype(np.float32), equal_nan=True)
    finite = exponent < 31
    alone = as_read(["x"], {"x": EVERY_HALF[finite][:, None]}, COLUMNS)["x"]
    assert np.array_equal(alone.view(np.int32), EVERY_HALF[finite].astype(np.float32)[:, None].view(np.int32))


def test_subnormal_numbers_are_read_where_the_thread_takes_those_of_single_precision_for_zero() -> None:
    small = np.arange(1, 1024, dtype=np.uint16).view(np.float16)[:, None]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot take subnormal numbers for zero")
    try:
        found = as_read(["x"], {"x": small}, COLUMNS)["x"]
    finally:
        torch.set_flush_denormal(False)
    assert found[:, 0].tolist() == [n * 2.0**-24 for n in range(1, 1024)]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 30), low=st.integers(0, 255), high=st.integers(0, 255))
def test_numbers_are_rounded_as_numpy_rounds_them(seed: int, low: int, high: int) -> None:
    rng = np.random.default_rng(seed)
    exponent = rng.integers(min(low, high), max(low, high), 4096, endpoint=True, dtype=np.uint32)
    digits = rng.integers(0, 1 << 23, 4096, dtype=np.uint32) & rng.choice(np.array([0x7FFFFF, 0x7FF000, 0x7FE000], np.uint32), 4096)
    x = (rng.integers(0, 2, 4096, dtype=np.uint32) << 31 | exponent << 23 | digits).view(np.float32)
    x = np.where(np.isnan(x), np.float32(1), x).reshape(64, 64)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    assert np.array_equal(as_stored({"x": x, "e": x})["x"].view(np.uint16), expected.view(np.uint16))


# Files


def rows_of(count: int, seed: int, width: int = 6) -> Rows:
    rng = np.random.default_rng(seed)
    e = rng.normal(size=(count, 3)) * 10.0 ** rng.integers(-12, 3, (count, 1))
    x = rng.normal(size=(count, width))
    x[rng.random(count) < 0.3] = np.abs(x[0])  # keys that come again
    return Rows(
        step=np.sort(np.append(np.arange(8), rng.integers(0, 8, count - 8))).astype(np.int32),
        sample_id=rng.integers(0, 20, count),
        position=rng.integers(0, 2, count).astype(np.int32),
        label=rng.integers(0, 4, count).astype(np.int32),
        task=rng.integers(0, 2, count).astype(np.int32),
        x=x.astype(np.float32),
        e=e.astype(np.float32),
    )


def probes_of(rows: Rows) -> dict[str, ndarray]:
    rng = np.random.default_rng(5)
    numbers = np.arange(4)
    return {
        "test_id": numbers,
        **{name: numbers.astype(np.int32) % 4 for name in ("label", "predicted")},
        **{name: np.zeros(4, np.int32) for name in ("position", "task")},
        "step": np.full(4, 8, np.int32),
        "x": rng.normal(size=(4, rows.x.shape[1])).astype(np.float32),
        "y": rng.normal(size=(4, 3)).astype(np.float32),
    }


def write(path: Path, rows: Rows, dtype: str) -> Path:
    write_store(
        path, [rows], tasks=("a", "b"), epoch_of_step=lambda s: s // 3, probes=[probes_of(rows)], flush_every=3, dtype=dtype
    )
    rng = np.random.default_rng(9)
    for name in ("initial", "final"):
        tensors = {"layer0.weight": rng.normal(size=(3, rows.x.shape[1])).astype(np.float32)}
        write_whole(path / "weights" / f"{name}.safetensors", save(tensors))
    return path


@pytest.fixture(scope="module")
def rows() -> Rows:
    return rows_of(300, 0)


@pytest.fixture(scope="module")
def halved(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in half precision of several parts with small row groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, "MAX_GROUP_ROWS", 32)
        return write(tmp_path_factory.mktemp("half") / "store", rows, "float16")


def as_kept(rows: Rows) -> Rows:
    """The rows as a store in half precision keeps them."""
    return Rows(**{**vars(rows), **kept(rows.x, rows.e)})


@pytest.fixture(scope="module")
def twin(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store in single precision of what `halved` keeps: the slow, obvious version of it."""
    return dualstore.open(write(tmp_path_factory.mktemp("single") / "store", as_kept(rows), "float32"))


def parts_of(path: Path) -> list[Path]:
    return sorted((path / "patterns" / "layer=0").iterdir())


def test_pyarrow_polars_and_duckdb_read_the_parts(halved: Path, rows: Rows) -> None:
    stored = as_stored({"x": rows.x, "e": rows.e})
    tables = [pq.read_table(file, page_checksum_verification=True) for file in parts_of(halved)]
    arrow = pa.concat_tables(tables)
    arrow.validate(full=True)
    assert arrow.schema.field("x").type == pa.list_(pa.field("element", pa.float16(), nullable=False), 6)
    assert arrow.schema.field("scale").type == pa.float32()
    polars = pl.concat([pl.read_parquet(file, hive_partitioning=False) for file in parts_of(halved)])
    assert polars.schema["e"] == pl.Array(pl.Float16, 3)
    with duckdb.connect(config={"python_enable_replacements": False}) as connection:
        files = [str(file) for file in parts_of(halved)]
        duck = connection.sql("SELECT * FROM read_parquet($files)", params={"files": files}).to_arrow_table()
    for name in ("x", "e"):
        assert same(np.array(arrow.column(name).to_pylist(), np.float16), stored[name])
        assert same(polars[name].to_numpy(), stored[name])
        assert same(np.array(duck.column(name).to_pylist(), np.float32), stored[name].astype(np.float32))
    for found in (arrow.column("scale"), polars["scale"], duck.column("scale")):
        assert same(found.to_numpy(), stored["scale"])


def test_the_file_says_half_precision_also_without_the_schema_of_arrow(halved: Path) -> None:
    metadata = pq.read_metadata(parts_of(halved)[0])
    leaf = metadata.schema.column([metadata.schema.column(i).path for i in range(len(metadata.schema))].index("x.list.element"))
    assert (leaf.physical_type, leaf.logical_type.type, leaf.length) == ("FIXED_LEN_BYTE_ARRAY", "FLOAT16", 2)


def test_keys_and_errors_are_read_in_single_precision_with_their_scale(halved: Path, rows: Rows) -> None:
    log = dualstore.open(halved).patterns(LAYER)
    expected = kept(rows.x, rows.e)
    for name in ("x", "e"):
        assert same(np.concatenate([group.part.mapping.array(group, name) for group in log.groups]), expected[name])
        blocks = [b[name] for group in log.groups for _, b in group.part.mapping.blocks(group, ["step", name], 7)]
        assert same(np.concatenate(blocks), expected[name])
    some = np.random.default_rng(1).integers(0, 300, 50)
    found = log.take(["e", "sample_id", "x"], some)
    assert same(found["e"], expected["e"][some])
    assert same(found["x"], expected["x"][some])
    assert same(found["sample_id"], rows.sample_id[some])
    group = log.groups[1]
    mine = slice(group.first + 3, group.first + 9)
    assert same(group.part.mapping.array(group, "e", slice(3, 9)), expected["e"][mine])


def test_what_is_read_of_half_precision_is_not_kept(halved: Path) -> None:
    group = dualstore.open(halved).patterns(LAYER).groups[0]
    mapping = group.part.mapping
    assert mapping.array(group, "x") is not mapping.array(group, "x")
    assert mapping.column(group, "x").values.type == pa.float16()


@pytest.mark.parametrize(
    "options", [{"compression": "zstd"}, {"use_dictionary": False, "compression": None}], ids=["zstd", "plain"]
)
def test_parts_of_other_writers_give_the_same_answers(tmp_path: Path, rows: Rows, twin: Store, options: dict[str, Any]) -> None:
    path = write(tmp_path / "store", rows, "float16")
    for file in parts_of(path):
        pq.write_table(pq.ParquetFile(file).read(), file, **options)
    assert answers(dualstore.open(path)) == answers(twin)


def test_rows_that_are_not_finite_are_counted(tmp_path: Path, rows: Rows) -> None:
    odd = Rows(**{**vars(rows), "x": rows.x.copy(), "e": rows.e.copy()})
    odd.x[3, 1], odd.x[5, 0], odd.e[7] = 1e6, np.nan, np.inf
    store = dualstore.open(write(tmp_path / "store", odd, "float16"))
    assert store.info()["layers"][0]["nonfinite_rows"] == 3


# Answers


def answers(store: Store) -> list[Any]:
    """What a store says to questions of every kind."""
    vector = np.linspace(-1, 1, 6)
    found: list[Any] = [store.info()["rows"]]
    for how in ({"top": 7}, {"absolute": True}, {"bottom": True, "where": "label = 1"}, {"per": "task"}, {"at_step": 4}):
        found.append(store.query(vector, layer=0, **how).to_dicts())
        found.append(store.query(test_id=[1, 2], layer=0, **how).to_dicts())
    values: list[dict[str, Any]] = [{"score": "contribution", "output": 2}, {"score": "influence", "gradient": [1.0, -2.0, 0.5]}]
    for how in values:
        found.append(store.query(vector, layer=0, **how).to_dicts())
        found.append(store.totals(vector, layer=0, by="label", **how).to_dicts())
    sums: list[dict[str, Any]] = [{}, {"absolute": True}, {"where": "step < 5"}]
    found += [store.totals(test_id=[1, 3], layer=0, by="label, epoch", **how).to_dicts() for how in sums]
    found.append(store.votes().to_dicts())
    found.append(store.self_influence(top=5).to_dicts())
    found.append(store.weights(0).weight.tolist())
    found.append(store.weights(0, gains={"task": {"a": 2.0}}).weight.tolist())
    found.append(store.sql("SELECT * FROM attention ORDER BY ALL", layer=0, x=vector).to_dicts())
    found.append(store.sql("SELECT * FROM patterns ORDER BY ALL").to_dicts())
    return found


@pytest.mark.parametrize("indexed", [False, True], ids=["scan", "index"])
@pytest.mark.parametrize("budget", [1 << 20, 256 << 20])
def test_answers_are_those_of_a_store_in_single_precision_of_the_same_numbers(
    tmp_path: Path, rows: Rows, twin: Store, budget: int, *, indexed: bool
) -> None:
    path = write(tmp_path / "store", rows, "float16")
    store = dualstore.open(path, budget_bytes=budget)
    if indexed:
        store.build_index()
        assert any((path / "index").rglob("*.sketch-0.arrow"))
    assert answers(store) == answers(twin)


def test_alpha_is_the_product_of_the_stored_key_and_the_query_in_single_precision(halved: Path, rows: Rows) -> None:
    vector = np.random.default_rng(2).normal(size=6)
    expected = reference.halved(as_kept(rows).x, vector.astype(np.float32))
    found = dualstore.open(halved).query(vector, layer=0, top=5).table.column("alpha").to_pylist()
    assert found == sorted(expected.tolist(), reverse=True)[:5]


def test_a_query_beyond_half_precision_is_asked_all_the_same(halved: Path) -> None:
    found = dualstore.open(halved).query(np.full(6, 1e30), layer=0, top=1).to_dicts()
    assert found[0]["alpha"] > 1e29


def test_a_half_precision_store_takes_half_the_bytes(tmp_path: Path) -> None:
    rows = rows_of(4000, 3, width=200)
    sizes = []
    for dtype in ("float16", "float32"):
        path = write(tmp_path / dtype, rows, dtype)
        sizes.append(sum(file.stat().st_size for file in parts_of(path)))
    assert sizes[0] < 0.56 * sizes[1]


# The proof


def record(path: Path) -> None:
    """Forty steps of 16 rows, probed at the end."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    with dualstore.record(model, optimizer, path, index=False) as recorder:
        for step in range(40):
            ids = torch.arange(16) + 16 * (step % 4)
            with recorder.batch(ids, y[ids]):
                nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with recorder.probe(range(6), y[:6]):
            model(x[:6])


def halve(source: Path, path: Path) -> None:
    """Writes a recording again, in half precision."""
    store = dualstore.open(source)
    path.mkdir()
    writer = StoreWriter(path, replace(store.info_file, dtype="float16"))
    for step in store.steps.table.to_pylist():
        for layer in store.layers:
            log = store.patterns(layer)
            mine = np.flatnonzero(log.take(["step"], np.arange(log.rows))["step"] == step["step"])
            rows = log.take([column.name for column in log.columns if column.name != "step"], mine)
            writer.add_patterns(layer, rows, rows.pop("x"), rows.pop("e"))
        writer.end_step([{name: value for name, value in step.items() if name not in ("step", "rows")}])
    for layer in store.layers:
        log = store.probes(layer)
        rows = log.take([column.name for column in log.columns], np.arange(log.rows))
        writer.write_probes(layer, rows, rows.pop("x"), rows.pop("y"), rows.pop("g"))
    writer.close()
    writer.save_info(status="complete")
    shutil.copytree(source / "weights", path / "weights")


def test_a_store_in_half_precision_proves_itself_within_its_limit(tmp_path: Path) -> None:
    record(tmp_path / "source")
    halve(tmp_path / "source", tmp_path / "store")
    found = dualstore.open(tmp_path / "store").verify()
    assert found.problems == []
    for check in found.layers:
        for residual in (check.weight_residual, check.output_residual):
            assert residual is not None
            assert LIMITS["float32"] < residual < LIMITS["float16"]


def test_weights_that_training_did_not_leave_are_beyond_the_limit_of_half_precision(tmp_path: Path) -> None:
    record(tmp_path / "source")
    halve(tmp_path / "source", tmp_path / "store")
    file = tmp_path / "store" / "weights" / "final.safetensors"
    write_whole(file, save({name: 1.02 * value for name, value in load_file(file).items()}))
    found = dualstore.open(tmp_path / "store").verify()
    assert [problem[:7] for problem in found.problems] == ["layer 0", "layer 1"]
    assert all("weight residual" in problem for problem in found.problems)


def test_weights_are_written_in_single_precision(tmp_path: Path, halved: Path) -> None:
    dualstore.open(halved).write_weights(tmp_path / "made.safetensors")
    assert {str(value.dtype) for value in load_file(tmp_path / "made.safetensors").values()} == {"float32"}

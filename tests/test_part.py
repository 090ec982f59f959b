"""part: what is laid down piece by piece is one Parquet file that every reader agrees on, bit for bit."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dualstore import part
from dualstore.bulk import Bulk
from dualstore.capture.threads import TorchBulk
from dualstore.log import Log, Mapping
from dualstore.part import PartWriter, arrow_schema, group_rows_for, upper_norm
from dualstore.schema import Column
from dualstore.spool import PAGE, Spool
from tests.faults import FullDisk

GROUP_ROWS = 16
SMALL = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WAYS = ["direct", "spooled", "by torch"]
"""How vectors come to the file: at once, or through buffers and a thread, copied by numpy or by PyTorch."""

Rows = dict[str, NDArray[Any]]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of 16 rows, so that small files have many; no waiting for the disk, as nothing here cuts the power."""
    monkeypatch.setattr(part, "MAX_GROUP_ROWS", GROUP_ROWS)
    monkeypatch.setattr(os, "fsync", lambda file: None)


def columns_of(dtype: str, width: int, other: int = 3) -> tuple[Column, ...]:
    return (Column("step", "int32"), Column("sample_id", "int64"), Column("x", dtype, width), Column("e", dtype, other))


def any_floats(dtype: str, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    """Random bits: NaNs of every payload, infinities, both zeros and denormals among them."""
    rng = np.random.default_rng(seed)
    bits = np.uint32 if dtype == "float32" else np.uint64
    values = rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True).view(dtype)
    special = np.array(
        [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max], dtype
    )
    chosen = rng.random(shape) < 0.3
    values[chosen] = rng.choice(special, int(chosen.sum()))
    return values


def rows_of(columns: Sequence[Column], rows: int, seed: int = 0, floats: Callable[..., NDArray[Any]] = any_floats) -> Rows:
    rng = np.random.default_rng([seed, rows])
    made: Rows = {}
    for place, column in enumerate(columns):
        if column.width is None:
            limits = np.iinfo(column.dtype)
            made[column.name] = rng.integers(limits.min, limits.max, rows, column.dtype, endpoint=True)
        else:
            made[column.name] = floats(column.dtype, (rows, column.width), seed + place)
    return made


def modest_floats(dtype: str, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def cut(rows: Rows, start: int, stop: int) -> Rows:
    return {name: values[start:stop] for name, values in rows.items()}


def append(writer: PartWriter, rows: Rows) -> None:
    scalars = {column.name: rows[column.name] for column in writer.columns if column.width is None}
    vectors = {column.name: rows[column.name] for column in writer.columns if column.width is not None}
    with np.errstate(all="ignore"):
        writer.append(scalars, vectors)


@contextmanager
def open_part(path: Path, columns: Sequence[Column], way: str = "direct") -> Iterator[PartWriter]:
    """A part to be filled. Its buffers, if any, are as small as they can be: a page each."""
    if way == "direct":
        yield PartWriter(path, columns)
        return
    spool = Spool(2, PAGE, lambda: None, TorchBulk() if way == "by torch" else Bulk())
    try:
        yield PartWriter(path, columns, spool)
    finally:
        spool.close()


def write_part(
    path: Path, columns: Sequence[Column], rows: Rows, pieces: Sequence[int] | None = None, way: str = "direct"
) -> PartWriter:
    with open_part(path, columns, way) as writer:
        at = 0
        for piece in [len(rows["step"])] if pieces is None else pieces:
            append(writer, cut(rows, at, at + piece))
            at += piece
        writer.finish()
        writer.publish()
    return writer


def as_bits(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def assert_same(found: Rows, expected: Rows) -> None:
    """Bit for bit, so that NaN equals NaN and -0.0 is not 0.0."""
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert np.array_equal(as_bits(found[name]), as_bits(values)), name


def as_numpy(column: pa.ChunkedArray, width: int | None) -> NDArray[Any]:
    array = column.combine_chunks()
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    if width is None:
        return np.asarray(array.to_numpy(zero_copy_only=False))
    return np.asarray(array.flatten().to_numpy(zero_copy_only=False)).reshape(-1, width)


def by_pyarrow(path: Path, columns: Sequence[Column]) -> Rows:
    table = pq.read_table(path, page_checksum_verification=True)
    table.validate(full=True)
    assert table.schema.equals(arrow_schema(columns))
    return {column.name: as_numpy(table.column(column.name), column.width) for column in columns}


def by_polars(path: Path, columns: Sequence[Column]) -> Rows:
    frame = pl.read_parquet(path, hive_partitioning=False)
    assert all(frame.schema[column.name] == pl.Array for column in columns if column.width is not None)
    return {column.name: frame[column.name].to_numpy() for column in columns}


@cache
def connection() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(config={"python_enable_replacements": False, "threads": 1})


def by_duckdb(path: Path, columns: Sequence[Column]) -> Rows:
    table = connection().sql("SELECT * FROM read_parquet($path)", params={"path": str(path)}).to_arrow_table()
    return {column.name: as_numpy(table.column(column.name), column.width) for column in columns}


READERS = {"pyarrow": by_pyarrow, "polars": by_polars, "duckdb": by_duckdb}


def lie_in_file(addresses: Sequence[int], path: Path) -> bool:
    """Whether the addresses lie in this process's mappings of the file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    return all(any(start <= address < stop for start, stop in spans) for address in addresses)


def mapped(path: Path, columns: Sequence[Column]) -> Rows:
    """The file as its row groups' mapped arrays, which must be the file's own memory, aligned, not a copy."""
    log = Log([path], columns)
    mapping = Mapping(log.parts[0])
    found: dict[str, list[NDArray[Any]]] = {column.name: [] for column in columns}
    addresses: list[int] = []
    for group in log.groups:
        for column in columns:
            array = mapping.column(group, column.name)
            assert array is not None
            values = array if column.width is None else array.values
            addresses.append(values.buffers()[1].address)
            found[column.name].append(mapping.array(group, column.name))
            assert found[column.name][-1].ctypes.data == addresses[-1]
    assert all(address % 64 == 0 for address in addresses)
    assert lie_in_file(addresses, path)
    shapes = {column.name: () if column.width is None else (column.width,) for column in columns}
    return {
        name: np.concatenate([np.empty((0, *shapes[name]), log.parts[0].columns[name].dtype), *some])
        for name, some in found.items()
    }


def note_of(path: Path) -> dict[str, Any]:
    note: dict[str, Any] = json.loads(pq.read_metadata(path).metadata[b"dualstore"])
    return note


# Readers


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("width", [1, 2, 5, 300])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_reader_gives_the_rows_back(tmp_path: Path, dtype: str, width: int, reader: str) -> None:
    columns = columns_of(dtype, width)
    for rows in (1, GROUP_ROWS - 1, GROUP_ROWS, GROUP_ROWS + 1, 3 * GROUP_ROWS):
        made = rows_of(columns, rows)
        write_part(tmp_path / f"part-{rows}.parquet", columns, made)
        assert_same(READERS[reader](tmp_path / f"part-{rows}.parquet", columns), made)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [1, 5, 300])
@SMALL
@given(pieces=st.lists(st.integers(0, 3 * GROUP_ROWS), min_size=1, max_size=6), dtype=st.sampled_from(["float32", "float64"]))
def test_the_sizes_of_the_pieces_do_not_matter(tmp_path: Path, width: int, way: str, dtype: str, pieces: list[int]) -> None:
    columns = columns_of(dtype, width, other=width % 3 + 1)
    made = rows_of(columns, sum(pieces), seed=len(pieces))
    writer = write_part(tmp_path / "pieces.parquet", columns, made, pieces, way)
    write_part(tmp_path / "whole.parquet", columns, made, way=way)
    assert writer.rows == sum(pieces)
    assert_same(by_pyarrow(tmp_path / "pieces.parquet", columns), made)
    assert_same(mapped(tmp_path / "pieces.parquet", columns), made)
    assert (tmp_path / "pieces.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


@pytest.mark.parametrize("way", WAYS)
@SMALL
@given(pieces=st.lists(st.integers(0, 3 * GROUP_ROWS), min_size=1, max_size=4), dtype=st.sampled_from(["float32", "float64"]))
def test_rows_kept_of_more_leave_the_same_bytes_as_these_rows_alone(
    tmp_path: Path, way: str, dtype: str, pieces: list[int]
) -> None:
    columns = columns_of(dtype, 300)
    more = rows_of(columns, 2 * sum(pieces), seed=sum(pieces))
    kept = np.sort(np.random.default_rng(0).permutation(2 * sum(pieces))[: sum(pieces)])
    alone = {name: values[kept] for name, values in more.items()}
    write_part(tmp_path / "alone.parquet", columns, alone, way=way)
    with open_part(tmp_path / "kept.parquet", columns, way) as writer:
        at = 0
        for piece in pieces:
            scalars = {column.name: alone[column.name][at : at + piece] for column in columns if column.width is None}
            vectors = {column.name: more[column.name] for column in columns if column.width is not None}
            with np.errstate(all="ignore"):
                writer.append(scalars, vectors, kept[at : at + piece])
            at += piece
        writer.finish()
        writer.publish()
    assert (tmp_path / "kept.parquet").read_bytes() == (tmp_path / "alone.parquet").read_bytes()


@pytest.mark.parametrize("way", WAYS)
def test_vectors_may_lie_in_memory_as_they_like(tmp_path: Path, way: str) -> None:
    columns = columns_of("float64", 5)
    made = rows_of(columns, 3 * GROUP_ROWS)
    turned = {name: np.asfortranarray(values) for name, values in made.items()}
    write_part(tmp_path / "columns.parquet", columns, turned, [GROUP_ROWS // 2, 2 * GROUP_ROWS], way=way)
    write_part(tmp_path / "same.parquet", columns, made, [GROUP_ROWS // 2, 2 * GROUP_ROWS], way=way)
    assert (tmp_path / "columns.parquet").read_bytes() == (tmp_path / "same.parquet").read_bytes()


@pytest.mark.parametrize("reader", READERS)
def test_a_part_without_rows_is_a_file_without_rows(tmp_path: Path, reader: str) -> None:
    columns = columns_of("float32", 5)
    path = tmp_path / "part.parquet"
    write_part(path, columns, rows_of(columns, 0))
    found = READERS[reader](path, columns)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(("step", "sample_id", "x", "e"), 0)
    assert Log([path], columns).groups == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_row_group_is_mapped_aligned_and_without_a_copy(tmp_path: Path, dtype: str, way: str) -> None:
    columns = columns_of(dtype, 5)
    made = rows_of(columns, 5 * GROUP_ROWS + 3)
    write_part(tmp_path / "part.parquet", columns, made, [7] * 11 + [6], way)
    assert [group.rows for group in Log([tmp_path / "part.parquet"], columns).groups] == [GROUP_ROWS] * 5 + [3]
    assert_same(mapped(tmp_path / "part.parquet", columns), made)


def test_two_vector_columns_of_very_different_widths_keep_apart(tmp_path: Path) -> None:
    columns = (
        Column("step", "int32"),
        Column("narrow", "float32", 1),
        Column("wide", "float64", 1000),
        Column("last", "float32", 2),
    )
    made = rows_of(columns, 2 * GROUP_ROWS + 1)
    write_part(tmp_path / "part.parquet", columns, made, [5] * 6 + [3])
    for reader in READERS.values():
        assert_same(reader(tmp_path / "part.parquet", columns), made)
    assert_same(mapped(tmp_path / "part.parquet", columns), made)


def test_a_reader_passes_over_row_groups_by_the_statistics_of_scalars(tmp_path: Path) -> None:
    columns = columns_of("float32", 2)
    made = rows_of(columns, 3 * GROUP_ROWS) | {"step": np.arange(-GROUP_ROWS, 2 * GROUP_ROWS, dtype=np.int32)}
    write_part(tmp_path / "part.parquet", columns, made)
    metadata = pq.read_metadata(tmp_path / "part.parquet")
    found = [metadata.row_group(group).column(0).statistics for group in range(3)]
    assert [(some.min, some.max, some.null_count) for some in found] == [(-16, -1, 0), (0, 15, 0), (16, 31, 0)]
    few = pq.read_table(tmp_path / "part.parquet", filters=[("step", ">=", 30)])
    assert few.column("step").to_pylist() == [30, 31]


@pytest.mark.parametrize("name", ["step", "sample_id", "x", "e"])
def test_a_flipped_bit_of_a_value_fails_the_checksum(tmp_path: Path, name: str) -> None:
    columns = columns_of("float32", 5)
    path = tmp_path / "part.parquet"
    write_part(path, columns, rows_of(columns, 2 * GROUP_ROWS + 3), [10, 10, 15])
    metadata = pq.read_metadata(path)
    data = path.read_bytes()
    for group in range(3):
        chunk = metadata.row_group(group).column([column.name for column in columns].index(name))
        damaged = bytearray(data)
        damaged[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(OSError, match="CRC checksum verification failed"):
            pq.read_table(path, page_checksum_verification=True)


# Row groups


def test_row_groups_are_powers_of_two_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "MAX_GROUP_ROWS", 16_384)
    for width, rows in ((1, 16_384), (512, 16_384), (513, 8192), (3000, 2048), (10_000_000, 1)):
        columns = [Column("step", "int32"), Column("x", "float32", width), Column("e", "float32", 1)]
        assert group_rows_for(columns) == rows
        assert rows == 1 or rows * width * 4 <= part.GROUP_BYTES


# What is known of the rows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@SMALL
@given(scale=st.integers(-60, 50), width=st.sampled_from([1, 2, 5, 300]), seed=st.integers(0, 1000))
def test_the_noted_bound_is_above_every_norm_of_its_group(
    tmp_path: Path, way: str, dtype: str, scale: int, width: int, seed: int
) -> None:
    columns = columns_of(dtype, width)
    made = rows_of(columns, 2 * GROUP_ROWS + 7, seed, modest_floats)
    made["x"] *= np.array(2.0**scale, dtype)
    write_part(tmp_path / "part.parquet", columns, made, [5] * 7 + [4], way)
    for group in Log([tmp_path / "part.parquet"], columns).groups:
        norms = np.linalg.norm(made["x"][group.first : group.first + group.rows].astype(np.longdouble), axis=1)
        assert group.max_norm is not None
        assert norms.max() <= group.max_norm <= 1.01 * norms.max() + 1e-15


@pytest.mark.parametrize("way", WAYS)
def test_the_noted_bound_is_above_norms_whose_squares_are_too_small_for_float32(tmp_path: Path, way: str) -> None:
    columns = columns_of("float32", 300)
    made = rows_of(columns, 3, floats=modest_floats) | {"x": np.full((3, 300), np.float32(1e-30))}
    write_part(tmp_path / "part.parquet", columns, made, way=way)
    (bound,) = note_of(tmp_path / "part.parquet")["max_norm"]["x"]
    assert np.linalg.norm(made["x"][0].astype(np.float64)) <= bound < 1e-15


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_there_is_no_bound_where_a_norm_is_not_finite(tmp_path: Path, way: str, value: float) -> None:
    columns = columns_of("float32", 5)
    made = rows_of(columns, 3 * GROUP_ROWS, floats=modest_floats)
    made["x"][GROUP_ROWS + 2, 3] = value
    write_part(tmp_path / "part.parquet", columns, made, [GROUP_ROWS + 5, 2 * GROUP_ROWS - 5], way)
    bounds = note_of(tmp_path / "part.parquet")["max_norm"]["x"]
    assert [bound is None for bound in bounds] == [False, True, False]
    assert upper_norm(float("nan"), 5) is None


@pytest.mark.parametrize("way", WAYS)
@SMALL
@given(data=st.data())
def test_rows_with_nan_or_infinity_are_counted(tmp_path: Path, way: str, data: st.DataObject) -> None:
    columns = columns_of("float32", 5)
    rows = data.draw(st.integers(1, 3 * GROUP_ROWS))
    made = rows_of(columns, rows, floats=modest_floats)
    for name in ("x", "e"):
        for row in data.draw(st.lists(st.integers(0, rows - 1), max_size=5)):
            made[name][row, row % 3] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e38]))
    writer = write_part(tmp_path / "part.parquet", columns, made, [rows // 2, rows - rows // 2], way)
    expected = {name: int((~np.isfinite(made[name])).any(axis=1).sum()) for name in ("x", "e")}
    assert writer.nonfinite == note_of(tmp_path / "part.parquet")["nonfinite_rows"] == expected
    assert writer.nonfinite_rows == sum(expected.values())


# Going back


Attempt = tuple[int, bool]
"""Rows appended in two pieces, and whether they are kept."""

ATTEMPTS = st.lists(st.tuples(st.integers(0, 2 * GROUP_ROWS + 3), st.booleans()), min_size=1, max_size=6)


def write_attempts(path: Path, columns: Sequence[Column], attempts: Sequence[Attempt], way: str) -> Rows:
    """A part of the attempts that are kept; the others are appended and rolled back. Returns the rows kept."""
    kept: list[Rows] = [rows_of(columns, 0)]
    with open_part(path, columns, way) as writer:
        for seed, (rows, keep) in enumerate(attempts):
            made = rows_of(columns, rows, seed)
            mark = writer.mark()
            append(writer, cut(made, 0, rows // 3))
            append(writer, cut(made, rows // 3, rows))
            if keep:
                kept.append(made)
            else:
                writer.rollback(mark)
            assert writer.rows == sum(len(some["step"]) for some in kept)
        writer.finish()
        writer.publish()
    return {column.name: np.concatenate([some[column.name] for some in kept]) for column in columns}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [1, 300])
@SMALL
@given(attempts=ATTEMPTS)
def test_rows_rolled_back_leave_nothing_a_reader_sees(tmp_path: Path, width: int, way: str, attempts: list[Attempt]) -> None:
    columns = columns_of("float32", width)
    kept = write_attempts(tmp_path / "back.parquet", columns, attempts, way)
    write_part(tmp_path / "without.parquet", columns, kept, way=way)
    assert_same(by_pyarrow(tmp_path / "back.parquet", columns), kept)
    assert_same(mapped(tmp_path / "back.parquet", columns), kept)
    found, expected = (pq.read_metadata(tmp_path / name) for name in ("back.parquet", "without.parquet"))
    assert found.to_dict() == expected.to_dict()
    assert note_of(tmp_path / "back.parquet") == note_of(tmp_path / "without.parquet")


BACK = {"in a group": [(5, True), (4, False)], "past a group": [(5, True), (3 * GROUP_ROWS, False), (2, True)]}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attempts", BACK.values(), ids=BACK)
def test_rows_rolled_back_leave_the_same_bytes_as_rows_never_written(tmp_path: Path, attempts: list[Attempt], way: str) -> None:
    columns = columns_of("float32", 5)
    write_attempts(tmp_path / "back.parquet", columns, attempts, way)
    write_attempts(tmp_path / "without.parquet", columns, [(rows if keep else 0, keep) for rows, keep in attempts], way)
    assert (tmp_path / "back.parquet").read_bytes() == (tmp_path / "without.parquet").read_bytes()


@pytest.mark.parametrize("way", WAYS)
def test_a_mark_can_be_returned_to_more_than_once(tmp_path: Path, way: str) -> None:
    columns = columns_of("float32", 300)
    made = rows_of(columns, 10)
    with open_part(tmp_path / "part.parquet", columns, way) as writer:
        append(writer, made)
        mark = writer.mark()
        for rows in (3, GROUP_ROWS, 40):
            append(writer, rows_of(columns, rows, seed=rows))
            writer.rollback(mark)
        writer.finish()
        writer.publish()
    assert_same(by_pyarrow(tmp_path / "part.parquet", columns), made)


@pytest.mark.parametrize("way", WAYS)
def test_a_part_can_be_rolled_back_and_finished_whichever_write_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    columns = columns_of("float32", 300)
    first, second = rows_of(columns, 10, 1), rows_of(columns, 30, 2)

    def attempt(place: int) -> int:
        """Fails the write of this number. Returns how many there were."""
        with open_part(tmp_path / "part.parquet", columns, way) as writer:
            append(writer, first)
            mark = writer.mark()
            with monkeypatch.context() as patch, suppress(OSError):
                disk = FullDisk(patch, lambda call: call == place)
                append(writer, second)
            writer.rollback(mark)
            writer.finish()
            writer.publish()
        return disk.calls

    for place in range(1, attempt(0) + 1):
        attempt(place)
        assert_same(by_pyarrow(tmp_path / "part.parquet", columns), first)
        assert_same(mapped(tmp_path / "part.parquet", columns), first)


@pytest.mark.parametrize("way", WAYS)
def test_a_write_cut_short_by_the_system_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    columns = columns_of("float32", 5)
    made = rows_of(columns, 40)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: whole(file, data[:7], at))
    write_part(tmp_path / "part.parquet", columns, made, way=way)
    assert_same(by_pyarrow(tmp_path / "part.parquet", columns), made)


# Whole or not at all


def test_a_part_has_its_name_only_when_it_is_published(tmp_path: Path) -> None:
    columns = columns_of("float32", 5)
    path = tmp_path / "layer=0" / "part-0-000000.parquet"
    writer = PartWriter(path, columns)
    for _ in range(3):
        append(writer, rows_of(columns, 20))
        assert not list(path.parent.glob("*.parquet"))
    writer.finish()
    assert not list(path.parent.glob("*.parquet"))
    writer.publish()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("finished", [True, False])
def test_a_part_given_up_leaves_nothing(tmp_path: Path, way: str, *, finished: bool) -> None:
    columns = columns_of("float32", 300)
    for rows in (0, 3, GROUP_ROWS, 50):
        with open_part(tmp_path / "part.parquet", columns, way) as writer:
            append(writer, rows_of(columns, rows))
            if finished:
                writer.finish()
            files = len(os.listdir("/proc/self/fd"))
            writer.discard()
        assert list(tmp_path.iterdir()) == []
        assert len(os.listdir("/proc/self/fd")) == files - (1 if way == "direct" else 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_part_that_cannot_be_begun_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    FullDisk(monkeypatch, lambda call: True)
    with pytest.raises(OSError, match="No space left"), open_part(tmp_path / "part.parquet", columns_of("float32", 5), way):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_part_takes_the_place_of_an_older_one_at_once(tmp_path: Path) -> None:
    columns = columns_of("float32", 5)
    path = tmp_path / "part.parquet"
    old, new = rows_of(columns, 20, 1), rows_of(columns, 5, 2)
    write_part(path, columns, old)
    writer = PartWriter(path, columns)
    append(writer, new)
    writer.finish()
    assert_same(by_pyarrow(path, columns), old)
    writer.publish()
    assert_same(by_pyarrow(path, columns), new)

"""log: parts of every writer give the same rows, mapped or decoded; files that are not what they say give an error."""

import mmap
import os
import re
from collections.abc import Callable, Sequence
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
from dualstore.errors import DamagedError
from dualstore.log import Log, Mapping, Part
from dualstore.part import PartWriter
from dualstore.schema import Column
from dualstore.thrift import BINARY, I32, STRUCT, Decoder, Field, encode, varint

ROWS, WIDTH, GROUP_ROWS = 50, 5, 16
COLUMNS = (Column("step", "int32"), Column("sample_id", "int64"), Column("x", "float32", WIDTH))
NAMES = [column.name for column in COLUMNS]

Rows = dict[str, NDArray[Any]]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of 16 rows, so that small files have many; no waiting for the disk, as nothing here cuts the power."""
    monkeypatch.setattr(part, "MAX_GROUP_ROWS", GROUP_ROWS)
    monkeypatch.setattr(os, "fsync", lambda file: None)


def rows_of(rows: int = ROWS) -> Rows:
    """Rows whose vectors have values that a careless reader would change: NaN, infinity, -0.0, the smallest denormal."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, WIDTH)).astype(np.float32)
    x[::7, 1], x[::5, 2], x[::3, 3], x[::4, 4] = np.nan, -np.inf, -0.0, 1e-45
    return {"step": np.arange(rows, dtype=np.int32) // 3, "sample_id": rng.integers(-(2**63), 2**63 - 1, rows), "x": x}


def table_of(rows: Rows, **changed: Any) -> pa.Table:
    """The rows as pyarrow makes a table of them, everything nullable; `changed` are other columns."""
    arrays = {"step": pa.array(rows["step"]), "sample_id": pa.array(rows["sample_id"]), "x": fixed(rows["x"])}
    arrays |= changed
    return pa.table({name: array for name, array in arrays.items() if array is not None})


def fixed(x: NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(x.reshape(-1), x.shape[1])


def listed(x: NDArray[Any], kind: Any = pa.ListArray, offset: Any = np.int32) -> pa.Array:
    return kind.from_arrays(pa.array(np.arange(0, x.size + 1, x.shape[1], dtype=offset)), x.reshape(-1))


def write_own(path: Path, rows: Rows, columns: Sequence[Column] = COLUMNS) -> None:
    writer = PartWriter(path, columns)
    scalars = {column.name: rows[column.name] for column in columns if column.width is None}
    writer.append(scalars, {column.name: rows[column.name] for column in columns if column.width is not None})
    writer.finish()
    writer.publish()


def read(path: Path, columns: Sequence[Column] = COLUMNS) -> Rows:
    """All rows of a part, taken column by column and group by group."""
    log = Log([path], columns)
    mapping = Mapping(log.parts[0])
    found = {column.name: [mapping.array(group, column.name) for group in log.groups] for column in columns}
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


def same(found: Rows, expected: Rows) -> bool:
    """Bit for bit, so that NaN equals NaN and -0.0 is not 0.0."""
    return all(
        found[name].dtype == values.dtype and found[name].shape == values.shape and found[name].tobytes() == values.tobytes()
        for name, values in expected.items()
    )


def naming(path: Path, text: str = "") -> str:
    """A pattern that an error about the file matches: its name first, all in one line."""
    return rf"^{re.escape(str(path))}: [^\n]*{text}[^\n]*\Z"


# Other writers


def write_by_pyarrow(**options: Any) -> Callable[[Rows, Path], None]:
    return lambda rows, path: pq.write_table(table_of(rows), path, row_group_size=20, **options)


def write_lists(kind: Any, offset: Any, **options: Any) -> Callable[[Rows, Path], None]:
    return lambda rows, path: pq.write_table(table_of(rows, x=listed(rows["x"], kind, offset)), path, row_group_size=20, **options)


def write_by_polars(compression: Any) -> Callable[[Rows, Path], None]:
    def write(rows: Rows, path: Path) -> None:
        frame = pl.DataFrame({**rows, "x": pl.Series("x", rows["x"], dtype=pl.Array(pl.Float32, WIDTH))})
        frame.write_parquet(path, compression=compression, row_group_size=20)

    return write


def write_by_duckdb(options: str) -> Callable[[Rows, Path], None]:
    def write(rows: Rows, path: Path) -> None:
        with duckdb.connect(config={"python_enable_replacements": False, "threads": 1}) as connection:
            connection.register("rows", table_of(rows, x=listed(rows["x"])))
            connection.execute(f"COPY (SELECT * FROM rows) TO '{path}' (FORMAT parquet{options})")

    return write


PLAIN = {"use_dictionary": False, "compression": None}
WRITERS: dict[str, Callable[[Rows, Path], None]] = {
    "pyarrow zstd": write_by_pyarrow(compression="zstd"),
    "pyarrow snappy and dictionary": write_by_pyarrow(compression="snappy", use_dictionary=True),
    "pyarrow dictionary": write_by_pyarrow(compression=None, use_dictionary=True),
    "pyarrow pages of version 2": write_by_pyarrow(compression="zstd", data_page_version="2.0"),
    "pyarrow plain pages of version 2": write_by_pyarrow(**PLAIN, data_page_version="2.0"),
    "pyarrow many pages": write_by_pyarrow(**PLAIN, data_page_size=64, write_batch_size=4),
    "pyarrow many pages of version 2": write_by_pyarrow(**PLAIN, data_page_size=64, write_batch_size=4, data_page_version="2.0"),
    "pyarrow plain": write_by_pyarrow(**PLAIN),
    "pyarrow plain with checksums": write_by_pyarrow(**PLAIN, write_page_checksum=True),
    "pyarrow plain without statistics": write_by_pyarrow(**PLAIN, write_statistics=False),
    "pyarrow plain without types": write_by_pyarrow(**PLAIN, store_schema=False),
    "pyarrow split bytes": write_by_pyarrow(compression=None, use_dictionary=False, use_byte_stream_split=["x.list.element"]),
    "pyarrow lists": write_lists(pa.ListArray, np.int32),
    "pyarrow plain lists": write_lists(pa.ListArray, np.int32, **PLAIN),
    "pyarrow large lists": write_lists(pa.LargeListArray, np.int64),
    "polars uncompressed": write_by_polars("uncompressed"),
    "polars zstd": write_by_polars("zstd"),
    "duckdb": write_by_duckdb(""),
    "duckdb uncompressed": write_by_duckdb(", COMPRESSION uncompressed"),
    "duckdb version 2": write_by_duckdb(", PARQUET_VERSION v2"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_parts_of_every_writer_give_the_same_rows(tmp_path: Path, writer: str) -> None:
    rows, path = rows_of(), tmp_path / "part.parquet"
    WRITERS[writer](rows, path)
    assert same(read(path), rows)


@pytest.mark.parametrize("writer", WRITERS)
def test_blocks_of_every_writer_are_the_same_rows_in_pieces(tmp_path: Path, writer: str) -> None:
    rows, path = rows_of(), tmp_path / "part.parquet"
    WRITERS[writer](rows, path)
    log = Log([path], COLUMNS)
    assert log.rows == ROWS
    for group in log.groups:
        blocks = list(Mapping(group.part).blocks(group, NAMES, 7))
        assert [start for start, _ in blocks] == list(range(0, group.rows, 7))
        whole = {name: np.concatenate([block[name] for _, block in blocks]) for name in NAMES}
        assert same(whole, {name: values[group.first : group.first + group.rows] for name, values in rows.items()})


@pytest.mark.parametrize("writer", ["pyarrow plain", "pyarrow plain pages of version 2", "polars uncompressed"])
def test_plain_vectors_of_other_writers_are_mapped_where_they_lie(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "part.parquet"
    WRITERS[writer](rows_of(), path)
    log = Log([path], COLUMNS)
    assert all(Mapping(log.parts[0]).column(group, "x") is not None for group in log.groups)


@pytest.mark.parametrize("writer", ["pyarrow zstd", "pyarrow dictionary", "pyarrow many pages", "polars zstd", "duckdb"])
def test_what_is_not_one_plain_run_of_bytes_is_not_mapped(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "part.parquet"
    WRITERS[writer](rows_of(), path)
    log = Log([path], COLUMNS)
    assert all(Mapping(log.parts[0]).column(group, "x") is None for group in log.groups)


@pytest.mark.parametrize("options", [PLAIN, {"compression": "zstd"}], ids=["plain", "zstd"])
def test_columns_that_no_row_needs_do_not_disturb(tmp_path: Path, options: dict[str, Any]) -> None:
    """Among them columns whose names begin with the name of one that is needed, as path and name look alike in a footer."""
    rows, path = rows_of(), tmp_path / "part.parquet"
    spare = {"a": pa.array(["text"] * ROWS), "step.old": pa.array(rows["step"] + 1), "steps": pa.array(rows["step"] + 2)}
    spare |= {"x.norm": pa.array(np.ones(ROWS, np.float32)), "s": pa.array([{"x": 1, "step": 2}] * ROWS)}
    pq.write_table(table_of(rows, **spare), path, row_group_size=20, **options)
    assert same(read(path), rows)


def test_columns_may_come_in_any_order(tmp_path: Path) -> None:
    rows, path = rows_of(), tmp_path / "part.parquet"
    pq.write_table(table_of(rows).select(["x", "sample_id", "step"]), path, **PLAIN)
    assert same(read(path), rows)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [1, 2, 300])
@pytest.mark.parametrize("options", [PLAIN, {"compression": "zstd"}], ids=["plain", "zstd"])
def test_widths_and_types_are_the_same_for_mapped_and_decoded_rows(
    tmp_path: Path, dtype: str, width: int, options: dict[str, Any]
) -> None:
    columns = (Column("step", "int32"), Column("x", dtype, width))
    x = np.random.default_rng(0).standard_normal((ROWS, width)).astype(dtype)
    rows = {"step": np.arange(ROWS, dtype=np.int32), "x": x}
    write_own(tmp_path / "own.parquet", rows, columns)
    pq.write_table(pa.table({"step": rows["step"], "x": fixed(x)}), tmp_path / "other.parquet", **options)
    assert same(read(tmp_path / "own.parquet", columns), rows)
    assert same(read(tmp_path / "other.parquet", columns), rows)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 3 * GROUP_ROWS), block=st.integers(1, 60), own=st.booleans())
def test_blocks_of_any_size_make_up_the_whole(tmp_path: Path, rows: int, block: int, *, own: bool) -> None:
    made, path = rows_of(rows), tmp_path / "part.parquet"
    if own:
        write_own(path, made)
    else:
        pq.write_table(table_of(made), path, row_group_size=20)
    for group in Log([path], COLUMNS).groups:
        blocks = list(Mapping(group.part).blocks(group, NAMES, block))
        assert [start for start, _ in blocks] == list(range(0, group.rows, block))
        assert all(len(values) <= block for _, piece in blocks for values in piece.values())
        whole = {name: np.concatenate([piece[name] for _, piece in blocks]) for name in NAMES}
        assert same(whole, {name: values[group.first : group.first + group.rows] for name, values in made.items()})


def test_arrays_outlive_their_mapping_and_the_name_of_their_file(tmp_path: Path) -> None:
    rows, path = rows_of(), tmp_path / "part.parquet"
    write_own(path, rows)
    found = read(path)
    path.unlink()
    assert same(found, rows)


# Several parts


def test_the_rows_of_several_parts_are_numbered_in_the_order_of_the_parts(tmp_path: Path) -> None:
    rows = rows_of()
    cuts = [0, 20, 21, ROWS]
    paths = [tmp_path / f"part-{number}.parquet" for number in range(3)]
    for path, start, stop in zip(paths, cuts, cuts[1:], strict=False):
        write_own(path, {name: values[start:stop] for name, values in rows.items()})
    log = Log(paths, COLUMNS)
    assert log.rows == ROWS
    assert [(group.part.path.name, group.index, group.first, group.rows) for group in log.groups] == [
        ("part-0.parquet", 0, 0, 16),
        ("part-0.parquet", 1, 16, 4),
        ("part-1.parquet", 0, 20, 1),
        ("part-2.parquet", 0, 21, 16),
        ("part-2.parquet", 1, 37, 13),
    ]
    for group in log.groups:
        assert np.array_equal(Mapping(group.part).array(group, "step"), rows["step"][group.first : group.first + group.rows])


def test_single_rows_are_read_without_what_lies_around_them(tmp_path: Path) -> None:
    """Reading ahead of each of some scattered rows would read most of a store that is not in memory."""
    paths = [tmp_path / f"part-{number}.parquet" for number in range(3)]
    for path in paths:
        write_own(path, rows_of())
    log = Log(paths, COLUMNS)
    logged: list[tuple[str, int]] = []

    class Logged(mmap.mmap):
        name = ""

        def madvise(self, option: int, *where: int) -> None:
            logged.append((self.name, option))

    for own in log.parts:
        own._mapping = mapping = Mapping(own)
        with open(own.path, "rb") as file:
            mapping._map = Logged(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapping._map.name = own.path.stem
    for _ in range(2):
        log.take(["x", "step"], np.array([2 * ROWS + 3, 5, 0]))
    assert logged == [("part-0", mmap.MADV_RANDOM), ("part-2", mmap.MADV_RANDOM)]
    logged.clear()
    for group in log.groups:
        list(group.part.mapping.blocks(group, ["x"], 10))
    assert logged == [("part-0", mmap.MADV_NORMAL), ("part-2", mmap.MADV_NORMAL)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=3), rows=st.integers(1, 100))
def test_chunks_are_runs_of_groups_of_one_part(tmp_path: Path, sizes: list[int], rows: int) -> None:
    paths = [tmp_path / f"part-{number}.parquet" for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        write_own(path, rows_of(size))
    log = Log(paths, COLUMNS)
    runs = list(log.chunks(rows))
    assert [group for run in runs for group in run] == log.groups
    assert all(len({group.part.path for group in run}) == 1 for run in runs)
    assert all(len(run) == 1 or sum(group.rows for group in run) <= rows for run in runs)


@pytest.mark.parametrize("writer", ["pyarrow plain", "polars uncompressed", "own"])
def test_a_part_without_rows_has_no_groups(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "part.parquet"
    (write_own if writer == "own" else lambda path, rows: WRITERS[writer](rows, path))(path, rows_of(0))
    log = Log([path], COLUMNS)
    assert (log.rows, log.groups, list(log.chunks(10))) == (0, [], [])


def test_a_log_of_no_parts_has_no_rows() -> None:
    log = Log([], COLUMNS)
    assert (log.rows, log.groups, list(log.chunks(10))) == (0, [], [])


# What the writer noted


def test_a_rewritten_part_does_not_keep_the_note_of_the_one_it_was_made_from(tmp_path: Path) -> None:
    rows = rows_of() | {"x": np.ones((ROWS, WIDTH), np.float32)}
    write_own(tmp_path / "own.parquet", rows)
    assert [group.max_norm is None for group in Log([tmp_path / "own.parquet"], COLUMNS).groups] == [False] * 4
    table = pq.read_table(tmp_path / "own.parquet").replace_schema_metadata(pq.read_metadata(tmp_path / "own.parquet").metadata)
    pq.write_table(table, tmp_path / "other.parquet", row_group_size=GROUP_ROWS)
    assert b"dualstore" in pq.read_metadata(tmp_path / "other.parquet").metadata
    assert [group.max_norm for group in Log([tmp_path / "other.parquet"], COLUMNS).groups] == [None] * 4


# Files that do not hold what is expected


def nulled(values: NDArray[Any]) -> pa.Array:
    return pa.array(values, mask=np.arange(len(values)) == 30)


def null_rows(x: NDArray[Any]) -> pa.Array:
    return pa.array([None if number == 30 else row for number, row in enumerate(x.tolist())], pa.list_(pa.float32(), WIDTH))


def null_values(x: NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.array([[None, *row[1:]] if number == 30 else row for number, row in enumerate(x.tolist())], kind)


def short_row(x: NDArray[Any]) -> pa.Array:
    return pa.array([row[:-1] if number == 30 else row for number, row in enumerate(x.tolist())], pa.list_(pa.float32()))


def uneven_rows(x: NDArray[Any]) -> pa.Array:
    """As many values as there should be, but one row has two too many and the next two too few."""
    ends = np.arange(0, x.size + 1, WIDTH, dtype=np.int32)
    ends[31] += 2
    return pa.ListArray.from_arrays(pa.array(ends), x.reshape(-1))


ROW = rows_of()
CONTENTS: dict[str, tuple[pa.Table, str]] = {
    "null in a scalar column": (table_of(ROW, step=nulled(ROW["step"])), "'step': expected no nulls, found 1"),
    "null in a wide scalar column": (table_of(ROW, sample_id=nulled(ROW["sample_id"])), "'sample_id': expected no nulls, found 1"),
    "null row": (table_of(ROW, x=null_rows(ROW["x"])), "'x': expected no nulls, found 1"),
    "null in a row": (
        table_of(ROW, x=null_values(ROW["x"], pa.list_(pa.float32(), WIDTH))),
        "'x': expected 5 values .* and 1 nulls",
    ),
    "null in a list": (table_of(ROW, x=null_values(ROW["x"], pa.list_(pa.float32()))), "'x': expected 5 values .* and 1 nulls"),
    "short row": (table_of(ROW, x=short_row(ROW["x"])), r"'x': expected 5 values in every row, found \[4, 5\]"),
    "uneven rows": (table_of(ROW, x=uneven_rows(ROW["x"])), r"'x': expected 5 values in every row, found \[3, 5, 7\]"),
}
SCHEMAS: dict[str, tuple[pa.Table, str]] = {
    "narrow rows": (table_of(ROW, x=fixed(ROW["x"][:, :4])), "'x': expected lists of 5 float32, found fixed_size_list.*4"),
    "double vectors": (table_of(ROW, x=fixed(ROW["x"].astype(np.float64))), "'x': expected lists of 5 float32, found .*double"),
    "half vectors": (table_of(ROW, x=fixed(ROW["x"].astype(np.float16))), "'x': expected lists of 5 float32, found .*halffloat"),
    "scalars for vectors": (table_of(ROW, x=pa.array(ROW["step"])), "'x': expected lists of 5 float32, found int32"),
    "vectors for scalars": (table_of(ROW, step=fixed(ROW["x"])), "'step': expected int32, found fixed_size_list"),
    "lists of lists": (table_of(ROW, x=pa.array([[[1.0]]] * ROWS)), "'x': expected lists of 5 float32, found list"),
    "wide steps": (table_of(ROW, step=pa.array(ROW["step"].astype(np.int64))), "'step': expected int32, found int64"),
    "unsigned steps": (table_of(ROW, step=pa.array(ROW["step"].astype(np.uint32))), "'step': expected int32, found uint32"),
    "text": (table_of(ROW, step=pa.array(["0"] * ROWS)), "'step': expected int32, found string"),
    "missing column": (table_of(ROW, x=None), r"expected a column 'x', found \['step', 'sample_id'\]"),
    "no columns": (pa.table({"a": [1]}), r"expected a column 'step', found \['a'\]"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "zstd": {"compression": "zstd"},
    "plain pages of version 2": {**PLAIN, "data_page_version": "2.0"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("content", CONTENTS)
def test_rows_that_are_not_whole_vectors_are_an_error(tmp_path: Path, content: str, options: str) -> None:
    table, message = CONTENTS[content]
    path = tmp_path / "part.parquet"
    pq.write_table(table, path, row_group_size=20, **OPTIONS[options])
    with pytest.raises(DamagedError, match=naming(path, message)):
        read(path)


@pytest.mark.parametrize("content", SCHEMAS)
def test_columns_of_another_type_are_an_error(tmp_path: Path, content: str) -> None:
    table, message = SCHEMAS[content]
    path = tmp_path / "part.parquet"
    pq.write_table(table, path, **PLAIN)
    with pytest.raises(DamagedError, match=naming(path, message)):
        Part(path, COLUMNS)


def test_a_column_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    table = table_of(rows_of())
    pq.write_table(pa.table([*table.columns, table.column("x")], names=[*NAMES, "x"]), path, **PLAIN)
    with pytest.raises(DamagedError, match=naming(path, "expected a column 'x'")):
        Part(path, COLUMNS)


# Damaged files


GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "text": lambda data: b"step,sample_id\n1,2\n" * 100,
    "a few bytes": lambda data: data[:10],
    "magic only": lambda data: b"PAR1PAR1",
    "no footer": lambda data: data[:-200],
    "last byte missing": lambda data: data[:-1],
    "footer of zeros": lambda data: data[:-300] + bytes(292) + data[-8:],
    "footer of ones": lambda data: data[:-300] + b"\xff" * 292 + data[-8:],
    "footer longer than the file": lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1",
    "footer of length 0": lambda data: data[:-8] + bytes(4) + b"PAR1",
    "encrypted": lambda data: data[:-4] + b"PARE",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_file_that_is_not_parquet_is_an_error(tmp_path: Path, garbage: str) -> None:
    path = tmp_path / "part.parquet"
    write_own(path, rows_of())
    path.write_bytes(GARBAGE[garbage](path.read_bytes()))
    with pytest.raises(DamagedError, match=naming(path, "expected a Parquet file, found .*; restore or delete it")):
        Part(path, COLUMNS)


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write_own(path, rows_of())
    data = path.read_bytes()
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(DamagedError, match=naming(path)):
            Part(path, COLUMNS)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.parquet", tmp_path):
        with pytest.raises(DamagedError, match=naming(path)):
            Part(path, COLUMNS)


def test_a_file_that_vanishes_between_footer_and_rows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write_own(path, rows_of())
    found = Part(path, COLUMNS)
    path.unlink()
    with pytest.raises(DamagedError, match=naming(path, "cannot be mapped")):
        Mapping(found)


@pytest.mark.parametrize("writer", ["own", "pyarrow plain", "pyarrow zstd", "duckdb"])
@pytest.mark.parametrize("place", ["front", "middle", "before the footer"])
def test_bytes_missing_within_a_file_give_an_error_or_the_right_rows(tmp_path: Path, writer: str, place: str) -> None:
    rows, path = rows_of(), tmp_path / "part.parquet"
    (write_own if writer == "own" else lambda path, rows: WRITERS[writer](rows, path))(path, rows)
    data = path.read_bytes()
    body = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for size in (1, 64, 200):
        at = {"front": 4, "middle": body // 2, "before the footer": body - size}[place]
        path.write_bytes(data[:at] + data[at + size :])
        assert_right_or_damaged(path, rows)


def assert_right_or_damaged(path: Path, rows: Rows) -> bool:
    """Whether the rows could be read; what must not happen is that they are read and wrong."""
    found, message = None, ""
    try:
        found = read(path)
    except DamagedError as error:
        message = str(error)
    assert re.match(naming(path), message) if found is None else same(found, rows)
    return found is not None


def header_of(path: Path, name: str, group: int = 0) -> range:
    """The offsets of the bytes of a column's first page header."""
    chunk = pq.read_metadata(path).row_group(group).column(NAMES.index(name))
    decoder = Decoder(memoryview(path.read_bytes())[chunk.data_page_offset :])
    decoder.struct()
    return range(chunk.data_page_offset, chunk.data_page_offset + decoder.at)


@pytest.mark.parametrize(
    ("writer", "name"),
    [("own", "x"), ("own", "step"), ("pyarrow plain", "x"), ("pyarrow plain pages of version 2", "x"), ("pyarrow zstd", "x")],
)
def test_a_page_header_that_lies_gives_an_error_or_the_right_rows(tmp_path: Path, writer: str, name: str) -> None:
    rows, path = rows_of(20), tmp_path / "part.parquet"
    (write_own if writer == "own" else lambda path, rows: WRITERS[writer](rows, path))(path, rows)
    data = path.read_bytes()
    for at in header_of(path, name):
        for value in {0xFF, data[at] ^ 1, data[at] ^ 2} - {data[at]}:
            path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            assert_right_or_damaged(path, rows)


@pytest.mark.parametrize("writer", ["own", "pyarrow plain"])
@pytest.mark.parametrize("name", ["step", "x"])
def test_a_page_header_that_names_another_encoding_gives_an_error_or_the_right_rows(tmp_path: Path, writer: str, name: str) -> None:
    """Each encoding of the format in turn, byte stream split (9) too, which any bytes can be read as."""
    rows, path = rows_of(20), tmp_path / "part.parquet"
    (write_own if writer == "own" else lambda path, rows: WRITERS[writer](rows, path))(path, rows)
    data = path.read_bytes()
    header = header_of(path, name)
    at = header.start + data[header.start : header.stop].rindex(bytes([0x15, 0, 0x15, 6, 0x15, 6])) + 1
    for encoding in range(10):
        path.write_bytes(data[:at] + bytes([encoding << 1]) + data[at + 1 :])
        assert assert_right_or_damaged(path, rows) or encoding


def stored(number: int, page: Field) -> Callable[[int], bytes]:
    """A page header for a chunk of so many bytes that claims a page of this number and contents."""

    def header(size: int) -> bytes:
        claims = (encode([(1, I32, number), (2, I32, size - own), (3, I32, size - own), page]) for own in range(100))
        return next(claim for own, claim in enumerate(claims) if len(claim) == own)

    return header


HEADERS: dict[str, Callable[[int], bytes]] = {
    "zeros": lambda size: bytes(200),
    "ones": lambda size: b"\xff" * 200,
    "nested": lambda size: bytes([0x1C]) * 200,
    "nested without end": lambda size: bytes([0x1C]) * 20_000,
    "more booleans than bytes": lambda size: bytes([0x19, 0xF1]) + varint(20_000) + bytes(100),
    "a number without end": lambda size: bytes([0x15]) + b"\xff" * 20_000,
    "text for sizes": lambda size: bytes([0x15, 0, 0x18, 0, 0x18, 0, 0x2C]) + bytes(100),
    "a number for the page": stored(0, (5, I32, 7)),
    "text for the page": stored(0, (5, BINARY, b"\1\2\3\4")),
    "text within the page": stored(0, (5, STRUCT, [(1, BINARY, b"text"), (2, BINARY, b"text")])),
    "levels before the page": stored(3, (8, STRUCT, [(1, I32, 9000), (4, I32, 0), (5, I32, -1000), (6, I32, -1000)])),
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_page_header_of_garbage_is_an_error(tmp_path: Path, header: str) -> None:
    columns = (Column("step", "int32"), Column("x", "float32", 3000))
    path = tmp_path / "part.parquet"
    write_own(path, {"step": np.zeros(3, np.int32), "x": np.ones((3, 3000), np.float32)}, columns)
    chunk = pq.read_metadata(path).row_group(0).column(1)
    garbage, data = HEADERS[header](chunk.total_compressed_size), path.read_bytes()
    path.write_bytes(data[: chunk.data_page_offset] + garbage + data[chunk.data_page_offset + len(garbage) :])
    with pytest.raises(DamagedError, match=naming(path, "row group 0")):
        read(path, columns)


Lie = Callable[[list[Field], int], list[Field]]


def lie(number: int) -> Lie:
    """Adds to the field of this number."""
    return lambda fields, by: [(field, kind, value + by if field == number else value) for field, kind, value in fields]


LIES = {"number of values": 5, "unpacked size": 6, "size": 7, "offset": 9}


@pytest.mark.parametrize("field", LIES)
@pytest.mark.parametrize("name", ["step", "x"])
def test_a_footer_that_lies_about_a_column_gives_an_error_or_the_right_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, name: str
) -> None:
    rows, path = rows_of(20), tmp_path / "part.parquet"
    honest = part._chunk_metadata
    for by in (-400, -64, -20, -16, -4, -1, 1, 4, 16, 20, 64, 400, 100_000):

        def dishonest(column: Column, *arguments: Any, by: int = by) -> list[Field]:
            fields = honest(column, *arguments)
            return lie(LIES[field])(fields, by) if column.name == name else fields

        monkeypatch.setattr(part, "_chunk_metadata", dishonest)
        write_own(path, rows)
        assert_right_or_damaged(path, rows)


@pytest.mark.parametrize("by", [-17, -16, -5, -1, 1, 4, 5, 100])
def test_a_footer_that_lies_about_the_rows_of_a_group_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    path = tmp_path / "part.parquet"
    honest = PartWriter._group_metadata
    monkeypatch.setattr(PartWriter, "_group_metadata", lambda *arguments: lie(3)(honest(*arguments), by))
    write_own(path, rows_of(2 * GROUP_ROWS))
    with pytest.raises(DamagedError, match=naming(path)):
        read(path)


@pytest.mark.parametrize(("text", "column"), [(b"\x04step\x00", "step"), (b"\x07element\x00", "x"), (b"\x09dualstore\x19", "x")])
def test_a_footer_with_names_that_are_not_text_is_an_error(tmp_path: Path, text: bytes, column: str) -> None:
    path = tmp_path / "part.parquet"
    write_own(path, rows_of())
    data = path.read_bytes()
    at = data.rindex(text) if text.startswith(b"\x09") else data.index(text)
    path.write_bytes(data[: at + 1] + b"\xff" + data[at + 2 :])
    with pytest.raises(DamagedError, match=naming(path)):
        Log([path], COLUMNS).groups[0].max_norm, read(path)


def test_rows_are_taken_in_the_order_that_is_asked(tmp_path: Path) -> None:
    """From mapped and decoded groups of two parts, some rows more than once."""
    made = [rows_of(70), rows_of(30)]
    write_own(tmp_path / "part-0.parquet", made[0])
    write_by_pyarrow(compression="zstd")(made[1], tmp_path / "part-1.parquet")
    log = Log(sorted(tmp_path.iterdir()), COLUMNS)
    rows = np.random.default_rng(0).integers(0, 100, 200)
    for asked in (rows, rows[:0], rows[:1]):
        expected = {name: np.concatenate([part[name] for part in made])[asked] for name in ("x", "step")}
        assert same(log.take(["x", "step"], asked), expected)

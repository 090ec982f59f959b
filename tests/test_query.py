"""Questions to a store: the rows, their order and their alphas equal the reference for every way of asking and storing."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray
from torch import nn

import dualstore
from dualstore.errors import QueryError
from dualstore.scan import Options
from dualstore.store import Store
from tests import reference
from tests.reference import Rows, write_store

TASKS = ("mnist", "it's", 'a "b"')
ROW = ("step", "epoch", "sample_id", "position", "label", "task")


def make_rows(count: int, width: int, seed: int, dtype: Any = np.float32) -> Rows:
    """Patterns of 12 steps with small whole numbers as keys, so that products are exact and most alphas tie."""
    rng = np.random.default_rng(seed)
    step = np.sort(np.append(np.arange(12), rng.integers(0, 12, count - 12))).astype(np.int32)
    return Rows(
        step=step,
        sample_id=rng.choice([-5, 0, 3, 2**40, *range(100, 130)], count),
        position=rng.integers(0, 3, count).astype(np.int32),
        label=rng.integers(-1, 5, count).astype(np.int32),
        task=rng.integers(-1, 3, count).astype(np.int32),
        x=rng.integers(-2, 3, (count, width)).astype(dtype),
        e=rng.integers(-2, 3, (count, 2)).astype(dtype),
        epoch=step // 5,
    )


FIRST = make_rows(400, 5, 0)
SECOND = make_rows(130, 3, 1)
SECOND.x = np.random.default_rng(2).normal(size=SECOND.x.shape).astype(np.float32)
PROBES = {
    "test_id": np.array([7, 5, 5, 7, 5, 9, 9, -3], np.int64),
    "position": np.array([0, 1, 0, 0, 2, 0, 0, 4], np.int32),
    "step": np.array([9, 3, 3, 4, 3, 6, 6, 0], np.int32),
    "label": np.zeros(8, np.int32),
    "task": np.zeros(8, np.int32),
    "predicted": np.zeros(8, np.int32),
}


def probes_of(rows: Rows, seed: int) -> dict[str, ndarray]:
    """PROBES with vectors that differ from row to row."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (8, rows.x.shape[1])) + np.arange(8)[:, None]
    return PROBES | {"x": x.astype(rows.x.dtype), "y": np.zeros((8, 2), rows.x.dtype)}


PROBED = probes_of(FIRST, 3)


def vectors_of(dtype: Any) -> pa.DataType:
    return pa.list_(pa.from_numpy_dtype(np.dtype(dtype)))


def rewrite(path: Path, how: str) -> None:
    """Writes a part anew, in its place, as other programs would."""
    with pq.ParquetFile(path) as file:
        table = file.read()
    other = path.with_suffix(".new")
    if how == "zstd":
        pq.write_table(table, other, compression="zstd", row_group_size=77)
    elif how == "plain":
        pq.write_table(table, other, compression="none", use_dictionary=False, row_group_size=100, data_page_size=1 << 24)
    elif how == "plain, second page version":
        pq.write_table(table, other, compression="none", use_dictionary=False, data_page_size=1 << 24, data_page_version="2.0")
    elif how == "lists":
        plain = [field.with_type(vectors_of(np.float32)) if field.name in "xe" else field for field in table.schema]
        pq.write_table(table.cast(pa.schema(plain)), other, compression="snappy")
    else:
        polars.DataFrame(table).write_parquet(other, compression="zstd", row_group_size=99)
    other.replace(path)


FORMS = ["as written", "many parts", "small groups", "zstd", "plain", "plain, second page version", "lists", "polars", "mixed"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same rows stored in many ways."""
    root = tmp_path_factory.mktemp("stores")
    for form in FORMS:
        with pytest.MonkeyPatch.context() as patch:
            if form in ("small groups", "mixed"):
                patch.setattr("dualstore.part.MAX_GROUP_ROWS", 64)
            every = {"as written": None, "many parts": 2}.get(form, 5)
            probes = [PROBED, probes_of(SECOND, 4)]
            write_store(
                root / form, [FIRST, SECOND], tasks=TASKS, epoch_of_step=lambda step: step // 5, probes=probes, flush_every=every
            )
        for number, path in enumerate(sorted(root.glob(f"{form}/*/layer=*/*.parquet"))):
            if form in ("zstd", "plain", "plain, second page version", "lists", "polars"):
                rewrite(path, form)
            elif form == "mixed" and number % 2:
                rewrite(path, "zstd")
    return {form: root / form for form in FORMS}


@pytest.fixture(scope="module")
def store(stores: dict[str, Path]) -> Store:
    return dualstore.open(stores["small groups"])


def answer(
    rows: Rows,
    queries: ndarray,
    top: int,
    *,
    bottom: bool = False,
    absolute: bool = False,
    min_alpha: float = -math.inf,
    kept: ndarray | None = None,
    groups: Sequence[Any] | None = None,
    column: str | None = None,
    names: Sequence[int] = (),
    shown: bool = False,
) -> list[dict[str, Any]]:
    """What a query must return, from the reference: `groups` has the value of `per` for each row, None for NULL."""
    kept = np.ones(len(rows), bool) if kept is None else kept
    values = [None] if groups is None else sorted(set(np.array(groups, object)[kept]), key=lambda value: (value is None, value))
    found = []
    for number, query in enumerate(queries):
        alphas = reference.halved(rows.x, query) + 0.0
        for value in values:
            mine = kept if groups is None else kept & np.array([group == value for group in groups])
            sizes = np.abs(alphas) if absolute else alphas
            for rank, row in enumerate(reference.ranked(rows, sizes, top, largest=not bottom, kept=mine & (sizes >= min_alpha))):
                named = {} if column is None else {column: names[number]}
                of = {"group": value} if shown else {}
                found.append(named | of | {"rank": rank + 1, "alpha": alphas[row]} | describe(rows, row))
    return found


def describe(rows: Rows, row: int) -> dict[str, Any]:
    """The row columns of one row."""
    found = {name: int(getattr(rows, name)[row]) for name in ROW}
    return found | {"task": None if rows.task[row] < 0 else TASKS[rows.task[row]]}


def named_tasks(rows: Rows) -> list[str | None]:
    return [None if task < 0 else TASKS[task] for task in rows.task]


CONDITIONS: list[tuple[str | None, Callable[[Rows], ndarray]]] = [
    (None, lambda rows: rows.step >= 0),
    ("true", lambda rows: rows.step >= 0),
    ("1 = 2", lambda rows: rows.step < 0),
    ("NULL", lambda rows: rows.step < 0),
    ("step = 7", lambda rows: rows.step == 7),
    ("step BETWEEN 3 AND 8 AND NOT step = 5", lambda rows: (rows.step >= 3) & (rows.step <= 8) & (rows.step != 5)),
    ("epoch = 1", lambda rows: rows.step // 5 == 1),
    ("sample_id = 1099511627776", lambda rows: rows.sample_id == 2**40),
    ("sample_id % 2 = 0", lambda rows: rows.sample_id % 2 == 0),
    ("sample_id IN (-5, 3, 110) OR position > 1", lambda rows: np.isin(rows.sample_id, [-5, 3, 110]) | (rows.position > 1)),
    ("position = 2", lambda rows: rows.position == 2),
    ("label = -1", lambda rows: rows.label == -1),
    ("label >= 3", lambda rows: rows.label >= 3),
    ("task = 'it''s'", lambda rows: rows.task == 1),
    ("task LIKE '%b%'", lambda rows: rows.task == 2),
    ("task IS NULL", lambda rows: rows.task == -1),
    ("task <> 'mnist'", lambda rows: rows.task > 0),
    ('"step" = 1 AND sample_id = 3', lambda rows: (rows.step == 1) & (rows.sample_id == 3)),
]
GROUPS: list[tuple[str | None, Callable[[Rows], list[Any] | None], bool]] = [
    (None, lambda rows: None, False),
    ("label", lambda rows: rows.label.tolist(), False),
    ("task", named_tasks, False),
    ("sample_id", lambda rows: rows.sample_id.tolist(), False),
    (" epoch ", lambda rows: (rows.step // 5).tolist(), False),
    ("label % 2 = 0", lambda rows: (rows.label % 2 == 0).tolist(), True),
    ("nullif(label, 2)", lambda rows: [None if label == 2 else label for label in rows.label.tolist()], True),
    ("task || '!'", lambda rows: [None if task is None else task + "!" for task in named_tasks(rows)], True),
    ("step * 1000 + sample_id", lambda rows: (rows.step * 1000 + rows.sample_id).tolist(), True),
    ("'all'", lambda rows: ["all"] * len(rows), True),
]


@settings(deadline=None, max_examples=60)
@given(
    form=st.sampled_from(FORMS),
    layer=st.sampled_from([0, "layer1"]),
    count=st.integers(1, 3),
    condition=st.sampled_from(CONDITIONS),
    per=st.sampled_from(GROUPS),
    top=st.one_of(st.integers(1, 6), st.just(500)),
    order=st.sampled_from([{}, {"bottom": True}, {"absolute": True}, {"min_alpha": 2}, {"absolute": True, "min_alpha": 3.0}]),
    budget_bytes=st.sampled_from([2000, 1 << 20, 1 << 28]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_every_question_is_answered_as_by_the_reference(
    stores: dict[str, Path],
    form: str,
    layer: int | str,
    count: int,
    condition: tuple[str | None, Callable[[Rows], ndarray]],
    per: tuple[str | None, Callable[[Rows], list[Any] | None], bool],
    top: int,
    order: dict[str, Any],
    budget_bytes: int,
    threads: int,
    seed: int,
) -> None:
    rows = FIRST if layer == 0 else SECOND
    queries = np.random.default_rng(seed).integers(-2, 3, (count, rows.x.shape[1])).astype(np.float32)
    store = Store(stores[form], Options(budget_bytes, threads))
    found = store.query(queries if count > 1 else queries[0], layer=layer, top=top, where=condition[0], per=per[0], **order)
    column = "query" if count > 1 else None
    expected = answer(
        rows,
        queries,
        top,
        **order,
        kept=condition[1](rows),
        groups=per[1](rows),
        column=column,
        names=range(count),
        shown=per[2],
    )
    assert found.to_dicts() == expected
    assert found.columns == [*([column] if column else []), *(["group"] if per[2] else []), "rank", "alpha", *ROW]


@pytest.mark.parametrize("form", FORMS)
def test_every_way_of_storing_gives_the_same_answer(stores: dict[str, Path], form: str) -> None:
    store, query = dualstore.open(stores[form]), np.array([1, -2, 0, 1, 3], np.float32)
    assert store.query(query, layer=0, top=60).to_dicts() == answer(FIRST, query[None], 60)
    found = store.query(query, layer=0, top=2, per="task", where="label >= 3")
    assert found.to_dicts() == answer(FIRST, query[None], 2, kept=FIRST.label >= 3, groups=named_tasks(FIRST))
    assert store.query(test_id=5, layer=0, top=9).to_dicts() == answer(FIRST, PROBED["x"][4:5], 9)


@pytest.mark.parametrize("condition", CONDITIONS, ids=[str(where) for where, _ in CONDITIONS])
def test_conditions_on_every_row_column_select_what_they_say(
    store: Store, condition: tuple[str | None, Callable[[Rows], ndarray]]
) -> None:
    query = np.array([1, 1, 1, -1, 2], np.float32)
    expected = answer(FIRST, query[None], 500, kept=condition[1](FIRST))
    assert store.query(query, layer=0, top=500, where=condition[0]).to_dicts() == expected


@pytest.mark.parametrize("per", GROUPS[1:], ids=[str(per) for per, *_ in GROUPS[1:]])
def test_groups_come_in_the_order_of_their_values_each_with_its_best_rows(
    store: Store, per: tuple[str, Callable[[Rows], list[Any] | None], bool]
) -> None:
    queries = np.array([[1, 1, 1, -1, 2], [0, 0, 0, 0, 0]], np.float32)
    for top in (1, 3):
        found = store.query(queries, layer=0, top=top, per=per[0])
        assert found.to_dicts() == answer(FIRST, queries, top, groups=per[1](FIRST), column="query", names=[0, 1], shown=per[2])


def test_a_group_of_nan_is_one_group_after_the_others(stores: dict[str, Path]) -> None:
    query, per = np.ones(5), "CASE WHEN label < 2 THEN 'NaN'::DOUBLE ELSE label END"
    for form in ("as written", "many parts"):
        found = dualstore.open(stores[form]).query(query, layer=0, top=1, per=per).to_dicts()
        assert [row["group"] for row in found[:-1]] == [2, 3, 4]
        assert math.isnan(found[-1]["group"])
        assert {name: found[-1][name] for name in ROW} == {
            name: value for name, value in answer(FIRST, np.ones((1, 5)), 1, kept=FIRST.label < 2)[0].items() if name in ROW
        }


def test_files_rewritten_while_the_store_is_open_give_the_same_answer(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [FIRST], tasks=TASKS, epoch_of_step=lambda step: step // 5, flush_every=4)
    store, query = dualstore.open(tmp_path / "store"), np.arange(5)
    expected = answer(FIRST, query[None].astype(np.float32), 50)
    for how in ("zstd", "polars", "plain", "lists"):
        for path in sorted(tmp_path.glob("store/patterns/*/*.parquet")):
            rewrite(path, how)
            assert store.query(query, layer=0, top=50).to_dicts() == expected


def test_changed_keys_of_a_rewritten_file_are_seen_whatever_its_first_writer_noted(tmp_path: Path) -> None:
    """The norms noted by the recording may be too small for the keys that another program has put in their place."""
    write_store(tmp_path / "store", [FIRST], tasks=TASKS)
    (path,) = tmp_path.glob("store/patterns/*/*.parquet")
    with pq.ParquetFile(path) as file:
        table = file.read()
    # Large keys almost orthogonal to the query: with the noted norms the rounding of float32 products would pass for exact.
    query = np.array([1, -1, 2, 0.5, 3], np.float32)
    x = np.random.default_rng(0).normal(size=(400, 5)) * 1e6
    rows = Rows(**{**vars(FIRST), "x": (x - np.outer(x @ query, query) / (query @ query)).astype(np.float32)})
    keys = pa.FixedSizeListArray.from_arrays(pa.array(rows.x.reshape(-1)), 5)
    at = table.schema.get_field_index("x")
    changed = table.set_column(at, "x", keys)
    assert b"dualstore" in changed.schema.metadata
    pq.write_table(changed, path, compression="none", use_dictionary=False)
    store = dualstore.open(tmp_path / "store")
    for top in (1, 3, 9):
        for bottom in (False, True):
            found = store.query(query, layer=0, top=top, bottom=bottom).to_dicts()
            expected = answer(rows, query[None], top, bottom=bottom)
            assert [(row["alpha"], row["step"], row["sample_id"]) for row in found] == [
                (row["alpha"], row["step"], row["sample_id"]) for row in expected
            ]


def test_a_batch_is_answered_like_its_queries_one_by_one(store: Store) -> None:
    queries = np.random.default_rng(5).normal(size=(9, 3)).astype(np.float32)
    batch = store.query(queries, layer=1, top=7).to_dicts()
    assert [row.pop("query") for row in batch] == np.repeat(np.arange(9), 7).tolist()
    for number, query in enumerate(queries):
        assert batch[7 * number :][:7] == store.query(query, layer=1, top=7).to_dicts()


def test_alpha_is_the_same_float_in_every_kind_of_question(store: Store, stores: dict[str, Path]) -> None:
    query = np.random.default_rng(6).normal(size=3).astype(np.float32)
    expected = sorted((reference.halved(SECOND.x, query) + 0.0).tolist(), reverse=True)
    for form in FORMS:
        for options in (Options(2000, 1), Options(1 << 28, 3)):
            found = Store(stores[form], options).query(query, layer=1, top=200).to_dicts()
            assert [row["alpha"] for row in found] == expected
    grouped = store.query(np.stack([query, query]), layer=1, top=200, per="label").to_dicts()
    assert sorted((row["alpha"] for row in grouped), reverse=True) == sorted([*expected, *expected], reverse=True)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 5)])
def test_lists_arrays_and_other_number_types_are_taken(store: Store, shape: tuple[int, ...]) -> None:
    query = np.arange(math.prod(shape)).reshape(shape)
    expected = store.query(query.astype(np.float32), layer=0, top=4).to_dicts()
    for given_as in (query, query.tolist(), query.astype(np.float64), query.astype(np.int8), query.astype(np.float16)):
        assert store.query(given_as, layer="layer0", top=4).to_dicts() == expected
    assert ("query" in expected[0]) == (len(shape) == 2)


def test_a_query_of_double_precision_is_used_as_it_is_where_the_store_is(tmp_path: Path) -> None:
    rows = make_rows(60, 4, 7, np.float64)
    rows.x = np.random.default_rng(8).normal(size=rows.x.shape)
    write_store(tmp_path / "store", [rows], tasks=TASKS, epoch_of_step=lambda step: step // 5)
    query = np.array([0.1, 0.2, -0.3, 1 / 3])
    found = dualstore.open(tmp_path / "store").query(query, layer=0, top=60)
    assert found.to_dicts() == answer(rows, query[None], 60)


def test_the_latest_probe_of_a_test_id_is_asked(store: Store) -> None:
    for test_id, row in ((7, 0), (9, 6), (-3, 7)):
        found = store.query(test_id=test_id, layer=0, top=5)
        assert found.to_dicts() == answer(FIRST, PROBED["x"][row : row + 1], 5)


def test_the_position_of_a_probe_is_the_last_unless_chosen(store: Store) -> None:
    for position, row in ((None, 4), (0, 2), (1, 1), (2, 4)):
        found = store.query(test_id=5, position=position, layer=0, top=5)
        assert found.to_dicts() == answer(FIRST, PROBED["x"][row : row + 1], 5)


def test_several_test_ids_are_told_apart_by_a_column(store: Store) -> None:
    for ids in ([9, 5, 7], (9, 5, 7)):
        found = store.query(test_id=ids, layer=0, top=4, where="label > 0")
        expected = answer(FIRST, PROBED["x"][[6, 4, 0]], 4, kept=FIRST.label > 0, column="test_id", names=[9, 5, 7])
        assert found.to_dicts() == expected
    assert store.query(test_id=[5], layer=0, top=1).columns[0] == "test_id"
    assert store.query(test_id=[5, 5], layer=0, top=2).table == store.query(test_id=[5], layer=0, top=2).table


def test_a_layer_without_patterns_has_no_best_rows(tmp_path: Path) -> None:
    nothing = Rows(**{name: getattr(FIRST, name)[:0] for name in ("step", "sample_id", "position", "label", "task", "x", "e")})
    write_store(tmp_path / "store", [nothing])
    store = dualstore.open(tmp_path / "store")
    for per, columns in ((None, []), ("label", []), ("label + 1", ["group"])):
        found = store.query(np.ones((2, 5)), layer=0, per=per, where=None if per is None else "step > 1")
        assert len(found) == 0
        assert found.columns == ["query", *columns, "rank", "alpha", *ROW]
    with pytest.raises(QueryError, match="test id 3 was not recorded as a probe of layer 0; none is"):
        store.query(test_id=3, layer=0)


GOOD = [1.0, 2.0, 3.0, 4.0, 5.0]
COLUMNS = "columns: step, epoch, sample_id, position, label, task, slot, duplicate$"


@pytest.mark.parametrize(
    ("question", "match"),
    [
        ({"layer": 9}, r"no layer 9; there are 0 \(layer0\), 1 \(layer1\)"),
        ({"layer": "fc"}, r"no layer 'fc'; there are 0 \(layer0\)"),
        ({"x": None}, "expected either a vector x or a test_id, found neither"),
        ({"test_id": 5}, "expected either a vector x or a test_id, found both"),
        ({"x": None, "test_id": 8}, "test id 8 was not recorded as a probe of layer 0; 4 are, -3 to 9"),
        ({"x": None, "test_id": [5, 8]}, "test id 8 was not recorded"),
        ({"x": None, "test_id": []}, r"test_id: expected whole numbers, found \[\]"),
        ({"x": None, "test_id": True}, "test_id: expected whole numbers, found True"),
        ({"x": None, "test_id": 2**70}, "test_id: expected whole numbers"),
        ({"x": None, "test_id": 5, "position": 3}, "test id 5 has no position 3 at layer 0; it has 0 to 2"),
        ({"top": 0}, "top: expected a whole number of at least 1, found 0"),
        ({"top": -3}, "top: expected a whole number of at least 1, found -3"),
        ({"top": True}, "top: expected a whole number of at least 1, found True"),
        ({"bottom": True, "absolute": True}, "bottom: expected without absolute and min_alpha"),
        ({"bottom": True, "min_alpha": 0}, "bottom: expected without absolute and min_alpha"),
        ({"min_alpha": math.nan}, "min_alpha: expected a finite number, found nan"),
        ({"min_alpha": 10**400}, "min_alpha: expected a finite number, found 1000"),
        ({"min_alpha": "3"}, "min_alpha: expected a finite number, found '3'"),
        ({"x": [1, 2]}, r"query for layer 0 \(layer0\): expected 5 values, or rows of them, found shape \(2,\)"),
        ({"x": [GOOD[:4], GOOD[:4]]}, r"expected 5 values, or rows of them, found shape \(2, 4\)"),
        ({"x": [[GOOD]]}, r"expected 5 values, or rows of them, found shape \(1, 1, 5\)"),
        ({"x": []}, r"expected 5 values, or rows of them, found shape \(0,\)"),
        ({"x": np.zeros((0, 5))}, r"expected 5 values, or rows of them, found shape \(0, 5\)"),
        ({"x": [[1, 2], [3]]}, "query for layer 0 .*: expected numbers, found"),
        ({"x": [*GOOD[:4], math.nan]}, "query for layer 0 .*: expected finite numbers, found NaN or infinity"),
        ({"x": [*GOOD[:4], -math.inf]}, "expected finite numbers, found NaN or infinity"),
        ({"x": [*GOOD[:4], -1e39]}, r"expected values within float32, found up to 1e\+39"),
        ({"where": "colour = 1"}, f"condition 'colour = 1': .*colour.*; {COLUMNS}"),
        ({"where": "label = = 1"}, f"condition 'label = = 1': Parser Error: syntax error.*; {COLUMNS}"),
        ({"where": ""}, "condition ''"),
        ({"where": "sum(label) > 1"}, "condition .*aggregates"),
        ({"where": "row_number() OVER () > 1"}, "condition .*window functions"),
        ({"where": "label"}, "condition 'label': .*; columns: step"),
        ({"where": "task"}, "condition 'task': .*; columns: step"),
        ({"where": "label = 1, step = 2"}, "condition .*single expression"),
        ({"where": "label = 1; DROP TABLE samples"}, "condition .*label = 1; DROP"),
        ({"where": "samples.label = 1"}, "condition 'samples.label = 1': .*samples.*not found"),
        ({"where": "sample_id IN (SELECT sample_id FROM samples)"}, "condition .*samples does not exist"),
        ({"where": "alpha > 1"}, "condition 'alpha > 1'"),
        ({"where": "_row = 1"}, "condition '_row = 1'"),
        ({"per": "colour"}, f"expression 'colour': .*; {COLUMNS}"),
        ({"per": "label +"}, r"expression 'label \+'"),
        ({"per": ""}, "expression ''"),
        ({"per": "sum(label)"}, "expression 'sum.label.'"),
        ({"per": "row_number() OVER ()"}, "expression 'row_number.. OVER ..'"),
        ({"per": "label, task"}, "expression 'label, task'"),
        ({"per": "[label]"}, "expression '.label.'"),
    ],
)
def test_a_question_that_does_not_fit_is_refused_in_one_clear_line(store: Store, question: dict[str, Any], match: str) -> None:
    with pytest.raises(QueryError, match=match) as caught:
        store.query(**{"x": GOOD, "layer": 0} | question)
    assert "\n" not in str(caught.value)


WRONG_TYPES = [
    ("x=GOOD, layer=None", "no layer None"),
    ("x=GOOD, layer=np.arange(2)", "no layer array"),
    ("x=GOOD, layer=0, top=1.5", "top: expected a whole number of at least 1, found 1.5"),
    ("x=GOOD, layer=0, top='3'", "top: expected a whole number of at least 1, found '3'"),
    ("x=GOOD, layer=0, top=None", "top: expected a whole number of at least 1, found None"),
    ("layer=0, test_id='5'", "test_id: expected whole numbers, found '5'"),
    ("layer=0, test_id=5.0", "test_id: expected whole numbers, found 5.0"),
    ("layer=0, test_id=[[5, 7], [9, 5]]", "test_id: expected whole numbers"),
    ("x=3.0, layer=0", r"expected 5 values, or rows of them, found shape \(\)"),
    ("x='a query', layer=0", "query for layer 0 .*: expected numbers, found"),
    ("x=list('12345'), layer=0", "query for layer 0 .*: expected numbers, found"),
    ("x={'a': 1}, layer=0", "query for layer 0 .*: expected numbers, found"),
    ("x=[1, 2, 3, 4, None], layer=0", "query for layer 0 .*: expected"),
    ("x=np.ones(5) * 1j, layer=0", "query for layer 0 .*: expected numbers, found"),
]
SAME = ["test_id=np.int64(5), layer=0, top=2", "test_id=5, layer=np.int64(0), top=np.int32(2), position=np.int16(2)"]
SAME_BATCH = ["test_id=np.array([5, 9]), layer=0, top=2", "test_id=(5, 9), layer=0, top=2"]
CHILD = """
import json, sys
import numpy as np
import dualstore

GOOD = [1.0, 2.0, 3.0, 4.0, 5.0]
store = dualstore.open(sys.argv[1])
for text in json.loads(sys.argv[2]):
    try:
        found = eval(f"store.query({text}).to_dicts()")
    except Exception as error:
        found = [type(error).__name__, str(error)]
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def unchecked(stores: dict[str, Path]) -> dict[str, Any]:
    """Answers, or name and text of errors, as users see them: without the checks of types that are on while tests run."""
    asked = [text for text, _ in WRONG_TYPES] + SAME + SAME_BATCH
    run = [sys.executable, "-W", "error", "-c", CHILD, str(stores["as written"]), json.dumps(asked)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    return dict(zip(asked, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("question", "match"), WRONG_TYPES)
def test_arguments_of_a_wrong_type_are_refused_in_one_clear_line(unchecked: dict[str, Any], question: str, match: str) -> None:
    assert unchecked[question][0] == "QueryError"
    assert re.search(match, unchecked[question][1])
    assert "\n" not in unchecked[question][1]


def test_numbers_of_numpy_are_taken_as_numbers(unchecked: dict[str, Any]) -> None:
    for question in SAME:
        assert unchecked[question] == answer(FIRST, PROBED["x"][4:5], 2)
    for question in SAME_BATCH:
        assert unchecked[question] == answer(FIRST, PROBED["x"][[4, 6]], 2, column="test_id", names=[5, 9])


def test_a_bad_condition_is_refused_before_any_row_is_read(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [FIRST], tasks=TASKS)
    (path,) = tmp_path.glob("store/patterns/*/*.parquet")
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(QueryError, match="condition 'colour = 1'"):
        dualstore.open(tmp_path / "store").query(GOOD, layer=0, where="colour = 1")


@pytest.mark.parametrize("options", [{"budget_bytes": (1 << 20) - 1}, {"threads": 0}])
def test_a_store_is_not_opened_without_room_to_work(stores: dict[str, Path], options: dict[str, int]) -> None:
    with pytest.raises(QueryError, match="expected a budget of at least 1 MiB and 1 to 256 threads"):
        dualstore.open(stores["as written"], **options)


def test_a_recorded_probe_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    probes = probes_of(FIRST, 3)
    probes["x"] = probes["x"].copy()
    probes["x"][0, 1] = np.nan
    write_store(tmp_path / "store", [FIRST], tasks=TASKS, probes=[probes])
    store = dualstore.open(tmp_path / "store")
    with pytest.raises(QueryError, match="the recorded probe of layer 'layer0': expected finite numbers, found NaN or infinity"):
        store.query(test_id=[5, 7], layer=0)
    assert len(store.query(test_id=5, layer=0)) == 20


def test_a_folder_whose_name_begins_with_a_tilde_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not one in the user's home, as libraries that expand the tilde would have it."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualstore.record(model, optimizer, "~/store") as recorder:
        with recorder.batch([0, 1]):
            model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    assert (tmp_path / "~" / "store").is_dir()
    store = dualstore.open("~/store")
    assert len(store.query([1, 1], layer=0)) == 2
    assert store.sql("SELECT count(*) AS n FROM steps").to_dicts() == [{"n": 1}]
    assert store.verify().problems == []


def test_the_largest_test_id_can_be_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).eval()
    with dualstore.record(model, torch.optim.SGD(model.parameters()), tmp_path / "s") as recorder, recorder.probe([2**63 - 1]):
        model(torch.ones(1, 2))
    assert len(dualstore.open(tmp_path / "s").query(test_id=2**63 - 1, layer=0)) == 0


def test_groups_of_any_type_are_answered_or_refused_in_one_line(store: Store) -> None:
    query = np.ones(store.layers[0].d_in)
    found = store.query(query, layer=0, per="(label % 2)::VARCHAR::ENUM('-1', '0', '1')", top=1)
    assert set(found.table["group"].to_pylist()) == {"-1", "0", "1"}
    with pytest.raises(QueryError, match="cannot be grouped; cast them to text"):
        store.query(query, layer=0, per="DATE '290000-01-01'")


def test_the_two_zeros_are_one_group(store: Store) -> None:
    found = store.query(GOOD, layer=0, top=1, per="CASE WHEN step < 6 THEN -0.0::DOUBLE ELSE 0.0::DOUBLE END").to_dicts()
    assert [str(row["group"]) for row in found] == ["0.0"]

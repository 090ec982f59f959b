"""The scan gives the true top-k, in order, whatever the blocks, threads, files and numbers."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

from dualstore.best import Ranking
from dualstore.coefficients import Coefficients
from dualstore.index import LayerIndex
from dualstore.log import Log
from dualstore.part import PartWriter
from dualstore.rows import Labelling, Selector
from dualstore.scan import Options, Piece, computed, pieces
from dualstore.schema import Layer, pattern_columns
from dualstore.scores import Score
from dualstore.sketch import Sketch, build_sketches, coordinates, read_sketches
from dualstore.steps import STEPS_SCHEMA, Steps
from dualstore.topk import top_k
from tests import reference
from tests.reference import Rows

LABELLING = Labelling(Steps(STEPS_SCHEMA.empty_table()), ("mnist", "digits"))
EVERYTHING = Selector(LABELLING, None, None)
KINDS = ["ties", "few", "normal", "graded", "huge", "tiny", "cancelling", "mixed", "zeros"]


def make_rows(kind: str, count: int, width: int, seed: int, dtype: Any = np.float32) -> Rows:
    """Patterns in step order; many share step, sample_id or position, so that ties go down to the place in the log."""
    rng = np.random.default_rng([seed, count, width])
    return Rows(
        step=np.sort(rng.integers(0, 6, count)).astype(np.int32),
        sample_id=rng.integers(-3, 4, count),
        position=rng.integers(0, 2, count).astype(np.int32),
        label=rng.integers(-1, 3, count).astype(np.int32),
        task=rng.integers(-1, 2, count).astype(np.int32),
        x=make_vectors(kind, count, width, rng).astype(dtype),
        e=np.zeros((count, 1), dtype),
    )


def make_vectors(kind: str, count: int, width: int, rng: np.random.Generator) -> ndarray:
    """Vectors of one sort; "mixed" has rows of every size and some that are not finite."""
    x = rng.normal(size=(count, width))
    if kind == "ties":
        return rng.integers(-1, 2, (count, width)).astype(np.float64)
    if kind == "few":
        return rng.normal(size=(3, width))[rng.integers(0, 3, count)]
    if kind == "graded":
        return x * 10.0 ** rng.uniform(-6, 6, (count, width))
    if kind == "huge":
        return x * rng.choice([1e18, 1e30])
    if kind == "tiny":
        return x * rng.choice([1e-30, 1e-44])
    if kind == "cancelling":
        x[:, width - width // 2 :] = -x[:, : width // 2] * (1 + 1e-7 * rng.normal(size=(count, width // 2)))
        return x * 1e5
    if kind == "mixed":
        x = x * rng.choice([0, 1e-44, 1e-30, 1, 1e18, 1e30], (count, 1))
        return np.where(rng.random((count, width)) < 0.02, rng.choice([np.nan, np.inf, -np.inf], (count, width)), x)
    return x * (rng.random((count, 1)) < 0.5) if kind == "zeros" else x


def make_queries(kind: str, count: int, width: int, seed: int) -> ndarray:
    """Finite queries, one of them zero now and then."""
    rng = np.random.default_rng([seed, 7])
    found = np.ones((count, width)) if kind == "cancelling" else make_vectors(kind, count, width, rng)
    return np.nan_to_num(found, nan=0.0, posinf=1.0, neginf=-1.0).astype(np.float32)


def write_log(folder: Path, rows: Rows, cuts: Sequence[int] = (), group_rows: int = 64) -> Log:
    """The rows as parts that end at the given row numbers."""
    layer = Layer(0, "fc", "Linear", rows.x.shape[1], rows.e.shape[1], False, 0, -1)
    columns = pattern_columns(layer, str(rows.x.dtype))
    names = [column.name for column in columns if column.width is None]
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr("dualstore.part.MAX_GROUP_ROWS", group_rows)
        for number, (a, b) in enumerate(pairwise([0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)])):
            if a < b:
                part = PartWriter(folder / f"part-0-{number:06d}.parquet", columns)
                scalars = {name: getattr(rows, name, np.zeros(len(rows), np.int32))[a:b] for name in names}
                part.append(scalars, {"x": rows.x[a:b], "e": rows.e[a:b]})
                part.finish()
                part.publish()
    return Log(sorted(folder.glob("*.parquet")), columns)


def search_of(log: Log, folder: str, which: str, *, rows: int = 100) -> list[Sketch]:
    """Sketches of "all" segments of a log, of "some" or of "no" one; of so many rows."""
    if which == "no" or not log.rows:
        return []
    index = LayerIndex(Path(folder) / "index", log)
    with pytest.MonkeyPatch.context() as patch:
        width = log.columns[-2].row_width
        patch.setattr("dualstore.sketch._KEY_VALUES", 2)
        patch.setattr("dualstore.sketch.SEGMENT_BYTES", rows * 4 * (coordinates(width) + 3))
        build_sketches(index, width, 1 << 28)
        found = read_sketches(index, width)
    return found if which == "all" else found[::2]


@pytest.fixture(autouse=True)
def small_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches and scans of a few rows at a time; searches do not give up early."""
    for module in ("scan", "search"):
        monkeypatch.setattr(f"dualstore.{module}.RUN_ROWS", 100)
    for name, value in (("_HEAD_ROWS", 5), ("_BLOCK_ROWS", 30), ("_FIRST_ROWS", 2), ("_FEW_ROWS", 1000), ("_MANY_ROWS", 7)):
        monkeypatch.setattr(f"dualstore.search.{name}", value)


def expect(
    rows: Rows,
    queries: ndarray,
    k: int,
    largest: bool = True,
    kept: ndarray | None = None,
    codes: ndarray | None = None,
    floor: float | None = None,
    magnitude: bool = False,
    worth: Sequence[ndarray] | None = None,
) -> list[tuple]:
    """(query, group, rank, row, alpha) of the answer, from the reference; alpha times what a row is worth to the query."""
    found: list[tuple] = []
    for number, query in enumerate(queries):
        values = reference.halved(rows.x, query) + 0.0
        if worth is not None:
            with np.errstate(all="ignore"):
                values = values * worth[number] + 0.0
        for code in [0] if codes is None else range(codes.max(initial=-1) + 1):
            mine = np.ones(len(rows), bool) if codes is None else codes == code
            sizes = np.abs(values) if magnitude else values
            mine = mine & (True if kept is None else kept) & (True if floor is None else sizes >= floor)
            best = reference.ranked(rows, sizes, k, largest=largest, kept=mine)
            found += [(number, code, rank + 1, row, values[row]) for rank, row in enumerate(best)]
    return found


def as_tuples(found: Ranking) -> list[tuple]:
    columns = (found.query, found.code, found.rank, found.row, found.alpha)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@settings(deadline=None, max_examples=120)
@given(
    kind=st.sampled_from(KINDS),
    asked=st.sampled_from([*KINDS, None]),
    count=st.integers(0, 260),
    width=st.integers(1, 9),
    queries=st.integers(1, 4),
    k=st.one_of(st.integers(1, 12), st.integers(1, 300)),
    largest=st.booleans(),
    budget_bytes=st.sampled_from([2000, 20_000, 1 << 20, 1 << 28]),
    threads=st.integers(1, 3),
    group_rows=st.sampled_from([32, 64, 16_384]),
    cuts=st.lists(st.integers(0, 260), max_size=3),
    sketched=st.sampled_from(["no", "some", "all"]),
    seed=st.integers(0, 999),
)
def test_the_answer_is_the_true_one_for_every_knob(
    kind: str,
    asked: str | None,
    count: int,
    width: int,
    queries: int,
    k: int,
    largest: bool,
    budget_bytes: int,
    threads: int,
    group_rows: int,
    cuts: list[int],
    sketched: str,
    seed: int,
) -> None:
    rows, vectors = make_rows(kind, count, width, seed), make_queries(asked or kind, queries, width, seed)
    with tempfile.TemporaryDirectory() as folder:
        log = write_log(Path(folder), rows, cuts, group_rows)
        sketches = search_of(log, folder, sketched)
        options = Options(budget_bytes, threads)
        found = top_k(log, vectors, k, EVERYTHING, largest=largest, options=options, sketches=sketches)
    assert as_tuples(found) == expect(rows, vectors, k, largest)


CONDITIONS = [
    ("true", lambda rows: rows.step > -1),
    ("false", lambda rows: rows.step > 99),
    ("label = 1", lambda rows: rows.label == 1),
    ("step BETWEEN 1 AND 3", lambda rows: (rows.step >= 1) & (rows.step <= 3)),
    ("task = 'digits' AND sample_id > 0", lambda rows: (rows.task == 1) & (rows.sample_id > 0)),
    ("sample_id = 3 AND position = 1 AND label = 2", lambda rows: (rows.sample_id == 3) & (rows.position == 1) & (rows.label == 2)),
]
GROUPS = ["label", "sample_id", "step * 10 + position", "task"]


def group_codes(rows: Rows, per: str, kept: ndarray) -> tuple[ndarray, list[Any]]:
    """For each row the number of its group, in order of appearance among the kept rows, and the groups' values."""
    names = [None, "mnist", "digits"]
    values = {
        "label": rows.label.tolist(),
        "sample_id": rows.sample_id.tolist(),
        "step * 10 + position": (rows.step * 10 + rows.position).tolist(),
        "task": [names[task + 1] for task in rows.task],
    }[per]
    order = list(dict.fromkeys(value for value, mine in zip(values, kept, strict=True) if mine))
    return np.array([order.index(value) if value in order else -1 for value in values], np.int64), order


@settings(deadline=None, max_examples=50)
@given(
    kind=st.sampled_from(KINDS),
    condition=st.sampled_from(CONDITIONS),
    per=st.sampled_from([None, *GROUPS]),
    count=st.integers(0, 260),
    queries=st.integers(1, 3),
    k=st.integers(1, 9),
    order=st.sampled_from(["largest", "smallest", "magnitude"]),
    level=st.sampled_from([None, 0.0, 0.5, 0.9, 1.0]),
    budget_bytes=st.sampled_from([2000, 20_000, 1 << 20]),
    threads=st.integers(1, 3),
    group_rows=st.sampled_from([32, 64, 16_384]),
    cuts=st.lists(st.integers(0, 260), max_size=3),
    sketched=st.sampled_from(["no", "some", "all"]),
    seed=st.integers(0, 999),
)
def test_selected_and_grouped_answers_are_the_true_ones_for_every_knob(
    kind: str,
    condition: tuple[str, Any],
    per: str | None,
    count: int,
    queries: int,
    k: int,
    order: str,
    level: float | None,
    budget_bytes: int,
    threads: int,
    group_rows: int,
    cuts: list[int],
    sketched: str,
    seed: int,
) -> None:
    rows, vectors = make_rows(kind, count, 4, seed), make_queries(kind, queries, 4, seed)
    floor = None
    if level is not None and order != "smallest" and count:  # one of the alphas, which ties may share
        with np.errstate(all="ignore"):
            values = np.nan_to_num(np.sort(reference.halved(rows.x, vectors[0]) + 0.0))
        floor = float(values[int(level * (count - 1))])
    kept = condition[1](rows)
    codes, names = (None, [None]) if per is None else group_codes(rows, per, kept)
    select = Selector(LABELLING, condition[0], per)
    with tempfile.TemporaryDirectory() as folder:
        log = write_log(Path(folder), rows, cuts, group_rows)
        sketches = search_of(log, folder, sketched)
        how = {"largest": order != "smallest", "magnitude": order == "magnitude", "floor": floor}
        found = top_k(log, vectors, k, select, options=Options(budget_bytes, threads), sketches=sketches, **how)
    expected = expect(rows, vectors, k, order != "smallest", kept, codes, floor, order == "magnitude")
    number = [names.index(value) for value in select.values]  # groups are numbered as they are met
    assert sorted((query, number[code], *rest) for query, code, *rest in as_tuples(found)) == expected
    assert set(select.values) == set(names)


@settings(deadline=None, max_examples=80)
@given(
    kind=st.sampled_from(KINDS),
    errors=st.sampled_from(KINDS),
    name=st.sampled_from(["contribution", "influence"]),
    condition=st.sampled_from(CONDITIONS[:3]),
    per=st.sampled_from([None, None, *GROUPS]),
    count=st.integers(0, 260),
    width=st.integers(1, 4),
    queries=st.integers(1, 3),
    k=st.integers(1, 12),
    order=st.sampled_from(["largest", "smallest", "magnitude"]),
    budget_bytes=st.sampled_from([2000, 20_000, 1 << 20]),
    threads=st.integers(1, 3),
    group_rows=st.sampled_from([32, 64, 16_384]),
    cuts=st.lists(st.integers(0, 260), max_size=3),
    seed=st.integers(0, 999),
)
def test_scores_rank_as_their_true_values_for_every_knob(
    kind: str,
    errors: str,
    name: str,
    condition: tuple[str, Any],
    per: str | None,
    count: int,
    width: int,
    queries: int,
    k: int,
    order: str,
    budget_bytes: int,
    threads: int,
    group_rows: int,
    cuts: list[int],
    seed: int,
) -> None:
    rows, vectors = make_rows(kind, count, 4, seed), make_queries(kind, queries, 4, seed)
    rng = np.random.default_rng([seed, 3])
    rows.e = make_vectors(errors, count, width, rng).astype(np.float32)
    coefficients = Coefficients(np.arange(6, dtype=np.int32), rng.normal(size=6) * rng.choice([0, 1, 1e-30], 6), 1.0, 0.0)
    outputs, gradients = rng.integers(0, width, queries), make_queries(errors, queries, width, seed + 1)
    score = Score(name, coefficients, outputs, None) if name == "contribution" else Score(name, coefficients, None, gradients)
    with np.errstate(all="ignore"):
        chosen = [rows.e[:, j].astype(float) if name == "contribution" else reference.halved(rows.e, g) + 0.0
                  for j, g in zip(outputs, gradients, strict=True)]  # fmt: skip
        worth = [coefficients.c[rows.step] * found + 0.0 for found in chosen]
    kept = condition[1](rows)
    codes, names = (None, [None]) if per is None else group_codes(rows, per, kept)
    select = Selector(LABELLING, condition[0], per)
    with tempfile.TemporaryDirectory() as folder:
        log = write_log(Path(folder), rows, cuts, group_rows)
        how = {"largest": order != "smallest", "magnitude": order == "magnitude"}
        found = top_k(log, vectors, k, select, options=Options(budget_bytes, threads), score=score, **how)
    expected = expect(rows, vectors, k, order != "smallest", kept, codes, None, order == "magnitude", worth)
    number = [names.index(value) for value in select.values]
    assert sorted((query, number[code], *rest) for query, code, *rest in as_tuples(found)) == expected


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from([1e-310, 1e-200, 1e-20, 1.0, 1e120, 1e200]),
    asked=st.sampled_from([5e-324, 1e-305, 1e-100, 1.0, 1e150, 1e300]),
    count=st.integers(0, 150),
    width=st.integers(1, 6),
    k=st.integers(1, 12),
    largest=st.booleans(),
    budget_bytes=st.sampled_from([2000, 1 << 20]),
    group_rows=st.sampled_from([32, 16_384]),
    sketched=st.sampled_from(["no", "all"]),
    seed=st.integers(0, 999),
)
def test_double_precision_is_ranked_by_its_alphas_out_to_the_ends_of_the_range(
    kind: str,
    size: float,
    asked: float,
    count: int,
    width: int,
    k: int,
    largest: bool,
    budget_bytes: int,
    group_rows: int,
    sketched: str,
    seed: int,
) -> None:
    """Where products round to zero, to few digits or to infinity, that is what ranks."""
    rows = make_rows(kind, count, width, seed, np.float64)
    with np.errstate(all="ignore"):
        rows.x *= size
        queries = np.nan_to_num(make_queries("normal", 2, width, seed).astype(np.float64) * asked, posinf=1e308, neginf=-1e308)
    with tempfile.TemporaryDirectory() as folder:
        log = write_log(Path(folder), rows, (), group_rows)
        sketches = search_of(log, folder, sketched)
        found = top_k(log, queries, k, EVERYTHING, largest=largest, options=Options(budget_bytes), sketches=sketches)
    assert as_tuples(found) == expect(rows, queries, k, largest)


@pytest.mark.parametrize("near", ["keys", "errors"])
def test_scores_that_single_precision_cannot_tell_apart_are_ranked_as_they_are(tmp_path: Path, near: str) -> None:
    rng = np.random.default_rng(1)
    rows = make_rows("normal", 3000, 9, 0)
    rows.e = rng.normal(size=(3000, 7)).astype(np.float32)
    rows.x[:], rows.e[:] = rows.x[0], rows.e[0]
    moved = rows.x if near == "keys" else rows.e
    moved *= (1 + 2e-7 * rng.normal(size=moved.shape)).astype(np.float32)
    query, gradient = rows.x[:1] + 1, rows.e[:1] * 2
    score = Score("influence", Coefficients(np.arange(6, dtype=np.int32), np.ones(6), 1.0, 0.0), None, gradient)
    log = write_log(tmp_path, rows, [1000], 64)
    worth = [reference.halved(rows.e, gradient[0])]
    for largest in (True, False):
        found = top_k(log, query, 40, EVERYTHING, largest=largest, score=score, options=Options(100_000))
        assert as_tuples(found) == expect(rows, query, 40, largest, worth=worth)


def test_ties_are_ordered_by_step_sample_position_and_place(tmp_path: Path) -> None:
    rows = make_rows("ties", 120, 2, 0)
    rows.x[:] = 1
    log = write_log(tmp_path, rows, [50, 51, 90], 16)
    expected = np.lexsort((np.arange(120), rows.position, rows.sample_id, rows.step)).tolist()
    for largest in (True, False):
        for k in (1, 7, 120):
            found = top_k(log, np.ones((1, 2), np.float32), k, EVERYTHING, largest=largest, options=Options(800))
            assert found.row.tolist() == expected[:k]


def test_a_later_part_may_hold_earlier_steps(tmp_path: Path) -> None:
    """Parts of several writers are not in the order of steps; ties still are."""
    rows = make_rows("ties", 150, 1, 1)
    rows.x[:] = 1
    rows.step = rows.step[::-1].copy()
    log = write_log(tmp_path, rows, [40, 90])
    for budget_bytes in (1, 1 << 20):
        found = top_k(log, np.ones((1, 1), np.float32), 10, EVERYTHING, options=Options(budget_bytes))
        assert as_tuples(found) == expect(rows, np.ones((1, 1), np.float32), 10)


def test_nan_is_never_ranked_and_infinity_is(tmp_path: Path) -> None:
    rows = make_rows("normal", 8, 2, 0)
    rows.x = np.array(
        [[np.nan, 0], [1, 1], [np.inf, 0], [-np.inf, 0], [np.inf, -np.inf], [2, 2], [3e38, 3e38], [np.inf, 1]], np.float32
    )
    for group_rows in (1, 8):
        log = write_log(tmp_path / str(group_rows), rows, (), group_rows)
        for options in (Options(1), Options()):
            best = top_k(log, np.ones((1, 2), np.float32), 9, EVERYTHING, options=options)
            assert best.alpha.tolist() == [np.inf, np.inf, 2 * float(np.float32(3e38)), 4, 2, -np.inf]
            assert sorted(best.row[:2].tolist()) == [2, 7]
            worst = top_k(log, np.ones((1, 2), np.float32), 2, EVERYTHING, largest=False, options=options)
            assert worst.row.tolist() == [3, 1]


def near_ties(count: int, width: int, seed: int) -> tuple[Rows, ndarray]:
    """Large keys almost orthogonal to the query, so that float32 products are little but rounding."""
    rng = np.random.default_rng(seed)
    rows = make_rows("normal", count, width, seed)
    query = rng.normal(size=width).astype(np.float32)
    x = rng.normal(size=(count, width)) * 1000
    x -= np.outer(x @ query, query) / (query @ query)
    rows.x = x.astype(np.float32)
    return rows, query


@pytest.mark.parametrize(("width", "threads"), [(3, 1), (64, 2), (784, 3)])
def test_rows_that_single_precision_puts_in_the_wrong_order_come_in_the_right_one(tmp_path: Path, width: int, threads: int) -> None:
    rows, query = near_ties(300, width, width)
    values = reference.halved(rows.x, query)
    fast = np.argsort(-(rows.x @ query), kind="stable").tolist()
    assert fast[:10] != reference.ranked(rows, values, 10)
    log = write_log(tmp_path, rows, [100])
    others = make_vectors("normal", 3, width, np.random.default_rng(1)).astype(np.float32)
    for k in (1, 10):
        for largest in (True, False):
            for queries in (query[None], np.stack([others[0], query, *others[1:]])):
                found = top_k(log, queries, k, EVERYTHING, largest=largest, options=Options(1 << 20, threads))
                mine = found.row[found.query == (1 if len(queries) > 1 else 0)]
                assert mine.tolist() == reference.ranked(rows, values, k, largest=largest)


def test_differences_that_single_precision_cannot_hold_decide(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = make_rows("normal", 256, 3, 0)
    small = rng.permutation(256).astype(np.float32)
    rows.x = np.stack([np.full(256, 2.0**30, np.float32), small, np.full(256, -(2.0**30), np.float32)], axis=1)
    query = np.ones((1, 3), np.float32)
    for group_rows in (16, 256):
        log = write_log(tmp_path / str(group_rows), rows, (), group_rows)
        for budget_bytes in (400, 1 << 20):
            found = top_k(log, query, 256, EVERYTHING, options=Options(budget_bytes))
            assert found.alpha.tolist() == list(range(255, -1, -1))
            best = top_k(log, query, 5, EVERYTHING, options=Options(budget_bytes))
            assert best.alpha.tolist() == [255, 254, 253, 252, 251]


def test_one_row_whose_fast_product_is_far_too_small_is_found_among_exact_ones(tmp_path: Path) -> None:
    """191 + 2^30 rounds down by 63 in single precision, the other rows' sums not at all; each must be the best of some question."""
    rows = make_rows("normal", 200, 3, 0)
    rows.x = np.stack([np.full(200, 2.0**22), np.arange(200) - 10, np.full(200, -(2.0**22))], axis=1).astype(np.float32)
    rows.x[77] = [2.0**30, 191, -(2.0**30)]
    for group_rows in (32, 256):
        log = write_log(tmp_path / str(group_rows), rows, (), group_rows)
        for largest, query in ((True, np.ones((1, 3))), (False, -np.ones((1, 3))), (True, np.ones((4, 3)))):
            asked = query.astype(np.float32)
            for select, codes in ((EVERYTHING, None), (Selector(LABELLING, None, "1"), np.zeros(200, np.int64))):
                found = top_k(log, asked, 1, select, largest=largest, options=Options(20_000))
                assert as_tuples(found) == expect(rows, asked, 1, largest, None, codes)
                assert set(found.row.tolist()) == {77}


def test_near_ties_are_right_within_each_group(tmp_path: Path) -> None:
    rows, query = near_ties(300, 48, 5)
    log = write_log(tmp_path, rows, [37])
    codes, _ = group_codes(rows, "label", np.ones(300, bool))
    for k in (1, 5):
        found = top_k(log, np.stack([query, -query]), k, Selector(LABELLING, None, "label"))
        assert as_tuples(found) == expect(rows, np.stack([query, -query]), k, True, None, codes)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-19, 1.0, 1e15, 1e19, 1e30, 1e38])
def test_the_size_of_query_and_keys_does_not_matter(tmp_path: Path, scale: float) -> None:
    rows = make_rows("normal", 130, 6, 3)
    query = np.random.default_rng(4).normal(size=6)
    log = write_log(tmp_path / "as is", rows)
    scaled = (query * scale).astype(np.float32)
    assert np.isfinite(scaled).all()
    assert as_tuples(top_k(log, scaled[None], 20, EVERYTHING)) == expect(rows, scaled[None], 20)
    rows.x = (rows.x.astype(np.float64) * scale / 10).astype(np.float32)
    log = write_log(tmp_path / "scaled", rows)
    for asked in (query.astype(np.float32), scaled):
        assert as_tuples(top_k(log, asked[None], 20, EVERYTHING)) == expect(rows, asked[None], 20)


def test_queries_with_elements_of_every_size_are_answered_exactly(tmp_path: Path) -> None:
    rows = make_rows("graded", 200, 4, 5)
    log = write_log(tmp_path, rows, [60])
    queries = np.array([[1e38, 1, 1e-38, 1e-45], [0, 1e-45, 0, 0], [1e-45, 1e30, 0, 0], [0, 0, 0, 0]], np.float32)
    for largest in (True, False):
        assert as_tuples(top_k(log, queries, 15, EVERYTHING, largest=largest)) == expect(rows, queries, 15, largest)


def test_small_keys_after_huge_ones_are_passed_over_without_a_warning(tmp_path: Path) -> None:
    """The k-th best value so far is beyond float32 when the small keys come."""
    rows = make_rows("normal", 128, 3, 6)
    rows.x[:64] = np.abs(rows.x[:64]) * np.float32(1e38)
    rows.x[np.isinf(rows.x)] = 3e38
    log = write_log(tmp_path, rows, (), 64)
    query = np.full((2, 3), 1e30, np.float32)
    for select, codes in ((EVERYTHING, None), (Selector(LABELLING, None, "label % 2"), None)):
        if select is not EVERYTHING:
            values = np.fmod(rows.label, 2)
            codes = np.array([list(dict.fromkeys(values.tolist())).index(value) for value in values.tolist()])
        assert as_tuples(top_k(log, query, 4, select)) == expect(rows, query, 4, True, None, codes)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15, 1e100])
def test_double_precision_stores_are_answered_exactly(tmp_path: Path, scale: float) -> None:
    rows = make_rows("normal", 200, 5, 7, np.float64)
    rows.x *= scale
    queries = np.random.default_rng(8).normal(size=(3, 5))
    log = write_log(tmp_path, rows, [77])
    for largest in (True, False):
        assert as_tuples(top_k(log, queries, 9, EVERYTHING, largest=largest)) == expect(rows, queries, 9, largest)


@pytest.mark.parametrize(
    ("key", "query"), [(1e150, 1e200), (1e-200, 1e-200), (1e-20, 1e-305), (1e-310, 1.0), (1.0, 5e-324), (1.0, 1e-309), (1.0, 1e308)]
)
def test_double_precision_products_that_leave_the_range_tie_as_their_alpha_does(tmp_path: Path, key: float, query: float) -> None:
    rows = make_rows("normal", 4, 1, 8, np.float64)
    rows.step[:] = 0
    rows.sample_id = np.array([1, 2, 3, 0])
    rows.x = np.array([[1.0], [3.0], [2.0], [1.0]]) * key
    asked = np.array([[query]])
    for group_rows in (1, 4):
        log = write_log(tmp_path / str(group_rows), rows, (), group_rows)
        for largest in (True, False):
            assert as_tuples(top_k(log, asked, 2, EVERYTHING, largest=largest)) == expect(rows, asked, 2, largest)


def test_pieces_hold_every_selected_row_once_and_in_order(tmp_path: Path) -> None:
    rows = make_rows("normal", 200, 3, 9)
    log = write_log(tmp_path, rows, [10, 150], 32)
    for where, kept in CONDITIONS:
        for block_rows in (7, 64):
            found = list(pieces(log, Selector(LABELLING, where, None), block_rows))
            numbers = np.concatenate([np.zeros(0, np.int64), *(piece.local + piece.group.first for piece in found)])
            assert numbers.tolist() == np.flatnonzero(kept(rows)).tolist()
            keys = np.concatenate([np.zeros((0, 3), np.float32), *(piece.selected_keys(slice(None)) for piece in found)])
            assert keys.tolist() == rows.x[kept(rows)].tolist()
            assert all(len(piece.keys) <= block_rows for piece in found)
            for piece in found:
                assert piece.chosen(piece.keys).tolist() == piece.selected_keys(slice(None)).tolist()


def test_an_empty_log_has_no_best_rows(tmp_path: Path) -> None:
    log = write_log(tmp_path, make_rows("normal", 0, 3, 0))
    for select in (EVERYTHING, Selector(LABELLING, "label = 1", "task")):
        assert as_tuples(top_k(log, np.ones((2, 3), np.float32), 5, select)) == []


MEMORY = """
import json, sys, threading, time
import numpy as np
import dualstore
import dualstore.database

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

small, large, budget, question = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
count = question.pop("queries")
rng = np.random.default_rng(0)
queries = rng.normal(size=(count, 256)).astype(np.float32)
dualstore.open(small, budget_bytes=budget).query(queries, layer=0, **question)  # what is paid once
store = dualstore.open(large, budget_bytes=budget)
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
found = store.query(queries, layer=0, **question)
done = True
thread.join()
print(json.dumps({"growth": peak - before, "rows": len(found)}))
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store of 64 MB of keys, one of 128 MB with compressed parts, and one of a hundredth of it."""
    root = tmp_path_factory.mktemp("memory")
    rng = np.random.default_rng(0)
    for name, count in (("large", 62_500), ("small", 625), ("packed", 62_500)):
        rows = make_rows("zeros", 0, 256, 0)
        zeros = np.zeros(count, np.int32)
        step = np.sort(rng.integers(0, 5, count)).astype(np.int32)
        x = (rng.integers(-3, 4, (count, 256)) if name == "packed" else rng.normal(size=(count, 256))).astype(np.float32)
        rows = Rows(
            step,
            rng.integers(0, 1000, count),
            zeros,
            rng.integers(0, 9, count).astype(np.int32),
            zeros,
            x,
            np.zeros((count, 1), np.float32),
        )
        reference.write_store(root / name, [rows], tasks=["mnist"], flush_every=2)
    for path in (root / "packed" / "patterns" / "layer=0").glob("*.parquet"):
        with pq.ParquetFile(path) as file:
            table = file.read()
        pq.write_table(pa.concat_tables([table, table]), path, compression="zstd", row_group_size=4096)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    ("name", "question", "allowed"),
    [
        ("large", {"queries": 1, "top": 20}, 8 << 20),
        ("large", {"queries": 16, "top": 20}, 8 << 20),
        ("large", {"queries": 2, "top": 5, "where": "label = 3"}, 24 << 20),
        ("large", {"queries": 1, "top": 1, "per": "sample_id"}, 24 << 20),
        ("packed", {"queries": 1, "top": 20}, 64 << 20),
    ],
)
def test_memory_stays_bounded_however_large_the_store(
    stores: dict[str, Path], name: str, question: dict[str, Any], allowed: int
) -> None:
    """A budget of 4 MiB. Keys that are mapped add at most as much again; DuckDB and the decoder take their own."""
    arguments = [str(stores["small"]), str(stores[name]), str(4 << 20), json.dumps(question)]
    run = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["rows"] >= question["top"]
    assert found["growth"] < allowed


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_work_on_pieces_is_handed_out_in_order_and_little_of_it_ahead(tmp_path: Path, threads: int) -> None:
    log = write_log(tmp_path, make_rows("normal", 600, 3, 0), group_rows=32)
    taken = 0

    def source() -> Iterator[Piece]:
        nonlocal taken
        for piece in pieces(log, EVERYTHING, 64):
            taken += 1
            yield piece

    def work(piece: Piece) -> int:
        time.sleep(0.002 * (piece.group.index % 3))  # later pieces are often done first
        return piece.group.index

    ahead, order = [], []
    for done, (piece, index) in enumerate(computed(source(), work, threads)):
        assert index == piece.group.index
        order.append(index)
        ahead.append(taken - done)
    assert order == list(range(len(log.groups)))
    assert len(order) > 10
    assert max(ahead) <= threads + 2


def test_an_error_in_the_work_on_a_piece_is_raised_where_it_is_asked_for(tmp_path: Path) -> None:
    log = write_log(tmp_path, make_rows("normal", 600, 3, 0), group_rows=32)
    with pytest.raises(ZeroDivisionError):
        list(computed(pieces(log, EVERYTHING, 64), lambda piece: 1 // (5 - piece.group.index), 2))


@pytest.mark.parametrize("sketched", ["no", "all"])
@pytest.mark.parametrize("per", [None, "label"])
def test_a_floor_that_no_row_can_reach_leaves_nothing(tmp_path: Path, per: str | None, sketched: str) -> None:
    """Also where it is beyond float64 once the query is scaled."""
    log = write_log(tmp_path, make_rows("plain", 200, 4, 0))
    query = np.full((1, 4), 0.01, np.float32)
    sketches = search_of(log, str(tmp_path), sketched)
    found = top_k(log, query, 3, Selector(LABELLING, None, per), floor=np.finfo(np.float64).max, sketches=sketches)
    assert not len(found.row)

"""Totals equal plain sums of alpha, and votes the paper's table, for every grouping, condition and budget."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

import dualstore
from dualstore.errors import QueryError
from dualstore.scan import Options
from dualstore.store import Store
from tests import reference
from tests.reference import Rows, write_store

TASKS = ("mnist", "digits")


def make_rows(count: int, width: int, seed: int, *, whole: bool) -> Rows:
    """Patterns of 6 steps; whole numbers add up without rounding."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (count, width)) if whole else rng.normal(size=(count, width)) * 10.0 ** rng.integers(-3, 4, (count, 1))
    step = np.sort(np.append(np.arange(6), rng.integers(0, 6, count - 6))).astype(np.int32)
    return Rows(
        step=step,
        sample_id=rng.integers(0, 30, count),
        position=rng.integers(0, 3, count).astype(np.int32),
        label=rng.integers(-1, 5, count).astype(np.int32),
        task=rng.integers(-1, 2, count).astype(np.int32),
        x=x.astype(np.float32),
        e=np.zeros((count, 1), np.float32),
        epoch=step // 2,
    )


LAYERS = [make_rows(400, 6, 0, whole=True), make_rows(300, 4, 1, whole=False)]


def make_probes(rows: Rows, count: int, seed: int) -> dict[str, ndarray]:
    """Probes of which some have no label or no prediction, and some were recorded twice."""
    rng = np.random.default_rng(seed)
    twice = np.append(np.arange(count), [1, 3])
    return {
        "test_id": twice,
        "position": np.zeros(count + 2, np.int32),
        "step": np.append(np.full(count, 3), [5, 2]).astype(np.int32),
        "label": rng.integers(-1, 5, count + 2).astype(np.int32),
        "task": np.zeros(count + 2, np.int32),
        "predicted": rng.integers(-1, 5, count + 2).astype(np.int32),
        "x": rng.integers(-3, 4, (count + 2, rows.x.shape[1])).astype(np.float32),
        "y": np.zeros((count + 2, 1), np.float32),
    }


PROBES = [make_probes(rows, 25, 2 + seed) for seed, rows in enumerate(LAYERS)]


@pytest.fixture(scope="module", params=["scan", "index"])
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("totals") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualstore.part.MAX_GROUP_ROWS", 128)
        write_store(path, LAYERS, tasks=TASKS, epoch_of_step=lambda step: step // 2, probes=PROBES, flush_every=4)
        if request.param == "index":
            patch.setattr("dualstore.sums.ROWS_PER_CELL", 1)
            dualstore.open(path).build_index()
    return path


@pytest.fixture(scope="module")
def store(path: Path) -> Store:
    return dualstore.open(path)


def task_names(rows: Rows) -> list[str | None]:
    return [None if task < 0 else TASKS[task] for task in rows.task]


def parity(rows: Rows) -> list[str]:
    return ["odd" if label % 2 else "even" for label in rows.label]


# What is asked, the names of the group columns and each row's groups.
GROUPINGS: list[tuple[str | list[str], list[str], Callable[[Rows], list[Sequence[Any]]]]] = [
    ("label", ["label"], lambda rows: [rows.label.tolist()]),
    ("task", ["task"], lambda rows: [task_names(rows)]),
    ("sample_id", ["sample_id"], lambda rows: [rows.sample_id.tolist()]),
    ("epoch", ["epoch"], lambda rows: [rows.epoch.tolist()]),
    ("task, label", ["task", "label"], lambda rows: [task_names(rows), rows.label.tolist()]),
    (
        ["task", "epoch", "label"],
        ["task", "epoch", "label"],
        lambda rows: [task_names(rows), rows.epoch.tolist(), rows.label.tolist()],
    ),
    ("step * 2 AS twice", ["twice"], lambda rows: [(rows.step * 2).tolist()]),
    (
        ['CASE WHEN label % 2 = 0 THEN \'even\' ELSE \'odd\' END AS "a ""name"""', "position"],
        ['a "name"', "position"],
        lambda rows: [parity(rows), rows.position.tolist()],
    ),
    ("nullif(label, 3) AS label", ["label"], lambda rows: [[None if label == 3 else label for label in rows.label.tolist()]]),
    ("", [], lambda rows: []),
    ([], [], lambda rows: []),
]
CONDITIONS: list[tuple[str | None, Callable[[Rows], ndarray]]] = [
    (None, lambda rows: rows.step >= 0),
    ("label >= 0 AND task = 'digits'", lambda rows: (rows.label >= 0) & (rows.task == 1)),
    ("sample_id = 7", lambda rows: rows.sample_id == 7),
    ("epoch = 2", lambda rows: rows.epoch == 2),
]


def expect(
    rows: Rows, query: ndarray, groups: list[Sequence[Any]], kept: ndarray, absolute: bool
) -> dict[tuple, tuple[float, float, int]]:
    """Groups to (total, sum of |alpha|, count)."""
    alphas = reference.halved(rows.x, query)
    found: dict[tuple, list[float]] = {} if groups else {(): []}
    for row in np.flatnonzero(kept):
        found.setdefault(tuple(values[row] for values in groups), []).append(float(abs(alphas[row]) if absolute else alphas[row]))
    return {key: (math.fsum(terms), math.fsum(map(abs, terms)), len(terms)) for key, terms in found.items()}


def check(rows: list[dict[str, Any]], names: list[str], expected: dict[tuple, tuple[float, float, int]]) -> None:
    """The groups, their totals and counts, and the order: total downwards, then groups, NULL last."""
    assert len(rows) == len(expected)
    for row in rows:
        total, size, count = expected[tuple(row[name] for name in names)]
        assert abs(row["total"] - total) <= 1e-12 * size
        assert row["count"] == count
    keys = [(-row["total"], *((row[name] is None, row[name] or 0) for name in names)) for row in rows]
    assert keys == sorted(keys)


@settings(deadline=None, max_examples=35)
@given(
    layer=st.sampled_from([0, 1]),
    grouping=st.sampled_from(GROUPINGS),
    condition=st.sampled_from(CONDITIONS),
    rule=st.sampled_from([{}, {"absolute": True}, {"paper": True}]),
    budget_bytes=st.sampled_from([2000, 1 << 20, 1 << 28]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_totals_are_the_sums_of_alpha(
    path: Path,
    layer: int,
    grouping: tuple[str | list[str], list[str], Callable[[Rows], list[Sequence[Any]]]],
    condition: tuple[str | None, Callable[[Rows], ndarray]],
    rule: dict[str, bool],
    budget_bytes: int,
    threads: int,
    seed: int,
) -> None:
    rows, (by, names, groups) = LAYERS[layer], grouping
    query = np.random.default_rng(seed).integers(-2, 3, rows.x.shape[1]).astype(np.float32)
    store = Store(path, Options(budget_bytes, threads))
    found = store.totals(query, layer=layer, by=by, where=condition[0], **rule)
    absolute = "absolute" in rule or ("paper" in rule and layer == 0)
    assert found.columns == [*names, "total", "count"]
    check(found.to_dicts(), names, expect(rows, query, groups(rows), condition[1](rows), absolute))


@pytest.mark.parametrize("grouping", GROUPINGS, ids=[str(by) for by, *_ in GROUPINGS])
def test_every_grouping_is_summed(
    store: Store, grouping: tuple[str | list[str], list[str], Callable[[Rows], list[Sequence[Any]]]]
) -> None:
    by, names, groups = grouping
    query = np.array([1, -1, 2, 0, 1, 1], np.float32)
    found = store.totals(query, layer=0, by=by)
    assert found.columns == [*names, "total", "count"]
    check(found.to_dicts(), names, expect(LAYERS[0], query, groups(LAYERS[0]), np.ones(400, bool), False))


def test_the_papers_rule_takes_magnitudes_at_the_first_layer_only(store: Store) -> None:
    for layer, same in ((0, {"absolute": True}), (1, {})):
        query = np.ones(LAYERS[layer].x.shape[1])
        found = store.totals(query, layer=layer, paper=True)
        assert found.to_dicts() == store.totals(query, layer=layer, **same).to_dicts()
        assert found.to_dicts() != store.totals(query, layer=layer, absolute=layer == 1).to_dicts()


def test_totals_that_tie_are_ordered_by_their_groups(store: Store) -> None:
    found = store.totals(np.zeros(6), layer=0, by="task, label").to_dicts()
    keys = [(row["task"], row["label"]) for row in found]
    labels = range(-1, 5)
    assert keys == [(task, label) for task in ("digits", "mnist", None) for label in labels]
    assert {row["total"] for row in found} == {0.0}


def test_expressions_without_a_name_are_summed_too(store: Store) -> None:
    query = np.array([1, 0, 2, 0, 1, 1], np.float32)
    found = store.totals(query, layer=0, by="label % 2 = 0").to_dicts()
    name = next(iter(found[0]))
    check(found, [name], expect(LAYERS[0], query, [[label % 2 == 0 for label in LAYERS[0].label]], np.ones(400, bool), False))


def test_several_queries_are_told_apart_by_a_column(store: Store) -> None:
    rows, probes = LAYERS[0], PROBES[0]
    for by, names, groups in GROUPINGS[1:2] + GROUPINGS[4:5] + GROUPINGS[-2:]:
        found = store.totals(test_id=[7, 1, 2], layer=0, by=by).to_dicts()
        assert [row["test_id"] for row in found] == sorted(row["test_id"] for row in found)
        for test_id, place in ((7, 7), (1, 25), (2, 2)):
            mine = [row for row in found if row["test_id"] == test_id]
            check(mine, names, expect(rows, probes["x"][place], groups(rows), np.ones(400, bool), False))
    vectors = np.array([[1, 2, 3, 0, 0, 1], [0, 0, 0, 0, 0, 0]], np.float32)
    found = store.totals(vectors, layer=0, by="label", absolute=True).to_dicts()
    for number, query in enumerate(vectors):
        mine = [row for row in found if row["query"] == number]
        check(mine, ["label"], expect(rows, query, [rows.label.tolist()], np.ones(400, bool), True))


def test_a_probe_may_be_asked_for_by_its_id_and_position(store: Store) -> None:
    single = store.totals(test_id=3, position=0, layer=1, by="epoch")
    check(single.to_dicts(), ["epoch"], expect(LAYERS[1], PROBES[1]["x"][3], [LAYERS[1].epoch.tolist()], np.ones(300, bool), False))


def test_nothing_selected_adds_up_to_no_groups_and_to_zero_as_a_whole(store: Store) -> None:
    assert store.totals(np.ones(6), layer=0, by="label", where="step > 99").to_dicts() == []
    assert store.totals(np.ones(6), layer=0, by="", where="step > 99").to_dicts() == [{"total": 0.0, "count": 0}]


def test_totals_of_more_rows_than_are_held_at_once_are_right(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualstore.totals.RUN_ROWS", 10)
    rows, query = LAYERS[0], np.array([1, -1, 2, 0, 1, 1], np.float32)
    for by, names, groups in (GROUPINGS[0], GROUPINGS[4], GROUPINGS[9]):
        found = Store(store.path, Options(1)).totals(query, layer=0, by=by).to_dicts()
        check(found, names, expect(rows, query, groups(rows), np.ones(400, bool), False))


def test_a_total_of_terms_that_cancel_keeps_their_small_rest(tmp_path: Path) -> None:
    rows = make_rows(300, 1, 9, whole=True)
    rows.label[:] = 0
    rows.x[:] = np.where(np.arange(300) % 2, np.float32(1e18), np.float32(-1e18))[:, None]
    rows.x[::100] = 1
    rows.x[1::100] = 2
    write_store(tmp_path / "store", [rows], tasks=TASKS)
    total = dualstore.open(tmp_path / "store").totals([1.0], layer=0).to_dicts()[0]["total"]
    assert abs(total - 9) <= 1e-12 * 3e20


@pytest.mark.parametrize(
    ("question", "match"),
    [
        ({"by": "colour"}, "expression 'colour': .*colour.*; columns: step, epoch, .*, duplicate, alpha$"),
        ({"by": "label,"}, "expression 'label,'"),
        ({"by": ["label", "= 2"]}, "expression 'label, = 2'"),
        ({"by": "(SELECT count(*) FROM samples)"}, "samples does not exist"),
        ({"by": "count(*)"}, "expression 'count"),
        ({"by": "label, max(step)"}, "expression 'label, max.step.'"),
        ({"by": "row_number() OVER ()"}, "expression 'row_number"),
        ({"where": "sum(alpha) > 1"}, "condition 'sum.alpha. > 1'"),
        ({"where": "alpha > 1"}, "condition 'alpha > 1': .*; columns: step, epoch, .*, duplicate$"),
        ({"layer": 5}, "no layer 5"),
        ({"x": None}, "found neither"),
        ({"x": [1.0]}, "expected 6 values"),
        ({"x": [math.nan] * 6}, "expected finite numbers"),
    ],
)
def test_a_question_that_does_not_fit_is_refused_in_one_clear_line(store: Store, question: dict[str, Any], match: str) -> None:
    with pytest.raises(QueryError, match=match) as caught:
        store.totals(**{"x": [1.0] * 6, "layer": 0} | question)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["total", "count"])
def test_a_group_named_like_a_measure_leaves_the_measure_right(store: Store, name: str) -> None:
    """Or the name is refused; a wrong sum is what must not come back."""
    expected = [(row["total"], row["count"]) for row in store.totals(np.ones(6), layer=0, by="label").to_dicts()]
    found = expected
    with suppress(QueryError):
        columns = store.totals(np.ones(6), layer=0, by=f"label AS {name}").to_arrow().columns[-2:]
        found = list(zip(*(column.to_pylist() for column in columns), strict=True))
    assert found == expected


def vote(rows: Rows, query: ndarray, kept: ndarray, absolute: bool) -> int:
    """The label with the largest total; the smaller of those that tie; -1 where there is none."""
    alphas = reference.alphas(rows.x, query)
    totals = {
        label: math.fsum(np.abs(alphas[mine]) if absolute else alphas[mine])
        for label in range(rows.label.max() + 1)
        if (mine := kept & (rows.label == label)).any()
    }
    return max(totals, key=lambda label: (totals[label], -label), default=-1)


def table_of(
    layers: Sequence[int], layer_rows: Sequence[Rows], probes: Sequence[dict[str, ndarray]], where: Any
) -> list[dict[str, Any]]:
    """The paper's table: the latest row of each probe counts, those without label or prediction do not."""
    found = []
    for layer in layers:
        rows, probe, last = layer_rows[layer], probes[layer], {}
        for place in np.argsort(probe["step"], kind="stable"):
            last[probe["test_id"][place]] = place
        counted = [place for place in last.values() if probe["label"][place] >= 0 and probe["predicted"][place] >= 0]
        votes = {place: vote(rows, probe["x"][place], where(rows), layer == 0) for place in counted}
        for name in ("right", "wrong"):
            mine = [place for place in counted if (probe["label"][place] == probe["predicted"][place]) == (name == "right")]
            shares = [float(np.mean([votes[p] == probe[k][p] for p in mine])) if mine else None for k in ("label", "predicted")]
            row = {"layer": layer, "prediction": name, "probes": len(mine)}
            found.append(row | {"target_accuracy": shares[0], "output_accuracy": shares[1]})
    return found


@pytest.mark.parametrize("budget_bytes", [2000, 1 << 28])
@pytest.mark.parametrize(
    "condition", [*CONDITIONS, ("step < 0", lambda rows: rows.step < 0)], ids=lambda condition: str(condition[0])
)
def test_votes_are_the_papers_table(path: Path, condition: tuple[str | None, Callable[[Rows], ndarray]], budget_bytes: int) -> None:
    store = Store(path, Options(budget_bytes, 1 + budget_bytes % 3))
    found = store.votes(where=condition[0])
    assert found.columns == ["layer", "prediction", "probes", "target_accuracy", "output_accuracy"]
    assert found.to_dicts() == table_of([0, 1], LAYERS, PROBES, condition[1])


def test_votes_of_one_layer_are_those_rows_of_the_table(store: Store) -> None:
    whole = store.votes().to_dicts()
    assert store.votes(0).to_dicts() == whole[:2]
    assert store.votes("layer1").to_dicts() == whole[2:]


@pytest.mark.parametrize("changed", [0, 7, 300], ids=["all again", "some changed", "all changed"])
@pytest.mark.parametrize("limit", [64, 1 << 28])
def test_keys_that_come_again_are_counted_for_every_row(tmp_path: Path, changed: int, limit: int) -> None:
    """As at a first layer, whose inputs are the same in every epoch; or nearly, or not at all; labels may change, too."""
    rng = np.random.default_rng(changed)
    rows = make_rows(300, 5, 5, whole=True)
    rows.sample_id = np.tile(np.arange(60), 5)
    rows.position = (rows.sample_id % 2).astype(np.int32)
    rows.label = (rows.sample_id % 3).astype(np.int32)
    rows.x = np.tile(rows.x[:60], (5, 1))
    some = rng.permutation(300)[:changed]
    rows.x[some] += rng.integers(1, 3, (changed, 5))
    rows.label[rng.permutation(300)[: changed // 2]] = 4
    probes = make_probes(rows, 25, 6)
    write_store(tmp_path / "store", [rows], tasks=TASKS, probes=[probes])
    store = Store(tmp_path / "store", Options(limit * 4 * 64))
    for where, kept in ((None, rows.step >= 0), ("step > 2", rows.step > 2)):
        assert store.votes(where=where).to_dicts() == table_of([0], [rows], [probes], lambda rows, kept=kept: kept)


def test_votes_that_single_precision_cannot_tell_apart_are_told_by_double(tmp_path: Path) -> None:
    rows = make_rows(60, 2, 5, whole=True)
    rows.label = np.tile(np.array([0, 1, 2], np.int32), 20)
    rows.x[:] = 1e4
    rows.x[2] += np.float32(2**-10)  # the total of label 2 is larger by less than the rounding of one product
    probes = {name: values[:4] for name, values in make_probes(rows, 10, 6).items()}
    probes |= {"label": np.full(4, 2, np.int32), "predicted": np.full(4, 2, np.int32), "x": np.ones((4, 2), np.float32)}
    write_store(tmp_path / "store", [rows], tasks=TASKS, probes=[probes])
    assert dualstore.open(tmp_path / "store").votes().to_dicts()[0]["target_accuracy"] == 1.0


def test_votes_of_products_too_small_for_single_precision_are_right(tmp_path: Path) -> None:
    rows = make_rows(60, 2, 5, whole=True)
    rows.label = np.tile(np.array([0, 1, 2], np.int32), 20)
    rows.x = np.where(rows.label[:, None] == 1, np.float32([1.5e-20, 0]), np.float32([1e-20, 1e-20]))
    probes = {name: values[:4] for name, values in make_probes(rows, 10, 6).items()}
    probes |= {"label": np.full(4, 0, np.int32), "predicted": np.full(4, 0, np.int32)}
    probes["x"] = np.full((4, 2), 1.1e-18, np.float32)  # 1.65e-38 is a normal number, twice 1.1e-38 two denormal ones
    write_store(tmp_path / "store", [rows], tasks=TASKS, probes=[probes])
    assert dualstore.open(tmp_path / "store").votes().to_dicts()[0]["target_accuracy"] == 1.0


def test_votes_that_tie_go_to_the_smaller_label(tmp_path: Path) -> None:
    rows = make_rows(60, 2, 5, whole=True)
    rows.x[:] = 1
    rows.label = np.array([4, 3, 2, -1, -1, -1] * 10, np.int32)
    probes = {name: values[:3] for name, values in make_probes(rows, 10, 6).items()}
    probes |= {"label": np.array([2, 3, 4], np.int32), "predicted": np.array([2, 2, 2], np.int32), "x": np.ones((3, 2), np.float32)}
    write_store(tmp_path / "store", [rows, rows], tasks=TASKS, probes=[probes, probes])
    found = dualstore.open(tmp_path / "store").votes().to_dicts()
    assert [(row["probes"], row["target_accuracy"], row["output_accuracy"]) for row in found] == [(1, 1.0, 1.0), (2, 0.0, 1.0)] * 2


def test_votes_without_labels_or_probes_are_not_an_error(tmp_path: Path) -> None:
    rows = make_rows(30, 2, 5, whole=True)
    rows.label[:] = -1
    probes = make_probes(rows, 10, 6)
    write_store(tmp_path / "unlabelled", [rows, rows], tasks=TASKS, probes=[probes, probes])
    found = dualstore.open(tmp_path / "unlabelled").votes().to_dicts()
    assert found == table_of([0, 1], [rows, rows], [probes, probes], lambda rows: rows.step >= 0)
    write_store(tmp_path / "unprobed", [rows], tasks=TASKS)
    empty = dualstore.open(tmp_path / "unprobed").votes().to_dicts()
    assert [(row["probes"], row["target_accuracy"]) for row in empty] == [(0, None), (0, None)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("label", [-1, 3])
def test_a_key_that_is_not_finite_spoils_the_total_of_its_own_label_only(tmp_path: Path, label: int, bad: float) -> None:
    """Where its label does not count it changes nothing; else the vote is at least the same for every budget."""
    rows = make_rows(300, 2, 5, whole=True)
    rows.x[150, 0] = bad
    rows.label[150] = label
    clean = Rows(**{name: values[np.arange(len(values)) != 150] for name, values in vars(rows).items()})
    probes = make_probes(rows, 10, 6)
    probes["x"] = np.abs(probes["x"]) + 1
    with np.errstate(all="ignore"):
        write_store(tmp_path / "store", [rows, rows], tasks=TASKS, probes=[probes, probes])
    tables = [Store(tmp_path / "store", Options(budget)).votes().to_dicts() for budget in (1000, 1 << 28)]
    assert tables[0] == tables[1]
    if label < 0:
        assert tables[0] == table_of([0, 1], [clean, clean], [probes, probes], lambda rows: rows.step >= 0)


def test_unknown_layers_and_conditions_of_votes_are_refused(store: Store) -> None:
    with pytest.raises(QueryError, match="no layer 7"):
        store.votes(7)
    with pytest.raises(QueryError, match="condition 'colour = 1'"):
        store.votes(where="colour = 1")


@pytest.mark.parametrize("by", ['label AS "Total"', 'label AS "COUNT"', 'label, task AS "Label"', "label, label"])
def test_group_names_that_sql_does_not_tell_apart_are_refused(store: Store, by: str) -> None:
    with pytest.raises(QueryError, match=r"expression .*: (a group cannot be called|expected groups of different names)"):
        store.totals(np.ones(6), layer=0, by=by)


def test_a_group_named_like_the_column_of_queries_is_refused(store: Store) -> None:
    with pytest.raises(QueryError, match="expected groups of different names, found query, query"):
        store.totals(np.ones((2, 6)), layer=0, by='label AS "Query"')


@pytest.mark.parametrize("expression", ["random() > 2", "uuid() IS NULL", "label + epoch(now()) < 0"])
def test_expressions_that_change_from_one_run_of_rows_to_the_next_are_refused(store: Store, expression: str) -> None:
    for question in ({"by": expression}, {"where": expression}):
        with pytest.raises(QueryError, match=r"expected the same value whenever it is computed, found \w+\(\)"):
            store.totals(np.ones(6), layer=0, **question)
    with pytest.raises(QueryError, match="expected the same value whenever"):
        store.query(np.ones(6), layer=0, per=expression)


def test_constants_and_comments_are_groups_like_others(store: Store) -> None:
    assert [row["count"] for row in store.totals(np.ones(6), layer=0, by="'all' AS what")] == [400]
    commented = store.totals(np.ones(6), layer=0, by="label -- the digit").to_dicts()
    assert commented == store.totals(np.ones(6), layer=0, by="label").to_dicts()

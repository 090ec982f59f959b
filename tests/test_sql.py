"""Free SQL: what the relations hold, attention that equals a query bit for bit, and errors that say what was wrong."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from numpy import ndarray

import dualstore
from dualstore.errors import DamagedError, QueryError
from dualstore.scan import Options
from dualstore.schema import Layer, StoreInfo
from dualstore.store import Store
from dualstore.writer import SAMPLES_SCHEMA, StoreWriter, write_table
from tests import reference
from tests.reference import Rows, write_store

TASKS = ("mnist", "digits")


def make_rows(count: int, width: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    step = np.sort(np.append(np.arange(6), rng.integers(0, 6, count - 6))).astype(np.int32)
    return Rows(
        step=step,
        sample_id=rng.integers(0, 20, count),
        position=rng.integers(0, 3, count).astype(np.int32),
        label=rng.integers(-1, 4, count).astype(np.int32),
        task=rng.integers(-1, 2, count).astype(np.int32),
        x=rng.normal(size=(count, width)).astype(np.float32),
        e=rng.normal(size=(count, 2)).astype(np.float32),
        epoch=step // 3,
    )


LAYERS = [make_rows(200, 5, 0), make_rows(90, 3, 1)]
PROBES: list[dict[str, ndarray]] = [
    {
        "test_id": np.array([4, 2, 4]),
        "position": np.array([0, 0, 0], np.int32),
        "step": np.array([1, 1, 5], np.int32),
        "label": np.array([0, -1, 1], np.int32),
        "task": np.array([0, -1, 1], np.int32),
        "predicted": np.array([2, 3, -1], np.int32),
        "x": np.random.default_rng(7).normal(size=(3, rows.x.shape[1])).astype(np.float32),
        "y": np.random.default_rng(8).normal(size=(3, 2)).astype(np.float32),
    }
    for rows in LAYERS
]
SAMPLES = pa.table(
    {
        "sample_id": list(range(0, 20, 2)),
        "task": [0, 1, -1, 0, 1, 0, 1, 0, 1, 0],
        "label": list(range(10)),
        "payload": [bytes([n]) * n for n in range(10)],
        "mime": ["image/png", "text/plain"] * 5,
    },
    SAMPLES_SCHEMA,
)


def write(path: Path) -> Path:
    """A store of two parts a layer with probes and samples."""
    write_store(path, LAYERS, tasks=TASKS, epoch_of_step=lambda step: step // 3, probes=PROBES, flush_every=4)
    write_table(path / "samples" / "part-0-000000.parquet", SAMPLES)
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return dualstore.open(write(tmp_path_factory.mktemp("sql") / "store"))


def task_names(codes: ndarray) -> list[str | None]:
    return [None if code < 0 else TASKS[code] for code in codes]


ROW = ["step", "epoch", "sample_id", "position", "label", "task"]
SAMPLER = ["slot", "duplicate"]


def test_patterns_hold_every_row_of_every_layer(store: Store) -> None:
    found = store.sql("SELECT * FROM patterns").to_arrow()
    assert found.column_names == ["layer", *ROW, *SAMPLER, "x", "e", "token"]
    for number, rows in enumerate(LAYERS):
        mine = found.filter(pc.equal(found.column("layer"), number)).to_pydict()
        got = sorted(zip(*(mine[name] for name in [*ROW[:5], "x", "e"]), mine["task"], strict=True), key=repr)
        columns = [getattr(rows, name).tolist() for name in [*ROW[:5], "x", "e"]]
        assert got == sorted(zip(*columns, task_names(rows.task), strict=True), key=repr)


def test_steps_hold_one_row_a_step_and_parameter_group(store: Store) -> None:
    found = store.sql("SELECT * FROM steps ORDER BY step").to_dicts()
    assert [row["step"] for row in found] == list(range(6))
    assert [row["epoch"] for row in found] == [0, 0, 0, 1, 1, 1]
    assert [row["rows"] for row in found] == [[int((rows.step == step).sum()) for rows in LAYERS] for step in range(6)]
    assert {row["lr"] for row in found} == {0.1}


def test_samples_hold_what_was_recorded_with_the_names_of_tasks(store: Store) -> None:
    found = store.sql("SELECT * FROM samples ORDER BY sample_id").to_arrow()
    assert found.column_names == ["sample_id", "task", "label", "payload", "mime"]
    assert found.drop_columns("task").to_pydict() == SAMPLES.drop_columns("task").to_pydict()
    assert found.column("task").to_pylist() == task_names(SAMPLES.column("task").to_numpy())


def test_probes_hold_both_rows_of_an_example_probed_twice(store: Store) -> None:
    found = store.sql("SELECT * FROM probes WHERE layer = 1 ORDER BY step, test_id").to_arrow()
    assert found.column_names == ["layer", "test_id", "position", "step", "label", "task", "predicted", "x", "y", "g", "token"]
    order = [1, 0, 2]
    for name in ("test_id", "position", "step", "label", "predicted", "x", "y"):
        assert found.column(name).to_pylist() == PROBES[1][name][order].tolist()
    assert found.column("task").to_pylist() == task_names(PROBES[1]["task"][order])
    assert store.sql("SELECT count(*) AS n FROM probes").to_dicts() == [{"n": 6}]


@pytest.mark.parametrize("options", [Options(2000, 1), Options(1 << 20, 2), Options()])
@pytest.mark.parametrize("layer", [0, "layer1"])
def test_attention_is_alpha_bit_for_bit(store: Store, layer: int | str, options: Options) -> None:
    rows, store = LAYERS[0 if layer == 0 else 1], Store(store.path, options)
    query = np.random.default_rng(9).normal(size=rows.x.shape[1]).astype(np.float32)
    found = store.sql("SELECT * FROM attention", layer=layer, x=query).to_arrow()
    assert found.column_names == [*ROW, *SAMPLER, "alpha"]
    assert found.column("alpha").to_pylist() == reference.halved(rows.x, query).tolist()
    for name in ROW[:5]:
        assert found.column(name).to_pylist() == getattr(rows, name).tolist()
    assert found.column("task").to_pylist() == task_names(rows.task)
    ranked = store.query(query, layer=layer, top=500).to_dicts()
    order = "ORDER BY alpha DESC, step, sample_id, position"
    again = store.sql(f"SELECT alpha, {', '.join(ROW)} FROM attention {order}", layer=layer, x=query).to_dicts()
    assert [{name: row[name] for name in ["alpha", *ROW]} for row in ranked] == again


def test_attention_has_the_same_zero_as_a_query(tmp_path: Path) -> None:
    rows = make_rows(10, 2, 3)
    rows.x[:] = 0
    write_store(tmp_path / "store", [rows], tasks=TASKS)
    store = dualstore.open(tmp_path / "store")
    attention = store.sql("SELECT alpha FROM attention", layer=0, x=[-1, -1]).to_arrow().column("alpha").to_numpy()
    ranked = store.query([-1, -1], layer=0).to_arrow().column("alpha").to_numpy()
    assert attention.tobytes() == ranked.tobytes()


def test_attention_of_a_recorded_probe_is_that_of_its_latest_row(store: Store) -> None:
    found = store.sql("SELECT alpha FROM attention", layer=0, test_id=4).to_arrow().column("alpha").to_pylist()
    assert found == reference.halved(LAYERS[0].x, PROBES[0]["x"][2]).tolist()
    assert store.sql("SELECT alpha FROM attention", layer=0, test_id=4, position=0).to_arrow().column("alpha").to_pylist() == found


def test_attention_may_be_used_twice_in_one_statement(store: Store) -> None:
    query, rows = np.ones(5, np.float32), LAYERS[0]
    alphas = reference.halved(rows.x, query)
    text = """
        SELECT count(*) AS pairs, max(a.alpha - b.alpha) AS most, (SELECT count(*) FROM attention) AS n
        FROM attention AS a JOIN attention AS b USING (step)
    """
    (found,) = store.sql(text, layer=0, x=query).to_dicts()
    same = rows.step[:, None] == rows.step
    assert found["pairs"] == same.sum()
    assert found["n"] == 200
    assert found["most"] == (alphas[:, None] - alphas)[same].max()
    above = store.sql("SELECT count(*) AS n FROM attention WHERE alpha > (SELECT avg(alpha) FROM attention)", layer=0, x=query)
    assert above.to_dicts() == [{"n": int((alphas > alphas.mean()).sum())}]


def test_attention_is_grouped_ordered_limited_and_filtered(store: Store) -> None:
    query, rows = np.ones(5, np.float32), LAYERS[0]
    alphas = reference.halved(rows.x, query)
    grouped = store.sql(
        "SELECT label, sum(alpha) AS total, count(*) AS n FROM attention GROUP BY label ORDER BY label", layer=0, x=query
    )
    for row, label in zip(grouped, range(-1, 4), strict=True):
        assert (row["label"], row["n"]) == (label, (rows.label == label).sum())
        assert row["total"] == pytest.approx(alphas[rows.label == label].sum(), rel=1e-12, abs=1e-12)
    best = store.sql("SELECT alpha FROM attention ORDER BY alpha DESC LIMIT 5", layer=0, x=query)
    assert [row["alpha"] for row in best] == sorted(alphas, reverse=True)[:5]
    some = store.sql("SELECT alpha FROM attention WHERE task = 'digits' AND epoch = 1 AND step <> 4", layer=0, x=query)
    kept = (rows.task == 1) & (rows.epoch == 1) & (rows.step != 4)
    assert [row["alpha"] for row in some] == alphas[kept].tolist()
    assert len(store.sql("SELECT 1 AS one FROM attention LIMIT 3", layer=0, x=query)) == 3


def test_attention_joins_samples_steps_and_patterns(store: Store) -> None:
    query, rows = np.ones(5, np.float32), LAYERS[0]
    alphas = reference.halved(rows.x, query)
    text = "SELECT mime, max(alpha) AS best FROM attention JOIN samples USING (sample_id) GROUP BY mime ORDER BY mime"
    expected = [alphas[(rows.sample_id % 4 == rest)].max() for rest in (0, 2)]
    assert [row["best"] for row in store.sql(text, layer=0, x=query)] == expected
    text = "SELECT sum(lr * alpha) AS moved FROM attention JOIN steps USING (step)"
    assert store.sql(text, layer=0, x=query).to_dicts()[0]["moved"] == pytest.approx(0.1 * alphas.sum())
    text = """
        SELECT count(*) AS n FROM attention AS a JOIN patterns AS p USING (step, sample_id, position)
        WHERE p.layer = 0 AND list_sum(p.x) > 1e9
    """
    assert store.sql(text, layer=0, x=query).to_dicts() == [{"n": 0}]


def test_vectors_are_lists_that_sql_computes_with(store: Store) -> None:
    text = "SELECT list_sum(list_transform(x, lambda v: v::DOUBLE * v)) AS square FROM patterns WHERE layer = 1 ORDER BY square"
    squares = sorted((LAYERS[1].x.astype(np.float64) ** 2).sum(1).tolist())
    assert [row["square"] for row in store.sql(text)] == pytest.approx(squares)


@pytest.mark.parametrize(
    "name", ["a[1]*b", "q?{x,y}", "[", "it's", 'a"b', "back\\slash", "$files", "sp ace", "layer=9", "step=1", "label=3", "task=x"]
)
def test_a_store_may_lie_in_a_folder_of_any_name(store: Store, tmp_path: Path, name: str) -> None:
    shutil.copytree(store.path, tmp_path / name / "store")
    if name == "a[1]*b":
        shutil.copytree(store.path, tmp_path / "a1b" / "store")  # what the name would match as a pattern
    store = dualstore.open(tmp_path / name / "store")
    found = store.sql(
        "SELECT layer, count(*) AS n, sum(step)::INT AS s, sum(label)::INT AS l, count(task) AS t FROM patterns GROUP BY layer"
    )
    assert sorted(map(tuple, (row.values() for row in found))) == [
        (number, len(rows), rows.step.sum(), rows.label.sum(), (rows.task >= 0).sum()) for number, rows in enumerate(LAYERS)
    ]
    probed = store.sql(
        "SELECT layer, sum(step)::INT AS steps, count(task) AS named FROM probes GROUP BY layer ORDER BY layer"
    ).to_dicts()
    assert probed == [{"layer": number, "steps": 7, "named": 2} for number in (0, 1)]
    assert store.sql("SELECT sum(label)::INT AS labels FROM samples").to_dicts() == [{"labels": 45}]
    assert len(store.sql("SELECT * FROM attention", layer=0, test_id=2)) == 200


def test_parts_that_do_not_belong_to_the_store_are_not_read(tmp_path: Path) -> None:
    store = dualstore.open(write(tmp_path / "store"))
    (tmp_path / "store" / "patterns" / "layer=0" / ".part-0-000009.parquet.1.tmp").write_bytes(b"half a part")
    (tmp_path / "store" / "samples" / "notes.txt").write_text("mine")
    assert store.sql("SELECT count(*) AS n FROM patterns").to_dicts() == [{"n": 290}]
    assert store.sql("SELECT count(*) AS n FROM samples").to_dicts() == [{"n": 10}]


def test_a_store_without_rows_has_empty_relations(tmp_path: Path) -> None:
    info = StoreInfo((Layer(0, "fc", "Linear", 3, 2, False, 0, -1),), "float32", "SGD", True)
    writer = StoreWriter(tmp_path, info)
    writer.close()
    writer.save_info(status="complete")
    store = dualstore.open(tmp_path)
    for name in ("patterns", "steps", "samples", "probes"):
        assert store.sql(f"SELECT count(*) AS n FROM {name}").to_dicts() == [{"n": 0}]
    assert store.sql("SELECT * FROM attention", layer=0, x=[1, 2, 3]).columns == [*ROW, *SAMPLER, "alpha"]
    assert store.sql("SELECT * FROM patterns").columns == ["layer", *ROW, *SAMPLER, "x", "e", "token"]
    assert store.sql("SELECT * FROM probes").columns == [
        "layer",
        "test_id",
        "position",
        "step",
        "label",
        "task",
        "predicted",
        "x",
        "y",
        "g",
        "token",
    ]
    assert store.sql("SELECT * FROM samples").columns == ["sample_id", "task", "label", "payload", "mime"]


@pytest.mark.parametrize("name", ["patterns", "probes", "samples"])
def test_empty_and_filled_relations_have_the_same_types(store: Store, tmp_path: Path, name: str) -> None:
    write_store(
        tmp_path / "store", [Rows(**{key: values[:0] for key, values in vars(rows).items()}) for rows in LAYERS], tasks=TASKS
    )
    empty = dualstore.open(tmp_path / "store")
    asked = f"SELECT column_name, column_type FROM (DESCRIBE {name})"
    assert [row["column_name"] for row in empty.sql(asked)] == [row["column_name"] for row in store.sql(asked)]
    scalars = asked + " WHERE column_type NOT LIKE '%[%'"
    assert empty.sql(scalars).to_dicts() == store.sql(scalars).to_dicts()


@pytest.mark.parametrize(
    ("text", "question", "match"),
    [
        ("SELECT colour FROM patterns", {}, "SQL: Binder Error: .*colour.*; relations: .*patterns.*probes.*samples.*steps"),
        ("SELEC 1", {}, "SQL: Parser Error: syntax error"),
        ("SELECT * FROM nowhere", {}, "SQL: Catalog Error: .*nowhere does not exist"),
        ("SELECT * FROM attention", {}, "SQL: Catalog Error: .*attention does not exist"),
        ("SELECT * FROM attention", {"layer": 0}, "attention does not exist"),
        ("SELECT 'a'::INT", {}, "SQL: Conversion Error"),
        ("SELECT 1", {"test_id": 4}, "sql: expected a layer with the query"),
        ("SELECT 1", {"x": [1, 2]}, "sql: expected a layer with the query"),
        ("SELECT 1", {"layer": 0, "x": [1, 2]}, "query for layer 0 .*: expected 5 values"),
        ("SELECT 1", {"layer": 0, "x": [1.0] * 5, "test_id": 4}, "found both"),
        ("SELECT 1", {"layer": 0, "test_id": 99}, "test id 99 was not recorded"),
        ("SELECT 1", {"layer": 3, "test_id": 4}, "no layer 3"),
        ("SELECT 1", {"layer": 0, "x": [[1.0] * 5, [2.0] * 5]}, "sql: expected one query"),
    ],
)
def test_sql_that_does_not_fit_is_refused_in_one_clear_line(store: Store, text: str, question: dict[str, Any], match: str) -> None:
    with pytest.raises(QueryError, match=match) as caught:
        store.sql(text, **question)
    assert "\n" not in str(caught.value)


def test_variables_of_the_caller_are_not_relations(store: Store) -> None:
    mine = pa.table({"secret": [1]})
    assert mine.num_rows == 1
    with pytest.raises(QueryError, match="mine does not exist"):
        store.sql("SELECT * FROM mine")


def test_statements_that_return_nothing_give_an_empty_answer(store: Store) -> None:
    for text in ("", "-- nothing"):
        found = store.sql(text)
        assert (len(found), found.columns, found.to_dicts()) == (0, [], [])
        assert len(str(found).splitlines()) <= 2


def test_columns_of_the_same_name_are_all_shown(store: Store) -> None:
    found = store.sql("SELECT 1 AS a, 2 AS a, 3 AS b")
    assert [column.to_pylist() for column in found.to_arrow().columns] == [[1], [2], [3]]
    assert str(found).splitlines()[-1].split() == ["1", "2", "3"]
    assert list(found.to_dicts()[0].values()) == [1, 2, 3]
    assert found.to_polars().row(0) == (1, 2, 3)
    joined = store.sql("SELECT * FROM probes AS p JOIN probes AS q ON p.test_id = q.test_id AND p.layer < q.layer")
    assert len(joined.to_polars()) == len(joined.to_dicts()) == 5


@pytest.mark.parametrize("folder", ["patterns", "probes"])
def test_sql_over_a_damaged_part_is_refused_in_one_line(store: Store, tmp_path: Path, folder: str) -> None:
    copy = shutil.copytree(store.path, tmp_path / "store")
    part = next((copy / folder).glob("layer=0/*.parquet"))
    part.write_bytes(part.read_bytes()[:50])
    with pytest.raises(DamagedError, match=f"{folder}: .*{part.name}") as caught:
        dualstore.open(copy).sql("SELECT count(*) FROM steps")
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_part_is_said_where_attention_meets_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: Any, **__: Any) -> Any:
        raise DamagedError("part-0.parquet: damaged")
        yield

    monkeypatch.setattr("dualstore.relations.attention", damaged)
    with pytest.raises(DamagedError, match=r"^part-0.parquet: damaged$"):
        store.sql("SELECT sum(alpha) FROM attention", layer=0, x=np.ones(store.layers[0].d_in))


def test_a_long_statement_can_be_interrupted(store: Store) -> None:
    code = "import sys, dualstore; dualstore.open(sys.argv[1]).sql('SELECT count(*) FROM range(100000000000) t(i) WHERE i % 7 = 3')"
    running = subprocess.Popen([sys.executable, "-c", code, store.path], stderr=subprocess.PIPE, text=True)
    time.sleep(2)
    running.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in running.communicate(timeout=60)[1]


@pytest.mark.parametrize("value", ["DATE '290000-01-01'", "'infinity'::TIMESTAMP", "TIMESTAMP_NS '2020-01-01 00:00:00.123456789'"])
def test_times_that_python_does_not_know_are_text(store: Store, value: str) -> None:
    found = store.sql(f"SELECT {value} AS t")
    assert isinstance(found.to_dicts()[0]["t"], str)
    assert repr(found)

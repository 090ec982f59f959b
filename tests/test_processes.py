"""Several processes write one store at once, and one of them is killed."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy import ndarray

import dualstore
from dualstore.errors import DualstoreWarning
from dualstore.merge import merge_stores
from dualstore.store import Store

ROOT = Path(__file__).resolve().parents[1]
STEPS = 40
WRITER = """
import sys
from pathlib import Path
import numpy as np
from dualstore.schema import Layer, StoreInfo
from dualstore.writer import StoreWriter
from tests.reference import group_row
from tests.test_processes import STEPS, rows_of

path, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
path.mkdir(parents=True, exist_ok=True)
layer = Layer(0, "fc", "Linear", 4, 2, False, 0, -1)
tasks = ("a", "b") if rank == 0 else ("b", "a")
info = StoreInfo((layer,), "float64", "SGD", True, tasks=tasks, ranks=ranks)
writer = StoreWriter(path, info, rank=rank)
writer.write_weights("initial", {"fc.weight": np.zeros((2, 4))})
for step in range(STEPS):
    sample, label, x, e = rows_of(step, rank)
    task = np.array([tasks.index("ab"[number % 2]) for number in label], np.int32)
    scalars = {"sample_id": sample, "position": np.zeros(len(x), np.int32), "label": label, "task": task}
    writer.add_patterns(layer, scalars, x, e)
    writer.end_step([group_row(step // 10)])
    if step % 5 == rank:
        writer.flush()
        writer.wait()
        print(step, flush=True)
    if sys.argv[4:] and step == int(sys.argv[4]):
        sys.stdin.read()
writer.close()
writer.save_info(status="complete")
"""


def rows_of(step: int, rank: int) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Samples, labels, keys and errors that a rank has in a step."""
    rng = np.random.default_rng([step, rank])
    count = 2 + (step + rank) % 3
    sample, label = rng.integers(0, 1000, count), rng.integers(0, 4, count).astype(np.int32)
    return sample, label, rng.standard_normal((count, 4)), rng.standard_normal((count, 2))


def start(path: Path, rank: int, ranks: int, *hang_at: int) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", WRITER, str(path), str(rank), str(ranks), *map(str, hang_at)]
    return subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def assert_holds(store: Store, ranks: int, last: int) -> None:
    """The store answers as all rows of all ranks up to a step do."""
    rows = [rows_of(step, rank) for rank in range(ranks) for step in range(last + 1)]
    sample, label, x, e = (np.concatenate(found) for found in zip(*rows, strict=True))
    step = np.concatenate([np.full(len(rows_of(s, r)[0]), s) for r in range(ranks) for s in range(last + 1)])
    query = np.arange(1.0, 5.0)
    alpha = x @ query
    best = np.argsort(-alpha)[:10]
    found = store.query(query, layer=0, top=10).to_dicts()
    assert [(row["step"], row["sample_id"], row["label"]) for row in found] == [(step[i], sample[i], label[i]) for i in best]
    by_task = {row["task"]: row["total"] for row in store.totals(query, layer=0, by="task")}
    assert by_task == {name: pytest.approx(alpha[label % 2 == code].sum()) for code, name in enumerate("ab")}
    assert store.sql("SELECT count(*) AS n, max(step) AS last FROM patterns").to_dicts() == [{"n": len(x), "last": last}]
    np.testing.assert_allclose(store.weights(0).weight, -0.1 * e.T @ x, rtol=1e-12, atol=1e-13)


def test_two_processes_write_one_store_at_once(tmp_path: Path) -> None:
    writers = [start(tmp_path / "store", rank, 2) for rank in (1, 0)]
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    store = dualstore.open(tmp_path / "store")
    assert_holds(store, 2, STEPS - 1)
    store.build_index()
    assert_holds(dualstore.open(tmp_path / "store"), 2, STEPS - 1)
    assert not list((tmp_path / "store").rglob("*.tmp"))


@pytest.mark.parametrize("shared", [True, False], ids=["one folder", "folders of their own"])
def test_of_a_process_that_is_killed_the_flushed_steps_are_left(tmp_path: Path, *, shared: bool) -> None:
    folders = [tmp_path / ("store" if shared else f"rank{rank}") for rank in range(2)]
    killed, other = start(folders[1], 1, 2, 18), start(folders[0], 0, 2)
    assert killed.stdout is not None
    while int(killed.stdout.readline()) < 16:
        pass
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    other.communicate(timeout=120)
    assert (killed.returncode, other.returncode) == (-signal.SIGKILL, 0)
    if not shared:
        merge_stores(tmp_path / "store", folders)
    with pytest.warns(DualstoreWarning, match=r"up to step 16; rank 0 at step 39 \(complete\); rank 1 at step 16 \(recording\)$"):
        store = dualstore.open(tmp_path / "store")
    assert_holds(store, 2, 16)
    assert store.verify(at_step=16).ok
    (problem,) = store.verify().problems
    assert "complete up to step 16, and is checked as of then" in problem

"""What does the index save? Queries on the paper's MNIST run against brute force.

Answers are asserted equal to brute force before any time is printed. Brute force: numpy over a memory map, torch in memory,
and, where they are installed (extra `bench`), faiss and usearch; DuckDB on a table in memory.
"""

import gc
import json
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import torch
from common import arguments, drop_cache, machine, mnist_run, run_python, seconds, spread, work_folder

import dualstore
from dualstore.kernels import exact_dots
from dualstore.store import Store

K = 20
Rows = dict[str, np.ndarray]
Conditions = dict[str | None, Callable[[Rows], np.ndarray]]
EVERYTHING: Conditions = {None: lambda rows: rows["step"] >= 0}
DIGITS = EVERYTHING | {"label = 3": lambda rows: rows["label"] == 3}
NAMES = ("step", "sample_id", "position", "label")


def main() -> None:
    parser = arguments(__doc__, store=True)
    parser.add_argument("--probes", type=int, default=100, help="queries timed, and compared for k = 20")
    options = parser.parse_args()
    print(machine(), f"torch {torch.__version__}")
    with work_folder() as folder:
        path = mnist_run(options, folder)
        build(path)
        for layer in (2, 1):
            compare(dualstore.open(path), layer, options.probes, folder, DIGITS)
            cold(path, layer)


def build(path: Path) -> None:
    """Size and time of the index beside one pass over the keys."""
    shutil.rmtree(path / "index", ignore_errors=True)
    store = dualstore.open(path)
    passes = seconds(lambda: [one_pass(store, number) for number in range(3)], runs=3)
    keys = sum(found.nbytes for number in range(3) for found in arrays(store, number))
    start = time.perf_counter()
    store.build_index()
    built = time.perf_counter() - start
    size = sum(file.stat().st_size for file in (path / "index").rglob("*.arrow"))
    print(
        f"index of 3 layers: {size / 1e6:.0f} MB, {100 * size / keys:.2f} % of {keys / 1e9:.2f} GB of keys; built in {built:.1f} s"
    )
    print(f"  one product over all keys, warm: {spread(passes)} s; build / pass {built / statistics.median(passes):.1f}")


def one_pass(store: Store, number: int) -> None:
    """The product of all keys of a layer with one vector."""
    for found in arrays(store, number):
        found @ np.ones(found.shape[1], np.float32)


def arrays(store: Store, layer: int) -> list[np.ndarray]:
    return [group.part.mapping.array(group, "x") for group in store.patterns(store.layer(layer)).groups]


def compare(store: Store, number: int, probes: int, folder: Path, conditions: Conditions) -> None:
    """One layer: equality for several k and conditions, then times."""
    layer = store.layer(number)
    log = store.patterns(layer)
    rows = {name: np.concatenate([g.part.mapping.array(g, name) for g in log.groups]) for name in NAMES}
    keys = np.concatenate(arrays(store, number))
    queries = np.concatenate([g.part.mapping.array(g, "x") for g in store.probes(layer).groups])
    queries = queries[queries.any(axis=1)]  # of zeros all are equally good
    queries = np.ascontiguousarray(queries[:: len(queries) // probes][:probes])
    for index, query in enumerate(queries):
        sizes = (1, K, 500) if index < 10 else (K,)
        for where, select in (conditions if index < 10 else EVERYTHING).items():
            kept = np.flatnonzero(select(rows))
            alphas = (keys @ query)[kept]
            near = kept[np.argpartition(-alphas, 2000)[:2000]]  # far more than the rounding of a product can move
            exact = exact_dots(keys[near], query)
            order = near[np.lexsort((near, *(rows[name][near] for name in ("position", "sample_id", "step")), -exact))]
            for k in sizes:
                found = store.query(query, layer=number, top=k, where=where).to_arrow()
                for name in NAMES:
                    assert np.array_equal(found[name].to_numpy(), rows[name][order[:k]]), (number, index, where, k)
    print(f"layer {number}: {len(keys):,} keys of {keys.shape[1]}; {probes} probes, k = {K}, equal to brute force")
    costs = [store.query(query, layer=number, top=K).explain for query in queries]
    shares, read = [cost.to_dict()["share"] for cost in costs if cost], [cost.rows_read for cost in costs if cost]
    print(f"  bytes read / key bytes: {100 * statistics.median(shares):.2f} % (up to {100 * max(shares):.2f} %)", end="; ")
    print(f"keys read: {statistics.median(read):.0f} (up to {max(read)})")
    each = [seconds(partial(store.query, query, layer=number, top=K), runs=3, warm=False) for query in queries]
    ours = [statistics.median(times) for times in each]
    many = queries[np.arange(64) % len(queries)]
    ours_many = seconds(lambda: store.query(many, layer=number, top=K), runs=5)
    print(f"  one query {spread(ours, 1e3)} ms; 64 at once {spread(ours_many, 1e3)} ms")
    best, best_many = np.inf, np.inf
    for name, one, several in brute_force(keys, queries[0], many, folder):
        times = seconds(one, runs=5)
        times_many = seconds(several, runs=2) if several is not None else [np.inf]
        best, best_many = min(best, statistics.median(times)), min(best_many, statistics.median(times_many))
        print(f"  {name:24} one {spread(times, 1e3)} ms; 64 at once {spread(times_many, 1e3)} ms")
    gain, gain_many = best / statistics.median(ours), best_many / statistics.median(ours_many)
    print(f"  faster than the best: one query {gain:.1f} x, 64 at once {gain_many:.1f} x")


FIRST = """
import json, sys, time, dualstore
start = time.perf_counter()
found = dualstore.open(sys.argv[1]).query(test_id=42, layer=int(sys.argv[2]), top=20).to_dicts()
print(json.dumps([time.perf_counter() - start, found]))
"""


def cold(path: Path, number: int) -> None:
    """The first query of a store that is not in the page cache, with and without the index, in a process of its own."""

    def first() -> tuple[float, list[dict[str, object]]]:
        gc.collect()  # pages that are still mapped stay in memory
        drop_cache([file for folder in ("patterns", "index", "aside") for file in (path / folder).rglob("*.*")])
        took, answer = json.loads(run_python(None, FIRST, str(path), str(number))[0])
        return took, answer

    searched = [first() for _ in range(3)]
    (path / "index").rename(path / "aside")
    try:
        scanned = [first() for _ in range(3)]
    finally:
        (path / "aside").rename(path / "index")
    assert all(answer == searched[0][1] for _, answer in searched + scanned)
    ours, scans = [took for took, _ in searched], [took for took, _ in scanned]
    gain = statistics.median(scans) / statistics.median(ours)
    print(f"  cold, first query: {spread(ours, 1e3)} ms; by scan {spread(scans, 1e3)} ms; {gain:.1f} x")


def brute_force(
    keys: np.ndarray, query: np.ndarray, many: np.ndarray, folder: Path
) -> list[tuple[str, Callable[[], object], Callable[[], object] | None]]:
    """(name, one query, 64 queries) of each way that is installed."""
    file = folder / "keys.npy"
    np.save(file, keys)
    mapped = np.load(file, mmap_mode="r")
    tensor, one, several = torch.from_numpy(keys), torch.from_numpy(query), torch.from_numpy(many.T.copy())
    found: list[tuple[str, Callable[[], object], Callable[[], object] | None]] = [
        (
            "numpy memory map",
            lambda: np.argpartition(-(mapped @ query), K)[:K],
            lambda: np.argpartition(-(mapped @ many.T), K, axis=0),
        ),
        ("torch in memory", lambda: torch.topk(torch.mv(tensor, one), K), lambda: torch.topk(tensor @ several, K, dim=0)),
    ]
    try:
        import faiss

        index = faiss.IndexFlatIP(keys.shape[1])
        index.add(keys)
        found.append(("faiss IndexFlatIP", lambda: index.search(query[None], K), lambda: index.search(many, K)))
    except ImportError:
        print("  faiss is not installed")
    try:
        from usearch.index import MetricKind, search

        found.append(("usearch exact", lambda: search(keys, query, K, MetricKind.IP, exact=True), None))
    except ImportError:
        print("  usearch is not installed")
    database = duckdb.connect()
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(keys.reshape(-1)), keys.shape[1])
    database.register("arrow", pa.table({"row": np.arange(len(keys)), "x": vectors}))
    text = f"SELECT row FROM arrow ORDER BY array_inner_product(x, $q::FLOAT[{keys.shape[1]}]) DESC LIMIT {K}"
    found.append(("DuckDB over Arrow", lambda: database.execute(text, {"q": query.tolist()}).fetchall(), None))
    return found


if __name__ == "__main__":
    main()

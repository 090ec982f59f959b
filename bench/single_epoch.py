"""Does the index help where no sample is seen twice? 20 million keys of 256, asked in 2 GB of memory.

The keys are normal with a spectrum that falls as 1/i in random directions, as hidden states do roughly; every row is another
sample. The index is built and all questions are asked inside a memory cgroup (v1 or v2), which needs root; answers of the
search and of the scan are asserted equal to brute force before any time is printed.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path

import numpy as np
from common import drop_cache, machine, memory_cgroup, run_python, work_folder

import dualstore
from dualstore.kernels import exact_dots
from dualstore.schema import Layer, StoreInfo
from dualstore.store import Store
from dualstore.writer import StoreWriter

WIDTH, BATCH, LIMIT, K = 256, 16_384, 2 << 30, 20

BUILD = "import sys, dualstore; dualstore.open(sys.argv[1]).build_index()"
QUESTIONS = """
import json, sys, time, numpy, dualstore
store = dualstore.open(sys.argv[1])
out, times = [], []
for query in numpy.load(sys.argv[2])[:int(sys.argv[3])]:
    start = time.perf_counter()
    found = store.query(query, layer=0, top=20)
    times.append(time.perf_counter() - start)
    out.append(found.to_polars()["sample_id"].to_list())
print(json.dumps([out, times, found.explain.to_dict()]))
"""


def write(path: Path, rows: int) -> None:
    """A store of one epoch: sample ids count the rows."""
    path.mkdir()
    layer = Layer(0, "hidden", "Linear", WIDTH, 1, False, 0, -1)
    writer = StoreWriter(path, StoreInfo((layer,), "float32", "SGD", True))
    group = {"group": 0, "epoch": 0, "lr": 0.1, "momentum": 0.0, "dampening": 0.0, "decay": 0.0, "nesterov": False}
    group |= {"maximize": False, "clip": 1.0, "batch_size": BATCH, "loss": 0.0, "idle": []}
    zeros = np.zeros(BATCH, np.int32)
    generator, turn = np.random.default_rng(0), directions()
    for step in range(rows // BATCH):
        ids = np.arange(step * BATCH, (step + 1) * BATCH)
        scalars = {"sample_id": ids, "position": zeros, "label": (ids % 10).astype(np.int32), "task": zeros - 1}
        writer.add_patterns(layer, scalars, vectors(generator, BATCH, turn), np.zeros((BATCH, 1), np.float32))
        writer.end_step([group])
    writer.close()
    writer.save_info(status="complete")


def directions() -> np.ndarray:
    """An orthonormal basis."""
    return np.linalg.qr(np.random.default_rng(1).standard_normal((WIDTH, WIDTH)))[0].astype(np.float32)


def vectors(generator: np.random.Generator, count: int, turn: np.ndarray) -> np.ndarray:
    """Normal vectors of the given spectrum."""
    drawn = generator.standard_normal((count, WIDTH), np.float32)
    return (drawn / np.arange(1, WIDTH + 1, dtype=np.float32)) @ turn


def brute_force(store: Store, queries: np.ndarray) -> list[list[int]]:
    """Sample ids of the best rows of each query: the nearest by a product in single precision, ranked by their alpha."""
    rows = [np.zeros(0, np.int64)] * len(queries)
    near = [np.zeros((0, WIDTH), np.float32)] * len(queries)
    for group in store.patterns(store.layer(0)).groups:
        keys = group.part.mapping.array(group, "x")
        alphas = keys @ queries.T
        for number in range(len(queries)):
            best = np.argpartition(-alphas[:, number], 4 * K)[: 4 * K]
            rows[number] = np.concatenate([rows[number], best + group.first])
            near[number] = np.concatenate([near[number], keys[best]])
            kept = np.argsort(-exact_dots(near[number], queries[number]), kind="stable")[: 4 * K]
            rows[number], near[number] = rows[number][kept], near[number][kept]
    return [found[:K].tolist() for found in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--probes", type=int, default=20)
    options = parser.parse_args()
    with memory_cgroup(LIMIT) as group, work_folder() as folder:
        path = folder / "store"
        write(path, options.rows)
        store = dualstore.open(path)
        rows = store.patterns(store.layer(0)).rows
        keys = 4 * rows * WIDTH
        print(machine(), f"{rows:,} keys of {WIDTH}, {keys / 1e9:.1f} GB; limit {LIMIT / 1e9:.1f} GB", flush=True)
        queries = vectors(np.random.default_rng(2), options.probes, directions())
        np.save(folder / "queries.npy", queries)
        expected = brute_force(store, queries)
        _, _, built = run_python(group, BUILD, str(path))
        size = sum(file.stat().st_size for file in (path / "index").rglob("*.arrow"))
        print(f"index: {size / 1e9:.2f} GB, {100 * size / keys:.1f} % of the keys; built in {built:.0f} s", flush=True)
        searched = ask(group, folder, options.probes, expected)
        shutil.rmtree(path / "index")
        scanned = ask(group, folder, 3, expected)
        gain = statistics.median(scanned) / statistics.median(searched[1:])
        print(f"equal to brute force; search / scan, both after their first query: {gain:.1f} x faster")


def ask(group: Path, folder: Path, probes: int, expected: list[list[int]]) -> list[float]:
    """Seconds of each query, of a store that is cold at first."""
    drop_cache(sorted((folder / "store").rglob("*.parquet")) + sorted((folder / "store").rglob("*.arrow")))
    found, _, _ = run_python(group, QUESTIONS, str(folder / "store"), str(folder / "queries.npy"), str(probes))
    answers, times, cost = json.loads(found)
    assert answers == expected[:probes], "answers differ from brute force"
    rest = statistics.median(times[1:])
    print(f"  {cost['path']}: first query {times[0]:.2f} s, then {rest:.3f} s; {cost['rows_read']:,} keys read", flush=True)
    return times


if __name__ == "__main__":
    main()

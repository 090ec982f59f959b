"""How fast is a scan? One query and sixteen in one pass against torch.mv in memory, warm; against dd, cold.

640,000 keys of 800 float32 in one layer, as the paper's MNIST run has them. Answers are asserted equal to a brute-force
ranking before any time is printed.
"""

import statistics
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import arguments, drop_cache, machine, seconds, spread, work_folder

import dualstore
from dualstore.best import Ranking
from dualstore.kernels import exact_dots
from dualstore.log import Group, Log, Mapping
from dualstore.rows import Selector
from dualstore.scan import Options
from dualstore.schema import Layer, StoreInfo
from dualstore.topk import top_k
from dualstore.writer import StoreWriter

WIDTH, BATCH = 800, 128


def write(path: Path, rows: int) -> None:
    """A store of half-rectified random keys; errors of width 10."""
    path.mkdir()
    layer = Layer(0, "hidden", "Linear", WIDTH, 10, False, 0, -1)
    writer = StoreWriter(path, StoreInfo((layer,), "float32", "SGD", True))
    generator = np.random.default_rng(0)
    group = {"group": 0, "epoch": 0, "lr": 0.1, "momentum": 0.0, "dampening": 0.0, "decay": 0.0, "nesterov": False}
    group |= {"maximize": False, "clip": 1.0, "batch_size": BATCH, "loss": 0.0, "idle": []}
    zeros = np.zeros(BATCH, np.int32)
    for step in range(rows // BATCH):
        x = np.maximum(generator.standard_normal((BATCH, WIDTH), np.float32), 0)
        ids = np.arange(step * BATCH, (step + 1) * BATCH)
        scalars = {"sample_id": ids, "position": zeros, "label": (ids % 10).astype(np.int32), "task": zeros - 1}
        writer.add_patterns(layer, scalars, x, np.zeros((BATCH, 10), np.float32))
        writer.end_step([group])
    writer.close()
    writer.save_info(status="complete")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=640_000)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    with work_folder() as folder:
        write(folder / "store", options.rows)
        store = dualstore.open(folder / "store")
        layer = store.layer(0)
        log = store.patterns(layer)
        everything = Selector(store.labelling, None, None)
        queries = np.maximum(np.random.default_rng(1).standard_normal((16, WIDTH), np.float32), 0)
        paths = [part.path for part in log.parts]
        keys = np.concatenate([_keys(group) for group in log.groups])
        tensor = torch.from_numpy(keys)
        _assert_equal(top_k(log, queries, 20, everything), keys, queries)
        size = keys.nbytes / 1e9
        print(machine(), f"torch {torch.__version__}; {len(keys):,} x {WIDTH} float32, {size:.2f} GB, k = 20")

        scan = partial(_scan, log, queries, everything)

        times: dict[str, list[float]] = {name: [] for name in ("mv", "one", "sixteen", "matmul")}
        work = {
            "mv": lambda: torch.mv(tensor, torch.from_numpy(queries[0])),
            "one": partial(scan, 1),
            "sixteen": partial(scan, 16),
            "matmul": lambda: tensor @ torch.from_numpy(queries.T),
        }
        for _ in range(options.runs):  # in turns, so that a drifting machine treats all alike
            for name, run in work.items():
                time.sleep(0.3)  # the threads of one library go on turning for a while, in the way of the next
                times[name] += seconds(run, runs=1)
        for name, label in (
            ("mv", "torch.mv in memory"),
            ("one", "one query"),
            ("matmul", "torch 16-query product in memory"),
            ("sixteen", "sixteen queries, one pass"),
        ):
            print(f"  warm  {label:34} {spread(times[name], 1e3)} ms, {size / statistics.median(times[name]):.1f} GB/s")
        speed = statistics.median(a / b for a, b in zip(times["mv"], times["one"], strict=True))
        pass_ratio = statistics.median(b / a for a, b in zip(times["one"], times["sixteen"], strict=True))
        print(f"  one query: {speed:.2f} x the speed of torch.mv; sixteen cost {pass_ratio:.2f} x one")
        del tensor, keys
        total = sum(path.stat().st_size for path in paths)
        read = seconds(lambda: _dd(paths), runs=3, warm=False, before=lambda: drop_cache(paths))
        del store, log, everything, scan, work  # what is mapped cannot be dropped from the cache
        cold = seconds(lambda: _fresh(folder / "store", queries[:1]), runs=3, warm=False, before=lambda: drop_cache(paths))
        print(f"  cold  dd of the same files {spread(read)} s, {total / statistics.median(read) / 1e9:.2f} GB/s")
        rate = size / statistics.median(cold)
        print(
            f"  cold  one query {spread(cold)} s, {rate:.2f} GB/s of keys: {rate * statistics.median(read) / total * 1e9:.2f} x dd"
        )


def _scan(log: Log, queries: np.ndarray, select: Selector, count: int) -> None:
    top_k(log, queries[:count], 20, select, options=Options())


def _fresh(path: Path, queries: np.ndarray) -> None:
    store = dualstore.open(path)
    top_k(store.patterns(store.layer(0)), queries, 20, Selector(store.labelling, None, None))


def _keys(group: Group) -> np.ndarray:
    return np.array(Mapping(group.part).array(group, "x"))


def _assert_equal(ranking: Ranking, keys: np.ndarray, queries: np.ndarray) -> None:
    for index, query in enumerate(queries):
        alphas = exact_dots(keys, query)
        best = np.lexsort((np.arange(len(alphas)), -alphas))[:20]
        assert np.array_equal(ranking.row[ranking.query == index], best), "the scan and brute force disagree"


def _dd(paths: list[Path]) -> None:
    for path in paths:
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M"], check=True, capture_output=True)


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s in all")

"""How do query, totals and votes grow with the log? The first quarter to the whole of the paper's MNIST run.

Each is a store of its own, of links to the first parts, with its own index. Answers of the index are asserted equal to
those of the scan before any time is printed. With `--plot FILE` the times are drawn, too.
"""

import os
import shutil
import statistics
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
from common import arguments, machine, mnist_run, seconds, work_folder

import dualstore
from dualstore.store import Store

K = 20
SHARES = (0.25, 0.5, 0.75, 1.0)
KINDS = ("query", "query by scan", "totals", "votes")


def main() -> None:
    parser = arguments(__doc__, store=True)
    parser.add_argument("--probes", type=int, default=100, help="queries timed")
    parser.add_argument("--plot", type=Path, help="draws the times into this file (SVG, PNG or PDF)")
    options = parser.parse_args()
    print(machine())
    found: dict[int, list[tuple[int, dict[str, float]]]] = {}
    with work_folder() as folder:
        path = mnist_run(options, folder)
        steps = len(dualstore.open(path).steps.numbers)
        for layer in (2, 1):
            print(f"layer {layer}: medians of {options.probes} queries, k = {K}")
            found[layer] = []
            for share in SHARES:
                copy = folder / f"{layer}-{share}"
                prefix(path, copy, share * steps - 1)
                store = dualstore.open(copy)
                measured = measure(store, layer, options.probes)
                found[layer].append((store.patterns(store.layer(layer)).rows, measured))
                report(*found[layer][-1], found[layer][0][1])
                shutil.rmtree(copy)
    if options.plot:
        draw(found, options.plot)


def measure(store: Store, number: int, probes: int) -> dict[str, float]:
    """Median seconds of each kind of question."""
    layer = store.layer(number)
    queries = np.concatenate([g.part.mapping.array(g, "x") for g in store.probes(layer).groups])
    queries = queries[:: len(queries) // probes][:probes]
    ask = partial(store.query, layer=number, top=K)
    answers = [ask(query).to_dicts() for query in queries[:5]]
    each = [statistics.median(seconds(partial(ask, query), runs=3, warm=False)) for query in queries]
    totals, votes = (
        statistics.median(seconds(partial(store.totals, queries[0], layer=number, by="label,task"), runs=5)),
        statistics.median(seconds(partial(store.votes, number), runs=3)),
    )
    shutil.rmtree(store.path / "index")
    bare = dualstore.open(store.path)
    assert answers == [bare.query(query, layer=number, top=K).to_dicts() for query in queries[:5]]
    scans = seconds(partial(bare.query, queries[0], layer=number, top=K), runs=5)
    return dict(zip(KINDS, (statistics.median(each), statistics.median(scans), totals, votes), strict=True))


def report(rows: int, measured: dict[str, float], first: dict[str, float]) -> None:
    """One line of the table."""
    shown = "; ".join(f"{name} {1e3 * measured[name]:.1f} ms ({measured[name] / first[name]:.2f} x)" for name in KINDS)
    print(f"  {rows:,} rows: {shown}", flush=True)


def draw(found: dict[int, list[tuple[int, dict[str, float]]]], path: Path) -> None:
    """A plot for each layer, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, len(found), sharey=True)
    for axis, (layer, lines) in zip(axes, found.items(), strict=True):
        rows = [count for count, _ in lines]
        for name in KINDS:
            axis.plot(rows, [1e3 * measured[name] for _, measured in lines], marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="patterns", title=f"layer {layer}")
    axes[0].set_ylabel("ms")
    axes[0].legend()
    figure.savefig(path)
    print(f"drawn: {path}")


def prefix(path: Path, copy: Path, steps: float) -> None:
    """A store of the first parts of another, about so many steps, by links; with its own index."""
    kept: list[str] = []
    for file in sorted((path / "steps").glob("*.parquet")):
        kept.append(file.name)
        ((last,),) = duckdb.execute("SELECT max(step) FROM read_parquet($file)", {"file": str(file)}).fetchall()
        if last >= steps:
            break
    for source in path.rglob("*"):
        target = copy / source.relative_to(path)
        folder = source.relative_to(path).parts[0]
        if source.is_dir() or folder == "index" or (folder in ("patterns", "steps") and source.name not in kept):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, target)
    dualstore.open(copy).build_index()


if __name__ == "__main__":
    main()

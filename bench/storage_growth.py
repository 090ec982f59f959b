"""How large does a store become? Bytes against the number of patterns T on the paper's MNIST run, and what that means at scale.

Sizes are those of the files: footers tell each column's share. Half precision is computed: its vectors take half as much.
With `--plot FILE` the sizes are drawn, too. Irie et al. 2022 (arXiv 2202.05798), section 6, estimate 14.4 PB for the keys of
one layer of GPT-3: 12,000 values of 4 bytes for each of 300e9 tokens.
"""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from common import arguments, machine, mnist_run, work_folder

import dualstore

WIDTH, TOKENS = 12_000, 300e9
KINDS = ("keys only", "keys + errors", "keys only, float16", "keys + errors, float16", "index")


def main() -> None:
    parser = arguments(__doc__, store=True)
    parser.add_argument("--plot", type=Path, help="draws the sizes into this file (SVG, PNG or PDF)")
    options = parser.parse_args()
    print(machine())
    with work_folder() as folder:
        path = mnist_run(options, folder)
        rows, sizes = measure(path)
        values = sum(layer.d_in for layer in dualstore.open(path).layers)
    print("MB of all layers together, after some parts and at the end:")
    print("  T        " + "".join(f"{name:>24}" for name in KINDS))
    for at in np.unique(np.linspace(0, len(rows) - 1, 6).astype(int)):
        print(f"  {rows[at]:<9,}" + "".join(f"{sizes[name][at] / 1e6:24,.1f}" for name in KINDS))
    print("bytes for each pattern and input value (of a key of float32: 4):")
    each = {}
    for name in KINDS:
        slope, start = np.polyfit(rows, sizes[name], 1)
        each[name] = slope / values
        straight = np.abs(np.polyval((slope, start), rows) - sizes[name]).max() / sizes[name][-1]
        print(f"  {name:24}{each[name]:8.4f}; off a straight line by at most {100 * straight:.2f} % of the end")
    assert each["keys only"] >= 4
    print(f"one layer of {WIDTH:,} inputs over {TOKENS:.0e} tokens:")
    print(f"  float32 keys alone, as estimated by Irie et al.: {4 * WIDTH * TOKENS / 1e15:.1f} PB")
    for name in ("keys only", "keys only, float16", "index"):
        print(f"  {name + ' as stored here:':40}{each[name] * WIDTH * TOKENS / 1e15:6.2f} PB")
    if options.plot:
        draw(rows, sizes, options.plot)


def measure(path: Path) -> tuple[list[int], dict[str, list[float]]]:
    """T after each part, and the bytes of each kind of store up to there."""
    rows: list[int] = []
    sizes: dict[str, list[float]] = {name: [] for name in KINDS}
    total = dict.fromkeys(KINDS, 0.0)
    patterns = 0
    for name in sorted(file.name for file in (path / "steps").glob("*.parquet")):
        for layer in sorted((path / "patterns").iterdir()):
            file = layer / name
            with pq.ParquetFile(file) as opened:
                metadata = opened.metadata
            patterns += metadata.num_rows if layer.name == "layer=0" else 0
            columns = {"x": 0, "e": 0}
            for group in range(metadata.num_row_groups):
                for column in range(metadata.num_columns):
                    chunk = metadata.row_group(group).column(column)
                    if (found := chunk.path_in_schema.split(".")[0]) in columns:
                        columns[found] += chunk.total_compressed_size
            whole, rest = file.stat().st_size, file.stat().st_size - columns["x"] - columns["e"]
            total["keys only"] += columns["x"] + rest
            total["keys + errors"] += whole
            total["keys only, float16"] += columns["x"] / 2 + rest
            total["keys + errors, float16"] += (columns["x"] + columns["e"]) / 2 + rest
            index = path / "index" / layer.name
            total["index"] += sum(found.stat().st_size for found in index.glob(f"{file.stem}.*"))
        rows.append(patterns)
        for kind, size in total.items():
            sizes[kind].append(size)
    return rows, sizes


def draw(rows: list[int], sizes: dict[str, list[float]], path: Path) -> None:
    """Gigabytes against T."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in KINDS:
        axes.plot(rows, [size / 1e9 for size in sizes[name]], label=name)
    axes.set(xlabel="patterns T", ylabel="GB")
    axes.legend()
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()

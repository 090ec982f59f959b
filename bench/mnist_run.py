"""The paper's MNIST run end to end: 640,000 patterns x 3 layers recorded, verified, and the vote table reproduced.

Asserts the table within 3 points ("right") and 6 points ("wrong") of Irie et al. 2022, table 2.
"""

import time
from pathlib import Path

from common import arguments, machine, work_folder

import dualstore
from dualstore.datasets import load_idx
from dualstore.training import Phase, Settings, prepare, run_phases

PAPER = {  # layer: target accuracy where the prediction is wrong and right, output accuracy where it is wrong
    0: (17.2, 75.1, 49.5),
    1: (18.0, 78.8, 52.9),
    2: (20.6, 84.7, 60.1),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--store", type=Path, help="keep the store here, or use the one that is there")
    options = parser.parse_args()
    print(machine())
    with work_folder() as folder:
        path = options.store or folder / "store"
        if not (path / "store.json").exists():
            data = prepare(load_idx("mnist", options.data), task="mnist")
            start = time.perf_counter()
            report = run_phases(path, [Phase([data], 5000)], Settings(), progress=lambda done, total: None)
            print(f"recorded in {time.perf_counter() - start:.0f} s; test accuracy {100 * report.accuracy[0]['mnist']:.2f} %")
        store = dualstore.open(path)
        info = store.info()
        print(f"{info['rows']:,} rows, {info['bytes'] / 1e9:.2f} GB")
        assert info["rows"] == 3 * 640_000
        start = time.perf_counter()
        store.build_index()
        size = sum(path.stat().st_size for path in (path / "index").rglob("*.arrow"))
        print(f"index built, or found, in {time.perf_counter() - start:.1f} s; {size / 1e6:.0f} MB")
        start = time.perf_counter()
        votes = {(row["layer"], row["prediction"]): row for row in store.votes()}
        print(
            f"votes of {votes[0, 'right']['probes'] + votes[0, 'wrong']['probes']:,} probes in {time.perf_counter() - start:.0f} s"
        )
        print("layer  target|wrong  target|right  output|wrong   (here - paper, points)")
        for layer, expected in PAPER.items():
            right, wrong = votes[layer, "right"], votes[layer, "wrong"]
            found = [100 * value for value in (wrong["target_accuracy"], right["target_accuracy"], wrong["output_accuracy"])]
            print(f"{layer:5}  " + "  ".join(f"{a:5.1f} ({a - b:+4.1f})" for a, b in zip(found, expected, strict=True)))
            assert abs(found[1] - expected[1]) <= 3
            assert abs(found[0] - expected[0]) <= 6
            assert abs(found[2] - expected[2]) <= 6
        start = time.perf_counter()
        verification = store.verify()
        print(f"verify in {time.perf_counter() - start:.0f} s: ok {verification.ok}; problems {verification.problems}")
        for layer_check in verification.layers:
            print(
                f"  layer {layer_check.layer}: weights {layer_check.weight_residual:.2e}, outputs {layer_check.output_residual:.2e}"
            )
        assert verification.ok


if __name__ == "__main__":
    main()

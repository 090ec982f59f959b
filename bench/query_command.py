"""How long does `dualstore query` take, process and all, on the demo's store? And does it import torch?"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

from common import arguments, machine, seconds, spread, work_folder


def main() -> None:
    arguments(__doc__).parse_args()
    script = Path(sys.executable).with_name("dualstore")
    with work_folder() as folder:
        store = str(folder / "store")
        subprocess.run([script, "demo", "--store", store], check=True, capture_output=True)
        query = [script, "query", "--store", store, "--test-id", "42", "--layer", "1", "--top", "20"]
        times = seconds(lambda: subprocess.run(query, check=True, capture_output=True), runs=15)
        bare = seconds(lambda: subprocess.run([sys.executable, "-c", "import numpy, pyarrow.parquet"], check=True), runs=15)
        found = subprocess.run(
            [*query], check=True, capture_output=True, env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}, text=True
        )
        imported = {
            line.split("|")[-1].strip().split(".")[0] for line in found.stderr.splitlines() if line.startswith("import time:")
        }
        assert "numpy" in imported
        assert not {"torch", "duckdb", "polars"} & imported, imported
        print(machine())
        print(f"dualstore query: {spread(times)} s whole process; importing numpy and pyarrow alone: {spread(bare)} s")
        print(f"ratio {statistics.median(times) / statistics.median(bare):.2f}; torch, duckdb and polars are not imported")


if __name__ == "__main__":
    main()

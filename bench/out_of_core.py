"""Does a query over the 10 GB store of the paper's MNIST run work in 1 GB of memory?

Runs the same queries outside and inside a memory cgroup (v1 or v2) of 1 GB and asserts that the answers are equal.
Making a cgroup needs root; where it cannot be made the benchmark says so and stops.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from common import arguments, drop_cache, machine, make_cgroup, mnist_run, work_folder

LIMIT = 1 << 30

QUESTIONS = """
import json, sys, dualstore
store = dualstore.open(sys.argv[1])
out = [store.query(test_id=[0, 1, 2, 3], layer=layer, top=20).to_dicts() for layer in (0, 1, 2)]
out.append(store.query(test_id=42, layer=1, top=3, per="label", where="epoch >= 2").to_dicts())
out.append(store.totals(test_id=42, layer=2, by="label").to_dicts())
print(json.dumps(out))
print(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1], file=sys.stderr)
"""


def ask(store: Path, group: Path | None) -> tuple[str, int, float]:
    """The answers, the anonymous memory at the end in KiB, and wall seconds."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    start = time.perf_counter()
    found = subprocess.run(
        [sys.executable, "-c", QUESTIONS, str(store)], capture_output=True, text=True, check=True, preexec_fn=enter
    )
    return found.stdout, int(found.stderr.split()[-1]), time.perf_counter() - start


def main() -> None:
    parser = arguments(__doc__, store=True)
    options = parser.parse_args()
    group = make_cgroup(LIMIT)
    if group is None:
        print("skipped: no memory cgroup can be made here (needs root and cgroup v1 or v2 with the memory controller)")
        return
    try:
        with work_folder() as folder:
            store = mnist_run(options, folder)
            parts = sorted((store / "patterns").rglob("*.parquet"))
            size = sum(path.stat().st_size for path in parts)
            print(machine(), f"log {size / 1e9:.2f} GB, limit {LIMIT / 1e9:.2f} GB")
            free, free_memory, free_wall = ask(store, None)
            drop_cache(parts)
            bounded, memory, wall = ask(store, group)
            assert json.loads(free) == json.loads(bounded), "answers differ"
            print(f"equal answers; in the cgroup: {wall:.1f} s cold, anonymous memory {memory / 1024:.0f} MiB")
            print(f"without it: {free_wall:.1f} s, anonymous memory {free_memory / 1024:.0f} MiB")
            peak = next((f for f in (group / "memory.max_usage_in_bytes", group / "memory.peak") if f.exists()), None)
            if peak is not None:
                print(f"peak of the cgroup, page cache included: {int(peak.read_text()) / 1e9:.2f} GB")
    finally:
        group.rmdir()


if __name__ == "__main__":
    main()

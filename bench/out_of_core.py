"""Does a query over the 10 GB store of the paper's MNIST run work in 1 GB of memory?

Runs the same queries outside and inside a memory cgroup (v1 or v2) of 1 GB and asserts that the answers are equal.
Making a cgroup needs root; where it cannot be made the benchmark says so and stops.
"""

import json
from pathlib import Path

from common import arguments, drop_cache, machine, memory_cgroup, mnist_run, run_python, work_folder

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
    answers, memory, wall = run_python(group, QUESTIONS, str(store))
    return answers, int(memory.split()[-1]), wall


def main() -> None:
    options = arguments(__doc__, store=True).parse_args()
    with memory_cgroup(LIMIT) as group, work_folder() as folder:
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


if __name__ == "__main__":
    main()

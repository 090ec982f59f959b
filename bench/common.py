"""What the benchmarks share: the machine in words, medians, temporary folders, dropping files from the page cache."""

import argparse
import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def machine() -> str:
    """The machine in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ""
    )
    return f"{os.cpu_count()} cores {model or platform.machine()}, {memory:.0f} GiB, Python {platform.python_version()}"


def seconds(
    work: Callable[[], object], runs: int = 5, warm: bool = True, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Wall seconds of several runs, after one that is not counted if `warm`; `before` runs uncounted before each."""
    if warm:
        work()
    times = []
    for _ in range(runs):
        before()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def spread(times: list[float], unit: float = 1.0) -> str:
    """Median and range."""
    return f"{statistics.median(times) * unit:.4g} ({min(times) * unit:.4g}..{max(times) * unit:.4g})"


@contextlib.contextmanager
def work_folder(given: Path | None = None) -> Iterator[Path]:
    """A folder for stores that is removed at the end; `given` is kept."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="dualstore-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def drop_cache(paths: list[Path]) -> None:
    """Writes files back and takes them out of the page cache; they must not be mapped."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    return next(
        int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    )


def arguments(description: str | None, *, store: bool = False) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks of the MNIST run share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=None, help="folder with the IDX files; also $DUALSTORE_DATA")
    if store:
        parser.add_argument("--store", type=Path, help="a store of the MNIST run; by default it is recorded first")
    return parser


def mnist_run(options: argparse.Namespace, folder: Path) -> Path:
    """The store of the paper's MNIST run that `--store` names, or one recorded now."""
    path: Path = options.store or folder / "store"
    if not (path / "store.json").exists():
        from dualstore.experiments.images import PLANS, phases_of, run_phases

        plan = PLANS["mnist"]
        run_phases(path, phases_of(plan, plan.settings, options.data), plan.settings, progress=lambda done, total: None)
    return path


@contextlib.contextmanager
def memory_cgroup(size: int) -> Iterator[Path]:
    """A new memory cgroup (v1 or v2) of so many bytes; ends the benchmark where none can be made."""
    group = _make_cgroup(size)
    if group is None:
        raise SystemExit("skipped: no memory cgroup can be made here (needs root and cgroup v1 or v2 with the memory controller)")
    try:
        yield group
    finally:
        group.rmdir()


def run_python(group: Path | None, program: str, *words: str) -> tuple[str, str, float]:
    """Output, errors and wall seconds of a Python program, in a cgroup if one is given."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    start = time.perf_counter()
    command = [sys.executable, "-c", program, *words]
    found = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=enter)
    return found.stdout, found.stderr, time.perf_counter() - start


def _make_cgroup(size: int) -> Path | None:
    for root, limit in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        group = root / f"dualstore-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(size))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    return None

"""Stores that several processes wrote, each its own parts and its own `rank-R.json` (rank 0: `store.json`), read as one.

The processes never wait for each other: what they could get into each other's way with carries the rank in its name, or, as
the codes of tasks, in its value.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path

from dualstore.errors import DamagedError, StoreError
from dualstore.log import Log
from dualstore.schema import Layer, PartName, Status, StoreInfo
from dualstore.steps import Steps

__all__ = ["contradiction", "endings", "in_the_way", "joined", "read_ranks", "shares", "tasks_by_code"]

Infos = Sequence[StoreInfo | None]
"""What each rank says of itself; None for one that has not begun."""

_SAME = ("format", "ranks", "dtype", "optimizer", "exact", "blocks")
_FOLDERS = ("patterns", "steps", "samples", "probes", "blocks")


def read_ranks(path: Path) -> tuple[StoreInfo | None, ...]:
    """What each rank of the store at `path` says of itself, None where it has not begun.

    Raises StoreError where rank 0 has not, DamagedError where they contradict each other.
    """
    first = StoreInfo.read(path)
    found: list[StoreInfo | None] = [first]
    for rank in range(1, first.ranks):
        file = path / StoreInfo.file_name(rank)
        found.append(StoreInfo.read(path, rank) if file.is_file() else None)
        if problem := contradiction(first, found[-1] or first):
            raise DamagedError(f"{file}: {problem}")
    return tuple(found)


def contradiction(first: StoreInfo, other: StoreInfo) -> str:
    """In what another rank is not of the training that rank 0 is of; "" for nothing."""
    for name in _SAME:
        if getattr(first, name) != getattr(other, name):
            return f"expected {name} {getattr(first, name)!r}, as rank 0 has, found {getattr(other, name)!r}"
    if len(first.layers) != len(other.layers):
        return f"expected {len(first.layers)} layers, as rank 0 has, found {len(other.layers)}"
    differing = (pair for pair in zip(first.layers, other.layers, strict=True) if pair[0] != pair[1])
    return next((_other_layer(*pair) for pair in differing), "")


def _other_layer(first: Layer, other: Layer) -> str:
    name = next(field.name for field in fields(Layer) if getattr(first, field.name) != getattr(other, field.name))
    expected, found = getattr(first, name), getattr(other, name)
    return f"layer {first.number} ({first.name}): expected {name} {expected!r}, as rank 0 has, found {found!r}"


def joined(infos: Infos) -> StoreInfo:
    """What the ranks say together: the store is complete where all are, and being recorded where one is."""
    first = infos[0]
    assert first is not None
    if len(infos) == 1:
        return first
    states = {"recording" if info is None else info.status for info in infos}
    status: Status = "recording" if "recording" in states else "interrupted" if "interrupted" in states else "complete"
    tasks = tuple(dict.fromkeys(name for info in infos if info is not None for name in info.tasks))
    return replace(first, status=status, tasks=tasks, problems=_problems(infos))


def _problems(infos: Infos) -> tuple[str, ...]:
    """What the ranks noticed, each with those that did unless all did."""
    of: dict[str, list[int]] = {}
    for rank, info in enumerate(infos):
        for text in () if info is None else info.problems:
            of.setdefault(text, []).append(rank)
    return tuple(text if len(ranks) == len(infos) else f"{_named(ranks)}: {text}" for text, ranks in of.items())


def tasks_by_code(infos: Infos) -> tuple[str | None, ...]:
    """The name of every task code, None for codes that no rank gives: the i-th name of a rank has the code i * ranks + rank."""
    lists = [() if info is None else info.tasks for info in infos]
    codes = range(max(map(len, lists)) * len(lists))
    found = [(lists[code % len(lists)], code // len(lists)) for code in codes]
    return tuple(names[place] if place < len(names) else None for names, place in found)


def endings(infos: Infos, steps: Steps) -> list[str]:
    """How far each rank has come, in words; nothing for a single one."""
    of: dict[str, list[int]] = {}
    for rank, (info, own) in enumerate(zip(infos, steps.ranks, strict=True) if steps.ranks else ()):
        status = "not begun" if info is None else info.status
        of.setdefault(f"{'at no step' if own.last_step < 0 else f'at step {own.last_step}'} ({status})", []).append(rank)
    return [f"{_named(ranks)} {ending}" for ending, ranks in of.items()]


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def shares(log: Log, ranks: int) -> list[tuple[int, int]]:
    """For each rank the number of its first row in a log, and of the one behind its last."""
    if ranks == 1:
        return [(0, log.rows)]
    rows = [sum(part.rows for part in log.parts if part.rank == rank) for rank in range(ranks)]
    ends = list(accumulate(rows))
    return list(zip([0, *ends], ends, strict=False))


def in_the_way(root: Path, rank: int, info: StoreInfo) -> Path | None:
    """A file at `root` that a rank must not begin to write beside; None where it may.

    A single process wants an empty folder; of several each only bears what the others of the same training write.
    """
    if not root.exists():
        return None
    if not root.is_dir():
        return root
    return next((path for path in sorted(root.iterdir()) if not _of_another(path, rank, info)), None)


def _of_another(path: Path, rank: int, info: StoreInfo) -> bool:
    """Whether a path at the top of a store is what another rank of this training writes."""
    others = [other for other in range(info.ranks) if other != rank]
    if path.name in _FOLDERS:
        return bool(others) and all(_rank_of(file.name) in others for file in path.rglob("*") if file.is_file())
    if path.name == "weights":
        return 0 in others
    for other in others:
        name = StoreInfo.file_name(other)
        if path.name == (f".ballast-{other}.tmp" if other else ".ballast.tmp") or path.name.startswith(f".{name}."):
            return True
        if path.name == name:
            return _goes_on(path.parent, other, info)
    return False


def _rank_of(name: str) -> int:
    """Of the writer of a part, or of one that is under way; -1 for another file."""
    found = PartName.of(name.removeprefix(".").partition(".parquet")[0] + ".parquet")
    return -1 if found.sequence < 0 else found.rank


def _goes_on(root: Path, other: int, info: StoreInfo) -> bool:
    """Whether another rank is recording the same training."""
    try:
        found = StoreInfo.read(root, other)
    except StoreError:
        return False
    return found.status == "recording" and not contradiction(info, found)

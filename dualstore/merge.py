"""One store of what the processes of a training recorded on disks of their own.

Nothing is rewritten: parts carry their rank in their name and the codes of tasks in their rows, so they are linked, or copied
where that cannot be. The index is left to be built afterwards.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_hex

import pyarrow as pa
import pyarrow.parquet as pq

from dualstore.errors import DamagedError, StoreError
from dualstore.joint import join_steps
from dualstore.log import Log
from dualstore.part import sync_directory
from dualstore.ranks import contradiction
from dualstore.schema import BLOCK_COLUMNS, MOST_RANKS, PartName, StoreInfo, pattern_columns, probe_columns
from dualstore.steps import Steps
from dualstore.weights import Tensors

__all__ = ["merge_stores"]


def merge_stores(out: str | Path, folders: Sequence[str | Path]) -> None:
    """Makes one store at `out` of the folders of all ranks, each with one rank or some; they stay as they are.

    Every rank must be there once, be of the same training, and have all of its files; ranks that were killed may be among
    them. What they have flushed is taken, and `dualstore.open` says how far all have come. Files are hard links where both
    places are on one disk. `out` appears whole or not at all.

    Raises StoreError where something does not fit or cannot be written, DamagedError for a file that is not whole.
    """
    out, found = Path(out), [Path(folder) for folder in folders]
    _check_out(out, found)
    ranks = _ranks(found)
    files = [file for rank in range(len(ranks)) for file in _files(ranks[rank], rank)]
    _check_together(ranks)
    made = out.with_name(f".{out.name}.{token_hex(4)}.tmp")
    try:
        for source, name in files:
            _take(source, made / name)
        for folder in [made, *(path for path in made.rglob("*") if path.is_dir())]:
            sync_directory(folder)
        os.rename(made, out)
        sync_directory(out.parent)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error.strerror or error}; choose another place") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _check_out(out: Path, folders: Sequence[Path]) -> None:
    """Raises StoreError where nothing may be written at `out`."""
    if not out.name or not out.absolute().parent.is_dir():
        raise StoreError(f"{out}: expected a new folder in one that exists, found none at {out.absolute().parent}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"{out}: expected no folder or an empty one, found other files; choose another path or remove it first")
    within = next((folder for folder in folders if out.resolve().is_relative_to(folder.resolve())), None)
    if within is not None:
        raise StoreError(f"{out}: lies in {within}, which is to stay as it is; choose another path")


def _ranks(folders: Sequence[Path]) -> list[tuple[Path, StoreInfo]]:
    """The folder of each rank, and what the rank says of itself."""
    found: dict[int, tuple[Path, StoreInfo]] = {}
    for folder in folders:
        own = [rank for rank in _described(folder) if (folder / StoreInfo.file_name(rank)).is_file()]
        if not own:
            raise StoreError(f"{folder}: expected what a rank recorded, found neither store.json nor rank-R.json")
        for rank in own:
            if rank in found:
                raise StoreError(f"{folder}: expected each rank once, found rank {rank}, which {found[rank][0]} has, too")
            found[rank] = (folder, StoreInfo.read(folder, rank))
        _check_parts(folder, own)
    count = max(info.ranks for _, info in found.values())
    missing = [rank for rank in range(count) if rank not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StoreError(f"merge: expected the folders of {count} ranks, found none of rank {missing[0]}{more}; give them all")
    ranks = [found[rank] for rank in sorted(found)]
    for rank, (folder, info) in enumerate(ranks):
        if problem := contradiction(ranks[0][1], info):
            raise StoreError(f"{folder / StoreInfo.file_name(rank)}: {problem}; merge the ranks of one training")
    return ranks


def _described(folder: Path) -> list[int]:
    """The ranks whose own file may be in a folder."""
    if not folder.is_dir():
        raise StoreError(f"{folder}: expected the folder that a rank recorded, found none")
    numbers = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.json"))
    return [0, *sorted(int(number) for number in numbers if number.isdecimal() and 0 < int(number) < MOST_RANKS)]


def _check_parts(folder: Path, ranks: Sequence[int]) -> None:
    """Raises StoreError where a part in a folder is of a rank that says nothing of itself there."""
    for path in folder.rglob("part-*.parquet"):
        name = PartName.of(path.name)
        if name.sequence < 0 or name.rank not in ranks:
            raise StoreError(f"{path}: expected parts of {', '.join(StoreInfo.file_name(rank) for rank in ranks)}, found another")


def _files(found: tuple[Path, StoreInfo], rank: int) -> Iterator[tuple[Path, Path]]:
    """The files of a rank, and their names in the store. Raises DamagedError where one is missing or not whole."""
    folder, info = found
    steps = {path.name: path for path in _parts(folder / "steps", rank)}
    counts = {name: Steps.read([path]).rows_per_step(len(info.layers)).sum(axis=0) for name, path in steps.items()}
    for number, layer in enumerate(info.layers):
        place = Path("patterns") / f"layer={layer.number}"
        paths = [path for path in _parts(folder / place, rank) if path.name in steps or info.status == "complete"]
        log = Log(paths, pattern_columns(layer, info.dtype, info.format))
        _check_rows(
            folder, place, {part.path.name: part.rows for part in log.parts}, {n: int(c[number]) for n, c in counts.items()}
        )
        yield from ((part.path, place / part.path.name) for part in log.parts)
        place = Path("probes") / f"layer={layer.number}"
        probes = Log(_parts(folder / place, rank), probe_columns(layer, info.dtype, info.format))
        yield from ((part.path, place / part.path.name) for part in probes.parts)
    blocks = Log(_parts(folder / "blocks", rank), BLOCK_COLUMNS)
    yield from ((part.path, Path("blocks") / part.path.name) for part in blocks.parts)
    for path in _parts(folder / "samples", rank):
        _check_parquet(path)
        yield path, Path("samples") / path.name
    if rank == 0:
        for path in sorted((folder / "weights").glob("[!.]*.safetensors")):
            Tensors(path)
            yield path, Path("weights") / path.name
    yield from ((path, Path("steps") / path.name) for path in steps.values())
    yield folder / StoreInfo.file_name(rank), Path(StoreInfo.file_name(rank))


def _parts(folder: Path, rank: int) -> list[Path]:
    paths = sorted(folder.glob("part-*.parquet"), key=lambda path: PartName.of(path.name))
    return [path for path in paths if PartName.of(path.name).rank == rank]


def _check_rows(folder: Path, place: Path, found: dict[str, int], expected: dict[str, int]) -> None:
    """Raises DamagedError unless the parts of a layer hold the rows that the parts of `steps` of their names speak of."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in expected:
            raise DamagedError(
                f"{folder / place / name}: expected steps/{name} beside it, found none; copy the rank's folder again"
            )
        if found.get(name, 0) != expected[name]:
            wanted = f"expected {expected[name]} rows, as steps/{name} says"
            raise DamagedError(f"{folder / place / name}: {wanted}, found {found.get(name, 0)}; copy the rank's folder again")


def _check_parquet(path: Path) -> None:
    try:
        pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DamagedError(f"{path}: expected a Parquet file, found {reason}; copy it again") from error


def _check_together(ranks: Sequence[tuple[Path, StoreInfo]]) -> None:
    """Raises StoreError where the logs of the ranks are not of one training, or one has steps missing."""
    if len(ranks) == 1:
        return
    paths = [path for rank, (folder, _) in enumerate(ranks) for path in _parts(folder / "steps", rank)]
    steps = join_steps(paths, len(ranks), len(ranks[0][1].layers))
    for rank, (folder, info) in enumerate(ranks):
        own = steps.ranks[rank]
        if own.difference:
            raise StoreError(f"{folder}: {own.difference}; merge the ranks of one training")
        if info.status == "complete" and own.last_step < max(other.last_step for other in steps.ranks):
            raise DamagedError(f"{folder}: expected the last steps of a complete recording, found none after {own.last_step}; "
                               "copy the rank's folder again")  # fmt: skip
    last = min(own.last_step for own in steps.ranks)
    if len(steps.numbers) != last + 1:
        raise DamagedError(f"{ranks[0][0]}: expected every step from 0 to {last} at all ranks, found {len(steps.numbers)}; "
                           "a part of steps is missing, copy the folders again")  # fmt: skip


def _take(source: Path, target: Path) -> None:
    """Makes the file be at another place, too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())

"""Merging: one store of the folders of all ranks, or one clear line and nothing left behind."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from dualstore.cli import commands

import dualstore
from dualstore.errors import DamagedError, DualstoreWarning, StoreError
from dualstore.steps import STEPS_SCHEMA
from dualstore.writer import write_table
from tests.split import split_store, together
from tests.test_ranks import BATCH, answers, assert_same, record

OWNER = np.arange(BATCH) % 2


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("source") / "store", "SGD")


@pytest.fixture
def folders(source: Path, tmp_path: Path) -> list[Path]:
    return split_store(source, tmp_path / "in", OWNER, 2, [{3, 6}, {1, 8}])


def state(*folders: Path) -> dict[Path, bytes]:
    """Every file of some folders."""
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_the_folders_of_all_ranks_become_one_store(source: Path, folders: list[Path], tmp_path: Path) -> None:
    before = state(*folders)
    dualstore.merge_stores(tmp_path / "store", reversed(folders))  # type: ignore[arg-type]
    assert state(*folders) == before
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    assert_same(answers(store), answers(dualstore.open(source)))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_may_hold_several_ranks(source: Path, tmp_path: Path) -> None:
    folders = split_store(source, tmp_path / "in", np.arange(BATCH) % 3, 3)
    node = together(folders[1:], tmp_path / "node")
    dualstore.merge_stores(tmp_path / "store", [folders[0], node])
    assert_same(answers(dualstore.open(tmp_path / "store")), answers(dualstore.open(source)))


def test_a_store_of_a_single_process_is_copied(source: Path, tmp_path: Path) -> None:
    dualstore.merge_stores(tmp_path / "store", [source])
    assert_same(answers(dualstore.open(tmp_path / "store")), answers(dualstore.open(source)))


def test_parts_are_linked_or_copied_where_that_cannot_be(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dualstore.merge_stores(tmp_path / "linked", folders)
    part = Path("patterns/layer=0/part-1-000000.parquet")
    assert (tmp_path / "linked" / part).samefile(folders[1] / part)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    dualstore.merge_stores(tmp_path / "copied", folders)
    assert not (tmp_path / "copied" / part).samefile(folders[1] / part)
    contents = [
        {path.relative_to(tmp_path / name): data for path, data in state(tmp_path / name).items()} for name in ("linked", "copied")
    ]
    assert contents[0] == contents[1]


def test_a_rank_that_was_killed_is_merged_as_far_as_it_came(source: Path, tmp_path: Path) -> None:
    folders = split_store(source, tmp_path / "in", OWNER, 2, [{3, 6}, {2, 5}], {1: 9})
    part = folders[1] / "patterns/layer=0/part-1-000001.parquet"
    shutil.copy(part, part.with_name("part-1-000002.parquet"))  # published, but not yet committed
    dualstore.merge_stores(tmp_path / "store", folders)
    with pytest.warns(
        DualstoreWarning, match="complete up to step 5; rank 0 at step 11 .interrupted.; rank 1 at step 5 .recording."
    ):
        store = dualstore.open(tmp_path / "store")
    assert store.verify(at_step=5).ok
    assert not list(store.path.rglob("*1-000002*"))


def set_info(folder: Path, rank: int, **values: Any) -> None:
    file = folder / ("store.json" if rank == 0 else f"rank-{rank}.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def set_layer(folder: Path, rank: int, **values: Any) -> None:
    layers = json.loads((folder / f"rank-{rank}.json").read_text())["layers"]
    set_info(folder, rank, layers=[layers[0], layers[1] | values])


def rewrite_steps(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    write_table(path, pa.Table.from_pylist(change(pq.ParquetFile(path).read().to_pylist()), STEPS_SCHEMA))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


KEYS = "patterns/layer=1/part-1-000001.parquet"
LOG = "steps/part-1-000001.parquet"
FAULTS: dict[str, tuple[Callable[[list[Path]], Any], str]] = {
    "a rank is missing": (lambda f: f.pop(), "expected the folders of 2 ranks, found none of rank 1; give them all"),
    "rank 0 is missing": (lambda f: f.pop(0), "found none of rank 0"),
    "a rank is there twice": (lambda f: f.append(f[1]), "rank1: expected each rank once, found rank 1, which"),
    "no folder": (lambda f: f.append(f[0] / "none"), "none: expected the folder that a rank recorded, found none"),
    "another folder": (lambda f: f.append(f[0] / "weights"), "weights: expected what a rank recorded, found neither store.json"),
    "another dtype": (lambda f: set_info(f[1], 1, dtype="float32"), "rank-1.json: expected dtype 'float64', as rank 0 has, found"),
    "another optimiser": (lambda f: set_info(f[1], 1, optimizer="Adam"), "expected optimizer 'SGD', as rank 0 has, found 'Adam'"),
    "another format": (lambda f: set_info(f[1], 1, format=2), "expected format 3, as rank 0 has, found 2"),
    "other ranks": (lambda f: set_info(f[1], 1, ranks=3), "expected the folders of 3 ranks, found none of rank 2"),
    "another layer": (lambda f: set_layer(f[1], 1, d_in=7), r"layer 1 \(2\): expected d_in 5, as rank 0 has, found 7"),
    "fewer layers": (lambda f: set_info(f[1], 1, layers=[]), "expected 2 layers, as rank 0 has, found 0"),
    "no json": (lambda f: (f[1] / "rank-1.json").write_text("{"), "rank-1.json: expected a dualstore store.json"),
    "half a part": (lambda f: truncate(f[1] / KEYS), f"{KEYS}: expected a Parquet file"),
    "half a part of steps": (lambda f: truncate(f[1] / LOG), f"{LOG}: expected the columns of a steps part"),
    "half a part of probes": (lambda f: truncate(f[1] / "probes/layer=0/part-1-000002.parquet"), "expected a Parquet file"),
    "half weights": (lambda f: truncate(f[0] / "weights/final.safetensors"), "final.safetensors: expected a safetensors file"),
    "a part is missing": (lambda f: remove(f[1] / KEYS), f"{KEYS}: expected .* rows, as steps/part-1-000001.parquet says, found 0"),
    "a part of steps is missing": (lambda f: remove(f[1] / LOG), "expected steps/part-1-000001.parquet beside it, found none"),
    "the last parts are missing": (
        lambda f: remove(*f[1].glob("patterns/*/part-1-000002.*"), *f[1].glob("steps/part-1-000002.*")),
        "expected the last steps of a complete recording, found none after 8",
    ),
    "parts between are missing": (
        lambda f: remove(*f[1].glob("patterns/*/part-1-000001.*"), *f[1].glob("steps/part-1-000001.*")),
        "expected every step from 0 to 11 at all ranks, found 5",
    ),
    "a part of another rank": (
        lambda f: (f[1] / KEYS).rename(f[1] / KEYS.replace("part-1", "part-5")),
        "part-5-000001.parquet: expected parts of rank-1.json, found another",
    ),
    "another training": (
        lambda f: rewrite_steps(f[1] / LOG, lambda rows: [row | {"lr": 0.2} for row in rows]),
        "rank1: step 2, parameter group 0: lr is 0.1 at rank 0 and 0.2 at rank 1; merge the ranks of one training",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_refused_and_leaves_nothing_behind(folders: list[Path], tmp_path: Path, name: str) -> None:
    fault, match = FAULTS[name]
    all_folders = list(folders)
    fault(folders)
    before = state(*all_folders)
    with pytest.raises(StoreError, match=match) as raised:
        dualstore.merge_stores(tmp_path / "store", folders)
    assert "\n" not in str(raised.value)
    assert state(*all_folders) == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_place_that_is_not_free_is_refused(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    for out, match in (
        (tmp_path / "full", "expected no folder or an empty one, found other files"),
        (tmp_path / "full" / "note", "expected no folder or an empty one"),
        (tmp_path / "no" / "such", "expected a new folder in one that exists"),
        (folders[0] / "store", "lies in .*rank0, which is to stay as it is"),
    ):
        with pytest.raises(StoreError, match=match):
            dualstore.merge_stores(out, folders)
    assert not (folders[0] / "store").exists()
    (tmp_path / "empty").mkdir()
    dualstore.merge_stores(tmp_path / "empty", folders)
    assert dualstore.open(tmp_path / "empty").verify().ok


def test_a_disk_that_is_full_leaves_nothing_behind(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copyfile", refuse)
    with pytest.raises(StoreError, match=r"store: cannot be written: No space left on device; choose another place"):
        dualstore.merge_stores(tmp_path / "store", folders)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_folder_alone_is_no_store_and_says_how_to_make_one(folders: list[Path]) -> None:
    with pytest.raises(StoreError, match=r"rank1: not a store \(it has only rank-1.json, .*\); join .*: dualstore merge"):
        dualstore.open(folders[1])
    with pytest.warns(
        DualstoreWarning, match=r"no step of it is complete; rank 0 at step 11 \(complete\); rank 1 at no step \(not begun\)"
    ):
        assert dualstore.open(folders[0]).last_step == -1


@pytest.mark.parametrize("indexed", [True, False])
def test_the_command_merges_and_builds_the_index(folders: list[Path], tmp_path: Path, *, indexed: bool) -> None:
    words = ["merge", str(tmp_path / "store"), *map(str, folders)]
    found = CliRunner().invoke(commands, words if indexed else [*words, "--no-index"])
    assert found.exit_code == 0, found.output
    assert f"store of 2 folders: {tmp_path / 'store'}" in found.output
    assert (tmp_path / "store" / "index").exists() == indexed
    assert dualstore.open(tmp_path / "store").verify().ok


def test_a_damaged_part_is_damage(folders: list[Path], tmp_path: Path) -> None:
    truncate(folders[1] / KEYS)
    with pytest.raises(DamagedError):
        dualstore.merge_stores(tmp_path / "store", folders)

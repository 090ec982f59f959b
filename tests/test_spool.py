"""Runs of bytes through aligned buffers: what lies in the file is what was appended, whatever happened on the way."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualstore import spool as module
from dualstore.spool import PAGE, Run, Spool


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """An open file and the same file for direct I/O."""
    path = tmp_path / "run"
    plain = os.open(path, os.O_RDWR | os.O_CREAT)
    direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
    yield plain, direct
    os.close(plain)
    os.close(direct)


def never() -> None:
    raise AssertionError("the disk is not full")


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 3 * PAGE), st.integers(0, 100)), max_size=25), runs=st.integers(1, 3))
def test_what_is_appended_and_not_taken_back_is_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]], runs: int
) -> None:
    path = tmp_path_factory.mktemp("spool") / "run"
    plain = os.open(path, os.O_RDWR | os.O_CREAT)
    direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
    spool = Spool(runs, 4 * PAGE * (runs + 3) // 2, never)
    wanted = [b""] * runs
    places = [Run(spool, plain, direct, index * 64 * PAGE) for index in range(runs)]
    for number, (size, back) in enumerate(steps):
        index = number % runs
        data = bytes([number % 251 + 1]) * size
        places[index].append(memoryview(data))
        wanted[index] += data
        if back > 60:  # take some back
            wanted[index] = wanted[index][: len(wanted[index]) * (100 - back) // 40]
            places[index].seek(len(wanted[index]))
    for place in places:
        place.end()
    spool.close()
    for index, expected in enumerate(wanted):
        assert os.pread(plain, len(expected), index * 64 * PAGE) == expected
    os.close(plain)
    os.close(direct)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 3 * PAGE),
    pieces=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=8),
    piece=st.integers(1, 9),
)
def test_rows_are_added_as_their_bytes_would_be_and_seen_on_the_way(
    tmp_path_factory: pytest.TempPathFactory, width: int, pieces: list[tuple[int, bool]], piece: int
) -> None:
    path = tmp_path_factory.mktemp("spool") / "run"
    plain = os.open(path, os.O_RDWR | os.O_CREAT)
    spool = Spool(1, 7 * PAGE, never)
    run, random, wanted, seen = Run(spool, plain, plain, 0), np.random.default_rng(width), b"", b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece * width)
        for count, some in pieces:
            rows = random.integers(0, 256, (2 * count, width), np.uint8)
            kept = np.sort(random.permutation(2 * count)[:count]) if some else None
            wanted += (rows if kept is None else rows[kept]).tobytes()
            seen += b"".join(found.tobytes() for found in run.append_rows(rows, kept))
    run.end()
    spool.close()
    assert seen == wanted
    assert os.pread(plain, len(wanted) + 1, 0) == wanted
    os.close(plain)


def test_buffers_stay_within_the_limit() -> None:
    spool = Spool(10, 1 << 20, never)
    assert spool.total_bytes <= 1 << 20
    assert spool.buffer_bytes % PAGE == 0
    spool.close()


def test_a_full_disk_frees_space_writes_again_and_stops_later_appends(
    file: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[bool] = []
    write = os.pwrite

    def full(descriptor: int, data: memoryview, at: int) -> int:
        if not freed:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr(module.os, "pwrite", full)
    spool = Spool(1, 4 * PAGE, lambda: freed.append(True))
    run = Run(spool, *file, 0)
    run.append(memoryview(b"a" * PAGE))
    spool.wait(run)
    with pytest.raises(OSError, match="No space left"):
        run.append(memoryview(b"b"))
    run.end()
    spool.close()
    assert freed == [True]
    assert os.pread(file[0], 2 * PAGE, 0) == b"a" * PAGE


def test_bytes_that_cannot_be_written_at_all_fail_the_end(file: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, data: memoryview, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    spool = Spool(1, 4 * PAGE, never)
    run = Run(spool, *file, 0)
    monkeypatch.setattr(module.os, "pwrite", broken)
    run.append(memoryview(b"a" * PAGE))
    with pytest.raises(OSError, match="Input/output error"):
        run.end()
    spool.close()


def test_a_file_system_that_refuses_direct_writes_gets_ordinary_ones(
    file: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def refuse(descriptor: int, data: memoryview, at: int) -> int:
        if descriptor == file[1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data, at)

    monkeypatch.setattr(module.os, "pwrite", refuse)
    spool = Spool(1, 4 * PAGE, never)
    run = Run(spool, *file, 0)
    run.append(memoryview(b"a" * (2 * PAGE + 5)))
    run.end()
    spool.close()
    assert os.pread(file[0], 3 * PAGE, 0) == b"a" * (2 * PAGE + 5)

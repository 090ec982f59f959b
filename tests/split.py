"""Stores of several ranks made of one that a single process recorded: the same rows, dealt out."""

import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray
from safetensors.numpy import load_file

from dualstore.schema import Layer, StoreInfo
from dualstore.writer import StoreWriter

VECTORS = {"patterns": ("x", "e"), "probes": ("x", "y", "g")}


def split_store(
    source: Path,
    target: Path,
    owner: ndarray,
    ranks: int,
    flushes: Sequence[Collection[int]] = (),
    killed: dict[int, int] | None = None,
) -> list[Path]:
    """Folders, one a rank, of what the ranks of `source` would have written; the row in place i of a step is of rank owner[i].

    Each rank flushes after the steps of its `flushes`, and names tasks in an order of its own. Those that are `killed` get as
    far as some step and leave behind what was flushed until then.
    """
    info = StoreInfo.read(source)
    steps = _table(source / "steps")
    layers = {layer.number: _table(source / f"patterns/layer={layer.number}") for layer in info.layers}
    folders = []
    for rank in range(ranks):
        folder = target / f"rank{rank}"
        folder.mkdir(parents=True)
        names = info.tasks if rank % 2 == 0 else tuple(reversed(info.tasks))
        writer = StoreWriter(folder, replace(info, status="recording", ranks=ranks, tasks=names), rank=rank)
        writer.write_weights("initial", load_file(source / "weights/initial.safetensors"))
        for step in range(max(steps.column("step").to_pylist(), default=-1) + 1):
            if killed and step > killed.get(rank, step):
                break
            _write_step(writer, info, step, steps, layers, owner, rank)
            if flushes and step in flushes[rank]:
                writer.flush()
        folders.append(_ended(writer, source, info, rank, killed or {}))
    return folders


def together(folders: Sequence[Path], target: Path) -> Path:
    """One folder of what lies in several, as if all had written there."""
    for folder in folders:
        shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


def _table(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.ParquetFile(part).read() for part in sorted(folder.glob("part-*.parquet"))])


def _write_step(
    writer: StoreWriter, info: StoreInfo, step: int, steps: pa.Table, layers: dict[int, pa.Table], owner: ndarray, rank: int
) -> None:
    for layer in info.layers:
        table = layers[layer.number]
        places = np.flatnonzero(table.column("step").to_numpy() == step)
        mine = places[owner[np.arange(len(places)) % len(owner)] == rank]
        if len(mine):
            scalars, vectors = _columns(table.take(pa.array(mine)), "patterns", info, writer.info)
            writer.add_patterns(layer, {name: values for name, values in scalars.items() if name != "step"}, *vectors)
    groups = [row for row in steps.to_pylist() if row["step"] == step]
    own = int((owner == rank).sum())
    writer.end_step([{**{n: v for n, v in row.items() if n not in ("step", "rows")}, "batch_size": own} for row in groups])


def _columns(table: pa.Table, folder: str, info: StoreInfo, own: StoreInfo) -> tuple[dict[str, ndarray], list[ndarray]]:
    """Scalar columns, with the codes of a rank's own list of tasks, and vectors."""
    arrays: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        is_list = pa.types.is_fixed_size_list(column.type)
        arrays[name] = column.flatten().to_numpy().reshape(len(table), -1) if is_list else column.to_numpy()
    places = np.array([*(own.tasks.index(name) for name in info.tasks), -1], np.int32)
    arrays["task"] = places[arrays["task"]]
    vectors = [np.ascontiguousarray(arrays.pop(name)) for name in VECTORS[folder]]
    return arrays, vectors


def _ended(writer: StoreWriter, source: Path, info: StoreInfo, rank: int, killed: dict[int, int]) -> Path:
    """The folder of a rank that has come to its end, or was killed."""
    if rank in killed:
        writer.wait()
        left = writer.root.with_name(f"{writer.root.name}-left")
        shutil.copytree(writer.root, left)  # with what lies under temporary names
        writer.close()
        return left
    for layer in info.layers:
        _write_probes(writer, source, layer, info, rank)
    writer.write_weights("final", load_file(source / "weights/final.safetensors"))
    writer.close()
    writer.save_info(status="interrupted" if killed else "complete")
    return writer.root


def _write_probes(writer: StoreWriter, source: Path, layer: Layer, info: StoreInfo, rank: int) -> None:
    table = _table(source / f"probes/layer={layer.number}")
    mine = np.flatnonzero(np.arange(len(table)) % writer.info.ranks == rank)
    if len(mine):
        scalars, vectors = _columns(table.take(pa.array(mine)), "probes", info, writer.info)
        writer.write_probes(layer, scalars, *vectors)


def status_of(folder: Path, rank: int) -> str:
    """What a rank says it is doing."""
    return str(json.loads((folder / StoreInfo.file_name(rank)).read_text())["status"])

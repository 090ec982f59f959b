"""Going on with a store: at which of its steps the loaded weights are, and whether the rest fits."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy import ndarray
from numpy.typing import NDArray

from dualstore.capture.optimizers import Mark
from dualstore.capture.threads import TorchBulk
from dualstore.errors import DamagedError, RecordError, StoreError
from dualstore.rewind import last_sequence, rewind, written_by
from dualstore.schema import FORMAT, Layer, StoreInfo
from dualstore.shapes import Int64
from dualstore.steps import Steps
from dualstore.weights import Tensors
from dualstore.writer import StoreWriter, remove_left_ballast

__all__ = ["ids_of_last_epoch", "resumed"]


def resumed(
    path: Path, info: StoreInfo, mark: Mark, tensors: Mapping[str, NDArray[Any]], *, rank: int, flush_s: float
) -> tuple[StoreWriter, Steps]:
    """The writer of the store at `path`, cut behind the step that the model is at, and the steps up to there.

    `mark` and `tensors` are those of the model and its optimiser as they are now. Raises RecordError, before anything is
    changed, where the store or the step does not fit.
    """
    try:
        known = StoreInfo.read(path, rank)
        steps = Steps.read(sorted((path / "steps").glob(f"part-{rank}-*.parquet")))
        _check(path, known, info)
        step = _step_of(path, steps, mark, tensors)
        if not remove_left_ballast(path, rank):
            raise RecordError(f"{path}: another process is recording into it; end that first")
        found = StoreWriter(
            path,
            _continued(known, info),
            rank=rank,
            flush_s=flush_s,
            last_step=step,
            sequence=last_sequence(path, rank) + 1,
            bulk=TorchBulk(),
        )
        if rank == 0:
            (path / "weights" / "final.safetensors").unlink(missing_ok=True)
        for left in written_by(path, rank, ".part-{}-*.tmp"):
            left.unlink()
        rewind(path, known, step, rank)
    except (StoreError, DamagedError) as error:
        raise RecordError(f"resume: {error}") from error
    except OSError as error:
        raise RecordError(f"{path}: recording cannot go on: {error.strerror or error}") from error
    return found, Steps.read(sorted((path / "steps").glob(f"part-{rank}-*.parquet")))


def ids_of_last_epoch(path: Path, info: StoreInfo, steps: Steps, rank: int) -> Iterator[Int64[ndarray, " n"]]:
    """The sample ids that a rank has seen in the last epoch of a store, some at a time."""
    if not len(steps.numbers):
        return
    first = int(steps.numbers[np.searchsorted(steps.epochs, steps.epochs[-1])])
    for layer in info.layers:
        for part in sorted((path / "patterns" / f"layer={layer.number}").glob(f"part-{rank}-*.parquet")):
            with pq.ParquetFile(part) as file:
                for batch in file.iter_batches(1 << 16, columns=["step", "sample_id"]):
                    chosen = batch.column("step").to_numpy() >= first
                    yield batch.column("sample_id").to_numpy()[chosen]


def _continued(known: StoreInfo, info: StoreInfo) -> StoreInfo:
    """The old store's notes with this recording's unrecorded parameters."""
    changed = {name: getattr(known, name) for name in ("tasks", "problems", "created", "maker", "mixed", "other")}
    return StoreInfo(**{field.name: getattr(info, field.name) for field in fields(info)} | changed)


def _check(path: Path, known: StoreInfo, info: StoreInfo) -> None:
    """Raises RecordError where the model, its optimiser or the options are not those of the store."""
    if known.format != FORMAT:
        raise RecordError(f"{path}: expected a store of format {FORMAT}, found {known.format}, which cannot be gone on with")
    for name in ("dtype", "optimizer", "ranks", "blocks"):
        if getattr(known, name) != getattr(info, name):
            raise RecordError(f"{path}: {name}: the store has {getattr(known, name)}, found {getattr(info, name)}")
    for number in range(max(len(known.layers), len(info.layers))):
        old, new = (found.layers[number] if number < len(found.layers) else None for found in (known, info))
        if old != new:
            raise RecordError(
                f"{path}: layer {number}: the store has {_shown(old)}, the model {_shown(new)}; the model, its parameter groups or "
                "the layers to record have changed"
            )


def _shown(layer: Layer | None) -> str:
    if layer is None:
        return "none"
    groups = f"groups {layer.weight_group} and {layer.bias_group}, keys {layer.keys}, errors {layer.errors}"
    return f"{layer.name!r} ({layer.kind}, {layer.d_in} to {layer.d_out}, {groups})"


def _step_of(path: Path, steps: Steps, mark: Mark, tensors: Mapping[str, NDArray[Any]]) -> int:
    """The last step after which the weights and the optimiser's state were those of now; -1 for before the first."""
    weights, state = steps.marks()
    same = weights == mark.weights_crc
    whole = np.flatnonzero(same & (state == mark.state_crc))
    if len(whole):
        return int(steps.numbers[whole[-1]])
    if same.any():
        raise RecordError(
            f"{path}: the model's weights are those after step {steps.numbers[np.flatnonzero(same)[-1]]}, but the optimiser's "
            "state is not; load the optimiser's state_dict from the checkpoint, too"
        )
    initial = Tensors(path / "weights" / "initial.safetensors")
    if set(initial) == set(tensors) and all(
        np.array_equal(initial[name], array, equal_nan=True) for name, array in tensors.items()
    ):
        return -1
    last = f"up to step {steps.numbers[-1]}" if len(steps.numbers) else "and it has none"
    raise RecordError(
        f"{path}: the model's weights are those of no step that the store has whole, {last}; load the checkpoint before record(), "
        "and call rec.flush() where you save one"
    )

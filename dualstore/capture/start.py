"""Beginning a store: its folder, and the weights that training starts with."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from dualstore.capture.layers import Found
from dualstore.capture.optimizers import state_of
from dualstore.capture.threads import TorchBulk
from dualstore.errors import RecordError
from dualstore.ranks import in_the_way
from dualstore.schema import StoreInfo
from dualstore.writer import StoreWriter

__all__ = ["new_store", "tensors_of"]


def new_store(path: Path, info: StoreInfo, initial: Mapping[str, NDArray[Any]], rank: int, flush_s: float) -> StoreWriter:
    """The writer of a new store, or of one that other ranks have begun; rank 0 writes the initial weights.

    Leaves nothing behind where that fails.
    """
    fresh = False
    try:
        fresh = not path.exists()
        if in_the_way(path, rank, info) is not None:
            raise RecordError(
                f"{path}: expected no folder or an empty one, found other files; choose another path or remove it first"
            )
        path.mkdir(parents=True, exist_ok=True)
        writer = StoreWriter(path, info, rank=rank, flush_s=flush_s, bulk=TorchBulk())
        try:
            if rank == 0:
                writer.write_weights("initial", initial)
        except OSError:
            writer.close()
            shutil.rmtree(path / "weights", ignore_errors=True)
            (path / "store.json").unlink()
            raise
    except OSError as error:
        if fresh:
            with suppress(OSError):
                path.rmdir()
        raise RecordError(f"{path}: recording cannot start: {error.strerror or error}; free or choose another place") from error
    return writer


def tensors_of(found: Found, optimizers: Sequence[torch.optim.Optimizer], *, with_state: bool) -> dict[str, NDArray[Any]]:
    """Weights and biases of the recorded layers by name, and the optimiser's state of them where there is one already."""
    tensors: dict[str, NDArray[Any]] = {}
    for recorded in found.recorded:
        name = recorded.layer.name
        tensors |= {f"{name}.{kind}": array for kind, array in recorded.tensors(lambda parameter: parameter).items()}
        states = {id(m.parameter): state_of(optimizers, m.parameter) for m in (*recorded.weights, *recorded.biases)}
        for key in sorted({key for state in states.values() for key in state}) if with_state else ():
            state = recorded.tensors(lambda parameter, key=key, states=states: states[id(parameter)].get(key))  # type: ignore[misc]
            tensors |= {f"{name}.{kind}.{key}": array for kind, array in state.items()}
    return tensors

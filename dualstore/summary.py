"""What a store holds, in plain values."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from dualstore.log import Log
from dualstore.probes import scalars
from dualstore.schema import Layer

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["bytes_below", "describe"]


def describe(store: "Store") -> dict[str, Any]:
    """See `Store.info`."""
    info = store.info_file
    layers = [_describe_layer(store, layer) for layer in store.layers]
    probes = store.probes(store.layers[0])
    return {
        "path": str(store.path),
        "format": info.format,
        "status": info.status,
        "created": info.created,
        "dtype": info.dtype,
        "optimizer": info.optimizer,
        "exact": info.exact,
        "steps": len(store.steps.numbers),
        "epochs": len(np.unique(store.steps.epochs)),
        "complete_to_step": store.last_step,
        "ranks": info.ranks,
        "endings": store.endings,
        "rows": sum(layer["rows"] for layer in layers),
        "bytes": bytes_below(store.path),
        "probes": len(np.unique(scalars(probes, "test_id"))),
        "samples": sum(pq.read_metadata(path).num_rows for path in store.part_paths("samples")),
        "tasks": list(info.tasks),
        "blocks": list(info.blocks),
        "unrecorded": list(info.unrecorded),
        "problems": list(info.problems),
        "layers": layers,
    }


def bytes_below(folder: Path) -> int:
    """Of all files in a folder and below; a recording that goes on may rename and remove some meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _describe_layer(store: "Store", layer: Layer) -> dict[str, Any]:
    log, rates = store.patterns(layer), store.rates(layer)
    return {
        "layer": layer.number,
        "name": layer.name,
        "kind": layer.kind,
        "d_in": layer.d_in,
        "d_out": layer.d_out,
        "bias": layer.bias,
        "keys": layer.keys,
        "errors": layer.errors,
        "rows": log.rows,
        "recorded": 1.0 if rates is None else rates.share,
        "parts": len(log.parts),
        "bytes": sum(_size(part.path) for part in log.parts),
        "nonfinite_rows": _nonfinite(log),
    }


def _nonfinite(log: Log) -> int:
    """Keys and errors with NaN or infinity, as their writer counted them."""
    return sum(sum(part.note.get("nonfinite_rows", {}).values()) for part in log.parts)


def _size(path: Path) -> int:
    return path.stat().st_size

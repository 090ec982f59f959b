"""Proving a store against the network it was recorded from."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from dualstore.errors import DualstoreError
from dualstore.keys import units, wide
from dualstore.log import Group, Log
from dualstore.probes import ProbeRows
from dualstore.schema import Layer
from dualstore.sharing import without_errors
from dualstore.weights import Affine, rebuild, replayed, trained

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["LIMITS", "LayerCheck", "Verification", "verify_store"]

_AMPLIFIED = 10
"""How much more rounding may leave where an adaptive optimiser divides by gradients that cancel: measured up to 2."""
LIMITS = {"float16": 3e-3, "float32": 1e-5, "float64": 1e-11}
"""Largest residual of an exact store, by its dtype; what training itself rounds away may be more.

In half precision each key and error is off by up to 2^-12 of itself, which counts more where gradients cancel. Measured on
MNIST, 784-128-10, batches of 128: weights 5e-5 to 7e-5 for plain SGD, 7e-5 to 2.4e-4 with momentum 0.9 or under Adam after
400 steps, 2.7e-4 after 4,000; outputs 1e-4 to 7e-4, and 9e-4.
"""


_MIXED = 2e-2
"""The same where layers multiplied in half precision, which rounds gradients: measured 3e-3 to 4e-3."""


@dataclass(frozen=True)
class LayerCheck:
    """How far the store and the network are apart at one layer."""

    layer: int
    name: str
    rows: int
    weight_residual: float | None
    """|[W b]_trained - [W b]_rebuilt| / |[W b]_trained - [W b]_initial| (Frobenius); None where it cannot be had."""
    output_residual: float | None
    """Largest |y - y_rebuilt| / |y| over the probes recorded after the last step; None without such probes."""
    note: str = ""
    """Why nothing can be proven for the layer, where that is no problem."""
    recorded: float = 1.0
    """Share of the patterns that was recorded; below 1 nothing can be rebuilt."""


@dataclass
class Verification:
    """What `verify_store` found. `problems` is empty and `ok` true for a store that proves itself."""

    ok: bool = True
    layers: list[LayerCheck] = field(default_factory=list)
    rows: int = 0
    """Patterns of all layers."""
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Notes something that is not as it should be, once."""
        self.ok = False
        if text not in self.problems:
            self.problems.append(text)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def verify_store(store: "Store", *, probes: int = 8, until: int | None = None) -> Verification:
    """Checks the whole store; reads every byte of it once or twice.

    For each layer: every step has as many rows as the optimiser's log says, in step order; the checksums of all pages;
    the trained weights against initial weights plus rows, also those of layers that share the weight; recorded outputs of up to
    `probes` probes against W_0 x + bias + sum of contributions. Problems found while recording are repeated. With `until`, the
    memory as it was after that step is checked against the probes recorded then; there are no trained weights of then to
    compare. Of layers without errors nothing but rows and checksums can be checked, which their `note` says. A layer of which
    only a share of the patterns was recorded cannot be proven, which is a problem; its rows are counted.
    """
    found = Verification()
    for problem in store.info_file.problems:
        found.problem(f"while recording: {problem}")
    if len(store.steps.numbers) and not np.array_equal(store.steps.numbers, np.arange(store.last_step + 1)):
        found.problem(f"steps: expected every step from 0 to {store.last_step}, found {len(store.steps.numbers)}")
    for own in store.steps.ranks:
        if own.difference:
            found.problem(f"steps: {own.difference}; ranks of one training have the same")
    for problem in _damage_of_blocks(store):
        found.problem(problem)
    if store.cut and until is None:
        found.problem(f"{', '.join(store.endings)}: the store is complete up to step {store.last_step}, and is checked as of then")
        until = store.last_step
    ranks = store.steps.rows_by_rank(len(store.layers))
    for index, layer in enumerate(store.layers):
        try:
            _verify_layer(store, layer, [counts[:, index] for counts in ranks], probes, found, until)
        except DualstoreError as error:
            found.problem(str(error))
            found.layers.append(LayerCheck(layer.number, layer.name, 0, None, None))
    return found


def _verify_layer(
    store: "Store", layer: Layer, expected: Sequence[ndarray], probes: int, found: Verification, until: int | None
) -> None:
    log = store.patterns(layer)
    found.rows += log.rows
    for problem in [*_count_problems(store, layer, log, expected), *_damage(log), *_damage(store.probes(layer))]:
        found.problem(problem)
    lacking, rates = without_errors(store, layer), store.rates(layer)
    if rates is not None:
        where = f"layer {layer.number} ({layer.name})"
        found.problem(f"{where}: {rates.share:.1%} of the patterns were recorded, from which its weights cannot be proven")
        found.layers.append(LayerCheck(layer.number, layer.name, log.rows, None, None, recorded=rates.share))
        return
    if lacking is not None:
        found.layers.append(LayerCheck(layer.number, layer.name, log.rows, None, None, f"{lacking}: its values cannot be proven"))
        return
    if not store.info_file.exact:  # how far off values would be is shown, and proves nothing
        found.problem(f"values are not exact under {store.info_file.optimizer}; residuals are those of plain SGD")
        store = copy.copy(store)
        store.inexact = True
    try:
        weight, output = _residuals(store, layer, probes, until)
    except DualstoreError as error:
        found.problem(str(error))
        weight, output = None, None
    found.layers.append(LayerCheck(layer.number, layer.name, log.rows, weight, output))
    if not store.info_file.exact:
        return
    limits = _limits(store, layer)
    for kind, residual, limit in zip(("weight", "output"), (weight, output), limits, strict=True):
        if residual is not None and not residual <= limit:
            found.problem(f"layer {layer.number} ({layer.name}): {kind} residual {residual:.3g}, expected at most {limit:.3g}")


def _count_problems(store: "Store", layer: Layer, log: Log, expected: Sequence[ndarray]) -> Iterator[str]:
    """Of rows that are not what the steps log expects of each rank."""
    where = f"layer {layer.number} ({layer.name})"
    numbers = store.steps.numbers
    counts = np.zeros((len(expected), len(numbers)), np.int64)
    rank, last = 0, -1
    for group in log.groups:
        if len(expected) > 1 and group.part.rank != rank:
            rank, last = group.part.rank, -1
        if rank >= len(expected):
            yield f"{group.part.path}: expected parts of ranks 0 to {len(expected) - 1}, found one of rank {rank}"
            continue
        steps = group.part.mapping.array(group, "step")
        if (np.diff(steps) < 0).any() or steps[0] < last:
            yield f"{group.part.path}: row group {group.index}: rows are not in step order; a part may be there twice"
        last = int(steps[-1])
        known = np.isin(steps, numbers)
        if not known.all():
            yield f"{group.part.path}: row group {group.index}: {int((~known).sum())} rows of steps that the optimiser's log lacks"
        np.add.at(counts[rank], np.searchsorted(numbers, steps[known]), 1)
        if group.max_norm is not None and _largest_norm(group) > group.max_norm:
            yield f"{group.part.path}: row group {group.index}: keys are longer than its note of norms says; queries may miss them"
    for rank, (wanted, there) in enumerate(zip(expected, counts, strict=True)):
        wrong = np.flatnonzero(there != wanted)
        if len(wrong):
            first, of = wrong[0], f", rank {rank}" if len(expected) > 1 else ""
            text = f"{where}{of}: step {numbers[first]}: expected {wanted[first]} rows, found {there[first]}"
            yield f"{text}; {len(wrong)} steps differ"


def _largest_norm(group: Group) -> float:
    blocks = group.part.mapping.blocks(group, ["x"], 1024)
    return max(float(np.linalg.norm(block["x"].astype(np.float64), axis=1).max()) for _, block in blocks)


def _damage(log: Log) -> Iterator[str]:
    """Parts whose pages do not match their checksums, or that cannot be read."""
    for part in log.parts:
        try:
            with pq.ParquetFile(part.path, page_checksum_verification=True, memory_map=True) as file:
                for index in range(file.metadata.num_row_groups):
                    for _ in file.iter_batches(1024, row_groups=[index]):
                        pass
        except (pa.ArrowException, OSError) as error:
            yield f"{part.path}: damaged: {str(error).splitlines()[0]}"


def _damage_of_blocks(store: "Store") -> list[str]:
    try:
        return list(_damage(store.block_rows()))
    except DualstoreError as error:
        return [str(error)]


def _residuals(store: "Store", layer: Layer, probes: int, until: int | None) -> tuple[float | None, float | None]:
    """Weight and output residual. Raises DualstoreError where they cannot be had."""
    x, y = _probes_after(store, layer, probes, store.last_step if until is None else until)
    dual, weight = rebuild(store, layer, x, until), None
    if until is None:
        before, after = trained(store, layer, "initial"), trained(store, layer)
        weight = _relative(after.joined - dual.rebuilt.joined, after.joined - before.joined)
    initial = Affine(dual.initial.weight, dual.initial.bias + dual.change.bias)
    outputs = x @ initial.weight.T + initial.bias + dual.outputs
    residuals = [_relative(a - b, b) for a, b in zip(outputs, y, strict=True)]
    return weight, max(residuals, default=None)


def _limits(store: "Store", layer: Layer) -> tuple[float, float]:
    """The largest weight and output residual that do not contradict an exact store.

    Training rounds the weights once a step, by up to half a unit in the last place of each: a random walk of about
    u |W| sqrt(steps), which no memory can explain. It passes 1e-5 of the weights' change in long, slow training. An adaptive
    optimiser makes steps of the same size of gradients whose terms cancel: what rounding left of them counts more.
    """
    kind, dtype = store.info_file.dtype, store.info_file.precision
    more = _AMPLIFIED if replayed(store) and kind != "float16" else 1
    limit = max(more * LIMITS[kind], _MIXED if store.info_file.mixed else 0.0)
    try:
        before, after = trained(store, layer, "initial"), trained(store, layer)
        if store.tensors("final")[f"{layer.name}.weight"].dtype == np.float32:
            dtype, limit = "float32", max(limit, more * LIMITS["float32"])
    except DualstoreError:
        return limit, limit
    walk = float(np.finfo(dtype).eps) / 2 * np.sqrt(len(store.steps.numbers))
    size, change = np.linalg.norm(after.joined), np.linalg.norm(after.joined - before.joined)
    return max(limit, float(2 * walk * size / change)) if change > 0 else limit, max(limit, float(2 * walk))


def _probes_after(store: "Store", layer: Layer, probes: int, step: int) -> tuple[ndarray, ndarray]:
    """X and y, float64, of probes that were recorded after a step and before the next."""
    rows = ProbeRows.of(store.probes(layer))
    rows = rows.select(rows.scalars("step") == step + 1)
    spread = np.unique(np.linspace(0, len(rows.row) - 1, min(probes, len(rows.row))).round().astype(np.int64))
    some = rows.select(spread)
    x, y = wide(some.vectors("x")), some.vectors("y").astype(np.float64)
    x = x if layer.keys == "vector" else units(x, np.arange(layer.d_in), "float64")
    finite = np.isfinite(x).all(1) & np.isfinite(y).all(1)
    return x[finite], y[finite]


def _relative(difference: ndarray, reference: ndarray) -> float:
    size = float(np.linalg.norm(reference))
    error = float(np.linalg.norm(difference))
    return error / size if size > 0 else error

"""From the calls and steps that the hooks see to rows of the store; on the background thread, if there is one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualstore.capture.blocks import BlockCall
from dualstore.capture.choice import Choice
from dualstore.capture.gradients import Audit, Change, common_factor, lost
from dualstore.capture.layers import Found
from dualstore.capture.names import AnyClaim, Names
from dualstore.capture.notes import Notes
from dualstore.capture.optimizers import Mark
from dualstore.capture.taps import Rows, Tap, keys_of, vectors_of
from dualstore.errors import RecordError
from dualstore.schema import BLOCK_COLUMNS, Layer
from dualstore.writer import StoreWriter

__all__ = ["Batch", "Call", "Taken", "Writing"]

_BLOCK_BYTES = sum(column.row_bytes for column in BLOCK_COLUMNS)


@dataclass(slots=True, eq=False)
class Batch:
    """What `Recorder.batch` gives: set `loss` to have it noted with the step."""

    names: Names
    epoch: int
    loss: Any = float("nan")


@dataclass(slots=True)
class Call:
    """One call in training: its input, and whose rows they are."""

    tap: Tap
    batch: Batch
    claims: Sequence[AnyClaim]
    """For each layer of the tap."""
    x: torch.Tensor
    version: int


@dataclass(slots=True)
class Taken:
    """What the optimisers were about to do when a step began."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    changes: dict[int, list[Change]] = field(default_factory=dict)
    """For each layer, what became of its watched gradients; none for those whose optimiser took no step."""
    idle: list[int] = field(default_factory=list)
    idle_bias: list[int] = field(default_factory=list)
    epoch: int = 0
    scales: dict[int, Any] = field(default_factory=dict)
    """By what a fused optimiser divides the gradients of its groups itself, for GradScaler."""

    def forget(self, layer: int) -> None:
        """Takes a layer out, whose optimiser passed the step over."""
        del self.changes[layer]
        self.idle, self.idle_bias = ([number for number in some if number != layer] for some in (self.idle, self.idle_bias))


class Writing:
    """Takes rows as they arrive and makes steps of them. Not for several threads at once."""

    def __init__(
        self, writer: StoreWriter, found: Found, choices: Sequence[Choice], notes: Notes, *, ranks: int, seed: int
    ) -> None:
        self.writer = writer
        self._found, self.choices, self._notes, self._ranks = found, choices, notes, ranks
        self._random = np.random.default_rng([seed, writer.rank])
        self._stored = writer.info.precision
        self._batches: dict[int, list[Batch]] = {layer.number: [] for layer in found.layers}
        """The batches that each layer has rows of in the step under way."""
        self._blocks: list[tuple[Batch, BlockCall]] = []
        """Calls of residual blocks whose errors have arrived since the last step."""
        self._audits: dict[int, Audit] = {}
        self._audited = {layer.number: _audited(found, layer) for layer in found.layers}
        self.mixed = writer.info.mixed
        """Whether an error came in half precision."""
        self._owed = set[int]()
        """Layers with rows that were left out of a step, for their optimiser took none."""
        self._nonfinite_seen = False
        self._row_bytes = {layer.number: writer.row_bytes(layer) for layer in found.layers}
        self.bytes = self._largest = self._pending = 0
        """Written so far, at most; by the step that wrote most; and by the one under way."""

    def write(self, call: Call, error: torch.Tensor, version: int, changes: Mapping[int, list[Change]], audited: bool) -> None:
        """Adds the patterns of one call. `changes` tell, for rows of an earlier backward pass, whether they still count."""
        for tensor, was, what in ((call.x, call.version, "input"), (error, version, "error")):
            if tensor._version != was:
                name = call.tap.layers[0].name
                raise RecordError(
                    f"layer {name!r}: its {what} was changed in place before it was written; make the change on a copy"
                )
        self.add(call.tap.layers, call.claims, call.batch, call.tap.errors(call.x, error), changes, audited)

    def add(
        self,
        layers: Sequence[Layer],
        claims: Sequence[AnyClaim],
        batch: Batch,
        rows: Sequence[Rows],
        changes: Mapping[int, list[Change]],
        audited: bool,
    ) -> None:
        """Adds patterns of several layers, each with its claim and rows."""
        for layer, claim, (keys, errors) in zip(layers, claims, rows, strict=True):
            if layer.number in changes:
                self._earlier(layer, changes[layer.number])
            self.mixed = self.mixed or errors.dtype in (torch.bfloat16, torch.float16)
            x, e = keys_of(keys, layer, self._stored), vectors_of(errors, self._stored)
            if audited:
                self._audit(layer, x, e, errors.dtype)
            kept, columns = self.choices[layer.number].kept(claim.named(), e, claim.each, self._random)
            self.writer.add_patterns(layer, columns, x, e if layer.errors else None, kept)
            self._batches[layer.number].append(batch)
            self._pending += len(e if kept is None else kept) * self._row_bytes[layer.number]

    def add_block(self, batch: Batch, call: BlockCall) -> None:
        """Adds what a residual block did to a batch; it counts if rows of the batch are in the step."""
        self._blocks.append((batch, call))

    @property
    def bytes_after_next(self) -> int:
        """What would be written after one more step like the largest."""
        return self.bytes + self._largest

    def drop_all(self, layers: Sequence[Layer]) -> None:
        """Forgets the rows that some layers have of the step under way."""
        for layer in layers:
            self.drop(layer)

    def drop(self, layer: Layer) -> None:
        """Forgets rows whose gradients were thrown away without a step: their errors never reached the weights."""
        self.writer.drop_patterns(layer)
        self._batches[layer.number].clear()
        self._audits.pop(self._audited[layer.number][0], None)

    def end_step(self, step: int, taken: Taken, mark: Mark, *, recorded: bool) -> None:
        """Makes the rows that have arrived a step."""
        for layer in self._found.layers:
            self._settle(layer, taken.changes.get(layer.number), recorded=recorded)
        for number in list(self._audits):
            self._judge(number, step, taken)
        batches = list({id(batch): batch for some in self._batches.values() for batch in some}.values())
        for some in self._batches.values():
            some.clear()
        self._write_blocks(step, {id(batch) for batch in batches})
        losses = [_number(batch.loss) for batch in batches]
        common = {
            "epoch": max((batch.epoch for batch in batches), default=taken.epoch),
            "batch_size": sum(len(batch.names.ids) for batch in batches),
            "loss": sum(losses) / len(losses) if losses else float("nan"),
            "idle": taken.idle,
            "idle_bias": taken.idle_bias,
            "weights_crc": mark.weights_crc,
            "state_crc": mark.state_crc,
        }
        if not all(choice.share == choice.every == 1 for choice in self.choices):
            common["rates"] = [choice.rate if recorded else 0.0 for choice in self.choices]
        for index, group in enumerate(taken.groups):
            group |= common | self._clip(index, taken)
        self.writer.end_step(taken.groups)
        self.bytes, self._largest, self._pending = self.bytes + self._pending, max(self._largest, self._pending), 0
        for batch in batches:
            batch.names.check_labels(self._notes)
        if self.writer.nonfinite_rows and not self._nonfinite_seen:
            self._nonfinite_seen = True
            self._notes.notice(
                f"NaN or infinity among the recorded keys or errors since step {step}; such rows are stored and counted"
            )

    def _write_blocks(self, step: int, batches: Collection[int]) -> None:
        """Writes what blocks did to the batches of a step; what they did to others was thrown away with these."""
        calls, self._blocks = self._blocks, []
        for batch, call in calls:
            if id(batch) in batches:
                self.writer.write_blocks(call.columns(step, probed=False))
                self._pending += len(call.names.ids) * _BLOCK_BYTES

    def _settle(self, layer: Layer, changes: list[Change] | None, *, recorded: bool) -> None:
        """Drops rows that were thrown away, and notes a gradient that has none."""
        there = bool(self._batches[layer.number])
        if changes is None:
            if there:  # they will be thrown away, or count in a later step, for which they are not kept
                self.drop(layer)
                self._owed.add(layer.number)
        elif there and lost(changes):
            self.drop(layer)
        elif layer.number in self._owed and changes[0].products[0] > 0:
            self._miss(layer)
        elif not there and recorded and changes[0].products[0] > 0 and not self._shared(layer):
            self._notes.problem(
                f"layer {layer.name!r} has a gradient but its forward pass was not seen; its values will not be exact"
            )

    def _shared(self, layer: Layer) -> bool:
        """Whether another layer, of the same weight, has rows."""
        place = layer.weight_places[0].parameter
        return any(self._batches[other.number] for other in self._found.layers if other.weight_places[0].parameter == place)

    def _earlier(self, layer: Layer, changes: list[Change]) -> None:
        """Settles what an earlier backward pass has brought, now that another one begins."""
        if lost(changes):
            self.drop(layer)
        elif layer.number in self._owed:
            self._miss(layer)
        self._owed.discard(layer.number)

    def _miss(self, layer: Layer) -> None:
        self._owed.discard(layer.number)
        self._notes.problem(
            f"layer {layer.name!r}: a gradient from before a step of another optimiser counts in a later one; its rows are "
            "missing, its values will not be exact"
        )

    def _audit(self, layer: Layer, x: NDArray[Any], e: NDArray[Any], dtype: torch.dtype) -> None:
        """Adds rows to what the weight's watched elements are compared with."""
        number, shape, columns, turned = self._audited[layer.number]
        if number not in self._audits:
            self._audits[number] = Audit(shape)
        self._audits[number].add(x[:, columns] if x.ndim == 2 and not turned else x, e, dtype, turned=turned)

    def _judge(self, number: int, step: int, taken: Taken) -> None:
        audit, changes = self._audits.pop(number), taken.changes.get(number)
        left = 0.0 if changes is None else audit.left(changes[0])
        if left > 0:
            self._notes.problem(
                f"layer {self._found.layers[number].name!r}: {100 * left:.3g} % of its gradient at step {step} does not come "
                "from recorded rows: a penalty on the weight in the loss, a hook that changes gradients, or the weight is "
                "used outside the layer's forward pass; its values will not be exact",
                once=("audit", number),
            )

    def _clip(self, group: int, taken: Taken) -> dict[str, Any]:
        """Number and clip factor of a parameter group."""
        mine = []
        for layer in self._found.layers:
            changes = taken.changes.get(layer.number, [])
            mine += [change for of, change in zip((layer.weight_group, layer.bias_group), changes, strict=False) if of == group]
        factor, edited = common_factor(mine)
        if edited:
            self._notes.problem(
                f"gradients of parameter group {group} were changed before the step other than by one factor; "
                "values will not be exact"
            )
        scale = taken.scales.get(group)
        return {"group": group, "clip": (factor if scale is None else factor / float(scale)) / self._ranks}


def _audited(found: Found, layer: Layer) -> tuple[int, tuple[int, int], slice, bool]:
    """Number of the layer whose weight is watched, its shape, the columns of it, and whether this layer has it turned round."""
    mine = found.recorded[layer.number].weights[0]
    for recorded in found.recorded[: layer.number]:
        other = recorded.weights[0]
        if other.parameter is mine.parameter and other.place.rows == mine.place.rows:
            return recorded.layer.number, _shape(recorded.weights[0]), slice(None), other.place.transposed != mine.place.transposed
    shape = _shape(mine)
    return layer.number, shape, slice(0, shape[1]), False


def _shape(matrix: Any) -> tuple[int, int]:
    rows, columns = matrix.of(matrix.parameter).shape
    return int(rows), int(columns)


def _number(loss: Any) -> float:
    try:
        return float("nan") if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"batch.loss: expected one number, found {loss!r}; recording has stopped") from error

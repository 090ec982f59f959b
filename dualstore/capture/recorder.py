"""The recorder: hooks that take a layer's input on the way forward and its error on the way back, step by step."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from dualstore.capture.background import Inline, begin_work
from dualstore.capture.blocks import Block, BlockCall, BlockWatch, Norms, find_blocks
from dualstore.capture.choice import Choice
from dualstore.capture.compiled import forget_compiled
from dualstore.capture.estimate import Estimate
from dualstore.capture.functional import LinearWatch, Use, slow_path
from dualstore.capture.gradients import Change, GradientWatch, Matrix
from dualstore.capture.layers import Chosen, Found, Recorded, find_layers
from dualstore.capture.names import AnyClaim, EpochCounter, Names, Sampled, TaskCodes
from dualstore.capture.notes import Notes, warn
from dualstore.capture.optimizers import Mark, is_exact, named
from dualstore.capture.payload import encode_payloads
from dualstore.capture.probe import Probe, source_of
from dualstore.capture.ranks import unwrapped
from dualstore.capture.recurrent import Recurrent
from dualstore.capture.resume import ids_of_last_epoch, resumed
from dualstore.capture.sequences import Arrived, SequenceCall
from dualstore.capture.settings import Settings
from dualstore.capture.start import new_store, tensors_of
from dualstore.capture.stepping import Stepper
from dualstore.capture.taps import ProjectionTap, Tap
from dualstore.capture.writing import Batch, Call, Writing
from dualstore.errors import RecordError, StoreError
from dualstore.schema import Layer, Status, StoreInfo
from dualstore.store import open_store
from dualstore.writer import SAMPLES_SCHEMA, StoreWriter

__all__ = ["Recorder", "record"]

_OPEN: "WeakSet[nn.Module]" = WeakSet()
"""Models that are being recorded."""


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    path: str | Path,
    *,
    layers: Chosen = None,
    keys_only: bool = False,
    dtype: str = "float32",
    share: float | Mapping[str, float] = 1.0,
    every: int = 1,
    positions: Sequence[int] | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
    sampler: Any = None,
    resume: bool = False,
    queue_bytes: int | None = None,
    flush_s: float = 60.0,
    index: bool = True,
    audit_every: int = 50,
    blocks: Chosen = None,
    branch: str | None = None,
    maker: str = "",
) -> "Recorder":
    """Starts recording the training of `model` by `optimizer`, one or several, into a new store at `path`.

    Recorded is every linear map that is trained: nn.Linear, Conv1D of transformers, convolutions, nn.Embedding, nn.LSTM, nn.GRU
    and the projections of nn.MultiheadAttention: one pattern for each row of its input that gets an error. Training stays
    bit-identical. Use it as a context manager, or call `close()` at the end.

    Args:
        layers: which, by names of modules or layers with * and ?, or types of modules; by default all of them.
        keys_only: leave out the errors: attention can be asked, values cannot.
        dtype: of stored keys and errors, "float32", "float64" or "float16", in which errors have a scale of their own each.
        share: of the patterns, drawn at random; one number, or by names of layers.
        every: record one step in so many. With this or a `share`, totals are estimates and weights cannot be rebuilt.
        positions: of longer inputs the places to record, [-1] for the last one.
        seed: of the draw.
        max_bytes: stop recording, training goes on, before the store's patterns take more.
        sampler: the torch DistributedSampler, to have samples marked that it takes twice to fill up.
        resume: go on with the store at `path` from a checkpoint that `model` and `optimizer` have loaded. The step it was
            saved after is found by the weights; later steps that the store has are forgotten.
        queue_bytes: bound of the memory held by steps that wait to be written on a thread of their own; training waits
            beyond it. 0 writes them on the training thread. By default 64 MiB where the model is on an accelerator or PyTorch
            leaves a core free, and 0 where training takes all cores.
        flush_s: a crash loses at most the steps of this many seconds (or of 256 MiB a layer, whichever is less).
        index: whether to build the index when the recording is closed: one more pass over the keys (`Store.build_index`).
        audit_every: at every so many steps, some elements of each layer's gradient are compared with what the recorded rows add
            up to, and the weights with what the optimiser left; what differs makes values inexact: it is warned about once and
            noted in the store. 0 for never.
        blocks: residual blocks, x + f(x), chosen as `layers` are: of each call the norms of its input and of what it adds are
            recorded for every sample, in training and in probes (`Store.stiffness`).
        branch: name of the submodule of each block that computes f, where something else, as a gate, works on what it gives.
        maker: noted in store.json as what wrote the store.

    Raises RecordError where `path` is not empty (or, to resume, holds no store that fits), nothing is to be recorded, or an
    argument is wrong.
    """
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
        raise RecordError(f"optimizer: expected one of torch.optim or several, found {optimizer!r}")
    settings = Settings(
        layers=layers,
        keys_only=keys_only,
        dtype=dtype,
        share=share,
        every=every,
        positions=positions,
        seed=seed,
        max_bytes=max_bytes,
        sampler=sampler,
        resume=resume,
        queue_bytes=queue_bytes,
        flush_s=flush_s,
        index=index,
        audit_every=audit_every,
        blocks=blocks,
        branch=branch,
        maker=maker,
    )
    return Recorder(model, optimizers, Path(path), settings)


class Recorder:
    """A recording under way; made by `dualstore.record`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], path: Path, settings: Settings) -> None:
        settings.check()
        self._rank, self._ranks, self._model = unwrapped(model)
        if self._model in _OPEN:
            raise RecordError("record: this model is being recorded already; close that recording first")
        self._optimizers, self._settings = optimizers, settings
        found = self._found = find_layers(self._model, optimizers, settings.layers, errors=not settings.keys_only)
        if not found.layers:
            raise RecordError("record: expected a model with at least one linear layer that the optimiser trains, found none")
        self._blocks = find_blocks(self._model, settings.blocks, settings.branch)
        choices = [Choice.of(layer, settings.share, settings.every, settings.positions) for layer in found.layers]
        self._sampled = None if settings.sampler is None else Sampled(settings.sampler)
        _warn_unrecorded(found)
        self._epochs = EpochCounter()
        if "torch._dynamo" in sys.modules:
            forget_compiled()
        writer = self._start(path)
        self._tasks = TaskCodes(writer.info.tasks)
        self._notes = Notes(writer.info.problems)
        self._writing = Writing(writer, found, choices, self._notes, ranks=self._ranks, seed=settings.seed)
        self._background = begin_work(settings.queue_bytes, self._model.parameters())
        self._batch: Batch | None = None
        self._probe: Probe | None = None
        self._slots = 0
        """Samples of the step under way."""
        self._step_begun = False
        """Whether errors have arrived since the last step."""
        self._counted: dict[int, int] | None = None
        """Rows of each layer, while they are only counted."""
        self._differentiating = False
        """Whether a forward pass may be recomputed for the loss of a probe, whose layers were seen already."""
        self._closed = self._stopped = False
        self.steps = writer.last_step + 1
        """Optimiser steps taken so far."""
        for name in found.mixed:
            self._notes.problem(
                f"layer {name!r}: modules that share its weight have biases of their own; its bias will not be exact"
            )
        if settings.positions is not None:
            self._notes.problem(
                f"only the positions {list(settings.positions)} of longer inputs are recorded; values are not complete"
            )
        watched = [matrix for recorded in found.recorded for matrix in recorded.watched]
        self._watch = GradientWatch(watched, averaged=self._ranks > 1)
        self._stepper = Stepper(
            self._model,
            found,
            optimizers,
            self._watch,
            self._notes,
            end=self._end_step,
            skip=self._skip_step,
            audited=lambda: self._audited,
        )
        self._hooks = self._hook()
        _OPEN.add(self._model)

    @contextmanager
    def batch(self, sample_id: Any = None, label: Any = None, task: Any = None, epoch: int | None = None) -> Iterator[Batch]:
        """Names the samples of one batch while the model runs on it; put forward and backward inside.

        Args:
            sample_id: (n,) whole numbers, one for each row of the batch; stored as -1 where there are labels only.
            label: (n,) whole numbers, or (n, ...) with one for each position; none are stored as -1. A position with the label
                -100, which losses of torch ignore, is stored where an error reaches it all the same.
            task: one name, or n.
            epoch: by default counted: a new epoch begins with the first id that comes again.

        Raises RecordError for ids of the wrong kind or number, and for what went wrong in writing.
        """
        self._check_open()
        names = Names.check("batch()", sample_id, label, task, self._tasks)
        names.first_slot, self._slots = self._slots, self._slots + len(names.ids)
        names.duplicates = None if self._sampled is None else self._sampled.next(len(names.ids))
        outer, self._batch = self._batch, Batch(names, self._epochs.see(names.ids) if epoch is None else self._epochs.given(epoch))
        try:
            yield self._batch
        finally:
            self._batch = outer

    @contextmanager
    def probe(
        self,
        test_id: Any,
        label: Any = None,
        task: str | Sequence[str] | None = None,
        predicted: Any = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Records each layer's input and output for test examples: the queries to ask later.

        Call the model once inside, on n rows named by `test_id`. `predicted` defaults to the largest element of the
        model's output. A test id that is probed again replaces the earlier probe; what `blocks` did to it then is kept.

        Args:
            loss: a function of the model's output that gives one loss for each row, (n,), say
                `lambda output: cross_entropy(output, labels, reduction="none")`. Its gradient at each layer's output is
                recorded, too: influence needs it. The model's own gradients stay as they are. Without it, the model runs
                without gradients.

        Raises RecordError where ids, rows or losses do not fit. Warns where the model is in training mode.
        """
        self._check_open()
        if self._model.training:
            warn("probe() while the model is in training mode: dropout and batch norm are active; call model.eval() first")
        names = Names.check("probe()", test_id, label, task, self._tasks)
        probe = self._probe = Probe(names, predicted, loss)
        try:
            with slow_path(), torch.set_grad_enabled(loss is not None):
                yield
        finally:
            self._probe = None
        self._differentiating = True
        try:
            probe.differentiate([parameter for parameter in self._model.parameters() if parameter.requires_grad])
        finally:
            self._differentiating = False
        rows = probe.columns(self.steps, self._writing.writer.info.dtype)
        for number, (columns, x, y, g) in rows.items():
            layer = self._found.layers[number]
            self._put(partial(self._writing.writer.write_probes, layer, columns, x, y, g), x.nbytes + 2 * y.nbytes)
        for call in probe.blocks:
            self._put(partial(self._writing.writer.write_blocks, call.columns(self.steps, probed=True)), call.nbytes)

    def samples(self, sample_id: Any, label: Any, payload: Any, task: str | Sequence[str] | None = None) -> None:
        """Stores what a person wants to see of training samples: images (as PNG) or texts. Call it once a sample."""
        self._check_open()
        names = Names.check("samples()", sample_id, label, task, self._tasks)
        payloads = encode_payloads(_shown(payload))
        if len(payloads) != len(names.ids):
            raise RecordError(f"samples(): expected {len(names.ids)} payloads, one for each id, found {len(payloads)}")
        columns = [names.ids, names.tasks, names.labels, [data for data, _ in payloads], [mime for _, mime in payloads]]
        arrays = [pa.array(column, kind.type) for column, kind in zip(columns, SAMPLES_SCHEMA, strict=True)]
        table = pa.table(arrays, schema=SAMPLES_SCHEMA)
        self._put(partial(self._writing.writer.write_samples, table), table.nbytes)

    def estimate(self, *inputs: Any, steps: int | None = None, **named: Any) -> Estimate:
        """What recording will take, from one forward pass on a batch like those of training; says it on standard error.

        The model runs in eval mode without gradients. With `steps`, of the whole training; warns where the disk is too small.
        """
        self._check_open()
        modes = [(module, module.training) for module in self._model.modules()]
        rows = self._counted = {}
        try:
            with torch.no_grad(), slow_path():
                self._model.eval()(*inputs, **named)
        finally:
            self._counted = None
            for module, training in modes:
                module.training = training
        return Estimate.of(self._writing.writer, rows, self._writing.choices, steps)

    def flush(self) -> None:
        """Makes all steps taken so far part of the store; returns when they are on disk."""
        self._check_open()
        self._end_step()
        if self._step_begun:
            raise RecordError("flush(): a step is under way; call it after optimizer.step()")
        self._put(self._flush, 0)
        self._drain()

    def close(self) -> None:
        """Takes the hooks off, writes what is left and the final weights. Raises RecordError where writing failed."""
        self._close("complete")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self._close("interrupted")
        except RecordError as error:
            warn(str(error))  # the error that ends the context says more

    # Hooks

    def _hook(self) -> ExitStack:
        """Looks at calls and steps until it is closed."""
        hooks, found = ExitStack(), self._found
        hooks.callback(self._model.register_forward_hook(self._model_called).remove)
        for module, tap in found.taps:
            hooks.callback(module.register_forward_hook(partial(self._called, tap), with_kwargs=True).remove)
        for module, recorded in found.recurrences.items():
            hooks.callback(module.register_forward_hook(partial(self._recurred, recorded), with_kwargs=True).remove)
        projections = [(one.layer, one.weights[0]) for some in found.projections.values() for one in some]
        if projections:
            watch = LinearWatch([matrix.parameter for _, matrix in projections], partial(self._projected, projections))
            hooks.callback(watch.close)
        BlockWatch(self._blocks, wanted=self._wants_blocks, see=self._block_called).hook(hooks)
        self._stepper.hook(hooks)
        return hooks

    def _called(self, tap: Tap, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        self._see(tap, args[0] if args else next(iter(kwargs.values())), output)

    def _projected(self, projections: Sequence[tuple[Layer, Matrix]], use: Use) -> None:
        """A multiplication inside attention."""
        mine = [(layer, m.place) for layer, m in projections if m.parameter is use.parameter and use.covers(m.place.rows)]
        if mine:
            self._see(ProjectionTap(mine, use), use.x, use.output)

    def _see(self, tap: Tap, x: torch.Tensor, output: torch.Tensor) -> None:
        """A call that gives rows to a tap."""
        if self._differentiating:
            return
        if self._counted is not None:
            self._count(tap.layers, tap.leading(x, output))
        elif self._probe is not None:
            self._probe.see(tap, x, output)
        elif output.requires_grad and self._recording:
            call = None if self._batch is None else self._call(tap, self._batch, x, output)
            source_of(output).register_hook(partial(self._error_arrived, tap, call))

    def _call(self, tap: Tap, batch: Batch, x: torch.Tensor, output: torch.Tensor) -> Call:
        leading = tap.leading(x, output)
        if tap.is_shared(x, leading, len(batch.names.ids)):
            claims = [batch.names.claim_shared(layer.number, layer.name, math.prod(leading)) for layer in tap.layers]
        else:
            claims = [batch.names.claim(layer.number, layer.name, leading) for layer in tap.layers]
        # What autograd did not make belongs to the caller, who may fill the same memory with the next batch, or to the optimiser.
        # Until the error arrives the weight's gradient needs it, too.
        needed = (
            isinstance(self._background, Inline) and self._found.recorded[tap.layers[0].number].weights[0].parameter.requires_grad
        )
        made = not (x if x._base is None else x._base).is_leaf
        taken = x.detach() if made or needed else x.detach().clone()
        return Call(tap, batch, claims, taken, taken._version)

    def _error_arrived(self, tap: Tap, call: Call | None, error: torch.Tensor) -> None:
        if self._closed:
            return  # the forward pass was recorded, the recording has ended since
        changes = self._begin(tap.layers, call)
        assert call is not None
        job = partial(self._writing.write, call, error.detach(), error._version, changes, self._audited)
        self._put(job, _nbytes(call.x) + _nbytes(error))

    def _begin(self, layers: Sequence[Layer], call: Any) -> dict[int, list[Change]]:
        """What became of the gradients of an earlier backward pass, where errors of another one arrive."""
        if call is None:
            raise RecordError(
                f"layer {layers[0].name!r}: a gradient arrived for a forward pass outside batch(); "
                "put it inside `with rec.batch(sample_id=...):`"
            )
        self._end_step()
        self._step_begun = True
        watched = {layer.number: self._found.recorded[layer.number].watched for layer in layers}
        return {
            number: [self._watch.change(matrix) for matrix in some]
            for number, some in watched.items()
            if self._watch.begins(some[0])
        }

    def _recurred(self, recorded: dict[int, Recorded], module: Recurrent, args: Any, kwargs: Any, output: Any) -> None:
        """A call of an LSTM or GRU."""
        call = SequenceCall.of(module, recorded, args, kwargs, output)
        if self._differentiating:
            return
        if self._counted is not None:
            self._count(call.layers, [call.rows])
        elif self._probe is not None:
            call.probe(self._probe)
        elif self._recording:
            claims = None if self._batch is None else call.claims(self._batch.names)
            call.on_error(partial(self._sequence_error, recorded, self._batch, claims))

    def _sequence_error(
        self,
        recorded: dict[int, Recorded],
        batch: Batch | None,
        claims: Sequence[AnyClaim] | None,
        arrived: Arrived,
    ) -> None:
        if self._closed:
            return
        layers = [one.layer for one in recorded.values()]
        changes = self._begin(layers, batch)
        assert batch is not None
        assert claims is not None
        needed = self._audited or any(layer.errors for layer in layers) or batch.names.ignoring  # padding is what has no error
        rows = arrived.rows(errors=needed)
        if not isinstance(self._background, Inline):  # the caller may fill the same memory with the next batch
            given = _memory(arrived.x.data)
            rows = [(keys.clone() if _memory(keys) == given else keys, errors) for keys, errors in rows]
        size = sum(_nbytes(tensor) for pair in rows for tensor in pair)
        self._put(partial(self._writing.add, layers, claims, batch, rows, changes, self._audited), size)

    def _wants_blocks(self) -> bool:
        """Whether calls of residual blocks give rows now."""
        if self._closed or self._differentiating or self._counted is not None:
            return False
        return self._probe is not None or (self._batch is not None and self._recording and torch.is_grad_enabled())

    def _block_called(self, block: Block, norms: Norms, output: torch.Tensor) -> None:
        """A call of a residual block. In training it counts once its error arrives, as that of a layer does."""
        if self._probe is not None:
            self._probe.blocks.append(BlockCall.of(block, norms, self._probe.names, probed=True))
            return
        assert self._batch is not None
        call = BlockCall.of(block, norms, self._batch.names, probed=False)
        add = partial(self._put, partial(self._writing.add_block, self._batch, call), call.nbytes)
        if output.requires_grad:
            source_of(output).register_hook(partial(self._block_error, add))
        else:  # nothing up to here is trained
            add()

    def _block_error(self, add: Callable[[], None], error: torch.Tensor) -> None:
        if not self._closed:
            self._end_step()  # as where a layer's error arrives
            add()

    def _count(self, layers: Sequence[Layer], leading: Sequence[int]) -> None:
        assert self._counted is not None
        for layer in layers:
            self._counted[layer.number] = self._counted.get(layer.number, 0) + math.prod(leading)

    @property
    def _recording(self) -> bool:
        """Whether rows of the step under way are stored."""
        return not self._stopped and self.steps % self._settings.every == 0

    @property
    def _audited(self) -> bool:
        """Whether the step under way is one to be audited."""
        every = self._settings.audit_every
        return every > 0 and self._recording and self.steps // self._settings.every % every == 0

    def _model_called(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._probe is not None:
            self._probe.see_output(output)

    def _end_step(self) -> None:
        """Ends the step of the store that the optimisers have taken, if they have."""
        taken = self._stepper.take()
        if taken is None:
            return
        self._step_begun, self._slots, taken.epoch = False, 0, self._epochs.epoch
        audited = self._audited
        if not self._stopped:
            mark = Mark(self._found.recorded, self._optimizers)
            if audited:
                self._stepper.left = mark
            self._put(partial(self._writing.end_step, self.steps, taken, mark, recorded=self._recording), 0)
        self.steps += 1
        limit = None if self._stopped else self._settings.max_bytes
        if audited or limit:  # what is wrong is said at once, from the first step on
            self._drain()
        if limit and self._writing.bytes_after_next > limit:
            self._stop()

    def _skip_step(self, layers: Sequence[Layer]) -> None:
        """Forgets the rows of layers whose step does not exist."""
        self._step_begun = False
        self._put(partial(self._writing.drop_all, layers), 0)

    def _stop(self) -> None:
        """Ends the recording of steps; the weights of now are those that the store explains."""
        self._stopped = True
        self._notes.notice(
            f"max_bytes: recording has stopped after step {self.steps - 1}, with {self._writing.bytes:,} of "
            f"{self._settings.max_bytes:,} bytes written; training goes on unrecorded"
        )
        final = tensors_of(self._found, self._optimizers, with_state=False)
        self._put(partial(self._write_final, final), 0)
        self._put(self._flush, 0)

    # Ending

    def _flush(self) -> None:
        self._writing.writer.flush()
        self._writing.writer.wait()
        self._save_notes("recording")

    def _close(self, status: Status) -> None:
        if self._closed:
            return
        try:
            self._end_step()
            self._detach()
            self._background.close()
            self._writing.writer.close()
            if not self._stopped:
                self._write_final(tensors_of(self._found, self._optimizers, with_state=False))
            self._save_notes(status)
        except Exception as error:
            raise self._failed(error) from error
        self._notes.say()
        if self._settings.index and status == "complete" and self._ranks == 1:
            try:
                open_store(self._writing.writer.root).build_index()
            except StoreError as error:
                warn(str(error))

    def _write_final(self, tensors: dict[str, NDArray[Any]]) -> None:
        if self._rank == 0:  # all ranks have the same
            self._writing.writer.write_weights("final", tensors)

    def _detach(self) -> None:
        self._closed = True
        _OPEN.discard(self._model)
        self._hooks.close()

    def _failed(self, error: Exception) -> RecordError:
        """Ends the recording after a failed write; the steps before it become part of the store if the disk lets us."""
        self._detach()
        self._background.abandon()
        writer = self._writing.writer
        try:
            writer.close()
            self._save_notes("interrupted")
        except OSError:
            pass  # what was flushed earlier stays readable
        self._notes.say()
        if isinstance(error, RecordError):
            return error
        until = writer.flushed_step
        kept = f"complete up to step {until}" if until >= 0 else "without a complete step"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return RecordError(f"{writer.root}: writing failed: {reason}; recording has stopped, the store stays readable, {kept}")

    def _save_notes(self, status: Any) -> None:
        notes = {"tasks": tuple(self._tasks.names), "problems": tuple(self._notes.problems), "mixed": self._writing.mixed}
        self._writing.writer.save_info(status=status, **notes)

    def _put(self, job: Callable[[], None], size: int) -> None:
        try:
            self._background.put(job, size)
        except Exception as error:
            raise self._failed(error) from error
        self._notes.say()

    def _drain(self) -> None:
        """Waits until everything is written that has been put, and says what was noticed."""
        try:
            self._background.drain()
        except Exception as error:
            raise self._failed(error) from error
        self._notes.say()

    def _check_open(self) -> None:
        if self._closed:
            raise RecordError("the recorder is closed; its store is finished")

    # Starting

    def _start(self, path: Path) -> StoreWriter:
        """The writer of the store, new or to go on with."""
        info = StoreInfo(
            layers=self._found.layers,
            dtype=self._settings.dtype,
            optimizer=named(self._optimizers),
            exact=is_exact(self._optimizers),
            unrecorded=self._found.unrecorded,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            maker=self._settings.maker,
            ranks=self._ranks,
            blocks=tuple(block.name for block in self._blocks),
        )
        tensors = tensors_of(self._found, self._optimizers, with_state=True)
        if not self._settings.resume:
            return new_store(path, info, tensors, self._rank, self._settings.flush_s)
        mark = Mark(self._found.recorded, self._optimizers)
        writer, steps = resumed(path, info, mark, tensors, rank=self._rank, flush_s=self._settings.flush_s)
        for ids in ids_of_last_epoch(path, info, steps, self._rank):
            self._epochs.note(ids)
        self._epochs.epoch = int(steps.epochs[-1]) if len(steps.numbers) else 0
        return writer


def _shown(payload: Any) -> Any:
    """Tensors as numpy sees them."""
    if isinstance(payload, torch.Tensor):
        found = payload.detach().cpu()
        return found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
    return [_shown(item) for item in payload] if isinstance(payload, list | tuple) else payload


def _memory(tensor: torch.Tensor) -> int:
    """Where the memory begins that a tensor is part of."""
    return tensor.untyped_storage().data_ptr()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _warn_unrecorded(found: Found) -> None:
    if found.missing:
        share = f" ({100 * found.share:.3g} % of what is trained)" if found.share else ""
        warn(f"these parameters train but are not recorded: {', '.join(found.missing)}{share}")

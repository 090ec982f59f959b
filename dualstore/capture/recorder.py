"""The recorder: hooks that take a layer's input on the way forward and its error on the way back, step by step."""

import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from dualstore.capture.background import Background, Inline
from dualstore.capture.gradients import Audit, Change, GradientWatch, common_factor, lost, sample_of
from dualstore.capture.layers import Found, find_layers
from dualstore.capture.names import Claim, EpochCounter, Names, TaskCodes
from dualstore.capture.payload import encode_payloads
from dualstore.capture.probe import Probe, source_of, vectors_of
from dualstore.errors import DualstoreWarning, RecordError, StoreError
from dualstore.schema import Layer, Status, StoreInfo
from dualstore.store import open_store
from dualstore.writer import SAMPLES_SCHEMA, StoreWriter

__all__ = ["Recorder", "record"]

QUEUE_BYTES = 64 << 20
_EXACT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


@dataclass(slots=True, eq=False)
class Batch:
    """What `Recorder.batch` gives: set `loss` to have it noted with the step."""

    names: Names
    epoch: int
    loss: Any = float("nan")


@dataclass(slots=True)
class _Call:
    """One call of a layer in training: its input, and whose rows they are."""

    layer: Layer
    batch: Batch
    claim: Claim
    x: torch.Tensor
    version: int


@dataclass(slots=True)
class _Taken:
    """What the optimiser was about to do when its step began."""

    groups: list[dict[str, Any]]
    changes: list[list[Change]]
    """For each layer, what became of its watched gradients."""
    idle: list[int]
    idle_bias: list[int]
    epoch: int
    scale: Any
    """By what a fused optimiser divides the gradients itself, for GradScaler; None where it does not."""


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str | Path,
    *,
    dtype: str = "float32",
    queue_bytes: int | None = None,
    flush_s: float = 60.0,
    index: bool = True,
    audit_every: int = 50,
    maker: str = "",
) -> "Recorder":
    """Starts recording the training of `model` by `optimizer` into a new store at `path`.

    Every nn.Linear that the optimiser trains is recorded: one pattern for each row of its input that gets an error.
    Training stays bit-identical. Use it as a context manager, or call `close()` at the end.

    Args:
        dtype: of stored keys and errors, "float32" or "float64".
        queue_bytes: bound of the memory held by steps that wait to be written on a thread of their own; training waits
            beyond it. 0 writes them on the training thread. By default 64 MiB for a model on an accelerator and 0 for one
            on the CPU, whose cores are busy anyway (bench/recording_overhead.py).
        flush_s: a crash loses at most the steps of this many seconds (or of 256 MiB a layer, whichever is less).
        index: whether to build the index when the recording is closed: one more pass over the keys (`Store.build_index`).
        audit_every: at every so many steps, some elements of each layer's gradient are compared with what the recorded rows add
            up to, and the weights with what the optimiser left; what differs makes values inexact: it is warned about once and
            noted in the store. 0 for never.
        maker: noted in store.json as what wrote the store.

    Raises RecordError where `path` is not empty, nothing is to be recorded, or an argument is wrong.
    """
    return Recorder(
        model,
        optimizer,
        Path(path),
        dtype=dtype,
        queue_bytes=queue_bytes,
        flush_s=flush_s,
        index=index,
        audit_every=audit_every,
        maker=maker,
    )


class Recorder:
    """A recording under way; made by `dualstore.record`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        path: Path,
        *,
        dtype: str,
        queue_bytes: int | None,
        flush_s: float,
        index: bool,
        audit_every: int,
        maker: str,
    ) -> None:
        if dtype not in ("float32", "float64"):
            raise RecordError(f"dtype: expected 'float32' or 'float64', found {dtype!r}")
        for name, value, kinds in (
            ("flush_s", flush_s, (int, float)),
            ("queue_bytes", queue_bytes or 0, int),
            ("audit_every", audit_every, int),
            ("maker", maker, str),
        ):
            if not isinstance(value, kinds) or value != value:
                raise RecordError(f"{name}: expected a {'text' if kinds is str else 'number'}, found {value!r}")
        if audit_every < 0:
            raise RecordError(f"audit_every: expected 0 or more steps, found {audit_every}")
        found = find_layers(model, optimizer)
        if not found.layers:
            raise RecordError("record: expected a model with at least one nn.Linear that the optimiser trains, found none")
        _warn_unrecorded(found)
        self._model, self._optimizer, self._found = model, optimizer, found
        self._dtype, self._index = dtype, index
        self._weights = {number: modules[0].weight for number, modules in found.modules.items()}
        info = StoreInfo(
            layers=found.layers,
            dtype=dtype,
            optimizer=type(optimizer).__name__,
            exact=type(optimizer) in _EXACT,
            unrecorded=found.unrecorded,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            maker=maker,
        )
        self._writer = _new_store(path, info, self._tensors(with_buffers=True), flush_s)
        if queue_bytes is None:
            queue_bytes = 0 if all(weight.device.type == "cpu" for weight in self._weights.values()) else QUEUE_BYTES
        self._background = Background(queue_bytes) if queue_bytes else Inline()
        self._tasks, self._epochs = TaskCodes(), EpochCounter()
        self._batch: Batch | None = None
        self._probe: Probe | None = None
        self._step_begun = False
        """Whether errors have arrived since the last step."""
        self._batches: dict[int, list[Batch]] = {layer.number: [] for layer in found.layers}
        """The batches that each layer has rows of in the step under way; used where rows are written."""
        self._taken: _Taken | None = None
        self._audit_every = audit_every
        self._audits: dict[int, Audit] = {}
        """Of the layers in the step under way, where it is one to be audited; used where rows are written."""
        self._known = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        self._differentiating = False
        """Whether a forward pass may be recomputed for the loss of a probe, whose layers were seen already."""
        self._left_by_step: dict[int, Any] = {}
        """Some elements of each weight as the optimiser left them at the last audited step."""
        self._problems: list[str] = []
        self._noted: set[Any] = set()
        self._notices: deque[str] = deque()
        self._nonfinite_seen = False
        self._closed = False
        self.steps = 0
        """Optimiser steps taken so far."""
        self._watched = [self._watched_of(layer) for layer in found.layers]
        for layer in found.layers:
            biases = {id(module.bias) for module in found.modules[layer.number] if module.bias is not None}
            if len(biases) > 1:
                self._problem(
                    f"layer {layer.name!r}: modules that share its weight have biases of their own; its bias will not be exact"
                )
        self._watch = GradientWatch([p for some in self._watched for p in some])
        self._handles = self._hook()

    @contextmanager
    def batch(self, sample_id: Any, label: Any = None, task: Any = None, epoch: int | None = None) -> Iterator[Batch]:
        """Names the samples of one batch while the model runs on it; put forward and backward inside.

        Args:
            sample_id: (n,) whole numbers, one for each row of the batch.
            label: (n,) whole numbers, or (n, ...) with one for each position; none are stored as -1.
            task: one name, or n.
            epoch: by default counted: a new epoch begins with the first id that comes again.

        Raises RecordError for ids of the wrong kind or number, and for what went wrong in writing.
        """
        self._check_open()
        names = Names.check("batch()", sample_id, label, task, self._tasks)
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
        model's output. A test id that is probed again replaces the earlier probe.

        Args:
            loss: a function of the model's output that gives one loss for each row, (n,), say
                `lambda output: cross_entropy(output, labels, reduction="none")`. Its gradient at each layer's output is
                recorded, too: influence needs it. The model's own gradients stay as they are. Without it, the model runs
                without gradients.

        Raises RecordError where ids, rows or losses do not fit. Warns where the model is in training mode.
        """
        self._check_open()
        if self._model.training:
            _warn("probe() while the model is in training mode: dropout and batch norm are active; call model.eval() first")
        names = Names.check("probe()", test_id, label, task, self._tasks)
        probe = self._probe = Probe(names, predicted, loss)
        try:
            with torch.set_grad_enabled(loss is not None):
                yield
        finally:
            self._probe = None
        self._differentiating = True
        try:
            probe.differentiate([parameter for parameter in self._model.parameters() if parameter.requires_grad])
        finally:
            self._differentiating = False
        rows = probe.columns(self.steps, self._dtype)
        for number, (columns, x, y, g) in rows.items():
            layer = self._found.layers[number]
            self._put(partial(self._writer.write_probes, layer, columns, x, y, g), x.nbytes + 2 * y.nbytes)

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
        self._put(partial(self._writer.write_samples, table), table.nbytes)

    def flush(self) -> None:
        """Makes all steps taken so far part of the store; returns when they are on disk."""
        self._check_open()
        if self._step_begun:
            raise RecordError("flush(): a step is under way; call it after optimizer.step()")
        self._put(self._flush, 0)
        try:
            self._background.drain()
        except Exception as error:
            raise self._failed(error) from error

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
            _warn(str(error))  # the error that ends the context says more

    # Hooks

    def _hook(self) -> list[Any]:
        handles: list[Any] = [self._model.register_forward_hook(self._model_called)]
        for layer in self._found.layers:
            hook = partial(self._layer_called, layer)
            handles += [module.register_forward_hook(hook, with_kwargs=True) for module in self._found.modules[layer.number]]
        handles.append(self._optimizer.register_step_pre_hook(self._before_step))
        handles.append(self._optimizer.register_step_post_hook(self._after_step))
        return handles

    def _layer_called(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        if self._differentiating:
            return
        x: torch.Tensor = args[0] if args else kwargs["input"]
        if self._probe is not None:
            self._probe.see(layer, x, output)
        elif output.requires_grad:
            call = None if self._batch is None else self._call(layer, self._batch, x)
            source_of(output).register_hook(partial(self._error_arrived, layer, call))

    def _call(self, layer: Layer, batch: Batch, x: torch.Tensor) -> _Call:
        claim = batch.names.claim(layer.number, layer.name, x.shape)
        # What autograd did not make belongs to the caller, who may fill the same memory with the next batch. Until the
        # error arrives the weight's gradient needs it, too.
        kept = x.requires_grad or (isinstance(self._background, Inline) and self._weights[layer.number].requires_grad)
        taken = x.detach() if kept else x.detach().clone()
        return _Call(layer, batch, claim, taken, taken._version)

    def _error_arrived(self, layer: Layer, call: _Call | None, error: torch.Tensor) -> None:
        if self._closed:
            return  # the forward pass was recorded, the recording has ended since
        if call is None:
            raise RecordError(
                f"layer {layer.name!r}: a gradient arrived for a forward pass outside batch(); "
                "put it inside `with rec.batch(sample_id=...):`"
            )
        watched = self._watched[layer.number]
        changes = [self._watch.change(parameter) for parameter in watched] if self._watch.begins(watched[0]) else None
        self._step_begun = True
        job = partial(self._write, call, error.detach(), error._version, changes, self._audited)
        self._put(job, _nbytes(call.x) + _nbytes(error))

    @property
    def _audited(self) -> bool:
        """Whether the step under way is one to be audited."""
        return self._audit_every > 0 and self.steps % self._audit_every == 0

    def _model_called(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._probe is not None:
            self._probe.see_output(output)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimiser
        if closure is None:
            self._taken = self._look(optimizer)
            return None

        def looked() -> Any:  # after the step the optimiser may have worked in place on the gradients
            loss = closure()
            self._taken = self._look(optimizer)
            return loss

        return ((args[0], looked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": looked})

    def _look(self, optimizer: torch.optim.Optimizer) -> _Taken:
        for number, left in self._left_by_step.items():
            now = sample_of(self._weights[number])
            if isinstance(now, torch.Tensor):
                same = torch.equal(now.nan_to_num(), left.nan_to_num())
            else:
                same = np.array_equal(now, left, equal_nan=True)
            if not same:
                self._problem(
                    f"layer {self._found.layers[number].name!r}: its weight was changed between steps other than by the optimiser; "
                    "its values will not be exact"
                )
        self._left_by_step.clear()
        if self._audited:
            self._look_for_others(optimizer)
        taken = _Taken(
            groups=[_settings(optimizer, group) for group in optimizer.param_groups],
            changes=[[self._watch.change(parameter) for parameter in some] for some in self._watched],
            idle=[number for number, weight in self._weights.items() if weight.grad is None],
            idle_bias=[
                layer.number for layer, some in zip(self._found.layers, self._watched, strict=True) if some[-1].grad is None
            ],
            epoch=self._epochs.epoch,
            scale=getattr(optimizer, "grad_scale", None),
        )
        self._watch.forget()
        return taken

    def _look_for_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes parameters that have begun to train, or whose gradient stays although they no longer do."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if id(parameter) not in self._known:
                    name = next((n for n, p in self._model.named_parameters() if p is parameter), "a parameter outside the model")
                    self._problem(f"{name} trains since the recording began and is not recorded", once=id(parameter))
        for parameters, layer in zip(self._watched, self._found.layers, strict=True):
            frozen = [not p.requires_grad for p in parameters]
            if any(frozen) and not all(frozen) and any(p.grad is not None and not p.requires_grad for p in parameters):
                self._problem(
                    f"layer {layer.name!r}: a parameter is frozen but keeps its gradient, which the optimiser goes on using; its "
                    "values will not be exact: set the gradient to None"
                )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        taken, self._taken = self._taken, None
        assert taken is not None
        self._step_begun = False
        if _skipped(optimizer):
            for layer in self._found.layers:
                self._put(partial(self._drop, layer), 0)
            return
        if self._audited:
            self._left_by_step = {number: sample_of(weight) for number, weight in self._weights.items()}
        self._put(partial(self._end_step, self.steps, taken), 0)
        self.steps += 1

    # Writing, on the background thread if there is one

    def _write(self, call: _Call, error: torch.Tensor, version: int, changes: list[Change] | None, audited: bool) -> None:
        """Adds the patterns of one call. `changes` tell, for rows of an earlier backward pass, whether they still count."""
        for tensor, was, what in ((call.x, call.version, "input"), (error, version, "error")):
            if tensor._version != was:
                raise RecordError(
                    f"layer {call.layer.name!r}: its {what} was changed in place before it was written; make the change on a copy"
                )
        if changes is not None and lost(changes):
            self._drop(call.layer)
        x, e = vectors_of(call.x, self._dtype), vectors_of(error, self._dtype)
        if audited:
            self._audits.setdefault(call.layer.number, Audit()).add(x, e, error.dtype)
        self._writer.add_patterns(call.layer, call.claim.columns(), x, e)
        self._batches[call.layer.number].append(call.batch)

    def _drop(self, layer: Layer) -> None:
        """Forgets rows whose gradients were thrown away without a step: their errors never reached the weights."""
        self._writer.drop_patterns(layer)
        self._batches[layer.number].clear()
        self._audits.pop(layer.number, None)

    def _end_step(self, step: int, taken: _Taken) -> None:
        for layer, changes in zip(self._found.layers, taken.changes, strict=True):
            if self._batches[layer.number] and lost(changes):
                self._drop(layer)
            elif not self._batches[layer.number] and changes[0].products[0] > 0:
                self._problem(
                    f"layer {layer.name!r} has a gradient but its forward pass was not seen; its values will not be exact"
                )
        for number, audit in self._audits.items():
            left = audit.left(taken.changes[number][0])
            if left > 0:
                self._problem(
                    f"layer {self._found.layers[number].name!r}: {100 * left:.3g} % of its gradient at step {step} does not come "
                    "from recorded rows: a penalty on the weight in the loss, a hook that changes gradients, or the weight is "
                    "used outside the layer's forward pass; its values will not be exact",
                    once=number,
                )
        self._audits.clear()
        batches = list({id(batch): batch for some in self._batches.values() for batch in some}.values())
        for some in self._batches.values():
            some.clear()
        losses = [_number(batch.loss) for batch in batches]
        common = {
            "epoch": max((batch.epoch for batch in batches), default=taken.epoch),
            "batch_size": sum(len(batch.names.ids) for batch in batches),
            "loss": sum(losses) / len(losses) if losses else float("nan"),
            "idle": taken.idle,
            "idle_bias": taken.idle_bias,
        }
        self._writer.end_step([{**common, **group, **self._clip(index, taken)} for index, group in enumerate(taken.groups)])
        if self._writer.nonfinite_rows and not self._nonfinite_seen:
            self._nonfinite_seen = True
            self._notices.append(
                f"NaN or infinity among the recorded keys or errors since step {step}; such rows are stored and counted"
            )

    def _clip(self, group: int, taken: _Taken) -> dict[str, Any]:
        """Number and clip factor of a parameter group."""
        mine = []
        for layer, changes in zip(self._found.layers, taken.changes, strict=True):
            mine += [change for of, change in zip((layer.weight_group, layer.bias_group), changes, strict=False) if of == group]
        factor, edited = common_factor(mine)
        if edited:
            self._problem(
                f"gradients of parameter group {group} were changed before the step other than by one factor; "
                "values will not be exact"
            )
        return {"group": group, "clip": factor if taken.scale is None else factor / float(taken.scale)}

    def _flush(self) -> None:
        self._writer.flush()
        self._writer.wait()
        self._save_notes("recording")

    # Ending

    def _close(self, status: Status) -> None:
        if self._closed:
            return
        self._detach()
        try:
            self._background.close()
            self._writer.close()
            self._writer.write_weights("final", self._tensors(with_buffers=False))
            self._save_notes(status)
        except Exception as error:
            raise self._failed(error) from error
        self._say_notices()
        if self._index and status == "complete":
            try:
                open_store(self._writer.root).build_index()
            except StoreError as error:
                _warn(str(error))

    def _detach(self) -> None:
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._watch.close()

    def _failed(self, error: Exception) -> RecordError:
        """Ends the recording after a failed write; the steps before it become part of the store if the disk lets us."""
        self._detach()
        self._background.abandon()
        try:
            self._writer.close()
            self._save_notes("interrupted")
        except OSError:
            pass  # what was flushed earlier stays readable
        self._say_notices()
        if isinstance(error, RecordError):
            return error
        until = self._writer.flushed_step
        kept = f"complete up to step {until}" if until >= 0 else "without a complete step"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return RecordError(
            f"{self._writer.root}: writing failed: {reason}; recording has stopped, the store stays readable, {kept}"
        )

    def _save_notes(self, status: Any) -> None:
        tasks, problems = tuple(self._tasks.names), tuple(self._problems)
        self._writer.save_info(status=status, tasks=tasks, problems=problems)

    def _put(self, job: Callable[[], None], size: int) -> None:
        try:
            self._background.put(job, size)
        except Exception as error:
            raise self._failed(error) from error
        if self._notices:
            self._say_notices()

    def _check_open(self) -> None:
        if self._closed:
            raise RecordError("the recorder is closed; its store is finished")

    def _problem(self, text: str, once: Any = None) -> None:
        """Notes a problem, one for each `once`, by default one for each text."""
        key = text if once is None else once
        if key not in self._noted:
            self._noted.add(key)
            self._problems.append(text)
            self._notices.append(text)

    def _say_notices(self) -> None:
        """Warns on the training thread of what was noticed on either."""
        while self._notices:
            _warn(self._notices.popleft())

    # What is recorded

    def _watched_of(self, layer: Layer) -> list[torch.Tensor]:
        """The layer's weight, and its bias where that is trained."""
        module = self._found.modules[layer.number][0]
        return [module.weight] if layer.bias_group < 0 else [module.weight, module.bias]

    def _tensors(self, *, with_buffers: bool) -> dict[str, NDArray[Any]]:
        """Weights and biases of the recorded layers by name, and the optimiser's state of them where there is one already."""
        tensors = {}
        for layer in self._found.layers:
            module = self._found.modules[layer.number][0]
            for kind, parameter in (("weight", module.weight), ("bias", module.bias)):
                if parameter is None:
                    continue
                tensors[f"{layer.name}.{kind}"] = _array(parameter)
                for name, value in self._optimizer.state.get(parameter, {}).items() if with_buffers else ():
                    if isinstance(value, torch.Tensor | int | float):
                        tensors[f"{layer.name}.{kind}.{name}"] = _array(torch.as_tensor(value))
        return tensors


def _settings(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of `steps/` that the optimiser's parameter group sets."""
    betas = group.get("betas", (0.0, group.get("alpha", 0.0)))
    return {
        "lr": float(group.get("lr", float("nan"))),
        "momentum": float(group.get("momentum", 0.0)),
        "dampening": float(group.get("dampening", 0.0)),
        "decay": float(group.get("weight_decay", 0.0)),
        "beta1": float(betas[0]),
        "beta2": float(betas[1]),
        "eps": float(group.get("eps", 0.0)),
        "lr_decay": float(group.get("lr_decay", 0.0)),
        "amsgrad": bool(group.get("amsgrad", False)),
        "centered": bool(group.get("centered", False)),
        "decoupled": bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))),
        "nesterov": bool(group.get("nesterov", False)),
        "maximize": bool(group.get("maximize", False)),
    }


def _skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimiser passed the step over because GradScaler found infinity: such a step does not exist."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    wide = tensor.detach().cpu()
    return (wide if wide.dtype in (torch.float32, torch.float64) else wide.float()).contiguous().numpy().copy()


def _number(loss: Any) -> float:
    try:
        return float("nan") if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"batch.loss: expected one number, found {loss!r}; recording has stopped") from error


def _shown(payload: Any) -> Any:
    """Tensors as numpy sees them."""
    if isinstance(payload, torch.Tensor):
        found = payload.detach().cpu()
        return found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
    return [_shown(item) for item in payload] if isinstance(payload, list | tuple) else payload


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _new_store(path: Path, info: StoreInfo, initial: dict[str, NDArray[Any]], flush_s: float) -> StoreWriter:
    """The writer of a new store with its initial weights. Leaves nothing behind where that fails."""
    fresh = False
    try:
        fresh = not path.exists()
        if not fresh and (not path.is_dir() or any(path.iterdir())):
            raise RecordError(
                f"{path}: expected no folder or an empty one, found other files; choose another path or remove it first"
            )
        path.mkdir(parents=True, exist_ok=True)
        writer = StoreWriter(path, info, flush_s=flush_s)
        try:
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


def _warn_unrecorded(found: Found) -> None:
    if found.unrecorded:
        _warn(f"these parameters train but are not recorded: {', '.join(found.unrecorded)}")


def _warn(text: str) -> None:
    warnings.warn(text, DualstoreWarning, stacklevel=3)

"""A recording that the events of a training framework drive: begun, told of batches, flushed and ended by a callback."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from dualstore.capture.recorder import Recorder, record
from dualstore.errors import RecordError

__all__ = ["Driven", "Held"]


class Driven:
    """The recording of one training after another by a framework that calls back.

    Used in a `with` block it stays open behind the training, for probes, and is noted as interrupted where the block ends
    with an error; otherwise it ends with the training.
    """

    def __init__(self, path: str | Path, options: dict[str, Any]) -> None:
        self._path, self._options = Path(path), options
        self._recorder: Recorder | None = None
        self._open: Any = None
        """The context of the batch under way."""
        self._held = False
        self._flush_due = False

    @property
    def recorder(self) -> Recorder:
        """The recording under way. Raises RecordError where there is none."""
        if self._recorder is None:
            raise RecordError(f"{self._path}: no recording is under way; inside `with callback:` it stays open after the training")
        return self._recorder

    @property
    def running(self) -> bool:
        """Whether a recording is under way."""
        return self._recorder is not None

    def begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, resumed: bool) -> None:
        """Starts a recording, or goes on with the store where training goes on from a checkpoint."""
        self.interrupt()
        going_on: dict[str, Any] = {"resume": True} if resumed and (self._path / "store.json").exists() else {}
        self._recorder = record(model, optimizers, self._path, **going_on, **self._options)

    def enter(self, ids: Any, labels: Any, epoch: int) -> Any:
        """Opens a batch and gives it, to have its loss set; one that is open already is left first."""
        self.leave()
        self._open = self.recorder.batch(sample_id=ids, label=labels, epoch=epoch)
        return self._open.__enter__()

    def leave(self) -> None:
        """Leaves the batch under way, if there is one."""
        context, self._open = self._open, None
        if context is not None:
            context.__exit__(None, None, None)

    def flush(self) -> None:
        """Makes the steps so far part of the store; while gradients are being accumulated, as soon as the step is taken."""
        if self._recorder is None:
            return
        self._flush_due = False
        try:
            self._recorder.flush()
        except RecordError:
            if not self._recorder._step_begun:
                raise
            self._flush_due = True

    def flush_if_due(self) -> None:
        """Flushes where that had to wait for the end of a step."""
        if self._flush_due:
            self.flush()

    def finish(self) -> None:
        """Ends the recording, unless a `with` block holds it open."""
        self.leave()
        if not self._held:
            self.close()

    def close(self) -> None:
        """Ends the recording."""
        self.leave()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def interrupt(self, kind: type[BaseException] = RuntimeError, error: BaseException | None = None) -> None:
        """Ends a recording whose training has failed: what it has becomes part of the store, which says so."""
        self.leave()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(kind, error)

    def hold(self) -> None:
        """Keeps the recording open after the training, until `release`."""
        self._held = True

    def release(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends the recording, by the error that a `with` block ended with."""
        self._held = False
        if kind is None:
            self.close()
        else:
            self.interrupt(kind, error)


_Held = TypeVar("_Held", bound="Held")  # what checks types while tests run knows no `Self` here


class Held:
    """What the callbacks of all frameworks have in common: a `with` block holds the recording open behind the training."""

    _driven: Driven

    @property
    def recorder(self) -> Recorder:
        """The recording under way. Raises RecordError where there is none."""
        return self._driven.recorder

    def __enter__(self: _Held) -> _Held:
        self._driven.hold()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._take_off()
        self._driven.release(kind, error, trace)

    def close(self) -> None:
        """Ends the recording as complete; of a training that failed outside of a `with` block, `interrupt` is the right end."""
        self._take_off()
        self._driven.close()

    def interrupt(self) -> None:
        """Ends a recording whose training has failed, outside of a `with` block; the store says that it is interrupted."""
        self._take_off()
        self._driven.interrupt()

    def _take_off(self) -> None:
        """Takes off what the training got from the callback."""

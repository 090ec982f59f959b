"""Recording a `Trainer` of Lightning. Needs the extra `lightning`.

loader = DataLoader(dualstore.indexed(dataset), batch_size=32, shuffle=True)
callback = dualstore.lightning.RecorderCallback("store")
Trainer(max_epochs=3, callbacks=[callback]).fit(module, loader)  # training_step unpacks `x, y, ids = batch`
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dualstore.capture.driven import Driven, Held
from dualstore.capture.ids import ID_KEY
from dualstore.errors import RecordError

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError("dualstore.lightning needs Lightning: pip install 'dualstore[lightning]'") from error

__all__ = ["RecorderCallback"]


class RecorderCallback(Held, Callback):
    """Records what a `Trainer` trains into a store.

    Accumulation, clipping, schedules, validation on the way and checkpoints are as usual: with every checkpoint all steps so far
    become part of the store, and where `fit` goes on from one, the recording does, too. Without a `with` block the recording
    ends with `fit`; in one it stays open for probes.

    Args:
        path: of the store.
        ids: a function of the batch that gives the sample ids of its rows. By default what `dualstore.indexed` put there: the last
            element, or "sample_id".
        labels: a function of the batch that gives the labels of its rows. By default the element before the ids, or "labels" or
            "label", where they are whole numbers.
        options: those of `dualstore.record`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        ids: Callable[[Any], Any] | None = None,
        labels: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self._driven = Driven(path, options)
        self._ids, self._labels = ids or _ids_of, labels or _labels_of
        self._batch: Any = None

    # What the Trainer calls

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Weights and optimiser are ready, a checkpoint is loaded: starts to record."""
        self._driven.begin(pl_module, trainer.optimizers, resumed=trainer.global_step > 0)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Opens the batch."""
        self._batch = self._driven.enter(self._ids(batch), self._labels(batch), trainer.current_epoch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Notes the loss, as it is without accumulation and scaling."""
        if self._batch is not None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()
            self._batch.loss = loss.detach() * (trainer.accumulate_grad_batches / scale)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Leaves the batch."""
        self._batch = None
        self._driven.leave()
        self._driven.flush_if_due()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """There is to be a checkpoint: all steps before it are to be in the store."""
        self._driven.flush()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the recording, unless a `with` block holds it open."""
        self._driven.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training failed: what it has becomes part of the store, which says so."""
        self._driven.interrupt(type(exception), exception)


def _ids_of(batch: Any) -> Any:
    """The ids that `dualstore.indexed` put into a batch."""
    if isinstance(batch, Mapping) and ID_KEY in batch:
        return batch[ID_KEY]
    if isinstance(batch, tuple | list) and len(batch) > 1 and _whole(batch[-1]) and batch[-1].ndim == 1:
        return batch[-1]
    raise RecordError(
        f"RecorderCallback: expected a batch with ids, of a data set in `dualstore.indexed(...)`, found {type(batch).__name__}; "
        "or say where they are: RecorderCallback(..., ids=lambda batch: ...)"
    )


def _labels_of(batch: Any) -> Any:
    """The labels of a batch: one before the ids, or by their key; None where they are no whole numbers."""
    if isinstance(batch, Mapping):
        found = batch.get("labels", batch.get("label"))
    else:
        found = batch[-2] if isinstance(batch, tuple | list) and len(batch) > 2 else None
    return found if _whole(found) else None


def _whole(values: Any) -> bool:
    """Whether these are whole numbers, one a sample or more."""
    kind = getattr(values, "dtype", None)
    return kind is not None and values.ndim > 0 and not kind.is_floating_point and not kind.is_complex

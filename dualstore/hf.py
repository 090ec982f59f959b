"""Recording a `Trainer` of the transformers library, and probes of language models. Needs the extra `hf`.

    with dualstore.hf.RecorderCallback("store") as callback:
        trainer = Trainer(..., callbacks=[callback])
        trainer.train()
        dualstore.hf.probe_tokens(callback.recorder, model, tokens, test_id=range(len(tokens)))

A Trainer removes columns that the model does not know and shows its callbacks no batches. So the ids take a way of their own:
the callback lets the loader's data set say which item it gives and the collate function put the ids beside the batch; a hook
takes them away again just before the model is called.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualstore.capture import Recorder
from dualstore.capture.compiled import outside
from dualstore.capture.driven import Driven, Held
from dualstore.capture.ids import ID_KEY, Indexed, paired
from dualstore.errors import RecordError
from dualstore.schema import IGNORED

try:
    from transformers import TrainerCallback
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError("dualstore.hf needs transformers and accelerate: pip install 'dualstore[hf]'") from error

__all__ = ["RecorderCallback", "probe_tokens"]

LABEL_KEY = "sample_label"
Labels = Callable[[Mapping[str, Any]], Any]


class RecorderCallback(Held, TrainerCallback):
    """Records what a `Trainer` trains into a store; an item's sample_id is its place in the training set.

    An item that is a dict with a key "sample_id" keeps that one. Accumulation, clipping, schedules, evaluation on the way and
    checkpoints are as usual: with every checkpoint all steps so far become part of the store, and where training is resumed
    from one, the recording goes on from there. Without a `with` block the recording ends with `train()`.

    Args:
        path: of the store.
        labels: a function of the collated batch that gives the labels of its rows, (n,) or (n, S). By default they are the
            batch's "labels"; for a causal language model, which is to predict the next token, that token. Positions that are
            padding or count for nothing are -100.
        options: those of `dualstore.record`.
    """

    def __init__(self, path: str | Path, *, labels: Labels | None = None, **options: Any) -> None:
        self._driven, self._labels = Driven(path, options), labels
        self._undo: list[Callable[[], None]] = []
        """What takes everything off again that a training got."""
        self._epoch = -1
        self._ids: Any = None
        self._losses: list[tuple[Any, torch.Tensor, bool]] = []
        """Of the step under way: each batch with its loss, and whether that is a share of the step's."""

    # What the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights, optimiser and data are ready, a checkpoint is loaded: starts to record."""
        self.interrupt()  # of a training that failed
        _check(args)
        model, optimizer, loader = (kwargs[name] for name in ("model", "optimizer", "train_dataloader"))
        loader = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
        labels = self._labels or (_next_tokens if _predicts_next(model) else _labels_of)
        numbered = Indexed(loader.dataset, paired)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # and this
        self._driven.begin(model, [optimizer], resumed=state.global_step > 0)
        self._epoch, self._losses = int(state.epoch or 0) - 1, []
        self._replace(loader, dataset=numbered, collate_fn=_Collate(loader.collate_fn, labels))
        before = model.register_forward_pre_hook(outside(self._before_forward), with_kwargs=True, prepend=True)
        after = model.register_forward_hook(outside(self._after_forward), with_kwargs=True)
        self._undo += [before.remove, after.remove]

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Counts epochs."""
        self._epoch += 1

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The backward pass of a batch is through, others of the same step follow."""
        self._driven.leave()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The last backward pass of a step is through."""
        self._driven.leave()
        for batch, loss, shared in self._losses:  # the step's loss is the mean over batches
            batch.loss = loss * len(self._losses) if shared else loss
        self._losses = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimiser has taken a step."""
        self._driven.flush_if_due()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """There is a checkpoint: all steps before it are to be in the store."""
        self._driven.flush()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the recording with the training where weights of an earlier checkpoint come in its place."""
        if args.load_best_model_at_end and control.should_training_stop:
            self.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the recording, unless a `with` block holds it open."""
        self._take_off()
        self._driven.finish()

    # Hooks

    def _before_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Takes ids and labels out of what the model is given, and opens their batch."""
        ids, labels = kwargs.pop(ID_KEY, None), kwargs.pop(LABEL_KEY, None)
        if not model.training or not torch.is_grad_enabled() or not self._driven.running:
            return args, kwargs
        if ids is None and self._ids is None:
            raise RecordError(
                f"RecorderCallback: the model was trained on a batch without its ids; call it as `model(**inputs)`, with {ID_KEY!r}"
            )
        if ids is not None and ids is not self._ids:
            self._ids = ids
            batch = self._driven.enter(ids, labels, self._epoch)
            self._losses.append((batch, torch.tensor(float("nan")), False))
        return args, kwargs

    def _after_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Notes the loss that the model computes itself."""
        loss = getattr(output, "loss", None)
        if model.training and self._losses and isinstance(loss, torch.Tensor):
            self._losses[-1] = (self._losses[-1][0], loss.detach(), kwargs.get("num_items_in_batch") is not None)

    def _replace(self, loader: Any, **attributes: Any) -> None:
        """Sets attributes of a DataLoader, until the training ends."""
        for name, value in attributes.items():
            # A DataLoader guards its data set against being replaced, for its sampler is made for it: this one is as long.
            self._undo.append(partial(object.__setattr__, loader, name, getattr(loader, name)))
            object.__setattr__(loader, name, value)

    def _take_off(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._ids = None


class _Collate:
    """A collate function that sets ids and labels apart and puts them beside the batch."""

    def __init__(self, collate: Callable[[Any], Any], labels: Labels) -> None:
        self._collate, self._labels = collate, labels

    def __call__(self, items: Sequence[tuple[int, Any]]) -> Any:
        batch = self._collate([item for _, item in items])
        if not isinstance(batch, MutableMapping):
            raise RecordError(f"RecorderCallback: expected a collate function that gives a dict, found {type(batch).__name__}")
        labels = self._labels(batch)
        beside = {ID_KEY: torch.tensor([number for number, _ in items])} | ({} if labels is None else {LABEL_KEY: labels})
        for key, value in beside.items():
            batch[key] = value
        return batch


def _check(args: Any) -> None:
    if args.n_gpu > 1:
        raise RecordError(
            f"RecorderCallback: expected one device a process, found {args.n_gpu}, with a copy of the model on each; "
            "start it with torchrun, or set CUDA_VISIBLE_DEVICES"
        )


def _predicts_next(model: Any) -> bool:
    """Whether the model's loss compares each position with the token that follows."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(plain, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(plain, "loss_type", None) == "ForCausalLM" or type(plain).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _labels_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The batch's own labels, where they are whole numbers: one a sample or one a position."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim not in (1, 2):
        return None
    mask = batch.get("attention_mask")
    if labels.ndim == 2 and isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
        return labels.masked_fill(mask.eq(0), IGNORED)
    return labels


def _next_tokens(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The token behind each position, as a causal language model's loss has it."""
    labels = batch.get("shift_labels")
    if labels is None:
        own = batch.get("labels")
        labels = shifted(own) if isinstance(own, torch.Tensor) and own.ndim == 2 else own
    return _labels_of({**batch, "labels": labels})


def shifted(tokens: torch.Tensor) -> torch.Tensor:
    """(n, S): for each position the token behind it, -100 for the last one."""
    return nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)


def probe_tokens(
    recorder: Recorder,
    model: nn.Module,
    input_ids: torch.Tensor,
    *,
    test_id: Any,
    attention_mask: torch.Tensor | None = None,
    position: Any = None,
    generate: int = 0,
    task: str | Sequence[str] | None = None,
) -> torch.Tensor:
    """Records queries at every position of token sequences, (n, S), and gives the sequences that were asked with.

    The label of a position is the token behind it, `predicted` the model's most likely one. Ask for one of them as
    `store.query(test_id=..., layer=..., position=...)`.

    Args:
        test_id: n whole numbers.
        attention_mask: (n, S), 0 for padding, which is never a label.
        position: whose loss influence is about: one, or one for each sequence; by default the mean over all of them.
        generate: let the model go on by so many tokens first, always the most likely one; without padding.

    The model is in evaluation mode for that. Raises RecordError where shapes do not fit.
    """
    training = model.training
    model.eval()
    try:
        tokens = _continued(model, input_ids, attention_mask, generate)
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        labels = shifted(tokens.masked_fill(mask == 0, IGNORED)).masked_fill(mask == 0, IGNORED)
        asked = _only_at(labels, position)
        with recorder.probe(test_id, label=labels, task=task, loss=lambda output: _mean_loss(output.logits, asked)):
            model(input_ids=tokens, attention_mask=mask)
    finally:
        model.train(training)
    return tokens


@torch.no_grad()
def _continued(model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor | None, count: int) -> torch.Tensor:
    """The sequences with so many tokens more, each the most likely one."""
    if count and mask is not None and bool((mask == 0).any()):
        raise RecordError("probe_tokens(): expected sequences of one length to go on with, found padding; probe them one by one")
    for _ in range(count):
        following = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[:, -1].argmax(-1)
        tokens = torch.cat([tokens, following[:, None]], 1)
    return tokens


def _only_at(labels: torch.Tensor, position: Any) -> torch.Tensor:
    """The labels at one position of each sequence, -100 elsewhere; all of them where none is given."""
    if position is None:
        return labels
    places = torch.as_tensor(position, device=labels.device).expand(len(labels))
    if bool(((places < 0) | (places >= labels.shape[1] - 1)).any()):  # behind the last one there is no token
        raise RecordError(f"probe_tokens(): position: expected 0 to {labels.shape[1] - 2}, found {position!r}")
    here = torch.arange(labels.shape[1], device=labels.device) == places[:, None]
    return labels.masked_fill(~here, IGNORED)


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(n,): the mean cross entropy over the positions of each sequence that have a label."""
    each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return each.view(labels.shape).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)

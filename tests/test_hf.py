"""Trainers of transformers: the rows are those of the same training written out in torch, whatever the Trainer does besides."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

import dualstore
from dualstore.errors import DualstoreWarning, RecordError
from dualstore.hf import RecorderCallback, probe_tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore:these parameters train but are not recorded:dualstore.DualstoreWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
ROWS = 9 * 3 * 10 * 5
"""Nine layers, three epochs, ten sequences; at the last of their positions nothing is to be predicted."""
TOKENS = torch.randint(1, 11, (10, 6), generator=torch.Generator().manual_seed(3))


class Lines(Dataset[dict[str, Any]]):
    """Sequences of one length, with something that no model knows."""

    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": TOKENS[index], "labels": TOKENS[index], "text": f"line {index}"}


def language_model(**settings: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **settings)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    """Three epochs of three steps of two batches of two, the last one smaller; in order, clipped."""
    return TrainingArguments(
        str(folder),
        **{
            "use_cpu": True,
            "num_train_epochs": 3,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
            "lr_scheduler_type": "constant",
            "train_sampling_strategy": "sequential",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **settings,
        },
    )


def trainer_of(
    model: Any, folder: Path, callbacks: Any = (), *, data: Any = None, optimizer: Any = None, **settings: Any
) -> Trainer:
    return Trainer(
        model=model,
        args=arguments(folder, **settings),
        train_dataset=data or Lines(),
        eval_dataset=Lines(),
        callbacks=list(callbacks),
        optimizers=(optimizer, None),
    )


def record_by_hand(model: Any, path: Path, epochs: int = 3) -> None:
    """The same training as an ordinary loop."""
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, path, dtype="float64") as recorder:
        for epoch in range(epochs):
            for step in torch.arange(10).split(4):
                count = torch.tensor(len(step) * 5)
                for rows in step.split(2):
                    labels = torch.cat([TOKENS[rows, 1:], torch.full((len(rows), 1), -100)], 1)
                    with recorder.batch(rows, labels, epoch=epoch) as batch:
                        loss = model(input_ids=TOKENS[rows], labels=TOKENS[rows], num_items_in_batch=count).loss
                        batch.loss = loss.detach() * len(step.split(2))
                        loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


def rows_of(store: dualstore.Store) -> list[list[dict[str, Any]]]:
    """All columns of all patterns, and of all steps."""
    names = "layer, step, sample_id, position, label, x, e"
    patterns = store.sql(f"SELECT {names} FROM patterns ORDER BY layer, step, sample_id, position").to_dicts()
    steps = store.sql("SELECT step, epoch, lr, momentum, clip, batch_size, loss FROM steps ORDER BY step").to_dicts()
    return [patterns, steps]


class Fails(TrainerCallback):
    """Ends the training with an error behind a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise OSError("the power went off")


def test_rows_are_those_of_the_same_training_written_out(tmp_path: Path) -> None:
    record_by_hand(by_hand := language_model(), tmp_path / "hand")
    trainer = trainer_of(model := language_model(), tmp_path / "run", optimizer=None)
    trainer.optimizer = sgd(model)
    trainer.add_callback(RecorderCallback(tmp_path / "store", dtype="float64"))
    trainer.train()
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok, store.verify().problems
    assert rows_of(store) == rows_of(dualstore.open(tmp_path / "hand"))
    assert store.info()["rows"] == ROWS
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_batches_keep_their_ids_where_columns_are_removed(tmp_path: Path, workers: int) -> None:
    callback = RecorderCallback(tmp_path / "store", dtype="float64")
    settings = {"train_sampling_strategy": "random", "dataloader_num_workers": workers}
    if workers:
        settings["dataloader_multiprocessing_context"] = "fork"
    trainer_of(language_model(), tmp_path / "run", [callback], **settings).train()
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    rows = store.sql("SELECT epoch, sample_id, position, label FROM patterns WHERE layer = 0 ORDER BY ALL").to_dicts()
    places = [(epoch, number, position) for epoch in range(3) for number in range(10) for position in range(5)]
    assert [(row["epoch"], row["sample_id"], row["position"]) for row in rows] == places
    assert [row["label"] for row in rows] == [int(TOKENS[number, position + 1]) for _, number, position in places]
    first = store.sql("SELECT min(step) AS step FROM patterns GROUP BY sample_id ORDER BY sample_id").to_dicts()
    assert [row["step"] for row in first] != [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_training_with_the_default_optimiser_stays_as_it_is_and_is_rebuilt(tmp_path: Path) -> None:
    settings = {"lr_scheduler_type": "linear", "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2}
    trainer_of(plain := language_model(), tmp_path / "plain", **settings).train()
    callback = RecorderCallback(tmp_path / "store", dtype="float64")
    trainer_of(model := language_model(), tmp_path / "run", [callback], **settings).train()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    store = dualstore.open(tmp_path / "store")
    assert store.info()["optimizer"] == "AdamW"
    assert store.verify().ok, store.verify().problems


class WatchesFlushes(TrainerCallback):
    """Sees how much of the store another process could read behind each checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with pytest.warns(DualstoreWarning, match="unfinished"):
            self.last.append(dualstore.open(self.path).last_step)


def test_a_checkpoint_finds_every_step_before_it_in_the_store_and_evaluation_adds_nothing(tmp_path: Path) -> None:
    callback, watch = RecorderCallback(tmp_path / "store", dtype="float64"), WatchesFlushes(tmp_path / "store")
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(language_model(), tmp_path / "run", [callback, watch], **settings)
    trainer.train()
    assert watch.last == [1, 3, 5, 7, 8]
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    assert store.info()["rows"] == ROWS


def test_a_training_resumed_in_the_middle_of_an_epoch_misses_no_row(tmp_path: Path) -> None:
    def trainer(name: str, *more: TrainerCallback) -> Trainer:
        callback = RecorderCallback(tmp_path / f"{name}.store", dtype="float64")
        settings = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
        return trainer_of(language_model(), tmp_path / name, [callback, *more], **settings)

    trainer("whole").train()
    with pytest.raises(OSError, match="power"):
        trainer("broken", Fails(5)).train()
    trainer("broken").train(resume_from_checkpoint=True)
    store = dualstore.open(tmp_path / "broken.store")
    assert store.verify().ok, store.verify().problems
    assert rows_of(store) == rows_of(dualstore.open(tmp_path / "whole.store"))


def test_a_training_that_fails_inside_with_leaves_an_interrupted_store(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="power"), RecorderCallback(tmp_path / "store", dtype="float64") as callback:
        trainer_of(language_model(), tmp_path / "run", [callback, Fails(4)]).train()
    store = dualstore.open(tmp_path / "store")
    assert store.info()["status"] == "interrupted"
    assert store.last_step == 3
    assert store.verify().ok


def test_a_failed_training_is_noted_when_the_callback_is_told(tmp_path: Path) -> None:
    callback = RecorderCallback(tmp_path / "store", dtype="float64")
    model = language_model()
    with pytest.raises(OSError, match="power"):
        trainer_of(model, tmp_path / "run", [callback, Fails(4)]).train()
    callback.interrupt()
    assert dualstore.open(tmp_path / "store").info()["status"] == "interrupted"
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()  # nothing of it is left on the model
    with pytest.raises(RecordError, match="no recording is under way"):
        _ = callback.recorder


class Padded(Lines):
    """Padding in front or behind."""

    def __init__(self, *, left: bool) -> None:
        self.left = left

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, mask = TOKENS[index].clone(), torch.ones(6, dtype=torch.int64)
        padding = slice(0, index % 3) if self.left else slice(6 - index % 3, 6)
        tokens[padding], mask[padding] = 0, 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_has_no_label(tmp_path: Path, left: bool) -> None:
    data = Padded(left=left)
    trainer_of(language_model(), tmp_path / "run", [RecorderCallback(tmp_path / "store", dtype="float64")], data=data).train()
    rows = dualstore.open(tmp_path / "store").sql(
        "SELECT sample_id, position, label FROM patterns WHERE layer = 0 AND epoch = 0 ORDER BY sample_id, position"
    )
    for row in rows:
        item = data[row["sample_id"]]
        known = row["position"] < 5 and bool(item["attention_mask"][row["position"]])
        assert row["label"] == (int(item["labels"][row["position"] + 1]) if known else -100)


def test_labels_survive_a_loss_of_the_trainers_own(tmp_path: Path) -> None:
    callback = RecorderCallback(tmp_path / "store", dtype="float64")
    trainer_of(language_model(), tmp_path / "run", [callback], label_smoothing_factor=0.1).train()
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    labels = {row["label"] for row in store.sql("SELECT label FROM patterns WHERE position = 0")}
    assert labels == set(TOKENS[:, 1].tolist())


def test_labels_may_be_said(tmp_path: Path) -> None:
    callback = RecorderCallback(tmp_path / "store", labels=lambda batch: batch["input_ids"][:, 0])
    trainer_of(language_model(), tmp_path / "run", [callback]).train()
    rows = dualstore.open(tmp_path / "store").sql("SELECT DISTINCT sample_id, label FROM patterns ORDER BY sample_id")
    assert [row["label"] for row in rows] == TOKENS[:, 0].tolist()


class Judged(Lines):
    """A class for each sequence, and ids of its own."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": TOKENS[index], "labels": index % 3, "sample_id": 100 + index}


def test_a_classifiers_rows_have_the_samples_label_and_the_ids_that_items_bring(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=3)).double()
    trainer_of(model, tmp_path / "run", [RecorderCallback(tmp_path / "store", dtype="float64")], data=Judged()).train()
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    rows = store.sql("SELECT DISTINCT sample_id, label FROM patterns ORDER BY sample_id").to_dicts()
    assert rows == [{"sample_id": 100 + number, "label": number % 3} for number in range(10)]


def test_activation_checkpointing_gives_the_same_rows(tmp_path: Path) -> None:
    for name, on in (("plain", False), ("again", True)):
        callback = RecorderCallback(tmp_path / name, dtype="float64")
        trainer_of(language_model(), tmp_path / "run", [callback], activation_checkpointing=on).train()
    assert rows_of(dualstore.open(tmp_path / "again")) == rows_of(dualstore.open(tmp_path / "plain"))


def test_mixed_precision_keeps_every_row(tmp_path: Path) -> None:
    model = language_model().float()
    trainer_of(model, tmp_path / "run", [RecorderCallback(tmp_path / "store")], bf16=True).train()
    store = dualstore.open(tmp_path / "store")
    assert store.info()["rows"] == ROWS
    assert all(check.weight_residual is not None and check.weight_residual < 2e-2 for check in store.verify().layers)


def test_weights_of_an_earlier_checkpoint_do_not_count_as_those_that_training_left(tmp_path: Path) -> None:
    callback = RecorderCallback(tmp_path / "store", dtype="float64")
    settings = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 0.5}
    trainer = trainer_of(
        language_model(), tmp_path / "run", [callback], load_best_model_at_end=True, metric_for_best_model="loss", **settings
    )
    trainer.train()
    assert trainer.state.best_global_step < 9
    assert dualstore.open(tmp_path / "store").verify().ok


class Stream(IterableDataset[dict[str, Any]]):
    """Has no items by index."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(Lines()[index] for index in range(10))


def test_what_only_iterates_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    trainer = trainer_of(
        language_model(),
        tmp_path / "run",
        [RecorderCallback(tmp_path / "store")],
        data=Stream(),
        max_steps=2,
        train_sampling_strategy="random",
    )
    with pytest.raises(RecordError, match="expected a data set with a length and items by index"):
        trainer.train()
    assert not (tmp_path / "store").exists()


class Picky(Trainer):
    """Gives the model only what it picks."""

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        return model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss


def test_a_trainer_that_leaves_the_ids_out_is_told(tmp_path: Path) -> None:
    trainer = Picky(model=language_model(), args=arguments(tmp_path / "run"), train_dataset=Lines())
    trainer.add_callback(RecorderCallback(tmp_path / "store"))
    with pytest.raises(RecordError, match=r"trained on a batch without its ids; call it as `model\(\*\*inputs\)`"):
        trainer.train()


def test_a_second_training_needs_another_store(tmp_path: Path) -> None:
    trainer = trainer_of(language_model(), tmp_path / "run", [RecorderCallback(tmp_path / "store")])
    trainer.train()
    with pytest.raises(RecordError, match="expected no folder or an empty one"):
        trainer.train()


def test_probes_of_tokens_know_what_follows_and_what_the_model_expects(tmp_path: Path) -> None:
    with RecorderCallback(tmp_path / "store", dtype="float64") as callback:
        trainer_of(model := language_model(), tmp_path / "run", [callback]).train()
        model.train()
        asked = probe_tokens(callback.recorder, model, TOKENS[:3], test_id=[5, 6, 7], position=2)
        assert model.training
    assert torch.equal(asked, TOKENS[:3])
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    rows = store.sql("SELECT label, predicted, g FROM probes WHERE layer = 8 ORDER BY test_id, position").to_dicts()
    model.eval()
    logits = model(input_ids=TOKENS[:3]).logits
    assert [row["predicted"] for row in rows] == logits.argmax(-1).flatten().tolist()
    assert [row["label"] for row in rows] == nn.functional.pad(TOKENS[:3, 1:], (0, 1), value=-100).flatten().tolist()
    expected = torch.zeros(3, 6, 11, dtype=torch.float64)
    expected[:, 2] = logits[:, 2].softmax(-1) - nn.functional.one_hot(TOKENS[:3, 3], 11)
    found = torch.tensor([row["g"] for row in rows], dtype=torch.float64).reshape(3, 6, 11)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert len(store.query(test_id=6, layer=8, position=2, top=3, score="influence")) == 3


def test_probes_may_go_on_by_the_models_own_tokens(tmp_path: Path) -> None:
    model = language_model()
    with dualstore.record(model, sgd(model), tmp_path / "store", dtype="float64") as recorder:
        asked = probe_tokens(recorder, model, TOKENS[:2, :3], test_id=[0, 1], generate=2)
        with pytest.raises(RecordError, match="found padding"):
            probe_tokens(recorder, model, TOKENS[:2], test_id=[2, 3], attention_mask=(TOKENS[:2] > 5).long(), generate=1)
        with pytest.raises(RecordError, match=r"position: expected 0 to 4, found 5"):
            probe_tokens(recorder, model, TOKENS[:2], test_id=[2, 3], position=5)
    assert asked.shape == (2, 5)
    model.eval()
    assert torch.equal(model(input_ids=asked).logits.argmax(-1)[:, 2:4], asked[:, 3:])
    rows = dualstore.open(tmp_path / "store").sql(
        "SELECT label, predicted FROM probes WHERE layer = 8 AND position IN (2, 3) ORDER BY test_id, position"
    )
    assert [row["label"] for row in rows] == [row["predicted"] for row in rows] == asked[:, 3:].flatten().tolist()


def test_padding_is_no_label_of_a_probe(tmp_path: Path) -> None:
    model = language_model()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    with dualstore.record(model, sgd(model), tmp_path / "store") as recorder:
        probe_tokens(recorder, model, TOKENS[:1], test_id=[0], attention_mask=mask)
    rows = dualstore.open(tmp_path / "store").sql("SELECT label FROM probes WHERE layer = 8 ORDER BY position")
    assert [row["label"] for row in rows] == [*TOKENS[0, 1:4].tolist(), -100, -100, -100]


def test_a_missing_library_is_named_with_its_install_line() -> None:
    code = "import sys; sys.modules['transformers'] = None; import dualstore; dualstore.hf"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'dualstore[hf]'" in found.stderr.splitlines()[-1]

"""Trainers of Lightning: the rows are those of the same training written out in torch, whatever the Trainer does besides."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dualstore
from dualstore.errors import DualstoreWarning, RecordError
from dualstore.lightning import RecorderCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

X = torch.linspace(-2, 2, 80, dtype=torch.float64).reshape(20, 4).sin()
Y = torch.arange(20) % 3


class Net(LightningModule):
    """A small network; its batches are tuples with ids at their end."""

    def __init__(self, *, schedule: bool = False, adam: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.schedule, self.adam = schedule, adam

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader_of(data: Dataset[Any] | None = None, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dualstore.indexed(data or TensorDataset(X, Y)), **{"batch_size": 4, **settings})


def trainer_of(folder: Path, *more: Any, **settings: Any) -> Trainer:
    """Three epochs of two steps of two batches and one of one; clipped."""
    defaults = {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "enable_checkpointing": False}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=folder, callbacks=list(more), **{**defaults, **quiet, **settings})


def record_by_hand(net: Net, path: Path) -> None:
    """The same training as an ordinary loop."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    with dualstore.record(net, optimizer, path, dtype="float64") as recorder:
        for epoch in range(3):
            for step in torch.arange(20).split(8):
                for rows in step.split(4):
                    with recorder.batch(rows, Y[rows], epoch=epoch) as batch:
                        loss = nn.functional.cross_entropy(net(X[rows]), Y[rows])
                        batch.loss = loss.detach()
                        (loss / 2).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


def rows_of(path: Path) -> list[list[dict[str, Any]]]:
    """All columns of all patterns, and of all steps."""
    store = dualstore.open(path)
    names = "layer, step, sample_id, position, label, x, e"
    patterns = store.sql(f"SELECT {names} FROM patterns ORDER BY layer, step, sample_id, position").to_dicts()
    steps = store.sql("SELECT step, epoch, lr, momentum, clip, batch_size, loss FROM steps ORDER BY step").to_dicts()
    return [patterns, steps]


def test_rows_are_those_of_the_same_training_written_out(tmp_path: Path) -> None:
    record_by_hand(by_hand := Net(), tmp_path / "hand")
    trainer_of(tmp_path, RecorderCallback(tmp_path / "store", dtype="float64")).fit(net := Net(), loader_of())
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok, store.verify().problems
    assert store.info()["rows"] == 2 * 3 * 20
    assert rows_of(tmp_path / "store") == rows_of(tmp_path / "hand")
    for ours, theirs in zip(net.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_shuffled_batches_of_workers_keep_their_ids_and_schedules_are_rebuilt(tmp_path: Path) -> None:
    loader = loader_of(shuffle=True, num_workers=2, multiprocessing_context="fork")
    trainer_of(tmp_path, RecorderCallback(tmp_path / "store", dtype="float64")).fit(Net(schedule=True), loader)
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    rows = store.sql("SELECT epoch, sample_id, label, x FROM patterns WHERE layer = 0 ORDER BY epoch, sample_id").to_dicts()
    assert [(row["epoch"], row["sample_id"]) for row in rows] == [(epoch, number) for epoch in range(3) for number in range(20)]
    assert [row["label"] for row in rows] == 3 * Y.tolist()
    assert torch.equal(torch.tensor([row["x"] for row in rows], dtype=torch.float64), X.repeat(3, 1))
    assert len({row["lr"] for row in store.sql("SELECT lr FROM steps")}) == 3


def test_adam_and_clipping_by_value_are_what_the_recorder_says(tmp_path: Path) -> None:
    trainer_of(tmp_path, RecorderCallback(tmp_path / "adam", dtype="float64")).fit(Net(adam=True), loader_of())
    assert dualstore.open(tmp_path / "adam").verify().ok
    by_value = {"gradient_clip_algorithm": "value", "gradient_clip_val": 1e-3}
    with pytest.warns(DualstoreWarning, match="other than by one factor"):
        trainer_of(tmp_path, RecorderCallback(tmp_path / "value"), **by_value).fit(Net(), loader_of())
    assert not dualstore.open(tmp_path / "value").verify().ok


class WatchesFlushes(callbacks.Callback):
    """Sees how much of the store another process could read behind some batches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with pytest.warns(DualstoreWarning, match="unfinished"):
            self.last.append(dualstore.open(self.path).last_step)


class SavesAfterEachBatch(callbacks.Callback):
    """A checkpoint behind each batch, in the middle of accumulation too."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "now.ckpt")


def test_a_checkpoint_finds_every_step_before_it_in_the_store_and_validation_adds_nothing(tmp_path: Path) -> None:
    recorder, watch = RecorderCallback(tmp_path / "store", dtype="float64"), WatchesFlushes(tmp_path / "store")
    trainer = trainer_of(tmp_path, recorder, watch, SavesAfterEachBatch(), max_epochs=1, val_check_interval=1)
    trainer.fit(Net(), loader_of(), loader_of())
    assert watch.last == [-1, -1, 0, 0, 1]  # steps are taken behind the second, fourth and fifth batch
    assert dualstore.open(tmp_path / "store").verify().ok
    assert dualstore.open(tmp_path / "store").info()["rows"] == 2 * 20


class Fails(callbacks.Callback):
    """Ends the training with an error behind a step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            raise OSError("the power went off")


def test_a_training_that_fails_leaves_an_interrupted_store(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="power"):
        trainer_of(tmp_path, RecorderCallback(tmp_path / "store", dtype="float64"), Fails()).fit(Net(), loader_of())
    store = dualstore.open(tmp_path / "store")
    assert store.info()["status"] == "interrupted"
    assert store.last_step == 4
    assert store.verify().ok


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
def test_a_training_resumed_from_the_end_of_an_epoch_misses_no_row(tmp_path: Path) -> None:
    def fit(name: str, *more: Any, **settings: Any) -> None:
        recorder = RecorderCallback(tmp_path / f"{name}.store", dtype="float64")
        saver = callbacks.ModelCheckpoint(tmp_path / name)  # in the middle of an epoch Lightning forgets which data it had
        trainer = trainer_of(tmp_path, recorder, saver, *more, enable_checkpointing=True, max_epochs=4)
        trainer.fit(Net(schedule=True), loader_of(), **settings)

    fit("whole")
    with pytest.raises(OSError, match="power"):
        fit("broken", Fails())
    fit("broken", ckpt_path=tmp_path / "broken" / "epoch=0-step=3.ckpt")
    assert dualstore.open(tmp_path / "broken.store").verify().ok
    assert rows_of(tmp_path / "broken.store") == rows_of(tmp_path / "whole.store")


class Dicts(Dataset[dict[str, Any]]):
    """Items that are dicts."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], "label": Y[index]}


class DictNet(Net):
    """Its batches are dicts."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch["x"], batch["label"]), batch_idx)


def test_batches_may_be_dicts_or_say_where_ids_and_labels_are(tmp_path: Path) -> None:
    trainer_of(tmp_path, RecorderCallback(tmp_path / "dicts", dtype="float64")).fit(DictNet(), loader_of(Dicts()))
    said = RecorderCallback(tmp_path / "said", ids=lambda batch: batch[2] + 100, labels=lambda batch: batch[1] * 2, dtype="float64")
    trainer_of(tmp_path, said).fit(Net(), loader_of())
    plain, other = rows_of(tmp_path / "dicts"), rows_of(tmp_path / "said")
    for row in plain[0]:
        row["sample_id"] += 100
        row["label"] *= 2
    assert plain == other


def test_a_with_block_keeps_the_recording_open_for_probes(tmp_path: Path) -> None:
    with RecorderCallback(tmp_path / "store", dtype="float64") as callback:
        trainer_of(tmp_path, callback).fit(net := Net(), loader_of())
        net.eval()
        with callback.recorder.probe([0, 1, 2], Y[:3]):
            net(X[:3])
    store = dualstore.open(tmp_path / "store")
    check = store.verify()
    assert check.ok
    assert all(layer.output_residual is not None for layer in check.layers)
    with pytest.raises(RecordError, match="no recording is under way"):
        _ = callback.recorder


class Manual(Net):
    """Steps by itself, twice a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def test_a_module_that_steps_by_itself_is_recorded(tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    trainer_of(tmp_path, RecorderCallback(tmp_path / "store", dtype="float64"), **settings).fit(Manual(), loader_of())
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    assert store.last_step == 2 * 3 * 5 - 1
    assert store.info()["rows"] == 2 * 2 * 3 * 20


class Two(Manual):
    """Two optimisers, of one layer each."""

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.body[0].parameters(), lr=0.1, momentum=0.5),
            torch.optim.SGD(self.body[2].parameters(), lr=0.2),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in (both := self.optimizers()):
            optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, batch_idx))
        for optimizer in both:
            optimizer.step()


def test_a_module_with_two_optimisers_is_recorded(tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    trainer_of(tmp_path, RecorderCallback(tmp_path / "store", dtype="float64"), **settings).fit(Two(), loader_of())
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok, store.verify().problems
    assert store.info()["rows"] == 2 * 3 * 20
    assert store.last_step == 3 * 5 - 1


def test_batches_without_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"expected a batch with ids, of a data set in `dualstore.indexed"):
        trainer_of(tmp_path, RecorderCallback(tmp_path / "ids")).fit(Net(), DataLoader(TensorDataset(X, Y.double()), batch_size=4))


def test_a_missing_library_is_named_with_its_install_line() -> None:
    code = "import sys; sys.modules['lightning'] = None; import dualstore; dualstore.lightning"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'dualstore[lightning]'" in found.stderr.splitlines()[-1]

"""Training loops as people write them: mixed precision, batches of named tensors, ids that a loader brings along."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dualstore

torch.set_num_threads(1)


class Mixture(nn.Module):
    """Layers of several kinds behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.attend, self.head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        return self.head(self.attend(torch.relu(x)).mean(1))  # type: ignore[no-any-return]


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Items of named tensors."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(5) * (index + 3) + index) % 9
        return {"input_ids": tokens, "labels": tokens.sum() % 3}


def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture()


@pytest.mark.filterwarnings("ignore:these parameters train but are not recorded")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_autocast_is_recorded_as_it_multiplied_and_the_store_says_so(tmp_path: Path, kind: torch.dtype) -> None:
    model = mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == torch.float16)
    loader = DataLoader(dualstore.indexed(Sentences()), batch_size=8, shuffle=True)
    with dualstore.record(model, optimizer, tmp_path) as recorder:
        for _ in range(4):
            for batch in loader:
                with recorder.batch(batch["sample_id"], batch["labels"]) as noted:
                    with torch.autocast("cpu", kind):
                        loss = nn.functional.cross_entropy(model(input_ids=batch["input_ids"]), batch["labels"])
                    noted.loss = loss.detach()
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    store = dualstore.open(tmp_path)
    found = store.verify()
    assert found.problems == []
    assert store.info_file.mixed
    assert 1e-6 < max(check.weight_residual or 0 for check in found.layers) < 2e-2
    assert store.info()["rows"] == 4 * 40 * (7 * 5 + 1 + 5)


@pytest.mark.filterwarnings("ignore:these parameters train but are not recorded")
@pytest.mark.parametrize("workers", [0, 2])
def test_ids_from_a_loader_name_every_row_of_every_epoch(tmp_path: Path, workers: int) -> None:
    model = mixture().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=16)
    loader = DataLoader(dualstore.indexed(Sentences()), batch_size=8, shuffle=True, num_workers=workers)
    with dualstore.record(model, optimizer, tmp_path, dtype="float64") as recorder:
        for _ in range(3):
            for number, batch in enumerate(loader):
                with recorder.batch(batch["sample_id"], batch["labels"]):
                    nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"]).backward()
                if number % 2 or number == 4:  # accumulates two batches
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    store = dualstore.open(tmp_path)
    assert store.verify().ok
    assert max(check.weight_residual or 0 for check in store.verify().layers) < 1e-9
    text = "SELECT layer, epoch, sample_id, count(*) AS n, any_value(label) AS label FROM patterns GROUP BY ALL ORDER BY ALL"
    found: list[Any] = store.sql(text).to_dicts()
    assert len(found) == len(store.layers) * 3 * 40
    items = Sentences()
    assert all(row["label"] == int(items[row["sample_id"]]["labels"]) for row in found)
    names = {layer.number: layer.name for layer in store.layers}
    assert {row["n"] for row in found if names[row["layer"]] == "head"} == {1}
    assert {row["n"] for row in found if names[row["layer"]] != "head"} == {5}

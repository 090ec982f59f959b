"""Data sets that carry the index of each item: through workers, subsets, samplers and the default collate function."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import dualstore
from dualstore.errors import RecordError

X = torch.arange(20, dtype=torch.float64).reshape(10, 2)
Y = torch.arange(10) % 3


class Dicts(Dataset[dict[str, Any]]):
    """Items that are dicts, and an attribute of its own."""

    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], "y": Y[index]}


class ManyAtOnce(Dicts):
    """Reads several items in one go."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.asked.append(list(indices))
        return [self[index] for index in indices]


class Stream(IterableDataset[int]):
    """Only iterates."""

    def __iter__(self) -> Any:
        return iter(range(3))


def test_tuples_carry_their_index_as_the_last_element() -> None:
    data = dualstore.indexed(TensorDataset(X, Y))
    assert len(data) == 10
    x, y, number = data[3]
    assert torch.equal(x, X[3])
    assert (int(y), number) == (0, 3)
    assert data[-1][2] == 9
    assert data[torch.tensor(4)][2] == 4


def test_dicts_carry_their_index_by_a_key() -> None:
    assert dualstore.indexed(Dicts())[7]["sample_id"] == 7
    assert "sample_id" not in Dicts()[7]


def test_several_items_are_read_as_the_data_set_reads_them() -> None:
    data = dualstore.indexed(ManyAtOnce())
    batch = next(iter(DataLoader(data, batch_size=4)))
    assert batch["sample_id"].tolist() == [0, 1, 2, 3]
    assert data.asked == [[0, 1, 2, 3]]


def test_attributes_of_the_data_set_stay_in_reach_and_it_can_be_pickled() -> None:
    data = pickle.loads(pickle.dumps(dualstore.indexed(Dicts())))
    assert data.classes == ("a", "b", "c")
    assert data[1]["sample_id"] == 1
    with pytest.raises(AttributeError, match="_hidden"):
        _ = data._hidden


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["tuples", "dicts"])
def test_shuffled_batches_of_workers_keep_items_and_ids_together(kind: str, workers: int) -> None:
    data = dualstore.indexed(TensorDataset(X, Y) if kind == "tuples" else Dicts())
    some = Subset(data, [9, 2, 5, 7, 0, 1, 3])
    context = "fork" if workers else None
    loader = DataLoader(some, batch_size=3, shuffle=True, num_workers=workers, multiprocessing_context=context)
    seen = []
    for batch in loader:
        x, y, ids = batch if kind == "tuples" else (batch["x"], batch["y"], batch["sample_id"])
        assert ids.dtype == torch.int64
        assert torch.equal(x, X[ids])
        assert torch.equal(y, Y[ids])
        seen += ids.tolist()
    assert sorted(seen) == [0, 1, 2, 3, 5, 7, 9]


def test_rows_of_a_recording_are_those_of_the_samples_that_gave_them(tmp_path: Path) -> None:
    model = nn.Linear(2, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(dualstore.indexed(TensorDataset(X, Y)), batch_size=4, shuffle=True)
    with dualstore.record(model, optimizer, tmp_path / "store", dtype="float64") as recorder:
        for x, y, ids in loader:
            with recorder.batch(ids, y):
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    store = dualstore.open(tmp_path / "store")
    rows = store.sql("SELECT sample_id, label, x FROM patterns ORDER BY sample_id").to_dicts()
    assert [row["sample_id"] for row in rows] == list(range(10))
    assert [row["label"] for row in rows] == Y.tolist()
    assert torch.equal(torch.tensor([row["x"] for row in rows], dtype=torch.float64), X)


def test_what_only_iterates_is_refused() -> None:
    with pytest.raises(RecordError, match=r"expected a data set with a length and items by index, found Stream"):
        dualstore.indexed(Stream())
    with pytest.raises(RecordError, match="found generator"):
        dualstore.indexed(x for x in range(3))


def test_items_without_a_place_for_an_index_are_refused() -> None:
    with pytest.raises(RecordError, match="expected items that are tuples or dicts, found int"):
        dualstore.indexed([1, 2, 3])[0]
    with pytest.raises(RecordError, match="item 0 has a key 'sample_id' already"):
        dualstore.indexed([{"sample_id": 5}])[0]

"""Ids, labels, tasks, positions and epochs: what the loop names is what the rows say, and what does not fit is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dualstore
from dualstore.capture.names import EpochCounter, Names, TaskCodes, labels_of
from dualstore.errors import RecordError


def names(ids: Any, labels: Any = None, task: Any = None) -> Names:
    return Names.check("batch()", ids, labels, task, TaskCodes())


def columns_of(named: Names, *shapes: tuple[int, ...]) -> list[dict[str, list[int]]]:
    """The scalar columns of one layer's calls with inputs of these shapes."""
    claims = [named.claim(0, "layer", shape[:-1] or (1,)) for shape in shapes]
    return [{name: values.tolist() for name, values in claim.named().columns.items()} for claim in claims]


@pytest.mark.parametrize(
    "ids",
    [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2], np.uint8), torch.tensor([3, 1, 2]), torch.tensor([3, 1, 2], dtype=torch.int16)],
    ids=["list", "tuple", "bytes", "tensor", "short"],
)
def test_ids_may_be_a_tensor_an_array_or_a_list(ids: Any) -> None:
    found = names(ids, ids)
    assert found.ids.tolist() == [3, 1, 2]
    assert found.ids.dtype == np.int64
    assert found.labels.tolist() == [3, 1, 2]
    assert found.labels.dtype == np.int32


def test_a_range_names_samples_and_truth_values_are_labels() -> None:
    assert names(range(4)).ids.tolist() == [0, 1, 2, 3]
    assert names(range(2), torch.tensor([True, False])).labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([0.0, 1.0], "float64"),
        (torch.tensor([0.5]), "float32"),
        (["a", "b"], "<U1"),
        ([None, 1], "object"),
        ([2**70], "object"),
        ([[1, 2], [3]], "[[1, 2], [3]]"),
    ],
)
def test_ids_that_are_not_whole_numbers_are_refused(ids: Any, found: str) -> None:
    with pytest.raises(RecordError, match=re.escape(f"batch(): ids: expected whole numbers, found {found}")):
        names(ids)


@pytest.mark.parametrize(
    "ids", [5, torch.tensor(5), [[1, 2], [3, 4]], np.zeros((0, 2), int)], ids=["5", "scalar", "2-D", "empty 2-D"]
)
def test_ids_that_are_not_one_a_sample_are_refused(ids: Any) -> None:
    with pytest.raises(RecordError, match=r"batch\(\): expected one id a sample, found an array of shape"):
        names(ids)


def test_ids_beyond_64_bits_are_refused_instead_of_wrapped() -> None:
    assert names(np.array([2**63 - 1], np.uint64)).ids.tolist() == [2**63 - 1]
    with pytest.raises(RecordError, match=r"batch\(\)"):
        names(np.array([2**63], np.uint64))


@pytest.mark.parametrize("labels", [[0], [0, 1, 2], 0, [], np.zeros((3, 2), int)], ids=["1", "3", "scalar", "none", "2-D"])
def test_labels_of_another_number_than_ids_are_refused(labels: Any) -> None:
    with pytest.raises(RecordError, match=r"batch\(\): expected 2 labels, one for each id"):
        names([5, 6], labels)


def test_labels_that_are_not_whole_numbers_are_refused() -> None:
    with pytest.raises(RecordError, match=r"batch\(\): labels: expected whole numbers, found float64"):
        names([5, 6], [0.5, 1])
    with pytest.raises(RecordError, match=r"batch\(\): expected labels within 32 bits, found 1 to 4294967296"):
        names([5, 6], [1, 2**32])


def test_labels_that_are_not_given_are_minus_one() -> None:
    np.testing.assert_array_equal(labels_of(None, 3, "here"), [-1, -1, -1])


def test_tasks_are_numbered_in_order_of_appearance() -> None:
    codes = TaskCodes()
    np.testing.assert_array_equal(codes.codes("b", 2, "here"), [0, 0])
    np.testing.assert_array_equal(codes.codes(["a", "b", "a"], 3, "here"), [1, 0, 1])
    np.testing.assert_array_equal(codes.codes(None, 2, "here"), [-1, -1])
    np.testing.assert_array_equal(codes.codes(("c", "a"), 2, "here"), [2, 1])
    assert codes.names == ["b", "a", "c"]


def test_a_task_is_one_name_or_one_for_each_sample() -> None:
    with pytest.raises(RecordError, match=r"batch\(\): expected one task or 3, found 2"):
        names([1, 2, 3], None, ["a", "b"])


def test_a_layer_called_once_with_one_row_a_sample_has_position_zero() -> None:
    assert columns_of(names([7, 8], [1, 0], "t"), (2, 5)) == [
        {"sample_id": [7, 8], "position": [0, 0], "label": [1, 0], "task": [0, 0], "slot": [0, 1]}
    ]


def test_every_place_of_a_longer_input_is_a_position() -> None:
    (found,) = columns_of(names([7, 8], [1, 0], ["u", "v"]), (2, 2, 2, 5))
    assert found["sample_id"] == [7, 7, 7, 7, 8, 8, 8, 8]
    assert found["position"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert found["label"] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert found["task"] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_labels_may_be_given_for_each_position() -> None:
    (found,) = columns_of(names([7, 8], [[1, 2, 3], [4, 5, 6]]), (2, 3, 5))
    assert found["label"] == [1, 2, 3, 4, 5, 6]


def test_a_layer_called_again_goes_on_with_its_positions() -> None:
    first, second, third = columns_of(names([7, 8]), (2, 5), (2, 3, 5), (2, 5))
    assert (first["position"], second["position"], third["position"]) == ([0, 0], [1, 2, 3, 1, 2, 3], [4, 4])


def test_layers_do_not_share_their_positions() -> None:
    named = names([7])
    assert named.claim(0, "a", (1,)).named().columns["position"].tolist() == [0]
    assert named.claim(1, "b", (1,)).named().columns["position"].tolist() == [0]


def test_a_single_sample_without_a_batch_dimension_is_one_row() -> None:
    assert columns_of(names([7], [2]), (5,)) == [{"sample_id": [7], "position": [0], "label": [2], "task": [-1], "slot": [0]}]


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5)])
def test_an_empty_batch_has_no_rows(shape: tuple[int, ...]) -> None:
    assert columns_of(names([], []), shape) == [{"sample_id": [], "position": [], "label": [], "task": [], "slot": []}]


@pytest.mark.parametrize("leading", [(3,), (1, 2)])
def test_an_input_that_does_not_have_one_row_for_each_id_is_refused(leading: tuple[int, ...]) -> None:
    expected = f"layer 'fc': expected an input of 2 samples, one for each id of batch(), found samples and positions {leading}"
    with pytest.raises(RecordError, match=re.escape(expected)):
        names([7, 8]).claim(0, "fc", leading)


def test_missing_ids_are_minus_one_and_rows_are_told_apart_by_their_slot() -> None:
    (found,) = columns_of(names(None, [4, 5]), (2, 3))
    assert (found["sample_id"], found["slot"], found["label"]) == ([-1, -1], [0, 1], [4, 5])
    with pytest.raises(RecordError, match=r"batch\(\): expected ids of the samples, or their labels at least, found neither"):
        names(None)


def epochs(*batches: list[int]) -> list[int]:
    counter = EpochCounter()
    return [counter.see(np.array(batch, np.int64)) for batch in batches]


def test_an_epoch_begins_with_the_first_id_that_comes_again() -> None:
    assert epochs([0, 1], [2, 3], [1, 0], [3, 2], [0]) == [0, 0, 1, 1, 2]


def test_an_id_that_comes_twice_in_one_batch_begins_no_epoch() -> None:
    assert epochs([0, 0, 1], [2, 2], [0]) == [0, 0, 1]


def test_ids_far_apart_are_counted() -> None:
    assert epochs([5_000_000], [3], [5_000_000], [3]) == [0, 0, 1, 1]


def test_an_empty_batch_is_of_the_epoch_under_way() -> None:
    assert epochs([], [4], [], [4], []) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("strange", [[-1], [-3, 4], [EpochCounter.LARGEST]])
def test_ids_that_cannot_be_counted_leave_the_epoch_as_it_is(strange: list[int]) -> None:
    assert epochs([1], strange, strange, [2]) == [0, 0, 0, 0]


def test_a_negative_id_is_no_other_id() -> None:
    assert epochs([-1], [1023], [-1], [1022]) == [0, 0, 0, 0]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3000), max_size=4), max_size=30))
def test_epochs_equal_those_counted_with_a_set(batches: list[list[int]]) -> None:
    seen: set[int] = set()
    epoch, expected = 0, []
    for batch in batches:
        if seen & set(batch):
            epoch, seen = epoch + 1, set()
        seen |= set(batch)
        expected.append(epoch)
    assert epochs(*batches) == expected


def record_linear(path: Path, batches: list[tuple[torch.Tensor, dict[str, Any]]], **options: Any) -> dualstore.Store:
    """A store of nn.Linear(3, 2) trained on the batches with these names."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualstore.record(model, optimizer, path, **options) as recorder:
        for x, named in batches:
            with recorder.batch(**named) as batch:
                loss = model(x).square().sum()
                batch.loss = loss.detach()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualstore.open(path)


def test_rows_carry_the_names_of_their_batch(tmp_path: Path) -> None:
    batches = [
        (torch.ones(2, 3), {"sample_id": [5, 9], "label": [1, 0], "task": "first"}),
        (torch.ones(1, 2, 3), {"sample_id": torch.tensor([7]), "label": [[3, 4]], "task": ["second"]}),
        (torch.ones(2, 3), {"sample_id": [9, 11]}),
        (torch.ones(1, 3), {"sample_id": [5], "epoch": 17, "task": "first"}),
    ]
    store = record_linear(tmp_path / "store", batches)
    found = store.sql("SELECT step, epoch, sample_id, position, label, task FROM patterns ORDER BY step, sample_id, position")
    assert [tuple(row.values()) for row in found] == [
        (0, 0, 5, 0, 1, "first"),
        (0, 0, 9, 0, 0, "first"),
        (1, 0, 7, 0, 3, "second"),
        (1, 0, 7, 1, 4, "second"),
        (2, 1, 9, 0, -1, None),
        (2, 1, 11, 0, -1, None),
        (3, 17, 5, 0, -1, "first"),
    ]
    assert store.info()["tasks"] == ["first", "second"]
    sizes = store.sql("SELECT epoch, batch_size FROM steps ORDER BY step").to_dicts()
    assert [tuple(row.values()) for row in sizes] == [(0, 2), (0, 1), (1, 2), (17, 1)]


def test_ids_of_the_caller_may_change_after_the_batch(tmp_path: Path) -> None:
    ids = np.array([1, 2])
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualstore.record(model, optimizer, tmp_path / "store", queue_bytes=1 << 20) as recorder:
        for _ in range(2):
            with recorder.batch(ids, ids):
                model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ids += 10
    found = dualstore.open(tmp_path / "store").sql("SELECT sample_id, label FROM patterns ORDER BY step, sample_id")
    assert [tuple(row.values()) for row in found] == [(1, 1), (2, 2), (11, 11), (12, 12)]


def test_a_batch_that_is_refused_leaves_the_recording_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualstore.record(model, optimizer, tmp_path / "store") as recorder:
        with pytest.raises(RecordError, match="expected whole numbers"), recorder.batch([0.5]):
            pass
        with pytest.raises(RecordError, match=r"samples and positions \(2,\)"), recorder.batch([1, 2, 3]):
            model(torch.ones(2, 3))
        with recorder.batch([1, 2]):
            model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    store = dualstore.open(tmp_path / "store")
    assert store.info()["rows"] == 2
    assert store.verify().ok


@pytest.mark.parametrize("epoch", ["a", True, float("nan"), 2**31, -(2**31) - 1, [1], 1.5, None], ids=repr)
def test_an_epoch_is_a_whole_number_of_32_bits(epoch: Any) -> None:
    with pytest.raises(RecordError, match="epoch: expected a whole number within 32 bits"):
        EpochCounter().given(epoch)
    assert EpochCounter().given(np.int64(7)) == 7

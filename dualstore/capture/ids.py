"""A data set whose items carry their index, so that rows of a recording know whose they are."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from dualstore.errors import RecordError

__all__ = ["ID_KEY", "Indexed", "indexed", "paired"]

ID_KEY = "sample_id"
"""The key by which an item that is a dict has its index."""

Join = Callable[[Any, int], Any]


class Indexed(Dataset[Any]):
    """A map-style data set whose items are joined with their index; everything else is as in the data set itself.

    Raises RecordError for a data set whose items have no index.
    """

    def __init__(self, dataset: Any, join: Join) -> None:
        there = all(hasattr(dataset, name) for name in ("__getitem__", "__len__"))
        if isinstance(dataset, IterableDataset) or not there:
            raise RecordError(
                f"indexed(): expected a data set with a length and items by index, found {type(dataset).__name__}; "
                "what only iterates has no lasting ids: give its items one of their own"
            )
        self._dataset, self._join = dataset, join

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        number = self._number(index)
        return self._join(self._dataset[number], number)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Several items at once, as a DataLoader asks for them."""
        numbers = [self._number(index) for index in indices]
        read = getattr(self._dataset, "__getitems__", None)
        items = [self._dataset[number] for number in numbers] if read is None else read(numbers)
        return [self._join(item, number) for item, number in zip(items, numbers, strict=True)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is unpickled and has no data set yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._dataset, name)

    def _number(self, index: Any) -> int:
        """An index as a number from 0 on; what is out of range is left to the data set."""
        number = operator.index(index)
        return number + len(self) if number < 0 else number


def indexed(dataset: Any) -> Indexed:
    """The data set with the index of each item: a last element more of a tuple, the key "sample_id" of a dict.

    It works below subsets and samplers, with workers and with the default collate function:

        loader = DataLoader(dualstore.indexed(dataset), batch_size=32, shuffle=True)
        for x, y, ids in loader: ...

    Raises RecordError for a data set that only iterates, and when an item is neither a tuple nor a dict.
    """
    return Indexed(dataset, _joined)


def paired(item: Any, number: int) -> tuple[int, Any]:
    """The index in front of an item of any kind; an id that a dict has itself counts."""
    return (int(item[ID_KEY]) if isinstance(item, Mapping) and ID_KEY in item else number), item


def _joined(item: Any, number: int) -> Any:
    if isinstance(item, Mapping):
        if ID_KEY in item:
            raise RecordError(
                f"indexed(): item {number} has a key {ID_KEY!r} already; take the data set as it is, or rename the key"
            )
        return {**item, ID_KEY: number}
    if not isinstance(item, tuple | list):
        raise RecordError(
            f"indexed(): expected items that are tuples or dicts, found {type(item).__name__}; say `return x, y` in the data set"
        )
    return (*item, number)

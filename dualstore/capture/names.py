"""Who a row belongs to: the ids, labels and tasks that the training loop names, checked and spread over positions."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy import ndarray

from dualstore.capture.notes import Notes
from dualstore.errors import RecordError
from dualstore.schema import IGNORED, NO_LABEL
from dualstore.shapes import Int32, Int64

__all__ = ["AnyClaim", "Claim", "EpochCounter", "Named", "Names", "Sampled", "Scattered", "TaskCodes"]

NO_ID = -1
"""Id of a sample that was given none."""


class TaskCodes:
    """Task names in order of appearance; a row stores the index."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = list(names)

    def codes(self, task: Any, size: int, where: str) -> Int32[ndarray, " n"]:
        """The code of each of `size` rows; -1 without a task."""
        if task is None or isinstance(task, str):
            return np.full(size, NO_LABEL if task is None else self._code(task), np.int32)
        if not isinstance(task, Collection):
            raise RecordError(f"{where}: expected a task name or {size} of them, found {task!r}")
        if len(task) != size:
            raise RecordError(f"{where}: expected one task or {size}, found {len(task)}")
        return np.array([self._code(name) for name in task], np.int32)

    def _code(self, name: str) -> int:
        if not isinstance(name, str) or not _is_text(name):
            raise RecordError(f"task: expected a name, found {name!r}")
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


class Named:
    """Who some rows belong to: their scalar columns, not to be changed."""

    def __init__(self, columns: "dict[str, ndarray]") -> None:
        self.columns = columns

    @cached_property
    def padding(self) -> Int64[ndarray, " k"]:
        """The numbers of rows that are labelled as ignored."""
        return np.flatnonzero(self.columns["label"] == IGNORED)

    @cached_property
    def others(self) -> "tuple[Int64[ndarray, ' k'], dict[str, ndarray]]":
        """The numbers of the other rows, and their columns."""
        kept = np.flatnonzero(self.columns["label"] != IGNORED)
        return kept, self.of(kept)

    def of(self, kept: Int64[ndarray, " k"]) -> "dict[str, ndarray]":
        """The columns of some rows."""
        return {name: values[kept] for name, values in self.columns.items()}


@dataclass(slots=True, eq=False)
class Names:
    """Ids, labels and tasks of n samples; labels may be one a position, (n, ...)."""

    where: str
    """The call that gave them, for messages."""
    ids: Int64[ndarray, " n"]
    labels: Int32[ndarray, "n ..."]
    tasks: Int32[ndarray, " n"]
    first_slot: int = 0
    """Samples of earlier batches of the same step: a row of the batch has its place among all of them."""
    calls: dict[int, int] = field(default_factory=dict)
    """Rows a sample that each layer has given so far: positions of a layer called again go on from there."""
    duplicates: Int32[ndarray, " n"] | None = None
    """1 for samples that a sampler took again to fill up."""
    spread_rows: "dict[tuple[tuple[int, ...], int], Named]" = field(default_factory=dict)
    """`Claim.named` by shape and first position: layers of one batch mostly share them."""
    labelled: bool = False
    """Whether labels of positions have found a layer with these positions."""

    @classmethod
    def check(cls, where: str, ids: Any, labels: Any, task: Any, codes: TaskCodes) -> "Names":
        """Missing ids are -1. Raises RecordError where ids or labels are not whole numbers or their lengths differ."""
        if ids is None and labels is None:
            raise RecordError(f"{where}: expected ids of the samples, or their labels at least, found neither")
        found = np.full(len(labels), NO_ID) if ids is None else whole_numbers(ids, where, "ids")
        if found.ndim != 1:
            raise RecordError(f"{where}: expected one id a sample, found an array of shape {found.shape}")
        return cls(where, found, labels_of(labels, len(found), where), codes.codes(task, len(found), where))

    @property
    def ignoring(self) -> bool:
        """Whether labels say that something is to be ignored, which may be padding."""
        return bool((self.labels == IGNORED).any())

    def claim(self, layer: int, name: str, leading: Sequence[int]) -> "Claim":
        """The rows of one call of a layer, whose samples and positions are `leading`, (n, ...).

        Raises RecordError where the first dimension is not n.
        """
        leading = tuple(leading)
        if leading[0] != len(self.ids):
            raise RecordError(
                f"layer {name!r}: expected an input of {len(self.ids)} samples, one for each id of {self.where}, "
                f"found samples and positions {leading}; give one id for each row of the batch"
            )
        first = self.calls.get(layer, 0)
        self.calls[layer] = first + math.prod(leading[1:])
        return Claim(self, leading, first)

    def claim_shared(self, layer: int, name: str, rows: int) -> "Claim":
        """The rows of one call that is for all samples together: of none of them, with an id of -1, where there are several."""
        if len(self.ids) == 1:
            return self.claim(layer, name, (1, rows))
        nobody, task = np.full(1, NO_ID), self.tasks[:1] if (self.tasks == self.tasks[:1]).all() else np.full(1, NO_LABEL)
        first = self.calls.get(layer, 0)
        self.calls[layer] = first + rows
        names = Names(self.where, nobody, nobody.astype(np.int32), task.astype(np.int32), self.first_slot)
        return Claim(names, (1, rows), first)

    def claim_scattered(
        self, layer: int, name: str, samples: Int64[ndarray, " r"], positions: Int64[ndarray, " r"], count: int
    ) -> "Scattered":
        """Rows of a call whose `count` samples are of different lengths: place in the batch and position of each.

        Raises RecordError where there are not n samples.
        """
        if count != len(self.ids):
            raise RecordError(
                f"layer {name!r}: expected {len(self.ids)} sequences, one for each id of {self.where}, found {count}; "
                "give one id for each"
            )
        first = self.calls.get(layer, 0)
        self.calls[layer] = first + int(positions.max(initial=-1)) + 1
        return Scattered(self, samples, positions, first)

    def check_labels(self, notes: Notes) -> None:
        """Notes labels of positions that no layer has."""
        if self.labels.ndim > 1 and not self.labelled and self.spread_rows:
            notes.notice(
                f"{self.where}: labels of shape {self.labels.shape} fit the positions of no layer; the first of each sample "
                "is taken"
            )


@dataclass(slots=True, eq=False)
class Claim:
    """The rows of one call of a layer: every sample with every position, in the order of the input."""

    names: Names
    leading: tuple[int, ...]
    first: int
    """Position of each sample's first row."""

    @property
    def each(self) -> int:
        """Rows of every sample."""
        return math.prod(self.leading[1:])

    @property
    def rows(self) -> int:
        """All of them."""
        return math.prod(self.leading)

    def fits(self, values: ndarray) -> bool:
        """Whether values are one a row, or one a sample."""
        return values.shape in (self.leading, self.leading[:1])

    def named(self) -> Named:
        """sample_id, position, label, task and slot of each row; shared by layers."""
        key = (self.leading, self.first)
        found = self.names.spread_rows.get(key)
        if found is None:
            found = self.names.spread_rows[key] = Named(self._spread_all())
        return found

    def _spread_all(self) -> dict[str, ndarray]:
        names, each = self.names, self.each
        again = {} if names.duplicates is None else {"duplicate": np.repeat(names.duplicates, each)}
        positions = np.arange(self.first, self.first + each, dtype=np.int32)
        return {
            "sample_id": np.repeat(names.ids, each),
            "position": np.tile(positions, len(names.ids)),
            "label": self.spread(names.labels),
            "task": np.repeat(names.tasks, each),
            "slot": np.repeat(np.arange(names.first_slot, names.first_slot + len(names.ids), dtype=np.int32), each),
            **again,
        }

    def spread(self, values: ndarray) -> ndarray:
        """Values a sample (n,), or a position (n, ...), for each row."""
        if values.shape == self.leading:
            self.names.labelled = True
            return values.reshape(-1)
        first: Any = (slice(None), *[0] * (values.ndim - 1))
        return np.repeat(values[first], self.each)


@dataclass(slots=True, eq=False)
class Scattered:
    """The rows of one call where samples are of different lengths."""

    names: Names
    samples: Int64[ndarray, " r"]
    positions: Int64[ndarray, " r"]
    first: int
    each: int = 1
    """Rows have no positions in common."""

    @property
    def rows(self) -> int:
        """All of them."""
        return len(self.samples)

    def fits(self, values: ndarray) -> bool:
        """Whether values are one a position, or one a sample."""
        return values.ndim <= 2

    def named(self) -> Named:
        """As of `Claim`."""
        names = self.names
        again = {} if names.duplicates is None else {"duplicate": names.duplicates[self.samples]}
        return Named(
            {
                "sample_id": names.ids[self.samples],
                "position": (self.first + self.positions).astype(np.int32),
                "label": self.spread(names.labels),
                "task": names.tasks[self.samples],
                "slot": (names.first_slot + self.samples).astype(np.int32),
                **again,
            }
        )

    def spread(self, values: ndarray) -> ndarray:
        """Values a sample (n,), or a position (n, positions), for each row."""
        first: Any = (self.samples, *[0] * (values.ndim - 1))
        if values.ndim == 2 and values.shape[1] > self.positions.max(initial=-1):
            self.names.labelled = True
            first = (self.samples, self.positions)
        found: ndarray = values[first]
        return found


AnyClaim = Claim | Scattered


class EpochCounter:
    """Counts epochs where the loop does not say: a new one begins with the first id seen before in this one.

    Memory: one byte for each id up to the largest, at most 64 MiB; beyond that, or for negative ids, it stops counting.
    """

    LARGEST = 64 << 20

    def __init__(self) -> None:
        self._seen = np.zeros(1024, bool)
        self.epoch = 0

    def given(self, epoch: Any) -> int:
        """An epoch that the loop says itself. Raises RecordError where it is no whole number of 32 bits."""
        whole = isinstance(epoch, int | np.integer) and not isinstance(epoch, bool)
        if not whole or not -(1 << 31) <= epoch < 1 << 31:
            raise RecordError(f"batch(): epoch: expected a whole number within 32 bits, found {epoch!r}")
        return int(epoch)

    def see(self, ids: Int64[ndarray, " n"]) -> int:
        """The epoch of a batch."""
        if len(ids) and ids.min() < 0:
            return self.epoch
        try:
            again = self._seen[ids].any()
        except IndexError:
            return self._grow(ids)
        if again:
            self.epoch += 1
            self._seen[:] = False
        self._seen[ids] = True
        return self.epoch

    def note(self, ids: Int64[ndarray, " n"]) -> None:
        """Takes ids that the epoch has seen before the counting began."""
        kept = ids[(ids >= 0) & (ids < self.LARGEST)]
        if len(kept) and kept.max() >= len(self._seen):
            self._seen = np.append(self._seen, np.zeros(int(kept.max()) + 1 - len(self._seen), bool))
        self._seen[kept] = True

    def _grow(self, ids: Int64[ndarray, " n"]) -> int:
        if ids.max() >= self.LARGEST:
            return self.epoch
        grown = np.zeros(max(int(ids.max()) + 1, 2 * len(self._seen)), bool)
        grown[: len(self._seen)] = self._seen
        self._seen = grown
        return self.see(ids)


class Sampled:
    """Tells which samples a torch DistributedSampler takes again, so that all ranks get equally many."""

    def __init__(self, sampler: Any) -> None:
        """Raises RecordError where the sampler is of another kind."""
        try:
            self._ranks, self._rank = int(sampler.num_replicas), int(sampler.rank)
            self._size, self._each = len(sampler.dataset), int(sampler.num_samples)
        except (AttributeError, TypeError) as error:
            raise RecordError(f"sampler: expected a torch DistributedSampler, found {type(sampler).__name__}") from error
        self._seen = 0

    def next(self, count: int) -> Int32[ndarray, " n"]:
        """1 for those of the next `count` samples of this rank that another one has already."""
        place = (self._seen + np.arange(count)) % self._each
        self._seen += count
        return (place * self._ranks + self._rank >= self._size).astype(np.int32)


def _is_text(name: str) -> bool:
    """Whether a name can be written: half of a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def labels_of(labels: Any, size: int, where: str) -> Int32[ndarray, "n ..."]:
    """Labels of `size` samples as int32, -1 where none are given. Raises RecordError where they do not fit."""
    if labels is None:
        return np.full(size, NO_LABEL, np.int32)
    found = whole_numbers(labels, where, "labels")
    if found.ndim == 0 or len(found) != size:
        raise RecordError(f"{where}: expected {size} labels, one for each id, found {found.size}")
    narrow = found.astype(np.int32)
    if (narrow != found).any():
        raise RecordError(f"{where}: expected labels within 32 bits, found {found.min()} to {found.max()}")
    return narrow


def whole_numbers(values: Any, where: str, what: str) -> Int64[ndarray, "..."]:
    """`values`, a tensor, array or list, as int64. Raises RecordError where they are not whole numbers."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise RecordError(f"{where}: {what}: expected whole numbers, found {values!r}") from error
    if array.dtype.kind not in "iub" and array.size:
        raise RecordError(f"{where}: {what}: expected whole numbers, found {array.dtype}")
    if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
        raise RecordError(f"{where}: {what}: expected whole numbers within 64 bits with a sign, found {array.max()}")
    return array.astype(np.int64)

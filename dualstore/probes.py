"""Queries: vectors that the caller gives, or the layer inputs recorded for a test example."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray
from numpy.typing import ArrayLike

from dualstore.errors import QueryError
from dualstore.keys import units
from dualstore.log import Group, Log
from dualstore.schema import Layer, single
from dualstore.shapes import Bool, Float, Int32, Int64

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["ProbeRows", "Queries", "find_queries"]


@dataclass(frozen=True)
class Queries:
    """Vectors to ask with, in the store's precision, and how an answer names them."""

    vectors: Float[ndarray, "m d"]
    column: str | None
    """Column that tells several queries apart: "test_id" or "query"; None for a single one."""
    names: Int64[ndarray, " m"]
    title: str
    """What is asked, for the answer's title."""
    probes: "ProbeRows | None" = None
    """The recorded examples that are asked with, in their order; None for given vectors."""
    tokens: Int64[ndarray, " d"] | None = None
    """Whose values the vectors have, at a layer of tokens: those that are asked for, ascending."""

    def pooled(self, pool: str) -> "Queries":
        """One query in place of all: their mean or sum. Raises QueryError for another word."""
        if pool not in ("mean", "sum"):
            raise QueryError(f"pool: expected mean or sum, found {pool!r}")
        wide = self.vectors.astype(np.float64)
        vector = wide.mean(axis=0) if pool == "mean" else wide.sum(axis=0)
        title = f"{pool} over {self.title}"
        return Queries(vector[None].astype(self.vectors.dtype), None, self.names[:1], title, tokens=self.tokens)

    def named(self, number: int) -> str:
        """How a note calls one of the queries: " of test 3"; nothing for a single vector."""
        if self.probes is not None:
            return f" of test {self.names[number]}"
        return "" if self.column is None else f" of query {self.names[number]}"


@dataclass(frozen=True)
class ProbeRows:
    """Which rows of a probe log count: of every (test_id, position) the one that was recorded last."""

    log: Log
    test_id: Int64[ndarray, " p"]
    position: Int32[ndarray, " p"]
    row: Int64[ndarray, " p"]
    """Row number in the log; rows are sorted by test_id and position."""

    @classmethod
    def of(cls, log: Log) -> "ProbeRows":
        """Reads ids only: 20 bytes a probe."""
        test_id, position, step = (scalars(log, name) for name in ("test_id", "position", "step"))
        order = np.lexsort((np.arange(len(test_id)), step, position, test_id))
        last = np.ones(len(order), dtype=bool)
        last[:-1] = (np.diff(test_id[order]) != 0) | (np.diff(position[order]) != 0)
        rows = order[last]
        return cls(log, test_id[rows], position[rows], rows)

    def select(self, kept: Bool[ndarray, " p"] | Int64[ndarray, " q"]) -> "ProbeRows":
        """Some of the probes, by a mask or by their places."""
        return ProbeRows(self.log, self.test_id[kept], self.position[kept], self.row[kept])

    def scalars(self, name: str) -> ndarray:
        """A scalar column of these probes."""
        values: ndarray = scalars(self.log, name)[self.row]
        return values

    def vectors(self, name: str, start: int = 0, stop: int | None = None) -> Float[ndarray, "p d"] | Int32[ndarray, " p"]:
        """X or y of these probes, or of a range of them; of a layer of tokens x is their numbers."""
        found: ndarray = self.log.take([name], self.row[start:stop])[name]
        return found


def find_queries(
    store: "Store", layer: Layer, x: ArrayLike | int | float | None, test_id: int | Sequence[int] | None, position: int | None
) -> Queries:
    """The queries of one question. Raises QueryError where they are not there or do not fit the layer."""
    if (x is None) == (test_id is None):
        raise QueryError("query: expected either a vector x or a test_id, found " + ("neither" if x is None else "both"))
    if x is not None:
        return _given(store, layer, x)
    single = isinstance(test_id, int | np.integer)
    ids = np.atleast_1d(np.asarray(test_id))
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or not len(ids):
        raise QueryError(f"test_id: expected whole numbers, found {test_id!r}")
    ids = ids[np.sort(np.unique(ids, return_index=True)[1])]  # one that is given twice is asked once
    rows = ProbeRows.of(store.probes(layer))
    places = np.array([_place(store, layer, rows, int(wanted), position) for wanted in ids])
    probes = rows.select(places)
    keys = probes.vectors("x")
    if layer.keys == "vector":
        _check_finite(keys, f"the recorded probe of layer {layer.name!r}")
    tokens, vectors = _looked_at(store, layer, keys)
    shown = f"test {ids[0]}" if single else f"{len(ids)} tests"
    title = f"{shown}, layer {layer.number} ({layer.name})"
    return Queries(vectors, None if single else "test_id", ids.astype(np.int64), title, probes, tokens)


def _looked_at(store: "Store", layer: Layer, keys: ndarray) -> tuple[Int64[ndarray, " d"] | None, Float[ndarray, "m d"]]:
    """Of keys that are tokens, all of them and vectors of their values; other keys as they are."""
    if layer.keys == "vector":
        return None, keys
    tokens = np.unique(keys).astype(np.int64)
    return tokens, units(keys, tokens, single(store.info_file.dtype))


def _place(store: "Store", layer: Layer, rows: ProbeRows, test_id: int, position: int | None) -> int:
    first, end = (int(np.searchsorted(rows.test_id, test_id, side)) for side in ("left", "right"))
    if first == end:
        known = f"{len(np.unique(rows.test_id))} are, {rows.test_id[0]} to {rows.test_id[-1]}" if len(rows.test_id) else "none is"
        raise QueryError(f"{store.path}: test id {test_id} was not recorded as a probe of layer {layer.number}; {known}")
    if position is None:
        return int(end) - 1
    found = np.flatnonzero(rows.position[first:end] == position)
    if not len(found):
        known = f"{rows.position[first]} to {rows.position[end - 1]}"
        raise QueryError(f"{store.path}: test id {test_id} has no position {position} at layer {layer.number}; it has {known}")
    return int(first + found[0])


def _given(store: "Store", layer: Layer, x: ArrayLike | int | float) -> Queries:
    where = f"query for layer {layer.number} ({layer.name})"
    if layer.keys == "token":
        return _given_tokens(store, layer, x, where)
    try:
        given = np.asarray(x)
        if given.dtype.kind not in "biufO":
            raise TypeError(f"values of type {given.dtype}")
        vectors = np.atleast_2d(given.astype(np.float64))
    except (ValueError, TypeError, RuntimeError) as error:
        raise QueryError(f"{where}: expected numbers, found {error}") from error
    if vectors.ndim != 2 or not len(vectors) or vectors.shape[1] != layer.d_in:
        raise QueryError(f"{where}: expected {layer.d_in} values, or rows of them, found shape {np.shape(x)}")
    _check_finite(vectors, where)
    with np.errstate(over="ignore"):
        cast = vectors.astype(store.info_file.precision)
    if not np.isfinite(cast).all():
        raise QueryError(f"{where}: expected values within {store.info_file.precision}, found up to {np.abs(vectors).max():.6g}")
    column = None if np.ndim(x) == 1 else "query"
    shown = "a vector" if column is None else f"{len(cast)} vectors"
    return Queries(cast, column, np.arange(len(cast)), f"{shown}, layer {layer.number} ({layer.name})")


def _given_tokens(store: "Store", layer: Layer, x: ArrayLike | int | float, where: str) -> Queries:
    try:
        given = np.asarray(x)
    except (ValueError, TypeError, RuntimeError) as error:
        raise QueryError(f"{where}: expected tokens, found {error}") from error
    if given.dtype.kind not in "iu" or given.ndim > 1 or not given.size:
        found = repr(x) if given.ndim == 0 else f"{given.dtype} of shape {given.shape}"
        raise QueryError(f"{where}: expected a token, a whole number from 0 to {layer.d_in - 1}, or a list of them, found {found}")
    asked = np.atleast_1d(given)
    wrong = asked[(asked < 0) | (asked >= layer.d_in)]
    if len(wrong):
        raise QueryError(f"{where}: expected tokens from 0 to {layer.d_in - 1}, found {wrong[0]}")
    tokens, vectors = _looked_at(store, layer, asked)
    shown = f"token {asked[0]}" if given.ndim == 0 else f"{len(asked)} tokens"
    title = f"{shown}, layer {layer.number} ({layer.name})"
    return Queries(vectors, "query" if given.ndim else None, np.arange(len(asked)), title, tokens=tokens)


def _check_finite(vectors: ndarray, where: str) -> None:
    if not np.isfinite(vectors).all():
        raise QueryError(f"{where}: expected finite numbers, found NaN or infinity")


def scalars(log: Log, name: str) -> ndarray:
    """A scalar column of a whole log; for probes, whose number does not grow with training."""
    found = [_group_array(group, name) for group in log.groups]
    dtype = next(column.dtype for column in log.columns if column.name == name)
    return np.concatenate([np.zeros(0, dtype), *found])


def _group_array(group: Group, name: str) -> ndarray:
    return group.part.mapping.array(group, name)

"""The paper's vote: the label with the largest total.

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), table 2.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy import ndarray

from dualstore.kernels import error_bound
from dualstore.keys import places
from dualstore.probes import ProbeRows
from dualstore.rates import Rates, sample_note
from dualstore.repeats import Repeats, gather_repeats
from dualstore.result import Result
from dualstore.rows import Selector
from dualstore.scan import RUN_ROWS, Piece, pieces
from dualstore.schema import Layer
from dualstore.shapes import Bool, Float, Float64, Int32, Int64
from dualstore.sums import Rest, read_cells
from dualstore.totals import Wholes

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["count_votes"]

_BLOCK_ROWS = 1024


def count_votes(store: "Store", layers: Sequence[Layer], *, where: str | None) -> Result:
    """See `Store.votes`."""
    found: list[dict[str, Any]] = []
    for layer in layers:
        probes = ProbeRows.of(store.probes(layer))
        probes = probes.select((probes.scalars("label") >= 0) & (probes.scalars("predicted") >= 0))
        votes = _votes(store, layer, probes, where)
        labels, predicted = probes.scalars("label"), probes.scalars("predicted")
        for name, chosen in (("right", predicted == labels), ("wrong", predicted != labels)):
            shares = [_share(votes[chosen] == truth[chosen]) for truth in (labels, predicted)]
            counts = {"layer": layer.number, "prediction": name, "probes": int(chosen.sum())}
            found.append(counts | {"target_accuracy": shares[0], "output_accuracy": shares[1]})
    kinds = [pa.int32(), pa.string(), pa.int64(), pa.float64(), pa.float64()]
    names = ["layer", "prediction", "probes", "target_accuracy", "output_accuracy"]
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    rates = [(layer, store.rates(layer)) for layer in layers]
    notes = sample_note(rates, "estimated from a recorded share of the patterns")
    return Result(pa.Table.from_pylist(found, schema), "votes" + (f" where {where}" if where else ""), notes=notes)


def _share(hits: ndarray) -> float | None:
    return float(hits.mean()) if len(hits) else None


def _votes(store: "Store", layer: Layer, probes: ProbeRows, where: str | None) -> Int32[ndarray, " p"]:
    """The vote of each probe; -1 where no pattern has a label."""
    if layer.keys == "token":
        return _token_votes(store, layer, probes.vectors("x"), where)
    if layer.number == 0:
        return _magnitude_votes(store, layer, probes.vectors("x"), where)
    labels, sums = _label_sums(store, layer, where, _uneven(store, layer))
    each = max(1, store.options.budget_bytes // 4 // (layer.d_in * 8))
    votes = [np.zeros(0, np.int32)]
    for start in range(0, len(probes.row), each):
        vectors = probes.vectors("x", start, start + each).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            totals = vectors @ sums.T
        votes.append(labels[totals.argmax(1)] if len(labels) else np.full(len(vectors), -1, np.int32))
    return np.concatenate(votes)


def _uneven(store: "Store", layer: Layer) -> Rates | None:
    """The rates of a layer whose patterns do not all stand for as many: where they do, totals compare as they are."""
    rates = store.rates(layer)
    return None if rates is None or rates.constant else rates


def _label_sums(
    store: "Store", layer: Layer, where: str | None, rates: Rates | None
) -> tuple[Int32[ndarray, " l"], Float64[ndarray, "l d"]]:
    """Labels and the sums of their keys, each over its rate."""
    from dualstore.database import Database  # DuckDB is slow to start

    sums, rest = _LabelSums(layer.d_in), Rest(Selector(store.labelling, where, None))
    wholes = Wholes(Database(), store.labelling, where, "label")
    for cells in read_cells(store.index(layer), layer.d_in) if wholes.possible and rates is None else ():
        taken, left = wholes(cells)
        taken &= cells.finite()
        rest.leave_out(cells, taken | left)
        labels = np.unique(cells.label[taken])
        sums.add(labels, cells.merged(np.where(taken, np.searchsorted(labels, cells.label), -1), len(labels)))
    for piece in pieces(store.patterns(layer), rest, 4096):
        labels = piece.mapping.array(piece.group, "label")[piece.local]
        keys = piece.selected_keys(slice(None)).astype(np.float64)
        sums.add(labels, keys if rates is None else keys / rates.at(piece.steps(slice(None)))[:, None])
    return sums.result()


def _token_votes(store: "Store", layer: Layer, asked: ndarray, where: str | None) -> Int32[ndarray, " p"]:
    """The label that comes most often with each token. Held: a number for each label and token that is asked for."""
    tokens, place = np.unique(asked.astype(np.int64), return_inverse=True)
    counts: dict[int, Int64[ndarray, " u"]] = {}
    for piece in pieces(store.patterns(layer), Selector(store.labelling, where, None), RUN_ROWS):
        labels, at = piece.mapping.array(piece.group, "label")[piece.local], places(piece.selected_keys(slice(None)), tokens)
        for label in np.unique(labels[labels >= 0]).tolist():
            mine = at[(labels == label) & (at >= 0)]
            counts[label] = counts.get(label, 0) + np.bincount(mine, minlength=len(tokens))
    if not counts:
        return np.full(len(asked), -1, np.int32)
    known = np.array(sorted(counts), np.int32)
    found: ndarray = known[np.array([counts[label] for label in known.tolist()]).argmax(axis=0)[place]]
    return found


class _Magnitudes:
    """For each probe and label the sum of |alpha|, in the precision of the probes given, and how far off it may be."""

    def __init__(self, vectors: Float[ndarray, "p d"], budget_bytes: int) -> None:
        self._vectors = vectors
        each = max(1, budget_bytes // (_BLOCK_ROWS * vectors.itemsize))
        self._chunks = [slice(start, start + each) for start in range(0, len(vectors), each)]
        self._size = np.linalg.norm(vectors.astype(np.float64), axis=1)
        self._bound = error_bound(vectors.shape[1] + _BLOCK_ROWS + 5, vectors.dtype)
        self._tiny = vectors.shape[1] * float(np.finfo(vectors.dtype).tiny)
        """What a product may lose by underflow."""
        self._totals: dict[int, Float64[ndarray, " p"]] = {}
        self._norms: dict[int, float] = {}
        self._rows = 0.0

    def add(
        self, labels: Int32[ndarray, " n"], keys: Float[ndarray, "n d"], counts: Int64[ndarray, " n"] | Float64[ndarray, " n"]
    ) -> None:
        """Adds keys that stand for `counts` rows each."""
        for label in np.unique(labels[labels >= 0]).tolist():
            mine = np.flatnonzero(labels == label)
            for some in np.split(mine, range(_BLOCK_ROWS, len(mine), _BLOCK_ROWS)):
                self._add(label, keys[some].astype(self._vectors.dtype), counts[some])

    def _add(self, label: int, keys: Float[ndarray, "n d"], counts: Int64[ndarray, " n"] | Float64[ndarray, " n"]) -> None:
        totals = self._totals.setdefault(label, np.zeros(len(self._vectors)))
        with np.errstate(over="ignore", invalid="ignore"):
            for some in self._chunks:
                sizes = keys @ self._vectors[some].T
                np.abs(sizes, out=sizes)
                totals[some] += counts.astype(sizes.dtype) @ sizes
            norm = float(counts @ np.linalg.norm(keys.astype(np.float64), axis=1))
        self._norms[label] = self._norms.get(label, 0.0) + norm
        self._rows += float(counts.sum())

    def votes(self) -> tuple[Int32[ndarray, " p"], Bool[ndarray, " p"]]:
        """The label with the largest total for each probe, -1 where there is none; and whether rounding cannot change it."""
        labels = np.array(sorted(self._totals), np.int32)
        if not len(labels):
            return np.full(len(self._vectors), -1, np.int32), np.ones(len(self._vectors), bool)
        totals = np.array([self._totals[label] for label in labels.tolist()])
        best = totals.argmax(axis=0)
        with np.errstate(over="ignore", invalid="ignore"):
            error = 2 * self._bound * max(self._norms.values()) * self._size + 2 * self._tiny * self._rows
            others = np.where(np.arange(len(labels))[:, None] == best, -np.inf, totals)
            sure = np.isfinite(totals).all(axis=0) & (totals.max(axis=0) - others.max(axis=0) > error)
        return labels[best], sure


def _magnitude_votes(store: "Store", layer: Layer, vectors: Float[ndarray, "p d"], where: str | None) -> Int32[ndarray, " p"]:
    """The vote of each probe by |alpha|: in single precision, and again in double where that does not decide.

    Memory: as `Options.budget_bytes` allows; keys that come again are multiplied once.
    """
    log, budget, rates = store.patterns(layer), store.options.budget_bytes, _uneven(store, layer)
    votes, sure = np.full(len(vectors), -1, np.int32), np.zeros(len(vectors), bool)
    repeats: Repeats | None = None
    for dtype in dict.fromkeys((vectors.dtype, np.dtype(np.float64))):
        left = np.flatnonzero(~sure)
        if not len(left):
            break
        magnitudes = _Magnitudes(vectors[left].astype(dtype), budget // 4)
        single = 0

        def once(piece: Piece, index: Int64[ndarray, " r"], magnitudes: _Magnitudes = magnitudes) -> None:
            nonlocal single
            single += len(index)
            labels = piece.mapping.array(piece.group, "label")[piece.local[index]]
            counts = np.ones(len(index)) if rates is None else 1 / rates.at(piece.steps(index))
            magnitudes.add(labels, piece.selected_keys(index), counts)

        if repeats is None:
            most = budget // 4 // 64 if rates is None else 0  # equal keys of different rates do not count the same
            found = gather_repeats(log, Selector(store.labelling, where, None), most, once)
            repeats = found if not single else None
        else:
            found = repeats
        order = np.argsort(found.label, kind="stable")
        for mine in np.split(order, range(_BLOCK_ROWS, len(order), _BLOCK_ROWS)):
            magnitudes.add(found.label[mine], log.take(["x"], found.row[mine])["x"], found.count[mine])
        votes[left], sure[left] = magnitudes.votes()
    return votes


class _LabelSums:
    """Sums of float64 rows for each label that appears; rows without a label (-1) are left out."""

    def __init__(self, width: int) -> None:
        self._sums: dict[int, Float64[ndarray, " w"]] = {}
        self._width = width

    def add(self, labels: Int32[ndarray, " n"], rows: Float64[ndarray, "n w"]) -> None:
        found = np.unique(labels[labels >= 0])
        if np.isfinite(rows).all():
            sums = (labels == found[:, None]).astype(np.float64) @ rows  # (labels, w)
        else:  # 0 * inf would spoil every label
            with np.errstate(invalid="ignore"):
                sums = np.array([rows[labels == label].sum(axis=0) for label in found]).reshape(len(found), self._width)
        for label, total in zip(found.tolist(), sums, strict=True):
            self._sums[label] = self._sums[label] + total if label in self._sums else total

    def result(self) -> tuple[Int32[ndarray, " l"], Float64[ndarray, "l w"]]:
        """Labels, ascending, and their sums."""
        labels = sorted(self._sums)
        sums = np.array([self._sums[label] for label in labels]).reshape(len(labels), self._width)
        return np.array(labels, np.int32), sums

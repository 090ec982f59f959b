"""Sketches of keys: a few numbers a row from which alpha is bounded, so that a top-k reads hardly any key.

Keys of a layer lie near a subspace of few dimensions. With its basis V (d, p), a key x is kept as its coordinates c =
V^T x in single precision, its norm, and the norm of what is left, rho = |x - V c|. For a query q with a = V^T q and
q' = q - V a,

    alpha = x . q = c . a + (x - V c) . q = c . a + (x - V c) . q' + (V^T x - V^T V c) . a
          <= c . a + rho |q'| + delta |x| |a|

for any V and c, delta |x| being the largest |V^T x - V^T V c|, which rounding leaves: one product of (c, rho, |x|) with
(a, |q'|, delta |a|). Rows are sorted by norm within their segment, some consecutive row groups of the log, so that a search
may stop where |x| |q| falls below the k-th best alpha.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy import ndarray

from dualstore.index import LayerIndex, values
from dualstore.kernels import error_bound
from dualstore.log import Group, Log
from dualstore.shapes import Float, Float32, Float64, Int32, Int64

__all__ = ["Asked", "Projected", "Sketch", "build_sketches", "coordinates", "read_sketches"]

KIND = "sketch"
_KEY_VALUES = 25
"""Values of a key for each of its coordinates: a sketch takes 4 % of the keys and three numbers a row."""
_MOST_COORDINATES = 64
SEGMENT_BYTES = 48 << 20
"""A sketch is at most so large, however much memory there is to sort its rows."""
_SAMPLE_ROWS = 512
_TILE_ROWS = 1024
_COLUMNS = 256
"""Columns whose products are added up in single precision."""
_LEAST_NORM, _LEAST_SLACK = 2.0**-96, 1e-6
"""Their product is more than what single precision loses of a bound by underflow."""
_WORSE = 1.5
"""How much more of the keys than its best basis the one of the segment before may leave."""


def coordinates(width: int) -> int:
    """Coordinates kept of keys of `width` values."""
    return max(1, min(_MOST_COORDINATES, width // _KEY_VALUES))


def schema(width: int) -> pa.Schema:
    """Columns of the file of one segment; `row` counts from its first row."""
    vector = pa.list_(pa.field("element", pa.float32(), nullable=False), coordinates(width) + 2)
    fields = {"row": pa.int32(), "code": vector}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields.items()])


@dataclass(frozen=True)
class Sketch:
    """The sketch of one segment, rows by falling norm. What is not finite comes first, with infinite norm."""

    first: int
    """Number of the segment's first row in the log."""
    row: Int32[ndarray, " n"]
    code: Float32[ndarray, "n p+2"]
    """c; at least |x - V c|; at least |x|, and never quite 0."""
    basis: Float32[ndarray, "p d"]
    delta: float
    longest: float
    """At least |c| / |x|."""

    @property
    def end(self) -> int:
        """Number of the row behind the segment."""
        return self.first + len(self.row)

    @property
    def norm(self) -> Float32[ndarray, " n"]:
        """At least |x| of each row."""
        return self.code[:, -1]

    @property
    def row_bytes(self) -> int:
        """Bytes that a bound reads."""
        return 4 * int(self.code.shape[1])

    @property
    def largest(self) -> float:
        """The largest norm that is finite."""
        at = bisect_right(self.norm, -np.inf, key=lambda norm: -float(norm))
        return float(self.norm[at]) if at < len(self.norm) else 0.0


@dataclass(frozen=True)
class Projected:
    """Queries as the sketches of one basis need them."""

    inside: Float32[ndarray, "m p"]
    """a"""
    outside: Float64[ndarray, " m"]
    """At least |q - V a|."""
    norm: Float64[ndarray, " m"]
    size: Float64[ndarray, " m"]
    """|a|"""

    @classmethod
    def of(cls, queries: Float[ndarray, "m d"], basis: Float32[ndarray, "p d"]) -> "Projected":
        """The queries projected onto a basis."""
        wide, axes = queries.astype(np.float64), basis.astype(np.float64)
        inside = (wide @ axes.T).astype(np.float32)
        kept = inside.astype(np.float64)
        rest = wide - kept @ axes
        outside, norm, size = (np.sqrt(np.vecdot(some, some)) for some in (rest, wide, kept))
        return cls(inside, outside * (1 + 1e-6), norm, size)


@dataclass(frozen=True)
class Asked:
    """A sketch with queries put to it."""

    sketch: Sketch
    queries: Float32[ndarray, "m p+2"]

    @classmethod
    def of(cls, sketch: Sketch, queries: Projected) -> "Asked":
        """The queries put to a sketch of their basis."""
        width, count = sketch.basis.shape[1], sketch.code.shape[1]
        # The product's own rounding, and that of alpha; its terms are |c|, |x - V c| <= |x| + |c|, and a little of |x|.
        rounding = (2 * sketch.longest + 2) * error_bound(count + 8, np.float32) + error_bound(width, np.float64)
        slack = (queries.size * sketch.delta + queries.norm * rounding) * (1 + 1e-6)
        slack = np.maximum(slack, _LEAST_SLACK)
        return cls(sketch, np.column_stack([queries.inside, queries.outside, slack]).astype(np.float32))

    def reach(self, cuts: Float64[ndarray, " m"], norms: Float64[ndarray, " m"]) -> int:
        """How many of the first rows may have an alpha of at least their query's cut, by norm alone."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            least = float((cuts / (norms * (1 + 1e-5))).min())
        if not least > 0:  # NaN where nothing is known
            return len(self.sketch.norm)
        return bisect_right(self.sketch.norm, -least, key=lambda norm: -float(norm))

    def bounds(self, start: int, stop: int) -> Float32[ndarray, "n m"]:
        """At least the exact alpha of rows and queries; NaN where it cannot be told."""
        return self._bounds(self.sketch.code[start:stop])

    def bounds_of(self, rows: Int64[ndarray, " n"]) -> Float32[ndarray, "n m"]:
        """The same of some rows in ascending order."""
        consecutive = len(rows) and rows[-1] - rows[0] == len(rows) - 1
        return self._bounds(self.sketch.code[rows[0] : rows[-1] + 1] if consecutive else self.sketch.code[rows])

    def _bounds(self, codes: Float32[ndarray, "n p+2"]) -> Float32[ndarray, "n m"]:
        with np.errstate(over="ignore", invalid="ignore"):
            if len(self.queries) == 1:  # a third faster than the product of matrices
                bound: ndarray = (codes @ self.queries[0])[:, None]
            else:
                bound = codes @ self.queries.T
        return bound


def build_sketches(index: LayerIndex, width: int, budget_bytes: int, progress: Callable[[int], None] = lambda rows: None) -> None:
    """Writes the sketch of every segment that has none that fits; of row groups that can be mapped only.

    Memory: the budget, but at least six times the sketch of a row group.
    """
    basis: ndarray | None = None
    kept, done = set(), 0
    for groups in _segments(index.log, width, min(SEGMENT_BYTES, budget_bytes // 5)):
        part, name, rows = groups[0].part, f"{KIND}-{groups[0].index}", sum(group.rows for group in groups)
        table = index.table(part, name, schema(width), warn=False)
        if table is None or table.num_rows != rows:
            basis = _basis(_sample(index.log, groups), coordinates(width), basis)
            index.write(list(dict.fromkeys(group.part for group in groups)), name, *_sketch(groups, basis, progress))
        else:
            basis = _of_table(table, 0, width).basis
            progress(rows)
        kept.add((part.path.stem, name))
        done += rows
    progress(index.log.rows - done)
    index.remove_others(KIND, kept)


def read_sketches(index: LayerIndex, width: int) -> list[Sketch]:
    """The sketches that fit the log, in its order. Held: what numpy needs to see the mapped files."""
    if KIND not in index.kept:
        first = {(group.part.path.stem, f"{KIND}-{group.index}"): group for group in index.log.groups}
        found: list[Sketch] = []
        for group in sorted((first[name] for name in index.kinds(KIND) if name in first), key=lambda group: group.first):
            table = index.table(group.part, f"{KIND}-{group.index}", schema(width))
            if table is None or (found and group.first < found[-1].end) or not index.log.is_whole(group.first, table.num_rows):
                continue  # what a build that did not end has left may overlap
            sketch = _of_table(table, group.first, width)
            same = next((one.basis for one in found[-1:] if np.array_equal(one.basis, sketch.basis)), sketch.basis)
            found.append(replace(sketch, basis=same))
        index.kept[KIND] = found
    kept: list[Sketch] = index.kept[KIND]
    return kept


def _of_table(table: pa.Table, first: int, width: int) -> Sketch:
    extra = table.schema.metadata
    note = json.loads(extra[b"note"])
    row, code = values(table, "row"), values(table, "code")
    basis = np.frombuffer(extra[b"basis"], np.float32).reshape(-1, width)
    return Sketch(first, row, code, basis, note["delta"], note["longest"])


def _segments(log: Log, width: int, size: int) -> Iterator[list[Group]]:
    """Consecutive row groups that can be mapped, as many as make a sketch of at most so many bytes, at least one."""
    most = size // (4 * (coordinates(width) + 3))
    segment: list[Group] = []
    for group in log.groups:
        mapped = group.part.mapping.column(group, "x") is not None
        if segment and (not mapped or sum(one.rows for one in segment) + group.rows > most):
            yield segment
            segment = []
        if mapped:
            segment.append(group)
    if segment:
        yield segment


def _sketch(
    groups: Sequence[Group], basis: Float32[ndarray, "p d"], progress: Callable[[int], None]
) -> tuple[pa.Table, dict[str, bytes]]:
    """The sketch of the keys of a segment: its table and what goes with it."""
    measured: list[tuple[ndarray, ndarray, ndarray]] = []
    for group in groups:
        measured += [_measure(block["x"], basis) for _, block in group.part.mapping.blocks(group, ["x"], _TILE_ROWS)]
        progress(group.rows)
    table, delta, longest = (np.concatenate(found) for found in zip(*measured, strict=True))
    order = np.argsort(-table[:, -1], kind="stable").astype(np.int32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(table[order].reshape(-1)), type=schema(basis.shape[1]).field("code").type)
    note = json.dumps({"delta": float(delta.max()), "longest": float(longest.max())}).encode()
    found = pa.table([pa.array(order), vectors], schema=schema(basis.shape[1]))
    return found, {"basis": basis.tobytes(), "note": note}


def _measure(keys: Float[ndarray, "n d"], basis: Float32[ndarray, "p d"]) -> tuple[ndarray, ndarray, ndarray]:
    """(c, rho, |x|) of some keys, and (1,) delta and |c| / |x|; all but c at least what they stand for."""
    width, count = keys.shape[1], len(basis)
    unit = np.finfo(keys.dtype)
    gram = basis.astype(np.float64) @ basis.T.astype(np.float64)
    # By how much `inside` may be off, relative to |x|: |V| in the norm of Frobenius is the root of p, nearly.
    off = error_bound(min(width, _COLUMNS), keys.dtype) * np.sqrt(count) * 1.01 + error_bound(width, np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        square = np.vecdot(keys, keys).astype(np.float64) * (1 + 2 * error_bound(width, keys.dtype)) + width * 4.0 * unit.tiny
        norm = np.maximum(np.sqrt(square), _LEAST_NORM)
        inside = _inside(keys, basis)
        table = np.empty((len(keys), count + 2), np.float32)
        code = table[:, :-2]
        code[:] = inside
        kept = code.astype(np.float64)
        image, size = kept @ gram, np.sqrt(np.vecdot(kept, kept))
        left = square - 2 * np.vecdot(inside, kept) + np.vecdot(kept, image) + 2 * off * norm * size
        rest = np.sqrt(np.maximum(left, 0) + 1e-12 * square)
        defect = np.sqrt(np.vecdot(inside - image, inside - image))
        norm = (norm * (1 + 1e-6)).astype(np.float32)  # single precision rounds by less
        rest = (rest * (1 + 1e-6)).astype(np.float32)
        good = np.isfinite(norm) & np.isfinite(rest) & np.isfinite(size) & np.isfinite(defect)
        norm[~good], rest[~good], code[~good] = np.inf, np.inf, 0
        table[:, -2], table[:, -1] = rest, norm
        delta = float((defect[good] / norm[good]).max(initial=0.0)) * (1 + 1e-6) + off
        longest = float((size[good] / norm[good]).max(initial=0.0)) * (1 + 1e-6)
    return table, np.array([delta]), np.array([longest])


def _inside(keys: Float[ndarray, "n d"], basis: Float32[ndarray, "p d"]) -> Float64[ndarray, "n p"]:
    """V^T x, in the keys' precision for some columns at a time, whose sums are added in double."""
    rows, width = keys.shape
    total = np.zeros((rows, len(basis)))
    for start in range(0, width, _COLUMNS):
        columns = np.ascontiguousarray(basis[:, start : start + _COLUMNS].T.astype(keys.dtype))
        total += keys[:, start : start + _COLUMNS] @ columns
    return total


def _sample(log: Log, groups: Sequence[Group]) -> Float64[ndarray, "s d"]:
    """Some keys, spread over the segment; those that are not finite or huge are left out."""
    each = -(-_SAMPLE_ROWS // len(groups))
    spread = [group.first + np.unique(np.linspace(0, group.rows - 1, min(each, group.rows)).astype(int)) for group in groups]
    keys = log.take(["x"], np.concatenate(spread))["x"].astype(np.float64)
    return keys[(np.abs(keys) < 1e100).all(axis=1)]


def _basis(keys: Float64[ndarray, "s d"], count: int, before: Float32[ndarray, "p d"] | None) -> Float32[ndarray, "p d"]:
    """Orthonormal vectors that span nearly the best subspace of `count` dimensions for the keys.

    The basis `before` is kept where it leaves hardly more of the keys, so that queries are projected once for many segments.
    Source: Halko, Martinsson, Tropp 2011, Finding structure with randomness, algorithm 4.4 (subspace iteration).
    """
    width = keys.shape[1]
    found = np.linalg.qr(np.random.default_rng(0).standard_normal((width, min(width, count + 8))))[0]
    size = np.abs(keys).max(initial=0.0)
    keys = keys / size if size > 0 else keys
    for _ in range(2):
        found = np.linalg.qr(keys.T @ (keys @ found))[0]
    small = keys @ found
    turned = np.linalg.eigh(small.T @ small)[1][:, ::-1]
    best = np.ascontiguousarray((found @ turned)[:, :count].T.astype(np.float32))
    if before is not None and _left(keys, before) <= _WORSE * _left(keys, best):
        return before
    return best


def _left(keys: Float64[ndarray, "s d"], basis: Float32[ndarray, "p d"]) -> float:
    """The squares of the keys that a basis leaves, summed."""
    return float(np.square(keys).sum() - np.square(keys @ basis.T.astype(np.float64)).sum())

"""What a pattern is worth to a question beyond attention: alpha times a value of the pattern's own.

    contribution to output j   alpha_t c_t e_t[j]        what the pattern adds to output j of the layer for this query
    influence on a loss        alpha_t c_t (e_t . g)     its first-order effect on the loss whose gradient at the layer's
                                                         output is g; below zero where the pattern lowers the loss

Source: Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798) for the dual form; Pruthi et al. 2020 (arXiv 2002.08484) for
influence traced along training, of which this is every step of one layer.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from dualstore.coefficients import Coefficients
from dualstore.kernels import dots, error_bound, exact_dots
from dualstore.scan import Piece
from dualstore.shapes import Float, Float64, Int32, Int64

__all__ = ["SCORES", "Score", "Traced"]

SCORES = ("attention", "contribution", "influence")


@dataclass(frozen=True)
class Score:
    """How patterns are valued for each of m queries: `outputs` for contributions, or `gradients` for influence."""

    name: str
    coefficients: Coefficients
    outputs: Int64[ndarray, " m"] | None = None
    gradients: Float[ndarray, "m o"] | None = None
    """In the store's dtype."""

    def __post_init__(self) -> None:
        assert (self.outputs is None) != (self.gradients is None)

    def ranked(self, *, largest: bool, magnitude: bool) -> "Score":
        """The score of the queries that a top-k is asked with: negated for the smallest, both for the largest magnitude."""
        return self._of(np.tile(np.arange(len(self)), 2)) if magnitude else self

    def one(self, query: int) -> "Score":
        """That of one query."""
        return self._of(np.array([query]))

    def of(self, piece: Piece, alpha: Float64[ndarray, " n"]) -> Float64[ndarray, " n"]:
        """The scores of a piece's selected rows for the only query, whose alpha is given."""
        everything = slice(None)
        values = self.values(piece.steps(everything), piece.selected_errors(everything), np.zeros(len(alpha), np.int64))
        with np.errstate(over="ignore", invalid="ignore"):
            found: ndarray = alpha * values + 0.0
        return found

    def _of(self, queries: Int64[ndarray, " q"]) -> "Score":
        outputs, gradients = (None if found is None else found[queries] for found in (self.outputs, self.gradients))
        return Score(self.name, self.coefficients, outputs, gradients)

    def __len__(self) -> int:
        found = self.outputs if self.gradients is None else self.gradients
        assert found is not None
        return len(found)

    def values(
        self, steps: Int32[ndarray, " n"], errors: Float[ndarray, "n o"], queries: Int64[ndarray, " n"] | int
    ) -> Float64[ndarray, " n"]:
        """The value of each pattern, c e[j] or c (e . g), for one query each: the same bits wherever it is computed."""
        if self.outputs is not None:
            chosen = errors[np.arange(len(errors)), self.outputs[queries]].astype(np.float64)
        else:
            assert self.gradients is not None
            chosen = exact_dots(errors, self.gradients[queries])
        with np.errstate(over="ignore", invalid="ignore"):
            values: ndarray = self.coefficients.at(steps) * chosen + 0.0  # one zero, not two
        return values

    def estimates(
        self, steps: Int32[ndarray, " n"], errors: Float[ndarray, "n o"]
    ) -> tuple[Float64[ndarray, "n m"], Float64[ndarray, "n m"] | float]:
        """The values of patterns for all queries, and by how much they may be off those of `values`."""
        c = self.coefficients.at(steps)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            if self.outputs is not None:
                return c * errors[:, self.outputs].astype(np.float64), 0.0
            assert self.gradients is not None
            width, unit = errors.shape[1], np.finfo(errors.dtype)
            square = np.vecdot(errors, errors).astype(np.float64)
            norm = np.sqrt(square * (1.01 + width * float(unit.eps)) + 8 * width * float(unit.tiny))
            size = np.linalg.norm(self.gradients.astype(np.float64), axis=1) * (1 + 1e-12)
            off = error_bound(width, errors.dtype) * norm[:, None] * size + width * float(unit.tiny)
            return c * dots(errors, self.gradients), np.abs(c) * off * (1 + 1e-12)


@dataclass(frozen=True)
class Traced:
    """Scores that were computed beforehand, in a file, where a step's factor is a matrix: see `adaptive`."""

    name: str
    scores: Float64[ndarray, "rows m"]
    """A mapped file: of every row of the log for every query."""
    outputs: Int64[ndarray, " m"] | None
    initial: Float64[ndarray, " m"]
    """Of contributions, what is left of the initial weights adds to the output."""
    shared: Float64[ndarray, " m"]
    """Of contributions, what patterns of layers that share the weight add to the output."""
    columns: Int64[ndarray, " k"]
    sign: Float64[ndarray, " k"]

    def ranked(self, *, largest: bool, magnitude: bool) -> "Traced":
        """See `Score.ranked`."""
        if magnitude:
            return replace(self, columns=np.tile(self.columns, 2), sign=np.concatenate([self.sign, -self.sign]))
        return self if largest else replace(self, sign=-self.sign)

    def one(self, query: int) -> "Traced":
        """That of one query."""
        return replace(self, columns=self.columns[query : query + 1], sign=self.sign[query : query + 1])

    def all_of(self, piece: Piece) -> Float64[ndarray, "n k"]:
        """The scores of a piece's selected rows for all queries."""
        found: ndarray = self.scores[piece.group.first + piece.local][:, self.columns] * self.sign + 0.0
        return found

    def of(self, piece: Piece, alpha: Float64[ndarray, " n"]) -> Float64[ndarray, " n"]:
        """See `Score.of`."""
        assert len(alpha) == len(piece.local)
        found: ndarray = self.all_of(piece)[:, 0]
        return found

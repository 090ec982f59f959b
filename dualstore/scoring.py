"""From the words of a question to the score that ranks and sums its patterns, and what the score's numbers mean."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray
from numpy.typing import ArrayLike

from dualstore.adaptive import Stretch, walk
from dualstore.errors import QueryError
from dualstore.keys import square, through
from dualstore.probes import ProbeRows, Queries
from dualstore.rows import Selection
from dualstore.scan import Piece, pieces
from dualstore.schema import Layer
from dualstore.scores import SCORES, Score, Traced
from dualstore.shapes import Float, Float64, Int64
from dualstore.sharing import Some, sources_of
from dualstore.weights import coefficients_of, initial_of, lent, rebuild, rebuild_bias, replayed, temporary, trained

if TYPE_CHECKING:
    from dualstore.store import Store

__all__ = ["check_score", "check_step", "explained", "find_score", "own_values"]

_FROM_PROBES = ("predicted", "label")
_SHOWN_QUERIES = 5
"""Queries whose outputs are taken apart below an answer."""


def find_score(
    store: "Store",
    layer: Layer,
    queries: Queries,
    score: str,
    output: Any,
    gradient: ArrayLike | None,
    until: int | None,
    pool: str | None = None,
) -> Score | Traced | None:
    """The score of a question, with the coefficients of the weights after step `until`; None for attention.

    With `pool`, the mean or sum of the scores that a pattern has for the queries.

    Raises QueryError for a score or output that does not exist, InexactError where values are not exact, StoreError
    where the store lacks the weights that training started with.
    """
    check_score(score, output, gradient)
    if score == "attention":
        return None
    sources_of(store, layer)  # refuses layers without errors
    outputs = _outputs(store, layer, queries, output) if score == "contribution" else None
    gradients = _gradients(store, layer, queries, gradient) if score == "influence" else None
    if pool is not None:
        return _pooled(store, layer, queries, score, outputs, gradients, until, 1 / len(queries.vectors) if pool == "mean" else 1.0)
    if replayed(store):
        return _traced(store, layer, queries, score, outputs, gradients, until)
    return Score(score, coefficients_of(store, layer, "weight", until), outputs, gradients)


def check_score(score: str, output: Any, gradient: Any) -> None:
    """Raises QueryError for a score that does not exist, or what belongs to another."""
    if score not in SCORES:
        raise QueryError(f"score: expected {', '.join(SCORES[:-1])} or {SCORES[-1]}, found {score!r}")
    for name, given, wants in (("output", output, "contribution"), ("gradient", gradient, "influence")):
        if given is not None and score != wants:
            raise QueryError(f"{name}: expected with the score {wants} only, found score {score!r}")


def check_step(store: "Store", at_step: Any) -> int | None:
    """The step after which the memory is asked, None for the last. Raises QueryError where the run has no such step."""
    if at_step is None:
        return None
    if isinstance(at_step, bool) or not isinstance(at_step, int | np.integer) or not 0 <= at_step <= store.last_step:
        known = f"0 to {store.last_step}" if store.last_step >= 0 else "none, for no step is complete"
        raise QueryError(f"{store.path}: at_step: expected a step of the run, {known}; found {at_step!r}")
    return int(at_step)


def explained(
    store: "Store", layer: Layer, queries: Queries, score: Score | Traced, shown: Sequence[float] | None, until: int | None
) -> list[str]:
    """What the numbers of an answer mean; `shown` are the sums of the rows shown for each query, where rows are shown."""
    after = "" if until is None else f", weights as after step {until}"
    after += "" if store.info_file.exact else f"; NOT exact, {store.info_file.optimizer} is taken for plain SGD"
    if score.outputs is None and score.name == "contribution":
        return [f"contribution, pooled: in units of the outputs, for W x; the bias is apart{after}"]
    if score.outputs is None:
        unit = "in units of the probe's loss, to first order, through this layer's weights alone"
        formula = "alpha * value, value = c (e . g)" if isinstance(score, Score) else "sum of C[j, i] e[j] g[j] x_t[i] x[i]"
        return [f"influence = {formula}: {unit}; below zero: the pattern lowers that loss{after}"]
    formula = "alpha * value, value = c e[output]" if isinstance(score, Score) else "e[output] * sum of C[output, i] x_t[i] x[i]"
    notes = [f"contribution = {formula}: in units of the output, for W x; the bias is apart{after}"]
    known = until is None and store.info_file.status == "complete" and isinstance(score, Score)
    if any(store.rates(source.layer) is not None for source in sources_of(store, layer)) and not known:
        return notes  # what the output consists of would need all patterns
    start, bias, whole, shared = _parts(store, layer, queries, score, until)
    others = [f"{source.layer.number} ({source.layer.name})" for source in sources_of(store, layer)[1:]]
    for number in range(min(len(whole), _SHOWN_QUERIES)):
        total = whole[number] + bias[number]
        text = f"output {score.outputs[number]}{queries.named(number)}: {total:.6g} = {start[number]:.6g} from the initial weights"
        text += f" + {whole[number] - start[number] - shared[number]:.6g} from all patterns"
        if others:
            text += f" + {shared[number]:.6g} from those of {' and '.join(others)}, which shares the weight"
        text += f" + {bias[number]:.6g} bias"
        if shown is not None:
            share = f", {100 * shown[number] / total:.1f} % of the output" if total else ""
            text += f"; the rows shown carry {shown[number]:.6g}{share}"
        notes.append(text)
    return notes


def _parts(
    store: "Store", layer: Layer, queries: Queries, score: Score | Traced, until: int | None
) -> tuple[Float64[ndarray, " m"], Float64[ndarray, " m"], Float64[ndarray, " m"], Float64[ndarray, " m"]]:
    """For each query and its output a W_0 x, the bias, W x, and what patterns of layers that share W add to it."""
    outputs, complete = score.outputs, until is None and store.info_file.status == "complete"
    assert outputs is not None
    if isinstance(score, Traced):
        bias = trained(store, layer).bias[outputs] if complete else rebuild_bias(store, layer, until)[outputs]
        return score.initial, bias, score.initial + score.shared + score.scores.sum(axis=0), score.shared
    wide, looked = queries.vectors.astype(np.float64), _looked(queries)
    some, at = np.unique(outputs, return_inverse=True)
    start = initial_of(store, layer, "weight", coefficients_of(store, layer, "weight", until))[some][:, looked]
    if complete:
        final = trained(store, layer)
        weight, bias = final.weight[some][:, looked], final.bias[some]
    else:
        rebuilt = rebuild(store, layer, wide[:0], until, some, queries.tokens).rebuilt
        weight, bias = rebuilt.weight, rebuilt.bias
    shared = lent(store, layer, wide, until, some, looked)[np.arange(len(at)), at]
    return np.vecdot(start[at], wide), bias[at], np.vecdot(weight[at], wide), shared


def _looked(queries: Queries) -> Some:
    """Which columns of the weight queries look at."""
    return slice(None) if queries.tokens is None else queries.tokens


def _traced(
    store: "Store",
    layer: Layer,
    queries: Queries,
    name: str,
    outputs: Int64[ndarray, " m"] | None,
    gradients: Float[ndarray, "m o"] | None,
    until: int | None,
) -> Traced:
    """Scores by replaying the optimiser. Held: nothing; 8 bytes for each pattern and query lie in a temporary file."""
    vectors, count = queries.vectors.astype(np.float64), len(queries.vectors)
    scores = temporary((store.patterns(layer).rows, count))
    initial, shared, done = np.zeros(count), np.zeros(count), 0
    asked = np.arange(layer.d_out) if outputs is None else np.unique(outputs)
    for part in walk(store, layer, "weight", until, asked, queries.tokens):
        if not isinstance(part, Stretch):
            for query, output in enumerate(() if outputs is None else outputs.tolist()):
                for place in np.flatnonzero(asked[done : done + len(part)] == output):
                    initial[query] = part[place] @ vectors[query]
            done += len(part)
            continue
        if not part.source.own:
            if outputs is not None:
                _add_shared(shared, part, outputs, vectors)
            continue
        rows = scores[part.first : part.first + len(part.x)]
        for query, vector in enumerate(vectors):
            if outputs is None:
                assert gradients is not None
                weighed = through(part.x, part.factor * vector) * part.e  # (n, b)
                rows[:, query] += weighed @ gradients[query, part.outputs].astype(np.float64)
            else:
                for place in np.flatnonzero(part.outputs == outputs[query]):
                    rows[:, query] = part.e[:, place] * through(part.x, part.factor[place : place + 1] * vector)[:, 0]
    return Traced(name, scores, outputs, initial, shared, np.arange(count), np.ones(count))


def _add_shared(
    shared: Float64[ndarray, " m"], part: Stretch, outputs: Int64[ndarray, " m"], vectors: Float64[ndarray, "m d"]
) -> None:
    """Adds what a stretch of another layer gives to the output of each query."""
    change = part.change
    for query, vector in enumerate(vectors):
        for place in np.flatnonzero(part.outputs == outputs[query]):
            shared[query] += change[place] @ vector


def _pooled(
    store: "Store",
    layer: Layer,
    queries: Queries,
    name: str,
    outputs: Int64[ndarray, " m"] | None,
    gradients: Float[ndarray, "m o"] | None,
    until: int | None,
    share: float,
) -> Traced:
    """Scores of many queries together: with M = sum of x g^T over them, a pattern has c x_t^T M e_t. One pass over the rows."""
    vectors = queries.vectors.astype(np.float64)
    wanted = np.zeros((len(vectors), layer.d_out)) if gradients is None else gradients.astype(np.float64)
    if outputs is not None:
        wanted[np.arange(len(outputs)), outputs] = 1
    slope = share * (wanted.T @ vectors)  # (o, i)
    log = store.patterns(layer, queries.tokens)
    scores = temporary((log.rows, 1))
    if replayed(store):
        for part in walk(store, layer, "weight", until, np.arange(layer.d_out), queries.tokens):
            if isinstance(part, Stretch) and part.source.own:
                rows = scores[part.first : part.first + len(part.x)]
                rows[:, 0] += np.vecdot(through(part.x, part.factor * slope[part.outputs]), part.e)
    else:
        c = coefficients_of(store, layer, "weight", until)
        block_rows = max(64, store.options.budget_bytes // 4 // (16 * (vectors.shape[1] + layer.d_out)))
        for piece in pieces(log, lambda mapping, groups: Selection(None, None), block_rows, errors=True):
            steps, x, e = piece.wide()
            with np.errstate(over="ignore", invalid="ignore"):
                found = c.at(steps) * np.vecdot(x @ slope.T, e)
            scores[piece.group.first + piece.local, 0] = found
    return Traced(name, scores, None, np.zeros(1), np.zeros(1), np.arange(1), np.ones(1))


def own_values(store: "Store", layer: Layer, until: int | None) -> Callable[[Piece], Float64[ndarray, " n"]]:
    """What gives the influence of each pattern of a piece on the loss that it came from."""
    sources_of(store, layer)  # refuses layers without errors
    if not replayed(store):
        c = coefficients_of(store, layer, "weight", until)

        def own(piece: Piece) -> Float64[ndarray, " n"]:
            steps, x, e = piece.wide()
            with np.errstate(over="ignore", invalid="ignore"):
                squares = np.vecdot(x, x) if x.ndim > 1 else np.ones(len(x))  # a token's only 1
                found: ndarray = c.at(steps) * squares * np.vecdot(e, e)
            return found

        return own
    scores = temporary((store.patterns(layer).rows, 1))
    for part in walk(store, layer, "weight", until, np.arange(layer.d_out)):
        if isinstance(part, Stretch) and part.source.own:
            rows = scores[part.first : part.first + len(part.x)]
            rows[:, 0] += np.vecdot(through(square(part.x), part.factor), np.square(part.e))
    return lambda piece: scores[piece.group.first + piece.local, 0]


def _outputs(store: "Store", layer: Layer, queries: Queries, output: Any) -> Int64[ndarray, " m"]:
    """The output that is meant for each query."""
    known = f"a number from 0 to {layer.d_out - 1}"
    if isinstance(output, str) and output in _FROM_PROBES:
        probes = queries.probes
        if probes is None:
            raise QueryError(f"output: {output!r} needs a recorded test example; of a vector give {known}")
        found = probes.scalars(output).astype(np.int64)
        if (found < 0).any():
            what = "prediction" if output == "predicted" else "label"
            raise QueryError(f"{store.path}: test id {probes.test_id[found < 0][0]} was recorded without a {what}; give {known}")
        if not _predicts(store, layer) or (found >= layer.d_out).any():
            raise QueryError(
                f"output: {output!r} is an output of the layer that predicts, and layer {layer.number} ({layer.name}) is not; "
                f"give {known}"
            )
        return found
    whole = isinstance(output, int | np.integer) and not isinstance(output, bool)
    if not whole or not 0 <= output < layer.d_out:
        expected = f"{known} at layer {layer.number} ({layer.name}), predicted or label"
        raise QueryError(f"output: expected {expected}, found {'none' if output is None else repr(output)}")
    return np.full(len(queries.vectors), int(output))


def _predicts(store: "Store", layer: Layer) -> bool:
    """Whether the recorded predictions are the largest outputs of this layer, as some of the probes show."""
    rows = ProbeRows.of(store.probes(layer))
    known = np.flatnonzero(rows.scalars("predicted") >= 0)
    some = rows.select(known[np.unique(np.linspace(0, max(0, len(known) - 1), min(256, len(known))).astype(int))])
    return bool(len(some.row)) and bool((some.vectors("y").argmax(axis=1) == some.scalars("predicted")).all())


def _gradients(store: "Store", layer: Layer, queries: Queries, gradient: ArrayLike | None) -> Float[ndarray, "m o"]:
    """The gradients of each query, in the store's precision."""
    where = f"layer {layer.number} ({layer.name})"
    if gradient is not None:
        try:
            found = np.atleast_2d(np.asarray(gradient))
        except (ValueError, TypeError, RuntimeError) as error:
            raise QueryError(f"gradient: expected numbers, found {error}") from error
        if found.dtype.kind not in "biuf" or found.shape != (len(queries.vectors), layer.d_out):
            expected = f"{len(queries.vectors)} x {layer.d_out} numbers, dL/dy of {where} for each query"
            raise QueryError(f"gradient: expected {expected}, found {found.dtype} of shape {np.shape(gradient)}")
    elif queries.probes is None:
        raise QueryError("score influence: a vector has no loss; give its gradient at the layer's output, too, or a test id")
    elif store.info_file.format < 2 or np.isnan(found := queries.probes.vectors("g")).any():
        raise QueryError(
            f"{store.path}: influence needs the gradient of a loss at {where}, which these probes were recorded without; "
            "record them with rec.probe(..., loss=...)"
        )
    with np.errstate(over="ignore"):
        cast: ndarray = found.astype(store.info_file.precision)
    if not np.isfinite(cast).all():
        raise QueryError(f"gradient at {where}: expected finite {store.info_file.precision} numbers")
    return cast

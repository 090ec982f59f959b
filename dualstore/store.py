"""A store opened for reading: the one object that answers questions."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import ArrayLike

from dualstore.coefficients import Average, When
from dualstore.errors import DualstoreWarning, QueryError
from dualstore.gains import evaluate, gains_of, reweigh
from dualstore.index import LayerIndex
from dualstore.joint import join_steps
from dualstore.log import Log
from dualstore.parameters import parameters_of
from dualstore.probes import find_queries
from dualstore.ranking import rank_patterns
from dualstore.ranks import endings, joined, read_ranks, tasks_by_code
from dualstore.rates import Rates, rates_of, sample_note
from dualstore.relations import run_sql
from dualstore.repeats import build_repeats
from dualstore.result import Result
from dualstore.rows import Labelling
from dualstore.scan import Options
from dualstore.schema import BLOCK_COLUMNS, Column, Layer, PartName, pattern_columns, probe_columns, single
from dualstore.scoring import check_step, find_score
from dualstore.shapes import Int64
from dualstore.sharing import without_errors
from dualstore.sketch import build_sketches
from dualstore.steps import Steps
from dualstore.stiffness import Stiffness, measure_stiffness
from dualstore.summary import describe
from dualstore.sums import build_sums
from dualstore.totals import sum_groups, sum_self
from dualstore.verify import Verification, verify_store
from dualstore.votes import count_votes
from dualstore.weights import Affine, Tensors, save_weights

__all__ = ["Store", "open_store"]

MAX_THREADS = 256


def open_store(
    path: str | Path,
    *,
    budget_bytes: int = Options.budget_bytes,
    threads: int = Options.threads,
    inexact: bool = False,
) -> "Store":
    """The store at `path`, opened for reading; also while it is being recorded, up to its last flush.

    Args:
        budget_bytes: anonymous memory that a scan may take.
        threads: used by products of several queries.
        inexact: whether an optimiser that is not known is taken for plain SGD, and what needs all patterns is estimated
            where only a share of them was recorded, instead of refusing values.

    Raises StoreError where there is no store, DamagedError where its files contradict themselves.
    """
    if budget_bytes < 1 << 20 or not 1 <= threads <= MAX_THREADS:
        found = f"{budget_bytes} bytes and {threads}"
        raise QueryError(f"open: expected a budget of at least 1 MiB and 1 to {MAX_THREADS} threads, found {found}")
    path = Path(path)
    if str(path).startswith("~"):  # a folder of that name: what reads Parquet would look in the user's home
        path = path.absolute()
    return Store(path, Options(budget_bytes, threads), inexact=inexact)


class Store:
    """One recorded training run. Holds `store.json`, the steps and footers; vectors stay on disk."""

    def __init__(self, path: Path, options: Options, *, inexact: bool = False) -> None:
        self.path, self.options, self.inexact = path, options, inexact
        infos = read_ranks(path)
        self.info_file = joined(infos)
        steps = self._parts("steps")
        self._committed = {part.name for part in steps}
        width = 1 + max((layer.number for layer in self.layers), default=-1)
        self.steps = Steps.read(steps) if len(infos) == 1 else join_steps(steps, len(infos), width)
        self.endings = endings(infos, self.steps)
        """How far each of several ranks has come, in words."""
        self._logs: dict[str, tuple[Any, Log]] = {}
        self._indexes: dict[int, LayerIndex] = {}
        self._rates: dict[int, Rates | None] = {}
        self.labelling = Labelling(self.steps, tasks_by_code(infos), self.info_file.format)
        if self.info_file.status == "recording" or self.cut:
            last = f"it is complete up to step {self.last_step}" if len(self.steps.numbers) else "no step of it is complete"
            found = "the ranks ended at different steps" if self.info_file.status != "recording" else "the recording is unfinished"
            warnings.warn("; ".join([f"{path}: {found}", last, *self.endings]), DualstoreWarning, stacklevel=3)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The recorded layers."""
        return self.info_file.layers

    @property
    def last_step(self) -> int:
        """The last step of the store; -1 for none."""
        return int(self.steps.numbers[-1]) if len(self.steps.numbers) else -1

    @property
    def cut(self) -> bool:
        """Whether ranks have written rows of steps that others have not: these do not count."""
        return any(own.last_step > self.last_step for own in self.steps.ranks)

    def query(
        self,
        x: ArrayLike | None = None,
        *,
        layer: int | str,
        test_id: int | Sequence[int] | None = None,
        position: int | None = None,
        top: int = 20,
        bottom: bool = False,
        absolute: bool = False,
        min_alpha: float | None = None,
        where: str | None = None,
        per: str | None = None,
        score: str = "attention",
        output: int | str | None = None,
        gradient: ArrayLike | None = None,
        at_step: int | None = None,
        pool: str | None = None,
    ) -> Result:
        """The patterns with the largest alpha = x_t . x, of all that were recorded: exact, in order.

        Or with the largest contribution c alpha e[output] to an output of the layer for the query, or the largest
        influence c alpha (e . g) on the loss of a probe (`scores`).

        Args:
            x: the query, (d_in,) or (m, d_in) for m queries in one pass, rounded to the store's dtype (half precision is read as
                single); or give `test_id`, one or several. At a layer of tokens a number or a list of them: alpha is 1 where the
                token is the same, else 0.
            layer: number or name.
            position: of the probe's rows at this layer; by default the last.
            top: how many, for each query and group.
            bottom: the smallest alpha instead.
            absolute: the largest |alpha| instead; alpha is shown with its sign.
            min_alpha: only patterns whose alpha, or |alpha|, is at least this.
            where: SQL condition on step, epoch, sample_id, position, label, task, slot, duplicate.
            per: SQL expression; the best of each of its values.
            score: "attention", "contribution" or "influence"; `bottom` and `absolute` are by it.
            output: of a contribution: a number, or "predicted" or "label" of the test example at the layer that predicts.
            gradient: of an influence: g = dL/dy, (d_out,) or one for each query; by default the one recorded for the test
                example by `probe(..., loss=...)`.
            at_step: the memory as it was after this step: later patterns do not exist, c is that of then.
            pool: "mean" or "sum" of what a pattern has for all queries together, say its influence on the mean loss of many.

        Returns:
            rank, alpha, step, epoch, sample_id, position, label, task; test_id or query before them when several were
            asked, and the value of `per`. With a score other than attention it comes first, and alpha and value are its two
            factors; `notes` say what the output consists of. Ties are ordered by step, sample_id and position. alpha is the
            float64 dot product of stored key and query; rows whose alpha is NaN are not ranked.

        Raises QueryError for an unknown layer, test id or column, a wrong vector, or top < 1.
        """
        found = self.layer(layer)
        queries = find_queries(self, found, x, test_id, position)
        return rank_patterns(
            self,
            found,
            queries,
            top=top,
            bottom=bottom,
            absolute=absolute,
            min_alpha=min_alpha,
            where=where,
            per=per,
            score=score,
            output=output,
            gradient=gradient,
            at_step=at_step,
            pool=pool,
        )

    def totals(
        self,
        x: ArrayLike | None = None,
        *,
        layer: int | str | None,
        by: str | Sequence[str] = "label",
        test_id: int | Sequence[int] | None = None,
        position: int | None = None,
        where: str | None = None,
        absolute: bool = False,
        paper: bool = False,
        score: str = "attention",
        output: int | str | None = None,
        gradient: ArrayLike | None = None,
        at_step: int | None = None,
        pool: str | None = None,
    ) -> Result:
        """Sums of alpha, or of another score, over groups of patterns, largest first.

        Args:
            layer: number or name; None for the sum over all layers, of influence only.
            by: SQL expressions over the row columns, as one text or a list; "" for one total of everything.
            absolute: sum |alpha|, or the score's size, instead.
            paper: the rule of Irie et al. 2022: |alpha| at the first layer, alpha at the others.

        Returns:
            The group columns, total (float64) and count. Other arguments and errors as in `query`.
        """
        if layer is None and (score != "influence" or x is not None):
            raise QueryError("layer: expected one; only the influence of recorded test examples can be summed over all of them")
        layers = self.layers if layer is None else (self.layer(layer),)
        asked = [(found, find_queries(self, found, x, test_id, position)) for found in layers]
        text = by if isinstance(by, str) else ", ".join(by)
        magnitude = absolute or (paper and layers[0].number == 0)
        if paper and score != "attention":
            raise QueryError(f"paper: expected with the score attention only, found {score!r}")
        return sum_groups(
            self,
            asked,
            by=text,
            where=where,
            absolute=magnitude,
            score=score,
            output=output,
            gradient=gradient,
            at_step=at_step,
            pool=pool,
        )

    def self_influence(
        self, layer: int | str | None = None, *, top: int = 20, where: str | None = None, at_step: int | None = None
    ) -> Result:
        """The training samples whose patterns did most to their own loss: those that are mislabelled, rare or memorised.

        For each sample the sum of c |x|^2 |e|^2 over its visits and the layers (by default all): the influence of each of its
        patterns on the loss that it came from, which a mean over the batch divides by its size. Largest size first.

        Returns: sample_id, label, task, self_influence, count of patterns.

        Source: Pruthi et al. 2020 (arXiv 2002.08484), self-influence, here for every step instead of some checkpoints.
        """
        layers = self.layers if layer is None else (self.layer(layer),)
        return sum_self(self, layers, top=top, where=where, at_step=at_step)

    def votes(self, layer: int | str | None = None, *, where: str | None = None) -> Result:
        """How well the label with the largest total predicts, over all probes with a label and a prediction.

        A probe's vote is the label with the largest total (|alpha| at the first layer, alpha at the others; the smaller
        label wins a tie). Returned for probes that the network got right and wrong: the number of probes, the share whose
        vote is their label (target_accuracy) and whose vote is the network's prediction (output_accuracy), in 0..1.

        Source: Irie et al. 2022 (arXiv 2202.05798), table 2.
        """
        layers = self.layers if layer is None else (self.layer(layer),)
        return count_votes(self, layers, where=where)

    def stiffness(
        self,
        *,
        m1: float | Sequence[float] = 0.5,
        m2: float | Sequence[float] = 0.0,
        where: str | None = None,
        training: bool = False,
    ) -> Stiffness:
        """How unevenly residual blocks change the features on their way, at each step that has rows of them (`record(blocks=...)`).

        The stiffness index of block l is NSI_l = |f(x_l)| / |x_l|. A trajectory is what one sample goes through at one step; at
        M = (m1, m2) it is stiff where NSI_l >= max(mu (1 + m1), m2), mu being its mean. Blocks that change the shape are left out.

        Args:
            m1: thresholds relative to the mean, one or several, 0 or more.
            m2: thresholds of the index itself; all combinations with `m1` are asked.
            where: SQL condition on step, block, name, sample_id, test_id, slot, label, task, norm, change, increment, nsi, rank.
            training: of the rows from training, also where there are probes, whose rows are taken by default.

        Returns: `steps`, a Result with a row for each step and M: step, trajectories, nsi (mean), tns, m1, m2, stiff (share of
            trajectories that are stiff somewhere), ratio (mean share of blocks where they are); and `blocks`: step, block,
            name, nsi (mean), count. tns is the Total Neural Stiffness: `stiff` integrated over all M.

        Raises QueryError where the store has no rows of blocks, or a threshold or condition is wrong.

        Source: Huang et al. 2023 (arXiv 2308.09939); the integral in closed form, E[max NSI (max NSI / mu - 1)].
        """
        return measure_stiffness(self, m1=m1, m2=m2, where=where, training=training)

    def sql(
        self,
        text: str,
        *,
        layer: int | str | None = None,
        test_id: int | None = None,
        x: ArrayLike | None = None,
        position: int | None = None,
        score: str = "attention",
        output: int | str | None = None,
        gradient: ArrayLike | None = None,
        at_step: int | None = None,
    ) -> Result:
        """The result of SQL over patterns, steps, samples, probes, blocks and, for a chosen layer and query, attention.

        `attention` has the row columns and alpha, and a column of the score's name where one is asked for; it is computed
        while it is read and never held.

        Raises QueryError with DuckDB's message.
        """
        chosen = None if layer is None else self.layer(layer)
        if chosen is None and (test_id is not None or x is not None):
            raise QueryError("sql: expected a layer with the query; give layer=..., or neither")
        if chosen is None or (test_id is None and x is None):
            if score != "attention" or output is not None or gradient is not None or at_step is not None:
                raise QueryError("sql: expected a layer and a query with score, output, gradient and at_step")
            return run_sql(self, text, None, None)
        queries = find_queries(self, chosen, x, test_id, position)
        if len(queries.vectors) > 1:
            raise QueryError(f"sql: expected one query, found {len(queries.vectors)}; ask once for each")
        until = check_step(self, at_step)
        valued = find_score(self, chosen, queries, score, output, gradient, until)
        return run_sql(self, text, chosen, queries, valued, until)

    def info(self) -> dict[str, Any]:
        """What is stored: layers, counts, sizes, tasks, optimiser, and what makes values inexact."""
        return describe(self)

    def verify(self, *, probes: int = 8, at_step: int | None = None) -> "Verification":
        """Proves the store against the network: see `verify.verify_store`. Raises QueryError for a step outside the run."""
        return verify_store(self, probes=probes, until=check_step(self, at_step))

    def layer(self, layer: int | str) -> Layer:
        """The layer with this number or name. Raises QueryError."""
        for found in self.layers:
            if isinstance(layer, str | int | np.integer) and layer in (found.number, found.name):
                return found
        known = ", ".join(f"{found.number} ({found.name})" for found in self.layers)
        raise QueryError(f"{self.path}: no layer {layer!r}; there are {known}")

    def patterns(self, layer: Layer, tokens: Int64[ndarray, " u"] | None = None) -> Log:
        """The log of one layer's patterns; `over` some tokens where they are given. Raises DamagedError."""
        log = self._log(f"patterns/layer={layer.number}", pattern_columns(layer, self.info_file.dtype, self.info_file.format))
        return log if tokens is None else log.over(tokens, single(self.info_file.dtype))

    def rates(self, layer: Layer) -> Rates | None:
        """The rates at which one layer's patterns were recorded; None where all were."""
        if layer.number not in self._rates:
            self._rates[layer.number] = rates_of(self.steps, layer, self.layers.index(layer), len(self.layers))
        return self._rates[layer.number]

    def index(self, layer: Layer, tokens: Int64[ndarray, " u"] | None = None) -> LayerIndex:
        """What the index knows of one layer's patterns: see `build_index`. There is none of tokens."""
        log = self.patterns(layer, tokens)
        if tokens is not None:
            return LayerIndex(self.path / "index" / f"layer={layer.number}", log)
        known = self._indexes.get(layer.number)
        if known is None or known.log is not log:
            known = self._indexes[layer.number] = LayerIndex(self.path / "index" / f"layer={layer.number}", log)
        return known

    def build_index(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Makes query, totals and votes fast: sums and sketches the keys of every part that is not in the index yet.

        `progress` is called with (rows done, rows in all), each row counted three times. Memory: the budget, but
        at least what two row groups take and 16 bytes for each of a million keys that come again.

        Raises StoreError where the index cannot be written.
        """
        total, done = 3 * sum(self.patterns(layer).rows for layer in self.layers), 0

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            progress(done, total)

        for layer in self.layers:
            if layer.keys == "token":  # 4 bytes each: to read them is as fast as to look them up
                advance(3 * self.patterns(layer).rows)
                continue
            build_sums(self.index(layer), self.steps, layer.d_in, advance)
            build_repeats(self.index(layer), advance)
            build_sketches(self.index(layer), layer.d_in, self.options.budget_bytes, advance)

    def probes(self, layer: Layer) -> Log:
        """The log of one layer's probes. Raises DamagedError."""
        return self._log(f"probes/layer={layer.number}", probe_columns(layer, self.info_file.dtype, self.info_file.format))

    def block_rows(self) -> Log:
        """The log of what residual blocks did. Raises DamagedError."""
        return self._log("blocks", BLOCK_COLUMNS)

    def weights(
        self,
        layer: int | str,
        *,
        gains: Mapping[str, Mapping[Any, float]] | None = None,
        where: str | None = None,
        at_step: int | None = None,
        with_initial: bool = False,
        average: Average | None = None,
    ) -> Affine:
        """The layer's weight, (d_out, d_in), and bias, (d_out,), rebuilt from initial weights and patterns in float64.

        Args:
            gains: factors on the memories of groups, `{"task": {"mnist": 1.7}, "label": {3: 0}}`: SQL expressions over the row
                columns, and what the patterns where they have a value count; where several apply, their product. 0 masks.
            where: SQL condition; patterns outside do not count at all.
            at_step: the weights as they were after this step.
            with_initial: the one gain's factor holds for the initial weights, too (Gershman et al. 2025).
            average: the mean of the weights of several steps instead, as EMA or SWA would have it (`dualstore.Average`); up to
                `at_step`, if that is given.

        Raises QueryError for a value that no pattern has, InexactError where the optimiser is not known.
        """
        found = self.layer(layer)
        until = _when(self, at_step, average)
        affine = reweigh(self, [found], gains_of(gains), where=where, until=until, with_initial=with_initial)[0]
        self._warn_estimated([found])
        return affine

    def write_weights(
        self,
        path: str | Path,
        *,
        gains: Mapping[str, Mapping[Any, float]] | None = None,
        where: str | None = None,
        at_step: int | None = None,
        with_initial: bool = False,
        average: Average | None = None,
    ) -> None:
        """Writes the `weights` of all recorded layers as the model's parameters: safetensors, by name, in the store's dtype.

        A parameter that the recorded layers do not make up whole is left out with a warning, and so is one of layers that were
        recorded without errors. Of several biases of a layer the first is their sum and the others are zero: the outputs are
        the same.

        In single precision where that is half. `model.load_state_dict(safetensors.torch.load_file(path), strict=False)` takes
        them. Raises StoreError where the file cannot be written.
        """
        until = _when(self, at_step, average)
        layers = [layer for layer in self.layers if without_errors(self, layer) is None] or self.layers
        for layer in self.layers:
            if layer not in layers:
                warnings.warn(f"{without_errors(self, layer)}: its parameters are left out", DualstoreWarning, stacklevel=2)
        found = reweigh(self, layers, gains_of(gains), where=where, until=until, with_initial=with_initial)
        tensors = {name: values.astype(self.info_file.precision) for name, values in parameters_of(layers, found).items()}
        self._warn_estimated(layers)
        save_weights(Path(path), tensors)

    def _warn_estimated(self, layers: Sequence[Layer]) -> None:
        asked = [(layer, self.rates(layer)) for layer in layers]
        for note in sample_note(asked, "weights are estimated from a recorded share of the patterns"):
            warnings.warn(f"{self.path}: {note}", DualstoreWarning, stacklevel=3)

    def evaluate(
        self,
        gains: Mapping[str, Mapping[Any, float | Sequence[float]]],
        *,
        where: str | None = None,
        at_step: int | None = None,
        with_initial: bool = False,
        average: Average | None = None,
    ) -> Result:
        """Accuracy on the recorded probes, for each task, of the network whose weights are those of `weights` at every layer.

        Factors may be lists: every combination is tried, from one pass over the log. The layers must follow each other with
        a common activation (or none) between them, which the recorded probes show; other networks are refused.

        Returns: a column for each gain, task, probes, accuracy in 0..1.
        """
        until = _when(self, at_step, average)
        return evaluate(self, gains_of(gains), where=where, until=until, with_initial=with_initial)

    def tensors(self, name: str) -> Tensors:
        """What the file holds: tensors of `weights/<name>.safetensors`, "initial" or "final", by name; read one by one.

        Raises StoreError where the file is missing, DamagedError where it is unreadable.
        """
        return Tensors(self.path / "weights" / f"{name}.safetensors")

    def part_paths(self, folder: str) -> list[Path]:
        """Files of "patterns", "probes" (of all layers), "blocks" or "samples" that belong to the store."""
        if folder in ("samples", "blocks"):
            return self._parts(folder)
        return [path for layer in self.layers for path in self._parts(f"{folder}/layer={layer.number}")]

    def _log(self, folder: str, columns: Sequence[Column]) -> Log:
        """The log of a folder: the one used before, whose parts may be mapped already, unless a file has changed."""
        files = self._files(folder)
        state = tuple((file.name, *_state(file)) for file in files)
        known, log = self._logs.get(folder, (None, None))
        if log is None or known != state:
            last = self.last_step if self.cut and folder.startswith("patterns") else None
            log = Log([Path(file.path) for file in files], columns, last)
            self._logs[folder] = (state, log)
        return log

    def _parts(self, folder: str) -> list[Path]:
        return [Path(file.path) for file in self._files(folder)]

    def _files(self, folder: str) -> list[os.DirEntry[str]]:
        """The part files of a folder that belong to the store, those of each rank together."""
        try:
            with os.scandir(self.path / folder) as files:
                found = [file for file in files if file.name.startswith("part-") and file.name.endswith(".parquet")]
        except FileNotFoundError:
            return []
        if self.info_file.status != "complete" and folder.startswith("patterns"):
            found = [file for file in found if file.name in self._committed]
        return sorted(found, key=lambda file: PartName.of(file.name))


def _when(store: Store, at_step: int | None, average: Average | None) -> When:
    """The weights that are meant. Raises QueryError for a mean of none."""
    until = check_step(store, at_step)
    if average is None:
        return until
    if not isinstance(average, Average):
        raise QueryError(f"average: expected a dualstore.Average, found {average!r}")
    last = store.last_step if average.last is None else average.last
    mean = replace(average, last=last if until is None else min(until, last))
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in (mean.first, mean.every, mean.last))
    decay = mean.decay is None or (isinstance(mean.decay, int | float) and 0 <= mean.decay < 1)
    if not whole or not decay or not 1 <= mean.every < 1 << 31 or not 0 <= mean.first <= mean.last <= store.last_step:  # type: ignore[operator]
        raise QueryError(
            f"average: expected 0 <= first <= last <= {store.last_step}, every >= 1 and a decay from 0 to below 1 or none; "
            f"found {mean}"
        )
    return mean


def _state(file: os.DirEntry[str]) -> tuple[int, int, int]:
    """What changes when a file is written anew."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns

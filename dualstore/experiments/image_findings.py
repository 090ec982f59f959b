"""What the stores of the image experiments show: votes, attention across tasks, forgetting and its undoing.

Everything comes from the store alone, accuracies of earlier steps and of masked memories, too.
"""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from dualstore.experiments.findings import Measured, Rows
from dualstore.result import Result
from dualstore.schema import Layer
from dualstore.store import Store

__all__ = ["BETAS", "measure_beta", "measure_continual", "measure_joint", "measure_mnist"]

ASKED = 100
"""Test examples of each task of whose attention totals and matches are looked at; votes and accuracies are of all."""
ASKED_SIZES = 40
"""As many at the first layer, where totals are of |alpha| and every one is computed."""
TOP = 20
BETAS = [round(1 + 0.1 * tenth, 1) for tenth in range(11)]


def measure_mnist(store: Store) -> Measured:
    """How often the label with the largest total is the true label, and the prediction; table 2 of Irie et al. 2022."""
    votes = {(row["layer"], row["prediction"]): row for row in store.votes()}
    counts = [votes[store.layers[0].number, prediction]["probes"] for prediction in ("right", "wrong")]
    numbers = {"test accuracy": counts[0] / sum(counts)}
    for layer in store.layers:
        right, wrong = votes[layer.number, "right"], votes[layer.number, "wrong"]
        name = f"layer {layer.number}: vote is the"
        numbers[f"{name} label, prediction wrong"] = _number(wrong["target_accuracy"])
        numbers[f"{name} label, prediction right"] = _number(right["target_accuracy"])
        numbers[f"{name} output, prediction wrong"] = _number(wrong["output_accuracy"])
    return Measured(numbers)


def measure_joint(store: Store) -> Measured:
    """How much of the attention of test examples of each task goes to patterns of the same one, layer by layer."""
    tasks = sorted(store.info_file.tasks, reverse=True)  # which one came first differs from run to run
    accuracies = _accuracies(store.evaluate({}))
    numbers = {f"{task} test accuracy": accuracies[task] for task in tasks}
    matches: Rows = []
    asked, truth = {task: _probes(store, task)[:ASKED] for task in tasks}, _labels(store)
    for layer in store.layers:
        for task, ids in asked.items():
            totals = store.totals(layer=layer.number, by="task", test_id=_some(ids, layer), paper=True)
            numbers[f"layer {layer.number}, {task}: attention on its own task"] = _own_share(totals, task)
            top = store.query(layer=layer.number, test_id=ids, top=TOP)
            own = [row["task"] == task for row in top]
            numbers[f"layer {layer.number}, {task}: top {TOP} of its own task"] = sum(own) / max(1, len(own))
            matches += _crossings(store, layer.number, task, ids, truth)
    return Measured(numbers, {"best patterns of the other task, most frequent": matches})


def measure_continual(store: Store) -> Measured:
    """What of the first task is forgotten after the second, where the attention goes then, and with the second masked."""
    first, second = store.info_file.tasks
    before, after, masked = _forgetting(store, first, second)
    numbers = {
        f"{_shown(first)} accuracy before {_shown(second)}": before[first],
        f"{_shown(first)} accuracy after it": after[first],
        f"{_shown(second)} accuracy at the end": after[second],
        f"{_shown(first)} accuracy with the memories of {_shown(second)} masked": masked[first],
    }
    wrong = _probes(store, first, wrong=True)[: 2 * ASKED]
    truth = _labels(store)
    tables: dict[str, Rows] = {}
    for layer in store.layers if wrong else ():
        asked = _some(wrong, layer)
        totals = store.totals(layer=layer.number, by="task, label", test_id=asked, paper=True)
        best, best_of_first = _best_groups(totals, None), _best_groups(totals, first)
        name = f"layer {layer.number}, {_shown(first)} misclassified:"
        numbers[f"{name} attention on {_shown(second)}"] = 1 - _own_share(totals, first)
        numbers[f"{name} most attended class is of {_shown(second)}"] = _mean(best[test][0] == second for test in asked)
        numbers[f"{name} vote is the label"] = _mean(best[test][1] == truth[test] for test in asked)
        numbers[f"{name} vote is the label, {_shown(second)} masked"] = _mean(
            best_of_first[test][1] == truth[test] for test in asked
        )
        tables[f"layer {layer.number}: most attended class of misclassified {_shown(first)}"] = _favourites(best, truth)
    return Measured(numbers, tables)


def measure_beta(store: Store) -> Measured:
    """Accuracy on a forgotten task when its memories count more than once, with and without the initial weights."""
    first = store.info_file.tasks[0]
    alone = _accuracies(store.evaluate({}, at_step=_last_step_of(store, first)))
    numbers = {"first task alone": alone[first]}
    for with_initial, suffix in ((True, ", on W_0 too"), (False, "")):
        for row in store.evaluate({"task": {first: BETAS}}, with_initial=with_initial):
            factor, task = next(iter(row.values())), row["task"]
            if task == first:
                numbers[f"beta {factor:.1f}{suffix}"] = row["accuracy"]
    return Measured(numbers)


def _forgetting(store: Store, first: str, second: str) -> list[dict[str, float]]:
    """Accuracy of each task before the second, after it, and after it with its memories masked."""
    before = _accuracies(store.evaluate({}, at_step=_last_step_of(store, first)))
    found: list[dict[str, float]] = [{}, {}]
    for row in store.evaluate({"task": {second: [1.0, 0.0]}}):
        found[next(iter(row.values())) == 0.0][row["task"]] = row["accuracy"]
    return [before, *found]


def _last_step_of(store: Store, task: str) -> int:
    """The last step that has patterns of a task."""
    text = f"SELECT max(step) AS step FROM patterns WHERE layer = {store.layers[0].number} AND task = '{task}'"
    return int(store.sql(text).to_dicts()[0]["step"])


def _probes(store: Store, task: str, *, wrong: bool = False) -> list[int]:
    """Test ids of a task, or of those of it that the network got wrong."""
    only = " AND predicted <> label" if wrong else ""
    text = f"SELECT test_id FROM probes WHERE layer = {store.layers[0].number} AND task = '{task}'{only} ORDER BY test_id"
    return [row["test_id"] for row in store.sql(text)]


def _some(ids: list[int], layer: Layer) -> list[int]:
    return ids if layer.number else ids[:ASKED_SIZES]


def _labels(store: Store) -> dict[int, int]:
    text = f"SELECT test_id, label FROM probes WHERE layer = {store.layers[0].number} ORDER BY test_id"
    return {row["test_id"]: row["label"] for row in store.sql(text)}


def _accuracies(result: Result) -> dict[str, float]:
    return {row["task"]: row["accuracy"] for row in result}


def _own_share(totals: Result, task: str) -> float:
    """The mean over test examples of the share of their total that a task has."""
    own: dict[int, float] = defaultdict(float)
    whole: dict[int, float] = defaultdict(float)
    for row in totals:
        whole[row["test_id"]] += row["total"]
        own[row["test_id"]] += row["total"] if row["task"] == task else 0.0
    return float(np.mean([own[test] / total for test, total in whole.items() if total]))


def _best_groups(totals: Result, task: str | None) -> dict[int, tuple[str, int]]:
    """For each test example the task and label with the largest total, of one task or all."""
    found: dict[int, tuple[str, int]] = {}
    for row in totals:  # largest first
        if task is None or row["task"] == task:
            found.setdefault(row["test_id"], (row["task"], row["label"]))
    return found


def _favourites(best: dict[int, tuple[str, int]], truth: dict[int, int]) -> Rows:
    """For each class, the class that most of its test examples attend to most."""
    counts: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    for test, group in best.items():
        counts[truth[test]][group] += 1
    rows = []
    for label, found in sorted(counts.items()):
        (task, attended), count = min(found.items(), key=lambda item: (-item[1], item[0]))
        rows.append({"label": label, "attends_to": f"{task} {attended}", "share": count / found.total(), "examples": found.total()})
    return rows


def _crossings(store: Store, layer: int, task: str, ids: list[int], truth: dict[int, int]) -> Rows:
    """Which labels of the other task match those of a task best, and how often such a match is the best of all."""
    own = {row["test_id"]: row["alpha"] for row in store.query(layer=layer, test_id=ids, top=1, where=f"task = '{task}'")}
    best = store.query(layer=layer, test_id=ids, top=1, where=f"task <> '{task}'").to_dicts()
    pairs = Counter((truth[row["test_id"]], row["label"]) for row in best)
    ahead = Counter((truth[row["test_id"]], row["label"]) for row in best if row["alpha"] > own[row["test_id"]])
    return [
        {"layer": layer, "task": task, "label": label, "matched_label": other, "matches": count, "ahead": ahead[label, other]}
        for (label, other), count in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:3]
    ]


def _shown(task: str) -> str:
    return {"mnist": "MNIST", "fashion": "Fashion-MNIST"}.get(task, task)


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")


def _number(value: float | None) -> float:
    return float("nan") if value is None else value

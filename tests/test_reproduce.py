"""The papers' image experiments at a tiny scale: what is recorded, measured on the stores, and shown beside the paper's."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualstore
from dualstore.errors import DualstoreError
from dualstore.experiments import image_findings, reproduce
from dualstore.experiments.catalogue import COMPARISONS, EXPERIMENTS
from dualstore.experiments.experiment import Request
from dualstore.experiments.figures import draw
from dualstore.experiments.findings import Finding, Measured, Published, Run, compare
from dualstore.experiments.passages import agreement
from dualstore.experiments.texts import load_aesop, load_wikitext
from tests.pictures import write_idx, write_sets
from tests.test_cli import call, fails, parsed
from tests.test_texts import write_aesop, write_wikitext

SMALL = {"steps": 12, "batch_size": 8, "hidden": 6, "lr": 0.1}
ARGUMENTS = ("--steps", "12", "--batch-size", "8", "--hidden", "6", "--lr", "0.1")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of both sets, one gzipped, one plain."""
    return write_sets(tmp_path_factory.mktemp("images"))


def ignore(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def numbers_of(name: str, path: Path) -> dict[str, float]:
    experiment, request = EXPERIMENTS[name], Request()
    return experiment.measure(dualstore.open(path), experiment.settings(request), request).numbers


def again(name: str, folder: Path, images: Path, runs: int = 1, *, keep: bool = True, **changes: Any) -> reproduce.Reproduction:
    return reproduce.reproduce(name, folder, runs, Request(data=images, changes=SMALL | changes), ignore, keep=keep)


@pytest.mark.parametrize(
    ("run", "rows", "tasks"),
    [
        ("mnist", [96] * 3, ["mnist"]),
        ("joint", [96] * 3, ["mnist", "fashion"]),
        ("continual", [192] * 3, ["mnist", "fashion"]),
        ("beta", [192] * 2, ["mnist", "fashion"]),
    ],
)
def test_train_records_a_run_that_verifies(images: Path, tmp_path: Path, run: str, rows: list[int], tasks: list[str]) -> None:
    found = reproduce.train(run, tmp_path / "s", Request(data=images, changes=SMALL), ignore)
    assert "accuracy on mnist after phase 1" in found
    store = dualstore.open(tmp_path / "s")
    assert [store.patterns(layer).rows for layer in store.layers] == rows
    assert sorted(store.info_file.tasks) == sorted(tasks)
    assert store.verify().ok


def test_options_of_train_reach_the_training(images: Path, tmp_path: Path) -> None:
    words = ("train", "mnist", "--store", tmp_path / "s", "--data", images, *ARGUMENTS, "--clip", "0.05")
    assert "accuracy on mnist after phase 1" in call(*words).stdout
    clips = parsed("sql", "SELECT max(clip) AS high, max(lr) AS lr FROM steps", "--store", tmp_path / "s")
    assert clips[0]["high"] < 1
    assert clips[0]["lr"] == 0.1
    fails(*words, match="expected no folder or an empty one")


def test_train_names_missing_and_foreign_data(tmp_path: Path) -> None:
    images = write_sets(tmp_path / "data")
    words = ("train", "mnist", "--store", tmp_path / "s", "--steps", "1")
    fails(*words, "--data", tmp_path / "nowhere", match="train-images-idx3-ubyte")
    (images / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    fails(*words, "--data", images, match="t10k-labels-idx1-ubyte.gz: expected an IDX file")
    write_idx(images / "mnist" / "t10k-labels-idx1-ubyte", np.arange(3), packed=True)
    fails(*words, "--data", images, match="expected images and as many labels")
    assert not (tmp_path / "s").exists()


def test_scale_takes_a_share_of_widths_and_images(images: Path, tmp_path: Path) -> None:
    changes = {"steps": 2, "batch_size": 8, "images": 40}
    reproduce.train("joint", tmp_path / "s", Request(data=images, scale=0.01, changes=changes), ignore)
    assert [(layer.d_in, layer.d_out) for layer in dualstore.open(tmp_path / "s").layers] == [(36, 8), (8, 8), (8, 10)]


def test_the_second_phase_of_beta_has_whole_epochs_of_its_two_classes(images: Path, tmp_path: Path) -> None:
    reproduce.train("beta", tmp_path / "s", Request(data=images, changes={"batch_size": 3, "hidden": 4}), ignore)
    store = dualstore.open(tmp_path / "s")
    counts = store.sql("SELECT task, label, count(*) FROM patterns WHERE layer = 0 GROUP BY ALL ORDER BY ALL")
    assert [tuple(row.values()) for row in counts] == [
        ("fashion", 2, 20), ("fashion", 3, 20), ("mnist", 0, 20), ("mnist", 1, 20),
    ]  # fmt: skip
    first = store.sql("SELECT sample_id FROM patterns WHERE layer = 0 AND step < 3 ORDER BY step, slot").to_dicts()
    assert [row["sample_id"] for row in first] == list(range(8))  # in the order of the files, the rest of an epoch included


@pytest.fixture(scope="module", params=["mnist", "joint", "continual", "beta"])
def done(request: pytest.FixtureRequest, images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An experiment of two runs whose stores are kept."""
    folder = tmp_path_factory.mktemp(request.param)
    again(request.param, folder, images, runs=2)
    return request.param, folder


def test_numbers_are_those_of_the_stores(done: tuple[str, Path]) -> None:
    name, folder = done
    written = json.loads((folder / f"{name}.json").read_text())
    assert [run["seed"] for run in written["runs"]] == [0, 1]
    measured = [numbers_of(name, folder / f"{name}-{seed}") for seed in (0, 1)]
    assert [list(numbers) for numbers in measured] == [[finding["name"] for finding in written["findings"]]] * 2
    for finding in written["findings"]:
        ours = [numbers[finding["name"]] for numbers in measured]
        assert np.allclose(np.array(finding["runs"], float), ours, rtol=0, atol=0, equal_nan=True), finding["name"]
        assert finding["mean"] is None or finding["mean"] == pytest.approx(sum(ours) / 2)
    assert {finding["name"] for finding in written["findings"]} >= set(EXPERIMENTS[name].published)


def test_what_is_there_is_not_done_again(done: tuple[str, Path], images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder = done
    monkeypatch.setattr(reproduce, "train", lambda *_: pytest.fail("trains again"))
    before = json.loads((folder / f"{name}.json").read_text())
    assert json.loads(again(name, folder, images, runs=2).to_json())["runs"] == before["runs"]
    note = folder / f"{name}-1.json"
    known = json.loads(note.read_text())
    note.write_text(
        json.dumps({"settings": known["settings"], "cost": before["runs"][1]["cost"]})
    )  # stopped before it was measured
    assert json.loads(again(name, folder, images, runs=2).to_json())["findings"] == before["findings"]
    with pytest.raises(DualstoreError, match="expected a run with these settings, found one with others"):
        again(name, folder, images, lr=0.2)


def test_a_run_that_was_stopped_while_it_trained_is_trained_anew(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    request = Request(data=images, changes=SMALL)
    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce("mnist", tmp_path, 1, request, stop)
    assert (tmp_path / "mnist-0" / "store.json").exists()
    found = reproduce.reproduce("mnist", tmp_path, 1, request, ignore)
    assert found.runs[0].cost["rows"] == 3 * 12 * 8
    assert not (tmp_path / "mnist-0").exists()


def test_a_folder_that_is_something_else_is_left_alone(images: Path, tmp_path: Path) -> None:
    (tmp_path / "mnist-0").mkdir()
    (tmp_path / "mnist-0" / "mine").write_text("mine")
    with pytest.raises(DualstoreError, match="expected a store that an earlier reproduction made"):
        again("mnist", tmp_path, images)
    assert (tmp_path / "mnist-0" / "mine").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"mine": 1}'])
def test_notes_that_are_something_else_are_left_alone(images: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "mnist-0.json").write_text(text)
    with pytest.raises(DualstoreError, match=r"mnist-0\.json: expected "):
        again("mnist", tmp_path, images)
    assert (tmp_path / "mnist-0.json").read_text() == text


@pytest.mark.parametrize("run", ["[]", "null", "{}", '{"seed": 0}', '{"seed": 0, "measured": {"a": 1}, "cost": {}}'])
def test_numbers_of_a_run_that_are_something_else_are_refused(images: Path, tmp_path: Path, run: str) -> None:
    again("mnist", tmp_path, images, keep=False)
    note = tmp_path / "mnist-0.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"run": json.loads(run)}))
    with pytest.raises(DualstoreError, match=r"mnist-0\.json: expected the numbers of a run, found something else .*; remove it"):
        again("mnist", tmp_path, images)


@pytest.mark.parametrize("cost", [{"train_s": 1.0}, "much", None])
def test_a_store_that_is_gone_before_it_was_measured_is_trained_again(images: Path, tmp_path: Path, cost: Any) -> None:
    before = again("mnist", tmp_path, images, keep=False)
    note = tmp_path / "mnist-0.json"
    note.write_text(json.dumps({"settings": json.loads(note.read_text())["settings"], "cost": cost}))
    assert again("mnist", tmp_path, images).runs[0].measured == before.runs[0].measured


def test_two_processes_do_not_do_the_same_run(images: Path, tmp_path: Path) -> None:
    lines = ("import fcntl, sys", "file = open(sys.argv[1], 'w')", "fcntl.lockf(file, fcntl.LOCK_EX)")
    code = "\n".join([*lines, "print('held', flush=True)", "sys.stdin.read()"])
    words = [sys.executable, "-c", code, str(tmp_path / ".mnist-0.lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        with pytest.raises(DualstoreError, match="another process is at this run"):
            again("mnist", tmp_path, images)
        other.communicate("")
    assert again("mnist", tmp_path, images, keep=False).runs
    assert [path.name for path in tmp_path.iterdir() if "lock" in path.name] == []


def test_settings_that_an_experiment_lacks_are_named(images: Path, tmp_path: Path) -> None:
    with pytest.raises(DualstoreError, match="mnist: has no setting bptt; there are steps"):
        again("mnist", tmp_path, images, bptt=3)


def test_shares_of_attention_are_those_of_all_products(images: Path, tmp_path: Path) -> None:
    again("joint", tmp_path, images)
    store = dualstore.open(tmp_path / "joint-0")
    numbers = image_findings.measure_joint(store).numbers
    for layer in range(3):
        rows = store.sql(f"SELECT x, task FROM patterns WHERE layer = {layer}").to_dicts()
        keys, own = np.array([row["x"] for row in rows], float), np.array([row["task"] == "fashion" for row in rows])
        asked = store.sql(f"SELECT x FROM probes WHERE layer = {layer} AND task = 'fashion' ORDER BY test_id").to_dicts()
        alphas = np.array([row["x"] for row in asked], float) @ keys.T
        alphas = np.abs(alphas) if layer == 0 else alphas
        expected = float(np.mean(alphas[:, own].sum(1) / alphas.sum(1)))
        assert numbers[f"layer {layer}, fashion: attention on its own task"] == pytest.approx(expected, rel=1e-9)


def test_forgetting_is_that_of_the_network_and_its_undoing_masks_the_second_task(images: Path, tmp_path: Path) -> None:
    found = again("continual", tmp_path, images)
    store, numbers, cost = dualstore.open(tmp_path / "continual-0"), found.runs[0].measured.numbers, found.runs[0].cost
    assert numbers["MNIST accuracy before Fashion-MNIST"] == pytest.approx(cost["accuracy on mnist after phase 1"])
    assert numbers["MNIST accuracy after it"] == pytest.approx(cost["accuracy on mnist after phase 2"])
    assert numbers["Fashion-MNIST accuracy at the end"] == pytest.approx(cost["accuracy on fashion after phase 2"])
    masked = {row["task"]: row["accuracy"] for row in store.evaluate({"task": {"fashion": 0}})}
    assert numbers["MNIST accuracy with the memories of Fashion-MNIST masked"] == masked["mnist"]
    wrong = store.sql("SELECT test_id, label FROM probes WHERE layer = 2 AND task = 'mnist' AND predicted <> label").to_dicts()
    votes = [store.totals(layer=2, test_id=row["test_id"], where="task = 'mnist'").to_dicts()[0]["label"] for row in wrong]
    expected = np.mean([vote == row["label"] for vote, row in zip(votes, wrong, strict=True)])
    assert numbers["layer 2, MNIST misclassified: vote is the label, Fashion-MNIST masked"] == pytest.approx(expected)


def test_reproduce_prints_both_columns_and_writes_numbers_and_figures(images: Path, tmp_path: Path) -> None:
    words = ("reproduce", "beta", "--runs", "2", "--out", tmp_path / "out", "--data", images, *ARGUMENTS)
    shown = call(*words).stdout
    assert "beta 1.9, on W_0 too" in shown
    assert "99.5" in shown
    assert "what it cost" in shown
    assert "note: settings changed: steps = 12" in shown
    assert (tmp_path / "out" / "beta.png").read_bytes().startswith(b"\x89PNG")
    printed, written = json.loads(call(*words, "--json").stdout), json.loads((tmp_path / "out" / "beta.json").read_text())
    assert printed == written
    assert not (tmp_path / "out" / "beta-0").exists()


def test_every_image_experiment_is_drawn(done: tuple[str, Path], images: Path, tmp_path: Path) -> None:
    name, folder = done
    assert draw(again(name, folder, images, runs=2), tmp_path) == [tmp_path / f"{name}.png"]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_figures_without_matplotlib_are_left_out_with_the_line_that_installs_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None\n"
        "from pathlib import Path\n"
        "from dualstore.experiments.figures import draw\n"
        "from dualstore.experiments.findings import Reproduction\n"
        "print(draw(Reproduction('mnist', {}, '', '', [], [], [], {}), Path('.')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert "pip install 'dualstore[report]'" in found.stderr


def test_a_finding_agrees_within_two_points_or_two_deviations() -> None:
    assert Finding("a", (0.5, 0.52), Published(0.49)).agrees
    assert not Finding("a", (0.5, 0.53), Published(0.49)).agrees
    assert Finding("a", (0.5, 0.58), Published(0.49, 0.026)).agrees
    assert Finding("a", (0.5,)).agrees is None
    assert Finding("a", (0.5,)).std is None
    assert Finding("a", (0.5, 0.7)).std == pytest.approx(0.1 * 2**0.5)


def test_numbers_that_not_all_runs_have_are_left_out() -> None:
    runs = [Run(0, Measured({"a": 0.1, "b": 2.0}, plain=["b"]), {}), Run(1, Measured({"b": 3.0}), {})]
    (found,) = compare(runs, {"b": Published(1.0)})
    assert (found.name, found.ours, found.paper, found.share) == ("b", (2.0, 3.0), Published(1.0), False)


# Texts and residual networks


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small texts of both kinds."""
    folder = tmp_path_factory.mktemp("texts")
    write_aesop(folder)
    return write_wikitext(folder)


@pytest.mark.parametrize(("name", "section"), [("aesop", "fable"), ("wikitext", "article")])
def test_texts_are_reproduced_with_windows_and_rates(texts: Path, tmp_path: Path, name: str, section: str) -> None:
    words = ("reproduce", name, "--out", tmp_path, "--data", texts, "--keep", "--hidden", "8", "--batch-size", "4", "--steps", "5")
    shown = call(*words).stdout
    assert "[[" in shown
    written = {finding["name"]: finding for finding in json.loads((tmp_path / f"{name}.json").read_text())["findings"]}
    store = dualstore.open(tmp_path / f"{name}-0")
    corpus = load_aesop(texts) if name == "aesop" else load_wikitext(texts)
    for layer in ("lstm.l0", "output"):
        rates = agreement(store, corpus, layer, totals=0)
        assert written[f"{layer}, same {section}: top 3 by attention"]["mean"] == rates["best"]["section"]
        assert written[f"{layer}, same {section}: at random"]["mean"] == rates["random"]["section"]
        assert written[f"{layer}, same next token: 3 smallest"]["mean"] == rates["smallest"]["next"]
        over = written[f"{layer}, same {section}: top 3 by attention over random, times"]["mean"]
        assert over == pytest.approx(rates["best"]["section"] / rates["random"]["section"])
    assert written["perplexity of held-out passages after training"]["mean"] > 1
    sample = store.sql("SELECT task, payload, mime FROM samples ORDER BY sample_id LIMIT 1").to_dicts()[0]
    assert (sample["task"], sample["mime"]) == (corpus.sections[0], "text/plain")
    assert parsed("totals", "--store", store.path, "--test-id", "0", "--layer", "lstm.l0", "--by", "task")
    assert (tmp_path / f"{name}.png").exists()


def test_the_transformer_is_reproduced_with_both_levels(texts: Path, tmp_path: Path) -> None:
    words = ("reproduce", "transformer", "--out", tmp_path, "--data", texts, "--scale", "0.2", "--batch-size", "4", "--steps", "3")
    shown = call(*words).stdout
    for level in ("context, head 3", "training, W_Q", "training, W_K", "training, W_V"):
        assert level in shown
    assert "blocks.1.self_attn.{q,k,v}, same fable: top 3 by attention" in shown


def test_residual_networks_are_compared(images: Path, tmp_path: Path) -> None:
    words = (
        "reproduce",
        "stiffness",
        "--out",
        tmp_path,
        "--data",
        images,
        "--runs",
        "1",
        "--keep",
        "--steps",
        "4",
        "--batch-size",
        "8",
    )
    shown = call(*words, "--scale", "0.25").stdout
    written = {finding["name"]: finding["mean"] for finding in json.loads((tmp_path / "stiffness.json").read_text())["findings"]}
    for name in ("resnet", "senet", "stepnet"):
        found = dualstore.open(tmp_path / f"{name}-0").stiffness(m1=0.5).steps.to_dicts()[-1]
        assert written[f"{name}: total neural stiffness"] == pytest.approx(found["tns"], rel=1e-12)
        assert 0 <= written[f"{name}: test accuracy"] <= 1
        assert f"{name}: index along depth" in shown
    assert (tmp_path / "stiffness.png").exists()


@pytest.mark.parametrize("name", ["aesop", "stepnet"])
def test_train_and_the_other_commands_go_together(texts: Path, images: Path, tmp_path: Path, name: str) -> None:
    data = texts if name == "aesop" else images
    shown = call(
        "train", name, "--store", tmp_path / "s", "--data", data, "--scale", "0.05", "--steps", "3", "--batch-size", "4"
    ).stdout
    for line in shown.split("Try next:\n")[1].splitlines():
        call(*shlex.split(line.replace("dualstore ", "", 1)))


def test_full_takes_the_steps_of_the_paper() -> None:
    for name, steps, streams in (("aesop", 5_000, 64), ("wikitext", 10_000, 128)):
        settings = EXPERIMENTS[name].settings
        assert settings(Request(full=True)).steps == steps > settings(Request()).steps
        assert settings(Request(full=True)).batch_size == streams
        assert settings(Request(full=True, changes={"steps": 7})).steps == 7


def test_every_experiment_is_offered_by_the_commands() -> None:
    train, again = (re.search(r"{(.*?)}", "".join(call(name, "--help").stdout.split())) for name in ("train", "reproduce"))
    assert train
    assert again
    assert train[1].split("|") == list(EXPERIMENTS)
    assert again[1].split("|") == [name for name in EXPERIMENTS if name not in COMPARISONS["stiffness"]] + list(COMPARISONS)

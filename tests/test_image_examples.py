"""Test images beside what they retrieve, against all products."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualstore
from dualstore.experiments import image_examples, reproduce
from dualstore.experiments.experiment import Request
from dualstore.experiments.figures import draw_examples
from dualstore.experiments.image_examples import continual_examples, joint_examples, mnist_examples
from dualstore.store import Store
from tests.pictures import SIDE, write_sets

CHANGES = {"batch_size": 8, "hidden": 6, "lr": 0.1}
FINDERS = {"mnist": mnist_examples, "joint": joint_examples, "continual": continual_examples}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of both sets."""
    return write_sets(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def stores(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    """A store of each experiment; every image comes several times."""
    folder, found = tmp_path_factory.mktemp("stores"), {}
    for name in FINDERS:
        request = Request(data=images, changes=CHANGES | {"steps": 24 if name == "joint" else 12})
        reproduce.train(name, folder / name, request, lambda *_: None)
        found[name] = dualstore.open(folder / name)
    return found


def patterns_of(store: Store, layer: int, test_id: int) -> list[dict[str, Any]]:
    """All of a layer, each with its alpha, the largest first."""
    rows = store.sql(f"SELECT step, sample_id, task, label, x FROM patterns WHERE layer = {layer}").to_dicts()
    (probe,) = store.sql(f"SELECT x FROM probes WHERE layer = {layer} AND test_id = {test_id}").to_dicts()
    alphas = np.array([row["x"] for row in rows], float) @ np.array(probe["x"], float)
    return sorted(
        ({**row, "alpha": alpha} for row, alpha in zip(rows, alphas.tolist(), strict=True)),
        key=lambda row: (-row["alpha"], row["step"], row["sample_id"]),
    )


@pytest.mark.parametrize("largest", [3, 500])
@pytest.mark.parametrize("name", list(FINDERS))
def test_what_a_test_image_retrieves_is_what_all_products_give(
    stores: dict[str, Store], name: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_examples, "LARGEST", largest)
    store, examples = stores[name], FINDERS[name](stores[name])
    pictures = {row["sample_id"]: row["payload"] for row in store.sql("SELECT sample_id, payload FROM samples")}
    assert examples
    for example in examples:
        assert [found.layer for found in example.retrievals] == [0, 1, 2]
        for found in example.retrievals:
            ranked = patterns_of(store, found.layer, example.test_id)
            visits = list({row["sample_id"]: row for row in reversed(ranked[:largest])}.values())
            best = sorted(visits, key=lambda row: -row["alpha"])[:3]
            assert [match.alpha for match in found.best] == pytest.approx([row["alpha"] for row in best], rel=1e-9)
            assert len({match.sample_id for match in found.best}) == len(best)
            assert all(match.png == pictures[match.sample_id] for match in found.best)
            for (task, label), total in found.totals.items():
                mine = [row["alpha"] for row in ranked if (row["task"], row["label"]) == (task, label)]
                assert found.largest[task, label].tolist() == pytest.approx(mine[:largest], rel=1e-9)
                assert total == pytest.approx(sum(map(abs, mine)) if found.layer == 0 else sum(mine), rel=1e-6)
            groups = {(row["task"], row["label"]) for row in ranked}
            assert list(found.totals) == sorted(groups, key=lambda group: (store.info_file.tasks.index(group[0]), group[1]))


@pytest.mark.parametrize("name", list(FINDERS))
def test_chosen_are_the_first_right_and_wrong_ones(stores: dict[str, Store], name: str) -> None:
    tasks = stores[name].info_file.tasks
    wanted = {
        "mnist": [("mnist", True), ("mnist", False)],
        "joint": [(task, True) for task in tasks],
        "continual": [("mnist", False), ("fashion", True)],
    }[name]
    probes = stores[name].sql("SELECT * FROM probes WHERE layer = 0 ORDER BY test_id").to_dicts()
    expected = []
    for task, right in wanted:
        mine = [row for row in probes if row["task"] == task and (row["predicted"] == row["label"]) == right]
        expected += mine[:1]
    found = FINDERS[name](stores[name])
    assert [(one.test_id, one.group, one.predicted) for one in found] == [
        (row["test_id"], (row["task"], row["label"]), row["predicted"]) for row in expected
    ]
    for one, row in zip(found, expected, strict=True):
        assert one.pixels.shape == (SIDE, SIDE)
        assert one.pixels.ravel().tolist() == row["x"]


def test_examples_are_drawn_beside_the_numbers_of_each_run(images: Path, tmp_path: Path) -> None:
    request = Request(data=images, changes=CHANGES | {"steps": 12})
    reproduce.reproduce("continual", tmp_path, 2, request, lambda *_: None)
    for seed in (0, 1):
        assert (tmp_path / f"continual-{seed}.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_show_draws_nothing(tmp_path: Path) -> None:
    draw_examples([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()

"""Residual networks: each step is f times its size, each variant trains, and the store holds what the blocks did."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualstore
from dualstore.datasets import ImageSet, load_digits
from dualstore.errors import DualstoreError, RecordError
from dualstore.experiments.residual import VARIANTS, Adaptor, Block, ResidualNet, Settings, train

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    """Digits of 8 x 8."""
    return load_digits()


def tiny(**changes: Any) -> Settings:
    small: dict[str, Any] = {"width": 4, "depth": 2, "steps": 6, "batch_size": 16, "evaluations": 3, "probes": 20, "images": 200}
    return Settings(**{**small, **changes})


def run(path: Path, images: ImageSet, settings: Settings) -> float:
    return train(path, images, settings, progress=lambda done, total: None, maker="a test").accuracy


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_f_times_its_size(variant: str) -> None:
    torch.manual_seed(0)
    block = Block(6, 6, 1, variant).double()
    x = torch.randn(3, 6, 9, 9, dtype=torch.float64)
    f = block.branch(x)
    size = 1.0
    if variant == "senet":
        size = block.scaled.gate(f.mean((2, 3)))[:, :, None, None]
    if variant == "stepnet":
        size = block.scaled.gate(torch.cat([(x + f).mean((2, 3)), x.mean((2, 3))], 1))[:, :, None, None]
    torch.testing.assert_close(block(x) - x, f * size)
    if variant != "resnet":
        assert ((size > 0) & (size < 1)).all()


def test_the_adaptor_sees_where_the_step_comes_from() -> None:
    torch.manual_seed(0)
    adaptor = Adaptor(4)
    x, f = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    assert not torch.allclose(adaptor(x, f), adaptor(x + 1, f))


def test_networks_have_the_stages_they_say() -> None:
    model = ResidualNet("resnet", 8, 3)
    shapes: list[tuple[int, ...]] = []
    for block in model.modules():
        if isinstance(block, Block):
            block.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[1:])))
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert shapes == [(8, 28, 28)] * 3 + [(16, 14, 14)] * 3 + [(32, 7, 7)] * 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_trains_and_leaves_rows(tmp_path: Path, images: ImageSet, variant: str) -> None:
    accuracy = run(tmp_path / "store", images, tiny(variant=variant))
    assert 0 <= accuracy <= 1
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    assert store.info()["blocks"] == [f"stages.{stage}.{block}" for stage in range(3) for block in range(2)]
    found = store.stiffness()
    assert [(row["step"], row["trajectories"]) for row in found.steps] == [(2, 20), (4, 20), (6, 20)]
    # the first block of the later stages changes the shape
    assert {row["block"] for row in found.blocks} == {0, 1, 3, 5}
    assert all(row["tns"] > 0 for row in found.steps)
    assert store.stiffness(training=True).steps.table.column("trajectories").to_pylist() == [16] * 6
    rows = store.sql("SELECT increment, change FROM blocks WHERE NOT isnan(nsi)").table
    increment, change = (rows.column(name).to_numpy() for name in ("increment", "change"))
    if variant == "resnet":
        np.testing.assert_allclose(increment, change, rtol=1e-4)
    else:
        assert (change < increment).all()
    assert store.sql("SELECT count(*) AS count FROM samples").to_dicts() == [{"count": 200}]


def test_a_network_learns_the_digits(tmp_path: Path, images: ImageSet) -> None:
    assert run(tmp_path / "store", images, tiny(steps=60, batch_size=32, images=None, evaluations=1)) > 0.7


def test_runs_of_one_seed_are_the_same_and_see_the_same_batches(tmp_path: Path, images: ImageSet) -> None:
    for name, settings in (("a", tiny()), ("b", tiny()), ("other", tiny(variant="stepnet"))):
        run(tmp_path / name, images, settings)
    text = "SELECT step, block, sample_id, slot, norm FROM blocks WHERE test_id = -1 ORDER BY ALL"
    first, second, other = (dualstore.open(tmp_path / name).sql(text).table for name in ("a", "b", "other"))
    assert first.equals(second)
    assert first.select(["step", "block", "sample_id"]).equals(other.select(["step", "block", "sample_id"]))


@pytest.mark.parametrize(
    ("change", "message"), [({"variant": "vgg"}, "variant: expected one of resnet"), ({"depth": 0}, "depth: ")]
)
def test_settings_that_mean_nothing_are_refused(tmp_path: Path, images: ImageSet, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DualstoreError, match=message):
        run(tmp_path / "store", images, tiny(**change))
    assert not (tmp_path / "store").exists()


def test_a_place_that_is_taken_is_refused(tmp_path: Path, images: ImageSet) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RecordError, match="expected no folder or an empty one"):
        run(tmp_path, images, tiny())

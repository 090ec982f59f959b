"""Rows of residual blocks: the norms of what each block did to each sample, in training and in probes, and nothing else changed."""

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualstore
from dualstore.errors import DamagedError, DualstoreWarning, RecordError
from dualstore.schema import StoreInfo

torch.set_num_threads(1)

X = torch.linspace(-2, 2, 16 * 6, dtype=torch.float64).reshape(16, 6).sin()
Y = torch.arange(16) % 3
BATCHES = torch.arange(16).split(4)


class Block(nn.Module):
    """x + g(f(x)), or with another width W x + g(f(x)); g halves every second number."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(d_in, d_out), nn.Tanh())
        self.shortcut = nn.Linear(d_in, d_out, bias=False) if d_in != d_out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.branch(x)
        return self.shortcut(x) + f * (1 + torch.arange(f.shape[-1]) % 2) / 2


class Net(nn.Module):
    """Three blocks, of which the second changes the width, and a head."""

    def __init__(self, *, inplace: bool = False, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6, 6), Block(6, 5), Block(5, 5)])
        self.head = nn.Linear(5, 3)
        self.inplace, self.checkpointed = inplace, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if self.checkpointed else x
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
            x = x.mul_(0.9) if self.inplace else x * 0.9
        return self.head(x)


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).double()


def twin(model: Net) -> Net:
    """Another model of the same weights, without hooks."""
    found = net()
    found.load_state_dict(model.state_dict())
    return found


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@contextmanager
def recording(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, **options: Any) -> Iterator[dualstore.Recorder]:
    settings = {"layers": ["head"], "blocks": ["blocks.?"], "branch": "branch", "index": False, "dtype": "float64", **options}
    with dualstore.record(model, optimizer, path, **settings) as recorder:
        yield recorder


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(X[rows]), Y[rows])


def train(
    recorder: dualstore.Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int,
    before: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Steps `first` to `end`, each preceded by `before`."""
    for step in range(first, end):
        before()
        rows = BATCHES[step % 4]
        with recorder.batch(rows, Y[rows], task="t"):
            loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def expected(model: Net, x: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Norm, change and increment of each block for each row of x, in numpy."""
    found = []
    for block in model.blocks:
        y, f = block(x), block.branch(x)
        same = y.shape == x.shape
        nothing = np.full(len(x), np.nan)
        change = np.linalg.norm((y - x).numpy(), axis=1) if same else nothing
        increment = np.linalg.norm(f.numpy(), axis=1) if same else nothing
        found.append((np.linalg.norm(x.numpy(), axis=1), change, increment))
        x = y * 0.9
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    """All rows of blocks/, as the files have them."""
    return [row for part in sorted((path / "blocks").glob("part-*.parquet")) for row in pq.ParquetFile(part).read().to_pylist()]


def numbers(some: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows that can be compared, in a fixed order; NaN is None."""
    plain = [tuple(None if value != value else value for value in row.values()) for row in some]
    return sorted(plain, key=repr)


def assert_rows(found: list[dict[str, Any]], model: Net, ids: torch.Tensor, name: str) -> None:
    """The rows are what these samples went through."""
    for number, columns in enumerate(expected(model, X[ids])):
        mine = {row[name]: row for row in found if row["block"] == number}
        assert sorted(mine) == sorted(ids.tolist())
        for place, one in enumerate(ids.tolist()):
            values = [mine[one][column] for column in ("norm", "change", "increment")]
            np.testing.assert_allclose(values, [column[place] for column in columns], rtol=1e-12)


def test_rows_are_the_norms_computed_by_hand(tmp_path: Path) -> None:
    model, before = net(), []
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store") as recorder:
        train(recorder, model, optimizer, 0, 6, lambda: before.append(twin(model)))
    found = rows(tmp_path / "store")
    assert len(found) == 6 * 4 * 3
    for step in range(6):
        mine = [row for row in found if row["step"] == step]
        assert_rows(mine, before[step], BATCHES[step % 4], "sample_id")
        assert {row["test_id"] for row in mine} == {-1}
        assert sorted(row["slot"] for row in mine if row["block"] == 0) == [0, 1, 2, 3]
        assert all(row["label"] == row["sample_id"] % 3 and row["task"] == 0 for row in mine)
    assert all(row["change"] != row["increment"] for row in found)
    store = dualstore.open(tmp_path / "store")
    assert store.info()["blocks"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert store.verify().ok


def test_probes_at_several_steps_all_stay(tmp_path: Path) -> None:
    model, ids = net(), torch.arange(5)
    optimizer, models = sgd(model), {}
    with recording(model, optimizer, tmp_path / "store") as recorder:
        for step in (0, 2, 4):
            train(recorder, model, optimizer, max(step - 2, 0), step)
            models[step] = twin(model)
            model.eval()
            with recorder.probe(ids, Y[ids], task="t", loss=lambda out: nn.functional.cross_entropy(out, Y[ids], reduction="none")):
                model(X[ids])
            model.train()
    found = [row for row in rows(tmp_path / "store") if row["test_id"] >= 0]
    assert {row["sample_id"] for row in found} == {-1}
    for step, then in models.items():
        assert_rows([row for row in found if row["step"] == step], then, ids, "test_id")
    assert dualstore.open(tmp_path / "store").verify().ok


def test_without_a_branch_the_increment_is_the_change(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store", blocks=[Block], branch=None) as recorder:
        train(recorder, model, optimizer, 0, 2)
    found = rows(tmp_path / "store")
    assert len(found) == 24
    assert all(row["increment"] == row["change"] or row["block"] == 1 for row in found)


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"checkpointed": False}, {"checkpointed": True}], ids=str)
@pytest.mark.parametrize("queue_bytes", [0, 1 << 20])
def test_training_stays_bit_identical_and_the_rows_the_same(tmp_path: Path, options: dict[str, Any], queue_bytes: int) -> None:
    plain, watched, other = net(**options), net(**options), net()
    for model, blocks in ((plain, None), (watched, ["blocks.?"])):
        optimizer = sgd(model)
        path = tmp_path / ("plain" if blocks is None else "watched")
        branch = None if blocks is None else "branch"
        with recording(model, optimizer, path, blocks=blocks, branch=branch, queue_bytes=queue_bytes) as recorder:
            train(recorder, model, optimizer, 0, 5)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True))
    assert not (tmp_path / "plain" / "blocks").exists()
    optimizer = sgd(other)
    with recording(other, optimizer, tmp_path / "other") as recorder:
        train(recorder, other, optimizer, 0, 5)
    assert numbers(rows(tmp_path / "watched")) == numbers(rows(tmp_path / "other"))


def test_every_leaves_out_steps(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store", every=3) as recorder:
        train(recorder, model, optimizer, 0, 7)
    assert {row["step"] for row in rows(tmp_path / "store")} == {0, 3, 6}


def test_what_is_thrown_away_or_runs_without_gradients_is_no_row(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store") as recorder:
        train(recorder, model, optimizer, 0, 1)
        with recorder.batch(BATCHES[2], Y[BATCHES[2]]):
            loss_of(model, BATCHES[2]).backward()
        optimizer.zero_grad()
        with recorder.batch(BATCHES[3]), torch.no_grad():
            model(X[BATCHES[3]])
        with recorder.batch(BATCHES[3]):
            model(X[BATCHES[3]])  # no backward
        with torch.no_grad():
            model(X)
        recorder.estimate(X)
        train(recorder, model, optimizer, 1, 2)
    found = rows(tmp_path / "store")
    assert {(row["step"], row["sample_id"]) for row in found} == {(row // 4, row) for row in range(8)}
    assert len(found) == 24


def test_batches_that_are_accumulated_are_rows_of_one_step(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store") as recorder:
        for some in BATCHES[:2]:
            with recorder.batch(label=Y[some]):
                loss_of(model, some).backward()
        optimizer.step()
    found = rows(tmp_path / "store")
    assert {row["step"] for row in found} == {0}
    assert sorted(row["slot"] for row in found if row["block"] == 2) == list(range(8))
    assert {row["sample_id"] for row in found} == {-1}


def test_blocks_that_are_frozen_have_rows(tmp_path: Path) -> None:
    model = net()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with recording(model, optimizer, tmp_path / "store") as recorder:
        train(recorder, model, optimizer, 0, 2)
    assert len(rows(tmp_path / "store")) == 24


def test_tuples_positions_and_half_precision_are_measured_a_sample(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x + 2 * x, None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.head = Wide(), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.wide(x.to(torch.bfloat16))[0].float())

    model = Model()
    x = torch.full((2, 5, 6), 3.0)
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store", blocks=["wide"], branch=None, dtype="float32") as recorder:
        with recorder.batch([7, 8], torch.tensor([[4, 5, 5, 5, 5], [6, 5, 5, 5, 5]])):
            model(x).square().sum().backward()
        optimizer.step()
    found = rows(tmp_path / "store")
    assert [(row["sample_id"], row["label"]) for row in found] == [(7, 4), (8, 6)]
    np.testing.assert_allclose([row["norm"] for row in found], 3 * 30**0.5, rtol=1e-6)
    np.testing.assert_allclose([row["change"] for row in found], 6 * 30**0.5, rtol=1e-6)


def test_a_resumed_recording_has_the_rows_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    def probe(recorder: dualstore.Recorder, model: nn.Module) -> None:
        model.eval()
        with recorder.probe([0, 1]):
            model(X[:2])
        model.train()

    model = net()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "whole") as recorder:
        train(recorder, model, optimizer, 0, 4)
        probe(recorder, model)
        train(recorder, model, optimizer, 4, 9)
        probe(recorder, model)
    model = net()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store") as recorder:
        train(recorder, model, optimizer, 0, 4)
        probe(recorder, model)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(recorder, model, optimizer, 4, 6)
        recorder.flush()
        train(recorder, model, optimizer, 6, 8)
        probe(recorder, model)
    again = net(1)
    optimizer = sgd(again)
    again.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    with pytest.raises(RecordError, match=r"blocks: the store has \('blocks.0', .*\), found \(\)"):
        dualstore.record(again, optimizer, tmp_path / "store", layers=["head"], dtype="float64", resume=True)
    with recording(again, optimizer, tmp_path / "store", resume=True) as recorder:
        assert recorder.steps == 4
        train(recorder, again, optimizer, 4, 9)
        probe(recorder, again)
    assert numbers(rows(tmp_path / "store")) == numbers(rows(tmp_path / "whole"))
    assert dualstore.open(tmp_path / "store").verify().ok


def test_merging_carries_the_rows_along(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store") as recorder:
        train(recorder, model, optimizer, 0, 2)
        recorder.flush()
        train(recorder, model, optimizer, 2, 4)
    dualstore.merge_stores(tmp_path / "merged", [tmp_path / "store"])
    assert len(list((tmp_path / "merged" / "blocks").iterdir())) == 2
    assert numbers(rows(tmp_path / "merged")) == numbers(rows(tmp_path / "store"))
    part = tmp_path / "store" / "blocks" / "part-0-000001.parquet"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(DamagedError, match="expected a Parquet file"):
        dualstore.merge_stores(tmp_path / "again", [tmp_path / "store"])
    assert any("blocks" in problem for problem in dualstore.open(tmp_path / "store").verify().problems)


def test_rows_of_steps_that_are_not_committed_do_not_count(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store") as recorder:
        train(recorder, model, optimizer, 0, 2)
        recorder.flush()
        train(recorder, model, optimizer, 2, 4)
    for folder in ("steps", "patterns/layer=0"):
        (tmp_path / "store" / folder / "part-0-000001.parquet").unlink()
    text = (tmp_path / "store" / "store.json").read_text().replace('"complete"', '"recording"')
    (tmp_path / "store" / "store.json").write_text(text)
    with pytest.warns(DualstoreWarning, match="complete up to step 1"):
        store = dualstore.open(tmp_path / "store")
    assert {row["step"] for row in store.sql("SELECT DISTINCT step FROM blocks")} == {0, 1}


def test_a_store_without_blocks_is_read_as_before(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with recording(model, optimizer, tmp_path / "store", blocks=None, branch=None) as recorder:
        train(recorder, model, optimizer, 0, 2)
    file = tmp_path / "store" / "store.json"
    text = file.read_text()
    file.write_text(text.replace(',\n  "blocks": []', ""))
    assert file.read_text() != text
    assert StoreInfo.read(tmp_path / "store").blocks == ()
    store = dualstore.open(tmp_path / "store")
    assert store.verify().ok
    assert store.sql("SELECT * FROM blocks").to_dicts() == []
    shutil.rmtree(tmp_path / "store")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": ["block.?"]}, r"blocks: 'block.\?' matches no module of the model; near are blocks"),
        ({"blocks": [nn.Conv2d]}, "blocks: Conv2d matches no module of the model; there are blocks, blocks.0"),
        ({"blocks": "blocks.?"}, "blocks: expected names and types of modules"),
        ({"branch": "f"}, "block 'blocks.0': expected a submodule 'f', its branch, found branch, shortcut"),
        ({"blocks": None}, "branch: expected the name of a submodule of each of blocks="),
    ],
)
def test_wrong_choices_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(RecordError, match=message), recording(model, sgd(model), tmp_path / "store", **options):
        pass
    assert not (tmp_path / "store").exists()


def test_a_block_whose_input_is_no_tensor_is_named(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[0] + pair[1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.head = Pair(), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.pair((x, x)))

    model = Model().double()
    with (
        pytest.raises(RecordError, match=r"block 'pair': expected its input to be a tensor of numbers.*found tuple"),
        pytest.warns(DualstoreWarning)
        if False
        else recording(model, sgd(model), tmp_path / "a", blocks=["pair"], branch=None) as recorder,
        recorder.batch(BATCHES[0]),
    ):
        model(X[:4])


def test_ids_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = net()
    with recording(model, sgd(model), tmp_path / "store") as recorder:
        with (
            pytest.raises(RecordError, match=r"block 'blocks.0': expected an input of 3 samples.*found 4"),
            recorder.batch([1, 2, 3]),
        ):
            model(X[:4])
        model.eval()
        with pytest.raises(RecordError, match="with blocks= expected test ids of 0 or more, found -1"), recorder.probe([0, -1]):
            model(X[:2])

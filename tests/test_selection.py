"""What of a training is recorded: chosen layers, shares of rows, limits, no padding; and what is refused before it begins."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualstore
from dualstore.errors import DualstoreWarning, RecordError

torch.set_num_threads(1)

X = torch.linspace(-2, 2, 16 * 3 * 4, dtype=torch.float64).reshape(16, 3, 4).sin()
Y = torch.arange(16) % 3


class Net(nn.Module):
    """An encoder of two layers and a head; outputs for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"first": nn.Linear(4, 6), "second": nn.Linear(6, 6)})
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.encoder["second"](torch.tanh(self.encoder["first"](x))))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def train(recorder: dualstore.Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> None:
    for step in range(steps):
        rows = [(step * 5 + k) % 16 for k in range(4)]
        with recorder.batch(rows, Y[rows]):
            nn.functional.cross_entropy(model(X[rows]).mean(1), Y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def quiet() -> Any:
    with pytest.warns(DualstoreWarning, match=r"not recorded: norm\.weight, norm\.bias") as caught:
        yield caught


# Layers by name and type


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (["encoder.*"], ["encoder.first", "encoder.second"]),
        (["head"], ["head"]),
        (["*.second", "h?ad"], ["encoder.second", "head"]),
        ([nn.Linear], ["encoder.first", "encoder.second", "head"]),
        (["encoder.first", nn.Linear], ["encoder.first", "encoder.second", "head"]),
    ],
)
@pytest.mark.usefixtures("quiet")
def test_layers_are_chosen_by_patterns_and_types(tmp_path: Path, chosen: list[Any], names: list[str]) -> None:
    model = net()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path, dtype="float64", layers=chosen) as recorder:
        train(recorder, model, optimizer)
    store = dualstore.open(tmp_path)
    assert [layer.name for layer in store.layers] == names
    assert store.verify().ok
    left = [name for name, _ in model.named_parameters() if name.rsplit(".", 1)[0] not in names]
    assert store.info()["unrecorded"] == left


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (["encoder.frist"], "layers: 'encoder.frist' matches no layer of the model that can be recorded; near are encoder.first"),
        (["norm"], "layers: 'norm' is no layer that can be recorded; there are encoder.first, encoder.second, head"),
        ([nn.Linear, "nothing*"], "layers: 'nothing*' matches no layer of the model that can be recorded"),
        ([nn.Conv2d], "layers: Conv2d matches no layer of the model that can be recorded"),
        ("head", "layers: expected names and types of modules, as in ['encoder.*', nn.Linear], found 'head'"),
        ([], "expected a model with at least one linear layer that the optimiser trains, found none"),
    ],
)
def test_a_choice_of_nothing_is_refused_with_what_is_near(tmp_path: Path, chosen: Any, message: str) -> None:
    model = net()
    with pytest.raises(RecordError, match=re.escape(message)):
        dualstore.record(model, sgd(model), tmp_path / "store", layers=chosen)
    assert not (tmp_path / "store").exists()


# Shares


def columns(path: Path, text: str) -> Any:
    return dualstore.open(path).sql(text).to_dicts()


@pytest.mark.usefixtures("quiet")
def test_one_step_in_so_many_is_recorded_with_its_rate(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path, every=3) as recorder:
        train(recorder, model, optimizer, 7)
    assert columns(tmp_path, "SELECT DISTINCT step FROM patterns ORDER BY step") == [{"step": 0}, {"step": 3}, {"step": 6}]
    rates = columns(tmp_path, "SELECT step, rates[1] AS rate FROM steps ORDER BY step")
    assert [row["rate"] for row in rates] == [1 / 3, 0, 0, 1 / 3, 0, 0, 1 / 3]
    assert dualstore.open(tmp_path).info()["problems"] == []


@pytest.mark.usefixtures("quiet")
def test_a_share_of_the_rows_is_drawn_the_same_way_for_a_seed(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        model = net()
        optimizer = sgd(model)
        with dualstore.record(model, optimizer, tmp_path / name, share={"encoder.*": 0.5}, seed=seed) as recorder:
            train(recorder, model, optimizer, 20)
        found.append(columns(tmp_path / name, "SELECT layer, step, sample_id, position FROM patterns ORDER BY ALL"))
    assert found[0] == found[1] != found[2]
    counts = [sum(row["layer"] == layer for row in found[0]) for layer in range(3)]
    assert counts[2] == 20 * 12
    assert all(80 < count < 160 for count in counts[:2])
    assert columns(tmp_path / "a", "SELECT DISTINCT rates FROM steps") == [{"rates": [0.5, 0.5, 1.0]}]


@pytest.mark.usefixtures("quiet")
def test_chosen_positions_are_recorded_and_values_are_known_to_be_incomplete(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with (
        pytest.warns(DualstoreWarning, match=re.escape("only the positions [-1, 0] of longer inputs are recorded")),
        dualstore.record(model, optimizer, tmp_path, positions=[-1, 0]) as recorder,
    ):
        train(recorder, model, optimizer)
    assert columns(tmp_path, "SELECT DISTINCT position FROM patterns ORDER BY ALL") == [{"position": 0}, {"position": 2}]
    assert not dualstore.open(tmp_path).verify().ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, "share: expected a number above 0 and at most 1"),
        ({"share": {"head": 1.5}}, "share: expected a number above 0 and at most 1"),
        ({"every": 0}, "every: expected a whole number of at least 1, found 0"),
        ({"positions": []}, "positions: expected whole numbers"),
        ({"max_bytes": -1}, "max_bytes: expected 0 or more, found -1"),
        ({"sampler": 3}, "sampler: expected a torch DistributedSampler, found int"),
        ({"resume": True}, "no store there"),
    ],
)
@pytest.mark.filterwarnings("ignore:these parameters train")
def test_wrong_options_are_refused_before_anything_is_written(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(RecordError, match=re.escape(message)):
        dualstore.record(model, sgd(model), tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_options_of_wrong_types_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """In a process of its own, where no test tool looks at types first."""
    wrong = {
        "layers=[3]": "layers: expected names and types of modules",
        "share={3: 0.5}": "share: expected names of layers",
        "share='half'": "share: expected a number above 0",
        "every=1.5": "every: expected a whole number of at least 1, found 1.5",
        "positions=3": "positions: expected whole numbers, as in [-1] for the last one, found 3",
        "optimizer=model": "optimizer: expected one of torch.optim or several, found Linear(",
        "optimizer=[]": "optimizer: expected one of torch.optim or several, found []",
        "max_bytes='1 GB'": "max_bytes: expected a number, found '1 GB'",
    }
    code = f"""
import dualstore, torch
model = torch.nn.Linear(2, 2)
for options in {list(wrong)!r}:
    try:
        kept = "" if "optimizer=" in options else "optimizer=torch.optim.SGD(model.parameters()), "
        eval(f"dualstore.record(model, path='store', {{kept}}{{options}})")
    except dualstore.RecordError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(found.stdout.splitlines()) == len(wrong)
    for line, message in zip(found.stdout.splitlines(), wrong.values(), strict=True):
        assert line.startswith(message)
    assert not (tmp_path / "store").exists()


# Limits


@pytest.mark.usefixtures("quiet")
def test_recording_stops_at_its_limit_and_training_goes_on(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    step_bytes = 12 * (3 * 32 + 4 * (4 + 6 + 6 + 6 + 6 + 3))
    recorder = dualstore.record(model, optimizer, tmp_path, max_bytes=5 * step_bytes + 100)
    train(recorder, model, optimizer, 5 - 1)
    with pytest.warns(DualstoreWarning, match="max_bytes: recording has stopped after step 4"):
        train(recorder, model, optimizer, 3)
    model.eval()
    with recorder.probe([1]):
        model(X[:1])
    recorder.close()
    store = dualstore.open(tmp_path)
    assert store.steps.numbers.tolist() == [0, 1, 2, 3, 4]
    assert store.verify().ok
    assert len(store.query(test_id=1, layer=0, top=3).to_dicts()) == 3


@pytest.mark.usefixtures("quiet")
def test_what_recording_takes_is_said_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    optimizer = sgd(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recorder = dualstore.record(model, optimizer, tmp_path, dtype="float64")
    random = torch.get_rng_state()
    found = recorder.estimate(X[:4], steps=6)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert found.rows_per_step == {"encoder.first": 12, "encoder.second": 12, "head": 12}
    assert "dualstore: 4.13 kB a step, 24.8 kB in all" in capsys.readouterr().err
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(recorder, model, optimizer, 6)
    recorder.close()
    written = sum(
        layer["rows"] * (32 + 8 * (layer["d_in"] + layer["d_out"])) for layer in dualstore.open(tmp_path).info()["layers"]
    )
    assert found.total_bytes == written
    assert found.free_bytes > 0


@pytest.mark.usefixtures("quiet")
def test_an_estimate_larger_than_the_disk_is_warned_about(tmp_path: Path) -> None:
    model = net()
    with (
        dualstore.record(model, sgd(model), tmp_path) as recorder,
        pytest.warns(DualstoreWarning, match="recording 1000000000000 steps takes about"),
    ):
        recorder.estimate(X[:4], steps=10**12)


# Padding


class Reader(nn.Module):
    """Reads tokens with attention, which looks at no padding, and predicts the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.head = nn.Linear(5, 6), nn.MultiheadAttention(6, 1, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return self.head(h + self.attend(h, h, h, key_padding_mask=padding, need_weights=False)[0])  # type: ignore[no-any-return]


def test_padding_is_left_out_and_what_errors_reach_is_marked(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reader().double()
    optimizer = sgd(model)
    x, padding = torch.randn(4, 5, 5, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.bool)
    padding[:2, 3:] = True
    labels = torch.arange(20).reshape(4, 5) % 5
    labels[padding], labels[:, 0] = -100, -100
    with dualstore.record(model, optimizer, tmp_path, dtype="float64") as recorder:
        for _ in range(3):
            with recorder.batch([0, 1, 2, 3], labels):
                nn.functional.cross_entropy(model(x, padding).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    store = dualstore.open(tmp_path)
    assert store.verify().ok
    names = {layer.number: layer.name for layer in store.layers}
    text = "SELECT layer, label = -100 AS ignored, count(*) AS n, min(abs(list_sum(e))) > 0 AS reached FROM patterns GROUP BY ALL"
    counts = {(names[row["layer"]], row["ignored"]): row for row in store.sql(text).to_dicts()}
    assert counts["head", False]["n"] == 3 * 12
    assert ("head", True) not in counts
    assert counts["embed", True]["n"] == 3 * 4  # the first tokens, which others attend to; none of the padding
    assert counts["embed", True]["reached"]


def test_labels_that_fit_no_positions_are_warned_about(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).double()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path) as recorder:
        with recorder.batch([0, 1], torch.zeros(2, 7, dtype=torch.int64)):
            model(X[:2]).sum().backward()
        with pytest.warns(DualstoreWarning, match=r"labels of shape \(2, 7\) fit the positions of no layer"):
            optimizer.step()


# Several optimisers


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}])
@pytest.mark.usefixtures("quiet")
def test_several_optimisers_that_step_together_are_exact(tmp_path: Path, settings: dict[str, float]) -> None:
    model = net()
    first = torch.optim.SGD(model.encoder.parameters(), lr=0.1, **settings)
    second = torch.optim.SGD([*model.head.parameters(), *model.norm.parameters()], lr=0.03, **settings)
    with dualstore.record(model, [first, second], tmp_path, dtype="float64") as recorder:
        for step in range(6):
            rows = [(step * 5 + k) % 16 for k in range(4)]
            with recorder.batch(rows, Y[rows]):
                nn.functional.cross_entropy(model(X[rows]).mean(1), Y[rows]).backward()
            for optimizer in (first, second) if step % 2 else (second, first):
                optimizer.step()
            first.zero_grad()
            second.zero_grad()
    store = dualstore.open(tmp_path)
    assert store.steps.numbers.tolist() == list(range(6))
    assert max(check.weight_residual or 0 for check in store.verify().layers) < 1e-12
    assert store.verify().ok


def test_optimisers_that_take_turns_are_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    model = nn.ModuleDict({"maker": maker, "judge": judge})
    first, second = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.5)
    x = X.flatten(0, 1)
    with dualstore.record(model, [first, second], tmp_path, dtype="float64") as recorder:
        for step in range(5):
            rows = [step, step + 1]
            with recorder.batch(rows):
                second.zero_grad()
                (judge(x[rows]) - judge(maker(x[rows]).detach())).square().mean().backward()
            second.step()
            with recorder.batch(rows):
                first.zero_grad()
                judge(maker(x[rows])).square().mean().backward()
            first.step()
    store = dualstore.open(tmp_path)
    found = store.verify()
    assert found.problems == []
    assert max(check.weight_residual or 0 for check in found.layers) < 1e-12


@pytest.mark.usefixtures("quiet")
def test_optimisers_of_two_classes_give_attention_only(tmp_path: Path) -> None:
    model = net()
    both = [
        torch.optim.SGD(model.encoder.parameters(), lr=0.1),
        torch.optim.AdamW([*model.head.parameters(), *model.norm.parameters()]),
    ]
    with dualstore.record(model, both, tmp_path) as recorder, recorder.batch([0, 1]):
        model(X[:2]).square().mean().backward()
        for optimizer in both:
            optimizer.step()
    info = dualstore.open(tmp_path).info()
    assert (info["optimizer"], info["exact"]) == ("SGD+AdamW", False)


# Refused


def test_complex_weights_are_named_and_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, dtype=torch.complex64))
    with pytest.warns(DualstoreWarning, match=r"not recorded: 1\.weight, 1\.bias"):
        dualstore.record(model, sgd(model), tmp_path).close()
    assert [layer.name for layer in dualstore.open(tmp_path).layers] == ["0"]


def test_a_model_is_recorded_once_at_a_time(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    with dualstore.record(model, sgd(model), tmp_path / "a"):
        with pytest.raises(RecordError, match="this model is being recorded already; close that recording first"):
            dualstore.record(model, sgd(model), tmp_path / "b")
        assert not (tmp_path / "b").exists()
    dualstore.record(model, sgd(model), tmp_path / "b").close()


def test_parameters_without_memory_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, device="meta"))
    with pytest.raises(RecordError, match=r"layer '1': its 1\.weight is on the meta device"):
        dualstore.record(model, sgd(model), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_ids_may_come_twice_in_a_batch_and_are_told_apart_by_their_slot(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).double()
    optimizer = sgd(model)
    with dualstore.record(model, optimizer, tmp_path, dtype="float64") as recorder:
        for _ in range(2):
            with recorder.batch([7, 7, 8], [0, 1, 2]):
                model(X[:3, 0]).square().mean().backward()
        optimizer.step()
    found = columns(tmp_path, "SELECT sample_id, slot, label FROM patterns ORDER BY slot")
    assert [(row["sample_id"], row["slot"], row["label"]) for row in found] == [
        (7, 0, 0), (7, 1, 1), (8, 2, 2), (7, 3, 0), (7, 4, 1), (8, 5, 2)
    ]  # fmt: skip
    assert dualstore.open(tmp_path).verify().ok
    np.testing.assert_equal(dualstore.open(tmp_path).steps.table.column("batch_size").to_pylist(), [6])

"""Kinds of layers: the rows of every step add up to the gradients that autograd left, and rebuild weights and outputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualstore
from dualstore.schema import Layer

torch.set_num_threads(1)

SAMPLES, STEPS = 24, 6
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:these parameters train but are not recorded")


class Trained:
    """A model trained for some steps with a momentum and a decay, recorded, and its gradients noted by hand."""

    def __init__(self, path: Path, model: nn.Module, inputs: torch.Tensor, loss: Loss | None = None, **options: Any) -> None:
        self.path, self.model = path, model
        self.gradients: list[dict[str, torch.Tensor]] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, weight_decay=1e-3)
        optimizer.register_step_pre_hook(lambda *_: self.gradients.append(self._now()))
        with dualstore.record(model, optimizer, path, dtype="float64", **options) as recorder:
            for step in range(STEPS):
                rows = [(5 * step + 3 * k) % SAMPLES for k in range(5)]
                with recorder.batch(rows, [row % 3 for row in rows]):
                    (loss or square)(model, inputs[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with recorder.probe([1, 2], loss=lambda output: first(output).reshape(2, -1).square().sum(1)):
                model(inputs[:2])
            self.probed = inputs[:1]
        self.store = dualstore.open(path)

    def _now(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters()
        return {name: p.grad.detach().to_dense().clone() for name, p in named if p.grad is not None}

    def gradient(self, layer: Layer, step: int, *, bias: bool = False) -> np.ndarray:
        """By hand, of a layer's matrix or bias."""
        found = []
        for place in layer.bias_places[:1] if bias else layer.weight_places:
            whole = self.gradients[step][place.parameter].numpy()
            some = whole if place.rows is None else whole[slice(*place.rows)]
            flat = some if bias else some.reshape(len(some), -1)
            found.append(flat.T if place.transposed else flat)
        return np.concatenate(found, axis=-1)

    def rows(self, layer: Layer) -> dict[str, np.ndarray]:
        """What the store has of a layer, as pyarrow reads it; keys as vectors."""
        paths = sorted((self.path / f"patterns/layer={layer.number}").glob("*.parquet"))
        table = pq.ParquetDataset(paths).read().to_pydict()
        found = {name: np.array(values) for name, values in table.items()}
        if "token" in found:
            found["x"] = np.eye(layer.d_in)[found["token"]]
        return found

    def assert_exact(self, limit: float = 1e-12) -> None:
        """Rows of each step against autograd, and the store's own proof."""
        for layer in self.store.layers:
            rows = self.rows(layer)
            for step in range(STEPS):
                mine = rows["step"] == step
                e, x = rows["e"][mine], rows["x"][mine]
                others = [
                    self.rows(other)
                    for other in self.store.layers
                    if other is not layer and other.weight_places[0].parameter == layer.weight_places[0].parameter
                    and other.weight_places[0].rows is None
                ]  # fmt: skip
                turned = sum((r["x"][r["step"] == step].T @ r["e"][r["step"] == step] for r in others), np.zeros(()))
                np.testing.assert_allclose(e.T @ x + turned, self.gradient(layer, step), atol=limit, rtol=limit)
                if layer.bias:
                    np.testing.assert_allclose(e.sum(0), self.gradient(layer, step, bias=True), atol=limit, rtol=limit)
        self.assert_probes(limit)
        found = self.store.verify()
        assert found.problems == []
        assert len(found.layers) == len(self.store.layers)
        for check in found.layers:
            assert check.weight_residual is not None
            assert check.weight_residual < limit
            assert check.output_residual is not None
            assert check.output_residual < limit

    def assert_probes(self, limit: float) -> None:
        """Keys and gradients of a test example against the gradients of its loss."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(first(self.model(self.probed)).square().sum(), list(named.values()), allow_unused=True)
        self.gradients.append({name: g.to_dense() for name, g in zip(named, found, strict=True) if g is not None})
        sums = {layer.number: self._of_probe(layer) for layer in self.store.layers}
        for layer in self.store.layers:
            place, module = layer.weight_places[0], self.model.get_submodule(layer.name) if layer.keys == "token" else None
            if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.scale_grad_by_freq):
                continue  # the gradient of the output is not what reaches the table
            others = [
                sums[other.number].T
                for other in self.store.layers
                if other is not layer and other.weight_places[0].parameter == place.parameter and place.rows is None
            ]
            mine = sum(others, sums[layer.number])
            if np.isfinite(mine).all():  # gradients of what is looked up for all samples together are not taken apart
                np.testing.assert_allclose(mine, self.gradient(layer, -1), atol=limit, rtol=limit)
            else:
                assert layer.name in ("places", "mix")
        self.gradients.pop()

    def _of_probe(self, layer: Layer) -> np.ndarray:
        """The sum of g x^T over the rows of test example 1."""
        (path,) = (self.path / f"probes/layer={layer.number}").glob("*.parquet")
        rows = {name: np.array(values) for name, values in pq.ParquetFile(path).read().to_pydict().items()}
        mine = rows["test_id"] == 1
        x = np.eye(layer.d_in)[rows["token"]] if layer.keys == "token" else rows["x"]
        return rows["g"][mine].T @ x[mine]  # type: ignore[no-any-return]

    def names(self) -> list[str]:
        return [layer.name for layer in self.store.layers]


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return first(model(x)).square().mean()


def numbers(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, *shape, dtype=torch.float64)


def tokens(*shape: int, vocabulary: int = 7) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, vocabulary, (SAMPLES, *shape))


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(3, 4, 3), (3, 9)),
    "1d strided": (nn.Conv1d(4, 6, 4, stride=3, padding=2, dilation=2, groups=2), (4, 17)),
    "2d same": (nn.Conv2d(2, 4, (2, 3), padding="same", padding_mode="reflect"), (2, 6, 5)),
    "2d depthwise": (nn.Conv2d(3, 6, 3, groups=3, padding=1, padding_mode="circular", bias=False), (3, 5, 5)),
    "2d of one place": (nn.Conv2d(2, 3, 4), (2, 4, 4)),
    "3d": (nn.Conv3d(2, 2, (1, 2, 2), padding=(0, 1, 0), padding_mode="replicate"), (2, 3, 4, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_recorded_at_every_place_of_their_output(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    module, shape = CONVOLUTIONS[name]
    model = nn.Sequential(module, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    model(numbers(*shape))
    run = Trained(tmp_path / "store", model, numbers(*shape))
    run.assert_exact()
    layer = run.store.layers[0]
    places = model[0](numbers(*shape)).flatten(2).shape[-1]
    rows = run.rows(layer)
    assert sorted(set(rows["position"].tolist())) == list(range(places))
    assert layer.kind == type(module).__name__


def test_a_convolution_and_what_follows_in_channels_last_are_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(18, 2)).double()
    model = model.to(memory_format=torch.channels_last)
    Trained(tmp_path / "store", model, numbers(2, 6, 6).to(memory_format=torch.channels_last)).assert_exact()


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_idx": 0}, {"scale_grad_by_freq": True}, {"padding_idx": 3, "scale_grad_by_freq": True}],
)
def test_embeddings_are_recorded_by_token(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5, **options), nn.Tanh(), nn.Linear(5, 3)).double()
    run = Trained(tmp_path / "store", model, tokens(4))
    run.assert_exact()
    assert run.store.layers[0].keys == "token"
    assert run.rows(run.store.layers[0])["token"].dtype == np.int64


def test_sparse_gradients_of_an_embedding_are_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 5, sparse=True), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = tokens(4, vocabulary=9)
    with dualstore.record(model, optimizer, tmp_path, dtype="float64") as recorder:
        for step in range(STEPS):
            with recorder.batch([step, step + 1]):
                square(model, x[step : step + 2]).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = dualstore.open(tmp_path).verify()
    assert found.problems == []
    assert max(check.weight_residual or 0 for check in found.layers) < 1e-12


class Tied(nn.Module):
    """A language model whose output layer has the embedding's weight."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x))))  # type: ignore[no-any-return]


def test_a_weight_tied_between_embedding_and_output_has_two_kinds_of_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = Trained(tmp_path / "store", Tied().double(), tokens(4))
    run.assert_exact()
    assert [(layer.name, layer.keys) for layer in run.store.layers] == [
        ("embed", "token"),
        ("mix", "vector"),
        ("head", "vector"),
    ]
    places = [layer.weight_places[0] for layer in run.store.layers]
    assert places[0].parameter == places[2].parameter == "embed.weight"
    assert (places[0].transposed, places[2].transposed) == (True, False)


class Placed(nn.Module):
    """Tokens and their places, which are looked up once for all samples."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.words, self.places, self.flat = nn.Embedding(7, 6), nn.Embedding(5, 6), flat
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        places = self.mix(self.places(places if self.flat else places[None]))
        return self.head(torch.tanh(self.words(x) + places))  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [4, 5])
def test_a_table_of_positions_is_recorded_as_of_no_sample(tmp_path: Path, length: int) -> None:
    """Five samples: with five positions, too."""
    torch.manual_seed(0)
    run = Trained(tmp_path / "store", Placed(flat=False).double(), tokens(length))
    run.assert_exact()
    for layer in run.store.layers:
        rows = run.rows(layer)
        shared = layer.name in ("places", "mix")
        assert set(rows["sample_id"] == -1) == {shared}
        assert rows["position"][rows["step"] == 0].tolist() == list(range(length)) * (1 if shared else 5)
    assert len(run.store.query(test_id=1, layer="places", position=2, top=3).to_dicts()) == 3


def test_a_gain_may_be_of_a_group_that_some_layers_lack(tmp_path: Path) -> None:
    """A table of positions has patterns of no label."""
    torch.manual_seed(0)
    run = Trained(tmp_path / "store", Placed(flat=False).double(), tokens(4))
    run.store.write_weights(tmp_path / "masked.safetensors", gains={"label": {1: 0}})
    masked, final = load_file(tmp_path / "masked.safetensors"), run.model.state_dict()
    assert np.allclose(masked["places.weight"], final["places.weight"].numpy(), atol=1e-12)
    assert not np.allclose(masked["words.weight"], final["words.weight"].numpy(), atol=1e-6)
    with pytest.raises(dualstore.QueryError, match="gain label=7: no pattern has this value; there are "):
        run.store.write_weights(tmp_path / "none.safetensors", gains={"label": {7: 0}})
    assert not (tmp_path / "none.safetensors").exists()


def test_positions_without_a_dimension_of_samples_are_told_from_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(7, 6), "places": nn.Embedding(5, 6)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualstore.record(model, optimizer, tmp_path, dtype="float64") as recorder:
        for length in (5, 4):
            with recorder.batch(range(5)):
                (model["words"](tokens(length)[:5]) + model["places"](torch.arange(length))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with recorder.batch(range(5)):
            model["words"](torch.tensor([3, 1, 4, 1, 5])).square().mean().backward()
        optimizer.step()
    store = dualstore.open(tmp_path)
    assert store.verify().ok
    text = (
        "SELECT layer, step, min(sample_id) AS low, max(sample_id) AS high, count(*) AS n FROM patterns GROUP BY ALL ORDER BY ALL"
    )
    assert [tuple(row.values()) for row in store.sql(text).to_dicts()] == [
        (0, 0, 0, 4, 25), (0, 1, 0, 4, 20), (0, 2, 0, 4, 5), (1, 0, -1, -1, 5), (1, 1, -1, -1, 4)
    ]  # fmt: skip


class Attending(nn.Module):
    """Attention of a sequence on itself, or on another one of other widths."""

    def __init__(self, *, cross: bool, first: bool, **options: Any) -> None:
        super().__init__()
        others = {"kdim": 4, "vdim": 3} if cross else {}
        self.attend, self.cross, self.first = nn.MultiheadAttention(6, 2, batch_first=first, **others, **options), cross, first
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = (x[:, :2, :4], x[:, :2, :3]) if self.cross else (x, x)
        given = (x, key, value) if self.first else (part.transpose(0, 1) for part in (x, key, value))
        found = self.attend(*given, need_weights=False)[0]
        return self.head(found if self.first else found.transpose(0, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_zero_attn": True}])
def test_the_projections_of_attention_are_layers(tmp_path: Path, cross: bool, first: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    run = Trained(tmp_path / "store", Attending(cross=cross, first=first, **options).double(), numbers(3, 6))
    run.assert_exact()
    assert run.names() == ["attend.q", "attend.k", "attend.v", "attend.out", "head"]
    query = run.rows(run.store.layers[0])
    assert query["sample_id"][:3].tolist() == [query["sample_id"][0]] * 3
    assert query["position"][:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers_are_exact(tmp_path: Path, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True, norm_first=norm_first)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(6, 2)).double()
    run = Trained(tmp_path / "store", model, numbers(4, 6))
    run.assert_exact()
    assert len(run.names()) == 13


class Recurring(nn.Module):
    """A recurrent module between two linear layers."""

    def __init__(self, kind: type, *, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.inner = kind(3, 4, batch_first=True, **options)
        self.packed, self.head = packed, nn.Linear(4 * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            lengths = [5 - k % 4 for k in range(len(x))]
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            found, last = self.inner(packed)
            found = nn.utils.rnn.pad_packed_sequence(found, batch_first=True)[0]
        else:
            found, last = self.inner(x)
        h = last[0] if isinstance(last, tuple) else last
        return self.head(torch.relu_(found.clone())).mean(1) + h.mean((0, 2))[:, None]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True},
        {"bias": False, "num_layers": 2},
        {"packed": True},
        {"packed": True, "bidirectional": True},
    ],
)
def test_recurrent_modules_are_exact(tmp_path: Path, kind: type, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    run = Trained(tmp_path / "store", Recurring(kind, **options).double(), numbers(5, 3))
    run.assert_exact()
    directions = 2 if options.get("bidirectional") else 1
    assert len(run.names()) == (1 if kind is nn.LSTM else 2) * options.get("num_layers", 1) * directions + 1
    rows = run.rows(run.store.layers[0])
    lengths = [5 - k % 4 for k in range(5)] if options.get("packed") else [5] * 5
    assert rows["position"][rows["step"] == 0].tolist() == [t for length in lengths for t in range(length)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"packed": True}])
def test_keys_alone_are_those_that_come_with_errors(tmp_path: Path, kind: type, options: dict[str, Any]) -> None:
    stores = []
    for keys_only in (False, True):
        torch.manual_seed(0)
        stores.append(Trained(tmp_path / f"{keys_only}", Recurring(kind, **options).double(), numbers(5, 3), keys_only=keys_only))
    for layer, of_keys in zip(stores[0].store.layers, stores[1].store.layers, strict=True):
        whole, keys = stores[0].rows(layer), stores[1].rows(of_keys)
        assert (keys["step"] == whole["step"]).all()
        assert (keys["position"] == whole["position"]).all()
        np.testing.assert_array_equal(keys["x"], whole["x"])


def test_keys_alone_leave_out_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4, batch_first=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = [[1, 1, -100, -100], [1, 1, 1, 1]]
    with dualstore.record(model, optimizer, tmp_path / "store", keys_only=True, audit_every=0) as recorder:
        with recorder.batch([0, 1], labels):
            output, _ = model(numbers(4, 3)[:2])
            (output[0, :2].sum() + output[1].sum()).backward()
        optimizer.step()
    found = dualstore.open(tmp_path / "store").sql("SELECT sample_id, position FROM patterns ORDER BY ALL").to_dicts()
    assert [(row["sample_id"], row["position"]) for row in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_keys_of_an_output_that_was_changed_in_place_are_of_what_it_was(tmp_path: Path) -> None:
    class Edited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.edit = nn.LSTM(3, 4, batch_first=True), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found, _ = self.inner(x)
            output = 2 * found
            if self.edit:
                found.detach().zero_()
            return output

    rows = []
    for edit in (False, True):
        torch.manual_seed(0)
        model = Edited().double()
        model.edit = edit
        run = Trained(tmp_path / f"{edit}", model, numbers(5, 3), keys_only=True, audit_every=0)
        rows.append(run.rows(run.store.layers[0])["x"])
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-12, atol=1e-14)


def test_a_stream_of_batches_with_a_carried_state_is_exact(tmp_path: Path) -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)
            self.state: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = self.state if self.training else None
            found, state = self.inner(x[:, :3], state)
            found, (h, c) = self.inner(found[..., :3] + x[:, 2:], state)
            self.state = (h.detach(), c.detach())
            return self.head(found)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    run = Trained(tmp_path / "store", Stream().double(), numbers(5, 3))
    run.assert_exact()
    rows = run.rows(run.store.layers[0])
    assert sorted(set(rows["position"].tolist())) == list(range(6))


def test_dropout_between_recurrent_layers_is_named_with_the_reason(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recurring(nn.LSTM, num_layers=2, dropout=0.5).double()
    with pytest.warns(dualstore.DualstoreWarning, match=r"inner\.weight_ih_l0 \(dropout=0\.5 between its layers draws masks"):
        run = Trained(tmp_path / "store", model, numbers(5, 3))
    assert run.names() == ["head"]
    run.assert_exact()


class Adapted(nn.Module):
    """A frozen linear layer with two small ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 5), nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))  # type: ignore[no-any-return]


def test_adapters_beside_a_frozen_layer_are_recorded_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = Trained(tmp_path / "store", Adapted().double(), numbers(3, 6))
    run.assert_exact()
    assert run.names() == ["down", "up"]


def test_a_convolution_called_several_times_and_checkpointed_is_exact(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(3, 3, 3, padding=1), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(lambda z: torch.tanh(self.conv(z)), self.conv(x), use_reentrant=False)
            return self.head(y.mean(-1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    run = Trained(tmp_path / "store", Model().double(), numbers(3, 5))
    run.assert_exact()
    assert sorted(set(run.rows(run.store.layers[0])["position"].tolist())) == list(range(10))


class Bare(nn.Module):
    """A multiplication that no module does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.weight))  # type: ignore[no-any-return]


def test_a_bare_multiplication_is_named_with_its_share(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Bare().double()
    named = r"these parameters train but are not recorded: weight \(72 % of what is trained\)"
    with pytest.warns(dualstore.DualstoreWarning, match=named):
        run = Trained(tmp_path / "store", model, numbers(6))
    assert run.store.info()["unrecorded"] == ["weight"]
    run.assert_exact()

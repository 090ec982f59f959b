"""Both levels of retrieval in a transformer: softmax weights are the module's own, and projections retrieve training patterns."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dualstore
from dualstore.errors import QueryError
from dualstore.experiments import transformer
from dualstore.experiments.attention import context_weights, levels
from dualstore.experiments.passages import retrieve
from tests.test_language import text

HEADS = 2
SETTINGS = transformer.Settings(steps=6, batch_size=4, length=20, width=8, heads=HEADS, blocks=2, passages=5, lr=0.01)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dualstore.Store:
    path = tmp_path_factory.mktemp("transformer") / "store"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "these parameters train but are not recorded")
        transformer.train(path, text(), SETTINGS, progress=lambda done, total: None)
    return dualstore.open(path)


def test_weights_over_the_context_are_those_of_the_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"inner": nn.MultiheadAttention(8, HEADS, batch_first=True, dtype=torch.float64)})
    attention = model["inner"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    with dualstore.record(model, optimizer, tmp_path / "s", dtype="float64") as recorder:
        with recorder.batch(sample_id=range(3)):
            attention(x, x, x)[0].square().sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad(), recorder.probe(test_id=[5, 6, 7]):
            _, expected = attention(x, x, x, need_weights=True, average_attn_weights=False)
    store = dualstore.open(tmp_path / "s")
    for row, test_id in enumerate((5, 6, 7)):
        np.testing.assert_allclose(context_weights(store, test_id, "inner", HEADS), expected[row, :, -1].numpy(), rtol=1e-12)


def test_the_projections_of_a_trained_transformer_are_recorded(recorded: dualstore.Store) -> None:
    names = [f"{block}.{name}" for block in transformer.blocks_of(SETTINGS) for name in "qkv"]
    assert [layer.name for layer in recorded.layers] == names
    samples = sum(row["batch_size"] for row in recorded.sql("SELECT batch_size FROM steps"))
    assert {recorded.patterns(layer).rows for layer in recorded.layers} == {samples * SETTINGS.length}


def test_both_levels_are_ranked_for_the_last_token_of_a_context(recorded: dualstore.Store) -> None:
    corpus, block = text(), "blocks.1.self_attn"
    test_id = recorded.sql("SELECT max(test_id) AS test_id FROM probes").to_dicts()[0]["test_id"]
    weights = context_weights(recorded, test_id, block, HEADS)
    assert weights.shape == (HEADS, 20)
    np.testing.assert_allclose(weights.sum(1), 1)
    attended, retrieved = levels(recorded, corpus, test_id, block, HEADS, top=4, window=3)
    for head in range(HEADS):
        mine = [one for one in attended if one.head == head]
        assert [one.position for one in mine] == np.argsort(-weights[head], kind="stable")[:4].tolist()
        assert [one.weight for one in mine] == sorted(weights[head], reverse=True)[:4]
    token = corpus.vocabulary[corpus.passages[test_id].tokens[attended[0].position]]
    assert f"[[{token}]]" in attended[0].text
    assert retrieved["k"] == retrieve(recorded, corpus, test_id, f"{block}.k", top=4, window=3)
    assert list(retrieved) == ["q", "k", "v"]


def test_a_test_id_that_was_not_probed_is_named(recorded: dualstore.Store) -> None:
    with pytest.raises(QueryError, match="no test 77 at layer"):
        context_weights(recorded, 77, "blocks.0.self_attn", HEADS)

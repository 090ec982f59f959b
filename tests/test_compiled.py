"""Compiled models: hooks run between the compiled pieces, also where a model was compiled before they were put on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualstore
from dualstore.capture.compiled import forget_compiled, outside

pytestmark = pytest.mark.filterwarnings("ignore")  # while it traces, dynamo warns of whatever it meets

X = torch.linspace(-2, 2, 64, dtype=torch.float64).reshape(16, 4).sin()
Y = torch.arange(16) % 3


class Net(nn.Module):
    """A small network with a part that can be compiled alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def whole(net: Net) -> Any:
    return torch.compile(net, backend="aot_eager")


def in_place(net: Net) -> Any:
    net.compile(backend="eager")
    return net


def part_in_place(net: Net) -> Any:
    net.body.compile(backend="eager")
    return net


def function(net: Net) -> Any:
    return torch.compile(lambda x: net(x), backend="eager")


def train(call: Any, recorder: dualstore.Recorder, optimizer: torch.optim.Optimizer) -> None:
    for rows in [*torch.arange(16).split(8), *torch.arange(16).split(8)]:
        with recorder.batch(rows, Y[rows]):
            nn.functional.cross_entropy(call(X[rows]), Y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("compiled", [whole, in_place, part_in_place, function])
def test_a_compiled_model_that_has_run_before_is_rebuilt(tmp_path: Path, compiled: Callable[[Net], Any]) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    call = compiled(net)
    for _ in range(2):
        call(X).sum().backward()
        optimizer.zero_grad()
    for name in ("first", "second"):
        with dualstore.record(net, optimizer, tmp_path / name, dtype="float64") as recorder:
            train(call, recorder, optimizer)
        store = dualstore.open(tmp_path / name)
        assert store.info()["rows"] == 2 * 2 * 16
        assert store.verify().ok


def test_a_hook_outside_stops_a_full_graph_with_the_reason() -> None:
    net, seen = Net(), []
    net.body[0].register_forward_hook(outside(lambda module, args, output: seen.append(len(output))))
    torch.compile(net, backend="eager")(X)
    assert seen == [16]
    forget_compiled()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="dualstore records what passes here; compile without fullgraph=True"):
        torch.compile(net, backend="eager", fullgraph=True)(X)

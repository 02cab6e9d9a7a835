"""Which values are sent from one part of a model to the next, and which each makes for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.pipelining.layer_graph import LayerGraph, trace_layers
from tests.harness.layered_models import Masked, run_parts

pytestmark = pytest.mark.unit


def gives(graph: LayerGraph) -> list[tuple[str, ...]]:
    return [graph.make_part(at, at + 1).gives for at in range(len(graph.layers) - 1)]


def test_masks_are_made_by_each_part_and_not_sent() -> None:
    model, x = Masked(), torch.randint(7, (5, 6))
    graph = trace_layers(model, "embed, blocks.*, head")
    for at in range(3):
        part = graph.make_part(at, at + 1)
        run = run_parts(graph, [0, 1, 2, 3], (x,))[1][at][1]
        assert tuple(run) == part.gives
        assert sum(isinstance(value, Tensor) for value in run.values()) == 1
        assert {type(value) for value in run.values()} <= {Tensor, int, str}
    assert (
        "turns" in graph.make_part(2, 3).attributes
        and "turns" not in graph.make_part(4, 5).attributes
    )


class Begun(nn.Module):
    """Two layers, and a tensor that is made before the first and used after it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.one, self.two, self.way = nn.Linear(3, 3), nn.Linear(3, 3), way
        self.register_buffer("count", torch.zeros(3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        made = torch.full((x.shape[0], 3), 2.0)
        match self.way:
            case "random":
                made = torch.rand(x.shape[0], 3)
            case "filled":
                made.fill_(3.0)
            case "view":
                made[:, 0].fill_(3.0)
            case "counted":
                self.count.add_(1)
                made = self.count[:3]
            case "trained":
                made = self.weight[:3]
        x = self.one(x)
        return self.two(x * x.mean() + x) + made + self.weight


@pytest.mark.parametrize(
    ("way", "sent"),
    [("plain", 1), ("random", 2), ("filled", 2), ("view", 2), ("counted", 2), ("trained", 2)],
)
def test_only_what_is_the_same_each_time_is_made_again(way: str, sent: int) -> None:
    model, x = Begun(way), torch.randn(4, 3)
    graph = trace_layers(model, "one, two")
    torch.manual_seed(1)
    output, records = run_parts(graph, [0, 1], (x,))
    assert sum(isinstance(value, Tensor) for value in records[0][1].values()) == sent
    model.count.zero_()
    torch.manual_seed(1)
    assert torch.equal(output, model(x))


def test_a_value_is_sent_over_every_boundary_between_its_maker_and_its_last_user() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lines = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, x: Tensor) -> Any:
            first = self.lines[0](x)
            second = self.lines[1](first)
            return self.lines[3](self.lines[2](second)) + first * x

    assert gives(trace_layers(Skips(), "lines.*")) == [
        ("x", "lines_0"),
        ("x", "lines_0", "lines_1"),
        ("x", "lines_0", "lines_2"),
    ]

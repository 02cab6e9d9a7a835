"""Between two layers the boundary lies where the least crosses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.parallel.pipelining.boundaries import place_boundaries
from paceline.parallel.pipelining.flow import ValueFlow
from paceline.parallel.pipelining.layer_graph import trace_layers
from paceline.parallel.pipelining.operations import ModelPath, Operation, ValueRef
from tests.harness.layered_models import Looped
from tests.harness.sharded_models import gpt, unet

pytestmark = pytest.mark.unit


def gives(model: nn.Module, layers: str) -> list[tuple[str, ...]]:
    graph = trace_layers(model, layers)
    return [graph.make_part(at, at + 1).gives for at in range(len(graph.layers) - 1)]


class Between(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.one, self.two, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Any:
        x = self.one(x)
        match self.way:
            case "smaller":
                x = F.max_pool2d(x, 2).relu()
            case "larger":
                x = F.interpolate(x.relu(), scale_factor=2)
            case "made":
                x = x + torch.arange(x.shape[-1])
            case "joined":
                x = x.relu()
                x = torch.cat([x, x], -1)
        return self.two(x)


@pytest.mark.parametrize(
    ("way", "crosses"),
    [("smaller", "relu"), ("larger", "relu"), ("made", "add"), ("joined", "relu")],
)
def test_what_makes_smaller_goes_before_and_what_makes_larger_after(way: str, crosses: str) -> None:
    assert gives(Between(way), "one, two") == [(crosses,)]


def test_sums_go_with_the_layer_before_them() -> None:
    assert gives(gpt(), "tokens, positions, blocks.*, norm, head")[1] == ("add",)
    assert gives(unet(), "first, second, bottom, up, last, head") == [
        ("first",),
        ("first", "second"),
        ("first", "bottom"),
        ("cat",),
        ("last",),
    ]


def test_parameters_and_numbers_do_not_cross() -> None:
    assert all(
        "scale" not in name and "offset" not in name
        for names in gives(Looped(), "embed, blocks.*, head")
        for name in names
    )


def test_layers_given_to_one_function_are_refused() -> None:
    both = Operation(
        "both", "function", checkpoint, (ModelPath("one"), ModelPath("two"), ValueRef("x")), {}
    )
    with pytest.raises(UsageError, match="gives one and two to one function"):
        place_boundaries(ValueFlow(nn.Linear(1, 1), [both], ["x"]), ["one", "two"])

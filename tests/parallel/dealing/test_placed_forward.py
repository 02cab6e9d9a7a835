"""A forward over several places computes what the model does, and values move as little as they
can.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.errors import UsageError
from paceline.parallel.dealing import placed_forward
from paceline.parallel.dealing.placed_forward import PlacedForward
from paceline.parallel.pipelining.layer_graph import trace_layers
from tests.harness.layered_models import Looped, Made, Masked, Structured, Twice
from tests.harness.models import fill
from tests.harness.pipelines import LAYERS, gpt

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each move has copied: a move makes a copy, as it does between devices,
    and not within one.
    """
    counts = list[int]()

    def move(value: Any, device: torch.device) -> Any:
        def copied(x: Tensor) -> Tensor:
            counts.append(x.numel())
            return x.clone()

        return tree_map_only(Tensor, copied, value)

    monkeypatch.setattr(placed_forward, "move_values", move)
    return counts


def spread(model: nn.Module, layers: str, places: list[int], **options: Any) -> nn.Module:
    graph = trace_layers(model, layers, **options)
    forward = PlacedForward(model, graph, places, [CPU] * (places[-1] + 1))
    model.forward = forward
    forward.move_state()
    return model


MODELS: dict[
    str,
    tuple[Callable[[], nn.Module], str, list[int], Callable[[], tuple[Any, ...]], dict[str, Any]],
] = {
    "looped": (
        lambda: Looped(dropout=0.3),
        "embed, blocks.*, head",
        [0, 0, 1, 2, 2],
        lambda: (torch.randn(5, 3),),
        {},
    ),
    "structured": (
        Structured,
        "split, join, head",
        [0, 1, 2],
        lambda: ({"x": torch.randn(5, 3), "keep": torch.ones(1)},),
        {},
    ),
    "twice": (Twice, "embed, turn, middle", [0, 0, 1], lambda: (torch.arange(6).view(2, 3),), {}),
    "made": (Made, "one, two", [0, 1], lambda: (torch.randn(5, 3),), {}),
    "masked": (
        Masked,
        "embed, blocks.*, head",
        [0, 1, 1, 2, 2],
        lambda: (torch.arange(6).view(2, 3),),
        {},
    ),
    "tied": (gpt, LAYERS, [0, 0, 0, 1, 1, 1, 1, 2], lambda: (torch.arange(10).view(2, 5),), {}),
    "chained": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        "0, 2",
        [0, 1],
        lambda: (torch.randn(5, 3),),
        {},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_model(name: str, moved: list[int]) -> None:
    build, layers, places, batch, options = MODELS[name]
    torch.manual_seed(1)
    whole = fill(build())
    model, args = spread(copy.deepcopy(whole), layers, places, **options), batch()
    for training in (True, False):
        outputs = []
        for each in (whole, model):
            each.train(training).zero_grad()
            torch.manual_seed(2)
            outputs.append(
                [
                    leaf
                    for leaf in tree_leaves(each(*copy.deepcopy(args)))
                    if isinstance(leaf, Tensor)
                ]
            )
            sum((leaf.double().square().sum() for leaf in outputs[-1]), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        assert len(moved) > max(places)
        assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
        for (label, one), other in zip(whole.named_parameters(), model.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None, label
            assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-6), label


def test_a_copy_of_the_model_is_a_model_of_its_own(moved: list[int]) -> None:
    model = spread(fill(gpt()), LAYERS, [0, 0, 0, 1, 1, 1, 1, 1])
    copied, x = copy.deepcopy(model), torch.arange(10).view(2, 5)
    assert torch.equal(copied(x), model(x))
    with torch.no_grad():
        next(copied.parameters()).mul_(2)
    assert not torch.equal(copied(x), model(x))
    wanted = fill(gpt())
    with torch.no_grad():
        next(wanted.parameters()).mul_(2)
    assert torch.equal(copied(x), wanted(x))


class Skipping(nn.Module):
    """What the first layer makes is read by the last one, and by no other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.one(x)
        out: Tensor = self.four(self.three(self.two(skip[:, :1].expand(-1, 4)))) + skip
        return out


def test_values_go_straight_to_where_they_are_read(moved: list[int]) -> None:
    model = spread(Skipping(), "one, two, three, four", [0, 1, 2, 3])
    moved.clear()
    model(torch.randn(2, 4))
    assert sorted(moved) == [8] * 6  # the input, three times what follows, the skip, the output


def test_a_tied_weight_is_sent_once_in_a_forward(moved: list[int]) -> None:
    model = spread(gpt(layers=1), LAYERS, [0, 0, 0, 1, 1])
    moved.clear()
    model(torch.arange(10).view(2, 5))
    assert moved.count(model.get_parameter("tokens.weight").numel()) == 1


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.line = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.line(x) * self.calls
        return out


class CountingTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.middle = Counting(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.count(self.middle(self.count(x)))
        return out


def test_a_buffer_that_two_devices_would_change_is_refused(moved: list[int]) -> None:
    model = spread(CountingTwice(), "count, middle", [0, 1])
    with pytest.raises(
        UsageError, match=r"layers on two devices use count.calls, and the forward changes it there"
    ):
        model(torch.randn(2, 3))
    assert float(model.get_buffer("count.calls")) == 1.0  # as the first device has left it

"""What is measured of layers, and that nothing of it stays in the model."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.apps.gpt import GPT, GPTShape, next_token_loss
from paceline.errors import UsageError
from paceline.parallel.meta import meta
from paceline.parallel.pipelining import measuring
from paceline.parallel.pipelining.layer_graph import trace_layers
from paceline.parallel.pipelining.measuring import combine_costs, count_layers, measure_layers
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.split import LayerCost, SplitProblem, find_best_split
from tests.harness.layered_models import Looped
from tests.harness.sharded_models import gpt, pictures, texts, unet

pytestmark = pytest.mark.unit

NAMES = "tokens, positions, blocks.*, norm, head"


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = (
            nn.Linear(4, 6, bias=False),
            nn.BatchNorm1d(6),
            nn.Linear(6, 1),
        )
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return self.two(self.drop(self.norm(self.one(x)).tanh()))


def test_bytes_of_layers() -> None:
    model = Chain()
    model.one.weight.requires_grad_(False)
    one, norm, two = measure_layers(
        trace_layers(model, "one, norm, two"), (torch.randn(5, 4),), loss=Tensor.sum, repeats=1
    )
    assert (one.name, one.parameters, one.trained) == ("one", 4 * 24, 0)
    assert (norm.parameters, norm.trained, two.parameters) == (4 * 12, 4 * 12, 4 * 7)
    assert (one.sends, one.returns) == (4 * 30, 0)  # nothing before the norm needs a gradient
    assert (norm.sends, norm.returns) == (4 * 30, 4 * 30)
    assert (one.kept, one.backward_seconds > 0, one.forward_seconds > 0) == (0, False, True)
    # tanh and dropout, which go with the norm, keep what they made
    assert norm.kept >= 2 * 4 * 30 and norm.backward_seconds > 0


def test_kept_bytes_are_those_that_backward_waits_for() -> None:
    """Layers of one stage together keep what a graph of all of them keeps, but for what comes
    in.
    """
    model, (x, _) = gpt(), texts(0)
    graph = trace_layers(model, NAMES)
    saved = dict[int, int]()
    state = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()} | {
        x.untyped_storage().data_ptr()
    }

    def keep(one: Tensor) -> Tensor:
        saved[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        output = model(x)
    saved[output.untyped_storage().data_ptr()] = output.untyped_storage().nbytes()
    whole = sum(nbytes for place, nbytes in saved.items() if place not in state)
    costs = measure_layers(graph, (x,), repeats=0)
    # a layer counts what it gives, whether the next one keeps it or not
    assert whole <= sum(cost.kept for cost in costs) <= 1.25 * whole


def test_a_model_is_left_as_it_was() -> None:
    model, x = Chain(), torch.randn(5, 4)
    whole, state = copy.deepcopy(model), torch.get_rng_state()
    model.two.weight.grad = torch.ones(1, 6)
    before = [id(buffer) for buffer in model.buffers()]
    measure_layers(trace_layers(model, "one, norm, two"), (x,), loss=Tensor.sum)
    assert torch.equal(torch.get_rng_state(), state)
    assert [id(buffer) for buffer in model.buffers()] == before
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.state_dict().values(), whole.state_dict().values(), strict=True)
    )
    assert torch.equal(model.two.weight.grad, torch.ones(1, 6)) and model.norm.weight.grad is None


def test_batches_are_left_as_they_were_though_layers_change_what_they_get() -> None:
    model, x = (
        nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)
        ),
        torch.randn(5, 3),
    )
    before = x.clone()
    costs = measure_layers(trace_layers(model, "*"), (x,))
    assert [cost.name for cost in costs] == ["0", "1", "2", "3"] and torch.equal(x, before)
    costs = measure_layers(trace_layers(Looped(), "auto"), (torch.randn(5, 3),))
    assert all(cost.forward_seconds > 0 and cost.backward_seconds > 0 for cost in costs)


def test_a_skip_is_sent_by_every_layer_that_it_passes() -> None:
    costs = {
        cost.name: cost
        for cost in measure_layers(trace_layers(unet(), "auto"), pictures(0)[:1], repeats=0)
    }
    sends = [cost.sends for cost in costs.values()]
    skip = 8 * 8 * 3 * 16  # samples, channels, points of float64
    assert sends[0] == skip and sends[1] > skip and sends[2] == sends[1]


def test_a_layer_that_works_more_takes_longer_and_gets_a_stage_of_its_own() -> None:
    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(40):
                x = super().forward(x)
            return x

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), Slow(64, 64))
    costs = measure_layers(trace_layers(model, "*"), (torch.randn(256, 64),), repeats=5)
    assert costs[3].forward_seconds > max(cost.forward_seconds for cost in costs[:3])
    assert find_best_split(SplitProblem(costs, make_schedule("1f1b", 2, 4), [1.0, 1.0])) == [3, 1]


def test_counting_a_model_without_memory_agrees_on_bytes() -> None:
    shape = GPTShape(d=12, layers=2, heads=2, context=5, vocab=11)
    with meta():
        empty = GPT(shape)
    x = torch.randint(11, (8, 5))
    counted = count_layers(
        trace_layers(empty, NAMES), (x,), loss=lambda logits: next_token_loss(logits, x.to("meta"))
    )
    measured = measure_layers(
        trace_layers(GPT(shape), NAMES),
        (x,),
        loss=lambda logits: next_token_loss(logits, x),
        repeats=0,
    )
    for one, other in zip(counted, measured, strict=True):
        assert (one.name, one.parameters, one.trained, one.sends, one.returns) == (
            other.name,
            other.parameters,
            other.trained,
            other.sends,
            other.returns,
        )
    blocks = [cost.forward_seconds for cost in counted if "blocks" in cost.name]
    assert blocks[0] == pytest.approx(blocks[1]) and blocks[0] > counted[0].forward_seconds
    with pytest.raises(UsageError, match="is for models without memory"):
        count_layers(trace_layers(GPT(shape), NAMES), (x,))


def test_what_workers_have_measured_is_combined() -> None:
    random.seed(1)
    costs = [LayerCost(str(at), random.random(), random.random(), parameters=at) for at in range(4)]

    def slowed(by: float) -> list[LayerCost]:
        return [
            LayerCost(
                cost.name, cost.forward_seconds * by, cost.backward_seconds * by, cost.parameters
            )
            for cost in costs
        ]

    combined, speeds = combine_costs([slowed(2.0), slowed(1.0), slowed(4.0)])
    assert speeds == pytest.approx([0.5, 1.0, 0.25])
    assert [cost.forward_seconds for cost in combined] == pytest.approx(
        [cost.forward_seconds for cost in costs]
    )
    assert [cost.parameters for cost in combined] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="worker 1 has measured that its layers take no time"):
        combine_costs([costs, slowed(0.0)])


def test_a_worker_that_is_stopped_now_and_then_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ticks once a look, but for one stop of 20 ticks: 2 layers, 5 runs each of 1 tick
    forward and 1 backward.
    """
    looks = itertools.count()
    monkeypatch.setattr(
        measuring.time, "perf_counter", lambda: (at := next(looks)) + (20 if at > 8 else 0)
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    costs = measure_layers(trace_layers(model, "auto"), (torch.ones(2, 4),), repeats=5)
    assert (
        [cost.forward_seconds for cost in costs]
        == [cost.backward_seconds for cost in costs]
        == [2.0, 2.0]
    )

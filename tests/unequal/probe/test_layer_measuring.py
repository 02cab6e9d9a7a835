"""How a model can be cut, what its layers keep, and that measuring leaves it as it was."""

from __future__ import annotations

import torch
from torch import nn

from paceline.apps.gpt import GPT, GPTShape, next_token_loss
from paceline.apps.unet import UNet, UNetShape
from paceline.planner.cuts.layer_profile import LayerSteps
from paceline.unequal.probe.layer_measuring import (
    find_layer_graph,
    find_tensor_sizes,
    measure_checkpoints,
    measure_micro_batches,
)
from paceline.unequal.probe.model_call import ModelCall

SHAPE = GPTShape(d=16, layers=3, heads=4, context=8, vocab=32)
BATCH = 8


def make_call() -> ModelCall:
    torch.manual_seed(0)
    tokens = torch.randint(0, SHAPE.vocab, (BATCH, SHAPE.context))
    return ModelCall(GPT(SHAPE), (tokens,), {}, next_token_loss, tokens)


def measure(call: ModelCall) -> tuple[LayerSteps, ...]:
    graph = find_layer_graph(call.model)
    assert graph is not None
    return measure_micro_batches(graph, call, (4, 2, 4), BATCH)


def test_cuts_are_found_from_the_model() -> None:
    # Heads, features and words have to be divided evenly.
    assert find_tensor_sizes(GPT(SHAPE)) == (2, 4)
    assert find_tensor_sizes(nn.Sequential(nn.Linear(4, 4))) == ()
    assert find_layer_graph(nn.Linear(4, 4)) is None
    graph = find_layer_graph(UNet(UNetShape(width=4)))
    assert graph is not None and {"enter", "middle", "leave"} < set(graph.layers)


def test_layers_are_measured_with_each_size() -> None:
    small, large = measure(make_call())
    assert (small.samples, large.samples) == (2, 4)
    names = ["tokens", "positions", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert [cost.name for cost in large.costs] == names
    assert all(
        one.kept * 2 == other.kept
        for one, other in zip(small.costs[2:5], large.costs[2:5], strict=True)
    )
    # What goes to the next stage is the residual stream.
    assert large.costs[3].sends == 4 * 4 * SHAPE.context * SHAPE.d


def test_a_model_stays_as_it_was() -> None:
    call = make_call()
    before = {name: value.clone() for name, value in call.model.state_dict().items()}
    random, expected = torch.get_rng_state(), call.model(*call.args)
    found = measure_checkpoints(call, measure(call))
    assert found.names == ("blocks.0", "blocks.1", "blocks.2")
    assert not any("forward" in vars(module) for module in call.model.modules())
    assert all(parameter.grad is None for parameter in call.model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(call.model(*call.args), expected)
    for name, value in call.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_checkpoints_save_what_layers_keep_but_their_inputs() -> None:
    call = make_call()
    layers = measure(call)
    saved = measure_checkpoints(call, layers).saved_bytes
    blocks = [cost for cost in layers[-1].costs if cost.name.startswith("blocks")]
    kept = sum(cost.kept for cost in blocks) * BATCH / layers[-1].samples
    stream = 4 * BATCH * SHAPE.context * SHAPE.d
    # The results of blocks, which are the inputs of the next ones, are kept either way.
    assert kept - 2 * len(blocks) * stream <= saved <= kept


class Picky(nn.Module):
    """A layer that refuses all batches but the whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != BATCH:
            raise RuntimeError("another batch")
        return self.inner(x)


def test_layers_that_fail_alone_are_no_layers() -> None:
    model = nn.Sequential(Picky(), nn.Linear(4, 4))
    graph = find_layer_graph(model)
    assert graph is not None
    call = ModelCall(model, (torch.randn(BATCH, 4),))
    assert measure_micro_batches(graph, call, (2, 4), BATCH) == ()


def test_fewer_samples() -> None:
    call = make_call()
    part = call.take_rows(3, BATCH)
    assert torch.equal(part.args[0], call.args[0][:3]) and torch.equal(part.target, part.args[0])
    assert part.args[0].untyped_storage().nbytes() == 3 * SHAPE.context * 8

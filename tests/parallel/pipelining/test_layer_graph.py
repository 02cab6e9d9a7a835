"""Parts of a model, run one after the other, are the model: outputs and gradients to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.errors import UsageError
from paceline.parallel.pipelining.layer_graph import trace_layers
from tests.harness.layered_models import (
    Listed,
    Looped,
    Masked,
    Structured,
    Twice,
    backward_parts,
    run_parts,
)
from tests.harness.sharded_models import gpt, odd_net, pictures, texts, unet, vectors

pytestmark = pytest.mark.unit


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 5),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Linear(5, 6), nn.Tanh()),
        nn.Linear(6, 3),
    ).double()


def batch() -> tuple[dict[str, Tensor]]:
    return ({"x": torch.randn(5, 3), "keep": torch.rand(5, 1)},)


MODELS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[], Sequence[Any]]]] = {
    "gpt": (gpt, "tokens, positions, blocks.*, norm, head", lambda: texts(0)[:1]),
    "gpt auto": (gpt, "auto", lambda: texts(0)[:1]),
    "gpt, positions as glue": (gpt, "tokens, blocks.*, head", lambda: texts(0)[:1]),
    "list in a loop": (odd_net, "inward, blocks.*, head", lambda: vectors(0)[:1]),
    "inside blocks": (
        odd_net,
        "inward, blocks.0.*, blocks.1, blocks.2.*, head",
        lambda: vectors(0)[:1],
    ),
    "u-net": (unet, "first, second, bottom, up, last, head", lambda: pictures(0)[:1]),
    "u-net auto": (unet, "auto", lambda: pictures(0)[:1]),
    "sequence": (chain, "*", lambda: vectors(0)[:1]),
    "own parameters": (Looped, "embed, blocks.*, head", lambda: (torch.randn(5, 3),)),
    "dicts": (Structured, "split, join, head", batch),
    "masks": (Masked, "embed, blocks.*, head", lambda: (torch.randint(7, (5, 6)),)),
    "parameters in lists": (Listed, "auto", lambda: (torch.randn(5, 3),)),
    "twice": (Twice, "embed, middle", lambda: (torch.randint(7, (5,)),)),
}


def total(output: Any) -> Tensor:
    return torch.stack(
        [(leaf * leaf).sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    ).sum()


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_the_model(name: str) -> None:
    make, layers, example = MODELS[name]
    torch.manual_seed(3)
    model, args = make(), example()
    whole = copy.deepcopy(model)
    expected = whole(*args)
    total(expected).backward()
    graph = trace_layers(model, layers)
    count = len(graph.layers)
    for starts in [[0], list(range(count)), [0, count // 2], [0, 1]]:
        model.zero_grad()
        output, records = run_parts(graph, starts, args)
        assert all(
            torch.equal(one, other)
            for one, other in zip(tree_leaves(output), tree_leaves(expected), strict=True)
        )
        backward_parts(records, total(output))
        for (path, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None, path
            # summed in the order of stages, not in that of the forward
            if name == "twice" or path in ("tokens.weight", "scale"):
                torch.testing.assert_close(mine.grad, theirs.grad)
            else:
                assert torch.equal(mine.grad, theirs.grad), path


def shared(model: nn.Module, layers: str, starts: Sequence[int]) -> list[dict[int, str]]:
    return [
        stages
        for stages in trace_layers(model, layers).find_users(starts).values()
        if len(stages) > 1
    ]


def test_parameters_that_several_stages_use_are_told() -> None:
    names = "tokens, positions, blocks.*, norm, head"
    assert shared(gpt(), names, [0, 3, 5]) == [{0: "tokens.weight", 2: "head.weight"}]
    assert shared(gpt(), names, [0]) == []
    assert shared(Looped(), "embed, blocks.*, head", [0, 2]) == [{0: "scale", 1: "scale"}]
    assert shared(Twice(), "embed, middle", [0, 1]) == [
        {0: name, 1: name} for name in ("embed.weight", "turn.weight", "turn.bias")
    ]
    model = gpt()
    users = trace_layers(model, names).find_users([0, 3])
    assert set(users) == set(model.parameters()) and users[model.norm.weight] == {1: "norm.weight"}


def test_a_part_tells_the_modules_that_it_uses() -> None:
    graph = trace_layers(Twice(), "embed, middle")
    assert (graph.make_part(0, 1).modules, graph.make_part(0, 1).attributes) == (
        ("embed", "turn"),
        (),
    )
    assert (graph.make_part(1, 2).modules, graph.make_part(1, 2).attributes) == (
        ("middle", "turn"),
        ("embed.weight",),
    )


def test_a_value_is_carried_by_the_stages_between() -> None:
    graph = trace_layers(unet(), "first, second, bottom, up, last, head")
    part = graph.make_part(2, 3)
    assert "first" in part.takes and "first" in part.gives


def test_parts_follow_the_mode_of_the_model() -> None:
    model, x = Looped(dropout=0.5), torch.randn(5, 3)
    graph = trace_layers(model, "embed, blocks.*, head")
    for mode in (True, False):
        model.train(mode)
        torch.manual_seed(5)
        expected = model(x)
        torch.manual_seed(5)
        assert torch.equal(run_parts(graph, [0, 2], (x,))[0], expected)


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = Looped(dropout=0.5)
    model.blocks.eval()
    before, state = (
        {name: module.training for name, module in model.named_modules()},
        torch.get_rng_state(),
    )
    names = set(vars(model))
    trace_layers(model, "auto")
    assert {name: module.training for name, module in model.named_modules()} == before
    assert set(vars(model)) == names and torch.equal(torch.get_rng_state(), state)


def test_hooks_and_modules_put_in_place_of_others_are_used() -> None:
    model, x = Looped(), torch.randn(5, 3)
    graph = trace_layers(model, "embed, blocks.*, head")
    model.head = nn.Linear(4, 2)
    called = []
    model.blocks[1].register_forward_hook(lambda *_: called.append(1))
    output, _ = run_parts(graph, [0, 2], (x,))
    assert called == [1] and torch.equal(output, model(x))


def test_arguments_by_name() -> None:
    model, x, mask = Looped(), torch.randn(5, 3), torch.rand(5, 1)
    graph = trace_layers(model, "embed, blocks.*, head", inputs=("x", "mask", "shift"))
    output, _ = run_parts(graph, [0, 2], (x,), {"mask": mask, "shift": 2.0})
    assert torch.equal(output, model(x, mask=mask, shift=2.0))
    with pytest.raises(UsageError, match="leaves out"):
        graph.bind_inputs((x,), {})
    with pytest.raises(UsageError, match="without 'mask'"):
        trace_layers(model, "auto").bind_inputs((x,), {"mask": mask})
    with pytest.raises(UsageError, match="other arguments"):
        graph.bind_inputs((x, x, x), {})


class Chained(nn.Module):
    """A forward that can't be traced, of layers that follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Pairs(), Pairs()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        both = self.one(x, y=y)
        if bool(both[0].sum() > 1e9):
            return None
        return self.two(*both)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.line(x), x + y


def test_layers_that_are_not_traced_follow_one_another() -> None:
    model, x, y = Chained(), torch.randn(5, 3), torch.randn(5, 3)
    with pytest.raises(UsageError, match=r"test_layer_graph.py:\d+ .*an if.*trace=False"):
        trace_layers(model, "one, two")
    graph = trace_layers(model, "one, two", trace=False)
    expected = model(x, y)
    for given in [((x, y), {}), ((x,), {"y": y})]:
        output, _ = run_parts(graph, [0, 1], *given)
        assert all(torch.equal(one, other) for one, other in zip(output, expected, strict=True))
    with pytest.raises(
        UsageError, match=r"no layer has the parameters two.line.weight, two.line.bias: name"
    ):
        trace_layers(model, "one", trace=False)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("embed, head, blocks.*", r'another order; write "embed, blocks.\*, head"'),
        (
            "blocks.1, embed, blocks.0, head",
            'another order; write "embed, blocks.0, blocks.1, head"',
        ),
        ("embed, unused", "never calls unused"),
        (
            "embed, blocks.*, head",
            "no layer has the parameters unused.weight, unused.bias: the forward doesn't use them",
        ),
    ],
)
def test_a_chain_that_is_not_the_model_is_refused(names: str, words: str) -> None:
    model = Looped()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=words):
        trace_layers(model, names)


def test_what_a_part_is_not_given_is_named() -> None:
    part = trace_layers(unet(), "first, second, bottom, up, last, head").make_part(2, 3)
    with pytest.raises(
        UsageError, match="the stage of bottom takes first, second, and was not given second"
    ):
        part.run_stage({"first": torch.zeros(1)})


def test_what_cannot_be_sent_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Boxed(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.two(self.one(x).x)

    graph = trace_layers(Odd(), "one, two")
    with pytest.raises(UsageError, match="has a Box, which can't be sent"):
        run_parts(trace_layers(Odd(), "one, two", trace=False), [0, 1], (torch.randn(2, 3),))
    # what crosses is the tensor in it
    assert run_parts(graph, [0, 1], (torch.randn(2, 3),))[0].shape == (2, 3)


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxed(nn.Module):
    def forward(self, x: Tensor) -> Box:
        return Box(x)


def test_statistics_of_two_stages_are_refused() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.norm(self.two(self.norm(self.one(x))))

    graph = trace_layers(Normed(), "one, two")
    graph.find_users([0])
    with pytest.raises(UsageError, match="stages 0 and 1 both use norm"):
        graph.find_users([0, 1])

"""Forwards become operations that do the same at any later time; what would be taken down wrong
is refused.
"""

from __future__ import annotations

import random
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves
from paceline.parallel.pipelining.layer_graph import LayerGraph, trace_layers
from paceline.parallel.pipelining.tracing import trace_operations
from tests.harness.layered_models import Looped, Made, run_parts
from tests.harness.sharded_models import gpt, texts

pytestmark = pytest.mark.unit


class Two(nn.Module):
    """Two layers and what a test puts around them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.steps_made: Any = 2

    def graph(self) -> LayerGraph:
        return trace_layers(self, "one, two")


def test_tensors_made_by_the_forward_follow_the_batch() -> None:
    model = Made()
    graph = trace_layers(model, "one, two")
    for count in (3, 1):
        x = torch.randn(count, 3)
        assert torch.equal(run_parts(graph, [0, 1], (x,))[0], model(x))
    with pytest.raises(
        AssertionError, match=r"the assertion at .*layered_models.py:\d+ doesn't hold"
    ):
        run_parts(graph, [0, 1], (torch.randn(0, 3),))


class Drawn(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(
            self.one(x) + torch.randn(x.shape[0], 1) + torch.rand_like(x) + torch.rand(3)
        )


def test_random_numbers_are_drawn_each_time() -> None:
    model, x = Drawn(), torch.randn(4, 3)
    graph = model.graph()
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = model(x)
        torch.manual_seed(seed)
        assert torch.equal(run_parts(graph, [0, 1], (x,))[0], expected)


class Frozen(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.one(x) * 2
        return self.two(x)


def test_layers_without_gradients_stay_so() -> None:
    model, x = Frozen(), torch.randn(4, 3)
    for starts in ([0], [0, 1]):
        run_parts(model.graph(), starts, (x,))[0].sum().backward()
        assert model.one.weight.grad is None and model.two.weight.grad is not None


class Recomputed(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.one, x, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint(self.two, x, use_reentrant=False)


def test_layers_that_are_computed_again_in_backward_stay_so() -> None:
    model, x, calls = Recomputed(), torch.randn(4, 3), list[int]()
    graph = model.graph()
    model.one.register_forward_pre_hook(lambda *_: calls.append(1))
    output, _ = run_parts(graph, [0], (x,))
    assert len(calls) == 1
    output.sum().backward()
    assert len(calls) == 2


class Ways(Two):
    """A forward for each way in which one can't be taken down."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Any:
        x = self.inner(self.one(x))
        match self.way:
            case "branch":
                x = -x if x.sum() > 0 else x
            case "loop":
                x = sum(row for row in x)
            case "number":
                x = x * int(x.shape[0])
            case "item":
                x[0] = 1
            case "modes":
                x = x if self.training else x + 1
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    x = x @ x.mT
            case "random":
                x = x * random.random()
            case "count":
                self.count = 1
        return self.two(x)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (
            "branch",
            (
                r"test_tracing.py:\d+ \(x = -x if x.sum\(\) > 0 else x\): "
                r"an if, while or assert there depends on a value"
            ),
        ),
        ("loop", r"test_tracing.py:\d+ .*a loop there goes over a value"),
        ("number", r"test_tracing.py:\d+ "),
        ("item", r"test_tracing.py:\d+ .*item assignment"),
        ("modes", "does other things in training than in evaluation"),
        ("autocast", r"test_tracing.py:\d+ .*torch.autocast"),
        (
            "random",
            r"does other things each time \(at mul\), such as drawing random numbers in Python",
        ),
        (
            "count",
            "the forward sets the attribute count, which layers on other workers wouldn't see",
        ),
    ],
)
def test_what_cannot_be_taken_down_is_refused_with_its_place(way: str, words: str) -> None:
    model = Ways(way)
    before = dict(vars(model))
    with pytest.raises(UsageError, match=words) as caught:
        trace_layers(model, "one, two")
    assert "trace=False" in str(caught.value) and "\n" not in str(caught.value)
    assert vars(model) == before


def test_a_hook_that_nobody_would_call_is_refused() -> None:
    model = Ways("none")
    model.inner.register_forward_hook(lambda *_: None)
    trace_layers(model, "one, inner, two")
    with pytest.raises(
        UsageError, match="inner has a hook, but isn't called itself, as layers inside of it are"
    ):
        trace_layers(model, "one, inner.*, two")


def test_a_forward_that_is_set_on_the_model_is_refused() -> None:
    model = Ways("none")
    model.forward = lambda x: x
    with pytest.raises(UsageError, match="the forward of this Ways was set on the object"):
        trace_layers(model, "one, two")


def test_a_forward_of_any_number_of_arguments_is_refused() -> None:
    class Any_(Two):
        def forward(self, *xs: Tensor) -> Tensor:
            return self.two(self.one(xs[0]))

    with pytest.raises(UsageError, match=r"takes \*xs; give its arguments names"):
        Any_().graph()


def test_other_threads_train_while_a_model_is_traced() -> None:
    """torch.fx patches nn.Module for all threads; the ranks of a test are threads."""
    inside, done = threading.Event(), threading.Event()

    class Slow(Two):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert done.wait(60)
            return self.two(self.one(x))

    tracing = threading.Thread(target=lambda: trace_operations(Slow(), ("one", "two"), ("x",)))
    tracing.start()
    assert inside.wait(60)
    model, (x, _) = gpt(), texts(0)
    try:
        assert model(x).isfinite().all() and F.dropout(torch.zeros(2)).sum() == 0
        again = checkpoint(model.head, torch.zeros(12).double(), use_reentrant=False)
        assert torch.arange(3).tolist() == [0, 1, 2] and again.shape == (11,)
    finally:
        done.set()
        tracing.join(60)


def test_operations_read_like_the_forward() -> None:
    operations = trace_operations(
        Looped(dropout=0.5), ("embed", "blocks.0", "blocks.1", "blocks.2", "head"), ("x",)
    )
    drop = next(operation for operation in operations if operation.target is F.dropout)
    assert re.search(r"ByMode\(training=True, evaluation=False\)", repr(drop))
    called = [operation.target for operation in operations if operation.kind == "module"]
    assert called == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]


@dataclass
class Answer:
    x: Tensor
    rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.rows = self.x.shape[0]


class Texts(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "kind",
    [Answer, lambda x: Texts(x=x), lambda x: OrderedDict(x=x)],
    ids=["dataclass", "dict", "ordered"],
)
def test_what_a_forward_returns_stays_of_its_kind(kind: Any) -> None:
    class Answering(Two):
        def forward(self, x: Tensor) -> Any:
            return kind(self.two(self.one(x)))

    model, x = Answering(), torch.randn(3, 3)
    found, wanted = run_parts(model.graph(), [0, 1], (x,))[0], model(x)
    assert type(found) is type(wanted) and vars(found).keys() == vars(wanted).keys()
    for mine, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))


def test_an_object_of_unknown_kind_is_refused() -> None:
    class Holder:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Holding(Two):
        def forward(self, x: Tensor) -> Any:
            return Holder(self.two(self.one(x)))

    with pytest.raises(
        UsageError, match="an object there holds values, and is no tuple, list, dict or dataclass"
    ):
        Holding().graph()

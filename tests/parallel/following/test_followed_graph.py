"""Models whose forwards run as they are on every stage: they end where one process does, or it
is said why they can't.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline as pl
from paceline.errors import PacelineError, UsageError
from paceline.parallel.following.followed_graph import FollowedGraph, follow_layers
from paceline.parallel.pipelining.operations import OUTPUT
from paceline.session.run import Run
from tests.harness.models import fill
from tests.harness.pipelines import same
from tests.harness.runs import Numbered, workers


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reversed(torch.autograd.Function):
    """The reversal of gradients, which returns what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -grad, None


rounded = Rounded.apply


class Keeping(nn.Linear):
    """A layer that leaves what it has returned in a list."""

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(super().forward(x))
        return kept[-1]


class Net(nn.Module):
    """Four layers, and between them what a test wants: `way`."""

    def __init__(self, way: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(6, 6) for _ in range(4))
        self.head, self.scale = nn.Linear(6, 2), nn.Parameter(torch.ones(6))
        self.register_buffer("count", torch.zeros(()))
        self.way, self.drop = way, nn.Dropout(dropout)
        if way == "filling":
            self.two = Keeping(6, 6)

    def forward(self, x: Tensor, *, far: bool = False) -> Tensor:
        first = self.one(x)
        # a branch on what is known when it runs
        found: Tensor = getattr(self, self.way)(x, first) if first.shape[0] else first
        return found + first[:, :2] if far else found

    def estimator(self, x: Tensor, h: Tensor) -> Tensor:
        return self.head(self.four(self.three(rounded(self.two(h) * 4))))

    def reversal(self, x: Tensor, h: Tensor) -> Tensor:
        h = torch.tanh(self.two(h))
        return self.head(torch.tanh(self.three(Reversed.apply(h, 0.5))) + self.four(h) * 0.3)

    def length(self, x: Tensor, h: Tensor) -> Tensor:
        return self.head(self.four(self.three(self.two(h).reshape(len(x), -1))))

    def skips(self, x: Tensor, h: Tensor) -> Tensor:
        """Residuals over all layers, a scale that is the model's own, and a branch on what a
        layer has returned.
        """
        y = h + torch.tanh(self.two(h * self.scale))
        y = y + torch.tanh(self.three(-y if y.square().max() < 1e9 else y))
        return self.head((y + self.four(y)) * self.scale + h) + x[:, :2]

    def drawing(self, x: Tensor, h: Tensor) -> Tensor:
        y = self.drop(self.two(h))
        return self.head(y + self.four(self.three(y)))

    def scaled(self, x: Tensor, h: Tensor) -> Tensor:
        h.mul_(0.5)
        return self.head(self.four(self.three(self.two(h))))

    def skipping(self, x: Tensor, h: Tensor) -> Tensor:
        h = self.two(h) * (random.random() > 0.5)
        return self.head(self.four(self.three(h)))

    def changing(self, x: Tensor, h: Tensor) -> Tensor:
        y = self.two(h)
        h.mul_(2)
        return self.head(self.four(self.three(y)) + h)

    def counting(self, x: Tensor, h: Tensor) -> Tensor:
        self.count += 1
        return self.head(self.four(self.three(self.two(h))))

    def borrowing(self, x: Tensor, h: Tensor) -> Tensor:
        return self.head(F.linear(self.four(self.three(self.two(h))), self.one.weight))

    def twice(self, x: Tensor, h: Tensor) -> Tensor:
        return self.head(self.four(self.three(self.two(self.two(h)))))

    def filling(self, x: Tensor, h: Tensor) -> Tensor:
        kept = list[Tensor]()
        for layer in (self.two, self.three, self.four):
            h = layer(h, kept=kept) if isinstance(layer, Keeping) else layer(h)
        return self.head(h + sum(kept))

    def other(self, x: Tensor, h: Tensor) -> Tensor:
        return self.head(self.three(self.four(self.two(h))))

    def leaving(self, x: Tensor, h: Tensor) -> Tensor:
        y = self.three(self.two(h))
        return self.head(self.four(y) + torch.from_numpy(h.detach().numpy().copy()))


LAYERS = "one, two, three, four, head"


def branching(way: str, dropout: float = 0.0) -> nn.Module:
    """A model that can't be traced, as it has a branch on the rows of a batch."""
    return fill(Net(way, dropout).double())


@pytest.mark.alike(5)
@pytest.mark.parametrize("way", ["estimator", "reversal", "length", "skips", "scaled"])
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ("stage=2", "1f1b"),
        ("stage=3", "zero-bubble"),
        ("stage=2", "zbv"),
        ("data=2, stage=2", "gpipe"),
    ],
)
def test_followed_models_end_where_one_process_does(way: str, mesh: str, schedule: Any) -> None:
    cut = pl.pipeline(LAYERS, schedule=schedule, micro_batches=3)
    same(mesh, cut, build=lambda: branching(way), data=Numbered, loss=F.mse_loss, epochs=1)


@pytest.mark.parametrize("kind", [Rounded, Reversed])
def test_a_function_with_a_backward_of_its_own_keeps_it(kind: Any) -> None:
    """In a forward that could be traced but for that."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(kind.apply(*([self.one(x)] if kind is Rounded else [self.one(x), 0.5])))

    same(
        "stage=2",
        pl.pipeline("one, two"),
        build=lambda: fill(Plain().double()),
        data=Numbered,
        loss=F.mse_loss,
    )


def recorded(way: str, *, known: bool) -> tuple[FollowedGraph, dict[str, Any]]:
    """What stages of one layer each give each other, by the stage."""
    model, x = branching(way), torch.randn(5, 6, dtype=torch.float64)
    graph = follow_layers(model, LAYERS)
    values = graph.bind_inputs((x,), {})
    if known:
        graph.rehearse_forward(values)
    given = {}
    for place, name in enumerate(graph.layers):
        values = {**values, **graph.make_part(place, place + 1).run_stage(values)}
        given[name] = values
    graph.find_crossing_layers = functools.partial(
        graph.find_crossing_layers, kind=graph.describe_call(values)
    )
    assert torch.equal(given["head"][OUTPUT], model(x))
    return graph, given


def test_stages_give_each_other_what_is_used_and_shapes_of_the_rest() -> None:
    graph, given = recorded("length", known=True)
    assert [graph.find_crossing_layers(place) for place in range(1, 5)] == [{0}, {1}, {2}, {3}]
    assert [
        sorted(value) for key, value in given["three"].items() if key.startswith(("what", "shapes"))
    ] == [["three"], ["one", "two"]]
    # three depends on a number, which every stage has to know
    graph, _ = recorded("skips", known=True)
    assert [graph.find_crossing_layers(place) for place in range(1, 5)] == [
        {0},
        {0, 1},
        {0, 1, 2},
        {0, 1, 2, 3},
    ]
    graph, _ = recorded("length", known=False)
    assert graph.find_crossing_layers(4) == {0, 1, 2, 3}


def test_layers_of_other_stages_are_not_run_and_modules_are_left_as_they_were() -> None:
    model, x = branching("length"), torch.randn(5, 6, dtype=torch.float64)
    graph, called = follow_layers(model, LAYERS), list[str]()
    for name in graph.layers:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    values = graph.make_part(0, 2).run_stage(graph.bind_inputs((x,), {}))
    assert called == ["one", "two"]
    graph.make_part(2, 5).run_stage({**graph.bind_inputs((x,), {}), **values})
    assert called == ["one", "two", "three", "four", "head"]
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def failing(way: str, cut: Any, dropout: float = 0.0) -> PacelineError:
    def body(run: Run) -> None:
        model, x = branching(way, dropout), torch.ones(4, 6, dtype=torch.float64)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), cut=cut)
        run.step(model, x, x[:, :2], loss=F.mse_loss)

    with pytest.raises(PacelineError) as caught:
        workers(2, body, mesh="stage=2")
    return caught.value


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("changing", "changes in place what one returned"),
        ("skipping", "draws random numbers between layers"),
        ("counting", "changes count between layers"),
        ("borrowing", "uses one.weight between layers"),
        ("twice", "calls two where three was to follow"),
        ("other", "calls four where three was to follow: name the layers in the order"),
        ("filling", "changes a list or dict that it is given"),
        ("leaving", "in a way that can't be followed"),
    ],
)
def test_what_cannot_be_followed_is_refused(way: str, words: str) -> None:
    error = failing(way, pl.pipeline(LAYERS, split=[3, 2], micro_batches=2))
    assert isinstance(error, UsageError)
    assert words in str(error) and "\n" not in str(error)


def test_random_numbers_that_two_stages_use_are_refused() -> None:
    assert "draws random numbers between layers, and three and head use them" in str(
        failing("drawing", pl.pipeline(LAYERS, split=[3, 2], micro_batches=2), dropout=0.5)
    )


def test_statistics_between_layers_are_refused() -> None:
    model = branching("length")
    model.norm = nn.BatchNorm1d(6)
    with pytest.raises(UsageError, match="norm keeps running statistics between layers"):
        follow_layers(model, LAYERS)
    assert follow_layers(model, f"{LAYERS}, norm").outside_parameters == ("scale",)


def test_layers_that_are_followed_are_measured() -> None:
    def held(run: Run) -> list[int]:
        model = branching("skips")
        run.prepare(
            model,
            DataLoader(Numbered(), batch_size=8),
            cut=pl.pipeline(LAYERS, split="auto", micro_batches=2),
        )
        x = torch.ones(8, 6, dtype=torch.float64)
        run.step(model, x, x[:, :2], loss=F.mse_loss)
        return list(run._prepared.cuts.pipelines[0][1].split.bounds)

    one, two = workers(2, held, mesh="stage=2")
    assert one == two and one[0] == 0 and one[-1] == 5


def test_what_travels_depends_on_the_arguments_of_a_call() -> None:
    def body(run: Run) -> list[Tensor]:
        model = branching("length")
        run.prepare(model, cut=pl.pipeline(LAYERS, micro_batches=2))
        return [run.forward(model, x, **options) for options in ({}, {"far": True}, {"far": False})]

    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    wanted = [branching("length")(x, far=far).detach() for far in (False, True, False)]
    for found in workers(2, body, mesh="stage=2"):
        assert all(
            torch.allclose(one, two, atol=1e-12, rtol=0)
            for one, two in zip(found, wanted, strict=True)
        )


def test_a_model_runs_in_training_and_in_evaluation() -> None:
    def body(run: Run, cut: Any) -> tuple[Tensor, Tensor]:
        model, x = branching("drawing"), torch.ones(4, 6, dtype=torch.float64)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), cut=cut)
        model.eval()
        before = run.forward(model, x)
        model.train()
        run.step(model, x, x[:, :2], loss=F.mse_loss)
        return before, run.forward(model, x[:3])

    ((wanted, again),) = workers(1, lambda run: body(run, None))
    for found, other in workers(
        2, lambda run: body(run, pl.pipeline(LAYERS, micro_batches=2)), mesh="stage=2"
    ):
        assert torch.allclose(found, wanted, atol=1e-12, rtol=0) and torch.allclose(
            other, again, atol=1e-12, rtol=0
        )


def test_a_forward_that_was_set_on_the_model_is_refused() -> None:
    model = branching("length")
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="was set on the object"):
        follow_layers(model, LAYERS)

"""Trainings whose replicas differ between exchanges, and the check that they resume bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.session.run import Run
from paceline.sync.base import Strategy
from tests.harness.runs import batches, parameters, workers


def model() -> nn.Module:
    made = nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 2)
    ).double()
    generator = torch.Generator().manual_seed(3)  # threads share torch's own
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4)
    return made


Each = Callable[[nn.Module], Any]
Made = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def train(
    run: Run,
    *,
    each: Each = lambda net: None,
    make: Made = sgd,
    epochs: int = 4,
    loss: Any = "mean",
    **options: Any,
) -> Tensor:
    net = model()
    net, opt, loader = run.prepare(net, make(net), batches(), loss=loss, **options)
    for _ in run.epochs(epochs):
        for x, y in loader:
            value = F.mse_loss(net(x), y)
            (value if loss == "mean" else value * len(x)).backward()
            opt.step()
            opt.zero_grad()
            each(net)
    run._prepared.epochs.finish()  # replicas are looked at
    return parameters(net)


def runs(strategy: Strategy, size: int = 3, **options: Any) -> Tensor:
    weights = workers(size, lambda run: train(run, **options), strategy=strategy)
    assert all(torch.equal(other, weights[0]) for other in weights), "replicas are equal in the end"
    return weights[0]


@cache
def reference(strategy: Strategy, size: int = 3) -> Tensor:
    """`runs`, for those that several tests compare with."""
    return runs(strategy, size)


def resumes(strategy: Strategy, size: int, folder: Path, hosts: tuple[int, ...] = ()) -> None:
    """A run that is saved after 7 steps and resumed comes, bit for bit, to what it comes to when
    it is saved only.
    """

    def steps(run: Run, count: int, *, resume: bool = False) -> Tensor:
        net = model()
        net, opt, loader = run.prepare(net, adam(net), batches())
        assert run.resume() == resume
        taken = 0
        for _ in run.epochs(10):
            for x, y in loader:
                F.mse_loss(net(x), y).backward()
                opt.step()
                opt.zero_grad()
                taken += 1
                if taken == 7 and not resume:
                    run.save()
                if taken == count:
                    return parameters(net)
        raise AssertionError

    straight = workers(
        size, lambda run: steps(run, 13), strategy=strategy, hosts=hosts, folder=folder / "a"
    )
    workers(size, lambda run: steps(run, 7), strategy=strategy, hosts=hosts, folder=folder / "b")
    later = workers(
        size,
        lambda run: steps(run, 6, resume=True),
        strategy=strategy,
        hosts=hosts,
        folder=folder / "b",
    )
    assert all(torch.equal(one, other) for one, other in zip(later, straight, strict=True))


def evaluates_before_steps(run: Run) -> tuple[Tensor, Tensor]:
    """Train with an evaluation between each backward and its step; give the parameters before
    the end, and after.
    """
    net = model()
    net, opt, loader = run.prepare(net, sgd(net), batches())
    test = run.prepare(batches(), train=False)
    for _ in run.epochs(2):
        for x, y in loader:
            F.mse_loss(net(x), y).backward()
            for _x, _y in test:
                break
            opt.step()
            opt.zero_grad()
    before = parameters(net)
    run._prepared.epochs.finish()
    return before, parameters(net)

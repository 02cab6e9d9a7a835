"""One loss of several batches has one weight: it is refused where workers' parts of the batches
differ, and only there.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.runs import batches, distance, parameters, workers


def model() -> Any:
    made = nn.Linear(6, 2).double()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.linspace(-0.3, 0.4, p.numel(), dtype=torch.float64).view_as(p))
    return made


@dataclass
class Answer:
    x: Any

    def __sub__(self, other: Any) -> Any:
        return self.x - other


class Answering(nn.Linear):
    def forward(self, x: Any) -> Any:
        return Answer(super().forward(x))


def pairs(run: Any, count: int, *, inside: bool = True, answers: bool = False) -> Any:
    """One backward for two batches, in the turn of the second, or after the loop."""
    net = model()
    net.__class__ = Answering if answers else nn.Linear
    net, optimizer, loader = run.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), batches(count, 6)
    )
    losses = [(net(x) - y).square().mean() for x, y in loader] if not inside else []
    for x, y in loader if inside else ():
        losses.append((net(x) - y).square().mean())
        if len(losses) == 2:
            sum(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.clear()
    if losses:
        sum(losses).backward()
        optimizer.step()
    return parameters(net)


@pytest.mark.parametrize("inside", [True, False])
def test_batches_of_equal_parts_are_one_sum(inside: bool) -> None:
    alone = workers(1, lambda run: pairs(run, 24, inside=inside))[0]
    for mine in workers(3, lambda run: pairs(run, 24, inside=inside)):
        assert distance(mine, alone) < 1e-12


@pytest.mark.parametrize(
    ("inside", "words"),
    [(True, "in the turn of batch 3"), (False, "after the loop over the loader")],
)
def test_batches_of_unequal_parts_are_refused(inside: bool, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        workers(2, lambda run: pairs(run, 19, inside=inside))
    with pytest.raises(UsageError, match=words):
        workers(2, lambda run: pairs(run, 19, inside=inside, answers=True))


@pytest.mark.parametrize("of", ["the input", "parameters"])
def test_what_stays_on_this_worker_may_be_of_another_batch(of: str) -> None:
    """torch.autograd.grad exchanges nothing, so no weight is wrong."""

    def body(run: Any) -> torch.Tensor:
        net = model()
        net, optimizer, loader = run.prepare(
            net, torch.optim.SGD(net.parameters(), 0.1), batches(19, 6)
        )
        before = None
        for x, y in loader:
            x.requires_grad_()
            (net(x) - y).square().mean().backward()
            if before is not None:
                given = [before[1]] if of == "the input" else list(net.parameters())
                found = torch.autograd.grad(before[0].sum(), given, retain_graph=True)
                assert all(torch.isfinite(each).all() for each in found)
            before = net(x), x
        optimizer.step()
        return parameters(net)

    alone = workers(1, body)[0]
    for mine in workers(2, body):
        assert distance(mine, alone) < 1e-12


def test_where_replicas_part_each_has_its_own_mean() -> None:
    assert len(workers(2, lambda run: pairs(run, 19), strategy=LocalSGD(every=2))) == 2


def test_copies_remember_nothing() -> None:
    def body(run: Any) -> None:
        net = run.prepare(model())
        loader = run.prepare(batches(19, 6))
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            sum((other(x) - y).square().mean() for x, y in loader).backward()

    workers(2, body)

"""Gossip in whole runs on threads: the mean is kept, replicas stay near each other, and a full
graph is AllReduce.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.codec.codec import error_feedback
from paceline.codec.coding import compose, exact
from paceline.codec.dense import half, int4, int8
from paceline.codec.sparse import topk
from paceline.errors import UsageError
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Strategy
from paceline.sync.gossip.strategy import Gossip, GossipSync
from tests.harness.local_training import (
    adam,
    evaluates_before_steps,
    model,
    reference,
    resumes,
    runs,
    sgd,
    train,
)
from tests.harness.runs import batches, cut, distance, parameters, workers


def spread(strategy: Strategy, size: int, **options: Any) -> tuple[list[Tensor], Tensor]:
    """The replicas of all workers at the end of the last step, and what they become together."""
    last: dict[int, Tensor] = {}

    def body(run: Run) -> Tensor:
        def look(net: Any) -> None:
            last[run.rank] = parameters(net)

        return train(run, each=look, **options)

    found = workers(size, body, strategy=strategy)
    assert all(torch.equal(other, found[0]) for other in found)
    return [last[rank] for rank in range(size)], found[0]


@pytest.mark.parametrize(
    "options", [{}, {"shares": cut(1, 7, 2)}, {"shares": cut(0, 3, 5)}], ids=str
)
def test_a_full_graph_is_allreduce(options: dict[str, Any]) -> None:
    assert (
        distance(runs(Gossip("full"), epochs=2, **options), runs(AllReduce(), epochs=2, **options))
        < 1e-9
    )


@pytest.mark.each_choice
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("graph", ["ring", "exponential", "matching", ((0, 1),)], ids=str)
def test_every_graph_stays_near_allreduce(graph: Any, size: int) -> None:
    if isinstance(graph, tuple):
        graph = tuple((rank, rank + 1) for rank in range(size - 1))
    apart, together = spread(Gossip(graph), size)
    wanted = reference(AllReduce(), size)
    assert distance(together, wanted) < 0.05
    assert all(distance(replica, together) < 0.2 for replica in apart)
    assert any(not torch.equal(replica, apart[0]) for replica in apart), "they are not equal"


CODECS = [half(), int8(block=32), int4(block=32), topk(0.3), compose(topk(0.3), int8())]


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("graph", "codec"),
    [
        *(("exponential", codec) for codec in CODECS),
        *((graph, CODECS[-1]) for graph in ("ring", "matching")),
        *(
            pytest.param(graph, codec, marks=pytest.mark.soak)
            for graph in ("ring", "matching")
            for codec in CODECS[:-1]
        ),
    ],
    ids=repr,
)
def test_coded_gossip_comes_together(graph: str, codec: Any) -> None:
    gamma = 0.5 if "topk" in repr(codec) else 1.0
    _, together = spread(Gossip(graph, codec=codec, gamma=gamma), 4)
    assert distance(together, reference(AllReduce(), 4)) < 0.1


@pytest.mark.slow
def test_without_steps_of_their_own_replicas_come_to_the_mean_through_any_codec() -> None:
    """Learning rate 0: only mixing; the mean of all stays what it was, and all come to it."""
    for codec, gamma, epochs, near in (
        (exact(), 1.0, 4, 1e-9),
        (int8(block=32), 1.0, 3, 1e-3),
        (topk(0.2), 0.4, 16, 2e-2),
    ):

        def body(run: Run, epochs: int = epochs) -> tuple[Tensor, Tensor]:
            net = model()
            net, opt, loader = run.prepare(
                net, torch.optim.SGD(net.parameters(), lr=0.0), batches()
            )
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(
                        torch.randn(
                            p.shape,
                            generator=torch.Generator().manual_seed(run.rank),
                            dtype=p.dtype,
                        )
                    )
            first = parameters(net)
            for _ in run.epochs(epochs):
                for x, y in loader:
                    F.mse_loss(net(x), y).backward()
                    opt.step()
                    opt.zero_grad()
            return first, parameters(net)

        found = workers(4, body, strategy=Gossip("ring", codec=codec, gamma=gamma))
        mean = torch.stack([first for first, _ in found]).mean(0)
        after = torch.stack([last for _, last in found])
        assert distance(after.mean(0), mean) < 1e-6, "the mean is kept"
        assert all(distance(last, mean) < near for last in after), codec


def test_one_neighbour_a_step_sends_one_payload() -> None:
    def sent(strategy: Strategy) -> int:
        def body(run: Run) -> int:
            train(run, epochs=2)
            return run._context.traffic.within

        return workers(4, body, strategy=strategy)[0]

    exponential, ring, full = (sent(Gossip(graph)) for graph in ("exponential", "ring", "full"))
    assert 1.7 < ring / exponential < 2.1 and 2.5 < full / exponential < 3.1
    assert sent(Gossip("exponential", every=5)) < exponential / 3


def test_what_is_said_at_the_start() -> None:
    said: list[str] = []
    workers(4, lambda run: train(run, epochs=1), strategy=Gossip("ring"), said=said)
    assert "gossip on ring: a mixing brings 4 replicas nearer by 67% (spectral gap 0.667)" in said
    with pytest.raises(UsageError, match=r"never mixes: ranks \[2\]"):
        workers(3, train, strategy=Gossip(((0, 1),)))


@pytest.mark.parametrize(
    "strategy",
    [Gossip("ring"), Gossip(codec=int8(block=32)), Gossip("matching", every=2)],
    ids=repr,
)
def test_a_run_that_is_resumed_goes_on_as_if_it_had_been_saved_only(
    strategy: Gossip, tmp_path: Path
) -> None:
    resumes(strategy, 3, tmp_path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Gossip("star"), "graph='star' is unknown"),
        (lambda: Gossip(codec=error_feedback(int8())), "gossip wants a coding"),
        (lambda: Gossip(codec=int8(), gamma=0), "gamma must be above 0"),
        (lambda: Gossip(gamma=0.5), "gamma is for lossy codecs"),
        (lambda: Gossip(every=0), "every 1 or more"),
    ],
)
def test_wrong_arguments(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_one_worker_and_notation() -> None:
    assert bool(runs(Gossip(), size=1).isfinite().all())
    assert (
        repr(Gossip(((0, 1), (1, 2)), codec=int8()))
        == "Gossip(graph=((0, 1), (1, 2)), codec=int8())"
    )
    assert isinstance(GossipSync, type) and sgd is not adam


def test_an_evaluation_between_backward_and_step_hides_no_step() -> None:
    (one, together), (other, also), *_ = workers(5, evaluates_before_steps, strategy=Gossip("ring"))
    assert not torch.equal(one, other) and torch.equal(together, also)
    assert distance(together, runs(AllReduce(), size=5, epochs=2)) < 1e-2

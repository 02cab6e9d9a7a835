"""Gradients added up under `run.no_sync()`, and exchanged in a turn in which some workers have
no samples.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.codec.codec import error_feedback
from paceline.codec.sparse import topk
from paceline.errors import UsageError
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from paceline.sync.context import StepState
from paceline.sync.gossip.strategy import Gossip
from paceline.sync.localsgd.strategy import LocalSGD
from paceline.sync.per_axis import Sequence
from tests.harness.models import net, sgd
from tests.harness.runs import Numbered, alone, distance, parameters, workers

BATCH = 6


def train(
    run: Run,
    count: int,
    *,
    epochs: int = 2,
    halves: bool = False,
    by_hand: bool = False,
    clip: float | None = None,
) -> Tensor:
    """A step for each epoch, of whole batches and a last one of `count % BATCH` samples; with
    `halves` the last reaches one layer alone.
    """
    model = net()
    model, optimizer, loader = run.prepare(
        model, sgd(model), DataLoader(Numbered(count), batch_size=BATCH)
    )
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader, 1):
            last = number == len(loader)
            with contextlib.nullcontext() if last else run.no_sync():
                out = model[2](model[1](model[0](x)).detach()) if last and halves else model(x)
                F.mse_loss(out, y).backward()
            if last:
                if by_hand:
                    for p in model.parameters():
                        p.grad += 0.1 * p.detach()
                if clip is not None:
                    run.clip(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return parameters(model)


STRATEGIES: list[Any] = [
    AllReduce(),
    AllReduce(codec=error_feedback(topk(1.0))),
    ParameterServer(servers=2, bucket_mb=0.0002),
    ParameterServer(),
    ParameterServer(codec=error_feedback(topk(1.0))),
]


@pytest.mark.each_choice
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize(
    "options", [{}, {"halves": True}, {"clip": 0.1}], ids=["whole", "halves", "clipped"]
)
def test_what_a_worker_without_samples_had_added_up_counts(strategy: Any, options: Any) -> None:
    near = 1e-5 if strategy.codec is not None else 1e-9
    # of three workers two have no sample in the last batch, one has none, and all have one
    for count in (13, 14, 15):
        one = alone(lambda run, count=count: train(run, count, **options))
        assert all(
            distance(found, one) < near
            for found in workers(
                3, lambda run, n=count: train(run, n, **options), strategy=strategy
            )
        )


REFUSING: list[Any] = [LocalSGD(2), Sequence((AllReduce(), "local"), (LocalSGD(2), "host"))]


@pytest.mark.parametrize("strategy", REFUSING, ids=repr)
def test_it_is_refused_where_workers_are_weighed_by_their_samples(strategy: Any) -> None:
    with pytest.raises(UsageError, match=r"no_sync\(\) would be lost: this worker has no samples"):
        workers(3, lambda run: train(run, 13), strategy=strategy, hosts=(0, 1, 1))


def test_a_gradient_without_samples_is_refused_unless_it_is_zero() -> None:
    """As out of lockstep, where a push has one weight."""
    state = StepState(share_of_step=0.25)
    assert state.local_factor(torch.ones(2), 0.5) == 2.0
    state.share_of_step = 0.0
    assert state.local_factor(torch.ones(2), 0.0) == state.local_factor(torch.zeros(2), 1.0) == 0.0
    with pytest.raises(UsageError, match=r"no_sync\(\) would be lost"):
        state.local_factor(torch.ones(2), 1.0)


def test_gossip_weighs_gradients_themselves() -> None:
    """The mean of all replicas is that of one process after a step, as mixing leaves it as it
    is.
    """
    for count in (13, 14):
        found = workers(3, lambda run, n=count: train(run, n, epochs=1), strategy=Gossip())
        assert (
            distance(
                torch.stack(found).mean(0), alone(lambda run, n=count: train(run, n, epochs=1))
            )
            < 1e-9
        )


def test_gradients_that_are_changed_by_hand_then_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"p\.grad was changed in a turn in which this worker has no samples"
    ):
        workers(
            3, lambda run: train(run, 14, by_hand=True), strategy=ParameterServer(), deadline=10
        )
    one = alone(lambda run: train(run, 15, by_hand=True))
    found = workers(3, lambda run: train(run, 15, by_hand=True), strategy=ParameterServer())
    assert all(distance(x, one) < 1e-9 for x in found), (
        "where all have samples it counts as on one worker"
    )

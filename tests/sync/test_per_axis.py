"""AllReduce within hosts and local SGD between them, on threads: each host is one worker of
local SGD.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.codec.codec import error_feedback
from paceline.codec.dense import int8
from paceline.codec.sparse import topk
from paceline.errors import UsageError
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Strategy
from paceline.sync.gossip.strategy import Gossip
from paceline.sync.localsgd.outer import nesterov
from paceline.sync.localsgd.strategy import LocalSGD
from paceline.sync.per_axis import Sequence
from tests.harness.local_training import model, reference, resumes, runs, sgd, train
from tests.harness.runs import batches, cut, distance, workers

HOSTS = (0, 0, 1, 1)


def both(outer: LocalSGD, inner: AllReduce | None = None) -> Sequence:
    return Sequence((inner or AllReduce(), "local"), (outer, "host"))


def over_hosts(strategy: Strategy, hosts: tuple[int, ...] = HOSTS, **options: Any) -> Tensor:
    found = workers(len(hosts), lambda run: train(run, **options), strategy=strategy, hosts=hosts)
    assert all(torch.equal(other, found[0]) for other in found)
    return found[0]


@pytest.mark.slow
def test_a_round_of_one_step_is_allreduce() -> None:
    for options in ({}, {"shares": cut(1, 4, 2, 1)}, {"shares": cut(0, 0, 3, 5)}):
        assert (
            distance(over_hosts(both(LocalSGD(1)), **options), runs(AllReduce(), size=4, **options))
            < 1e-9
        ), options


@pytest.mark.parametrize(
    "outer",
    [LocalSGD(3), LocalSGD(4, outer=nesterov()), LocalSGD(3, momentum="averaged")],
    ids=repr,
)
def test_a_host_of_several_workers_is_one_worker_of_local_sgd(outer: LocalSGD) -> None:
    assert distance(over_hosts(both(outer)), reference(outer, 2)) < 1e-9
    assert (
        distance(
            over_hosts(both(outer), hosts=(0, 0, 0, 1), shares=cut(1, 2, 1, 4)), reference(outer, 2)
        )
        < 1e-9
    )


def test_gradients_are_equal_within_a_host_and_not_between() -> None:
    def body(run: Run) -> Tensor:
        net = model()
        net, _, loader = run.prepare(net, sgd(net), batches())
        for x, y in loader:
            F.mse_loss(net(x), y).backward()
            return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
        raise AssertionError

    grads = workers(4, body, strategy=both(LocalSGD(8)), hosts=(0, 1, 0, 1))
    assert (
        torch.equal(grads[0], grads[2])
        and torch.equal(grads[1], grads[3])
        and not torch.equal(grads[0], grads[1])
    )


def test_codecs_on_both_axes() -> None:
    wanted = over_hosts(both(LocalSGD(3)))
    coded = both(LocalSGD(3, codec=error_feedback(topk(0.3))), AllReduce(codec=int8(block=32)))
    assert 1e-7 < distance(over_hosts(coded), wanted) < 0.5


@pytest.mark.slow
def test_resume(tmp_path: Path) -> None:
    strategy = both(
        LocalSGD(3, codec=error_feedback(topk(0.3))),
        AllReduce(codec=error_feedback(int8(block=32))),
    )
    resumes(strategy, 4, tmp_path, HOSTS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sequence((LocalSGD(3), "local"), (AllReduce(), "host")),
        lambda: Sequence((AllReduce(), "host"), (LocalSGD(3), "local")),
        lambda: Sequence((AllReduce(), "local"), (Gossip(), "host")),
        lambda: Sequence(AllReduce(), LocalSGD(3)),
    ],
)
def test_what_can_not_stand_there(make: Any) -> None:
    with pytest.raises(
        UsageError, match=r"can't stand there; write Sequence\(\(AllReduce\(\), 'local'\)"
    ):
        make()
    with pytest.raises(UsageError, match=r"LocalSGD\(after=\.\.\.\) begins with mean gradients"):
        both(LocalSGD(3, after=5))

"""A worker that steps less or more often than the others is named before replicas that have
parted train on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import Mismatch
from paceline.replicas.step_count import StepCount
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.models import net, sgd
from tests.harness.runs import alone, batches, distance, parameters, workers


def failing(size: int, body: Callable[[Run], Any]) -> dict[int, str]:
    """What each worker has said of its Mismatch."""
    caught: dict[int, str] = {}

    def guarded(run: Run) -> None:
        try:
            body(run)
            run.close()
        except Mismatch as error:
            caught[run.rank] = str(error)
            raise

    with pytest.raises(Mismatch):
        workers(size, guarded)
    return caught


def test_counts_of_this_step_and_the_one_before() -> None:
    loop = SimpleNamespace(steps_made=0)
    tally = StepCount(loop)
    assert tally.get_counts() == [0, None, 0]
    tally.add_step()
    assert tally.get_counts() == [0, None, 1]
    loop.steps_made = 1
    assert tally.get_counts() == [1, 1, 0]
    tally.add_step()
    tally.add_step()
    assert tally.get_counts() == [1, 1, 2]
    loop.steps_made = 3
    assert tally.get_counts() == [3, 0, 0]
    tally.skip_comparisons()
    assert tally.get_counts() == [3, None, None]
    loop.steps_made = 5
    tally.add_step()
    assert tally.get_counts() == [5, None, 1]
    loop.steps_made = 6
    assert tally.get_counts() == [6, 1, 0]
    tally.is_waiting = True
    assert tally.get_counts() == [6, None, None]
    tally.enter_job()
    assert tally.get_counts() == [6, None, None]
    loop.steps_made = 9
    assert tally.get_counts() == [9, 0, 0]


@pytest.mark.parametrize("last", [0, 3, 4])
@pytest.mark.parametrize("how", ["before backward", "after backward"])
def test_a_worker_that_skips_a_step_by_itself_is_named(how: str, last: int) -> None:
    def body(run: Run) -> None:
        model = net()
        model, optimizer, loader = run.prepare(model, sgd(model), batches())
        for number, (x, y) in enumerate(loader):
            mine = run.rank == 1 and number == last
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * (
                float("nan") if mine and how == "before backward" else 1.0
            )
            if not torch.isfinite(loss):
                continue
            loss.backward()
            if not mine:
                optimizer.step()

    caught = failing(3, body)
    assert sorted(caught) == [0, 1, 2]
    for text in caught.values():
        assert re.search(
            (
                rf"[iI]n step {last} optimizers have not stepped alike \(rank 0 on here has made "
                r"1; rank 1 on here has made 0; "
            ),
            text,
        ), text
        assert "Skip a step on all workers or on none" in text


@pytest.mark.parametrize("prepared", [True, False])
def test_a_worker_that_steps_twice_is_named(prepared: bool) -> None:
    def body(run: Run) -> None:
        model = net()
        optimizer = sgd(model)
        model, loader, *_ = run.prepare(model, batches(), *([optimizer] if prepared else []))
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if run.rank == 0 and number == 2:
                optimizer.step()

    for text in failing(2, body).values():
        assert (
            "n step 2 optimizers have not stepped alike (rank 0 on here has made 2; "
            "rank 1 on here has made 1)" in text
        )


def test_a_loop_without_a_loader() -> None:
    def body(run: Run) -> None:
        model = net()
        model, optimizer = run.prepare(model, sgd(model))
        for number, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            F.mse_loss(model(x[run.rank :: 2]), y[run.rank :: 2]).backward()
            if run.rank == 0 or number != 3:
                optimizer.step()

    for text in failing(2, body).values():
        assert "rank 1 on here has made 3" in text


def same(body: Callable[[Run], Tensor]) -> None:
    wanted = alone(body)
    for size in (2, 3):
        for found in workers(size, body):
            assert distance(found, wanted) < 1e-12


def test_steps_that_all_workers_skip_or_repeat_alike() -> None:
    """A critic of several steps, an update every other turn, a decision by what all have, turns
    without any step.
    """

    def body(run: Run) -> Tensor:
        model, critic = net(), net(1)
        model, critic, one, two, loader = run.prepare(
            model, critic, sgd(model), sgd(critic), batches()
        )
        for number, (x, y) in enumerate(loader):
            for _ in range(number):
                two.zero_grad()
                F.mse_loss(critic(x), y).backward()
                two.step()
            loss = F.mse_loss(model(x), y)
            one.zero_grad()
            loss.backward()
            if number % 2 and run.mean(loss.detach()) > 0:
                one.step()
        return parameters(model, critic)

    same(body)


def test_local_steps_are_each_workers_own() -> None:
    """Where replicas differ between rounds by design, a worker may leave a step out."""

    def body(run: Run) -> Tensor:
        model = net()
        model, optimizer, loader = run.prepare(model, sgd(model), batches())
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if run.rank == 0 or number != 1:
                optimizer.step()
        return parameters(model)

    first, second = workers(2, lambda run: (body(run), run.close())[0], strategy=LocalSGD(5))
    assert torch.equal(first, second)


def test_servers_notice_that_one_worker_has_skipped_a_step() -> None:
    def body(run: Run) -> None:
        model = net()
        model, optimizer, loader = run.prepare(model, sgd(model), batches())
        for number, (x, y) in enumerate(loader):
            F.mse_loss(model(x), y).backward()
            if run.rank != 1 or number != 1:
                optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(
        Mismatch,
        match=r"rank 0 after 1 steps of training, rank 1 after 2 steps.*a worker has skipped",
    ):
        workers(2, body, strategy=ParameterServer())

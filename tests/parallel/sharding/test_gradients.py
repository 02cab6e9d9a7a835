"""Gradients of whole parameters become those of pieces: weighted, summed, once, and where all
workers have used something.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.cluster.store import Store
from paceline.comm.axis_meter import AxisMeter
from paceline.comm.group_protocol import Group
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import Mismatch
from paceline.parallel.shard import shard
from paceline.parallel.sharding import gradients
from paceline.parallel.sharding.flat_memory import FlatMemory, ModelParameter
from paceline.parallel.sharding.gradients import GradientBucket
from tests.harness.jobs import PATIENCE
from tests.harness.models import fill
from tests.harness.processes import threads
from tests.harness.sharded import Trainee, fitting, same
from tests.harness.sharded_models import OddNet, odd_net, vectors

STAGES = pytest.mark.parametrize("zero", [1, 2, 3])


@STAGES
# the last worker has no samples in the second
@pytest.mark.parametrize("cuts", [[1, 2, 11], [0, 7, 12]])
def test_uneven_batches_and_ghosts(zero: Any, cuts: list[int]) -> None:
    same(odd_net, fitting(vectors, cuts=cuts), shard("blocks.*", zero=zero), 4, data=2)


@STAGES
def test_a_weight_that_is_forgotten_is_seen(zero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = GradientBucket.add_gradient
    monkeypatch.setattr(
        GradientBucket, "add_gradient", lambda self, index, grad, scale: own(self, index, grad, 1.0)
    )
    with pytest.raises(AssertionError):
        same(odd_net, fitting(vectors), shard("blocks.*", zero=zero), 2)


@STAGES
def test_accumulation(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        one.optimizer.zero_grad()
        for micro in range(3):
            x, y = one.batch(*vectors(3 * number + micro))
            one.step_state.defer_exchange = micro < 2 and one.size > 1
            (F.mse_loss(one.model(x), y) / 3).backward()
        one.optimizer.step()

    same(odd_net, step, shard("blocks.*", zero=zero), 4, data=2)


@STAGES
def test_gradients_add_up_until_they_are_zeroed(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        if number % 2 == 0:
            one.optimizer.zero_grad(set_to_none=number % 4 == 0)
        x, y = one.batch(*vectors(number))
        F.mse_loss(one.model(x), y).backward()
        one.optimizer.step()

    same(odd_net, step, shard("blocks.*", zero=zero), 4, data=2, steps=6)


@STAGES
def test_parameters_that_some_workers_use(zero: Any) -> None:
    class Choosing(OddNet):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.unused = nn.Linear(5, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out + self.other(x[:, :5]) if bool((x[:, 0] > 1.5).any()) else out

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        # what nobody has used doesn't decay
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)

    def step(one: Trainee, number: int) -> None:
        x, y = vectors(number)
        x = x[x[:, 0].argsort()].clamp(max=1.4)  # nobody uses the other
        if number != 1:
            x[-1, 0] = 2.0  # the last worker does
        x, y = one.batch(x, y)
        one.optimizer.zero_grad()
        out = one.model(x)
        # the condition of one process covers all samples; here each has its own
        if one.size == 1 and number != 1:
            out = OddNet.forward(one.model, x) + torch.cat(
                [torch.zeros(6, 3), one.model.other(x[6:, :5])]
            )  # type: ignore[operator]
        F.mse_loss(out, y).backward()
        one.optimizer.step()

    same(
        lambda: fill(Choosing().double()),
        step,
        shard("blocks.*", zero=zero),
        2,
        optimizer=optimizer,
    )


class BucketAhead(GradientBucket):
    """Lets rank 0 be ahead: rank 1 has no gradients before `ahead` is set, as it is when rank 0
    waits. `under_way`: what it has sent.
    """

    ahead: threading.Event
    under_way: set[str]

    def add_gradient(self, index: int, grad: Tensor, scale: float) -> None:
        assert self.memory.rank == 0 or self.ahead.wait(PATIENCE)
        super().add_gradient(index, grad, scale)

    def begin_sum(self, group: Group) -> None:
        super().begin_sum(group)
        if group.rank == 0:
            self.under_way.add(self.memory.unit)

    def wait_briefly(self, seconds: float, meter: AxisMeter) -> bool:
        self.ahead.set()
        return super().wait_briefly(seconds, meter)

    def forget_pass(self) -> None:
        if self.memory.rank == 0:
            self.under_way.discard(self.memory.unit)
        super().forget_pass()


def test_a_worker_that_is_ahead_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has no gradients before rank 0 waits, or has sent more than it should."""
    most = list[int]()

    class Watched(BucketAhead):
        ahead, under_way = threading.Event(), set[str]()

        def begin_sum(self, group: Group) -> None:
            super().begin_sum(group)
            if group.rank == 0:
                most.append(len(self.under_way))
                if most[-1] > 2:
                    self.ahead.set()

    monkeypatch.setattr(gradients, "GradientBucket", Watched)
    monkeypatch.setattr(gradients, "LONGEST_WAIT", PATIENCE)
    same(odd_net, fitting(vectors), shard("blocks.*", zero=2), 2)
    assert len(most) == 16 and most[:2] == [1, 2] and max(most) == 2


@pytest.mark.parametrize(("zero", "native"), [(2, False), (3, False), (2, True), (3, True)])
def test_a_worker_that_keeps_its_buckets_is_not_waited_for_long(
    zero: Any, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker doesn't use a parameter of the last block, and with zero=3 needs what
    the first one gathers later on.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            out: Tensor = self.always(x).tanh()
            return (
                out.index_put((chosen,), self.sometimes(x[chosen])) if bool(chosen.any()) else out
            )

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.head = nn.Linear(7, 5), nn.Linear(5, 3)
            self.blocks = nn.ModuleList([Block() for _ in range(7)])

        def forward(self, x: Tensor) -> Tensor:
            chosen, x = x[:, 0] > 1.5, self.inward(x)
            for number, block in enumerate(self.blocks):
                x = x + block(x, chosen if number == 6 else chosen | True)
            out: Tensor = self.head(x)
            return out

    def step(one: Trainee, number: int) -> None:
        steps[one.rank] = number
        x, y = vectors(number)
        x[:, 0] = torch.arange(len(x)).lt(len(x) // 2) * 2.0
        x, y = one.batch(x, y)
        one.optimizer.zero_grad()
        F.mse_loss(one.model(x), y).backward()
        one.optimizer.step()

    class Watched(GradientBucket):
        def wait_briefly(self, seconds: float, meter: AxisMeter) -> bool:
            waits.append((self.memory.rank, steps[self.memory.rank]))
            return super().wait_briefly(seconds, meter)

    steps, waits = dict[int, int](), list[tuple[int, int]]()
    monkeypatch.setattr(gradients, "GradientBucket", Watched)
    monkeypatch.setattr(gradients, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(gradients, "SHORT_WAIT", 0.01)
    same(lambda: fill(Deep().double()), step, shard("blocks.*", zero=zero), 2, native=native)
    assert set(waits) == {(0, 0)}, (
        "those who have seen that others use other parameters don't wait for them"
    )


def test_workers_that_sum_different_units_are_told_which() -> None:
    """In shared memory, where it is written without a copy; the units are as long as each other."""

    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=20)
        memory = FlatMemory(
            f"blocks.{rank}",
            [ModelParameter("weight", nn.Parameter(torch.ones(6)), ())],
            group,
            frees=False,
        )
        bucket = GradientBucket(memory, None, keeps=True)
        bucket.add_gradient(0, torch.ones(6), 0.5)
        bucket.begin_sum(group)
        with pytest.raises(
            Mismatch, match=r"'the gradients of blocks\.0'.*'the gradients of blocks\.1'"
        ):
            bucket.wait_for_pieces(AxisMeter("shard"))
        group.close()

    threads(2, body)


def test_a_large_gradient_is_copied_when_no_bucket_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It and its copy are as large as a unit; rank 1 has no gradients before rank 0 waits, or
    has copied one too early.
    """
    found = list[int]()

    class Watched(BucketAhead):
        ahead, under_way = threading.Event(), set[str]()

        def add_gradient(self, index: int, grad: Tensor, scale: float) -> None:
            if self.memory.rank == 0 and 2 * grad.numel() > self.memory.layout.padded_numel:
                found.append(len(self.under_way))
                if self.under_way:
                    self.ahead.set()
            super().add_gradient(index, grad, scale)

    monkeypatch.setattr(gradients, "GradientBucket", Watched)
    monkeypatch.setattr(gradients, "LONGEST_WAIT", PATIENCE)
    layers = [nn.Linear(7, 9), *(nn.Linear(9, 9) for _ in range(3)), nn.Linear(9, 3)]
    same(
        lambda: fill(nn.Sequential(*(copy.deepcopy(layer) for layer in layers)).double()),
        fitting(vectors),
        shard("*", zero=3),
        2,
    )
    assert len(found) == 5 * 4 and not any(found), found

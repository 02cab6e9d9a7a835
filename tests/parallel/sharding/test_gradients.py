"""Gradients of whole parameters become those of pieces: weighted, summed, once, and where all workers have used something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.shard import shard
from paceline.parallel.sharding.gradients import GradientBucket
from tests.harness.models import fill
from tests.harness.sharded import Trainee, fitting, same
from tests.harness.sharded_models import OddNet, odd_net, vectors

STAGES = pytest.mark.parametrize("zero", [1, 2, 3])


@STAGES
@pytest.mark.parametrize("cuts", [[1, 2, 11], [0, 7, 12]])  # the last worker has no samples in the second
def test_uneven_batches_and_ghosts(zero: Any, cuts: list[int]) -> None:
    same(odd_net, fitting(vectors, cuts=cuts), shard("blocks.*", zero=zero), 4, data=2)


@STAGES
def test_a_weight_that_is_forgotten_is_seen(zero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = GradientBucket.put
    monkeypatch.setattr(GradientBucket, "put", lambda self, index, grad, scale: own(self, index, grad, 1.0))
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
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)  # what nobody has used doesn't decay

    def step(one: Trainee, number: int) -> None:
        x, y = vectors(number)
        x = x[x[:, 0].argsort()].clamp(max=1.4)  # nobody uses the other
        if number != 1:
            x[-1, 0] = 2.0  # the last worker does
        x, y = one.batch(x, y)
        one.optimizer.zero_grad()
        out = one.model(x)
        if one.size == 1 and number != 1:  # the condition of one process covers all samples; here each has its own
            out = OddNet.forward(one.model, x) + torch.cat([torch.zeros(6, 3), one.model.other(x[6:, :5])])  # type: ignore[operator]
        F.mse_loss(out, y).backward()
        one.optimizer.step()

    same(lambda: fill(Choosing().double()), step, shard("blocks.*", zero=zero), 2, optimizer=optimizer)

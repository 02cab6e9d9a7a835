"""What would look at a worker's piece as if it were the parameter is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import UsageError
from paceline.parallel.shard import shard
from tests.harness.sharded import Trainee, fitting, refused, same
from tests.harness.sharded_models import odd_net, vectors

STAGES = pytest.mark.parametrize("zero", [1, 2, 3])


@STAGES
def test_torchs_clipping_is_refused(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        fitting(vectors)(one, number)
        nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)

    refused(
        shard("blocks.*", zero=zero),
        "torch's clip_grad_norm_ would clip inward.weight by the norm of this worker's part",
        step=step,
    )
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    assert float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)) == pytest.approx(6**0.5)
    assert float(
        nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    ) == pytest.approx(0.1, rel=1e-4)


@STAGES
def test_clipping_by_value(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        x, y = one.batch(*vectors(number))
        one.optimizer.zero_grad()
        F.mse_loss(one.model(x), y).backward()
        if zero != 3 and one.size > 1:
            with pytest.raises(UsageError, match="give it what the optimizer steps"):
                nn.utils.clip_grad_value_(one.model.parameters(), 0.02)
            nn.utils.clip_grad_value_(
                [p for group in one.optimizer.param_groups for p in group["params"]], 0.02
            )
        else:
            nn.utils.clip_grad_value_(one.model.parameters(), 0.02)
        one.optimizer.step()

    same(odd_net, step, shard("blocks.*", zero=zero), 2)


@STAGES
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_of_the_model(zero: Any, to_none: bool) -> None:
    def step(one: Trainee, number: int) -> None:
        x, y = one.batch(*vectors(number))
        if number == 2:
            for part in one.model.children():
                part.zero_grad(to_none)
        elif number != 3:
            one.model.zero_grad(set_to_none=to_none)
        F.mse_loss(one.model(x), y).backward()
        one.optimizer.step()

    same(odd_net, step, shard("blocks.*", zero=zero), 4, data=2, steps=5)

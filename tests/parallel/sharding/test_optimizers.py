"""What would look at a worker's piece as if it were the parameter is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.parallel.shard import shard
from tests.harness.sharded import Trainee, fitting, refused
from tests.harness.sharded_models import vectors

STAGES = pytest.mark.parametrize("zero", [1, 2, 3])


@STAGES
def test_torchs_clipping_is_refused(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        fitting(vectors)(one, number)
        nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)

    refused(shard("blocks.*", zero=zero), "torch's clip_grad_norm_ would clip inward.weight by the norm of this worker's part", step=step)
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    assert float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)) == pytest.approx(6**0.5)
    assert float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])) == pytest.approx(0.1, rel=1e-4)

"""Outer optimizers: the mean as it is, and Nesterov momentum as torch's SGD takes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.sync.localsgd.outer import average, nesterov

CHANGES = [
    torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for seed in range(5)
]


def test_the_average_is_the_mean_of_replicas() -> None:
    start = torch.arange(7, dtype=torch.float64)
    assert average().begin(start) is None
    average().move(start, torch.full((7,), 0.5, dtype=torch.float64), None)
    assert torch.equal(start, torch.arange(7, dtype=torch.float64) + 0.5)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.3, 0.0)])
def test_nesterov_is_torchs_own_on_the_negative_change(lr: float, momentum: float) -> None:
    outer, start = nesterov(lr, momentum), torch.ones(7, dtype=torch.float64)
    memory = outer.begin(start)
    assert (memory is None) == (momentum == 0)
    wanted = nn.Parameter(torch.ones(7, dtype=torch.float64))
    optimizer = torch.optim.SGD([wanted], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for change in CHANGES:
        outer.move(start, change.clone(), memory)
        wanted.grad = -change
        optimizer.step()
        assert torch.allclose(start, wanted.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("lr", "momentum"), [(0.0, 0.9), (-1.0, 0.9), (0.7, 1.0), (0.7, -0.1), (float("nan"), 0.9)]
)
def test_settings_that_make_no_sense(lr: float, momentum: float) -> None:
    with pytest.raises(UsageError, match="lr must be above 0"):
        nesterov(lr, momentum)

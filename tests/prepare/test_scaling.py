"""A GradScaler of a cut model skips a step on all workers or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.session.run import Run
from tests.harness.models import fill
from tests.harness.runs import alone, batches, distance, workers
from tests.harness.sharded import put_together


class Overflowing(nn.Module):
    """A network whose last parameter alone can have a gradient that overflows: one worker has
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        self.last = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, factor: float) -> Tensor:
        out: Tensor = self.net(x) + self.last * factor
        return out


def train(cut: Any, *, fused: bool) -> Callable[[Run], tuple[Tensor, list[float]]]:
    def body(run: Run) -> tuple[Tensor, list[float]]:
        model = Overflowing()
        fill(model.net)
        opt = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        model, opt, scaler, loader = run.prepare(
            model, opt, scaler, batches(), cut=cut if run.size > 1 else None
        )  # type: ignore[assignment]
        scales = []
        for _ in run.epochs(1):
            for number, (x, y) in enumerate(loader):
                opt.zero_grad()
                scaler.scale(
                    F.mse_loss(model(x.float(), 3e38 if number == 2 else 0.0), y.float())
                ).backward()
                scaler.step(opt)
                scaler.update()
                scales.append(scaler.get_scale())
        cuts = run._prepared.cuts
        return put_together(
            model, run._axes.groups.everyone, cuts.placements, cuts.trained_tensor
        ), scales

    return body


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_one_part_skips_the_step_everywhere(zero: Any, fused: bool) -> None:
    wanted, scales = alone(train(None, fused=fused))
    assert scales[1] > scales[2]
    for found, seen in workers(3, train(pl.shard(zero=zero), fused=fused), mesh="shard"):
        assert seen == scales and distance(found, wanted) < 1e-5

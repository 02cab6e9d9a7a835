"""An Adagrad that was made before its model was cut: it has state from its start, and makes the
steps of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.session.run import Run
from tests.harness.runs import alone, distance, workers


def body(run: Run, **options: Any) -> Tensor:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.linspace(-1, 1 + number, parameter.numel(), dtype=torch.float64)
                .sin()
                .view_as(parameter)
            )
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(20, width, generator=generator, dtype=torch.float64) for width in (5, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05, initial_accumulator_value=0.1)
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(TensorDataset(x, y), 8), **options
    )
    for _ in run.epochs(2):
        for inputs, targets in loader:
            run.step(model, inputs, targets, loss=F.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
    return run.forward(model, x).detach()


@pytest.mark.parametrize(
    ("cut", "mesh"),
    [
        (pl.shard(zero=1), "shard=2"),
        (pl.shard(zero=3), "shard=2"),
        (pl.pipeline("0, 1, 2"), "stage=2"),
        (pl.tensor({"0": pl.column(), "2": pl.row()}), "tensor=2"),
    ],
    ids=["zero=1", "zero=3", "stage", "tensor"],
)
def test_it_makes_the_steps_of_one_process(cut: Any, mesh: str) -> None:
    for found in workers(2, lambda run: body(run, cut=cut), mesh=mesh):
        assert distance(found, alone(body)) < 1e-9

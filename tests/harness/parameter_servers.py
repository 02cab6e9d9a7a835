"""Trainings whose optimizers step on servers, in lockstep and not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.runs import batches, parameters, workers

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    made = nn.Sequential(
        nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 80), nn.Tanh(), nn.Linear(80, 2)
    ).double()
    generator = torch.Generator().manual_seed(3)  # threads share torch's own
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2)
    return made.to(dtype)


def train(
    run: Run,
    kind: str = "sgd",
    *,
    epochs: int = 4,
    clip: float | None = None,
    rate: float = 1.0,
    dtype: Any = torch.float64,
    **options: Any,
) -> Tensor:
    model = net(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, rate)
    model, optimizer, scheduler, loader = run.prepare(
        model, optimizer, scheduler, batches(), **options
    )
    for _ in run.epochs(epochs):
        for x, y in loader:
            loss = F.mse_loss(model(x.to(dtype)), y.to(dtype))
            loss.backward()
            if clip is not None:
                run.clip(model, clip)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return parameters(model)


def two() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Two networks, the first before the second, and an optimizer of each."""
    one, other = net(), nn.Linear(2, 2).double()
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(0.1)
    return (
        one,
        other,
        torch.optim.Adam(one.parameters(), 0.01),
        torch.optim.SGD(other.parameters(), 0.05, momentum=0.9),
    )


ASP, SSP, BACKUP = (
    ParameterServer(2, math.inf),
    ParameterServer(2, 2),
    ParameterServer(2, backup_workers=1),
)


# A small case and a large one come first.
CASES = dict.fromkeys(
    [
        (2, 1, "momentum"),
        (4, 3, "adam"),
        *product((1, 2, 3, 4), (1, 2, 3), ("sgd", "momentum", "adam")),
    ]
)
SERVED_BY = pytest.mark.parametrize(("size", "servers", "kind"), list(CASES))

# Those that are furthest apart come first: where others are left to a soak, these two always run.
EACH = pytest.mark.parametrize("strategy", [ASP, BACKUP, SSP], ids=repr)


class Numbers(Dataset[Any]):
    """Sample i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Table(nn.Module):
    """A weight for each sample: its gradient tells which samples were in a step."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].mean()


def table(
    run: Run, count: int = 60, batch: int = 6, *, lr: float = 1.0, **options: Any
) -> tuple[Table, Any, Any]:
    model = Table(count)
    loader = DataLoader(
        Numbers(count), batch, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    ready: tuple[Table, Any, Any] = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr), loader, **options
    )
    return ready


def turn(model: Table, optimizer: Any, ids: Tensor) -> None:
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def epoch(
    strategy: ParameterServer,
    size: int = 3,
    *,
    slow: Callable[[int], float] = lambda rank: 0.0,
    epochs: int = 1,
    **options: Any,
) -> list[tuple[list[int], Tensor, int]]:
    """What each worker has trained, the weights in the end, and the steps."""

    def body(run: Run) -> tuple[list[int], Tensor, int]:
        model, optimizer, loader = table(run, **options)
        mine: list[int] = []
        for _ in run.epochs(epochs):
            for ids in loader:
                time.sleep(slow(run.rank))
                mine += ids.tolist()
                turn(model, optimizer, ids)
        return mine, parameters(model), run.steps

    return workers(size, body, strategy=strategy)

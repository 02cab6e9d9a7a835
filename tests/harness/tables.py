"""A model of two tables and a dense layer, with tables on servers and as torch has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.servers.process import row_optimizers
from paceline.servers.tables.embedding import SparseEmbedding
from paceline.session.run import Run
from tests.harness.runs import alone

ROWS, DIM = 60, 4
Make = Callable[..., nn.Module]  # of a table: mode, seed


def data(count: int = 44) -> TensorDataset:
    """Ids of two tables, three and two for a sample, often the same; and targets."""
    generator = torch.Generator().manual_seed(5)
    first = (torch.rand(count, 3, generator=generator) ** 2 * ROWS).long()
    second = torch.randint(ROWS, (count, 2), generator=generator)
    return TensorDataset(
        first, second, torch.randn(count, 2, generator=generator, dtype=torch.float64)
    )


def loader(count: int = 28, batch: int = 8) -> DataLoader[Any]:
    return DataLoader(data(count), batch, shuffle=True, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, make: Make, dtype: torch.dtype, mode: str) -> None:
        super().__init__()
        self.first, self.second = make(mode=mode, seed=1), make(mode="sum", seed=2)
        self.dense = nn.Linear(2 * DIM, 2)
        with torch.no_grad():
            self.dense.weight.fill_(0.1)
            self.dense.bias.zero_()
        self.to(dtype)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.dense(torch.cat([self.first(a), self.second(b)], dim=1).tanh())


def served(servers: int = 2, **options: Any) -> Make:
    return lambda mode, seed: SparseEmbedding(
        ROWS, DIM, mode, seed=seed, servers=servers, **options
    )


def plain(*, sparse: bool = False) -> Make:
    """The same, as torch has it."""

    def make(mode: str, seed: int) -> nn.Module:
        bag = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=sparse, dtype=torch.float64)
        with torch.no_grad():
            bag.weight.copy_(
                row_optimizers.make_initial_values(
                    torch.arange(ROWS), DIM, torch.float64, seed=seed, std=1.0
                )
            )
        return bag

    return make


def handles(model: nn.Module) -> list[nn.Parameter]:
    return [model.first.weight, model.second.weight]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), 0.5)],
    "adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), 0.1, lr_decay=0.01)],
    "adam": lambda m: [
        torch.optim.SparseAdam(handles(m), 0.05),
        torch.optim.Adam(m.dense.parameters(), 0.01),
    ],
    "groups": lambda m: [
        torch.optim.SGD(
            [{"params": handles(m), "lr": 0.7}, {"params": m.dense.parameters(), "momentum": 0.9}],
            lr=0.1,
        )
    ],
}


def everything(model: nn.Module) -> Tensor:
    tables = [
        t.lookup(torch.arange(ROWS)) if isinstance(t, SparseEmbedding) else t.weight.detach()
        for t in (model.first, model.second)
    ]
    return torch.cat(
        [x.double().flatten() for x in tables]
        + [p.detach().double().flatten() for p in model.dense.parameters()]
    )


def step(model: nn.Module, optimizers: list[Any], batch: Any, **_: Any) -> None:
    a, b, y = batch
    F.mse_loss(model(a, b), y.to(model.dense.weight.dtype)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(
    run: Run,
    make: Make,
    kind: str = "adagrad",
    *,
    each: Callable[..., None] = step,
    epochs: int = 2,
    rate: float = 1.0,
    mode: str = "mean",
    dtype: torch.dtype = torch.float64,
    count: int = 28,
    **options: Any,
) -> Tensor:
    model = Net(make, dtype, mode)
    optimizers = OPTIMIZERS[kind](model)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, rate) for optimizer in optimizers
    ]
    model, *others, batches = run.prepare(model, *optimizers, *schedules, loader(count), **options)
    for _ in run.epochs(epochs):
        for batch in batches:
            each(model, others[: len(optimizers)], batch, run=run)
        for schedule in schedules:
            schedule.step()
    return everything(model)


def one(kind: str, **options: Any) -> Tensor:
    return alone(lambda run: train(run, plain(sparse=kind == "adam"), kind, **options))

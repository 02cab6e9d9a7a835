"""Sparse tables where workers are not in lockstep: rows make the steps that everything else
makes, whoever comes late.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.servers.tables.embedding import SparseEmbedding
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.parameter_servers import ASP, BACKUP, EACH, SSP, Numbers
from tests.harness.runs import workers

COUNT, BATCH = 36, 6


class Twins(nn.Module):
    """A weight for each sample, once on the servers of tables and once as a parameter: their
    gradients are the same, whatever they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = SparseEmbedding(
            COUNT, 1, "sum", std=0.0, seed=1, servers=2, dtype=torch.float64
        )
        self.dense = nn.Parameter(torch.zeros(COUNT, 1, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids[:, None]) + self.dense[ids]

    def both(self) -> tuple[Tensor, Tensor]:
        """What either has now."""
        return self.rows.lookup(torch.arange(COUNT)), self.dense.detach().clone()


Make = Callable[[Twins], list[Any]]
SGD: Make = lambda model: [torch.optim.SGD(model.parameters(), 1.0)]  # noqa: E731
ADAGRAD: Make = lambda model: [torch.optim.Adagrad(model.parameters(), 0.1)]  # noqa: E731
OWN: Make = lambda model: [  # noqa: E731
    torch.optim.SGD([model.rows.weight], 1.0),
    torch.optim.SGD([model.dense], 1.0),
]


def linear(model: Twins, ids: Tensor) -> Tensor:
    return model(ids).mean()


def bent(model: Twins, ids: Tensor) -> Tensor:
    return (model(ids) - ids[:, None] / COUNT).square().mean()


def begun(run: Run, make: Make) -> tuple[Twins, list[Any], Any]:
    model = Twins()
    loader = DataLoader(
        Numbers(COUNT), BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    model, loader, *optimizers = run.prepare(model, loader, *make(model))
    return model, optimizers, loader


def trained(
    strategy: ParameterServer,
    make: Make = SGD,
    loss: Callable[[Twins, Tensor], Tensor] = linear,
    *,
    size: int = 3,
    epochs: int = 2,
    between: Callable[[Run, Twins], object] = lambda run, model: None,
    slow: float = 0.01,
    late: float = 0.0,
) -> list[tuple[Tensor, Tensor, list[int]]]:
    """On each worker: the rows and their twins in the end, and the samples that it has trained."""
    chance = random.Random(3)

    def body(run: Run) -> tuple[Tensor, Tensor, list[int]]:
        model, optimizers, loader = begun(run, make)
        mine: list[int] = []
        for _ in run.epochs(epochs):
            for ids in loader:
                loss(model, ids).backward()
                time.sleep(
                    chance.random() * slow
                    + (late if run.rank == 1 and chance.random() < 0.5 else 0.0)
                )
                if (following := loader.peek()) is not None and chance.random() < 0.5:
                    model.rows.prefetch(following[:, None])
                between(run, model)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                mine += ids.tolist()
        return *model.both(), mine

    return workers(size, body, strategy=strategy)


EITHER = [  # plain SGD without dropped steps is in the next test
    *(
        pytest.param(strategy, ADAGRAD, id=f"adagrad-{strategy!r}")
        for strategy in (ASP, SSP, BACKUP)
    ),
    pytest.param(BACKUP, SGD, id=f"sgd-{BACKUP!r}"),
    *(
        pytest.param(strategy, SGD, id=f"sgd-{strategy!r}", marks=pytest.mark.soak)
        for strategy in (ASP, SSP)
    ),
]


@pytest.mark.each_choice
@pytest.mark.parametrize(("strategy", "make"), EITHER)
def test_rows_make_the_steps_of_everything_else(strategy: ParameterServer, make: Make) -> None:
    """Late gradients and dropped ones, too; with Adagrad a step of a sum is not the sum of two
    steps.
    """
    found = trained(strategy, make, bent)
    for rows, dense, _ in found:
        assert torch.allclose(rows, dense, rtol=1e-12, atol=1e-15) and bool(dense.any())
        assert torch.equal(rows, found[0][0]), "all read the same in the end"


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("strategy", "make", "size"),
    [(ASP, SGD, 2), (ASP, OWN, 4), (SSP, SGD, 4), (SSP, OWN, 2)],
    ids=["alone-one-2", "alone-its own-4", "stale-one-4", "stale-its own-2"],
)
def test_each_gradient_is_in_the_rows_once(
    strategy: ParameterServer, make: Make, size: int
) -> None:
    found = trained(strategy, make, size=size)
    for rows, dense, _ in found:
        assert torch.allclose(
            rows, torch.full((COUNT, 1), -2 / BATCH, dtype=torch.float64), rtol=1e-12
        )
        assert torch.allclose(dense, rows, rtol=1e-12)
    assert sorted(sample for _, _, mine in found for sample in mine) == sorted([*range(COUNT)] * 2)


@pytest.mark.parametrize("make", [SGD, OWN], ids=["one", "of its own"])
def test_what_comes_late_is_in_the_next_step(make: Make) -> None:
    """A worker goes on before its step is made, and takes part in that when it comes with more."""
    for rows, dense, _ in trained(ParameterServer(2, 4), make, late=0.1, slow=0.004):
        assert torch.allclose(
            rows, torch.full((COUNT, 1), -2 / BATCH, dtype=torch.float64), rtol=1e-12
        )
        assert torch.allclose(dense, rows, rtol=1e-12)


@pytest.mark.parametrize("strategy", [BACKUP], ids=repr)
def test_an_optimizer_of_tables_alone_with_backup_workers(strategy: ParameterServer) -> None:
    """Who makes its steps is decided like those of others; rows, which step first here, have
    every sample that is dealt again.
    """
    for rows, dense, _ in trained(strategy, OWN):
        assert bool((rows < 0).any()) and bool((dense < 0).any())
        assert strategy is BACKUP or bool((rows < 0).all())


@pytest.mark.parametrize("bound", [1, 3])
def test_rows_are_no_older_than_the_bound(bound: int) -> None:
    """In the rows that a worker reads are all turns of everybody else but the last `bound`,
    whoever is slow.
    """
    turns: list[list[list[int]]] = [[], [], []]

    def body(run: Run) -> int:
        model, (optimizer,), loader = begun(run, SGD)
        seen = 0
        for turn, ids in enumerate(loader):
            turns[run.rank].append(ids.tolist())
            rows = model.rows.lookup(torch.arange(COUNT))[:, 0]
            for others in turns:
                due = [sample for done in others[: max(turn - bound, 0)] for sample in done]
                assert bool((rows[due] < 0).all()), f"rank {run.rank} in turn {turn}"
                seen += len(due)
            time.sleep(0.02 if run.rank == 1 else 0.001)
            linear(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert sum(workers(3, body, strategy=ParameterServer(2, bound))) > 0


@pytest.mark.alike(2)
@EACH
def test_clipped(strategy: ParameterServer) -> None:
    """Layers are clipped by their norm, rows are not; who makes a step is asked before it is
    made.
    """
    for rows, dense, _ in trained(
        strategy, epochs=1, between=lambda run, model: run.clip([model.dense], 1e-3)
    ):
        assert dense.abs().max() < 2e-3 and rows.abs().max() > 0.1


@pytest.mark.parametrize("strategy", [SSP, BACKUP], ids=repr)
def test_a_gradient_that_comes_after_clipping_is_refused(strategy: ParameterServer) -> None:
    def between(run: Run, model: Twins) -> None:
        run.clip([model.dense], 1.0)
        model.rows(torch.tensor([[1]])).sum().backward()

    with pytest.raises(UsageError, match=r"have changed since run\.clip"):
        trained(strategy, between=between)


@pytest.mark.alike(2)
@EACH
def test_saved_between_epochs_and_resumed(strategy: ParameterServer, tmp_path: Path) -> None:
    """By other workers, who begin with what was saved."""

    def body(run: Run, again: bool) -> list[Tensor]:
        model, (optimizer,), loader = begun(run, ADAGRAD)
        assert run.resume() == again
        found = [*model.both()]
        for _ in run.epochs(2 if again else 1):
            for ids in loader:
                bent(model, ids).backward()
                optimizer.step()
                optimizer.zero_grad()
        found += model.both()
        if not again:
            run.save()
        return found

    saved = workers(3, lambda run: body(run, False), strategy=strategy, folder=tmp_path)[0]
    for rows, dense, rows_then, dense_then in workers(
        2, lambda run: body(run, True), strategy=strategy, folder=tmp_path
    ):
        assert torch.equal(rows, saved[2]) and torch.equal(dense, saved[3])
        assert torch.allclose(rows_then, dense_then, rtol=1e-12) and not torch.equal(
            rows_then, rows
        )


def test_a_table_that_comes_after_its_optimizer_has_stepped_is_refused() -> None:
    def body(run: Run) -> None:
        model, (optimizer,), loader = begun(run, SGD)
        for ids in loader:
            linear(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        late = SparseEmbedding(COUNT, 1, "sum")
        optimizer.add_param_group({"params": late.parameters()})
        run.prepare(late, optimizer)

    with pytest.raises(
        UsageError, match="prepare all tables of an optimizer before its first step"
    ):
        workers(2, body, strategy=SSP)


def test_nothing_but_tables_is_refused() -> None:
    def body(run: Run) -> None:
        table = SparseEmbedding(COUNT, 1, "sum")
        run.prepare(
            table, torch.optim.SGD(table.parameters(), 1.0), DataLoader(Numbers(COUNT), BATCH)
        )

    with pytest.raises(UsageError, match="train some other parameter with them"):
        workers(2, body, strategy=ASP)


def test_where_losses_are_survived_it_is_refused() -> None:
    def body(run: Run) -> None:
        run._prepared.survives = True
        begun(run, SGD)

    with pytest.raises(UsageError, match="leave out --min-workers"):
        workers(2, body, strategy=ParameterServer(2, math.inf))

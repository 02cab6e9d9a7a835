"""A model of which each worker has some stages: what it holds, what it tells the others, and
what it keeps apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import paceline as pl
from paceline.parallel.pipeline import pipeline
from paceline.session.run import Run
from tests.harness.models import fill
from tests.harness.runs import workers


class Normed(nn.Module):
    """Batch statistics in every stage, dropout in each."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(dropout)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_a_worker_holds_its_stages_alone() -> None:
    def body(run: Run) -> dict[str, int]:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, cut=pipeline("auto", micro_batches=2))
        x = torch.ones(4, 6, dtype=torch.float64)
        for _ in range(2):
            run.step(model, x, x, loss=nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        held = {name: parameter.numel() for name, parameter in model.named_parameters()}
        state = optimizer.state_dict()["state"]
        # all have the same tree
        assert [state[number]["exp_avg"].numel() for number in range(8)] == list(held.values())
        assert {float(entry["step"]) for entry in state.values()} == {2.0}
        return held

    first, second = workers(2, body, mesh="stage=2")
    assert list(first) == list(second) and all(
        min(first[name], second[name]) == 0 < max(first[name], second[name]) for name in first
    )


def test_running_statistics_of_micro_batches_come_to_all_at_a_save() -> None:
    numbers = torch.randn(6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def body(run: Run) -> list[torch.Tensor]:
        model = Normed().double()
        fill(model)
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            cut=pipeline("parts.*", micro_batches=3),
        )
        run.step(model, numbers, numbers, loss=nn.functional.mse_loss)
        run.save()
        return [buffer.clone() for buffer in model.buffers()]

    whole = Normed().double()
    fill(whole)
    for rows in numbers.split(2):
        whole(rows)
    for found in workers(2, body, mesh="stage=2"):
        assert all(
            torch.allclose(one, two, atol=1e-12, rtol=0)
            for one, two in zip(found, whole.buffers(), strict=True)
        )


def test_a_frozen_stage_is_left_alone() -> None:
    def body(run: Run) -> list[Any]:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
        for parameter in model[:2].parameters():
            parameter.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, cut=pipeline("auto", split=[2, 2], micro_batches=2))
        x = torch.ones(4, 6, dtype=torch.float64)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        run.step(model, x, x * 3, loss=nn.functional.mse_loss)
        optimizer.step()
        return [
            not torch.equal(one, two.detach())
            for one, two in zip(before, model.parameters(), strict=True)
        ]

    first, second = workers(2, body, mesh="stage=2")
    assert not any(first) and second == [False] * 4 + [True] * 4


def test_accumulating_by_no_sync_sums_tied_weights_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(torch.tanh(self.middle(self.first(x))))
            return out

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def body(run: Run) -> Any:
        model = Tied().double()
        fill(model)
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=pl.pipeline("first, middle, last", micro_batches=2),
        )
        with run.no_sync():
            run.step(model, x, x, loss=nn.functional.mse_loss)
        run.step(model, 2 * x, x, loss=nn.functional.mse_loss)
        return model.first.weight.grad

    whole = Tied().double()
    fill(whole)
    for rows in (x, 2 * x):
        nn.functional.mse_loss(whole(rows), x).backward()
    for found in workers(2, body, mesh="stage=2"):
        assert torch.allclose(found, whole.first.weight.grad, atol=1e-12, rtol=0)  # type: ignore[arg-type]

"""Trainings whose gradients go through codecs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.session.run import Run
from paceline.sync.allreduce import AllReduceSync
from tests.harness.runs import batches, parameters


def model() -> nn.Module:
    made = nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 2)
    )
    generator = torch.Generator().manual_seed(3)  # threads share torch's own
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    return made


def train(
    run: Run, *, grads: list[Tensor] | None = None, epochs: int = 4, scaler: Any = None
) -> Tensor:
    net = model()
    net, opt, loader = run.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), batches(dtype=torch.float32)
    )
    for _ in run.epochs(epochs):
        for x, y in loader:
            opt.zero_grad()
            F.mse_loss(net(x), y).backward()
            if grads is not None:
                grads.append(
                    torch.cat(
                        [p.grad.reshape(-1).clone() for p in net.parameters() if p.grad is not None]
                    )
                )
            opt.step()
    return parameters(net)


def exchange(run: Run) -> AllReduceSync:
    sync = run._backward.sync
    assert isinstance(sync, AllReduceSync)
    return sync


def steps(run: Run, count: int, *, resume: bool = False, save: bool = False) -> list[Tensor]:
    """The gradients of some steps, with a checkpoint before the first or after the last."""
    net = model()
    net, opt, loader = run.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), batches(dtype=torch.float32)
    )
    assert run.resume() == resume
    grads: list[Tensor] = []
    for _ in run.epochs(10):
        for x, y in loader:
            F.mse_loss(net(x), y).backward()
            grads.append(
                torch.cat(
                    [p.grad.reshape(-1).clone() for p in net.parameters() if p.grad is not None]
                )
            )
            opt.step()
            opt.zero_grad()
            if len(grads) == count:
                if save:
                    run.save()
                return grads
    raise AssertionError("too few batches")

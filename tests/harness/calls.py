"""Functions for workers of `pl.launch`, which import this module before anything loads torch:
they start faster.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl


def train(steps: int, folder: str = "runs") -> tuple[int, int, list[Tensor]]:
    """Train a small model: the rank, how many samples this worker has seen, and the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(
        TensorDataset(torch.randn(8 * steps, 4), torch.randn(8 * steps, 1)),
        batch_size=8,
        shuffle=True,
    )
    seen = 0
    with pl.start(folder=folder) as run:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for _ in run.epochs(1):
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                seen += len(x)
    return run.rank, seen, [parameter.detach() for parameter in model.parameters()]


def summed() -> tuple[str, float]:
    """Sum over workers by torch.distributed: the backend that did it, and the sum of ranks
    counted from 1.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    backend = dist.get_backend()
    dist.destroy_process_group()
    return backend, x.item()

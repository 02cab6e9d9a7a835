"""A small model whose weights are drawn from a seed, and its optimizer."""

from __future__ import annotations

import torch
from torch import nn


def net(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return fill(model, seed)


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all parameters by a generator of their own: torch's own is one for all threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)

"""A tensor to encode, and what arrives of it."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec.coding import Coding, make_message, split_message


def data(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 3


def sent(coding: Coding, x: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What arrives, and the bytes that were on the way."""
    whole, message = make_message(coding, x.numel())
    whole.fill_(0xAB)
    coding.encode(x, message, torch.Generator().manual_seed(seed))
    out = torch.full_like(x, float("nan"))
    there = whole.clone()
    coding.decode(split_message(coding, x.numel(), there), out)
    return out, there

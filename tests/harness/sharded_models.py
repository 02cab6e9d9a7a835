"""Models that are cut under test: odd sizes, tied weights, skips; their weights are drawn by a
generator of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.apps.gpt import GPT, GPTShape
from tests.harness.models import fill

TINY = GPTShape(d=12, layers=2, heads=2, context=5, vocab=11, tied=True)


class OddNet(nn.Module):
    """A perceptron with blocks that are added to what came in; no size is a multiple of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(7, 5)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5)) for _ in range(3)]
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


class UNet(nn.Module):
    """Convolutions down and up again, with skips from the first half to the second, so that
    blocks are not used in a chain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._block(2, 3), self._block(3, 5)
        self.bottom = self._block(5, 5)
        self.up = nn.ConvTranspose2d(5, 3, 2, stride=2)
        self.last = self._block(6, 3)
        self.head = nn.Conv2d(3, 1, 1)

    @staticmethod
    def _block(inward: int, outward: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inward, outward, 3, padding=1), nn.GroupNorm(1, outward), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.bottom(self.second(F.avg_pool2d(first, 2)))
        out: Tensor = self.head(self.last(torch.cat([first, self.up(second)], 1)))
        return out


def odd_net() -> nn.Module:
    return fill(OddNet().double())


def unet() -> nn.Module:
    return fill(UNet().double())


def gpt() -> nn.Module:
    return fill(GPT(TINY).double())


def vectors(number: int, count: int = 12) -> tuple[Tensor, Tensor]:
    """A global batch of this number."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(count, 7, generator=generator, dtype=torch.float64)
    return x, x[:, :3].sin() + x[:, 3:6]


def pictures(number: int, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(count, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def texts(number: int, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(TINY.vocab, (count, TINY.context + 1), generator=generator)
    return x[:, :-1], x[:, 1:]

"""A U-Net (Ronneberger et al. 2015) for fields on a periodic grid: convolutions down and up, with
skips from each level to its other side.

    x -+-> enter -+--------------------------------------> up.1 -> leave --> + -> out       levels=2
       |          `-> down.0 -+------------------> up.0 ---^                 ^
       |                      `-> down.1 -> middle ---^                      |
       `--- the first channels: what is learned is how they change ----------'

The modules are used in the order enter, down.*, middle, up.*, leave. torch.fx can trace the model,
with these as leaves or without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda channels: nn.GroupNorm(1, channels),
    "batch": nn.BatchNorm2d,
}


@dataclass(frozen=True)
class UNetShape:
    """The sizes of a U-Net: channels that go in and come out, channels of the finest level (each
    below has twice as many), and levels.
    """

    inward: int = 4
    outward: int = 1
    width: int = 16
    levels: int = 2
    norm: str = "group"  # of NORMS


class Convolutions(nn.Module):
    """Two convolutions around the edges of the grid, each with a norm and a bend."""

    def __init__(self, inward: int, outward: int, norm: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(inward, outward, 3, padding=1, padding_mode="circular", bias=False)
        self.first_norm = NORMS[norm](outward)
        self.second = nn.Conv2d(outward, outward, 3, padding=1, padding_mode="circular", bias=False)
        self.second_norm = NORMS[norm](outward)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, inward, n, n) to (samples, outward, n, n)."""
        x = F.silu(self.first_norm(self.first(x)))
        out: Tensor = F.silu(self.second_norm(self.second(x)))
        return out


class Down(nn.Module):
    """The mean of each two by two points, and a block with twice the channels."""

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.block = Convolutions(channels, 2 * channels, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, channels, 2n, 2n) to (samples, 2 * channels, n, n)."""
        out: Tensor = self.block(F.avg_pool2d(x, 2))
        return out


class Up(nn.Module):
    """Each point four times over, beside the skip, and a block with half the channels."""

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.block = Convolutions(channels + channels // 2, channels // 2, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Map (samples, channels, n, n) and the skip (samples, channels / 2, 2n, 2n) to the
        shape of the skip.
        """
        out: Tensor = self.block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return out


class UNet(nn.Module):
    """A U-Net for grids whose sides are divisible by 2 ** levels."""

    def __init__(self, shape: UNetShape) -> None:
        super().__init__()
        self.shape = shape
        widths = [shape.width * 2**level for level in range(shape.levels + 1)]
        self.enter = Convolutions(shape.inward, shape.width, shape.norm)
        self.down = nn.ModuleList(Down(width, shape.norm) for width in widths[:-1])
        self.middle = Convolutions(widths[-1], widths[-1], shape.norm)
        self.up = nn.ModuleList(Up(width, shape.norm) for width in reversed(widths[1:]))
        self.leave = nn.Conv2d(shape.width, shape.outward, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, inward, n, n) to (samples, outward, n, n)."""
        first = x[:, : self.shape.outward]
        x = self.enter(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        x = self.middle(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(x, skip)
        out: Tensor = first + self.leave(x)
        return out

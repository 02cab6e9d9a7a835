"""A U-Net (Ronneberger et al. 2015) for fields on a periodic grid.

Convolutions lead down to coarser levels and up again. A skip leads from each level on the way down
to the same level on the way up.

    x -+-> enter -+--------------------------------------> up.1 -> leave --> + -> out       levels=2
       |          `-> down.0 -+------------------> up.0 ---^                 ^
       |                      `-> down.1 -> middle ---^                      |
       `--- the first channels: the model learns how they change ------------'

The modules are used in the order enter, down.*, middle, up.*, leave. torch.fx can trace the model,
with or without these modules as leaves.
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
    """The sizes of a U-Net.

    Attributes:
        inward: Number of channels of the input.
        outward: Number of channels of the output.
        width: Number of channels of the finest level. Each coarser level has twice as many.
        levels: Number of times that the grid is halved.
        norm: Key of `NORMS`.
    """

    inward: int = 4
    outward: int = 1
    width: int = 16
    levels: int = 2
    norm: str = "group"


class Convolutions(nn.Module):
    """Two convolutions that wrap around the edges of the grid, each with a norm and SiLU."""

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
    """The mean of each square of four points, then convolutions to twice the channels."""

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.block = Convolutions(channels, 2 * channels, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, channels, 2n, 2n) to (samples, 2 * channels, n, n)."""
        out: Tensor = self.block(F.avg_pool2d(x, 2))
        return out


class Up(nn.Module):
    """Each point repeated four times, beside the skip, then convolutions to half the channels."""

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.block = Convolutions(channels + channels // 2, channels // 2, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Map (samples, channels, n, n) to the shape of the skip.

        The skip is (samples, channels / 2, 2n, 2n).
        """
        out: Tensor = self.block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return out


class UNet(nn.Module):
    """A U-Net. 2 ** levels divides the sides of its grids."""

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
        # The model learns the change of the first channels, so these are added at the end.
        first = x[:, : self.shape.outward]
        x = self.enter(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        x = self.middle(x)
        # The last skip is from the coarsest level, which comes first on the way up.
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(x, skip)
        out: Tensor = first + self.leave(x)
        return out

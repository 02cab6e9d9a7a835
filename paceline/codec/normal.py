"""A codec on elements that are made alike: each divided by the size it usually has, so that none drowns among larger ones.

    x / size  --codec-->  total  x size

The sizes are the same on every rank: what each has seen of its own part is summed every so many steps. Optimizers that divide by the size
of gradients (Adam) see about the gradients they would have seen (compare the frozen variance of 1-bit Adam, Tang et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor

from paceline.codec.codec import Codec, State, Sum, Way, Wire, finite, keeps, lift, plain
from paceline.codec.coding import Coding
from paceline.errors import UsageError
from paceline.wording import spell


@dataclass(frozen=True)
class normalised:
    """`codec` on elements divided by their usual size, which is agreed on every `every` sums: `error_feedback(normalised(sign()))`.

    The square of an element's size is the mean square that it had in each rank's part, with weights that fall by `decay` a sum, and
    `floor` squared times the mean of these over its tensor: so what was zero for a while (a word that no batch had) isn't blown up when
    it comes back.
    """

    codec: Codec | Coding
    every: int = 50
    decay: float = 0.97
    floor: float = 0.3

    __repr__ = spell

    def __post_init__(self) -> None:
        self._check(lift(self.codec).choose("", Size()))
        if self.every < 1 or not 0 <= self.decay < 1:
            raise UsageError(f"{self!r}: every has to be 1 or more, and decay from 0 to below 1")
        if not 0 < self.floor < math.inf:
            raise UsageError(f"{self!r}: floor is {self.floor}, and has to be above 0")

    def _check(self, chosen: Codec) -> None:
        if keeps(chosen.init([], torch.device("cpu"))):
            raise UsageError(f"{self!r}: what error_feedback keeps would be in sizes that change; put it around normalised")

    @property
    def stages(self) -> int:
        """See `Codec.stages`."""
        return lift(self.codec).stages + 1

    def choose(self, name: str, shape: Size) -> Codec:
        """See `Codec.choose`."""
        chosen = lift(self.codec).choose(name, shape)
        self._check(chosen)
        return chosen if isinstance(chosen, plain) else replace(self, codec=chosen)

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        """See `Codec.init`."""
        numel = sum(map(math.prod, shapes))
        inner = lift(self.codec).init(shapes, device)
        return {"squares": torch.zeros(numel, device=device), "sizes": torch.ones(numel, device=device), "sums": 0, "inner": inner}

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        """See `Codec.sum`."""
        inner, kept = lift(self.codec), min(self.decay, state["sums"] / (state["sums"] + 1))  # the first ones weigh alike
        squares = torch.mul(state["squares"], kept).addcmul_(x, x, value=(1 - kept) / wire.scale**2)
        sizes = state["sizes"]
        if state["sums"] % self.every == 0:
            summed = yield from plain().sum(squares, shapes, {}, wire)
            sizes = _sizes(summed.total, shapes, wire.group.size, self.floor)
        by = sizes if wire.scale == 1.0 else sizes * wire.scale
        found = yield from inner.sum(x / by, shapes, state["inner"], wire.after(1))
        total = found.total * by
        if not finite(total):
            return Sum(total, lambda y: None, state)

        def settle(y: Tensor) -> None:
            y.div_(by)
            found.settle(y)
            y.mul_(by)

        return Sum(total, settle, {"squares": squares, "sizes": sizes, "sums": state["sums"] + 1, "inner": found.state})


def _sizes(squares: Tensor, shapes: Sequence[Size], ranks: int, floor: float) -> Tensor:
    """Sizes from summed squares; ones in a tensor of which nothing is known."""
    squares.div_(ranks)
    for part in squares.split([math.prod(shape) for shape in shapes]):
        mean = float(part.mean()) if part.numel() else 0.0
        if 0 < mean < math.inf:
            part.add_(floor**2 * mean).sqrt_()
        else:
            part.fill_(1.0)
    return squares

"""A codec on elements that are made alike: each divided by the size it usually has, so that none drowns among larger ones.

    x / size  --codec-->  total  x size

The sizes are the same on every rank: what each has seen of its own part is summed every so many steps. Optimizers that divide by the size
of gradients (Adam) see about the gradients they would have seen (compare the frozen variance of 1-bit Adam, Tang et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from paceline.codec.codec import Codec, State, Sum, Way, Wire, finite, keeps, lift, plain
from paceline.codec.coding import Coding
from paceline.errors import UsageError
from paceline.wording import spell

FLOOR = 1e-3  # of the mean size: what is always zero isn't blown up


@dataclass(frozen=True)
class normalised:
    """`codec` on elements divided by their usual size, which is agreed on every `every` sums: `error_feedback(normalised(sign()))`.

    The size of an element is the root of the mean square that it had in each rank's part, with weights that fall by `decay` a sum.
    """

    codec: Codec | Coding
    every: int = 50
    decay: float = 0.9

    __repr__ = spell

    def __post_init__(self) -> None:
        self._check(lift(self.codec).choose("", Size()))
        if self.every < 1 or not 0 <= self.decay < 1:
            raise UsageError(f"{self!r}: every has to be 1 or more, and decay from 0 to below 1")

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
        return chosen if isinstance(chosen, plain) else normalised(chosen, self.every, self.decay)

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        """See `Codec.init`."""
        numel = sum(map(math.prod, shapes))
        inner = lift(self.codec).init(shapes, device)
        return {"squares": torch.zeros(numel, device=device), "sizes": torch.ones(numel, device=device), "sums": 0, "inner": inner}

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        """See `Codec.sum`."""
        inner, kept = lift(self.codec), self.decay if state["sums"] else 0.0
        squares = torch.mul(state["squares"], kept).addcmul_(x, x, value=(1 - kept) / wire.scale**2)
        sizes = state["sizes"]
        if state["sums"] % self.every == 0:
            summed = yield from plain().sum(squares, shapes, {}, wire)
            sizes = _sizes(summed.total, wire.group.size)
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


def _sizes(squares: Tensor, ranks: int) -> Tensor:
    """Sizes from summed squares; ones where nothing is known."""
    sizes = squares.div_(ranks).sqrt_()
    mean = float(sizes.mean())
    return sizes.clamp_(min=FLOOR * mean) if 0 < mean < math.inf else torch.ones_like(sizes)

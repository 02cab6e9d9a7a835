"""Codings that keep few elements and drop the rest: topk, randomk.

    topk      values  indices       the largest, where they are
    randomk   values  seed          any, drawn in a way that the seed says

Both lose so much that they need `error_feedback` around them, which sends later what was dropped
now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from paceline.codec.coding import Message, WirePart, cut_spans
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice, format_as_call

Threshold = Literal["exact", "sampled"]
SAMPLE = 16 << 10  # elements from which the threshold is guessed
# so many times the wanted number is hoped for beyond the guessed threshold, then the best of them
# are taken
MARGIN = 1.25


class _SparseCoding:
    """A coding of values, and of indices that `_where` finds in the rest of the message."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UsageError(
                f"{self!r}: fraction is {self.fraction!r}, "
                "and has to be above 0 and at most 1 (1 % is 0.01)"
            )

    def _count_kept(self, numel: int) -> int:
        return min(numel, max(1, round(self.fraction * numel))) if numel else 0

    def _find_indices(self, message: Message, numel: int) -> Tensor:
        raise NotImplementedError

    def decode(self, message: Message, out: Tensor) -> None:
        self.add(message, out.zero_())

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        if out.numel():
            out.index_add_(
                0,
                self._find_indices(message, out.numel()),
                message[0].neg() if minus else message[0],
            )


@dataclass(frozen=True)
class topk(_SparseCoding):
    """Keeps the `fraction` of elements of largest size, with their indices.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.topk(0.01))))

    It sends eight bytes for each (Deep Gradient Compression, Lin et al. 2018).
    `threshold="sampled"` finds them several times faster: a sample gives the size from which on
    elements count. So a few of the largest may be missed if sizes are spread unevenly. The choice
    depends on the values alone, not on chance.
    """

    fraction: float
    threshold: Threshold = "exact"

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := describe_unknown_choice("threshold", self.threshold, Threshold):
            raise UsageError(wrong)

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        count = self._count_kept(numel)
        return WirePart(torch.float32, count, values=True), WirePart(torch.int32, count)

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        values, indices = message
        if not x.numel():
            return
        chosen = self._find_largest(x, values.numel())
        torch.index_select(x, 0, chosen, out=values[: chosen.numel()])
        indices[: chosen.numel()].copy_(chosen)
        values[chosen.numel() :].zero_()  # fewer than hoped for: the rest adds zeros somewhere
        indices[chosen.numel() :].zero_()

    def _find_largest(self, x: Tensor, count: int) -> Tensor:
        stride = max(1, x.numel() // SAMPLE)
        sample = x[::stride].abs()
        rank = max(1, round(MARGIN * count * sample.numel() / x.numel()))
        if self.threshold == "exact" or stride == 1 or rank >= sample.numel():
            return torch.topk(x.abs(), count, sorted=False).indices
        least = torch.topk(sample, rank, sorted=False).values.min()
        few = [
            torch.nonzero((x[start:stop].abs() < least).logical_not_()).view(-1).add_(start)
            for start, stop in cut_spans(x)
        ]
        chosen = torch.cat(few)  # what is not a number is not less
        if chosen.numel() > count:
            chosen = chosen[torch.topk(x[chosen].abs(), count, sorted=False).indices]
        return chosen

    def _find_indices(self, message: Message, numel: int) -> Tensor:
        return message[1]


@dataclass(frozen=True)
class randomk(_SparseCoding):
    """Keeps a random `fraction` of the elements, other ones each time (Stich et al. 2018).

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.randomk(0.1))))

    It sends four bytes for each kept element, and eight for the seed. One element is drawn from
    each stretch of 1 / fraction elements. They are sent as they are, not scaled up.
    """

    fraction: float

    __repr__ = format_as_call

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        return WirePart(torch.int64, 1), WirePart(
            torch.float32, self._count_kept(numel), values=True
        )

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        seed, values = message
        seed.random_(generator=draw)
        torch.index_select(x, 0, self._find_indices(message, x.numel()), out=values)

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        values = message[1]
        out.index_add_(
            0, self._find_indices(message, out.numel()), values.neg() if minus else values
        )

    def _find_indices(self, message: Message, numel: int) -> Tensor:
        seed, values = message
        count = values.numel()
        # on the processor: a GPU draws other numbers
        generator = torch.Generator().manual_seed(int(seed))
        edges = torch.arange(count + 1, dtype=torch.int64) * numel // max(1, count)
        width = edges[1:] - edges[:-1]
        chance = torch.rand(count, generator=generator, dtype=torch.float64)
        return (edges[:-1] + (chance * width).long()).to(values.device)

"""Codings that keep few elements and drop the rest: topk, randomk.

    coding    message            elements
    topk      values, indices    the largest ones
    randomk   seed, values       random ones, which the seed determines

Both lose so much that they need `error_feedback` around them: it sends dropped values later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from paceline.codec.coding import Message, WirePart, cut_spans, runs_in_c
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice, format_as_call
from paceline.native.functions import load_functions

Threshold = Literal["exact", "sampled"]
SAMPLE = 16 << 10  # number of elements from which the threshold is estimated
# The estimated threshold aims at this multiple of the wanted number of elements. The largest of
# them are taken, so an estimate that is a little too high still finds enough.
MARGIN = 1.25


class _SparseCoding:
    """A coding of some values. Their indices are found from the rest of the message."""

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
    """Keeps the `fraction` of elements with the largest absolute values, and their indices.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.topk(0.01))))

    It sends eight bytes for each kept element (Deep Gradient Compression, Lin et al. 2018).
    `threshold="sampled"` is several times faster: it estimates the smallest absolute value to keep
    from a sample. A few of the largest may be missed if large values are spread unevenly. The
    choice depends on the values alone, and is never random.
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
        # If the sampled threshold found too few elements, the rest adds zeros to element 0.
        values[chosen.numel() :].zero_()
        indices[chosen.numel() :].zero_()

    def _find_largest(self, x: Tensor, count: int) -> Tensor:
        stride = max(1, x.numel() // SAMPLE)
        sample = x[::stride].abs()
        sample_count = max(1, round(MARGIN * count * sample.numel() / x.numel()))
        # A sample of everything, or a threshold below all of it, would save nothing.
        if self.threshold == "exact" or stride == 1 or sample_count >= sample.numel():
            return torch.topk(x.abs(), count, sorted=False).indices
        cutoff = torch.topk(sample, sample_count, sorted=False).values.min()
        chosen = _find_large(x, cutoff, 2 * count)
        if chosen.numel() > count:
            chosen = chosen[torch.topk(x[chosen].abs(), count, sorted=False).indices]
        return chosen

    def _find_indices(self, message: Message, numel: int) -> Tensor:
        return message[1]


def _find_large(x: Tensor, cutoff: Tensor, expected: int) -> Tensor:
    """Find the indices of elements whose absolute value is not less than `cutoff`.

    "Not less" instead of "at least": a nan isn't less than the threshold, so it is sent.

    Args:
        x: The elements.
        cutoff: The threshold.
        expected: Number of indices to have room for at first.
    """
    if not runs_in_c(x) or x.numel() >= 1 << 31:
        candidates = [
            torch.nonzero((x[start:stop].abs() < cutoff).logical_not_()).view(-1).add_(start)
            for start, stop in cut_spans(x)
        ]
        return torch.cat(candidates)
    while True:
        indices = torch.empty(expected, dtype=torch.int32, device="cpu")
        count = load_functions().find_large(
            x.data_ptr(), x.numel(), float(cutoff), indices.data_ptr(), expected
        )
        if count <= expected:
            return indices[:count].long()
        expected = count


@dataclass(frozen=True)
class randomk(_SparseCoding):
    """Keeps a random `fraction` of the elements, drawn anew each time (Stich et al. 2018).

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.randomk(0.1))))

    It sends four bytes for each kept element, and eight for the seed. One element is drawn from
    each stretch of 1 / fraction elements. Values are sent as they are, not scaled up.
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
        # Drawn on the CPU, because a GPU draws other numbers from the same seed. One element comes
        # from each of `count` stretches of almost equal width, so no index is drawn twice.
        generator = torch.Generator().manual_seed(int(seed))
        bounds = torch.arange(count + 1, dtype=torch.int64) * numel // max(1, count)
        widths = bounds[1:] - bounds[:-1]
        fractions = torch.rand(count, generator=generator, dtype=torch.float64)
        return (bounds[:-1] + (fractions * widths).long()).to(values.device)

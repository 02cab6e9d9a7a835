"""Histograms: how often numbers of a tensor lie in which of some intervals of equal width.

low                                  high
 |----|----|----|----|----|----|----|      counts[i] numbers lie from low + i * width on, and below the next edge;
   0    1    2   ...             6         the last interval has `high`, too
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import UsageError

MOST: Final = 512  # intervals; W&B takes no more
_FACTS: Final = 6  # numbers before the counts in a vector that holds a histogram


@dataclass(frozen=True)
class Histogram:
    """A tensor whose histogram is logged, and the number of intervals; the first worker counts
    when it is given to `run.log`.
    """

    values: Tensor
    bins: int = 64

    def compact(self) -> Tensor:
        """Count, where the tensor is and without waiting for it: a float64 vector for
        `HistogramCounts.of`.
        """
        values = self.values.detach().reshape(-1)
        values = values if values.dtype == torch.float64 else values.to(torch.float32)
        finite = values.isfinite()
        low = values.where(finite, torch.inf).amin()
        high = values.where(finite, -torch.inf).amax()
        kept = finite.to(values.dtype)
        inside = values.where(finite, low)  # counts nothing
        width = (high - low).clamp_min(torch.finfo(values.dtype).tiny)
        at = ((inside - low) / width * self.bins).nan_to_num().long().clamp_(0, self.bins - 1)
        counts = torch.zeros(self.bins, dtype=torch.float64, device=values.device).index_add_(
            0, at, kept.to(torch.float64)
        )
        exact = values.where(finite, 0).to(torch.float64)
        facts = [low, high, finite.sum(), (~finite).sum(), exact.sum(), exact.square().sum()]
        return torch.cat([torch.stack([fact.to(torch.float64) for fact in facts]), counts])


@dataclass(frozen=True)
class HistogramCounts:
    """A histogram: `other` numbers were not finite; `total` and `squares` are sums of the
    `count` finite ones and of their squares.
    """

    low: float
    high: float
    count: int
    other: int
    total: float
    squares: float
    counts: tuple[int, ...]

    @staticmethod
    def of(vector: Tensor) -> HistogramCounts:
        """Read what `Histogram.compact` has counted."""
        low, high, count, other, total, squares, *counts = vector.tolist()
        if not count:
            low = high = 0.0
        return HistogramCounts(
            low, high, int(count), int(other), total, squares, tuple(map(int, counts))
        )

    @property
    def edges(self) -> list[float]:
        """The edges of the intervals, one more than there are.

        They differ also where all numbers are the same.
        """
        width = (self.high - self.low) or max(abs(self.low), 1.0) * 1e-6
        bins = len(self.counts)
        return [self.low + width * at / bins for at in range(bins)] + [self.low + width]

    def fields(self) -> dict[str, Any]:
        """Return what a line of media.jsonl says of it."""
        facts = {
            "low": self.low,
            "high": self.high,
            "count": self.count,
            "other": self.other,
            "sum": self.total,
            "squares": self.squares,
        }
        return {"kind": "histogram", **facts, "counts": list(self.counts)}


def histogram(values: Tensor, bins: int = 64) -> Histogram:
    """Give `run.log` a tensor of which it shows how the numbers are distributed.

    >>> run.log(outputs=pl.histogram(model(x)))

    `values`: any real tensor that isn't empty; the first worker's counts. `bins`: the number of
    intervals of equal width between its smallest and its largest finite number, up to 512. Nothing
    is computed before `run.log` has it, and on other workers than the first nothing at all. Raises
    `UsageError` for anything else.
    """
    if not isinstance(values, Tensor) or values.is_complex() or not values.numel():
        found = (
            f"{values.dtype}, {tuple(values.shape)}"
            if isinstance(values, Tensor)
            else type(values).__qualname__
        )
        raise UsageError(f"pl.histogram got {found}: give a real tensor with at least one number")
    if not 1 <= bins <= MOST:
        raise UsageError(f"pl.histogram(..., bins={bins}): give 1 to {MOST}")
    return Histogram(values, bins)

"""Histograms of tensors: how many elements lie in each of some intervals of equal width.

low                                  high
 |----|----|----|----|----|----|----|      counts[i] elements lie from low + i * width up to, and
   0    1    2   ...             6         without, the next edge; the last interval includes `high`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import UsageError

# Most intervals; W&B accepts no more.
MAX_BINS: Final = 512


@dataclass(frozen=True)
class Histogram:
    """A tensor whose histogram is logged, and the number of intervals.

    The first worker counts when the histogram is given to `run.log`.
    """

    values: Tensor
    bins: int = 64

    def to_compact_tensor(self) -> Tensor:
        """Count on the tensor's device, without waiting for it.

        Returns:
            A float64 vector for `HistogramCounts.from_vector`: low, high, the number of finite
            elements, the number of others, the sum, the sum of squares, and then the counts.
        """
        values = self.values.detach().reshape(-1)
        values = values if values.dtype == torch.float64 else values.to(torch.float32)
        finite = values.isfinite()
        low = values.where(finite, torch.inf).amin()
        high = values.where(finite, -torch.inf).amax()
        weights = finite.to(values.dtype)
        # Nothing here may depend on a value, which would wait for the device. So elements that are
        # not finite stay in the tensor: they fall into the first interval with a weight of 0.
        clamped = values.where(finite, low)
        # If all elements are equal, the width is 0, and the division must not be by 0.
        width = (high - low).clamp_min(torch.finfo(values.dtype).tiny)
        interval = (
            ((clamped - low) / width * self.bins).nan_to_num().long().clamp_(0, self.bins - 1)
        )
        counts = torch.zeros(self.bins, dtype=torch.float64, device=values.device).index_add_(
            0, interval, weights.to(torch.float64)
        )
        finite_values = values.where(finite, 0).to(torch.float64)
        facts = [
            low,
            high,
            finite.sum(),
            (~finite).sum(),
            finite_values.sum(),
            finite_values.square().sum(),
        ]
        return torch.cat([torch.stack([fact.to(torch.float64) for fact in facts]), counts])


@dataclass(frozen=True)
class HistogramCounts:
    """The counts of a histogram.

    Attributes:
        low: Smallest finite element.
        high: Largest finite element.
        count: Number of finite elements.
        other: Number of elements that are not finite.
        total: Sum of the finite elements.
        squares: Sum of their squares.
        counts: Number of elements in each interval.
    """

    low: float
    high: float
    count: int
    other: int
    total: float
    squares: float
    counts: tuple[int, ...]

    @staticmethod
    def from_vector(vector: Tensor) -> HistogramCounts:
        """Read the vector that `Histogram.to_compact_tensor` has computed."""
        low, high, count, other, total, squares, *counts = vector.tolist()
        if not count:
            low = high = 0.0
        return HistogramCounts(
            low, high, int(count), int(other), total, squares, tuple(map(int, counts))
        )

    @property
    def bin_edges(self) -> list[float]:
        """Edges of the intervals, one more than there are intervals.

        They are distinct even if all elements are equal.
        """
        width = (self.high - self.low) or max(abs(self.low), 1.0) * 1e-6
        bins = len(self.counts)
        return [self.low + width * at / bins for at in range(bins)] + [self.low + width]

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of a line in media.jsonl."""
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
    """Log how the elements of a tensor are distributed, with `run.log`.

    >>> run.log(outputs=pl.histogram(model(x)))

    Nothing is computed before `run.log` gets it, and nothing on other workers than the first.

    Args:
        values: Any real tensor that isn't empty. The first worker's tensor counts.
        bins: Number of intervals of equal width between the smallest and the largest finite
            element, up to 512. Default: 64.

    Returns:
        A value for `run.log`.

    Raises:
        UsageError: The tensor is complex or empty, or the number of intervals is out of range.
    """
    if not isinstance(values, Tensor) or values.is_complex() or not values.numel():
        description = (
            f"{values.dtype}, {tuple(values.shape)}"
            if isinstance(values, Tensor)
            else type(values).__qualname__
        )
        raise UsageError(
            f"pl.histogram got {description}: give a real tensor with at least one number"
        )
    if not 1 <= bins <= MAX_BINS:
        raise UsageError(f"pl.histogram(..., bins={bins}): give 1 to {MAX_BINS}")
    return Histogram(values, bins)

"""Decimation: a curve of any length becomes a few hundred points, one for each stretch of it.

values      1 3 | 2 8 | nan 4 | 5            seven steps in four stretches
mean         2     5      4     5
low, high   1 3   2 8    4 4   5 5           a single peak stays visible
bad          0     0      1     0            values that are not finite
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Most points of a curve; a screen doesn't show more.
MAX_POINTS = 400

Floats = NDArray[np.float64]


class Stretches(NamedTuple):
    """Values of each stretch: mean, minimum and maximum of its finite values.

    They are NaN if no value is finite. `bad` is the number of values that are not finite.
    """

    mean: Floats
    low: Floats
    high: Floats
    bad: NDArray[np.int64]


def stretch_starts(length: int, points: int = MAX_POINTS) -> NDArray[np.int64]:
    """Return the starts of at most `points` stretches of nearly the same length."""
    count = min(length, points)
    return np.arange(count, dtype=np.int64) * length // max(count, 1)


def summarize_stretches(values: Floats, begins: NDArray[np.int64]) -> Stretches:
    """Summarize the stretches of `values` that begin at `begins`."""
    if not len(begins):
        empty = np.empty(0)
        return Stretches(empty, empty, empty, np.empty(0, dtype=np.int64))
    finite = np.isfinite(values)
    # `reduceat` reduces from each start to the next one. Values that are not finite are replaced by
    # the neutral element of each reduction.
    finite_count = np.add.reduceat(finite.astype(np.int64), begins)
    sums = np.add.reduceat(np.where(finite, values, 0.0), begins)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), begins)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), begins)
    is_empty = finite_count == 0
    lengths = np.diff(np.append(begins, len(values)))
    mean = np.divide(sums, finite_count, out=np.full(len(begins), np.nan), where=~is_empty)
    return Stretches(
        mean,
        np.where(is_empty, np.nan, low),
        np.where(is_empty, np.nan, high),
        lengths - finite_count,
    )


def last_values(values: Floats, begins: NDArray[np.int64]) -> Floats:
    """Return the last value of each stretch."""
    ends = np.append(begins[1:], len(values)) - 1
    return values[ends] if len(begins) else np.empty(0)


def sum_stretches(values: Floats, begins: NDArray[np.int64]) -> Floats:
    """Return the sum of each stretch, along the first dim."""
    return np.add.reduceat(values, begins, axis=0) if len(begins) else values[:0]

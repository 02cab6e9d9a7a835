"""Decimation: a curve of any length becomes a few hundred points, of which each has the mean, the
least and the most of its stretch.

values      1 3 | 2 8 | nan 4 | 5            seven steps in four stretches
mean         2     5      4     5
low, high   1 3   2 8    4 4   5 5           a single peak stays visible
bad          0     0      1     0            values that are no numbers
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

POINTS = 400  # of a curve: more than a screen tells apart

Floats = NDArray[np.float64]


class Stretches(NamedTuple):
    """The means, least and most of the finite values of each stretch, and how many were not
    finite; nan where none was.
    """

    mean: Floats
    low: Floats
    high: Floats
    bad: NDArray[np.int64]


def starts(length: int, points: int = POINTS) -> NDArray[np.int64]:
    """Return where each of at most `points` stretches of nearly the same length begins."""
    count = min(length, points)
    return np.arange(count, dtype=np.int64) * length // max(count, 1)


def stretches(values: Floats, begins: NDArray[np.int64]) -> Stretches:
    """Return what each stretch of `values`, which begin there, comes to."""
    if not len(begins):
        empty = np.empty(0)
        return Stretches(empty, empty, empty, np.empty(0, dtype=np.int64))
    finite = np.isfinite(values)
    good = np.add.reduceat(finite.astype(np.int64), begins)
    sums = np.add.reduceat(np.where(finite, values, 0.0), begins)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), begins)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), begins)
    none = good == 0
    lengths = np.diff(np.append(begins, len(values)))
    mean = np.divide(sums, good, out=np.full(len(begins), np.nan), where=~none)
    return Stretches(
        mean, np.where(none, np.nan, low), np.where(none, np.nan, high), lengths - good
    )


def lasts(values: Floats, begins: NDArray[np.int64]) -> Floats:
    """Return the last value of each stretch."""
    ends = np.append(begins[1:], len(values)) - 1
    return values[ends] if len(begins) else np.empty(0)


def sums(values: Floats, begins: NDArray[np.int64]) -> Floats:
    """Return the sum of each stretch, along the first axis."""
    return np.add.reduceat(values, begins, axis=0) if len(begins) else values[:0]

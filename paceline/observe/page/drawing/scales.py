"""Axes of drawings: which numbers stand at them, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.formatting import sized, spoken
from paceline.observe import tables
from paceline.unequal.probe.oddities import rated

Words = Callable[[float], str]


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, with `ticks` in words at some of its numbers."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Return where a value lies: 0 at the beginning, 1 at the end."""
        return (value - self.low) / (self.high - self.low)


def scale(
    low: float,
    high: float,
    words: Words,
    count: int = 5,
    *,
    zero: bool = False,
    whole: bool = False,
) -> Scale:
    """Return an axis for values from `low` to `high` with about `count` round numbers on it.

    `zero`: it begins at 0. `whole`: only whole numbers stand at it.
    """
    low = min(low, 0.0) if zero else low
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = (low if zero else low - pad), high + pad
    step = nice((high - low) / count)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple((number * step, words(number * step)) for number in range(first, last + 1))
    return Scale(low, high, ticks)


def nice(step: float) -> float:
    """Return the round number that is not below `step`: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * each for each in (1, 2, 5, 10) if power * each >= step * (1 - 1e-9))


def plain(value: float) -> str:
    """Write a number in four digits, as the report writes a loss."""
    return f"{value:,.0f}" if abs(value) >= 1000 and value == int(value) else f"{value:.4g}"


def whole(value: float) -> str:
    """Write a whole number, with commas."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Write a large number briefly: 12k, 3.4M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def clock(value: float) -> str:
    """Write seconds since the start as on a clock; whole ones below a minute as seconds."""
    return f"{value:.3g} s" if value < 60 else spoken(value)


def percent(value: float) -> str:
    """Write a part of a whole."""
    return f"{value:.1%}"


seconds: Words = tables.seconds
nbytes: Words = sized
rate: Words = rated

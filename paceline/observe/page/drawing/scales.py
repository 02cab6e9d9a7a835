"""Axes of drawings, and the formats of the numbers on a page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.formatting import format_bytes, format_duration
from paceline.observe import tables
from paceline.unequal.probe.oddities import format_rate as rate_text

NumberFormat = Callable[[float], str]


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, with labelled `ticks`."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def position_of(self, value: float) -> float:
        """Return the position of a value: 0 at the start of the axis, 1 at its end."""
        return (value - self.low) / (self.high - self.low)


def make_scale(
    low: float,
    high: float,
    words: NumberFormat,
    count: int = 5,
    *,
    zero: bool = False,
    whole: bool = False,
) -> Scale:
    """Make an axis for values from `low` to `high`, with round numbers on it.

    Args:
        low: Smallest value.
        high: Largest value.
        words: Format of the numbers.
        count: About how many numbers there are. Default: 5.
        zero: Whether the axis begins at 0.
        whole: Whether only whole numbers are shown.
    """
    low = min(low, 0.0) if zero else low
    if not high > low:
        # All values are equal: leave some space around them.
        pad = abs(low) * 0.1 or 1.0
        low, high = (low if zero else low - pad), high + pad
    step = round_up_step((high - low) / count)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple((index * step, words(index * step)) for index in range(first, last + 1))
    return Scale(low, high, ticks)


def round_up_step(step: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * each for each in (1, 2, 5, 10) if power * each >= step * (1 - 1e-9))


def format_number(value: float) -> str:
    """Format a number with four digits, as the report formats a loss."""
    return f"{value:,.0f}" if abs(value) >= 1000 and value == int(value) else f"{value:.4g}"


def format_whole(value: float) -> str:
    """Format a whole number, with commas."""
    return f"{value:,.0f}"


def format_short(value: float) -> str:
    """Format a large number briefly: 12k, 3.4M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def format_clock(value: float) -> str:
    """Format seconds since the start as on a clock; below a minute as seconds."""
    return f"{value:.3g} s" if value < 60 else format_duration(value)


def format_percent(value: float) -> str:
    """Format a share as a percentage."""
    return f"{value:.1%}"


format_seconds: NumberFormat = tables.format_seconds
format_nbytes: NumberFormat = format_bytes
format_rate: NumberFormat = rate_text

"""The status of a run, as plain data and as a line of text.

It travels from the first worker to the launcher, which shows it as a line or as a bar.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from paceline.formatting import format_duration

_MAX_POINTS: Final = 64  # points of a curve; an even number, as two become one
CURVE_CHARACTERS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run, and facts about the steps since the last status.

    Args:
        step: Number of steps taken.
        steps: Number of steps in total. None: unknown.
        epoch: Epoch of the loop over `run.epochs`, from 1 on.
        epochs: Number of epochs.
        values: Logged values by name, the loss first.
        curve: Course of the first value since the start of the run.
        rate: Samples per second, inside steps.
        parts: Share of each part of a step in its time.
        left: Estimated seconds to the end.
        late: Name of the slowest worker, and the cause.
        remark: Another line for the user.
    """

    step: int
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    curve: tuple[float, ...] = ()
    rate: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    left: float | None = None
    late: str = ""
    remark: str = ""

    @property
    def curve_name(self) -> str:
        """Name of the value that has a curve. Empty without values."""
        return next(iter(self.values), "")

    def to_fields(self) -> dict[str, Any]:
        """Convert to a dict, for `from_fields`."""
        return asdict(self)

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> RunStatus:
        """Make a status from the dict of `to_fields`, which may have travelled as JSON."""
        return RunStatus(**{**fields, "curve": tuple(fields.get("curve", ()))})


class ValueCurve:
    """A curve of any number of values, as at most 64 points.

    Each point is the mean of the same number of values, except the last, which may have fewer. When
    there are 64, neighbours are merged, and each later point has twice as many values.
    """

    def __init__(self) -> None:
        self._full_points: list[float] = []
        self._sum, self._count, self._values_per_point = 0.0, 0, 1

    def add_value(self, value: float) -> None:
        """Add the next value. A value that isn't finite is left out."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._values_per_point:
            self._full_points.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        # The curve is full: two neighbours become one point.
        if len(self._full_points) == _MAX_POINTS:
            self._full_points = [
                (one + other) / 2
                for one, other in zip(self._full_points[::2], self._full_points[1::2], strict=True)
            ]
            self._values_per_point *= 2

    def list_points(self) -> tuple[float, ...]:
        """Points so far."""
        return (*self._full_points, *([self._sum / self._count] if self._count else []))


def format_status(status: RunStatus) -> str:
    """Format a status as a line of text."""
    pieces = [] if status.epoch is None else [f"epoch {status.epoch}/{status.epochs}"]
    pieces += [
        f"step {status.step}" if status.steps is None else f"step {status.step}/{status.steps}"
    ]
    pieces += [f"{name} {value:.4g}" for name, value in status.values.items()]
    pieces += [] if status.rate is None else [f"{status.rate:,.0f} samples/s"]
    pieces += [format_part_shares(status.parts)] if status.parts else []
    pieces += [] if status.left is None else [f"{format_duration(status.left)} left"]
    return "  ".join(filter(None, (*pieces, status.late, status.remark)))


def format_part_shares(parts: Mapping[str, float]) -> str:
    """Format the share of each part of a step."""
    return " ".join(f"{part} {share:.0%}" for part, share in parts.items())


def draw_sparkline(points: Iterable[float], width: int) -> str:
    """Draw a curve as a line of at most `width` characters, from ▁ (lowest) to █ (highest).

    Empty for fewer than two points.
    """
    values = list(points)
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    # Each character shows the mean of about as many points as any other.
    edges = [column * len(values) // width for column in range(width + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    # A flat curve is drawn with the lowest character.
    steps = (len(CURVE_CHARACTERS) - 1) / (high - low) if high > low else 0.0
    return "".join(CURVE_CHARACTERS[round((mean - low) * steps)] for mean in means)

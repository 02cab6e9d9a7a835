"""How far a run is, as plain data: it travels from the first worker to what shows it, as a line
of text or as a bar.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from paceline.formatting import spoken

_BUCKETS: Final = 64  # of a curve: even, as two become one
SIGNS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class RunStatus:
    """How far a run is, and what the steps since the last status were like."""

    step: int
    steps: int | None = None  # in all, where that is known
    epoch: int | None = None  # of the loop over `run.epochs`, from 1 on
    epochs: int | None = None
    values: dict[str, float] = field(default_factory=dict)  # that were logged, the loss first
    curve: tuple[float, ...] = ()  # of the first of them, from the start to now
    rate: float | None = None  # samples a second, inside steps
    # the share of a step that each part takes
    parts: dict[str, float] = field(default_factory=dict)
    left: float | None = None  # seconds
    late: str = ""  # who is, and why
    remark: str = ""

    @property
    def name(self) -> str:
        """The name of the value that has a curve; empty without one."""
        return next(iter(self.values), "")

    def fields(self) -> dict[str, Any]:
        """Return the status for `read`."""
        return asdict(self)

    @staticmethod
    def read(fields: Mapping[str, Any]) -> RunStatus:
        """Make a status of its `fields`, which may have travelled as JSON."""
        return RunStatus(**{**fields, "curve": tuple(fields.get("curve", ()))})


class ValueCurve:
    """A curve of any number of values, in at most 64 points: each the mean of as many values,
    but for the last.
    """

    def __init__(self) -> None:
        self._whole: list[float] = []
        self._sum, self._count, self._each = 0.0, 0, 1

    def add(self, value: float) -> None:
        """Add the next value; one that isn't finite is left out."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._each:
            self._whole.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._whole) == _BUCKETS:
            self._whole = [
                (one + other) / 2
                for one, other in zip(self._whole[::2], self._whole[1::2], strict=True)
            ]
            self._each *= 2

    def points(self) -> tuple[float, ...]:
        """Return the points so far."""
        return (*self._whole, *([self._sum / self._count] if self._count else []))


def line(status: RunStatus) -> str:
    """Write a status as a line of text."""
    parts = [] if status.epoch is None else [f"epoch {status.epoch}/{status.epochs}"]
    parts += [
        f"step {status.step}" if status.steps is None else f"step {status.step}/{status.steps}"
    ]
    parts += [f"{name} {value:.4g}" for name, value in status.values.items()]
    parts += [] if status.rate is None else [f"{status.rate:,.0f} samples/s"]
    parts += [shares(status.parts)] if status.parts else []
    parts += [] if status.left is None else [f"{spoken(status.left)} left"]
    return "  ".join(filter(None, (*parts, status.late, status.remark)))


def shares(parts: Mapping[str, float]) -> str:
    """Write the share of each part of a step."""
    return " ".join(f"{part} {share:.0%}" for part, share in parts.items())


def sparkline(points: Iterable[float], width: int) -> str:
    """Draw a curve in one line of so many signs, lowest to highest."""
    found = list(points)
    if len(found) < 2:
        return ""
    width = min(width, len(found))
    edges = [at * len(found) // width for at in range(width + 1)]
    means = [sum(found[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    steps = (len(SIGNS) - 1) / (high - low) if high > low else 0.0
    return "".join(SIGNS[round((mean - low) * steps)] for mean in means)

"""The axis of steps, which curves of a run share: below each step stands when it was, and marks
say what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import number
from paceline.observe.page.drawing.plots import Mark
from paceline.observe.page.drawing.scales import Scale

# events that curves may change by
MARKED = ("lost", "came", "evicted", "shares", "codec", "link", "fault")


def of_steps(steps: Sequence[float | None], *, many: bool = False) -> Scale:
    """Return the axis for these steps, from 0 on where they begin near it."""
    known = [step for step in steps if step is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    return scales.scale(
        0.0 if low < 0.1 * high else low, high, scales.short, 8 if many else 5, whole=True
    )


def clock(data: Mapping[str, Any]) -> Callable[[float], str] | None:
    """Return what says when a step was; None where no step is known."""
    steps, times = data["course"]["step"], data["course"]["time"]
    if not steps:
        return None
    return lambda step: scales.clock(float(np.interp(step, [0.0, *steps], [0.0, *times])))


def marks(data: Mapping[str, Any]) -> list[Mark]:
    """Return the events of a run that its curves may change by, at their steps."""
    steps, times = data["course"]["step"], data["course"]["time"]
    if not steps:
        return []
    began = number(data, "log_began")  # events count from the start, steps from when all had joined

    def at(event: Mapping[str, Any]) -> float:
        step = event.get("step")
        return float(
            step
            if step is not None
            else np.interp(event["time"] - began, [0.0, *times], [0.0, *steps])
        )

    return [
        Mark(at(event), event["what"], event["kind"])
        for event in data["events"]
        if event["kind"] in MARKED
    ]

"""The axis of steps of a run's curves, with the time below each step, and marks for events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import read_number
from paceline.observe.page.drawing.plots import Mark
from paceline.observe.page.drawing.scales import Scale

# Kinds of events that curves may change by.
MARKED_KINDS = ("lost", "came", "evicted", "shares", "codec", "link", "fault")


def make_step_axis(steps: Sequence[float | None], *, many: bool = False) -> Scale:
    """Return the axis for these steps. It begins at 0 if they begin near 0."""
    known_steps = [step for step in steps if step is not None]
    low, high = min(known_steps, default=0.0), max(known_steps, default=1.0)
    return scales.make_scale(
        0.0 if low < 0.1 * high else low, high, scales.format_short, 8 if many else 5, whole=True
    )


def make_step_clock(data: Mapping[str, Any]) -> Callable[[float], str] | None:
    """Return a function that formats the time of a step; None if there are no steps."""
    steps, times = data["course"]["step"], data["course"]["time"]
    if not steps:
        return None
    return lambda step: scales.format_clock(float(np.interp(step, [0.0, *steps], [0.0, *times])))


def make_marks(data: Mapping[str, Any]) -> list[Mark]:
    """Return the events that curves may change by, at their steps."""
    steps, times = data["course"]["step"], data["course"]["time"]
    if not steps:
        return []
    # Events count from the start of the run, and steps from when all workers had joined.
    began = read_number(data, "log_began")

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
        if event["kind"] in MARKED_KINDS
    ]

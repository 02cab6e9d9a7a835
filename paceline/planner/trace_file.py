"""The simulated step as a trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from paceline.planner.step_cost import SimulatedStep


def format_trace(step: SimulatedStep) -> str:
    """Format the events of a step as JSON of complete events, in microseconds."""
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(e.lane for e in step.events))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    events += [
        {
            "ph": "X",
            "name": event.name,
            "pid": 0,
            "tid": lanes[event.lane],
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
        }
        for event in step.events
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"

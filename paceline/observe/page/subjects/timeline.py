"""The section on events: a row for each kind on one axis of time, and below it what they say.

lost        x
came                 ^
checkpoint     o  o  o  o
         0:00    0:10    0:20
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.plots import across
from paceline.observe.page.events import KINDS
from paceline.observe.page.markup import Markup, element, join

THICK: Final = 22  # pixels of a row
LISTED: Final = 200  # events in words, at most
_SHAPES: Final = {  # around 0, 0
    "lost": "M-5-5L5 5M5-5L-5 5",
    "came": "M0-6L6 5H-6Z",
    "evicted": "M0 6L6-5H-6Z",
    "shares": "M0-6L6 0L0 6L-6 0Z",
    "codec": "M-5-5H5V5H-5Z",
    "link": "M-6 0H6M2-4L6 0L2 4",
    "checkpoint": "M0-4.5A4.5 4.5 0 1 1 0 4.5A4.5 4.5 0 1 1 0-4.5Z",
    "fault": "M2-7L-4 1H0L-2 7L4-1H0Z",
    "other": "M0-5V5M-5 0H5",
}


def section(data: Mapping[str, Any]) -> Markup | None:
    """Draw the events of one run; None without any."""
    events: Sequence[Mapping[str, Any]] = data["events"]
    if not events:
        return None
    end = max([data["summary"].get("seconds") or 0.0, *(event["time"] for event in events)]) or 1.0
    axis = scales.scale(0.0, end, scales.clock)
    rows = list[Markup]()
    for kind, name in KINDS.items():
        mine = [event for event in events if event["kind"] == kind]
        if mine:
            rows += [element("span", {"class": "label"}, name), _row(name, kind, mine, end)]
    below = element(
        "svg",
        {"class": "plane", "width": "100%", "height": 20, "aria-hidden": "true"},
        *across(axis, 14),
    )
    return join(
        element("div", {"class": "rows"}, *rows, element("span", {"class": "label"}), below),
        _words(events),
    )


def _row(name: str, kind: str, events: Sequence[Mapping[str, Any]], end: float) -> Markup:
    marks = (
        element(
            "svg",
            {
                "x": f"{100 * event['time'] / end:.2f}%",
                "y": THICK / 2,
                "class": f"event {kind}",
                "overflow": "visible",
            },
            element("path", {"d": _SHAPES[kind]}),
            element("title", None, f"{scales.clock(event['time'])}: {event['what']}"),
        )
        for event in events
    )
    middle = element(
        "line", {"class": "grid", "x1": 0, "x2": "100%", "y1": THICK / 2, "y2": THICK / 2}
    )
    title = element("title", None, f"{name}: {len(events)}")
    return element(
        "svg",
        {"class": "plane", "width": "100%", "height": THICK, "role": "img"},
        title,
        middle,
        *marks,
    )


def _words(events: Sequence[Mapping[str, Any]]) -> Markup:
    """Write events, checkpoints in between left out where there are many."""
    told = (
        events
        if len(events) <= LISTED
        else [event for event in events if event["kind"] != "checkpoint"][-LISTED:]
    )
    items = (
        element(
            "li",
            None,
            element("span", {"class": "when"}, scales.clock(event["time"])),
            _icon(event["kind"]),
            event["what"],
        )
        for event in told
    )
    left = len(events) - len(told)
    more = (
        element("p", {"class": "hint"}, f"{left:,} more events are in summary.json.")
        if left
        else None
    )
    return join(element("ul", {"class": "events"}, items), more)


def _icon(kind: str) -> Markup:
    inside = element(
        "svg", {"x": 8, "y": 8, "overflow": "visible"}, element("path", {"d": _SHAPES[kind]})
    )
    return element(
        "svg",
        {"class": f"icon event {kind}", "width": 16, "height": 16, "aria-hidden": "true"},
        inside,
    )

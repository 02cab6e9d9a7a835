"""The section on events: one row for each kind on a common axis of time, and the texts below.

lost        x
came                 ^
checkpoint     o  o  o  o
         0:00    0:10    0:20
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.plots import draw_axis
from paceline.observe.page.events import EVENT_KINDS
from paceline.observe.page.markup import Markup, element, join_markup

ROW_HEIGHT: Final = 22  # pixels of a row
# Most events that are listed in words.
MAX_LISTED: Final = 200
# SVG path of the mark of each kind, around the point 0, 0.
_SHAPES: Final = {
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


def draw_events(data: Mapping[str, Any]) -> Markup | None:
    """Draw the events of one run; None without any."""
    events: Sequence[Mapping[str, Any]] = data["events"]
    if not events:
        return None
    end = max([data["summary"].get("seconds") or 0.0, *(event["time"] for event in events)]) or 1.0
    axis = scales.make_scale(0.0, end, scales.format_clock)
    rows = list[Markup]()
    for kind, name in EVENT_KINDS.items():
        events_of_kind = [event for event in events if event["kind"] == kind]
        if events_of_kind:
            rows += [
                element("span", {"class": "label"}, name),
                _draw_row(name, kind, events_of_kind, end),
            ]
    below = element(
        "svg",
        {"class": "plane", "width": "100%", "height": 20, "aria-hidden": "true"},
        *draw_axis(axis, 14),
    )
    return join_markup(
        element("div", {"class": "rows"}, *rows, element("span", {"class": "label"}), below),
        _list_events(events),
    )


def _draw_row(name: str, kind: str, events: Sequence[Mapping[str, Any]], end: float) -> Markup:
    """Draw the marks of one kind in a row."""
    marks = (
        element(
            "svg",
            {
                "x": f"{100 * event['time'] / end:.2f}%",
                "y": ROW_HEIGHT / 2,
                "class": f"event {kind}",
                "overflow": "visible",
            },
            element("path", {"d": _SHAPES[kind]}),
            element("title", None, f"{scales.format_clock(event['time'])}: {event['what']}"),
        )
        for event in events
    )
    middle = element(
        "line", {"class": "grid", "x1": 0, "x2": "100%", "y1": ROW_HEIGHT / 2, "y2": ROW_HEIGHT / 2}
    )
    title = element("title", None, f"{name}: {len(events)}")
    return element(
        "svg",
        {"class": "plane", "width": "100%", "height": ROW_HEIGHT, "role": "img"},
        title,
        middle,
        *marks,
    )


def _list_events(events: Sequence[Mapping[str, Any]]) -> Markup:
    """List events in words. If there are many, checkpoints are left out."""
    listed = (
        events
        if len(events) <= MAX_LISTED
        else [event for event in events if event["kind"] != "checkpoint"][-MAX_LISTED:]
    )
    items = (
        element(
            "li",
            None,
            element("span", {"class": "when"}, scales.format_clock(event["time"])),
            _draw_icon(event["kind"]),
            event["what"],
        )
        for event in listed
    )
    omitted = len(events) - len(listed)
    more = (
        element("p", {"class": "hint"}, f"{omitted:,} more events are in summary.json.")
        if omitted
        else None
    )
    return join_markup(element("ul", {"class": "events"}, items), more)


def _draw_icon(kind: str) -> Markup:
    """Draw the mark of a kind for the list."""
    mark = element(
        "svg", {"x": 8, "y": 8, "overflow": "visible"}, element("path", {"d": _SHAPES[kind]})
    )
    return element(
        "svg",
        {"class": f"icon event {kind}", "width": 16, "height": 16, "aria-hidden": "true"},
        mark,
    )

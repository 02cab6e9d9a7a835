"""The section on checkpoints: how many there were, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import figure, find, number
from paceline.observe.page.drawing.html_tables import table
from paceline.observe.page.markup import Child, Markup, element, join


def section(data: Mapping[str, Any]) -> Markup | None:
    """Write what the checkpoints of one run came to; None without any."""
    if not number(data, "checkpoints", "count"):
        return None
    seconds = number(data, "seconds")
    stood = number(data, "checkpoints", "stall_seconds")
    part = (
        f"Training stood still for them for {stood / seconds:.1%} of the run."
        if seconds > 0
        else ""
    )
    return join(element("p", None, part), table(("checkpoints", ""), _rows(data)))


def _rows(data: Mapping[str, Any]) -> Iterator[tuple[str, Child]]:
    yield "on the disk", figure(data, ("checkpoints", "count"), scales.whole)
    yield (
        "of them asked for in the background",
        figure(data, ("checkpoints", "background"), scales.whole),
    )
    yield (
        "training stood still, in all",
        figure(data, ("checkpoints", "stall_seconds"), scales.seconds),
    )
    yield "writing took, in all", figure(data, ("checkpoints", "write_seconds"), scales.seconds)
    yield "bytes written", figure(data, ("checkpoints", "nbytes"), scales.nbytes)
    best = find(data, "checkpoints", "best")
    if isinstance(best, Mapping):
        yield (
            "the best",
            join(
                str(best.get("checkpoint")),
                " with ",
                figure(data, ("checkpoints", "best", "metric"), scales.plain),
            ),
        )

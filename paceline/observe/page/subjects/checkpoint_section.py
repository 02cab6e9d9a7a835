"""The section on checkpoints: their number and their cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import draw_figure, find_field, read_number
from paceline.observe.page.drawing.html_tables import make_table
from paceline.observe.page.markup import Child, Markup, element, join_markup


def draw_checkpoints(data: Mapping[str, Any]) -> Markup | None:
    """Draw the checkpoints of one run; None without any."""
    if not read_number(data, "checkpoints", "count"):
        return None
    seconds = read_number(data, "seconds")
    stall_seconds = read_number(data, "checkpoints", "stall_seconds")
    sentence = (
        f"Training stood still for them for {stall_seconds / seconds:.1%} of the run."
        if seconds > 0
        else ""
    )
    return join_markup(
        element("p", None, sentence), make_table(("checkpoints", ""), _table_rows(data))
    )


def _table_rows(data: Mapping[str, Any]) -> Iterator[tuple[str, Child]]:
    """Yield the rows of the table."""
    yield "on the disk", draw_figure(data, ("checkpoints", "count"), scales.format_whole)
    yield (
        "of them asked for in the background",
        draw_figure(data, ("checkpoints", "background"), scales.format_whole),
    )
    yield (
        "training stood still, in all",
        draw_figure(data, ("checkpoints", "stall_seconds"), scales.format_seconds),
    )
    yield (
        "writing took, in all",
        draw_figure(data, ("checkpoints", "write_seconds"), scales.format_seconds),
    )
    yield "bytes written", draw_figure(data, ("checkpoints", "nbytes"), scales.format_nbytes)
    best = find_field(data, "checkpoints", "best")
    if isinstance(best, Mapping):
        yield (
            "the best",
            join_markup(
                str(best.get("checkpoint")),
                " with ",
                draw_figure(data, ("checkpoints", "best", "metric"), scales.format_number),
            ),
        )

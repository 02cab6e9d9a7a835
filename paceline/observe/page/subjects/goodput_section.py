"""The section on goodput: the share of the workers' time that trained samples that count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.observe.goodput_report import PART_MEANINGS
from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import draw_figure, draw_sum, find_field, read_number
from paceline.observe.page.drawing.html_tables import make_table
from paceline.observe.page.markup import Markup, element, join_markup

USEFUL = "trained samples that count"


def draw_goodput(data: Mapping[str, Any]) -> Markup | None:
    """Draw where the time of all workers went; None if the run has no such figures.

    Parts that took nothing are left out.
    """
    if not find_field(data, "goodput", "seconds"):
        return None
    meanings = {"useful": USEFUL, **PART_MEANINGS}
    rows = (
        (
            part,
            draw_figure(data, ("goodput", "percent", part), _format_percent),
            draw_figure(data, ("goodput", "seconds", part), scales.format_seconds),
            meaning,
        )
        for part, meaning in meanings.items()
        if part == "useful" or read_number(data, "goodput", "seconds", part) > 0
    )
    whole = draw_sum(data, ("goodput", "seconds"), scales.format_seconds)
    words = element("p", None, "The time of all workers, added up, is ", whole, ".")
    return join_markup(words, make_table(("part", "share", "of all workers", ""), rows))


def _format_percent(value: float) -> str:
    """Format a percentage."""
    return f"{value:.1f}%"

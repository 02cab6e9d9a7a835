"""Numbers say which field of the summary they are, and are never others."""

from __future__ import annotations

from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import (
    UNKNOWN,
    draw_figure,
    draw_share,
    draw_sum,
    find_field,
    read_number,
)

DATA: dict[str, Any] = {
    "summary": {
        "final_loss": 0.25,
        "step_seconds": {"compute": 0.3, "wait": 0.1},
        "rank": [{"a": 1}],
        "bad": "nan",
    }
}


def test_where_a_number_is_from() -> None:
    assert (
        draw_figure(DATA, ("final_loss",), scales.format_number)
        == '<data class="figure" data-field="final_loss" value="0.25">0.25</data>'
    )
    assert 'data-field="rank.0.a" value="1">1<' in draw_figure(
        DATA, ("rank", 0, "a"), scales.format_whole
    )
    assert 'data-sum="" value="0.4"' in draw_sum(DATA, ("step_seconds",), scales.format_seconds)
    assert draw_share(DATA, ("step_seconds", "wait"), ("step_seconds",)).endswith(
        'value="0.25">25%</data>'
    )


def test_what_is_no_number() -> None:
    assert ">nan</data>" in draw_figure(DATA, ("bad",), scales.format_number)
    assert UNKNOWN in draw_figure(
        DATA, ("missing",), scales.format_number
    ) and UNKNOWN in draw_figure(DATA, ("step_seconds",), scales.format_number)
    assert find_field(DATA, "rank", 3) is None and find_field(DATA, "final_loss", "x") is None
    assert read_number(DATA, "bad") == read_number(DATA, "missing") == 0.0
    assert "0%" in draw_share(DATA, ("missing",), ("missing",))

"""Numbers say which field of the summary they are, and are never others."""

from __future__ import annotations

from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import NONE, figure, find, number, share, summed

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
        figure(DATA, ("final_loss",), scales.plain)
        == '<data class="figure" data-field="final_loss" value="0.25">0.25</data>'
    )
    assert 'data-field="rank.0.a" value="1">1<' in figure(DATA, ("rank", 0, "a"), scales.whole)
    assert 'data-sum="" value="0.4"' in summed(DATA, ("step_seconds",), scales.seconds)
    assert share(DATA, ("step_seconds", "wait"), ("step_seconds",)).endswith(
        'value="0.25">25%</data>'
    )


def test_what_is_no_number() -> None:
    assert ">nan</data>" in figure(DATA, ("bad",), scales.plain)
    assert NONE in figure(DATA, ("missing",), scales.plain) and NONE in figure(
        DATA, ("step_seconds",), scales.plain
    )
    assert find(DATA, "rank", 3) is None and find(DATA, "final_loss", "x") is None
    assert number(DATA, "bad") == number(DATA, "missing") == 0.0
    assert "0%" in share(DATA, ("missing",), ("missing",))

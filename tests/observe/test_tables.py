"""Numbers and tables of reports."""

from __future__ import annotations

import pytest

from paceline.observe.tables import align_columns, format_seconds


@pytest.mark.parametrize(
    ("value", "text"), [(0.00251, "2.5 ms"), (0.9999, "999.9 ms"), (1.5, "1.50 s")]
)
def test_seconds_have_a_unit_that_fits(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_columns_are_aligned() -> None:
    assert list(align_columns([("", "to", "n"), ("stage 0", "b", "12")], left=2)) == [
        "           to   n",
        "  stage 0  b   12",
    ]

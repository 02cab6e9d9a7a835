"""Axes have few round numbers, whatever the values are."""

from __future__ import annotations

import pytest

from paceline.observe.page.drawing import scales


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (-3e-9, 7e12), (2.0, 2.0), (0.0, 0.0), (1.0001, 1.0002), (-5.0, -4.0)],
)
def test_ticks(low: float, high: float) -> None:
    axis = scales.make_scale(low, high, scales.format_number)
    assert axis.high > axis.low
    assert 2 <= len(axis.ticks) <= 12
    assert all(-1e-9 <= axis.position_of(value) <= 1 + 1e-9 for value, _ in axis.ticks)
    assert 0 <= axis.position_of(low) <= 1 and 0 <= axis.position_of(high) <= 1


def test_options() -> None:
    assert scales.make_scale(3.0, 9.0, scales.format_number, zero=True).low == 0
    assert scales.make_scale(0.0, 0.0, scales.format_number, zero=True).low == 0
    assert [
        words for _, words in scales.make_scale(1, 3, scales.format_number, whole=True).ticks
    ] == [
        "1",
        "2",
        "3",
    ]


@pytest.mark.parametrize(("step", "found"), [(0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (6e7, 1e8)])
def test_nice(step: float, found: float) -> None:
    assert scales.round_up_step(step) == pytest.approx(found)


def test_words() -> None:
    assert [scales.format_short(value) for value in (0.5, 12, 1500, 2_000_000, 3e9)] == [
        "0.5",
        "12",
        "1.5k",
        "2M",
        "3G",
    ]
    assert [scales.format_clock(value) for value in (5.0, 90.0, 3700.0)] == [
        "5 s",
        "1:30",
        "1:01:40",
    ]
    assert [scales.format_number(value) for value in (1234.0, 1.23456)] == ["1,234", "1.235"]

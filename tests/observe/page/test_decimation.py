"""Curves of any length become few points, and no peak is lost."""

from __future__ import annotations

import numpy as np

from paceline.observe.page.decimation import (
    MAX_POINTS,
    last_values,
    stretch_starts,
    sum_stretches,
    summarize_stretches,
)


def test_the_drawing() -> None:
    values = np.array([1, 3, 2, 8, np.nan, 4, 5])
    found = summarize_stretches(values, np.array([0, 2, 4, 6]))
    assert found.mean.tolist() == [2, 5, 4, 5]
    assert found.low.tolist() == [1, 2, 4, 5]
    assert found.high.tolist() == [3, 8, 4, 5]
    assert found.bad.tolist() == [0, 0, 1, 0]


def test_a_million_steps() -> None:
    values = np.zeros(1_000_000)
    values[123_456] = 9.0
    begins = stretch_starts(len(values))
    found = summarize_stretches(values, begins)
    assert len(begins) == MAX_POINTS
    assert found.high.max() == 9.0
    assert sum_stretches(np.ones(len(values)), begins).sum() == len(values)
    assert last_values(np.arange(1_000_000.0), begins)[-1] == 999_999


def test_short_ones_stay_as_they_are() -> None:
    values = np.array([3.0, 1.0, 2.0])
    assert summarize_stretches(values, stretch_starts(3)).mean.tolist() == [3, 1, 2]
    assert (
        len(stretch_starts(0))
        == len(summarize_stretches(np.empty(0), stretch_starts(0)).mean)
        == len(last_values(np.empty(0), stretch_starts(0)))
        == 0
    )


def test_stretches_without_a_number() -> None:
    found = summarize_stretches(np.array([np.nan, np.inf, 1.0]), np.array([0, 2]))
    assert np.isnan([found.mean[0], found.low[0], found.high[0]]).all()
    assert found.bad.tolist() == [2, 0]

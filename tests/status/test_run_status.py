"""A status as a line of text, and curves of any length in few points."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from paceline.status.run_status import RunStatus, ValueCurve, draw_sparkline, format_status

PARTS = {"compute": 0.6, "exchange": 0.2, "wait": 0.1, "data": 0.1}
WHOLE = RunStatus(
    361,
    800,
    2,
    3,
    {"loss": 2.34567, "accuracy": 0.5},
    (3.0, 2.5, 2.34567),
    1234.4,
    PARTS,
    12.3,
    "rank 2 late 41%: data loading",
    "slow",
)


def test_all_of_it() -> None:
    assert format_status(WHOLE) == (
        "epoch 2/3  step 361/800  loss 2.346  accuracy 0.5  1,234 samples/s  compute 60% exchange "
        "20% wait 10% data 10%  0:12 left  rank 2 late 41%: data loading  slow"
    )


def test_what_is_unknown_is_left_out() -> None:
    assert format_status(RunStatus(3)) == "step 3" and RunStatus(3).curve_name == ""
    assert format_status(RunStatus(3, 3, values={"loss": math.nan})) == "step 3/3  loss nan"


def test_it_travels_as_json() -> None:
    assert RunStatus.from_fields(json.loads(json.dumps(WHOLE.to_fields()))) == WHOLE
    assert RunStatus.from_fields({"step": 4}) == RunStatus(4)


@pytest.mark.parametrize("count", [0, 1, 5, 64, 65, 1000, 100_003])
def test_a_curve_has_few_points_which_are_means(count: int) -> None:
    curve = ValueCurve()
    for value in range(count):
        curve.add_value(float(value))
    points = curve.list_points()
    assert len(points) <= 64 and (count == 0 or len(points) >= min(count, 32))
    assert list(points) == sorted(points)
    assert count == 0 or (0 <= points[0] <= count / 32 and points[-1] >= (count - 1) * 31 / 32)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_curve_leaves_out_what_is_no_number(value: float) -> None:
    curve = ValueCurve()
    for each in (1.0, value, 2.0):
        curve.add_value(each)
    assert curve.list_points() == (1.0, 2.0)


@pytest.mark.parametrize(
    ("points", "width", "signs"),
    [
        ([], 8, ""),
        ([1.0], 8, ""),
        ([1.0, 1.0, 1.0], 8, "▁▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7, 0], 8, "█▁"),
        ([0, 0, 7, 7], 2, "▁█"),
        (range(1000), 4, "▁▃▆█"),
    ],
)
def test_a_curve_in_a_line(points: Any, width: int, signs: str) -> None:
    assert draw_sparkline(points, width) == signs

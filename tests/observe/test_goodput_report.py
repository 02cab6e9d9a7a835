"""Goodput in the report."""

from __future__ import annotations

import pytest

from paceline.observe.goodput_report import describe_goodput, read_goodput
from paceline.record.outcome.goodput import GOODPUT_PARTS, compute_percent

SECONDS = dict.fromkeys(GOODPUT_PARTS, 0) | {"useful": 75, "start": 5, "repeated": 20}
FIELDS = {"seconds": SECONDS, "percent": compute_percent(SECONDS)}


def test_parts_that_took_nothing_are_left_out() -> None:
    lines = describe_goodput(read_goodput(FIELDS)).splitlines()
    assert lines[0].startswith("Goodput: 75.0% of the workers' time (1:40, all added up)")
    assert [line.split()[:2] for line in lines[1:]] == [["start", "5.00%"], ["repeated", "20.00%"]]


def test_a_run_of_before() -> None:
    assert read_goodput(None) is None and read_goodput({}) is None
    assert describe_goodput(None) == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": {}},
        {**FIELDS, "percent": {}},
        {**FIELDS, "seconds": {**SECONDS, "useful": -1}},
        {**FIELDS, "seconds": {**SECONDS, "idle": "nan"}},
        {**FIELDS, "seconds": [1]},
    ],
)
def test_what_no_run_writes(fields: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        read_goodput(fields)

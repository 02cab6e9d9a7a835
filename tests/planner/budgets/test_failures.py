"""Rates of failures as they are typed, and traces with holes."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.planner.budgets.failures import DAY, HOUR, parse_failures, parse_trace

HEAD = "server,from_hour,to_hour,state\n"
TRACE = HEAD + "a,0,30,up\na,30,31,down\na,31,33,down\na,33,48,up\nb,0,2,down\nb,2,48,up\n"


@pytest.mark.parametrize(
    ("text", "per_day"),
    [
        ("6.5/1000-node-days", 6.5e-3),
        ("6.5/1000-server-days", 6.5e-3),
        ("0.02/day", 0.02),
        ("0.05/hour", 1.2),
        ("0/day", 0.0),
        ("rsc-2", 2.34e-3),
        ("llama-3", 3.79e-3),
    ],
)
def test_rates(text: str, per_day: float) -> None:
    assert parse_failures(text).rate * DAY == pytest.approx(per_day)


@pytest.mark.parametrize(
    "text", ["", "often", "-1/day", "nan/day", "inf/day", "6.5", "6.5/1000-cats", "1/0-node-days"]
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(UsageError, match=r"isn't a rate") as caught:
        parse_failures(text)
    assert "\n" not in str(caught.value)


def test_servers_that_fail_together_fail_as_often_each() -> None:
    alone, together = parse_failures("1/day"), parse_failures("1/day", together=4)
    assert together.rate == alone.rate
    assert together.mean_time(8) == 4 * alone.mean_time(8) == DAY / 2
    with pytest.raises(UsageError, match="at least one"):
        parse_failures("1/day", together=0)


def test_a_trace() -> None:
    trace = parse_trace(TRACE, "t.csv")
    assert (trace.servers, trace.seconds) == (2, 48 * HOUR)
    # two rows that follow each other are one outage
    assert [(each.begin / HOUR, each.end / HOUR) for each in trace.outages] == [(0, 2), (30, 33)]
    assert trace.down_seconds == 2.5 * HOUR
    # what was down at the beginning did not fail in it
    assert trace.rate == pytest.approx(1 / ((2 * 48 - 5) * HOUR))


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    failures = parse_failures(str(tmp_path / "t.csv"))
    assert failures.trace is not None and failures.rate == failures.trace.rate
    with pytest.raises(UsageError, match="contradicts a trace"):
        parse_failures(str(tmp_path / "t.csv"), together=2)
    with pytest.raises(UsageError, match="can't be read"):
        parse_failures(str(tmp_path / "other.csv"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the first line"),
        (HEAD, "no rows"),
        (HEAD + "a,0,1,up\na,2,3,up\n", "a hole between hours 1 and 2"),
        (HEAD + "a,1,3,up\n", "a hole between hours 0 and 1"),
        (HEAD + "a,0,3,up\nb,0,2,up\n", "server b has a hole between hours 2 and 3"),
        (HEAD + "a,0,2,up\na,1,3,up\n", "an overlap"),
        (HEAD + "a,0,2,broken\n", "up or down"),
        (HEAD + "a,2,1,up\n", "hours"),
        (HEAD + "a,0,inf,up\n", "hours"),
        (HEAD + "a,0,1\n", "3 columns"),
        (HEAD + "a,0,1,down\n", "no server is ever up"),
    ],
)
def test_a_trace_that_is_refused_in_one_line(text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault) as caught:
        parse_trace(text, "t.csv")
    assert "\n" not in str(caught.value)

"""The status line: at most one a second, the last step in any case, and one line alone on a terminal."""

from __future__ import annotations

import io

import pytest

from paceline.session.record.lateness import RankLateness
from paceline.session.record.status_line import FinishedStep, StatusLine, describe, spoken
from tests.harness.clocks import Clock

SECONDS = {"compute": 0.6, "exchange": 0.2, "wait": 0.1, "data": 0.1}


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def beat(step: int, now: float = 0.0, **values: float) -> FinishedStep:
    return FinishedStep(step, now, 64, values or {"loss": 1.0}, SECONDS)


def test_at_most_one_line_a_second_and_the_last_in_any_case() -> None:
    clock, stream = Clock(), io.StringIO()
    line = StatusLine(stream, clock=clock)
    for step in range(1, 36):
        clock.now += 0.125
        line.step(beat(step, clock.now), 35)
    line.close(35)
    line.close(35)
    steps = [int(text.split()[1].split("/")[0]) for text in stream.getvalue().splitlines()]
    assert steps == [1, 9, 17, 25, 33, 35]


def test_a_last_line_that_was_shown_is_not_repeated() -> None:
    stream = io.StringIO()
    line = StatusLine(stream, clock=Clock())
    line.step(beat(1), None)
    line.close(None)
    assert len(stream.getvalue().splitlines()) == 1


def test_what_a_line_says() -> None:
    clock, stream = Clock(), io.StringIO()
    line = StatusLine(stream, clock=clock)
    for step in (1, 3):
        clock.now += 10
        line.step(beat(step, clock.now, loss=2.34567, accuracy=0.5), 63)
    assert stream.getvalue().splitlines()[1] == (
        "step 3/63  loss 2.346  accuracy 0.5  64 samples/s  compute 60% exchange 20% wait 10% data 10%  5:00 left"
    )


def test_parts_that_are_unknown_are_left_out() -> None:
    assert describe(FinishedStep(3, 0.0, 0, {}, {}), 0, {}, total=None, left=None) == "step 3"
    assert describe(beat(5), 0, {}, total=5, left=0.0) == "step 5/5  loss 1"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03")])
def test_times(seconds: float, text: str) -> None:
    assert spoken(seconds) == text


def test_on_a_terminal_one_line_is_kept_up_to_date() -> None:
    clock, stream = Clock(), Terminal()
    line = StatusLine(stream, clock=clock)
    for step in range(1, 4):
        clock.now += 2
        line.step(beat(step), None)
    line.close(None)
    text = stream.getvalue()
    assert "\x1b[" in text or "\r" in text
    assert text.rstrip("\x1b[?25h\n").count("\n") <= 1
    assert "step 3" in text


def test_who_is_late_is_shown_as_long_as_it_matters() -> None:
    out, clock = io.StringIO(), Clock()
    line = StatusLine(out, clock=clock)
    late = RankLateness(2, {"compute": 0.001, "reading": 0.04})
    line.late(late, "c", 0.1)
    line.step(beat(1), None)
    clock.now += 1.1
    line.late(late, "c", 1.0)  # 4 % of a step
    line.step(beat(2), None)
    clock.now += 1.1
    line.late(RankLateness(2, {"compute": 0.0005}), "c", 0.001)  # half a millisecond
    line.step(beat(3), None)
    assert [text.endswith("  rank 2 on c late 41%: data loading") for text in out.getvalue().splitlines()] == [True, False, False]

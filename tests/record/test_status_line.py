"""Statuses of a run: about one a second, the last step in any case, and what is in them."""

from __future__ import annotations

import io
import math

import pytest

from paceline.record.display import PlainLines
from paceline.record.status_line import FinishedStep, StatusLine
from paceline.status.run_status import RunStatus
from paceline.unequal.stragglers.lateness import RankLateness
from tests.harness.clocks import Clock

SECONDS = {"compute": 0.6, "exchange": 0.2, "wait": 0.1, "data": 0.1}


class Kept:
    """A display that remembers what it was to show."""

    def __init__(self) -> None:
        self.shown: list[RunStatus] = []
        self.said: list[str] = []
        self.closed = 0

    def show(self, status: RunStatus) -> None:
        self.shown.append(status)

    def say(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        self.closed += 1


def beat(step: int, now: float = 0.0, **values: float) -> FinishedStep:
    return FinishedStep(step, now, 64, values or {"loss": 1.0}, SECONDS)


@pytest.mark.parametrize(("every", "lines"), [(None, 24), (10.0, 11), (math.inf, 0)])
def test_as_text_fewer_and_fewer_or_as_asked(every: float | None, lines: int) -> None:
    clock, stream = Clock(), io.StringIO()
    line = StatusLine(PlainLines(stream, every), clock=clock)
    for second in range(101):
        clock.now = 100.0 + second
        line.step(beat(second), None)
        line.show()
    line.close(None)
    found = len(stream.getvalue().splitlines())
    assert found == lines if every else 20 < found < 50


def test_about_one_a_second_and_the_last_in_any_case() -> None:
    clock, kept = Clock(), Kept()
    line = StatusLine(kept, clock=clock)
    for step in range(1, 36):
        clock.now += 0.125
        line.step(beat(step, clock.now), 35)
        line.show()
    line.close(35)
    line.close(35)
    assert [status.step for status in kept.shown] == [1, 9, 17, 25, 33, 35] and kept.closed == 2


def test_steps_that_come_together_are_one_status_of_the_newest() -> None:
    kept = Kept()
    line = StatusLine(kept, clock=Clock())
    for step in (1, 2, 3):
        line.step(beat(step, loss=4.0 - step), None)
    line.show()
    line.show()
    line.close(None)
    [status] = kept.shown
    assert (status.step, status.rate, status.curve) == (3, pytest.approx(64.0), (3.0, 2.0, 1.0))


def test_what_is_in_a_status() -> None:
    clock, kept = Clock(), Kept()
    line = StatusLine(kept, clock=clock)
    line.at((2, 3))
    line.remark("slow")
    for step in (1, 3):
        clock.now += 10
        line.step(beat(step, clock.now, loss=2.5, zeal=1.0, accuracy=0.5, beta=3.0, more=4.0), 63)
        line.show()
    status = kept.shown[1]
    assert (status.step, status.steps, status.epoch, status.epochs, status.left, status.remark) == (
        3,
        63,
        2,
        3,
        300.0,
        "slow",
    )
    assert list(status.values) == ["loss", "accuracy", "beta", "more"]
    assert status.parts == pytest.approx(SECONDS) and status.rate == pytest.approx(64.0)
    line.step(beat(63, clock.now), 63)
    line.close(63)
    assert kept.shown[-1].left is None


def test_without_a_loss_the_first_value_has_the_curve() -> None:
    kept = Kept()
    line = StatusLine(kept, clock=Clock())
    line.step(beat(1, b=1.0, a=2.0), None)
    line.step(FinishedStep(2, 0.0, 0, {}, {}), None)
    line.step(beat(3, a=3.0), None)
    line.show()
    assert (kept.shown[0].curve_name, kept.shown[0].curve) == ("a", (2.0, 3.0))


def test_who_is_late_is_shown_as_long_as_it_matters() -> None:
    clock, kept = Clock(), Kept()
    line = StatusLine(kept, clock=clock)
    late = RankLateness(2, {"compute": 0.001, "reading": 0.04})
    for step, (which, whole) in enumerate(
        [(late, 0.1), (late, 1.0), (RankLateness(2, {"compute": 0.0005}), 0.001)], 1
    ):
        clock.now += 1.1
        line.late(which, "c", whole)
        line.step(beat(step), None)
        line.show()
    assert [status.late for status in kept.shown] == ["rank 2 on c late 41%: data loading", "", ""]


def test_what_was_logged_once_a_step_was_over_has_a_line_of_its_own() -> None:
    clock, kept = Clock(), Kept()
    line = StatusLine(kept, clock=clock)
    line.logged(3, {"val/loss": 2.0})
    # within the same second: with the next line, or at the end
    line.logged(3, {"val/loss": 3.0, "val/accuracy": 0.25})
    line.logged(4, {"val/loss": 1.0})
    assert kept.said == ["step 3  val/loss 2"]
    clock.now += 1.0
    line.logged(4, {"val/accuracy": 0.5})
    line.logged(5, {"val/accuracy": 0.75})
    line.close(None)
    line.close(None)
    assert (
        kept.said[1:] == ["step 4  val/accuracy 0.5  val/loss 1", "step 5  val/accuracy 0.75"]
        and kept.shown == []
    )

"""Things reach a tracker in order; one that hangs holds nobody up, one that fails is said once,
one that is slow gets less.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from paceline.record.trackers.delivery import TrackerDelivery
from paceline.record.trackers.tracker import TrackedEvent, TrackedStep
from tests.harness.jobs import PATIENCE
from tests.harness.tracked import Notes


def steps(*numbers: int) -> list[TrackedStep]:
    return [TrackedStep(number, 0.0, {}, 8, {}) for number in numbers]


def later() -> float:
    return time.monotonic() + PATIENCE


class Held(Notes):
    """A tracker that takes nothing in before it is let go."""

    def __init__(self) -> None:
        super().__init__("held")
        self.go, self.came = threading.Event(), threading.Event()

    def log_steps(self, steps: Iterable[TrackedStep]) -> None:
        self.came.set()
        assert self.go.wait(PATIENCE)
        super().log_steps(steps)


def test_everything_comes_in_order() -> None:
    notes = Notes()
    delivery = TrackerDelivery(notes, [].append)
    delivery.deliver_steps(steps(1, 2))
    delivery.deliver_action(lambda: notes.log_event(TrackedEvent(0.0, "x")))
    delivery.deliver_steps(steps(3))
    assert delivery.end_delivery(failed=False, deadline=later())
    assert delivery.end_delivery(failed=False, deadline=later())
    assert notes.told == [("step", 1), ("step", 2), ("event", "x"), ("step", 3), ("close", False)]
    delivery.deliver_steps(steps(4))
    assert notes.told[-1] == ("close", False)


def test_one_that_hangs_holds_nobody_up() -> None:
    held = Held()
    delivery = TrackerDelivery(held, [].append)
    delivery.deliver_steps(steps(1))
    assert held.came.wait(PATIENCE)
    delivery.deliver_steps(steps(2))
    assert not delivery.end_delivery(failed=False, deadline=time.monotonic())
    assert held.told == []
    held.go.set()
    assert delivery.end_delivery(failed=False, deadline=later())
    assert held.told == [("step", 1), ("step", 2), ("close", False)]


def test_one_that_fails_is_said_once() -> None:
    said: list[str] = []
    notes = Notes(fails=OSError(28, "No space left on device"))
    delivery = TrackerDelivery(notes, said.append)
    delivery.deliver_steps(steps(1))
    delivery.deliver_action(lambda: notes.log_event(TrackedEvent(0.0, "x")))
    assert delivery.end_delivery(failed=False, deadline=later())
    assert delivery.has_failed
    (line,) = said
    assert line.startswith(
        "notes gets nothing more of this run (OSError: [Errno 28] No space left on device); "
        "training goes on"
    )
    assert notes.told == [("close", True)]


def test_one_that_is_slow_gets_fewer_steps() -> None:
    said: list[str] = []
    held = Held()
    delivery = TrackerDelivery(held, said.append, most=8)
    delivery.deliver_steps(steps(0))
    assert held.came.wait(PATIENCE)
    beside = TrackedStep(5, 0.0, {"val/x": 1.0})
    delivery.deliver_steps([*steps(1, 2, 3, 4, 5), beside, *steps(6, 7, 8)])
    delivery.deliver_steps(steps(*range(9, 13)))
    held.go.set()
    assert delivery.end_delivery(failed=False, deadline=later())
    assert said == [
        (
            "held is too slow for all steps of this run, and gets only some of them; "
            "metrics.jsonl has all"
        )
    ]
    told = [each[1] for each in held.told if each[0] == "step"]
    assert 0 in told and 5 in told and len(told) < 13 and told == sorted(told)


def test_it_begins_on_its_thread_and_says_where() -> None:
    said: list[str] = []
    delivery = TrackerDelivery(Notes(), [].append)
    delivery.begin_later(None, said.append)  # type: ignore[arg-type]  # which the tracker notes
    assert delivery.end_delivery(failed=False, deadline=later())
    assert said == ["notes: here"]

"""Where a worker's time went apart from its steps: pauses inside a step count once."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from paceline.record.outcome.worker_time import WorkerTime

STEPS = {"compute": 10.0, "exchange": 2.0, "wait": 3.0, "data": 1.0}


class Clock:
    """A clock that is set by hand, with the state of a training loop."""

    def __init__(self) -> None:
        self.now, self.waited, self.step, self.in_turn = 100.0, 0.0, 0, False
        self.open: Mapping[str, float] = dict.fromkeys(STEPS, 0.0)

    def measure(self, *, replaces: bool = False) -> WorkerTime:
        return WorkerTime(
            time.time(),
            replaces=replaces,
            step=lambda: self.step,
            is_in_turn=lambda: self.in_turn,
            waited=lambda: self.waited,
            step_seconds=lambda: STEPS,
            open_seconds=lambda: self.open,
            clock=lambda: self.now,
        )


def test_the_start() -> None:
    for replaces in (False, True):
        clock = Clock()
        measured = clock.measure(replaces=replaces)
        clock.now += 4.0
        with measured.measure_loss("checkpoint"):
            clock.now += 1.0  # before training it is a part of the start
        measured.begin_training()
        clock.now += 20.0
        measured.begin_training()
        seconds = measured.collect_seconds()
        assert seconds.present == pytest.approx(25, abs=0.1)
        start = pytest.approx(5, abs=0.1)
        assert (seconds.start, seconds.recovery) == ((0, start) if replaces else (start, 0))
        assert seconds.steps == (10.0, 2.0, 3.0, 1.0) and seconds.checkpoint == 0


def test_a_checkpoint_between_turns_and_in_one() -> None:
    clock = Clock()
    measured = clock.measure()
    measured.begin_training()
    with measured.measure_loss("checkpoint"):
        clock.now += 2.0
    clock.in_turn = True
    with measured.measure_loss("checkpoint"):
        clock.now, clock.waited = clock.now + 3.0, clock.waited + 1.0
        with measured.measure_loss("recovery"):  # inside of it: a part of it
            clock.now += 1.0
    seconds = measured.collect_seconds()
    assert (seconds.checkpoint, seconds.recovery) == (6, 0)
    # of the 4 s in the turn, 1 s was counted as waiting, and 3 s as computing
    assert seconds.steps == (7.0, 2.0, 2.0, 1.0)


def test_recovery_in_a_turn_that_goes_on() -> None:
    clock = Clock()
    measured = clock.measure()
    measured.begin_training()
    clock.in_turn = True

    def heal(value: int) -> int:
        clock.now += 1.5
        return value

    assert measured.measure_healing(heal)(3) == 3
    assert (measured.heals, measured.heal_seconds) == (1, 1.5)
    seconds = measured.collect_seconds()
    assert seconds.recovery == 1.5 and seconds.steps == (10.0, 0.5, 3.0, 1.0)


def test_a_turn_that_is_dealt_again() -> None:
    """It took 3 s, 1 s of them to recover. Then it failed once more, after 2 s."""
    clock = Clock()
    measured = clock.measure()
    measured.begin_training()
    clock.in_turn = True
    with measured.measure_loss("recovery", "exchange"):
        clock.now += 1.0
    clock.open = {"compute": 2.0, "exchange": 1.0, "wait": 0.0, "data": 0.0}
    measured.discard_turn()
    clock.open = {"compute": 4.0, "exchange": 1.0, "wait": 0.0, "data": 0.0}
    measured.discard_turn()
    seconds = measured.collect_seconds()
    assert (seconds.recovery, seconds.repeated) == (1, 4)
    assert seconds.steps == (6.0, 1.0, 3.0, 1.0)


def test_letting_a_worker_in_is_counted_as_data() -> None:
    clock = Clock()
    measured = clock.measure()
    measured.begin_training()
    with measured.measure_loss("recovery", "data"):
        clock.now += 0.5
    seconds = measured.collect_seconds()
    assert seconds.recovery == 0.5 and seconds.steps == (10.0, 2.0, 3.0, 0.5)

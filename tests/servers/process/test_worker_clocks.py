"""How far workers are ahead of the slowest, without a scheduler."""

from __future__ import annotations

import pytest

from paceline.errors import Mismatch
from paceline.servers.process.worker_clocks import WorkerClocks


def test_a_worker_is_ahead_of_the_slowest_that_runs() -> None:
    clocks = WorkerClocks({0: 4, 1: 3, 2: 2})
    assert clocks.find_slowest_clock({0, 1, 2}) == 2 and clocks.compute_lead(0, {0, 1, 2}) == 2
    assert clocks.compute_lead(0, {0, 1}) == 1, "a worker that takes no turns holds nobody"
    assert clocks.may_begin_turn(0, {0, 1, 2}, 2) and not clocks.may_begin_turn(0, {0, 1, 2}, 1)
    assert (
        clocks.list_slowest_workers(0, {0, 1, 2}) == [(2, 2)]
        and clocks.list_slowest_workers(2, {0, 1, 2}) == []
    )
    assert clocks.find_slowest_clock(()) == 4, "all are where the first one is, if none runs"


def test_turns_come_one_after_the_other() -> None:
    clocks = WorkerClocks({0: 4, 1: 3})
    clocks.complete_turn(1, 4)
    assert clocks.completed_turns == {0: 4, 1: 4}
    with pytest.raises(Mismatch, match="worker 1 can't come to turn 6 after turn 4"):
        clocks.complete_turn(1, 6)
    with pytest.raises(Mismatch, match="worker 7 takes no turns here"):
        clocks.check_takes_turns(7)
    WorkerClocks().check_takes_turns(7)  # before the first epoch nobody has a clock


def test_a_gradient_that_is_in_no_step_counts_as_a_turn_to_come() -> None:
    clocks = WorkerClocks({0: 5, 1: 3})
    clocks.leave_step_open(0, 1)
    clocks.leave_step_open(1, 1)
    clocks.complete_turn(1, 4)
    assert clocks.count_turns_in_steps(1) == 3 and clocks.find_slowest_clock({0, 1}) == 3
    clocks.record_step(0, [0, 1])
    assert clocks.count_turns_in_steps(1) == 3, "another optimizer's step is open"
    clocks.record_step(1, [1])
    assert clocks.count_turns_in_steps(1) == 4


def test_those_that_have_come_are_stuck_when_the_slowest_holds_them_all() -> None:
    clocks = WorkerClocks({0: 5, 1: 3})
    assert clocks.are_all_blocked({0}, {0, 1}, 2) and not clocks.are_all_blocked({0}, {0, 1}, 3)
    assert not clocks.are_all_blocked({0, 1}, {0, 1}, 2), "the slowest has come itself"

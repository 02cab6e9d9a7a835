"""What workers that have less than others are given: the whole state, and the result of the last
call. On threads.
"""

from __future__ import annotations

import pytest
import torch

from paceline.comm.group_protocol import Group
from paceline.elastic.handover import hand_over_result, hand_over_state
from paceline.elastic.recovery_plan import RecoveryPlan
from paceline.errors import Mismatch
from tests.harness.thread_groups import spawn


class Worker:
    """A worker whose state is a text, and its own hash."""

    def __init__(self, state: str, broken: bool = False) -> None:
        self.state, self._broken = state, broken

    def pack_state(self) -> tuple[bytes, str]:
        return self.state.encode(), self.state

    def load_state(self, state: bytes) -> str:
        self.state = state.decode() + "!" * self._broken
        return self.state


def handed(
    *states: str, old: int, hosts: tuple[int, ...] = (0, 0, 1, 1), broken: bool = False
) -> list[tuple[str, list[int]]]:
    def body(group: Group) -> tuple[str, list[int]]:
        mine = Worker(states[group.rank], broken and group.rank >= old)
        wrong = hand_over_state(group, hosts[: group.size], old, mine)
        return mine.state, wrong

    return spawn(len(states), body)


def test_new_workers_get_the_state() -> None:
    assert handed("one", "one", "", "", old=2) == [("one", [])] * 4


def test_a_worker_that_differs_is_told_to_all() -> None:
    """The new ones get theirs from a worker that is near."""
    assert handed("one", "one", "other", "", old=3, hosts=(0, 1, 0, 1)) == [
        ("one", [2]),
        ("one", [2]),
        ("other", [2]),
        ("one", [2]),
    ]


def test_a_state_that_came_differently_is_refused() -> None:
    with pytest.raises(Mismatch, match="rank 0 handed over differs from that of most workers"):
        handed("one", "", old=1, broken=True)


@pytest.mark.parametrize("behind", [(), (30,), (10, 30)])
def test_who_was_cut_off_gets_the_result_of_the_last_call(behind: tuple[int, ...]) -> None:
    plan = RecoveryPlan((10, 20, 30), (0, 1, 2), (), 5, frozenset(behind), 20, 0)

    def body(group: Group) -> float | None:
        found = hand_over_result(
            group, plan, {"loss": torch.tensor(7.0)} if group.rank == 1 else None
        )
        return None if found is None else float(found.value["loss"])

    assert spawn(3, body) == [7.0 if worker in behind else None for worker in plan.members]

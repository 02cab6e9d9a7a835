"""Operations begin in their order without waiting for other ranks, from before there is a group."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from paceline.comm.backend.issue import GroupMembers, Issuer
from paceline.comm.group_protocol import Group
from paceline.comm.solo import SoloGroup
from paceline.errors import DeadlineExceeded, PlaceError, UsageError, ViewChanged, WorkerLost
from tests.harness.thread_groups import spawn

PATIENCE = 20.0


def test_a_call_that_waits_for_others_does_not_hold_the_caller() -> None:
    """Rank 1 comes to the first call only after rank 0 has come back from it."""
    back = threading.Event()

    def body(group: Group) -> tuple[float, float]:
        issuer = Issuer(lambda: GroupMembers(group), range(2))
        if group.rank:
            assert back.wait(PATIENCE)
        works = [
            issuer.begin_call(
                lambda group, i=i: group.all_reduce(torch.tensor([10.0**i * (group.rank + 1)]))
            )
            for i in range(3)
        ]
        back.set()
        return [work.wait().item() for work in works]  # type: ignore[return-value]

    assert spawn(2, body) == [[3.0, 30.0, 300.0]] * 2


def test_ranks_meet_in_the_background_and_order_is_kept() -> None:
    met, order = threading.Event(), []

    def meet() -> GroupMembers:
        assert met.wait(PATIENCE)
        return GroupMembers(SoloGroup())

    issuer = Issuer(meet, [0])

    def begin(number: int) -> Any:
        def call(group: Group) -> Any:
            order.append(number)
            return group.all_reduce(torch.ones(1))

        return issuer.begin_call(call)

    before = [begin(number) for number in range(3)]
    assert not any(work.done() for work in before)
    with pytest.raises(DeadlineExceeded, match="they may still"):
        before[0].wait(0.01)
    met.set()
    assert all(work.wait(PATIENCE).item() == 1.0 for work in before)
    begin(3).wait()
    assert order == [0, 1, 2, 3] and all(
        work.done() and work.exception() is None for work in before
    )


def test_ranks_that_can_not_meet_fail_every_operation() -> None:
    def meet() -> GroupMembers:
        raise PlaceError("no way there")

    issuer = Issuer(meet, [0])
    work = issuer.begin_call(lambda group: group.barrier())
    with pytest.raises(PlaceError, match="no way there"):
        work.wait(PATIENCE)
    assert work.done() and isinstance(work.exception(), PlaceError)
    with pytest.raises(PlaceError, match="no way there"):
        issuer.begin_call(lambda group: group.barrier()).wait(PATIENCE)


def test_a_call_that_fails_leaves_the_next_ones_whole() -> None:
    def wrong(_: Group) -> Any:
        raise UsageError("not this one")

    issuer = Issuer(lambda: GroupMembers(SoloGroup()), [0])
    failed, good = (
        issuer.begin_call(wrong),
        issuer.begin_call(lambda group: group.all_reduce(torch.ones(2))),
    )
    with pytest.raises(UsageError, match="not this one"):
        failed.wait(PATIENCE)
    assert good.wait(PATIENCE).tolist() == [1.0, 1.0]


def test_errors_say_on_which_hosts_the_ranks_are_that_they_name() -> None:
    issuer = Issuer(lambda: GroupMembers(SoloGroup(), ("left", "right")), [4, 7])
    issuer.begin_call(lambda group: group.barrier()).wait(PATIENCE)
    late, lost, other = (
        DeadlineExceeded("late", (7,)),
        WorkerLost("gone", (4, 7)),
        ViewChanged("closed"),
    )
    for error in (late, lost, other):
        issuer.add_hosts(error)
    assert late.__notes__ == ["Of these, rank 7 is on host right."]
    assert lost.__notes__ == ["Of these, rank 4 is on host left, rank 7 is on host right."]
    assert not hasattr(other, "__notes__")


def test_after_the_end_nothing_begins() -> None:
    issuer, ended = Issuer(lambda: GroupMembers(SoloGroup()), [0]), []
    issuer.begin_call(lambda group: group.barrier()).wait(PATIENCE)
    issuer.end_operations(ended.append)
    with pytest.raises(ViewChanged, match="destroyed"):
        issuer.begin_call(lambda group: group.barrier())
    assert len(ended) == 1

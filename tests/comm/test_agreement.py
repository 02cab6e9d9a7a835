"""Calls of all workers in which a worker is lost: made again, told, or void."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.comm.agreement import (
    Agreement,
    CallDiscarded,
    CallResult,
    SliceAgreement,
    act_together,
)
from paceline.errors import Mismatch, PacelineError, UsageError, ViewChanged, WorkerLost
from tests.harness.thread_groups import ThreadGroup, spawn


class Flaky:
    """An act that loses a worker so many times before it succeeds."""

    def __init__(self, losses: int) -> None:
        self.losses, self.made = losses, 0

    def __call__(self) -> int:
        self.made += 1
        if self.made <= self.losses:
            raise WorkerLost("gone") if self.made % 2 else ViewChanged("others")
        return 42


def agreement(*outcomes: CallResult[Any] | None) -> tuple[Agreement, list[PacelineError]]:
    """One whose recovery tells these outcomes, and what it was told."""
    found, told = Agreement(spawn(1, lambda group: group)[0]), list[PacelineError]()

    def recover(error: PacelineError) -> CallResult[Any] | None:
        told.append(error)
        return outcomes[len(told) - 1]

    found.recovery = recover
    return found, told


def test_a_call_is_made_again_until_it_succeeds() -> None:
    one, told = agreement(None, None)
    act = Flaky(2)
    assert one.attempt_call(act) == 42
    assert act.made == 3 and [type(error) for error in told] == [WorkerLost, ViewChanged]
    assert one.calls == 1 and one.last == 42


def test_what_others_got_is_taken() -> None:
    one, _ = agreement(CallResult(7))
    act = Flaky(1)
    assert one.attempt_call(act) == 7
    assert act.made == 1 and one.calls == 1 and one.last == 7


def test_a_call_that_cannot_be_had_again_is_void() -> None:
    one, _ = agreement(None)
    with pytest.raises(CallDiscarded):
        one.settle_call(Flaky(1))
    assert one.calls == 0  # who comes to it later, when it is void, leaves it out


def test_when_others_have_it_so_have_i() -> None:
    """The last meeting of `settle` was lost here; that another has passed it says that all have
    what they need.
    """
    one, _ = agreement(CallResult(None))
    given: list[str] = []

    def act() -> str:
        given.append("mine")
        return "mine"

    meet = one._meet

    def lost(what: str, body: bytes, where: str) -> list[bytes]:
        one._meet = meet  # type: ignore[method-assign]
        raise WorkerLost("gone")

    one._meet = lost  # type: ignore[method-assign]
    assert one.settle_call(act) == "mine" and given == ["mine"] and one.last is None


def test_it_is_repeated_after_it_was_void() -> None:
    one, _ = agreement(None, None)
    act, voided = Flaky(2), []
    assert one.repeat_until_settled(act, lambda: voided.append(act.made)) == 42
    assert voided == [1, 2] and one.calls == 1  # who comes to it after a loss makes it once


def test_calls_within_a_call_are_part_of_it() -> None:
    one, told = agreement(None)
    act = Flaky(1)

    def outer() -> int:
        one.meet("something")
        return one.attempt_call(act)

    assert one.attempt_call(outer) == 42 and act.made == 2 and one.calls == 1 and len(told) == 1


def test_other_errors_are_not_survived() -> None:
    one, told = agreement()

    def act() -> None:
        raise Mismatch("different calls")

    with pytest.raises(Mismatch):
        one.attempt_call(act)
    assert not told and one.calls == 0


def test_without_recovery_a_loss_raises() -> None:
    one = Agreement(spawn(1, lambda group: group)[0])
    with pytest.raises(WorkerLost):
        one.attempt_call(Flaky(1))
    with pytest.raises(WorkerLost):
        one.settle_call(Flaky(1))


@pytest.mark.parametrize("survives", [True, False])
def test_a_call_under_way_is_seen_from_outside(survives: bool) -> None:
    """How many were made, what the last was, since when it lasts, and when it ended; one inside
    another is a part of it.
    """
    one, _ = agreement()
    one.recovery = one.recovery if survives else None
    seen = [(one.calls, one.since, one.what, len(one.ended))]

    def look() -> int:
        seen.append((one.calls, one.since is not None, one.what, len(one.ended)))
        return 42

    assert (
        one.settle_call(lambda: one.attempt_call(look, "inside"), "backward") == 42
        and one.attempt_call(look) == 42
    )
    assert one.wait_for_some(look, "shares of a stream") == 42
    seen.append((one.calls, one.since, one.what, len(one.ended)))
    stream = "shares of a stream of step 0"
    assert seen == [
        (0, None, "", 0),
        (0, True, "backward of step 0", 0),
        (1, True, "backward of step 0", 1),
        (2, True, stream, 2),
        (2, None, stream, 2),
    ]


def test_the_first_does_not_wait_while_it_makes_what_it_tells() -> None:
    """A disk that hangs has to be seen on the worker that writes."""

    def body(group: ThreadGroup) -> list[bool]:
        one, waits = Agreement(group), list[bool]()

        def make() -> bytes:
            waits.append(one.since is None)
            return b"x"

        assert one.tell_everyone("run.save", make) == b"x" and one.since is None
        return waits

    assert spawn(2, body) == [[True], []]


def test_a_call_that_fails_is_over() -> None:
    one, _ = agreement()
    one.recovery = None
    for call in (one.attempt_call, one.settle_call, lambda act: one.wait_for_some(act, "x")):
        with pytest.raises(WorkerLost):
            call(Flaky(1))
        assert one.since is None and one.calls == 0
    assert one.attempt_call(lambda: one.since) is not None


def test_what_is_no_call_of_all_is_begun_anew_after_each_loss() -> None:
    one, told = agreement(None, None)
    act = Flaky(2)
    assert one.retry_after_losses(act) == 42 and act.made == 3 and len(told) == 2 and one.calls == 0
    one.recovery = None
    with pytest.raises(WorkerLost):
        one.retry_after_losses(Flaky(1))


def test_inside_a_call_of_all_it_is_that_call_which_is_begun_anew() -> None:
    one, told = agreement(None)
    act = Flaky(1)
    assert (
        one.attempt_call(lambda: one.retry_after_losses(act)) == 42
        and act.made == 2
        and len(told) == 1
        and one.calls == 1
    )


def test_notes_go_with_the_next_meeting_and_with_no_other() -> None:
    def body(group: ThreadGroup) -> Any:
        one, found = Agreement(group), list[list[bytes]]()
        one.meet("before")
        one.send_note(b"%d" % group.rank, found.append)
        assert not found  # nothing is sent before the meeting
        met = one.meet("with notes", b"body")
        one.meet("after")
        return met, found, one.calls

    notes = [[b"0", b"1", b"2"]]
    assert spawn(3, body) == [([b"body"] * 3, notes, 3)] * 3
    assert spawn(1, body) == [([b"body"], [[b"0"]], 3)]


def test_a_note_is_not_sent_to_other_workers_than_those_it_was_for() -> None:
    def body(group: ThreadGroup) -> Any:
        one, found = Agreement(group), list[list[bytes]]()
        one.send_note(b"note", found.append)
        one.regroup(group, (), (0, 1))
        one.meet("in the new group")
        return found

    assert spawn(2, body) == [[], []]


def test_a_slice_meets_by_itself_and_is_told_what_the_first_of_all_tells() -> None:
    def body(group: ThreadGroup) -> Any:
        everyone = Agreement(group)
        parts = [
            part for ranks in ([0, 2], [1, 3]) if (part := group.make_subgroup(ranks)) is not None
        ]
        mine = SliceAgreement(parts[0], everyone, step=lambda: 0, hosts=("a", "b"))
        met = mine.meet("here", bytes([group.rank]))
        told = mine.tell_everyone("there", lambda: bytes([100 + group.rank]))
        return (
            list(b"".join(met)),
            list(told),
            list(b"".join(mine.gather_alike("all", bytes([group.rank])))),
            mine.is_alone,
        )

    assert spawn(4, body) == [
        ([rank % 2, rank % 2 + 2], [100], [0, 1, 2, 3], False) for rank in range(4)
    ]


def test_all_raise_what_one_fails_with() -> None:
    def body(group: ThreadGroup) -> Any:
        def act() -> bytes:
            if group.rank == 1:
                raise UsageError("there is no such file")
            return b"%d" % group.rank

        one = Agreement(group)
        fine = act_together(one, "acting", lambda: b"%d" % group.rank, UsageError)
        with pytest.raises(UsageError) as raised:
            act_together(one, "acting", act, UsageError)
        return fine, str(raised.value), len(one.meet("after it"))

    fine = [b"0", b"1", b"2"]
    told = "rank 1: there is no such file"
    assert spawn(3, body) == [(fine, told, 3), (fine, "there is no such file", 3), (fine, told, 3)]


def test_a_slice_of_one_worker_is_not_alone() -> None:
    def body(group: ThreadGroup) -> Any:
        everyone = Agreement(group)
        parts = [part for ranks in ([0], [1]) if (part := group.make_subgroup(ranks)) is not None]
        mine = SliceAgreement(parts[0], everyone, step=lambda: 0, hosts=("a",))
        return mine.is_alone, list(mine.tell_everyone("there", lambda: bytes([100 + group.rank])))

    assert spawn(2, body) == [(False, [100])] * 2


def test_workers_of_a_slice_are_called_by_their_numbers_among_all() -> None:
    def body(group: ThreadGroup) -> None:
        everyone = Agreement(group)
        parts = [
            part for ranks in ([0, 2], [1, 3]) if (part := group.make_subgroup(ranks)) is not None
        ]
        mine = SliceAgreement(parts[0], everyone, step=lambda: 7, hosts=("a", "b"))
        mine.meet("run.mean" if group.rank < 2 or group.rank == 2 else "run.gather")

    with pytest.raises(
        Mismatch, match=r"rank 1 on a at run.mean of step 7.*; rank 3 on b at run.gather"
    ):
        spawn(4, body)

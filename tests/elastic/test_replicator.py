"""Copies on their way between threads: who gets them, and what is left where one breaks off, or
is not what was sent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor

from paceline.comm.group_protocol import Work
from paceline.elastic import replicator as carrying
from paceline.elastic.replicator import Replicator
from paceline.elastic.state_copies import LABEL_FORM, CopyStore
from paceline.errors import DeadlineExceeded, WorkerLost
from paceline.timings import RecoveryTimings
from tests.harness.jobs import PATIENCE
from tests.harness.thread_groups import ThreadGroup, spawn

HOSTS = (0, 0, 1, 1, 2, 2)
NAMES = (10, 11, 12, 13, 14, 15)
PATIENT = RecoveryTimings(copy=PATIENCE)


def has(rank: int, step: int) -> dict[str, Any]:
    """What a rank alone has."""
    return {"x": torch.full((1000,), float(100 * step + rank)), "step": step, "rank": rank}


def kept(shelf: CopyStore) -> dict[int, int]:
    """As of which step the newest copy of each owner is, which is what it had then."""
    for owner in shelf.held_steps:
        step, state = next(shelf.read_copies(owner, lambda why: None))
        wanted = has(NAMES.index(owner), step)
        assert (
            torch.equal(state["x"], wanted["x"])
            and state["step"] == step
            and state["rank"] == wanted["rank"]
        )
    return shelf.held_steps


class Spoiling:
    """A group whose messages go wrong: `spoil` is given each call's number and what has come in
    it.
    """

    def __init__(
        self, group: ThreadGroup, spoil: Callable[[int, Sequence[tuple[int, Tensor]]], None]
    ) -> None:
        self._group, self._spoil, self._calls = group, spoil, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def exchange_agreed(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        self._calls += 1
        self._group.exchange_agreed(sends, recvs, tag=tag).wait()
        spoil, number = self._spoil, self._calls

        class Spoilt:
            def wait(self, timeout: float | None = None) -> None:
                spoil(number, recvs)

        return Spoilt()  # type: ignore[return-value]


def carry(
    size: int,
    steps: int,
    owners: Sequence[int],
    spoil: Callable[[int, Sequence[tuple[int, Tensor]]], None] | None = None,
    after: Callable[[int, Replicator], None] = lambda step, courier: None,
) -> list[tuple[Replicator, CopyStore]]:
    """So many steps of a few workers, of which some have something of their own."""

    def body(group: ThreadGroup) -> tuple[Replicator, CopyStore]:
        shelf = CopyStore()
        courier = Replicator(
            group if spoil is None else Spoiling(group, spoil), HOSTS, NAMES, shelf, timings=PATIENT
        )  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            if courier.can_send:
                courier.start_transfer(
                    has(group.rank, step) if group.rank in owners else None, step
                )
            assert courier.wait_for_transfer(60)
            after(step, courier)
        group.barrier().wait() if courier.can_send else None
        courier.close()
        return courier, shelf

    return spawn(size, body)


@pytest.mark.parametrize("owners", [(0, 2, 4), (0, 1, 2, 3, 4, 5), (0, 3), (5,), ()])
def test_each_copy_comes_to_the_next_host(owners: tuple[int, ...]) -> None:
    found = carry(6, 3, owners)
    for courier, _ in found:
        assert (
            courier.owner_numbers == {NAMES[rank] for rank in owners}
            and courier.complete_step == 3
            and courier.error is None
        )
    where = {owner: rank for rank, (_, shelf) in enumerate(found) for owner in kept(shelf)}
    assert where.keys() == ({NAMES[rank] for rank in owners} if len(owners) > 1 else set())
    for owner, rank in where.items():
        assert HOSTS[rank] != HOSTS[NAMES.index(owner)] and found[rank][1].held_steps[owner] == 3
    sent = [courier.sent_nbytes for courier, _ in found]
    assert [nbytes > 4000 for nbytes in sent] == [
        rank in owners and len(owners) > 1 for rank in range(6)
    ]


def test_a_copy_that_has_changed_on_its_way_is_refused_with_a_line_on_all_and_the_older_one_stays() -> (  # noqa: E501
    None
):
    def spoil(call: int, recvs: Sequence[tuple[int, Tensor]]) -> None:
        if call == 3 and recvs and recvs[0][0] == 0:
            recvs[0][1][17] ^= 32

    seen: list[dict[int, int]] = [{} for _ in range(4)]
    found = carry(
        4,
        4,
        (0, 2),
        spoil,
        lambda step, courier: seen[step - 1].update(courier._copy_store.held_steps),
    )
    assert [steps[NAMES[0]] for steps in seen] == [1, 2, 2, 4] and [
        steps[NAMES[2]] for steps in seen
    ] == [1, 2, 3, 4]
    assert kept(found[2][1]) == {NAMES[0]: 4}
    for courier, _ in found:
        remark = courier.messages.get_nowait()
        assert (
            "rank 2, of rank 0: a copy as of step 3 was refused" in remark
            and "the one as of step 2 is kept" in remark
        )
        with pytest.raises(queue.Empty):
            courier.messages.get_nowait()


def test_of_a_copy_that_breaks_off_half_way_nothing_is_kept() -> None:
    def spoil(call: int, recvs: Sequence[tuple[int, Tensor]]) -> None:
        if call == 3:
            for _, piece in recvs:
                piece[len(piece) // 2 :] = 0
            raise WorkerLost("rank 0 is gone")

    found = carry(4, 5, (0, 2), spoil)
    assert kept(found[2][1]) == {NAMES[0]: 2} and kept(found[0][1]) == {NAMES[2]: 2}
    assert all(
        isinstance(courier.error, WorkerLost) and courier.complete_step == 2 for courier, _ in found
    )


def test_one_of_which_all_had_come_is_kept() -> None:
    """Though its owner was gone before it heard of that."""

    def spoil(call: int, recvs: Sequence[tuple[int, Tensor]]) -> None:
        if call == 3:
            raise WorkerLost("rank 0 is gone")

    found = carry(4, 3, (0, 2), spoil)
    assert kept(found[2][1]) == {NAMES[0]: 3} and all(
        courier.complete_step == 2 for courier, _ in found
    )


def test_a_worker_of_another_version_neither_sends_to_us_nor_gets_anything() -> None:
    """Nobody waits for what won't come."""

    class Other:
        """A group of a worker whose labels are of a later form."""

        def __init__(self, group: ThreadGroup) -> None:
            self._group = group

        def __getattr__(self, name: str) -> Any:
            return getattr(self._group, name)

        def gather_bytes(self, payload: bytes) -> list[bytes]:
            found = msgpack.unpackb(payload)
            return self._group.gather_bytes(
                msgpack.packb([2, *found[1:]])
                if found[:1] == [LABEL_FORM] and self._group.rank == 0
                else payload
            )

    def body(group: ThreadGroup) -> tuple[dict[int, int], list[str]]:
        shelf = CopyStore()
        courier = Replicator(Other(group), HOSTS, NAMES, shelf, timings=PATIENT)  # type: ignore[arg-type]
        courier.start_transfer(has(group.rank, 1), 1)
        assert courier.wait_for_transfer(60) and courier.can_send, courier.error
        group.barrier().wait()
        courier.close()
        return kept(shelf), [courier.messages.get_nowait() for _ in range(2)]

    found = spawn(4, body)
    assert [held for held, _ in found] == [{}, {NAMES[3]: 1}, {}, {NAMES[1]: 1}]
    for _, remarks in found:
        assert remarks[0].startswith("rank 0 has copies of form 2, rank 2 can't keep them")
        assert remarks[1].startswith("rank 2 has copies of form 1, rank 0 can't keep them")


def test_a_worker_that_does_not_come_is_no_longer_waited_for() -> None:
    gone = threading.Event()

    def body(group: ThreadGroup) -> str:
        courier = Replicator(group, HOSTS, NAMES, CopyStore())
        if group.rank == 0:
            courier.start_transfer(has(0, 1), 1)
            assert courier.wait_for_transfer(60) and not courier.can_send
            gone.set()
        assert gone.wait(60)
        courier.close()
        courier.close()
        return type(courier.error).__name__

    assert spawn(2, body, deadline=0.3)[0] == DeadlineExceeded.__name__


def test_closing_lets_the_copy_under_way_come(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    wrap = carrying.pack_copy

    def slowly(state: Any, step: int) -> Any:
        held.wait(0.2)
        return wrap(state, step)

    monkeypatch.setattr(carrying, "pack_copy", slowly)

    def body(group: ThreadGroup) -> dict[int, int]:
        shelf = CopyStore()
        courier = Replicator(group, HOSTS, NAMES, shelf, timings=PATIENT)
        courier.start_transfer(has(group.rank, 1), 1)
        courier.close()
        return shelf.held_steps

    assert [list(held.values()) for held in spawn(4, body)] == [[1]] * 4

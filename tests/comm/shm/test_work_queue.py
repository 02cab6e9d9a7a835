from __future__ import annotations

import threading
from typing import Any

import pytest

from paceline.cluster.store import Store
from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.shm.segment import ControlSegment, Steps
from paceline.comm.shm.work_queue import WorkQueue
from paceline.errors import Mismatch, WorkerLost
from tests.harness.processes import threads

CALL = CallFingerprint("call")


def queues(size: int, body: Any) -> list[Any]:
    """`body(queue, board)` on threads, one a rank."""

    def run(rank: int, size: int, store: Store) -> Any:
        segment = ControlSegment.from_store(store, rank, range(size), deadline=60)
        return body(WorkQueue(segment, []), segment)

    return threads(size, run)


def counting(segment: ControlSegment, phases: int, log: list[Any], name: Any) -> Steps:
    for phase in range(phases):
        log.append((name, phase))
        segment.post()
        yield segment.posted
    return name


def test_operations_run_one_after_the_other_and_only_when_pushed() -> None:
    def body(queue: WorkQueue, segment: ControlSegment) -> None:
        log: list[Any] = []
        works = [queue.start_work(CALL, counting(segment, 3, log, name)) for name in "ab"]
        assert (
            works[1].wait() == "b"
            and works[0].done()
            and works[0].wait() == "a"
            and works[0].exception() is None
        )
        assert log == [(name, phase) for name in "ab" for phase in range(3)]

    queues(3, body)
    queues(1, body)


def test_an_error_found_by_all_ends_one_operation_and_one_found_alone_ends_all() -> None:
    def raising(error: BaseException) -> Steps:
        raise error
        yield 0

    def body(queue: WorkQueue, segment: ControlSegment) -> None:
        log: list[Any] = []
        first = queue.start_work(CALL, raising(Mismatch("apart")))
        second = queue.start_work(CALL, counting(segment, 2, log, "b"))
        with pytest.raises(Mismatch):
            first.wait()
        assert second.wait() == "b"
        third = queue.start_work(CALL, counting(segment, 2, log, "c"))
        fourth = queue.start_work(
            CALL, raising(RuntimeError("of torch") if segment.rank == 0 else Mismatch("apart"))
        )
        fifth = queue.start_work(CALL, counting(segment, 2, log, "e"))
        assert third.wait() == "c"
        with pytest.raises(RuntimeError if segment.rank == 0 else Mismatch):
            fourth.wait()
        with pytest.raises(
            WorkerLost, match=r"rank 0 broke off .*RuntimeError: of torch"
        ) as caught:
            fifth.wait()
        assert caught.value.ranks == (0,)
        with pytest.raises(WorkerLost):
            queue.start_work(CALL, counting(segment, 2, log, "f"))

    queues(2, body)


def test_an_interrupt_in_an_operation_is_raised_and_never_a_result() -> None:
    def body(queue: WorkQueue, segment: ControlSegment) -> None:
        def interrupted() -> Steps:
            yield segment.posted
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            queue.start_work(CALL, interrupted())
        with pytest.raises(WorkerLost, match="KeyboardInterrupt"):
            queue.start_work(CALL, counting(segment, 1, [], "b"))

    queues(1, body)


def test_several_threads_may_wait() -> None:
    def body(queue: WorkQueue, segment: ControlSegment) -> None:
        log: list[Any] = []
        works = [queue.start_work(CALL, counting(segment, 20, log, name)) for name in range(8)]
        found: list[Any] = []
        crew = [
            threading.Thread(target=lambda work=work: found.append(work.wait())) for work in works
        ]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(60)
        assert sorted(found) == list(range(8)) and log == [
            (name, phase) for name in range(8) for phase in range(20)
        ]

    queues(2, body)


def test_relatives_are_pushed_together_and_forgotten_when_gone() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        boards = [
            ControlSegment.from_store(store.open_substore(name), rank, range(size), deadline=60)
            for name in "ab"
        ]
        relatives: list[Any] = []
        one, other = (WorkQueue(segment, relatives) for segment in boards)
        log: list[Any] = []
        work = one.start_work(CALL, counting(boards[0], 5, log, "a"))
        if rank == 0:
            # rank 1 comes only once `work` has ended
            other.start_work(CALL, counting(boards[1], 1, log, "b")).wait()
        assert work.wait() == "a"
        if rank == 1:
            other.start_work(CALL, counting(boards[1], 1, log, "b")).wait()
        del other
        third = WorkQueue(
            ControlSegment.from_store(store.open_substore("c"), rank, range(size), deadline=60),
            relatives,
        )
        assert [ref() for ref in relatives] == [one, third]

    threads(2, body)


def test_a_finalizer_may_begin_and_cancel_operations_in_the_middle_of_another() -> None:
    """It runs in any thread at any time: here where an operation goes on, as the collector may
    find garbage there.
    """

    def body(queue: WorkQueue, segment: ControlSegment) -> None:
        log: list[Any] = []
        begun: list[Any] = []

        def finalized(act: Any) -> Steps:
            act()
            return (yield from counting(segment, 2, log, "outer"))

        first = queue.start_work(
            CALL,
            finalized(
                lambda: begun.append(queue.start_work(CALL, counting(segment, 2, log, "inner")))
            ),
        )
        assert first.wait() == "outer" and begun[0].wait() == "inner"

        def close() -> None:
            segment.watch.close(WorkerLost("this group has been closed"))
            queue.cancel_all()

        third = queue.start_work(CALL, finalized(close))
        with pytest.raises(WorkerLost, match="closed"):
            third.wait()
        assert not queue.has_pending

    queues(2, body)

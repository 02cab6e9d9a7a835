"""Operations under way: futures, and what goes on without its caller."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cluster.store import Store
from paceline.comm.backend import work as works
from paceline.comm.backend.process_group import GroupBackend
from paceline.comm.backend.work import CompositeWork, GlooResult, JoinedWork, PairWork
from paceline.comm.group_protocol import FinishedWork
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import DeadlineExceeded, Mismatch, WorkerLost
from tests.harness.backends import RUNNERS, backend, mine, on_threads, reducing
from tests.harness.processes import threads


@RUNNERS
def test_futures_end_in_the_background_in_any_order(run: Any) -> None:
    """Nobody waits for the works themselves, as in DDP."""

    def body(group: GroupBackend) -> Any:
        tensors = [mine(group.rank(), 50 + i, seed=i) for i in range(20)]
        works = [group.allreduce([x], reducing()) for x in tensors]
        futures = [work.get_future() for work in works]
        assert works[3].get_future() is futures[3]
        doubled = [future.then(lambda done: done.value()[0] * 2) for future in reversed(futures)]
        found = [future.wait() for future in reversed(doubled)]
        assert all(future.wait()[0] is x for future, x in zip(futures, tensors, strict=True))
        return found

    for found in run(3, body):
        for i, x in enumerate(found):
            torch.testing.assert_close(x, 2 * sum(mine(r, 50 + i, seed=i) for r in range(3)))


@RUNNERS
def test_errors_reach_futures_too(run: Any) -> None:
    def body(group: GroupBackend) -> None:
        future = group.allreduce([torch.ones(3 + group.rank())], reducing()).get_future()
        with pytest.raises(Exception, match="come apart"):
            future.wait()

    run(2, body)


def test_what_nobody_waits_for_goes_on_as_others_need_it() -> None:
    """Rank 0 begins a reduction of many blocks, and waits for a message that rank 1 sends once
    it has the result.
    """

    def body(rank: int, size: int, store: Store) -> Tensor:
        group = SharedGroup.from_store(store, rank, size, deadline=20)
        x = mine(rank, 1 << 20)
        work = backend(group).allreduce([x], reducing())
        if rank == 0:
            store.take("rank 1 has it", 20)
        work.wait()
        store.put(f"rank {rank} has it", True)
        store.take("rank 0 has it", 20)
        group.close()
        return x

    wanted = mine(0, 1 << 20) + mine(1, 1 << 20)
    assert all(torch.equal(x, wanted) for x in threads(2, body))


def test_results_are_the_tensors_that_were_given() -> None:
    def body(group: GroupBackend) -> None:
        x = mine(group.rank(), 5)
        work = group.allreduce([x], reducing())
        assert (
            work.result()[0] is x
            and work.is_completed()
            and work.is_success()
            and work.exception() is None
        )
        assert work.get_future().wait()[0] is x and work.get_future_result() is work.get_future()
        work.synchronize()
        failed = group.allreduce([torch.ones(3 + group.rank())], reducing())
        with pytest.raises(Mismatch):
            failed.wait()
        assert (
            failed.is_completed()
            and not failed.is_success()
            and isinstance(failed.exception(), Mismatch)
        )

    on_threads(2, body)


class Lasting:
    """What Gloo gives for a message.

    `error`: raised by its wait, at once or after the time given to it.
    """

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._late and timeout is not None:
            threading.Event().wait(timeout.total_seconds())
        raise RuntimeError("Connection closed by peer\nsecond line")

    def is_completed(self) -> bool:
        return False


def test_messages_name_the_rank_that_is_late_or_lost() -> None:
    late, lost = (
        PairWork(Lasting(late=True), "rank 3 has not come", 3),
        PairWork(Lasting(late=False), "rank 3 has not come", 3),
    )
    with pytest.raises(DeadlineExceeded, match=r"rank 3 has not come within 0\.01 s") as passed:
        late.wait(0.01)
    with pytest.raises(
        WorkerLost, match=r"rank 3 has not come, .* s later: Connection closed by peer$"
    ) as gone:
        lost.wait(20.0)
    assert (
        passed.value.missing == gone.value.ranks == (3,)
        and late.done()
        and lost.exception() is gone.value
    )


def test_a_sparse_sum_that_is_late_is_no_loss_of_a_worker() -> None:
    with pytest.raises(DeadlineExceeded, match=r"a sparse all_reduce has not ended within 0\.01 s"):
        GlooResult(Lasting(late=True), [torch.ones(1)]).wait(0.01)
    with pytest.raises(
        WorkerLost, match=r"a sparse all_reduce has not ended, .*: Connection closed by peer$"
    ):
        GlooResult(Lasting(late=False), [torch.ones(1)]).wait()


@pytest.mark.parametrize("kind", [CompositeWork, JoinedWork])
def test_several_works_have_the_time_of_one_together(
    kind: type[CompositeWork | JoinedWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(FinishedWork):
        def wait(self, timeout: float | None = None) -> None:
            given.append(timeout)
            now[0] += 4.0

        wait_and_raise = wait

    now, given = [100.0], list[float | None]()
    monkeypatch.setattr(works.time, "monotonic", lambda: now[0])
    kind([Slow(), Slow(), Slow()]).wait(6.0)
    assert given == [6.0, 2.0, works.SHORTEST]
    kind([Slow(), Slow()]).wait()
    assert (
        given[3:] == [None, None] and kind([Slow()]).done() and kind([Slow()]).exception() is None
    )


@RUNNERS
def test_what_is_begun_in_inference_mode_ends_outside_of_it_and_in_the_background(run: Any) -> None:
    def body(group: GroupBackend) -> list[Tensor]:
        with torch.inference_mode():
            # results are copied there
            tensors = [mine(group.rank(), 50, 2, seed=i).t() for i in range(3)]
            works = [group.allreduce([x], reducing()) for x in tensors[:2]]
            future = works[1].get_future()
        works[0].wait()
        future.wait()
        group.allreduce([tensors[2]], reducing()).wait()
        return tensors

    for found in run(2, body):
        for i, x in enumerate(found):
            torch.testing.assert_close(
                x + 0, mine(0, 50, 2, seed=i).t() + mine(1, 50, 2, seed=i).t()
            )

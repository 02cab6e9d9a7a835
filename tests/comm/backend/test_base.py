"""What the backend says of itself, and coalesced calls."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from paceline.cluster.store import Store
from paceline.comm.backend.process_group import GroupBackend
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import DeadlineExceeded, PacelineError, ViewChanged
from tests.harness.backends import (
    PATIENCE,
    backend,
    meet,
    mine,
    on_shared_memory,
    on_threads,
    reducing,
)
from tests.harness.jobs import wait_for
from tests.harness.processes import threads


def test_coalesced_calls_end_as_one() -> None:
    def body(group: GroupBackend) -> Any:
        x, y = mine(group.rank(), 3), mine(group.rank(), 4, seed=1)
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([x], reducing())
        group.allreduce([y], reducing())
        group._end_coalescing(torch.device("cpu")).wait()
        group._start_coalescing(torch.device("cpu"))
        assert group._end_coalescing(torch.device("cpu")).wait()  # of nothing
        return x, y

    for x, y in on_threads(3, body):
        torch.testing.assert_close(x, sum(mine(r, 3) for r in range(3)))
        torch.testing.assert_close(y, sum(mine(r, 4, seed=1) for r in range(3)))


def test_it_names_itself() -> None:
    def body(group: GroupBackend) -> None:
        group._set_group_name("mine")
        group._set_group_desc("for tests")
        assert (group.group_name, group.group_desc, group.name(), group.getBackendName()) == (
            "mine",
            "for tests",
            "paceline",
            "paceline",
        )
        assert (
            group._device_types == [torch.device("cpu")]
            and group._get_backend(torch.device("cpu")) is group
        )
        group._set_sequence_number_for_group()
        group.barrier().wait()
        assert group._get_sequence_number_for_group() == 1

    on_threads(2, body)


def test_a_group_that_was_destroyed_says_so() -> None:
    def body(group: GroupBackend) -> None:
        group.barrier().wait()
        group.shutdown()
        group.shutdown()  # twice is harmless
        with pytest.raises(ViewChanged, match="destroyed"):
            group.barrier().wait()

    on_threads(2, body)


def test_abort_ends_what_is_under_way_on_all_ranks() -> None:
    def body(group: GroupBackend) -> None:
        group.barrier().wait()
        if group.rank() == 0:
            group.abort()
        else:
            with pytest.raises(PacelineError, match="aborted"):
                group.allreduce([torch.ones(3)], reducing()).wait()

    on_shared_memory(2, body)


def test_another_timeout_counts_from_then_on() -> None:
    """The waits of rank 0 pass; those of rank 1, which come once rank 0 has told so, don't."""

    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)
        ours = backend(group)
        meet(ours)
        if rank == 0:
            ours.set_timeout(timedelta(seconds=0.2))
            with pytest.raises(DeadlineExceeded, match=r"0\.2 s") as caught:
                ours.barrier().wait()
            assert caught.value.__notes__ == ["Of these, rank 1 is on host host1."]
        store.put(f"done{rank}", True)
        store.take(f"done{1 - rank}", PATIENCE)
        group.close()

    threads(2, body)


def test_nothing_is_left_of_a_group_that_was_aborted() -> None:
    def completers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "paceline completer"}

    before = completers()

    def body(group: GroupBackend) -> None:
        group.allreduce([mine(group.rank(), 50)], reducing()).get_future().wait()
        group.barrier().wait()
        pending = (
            group.allreduce([mine(0, 50)], reducing()).get_future() if group.rank() == 0 else None
        )
        group.abort()
        if pending is not None:
            with pytest.raises(Exception, match="abort"):
                pending.wait()

    on_shared_memory(2, body)
    wait_for(lambda: completers() <= before)

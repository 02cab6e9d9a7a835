"""A rank that sleeps is woken by the one that it waits for, on both channels of a segment."""

from __future__ import annotations

import os
import threading

import pytest

from paceline.cluster.store import Store
from paceline.comm.shm.segment import AGREES, ASLEEP, OPS, SPAN, ControlSegment
from tests.harness.processes import threads


def join(store: Store, rank: int, size: int) -> ControlSegment:
    return ControlSegment.from_store(store, rank, range(size), deadline=60)


@pytest.mark.parametrize("channel", [OPS, AGREES])
def test_who_rests_is_woken_by_the_missing_one(channel: int) -> None:
    """Rank 0 would sleep for an hour: it ends in time only where it is woken."""

    def body(rank: int, size: int, store: Store) -> None:
        segment = join(store, rank, size)
        if rank == 0:
            found: list[bool] = []
            counters, value = (segment._ops, segment.posted + 1) if channel == OPS else (segment._agrees, segment._agreed + 1)
            thread = threading.Thread(target=lambda: found.append(segment._sleepers.rest(counters, value, 3600.0)), daemon=True)
            store.put("met", True)  # no wait of the beginning is under way any more
            thread.start()
            thread.join(60)
            assert found == [True], "it sleeps on"
            assert not segment._sleepers.rest(counters, value, 3600.0), "all have come: there is nobody to wait for"
            segment.post() if channel == OPS else segment.agree(b"")
            return
        store.take("met")
        asleep = segment._mine - SPAN // 8 + ASLEEP
        while not segment._cells[asleep]:
            os.sched_yield()
        segment.post() if channel == OPS else segment.agree(b"")  # which raises the counter before it waits for rank 0

    threads(2, body)


def test_a_rest_ends_by_itself() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        segment = join(store, rank, size)
        if rank == 0:
            assert segment.rest(segment.posted + 1, 0.001)
            assert segment._cells[segment._mine + ASLEEP] == 0
        segment.agree(b"")

    threads(2, body)

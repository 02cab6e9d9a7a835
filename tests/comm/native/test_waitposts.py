from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from paceline.cluster.store import Store
from paceline.comm.native.waitposts import GroupEnd, Waitposts
from paceline.comm.waitgraph import RankWait


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ranks_see_each_others_waits_until_they_leave() -> None:
    store = HashStore()
    one, other = Waitposts(store, 0, 2), Waitposts(store, 1, 2)
    wait = RankWait("data", 3, "all_reduce", {"data": 4})
    one.post_wait(wait)
    other.post_wait(wait)
    until(lambda: one.others == {1: wait})
    assert one.stuck == {} == other.stuck
    other.clear_wait()
    until(lambda: one.others == {})
    one.close()
    other.close()


def test_a_circle_is_found_by_both() -> None:
    store = HashStore()
    one, other = Waitposts(store, 0, 2), Waitposts(store, 1, 2)
    one.post_wait(RankWait("agree", 0, "agree", {"agree": 1}))
    other.post_wait(RankWait("calls", 0, "barrier", {"calls": 1}))
    until(lambda: set(one.stuck) == {0, 1} == set(other.stuck))
    one.close()
    other.close()


@pytest.mark.slow
def test_a_store_that_is_slow_is_waited_for() -> None:
    class Slow(Store):
        def set_if_absent(self, key: str, value: Any) -> Any:
            time.sleep(1.1)
            return super().set_if_absent(key, value)

    base = HashStore()
    first = GroupEnd("WorkerLost", "rank 2 is gone", (2,))
    assert Waitposts(base, 0, 2).decide_end(first) == first
    assert Waitposts(Slow(base), 1, 2).decide_end(GroupEnd("ViewChanged", "aborted")) == first


def test_the_first_verdict_counts() -> None:
    store = HashStore()
    one, other = Waitposts(store, 0, 2), Waitposts(store, 1, 2)
    first = GroupEnd("WorkerLost", "rank 2 is gone", (2,))
    assert one.decide_end(first) == first
    assert other.decide_end(GroupEnd("ViewChanged", "aborted")) == first

"""Ways of buckets on threads: the same sums by each, and what measured links choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.comm.agreement import Agreement
from paceline.comm.group import Group
from paceline.comm.threads import ThreadGroup, spawn
from paceline.errors import UsageError
from paceline.sync.context import SyncContext
from paceline.sync.route_choice import FAST, RouteFacts
from paceline.sync.routes import AcrossReducer, ScheduledReducer, reducer, unmeasured
from tests.harness.hierarchies import made

SLOW = (1e8, 1e8, 1e7)


def summed(group: Group, hosts: tuple[int, ...], facts: RouteFacts | None, via: str = "auto") -> tuple[str, list[bytes], list[str]]:
    """The kind of reducer, the bits of three sums that are under way at once, and what was said."""
    said: list[str] = []
    measures: Callable[[], RouteFacts] | None = None if facts is None else lambda: facts
    context = SyncContext(group, Agreement(group), hosts=hosts, announce=said.append, route_facts=measures)
    chosen = reducer(via)(context)
    assert context.route in ("", *said)
    flats = []
    for turn, numel in enumerate((100_000, 7, 40_001)):
        flat = chosen.empty(numel, torch.float32)
        flat.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(10 * group.rank + turn)))
        flats.append(flat)
    works = [chosen.all_reduce(flat, f"bucket {turn}") for turn, flat in enumerate(flats)]
    sums = [work.wait().clone() for work in works]
    for turn, total in enumerate(sums):
        parts = [torch.randn(total.numel(), generator=torch.Generator().manual_seed(10 * r + turn)) for r in range(group.size)]
        torch.testing.assert_close(total, torch.stack(parts).sum(0))
    chosen.close()
    return type(chosen).__name__, [total.numpy().tobytes() for total in sums], said


@pytest.mark.parametrize("via", ["auto", "uneven"])
def test_a_slow_link_brings_uneven_chunks_and_the_same_bits_everywhere(via: str) -> None:
    def body(group: ThreadGroup) -> tuple[str, list[bytes], list[str]]:
        return summed(group, (0, 1, 2), RouteFacts(SLOW, 1e-4, 4.0, 0.5), via)

    found = spawn(3, body)
    assert all(each == found[0] for each in found) and found[0][0] == ScheduledReducer.__name__
    assert [line.split(":")[0] for line in found[0][2]] == (["buckets travel by via='uneven'"] if via == "auto" else [])


@pytest.mark.parametrize("hosts", [(0, 0, 1, 2), (0, 1, 2, 0), (2, 1, 0, 2, 1)])
def test_uneven_chunks_between_hosts_of_several_workers(hosts: tuple[int, ...]) -> None:
    def body(group: ThreadGroup) -> tuple[str, list[bytes], list[str]]:
        whole = made(group, hosts)
        found = summed(whole, hosts, RouteFacts(SLOW, 1e-4, 4.0, 0.5))
        whole.close()
        return found

    found = spawn(len(hosts), body)
    assert all(each == found[0] for each in found) and found[0][0] == AcrossReducer.__name__


def test_fast_links_of_crowded_hosts_are_used_by_all_workers() -> None:
    def body(group: ThreadGroup) -> tuple[int, int]:
        whole = made(group, (0, 0, 1, 1))
        sent = []
        for rate in (FAST, FAST / 4):
            before = whole.inner.traffic.within
            summed(whole, (0, 0, 1, 1), RouteFacts((rate, rate), 1e-4, 1.0, 0.1))
            sent.append(whole.inner.traffic.within - before)
        whole.close()
        return sent[0], sent[1]

    for fast, slow in spawn(4, body):
        assert fast == 0 < slow, "over slow links, and not over fast ones, workers of a host add up first"


def test_nothing_is_measured_where_there_is_nothing_to_choose() -> None:
    def never() -> RouteFacts:
        raise AssertionError("measured")

    def body(group: ThreadGroup) -> None:
        for hosts in ((0, 0), (0, 1)):
            context = SyncContext(group, Agreement(group), hosts=hosts, route_facts=never)
            reducer("auto")(context).close()
            unmeasured("auto")(context).close()
            reducer("uneven")(context).close()
        with pytest.raises(UsageError, match="via='rnig' is unknown"):
            reducer("rnig")

    spawn(2, body)

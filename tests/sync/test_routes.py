"""Ways of buckets on threads: the same sums by each, and what a measured cluster chooses."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.agreement import Agreement
from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.sync.context import SyncContext
from paceline.sync.route_choice import ALIKE_RATIO, FAST_LINK, RouteFacts
from paceline.sync.routes import (
    BetweenHostsReducer,
    GroupReducer,
    ScheduledReducer,
    find_reducer_maker,
)
from tests.harness.hierarchies import made
from tests.harness.thread_groups import ThreadGroup, spawn

SLOW = (1e8, 1e8, 1e7)
SIZES = (100_000, 7, 2, 1, 40_001)  # also below the number of workers
Found = tuple[str, list[bytes], list[str], str]


def summed(
    group: Group, hosts: tuple[int, ...], facts: RouteFacts | None, via: str = "auto"
) -> Found:
    """The kind of reducer, the bits of sums that are under way at once, what was said, and the
    way; whole numbers give exact sums.
    """
    said: list[str] = []
    context = SyncContext(
        group, Agreement(group), hosts=hosts, announce=said.append, route_facts=facts
    )
    chosen = find_reducer_maker(via)(context)
    exact = [
        [
            torch.randint(-999, 999, (n,), generator=torch.Generator().manual_seed(9 * r + n))
            for r in range(group.size)
        ]
        for n in SIZES
    ]
    tenths = [
        torch.randn(n, generator=torch.Generator().manual_seed(10 * group.rank + n)) for n in SIZES
    ]
    flats = []
    for part in [*(each[group.rank].float() for each in exact), *tenths]:
        flat = chosen.allocate_bucket(part.numel(), torch.float32)
        flats.append(flat.copy_(part))
    works = [chosen.all_reduce(flat, f"bucket {turn}") for turn, flat in enumerate(flats)]
    sums = [work.wait().clone() for work in works]
    for total, parts in zip(sums, exact, strict=False):
        assert torch.equal(total, torch.stack(parts).sum(0).float())
    chosen.close()
    way = context.routes[0].way if context.routes else ""
    return type(chosen).__name__, [total.numpy().tobytes() for total in sums], said, way


@pytest.mark.parametrize("via", ["auto", "uneven"])
@pytest.mark.parametrize("rates", [SLOW, (1e7, 3e7, 1e8, 2e7, 9e7)])
def test_links_that_differ_bring_uneven_chunks_and_the_same_bits_everywhere(
    via: str, rates: tuple[float, ...]
) -> None:
    count = len(rates)

    def body(group: ThreadGroup) -> Found:
        return summed(group, tuple(range(count)), RouteFacts(rates, 1e-4, 4.0), via)

    found = spawn(count, body)
    assert all(each == found[0] for each in found)
    kind, _, said, way = found[0]
    assert (kind, way, len(said)) == (
        ScheduledReducer.__name__,
        "uneven",
        1,
    ) and "cluster.json" in said[0]


@pytest.mark.parametrize("hosts", [(0, 0, 1, 2), (0, 1, 2, 0), (2, 1, 0, 2, 1)])
@pytest.mark.parametrize("grouped", [True, False])
def test_uneven_chunks_between_hosts_of_several_workers(
    hosts: tuple[int, ...], grouped: bool
) -> None:
    """Also where the workers of a host have no shared memory, and the group is one of all
    workers.
    """

    def body(group: ThreadGroup) -> Found:
        whole = made(group, hosts) if grouped else group
        found = summed(whole, hosts, RouteFacts(SLOW, 1e-4, 4.0))
        whole.close()
        return found

    found = spawn(len(hosts), body)
    assert all(each == found[0] for each in found)
    assert found[0][0] == (BetweenHostsReducer if grouped else ScheduledReducer).__name__


@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 1, 1, 2, 0)])
def test_with_links_that_are_alike_nothing_changes_to_the_bit(hosts: tuple[int, ...]) -> None:
    def body(group: ThreadGroup) -> tuple[Found, Found]:
        whole = made(group, hosts) if len(hosts) > 3 else group
        found = [
            summed(whole, hosts, facts)
            for facts in (None, RouteFacts((1e8, 1e8 * ALIKE_RATIO, 1.1e8), 1e-4, 4.0))
        ]
        whole.close()
        return found[0], found[1]

    for without, given in spawn(len(hosts), body):
        assert without[:2] == given[:2] and (without[3], given[3]) == ("", "auto")
        assert without[2] == [] and len(given[2]) == 1


def test_fast_links_of_crowded_hosts_are_used_by_all_workers() -> None:
    def body(group: ThreadGroup) -> tuple[int, int]:
        whole = made(group, (0, 0, 1, 1))
        sent = []
        for rate in (FAST_LINK, FAST_LINK / 4):
            before = whole.inner.traffic.within
            summed(whole, (0, 0, 1, 1), RouteFacts((rate, rate), 1e-4, 1.0))
            sent.append(whole.inner.traffic.within - before)
        whole.close()
        return sent[0], sent[1]

    for fast, slow in spawn(4, body):
        assert fast == 0 < slow, (
            "over slow links, and not over fast ones, workers of a host add up first"
        )


def test_what_has_a_way_of_its_own_chooses_none() -> None:
    def body(group: ThreadGroup) -> None:
        for via, coded in (("auto", True), ("ring", False), ("native", False)):
            context = SyncContext(
                group, Agreement(group), hosts=(0, 1), route_facts=RouteFacts((1e8, 1e7), 1e-4, 1.0)
            )
            made = find_reducer_maker(via, coded=coded)(context)
            assert isinstance(made, GroupReducer) and context.routes == [] and context.route is None
            made.close()
        with pytest.raises(UsageError, match="via='rnig' is unknown"):
            find_reducer_maker("rnig")

    spawn(2, body)

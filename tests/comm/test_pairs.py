"""Pairs of each kind of group carry random messages; what belongs to one way is tested beside
its module.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from paceline.cluster.store import Store
from paceline.comm.axis_groups import make_fast_subgroup
from paceline.comm.group_protocol import Group, Traffic
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.pairs import connect_pairs
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.solo import SoloGroup
from tests.harness import hierarchies, processes
from tests.harness.jobs import PATIENCE
from tests.harness.pair_traffic import converse
from tests.harness.thread_groups import ThreadGroup, spawn


def jitter(seed: int) -> Callable[[int], None]:
    dice = random.Random(seed)
    return lambda rank: time.sleep(dice.random() * 1e-3)


@pytest.mark.parametrize(("size", "seed"), [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_random_messages_between_threads(size: int, seed: int) -> None:
    spawn(size, lambda group: converse(connect_pairs(group), 60, seed), delay=jitter(seed))


def test_random_messages_in_a_group_of_hosts_on_threads() -> None:
    def body(group: ThreadGroup) -> None:
        hosts = hierarchies.made(group, (0, 1, 0))
        converse(connect_pairs(hosts), 30, 4)
        hosts.close()

    spawn(3, body)


def talk(group: Group, seed: int, count: int = 40) -> Traffic:
    """Random messages over pairs of `group`, with delays of chance."""
    dice = random.Random(seed + group.rank)
    both = connect_pairs(group)
    converse(
        both, count, seed, pause=lambda: time.sleep(dice.random() * 1e-3 * (dice.random() < 0.3))
    )
    group.barrier().wait()  # all has come to all
    both.close()
    return both.traffic


def test_random_messages_of_one_worker() -> None:
    assert talk(SoloGroup(), 5) == Traffic()


def test_random_messages_in_shared_memory_and_in_a_part_of_a_group() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)
        traffic = talk(group, 6)
        assert traffic.within > 0 and traffic.between == 0
        part = group.make_subgroup([2, 0])
        if part is not None:
            talk(part, 7, 15)
        group.close()

    processes.fork(3, body)


def test_random_messages_over_torch_distributed() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = TorchGroup.from_store(store, rank, size, deadline=PATIENCE, hosts=range(size))
        traffic = talk(group, 8)
        assert traffic.within == 0 and traffic.between > 0
        group.close()

    processes.fork(3, body)


def test_random_messages_over_hosts_and_along_an_axis() -> None:
    hosts = (0, 1, 0, 1)

    def body(rank: int, size: int, store: Store) -> None:
        flat = TorchGroup.from_store(
            store.open_substore("flat"), rank, size, deadline=PATIENCE, hosts=hosts
        )
        mine = [other for other in range(size) if hosts[other] == hosts[rank]]
        inner = SharedGroup.from_store(
            store.open_substore(f"{hosts[rank]}"),
            mine.index(rank),
            2,
            deadline=PATIENCE,
            ranks=mine,
        )
        group = HostsGroup(inner, flat.make_subgroup([0, 1]), flat, hosts, deadline=PATIENCE)
        traffic = talk(group, 9)
        assert traffic.within > 0 and traffic.between > 0
        for ranks in ([0, 2], [0, 1], [1, 0, 3]):
            part = make_fast_subgroup(group, ranks)
            if part is not None:
                talk(part, 10, 10)
                part.close()
        group.close()

    processes.fork(4, body)

"""Pairs of each kind of group carry random messages; what belongs to one way is tested beside its module."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from paceline.comm.pairs import pairs
from paceline.comm.threads import ThreadGroup, spawn
from tests.harness import hierarchies
from tests.harness.pair_traffic import converse


def jitter(seed: int) -> Callable[[int], None]:
    dice = random.Random(seed)
    return lambda rank: time.sleep(dice.random() * 1e-3)


@pytest.mark.parametrize(("size", "seed"), [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_random_messages_between_threads(size: int, seed: int) -> None:
    spawn(size, lambda group: converse(pairs(group), 60, seed), delay=jitter(seed))


def test_random_messages_in_a_group_of_hosts_on_threads() -> None:
    def body(group: ThreadGroup) -> None:
        hosts = hierarchies.made(group, (0, 1, 0))
        converse(pairs(hosts), 30, 4)
        hosts.close()

    spawn(3, body)

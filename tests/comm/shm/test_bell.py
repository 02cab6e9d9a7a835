from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from paceline.comm.shm import futex
from paceline.comm.shm.bell import Bell
from tests.harness.jobs import PATIENCE

pytestmark = pytest.mark.skipif(not futex.has_futex(), reason="this machine has no futexes")
PLACES = (0, 8, 16)


class Cells:
    """The cells of three ranks, and a counter of each beside its bell."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(8 * 24)
        self.cells = memoryview(self.memory).cast("B").cast("q")
        self.bells = [
            Bell(self.cells, ctypes.addressof(self.memory), PLACES, rank) for rank in range(3)
        ]

    def post(self, rank: int) -> None:
        self.cells[PLACES[rank] + 4] += 1
        self.bells[rank].ring()

    def posted(self, rank: int, value: int) -> Callable[[], bool]:
        return lambda: self.cells[PLACES[rank] + 4] >= value

    def asleep(self, rank: int) -> bool:
        return self.cells[PLACES[rank]] == 1


def test_whoever_is_ready_does_not_sleep() -> None:
    ours = Cells()
    began = time.monotonic()
    ours.bells[0].sleep_until_rung(lambda: True, PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2 and not ours.asleep(0)


def test_a_sleep_ends_by_itself() -> None:
    ours = Cells()
    ours.bells[0].sleep_until_rung(lambda: False, 0.01)
    assert not ours.asleep(0)


def test_all_that_sleep_are_woken_and_no_bell_rings_for_others() -> None:
    ours = Cells()
    threads = [
        threading.Thread(
            target=ours.bells[rank].sleep_until_rung,
            args=(ours.posted(2, 1), PATIENCE),
            daemon=True,
        )
        for rank in (0, 1, 1)
    ]
    for thread in threads:
        thread.start()
    while not (ours.asleep(0) and ours.asleep(1)):
        time.sleep(0.001)
    end = time.monotonic() + PATIENCE / 2
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        ours.post(2)  # again, as a thread may not have fallen asleep when it was first rung for
        time.sleep(0.001)
    assert (
        not any(thread.is_alive() for thread in threads)
        and not ours.asleep(0)
        and not ours.asleep(1)
    )
    heard = [ours.cells[place + 1] for place in PLACES]
    ours.post(2)
    assert [ours.cells[place + 1] for place in PLACES] == heard  # nobody sleeps


def test_two_that_wait_for_each_other_in_turn_lose_no_round() -> None:
    ours, rounds = Cells(), 2000

    def play(rank: int, other: int) -> None:
        for number in range(1, rounds + 1):
            ours.post(rank)
            while not ours.posted(other, number)():
                ours.bells[rank].sleep_until_rung(ours.posted(other, number), 0.05)

    threads = [threading.Thread(target=play, args=pair, daemon=True) for pair in ((0, 1), (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert (ours.cells[PLACES[0] + 4], ours.cells[PLACES[1] + 4]) == (rounds, rounds)

from __future__ import annotations

import threading

import torch

from paceline.comm.shm import futex
from tests.harness.jobs import PATIENCE


def test_a_number_that_has_changed_is_not_waited_for() -> None:
    cell = torch.tensor([7 + (5 << 32)])
    futex.futex_wait(cell.data_ptr(), 6 + (5 << 32), PATIENCE)
    futex.futex_wait(cell.data_ptr(), 7 + (5 << 32), 0.001)  # and a wait ends in time


def test_all_sleepers_wake() -> None:
    cell = torch.tensor([0])
    awake = []

    def sleep(number: int) -> None:
        while cell.item() == 0:
            futex.futex_wait(cell.data_ptr(), 0, PATIENCE)
        awake.append(number)

    sleepers = [threading.Thread(target=sleep, args=(number,), daemon=True) for number in range(3)]
    for each in sleepers:
        each.start()
    cell.fill_(1)
    futex.futex_wake(cell.data_ptr())
    for each in sleepers:
        each.join(PATIENCE)
    assert sorted(awake) == [0, 1, 2]

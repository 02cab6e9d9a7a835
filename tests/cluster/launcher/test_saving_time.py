"""Which workers save after SIGTERM, for how long, and what ends them else."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from paceline.cluster.launcher.saving_time import SavingTime, pick_end_signal


class Worker:
    """A worker that has reported these events, as a launcher sees it."""

    def __init__(self, *events: str, ended: bool = False, number: int = -1) -> None:
        self.events, self.worker_number = {*events}, number
        self.ended_at = 1.0 if ended else None
        self.signals: list[int] = []
        self.orders: list[bytes] = []

    def has_reported(self, event: str) -> bool:
        return event in self.events

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def send_order(self, line: bytes) -> None:
        self.orders.append(line)


def begin(*workers: Worker, seconds: float = 30.0) -> tuple[SavingTime, Any]:
    saving: Any = SavingTime(seconds)
    return saving, saving.begin(workers, 100.0)


def test_all_are_asked_and_have_their_time() -> None:
    both = Worker("joined", "saves"), Worker("joined", "saves")
    saving, line = begin(*both)
    assert line.endswith("the run saves a checkpoint after its present step, within 30 s")
    assert [worker.signals for worker in both] == [[signal.SIGTERM]] * 2
    assert saving.lasts(129.9) and "for 10 s at most" in saving.describe_rest(120.0)
    assert not saving.lasts(130.0) and not saving.lasts(100.0)  # it doesn't begin again


@pytest.mark.parametrize(
    "workers",
    [
        (Worker("joined", "saves"), Worker("joined")),  # one has not begun to train
        (Worker("joined", "saves", "closed"), Worker("joined", "saves")),  # the run is over
        (Worker("saves", ended=True),),
        (),
    ],
)
def test_where_nothing_can_be_saved(workers: tuple[Worker, ...]) -> None:
    saving, line = begin(*workers)
    assert line == "" and not saving.lasts(100.0)
    assert not any(worker.signals for worker in workers)


def test_it_can_be_switched_off() -> None:
    assert begin(Worker("saves"), seconds=0.0)[1] == ""


def test_workers_of_an_elastic_job_are_told_to_leave() -> None:
    """One that is just starting is left out."""
    old, new = Worker("saves", number=7), Worker("joined", number=8)
    saving, line = begin(old, new)
    assert line and old.orders == [b'{"leave": true}\n'] and not (old.signals or new.orders)
    assert saving.lasts(101.0)


@pytest.mark.parametrize(("events", "lasts"), [(("saves",), False), (("saves", "closed"), True)])
def test_a_worker_that_fails_meanwhile_ends_it(events: tuple[str, ...], lasts: bool) -> None:
    one, other = Worker("saves"), Worker("saves")
    saving, _ = begin(one, other)
    one.ended_at, one.events = 2.0, {*events}
    assert saving.lasts(101.0) == lasts


def test_ctrl_c_ends_it() -> None:
    saving, _ = begin(Worker("saves"))
    saving.end()
    assert not saving.lasts(100.0)


def test_sigterm_would_not_end_a_worker_that_saves() -> None:
    workers: Any = Worker("saves"), Worker("joined")
    assert [pick_end_signal(worker) for worker in workers] == [signal.SIGKILL, signal.SIGTERM]

"""Rounds beside the scheduler: a lost worker's samples are in a round, or come again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import Mismatch
from paceline.servers.process.round_rpc import RoundRpc
from paceline.servers.process.scheduler_rpc import SchedulerRpc
from paceline.servers.protocol import rounds, samples

SIZES = torch.tensor([4, 4, 4])


class Keeper:
    """The two parts of a server, with 2 workers that take pieces of 2 samples."""

    def __init__(self, quorum: float, grace_seconds: float = 1e9) -> None:
        self.scheduling = SchedulerRpc()
        self.keeping = RoundRpc(self.scheduling.scheduler)
        self.scheduling.add_loss_listener(self.keeping.remove_lost_workers)
        self.handlers = {**self.scheduling.handlers, **self.keeping.handlers}
        values = torch.zeros(1, dtype=torch.float64)
        self.ask(0, rounds.OpenRounds(quorum, grace_seconds, 0.0, 0.0, (0, 1), False, (values,)))
        for worker in (0, 1):
            self.ask(worker, samples.DealSamples(0, 0, (0, 1), 0, SIZES))

    def ask(self, worker: int, request: Any) -> Any:
        return self.handlers[type(request)](worker, request)

    def take(self, worker: int, number: int) -> tuple[int, int, int] | None:
        return self.ask(worker, samples.TakeSamples(2, number)).piece

    def complete(self, worker: int, clock: int, *, carried: bool) -> None:
        self.ask(worker, samples.CompleteTurn(clock, False, carried, 1e9))

    def submit(self, worker: int, number: int, amount: float, *, final: bool = False) -> Any:
        changes = (torch.full((1,), amount, dtype=torch.float64),)
        return self.ask(worker, rounds.SubmitChange(number, 1.0, final, changes))

    def lose(self, *living: int) -> Any:
        return self.ask(living[0], samples.LoseWorkers(living))


def test_what_a_lost_worker_trained_since_its_last_round_is_dealt_again() -> None:
    keeper = Keeper(quorum=1.0)
    assert keeper.take(1, 1) == (0, 0, 2)
    keeper.complete(1, 1, carried=True)
    assert keeper.take(1, 2) == (0, 2, 4)
    assert keeper.take(0, 1) == (1, 0, 2)
    # Its change of two turns waits for worker 0 when it is lost.
    assert keeper.submit(1, 1, 100.0) is None
    keeper.lose(0)
    assert keeper.submit(0, 1, 3.0).values[0].item() == 3.0
    with pytest.raises(Mismatch, match="worker 1 was lost"):
        keeper.submit(1, 1, 100.0)  # the server tries a message that was put off again
    keeper.complete(0, 1, carried=False)
    assert [keeper.take(0, number) for number in (2, 3)] == [(0, 0, 2), (0, 2, 4)]


def test_what_is_in_a_round_is_not_dealt_again() -> None:
    keeper = Keeper(quorum=0.5, grace_seconds=0.0)
    assert keeper.take(1, 1) == (0, 0, 2)
    keeper.complete(1, 1, carried=True)
    assert keeper.take(1, 2) == (0, 2, 4)
    assert keeper.take(0, 1) == (1, 0, 2)
    # The round closes, and the worker is lost before it ends its turn.
    assert keeper.submit(1, 1, 5.0).values[0].item() == 5.0
    keeper.lose(0)
    keeper.complete(0, 1, carried=True)
    assert [keeper.take(0, number) for number in (2, 3, 4)] == [(1, 2, 4), (2, 0, 2), (2, 2, 4)]


def test_a_worker_that_goes_on_after_a_round_carries_its_later_pieces() -> None:
    keeper = Keeper(quorum=0.5, grace_seconds=0.0)
    assert keeper.take(1, 1) == (0, 0, 2)
    keeper.submit(1, 1, 5.0)
    keeper.complete(1, 1, carried=False)
    assert keeper.take(1, 2) == (0, 2, 4)
    assert keeper.take(0, 1) == (1, 0, 2)
    keeper.lose(0)
    keeper.complete(0, 1, carried=True)
    assert keeper.take(0, 2) == (0, 2, 4)


def test_an_answer_does_not_change_in_later_rounds() -> None:
    keeper = Keeper(quorum=0.5, grace_seconds=0.0)
    for worker in (0, 1):
        keeper.take(worker, 1)
    answer = keeper.submit(0, 1, 1.0)
    keeper.submit(1, 1, 1.0)
    assert answer.values[0].item() == 1.0 and answer.count == 1


def test_who_is_late_is_named_and_a_joined_worker_is_none_of_them() -> None:
    keeper = Keeper(quorum=1.0)
    for worker in (0, 1):
        keeper.take(worker, 1)
    keeper.submit(0, 1, 1.0)
    assert keeper.ask(0, rounds.ListLate()).missing == ((1, 0),)
    assert keeper.submit(1, 1, 1.0) is not None
    assert keeper.submit(2, 1, 1.0, final=True) is None
    for worker in (0, 1):
        keeper.submit(worker, 2, 1.0, final=True)
    assert keeper.keeping.summarize() == {
        "rounds": {"count": 2, "by_workers": {"2": 1, "3": 1}, "late": 0}
    }


def test_momentum_is_read_and_loaded() -> None:
    keeper = Keeper(quorum=1.0)
    value, memory = (torch.tensor([number], dtype=torch.float64) for number in (1.0, 4.0))
    request = rounds.OpenRounds(1.0, 0.0, 0.5, 0.5, (0,), True, (value, memory))
    keeper.ask(0, request)
    assert keeper.ask(0, rounds.ReadOuterState()).memories[0].item() == 4.0
    answer = keeper.submit(0, 1, 2.0, final=True)
    # v = 0.5 * 4 - 2 = 0;  x = 1 - 0.5 * (0.5 * 0 - 2)
    assert answer.values[0].item() == 2.0


def test_a_change_before_rounds_are_open_is_refused() -> None:
    keeping = RoundRpc(SchedulerRpc().scheduler)
    with pytest.raises(Mismatch, match="no worker has opened"):
        keeping.handlers[rounds.ReadOuterState](0, rounds.ReadOuterState())

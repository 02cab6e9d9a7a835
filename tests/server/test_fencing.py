"""What a server says and does after a loss: two of them come to the same steps, and who is lost is not heard any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import DeadlineExceeded, Mismatch
from paceline.server.journal import load_closes, merged
from paceline.server.protocol.message import Index, call
from paceline.server.protocol.parameters import AwaitStep, CloseStep, PullUnit, PushGradient
from paceline.server.protocol.recovery import DiscardPushes, DropSamples, FenceWorkers, LoadShard, ReadClosedSteps, ReadShard
from paceline.server.protocol.samples import CountedGradient
from paceline.server.protocol.service import CheckAlive

OPTIMIZER = Index(0)


def close(step: int, *came: tuple[int, int], rate: float = 0.5) -> CloseStep:
    settings = ((0, {"lr": rate}), (1, {"lr": rate}))
    gradients = tuple(CountedGradient(worker, number, ((worker, 0, 4),)) for worker, number in came)
    workers = tuple(worker for worker, _ in came)
    return CloseStep(OPTIMIZER, step, 0, workers, 1.0, settings, decided=True, keep=True, of=(0, 0), came=gradients)


def push(server: Any, worker: int, value: float) -> None:
    for unit in (0, 1):
        server(worker, PushGradient(Index(unit), 1, 0, b"\x01", True, False, torch.full((16,), value)))


def values(server: Any, worker: int) -> float:
    return float(server(worker, PullUnit(Index(0), 0, copy=True)).values[0])


def test_what_one_has_made_can_be_made_by_another(begun: Any) -> None:
    push(begun, 0, 1.0)
    push(begun, 1, 2.0)
    begun(0, close(1, (0, 1), (1, 1)))
    push(begun, 0, 4.0)
    begun(0, close(2, (0, 2), rate=0.25))
    closes = load_closes(begun(1, ReadClosedSteps(OPTIMIZER, 0)).packed.numpy().tobytes())
    assert closes == [close(1, (0, 1), (1, 1)), close(2, (0, 2), rate=0.25)]
    for each in closes:
        begun(1, each)  # has been made, and is not made twice
    assert values(begun, 1) == 1 - 0.5 * 3 - 0.25 * 4
    journal = merged([begun(0, DiscardPushes()).packed.numpy().tobytes()])
    assert journal.gradients == {(0, 0): 2, (0, 1): 1} and journal.done.rows() == [[0, 0, 4], [1, 0, 4]]


def test_what_was_pushed_in_vain_is_void_and_who_is_lost_is_not_heard(begun: Any) -> None:
    push(begun, 0, 1.0)
    push(begun, 7, 2.0)
    begun.send(7, close(2, (7, 1)))  # is put off
    assert begun(0, FenceWorkers((0, 1))).steps == (0,)
    begun(0, DiscardPushes())
    with pytest.raises(Mismatch, match="counts as lost"):
        begun(7, close(1, (0, 1), (7, 1)))
    with pytest.raises(Mismatch, match="have not pushed"):
        begun(0, close(1, (0, 1)))
    push(begun, 0, 1.0)
    begun(0, close(1, (0, 1)))
    assert values(begun, 0) == 0.5
    begun(7, CheckAlive())
    with pytest.raises(DeadlineExceeded):
        call(begun.caller(0), AwaitStep(OPTIMIZER, 2), 0.2)


def test_a_copy_knows_what_the_first_one_did(begun: Any) -> None:
    push(begun, 0, 1.0)
    begun(0, close(1, (0, 1)))
    begun(0, DropSamples(0, ((5, 0, 2),)))
    begun(0, LoadShard(begun(0, ReadShard()).chunks))
    journal = merged([begun(0, DiscardPushes()).packed.numpy().tobytes()])
    assert journal.gradients == {(0, 0): 1} and list(journal.dropped) == [(0, 5, 0, 2)] and values(begun, 0) == 0.5

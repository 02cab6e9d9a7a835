"""Where a run stands after a loss, by what the living and the servers say; and a keeper that goes on from there."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.journal import StepJournal
from paceline.server.protocol.message import Index
from paceline.server.protocol.parameters import CloseStep
from paceline.server.protocol.samples import CountedGradient
from paceline.server.reconcile import NONE, RecoveryState, WorkerReport, stand
from paceline.server.scheduler import SampleScheduler
from paceline.server.spans import SampleSpan
from paceline.server.stragglers import StepDecision

PART = (3, 8)


def closed(step: int, came: list[Any], part: tuple[int, int] = PART) -> CloseStep:
    worker, number, pieces = came
    gradient = CountedGradient(worker, number, tuple(map(tuple, pieces)))
    return CloseStep(Index(0), step, 0, (worker,), 1.0, (), of=part, came=(gradient,))


def journal(*came: list[Any], part: tuple[int, int] = PART) -> StepJournal:
    made = StepJournal()
    for step, each in enumerate(came, 1):
        made.made(closed(step, each, part))
    return made


def inside(clock: int = 0, taken: list[list[int]] | None = None, **more: object) -> WorkerReport:
    return WorkerReport(PART, open=True, clock=clock, taken=taken or [], **more)  # type: ignore[arg-type]


def test_what_is_in_no_step_nor_with_the_living_is_dealt_again() -> None:
    made = journal([0, 1, [[8, 0, 2]]], [7, 1, [[9, 0, 4]]])  # of which 7 is lost
    made.drop(3, [[8, 2, 3]])
    made.drop(2, [[8, 3, 4]])  # in another epoch
    told = {0: inside(1, [[8, 3, 4]]), 2: inside(4, carried=[[10, 0, 1]])}
    found = stand(told, [4, 4, 4], made, [2], gathers=True)
    assert found.todo == [(10, 1, 4)] and found.under_way == {0: [(8, 3, 4)], 2: []}
    assert found.clocks == {0: 1, 2: 4} and found.gradients == [{0: 1, 2: 0}] and found.steps == [2]
    assert found.dropped == [(3, (8, 2, 3)), (2, (8, 3, 4))]


def test_who_has_left_takes_no_more_and_who_comes_stands_with_the_slowest() -> None:
    told = {0: inside(6, [[8, 0, 1]]), 1: inside(2, left=True), 2: WorkerReport((3, 0), open=True, clock=1), 3: WorkerReport(NONE)}
    found = stand(told, [2], journal(part=(3, 0)), [0], gathers=True)
    assert found.active == [0, 2, 3] and found.clocks == {0: 6, 1: 2, 2: 6, 3: 6} and found.todo == [(8, 1, 2)]


def test_who_has_left_may_ask_again_and_end_its_turn() -> None:
    """It is told twice that there is nothing more, the second time perhaps after a loss; or it broke its loop off in a turn."""
    made = SampleScheduler()
    made.resume(stand({0: inside(1), 1: inside(2, left=True), 2: inside(3, [[8, 0, 1]], left=True)}, [4], journal(), [0], gathers=True))
    assert made.take(1, 4) is False and made.take(2, 4) is False and not made.takes(1) and not made.takes(2)
    made.tick(2, 4)
    assert made.clocks == {0: 1, 1: 2, 2: 4} and made.may(2, 0) and made.slowest == 1, "nobody waits for them"
    assert made.take(0, 4) == (8, 1, 4)


def test_samples_that_nobody_takes_any_more_are_counted() -> None:
    told = {0: inside(left=True), 1: WorkerReport(PART, open=False)}
    assert stand(told, [4, 4], journal([0, 1, [[8, 0, 3]]]), [1], gathers=True).nobodys == 5
    assert stand(told, [4, 4], journal([0, 1, [[8, 0, 4], [9, 0, 4]]]), [1], gathers=True).nobodys == 0
    assert stand({0: inside(stopped=True)}, [4, 4], journal(), [1], gathers=True).nobodys == 0


def test_who_paused_waits_for_the_others() -> None:
    told = {0: WorkerReport(PART, paused=True, clock=3), 1: inside(2, [[8, 0, 1]])}
    made = SampleScheduler()
    made.resume(stand(told, [4], journal(), [0], gathers=True))
    assert made.take(1, 4) is False and made.busy(1), "its own turn comes first"
    made.tick(1, 3)
    assert made.take(1, 4) is False and made.paused and made.takes(1)
    made.begin(*PART, [4], [0, 1, 5], times=1)
    assert made.take(5, 4) == (8, 1, 4) and made.clocks == {0: 3, 1: 3, 5: 3}
    # One has gone on already, the other is about to: what is there counts.
    made.resume(
        stand({0: WorkerReport(PART, paused=True), 1: WorkerReport(PART, 1, True, taken=[[8, 1, 3]])}, [4], journal(), [0], gathers=True)
    )
    assert not made.paused and made.take(0, 9) == (8, 0, 1) and made.take(0, 9) == (8, 3, 4)


def test_it_travels() -> None:
    told = {0: inside(1, [[8, 3, 4]]), 2: inside(4)}
    found = stand(told, [4, 4], journal([2, 5, [[8, 0, 1]]]), [1], gathers=False)
    assert RecoveryState.load(found.dump()) == found
    for report in told.values():
        assert WorkerReport.load(json.loads(json.dumps(asdict(report)))) == report


def test_a_keeper_of_backup_workers_goes_on() -> None:
    made = SampleScheduler()
    standing = stand({0: inside(2), 1: inside(2)}, [8], journal([0, 4, []], [1, 5, []]), [5], gathers=False)
    made.resume(standing)
    assert made.arrive(0, 0, 5, {}, 1) is False, "the step has been made without it"
    found = made.arrive(1, 0, 6, {}, 1)
    assert isinstance(found, StepDecision) and found.workers == [1] and made.arrive(0, 0, 6, {}, 1) is False


def test_a_keeper_that_gathers_goes_on_with_the_numbers_of_gradients() -> None:
    made = SampleScheduler()
    made.begin(*PART, [8], [0, 1, 2])
    for worker in (0, 1, 2):
        made.take(worker, 1)
        assert made.gather(worker, 0, 1, worker, bound=2, now=0.0) is None or worker == 2
    assert made.gather(1, 0, 2, "next", bound=2, now=0.1) is None
    made.resume(stand({0: inside(1), 1: inside(1)}, [8], journal([0, 1, []], [1, 1, []]), [1], gathers=True))
    assert made.gather(1, 0, 2, "again", bound=2, now=0.2) is None, "it comes again, with the same gradient"
    step = made.gather(0, 0, 2, "mine", bound=2, now=0.3)
    assert step is not None and step.number == 2 and step.came == {0: "mine", 1: "again"}, "the one that is lost isn't waited for"  # type: ignore[union-attr]


def test_what_was_dropped_is_told_by_the_next_keeper_too() -> None:
    made, known = journal([0, 1, []]), SampleScheduler()
    made.drop(1, [[8, 2, 3]])
    standing = stand({0: inside(2)}, [8], made, [1], gathers=False)
    for _ in range(2):
        known.resume(standing)
    assert known.facts()["dropped"] == {"gradients": 1, "samples": 1, "pieces": [[1, 8, 2, 3]]}


@given(seed=st.integers(0, 10**6))
def test_however_often_somebody_is_lost_each_sample_is_trained_once(seed: int) -> None:
    chance, sizes = random.Random(seed), [5, 3, 7, 1, 6]
    scheduler, servers = SampleScheduler(), StepJournal()
    scheduler.begin(*PART, sizes, range(4))
    living = {worker: WorkerReport(PART, open=True) for worker in range(4)}
    trained: list[tuple[int, int]] = []
    gradients = dict.fromkeys(range(4), 0)
    while any(not report.left for report in living.values()):
        worker, act = chance.choice([*living]), chance.random()
        report, others = living[worker], [report for other, report in living.items() if other != worker]
        if act < 0.06 and any(not other.left for other in others):
            del living[worker]
            scheduler = scheduler if chance.random() < 0.5 else SampleScheduler()
            scheduler.resume(stand(living, sizes, servers, [sum(gradients.values())], gathers=False))
        elif act < 0.5 and (found := scheduler.take(worker, chance.randint(1, 4))) is not None:
            if isinstance(found, SampleSpan):
                report.taken.append(list(found))
            assert not report.left or not scheduler.takes(worker), "who has left is told so again"
            report.left = not scheduler.takes(worker)
        elif report.taken:
            gradients[worker] += 1
            pieces = [report.taken[0]]
            trained += [(batch, sample) for batch, start, stop in pieces for sample in range(start, stop)]
            servers.made(closed(sum(gradients.values()), [worker, gradients[worker], pieces]))
            report.taken.pop(0)
            report.clock += 1
            scheduler.tick(worker, report.clock)
    assert sorted(trained) == [(8 + batch, sample) for batch, size in enumerate(sizes) for sample in range(size)]

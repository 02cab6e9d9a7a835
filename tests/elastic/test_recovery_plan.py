"""The plan of the living, on random courses of calls in which workers die at any moment."""

from __future__ import annotations

import random

import pytest

from paceline.elastic.recovery_plan import WorkerProgress, make_recovery_plan
from paceline.errors import Mismatch, WorkerLost
from paceline.replicas.majority import find_majority, pick_nearest_source

CALLS = 8


class Worker:
    """Makes calls 1, 2, ... one after the other; `inside` of one it waits for all others to
    begin it.
    """

    def __init__(self) -> None:
        self.done, self.inside, self.results = 0, False, list[int]()


def course(seed: int, size: int, deaths: int) -> tuple[dict[int, Worker], int]:
    """Workers at the moment when nobody who lives can go on; a call gives its number, and ends
    once all have begun it.
    """
    chance = random.Random(seed)
    workers = {number: Worker() for number in range(size)}
    dead: set[int] = set()
    moments = sorted(chance.randrange(1, size * CALLS) for _ in range(deaths))
    for step_state in range(10_000):
        if moments and step_state >= moments[0]:
            moments.pop(0)
            dead.add(chance.choice([number for number in workers if number not in dead]))
        movable = []
        for number, worker in workers.items():
            begun = all(
                other.done >= worker.done + 1 or (other.done == worker.done and other.inside)
                for other in workers.values()
            )
            if number not in dead and worker.done < CALLS and (not worker.inside or begun):
                # once somebody has died, one that could go on may be cut off just as well
                movable += (
                    [number] if not (dead and worker.inside and chance.random() < 0.3) else []
                )
        if not movable and (dead or all(worker.done == CALLS for worker in workers.values())):
            break
        if movable:
            worker = workers[chance.choice(movable)]
            if worker.inside:
                worker.done, worker.inside = worker.done + 1, False
                worker.results.append(worker.done)
            else:
                worker.inside = True
    return {number: worker for number, worker in workers.items() if number not in dead}, size


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_all_who_live_come_to_the_same_call_with_the_same_results(deaths: int) -> None:
    behind = 0
    for seed in range(1500):
        living, size = course(seed, 2 + deaths + seed % 3, deaths)
        # numbers say nothing of the order
        names = {worker: 1000 - worker for worker in range(size)}
        plan = make_recovery_plan(
            {
                names[number]: WorkerProgress(number, worker.done)
                for number, worker in living.items()
            }
        )
        assert plan.members == tuple(
            names[number] for number in sorted(living)
        ) and plan.origins == tuple(sorted(living))
        teller = next(
            worker for number, worker in living.items() if names[number] == plan.result_sender
        )
        for number, worker in living.items():
            if names[number] in plan.behind:
                worker.done += 1
                worker.results.append(teller.results[-1])
                behind += 1
            assert worker.done == plan.calls and worker.results == list(range(1, plan.calls + 1))
    assert behind > 50  # or this shows nothing


def test_the_turn_that_is_cut_is_that_of_who_is_ahead() -> None:
    assert (
        make_recovery_plan({5: WorkerProgress(0, 7, 3), 6: WorkerProgress(1, 8, 4)}).failed_turn
        == 4
    )
    assert (
        make_recovery_plan({5: WorkerProgress(0, 8, 0), 6: WorkerProgress(1, 7, 3)}).failed_turn
        == 0
    )  # it was the end of the turn that one of them completed


def test_who_is_behind_answers_loaders_as_those_ahead_did() -> None:
    plan = make_recovery_plan(
        {5: WorkerProgress(0, 7, 0, 2, False), 6: WorkerProgress(1, 8, 0, 6, False)}
    )
    assert plan.behind == {5} and plan.repeated_answers == 6 and not plan.is_admitting


def test_all_let_others_in_where_one_that_is_ahead_does() -> None:
    """Though nobody may be left to be let in: then all find so."""
    assert make_recovery_plan(
        {5: WorkerProgress(0, 7, 0, 2, False), 6: WorkerProgress(1, 8, 0, 0, True)}
    ).is_admitting
    assert not make_recovery_plan(
        {5: WorkerProgress(0, 7, 0, 2, True), 6: WorkerProgress(1, 8, 0, 0, False)}
    ).is_admitting, "who is ahead has done so"
    assert make_recovery_plan({5: WorkerProgress(0, 8), 9: WorkerProgress(-1)}).is_admitting


def test_who_has_just_come_is_let_in_later() -> None:
    plan = make_recovery_plan(
        {9: WorkerProgress(-1), 3: WorkerProgress(1, 5), 4: WorkerProgress(0, 5)}
    )
    assert (
        plan.members == (4, 3) and plan.new_workers == (9,) and plan.calls == 5 and not plan.behind
    )


def test_when_the_state_is_lost() -> None:
    with pytest.raises(WorkerLost, match="resume it from a checkpoint"):
        make_recovery_plan({9: WorkerProgress(-1)})


def test_workers_that_had_come_apart_are_told() -> None:
    with pytest.raises(Mismatch, match="5 by rank 0, 7 by rank 2"):
        make_recovery_plan({1: WorkerProgress(0, 5), 2: WorkerProgress(2, 7)})


def test_a_reach_is_its_text() -> None:
    assert WorkerProgress(*WorkerProgress(2, 5, 3, 4, True).to_list()) == WorkerProgress(
        2, 5, 3, 4, True
    )


def test_states_come_from_near_and_not_all_from_one() -> None:
    hosts = [0, 0, 1, 1, 0, 1, 2, 2]
    assert [pick_nearest_source(rank, range(4), hosts) for rank in (4, 5)] == [0, 3]
    assert {pick_nearest_source(rank, range(4), hosts) for rank in (6, 7)} <= {0, 1, 2, 3}
    assert pick_nearest_source(6, range(4), hosts) != pick_nearest_source(7, range(4), hosts)


def test_the_majority_tells_who_is_wrong() -> None:
    assert find_majority({0: "b", 1: "a", 2: "a"}) == ("a", [0])
    assert find_majority({0: "b", 1: "a"}) == ("b", [1])

"""The plan of the living, checked for every way in which workers can stand when one of them is lost."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from paceline.errors import WorkerLost
from paceline.fault.recover import Plan, Reach, decide, majority

BODIES = ("xu", "xuu", "xuxu", "cxu", "xcu", "xuc", "xuxuc", "cxucxuc", "xxu")  # x: exchange of gradients, u: a step, c: a call of all
TURNS = 2


@dataclass
class Worker:
    """A survivor: where it stands in `body`, repeated; what its state has gone through."""

    body: str
    at: int = 0
    state: list[int] = field(default_factory=list)  # the places of the steps that its parameters have gone through
    copies: dict[int, list[int]] = field(default_factory=dict)  # of the state when a turn began
    failed: bool = False

    @property
    def turn(self) -> int:
        return self.at // len(self.body)

    def go(self, until: int) -> None:
        """Through the places before `until`: all of their exchanges were completed."""
        while self.at < until:
            if self.at % len(self.body) == 0:
                self.copies[self.turn] = list(self.state)
            if self.body[self.at % len(self.body)] == "u" and not self.failed:
                self.state.append(self.at)
            self.at += 1

    def lose(self) -> None:
        """Go on to where the loss is found out, and from there to where it is seen to: a call, or the end of the turn."""
        while self.body[self.at % len(self.body)] == "u":
            self.go(self.at + 1)
        if self.at % len(self.body) == 0:
            self.copies[self.turn] = list(self.state)
        self.failed = self.body[self.at % len(self.body)] == "x"

    @property
    def reach(self) -> Reach:
        start = self.turn * len(self.body)
        done = self.body[: self.at - start]
        passes, updates = done.count("x"), done.count("u")
        whole = (passes, updates) == (self.body.count("x"), self.body.count("u"))
        calls = sum(self.body[place % len(self.body)] == "c" for place in range(self.at))
        return Reach(self.turn, passes, updates, self.failed, whole, undo=updates > 0, calls=calls)


def standing(body: str, count: int) -> list[list[Worker]]:
    """Every way in which `count` survivors can stand: who has completed an exchange or a call shows that all have come to it."""
    found = []
    places = range(TURNS * len(body))
    for spots in itertools.product(places, repeat=count):
        meetings = [place for place in range(max(spots)) if body[place % len(body)] in "xc"]
        if all(min(spots) >= place for place in meetings):
            workers = [Worker(body) for _ in spots]
            for worker, spot in zip(workers, spots, strict=True):
                worker.go(spot)
                worker.lose()
            found.append(workers)
    return found


def carry_out(plan: Plan, workers: list[Worker]) -> None:
    """What the session does with a plan, as far as the state goes."""
    before = [list(worker.state) for worker in workers]
    for rank in plan.undone:
        before[rank] = workers[rank].copies[workers[rank].turn]
    for rank, worker in enumerate(workers):
        source = plan.healed.get(rank, rank)
        worker.state = list(before[source])
        if rank in plan.healed:  # the rest of its body does nothing
            worker.at = plan.steps * len(worker.body)
        elif rank in plan.again:
            worker.at = worker.turn * len(worker.body)
        else:
            worker.go((worker.turn + 1) * len(worker.body))
        worker.failed = False


@pytest.mark.parametrize("body", BODIES)
def test_every_step_counts_once_whoever_is_lost(body: str) -> None:
    kinds = set()
    for count in (1, 2, 3):
        for workers in standing(body, count):
            plan = decide(dict(enumerate(worker.reach for worker in workers)), dict.fromkeys(range(count), 0))
            kinds.add((bool(plan.again), bool(plan.undone), bool(plan.healed), bool(plan.answers)))
            carry_out(plan, workers)
            assert all(worker.turn == plan.steps and worker.at % len(body) == 0 for worker in workers)
            steps = [place for place in range(plan.steps * len(body)) if body[place % len(body)] == "u"]
            assert all(worker.state == steps for worker in workers), (plan, workers)
    assert len(kinds) > 1


def test_a_new_worker_takes_the_state_over_from_one_on_its_host() -> None:
    reaches = {0: Reach(5), 1: Reach(5), 2: Reach(0, fresh=True), 3: Reach(5)}
    plan = decide(reaches, {0: 0, 1: 0, 2: 1, 3: 1})
    assert plan.healed == {2: 3} and plan.again == {0, 1, 3} and plan.steps == 5
    assert set(decide({rank: Reach(3, fresh=rank > 2) for rank in range(9)}, dict.fromkeys(range(9), 0)).healed.values()) == {0, 1, 2}


def test_when_the_state_is_lost() -> None:
    with pytest.raises(WorkerLost, match="resume it from a checkpoint"):
        decide({0: Reach(0, fresh=True)}, {0: 0})
    with pytest.raises(WorkerLost, match="after step 7, and nobody can go back"):
        decide({0: Reach(7, passes=1, updates=1, failed=True), 1: Reach(7, passes=1, updates=1, failed=True)}, {0: 0, 1: 0})


def test_who_can_not_go_back_takes_it_from_who_can() -> None:
    reaches = {0: Reach(7, 1, 1, failed=True), 1: Reach(7, 1, 1, failed=True, undo=True), 2: Reach(7, 1, 0, failed=True)}
    plan = decide(reaches, dict.fromkeys(range(3), 0))
    assert plan.again == {0, 1, 2} and plan.undone == {1} and plan.healed[0] in (1, 2)


def test_a_reach_is_its_text() -> None:
    reach = Reach(4, 1, 2, True, False, True, 9, False)
    assert Reach.load(reach.dump()) == reach


def test_majority() -> None:
    assert majority({0: "a", 1: "b", 2: "b"}) == ("b", [0])
    assert majority({0: "b", 1: "a"}) == ("b", [1])
    assert majority({3: "x"}) == ("x", [])

"""The keeper alone: every sample to one worker, clocks within their bound, and who makes a step."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import Mismatch
from paceline.servers.process.late_gradients import OpenStep, StepDecision, StepMade
from paceline.servers.process.sample_spans import SampleSpan
from paceline.servers.process.scheduler import MAX_LISTED_PIECES, SampleScheduler


def scheduler(*sizes: int, workers: int = 2, epoch: int = 0, first: int = 0) -> SampleScheduler:
    made = SampleScheduler()
    made.begin_dealing(epoch, first, sizes, range(workers))
    return made


class TestSamples:
    @given(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
        most=st.lists(st.integers(1, 5), min_size=1, max_size=4),
        data=st.data(),
    )
    def test_each_goes_to_one_worker_in_order(self, sizes, most, data):
        made, dealt, left = scheduler(*sizes, workers=len(most), first=3), [], set(range(len(most)))
        clocks = [0] * len(most)
        while left:
            worker = data.draw(st.sampled_from(sorted(left)))
            found = made.deal_piece(worker, most[worker])
            if isinstance(found, SampleSpan):
                assert found.stop - found.start <= most[worker]
                dealt += [(found.batch, sample) for sample in range(found.start, found.stop)]
                clocks[worker] += 1
                made.complete_turn(worker, clocks[worker])
            elif found is False:
                left.discard(worker)
        assert dealt == [
            (3 + batch, sample) for batch, size in enumerate(sizes) for sample in range(size)
        ]

    def test_what_is_dropped_for_good_is_told(self):
        made = scheduler(4, 4, epoch=7, first=2)
        made.deal_piece(0, 2)
        made.deal_piece(0, 2)  # read ahead
        made.complete_turn(0, 1, dropped=True)
        made.complete_turn(0, 2)
        assert made.summarize_schedule()["dropped"] == {
            "gradients": 1,
            "samples": 2,
            "pieces": [[7, 2, 0, 2]],
        }

    def test_not_more_is_told_than_can_be_read(self):
        made = scheduler(*[1] * (MAX_LISTED_PIECES + 5), workers=1)
        for clock in range(MAX_LISTED_PIECES + 5):
            made.deal_piece(0, 1)
            made.complete_turn(0, clock + 1, dropped=True)
        assert (
            made.tally.dropped_gradients == MAX_LISTED_PIECES + 5
            and len(made.tally.dropped_pieces) == MAX_LISTED_PIECES
        )

    def test_no_more_after_a_stop(self):
        made = scheduler(4, 4)
        made.deal_piece(0, 1)
        made.stop_dealing()
        assert made.deal_piece(1, 1) is False
        made.complete_turn(0, 1)
        assert made.deal_piece(0, 1) is False
        made.begin_dealing(1, 0, [4], range(2))
        assert made.deal_piece(1, 1) == (0, 0, 1), "the next epoch begins as ever"

    def test_the_next_part_goes_on_where_all_stand(self):
        made = scheduler(2)
        made.begin_dealing(0, 0, [2], range(2))  # as the second worker says it
        with pytest.raises(Mismatch, match="deal different batches"):
            made.begin_dealing(0, 0, [3], range(2))
        made.deal_piece(0, 2)
        with pytest.raises(Mismatch, match=r"workers \[0\] are in the middle of another"):
            made.begin_dealing(0, 1, [2], range(2))
        made.complete_turn(0, 1)
        assert made.deal_piece(0, 1) is made.deal_piece(1, 1) is False
        made.begin_dealing(0, 1, [2], range(2))
        assert made.clocks == {0: 1, 1: 1} and made.deal_piece(1, 5) == (1, 0, 2)

    def test_a_piece_that_is_asked_for_again_is_given_again(self):
        made = scheduler(4)
        assert made.deal_piece(0, 1, 1) == made.deal_piece(0, 2, 1) == (0, 0, 1)
        assert made.deal_piece(0, 1, 2) == (0, 1, 2) and made.deal_piece(1, 4, 1) == (0, 2, 4)

    @pytest.mark.parametrize("sizes", [[], [2, 0], [-1]])
    def test_nothing_to_deal(self, sizes):
        with pytest.raises(Mismatch, match="nothing to deal"):
            SampleScheduler().begin_dealing(0, 0, sizes, [0])

    def test_who_may_not_take(self):
        for worker, most in ((5, 1), (0, 0)):
            with pytest.raises(Mismatch, match="no turns to take, or asks for"):
                scheduler(3).deal_piece(worker, most)


class TestClocks:
    def test_a_worker_waits_for_the_slowest_that_trains(self):
        made = scheduler(*[1] * 20, workers=3)
        for _ in range(20):
            made.deal_piece(0, 1)
        for clock in range(1, 4):
            assert made.may_begin_turn(0, 2)
            made.complete_turn(0, clock)
        assert (
            not made.may_begin_turn(0, 2)
            and made.may_begin_turn(0, 3)
            and made.list_slowest_workers(0) == [(1, 0), (2, 0)]
        )
        made.leave_epoch(1)
        assert not made.may_begin_turn(0, 2) and made.list_slowest_workers(0) == [(2, 0)]
        made.leave_epoch(2)
        assert made.may_begin_turn(0, 2) and made.slowest_clock == 3

    @pytest.mark.parametrize(
        ("worker", "clock", "why"),
        [(0, 2, "can't come to turn 2"), (1, 1, "hasn't begun"), (9, 1, "hasn't begun")],
    )
    def test_a_turn_that_can_not_be(self, worker, clock, why):
        made = scheduler(4)
        made.deal_piece(0, 1)
        with pytest.raises(Mismatch, match=why):
            made.complete_turn(worker, clock)

    def test_how_far_ahead_workers_were(self):
        made = scheduler(*[1] * 4)
        for clock in (1, 2):
            made.deal_piece(0, 1)
            made.complete_turn(0, clock)
            made.record_permission(0)
        assert made.summarize_schedule()["staleness"] == {"1": 1, "2": 1}


class TestWhoMakesAStep:
    def test_the_first_who_come(self):
        made = scheduler(*[1] * 9, workers=4)
        for worker in range(4):
            made.deal_piece(worker, 1)
        assert made.record_arrival(3, 0, 1, "c", 2) is None
        assert made.list_absent_workers(0, 1) == [(0, 0), (1, 0), (2, 0)]
        found = made.record_arrival(1, 0, 1, "a", 2)
        assert (
            isinstance(found, StepDecision)
            and found.workers == [1, 3]
            and found.contributions == {3: "c", 1: "a"}
        )
        assert made.record_arrival(3, 0, 1, "c", 2) is found, "who waited for it is told"
        assert made.record_arrival(0, 0, 1, "b", 2) is False and made.get_last_decided(0) == 1
        with pytest.raises(Mismatch, match="step 3 of optimizer 0 can't come after step 1"):
            made.record_arrival(0, 0, 3, "b", 2)

    def test_those_who_wait_for_samples_or_have_left_are_not_waited_for(self):
        made = scheduler(1, 1, workers=3)
        assert made.deal_piece(0, 1) and made.deal_piece(1, 1) and made.deal_piece(2, 1) is None
        assert made.record_arrival(0, 0, 1, "", 1) is None
        assert isinstance(made.record_arrival(1, 0, 1, "", 1), StepDecision)
        made = scheduler(1, 1, workers=3)
        made.deal_piece(0, 1)
        made.leave_epoch(1)
        assert made.record_arrival(0, 0, 1, "", 0) is None
        made.leave_epoch(2)
        assert isinstance(made.record_arrival(0, 0, 1, "", 0), StepDecision)

    def test_who_is_very_late(self):
        made = scheduler(*[1] * 99, workers=2)
        for step in range(1, 40):
            assert isinstance(made.record_arrival(0, 0, step, "", 1), StepDecision)
        assert made.record_arrival(1, 0, 1, "", 1) is False and made.get_last_decided(0) == 39
        assert len(made._first_arrivals[0]._recent_decisions) <= 8, "old ones are forgotten"

    @given(st.integers(0, 10_000))
    def test_any_order_gives_each_step_all_but_so_many(self, seed):
        chance, made = random.Random(seed), scheduler(*[1] * 200, workers=4)
        steps = dict.fromkeys(range(4), 0)  # the last one that each worker knows
        made_by: dict[int, list[int]] = {}
        waiting: set[int] = set()
        for _ in range(60):
            worker = chance.randrange(4)
            found = made.record_arrival(worker, 0, steps[worker] + 1, "", 1)
            if found is None:
                waiting.add(worker)
            elif found is False:
                steps[worker] = made.get_last_decided(0)
            else:
                steps[worker] += 1
                assert (
                    made_by.setdefault(steps[worker], found.workers) == found.workers
                    and len(found.workers) == 3
                )
                assert worker in found.workers
                waiting.discard(worker)
        assert made.get_last_decided(0) >= max(steps.values())


class TestWhoIsInAStepWithinABound:
    def begun(self, workers: int = 3) -> SampleScheduler:
        """Turns have taken 1 s so far, four of each worker, and each of them begins one at 0."""
        made = scheduler(*[1] * 99, workers=workers)
        for worker in range(workers):
            for _ in range(20):
                made.deal_piece(worker, 1)
            made.begin_turn(worker, 0.0)
        for turn in range(1, 5):
            self.turn(made, *range(workers), number=turn, now=1.0)
            for worker in range(workers):
                made.begin_turn(worker, 0.0)
        return made

    def turn(
        self, made: SampleScheduler, *workers: int, number: int, now: float, bound: float = 2
    ) -> list[int]:
        """These come to a step, one by one, then all of them ask again; who is told that it is
        in one begins its next turn, if it may.
        """
        for worker in workers:
            made.record_gradient(worker, 0, number, worker, bound=bound, now=now)
        told = [
            worker
            for worker in workers
            if made.record_gradient(worker, 0, number, worker, bound=bound, now=now) is not None
        ]
        for worker in told:
            made.complete_turn(worker, made.clocks[worker] + 1)
        for worker in told:
            if made.may_begin_turn(worker, bound):
                made.record_permission(worker, now)
        return told

    def test_who_is_late_is_in_the_next_one(self):
        made = self.begun()
        assert self.turn(made, 0, 1, number=5, now=1.0) == [] and 1.0 < made.next_check < 1.5
        assert made.list_absent_workers(0, 0) == [(2, 4)]
        assert (
            self.turn(made, 0, 1, number=5, now=made.next_check) == [0, 1]
            and made.next_check == math.inf
        )
        assert (
            self.turn(made, 0, number=6, now=2.1) == []
            and self.turn(made, 2, number=5, now=2.1) == []
        )
        assert self.turn(made, 1, number=6, now=2.1) == [1]
        step = made.record_gradient(2, 0, 5, 2, bound=2, now=2.1)
        assert step is not None and list(step.contributions) == [0, 1, 2]
        facts = made.summarize_schedule()
        assert facts["steps_by_workers"] == {"2": 1, "3": 5} and facts["steps_late"] == {
            "0": 16,
            "1": 1,
        }

    def test_a_step_that_nobody_could_go_on_from_waits_for_the_slowest(self):
        made = self.begun()
        assert self.turn(made, 0, 1, number=5, now=1.0) == [] and self.turn(
            made, 0, 1, number=5, now=1.2
        ) == [0, 1]
        assert self.turn(made, 0, 1, number=6, now=2.2) == [0, 1], (
            "who is late is not waited for again"
        )
        assert self.turn(made, 0, 1, number=7, now=3.2) == [] and made.next_check == math.inf
        assert made.record_gradient(2, 0, 5, 2, bound=2, now=4.0) is not None
        assert all(
            made.record_gradient(worker, 0, 7, worker, bound=2, now=4.0) is not None
            for worker in (0, 1)
        )

    def test_one_that_may_go_on_is_enough(self):
        """Who has come with it is held at the bound, and not waited for there."""
        made = self.begun()
        assert self.turn(made, 0, number=5, now=2.0) == [] and self.turn(
            made, 0, number=5, now=2.3
        ) == [0]
        assert self.turn(made, 0, number=6, now=3.3) == [0]
        assert self.turn(made, 0, number=7, now=4.3) == [], "nobody could go on from it"
        assert self.turn(made, 1, number=5, now=4.4) == [1] and self.turn(
            made, 0, number=7, now=4.4
        ) == [0]
        assert made.clocks == {0: 7, 1: 5, 2: 4} and not made.may_begin_turn(0, 2)
        assert self.turn(made, 1, number=6, now=5.4) == [1] and made.clocks == {0: 7, 1: 6, 2: 4}
        assert self.turn(made, 1, number=7, now=6.4) == [] and self.turn(
            made, 2, number=5, now=6.5
        ) == [2]
        assert (
            self.turn(made, 1, number=7, now=6.5) == [1]
            and made.may_begin_turn(0, 2)
            and made.may_begin_turn(1, 2)
        )

    def test_those_who_have_left_or_wait_at_another_optimizer_are_not_waited_for(self):
        made = self.begun()
        assert made.record_gradient(0, 0, 5, 0, bound=2, now=1.0) is None
        made.leave_epoch(1)
        assert made.record_gradient(2, 1, 1, 2, bound=2, now=1.0) is not None, (
            "the first waits at the other one"
        )
        assert made.record_gradient(0, 0, 5, 0, bound=2, now=1.0) is None, (
            "the third is under way again"
        )
        made.leave_epoch(2)
        assert made.record_gradient(0, 0, 5, 0, bound=2, now=1.0) is not None

    def test_one_alone(self):
        assert all(
            SampleScheduler().record_gradient(0, 0, 1, "", bound=1, now=now) is not None
            for now in (0.0, 1.0)
        )

    def test_who_is_late_goes_on_and_is_in_the_open_step(self):
        made = self.begun()
        assert self.turn(made, 0, 1, number=5, now=1.0) == [] and self.turn(
            made, 0, 1, number=5, now=1.2
        ) == [0, 1]
        late = {"bound": 2, "part": True}
        assert (
            made.record_gradient(2, 0, 5, 2, now=1.5, **late) == OpenStep(5)
            and made.record_gradient(2, 0, 5, 2, bound=2, now=1.5) is None
        ), "it is open"
        made.complete_turn(2, 5)
        assert made.slowest_clock == 4, "nobody has its gradient yet"
        made.record_permission(2, 1.5)
        assert self.turn(made, 0, 1, number=6, now=2.2) == [0, 1] and made.slowest_clock == 5, (
            "who goes on isn't waited for"
        )
        step = made.record_gradient(2, 0, 5, 2, bound=2, now=2.5)
        assert (
            step is not None
            and list(step.contributions) == [0, 1, 2]
            and step.waiting_workers == {0, 1, 2}
        )
        assert made.record_gradient(2, 0, 6, 2, now=2.5, **late) == OpenStep(6), (
            "it stays out of phase"
        )
        made.complete_turn(2, 6)
        made.record_permission(2, 2.5)
        assert made.record_gradient(0, 0, 7, 0, now=3.2, **late) is None, (
            "who is on time waits for the others"
        )
        step = made.record_gradient(1, 0, 7, 1, now=3.2, **late)
        assert (
            step.number == 7
            and step.waiting_workers == {0, 1}
            and list(step.contributions) == [0, 1, 2]
        ), "the two make it, and have it taken"
        assert made.summarize_schedule()["steps_late"] == {"0": 18, "1": 2}

    def test_who_is_late_waits_where_others_are_about_to_come_or_nobody_would(self):
        made = self.begun()
        assert self.turn(made, 0, 1, number=5, now=1.0) == [] and self.turn(
            made, 0, 1, number=5, now=1.2
        ) == [0, 1]
        late = {"bound": 2, "part": True}
        assert made.record_gradient(2, 0, 5, 2, now=1.2 + 0.8, **late) is None, (
            "it is in phase again"
        )
        made = self.begun()
        assert self.turn(made, 0, 1, number=5, now=1.0) == [] and self.turn(
            made, 0, 1, number=5, now=1.2
        ) == [0, 1]
        made.leave_epoch(0)
        made.leave_epoch(1)
        assert made.record_gradient(2, 0, 5, 2, now=1.3, **late).waiting_workers == {2}

    @given(seed=st.integers(0, 10_000), bound=st.integers(1, 4))
    def test_any_times_keep_the_bound_and_end(self, seed, bound):
        """Whatever turns take: each gradient is in one step, nobody begins a turn too far ahead
        of what is in steps, and all is trained.
        """
        chance, workers, turns = random.Random(seed), 3, 15
        made, now, ends = (
            scheduler(*[1] * turns * workers, workers=workers),
            0.0,
            dict[int, float](),
        )
        number, in_steps = dict.fromkeys(range(workers), 0), dict.fromkeys(range(workers), 0)
        modes = dict.fromkeys(range(workers), "take")
        # who has gone on, and has to ask what became of its gradient before it comes with the next
        # one
        behind = set[int]()

        def gathers(worker: int, part: bool) -> StepMade | OpenStep | None:
            found = made.record_gradient(
                worker, 0, number[worker], number[worker], bound=bound, now=now, part=part
            )
            if isinstance(found, StepMade):
                assert (
                    found.waiting_workers <= found.contributions.keys()
                    and found.contributions[worker] == number[worker]
                )
                in_steps.update(
                    {
                        other: max(told, in_steps[other])
                        for other, told in found.contributions.items()
                    }
                )
            return found

        def goes_on(worker: int) -> str:
            """What it does next."""
            mode = modes[worker]
            if mode == "take" and (found := made.deal_piece(worker, 1)) is not None:
                assert (
                    not found
                    or made.clocks[worker]
                    - min(in_steps[other] for other in made._active_workers - made._parked_workers)
                    <= bound
                )
                made.begin_turn(worker, now)
                ends[worker] = now + chance.choice([0.01, 1.0, 1.0, 6.0]) * (
                    1 + 0.1 * chance.random()
                )
                return "turn" if found else "last" if worker in behind else "rest"
            if mode == "turn" and ends[worker] <= now:
                return "join" if worker in behind else "come"
            if mode in {"join", "last"} and gathers(worker, False):
                behind.remove(worker)
                return "come" if mode == "join" else "rest"
            if mode == "come":
                number[worker] += 1
                return "gather"
            if mode == "gather" and (told := gathers(worker, chance.random() < 0.8)):
                behind.update({worker} if isinstance(told, OpenStep) else ())
                made.complete_turn(worker, number[worker])
                return "tick"
            if mode == "tick" and made.may_begin_turn(worker, bound):
                made.record_permission(worker, now)
                return "take"
            return mode

        while {*modes.values()} != {"rest"}:
            before = None
            while before != modes:
                before = dict(modes)
                for worker in range(workers):
                    modes[worker] = goes_on(worker)
            now = min(
                [*(ends[worker] for worker in ends if modes[worker] == "turn"), made.next_check]
            )
            assert now < math.inf or {*modes.values()} == {"rest"}, (
                f"nobody would come any more: {modes}"
            )
        facts = made.summarize_schedule()
        assert (
            sum(number.values()) == turns * workers == sum(facts["steps_late"].values())
            and in_steps == number
        )
        assert (
            sum(int(size) * count for size, count in facts["steps_by_workers"].items())
            == turns * workers
        )


def test_letters():
    made = scheduler(1)
    made.notes.post_note(1, torch.ones(2))
    made.notes.post_note(0, torch.zeros(1))
    assert [(worker, letter.numel()) for worker, letter in made.notes.collect_notes()] == [
        (1, 2),
        (0, 1),
    ]
    assert len(made.notes.collect_notes()) == 2, "they have not arrived yet"
    assert made.notes.collect_notes(2) == []


class TestPause:
    def test_all_stop_when_their_turns_are_over_and_go_on_with_others(self):
        made = scheduler(4, 4)
        assert made.deal_piece(0, 1) and made.deal_piece(1, 1)
        made.pause_dealing()
        assert made.deal_piece(0, 1) is False and made.has_turns_under_way(0), (
            "its own turn comes first"
        )
        made.complete_turn(0, 1)
        assert made.deal_piece(0, 1) is None
        made.complete_turn(1, 1)
        assert (
            made.deal_piece(1, 1) is made.deal_piece(0, 1) is False
            and made.is_paused
            and made.is_active(0)
            and made.is_active(1)
        )
        for worker in (0, 1, 2):
            made.begin_dealing(0, 0, [4, 4], range(3), 1)
            assert made.deal_piece(worker, 2) == [(0, 2, 4), (1, 0, 2), (1, 2, 4)][worker]

    def test_where_somebody_has_ended_the_epoch_nobody_stops(self):
        made = scheduler(4)
        made.leave_epoch(0)
        made.pause_dealing()
        assert made.deal_piece(1, 4) == (0, 0, 4)

    def test_who_ends_it_meanwhile_lets_the_others_go_on(self):
        made = scheduler(4, workers=3)
        made.pause_dealing()
        assert made.deal_piece(0, 4) is None
        made.leave_epoch(1)
        assert made.deal_piece(0, 4) == (0, 0, 4)

    def test_where_nothing_is_left_the_epoch_ends(self):
        made = scheduler(2)
        made.deal_piece(0, 2)
        made.pause_dealing()
        made.complete_turn(0, 1)
        assert (
            made.deal_piece(0, 1) is made.deal_piece(1, 1) is False
            and not made.is_paused
            and not made.is_active(0)
        )


class TestLoss:
    def test_what_a_lost_worker_had_under_way_is_dealt_again(self):
        made = scheduler(4, 4, workers=3)
        for worker in (0, 1, 2, 2, 2):
            made.deal_piece(worker, 1)
        made.complete_turn(2, 1)  # its first piece counts as trained
        assert made.remove_lost_workers({0, 1}) == ([], 0)
        assert made.deal_piece(0, 4) == (0, 3, 4) and made.deal_piece(1, 1) == (1, 0, 1)
        with pytest.raises(Mismatch, match="no turns to take"):
            made.deal_piece(2, 1)
        with pytest.raises(Mismatch, match="hasn't begun"):
            made.complete_turn(2, 2)
        assert made.clocks == {0: 0, 1: 0}

    def test_what_it_had_added_up_without_a_step_is_dealt_again(self):
        made = scheduler(4)
        for clock, carried in ((1, False), (2, True), (3, True)):
            made.deal_piece(1, 1)
            made.complete_turn(1, clock, carried=carried)
        made.remove_lost_workers({0})
        assert [made.deal_piece(0, 9) for _ in range(3)] == [(0, 1, 2), (0, 2, 3), (0, 3, 4)]

    def test_who_waits_for_samples_gets_those_of_the_lost(self):
        made = scheduler(2, workers=2)
        made.deal_piece(1, 2)
        assert made.deal_piece(0, 2) is None
        made.remove_lost_workers({0})
        assert made.deal_piece(0, 2) == (0, 0, 2)

    def test_where_all_others_have_ended_the_epoch_it_is_told_how_much_is_lost(self):
        made = scheduler(4)
        made.deal_piece(1, 3)
        made.leave_epoch(0)
        assert made.remove_lost_workers({0}) == ([], 3) and made.remove_lost_workers({0}) == ([], 0)

    def test_who_is_lost_is_not_waited_for(self):
        made = scheduler(*[1] * 9, workers=3)
        for worker in range(3):
            made.deal_piece(worker, 1)
        made.deal_piece(0, 1)
        made.complete_turn(0, 1)
        made.complete_turn(0, 2)
        made.deal_piece(1, 1)
        made.complete_turn(1, 1)
        assert not made.may_begin_turn(0, 1)
        made.remove_lost_workers({0, 1})
        assert made.may_begin_turn(0, 1) and made.list_slowest_workers(0) == [(1, 1)]
        made.leave_epoch(1)
        made.begin_dealing(1, 0, [1], range(3))  # as it had said, when it lived
        assert made.clocks == {0: 2, 1: 2}

    def test_the_first_who_come_are_living_ones(self):
        made = scheduler(*[1] * 9, workers=4)
        for worker in range(4):
            made.deal_piece(worker, 1)
        assert made.record_arrival(3, 0, 1, "", 2) is None
        made.remove_lost_workers({0, 1, 2})
        assert made.record_arrival(1, 0, 1, "", 1) is None
        found = made.record_arrival(0, 0, 1, "", 1)
        assert isinstance(found, StepDecision) and found.workers == [0, 1]
        made.remove_lost_workers({1, 2})
        assert made.remove_lost_workers({2}) == ([(0, 1)], 0), "nobody who makes it is left"

    def test_a_step_within_a_bound_is_that_of_the_living(self):
        made = scheduler(*[1] * 9, workers=3)
        for worker in range(3):
            made.deal_piece(worker, 1)
        late = {"bound": 2, "now": 1.0}
        assert (
            made.record_gradient(0, 0, 1, "", **late)
            is made.record_gradient(2, 0, 1, "", **late)
            is None
        )
        assert made.remove_lost_workers({0, 1}) == ([], 0)
        step = made.record_gradient(1, 0, 1, "", **late)
        assert (
            step.contributions.keys() == step.waiting_workers == {0, 1}
            and made.record_gradient(0, 0, 1, "", **late) is step
        )
        assert made.remove_lost_workers({1}) == ([], 0), "one of them lives"
        assert made.remove_lost_workers({7})[0] == [(0, 1)]

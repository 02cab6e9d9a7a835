"""The keeper alone: every sample to one worker, clocks within their bound, and who makes a step."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import Mismatch
from paceline.sync.keeper import SHOWN, Decision, Keeper, Piece


def keeper(*sizes: int, workers: int = 2, epoch: int = 0, first: int = 0) -> Keeper:
    made = Keeper()
    made.begin(epoch, first, sizes, range(workers))
    return made


class TestSamples:
    @given(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), most=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data()
    )
    def test_each_goes_to_one_worker_in_order(self, sizes, most, data):
        made, dealt, left = keeper(*sizes, workers=len(most), first=3), [], set(range(len(most)))
        clocks = [0] * len(most)
        while left:
            worker = data.draw(st.sampled_from(sorted(left)))
            found = made.take(worker, most[worker])
            if isinstance(found, Piece):
                assert found.stop - found.start <= most[worker]
                dealt += [(found.batch, sample) for sample in range(found.start, found.stop)]
                clocks[worker] += 1
                made.tick(worker, clocks[worker])
            elif found is False:
                left.discard(worker)
        assert dealt == [(3 + batch, sample) for batch, size in enumerate(sizes) for sample in range(size)]

    def test_what_is_dropped_is_dealt_again_and_before_the_end(self):
        made = keeper(4)
        assert made.take(0, 4) == (0, 0, 4)
        assert made.take(1, 2) is None, "the other may drop its piece"
        made.tick(0, 1, "again")
        assert made.take(1, 3) == (0, 0, 3) and made.take(0, 3) == (0, 3, 4)
        for worker, clock in ((1, 1), (0, 2)):
            made.tick(worker, clock)
        assert made.take(0, 1) is made.take(1, 1) is False
        assert made.facts()["dropped"] == {"gradients": 1, "samples": 0, "dealt_again": 4, "pieces": []}

    def test_what_is_dropped_for_good_is_told(self):
        made = keeper(4, 4, epoch=7, first=2)
        made.take(0, 2)
        made.take(0, 2)  # read ahead
        made.tick(0, 1, "dropped")
        made.tick(0, 2)
        assert made.facts()["dropped"] == {"gradients": 1, "samples": 2, "dealt_again": 0, "pieces": [[7, 2, 0, 2]]}

    def test_not_more_is_told_than_can_be_read(self):
        made = keeper(*[1] * (SHOWN + 5), workers=1)
        for clock in range(SHOWN + 5):
            made.take(0, 1)
            made.tick(0, clock + 1, "dropped")
        assert made.tally.dropped == SHOWN + 5 and len(made.tally.pieces) == SHOWN

    def test_no_more_after_a_stop(self):
        made = keeper(4, 4)
        made.take(0, 1)
        made.stop()
        assert made.take(1, 1) is False
        made.tick(0, 1, "again")
        assert made.take(0, 1) is False
        made.begin(1, 0, [4], range(2))
        assert made.take(1, 1) == (0, 0, 1), "the next epoch begins as ever"

    def test_the_next_part_goes_on_where_all_stand(self):
        made = keeper(2)
        made.begin(0, 0, [2], range(2))  # as the second worker says it
        with pytest.raises(Mismatch, match="deal different batches"):
            made.begin(0, 0, [3], range(2))
        made.take(0, 2)
        with pytest.raises(Mismatch, match=r"workers \[0\] are in the middle of another"):
            made.begin(0, 1, [2], range(2))
        made.tick(0, 1)
        assert made.take(0, 1) is made.take(1, 1) is False
        made.begin(0, 1, [2], range(2))
        assert made.clocks == {0: 1, 1: 1} and made.take(1, 5) == (1, 0, 2)

    @pytest.mark.parametrize("sizes", [[], [2, 0], [-1]])
    def test_nothing_to_deal(self, sizes):
        with pytest.raises(Mismatch, match="nothing to deal"):
            Keeper().begin(0, 0, sizes, [0])

    def test_who_may_not_take(self):
        for worker, most in ((5, 1), (0, 0)):
            with pytest.raises(Mismatch, match="no turns to take, or asks for"):
                keeper(3).take(worker, most)


class TestClocks:
    def test_a_worker_waits_for_the_slowest_that_trains(self):
        made = keeper(*[1] * 20, workers=3)
        for _ in range(20):
            made.take(0, 1)
        for clock in range(1, 4):
            assert made.may(0, 2)
            made.tick(0, clock)
        assert not made.may(0, 2) and made.may(0, 3) and made.behind(0) == [(1, 0), (2, 0)]
        made.leave(1)
        assert not made.may(0, 2) and made.behind(0) == [(2, 0)]
        made.leave(2)
        assert made.may(0, 2) and made.slowest == 3

    @pytest.mark.parametrize(("worker", "clock", "why"), [(0, 2, "can't come to turn 2"), (1, 1, "hasn't begun"), (9, 1, "hasn't begun")])
    def test_a_turn_that_can_not_be(self, worker, clock, why):
        made = keeper(4)
        made.take(0, 1)
        with pytest.raises(Mismatch, match=why):
            made.tick(worker, clock)

    def test_how_far_ahead_workers_were(self):
        made = keeper(*[1] * 4)
        for clock in (1, 2):
            made.take(0, 1)
            made.tick(0, clock)
            made.went(0)
        assert made.facts()["staleness"] == {"1": 1, "2": 1}


class TestWhoMakesAStep:
    def test_the_first_who_come(self):
        made = keeper(*[1] * 9, workers=4)
        for worker in range(4):
            made.take(worker, 1)
        assert made.arrive(3, 0, 1, "c", 2) is None
        assert made.absent(0, 1) == [(0, 0), (1, 0), (2, 0)]
        found = made.arrive(1, 0, 1, "a", 2)
        assert isinstance(found, Decision) and found.workers == [1, 3] and found.came == {3: "c", 1: "a"}
        assert made.arrive(3, 0, 1, "c", 2) is found, "who waited for it is told"
        assert made.arrive(0, 0, 1, "b", 2) is False and made.decided(0) == 1
        with pytest.raises(Mismatch, match="step 3 of optimizer 0 can't come after step 1"):
            made.arrive(0, 0, 3, "b", 2)

    def test_those_who_wait_for_samples_or_have_left_are_not_waited_for(self):
        made = keeper(1, 1, workers=3)
        assert made.take(0, 1) and made.take(1, 1) and made.take(2, 1) is None
        assert made.arrive(0, 0, 1, "", 1) is None
        assert isinstance(made.arrive(1, 0, 1, "", 1), Decision)
        made = keeper(1, 1, workers=3)
        made.take(0, 1)
        made.leave(1)
        assert made.arrive(0, 0, 1, "", 0) is None
        made.leave(2)
        assert isinstance(made.arrive(0, 0, 1, "", 0), Decision)

    def test_who_is_very_late(self):
        made = keeper(*[1] * 99, workers=2)
        for step in range(1, 40):
            assert isinstance(made.arrive(0, 0, step, "", 1), Decision)
        assert made.arrive(1, 0, 1, "", 1) is False and made.decided(0) == 39
        assert len(made._decisions) <= 8, "old ones are forgotten"

    @given(st.integers(0, 10_000))
    def test_any_order_gives_each_step_all_but_so_many(self, seed):
        chance, made = random.Random(seed), keeper(*[1] * 200, workers=4)
        steps = dict.fromkeys(range(4), 0)  # the last one that each worker knows
        made_by: dict[int, list[int]] = {}
        waiting: set[int] = set()
        for _ in range(60):
            worker = chance.randrange(4)
            found = made.arrive(worker, 0, steps[worker] + 1, "", 1)
            if found is None:
                waiting.add(worker)
            elif found is False:
                steps[worker] = made.decided(0)
            else:
                steps[worker] += 1
                assert made_by.setdefault(steps[worker], found.workers) == found.workers and len(found.workers) == 3
                assert worker in found.workers
                waiting.discard(worker)
        assert made.decided(0) >= max(steps.values())


def test_letters():
    made = keeper(1)
    made.post(1, torch.ones(2))
    made.post(0, torch.zeros(1))
    assert [(worker, letter.numel()) for worker, letter in made.collect()] == [(1, 2), (0, 1)]
    assert made.collect() == []

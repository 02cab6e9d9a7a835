"""Who makes a step together: all who are on time, and who has come late since; by the times that
are told, without any wait.
"""

from __future__ import annotations

import math
import random

import pytest

from paceline.errors import Mismatch
from paceline.servers.process.late_gradients import (
    MAX_COMMON_SLOWDOWN,
    MAX_MARGIN,
    MIN_MARGIN,
    REJOIN_WAIT,
    REMEMBERED_TURNS,
    PartialSteps,
)

ALL = {0, 1, 2, 3}


def gathering(*spans: float) -> PartialSteps:
    """Four workers that know how long turns take: the last `SPANS` of each took so long; all
    begin one at 0.
    """
    made = PartialSteps(dict.fromkeys(ALL, 0.0))
    for turn in range(REMEMBERED_TURNS):
        for worker in sorted(ALL):
            made.record_gradient(
                worker, turn + 1, "", spans[(4 * turn + worker) % len(spans)] if spans else 1.0
            )
        made.make_step(())
        for worker in ALL:
            made.begin_turn(worker, 0.0)
    return made


def come(made: PartialSteps, *workers: int, now: float, absent: set[int] | None = None) -> bool:
    """Whether the step is made once these have come, and with whom."""
    for worker in workers:
        number = made._last_steps.get(worker, (0, None))[0] + 1
        assert made.record_gradient(worker, number, f"of {worker}", now) is None
    absent = ALL - made.contributions.keys() if absent is None else absent
    if made.is_awaiting_workers(absent, now):
        return False
    made.make_step(absent)
    return True


class TestWhoIsWaitedFor:
    def test_all_make_a_step_where_nobody_is_late(self):
        made = gathering()
        assert (
            not come(made, 2, 0, now=1.0)
            and not come(made, 3, now=1.03)
            and come(made, 1, now=1.04)
        )
        assert made.steps_by_worker_count == {
            4: REMEMBERED_TURNS + 1
        } and made.gradients_by_age == {0: 4 * (REMEMBERED_TURNS + 1)}

    def test_who_is_late_is_not_waited_for_again_and_its_gradient_is_in_a_later_step(self):
        made = gathering()
        assert not come(made, 0, 1, 2, now=1.0) and made.next_check == pytest.approx(1 + MIN_MARGIN)
        assert come(made, now=1.0 + MIN_MARGIN), "it is late"
        for worker in (0, 1, 2):
            made.begin_turn(worker, 1.1)
        assert (
            not come(made, 0, now=2.0) and not come(made, 1, now=2.0) and come(made, 2, now=2.0)
        ), "not waited for"
        for worker in (0, 1, 2):
            made.begin_turn(worker, 2.0)
        assert not come(made, 3, now=2.5), "the others are on time"
        assert not come(made, 0, 1, now=3.0) and come(made, 2, now=3.0)
        number, step = made._last_steps[3]
        assert (
            number == REMEMBERED_TURNS + 1
            and step.number == REMEMBERED_TURNS + 3
            and list(step.contributions) == [0, 1, 2, 3]
            and step.contributions[3] == "of 3"
        )
        assert made.steps_by_worker_count == {
            4: REMEMBERED_TURNS + 1,
            3: 2,
        } and made.gradients_by_age == {0: 4 * REMEMBERED_TURNS + 9, 2: 1}
        made.begin_turn(3, 3.0)
        assert 3 not in made._late_workers, "it is waited for again"

    def test_first_turns_take_as_long_as_they_do(self):
        made = PartialSteps()
        assert (
            not come(made, 0, 1, 2, now=1e6)
            and made.next_check == math.inf
            and come(made, 3, now=2e6)
        )
        for worker in (0, 1, 2):
            made.begin_turn(worker, 0.0)
        assert not come(made, 0, 1, 2, now=1e6), "nor does anybody know when this one began"
        made = gathering()
        made.begin_epoch()
        assert (
            not come(made, 0, 1, 2, now=1e6)
            and made.next_check == math.inf
            and come(made, 3, now=2e6)
        ), "another epoch"

    def test_the_leave_is_learnt(self):
        """A little where turns are alike, some of them slow or not; what they differ by where
        they do; never more than half.
        """
        same, some = gathering(), gathering(1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 1.0)
        for made in (same, some):
            assert not come(made, 0, 1, 2, now=1.0) and made.next_check == pytest.approx(
                1 + MIN_MARGIN
            )
        differing = gathering(0.9, 0.95, 1.05, 1.1)
        assert (
            not come(differing, 0, 1, 2, now=1.0)
            and 1 + MIN_MARGIN < differing.next_check < 1 + MAX_MARGIN
        )
        wild = gathering(0.3, 1.0, 1.0, 1.7, 2.5)
        assert not come(wild, 0, 1, 2, now=1.0) and wild.next_check == pytest.approx(1 + MAX_MARGIN)

    def test_when_all_are_slow_nobody_is_late(self):
        made = gathering()
        assert not come(made, 0, now=1.0) and made.next_check == pytest.approx(
            MAX_COMMON_SLOWDOWN * (1 + MIN_MARGIN)
        ), "one alone is quick"
        assert (
            not come(made, 1, now=1.8)
            and made.next_check == pytest.approx(1.8 * (1 + MIN_MARGIN))
            and come(made, 2, 3, now=1.9)
        )
        made = gathering()
        assert not come(made, 0, now=4.0) and made.next_check == pytest.approx(
            4 * (1 + MIN_MARGIN)
        ), "the first one takes four times as long"
        assert come(made, now=4.5) and made.steps_by_worker_count[1] == 1

    def test_who_waits_itself_is_not_waited_for(self):
        made = gathering()
        assert (
            come(made, 0, 1, now=1.0, absent=set())
            and 2 not in made._late_workers
            and 3 not in made._late_workers
        )

    def test_a_pace_that_changes_is_learnt_again(self):
        made = gathering()
        for _ in range(REMEMBERED_TURNS):
            assert come(made, 0, 1, 2, 3, now=9.0)
        assert not come(made, 0, 1, 2, now=9.0) and made.next_check == pytest.approx(
            9 * (1 + MIN_MARGIN)
        )


class TestWhoGoesOn:
    def late(self) -> PartialSteps:
        """The last worker has not come to the step that the others have made."""
        made = gathering()
        assert not come(made, 0, 1, 2, now=1.0) and come(made, now=1.0 + MIN_MARGIN)
        for worker in (0, 1, 2):
            made.begin_turn(worker, 1.0)
        return made

    def test_who_is_late_and_nobody_waits(self):
        made = self.late()
        made.record_gradient(3, REMEMBERED_TURNS + 1, "", 1.5)
        assert (
            made.release_if_late(3, {0, 1, 2}, 1.5)
            and 3 in made.contributions
            and not made.waiting_workers
        )
        made.begin_turn(3, 1.5)
        made.record_gradient(0, REMEMBERED_TURNS + 2, "", 2.0)
        assert not made.release_if_late(0, {1, 2}, 2.0) and made.waiting_workers == {0}, (
            "it is on time"
        )
        assert not made.release_if_late(3, {1, 2}, 2.0) and made.waiting_workers == {0, 3}, (
            "it has come to push more"
        )
        step = made.make_step({1, 2})
        assert (
            step.contributions.keys() == step.waiting_workers == {0, 3}
            and made.record_gradient(3, REMEMBERED_TURNS + 1, "", 2.1) is step
        )
        made.record_gradient(3, REMEMBERED_TURNS + 2, "", 2.2)
        assert not made.release_if_late(3, {0, 1, 2}, 2.2 - REJOIN_WAIT), (
            "who is on time is about to come"
        )

    def test_who_is_on_time_waits(self):
        made = gathering()
        made.record_gradient(0, REMEMBERED_TURNS + 1, "", 0.5)
        assert not made.release_if_late(0, {1, 2, 3}, 0.5) and made.waiting_workers == {0}

    def test_who_is_late_waits_with_who_waits(self):
        made = self.late()
        made.record_gradient(0, REMEMBERED_TURNS + 2, "", 1.4)
        assert not made.release_if_late(0, {1, 2, 3}, 1.4)
        made.record_gradient(3, REMEMBERED_TURNS + 1, "", 1.5)
        assert not made.release_if_late(3, {1, 2}, 1.5) and made.waiting_workers == {0, 3}
        made.make_step({1, 2})
        made.begin_turn(3, 2.0)
        assert 3 not in made._late_workers, "it is in phase again"

    def test_who_is_late_waits_a_short_time(self):
        made = self.late()
        made.record_gradient(3, REMEMBERED_TURNS + 1, "", 2 - REJOIN_WAIT + 0.01)
        assert not made.release_if_late(3, {0, 1, 2}, 2 - REJOIN_WAIT + 0.01)

    def test_who_is_late_waits_where_all_are(self):
        made = self.late()
        made.record_gradient(3, REMEMBERED_TURNS + 1, "", 1.5)
        assert not made.release_if_late(3, (), 1.5) and made.make_step(()).waiting_workers == {3}


class TestOnce:
    def test_who_asks_again_is_told_the_same(self):
        made = gathering()
        assert come(made, 0, 1, 2, 3, now=1.0)
        first = made.record_gradient(0, REMEMBERED_TURNS + 1, "again", 5.0)
        assert (
            first is not None
            and first.number == REMEMBERED_TURNS + 1
            and first.contributions[0] == "of 0"
            and not made.contributions
        )

    def test_a_gradient_out_of_turn(self):
        with pytest.raises(
            Mismatch, match="gradient 9 of worker 0 can't come after its gradient 4"
        ):
            gathering().record_gradient(0, 9, "", 1.0)

    @pytest.mark.parametrize("seed", range(20))
    def test_each_gradient_is_in_one_step_whatever_turns_take(self, seed):
        chance, made = random.Random(seed), PartialSteps(dict.fromkeys(ALL, 0.0))
        ends = {worker: chance.expovariate(1) for worker in ALL}  # of turns under way
        told: dict[tuple[int, int], int] = {}
        turns = dict.fromkeys(ALL, 0)
        for _ in range(300):
            now = min([*ends.values(), made.next_check])
            for worker in [worker for worker in ends if ends[worker] == now]:
                del ends[worker]
                turns[worker] += 1
                made.record_gradient(worker, turns[worker], turns[worker], now)
            absent = ALL - made.contributions.keys()
            if made.contributions and not made.is_awaiting_workers(absent, now):
                step = made.make_step(absent)
                for worker, turn in step.contributions.items():
                    assert told.setdefault((worker, turn), step.number) == step.number
                    made.begin_turn(worker, now)
                    ends[worker] = now + chance.choice([1.0, 1.0, 1.1, 5.0]) + 0.1 * chance.random()
        assert len(told) == sum(turns.values()) - len(made.contributions) > 100
        assert (
            sum(size * count for size, count in made.steps_by_worker_count.items())
            == sum(made.gradients_by_age.values())
            == len(told)
        )
        assert (
            made.steps_by_worker_count[4]
            and made.steps_by_worker_count[3]
            and min(made.gradients_by_age) == 0 < max(made.gradients_by_age)
        )

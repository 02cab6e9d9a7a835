"""Simulated workers with noise, quotas and changes: shares come to the optimum, stay where
nothing changes, and follow what does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from paceline.data.balance import SpeedCurve, SpeedShares, balance_shares
from paceline.data.costs import deal_by_cost
from paceline.data.shares import divide_equally
from paceline.unequal.shares.balancer import Balancer
from paceline.unequal.shares.work_record import StepWork

Seconds = Callable[[int, int, int], float]  # rank, samples, step -> own work


class Simulation:
    """Workers that take shares of `batch` as a balancer says, and meet after `every` seconds of
    steps.
    """

    def __init__(
        self, size: int, batch: int, seconds: Seconds, *, every: float = 1.0, micros: int = 1
    ) -> None:
        self.size, self.batch, self.seconds, self.every, self.micros = (
            size,
            batch,
            seconds,
            every,
            micros,
        )
        self.balancer = Balancer(size)
        self.policy: Callable[[int], tuple[int, ...]] = lambda samples: divide_equally(
            samples, size
        )
        self.step = 0
        self.changes: list[int] = []
        self.lasted: list[float] = []
        self._kept: list[StepWork] = []

    def run(self, steps: int) -> Simulation:
        for _ in range(steps):
            shares = self.policy(self.batch)
            own = [self.seconds(rank, share, self.step) for rank, share in enumerate(shares)]
            self._kept.append(StepWork(tuple(map(float, shares)), tuple(own), max(own)))
            self.lasted.append(max(own))
            self.step += 1
            if sum(step.whole for step in self._kept) >= self.every:
                self.balancer.take_steps(self._kept)
                self._kept = []
                if (split := self.balancer.decide_speeds()) is not None:
                    self.policy = SpeedShares(split.curves)
                    self.changes.append(self.step)
        return self

    @property
    def shares(self) -> tuple[int, ...]:
        return self.policy(self.batch)


def machines(curves: Sequence[SpeedCurve], noise: float = 0.02, seed: int = 1) -> Seconds:
    draw = random.Random(seed)
    return lambda rank, samples, step: max(curves[rank](samples) * draw.gauss(1.0, noise), 1e-6)


class Throttled:
    """Work of processors with quotas: each runs for its part of every 100 ms, and what it hasn't
    used is gone.
    """

    PERIOD = 0.1

    def __init__(
        self, quotas: Sequence[float], per_sample: float, fixed: float = 0.0, *, seen: bool = True
    ) -> None:
        self.quotas, self.per_sample, self.fixed, self.seen = quotas, per_sample, fixed, seen
        self._now = self._ended = 0.0
        # when each began, and what was used of it
        self._periods = [(0.013 * rank, 0.0) for rank in range(len(quotas))]
        self._draw = random.Random(5)

    def __call__(self, rank: int, samples: int, step: int) -> float:
        if rank == 0:
            self._now, self._ended = max(self._now, self._ended), 0.0
        left = work = (self.fixed + self.per_sample * samples) * self._draw.gauss(1.0, 0.02)
        now = self._now
        (began, used), quota = self._periods[rank], self.quotas[rank] * self.PERIOD
        while True:
            if now >= began + self.PERIOD:
                began, used = (began + self.PERIOD if now < began + 2 * self.PERIOD else now), 0.0
                continue
            run = left if self.quotas[rank] >= 1 else min(left, quota - used)
            left, now, used = left - run, now + run, used + run
            if left <= 1e-9:
                break
            now = began + self.PERIOD
        self._periods[rank] = began, used
        self._ended = max(self._ended, now)
        return max(now - self._now, work / self.quotas[rank]) if self.seen else now - self._now


@pytest.mark.each_choice
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("seconds", [0.01, 0.5], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_equal_workers_never_change_shares_because_of_noise(
    size: int, seconds: float, seed: int
) -> None:
    curves = [SpeedCurve(seconds * 0.2, seconds * 0.8 / 12)] * size
    # long steps are looked at in pairs, short ones by the hundred
    steps = 2_000 if seconds < 0.1 else 600
    done = Simulation(size, 12 * size, machines(curves, noise=0.1, seed=seed)).run(steps)
    assert done.changes == [] and done.balancer.phase == "steady" and len(set(done.shares)) == 1


@pytest.mark.parametrize(
    "curves",
    [
        [SpeedCurve(0.01, 0.005), SpeedCurve(0.02, 0.010)],
        [SpeedCurve(0.0, 0.004), SpeedCurve(0.1, 0.004)],
        [SpeedCurve(0.05, 0.004), SpeedCurve(0.0, 0.008), SpeedCurve(0.01, 0.014)],
        [SpeedCurve(0.0001, 0.0001), SpeedCurve(0.001, 0.0003)],
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [36, 96])
def test_unequal_workers_come_to_the_optimum(curves: list[SpeedCurve], batch: int) -> None:
    done = Simulation(len(curves), batch, machines(curves)).run(600)
    best = max(
        curve(share) for curve, share in zip(curves, balance_shares(batch, curves), strict=True)
    )
    now = max(curve(share) for curve, share in zip(curves, done.shares, strict=True))
    assert now <= best * 1.04 and 1 <= len(done.changes) <= 4, (
        done.shares,
        balance_shares(batch, curves),
        done.changes,
    )


@pytest.mark.parametrize(
    ("batch", "before", "after"), [(96, 1.0, 0.4), (96, 0.5, 1.0), (36, 1.0, 0.4)]
)
def test_a_change_of_speed_is_followed_within_15_steps_and_back(
    batch: int, before: float, after: float
) -> None:
    def quota(rank: int, step: int) -> float:
        return 1.0 if rank == 0 else after if 60 <= step < 160 else before

    def best(now: float) -> float:
        curves = [SpeedCurve(0.02, 0.006), SpeedCurve(0.02 / now, 0.006 / now)]
        return max(
            curve(share) for curve, share in zip(curves, balance_shares(batch, curves), strict=True)
        )

    draw = random.Random(3)
    done = Simulation(
        2,
        batch,
        lambda rank, samples, step: (
            (0.02 + 0.006 * samples) / quota(rank, step) * draw.gauss(1.0, 0.02)
        ),
    ).run(300)
    for start, optimum in ((75, best(after)), (175, best(before))):
        mean = sum(done.lasted[start : start + 60]) / 60
        assert mean <= 1.1 * optimum, (start, mean, optimum, done.changes)
    assert len([step for step in done.changes if step >= 60]) <= 4, done.changes


@pytest.mark.parametrize(
    ("batch", "quotas"), [(96, (1.0, 0.5)), (36, (1.0, 0.5)), (96, (1.0, 0.6, 0.3))]
)
@pytest.mark.parametrize("per_sample", [0.0005, 0.004], ids=str)
def test_quotas_that_throttle_in_periods_are_measured_as_they_are_in_the_mean(
    batch: int, quotas: tuple[float, ...], per_sample: float
) -> None:
    done = Simulation(len(quotas), batch, Throttled(quotas, per_sample)).run(1_000)
    ideal = batch * per_sample / sum(quotas)
    mean = sum(done.lasted[-500:]) / 500
    assert mean <= ideal * 1.04 and len(done.changes) <= 4, (
        done.shares,
        mean / ideal,
        done.changes,
    )


def test_where_changes_bring_nothing_they_become_rare() -> None:
    """A worker that finds its quota whole after each wait, and doesn't say what it has used,
    looks fast whenever it has little to do.
    """
    done = Simulation(2, 36, Throttled((1.0, 0.5), 0.004, 0.01, seen=False)).run(2_000)
    assert len([step for step in done.changes if step >= 1_000]) <= 4, done.changes


def test_a_pause_of_one_worker_changes_nothing() -> None:
    """An evaluation or a checkpoint on one worker is over before it counts."""
    plain = machines([SpeedCurve(0.05, 0.01)] * 2)
    done = Simulation(
        2,
        24,
        lambda rank, samples, step: (
            plain(rank, samples, step) + (3.0 if rank == 0 and step % 50 == 49 else 0.0)
        ),
    ).run(600)
    assert done.changes == []


@pytest.mark.parametrize("per_sample", [100.0, 0.01], ids=str)
def test_where_samples_are_dealt_by_cost_shares_follow_in_any_unit_and_who_was_very_slow_comes_back(
    per_sample: float,
) -> None:
    draw, balancer = random.Random(0), Balancer(2)
    policy, parts = (
        SpeedShares([SpeedCurve(0, 1)] * 2, per_sample=per_sample),
        list[tuple[float, ...]](),
    )
    for step in range(900):
        costs = [draw.uniform(0.5, 1.5) * per_sample for _ in range(16)]
        units = tuple(
            sum(costs[place] for place in mine)
            for mine in deal_by_cost(costs, policy.parts(sum(costs)))
        )
        seconds = [0.02 + 0.02 * part / per_sample for part in units]
        seconds[1] *= 60 if 100 <= step < 400 else 1
        balancer.take_steps([StepWork(units, tuple(seconds), max(seconds))])
        if (split := balancer.decide_speeds(per_sample=per_sample)) is not None:
            policy = SpeedShares(split.curves, per_sample=per_sample)
        parts.append(tuple(part / per_sample for part in policy.parts(16 * per_sample)))
    assert parts[99] == pytest.approx((8, 8), rel=0.1) and parts[399] == pytest.approx(
        (15, 1), rel=0.1
    )
    assert parts[-1] == pytest.approx((8, 8), rel=0.1)


def test_known_speeds_need_no_calibration() -> None:
    found = Simulation(2, 96, machines([SpeedCurve(0.01, 0.005), SpeedCurve(0.01, 0.01)]))
    curves = found.run(100).balancer.curves
    again = Balancer(2, curves)
    assert again.phase == "steady" and again.curves == curves

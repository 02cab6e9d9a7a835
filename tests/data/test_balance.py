"""Splits by speed, against all splits that there are; speeds of workers that come and go."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline.data.balance import SpeedCurve, SpeedShares, WorkerSpeeds, balance_shares
from paceline.data.shares import make_policy
from paceline.errors import DataError


def slowest(curves: list[SpeedCurve], shares: tuple[int, ...]) -> float:
    return max(curve(share) for curve, share in zip(curves, shares, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_split_is_done_sooner(seed: int) -> None:
    draw = random.Random(seed)
    size, batch = draw.choice([2, 3]), draw.randrange(3, 25)
    curves = [
        SpeedCurve(draw.choice([0.0, draw.uniform(0, 5)]), draw.uniform(0.1, 3))
        for _ in range(size)
    ]
    splits = [
        split
        for split in itertools.product(range(1, batch + 1), repeat=size)
        if sum(split) == batch
    ]
    found = balance_shares(batch, curves)
    assert found in splits and slowest(curves, found) == pytest.approx(
        min(slowest(curves, split) for split in splits), rel=1e-9
    )


@pytest.mark.parametrize(
    ("batch", "curves", "wanted"),
    [
        (96, [SpeedCurve(0, 1), SpeedCurve(0, 2)], (64, 32)),
        (45, [SpeedCurve(10, 2), SpeedCurve(10, 4)], (30, 15)),
        (10, [SpeedCurve(0, 1), SpeedCurve(100, 1)], (9, 1)),
        (1, [SpeedCurve(0, 2), SpeedCurve(0, 1)], (0, 1)),
        (0, [SpeedCurve(0, 2), SpeedCurve(0, 1)], (0, 0)),
        (1_000_000, [SpeedCurve(0, 1), SpeedCurve(0, 3)], (750_000, 250_000)),
    ],
)
def test_splits(batch: int, curves: list[SpeedCurve], wanted: tuple[int, ...]) -> None:
    assert balance_shares(batch, curves) == wanted == SpeedShares(curves)(batch)


def test_parts_are_in_proportion_and_need_not_be_whole() -> None:
    parts = SpeedShares([SpeedCurve(1, 1), SpeedCurve(1, 2)]).parts(10.0)
    assert parts == pytest.approx((20 / 3, 10 / 3)) and sum(parts) == pytest.approx(10.0)
    assert SpeedShares([SpeedCurve(1, 1), SpeedCurve(3, 2)]).parts(0.0) == pytest.approx((0.0, 0.0))


def test_everybody_has_a_part_of_a_usual_sample_if_there_are_enough() -> None:
    far = SpeedShares([SpeedCurve(0.02, 0.0002), SpeedCurve(1.2, 0.012)], per_sample=100.0)
    assert far.parts(1600.0) == pytest.approx((1500.0, 100.0)) and far(16) == (15, 1)
    assert far.parts(190.0) == pytest.approx((95.0, 95.0)), (
        "two samples that are a bit smaller than usual"
    )
    assert far.parts(100.0) == pytest.approx((100.0, 0.0)) and far(1) == (1, 0)


@pytest.mark.parametrize(
    "numbers", [(0.0, 0.0), (0.0, -1.0), (-1.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)]
)
def test_no_speed_is_refused(numbers: tuple[float, float]) -> None:
    with pytest.raises(DataError, match="are no speed"):
        SpeedCurve(*numbers)


def test_auto_is_equal_until_speeds_are_known_and_no_other_word_is() -> None:
    assert make_policy("auto", 3)(8) == (3, 3, 2)
    with pytest.raises(DataError, match="shares is 'quick': give 'auto'"):
        make_policy("quick", 3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="must be 3 integers"):
        make_policy(SpeedShares([SpeedCurve(0, 1)] * 2), 3)(8)


SLOW, FAST, OTHER = SpeedCurve(0, 4), SpeedCurve(0, 1), SpeedCurve(2, 3)


def test_who_comes_back_to_its_host_starts_with_its_old_speed_and_newcomers_with_the_mean() -> None:
    speeds = WorkerSpeeds()
    assert speeds.curves_of((0, 1), ("a", "b")) is None
    speeds.record_speeds((0, 1, 2), ("a", "b", "b"), (FAST, SLOW, FAST))
    assert speeds.curves_of((0, 2), ("a", "b")) == (FAST, FAST)
    assert speeds.curves_of((0, 2, 3), ("a", "b", "b")) == (FAST, FAST, SLOW), (
        "3 is on the host of 1, who is gone"
    )
    assert speeds.curves_of((0, 1, 2, 3), ("a", "b", "b", "a")) == (FAST, SLOW, FAST, FAST)
    assert speeds.curves_of((0, 1, 2, 3), ("a", "b", "b", "c")) == (
        FAST,
        SLOW,
        FAST,
        SpeedCurve(0, 2),
    )


def test_saved_speeds_are_for_as_many_workers() -> None:
    speeds = WorkerSpeeds()
    speeds.record_speeds((0, 3), ("a", "b"), (FAST, OTHER))
    state = speeds.state_dict((0, 3))
    again = WorkerSpeeds()
    again.load_state_dict(state, (0, 1))
    assert again.curves_of((0, 1), ("a", "b")) == (FAST, OTHER)
    fewer = WorkerSpeeds()
    fewer.load_state_dict(state, (0, 1, 2))
    assert fewer.curves_of((0, 1, 2), ("a", "b", "c")) is None

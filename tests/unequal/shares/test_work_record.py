"""Stretches of steps, their means and their noise."""

from __future__ import annotations

import math
import random

import pytest

from paceline.data.balance import SpeedCurve
from paceline.unequal.shares.work_record import StepWork, WorkRecord

CURVES = (SpeedCurve(0.0, 0.01), SpeedCurve(0.0, 0.02))


def test_steps_are_put_together_until_they_are_long_enough() -> None:
    record = WorkRecord(2)
    for seconds in (0.05, 0.15, 0.05, 0.15):
        record.add_step(StepWork((10.0, 5.0), (0.1, seconds), 0.1), CURVES)
    assert (
        record.total == 2
        and record.mean_work(2).slowness == pytest.approx((1.0, 1.0))
        and record.mean_work(2).units == (10.0, 5.0)
    )


def test_steps_without_work_of_some_worker_tell_nothing() -> None:
    record = WorkRecord(2)
    record.add_step(StepWork((10.0, 0.0), (1.0, 1.0), 1.0), CURVES)
    record.add_step(StepWork((10.0, 5.0), (1.0, 0.0), 1.0), CURVES)
    assert record.total == 0


def test_noise_is_that_from_block_to_block_and_a_change_of_speed_counts_little() -> None:
    record, draw = WorkRecord(2), random.Random(1)
    assert record.noise_of(0) == math.inf
    for number in range(200):
        times = 1.0 if number < 180 else 2.5
        record.add_step(StepWork((10.0, 5.0), (0.1 * draw.gauss(1, 0.1), 0.1 * times), 1.0), CURVES)
    assert record.noise_of(0) == pytest.approx(0.1, rel=0.35) and record.noise_of(1) < 0.03
    record.forget_steps()
    assert record.total == 0 and record.noise_of(0) == pytest.approx(0.1, rel=0.35), (
        "noise is remembered"
    )


def test_a_pause_stands_out_of_many_blocks() -> None:
    record = WorkRecord(2)
    for number in range(12):
        record.add_step(StepWork((10.0, 5.0), (0.1 if number != 5 else 30.0, 0.1), 1.0), CURVES)
    assert record.mean_work(12).slowness == pytest.approx((1.0, 1.0))

"""What a device computes: rates out of times, with and without the gaps of a quota."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.session.cluster_probe import SOME_PERIODS
from paceline.unequal.probe import compute

CPU = torch.device("cpu")


def throttled(
    quota: float, *, start: int, milliseconds: int, each: int = 2000, period: int = 100_000
) -> list[float]:
    """When products of 2 ms end (seconds) of a worker that may compute for a part of each
    period, from a millisecond of one on.
    """
    now, ends, runs = 1000 * start, [1000 * start], round(quota * period)  # microseconds
    while now < 1000 * (start + milliseconds):
        left = each
        while left > 0:
            if now % period >= runs:
                now += period - now % period
            step = min(left, runs - now % period)
            now, left = now + step, left - step
        ends.append(now)
    return [1e-6 * end for end in ends]


@pytest.mark.parametrize("quota", [0.3, 0.5, 0.6, 0.9])
@pytest.mark.parametrize("start", range(0, 100, 7))
def test_a_quota_is_seen_in_the_rate_whenever_the_measurement_begins(
    quota: float, start: int
) -> None:
    rate, spread = compute.compute_steady_rate(
        throttled(quota, start=start, milliseconds=round(1e3 * SOME_PERIODS))
    )
    assert rate == pytest.approx(quota / 2e-3, rel=0.04) and spread < 0.01


def test_parts_of_periods_would_tell_another_rate() -> None:
    ends = throttled(0.5, start=0, milliseconds=340)
    assert (len(ends) - 1) / (ends[-1] - ends[0]) > 1.05 * 250
    assert compute.compute_steady_rate(ends)[0] == pytest.approx(250, rel=0.02)


def test_without_gaps_the_middle_part_counts() -> None:
    dice, now, ends = random.Random(0), 0.0, [0.0]
    for index in range(100):
        # something else runs for a while
        now += 2e-3 * dice.uniform(0.95, 1.05) + (5e-3 if 20 <= index < 30 else 0)
        ends.append(now)
    rate, spread = compute.compute_steady_rate(ends)
    assert rate == pytest.approx(500, rel=0.03) and 0.02 < spread < 0.1


def test_times_that_lie_apart_have_a_spread() -> None:
    now, ends = 0.0, [0.0]
    for index in range(60):
        now += 2e-3 if index % 2 else 4e-3
        ends.append(now)
    assert compute.compute_steady_rate(ends)[1] > 0.4


def test_products_count_two_operations_for_each_element_and_step() -> None:
    speed, attended = compute.measure_products(CPU, "float32", 64, 0.0)
    assert speed.dtype == "float32" and speed.flops > 0 and attended > 0
    calls: list[int] = []
    found = compute.repeat_action(lambda: calls.append(1), CPU, 0.0)
    assert len(calls) == compute.LEAST + 1 and found.rate > 0  # one to warm up


def test_the_side_is_the_first_that_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def product(device: torch.device, dtype: str, length: int) -> int:
        asked.append(length)
        return length

    monkeypatch.setattr(compute, "_make_product", product)
    monkeypatch.setattr(compute, "_time_once", lambda length, device: 1e-9 * length**2)
    assert compute.choose_matrix_length(CPU, "float32") == 2048 and asked == [
        64,
        128,
        256,
        512,
        1024,
        2048,
    ]


def test_copies_are_measured_in_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compute, "repeat_action", lambda act, device, seconds: compute.MeasuredRate(10.0, 0.0, 1.0)
    )
    monkeypatch.setattr(
        compute, "find_free_memory", lambda device: compute.machine.MemorySize(1 << 40, 1 << 40)
    )
    assert compute.measure_copies(compute.make_copy_pair(CPU), 0.1) == 2 * compute.COPIED * 10
    monkeypatch.setattr(
        compute, "find_free_memory", lambda device: compute.machine.MemorySize(1 << 40, 1 << 24)
    )
    # little memory is left for it
    assert compute.measure_copies(compute.make_copy_pair(CPU), 0.1) == 2 * (1 << 21) * 10


def test_memory_of_a_processor_is_the_machines() -> None:
    total, free = compute.find_free_memory(CPU)
    assert 0 < free <= total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_is_measured() -> None:
    device = torch.device("cuda", 0)
    side = compute.choose_matrix_length(device, "float32")
    assert compute.measure_products(device, "float32", side, 0.1)[0].flops > 1e11
    assert (
        compute.measure_copies(compute.make_copy_pair(device), 0.1) > 1e10
        and compute.find_free_memory(device).free > 0
    )

"""When links are measured, whose link is found to be slow, and what a codec is predicted to
gain.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from paceline.unequal.probe.slow_links import (
    CodecCost,
    ExchangeSensor,
    Slowdown,
    SlowLink,
    find_slow_links,
    plan_rounds,
    predict_speedup,
)


def take(
    sensor: ExchangeSensor,
    exchange: float,
    times: int = 1,
    *,
    late: float = 0.0,
    names: range = range(3),
    count: int = 10,
) -> list[Slowdown]:
    """What is found in flushes of `count` steps; rank 0 waits in its exchanges for the others,
    who are `late`.
    """
    steps = [[[0.05, exchange + (late if rank == 0 else 0.0), 0.0, 0.0]] * count for rank in names]
    return [found for _ in range(times) if (found := sensor.take_flush(names, steps)) is not None]


def test_a_slowdown_that_lasts_is_said_once() -> None:
    sensor = ExchangeSensor()
    assert take(sensor, 0.005, 20) == [] and not sensor.slow
    (found,) = take(sensor, 0.06, 20)
    assert found.usual == pytest.approx(0.005) and found.now == pytest.approx(0.06) and sensor.slow
    assert found.step == pytest.approx(0.11)
    assert take(sensor, 0.005, 20) == [] and not sensor.slow
    assert len(take(sensor, 0.06, 20)) == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_steps_of_which_few_make_a_flush_are_followed(count: int) -> None:
    """A step that takes a second is flushed alone: several flushes are looked at together."""
    sensor = ExchangeSensor()
    assert take(sensor, 0.005, 40, count=count) == []
    (found,) = take(sensor, 0.06, 40, count=count)
    assert found.usual == pytest.approx(0.005) and found.now == pytest.approx(0.06)
    assert [
        take(sensor, 0.2, count=count) + take(sensor, 0.005, 40, count=count) for _ in range(3)
    ] == [[]] * 3


def test_moments_little_and_waits_for_late_workers_are_none() -> None:
    sensor = ExchangeSensor()
    take(sensor, 0.005, 10)
    assert [take(sensor, 0.2) + take(sensor, 0.005, 4) for _ in range(10)] == [[]] * 10
    assert take(sensor, 0.012, 20) == []  # a tenth of a step
    assert take(sensor, 0.005, 20, late=0.2) == []


def glance(
    sensor: ExchangeSensor, *exchanges: float, late: float = 0.0, step: float = 0.05
) -> Slowdown | None:
    """What is found in the last two steps of three ranks, whose last one waits for nobody."""
    return sensor.glance_at_steps(
        [
            [[step, exchange + (late if rank < 2 else 0.0), 0.0, 0.0] for exchange in exchanges]
            for rank in range(3)
        ]
    )


def test_two_steps_that_are_far_slower_are_enough() -> None:
    sensor = ExchangeSensor()
    take(sensor, 0.005)
    assert sensor.steps_ahead is None  # nothing is usual yet
    take(sensor, 0.005, 4)
    assert sensor.steps_ahead == 3  # steps of 55 ms in 0.2 s
    assert glance(sensor, 0.06, 0.06) == Slowdown(*map(pytest.approx, (0.005, 0.06, 0.11, 0.05)))


@pytest.mark.parametrize(
    ("exchanges", "late", "step"),
    [
        ((0.06, 0.005), 0.0, 0.05),
        ((0.005, 0.06), 0.0, 0.05),
        ((0.005, 0.005), 0.2, 0.05),
        ((0.06, 0.06), 0.0, 0.2),
        ((0.018, 0.018), 0.0, 0.01),
    ],
    ids=[
        "a step",
        "the last step",
        "workers that are late",
        "a quarter of a step",
        "three times as long",
    ],
)
def test_what_a_glance_leaves_to_flushes(
    exchanges: tuple[float, float], late: float, step: float
) -> None:
    sensor = ExchangeSensor()
    take(sensor, 0.005, 5)
    assert glance(sensor, *exchanges, late=late, step=step) is None


def test_glances_follow_the_pace_of_steps_and_pause() -> None:
    sensor = ExchangeSensor()
    take(sensor, 0.005, 5)
    found = glance(sensor, 0.95, 0.95)
    assert found is not None and sensor.steps_ahead == 1
    sensor.note_examination(found, found=False)
    assert sensor.steps_ahead == 60 and not sensor.slow
    sensor.note_examination(found, found=True)
    assert sensor.steps_ahead is None and sensor.slow
    assert take(sensor, 0.95, 20) == []  # it was said
    assert take(sensor, 0.005, 10) == [] and sensor.steps_ahead is not None and not sensor.slow


def test_other_workers_have_other_exchanges() -> None:
    sensor = ExchangeSensor()
    take(sensor, 0.005, 20)
    assert take(sensor, 0.06, 20, names=range(2)) == []


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_rounds_have_every_pair_once_and_no_host_twice(count: int) -> None:
    found = plan_rounds(count)
    assert sorted(pair for pairs in found for pair in pairs) == sorted(
        permutations(range(count), 2)
    )
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in found)


def rates(count: int, *slow: tuple[int, int]) -> dict[tuple[int, int], float]:
    return {pair: 12e6 if pair in slow else 120e6 for pair in permutations(range(count), 2)}


def test_the_host_whose_best_link_is_slow_is_found() -> None:
    both = [(2, 0), (2, 1), (0, 2), (1, 2)]
    assert find_slow_links(rates(3, *both)) == SlowLink((2,), 12e6, 120e6)
    assert find_slow_links(rates(3, (2, 0), (2, 1))) == SlowLink(
        (2,), 12e6, 120e6
    )  # it is only slow to send
    # all else is fine with both
    assert find_slow_links(rates(4, (0, 1), (1, 0))) == SlowLink((0, 1), 12e6, 120e6)
    assert find_slow_links(rates(3)) is None
    assert find_slow_links(rates(2, (0, 1))) == SlowLink((0, 1), 12e6, None)


def test_the_gain_is_what_the_link_has_less_to_do() -> None:
    """10 MB over 12.5 MB/s take 800 ms.

    A quarter of it takes 200 ms, which leaves 400 ms of a second's step, and 20 ms are for coding.
    """
    now, codec = Slowdown(0.05, 0.7, 1.0, 0.3), CodecCost(0.25, 0.02 / 2.5e6)
    assert predict_speedup(now, 10e6, 12.5e6, 2.5e6, codec) == pytest.approx(1.0 / (0.4 + 0.02))
    assert predict_speedup(now._replace(busy=0.5), 10e6, 12.5e6, 2.5e6, codec) == pytest.approx(
        1.0 / (0.5 + 0.02)
    )
    assert predict_speedup(now, 10e6, 12.5e6, 2.5e6, CodecCost(1.0, 0.0)) == pytest.approx(1.0)

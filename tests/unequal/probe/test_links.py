"""Links measured between threads: what chunks tell, who measures whom, and a worker that dies."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from paceline.comm.group_protocol import Group
from paceline.comm.pairs import connect_pairs
from paceline.errors import DeadlineExceeded, PacelineError, WorkerLost
from paceline.timings import ProbeTimings
from paceline.unequal.probe import links
from paceline.unequal.probe.links import LinkFigures, LinkMeter
from tests.harness.jobs import PATIENCE
from tests.harness.thread_groups import spawn


def test_the_rate_is_that_of_the_later_chunks() -> None:
    slow_start = [(0.0, 100), (0.2, 100), (0.3, 100)]
    steady = [(0.3 + 0.01 * index, 100) for index in range(1, 71)]
    assert links.compute_steady_rate(slow_start + steady) == pytest.approx(100 / 0.01)
    # what a token bucket lets pass at once
    burst = [(0.0, 100)] * 10 + [(0.01 * index, 100) for index in range(1, 101)]
    assert links.compute_steady_rate(burst) == pytest.approx(100 / 0.01, rel=0.02)


def test_a_pause_spoils_one_part_alone() -> None:
    arrivals, now = [], 0.0
    for index in range(60):
        now += 0.01 + (0.2 if index == 55 else 0.0)
        arrivals.append((now, 100))
    assert links.compute_steady_rate(arrivals) == pytest.approx(100 / 0.01)


def test_the_rate_of_few_chunks() -> None:
    assert links.compute_steady_rate([(1.0, 50), (2.0, 50)]) == 50
    assert links.compute_steady_rate([(0.0, 50), (0.1, 50), (9.0, 80)]) == pytest.approx(80 / 8.9)


def test_chunks_fit_the_link() -> None:
    assert links.choose_chunk_size(120e6, 0.15) == int(120e6 * 0.15 / links.CHUNKS)
    assert (
        links.choose_chunk_size(1e3, 0.15) == links.SMALLEST
        and links.choose_chunk_size(1e12, 0.15) == links.LARGEST
    )


def test_long_links_have_long_streams() -> None:
    assert links.choose_stream_seconds(1e-4, 0.15) == 0.15
    assert links.choose_stream_seconds(0.02, 0.15) == pytest.approx(0.48)
    assert links.choose_stream_seconds(10.0, 0.15) == links.LONGEST


def test_each_source_has_the_figures_of_its_pairs() -> None:
    def body(group: Group) -> tuple[list[LinkFigures], list[LinkFigures]]:
        meter = LinkMeter(connect_pairs(group))
        alone = meter.measure_alone([[(0, 1)], [(1, 2)], [(2, 0), (1, 3)], [(3, 0)]], 0.005)
        crowded = meter.measure_crowded([[(0, 1), (1, 2), (2, 0)]], 0.005)
        meter.meet_workers()
        return alone, crowded

    found = spawn(4, body)
    assert [[each.pair for each in alone] for alone, _ in found] == [
        [(0, 1)],
        [(1, 2), (1, 3)],
        [(2, 0)],
        [(3, 0)],
    ]
    assert [[each.pair for each in crowded] for _, crowded in found] == [
        [(0, 1)],
        [(1, 2)],
        [(2, 0)],
        [],
    ]
    assert all(
        each.latency > 0 and each.rate > 0 for both in found for figures in both for each in figures
    )


def test_nobody_goes_on_before_all_have_met() -> None:
    came: list[int] = []

    def body(group: Group) -> list[int]:
        meter = LinkMeter(connect_pairs(group))
        for _ in range(20):
            came.append(group.rank)
            meter.meet_workers()
            seen = list(came)
            meter.meet_workers()
            assert len(seen) % group.size == 0
        return seen

    assert all(len(seen) == 60 for seen in spawn(3, body))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_worker_that_does_not_come_is_named(late: int) -> None:
    """Only who waits for the late one has a short deadline, and only once the others' word is on
    its way.
    """
    over, said = threading.Barrier(3), threading.Event()
    told: dict[int, PacelineError] = {}
    timings = (
        ProbeTimings(PATIENCE, PATIENCE, 0.4)
        if late == 0
        else ProbeTimings(PATIENCE, 1.0, PATIENCE)
    )

    def body(group: Group) -> None:
        network = connect_pairs(group)
        meter = LinkMeter(network, timings)
        try:
            if group.rank == 0 and late:
                assert said.wait(PATIENCE)
            if group.rank not in (0, late):
                send = network.send

                def sent(*given: Any, **more: Any) -> Any:
                    work = send(*given, **more)
                    said.set()
                    return work

                network.send = sent  # type: ignore[method-assign]
            if group.rank != late:
                meter.meet_workers()
        except PacelineError as error:
            told[group.rank] = error
        finally:
            if group.rank == 0 and late:
                network.abort()  # those who wait for its word
        over.wait(PATIENCE)  # the late one stays as long as the others wait
        meter.meet_workers()

    with pytest.raises(PacelineError):
        spawn(3, body)
    named = told[0] if late else next(iter(told.values()))
    assert (
        isinstance(named, DeadlineExceeded)
        and f"from rank {late}" in str(named)
        and named.missing == (late,)
    )


def test_a_link_whose_other_end_does_not_answer() -> None:
    over = threading.Event()

    def body(group: Group) -> str:
        meter = LinkMeter(connect_pairs(group), ProbeTimings(0.2, PATIENCE, PATIENCE))
        meter.meet_workers()
        if group.rank == 1:
            over.wait(PATIENCE)
            return ""
        try:
            meter._measure_link(1, 0.01)
        except DeadlineExceeded as error:
            return str(error)
        finally:
            over.set()
        raise AssertionError("it was answered")

    assert "has not received an answer from rank 1" in spawn(2, body)[0]


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_worker_that_dies_ends_it_for_all(dies: int) -> None:
    ended: dict[int, BaseException] = {}

    def body(group: Group) -> None:
        meter = LinkMeter(connect_pairs(group))
        try:
            meter.measure_alone([[(0, 1)], [(1, 2)]], 0.005)
            if group.rank == dies:
                raise OSError("it dies here")
            meter.measure_crowded([[(0, 1), (1, 2), (2, 0)]], 0.005)
            meter.meet_workers()
        except PacelineError as error:
            ended[group.rank] = error
            raise

    with pytest.raises((OSError, WorkerLost)):
        spawn(3, body)
    assert set(ended) == {0, 1, 2} - {dies} and all(
        isinstance(error, WorkerLost) for error in ended.values()
    )

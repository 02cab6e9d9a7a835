"""The simulator against one that goes through time tick by tick, and against what can be worked
out by hand.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.parallel.pipelining.schedule import Action, PipelineSchedule
from paceline.parallel.pipelining.schedules import SCHEDULES, make_schedule
from paceline.parallel.pipelining.simulate import (
    PipelineTimeline,
    StageTimes,
    make_even_times,
    simulate_schedule,
)

SIZES = [(1, 1), (2, 2), (2, 5), (3, 3), (3, 7), (4, 8), (4, 13)]


def by_ticks(schedule: PipelineSchedule, times: StageTimes) -> dict[Action, tuple[int, int]]:
    """When each action begins and ends, where all times are whole: at each tick, whoever is free
    begins what it can.
    """
    done: dict[Action, tuple[int, int]] = {}
    there: dict[Action, int] = {}
    at, busy = [0] * schedule.ranks, [0] * schedule.ranks
    links: dict[tuple[int, int], int] = {}
    for tick in range(100_000):
        for rank, row in enumerate(schedule.rows):
            while busy[rank] <= tick and at[rank] < len(row):
                action = row[at[rank]]
                if any(
                    need.stage != action.stage and there.get(need, tick + 1) > tick
                    for need in schedule.find_needed(action)
                ):
                    break
                busy[rank] = tick + int(times.seconds(action.kind, action.stage))
                done[action] = tick, busy[rank]
                at[rank] += 1
                goes = schedule.target_stage(action)
                there[action] = busy[rank]
                if goes is not None and schedule.placed[goes] != rank:
                    boundary, way = min(goes, action.stage), (rank, schedule.placed[goes])
                    assert times.links is not None
                    links[way] = max(links.get(way, 0), busy[rank]) + int(
                        times.transfer_nbytes(boundary, back=goes < action.stage)
                    )
                    there[action] = links[way] + int(times.links[boundary].latency_seconds)
        if all(at[rank] == len(row) for rank, row in enumerate(schedule.rows)):
            return done
    raise AssertionError("not done")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_as_if_time_went_by(data: st.DataObject) -> None:
    name, ranks, micro_batches = (
        data.draw(st.sampled_from(SCHEDULES)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 7)),
    )
    schedule = make_schedule(name, ranks, micro_batches)
    whole = st.integers(1, 5)
    numbers = [
        data.draw(st.lists(whole, min_size=count, max_size=count))
        for count in [schedule.stages] * 4 + [schedule.stages - 1] * 3
    ]
    forward, backward, first, second, sends, returns, latencies = numbers
    times = StageTimes(
        forward,
        backward,
        first,
        second,
        None,
        sends,
        returns,
        [LinkSpeed(float(wait), 1.0) for wait in latencies],
    )
    timeline = simulate_schedule(schedule, times)
    assert {
        span.action: (span.start, span.end) for row in timeline.rows for span in row
    } == by_ticks(schedule, times)


def unit(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> PipelineTimeline:
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    return simulate_schedule(schedule, make_even_times(schedule, 1.0, 2.0))


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_bubbles_are_those_of_the_papers(ranks: int, micro_batches: int) -> None:
    p, m = ranks, micro_batches
    bubbles = {name: unit(name, p, m).bubble for name in SCHEDULES}
    assert bubbles["gpipe"] == bubbles["1f1b"] == pytest.approx((p - 1) / (m + p - 1))
    assert bubbles["interleaved"] == pytest.approx((p - 1) / 2 / (m + (p - 1) / 2))
    assert bubbles["zero-bubble"] == pytest.approx((p - 1) / (3 * m + p - 1))
    assert m < 2 * p - 1 or bubbles["zbv"] == pytest.approx((p - 1) / 2 / (3 * m + (p - 1) / 2))


def test_what_is_kept() -> None:
    assert unit("1f1b", 4, 8).kept_micro_batches == (4, 3, 2, 1)
    assert unit("interleaved", 4, 8).kept_micro_batches == (5.5, 4.5, 3.5, 2.5)
    assert unit("zbv", 4, 8).kept_micro_batches == (4, 4, 4, 4)
    assert unit("1f1b", 4, 8).kept_bytes == (0, 0, 0, 0)  # nobody said
    schedule = make_schedule("1f1b", 2, 5)
    assert simulate_schedule(
        schedule, replace(make_even_times(schedule, 1, 2), kept=(10, 100))
    ).kept_bytes == (
        20,
        100,
    )


def test_transfers_run_beside_computing_and_one_after_another() -> None:
    """F at 0 to 1 and 1 to 2; bytes take 3, and 1 more until they are there: the second leaves
    when the link is free again.
    """
    schedule = make_schedule("gpipe", 2, 2)
    timeline = simulate_schedule(
        schedule, StageTimes([1, 1], [2, 2], sends=[6], returns=[1], links=[LinkSpeed(1.0, 2.0)])
    )
    there, back = timeline.transfers[:2], timeline.transfers[2:]
    assert [(way.source, way.target, way.start, way.end, way.nbytes) for way in there] == [
        (0, 1, 1, 5, 6),
        (0, 1, 4, 8, 6),
    ]
    assert [span.start for span in timeline.rows[1]] == [5, 8, 9, 11]
    assert [(way.source, way.target, way.start, way.end) for way in back] == [
        (1, 0, 11, 12.5),
        (1, 0, 13, 14.5),
    ]
    assert timeline.makespan == 16.5 and timeline.idle == (10.5, 10.5)


def test_stages_of_one_rank_send_nothing() -> None:
    schedule = make_schedule("zbv", 2, 3)
    ways = {
        (way.action.stage, way.source, way.target)
        for way in simulate_schedule(schedule, make_even_times(schedule, 1, 2, 1)).transfers
    }
    # nothing from stage 1 to 2, and back, which are both on rank 1
    assert ways == {(0, 0, 1), (2, 1, 0), (3, 0, 1), (1, 1, 0)}
    assert simulate_schedule(make_schedule("1f1b", 1, 3), StageTimes([1], [2])).transfers == ()


def test_a_slow_rank_is_waited_for() -> None:
    schedule = make_schedule("1f1b", 2, 10)
    even, slow = (
        simulate_schedule(schedule, make_even_times(schedule, 1, 2), speeds)
        for speeds in ([1, 1], [1, 0.5])
    )
    # ten times as long at the slow one, and what comes before and after
    assert (even.makespan, slow.makespan) == (33, 63)
    assert slow.idle == (33, 3)


def test_halves_of_a_backward() -> None:
    schedule = make_schedule("zero-bubble", 1, 1)
    assert [span.end for span in simulate_schedule(schedule, StageTimes([1], [4])).rows[0]] == [
        1,
        3,
        5,
    ]
    assert [
        span.end for span in simulate_schedule(schedule, StageTimes([1], [4], [3], [2])).rows[0]
    ] == [
        1,
        4,
        6,
    ]


def test_nothing_takes_no_time() -> None:
    assert unit("gpipe", 1, 4).bubble == 0
    schedule = make_schedule("gpipe", 2, 1)
    assert simulate_schedule(schedule, make_even_times(schedule, 0, 0)).bubble == 0


@pytest.mark.parametrize(
    ("times", "speeds", "message"),
    [
        (StageTimes([1], [2, 2]), None, "forwards has 1 value: for 1f1b here it needs 2"),
        (StageTimes([1, 1], [2, 2], sends=[1, 1]), None, "sends has 2 values: .* needs 1"),
        (StageTimes([1, 1], [2, 2], links=[]), None, "links has 0 values"),
        (
            StageTimes([1, 1], [2, 2], links=[LinkSpeed(0.0, 0.0)]),
            None,
            r"links is \[\(0.0, 0.0\)\]: each link needs a latency",
        ),
        (
            StageTimes([1, 1], [2, 2], links=[LinkSpeed(-1.0, 5.0)]),
            None,
            r"links is \[\(-1.0, 5.0\)\]",
        ),
        (StageTimes([1, 1], [2, -2]), None, r"backwards is \[2, -2\]"),
        (StageTimes([1, float("nan")], [2, 2]), None, "forwards is"),
        (StageTimes([1, 1], [2, 2]), [1], "speeds has 1 value"),
        (StageTimes([1, 1], [2, 2]), [1, 0], r"speeds is \[1, 0\]"),
    ],
)
def test_times_that_dont_fit(times: StageTimes, speeds: list[float] | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate_schedule(make_schedule("1f1b", 2, 2), times, speeds)

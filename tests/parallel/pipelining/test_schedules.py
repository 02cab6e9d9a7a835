"""The schedules there are: proved for many sizes, with the memory and the time that they
promise, and in the order of torch's.
"""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.parallel.pipelining.schedule import (
    PipelineSchedule,
    count_kept,
    order_actions,
    prove_schedule,
)
from paceline.parallel.pipelining.schedules import SCHEDULES, check_schedule, make_schedule
from tests.harness.compiling import COMPILES

KINDS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
UNITS = {"forward": 1, "backward": 2, "input": 1, "weight": 1}
SIZES = [(2, 2), (2, 5), (3, 3), (3, 7), (4, 8), (4, 13), (5, 10), (8, 32)]


def makespan(schedule: PipelineSchedule) -> int:
    """Time until all is done, where a forward of one stage takes 1."""
    ends: dict[object, int] = {}
    clock = [0] * schedule.ranks
    for rank, action in order_actions(schedule):
        start = max([clock[rank], *(ends[need] for need in schedule.find_needed(action))])
        ends[action] = clock[rank] = start + UNITS[action.kind]
    return max(clock)


@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 30), st.integers(2, 4))
@settings(max_examples=120, deadline=None)
def test_any_size_is_proved(name: str, ranks: int, micro_batches: int, chunks: int) -> None:
    schedule = make_schedule(name, ranks, micro_batches, chunks if name == "interleaved" else None)
    prove_schedule(schedule)
    assert (schedule.ranks, schedule.micro_batches) == (ranks, micro_batches)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_memory_and_time_are_as_promised(ranks: int, micro_batches: int) -> None:
    p, m = ranks, micro_batches
    schedules = {name: make_schedule(name, p, m) for name in SCHEDULES}
    kept = {name: count_kept(schedule) for name, schedule in schedules.items()}
    times = {name: makespan(schedule) for name, schedule in schedules.items()}
    assert kept["gpipe"] == [m] * p
    assert kept["1f1b"] == [min(m, p - r) for r in range(p)]
    assert kept["zero-bubble"] == [p] * p
    largest = -(-m // (m // p))  # the first round
    assert kept["interleaved"] == [min(2 * m, largest + 2 * (p - 1 - r) + 1) for r in range(p)]
    assert max(kept["zbv"]) <= 2 * p
    assert times["gpipe"] == times["1f1b"] == 3 * m + 3 * (p - 1)
    assert times["zero-bubble"] == 3 * m + p - 1
    assert times["interleaved"] == 2 * 3 * m + 3 * (p - 1)  # a stage is half as long there
    if m >= 2 * p - 1:
        assert times["zbv"] == 2 * 3 * m + p - 1 and kept["zbv"] == [2 * p] * p


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_more_chunks_make_the_bubble_smaller(chunks: int) -> None:
    assert makespan(make_schedule("interleaved", 4, 8, chunks)) == 3 * 8 * chunks + 3 * 3


def rows_of_torch(
    name: str, ranks: int, micro_batches: int, chunks: int
) -> list[list[tuple[str, int, int]]]:
    """What each rank does under torch's schedule of that name; that comes without stages and
    processes only if no constructor runs.
    """
    # with the compiler, which takes long
    peers = importlib.import_module("torch.distributed.pipelining.schedules")
    kind = {
        "gpipe": peers.ScheduleGPipe,
        "1f1b": peers.Schedule1F1B,
        "interleaved": peers.ScheduleInterleaved1F1B,
        "zero-bubble": peers.ScheduleInterleavedZeroBubble,
        "zbv": peers.ScheduleZBVZeroBubble,
    }[name]
    peer = object.__new__(kind)
    rounds = max(1, micro_batches // ranks)
    given = {
        "n_local_stages": chunks,
        "number_of_rounds": rounds,
        "microbatches_per_round": micro_batches // rounds,
    }
    peer.__dict__ |= {
        "pp_group_size": ranks,
        "_n_microbatches": micro_batches,
        "_num_stages": ranks * chunks,
        "num_stages": ranks * chunks,
    }
    peer.__dict__ |= given
    if name in ("gpipe", "1f1b"):
        rows = peer._get_pipeline_order()
    else:
        rows = [peer._calculate_single_rank_operations(rank) for rank in range(ranks)]
    letters = [
        [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in rows[rank] if a]
        for rank in range(ranks)
    ]
    return [
        [(KINDS[letter], stage, number) for letter, stage, number in row if letter in KINDS]
        for row in letters
    ]


@COMPILES
@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "chunks"),
    [
        *(("gpipe", *sizes, 1) for sizes in SIZES),
        *(("1f1b", *sizes, 1) for sizes in SIZES),
        *(("zero-bubble", *sizes, 1) for sizes in SIZES),
        *(("zbv", *sizes, 2) for sizes in SIZES),
        *(("zbv", ranks, micro_batches, 2) for ranks, micro_batches in [(4, 1), (4, 3), (3, 2)]),
        # torch refuses the others
        *(("interleaved", *sizes, 2) for sizes in SIZES if sizes[1] % (sizes[1] // sizes[0]) == 0),
        *(
            ("interleaved", ranks, micro_batches, 3)
            for ranks, micro_batches in [(4, 3), (4, 6), (2, 8), (3, 9)]
        ),
    ],
)
def test_the_order_is_that_of_torch(name: str, ranks: int, micro_batches: int, chunks: int) -> None:
    ours = make_schedule(name, ranks, micro_batches, chunks)
    mine = [
        [(action.kind, action.stage, action.micro_batch) for action in row] for row in ours.rows
    ]
    theirs = rows_of_torch(name, ranks, micro_batches, chunks)
    # torch numbers the last rank's forwards from 1 in this listing, which it doesn't run
    if name == "1f1b":
        mine[-1], theirs[-1] = ([step[:2] for step in rows[-1]] for rows in (mine, theirs))  # type: ignore[misc]
    assert mine == theirs


def test_where_stages_are() -> None:
    assert make_schedule("1f1b", 3, 4).placed == (0, 1, 2)
    assert make_schedule("interleaved", 2, 4, 3).placed == (0, 1, 0, 1, 0, 1)
    assert make_schedule("zbv", 3, 5).placed == (0, 1, 2, 2, 1, 0)


def test_chunks_of_a_user() -> None:
    assert [check_schedule(name, 2, 4) for name in SCHEDULES] == [1, 1, 2, 1, 2]
    assert check_schedule("interleaved", 2, 4, 3) == 3 and check_schedule("zbv", 2, 4, 2) == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("1f1b2", 2, 4), "schedule='1f1b2' is unknown; possible: .*did you mean 1f1b?"),
        (("1f1b", 0, 4), "1f1b with ranks=0: it has to be at least 1"),
        (("1f1b", 2, 0), "1f1b with micro_batches=0: it has to be at least 1"),
        (("1f1b", 2, True), "micro_batches=True"),
        (
            ("1f1b", 2, 4, 2),
            "1f1b with chunks=2: each rank has one stage; leave chunks out, or take interleaved",
        ),
        (("zbv", 2, 4, 3), "zbv with chunks=3: each rank has 2 stages"),
        (
            ("interleaved", 2, 4, 1),
            "interleaved with chunks=1: each rank has 2 stages or more; take 1f1b for one",
        ),
    ],
)
def test_what_cant_be(asked: tuple[str, int, int], message: str) -> None:
    for function in (check_schedule, make_schedule):
        with pytest.raises(UsageError, match=message):
            function(*asked)


def test_too_few_micro_batches_for_an_interleaved_schedule() -> None:
    with pytest.raises(
        UsageError,
        match=(
            r"interleaved with micro_batches=3 on 4 ranks: .* give it micro_batches=4 or more, or "
            r"take 1f1b"
        ),
    ):
        check_schedule("interleaved", 4, 3)
    prove_schedule(make_schedule("interleaved", 4, 3))  # a last batch may be smaller

from __future__ import annotations

import ctypes
from collections import Counter

import pytest

from paceline.comm.native.schedule_steps import (
    ADD,
    END,
    OWN,
    RECEIVE,
    REPLACE,
    SEND,
    TERM,
    Step,
    compile_steps,
    list_steps,
)
from paceline.comm.schedule import SCHEDULES, build_direct, build_owners, build_ring, build_schedule


def test_steps_of_two_owners() -> None:
    # as drawn in native/schedule.h, for rank 1 of two and ten elements; rank 0 is link 7
    assert list(list_steps(build_owners(2), 1, 10, (7, -1))) == [
        Step(SEND, 7, 1, 0, 5),
        Step(RECEIVE, 7, 0, 5, 10),
        Step(ADD, a=5, b=10, n=2),
        Step(TERM, n=1),  # from rank 0, received by step 1
        Step(TERM, n=OWN),
        Step(END),
        Step(SEND, 7, 3, 5, 10),
        Step(REPLACE, 7, 2, 0, 5, True),
        Step(END),
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("numel", [0, 2, 101])
def test_what_one_rank_sends_another_receives(name: str, numel: int) -> None:
    size = 5
    plan = build_schedule(name, [0, 1, 0, 1, 2])
    sent: Counter[tuple[int, int, int, int, int]] = Counter()
    received: Counter[tuple[int, int, int, int, int]] = Counter()
    for rank in range(size):
        # the number of a link is the rank at its other end
        for step in list_steps(plan, rank, numel, range(size)):
            if step.kind == SEND:
                sent[rank, step.link, step.message, step.a, step.b] += 1
            if step.kind in (RECEIVE, REPLACE):
                received[step.link, rank, step.message, step.a, step.b] += 1
    assert sent == received and bool(sent) == (numel > 0)
    # a message has a number of its own, as messages are told apart by it
    assert len({key[2] for key in sent}) == sent.total()


def test_compiled_steps_are_numbers_for_c() -> None:
    links = (0, 1, 2)
    compiled = compile_steps(build_ring(3), 0, 9, links)
    steps = list(list_steps(build_ring(3), 0, 9, links))
    assert list(compiled.array) == [int(value) for step in steps for value in step]
    assert ctypes.sizeof(compiled.array) == 8 * 6 * compiled.n_steps == 8 * 6 * len(steps)
    assert compiled.sent == ((1, 3),) * 4 and compiled.rounds == 4


@pytest.mark.parametrize(
    ("plan", "at_once"),
    [
        (build_direct(3), True),
        (build_owners(3), True),
        (build_ring(3), False),
        (build_ring(2), True),
    ],
)
def test_sums_of_all_parts_are_told_from_partial_ones(plan: object, at_once: bool) -> None:
    assert compile_steps(plan, 0, 100, (0, 1, 2)).adds_at_once is at_once  # type: ignore[arg-type]

"""The section that says how a run is now: each thing that is known, and nothing that a run has
named as markup.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from paceline.observe.watch.now import LateRank, RunNow, State
from paceline.observe.watch.section import MAX_EVENTS, draw_now_section

NOW = RunNow(
    name="mine",
    state="running",
    sync="AllReduce()",
    workers=3,
    cluster=(("a", (0, 1)), ("b", (2,))),
    step=1040,
    total_steps=2000,
    loss=1.23456,
    seconds=75.0,
    samples_per_second=1234.5,
    parts={"compute": 0.06, "exchange": 0.02, "wait": 0.01, "data": 0.01},
    late=LateRank(2, "b", 0.05, 0.1, "compute"),
    link="the link of b slow: 10 Mbit/s",
    shares=(16, 16, 32),
    checkpoints=2,
    events=((3.0, "rank 3 was lost"), (65.0, "saved step-00000020")),
)


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_all_that_is_known_is_there() -> None:
    found = words(draw_now_section(NOW, ["rank 1 failed; all start again"]))
    for part in (
        "mine running",
        "rank 1 failed; all start again",
        "step 1,040 of 2,000",
        "loss 1.235",
        "samples/s 1,234",
        "since its start 1:15",
        "left, about 1:36",
        "workers 3",
        "checkpoints 2",
        "compute 60%, 60.0 ms",
        "data 10%, 10.0 ms",
        "rank 2 on b is late by 50% of a step: compute",
        "the link of b slow: 10 Mbit/s",
        "3 workers on 2 hosts; samples of each in a batch of 64",
        "a rank 0: 16 rank 1: 16 b rank 2: 32, late",
        "1:05 saved step-00000020 0:03 rank 3 was lost",
    ):
        assert part in found, (part, found)
    assert draw_now_section(NOW).startswith('<section id="now" data-state="running">')


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("waiting", "waiting for the workers to begin"),
        ("silent", "no word from it for a minute or more"),
        ("gone", "broken off: the process that wrote its folder is gone"),
        ("failed", "failed at step 1040: ValueError: no"),
        ("ended", "ended"),
    ],
)
def test_the_states_of_a_run(state: State, said: str) -> None:
    found = words(
        draw_now_section(
            replace(NOW, state=state, why="ValueError: no" if state == "failed" else "")
        )
    )
    assert said in found
    assert ("step 1,040" in found) == (state != "waiting")
    assert ("is late by" in found) == (state != "ended") and "left, about" not in found


def test_what_is_not_known_is_left_out() -> None:
    found = words(draw_now_section(RunNow(name="mine", state="running", workers=1)))
    assert found == "Now mine running step 0 loss none logged workers 1"


def test_a_worker_that_is_hardly_late_is_not_named() -> None:
    found = words(draw_now_section(replace(NOW, late=LateRank(2, "b", 0.01, 0.1, "compute"))))
    assert (
        "No worker makes the others wait." in found
        and "late by" not in found
        and "32, late" not in found
    )


def test_of_many_events_the_last_are_shown() -> None:
    found = draw_now_section(
        replace(NOW, events=tuple((float(number), f"event {number}.") for number in range(100)))
    )
    assert (
        found.count("<li>") == MAX_EVENTS
        and "event 99." in found
        and f"event {99 - MAX_EVENTS}." not in found
    )


def test_names_are_no_markup() -> None:
    evil = "<script>alert(1)</script>"
    late = LateRank(2, evil, 0.05, 0.1, evil)
    now = replace(
        NOW,
        name=evil,
        why=evil,
        loss=evil,
        link=evil,
        cluster=((evil, (0,)),),
        late=late,
        events=((1.0, evil),),
    )
    assert "<script" not in draw_now_section(now, [evil])

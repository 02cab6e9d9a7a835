"""The benchmark of bubbles: what it reads of a trace, and what it compares that with."""

from __future__ import annotations

import pytest

from benchmarks.bubbles import measured, simulated


def event(rank: int, name: str, start: float, seconds: float, step: int) -> dict[str, object]:
    return {"ph": "X", "cat": "stage", "name": name, "pid": rank, "ts": start, "dur": seconds, "args": {"step": step}}


def test_the_bubble_of_a_trace_is_the_median_of_its_steps_without_the_first() -> None:
    events = [{"ph": "M", "name": "process_name", "pid": 0}]
    for step, wait in enumerate([500.0, 500.0, 1.0, 2.0, 50.0]):
        events += [event(0, "F0 of stage 0", 0.0, 1.0, step), event(1, "F0 of stage 1", 1.0 + wait, 1.0, step)]
        events.append(event(1, "what stage 0 gives stage 1 for micro-batch 0", 0.0, 1.0 + wait, step))
    assert measured(events) == pytest.approx(1 - 2 / (2 * 4))


@pytest.mark.parametrize(("name", "bubble"), [("gpipe", 3 / 11), ("1f1b", 3 / 11), ("interleaved", 3 / 19), ("zero-bubble", 3 / 27)])
def test_the_simulation_is_that_of_the_paper(name: str, bubble: float) -> None:
    assert simulated(name, 4, 8, 0.01) == pytest.approx(bubble)

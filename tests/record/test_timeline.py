"""All ranks on one clock, drawn so that Perfetto can show it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.mesh import Mesh
from paceline.comm.agreement import Agreement
from paceline.record.timeline import (
    ClockOffset,
    add_late_spans,
    compare_clocks,
    estimate_offsets,
    gather_spans,
    make_trace_events,
    write_trace,
)
from paceline.trace import ServerWork, Span
from paceline.unequal.stragglers.lateness import RankLateness
from tests.harness.thread_groups import ThreadGroup, spawn


def span(name: str, kind: str, start: int, end: int, step: int = 0) -> Span:
    return Span(name, kind, start, end, step)


def meet(truth: list[int], rounds: int, slack: int, seed: int) -> list[list[tuple[int, int]]]:
    """Meetings of ranks whose clocks are ahead by `truth`: each enters and leaves up to `slack`
    away from the moment all were there.
    """
    draw = random.Random(seed)
    times: list[list[tuple[int, int]]] = [[] for _ in truth]
    for k in range(rounds):
        step_state = 10**9 * (k + 1)
        for rank, ahead in enumerate(truth):
            times[rank].append(
                (
                    step_state - draw.randrange(slack) + ahead,
                    step_state + draw.randrange(slack) + ahead,
                )
            )
    return times


@pytest.mark.parametrize("seed", range(5))
def test_offsets_are_found(seed: int) -> None:
    truth = [0, 5 * 10**12, 0, -3 * 10**9]
    found = estimate_offsets(meet(truth, rounds=16, slack=100_000, seed=seed), hosts=[0, 1, 0, 2])
    assert found[0] == found[2] == ClockOffset(0, 0)
    assert all(abs(one.ahead - other) < 60_000 for one, other in zip(found, truth, strict=True))
    assert all(
        abs(one.ahead - other) <= one.within < 60_000
        for one, other in zip(found, truth, strict=True)
    )


def test_offsets_from_ping_pong() -> None:
    mine = [(0, 100), (1000, 1010), (2000, 2400)]  # sent, received
    theirs = [(580, 580), (1505, 1505), (2530, 2530)]  # answered
    # the fastest: 1505 - (1000 + 1010) / 2
    assert estimate_offsets([mine, theirs], hosts=[0, 1]) == [(0, 0), (500, 5)]


def test_more_ranks_of_a_host_narrow_its_offset() -> None:
    loose, tight = [(-500, 500)], [(1000, 1010)]
    assert estimate_offsets([[(0, 10)], [(995, 1520)], tight], hosts=[0, 1, 1]) == [
        (0, 0),
        (1000, 10),
        (1000, 10),
    ]
    assert estimate_offsets([[(0, 10)], loose], hosts=[0, 0]) == [(0, 0), (0, 0)]


def test_clocks_are_compared_in_a_group() -> None:
    ahead = [0, 7 * 10**9, 7 * 10**9]

    def body(group: ThreadGroup) -> list[ClockOffset]:
        return compare_clocks(
            Agreement(group), [0, 1, 1], clock=lambda: time.perf_counter_ns() + ahead[group.rank]
        )

    results = spawn(3, body)
    assert results[0] == results[1] == results[2]
    assert all(
        abs(found.ahead - true) <= found.within
        for found, true in zip(results[0], ahead, strict=True)
    )
    assert (
        spawn(2, lambda group: compare_clocks(Agreement(group), [0, 0]))
        == [[ClockOffset()] * 2] * 2
    )


def test_spans_are_gathered() -> None:
    results = spawn(
        2,
        lambda group: gather_spans(
            Agreement(group), [span("x", "data", group.rank, 5, 3)] * group.rank
        ),
    )
    assert results[0] == results[1] == {0: [], 1: [Span("x", "data", 1, 5, 3)]}


def events(*arguments: Any, **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    found = list(make_trace_events(*arguments, **options))
    return [event for event in found if event["ph"] == "X"], [
        event for event in found if event["ph"] == "M"
    ]


def test_one_clock() -> None:
    drawn, named = events(
        {
            0: [span("turn", "step", 5_000, 9_000, 4)],
            1: [span("turn", "step", 1_006_000, 1_010_500, 4)],
        },
        names=["A", "B"],
        offsets=[ClockOffset(), ClockOffset(1_000_000)],
    )
    assert [(event["pid"], event["ts"], event["dur"]) for event in drawn] == [
        (0, 0.0, 4.0),
        (1, 1.0, 4.5),
    ]
    assert drawn[0]["args"] == {"step": 4}
    names = [event["args"]["name"] for event in named if event["name"] == "process_name"]
    assert names == ["rank 0 on A", "rank 1 on B"]


def test_kinds_have_rows_in_order() -> None:
    spans = [
        span("a", "data", 0, 1),
        span("b", "odd", 0, 1),
        span("c", "step", 0, 9),
        span("d", "exchange", 2, 3),
    ]
    _, named = events({0: spans})
    assert [event["args"]["name"] for event in named if event["name"] == "thread_name"] == [
        "step",
        "exchange",
        "data",
        "odd",
    ]
    assert [event["args"]["name"] for event in named if event["name"] == "process_name"] == [
        "rank 0"
    ]


def test_ranks_have_their_places_and_exchanges_their_axes() -> None:
    mesh = Mesh((("data", 2), ("tensor", 2)), (0, 2, 1, 3))
    mine = [
        span("backward", "exchange", 0, 1),
        span("bucket 0", "bucket", 0, 1),
        Span("sum", "tensor", 2, 3, 0, "tensor"),
    ]
    drawn, named = events(
        {0: [*mine, span("compute", "compute", 0, 9)], 2: []}, names=["A", "A", "B"], mesh=mesh
    )
    names = [event["args"]["name"] for event in named if event["name"] == "process_name"]
    assert names == ["rank 0 on A (data 0, tensor 0)", "rank 2 on B (data 0, tensor 1)"]
    axes = {event["name"]: event["args"].get("axis") for event in drawn}
    assert axes == {"backward": "data", "bucket 0": "data", "sum": "tensor", "compute": None}
    assert [event["args"]["name"] for event in named if event["name"] == "thread_name"] == [
        "compute",
        "exchange",
        "bucket",
        "tensor",
    ]
    drawn, _ = events({0: mine}, mesh=Mesh((("tensor", 2),), (0, 1)))
    assert [event["args"].get("axis") for event in drawn] == [None, None, "tensor"]


def test_overlapping_spans_get_rows_of_their_own() -> None:
    #   a [0        10]
    #   b    [2  5]          inside a: the same row
    #   c         [6     12] reaches out of a: another row
    #   d               [12  15]
    spans = [
        span("a", "exchange", 0, 10),
        span("c", "exchange", 6, 12),
        span("b", "exchange", 2, 5),
        span("d", "exchange", 12, 15),
    ]
    drawn, named = events({0: spans})
    rows = {event["name"]: event["tid"] for event in drawn}
    assert rows["a"] == rows["b"] == rows["d"] != rows["c"]
    assert [event["args"]["name"] for event in named if event["name"] == "thread_name"] == [
        "exchange",
        "exchange 2",
    ]


def test_rows_never_hold_spans_that_cross() -> None:
    draw = random.Random(0)
    for _ in range(50):
        spans = [
            span("x", "k", start, start + draw.randrange(30))
            for start in (draw.randrange(100) for _ in range(30))
        ]
        rows: dict[int, list[tuple[int, int]]] = {}
        for event in events({0: spans})[0]:
            rows.setdefault(event["tid"], []).append(
                (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
            )
        assert sum(map(len, rows.values())) == 30
        for row in rows.values():
            assert not any(a[0] < b[0] < a[1] < b[1] for a in row for b in row)


def test_the_file_is_whole_json(tmp_path: Path) -> None:
    write_trace(
        tmp_path / "trace.json",
        make_trace_events({0: [span('a "quoted" name', "data", 1, 2)], 1: []}, names=["ü", "B"]),
    )
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 1
    write_trace(tmp_path / "trace.json", make_trace_events({}))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_servers_are_beside_the_ranks() -> None:
    """On the clock of rank 0, with a curve of what waits there."""
    served = [
        ServerWork(
            "server 0 on B",
            10**9,
            [span("push", "serve", 10**9 + 5_000, 10**9 + 7_000, 3)],
            [(10**9 + 6_000, 2)],
        )
    ]
    events = list(
        make_trace_events({0: [span("turn", "step", 4_000, 9_000)]}, names=["A"], servers=served)
    )
    (name,) = [
        event
        for event in events
        if event["name"] == "process_name" and event["args"]["name"] == "server 0 on B"
    ]
    mine = [event for event in events if event["pid"] == name["pid"]]
    (work,) = [event for event in mine if event["ph"] == "X"]
    assert (work["name"], work["ts"], work["dur"], work["args"]["step"]) == ("push", 1.0, 2.0, 3)
    assert [(event["ts"], event["args"]) for event in mine if event["ph"] == "C"] == [
        (2.0, {"messages": 2})
    ]


def test_who_was_late_is_drawn_at_the_end_of_its_turns_with_the_cause() -> None:
    ms = 10**6
    spans = {
        rank: [
            span("turn", "step", 0, 40 * ms),
            span("turn", "step", 50 * ms, 100 * ms),
            span("turn", "step", 200 * ms, 300 * ms, 1),
        ]
        for rank in (0, 1)
    }
    late = {
        1: [RankLateness(1, {"stolen": 0.02, "reading": 0.001})],
        2: [RankLateness(0, {"compute": 0.005}), RankLateness(1, {"compute": 0.02})],
    }
    found = add_late_spans(spans, late)
    assert found[0] == spans[0]  # 5 ms of 100 are not worth it
    assert found[1][3:] == [
        span("stolen processor", "late", 79 * ms, 100 * ms),
        span("compute", "late", 280 * ms, 300 * ms, 1),
    ]

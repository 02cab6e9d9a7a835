"""The timeline of all ranks on one clock, in Chrome's trace format, for Perfetto (ui.perfetto.dev).

A rank is a process of the picture. Each kind of span has a row, or several if spans of the kind
overlap. If a model is cut, a rank shows its place in the mesh, each axis with a cut has a row, and
an exchange says along which axis it is:

    rank 0 on A   step      [ turn          ][ turn         ]
                  late                 [data loading]
                  compute     [      ]       [      ]
                  exchange            [     ]        [     ]
                  bucket          [ 0  ]         [ 0 ]
                  bucket 2           [ 1  ]         [ 1  ]
                  between          [][][][]       [][][][]
    server 0 on A serve          [][][ ]        [][][ ]     and a curve of the messages that wait
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgpack

from paceline.cluster.mesh import Mesh
from paceline.record.folder import write_atomically
from paceline.trace import ServerWork, Span
from paceline.unequal.stragglers.lateness import RankLateness

# Only for types, so that reading a run's folder doesn't import torch.
if TYPE_CHECKING:
    from paceline.comm.agreement import Agreement

SPAN_KINDS: Final = (
    *("step", "late", "compute", "collection", "exchange", "wait", "data", "bucket"),
    *("tensor", "stage", "shard"),
    *("within", "between"),
)  # rows in order
# Kinds of spans of strategies, which exchange along the axis `data`.
STRATEGY_KINDS: Final = ("exchange", "bucket")
# Process number of the first server in the picture, above all ranks.
FIRST_SERVER: Final = 1 << 20
# A rank is drawn as late from these seconds, and from this share of a turn.
MIN_LATE_SECONDS, MIN_LATE_SHARE = 1e-3, 0.1
# Meetings at which clocks are compared.
_CLOCK_MEETINGS = 16

# Clock of one rank just before and just after a meeting of all ranks, in nanoseconds.
ClockMeeting = tuple[int, int]


class ClockOffset(NamedTuple):
    """How far a rank's clock is ahead of rank 0's, in nanoseconds.

    `within` is the most by which `ahead` may be wrong.
    """

    ahead: int = 0
    within: int = 0


def estimate_offsets(
    meetings: Sequence[Sequence[ClockMeeting]], hosts: Sequence[int]
) -> list[ClockOffset]:
    """Estimate the offset of each rank's clock from meetings that all ranks took part in.

    No rank leaves a meeting before all ranks have entered it. So for ranks r and s: before_s <=
    after_r - offset_r + offset_s. Each meeting bounds the offset from both sides. The middle of the
    narrowest bounds is taken, which is wrong by at most half the fastest meeting. Ranks of one host
    share its clock. A ping-pong is a meeting, too: (sent, received) on one side, (answered,
    answered) on the other.

    Args:
        meetings: Clock of each rank just before and just after each meeting, in nanoseconds.
        hosts: Host of each rank.
    """
    bounds: dict[int, tuple[int, int]] = {}
    # Ranks on the host of rank 0 all show its clock, so each of them gives bounds.
    base_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    for rank, host in enumerate(hosts):
        pairs = [
            (own, other)
            for base in base_ranks
            for own, other in zip(meetings[rank], meetings[base], strict=True)
        ]
        lowest = [own[0] - other[1] for own, other in pairs]
        highest = [own[1] - other[0] for own, other in pairs]
        if host in bounds:
            lowest.append(bounds[host][0])
            highest.append(bounds[host][1])
        bounds[host] = max(lowest), min(highest)
    return [
        ClockOffset() if host == hosts[0] else _middle_of_bounds(*bounds[host]) for host in hosts
    ]


def _middle_of_bounds(low: int, high: int) -> ClockOffset:
    """Return the offset in the middle of these bounds."""
    return ClockOffset((low + high) // 2, -((low - high) // 2))


def compare_clocks(
    agreement: Agreement, hosts: Sequence[int], *, clock: Callable[[], int] = time.perf_counter_ns
) -> list[ClockOffset]:
    """Estimate the offsets of all ranks; takes no time on a single host. Collective."""
    if len(set(hosts)) == 1:
        return [ClockOffset()] * len(hosts)
    own_meetings = []
    for _ in range(_CLOCK_MEETINGS):
        entered = clock()
        agreement.meet("comparing clocks")
        own_meetings.append((entered, clock()))
    return estimate_offsets(
        [
            msgpack.unpackb(body)
            for body in agreement.meet("compared clocks", msgpack.packb(own_meetings))
        ],
        hosts,
    )


def gather_spans(agreement: Agreement, spans: Sequence[Span]) -> dict[int, list[Span]]:
    """Return the spans of every rank. Collective."""
    bodies = agreement.meet("the timeline", msgpack.packb([list(span) for span in spans]))
    return {
        rank: [Span(*span) for span in msgpack.unpackb(body)] for rank, body in enumerate(bodies)
    }


def add_late_spans(
    spans: Mapping[int, Sequence[Span]], late: Mapping[int, Sequence[RankLateness]]
) -> dict[int, list[Span]]:
    """Return the spans of each rank, with a further one for each turn in which it was late.

    That span ends with the turn, is as long as the rank was late, and has the name of the cause.
    `late` lists the late ranks by step.
    """
    marked = {rank: [*rank_spans] for rank, rank_spans in spans.items()}
    for rank, rank_spans in spans.items():
        turns = {span.step: span for span in rank_spans if span.kind == "step"}
        for turn in turns.values():
            least = max(MIN_LATE_SECONDS * 1e9, MIN_LATE_SHARE * (turn.end - turn.start))
            marked[rank] += [
                Span(
                    lateness.cause,
                    "late",
                    turn.end - int(lateness.seconds * 1e9),
                    turn.end,
                    turn.step,
                )
                # A span has the number of steps that have ended, so its own step is the next one.
                for lateness in late.get(turn.step + 1, ())
                if lateness.rank == rank and lateness.seconds * 1e9 >= least
            ]
    return marked


def make_trace_events(
    spans: Mapping[int, Sequence[Span]],
    *,
    names: Sequence[str] = (),
    offsets: Sequence[ClockOffset] = (),
    servers: Sequence[ServerWork] = (),
    mesh: Mesh | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the events of all ranks and servers, in microseconds since the first span.

    Args:
        spans: Spans of each rank, on its own clock in nanoseconds.
        names: Host of each rank.
        offsets: Clock offset of each rank. Default: none.
        servers: Spans of servers, and the number of messages that wait there.
        mesh: Places of the ranks, if a model is cut.
    """
    shift = {rank: offsets[rank].ahead if rank < len(offsets) else 0 for rank in spans}
    starts = [span.start - shift[rank] for rank, rank_spans in spans.items() for span in rank_spans]
    origin = min(
        [*starts, *(span.start - server.ahead for server in servers for span in server.spans)],
        default=0,
    )
    for rank, rank_spans in sorted(spans.items()):
        name = f"rank {rank} on {names[rank]}" if rank < len(names) else f"rank {rank}"
        place, axis = (
            ("", "")
            if mesh is None
            else (f" ({mesh.format_coordinates(rank)})", "data" * (mesh.axis_size("data") > 1))
        )
        yield from _make_process_events(rank, name + place, rank_spans, shift[rank] + origin, axis)
    for process_number, server in enumerate(servers, FIRST_SERVER):
        zero = server.ahead + origin
        yield from _make_process_events(process_number, server.name, server.spans, zero)
        for moment, count in server.waiting:
            yield {
                "ph": "C",
                "name": "put off",
                "pid": process_number,
                "tid": 0,
                "ts": (moment - zero) / 1000,
                "args": {"messages": count},
            }


def _make_process_events(
    process_number: int, name: str, spans: Sequence[Span], zero: int, axis: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the events of one process.

    `axis` is the axis along which strategies exchange, if a model is cut.
    """
    yield _name_event("process", process_number, 0, name)
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": process_number,
        "tid": 0,
        "args": {"sort_index": process_number},
    }
    for row, (title, lane) in enumerate(_assign_rows(spans)):
        yield _name_event("thread", process_number, row, title)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": process_number,
            "tid": row,
            "args": {"sort_index": row},
        }
        for span in lane:
            along = span.axis or (axis if span.kind in STRATEGY_KINDS else "")
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": process_number,
                "tid": row,
                "ts": (span.start - zero) / 1000,
                "dur": max(span.end - span.start, 0) / 1000,
                "args": {"step": span.step, **({"axis": along} if along else {})},
            }


def write_trace(
    path: Path, events: Iterator[dict[str, Any]], *, offsets: Sequence[ClockOffset] = ()
) -> None:
    """Write the events as a trace for Perfetto and chrome://tracing.

    The estimated clock offsets are written, too.
    """
    lines = ",\n".join(json.dumps(event) for event in events)
    clocks = {
        "clock_ahead_us": [each.ahead / 1000 for each in offsets],
        "clock_within_us": [each.within / 1000 for each in offsets],
    }
    about = json.dumps(clocks)
    write_atomically(
        path, f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [\n{lines}\n]}}\n'
    )


def _name_event(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _assign_rows(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Yield the rows of the picture with their titles, kinds in the order of `SPAN_KINDS`."""
    kinds = sorted(
        {span.kind for span in spans},
        key=lambda kind: (SPAN_KINDS.index(kind) if kind in SPAN_KINDS else len(SPAN_KINDS), kind),
    )
    for kind in kinds:
        for row_number, lane in enumerate(
            _split_into_lanes([span for span in spans if span.kind == kind]), 1
        ):
            yield kind if row_number == 1 else f"{kind} {row_number}", lane


def _split_into_lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Sort spans into rows so that any two in a row are apart, or one contains the other.

    The viewer can draw only such spans in one row.
    """
    # Each row with its spans, and the ends of the spans that are still open.
    lanes: list[tuple[list[Span], list[int]]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        # Spans come in the order of their starts, so whatever ended before this one is closed for
        # good.
        for _, ends in lanes:
            while ends and ends[-1] <= span.start:
                ends.pop()
        lane = next((lane for lane in lanes if not lane[1] or span.end <= lane[1][-1]), None)
        if lane is None:
            lane = ([], [])
            lanes.append(lane)
        lane[0].append(span)
        lane[1].append(span.end)
    return [lane for lane, _ in lanes]

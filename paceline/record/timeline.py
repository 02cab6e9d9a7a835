"""The timeline of all ranks, on one clock, in Chrome's trace format, which Perfetto
(ui.perfetto.dev) opens.

A rank is a process of the picture; each kind of span has a row of its own, more than one where
spans of a kind overlap. Where a model is cut, a rank has its place in the mesh, each axis that
something is cut along a row, and an exchange says along which axis it is:

    rank 0 on A   step      [ turn          ][ turn         ]
                  late                 [data loading]
                  compute     [      ]       [      ]
                  exchange            [     ]        [     ]
                  bucket          [ 0  ]         [ 0 ]
                  bucket 2           [ 1  ]         [ 1  ]
                  between          [][][][]       [][][][]
    server 0 on A serve          [][][ ]        [][][ ]     and a curve of the messages that wait
                                                            for something
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgpack

from paceline.cluster.mesh import Mesh
from paceline.record.folder import write_whole
from paceline.trace import Served, Span
from paceline.unequal.stragglers.lateness import RankLateness

if TYPE_CHECKING:  # so that reading a run's folder doesn't import torch
    from paceline.comm.agreement import Agreement

KINDS: Final = (
    *("step", "late", "compute", "collection", "exchange", "wait", "data", "bucket"),
    *("tensor", "stage", "shard"),
    *("within", "between"),
)  # rows in order
OF_STRATEGIES: Final = ("exchange", "bucket")  # what strategies do, which exchange along `data`
SERVERS: Final = 1 << 20  # the number of the first server, as a process of the picture
# seconds, and a share of a turn, from which on it is drawn that a rank was late
LATE_LEAST, LATE_SHARE = 1e-3, 0.1
_MEETINGS = 16  # that clocks are compared at

Meeting = tuple[int, int]  # the clock of one rank before and after a meeting, in nanoseconds


class ClockOffset(NamedTuple):
    """How far the clock of a rank is `ahead` of rank 0's, and by how much that may be wrong
    (`within`), in nanoseconds.
    """

    ahead: int = 0
    within: int = 0


def offsets(meetings: Sequence[Sequence[Meeting]], hosts: Sequence[int]) -> list[ClockOffset]:
    """Return the offset of each rank's clock, judged by meetings that all ranks took part in.

    `meetings[rank][k]` is that rank's clock just before and just after meeting k, `hosts` the host
    of each rank. Nobody leaves a meeting before everybody has come, so for ranks r and s: before_s
    <= after_r - offset_r + offset_s. Each meeting bounds the offset from both sides; the middle of
    the narrowest bounds is taken, which is off by at most half the fastest meeting. Ranks of one
    host share its clock. A ping-pong is a meeting too: (sent, received) on one side, (answered,
    answered) on the other.
    """
    bounds: dict[int, tuple[int, int]] = {}
    here = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    for rank, host in enumerate(hosts):
        pairs = [
            (mine, theirs)
            for base in here
            for mine, theirs in zip(meetings[rank], meetings[base], strict=True)
        ]
        low = [mine[0] - theirs[1] for mine, theirs in pairs]
        high = [mine[1] - theirs[0] for mine, theirs in pairs]
        known = bounds.get(host)
        bounds[host] = (
            max(low if known is None else [*low, known[0]]),
            min(high if known is None else [*high, known[1]]),
        )
    return [ClockOffset() if host == hosts[0] else _middle(*bounds[host]) for host in hosts]


def _middle(low: int, high: int) -> ClockOffset:
    return ClockOffset((low + high) // 2, -((low - high) // 2))


def compare(
    agreement: Agreement, hosts: Sequence[int], *, clock: Callable[[], int] = time.perf_counter_ns
) -> list[ClockOffset]:
    """Return the `offsets` of this job's ranks; takes no time where there is one host.

    Collective.
    """
    if len(set(hosts)) == 1:
        return [ClockOffset()] * len(hosts)
    mine = []
    for _ in range(_MEETINGS):
        before = clock()
        agreement.meet("comparing clocks")
        mine.append((before, clock()))
    return offsets(
        [msgpack.unpackb(body) for body in agreement.meet("compared clocks", msgpack.packb(mine))],
        hosts,
    )


def gather(agreement: Agreement, spans: Sequence[Span]) -> dict[int, list[Span]]:
    """Return the spans of every rank. Collective."""
    bodies = agreement.meet("the timeline", msgpack.packb([list(span) for span in spans]))
    return {
        rank: [Span(*span) for span in msgpack.unpackb(body)] for rank, body in enumerate(bodies)
    }


def mark_late(
    spans: Mapping[int, Sequence[Span]], late: Mapping[int, Sequence[RankLateness]]
) -> dict[int, list[Span]]:
    """Return the spans of each rank, and one at the end of each turn in which it was late: as long
    as it was, by the name of the cause.

    `late`: by step, who was late in it.
    """
    marked = {rank: [*each] for rank, each in spans.items()}
    for rank, each in spans.items():
        turns = {span.step: span for span in each if span.kind == "step"}
        for turn in turns.values():
            least = max(LATE_LEAST * 1e9, LATE_SHARE * (turn.end - turn.start))
            marked[rank] += [
                Span(found.cause, "late", turn.end - int(found.seconds * 1e9), turn.end, turn.step)
                # a span has the number of steps that are over
                for found in late.get(turn.step + 1, ())
                if found.rank == rank and found.seconds * 1e9 >= least
            ]
    return marked


def merge(
    spans: Mapping[int, Sequence[Span]],
    *,
    names: Sequence[str] = (),
    offsets: Sequence[ClockOffset] = (),
    servers: Sequence[Served] = (),
    mesh: Mesh | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the events of all ranks.

    `names` are their hosts, `offsets` those of their clocks (default: none).

    `mesh`: where ranks are, if a model is cut between them. Times of events are microseconds since
    the first span.
    """
    shift = {rank: offsets[rank].ahead if rank < len(offsets) else 0 for rank in spans}
    starts = [span.start - shift[rank] for rank, each in spans.items() for span in each]
    origin = min(
        [*starts, *(span.start - server.ahead for server in servers for span in server.spans)],
        default=0,
    )
    for rank, each in sorted(spans.items()):
        name = f"rank {rank} on {names[rank]}" if rank < len(names) else f"rank {rank}"
        place, axis = (
            ("", "")
            if mesh is None
            else (f" ({mesh.place(rank)})", "data" * (mesh.extent("data") > 1))
        )
        yield from _process(rank, name + place, each, shift[rank] + origin, axis)
    for number, server in enumerate(servers, SERVERS):
        zero = server.ahead + origin
        yield from _process(number, server.name, server.spans, zero)
        for when, count in server.waiting:
            yield {
                "ph": "C",
                "name": "put off",
                "pid": number,
                "tid": 0,
                "ts": (when - zero) / 1000,
                "args": {"messages": count},
            }


def _process(
    number: int, name: str, spans: Sequence[Span], zero: int, axis: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the events of a process.

    `axis`: along which strategies exchange, where a model is cut.
    """
    yield _named("process", number, 0, name)
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": number,
        "tid": 0,
        "args": {"sort_index": number},
    }
    for row, (title, lane) in enumerate(_rows(spans)):
        yield _named("thread", number, row, title)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": number,
            "tid": row,
            "args": {"sort_index": row},
        }
        for span in lane:
            along = span.axis or (axis if span.kind in OF_STRATEGIES else "")
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": number,
                "tid": row,
                "ts": (span.start - zero) / 1000,
                "dur": max(span.end - span.start, 0) / 1000,
                "args": {"step": span.step, **({"axis": along} if along else {})},
            }


def write(
    path: Path, events: Iterator[dict[str, Any]], *, offsets: Sequence[ClockOffset] = ()
) -> None:
    """Write the events as a trace that Perfetto and chrome://tracing read, and say in it how the
    clocks of ranks were taken to differ.
    """
    lines = ",\n".join(json.dumps(event) for event in events)
    found = {
        "clock_ahead_us": [each.ahead / 1000 for each in offsets],
        "clock_within_us": [each.within / 1000 for each in offsets],
    }
    about = json.dumps(found)
    write_whole(
        path, f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [\n{lines}\n]}}\n'
    )


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _rows(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    kinds = sorted(
        {span.kind for span in spans},
        key=lambda kind: (KINDS.index(kind) if kind in KINDS else len(KINDS), kind),
    )
    for kind in kinds:
        for number, lane in enumerate(_lanes([span for span in spans if span.kind == kind]), 1):
            yield kind if number == 1 else f"{kind} {number}", lane


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Sort spans into rows in which any two are apart, or one inside the other: only such can be
    drawn in one row.
    """
    # the spans of a row, and the ends of those that are open
    lanes: list[tuple[list[Span], list[int]]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
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

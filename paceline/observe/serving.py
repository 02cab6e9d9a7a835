"""The report on servers of a run: how busy each was, its traffic, how far workers were apart;
and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.formatting import counted, sized
from paceline.observe.remarks import Remark

BUSY = 0.6  # of a run: a server that works for so long keeps workers waiting
AHEAD = 0.25  # of the turns
LEFT_OUT = 0.05  # of the samples


@dataclass(frozen=True)
class ServerFacts:
    """The facts of one server, from the summary."""

    name: str
    busy: float  # seconds
    received: int  # bytes
    sent: int
    kept: int
    put_off: int  # messages that waited at a time, at most
    rows: int | None = None  # in use, of sparse tables
    # how often a worker went on so many turns ahead of the slowest
    staleness: Mapping[int, int] = field(default_factory=dict)
    # how many steps were made by so many workers
    makers: Mapping[int, int] = field(default_factory=dict)
    dropped: tuple[int, int] = (0, 0)  # gradients that came too late for a step, and their samples


def read(fields: Mapping[str, Any], index: int) -> ServerFacts:
    """Read the facts of a server from these fields of a summary.

    Raises KeyError, ValueError or TypeError for fields that are none.
    """
    dropped = fields.get("dropped") or {}
    return ServerFacts(
        name=str(fields.get("name", f"server {index}")),
        busy=float(fields["busy_seconds"]),
        received=int(fields["bytes"]),
        sent=int(fields["bytes_sent"]),
        kept=int(fields["memory_bytes"]),
        put_off=int(fields["put_off"]),
        rows=None if fields.get("rows") is None else int(fields["rows"]),
        staleness={int(turns): int(count) for turns, count in fields.get("staleness", {}).items()},
        makers={
            int(workers): int(count)
            for workers, count in fields.get("steps_by_workers", {}).items()
        },
        dropped=(int(dropped.get("gradients", 0)), int(dropped.get("samples", 0))),
    )


def tell(servers: Sequence[ServerFacts], seconds: float, samples: int) -> str:
    """Describe the servers of a run of so many seconds in which so many samples were trained;
    empty without servers.
    """
    if not servers:
        return ""
    width = max(len(server.name) for server in servers)
    lines = ["Servers, with the share of the run in which each worked:"]
    for server in servers:
        kept = sized(server.kept) + (
            "" if server.rows is None else f" in {counted(server.rows, 'row')}"
        )
        lines.append(
            f"  {server.name:<{width}}  {server.busy / seconds if seconds > 0 else 0:>4.0%}  "
            f"{sized(server.received)} received, "
            f"{sized(server.sent)} sent, {kept} kept; at most {counted(server.put_off, 'message')} "
            "put off"
        )
    for server in servers:
        if sum(server.staleness.values()):
            lines.append(f"Workers went on {_shares(server.staleness)} turns ahead of the slowest.")
        if sum(server.makers.values()):
            lines.append(f"Steps were made by {_shares(server.makers)} workers.")
        if server.dropped[0]:
            gradients, lost = server.dropped
            share = f" ({lost / samples:.1%} of those trained)" if samples else ""
            lines.append(
                f"{counted(gradients, 'gradient')} came too late for a step: "
                f"their {counted(lost, 'sample')}{share} were dropped."
            )
    return "\n".join(lines)


def _shares(counts: Mapping[int, int]) -> str:
    """Write each number with its share: "0 (33%), 1 (67%)"."""
    total = sum(counts.values())
    return ", ".join(f"{number} ({count / total:.0%})" for number, count in sorted(counts.items()))


def advise(servers: Sequence[ServerFacts], seconds: float, samples: int) -> Iterator[Remark]:
    """Advise where a server is busy most of the time, where workers are held by the bound, and
    where work is thrown away.
    """
    busy = [server for server in servers if seconds > 0 and server.busy / seconds > BUSY]
    if busy:
        most = max(server.busy for server in busy) / seconds
        head = (
            f"{' and '.join(server.name for server in busy)}: at work for {most:.0%} of the run, "
            "so workers wait there"
        )
        alike = 2 * min(server.received for server in servers) > max(
            server.received for server in servers
        )
        if alike or len(busy) == len(servers):
            yield Remark(f"{head}. More servers share the work: --servers N")
        else:
            words = (
                f"{head}, while another gets less than half as many bytes: "
                "more of them (--servers N) help as far as they share these"
            )
            yield Remark(words)
    for server in servers:
        far, turns = max(server.staleness, default=0), sum(server.staleness.values())
        if far and server.makers and server.staleness[far] > AHEAD * turns:
            yield Remark(
                f"Workers were {counted(far, 'turn')} ahead of the slowest in "
                f"{server.staleness[far] / turns:.0%} of their turns: if that "
                "is the bound, they wait there. A larger one helps if workers are slow now and "
                "then; if it is always the same one, "
                "staleness=inf, or leaving it out"
            )
        _, lost = server.dropped
        if samples and lost / samples > LEFT_OUT:
            yield Remark(
                f"Backup workers dropped {lost:,} samples, {lost / samples:.0%} of those trained: "
                "leave out a worker that is always late, "
                "or give it fewer samples (--shares auto)"
            )

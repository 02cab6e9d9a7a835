"""Reports on servers of a run: load, traffic and staleness, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.formatting import format_bytes, format_count
from paceline.observe.remarks import Remark

# Share of a run from which on a busy server makes workers wait.
BUSY_SHARE = 0.6
# Share of the turns at the staleness bound that is worth advice.
AHEAD_SHARE = 0.25
# Share of the samples that may be dropped without advice.
DROPPED_SHARE = 0.05


@dataclass(frozen=True)
class ServerFacts:
    """The facts of one server, from the summary."""

    name: str
    busy: float  # seconds
    received: int  # bytes
    sent: int
    kept: int
    put_off: int  # most messages that waited at a time
    rows: int | None = None  # rows in use of sparse tables
    # How often a worker went on, by the number of turns that it was ahead of the slowest.
    staleness: Mapping[int, int] = field(default_factory=dict)
    # Number of steps by the number of workers that made them.
    makers: Mapping[int, int] = field(default_factory=dict)
    # Gradients that came too late for a step, and their samples.
    dropped: tuple[int, int] = (0, 0)


def read_server(fields: Mapping[str, Any], index: int) -> ServerFacts:
    """Read the facts of a server from its fields in a summary.

    Raises:
        KeyError, ValueError, TypeError: The fields are not those of a server.
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


def describe_servers(servers: Sequence[ServerFacts], seconds: float, samples: int) -> str:
    """Describe the servers of a run; empty without servers.

    Args:
        servers: Facts of the servers.
        seconds: Seconds of the run.
        samples: Samples that were trained.
    """
    if not servers:
        return ""
    width = max(len(server.name) for server in servers)
    lines = ["Servers, with the share of the run in which each worked:"]
    for server in servers:
        kept_text = format_bytes(server.kept) + (
            "" if server.rows is None else f" in {format_count(server.rows, 'row')}"
        )
        lines.append(
            f"  {server.name:<{width}}  {server.busy / seconds if seconds > 0 else 0:>4.0%}  "
            f"{format_bytes(server.received)} received, "
            f"{format_bytes(server.sent)} sent, {kept_text} kept; at most "
            f"{format_count(server.put_off, 'message')} put off"
        )
    for server in servers:
        if sum(server.staleness.values()):
            lines.append(
                f"Workers went on {_format_shares(server.staleness)} turns ahead of the slowest."
            )
        if sum(server.makers.values()):
            lines.append(f"Steps were made by {_format_shares(server.makers)} workers.")
        if server.dropped[0]:
            gradients, lost = server.dropped
            share = f" ({lost / samples:.1%} of those trained)" if samples else ""
            lines.append(
                f"{format_count(gradients, 'gradient')} came too late for a step: "
                f"their {format_count(lost, 'sample')}{share} were dropped."
            )
    return "\n".join(lines)


def _format_shares(counts: Mapping[int, int]) -> str:
    """Format each number with its share: "0 (33%), 1 (67%)"."""
    total = sum(counts.values())
    return ", ".join(f"{key} ({count / total:.0%})" for key, count in sorted(counts.items()))


def advise_on_servers(
    servers: Sequence[ServerFacts], seconds: float, samples: int
) -> Iterator[Remark]:
    """Advise on busy servers, on workers that wait at the staleness bound, and on dropped work.

    Args:
        servers: Facts of the servers.
        seconds: Seconds of the run.
        samples: Samples that were trained.
    """
    busy_servers = [
        server for server in servers if seconds > 0 and server.busy / seconds > BUSY_SHARE
    ]
    if busy_servers:
        busiest_share = max(server.busy for server in busy_servers) / seconds
        names = " and ".join(server.name for server in busy_servers)
        finding = f"{names}: at work for {busiest_share:.0%} of the run, so workers wait there"
        # If one server gets most of the bytes, further servers share only what is divided among
        # them.
        is_even = 2 * min(server.received for server in servers) > max(
            server.received for server in servers
        )
        if is_even or len(busy_servers) == len(servers):
            yield Remark(f"{finding}. More servers share the work: --servers N")
        else:
            words = (
                f"{finding}, while another gets less than half as many bytes: more of them "
                "(--servers N) help as far as they share these"
            )
            yield Remark(words)
    for server in servers:
        # The farthest that a worker was ahead is taken for the staleness bound.
        most_ahead, turns = max(server.staleness, default=0), sum(server.staleness.values())
        if most_ahead and server.makers and server.staleness[most_ahead] > AHEAD_SHARE * turns:
            yield Remark(
                f"Workers were {format_count(most_ahead, 'turn')} ahead of the slowest in "
                f"{server.staleness[most_ahead] / turns:.0%} of their turns: if that "
                "is the bound, they wait there. A larger one helps if workers are slow now and "
                "then; if it is always the same one, staleness=inf, or leaving it out"
            )
        _, dropped_samples = server.dropped
        if samples and dropped_samples / samples > DROPPED_SHARE:
            yield Remark(
                f"Backup workers dropped {dropped_samples:,} samples, "
                f"{dropped_samples / samples:.0%} of those trained: leave out a worker that is "
                "always late, or give it fewer samples (--shares auto)"
            )

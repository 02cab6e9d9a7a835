"""Connections of a worker to the primary and copies of each shard.

All get the same messages, and the primary answers. A copy replaces a lost primary.

    worker     push, close  --->  primary of shard 0 (server 0)
                            --->  copy of shard 0 (server 2, on another host)
               read         --->  primary of shard 0; its copy, if the primary is lost

A push counts once all remaining copies have it. Their states are equal, as they depend on the
messages, and not on the order in which workers send them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from paceline.comm.cancellation import CancelScope
from paceline.comm.group_protocol import Traffic
from paceline.comm.rpc import RpcClient
from paceline.errors import RECOVERABLE_ERRORS, DeadlineExceeded, PacelineError, ServerLost
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.protocol.message import (
    Acknowledged,
    R,
    Request,
    SentRequest,
    call_server,
    send_request,
)
from paceline.servers.protocol.samples import MissingWorkers
from paceline.servers.protocol.service import Alive, CheckAlive, EndServer, ReadFacts, ReadTimeline
from paceline.servers.worker.transfer_units import ServerConnections
from paceline.timings import DEFAULT_TIMINGS, ServerTimings
from paceline.trace import ServerWork, Span

CLOCK_PINGS = 8  # messages that compare a server's clock with this worker's


class ServerTraffic:
    """Counts the traffic to servers from now on (a `Sender`). The connections outlive it."""

    def __init__(self, connections: ServerConnections) -> None:
        self._connections, self._sent_before, self._waited_before = (
            connections,
            connections.traffic,
            connections.waited,
        )

    @property
    def traffic(self) -> Traffic:
        return self._connections.traffic - self._sent_before

    @property
    def waited(self) -> float:
        return self._connections.waited - self._waited_before

    def close(self) -> None: ...

    def abort(self) -> None:
        self._connections.abort()


def _measure_clock_lead(caller: RpcClient, seconds: float) -> int:
    """Measure by how many nanoseconds a server's clock is ahead of this worker's.

    The error is at most half of the shortest round trip.
    """
    samples = []  # round trip and lead, in nanoseconds
    for _ in range(CLOCK_PINGS):
        before = time.perf_counter_ns()
        server_clock = call_server(caller, CheckAlive(), seconds).clock
        after = time.perf_counter_ns()
        samples.append((after - before, server_clock - (before + after) // 2))
    return min(samples)[1]


class ReplicaConnections(ServerConnections):
    """Connections to all servers that are alive.

    `callers_by_shard` has the connections of each shard, the primary first.
    """

    def __init__(self, *, timings: ServerTimings = DEFAULT_TIMINGS.servers) -> None:
        super().__init__(timings=timings)
        self.callers_by_shard: list[list[RpcClient]] = []
        self.cancel_scope: CancelScope | None = None  # ends all waits when the workers change
        self._caller_by_server: dict[int, RpcClient] = {}

    @property
    def primaries(self) -> list[RpcClient]:
        """Connections to the primaries, by shard."""
        return [copies[0] for copies in self.callers_by_shard]

    def connect_all(self, endpoints: ServerEndpoints, me: int) -> None:
        """Connect to these servers, as worker number `me`.

        If servers outlive workers, a lost server ends only the waits for itself.
        """
        self._caller_by_server.clear()
        if endpoints.pool is None:
            super().connect_all(endpoints, me)
            self._caller_by_server = dict(enumerate(self.callers))
        self.update_servers(endpoints, me)

    def tell_all_copies(self, shard: int, request: Request[Acknowledged], seconds: float) -> None:
        """Send a request to all copies of a shard, and wait until they have answered."""
        for caller in self.callers_by_shard[shard]:
            call_server(caller, request, seconds)

    def ask_shard(self, shard: int, request: Request[R], seconds: float) -> R:
        """Ask a shard, and return the answer of the first copy that answers."""
        *others, last = self.callers_by_shard[shard]
        for caller in others:
            with contextlib.suppress(ServerLost):
                return call_server(caller, request, seconds)
        return call_server(last, request, seconds)

    def update_servers(self, endpoints: ServerEndpoints, me: int) -> None:
        """Connect to the new servers among these endpoints, and hang up on removed ones."""
        servers = endpoints.numbers or tuple(range(len(endpoints.addresses)))
        for index, server in enumerate(servers):
            if server not in self._caller_by_server:
                self._caller_by_server[server] = self.connect_server(endpoints, me, index)
        for server in self._caller_by_server.keys() - {*servers}:
            caller = self._caller_by_server.pop(server)
            # Waits for this server end, and the caller asks another copy.
            caller.end_waits(ServerLost(f"{caller.who} is not among the servers any more"))
            self._hang_up(caller)
        # Servers are numbered in the order in which they started, so the oldest copy of a shard
        # becomes its primary, on all workers alike.
        shards = endpoints.shards or servers
        self.callers_by_shard = [[] for _ in range(max(shards, default=-1) + 1)]
        for server, shard in sorted(zip(servers, shards, strict=True)):
            self.callers_by_shard[shard].append(self._caller_by_server[server])
        self.callers = list(self._caller_by_server.values())

    def connect_server(self, endpoints: ServerEndpoints, me: int, place: int = 0) -> RpcClient:
        """Connect to the server at index `place` of these endpoints."""
        address, name, timings = endpoints.addresses[place], endpoints.names[place], self._timings
        caller = RpcClient(
            address, endpoints.keys, sender=me, who=name, alert=timings.silence, timings=timings
        )
        caller.cancel_scope = self.cancel_scope
        return caller

    def set_cancel_scope(self, cancel_scope: CancelScope | None) -> None:
        """End all waits when this scope is cancelled."""
        self.cancel_scope = cancel_scope
        for caller in self.callers:
            caller.cancel_scope = cancel_scope

    def add_connection(self, server: int, caller: RpcClient | None) -> None:
        """Add an open connection, which `update_servers` then uses for that server."""
        if caller is not None:
            self._caller_by_server[server] = caller

    @contextlib.contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Count the time of this block as waiting for servers and slower workers."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def find_lost_servers(self, seconds: float) -> list[int]:
        """Find the servers that don't answer within `seconds`.

        Messages under way are forgotten.
        """
        end, pings, lost = time.monotonic() + seconds, dict[int, SentRequest[Alive]](), list[int]()
        # Send all pings before the first wait: several lost servers cost one timeout.
        for server, caller in self._caller_by_server.items():
            caller.forget_messages()
            try:
                pings[server] = send_request(caller, CheckAlive(), max(end - time.monotonic(), 0.0))
            except (*RECOVERABLE_ERRORS, DeadlineExceeded):
                lost.append(server)
        for server, ping in pings.items():
            try:
                ping.wait_for_reply(max(end - time.monotonic(), 0.0))
            except (*RECOVERABLE_ERRORS, DeadlineExceeded):
                lost.append(server)
        return lost

    def get_server_names(self, servers: Collection[int]) -> list[str]:
        """Names of these servers, without unknown ones."""
        return [
            self._caller_by_server[server].who
            for server in sorted(servers)
            if server in self._caller_by_server
        ]

    def read_facts(self, seconds: float) -> list[dict[str, Any]]:
        """Read the name and the counts of each primary, for the summary of the run."""
        return [
            {"name": self.primaries[shard].who, **self.ask_shard(shard, ReadFacts(), seconds).facts}
            for shard in range(len(self.callers_by_shard))
        ]

    def read_timelines(self, seconds: float) -> list[ServerWork]:
        """Read the timeline of each primary, as far as it remembers."""
        timelines = []
        for caller in self.primaries:
            with contextlib.suppress(
                *RECOVERABLE_ERRORS
            ):  # a lost server's timeline is lost with it
                packed = call_server(caller, ReadTimeline(), seconds).packed.numpy().tobytes()
                # Servers on this host share the worker's clock.
                lead = 0 if caller.near else _measure_clock_lead(caller, seconds)
                spans, waiting = msgpack.unpackb(packed)
                timelines.append(
                    ServerWork(
                        caller.who,
                        lead,
                        [Span(*span) for span in spans],
                        [(when, count) for when, count in waiting],
                    )
                )
        return timelines

    def dismiss_servers(self, *, told: bool = True) -> None:
        """Hang up; with `told`, end all servers first.

        The launcher ends a server that doesn't answer.
        """
        for caller in self.callers if told else ():
            with contextlib.suppress(*RECOVERABLE_ERRORS, DeadlineExceeded):
                call_server(caller, EndServer(), 1.0)
        self.close()


class ServerWait(NamedTuple):
    """A wait for a server: the rank that waits, the numbers of all workers, and its limit."""

    rank: int
    workers: Sequence[int]  # by rank
    seconds: float


def name_missing_workers(
    error: DeadlineExceeded,
    caller: RpcClient,
    what: str,
    who: Request[MissingWorkers],
    waiter: ServerWait,
) -> DeadlineExceeded:
    """Add the ranks of the missing workers to an error.

    Args:
        error: The error of the wait.
        caller: The server that was waited for.
        what: The call of the user that waited.
        who: A request for the missing workers, which is answered at once.
        waiter: The worker that waited.
    """
    try:
        missing_turns = call_server(caller, who, min(waiter.seconds, 2.0)).missing
    except PacelineError:
        return error  # the server itself doesn't answer
    ranks = {worker: rank for rank, worker in enumerate(waiter.workers)}
    names = ", ".join(
        f"rank {ranks[worker]}, which has completed {turns} turns"
        for worker, turns in missing_turns
        if worker in ranks
    )
    missing = tuple(ranks[worker] for worker, _ in missing_turns if worker in ranks)
    text = (
        f"{what}: rank {waiter.rank} waited {waiter.seconds:g} s in vain for "
        f"{names or 'a worker that the server does not know'}"
    )
    return DeadlineExceeded(
        f"{text}. If it is only slow, raise start(deadline=seconds); else look at its own output",
        missing,
    )

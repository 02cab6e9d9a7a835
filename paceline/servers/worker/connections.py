"""Connections of a worker to the primary and copies of each shard.

All receive the same messages, the primary answers, and a copy replaces a lost primary.

    worker     push, close  --->  primary of shard 0 (server 0)
                            --->  copy of shard 0 (server 2, on another host)
               read         --->  primary of shard 0; its copy, if the primary is lost

A push counts once all remaining copies have it. Their state is equal, as it depends on the messages
they receive, not on the order of the workers.
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
from paceline.errors import LOSSES, DeadlineExceeded, PacelineError, ServerLost
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.protocol.message import Acknowledged, R, Request, SentRequest, call, send
from paceline.servers.protocol.samples import MissingWorkers
from paceline.servers.protocol.service import Alive, CheckAlive, EndServer, ReadFacts, ReadTimeline
from paceline.servers.worker.units import ServerLinks
from paceline.timings import DEFAULTS, ServerTimings
from paceline.trace import Served, Span

PINGS = 8  # messages by which a server's clock is compared


class ServerTraffic:
    """Counts what is sent to servers from now on (a `Sender`). The connections outlive it."""

    def __init__(self, connections: ServerLinks) -> None:
        self._connections, self._sent, self._waited = (
            connections,
            connections.traffic,
            connections.waited,
        )

    @property
    def traffic(self) -> Traffic:
        return self._connections.traffic - self._sent

    @property
    def waited(self) -> float:
        return self._connections.waited - self._waited

    def close(self) -> None: ...

    def abort(self) -> None:
        self._connections.abort()


def _ahead(caller: RpcClient, seconds: float) -> int:
    """Nanoseconds by which a server's clock is ahead of this worker's.

    The error is at most half of the fastest answer.
    """
    found = []
    for _ in range(PINGS):
        before = time.perf_counter_ns()
        there = call(caller, CheckAlive(), seconds).clock
        after = time.perf_counter_ns()
        found.append((after - before, there - (before + after) // 2))
    return min(found)[1]


class ReplicaConnections(ServerLinks):
    """Connections to all living servers. `of`: by shard, the primary first."""

    def __init__(self, *, timings: ServerTimings = DEFAULTS.servers) -> None:
        super().__init__(timings=timings)
        self.of: list[list[RpcClient]] = []
        self.cancel_scope: CancelScope | None = None  # ends all waits when the workers change
        self._by_number: dict[int, RpcClient] = {}

    @property
    def primaries(self) -> list[RpcClient]:
        """Connections to the primaries, by shard."""
        return [copies[0] for copies in self.of]

    def open(self, endpoints: ServerEndpoints, me: int) -> None:
        """Connect to these servers, as worker `me`.

        Where servers outlive workers, a lost one ends only the waits for itself.
        """
        self._by_number.clear()
        if endpoints.pool is None:
            super().open(endpoints, me)
            self._by_number = dict(enumerate(self.callers))
        self.reach(endpoints, me)

    def tell(self, shard: int, request: Request[Acknowledged], seconds: float) -> None:
        """Send to all copies of a shard, and wait until they have answered."""
        for caller in self.of[shard]:
            call(caller, request, seconds)

    def ask(self, shard: int, request: Request[R], seconds: float) -> R:
        """Ask a shard, and return the answer of the first copy that is alive."""
        *others, last = self.of[shard]
        for caller in others:
            with contextlib.suppress(ServerLost):
                return call(caller, request, seconds)
        return call(last, request, seconds)

    def reach(self, endpoints: ServerEndpoints, me: int) -> None:
        """Connect to new servers among these endpoints, and hang up on servers that are not
        among them any more.
        """
        numbers = endpoints.numbers or tuple(range(len(endpoints.addresses)))
        for place, number in enumerate(numbers):
            if number not in self._by_number:
                self._by_number[number] = self.call(endpoints, me, place)
        for number in self._by_number.keys() - {*numbers}:
            caller = self._by_number.pop(number)
            # another server is asked instead
            caller.end_waits(ServerLost(f"{caller.who} is not among the servers any more"))
            self._hang_up(caller)
        shards = endpoints.shards or numbers
        self.of = [[] for _ in range(max(shards, default=-1) + 1)]
        for number, shard in sorted(zip(numbers, shards, strict=True)):
            self.of[shard].append(self._by_number[number])
        self.callers = list(self._by_number.values())

    def call(self, endpoints: ServerEndpoints, me: int, place: int = 0) -> RpcClient:
        """Connect to the server at index `place` of these endpoints."""
        address, name, timings = endpoints.addresses[place], endpoints.names[place], self._timings
        found = RpcClient(
            address, endpoints.keys, sender=me, who=name, alert=timings.silence, timings=timings
        )
        found.cancel_scope = self.cancel_scope
        return found

    def follow(self, cancel_scope: CancelScope | None) -> None:
        """End all waits when this scope is cancelled."""
        self.cancel_scope = cancel_scope
        for caller in self.callers:
            caller.cancel_scope = cancel_scope

    def know(self, number: int, caller: RpcClient | None) -> None:
        """Keep a connection that exists already, for when `reach` comes to that server."""
        if caller is not None:
            self._by_number[number] = caller

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for servers, or for other workers there."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def lost(self, seconds: float) -> list[int]:
        """Return the numbers of servers that don't answer within so many seconds.

        Messages under way are forgotten.
        """
        end, asked, lost = time.monotonic() + seconds, dict[int, SentRequest[Alive]](), list[int]()
        for number, caller in self._by_number.items():
            caller.forget_messages()
            try:
                asked[number] = send(caller, CheckAlive(), max(end - time.monotonic(), 0.0))
            except (*LOSSES, DeadlineExceeded):
                lost.append(number)
        for number, sent in asked.items():
            try:
                sent.wait(max(end - time.monotonic(), 0.0))
            except (*LOSSES, DeadlineExceeded):
                lost.append(number)
        return lost

    def names(self, numbers: Collection[int]) -> list[str]:
        """Return the names of these servers."""
        return [
            self._by_number[number].who for number in sorted(numbers) if number in self._by_number
        ]

    def facts(self, seconds: float) -> list[dict[str, Any]]:
        """Return name and counts of each primary, for the summary."""
        return [
            {"name": self.primaries[shard].who, **self.ask(shard, ReadFacts(), seconds).facts}
            for shard in range(len(self.of))
        ]

    def served(self, seconds: float) -> list[Served]:
        """Return when each primary did what, as far as it remembers."""
        found = []
        for caller in self.primaries:
            with contextlib.suppress(*LOSSES):  # a lost server's timeline is lost with it
                packed = call(caller, ReadTimeline(), seconds).packed.numpy().tobytes()
                ahead = 0 if caller.near else _ahead(caller, seconds)
                spans, waiting = msgpack.unpackb(packed)
                found.append(
                    Served(
                        caller.who,
                        ahead,
                        [Span(*span) for span in spans],
                        [(when, count) for when, count in waiting],
                    )
                )
        return found

    def dismiss(self, *, told: bool = True) -> None:
        """Hang up; with `told`, tell all servers first that they can end.

        One that doesn't answer is ended by its launcher.
        """
        for caller in self.callers if told else ():
            with contextlib.suppress(*LOSSES, DeadlineExceeded):
                call(caller, EndServer(), 1.0)
        self.close()


class ServerWait(NamedTuple):
    """A wait for a server: which rank waits, among which workers (their numbers, by rank), and
    for how many seconds.
    """

    rank: int
    workers: Sequence[int]
    seconds: float


def named(
    error: DeadlineExceeded,
    caller: RpcClient,
    what: str,
    who: Request[MissingWorkers],
    waiter: ServerWait,
) -> DeadlineExceeded:
    """Return the error with the names of the missing workers.

    The request `who` asks the server for them.
    """
    try:
        found = call(caller, who, min(waiter.seconds, 2.0)).missing
    except PacelineError:
        return error  # the server itself doesn't answer
    ranks = {worker: rank for rank, worker in enumerate(waiter.workers)}
    names = ", ".join(
        f"rank {ranks[worker]}, which has completed {turns} turns"
        for worker, turns in found
        if worker in ranks
    )
    missing = tuple(ranks[worker] for worker, _ in found if worker in ranks)
    text = (
        f"{what}: rank {waiter.rank} waited {waiter.seconds:g} s in vain for "
        f"{names or 'nobody who can be named'}"
    )
    return DeadlineExceeded(
        f"{text}. If it is only slow, raise start(deadline=seconds); else look at its own output",
        missing,
    )

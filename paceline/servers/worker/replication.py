"""Replacement of servers that are lost, or leave: which are lost, which worker starts a copy where,
and from when on it counts.

    a server is lost      all say which they miss: its copies go on; a worker begins to start
                          another, on a host without one of that shard
    some turns later      it has begun: while no worker sends servers anything, the first worker
                          fills it, piece by piece
    then                  it counts
    a host leaves         the same for what only its servers keep; once those copies count, its
                          servers don't any more, and it goes

Some workers may have come further than others when the next server is lost: so all also say which
copies they start, which have been taken in, and which servers have left.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from paceline.comm.rpc import RpcClient
from paceline.errors import LOSSES, DeadlineExceeded, StateLost
from paceline.servers.process.endpoints import ServerEndpoints, ServerPool
from paceline.servers.worker.connections import ReplicaConnections
from paceline.sync.context import SyncContext


class StartingReplica(NamedTuple):
    """A copy that is being started: its shard, and the worker that starts it."""

    shard: int
    starter: int


Fill = Callable[[int, RpcClient], Iterator[None]]  # fills a copy of this shard, a piece at a time


def gone(names: Collection[str]) -> StateLost:
    """Return the error for servers of whose data no copy is left."""
    return StateLost(
        f"{' and '.join(names)}: gone, and nobody else has what was kept there; "
        "resume from a checkpoint, as --restarts does without "
        "--min-workers (in lockstep replicas=2 has a copy on another host go on)"
    )


class ServerReplication:
    """One worker's part in keeping `copies` of each shard.

    `pool` starts servers, `connections` reach them.

    `kind`: what a server is called in messages.
    """

    def __init__(
        self,
        context: SyncContext,
        pool: ServerPool,
        connections: ReplicaConnections,
        copies: int,
        *,
        fill: Fill,
        kind: str = "server",
    ) -> None:
        self.context, self.pool, self.kind = context, pool, kind
        self._connections, self._copies, self._fill = connections, copies, fill
        self._lost: list[str] = []  # names of servers
        self._left: set[int] = set()  # servers that went with their hosts
        self._taken: list[Any] = []  # descriptions of the copies that were taken in last
        self._anew: dict[int, StartingReplica] = {}  # copies being started, by number
        self._early: dict[int, RpcClient] = {}  # connections to copies that don't count yet
        self._seen: set[int] = set()  # numbers of copies that this worker has taken in

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers, by rank."""
        return list(self.context.agreement.origins)

    @property
    def me(self) -> int:
        """Number of this worker."""
        return self.workers[self.context.group.rank]

    @property
    def waits(self) -> bool:
        """Whether a copy is being started."""
        return bool(self._anew)

    # ---- after a loss

    def survey(self, context: SyncContext) -> None:
        """Go on with the workers and servers that are left, and begin to start what is missing.

        Collective.

        Raises `StateLost` where no copy of a shard is left.
        """
        self.context, connections, pool = context, self._connections, self.pool
        anew = [
            [number, list(found)]
            for number, found in sorted(self._anew.items())
            if found.starter == self.me
        ]
        mine = {
            "lost": connections.lost(min(context.deadline, context.timings.servers.alive)),
            "left": sorted(self._left),
            "anew": anew,
            "taken": self._taken,
        }
        mine |= {"here": pool.here, "next": pool.next_step}
        answers = [
            json.loads(body) for body in context.group.gather_bytes(json.dumps(mine).encode())
        ]
        lost = {number for each in answers for number in each["lost"]}
        pool.next_step = max(each["next"] for each in answers)
        self._anew = {
            number: StartingReplica(*found) for each in answers for number, found in each["anew"]
        }
        for number, found in [taken for each in answers for taken in each["taken"]]:
            self._count(number, found)
        self._left |= {number for each in answers for number in each["left"]}
        shards = len(connections.of)
        self._lost += (names := connections.names(lost - self._left))
        endpoints = pool.lose(lost | self._left)
        if {*range(shards)} - {*endpoints.shards}:
            raise gone(names or [f"a {self.kind}"])
        connections.reach(endpoints, self.me)
        self._taken = [
            [number, found] for number, found in self._taken if number in endpoints.numbers
        ]
        self._replace(
            {worker: each["here"] for worker, each in zip(self.workers, answers, strict=True)},
            endpoints,
        )

    def _replace(self, hosts: Mapping[int, str], endpoints: ServerEndpoints) -> None:
        """Begin to start missing copies. `hosts`: of the living workers."""
        wanted = [
            shard
            for shard in range(len(self._connections.of))
            for _ in range(self._copies - endpoints.shards.count(shard))
        ]
        for _, found in sorted(self._anew.items()):
            if found.shard in wanted:
                wanted.remove(found.shard)
        self._start(wanted, hosts)

    def _start(self, shards: Iterable[int], hosts: Mapping[int, str]) -> None:
        """Begin to start copies of these shards, on hosts that have none of the shard, those
        with the fewest servers first.
        """
        homes, all_of_them = self.pool.homes(), [*hosts.values()]
        homes += [
            (hosts[found.starter], found.shard)
            for _, found in sorted(self._anew.items())
            if found.starter in hosts
        ]
        for shard in shards:
            free = [host for host in dict.fromkeys(all_of_them) if (host, shard) not in homes]
            if not free and len(set(all_of_them)) > 1:
                continue  # each host has one: another there would die with it
            home = min(
                free or all_of_them, key=lambda host: sum(host == other for other, _ in homes)
            )
            homes.append((home, shard))
            starter = next(worker for worker, host in hosts.items() if host == home)
            self._anew[self.pool.spawn(shard, mine=starter == self.me)] = StartingReplica(
                shard, starter
            )

    # ---- leaving hosts

    def relieve(self, hosts: Mapping[int, str], leaving: Collection[str]) -> bool:
        """Begin to copy what only `leaving` hosts keep; return whether nothing (more) is kept by
        them alone.

        `hosts`: of all workers, some of which stay. Collective.
        """
        staying = {worker: host for worker, host in hosts.items() if host not in leaving}
        kept = {shard for home, shard in self.pool.homes() if home not in leaving}
        bare = {*range(len(self._connections.of))} - kept
        self._start(
            sorted(
                bare - {found.shard for found in self._anew.values() if found.starter in staying}
            ),
            staying,
        )
        return not bare

    def part(self, leaving: Collection[str]) -> None:
        """Let the servers on leaving hosts count no more.

        On all workers, while none sends servers anything.
        """
        numbers = self.pool.on(leaving)
        self._left |= {*numbers}
        self._connections.reach(self.pool.lose(numbers), self.me)

    # ---- new copies

    def begun(self) -> list[Any]:
        """This worker's copies that have begun or failed to, with facts for the other workers."""
        mine = {
            number: self.pool.spawned(number)
            for number, found in self._anew.items()
            if found.starter == self.me
        }
        return [[number, found] for number, found in mine.items() if found is not None]

    def filling(self, server: Any) -> Iterator[bool]:
        """Fill a new copy from the others of its shard.

        Yields True after each piece, False if it is lost already.
        """
        endpoints = self.pool.at(server)
        number, shard = endpoints.numbers[0], endpoints.shards[0]
        caller = self._early.get(number) or self._connections.call(endpoints, self.me)
        self._early[number], caller.cancel_scope = caller, self._connections.cancel_scope
        try:
            for _ in self._fill(shard, caller):
                yield True
        except (*LOSSES, DeadlineExceeded):
            yield False

    def take_in(self, servers: Iterable[Any], filled: Collection[int]) -> None:
        """Let the filled copies count from now on."""
        self._taken = [[number, found] for number, found in servers if found and number in filled]
        for number, found in self._taken:
            self._count(number, found)
        for number in [number for number, _ in servers if number not in filled]:
            self._anew.pop(number, None)
            if (early := self._early.pop(number, None)) is not None:
                early.close()
            self.context.announce(
                f"a copy of a {self.kind}, to replace one that was lost or leaves, could not "
                "begin: there is one less"
            )

    def _count(self, number: int, found: Any) -> None:
        """Let a copy count, unless it does already, or has been lost since."""
        self._anew.pop(number, None)
        # a worker that has just joined was told where servers are
        known = self._seen | {*self.pool.lose(()).numbers}
        self._seen.add(number)
        if number not in known:
            self._connections.know(number, self._early.pop(number, None))
            self._connections.reach(self.pool.add(found), self.me)

    def renew(self) -> None:
        """Fill the copies that have begun and take them in, while no worker sends servers anything.

        Collective, if any are being started.

        The first worker fills a copy with what others have; the rest wait, and all meet now and
        then as long as that takes.
        """
        if self.waits:
            self.take_in(
                *self.context.agreement.repeat_until_settled(
                    self._renewed, what=f"{self.kind}s begin"
                )
            )

    def _renewed(self) -> tuple[list[Any], list[int]]:
        """Return the copies that have begun, with what all workers need to know, and the numbers
        of those that were filled.
        """
        answers = self.context.agreement.meet(
            f"{self.kind}s begin", json.dumps(self.begun()).encode()
        )
        servers = sorted(found for answer in answers for found in json.loads(answer))
        return servers, [number for number, found in servers if found and self._filled(found)]

    def _filled(self, server: Any) -> bool:
        """Whether the first worker could fill this copy. Collective."""
        first = self.context.group.rank == 0
        filling = self.filling(server) if first else iter(())
        seconds = min(self.context.timings.servers.fill, self.context.deadline / 4)
        while True:
            word = _slice(filling, seconds) if first else b""
            answer = self.context.agreement.meet(f"{self.kind}s are filled", word)[0]
            if answer != b"on":
                return answer == b"filled"

    # ---- for others

    def take_lost(self) -> list[str]:
        """Return the names of the servers that were lost since the last call."""
        found, self._lost = self._lost, []
        return found

    def close(self) -> None:
        """Hang up on copies that don't count yet."""
        for caller in self._early.values():
            with contextlib.suppress(*LOSSES):
                caller.close()
        self._early.clear()


def _slice(filling: Iterator[bool], seconds: float) -> bytes:
    """Fill for a while. Returns b"on" if there is more to do."""
    end = time.monotonic() + seconds
    for alive in filling:
        if not alive:
            return b"lost"
        if time.monotonic() > end:
            return b"on"
    return b"filled"

"""Replacement of servers that are lost or leave, by new copies of their shards.

    a server is lost      all workers tell which servers they miss; its copies go on; one worker
                          starts a new copy, on a host that has none of the shard
    some turns later      the copy has begun; while no worker sends servers anything, the first
                          worker fills it, piece by piece
    then                  the copy counts: all workers send to it
    a host leaves         new copies are started of the shards that only this host has; once they
                          count, its servers don't count any more, and it goes

Some workers may be further in this protocol than others when the next server is lost. So all also
tell which copies they start, which have been taken in, and which servers have left.
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
    """A copy that is being started: its shard, and the number of the worker that starts it."""

    shard: int
    starter: int


Fill = Callable[[int, RpcClient], Iterator[None]]  # fills a copy of a shard, piece by piece


def gone(names: Collection[str]) -> StateLost:
    """Make the error for lost servers if no copy of their state is left."""
    return StateLost(
        f"{' and '.join(names)}: lost, and no other server has a copy of its state; "
        "resume from a checkpoint, as --restarts does without "
        "--min-workers (in lockstep, replicas=2 keeps a copy on another host)"
    )


class ServerReplication:
    """One worker's part in keeping several copies of each shard.

    All workers hold the same copies in `_starting_copies`, except between a loss and the end of
    `agree_on_losses`. A copy leaves it when it counts or could not begin. `_early_connections` has
    only copies in `_starting_copies`, and only on the worker that fills them.
    `_last_taken_in` lets workers that missed the end of `take_in_copies` catch up.

    Args:
        context: The group of workers and its agreement.
        pool: Starts servers.
        connections: Connections to the servers.
        copies: Number of servers that keep each shard.
        fill: Fills a copy.
        kind: Name of a server in messages. Default: "server".
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
        self._left: set[int] = set()  # numbers of servers that left with their hosts
        self._taken: list[Any] = []  # number and description of each copy that was taken in last
        self._anew: dict[int, StartingReplica] = {}  # by number of the server
        self._early: dict[int, RpcClient] = {}  # by number of the server
        self._seen: set[int] = set()  # numbers of all copies that this worker has taken in

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
        """Agree which servers are left, go on with them, and begin to replace the lost ones.

        Collective. Raises `StateLost` if no copy of a shard is left.
        """
        self.context, connections, pool = context, self._connections, self.pool
        # Each worker reports the copies that it starts itself: copies that a lost worker was
        # starting are dropped, and started anew below.
        starting = [
            [server, list(copy)]
            for server, copy in sorted(self._anew.items())
            if copy.starter == self.me
        ]
        report = {
            "lost": connections.lost(min(context.deadline, context.timings.servers.alive)),
            "left": sorted(self._left),
            "anew": starting,
            "taken": self._taken,
            "here": pool.here,
            "next": pool.next_step,
        }
        reports = [
            json.loads(body) for body in context.group.gather_bytes(json.dumps(report).encode())
        ]
        # A server that one worker can't reach is lost for all.
        lost = {server for each in reports for server in each["lost"]}
        pool.next_step = max(each["next"] for each in reports)
        self._anew = {
            server: StartingReplica(*copy) for each in reports for server, copy in each["anew"]
        }
        # Copies that any worker has taken in count for all, before the lost ones are removed.
        for server, description in [taken for each in reports for taken in each["taken"]]:
            self._count(server, description)
        self._left |= {server for each in reports for server in each["left"]}
        shards = len(connections.of)
        self._lost += (names := connections.names(lost - self._left))
        endpoints = pool.lose(lost | self._left)
        if {*range(shards)} - {*endpoints.shards}:
            raise gone(names or [f"a {self.kind}"])
        connections.reach(endpoints, self.me)
        self._taken = [
            [server, description]
            for server, description in self._taken
            if server in endpoints.numbers
        ]
        self._replace(
            {worker: each["here"] for worker, each in zip(self.workers, reports, strict=True)},
            endpoints,
        )

    def _replace(self, hosts: Mapping[int, str], endpoints: ServerEndpoints) -> None:
        """Begin to start the missing copies. `hosts` has the host of each remaining worker."""
        missing = [
            shard
            for shard in range(len(self._connections.of))
            for _ in range(self._copies - endpoints.shards.count(shard))
        ]
        for _, copy in sorted(self._anew.items()):
            if copy.shard in missing:
                missing.remove(copy.shard)
        self._start(missing, hosts)

    def _start(self, shards: Iterable[int], hosts: Mapping[int, str]) -> None:
        """Begin to start a copy of each of these shards.

        It goes to a host that has no copy of the shard, among these the one with the fewest
        servers. All workers compute the same hosts from the same facts, so they need no message.
        """
        homes, worker_hosts = self.pool.homes(), [*hosts.values()]
        homes += [
            (hosts[copy.starter], copy.shard)
            for _, copy in sorted(self._anew.items())
            if copy.starter in hosts
        ]
        for shard in shards:
            free = [host for host in dict.fromkeys(worker_hosts) if (host, shard) not in homes]
            if not free and len(set(worker_hosts)) > 1:
                continue  # each host has a copy: a second one there would be lost with it
            home = min(
                free or worker_hosts, key=lambda host: sum(host == other for other, _ in homes)
            )
            homes.append((home, shard))
            starter = next(worker for worker, host in hosts.items() if host == home)
            self._anew[self.pool.spawn(shard, mine=starter == self.me)] = StartingReplica(
                shard, starter
            )

    # ---- leaving hosts

    def relieve(self, hosts: Mapping[int, str], leaving: Collection[str]) -> bool:
        """Begin to copy the shards that only leaving hosts have. Collective.

        Returns whether the hosts can leave: other hosts have a copy of each shard.

        Args:
            hosts: The host of each worker, of which some stay.
            leaving: Hosts that leave.
        """
        staying = {worker: host for worker, host in hosts.items() if host not in leaving}
        staying_shards = {shard for home, shard in self.pool.homes() if home not in leaving}
        missing = {*range(len(self._connections.of))} - staying_shards
        starting = {copy.shard for copy in self._anew.values() if copy.starter in staying}
        self._start(sorted(missing - starting), staying)
        return not missing

    def part(self, leaving: Collection[str]) -> None:
        """Remove the servers on leaving hosts.

        All workers call it, while none sends servers anything.
        """
        servers = self.pool.on(leaving)
        self._left |= {*servers}
        self._connections.reach(self.pool.lose(servers), self.me)

    # ---- new copies

    def begun(self) -> list[Any]:
        """List this worker's copies that have begun or could not, as JSON values.

        Each is the server's number, and its description for the other workers or False.
        """
        outcomes = {
            server: self.pool.spawned(server)
            for server, copy in self._anew.items()
            if copy.starter == self.me
        }
        return [[server, outcome] for server, outcome in outcomes.items() if outcome is not None]

    def filling(self, server: Any) -> Iterator[bool]:
        """Fill a new copy from another copy of its shard.

        Yields True after each piece, and False if the new copy is lost already.
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
        """Let the filled copies count from now on, and forget the others.

        `servers` has the number and the description of each copy that has begun or could not.
        """
        self._taken = [
            [server, description]
            for server, description in servers
            if description and server in filled
        ]
        for server, description in self._taken:
            self._count(server, description)
        for server in [server for server, _ in servers if server not in filled]:
            self._anew.pop(server, None)
            if (early := self._early.pop(server, None)) is not None:
                early.close()
            self.context.announce(
                f"a copy of a {self.kind}, to replace one that was lost or leaves, could not "
                "begin: there is one less"
            )

    def _count(self, server: int, description: Any) -> None:
        """Let a copy count, unless it counts already or has been lost since."""
        self._anew.pop(server, None)
        # A worker that has just joined knows the copy from the list of servers that it was sent.
        counted = self._seen | {*self.pool.lose(()).numbers}
        self._seen.add(server)
        if server not in counted:
            self._connections.know(server, self._early.pop(server, None))
            self._connections.reach(self.pool.add(description), self.me)

    def renew(self) -> None:
        """Fill the copies that have begun and take them in. Collective, if any are being started.

        No worker may send servers anything meanwhile. The first worker fills a copy from another
        copy. The rest wait: all meet from time to time, so that no deadline passes.
        """
        if self.waits:
            self.take_in(
                *self.context.agreement.repeat_until_settled(
                    self._renewed, what=f"{self.kind}s begin"
                )
            )

    def _renewed(self) -> tuple[list[Any], list[int]]:
        """Fill the copies that have begun on any worker.

        Returns number and description of each copy, and the numbers of the filled ones.
        """
        answers = self.context.agreement.meet(
            f"{self.kind}s begin", json.dumps(self.begun()).encode()
        )
        servers = sorted(outcome for answer in answers for outcome in json.loads(answer))
        return servers, [
            server for server, description in servers if description and self._filled(description)
        ]

    def _filled(self, server: Any) -> bool:
        """Fill a copy on the first worker, and tell all whether it could. Collective."""
        is_first = self.context.group.rank == 0
        filling = self.filling(server) if is_first else iter(())
        # Meet well before the deadline of the other workers' wait.
        seconds = min(self.context.timings.servers.fill, self.context.deadline / 4)
        while True:
            progress = _slice(filling, seconds) if is_first else b""
            answer = self.context.agreement.meet(f"{self.kind}s are filled", progress)[0]
            if answer != b"on":
                return answer == b"filled"

    # ---- reports and end

    def take_lost(self) -> list[str]:
        """Take the names of the servers that were lost since the last call."""
        names, self._lost = self._lost, []
        return names

    def close(self) -> None:
        """Hang up on copies that don't count yet."""
        for caller in self._early.values():
            with contextlib.suppress(*LOSSES):
                caller.close()
        self._early.clear()


def _slice(filling: Iterator[bool], seconds: float) -> bytes:
    """Fill a copy for some seconds. Returns b"on" if there is more to do, b"filled" or b"lost"."""
    end = time.monotonic() + seconds
    for is_alive in filling:
        if not is_alive:
            return b"lost"
        if time.monotonic() > end:
            return b"on"
    return b"filled"

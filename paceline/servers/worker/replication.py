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
from paceline.errors import RECOVERABLE_ERRORS, DeadlineExceeded, StateLost
from paceline.servers.process.endpoints import ServerEndpoints, ServerPool
from paceline.servers.worker.connections import ReplicaConnections
from paceline.sync.context import SyncContext


class StartingReplica(NamedTuple):
    """A copy that is being started: its shard, and the number of the worker that starts it."""

    shard: int
    starter: int


FillReplica = Callable[[int, RpcClient], Iterator[None]]  # fills a copy of a shard, piece by piece


def make_state_lost(names: Collection[str]) -> StateLost:
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
        fill: FillReplica,
        kind: str = "server",
    ) -> None:
        self.context, self.pool, self.server_kind = context, pool, kind
        self._connections, self._copy_count, self._fill_replica = connections, copies, fill
        self._lost_names: list[str] = []  # names of servers
        self._departed_servers: set[int] = set()  # numbers of servers that left with their hosts
        self._last_taken_in: list[
            Any
        ] = []  # number and description of each copy that was taken in last
        self._starting_copies: dict[int, StartingReplica] = {}  # by number of the server
        self._early_connections: dict[int, RpcClient] = {}  # by number of the server
        self._seen_copies: set[int] = set()  # numbers of all copies that this worker has taken in

    @property
    def worker_numbers(self) -> list[int]:
        """Numbers of the workers, by rank."""
        return list(self.context.agreement.origins)

    @property
    def worker_number(self) -> int:
        """Number of this worker."""
        return self.worker_numbers[self.context.group.rank]

    @property
    def has_starting_copies(self) -> bool:
        """Whether a copy is being started."""
        return bool(self._starting_copies)

    # ---- after a loss

    def agree_on_losses(self, context: SyncContext) -> None:
        """Agree which servers are left, go on with them, and begin to replace the lost ones.

        Collective. Raises `StateLost` if no copy of a shard is left.
        """
        self.context, connections, pool = context, self._connections, self.pool
        # Each worker reports the copies that it starts itself: copies that a lost worker was
        # starting are dropped, and started anew below.
        starting = [
            [server, list(copy)]
            for server, copy in sorted(self._starting_copies.items())
            if copy.starter == self.worker_number
        ]
        report = {
            "lost": connections.find_lost_servers(
                min(context.deadline, context.timings.servers.alive)
            ),
            "left": sorted(self._departed_servers),
            "anew": starting,
            "taken": self._last_taken_in,
            "here": pool.host_name,
            "next": pool.next_server,
        }
        reports = [
            json.loads(body) for body in context.group.gather_bytes(json.dumps(report).encode())
        ]
        # A server that one worker can't reach is lost for all.
        lost = {server for each in reports for server in each["lost"]}
        pool.next_server = max(each["next"] for each in reports)
        self._starting_copies = {
            server: StartingReplica(*copy) for each in reports for server, copy in each["anew"]
        }
        # Copies that any worker has taken in count for all, before the lost ones are removed.
        for server, description in [taken for each in reports for taken in each["taken"]]:
            self._add_copy(server, description)
        self._departed_servers |= {server for each in reports for server in each["left"]}
        shards = len(connections.callers_by_shard)
        self._lost_names += (names := connections.get_server_names(lost - self._departed_servers))
        endpoints = pool.remove_servers(lost | self._departed_servers)
        if {*range(shards)} - {*endpoints.shards}:
            raise make_state_lost(names or [f"a {self.server_kind}"])
        connections.update_servers(endpoints, self.worker_number)
        self._last_taken_in = [
            [server, description]
            for server, description in self._last_taken_in
            if server in endpoints.numbers
        ]
        self._replace_missing(
            {
                worker: each["here"]
                for worker, each in zip(self.worker_numbers, reports, strict=True)
            },
            endpoints,
        )

    def _replace_missing(self, hosts: Mapping[int, str], endpoints: ServerEndpoints) -> None:
        """Begin to start the missing copies. `hosts` has the host of each remaining worker."""
        missing = [
            shard
            for shard in range(len(self._connections.callers_by_shard))
            for _ in range(self._copy_count - endpoints.shards.count(shard))
        ]
        for _, copy in sorted(self._starting_copies.items()):
            if copy.shard in missing:
                missing.remove(copy.shard)
        self._start_copies(missing, hosts)

    def _start_copies(self, shards: Iterable[int], hosts: Mapping[int, str]) -> None:
        """Begin to start a copy of each of these shards.

        It goes to a host that has no copy of the shard, among these the one with the fewest
        servers. All workers compute the same hosts from the same facts, so they need no message.
        """
        homes, worker_hosts = self.pool.list_homes(), [*hosts.values()]
        homes += [
            (hosts[copy.starter], copy.shard)
            for _, copy in sorted(self._starting_copies.items())
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
            self._starting_copies[
                self.pool.spawn_server(shard, mine=starter == self.worker_number)
            ] = StartingReplica(shard, starter)

    # ---- leaving hosts

    def relieve_hosts(self, hosts: Mapping[int, str], leaving: Collection[str]) -> bool:
        """Begin to copy the shards that only leaving hosts have. Collective.

        Returns whether the hosts can leave: other hosts have a copy of each shard.

        Args:
            hosts: The host of each worker, of which some stay.
            leaving: Hosts that leave.
        """
        staying = {worker: host for worker, host in hosts.items() if host not in leaving}
        staying_shards = {shard for home, shard in self.pool.list_homes() if home not in leaving}
        missing = {*range(len(self._connections.callers_by_shard))} - staying_shards
        starting = {
            copy.shard for copy in self._starting_copies.values() if copy.starter in staying
        }
        self._start_copies(sorted(missing - starting), staying)
        return not missing

    def drop_leaving_servers(self, leaving: Collection[str]) -> None:
        """Remove the servers on leaving hosts.

        All workers call it, while none sends servers anything.
        """
        servers = self.pool.list_servers_on(leaving)
        self._departed_servers |= {*servers}
        self._connections.update_servers(self.pool.remove_servers(servers), self.worker_number)

    # ---- new copies

    def list_begun_copies(self) -> list[Any]:
        """List this worker's copies that have begun or could not, as JSON values.

        Each is the server's number, and its description for the other workers or False.
        """
        outcomes = {
            server: self.pool.get_spawned_server(server)
            for server, copy in self._starting_copies.items()
            if copy.starter == self.worker_number
        }
        return [[server, outcome] for server, outcome in outcomes.items() if outcome is not None]

    def fill_new_copy(self, server: Any) -> Iterator[bool]:
        """Fill a new copy from another copy of its shard.

        Yields True after each piece, and False if the new copy is lost already.
        """
        endpoints = self.pool.make_endpoints_of(server)
        number, shard = endpoints.numbers[0], endpoints.shards[0]
        caller = self._early_connections.get(number) or self._connections.connect_server(
            endpoints, self.worker_number
        )
        self._early_connections[number], caller.cancel_scope = (
            caller,
            self._connections.cancel_scope,
        )
        try:
            for _ in self._fill_replica(shard, caller):
                yield True
        except (*RECOVERABLE_ERRORS, DeadlineExceeded):
            yield False

    def take_in_copies(self, servers: Iterable[Any], filled: Collection[int]) -> None:
        """Let the filled copies count from now on, and forget the others.

        `servers` has the number and the description of each copy that has begun or could not.
        """
        self._last_taken_in = [
            [server, description]
            for server, description in servers
            if description and server in filled
        ]
        for server, description in self._last_taken_in:
            self._add_copy(server, description)
        for server in [server for server, _ in servers if server not in filled]:
            self._starting_copies.pop(server, None)
            if (early := self._early_connections.pop(server, None)) is not None:
                early.close()
            self.context.announce(
                f"a copy of a {self.server_kind}, to replace one that was lost or leaves, could "
                "not "
                "begin: there is one less"
            )

    def _add_copy(self, server: int, description: Any) -> None:
        """Let a copy count, unless it counts already or has been lost since."""
        self._starting_copies.pop(server, None)
        # A worker that has just joined knows the copy from the list of servers that it was sent.
        counted = self._seen_copies | {*self.pool.remove_servers(()).numbers}
        self._seen_copies.add(server)
        if server not in counted:
            self._connections.add_connection(server, self._early_connections.pop(server, None))
            self._connections.update_servers(self.pool.add_server(description), self.worker_number)

    def fill_new_copies(self) -> None:
        """Fill the copies that have begun and take them in. Collective, if any are being started.

        No worker may send servers anything meanwhile. The first worker fills a copy from another
        copy. The rest wait: all meet from time to time, so that no deadline passes.
        """
        if self.has_starting_copies:
            self.take_in_copies(
                *self.context.agreement.repeat_until_settled(
                    self._fill_begun_copies, what=f"{self.server_kind}s begin"
                )
            )

    def _fill_begun_copies(self) -> tuple[list[Any], list[int]]:
        """Fill the copies that have begun on any worker.

        Returns number and description of each copy, and the numbers of the filled ones.
        """
        answers = self.context.agreement.meet(
            f"{self.server_kind}s begin", json.dumps(self.list_begun_copies()).encode()
        )
        servers = sorted(outcome for answer in answers for outcome in json.loads(answer))
        return servers, [
            server
            for server, description in servers
            if description and self._fill_in_slices(description)
        ]

    def _fill_in_slices(self, server: Any) -> bool:
        """Fill a copy on the first worker, and tell all whether it could. Collective."""
        is_first = self.context.group.rank == 0
        filling = self.fill_new_copy(server) if is_first else iter(())
        # Meet well before the deadline of the other workers' wait.
        seconds = min(self.context.timings.servers.fill, self.context.deadline / 4)
        while True:
            progress = _fill_slice(filling, seconds) if is_first else b""
            answer = self.context.agreement.meet(f"{self.server_kind}s are filled", progress)[0]
            if answer != b"on":
                return answer == b"filled"

    # ---- reports and end

    def take_lost_names(self) -> list[str]:
        """Take the names of the servers that were lost since the last call."""
        names, self._lost_names = self._lost_names, []
        return names

    def close(self) -> None:
        """Hang up on copies that don't count yet."""
        for caller in self._early_connections.values():
            with contextlib.suppress(*RECOVERABLE_ERRORS):
                caller.close()
        self._early_connections.clear()


def _fill_slice(filling: Iterator[bool], seconds: float) -> bytes:
    """Fill a copy for some seconds. Returns b"on" if there is more to do, b"filled" or b"lost"."""
    end = time.monotonic() + seconds
    for is_alive in filling:
        if not is_alive:
            return b"lost"
        if time.monotonic() > end:
            return b"on"
    return b"filled"

"""Starts servers: programs beside the first worker of each host.

They end with the worker that has started them, or, where losses are survived, with the launcher of
their host. Then a new worker connects to them (`join`), and what is lost is started anew in the
background (`spawn`, `add`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import msgpack

from paceline.cluster.launcher.worker import describe_end
from paceline.cluster.secret import make_secret_error
from paceline.cluster.store import find_own_address
from paceline.comm.agreement import Agreement
from paceline.comm.rpc import derive_rpc_keys
from paceline.errors import PacelineError, ResourceError, WorkerLost
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.workers.groups import WorkerContext


class StartedServer(NamedTuple):
    """A server: its number, never used twice, the shard that it keeps, its host
    (`ServerStarter.host_name`), its name, and where it listens.
    """

    number: int
    shard: int
    host: str
    name: str
    addresses: tuple[str, ...]  # between hosts, if it does there; and inside of its own


class ServerStarter:
    """Servers of a job, as one worker starts and reaches them (a `ServerPool`).

    `what` and `kind` name them in messages.
    """

    def __init__(
        self,
        worker_context: WorkerContext,
        agreement: Agreement,
        what: str = "ParameterServer",
        kind: str = "server",
    ) -> None:
        self._worker_context, self._agreement, self._feature, self._server_kind = (
            worker_context,
            agreement,
            what,
            kind,
        )
        self._outlives_worker = worker_context.place.worker is not None
        self.host_name = (
            worker_context.launcher_name
            if self._outlives_worker
            else str(worker_context.cluster.host_by_rank()[worker_context.place.rank])
        )
        self._servers: list[StartedServer] = []
        self._job = self._secret = ""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starting_servers: dict[
            int, tuple[int, subprocess.Popen[bytes]]
        ] = {}  # by number: its shard
        self._begun_servers: dict[
            int, Any
        ] = {}  # by number: the server that began, or why it did not
        self._folders: list[str] = []
        self._watchers: list[Callable[[PacelineError], None]] = []
        self._is_closing = False
        self.next_server = 0  # number

    def start_servers(self, asked: int | None, copies: int = 1) -> ServerEndpoints:
        """Start servers, each in several `copies`, dealt to hosts in turn; return where all of them
        listen. Collective.

        `asked` None: as many as the launcher was asked for, else one on each host. Copies are on
        different hosts, if there are enough. Raises `SecretError` where several hosts have no
        secret of the job.
        """
        worker_context, cluster = self._worker_context, self._worker_context.cluster
        if worker_context.place.joining:
            return self._make_endpoints()
        count, hosts, me = (
            asked or worker_context.place.servers or len(cluster.hosts),
            len(cluster.hosts),
            worker_context.place.rank,
        )
        secret = worker_context.place.secret
        if secret is None and hosts > 1:
            raise make_secret_error(
                f"{self._feature} listens on {hosts} hosts, and this job has no secret"
            )
        shown = secrets.token_hex(32) if secret is None else ""
        facts = json.loads(
            self._agreement.tell_everyone(
                "servers begin", lambda: json.dumps([secrets.token_hex(8), shown]).encode()
            )
        )
        self._job, self._secret = facts[0], facts[1] if secret is None else secret.hex()
        where = [
            (copy * count + shard, (shard + copy) % hosts)
            for copy in range(copies)
            for shard in range(count)
        ]
        # others of my host start none
        mine = cluster.host_by_rank()[me] if cluster.host_of(me).ranks[0] == me else -1
        started = [(number, self._start_process()) for number, host in where if host == mine]
        begun = [(number, self._await_addresses(process)) for number, process in started]
        answers = self._agreement.meet("servers", msgpack.packb([self.host_name, begun]))
        self._servers = []
        for host, found in map(msgpack.unpackb, answers):
            for number, addresses in found:
                place = cluster.hosts[where[number][1]].name
                name = self._make_name(number % count, place, copy=number >= count)
                self._servers.append(
                    StartedServer(number, number % count, host, name, tuple(addresses))
                )
        self._servers.sort()
        self.next_server = count * copies
        self._watch_servers([number for number, _ in begun])
        return self._make_endpoints()

    def _make_name(self, shard: int, place: str, *, copy: bool) -> str:
        return f"{'the copy of ' if copy else ''}{self._server_kind} {shard} on {place}"

    def _make_endpoints(self, known: list[StartedServer] | None = None) -> ServerEndpoints:
        known = self._servers if known is None else known
        near = [each.host == self.host_name or len(each.addresses) == 1 for each in known]
        return ServerEndpoints(
            addresses=tuple(
                each.addresses[-1 if here else 0] for each, here in zip(known, near, strict=True)
            ),
            names=tuple(each.name for each in known),
            keys=derive_rpc_keys(bytes.fromhex(self._secret), self._job),
            watch=self._watchers.append,
            close=self.close,
            numbers=tuple(each.number for each in known),
            shards=tuple(each.shard for each in known),
            pool=self if self._outlives_worker else None,
        )

    # ---- the programs

    def _start_process(self) -> subprocess.Popen[bytes]:
        """Start a server.

        One that outlives this worker is in a process group of its own, or would be killed with it.
        """
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.servers.process.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0 if self._outlives_worker else None,
        )
        self._processes.append(process)
        between = len(self._worker_context.cluster.hosts) > 1 or (
            self._outlives_worker and self._worker_context.place.secret is not None
        )
        asked: dict[str, Any] = {
            "job": self._job,
            "secret": self._secret,
            "hosts": [find_own_address(self._worker_context.place)] if between else [],
        }
        asked |= {"launcher": os.getppid()} if self._outlives_worker else {"parent": os.getpid()}
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: a wait for it finds out
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
        return process

    def _await_addresses(self, process: subprocess.Popen[bytes]) -> list[str]:
        """Addresses at which a server listens: between hosts, if there are several, and in this
        one.
        """
        poll, seconds = select.poll(), self._worker_context.deadline
        assert process.stdout is not None
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(1000 * seconds):
            raise ResourceError(f"a server has not begun within {seconds:g} s")
        line = process.stdout.readline()
        if not line:
            raise ResourceError(
                f"a server could not begin: it {_describe_end(process)}; its own output says more"
            )
        found: list[str] = json.loads(line)
        self._folders.append(os.path.dirname(found[-1].removeprefix("ipc://")))
        return found

    def _watch_servers(self, numbers: list[int]) -> None:
        """Watch servers of this worker, so that callers hear when one ends."""
        names = [each.name for each in self._servers if each.number in numbers]
        for name, process in zip(
            names, self._processes[-len(names) :] if names else [], strict=True
        ):
            threading.Thread(
                target=self._report_death,
                args=(name, process),
                name="paceline server watch",
                daemon=True,
            ).start()

    def _report_death(self, name: str, process: subprocess.Popen[bytes]) -> None:
        # one that was told to end does so with 0
        if process.wait() != 0 and not self._is_closing and not self._outlives_worker:
            error = WorkerLost(
                f"{name} {_describe_end(process)}: what it kept is lost; resume from a checkpoint"
            )
            for callback in self._watchers:
                callback(error)

    def close(self) -> None:
        """Kill the servers.

        What they keep is not needed any more; a worker that has failed has only a second for its
        last words.
        """
        self._is_closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self.leave_pool()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    # ---- where losses are survived (`ServerPool`)

    def leave_pool(self) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        self._processes = []

    def join_info(self) -> Any:
        return [
            self._job,
            self._secret if self._worker_context.place.secret is None else "",
            self.next_server,
            self._servers,
        ]

    def join_pool(self, info: Any) -> ServerEndpoints:
        self._job, shown, self.next_server, known = info
        own = self._worker_context.place.secret
        self._secret = shown if own is None else own.hex()
        self._servers = [_parse_server(each) for each in known]
        return self._make_endpoints()

    def remove_servers(self, numbers: Collection[int]) -> ServerEndpoints:
        self._servers = [each for each in self._servers if each.number not in numbers]
        return self._make_endpoints()

    def spawn_server(self, shard: int, *, mine: bool) -> int:
        number, self.next_server = self.next_server, self.next_server + 1
        if mine:
            self._starting_servers[number] = shard, self._start_process()
        return number

    def get_spawned_server(self, number: int) -> Any:
        shard, process = self._starting_servers[number]
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN | select.POLLHUP)
        if number not in self._begun_servers and poll.poll(0):
            try:
                name = self._make_name(shard, self._agreement.host, copy=True)
                self._begun_servers[number] = list(
                    StartedServer(
                        number, shard, self.host_name, name, tuple(self._await_addresses(process))
                    )
                )
            except ResourceError:
                self._begun_servers[number] = False
        return self._begun_servers.get(number)

    def add_server(self, server: Any) -> ServerEndpoints:
        self._servers.append(_parse_server(server))
        return self._make_endpoints()

    def make_endpoints_of(self, server: Any) -> ServerEndpoints:
        return self._make_endpoints([_parse_server(server)])

    def list_homes(self) -> list[tuple[str, int]]:
        return [(each.host, each.shard) for each in self._servers]

    def list_servers_on(self, hosts: Collection[str]) -> list[int]:
        return [each.number for each in self._servers if each.host in hosts]


def _parse_server(server: Any) -> StartedServer:
    number, shard, host, name, addresses = server
    return StartedServer(number, shard, host, name, tuple(addresses))


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    return describe_end(code if code >= 0 else 128 - code)

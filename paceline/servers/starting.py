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

from paceline.cluster.launcher.worker import ending
from paceline.cluster.secret import missing
from paceline.cluster.store import address
from paceline.comm.agreement import Agreement
from paceline.comm.rpc import derive_rpc_keys
from paceline.errors import PacelineError, ResourceError, WorkerLost
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.workers.groups import WorkerContext


class StartedServer(NamedTuple):
    """A server: its number, never used twice, the shard that it keeps, its host
    (`ServerStarter.here`), its name, and where it listens.
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
        self._worker_context, self._agreement, self._what, self._kind = (
            worker_context,
            agreement,
            what,
            kind,
        )
        self._outlive = worker_context.place.worker is not None
        self.here = (
            worker_context.home
            if self._outlive
            else str(worker_context.cluster.where()[worker_context.place.rank])
        )
        self._known: list[StartedServer] = []
        self._job = self._secret = ""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._beginning: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by number: its shard
        self._found: dict[int, Any] = {}  # by number: the server that began, or why it did not
        self._folders: list[str] = []
        self._watchers: list[Callable[[PacelineError], None]] = []
        self._closing = False
        self.next_step = 0  # number

    def begin(self, asked: int | None, copies: int = 1) -> ServerEndpoints:
        """Start servers, each in several `copies`, dealt to hosts in turn; return where all of them
        listen. Collective.

        `asked` None: as many as the launcher was asked for, else one on each host. Copies are on
        different hosts, if there are enough. Raises `SecretError` where several hosts have no
        secret of the job.
        """
        worker_context, cluster = self._worker_context, self._worker_context.cluster
        if worker_context.place.joining:
            return self._endpoints()
        count, hosts, me = (
            asked or worker_context.place.servers or len(cluster.hosts),
            len(cluster.hosts),
            worker_context.place.rank,
        )
        secret = worker_context.place.secret
        if secret is None and hosts > 1:
            raise missing(f"{self._what} listens on {hosts} hosts, and this job has no secret")
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
        mine = cluster.where()[me] if cluster.of(me).ranks[0] == me else -1
        started = [(number, self._start()) for number, host in where if host == mine]
        begun = [(number, self._begun(process)) for number, process in started]
        answers = self._agreement.meet("servers", msgpack.packb([self.here, begun]))
        self._known = []
        for host, found in map(msgpack.unpackb, answers):
            for number, addresses in found:
                place = cluster.hosts[where[number][1]].name
                name = self._name(number % count, place, copy=number >= count)
                self._known.append(
                    StartedServer(number, number % count, host, name, tuple(addresses))
                )
        self._known.sort()
        self.next_step = count * copies
        self._watch([number for number, _ in begun])
        return self._endpoints()

    def _name(self, shard: int, place: str, *, copy: bool) -> str:
        return f"{'the copy of ' if copy else ''}{self._kind} {shard} on {place}"

    def _endpoints(self, known: list[StartedServer] | None = None) -> ServerEndpoints:
        known = self._known if known is None else known
        near = [each.host == self.here or len(each.addresses) == 1 for each in known]
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
            pool=self if self._outlive else None,
        )

    # ---- the programs

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a server.

        One that outlives this worker is in a process group of its own, or would be killed with it.
        """
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.servers.process.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0 if self._outlive else None,
        )
        self._processes.append(process)
        between = len(self._worker_context.cluster.hosts) > 1 or (
            self._outlive and self._worker_context.place.secret is not None
        )
        asked: dict[str, Any] = {
            "job": self._job,
            "secret": self._secret,
            "hosts": [address(self._worker_context.place)] if between else [],
        }
        asked |= {"launcher": os.getppid()} if self._outlive else {"parent": os.getpid()}
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: a wait for it finds out
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
        return process

    def _begun(self, process: subprocess.Popen[bytes]) -> list[str]:
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
                f"a server could not begin: it {_ended(process)}; its own output says more"
            )
        found: list[str] = json.loads(line)
        self._folders.append(os.path.dirname(found[-1].removeprefix("ipc://")))
        return found

    def _watch(self, numbers: list[int]) -> None:
        """Watch servers of this worker, so that callers hear when one ends."""
        names = [each.name for each in self._known if each.number in numbers]
        for name, process in zip(
            names, self._processes[-len(names) :] if names else [], strict=True
        ):
            threading.Thread(
                target=self._wait, args=(name, process), name="paceline server watch", daemon=True
            ).start()

    def _wait(self, name: str, process: subprocess.Popen[bytes]) -> None:
        # one that was told to end does so with 0
        if process.wait() != 0 and not self._closing and not self._outlive:
            error = WorkerLost(
                f"{name} {_ended(process)}: what it kept is lost; resume from a checkpoint"
            )
            for callback in self._watchers:
                callback(error)

    def close(self) -> None:
        """Kill the servers.

        What they keep is not needed any more; a worker that has failed has only a second for its
        last words.
        """
        self._closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self.leave()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    # ---- where losses are survived (`ServerPool`)

    def leave(self) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        self._processes = []

    def join_info(self) -> Any:
        return [
            self._job,
            self._secret if self._worker_context.place.secret is None else "",
            self.next_step,
            self._known,
        ]

    def join(self, info: Any) -> ServerEndpoints:
        self._job, shown, self.next_step, known = info
        own = self._worker_context.place.secret
        self._secret = shown if own is None else own.hex()
        self._known = [_known(each) for each in known]
        return self._endpoints()

    def lose(self, numbers: Collection[int]) -> ServerEndpoints:
        self._known = [each for each in self._known if each.number not in numbers]
        return self._endpoints()

    def spawn(self, shard: int, *, mine: bool) -> int:
        number, self.next_step = self.next_step, self.next_step + 1
        if mine:
            self._beginning[number] = shard, self._start()
        return number

    def spawned(self, number: int) -> Any:
        shard, process = self._beginning[number]
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN | select.POLLHUP)
        if number not in self._found and poll.poll(0):
            try:
                name = self._name(shard, self._agreement.host, copy=True)
                self._found[number] = list(
                    StartedServer(number, shard, self.here, name, tuple(self._begun(process)))
                )
            except ResourceError:
                self._found[number] = False
        return self._found.get(number)

    def add(self, server: Any) -> ServerEndpoints:
        self._known.append(_known(server))
        return self._endpoints()

    def at(self, server: Any) -> ServerEndpoints:
        return self._endpoints([_known(server)])

    def homes(self) -> list[tuple[str, int]]:
        return [(each.host, each.shard) for each in self._known]

    def on(self, hosts: Collection[str]) -> list[int]:
        return [each.number for each in self._known if each.host in hosts]


def _known(server: Any) -> StartedServer:
    number, shard, host, name, addresses = server
    return StartedServer(number, shard, host, name, tuple(addresses))


def _ended(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    return ending(code if code >= 0 else 128 - code)

"""Starts servers: programs beside the first worker of each host, which end with it."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable

import msgpack

from paceline.cluster.secret import missing
from paceline.cluster.store import address
from paceline.cluster.worker import ending
from paceline.comm.messages import keys
from paceline.comm.ordered import Agreement
from paceline.errors import PacelineError, ResourceError, WorkerLost
from paceline.session.groups import Surroundings
from paceline.sync.base import Room


class Serving:
    """The servers that this worker has started."""

    def __init__(self, around: Surroundings, agreement: Agreement) -> None:
        self._around, self._agreement = around, agreement
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folders: list[str] = []
        self._told: list[Callable[[PacelineError], None]] = []
        self._closing = False

    def begin(self, asked: int | None) -> Room:
        """Start so many servers, dealt to hosts in turn; gives where all of them are. Collective.

        None: as many as the launcher was asked for, else one on each host.

        Raises `SecretError` where several hosts have no secret of the job.
        """
        around, cluster = self._around, self._around.cluster
        count, hosts, me = asked or around.place.servers or len(cluster.hosts), len(cluster.hosts), around.place.rank
        secret = around.place.secret
        if secret is None and hosts > 1:
            raise missing(f"ParameterServer listens on {hosts} hosts, and this job has no secret")
        shown = "" if secret is not None else secrets.token_hex(32)
        facts = json.loads(self._agreement.tell("servers begin", lambda: json.dumps([secrets.token_hex(8), shown]).encode()))
        job, secret = facts[0], bytes.fromhex(facts[1]) if secret is None else secret
        mine = cluster.where()[me]
        started = [self._start(job, secret) for number in range(count) if number % hosts == mine and cluster.hosts[mine].ranks[0] == me]
        found = [msgpack.unpackb(body) for body in self._agreement.meet("servers", msgpack.packb(started))]
        by_host = {host: iter(found[cluster.hosts[host].ranks[0]]) for host in range(hosts)}
        each = [(number % hosts, next(by_host[number % hosts])) for number in range(count)]
        names = tuple(f"server {number} on {cluster.hosts[host].name}" for number, (host, _) in enumerate(each))
        for number, process in zip([n for n in range(count) if n % hosts == mine], self._processes[-len(started) :], strict=False):
            self._watch(names[number], process)
        addresses = tuple(there[-1] if host == mine else there[0] for host, there in each)
        return Room(addresses, names, keys(secret, job), self._told.append, self.close)

    def _start(self, job: str, secret: bytes) -> list[str]:
        """Where it listens: between hosts, if there are several, and in this one."""
        process = subprocess.Popen([sys.executable, "-P", "-m", "paceline.sync.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes.append(process)
        hosts = [address(self._around.place)] if len(self._around.cluster.hosts) > 1 else []
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"job": job, "secret": secret.hex(), "hosts": hosts, "parent": os.getpid()}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            process.wait()
        poll, seconds = select.poll(), self._around.deadline
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(1000 * seconds):
            raise ResourceError(f"a server has not begun within {seconds:g} s")
        line = process.stdout.readline()
        if not line:
            raise ResourceError(f"a server could not begin: it {_ended(process)}; its own output says more")
        found: list[str] = json.loads(line)
        self._folders.append(os.path.dirname(found[-1].removeprefix("ipc://")))
        return found

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        def wait() -> None:
            if process.wait() != 0 and not self._closing:  # one that was told to end does so with 0
                error = WorkerLost(f"{name} {_ended(process)}: what it kept is lost; resume from a checkpoint")
                for told in self._told:
                    told(error)

        threading.Thread(target=wait, name="paceline server watch", daemon=True).start()

    def close(self) -> None:
        """End them, at once: what they keep is nobody's any more, and a worker that has failed has a second for its last words."""
        self._closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._processes = []


def _ended(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    return ending(code if code >= 0 else 128 - code)

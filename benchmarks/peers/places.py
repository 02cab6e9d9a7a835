"""Where launches happen: this machine, or the hosts of a lab.

Starting a command there, and ending all that it started.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import psutil  # type: ignore[import-untyped]

from benchmarks.harness import ONE_THREAD
from benchmarks.peers.catalogue import Setting
from benchmarks.peers.environments import ROOT

if TYPE_CHECKING:
    from paceline.lab.hosts import Cluster

Process = subprocess.Popen[bytes]
PREFIX = "peers-"  # of temporary folders


@dataclass(frozen=True)
class Host:
    """Where workers are: `interface` is None where the launchers' own choice is right."""

    number: int
    address: str
    interface: str | None
    workers: int


class Place(Protocol):
    """Hosts, and how a command is started on one; `folder` is for temporary files, the same on
    all hosts.
    """

    hosts: tuple[Host, ...]
    folder: Path

    def spawn(
        self, host: int, command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]
    ) -> Process:
        """Start a command on a host."""

    def port(self) -> int:
        """A free port on the first host."""

    def sweep(self) -> None:
        """Kill what launches left on the hosts."""


class Here:
    """This machine as it is, over loopback."""

    def __init__(self, workers: int, folder: Path) -> None:
        self.hosts: tuple[Host, ...] = (Host(0, "127.0.0.1", None, workers),)
        self.folder = folder

    def spawn(
        self, host: int, command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]
    ) -> Process:
        """Start a command in a session of its own."""
        return subprocess.Popen(
            command,
            env=environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def port(self) -> int:
        """A port that was free a moment ago."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    def sweep(self) -> None:
        """Kill every process that carries this place's folder in its environment, as all that we
        start do.
        """
        kill_marked(self.folder)


class Lab:
    """The hosts of a built cluster.

    A `ssh` of its own leads from one host to another, for launchers that start remote commands.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.hosts = tuple(
            Host(seat.number, seat.address, seat.interface, seat.workers) for seat in cluster.hosts
        )
        self.folder = folder
        self._cluster = cluster
        self._ports = iter(range(29500, 32000))
        self._write_ssh()

    def spawn(
        self, host: int, command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]
    ) -> Process:
        """Start a command on a host."""
        paths = {"PATH": f"{self.folder / 'bin'}:{environ['PATH']}"}
        return self._cluster.spawn(
            host, command, environ={**environ, **paths}, cwd=self.folder, stdout=log, stderr=log
        )

    def port(self) -> int:
        """A port that no launch has had in this lab."""
        return next(self._ports)

    def sweep(self) -> None:
        """Kill all processes of all hosts."""
        for host in self.hosts:
            for pid in self._cluster.processes(host.number):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def _write_ssh(self) -> None:
        """`ssh [options] HOST COMMAND...` as a script that enters the host's namespaces through
        this process, which holds them.
        """
        doors = []
        for host in self.hosts:
            door = shlex.join(self._cluster.entry_command(host.number)).replace(
                "/proc/self/", f"/proc/{os.getpid()}/"
            )
            doors.append(
                f'{host.address}|{self._cluster.hosts[host.number].name}) exec {door} sh -c "$*";;'
            )
        lines = [
            "#!/bin/sh",
            (
                'options() { left=$#; while [ "${1#-}" != "$1" ]; do case $1 in -[opil]) shift 2;; '
                "*) shift;; esac; done"
            ),
            "past=$((left - $#)); }",
            'options "$@"; shift $past; host=$1; shift',
            'options "$@"; shift $past',  # they may stand behind the host too
            "case $host in",
            *doors,
            '*) echo "ssh: $host is no host of this lab" >&2; exit 255;;',
            "esac",
        ]
        script = self.folder / "bin" / "ssh"
        script.parent.mkdir()
        script.write_text("\n".join(lines) + "\n")
        script.chmod(0o755)


@contextmanager
def place(setting: Setting) -> Iterator[Place]:
    """Build what a setting asks for, and take it down afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    folder.chmod(0o755)
    (folder / "driver").write_text(f"{os.getpid()} {psutil.Process().create_time()}")
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    try:
        if setting.bandwidth is None:
            here = Here(setting.workers, folder)
            try:
                yield here
            finally:
                here.sweep()
        else:
            from paceline import lab

            with lab.cluster(
                hosts=setting.hosts, workers=setting.each, bandwidth=setting.bandwidth
            ) as cluster:
                yield Lab(cluster, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tidy() -> None:
    """Remove what drivers left that were killed: their folders, and the processes that carry
    those in their environments.
    """
    for note in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/driver"):
        pid, began = note.read_text().split()
        try:
            alive = psutil.Process(int(pid)).create_time() == float(began)
        except psutil.NoSuchProcess:
            alive = False
        if not alive:
            kill_marked(note.parent)
            shutil.rmtree(note.parent, ignore_errors=True)


def kill_marked(folder: Path) -> None:
    """Kill every process of ours that was started with this folder."""
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and process.environ().get("PEERS_FOLDER") == str(
                folder
            ):
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def surroundings(place: Place) -> dict[str, str]:
    """The environment that every command gets: one thread, our modules, no launcher's variables,
    and a mark to find it by.
    """
    foreign = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "OMPI_",
        "PMI",
        "SLURM_",
        "TORCHELASTIC_",
        "PACELINE_",
        "HOROVOD_",
        "ACCELERATE_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **kept,
        **ONE_THREAD,
        "PYTHONPATH": str(ROOT),
        "PEERS_FOLDER": str(place.folder),
        "PYTHONUNBUFFERED": "1",
    }


def end(processes: Sequence[Process], patience: float = 10.0) -> None:
    """Ask processes to end, and kill them with their sessions when they don't."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"peers: process {process.pid} had to be killed", file=sys.stderr)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""How each launcher is called: a peer and a place give the commands to start on each host, as
data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import environments
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.places import Host, Place, surroundings


@dataclass(frozen=True)
class Start:
    """A command for a host. A `helper` serves the others, and is ended when they have."""

    host: int
    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    helper: bool = False


@dataclass(frozen=True)
class Call:
    """What is to be started: the interpreter, the program and its arguments, on the hosts of a
    place.
    """

    place: Place
    python: Path
    program: Path
    arguments: tuple[str, ...]

    def line(self, host: Host, *more: str) -> tuple[str, ...]:
        """The program and its arguments on a host."""
        return (
            str(self.program),
            *(argument.replace("{address}", host.address) for argument in (*self.arguments, *more)),
        )

    def beside(self, name: str) -> str:
        """A command of the interpreter's environment."""
        return str(self.python.parent / name)

    @property
    def workers(self) -> int:
        """The workers of all hosts."""
        return sum(host.workers for host in self.place.hosts)


def alone(call: Call) -> list[Start]:
    """One process on the first host."""
    return [Start(0, (str(call.python), *call.line(call.place.hosts[0])))]


def torchrun(call: Call) -> list[Start]:
    """torchrun on every host, as its documentation has it for a fixed number of nodes."""
    hosts, port, starts = call.place.hosts, call.place.port(), []
    for host in hosts:
        flags = {
            "--nnodes": len(hosts),
            "--node-rank": host.number,
            "--nproc-per-node": host.workers,
            "--master-addr": hosts[0].address,
            "--master-port": port,
        }
        words = (word for flag, value in flags.items() for word in (flag, str(value)))
        starts.append(
            Start(
                host.number,
                (str(call.python), "-m", "torch.distributed.run", *words, *call.line(host)),
                gloo(host),
            )
        )
    return starts


def paceline(call: Call) -> list[Start]:
    """`paceline run` on every host, the same line on each."""
    hosts = call.place.hosts
    several: tuple[str, ...] = ()
    if len(hosts) > 1:
        meeting = f"{hosts[0].address}:{call.place.port()}"
        several = (
            "--hosts",
            str(len(hosts)),
            "--join",
            meeting,
            "--secret-file",
            str(call.place.folder / "secret"),
        )
    starts = []
    for host in hosts:
        rank = ("--host-rank", str(host.number)) if several else ()
        command = (
            str(call.python),
            "-m",
            "paceline",
            "run",
            "--workers",
            str(host.workers),
            *several,
            *rank,
            *call.line(host),
        )
        starts.append(Start(host.number, command))
    return starts


def mpirun(call: Call) -> list[Start]:
    """Open MPI's mpirun on the first host; it reaches the others by ssh."""
    hosts = call.place.hosts
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(call.workers)]
    if len(hosts) > 1:
        interface = str(hosts[0].interface)
        flags += [
            "--host",
            ",".join(f"{host.address}:{host.workers}" for host in hosts),
            "--map-by",
            "slot",
        ]
        flags += [
            "--mca",
            "btl_tcp_if_include",
            interface,
            "--prtemca",
            "prte_if_include",
            interface,
        ]
        flags += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self"]
        flags += ["-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", "-x", "PEERS_FOLDER"]
    if call.workers > len(os.sched_getaffinity(0)):
        # else those that wait keep the others from computing: ten times slower here
        flags += ["--mca", "mpi_yield_when_idle", "1"]
    return [Start(0, (call.beside("mpirun"), *flags, str(call.python), *call.line(hosts[0])))]


def horovodrun(call: Call) -> list[Start]:
    """Horovod's launcher on the first host, with its Gloo controller; it reaches the others by
    ssh.
    """
    hosts = call.place.hosts
    flags = ["-np", str(call.workers), "--gloo"]
    if len(hosts) > 1:
        flags += [
            "-H",
            ",".join(f"{host.address}:{host.workers}" for host in hosts),
            "--network-interfaces",
            str(hosts[0].interface),
        ]
    return [
        Start(
            0,
            (call.beside("horovodrun"), *flags, str(call.python), *call.line(hosts[0])),
            {"PATH": path_with(call)},
        )
    ]


def accelerate(call: Call) -> list[Start]:
    """`accelerate launch --cpu --num_processes N`, which reads as if it started N processes."""
    flags = ("--cpu", "--num_processes", str(call.workers))
    return [
        Start(0, (call.beside("accelerate"), "launch", *flags, *call.line(call.place.hosts[0])))
    ]


def torchft(call: Call) -> list[Start]:
    """A lighthouse on the first host, and torchrun once for each worker: every worker is a
    replica group.
    """
    first, port = call.place.hosts[0], call.place.port()
    meeting = f"{first.address}:{port}"
    light = (
        call.beside("torchft_lighthouse"),
        "--min_replicas",
        str(call.workers),
        "--bind",
        meeting,
        "--join_timeout_ms",
        "60000",
    )
    starts, replica = [Start(0, light, helper=True)], 0
    for host in call.place.hosts:
        for _ in range(host.workers):
            torch = (
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "1",
                "--nproc-per-node",
                "1",
                "--master-addr",
                host.address,
            )
            command = (
                str(call.python),
                *torch,
                "--master-port",
                str(call.place.port()),
                *call.line(host, "--replica", str(replica)),
            )
            starts.append(
                Start(
                    host.number, command, {"TORCHFT_LIGHTHOUSE": f"http://{meeting}", **gloo(host)}
                )
            )
            replica += 1
    return starts


LAUNCHERS: dict[str, Callable[[Call], list[Start]]] = {
    "alone": alone,
    "torchrun": torchrun,
    "paceline run": paceline,
    "mpirun": mpirun,
    "horovodrun": horovodrun,
    "accelerate launch": accelerate,
    "torchft": torchft,
}


def gloo(host: Host) -> dict[str, str]:
    """The interface, said to Gloo as a user would on a host with several."""
    return {} if host.interface is None else {"GLOO_SOCKET_IFNAME": host.interface}


def path_with(call: Call) -> str:
    """The search path with the environment's commands first: launchers look for theirs there."""
    return f"{call.python.parent}:{surroundings(call.place)['PATH']}"


def starts(peer: Peer, place: Place, arguments: Sequence[str], bucket: float | None) -> list[Start]:
    """The commands that launch a peer; `bucket` is the best size for DDP's buckets, in MB."""
    own = tuple(
        argument.replace("{bucket}", f"{bucket:g}" if bucket is not None else "")
        for argument in peer.arguments
    )
    program = environments.HERE / "programs" / peer.program
    call = Call(place, environments.python_of(peer.environment), program, (*arguments, *own))
    return LAUNCHERS[peer.launcher](call)

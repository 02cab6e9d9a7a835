"""A cluster built on this machine.

Each host has its own network, name, shared memory and processors.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from paceline.cluster import machine, secret
from paceline.cluster.discover import copy_environment
from paceline.cluster.launcher.request import Placement
from paceline.errors import ResourceError, UsageError
from paceline.lab import cgroups, cleaning, enter, kernel, links, remains, spaces
from paceline.lab.description import Description, Rate, find_cluster, make_regular, parse_rate
from paceline.lab.running import LabRequest, Outcome, run_request

# File descriptors of this process. Each host needs more: its namespaces, its launcher's pipes.
_DESCRIPTORS: Final = 64
_KINDS: Final = ("net", "uts", "ipc", "mnt")
# Processes of hosts get no sessions of their own: the kernel divides the cores among sessions
# (autogroups) before it divides them among threads.
_QUIET: Final[dict[str, Any]] = {"stdin": subprocess.DEVNULL, "process_group": 0}


@dataclass(frozen=True)
class BuiltHost:
    """One host of a built cluster.

    Attributes:
        number: Index in the description.
        name: Name of the host.
        workers: Number of its workers.
        address: Its IP address.
        interface: Name of its network interface, inside of the host.
        port: Name of the interface at the other end of its link, in the switch.
        space: Its namespaces.
        group: Its control groups.
    """

    number: int
    name: str
    workers: int
    address: str
    interface: str
    port: str
    space: spaces.NamespaceSet
    group: cgroups.Cgroup

    @property
    def network(self) -> str:
        """Name of its network: the target of /proc/PID/ns/net for each process of this host."""
        return self.space.network


class Cluster:
    """A cluster that is built when it is entered and removed when it is left.

    >>> with lab.Cluster(lab.ready("two-hosts")) as cluster:
    ...     outcome = cluster.run("train.py")

    Before it is built, the leftovers of labs that were killed are removed. Entering raises
    `ResourceError` if this machine can't build the description.

    Invariants:
        - `hosts` is empty unless the cluster is built.
        - `_held` removes everything that was built, in the reverse order.
        - The record of this lab exists before the first thing that a killed process would leave.
        - A host is in `_limited` if it has or had a quota. Until then its processes stay out of the
          cpu control group, and share the cores thread by thread, as without a lab.

    Attributes:
        description: Description of the cluster.
        identity: Eight hex digits that no other lab on this machine has.
        hosts: The built hosts, in the order of the description.
        folder: Folder of the lab's temporary files.
        notes: Properties that could not be built as described, if the description allows that.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.identity = secrets.token_hex(4)
        self.hosts: tuple[BuiltHost, ...] = ()
        self.folder = Path()
        self.notes: list[str] = []
        self._delays = True
        self._switch: spaces.NamespaceSet | None = None
        self._processors: dict[int, float | None] = {}
        self._limited: set[int] = set()
        self._held = ExitStack()
        self._runs = 0
        self._start_host: Any = None

    def __enter__(self) -> Cluster:
        """Build the cluster."""
        if self.hosts:
            raise UsageError("this cluster is built already: leave it first, or make another")
        machine.raise_descriptor_limit(_DESCRIPTORS + 8 * len(self.description.hosts))
        kernel.check_rights()
        cleaning.remove_leftovers()
        self.notes = kernel.check_abilities(self.description)
        self._delays = not self.notes
        self.folder = Path(tempfile.gettempdir()) / f"{cgroups.PREFIX}{self.identity}"
        with ExitStack() as held:
            held.callback(remains.forget_record, self.identity)
            # The record comes before anything that could be left over.
            self._write_record([], 0)
            held.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.folder.mkdir(mode=0o700)
            self._build_hosts(held)
            # Until here an error removes everything that was built; from here on `close` does.
            self._held = held.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes on all hosts, and remove the cluster. A second call does nothing."""
        self._held.close()
        self.hosts = ()

    def run(self, script: str | Path, *args: str, **options: Any) -> Outcome:
        """Start `paceline run` on each host, as a user would, and wait for the end of the run.

        Args:
            script: Path of the script to train with.
            args: Arguments of the script.
            options: Other fields of `LabRequest`.
        """
        return self.perform(LabRequest(str(script), args, **options))

    def perform(self, start: LabRequest) -> Outcome:
        """Run a request, as `run` does with its arguments."""
        self._check_built()
        self._runs += 1
        return run_request(self, start, self.pages(self._runs))

    @property
    def secret(self) -> Path:
        """File with the secret of the lab's jobs.

        It lies beside the folders of the hosts. Its name has a dot, which no host's name has.
        """
        return self.folder / "job.secret"

    def pages(self, run: int) -> Path:
        """Folder of the workers' progress pages in a run (counted from 1)."""
        return self.folder / f"run.{run}"

    def spawn(
        self,
        host: int,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start any command on a host. The process ends with the cluster at the latest.

        Args:
            host: Index of the host.
            command: The command and its arguments.
            environ: Its environment variables. Default: those of this process.
            options: Options of `subprocess.Popen`.
        """
        seat = self._built_host(host)
        variables = copy_environment() if environ is None else dict(environ)
        return subprocess.Popen(
            [*self.entry_command(host), *command],
            # The mark lets the cleaning find the process, even if it has left the host.
            env={**variables, remains.MARK: self.identity, "TMPDIR": str(self.folder / seat.name)},
            pass_fds=(*options.pop("pass_fds", ()), *seat.space.fds.values()),
            **{**_QUIET, **options},
        )

    def entry_command(self, host: int) -> list[str]:
        """Build the command prefix that makes a command run on this host.

        The process has to inherit the host's namespaces; `spawn` passes them on.
        """
        seat = self._built_host(host)
        namespaces = ",".join(f"{kind}=/proc/self/fd/{fd}" for kind, fd in seat.space.fds.items())
        entry_files = seat.group.list_entry_files(
            ("cpu", "memory") if host in self._limited else ("memory",)
        )
        return [
            sys.executable,
            "-I",
            "-S",
            str(Path(enter.__file__)),
            namespaces,
            ",".join(map(str, entry_files)) or "-",
        ]

    def processes(self, host: int) -> list[int]:
        """List the process IDs of all processes on a host."""
        return remains.processes_inside([self._built_host(host).network])

    def cut(self, host: int) -> None:
        """Unplug a host's network: no packet gets in or out, and no process is notified."""
        links.switch_on(self._switch_space, self._built_host(host).port, on=False)

    def mend(self, host: int) -> None:
        """Plug a host's network in again after `cut`."""
        links.switch_on(self._switch_space, self._built_host(host).port, on=True)

    def limit(self, host: int, up: Rate | str | None, down: Rate | str | None) -> None:
        """Limit a host's rates of sending and receiving, from now on.

        Args:
            host: Index of the host.
            up: Limit of sending, in bits per second or as text ("1gbit"). None: no limit.
            down: Limit of receiving, likewise.
        """
        seat = self._built_host(host)
        up_rate, down_rate = (None if rate is None else parse_rate(rate) for rate in (up, down))
        # Setting a rate removes the delay beside it, so the delay is set each time, too.
        delay = self.description.hosts[host].delay if self._delays else None
        links.limit_rate(seat.space, seat.interface, up_rate, delay)
        links.limit_rate(self._switch_space, seat.port, down_rate)

    def quota(self, host: int, processors: float | None) -> None:
        """Limit a host to this number of cores, from now on (None: all)."""
        seat = self._built_host(host)
        if "cpu" not in seat.group.controllers:
            # If quotas are still impossible, this raises an error with the reason.
            cgroups.find_base("cpu")
            raise ResourceError(
                "this lab was built without processor quotas, which are possible now: build it "
                "again"
            )
        seat.group.limit_processors(processors)
        self._processors[host] = processors
        # The first quota moves the host's running processes into the cpu control group. The host is
        # marked before that, so a process that starts meanwhile enters the group by itself.
        if processors is not None and host not in self._limited:
            self._limited.add(host)
            seat.group.admit_processes("cpu", lambda: self.processes(host))

    def quota_of(self, host: int) -> float | None:
        """Look up the number of cores that a host may use (None: all)."""
        self._built_host(host)
        return self._processors.get(host)

    def start(self, host: int) -> None:
        """Start the launcher of a host that has none in this run: it was left out, or has ended."""
        seat = self._built_host(host)
        if self._start_host is None:
            raise UsageError(
                f"no run is under way that {seat.name} could join: start it by a fault, "
                "cluster.run(..., faults=[join(...)])"
            )
        self._start_host(host)

    def crash(self, host: int) -> None:
        """Cut a host's power: its network goes down, then all its processes are killed."""
        # The network goes first, so that no other host hears of the end of a connection.
        self.cut(host)
        survivors = remains.kill_processes(lambda: self.processes(host))
        if survivors:
            raise ResourceError(
                f"processes {', '.join(map(str, survivors))} of {self._built_host(host).name} "
                "don't end after SIGKILL: look at them with ps"
            )

    @contextmanager
    def starting(self, start_host: Any) -> Iterator[None]:
        """Make `start` call this function with the index of a host, while a run is under way."""
        self._start_host = start_host
        try:
            yield
        finally:
            self._start_host = None

    @property
    def _switch_space(self) -> spaces.NamespaceSet:
        self._check_built()
        assert self._switch is not None
        return self._switch

    def _check_built(self) -> None:
        if not self.hosts:
            raise UsageError(
                "this cluster isn't built now: use it inside of `with Cluster(...) as cluster:`"
            )

    def _built_host(self, host: int) -> BuiltHost:
        self._check_built()
        if not 0 <= host < len(self.hosts):
            raise UsageError(
                f"there is no host {host}: {self.description.name} has hosts 0 to "
                f"{len(self.hosts) - 1}"
            )
        return self.hosts[host]

    def _build_hosts(self, held: ExitStack) -> None:
        """Build all hosts and connect them; `held` removes them again, in the reverse order."""
        names = self.folder / "hosts.table"
        # torch looks up the peer of a connection by the second form of its address. That line needs
        # another name, or the host would seem to have two addresses.
        table = [
            (
                f"{links.host_address(index)} {host.name}\n::ffff:{links.host_address(index)} "
                f"{host.name}.lab"
            )
            for index, host in enumerate(self.description.hosts)
        ]
        names.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *table]) + "\n")
        names.chmod(0o644)
        # The file is private before the secret is in it.
        self.secret.touch(mode=0o600)
        self.secret.write_bytes(secret.make_secret())
        self._switch = spaces.NamespaceSet.make_namespaces(["net"])
        held.callback(self._switch.close)
        seats = [
            self._furnish_host(index, names, held) for index in range(len(self.description.hosts))
        ]
        # The keeper knows all control groups before the first one is made.
        self._start_keeper(seats, held)
        for seat in seats:
            seat.group.make_folders()
        self.hosts = tuple(seats)
        self._connect_hosts()

    def _furnish_host(self, index: int, names: Path, held: ExitStack) -> BuiltHost:
        """Make a host's folder and namespaces; its control groups are only named, not made."""
        host = self.description.hosts[index]
        (self.folder / host.name).mkdir()
        space = spaces.NamespaceSet.make_namespaces(_KINDS, spaces.make_furnisher(host.name, names))
        held.callback(space.close)
        group = cgroups.Cgroup(
            f"{cgroups.PREFIX}{self.identity}-{index}", _find_bases(host.processors, host.memory)
        )
        return BuiltHost(
            index,
            host.name,
            host.workers,
            links.host_address(index),
            links.INTERFACE,
            f"port{index}",
            space,
            group,
        )

    def _write_record(self, seats: Sequence[BuiltHost], keeper: int) -> Path:
        """Write the record of everything that has to be removed if this process is killed."""
        hosts = [
            {
                "name": seat.name,
                "address": seat.address,
                "network": seat.network,
                "fds": seat.space.fds,
                "cgroups": [str(folder) for folder in seat.group.folders],
            }
            for seat in seats
        ]
        process = os.getpid()
        owner = {
            "identity": self.identity,
            "name": self.description.name,
            "process": process,
            "began": remains.start_ticks(process),
        }
        try:
            return remains.write_record(
                {**owner, "keeper": keeper, "folder": str(self.folder), "hosts": hosts}
            )
        except OSError as error:
            raise ResourceError(
                f"the lab's record can't be written to {error.filename} ({error.strerror}): "
                "make yourself the owner of that place"
            ) from error

    def _start_keeper(self, seats: Sequence[BuiltHost], held: ExitStack) -> None:
        """Start the keeper, which cleans up when this process is killed."""
        path = self._write_record(seats, 0)
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(remains.__file__)), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            # While the keeper holds the networks, no other lab can get their numbers.
            pass_fds=[fd for seat in seats for fd in seat.space.fds.values()],
        )
        # On the way back these run in the reverse order: the processes are killed, the control
        # groups are removed, and only then the keeper may go.
        held.callback(_dismiss_keeper, keeper)
        self._write_record(seats, keeper.pid)
        for seat in seats:
            held.callback(seat.group.remove_folders)
        held.callback(
            remains.kill_processes,
            lambda: (
                {
                    *remains.processes_inside(seat.network for seat in seats),
                    *remains.processes_marked(self.identity),
                }
                - {keeper.pid}
            ),
        )

    def _connect_hosts(self) -> None:
        """Build the network, and set all limits of racks and hosts."""
        description = self.description
        rack_of_host = {
            name: index for index, rack in enumerate(description.racks) for name in rack.hosts
        }
        links.lay_bridges(self._switch_space, len(description.racks))
        for index, rack in enumerate(description.racks):
            links.limit_rate(self._switch_space, f"top{index}", rack.up)
            links.limit_rate(self._switch_space, f"bottom{index}", rack.down)
        for seat, host in zip(self.hosts, description.hosts, strict=True):
            links.plug_host(
                self._switch_space, seat.space, seat.number, rack_of_host.get(host.name)
            )
            self.limit(seat.number, host.up, host.down)
            if host.processors is not None:
                self.quota(seat.number, host.processors)
            if host.memory is not None:
                seat.group.limit_memory(host.memory)


def _find_bases(processors: float | None, memory: int | None) -> list[cgroups.CgroupBase]:
    """Find the parents of a host's control groups.

    The group of the processors is made whenever possible, since a fault may limit them later.
    """
    bases = []
    try:
        bases.append(cgroups.find_base("cpu"))
    except ResourceError:
        if processors is not None:
            raise
    if memory is not None:
        bases.append(cgroups.find_base("memory"))
    return bases


def _dismiss_keeper(keeper: subprocess.Popen[bytes]) -> None:
    """Tell the keeper that there is nothing to clean up, and wait until it ends."""
    assert keeper.stdin is not None
    try:
        with keeper.stdin as pipe:
            pipe.write(b"done")
    except BrokenPipeError:
        pass  # the keeper was killed
    keeper.wait()


def cluster(
    *,
    hosts: int | None = None,
    workers: int | None = None,
    placement: Placement | None = None,
    description: Description | str | None = None,
    **each: Any,
) -> Cluster:
    """Make a cluster to be entered by `with`.

    >>> with lab.cluster(hosts=2, workers=2, bandwidth="1gbit") as cluster:
    ...     outcome = cluster.run("train.py")

    Args:
        hosts: Number of equal hosts. Default: 2.
        workers: Number of workers on each. Default: 1.
        placement: How ranks are dealt to hosts; it may replace that of `description`.
        description: Instead of `hosts` and `workers`: a `Description`, the name of a ready-made
            cluster, or the path of a TOML file.
        each: Properties of each host: bandwidth, up, down ("1gbit"), delay ("20ms"), processors
            (cores), memory ("2GB").
    """
    if description is None:
        return Cluster(
            make_regular(
                2 if hosts is None else hosts,
                1 if workers is None else workers,
                placement=placement or "block",
                **each,
            )
        )
    conflicting = [
        name
        for name, value in (("hosts", hosts), ("workers", workers), *each.items())
        if value is not None
    ]
    if conflicting:
        raise UsageError(
            f"{', '.join(conflicting)} and a description are given: write all into the "
            "description, or leave the description out"
        )
    chosen = find_cluster(description) if isinstance(description, str) else description
    return Cluster(chosen if placement is None else replace(chosen, placement=placement))

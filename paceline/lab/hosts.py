"""A built cluster: for each host a network, a name, shared memory and processors of its own, on
this machine.
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

# of this process, and more for each host: its namespaces, and the pipes of its launcher
_DESCRIPTORS: Final = 64
_KINDS: Final = ("net", "uts", "ipc", "mnt")
# Not in sessions of their own: the kernel shares the cores among sessions (autogroups) before it
# shares them among threads.
_QUIET: Final[dict[str, Any]] = {"stdin": subprocess.DEVNULL, "process_group": 0}


@dataclass(frozen=True)
class BuiltHost:
    """One host of a built cluster.

    `space` holds its namespaces; `network` is its name in /proc; `port` is its interface at the
    switch.
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
        """The value of /proc/PID/ns/net of every process of this host."""
        return self.space.network


class Cluster:
    """A described cluster, built when it is entered and removed when it is left.

    >>> with lab.Cluster(lab.ready("two-hosts")) as cluster:
    ...     outcome = cluster.run("train.py")

    `identity` tells it from every other lab of this machine. `hosts` are its seats, in the order of
    the description. Remains of a lab that was killed are removed first. Raises `ResourceError` if
    this machine can't do what the description asks.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.identity = secrets.token_hex(4)
        self.hosts: tuple[BuiltHost, ...] = ()
        self.folder = Path()  # temporary files of this lab
        self.notes: list[str] = []  # what could not be built as described, though that was allowed
        self._delays = True
        self._switch: spaces.NamespaceSet | None = None
        self._processors: dict[int, float | None] = {}
        # hosts that have, or have had, a quota: others share the cores thread by thread, as without
        # a lab
        self._limited: set[int] = set()
        self._held = ExitStack()
        self._runs = 0
        self._start_host: Any = None

    def __enter__(self) -> Cluster:
        """Build it."""
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
            self._write_record([], 0)  # before there is anything that could be left
            held.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.folder.mkdir(mode=0o700)
            self._build_hosts(held)
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
        """End every process of every host, and remove it all. Calling it twice is harmless."""
        self._held.close()
        self.hosts = ()

    def run(self, script: str | Path, *args: str, **options: Any) -> Outcome:
        """Start `paceline run` on each host, as a user would, and wait for the end.

        `options` are the fields of `LabRequest`.
        """
        return self.perform(LabRequest(str(script), args, **options))

    def perform(self, start: LabRequest) -> Outcome:
        """Run a request, as `run` does."""
        self._check_built()
        self._runs += 1
        return run_request(self, start, self.pages(self._runs))

    @property
    def secret(self) -> Path:
        """The file with the secret of its jobs.

        Like all that lies beside the folders of hosts it has a dot, which no host's name has.
        """
        return self.folder / "job.secret"

    def pages(self, run: int) -> Path:
        """Return the folder of the workers' progress pages, in this run (counted from 1)."""
        return self.folder / f"run.{run}"

    def spawn(
        self,
        host: int,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start any command on a host; `options` are those of `subprocess.Popen`.

        It ends with the cluster at the latest.
        """
        seat = self._built_host(host)
        given = copy_environment() if environ is None else dict(environ)
        return subprocess.Popen(
            [*self.entry_command(host), *command],
            env={**given, remains.MARK: self.identity, "TMPDIR": str(self.folder / seat.name)},
            pass_fds=(*options.pop("pass_fds", ()), *seat.space.fds.values()),
            **{**_QUIET, **options},
        )

    def entry_command(self, host: int) -> list[str]:
        """Return the words before a command that make it run on this host; its namespaces have
        to be inherited (`spawn` does it).
        """
        seat = self._built_host(host)
        namespaces = ",".join(f"{kind}=/proc/self/fd/{fd}" for kind, fd in seat.space.fds.items())
        entrances = seat.group.list_entry_files(
            ("cpu", "memory") if host in self._limited else ("memory",)
        )
        return [
            sys.executable,
            "-I",
            "-S",
            str(Path(enter.__file__)),
            namespaces,
            ",".join(map(str, entrances)) or "-",
        ]

    def processes(self, host: int) -> list[int]:
        """Return the processes that run on a host."""
        return remains.processes_inside([self._built_host(host).network])

    def cut(self, host: int) -> None:
        """Pull the plug of a host's network: no packet gets in or out, and no process is
        notified.
        """
        links.switch_on(self._switch_space, self._built_host(host).port, on=False)

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        links.switch_on(self._switch_space, self._built_host(host).port, on=True)

    def limit(self, host: int, up: Rate | str | None, down: Rate | str | None) -> None:
        """Change the limits at which the host sends and receives (None: no limit), from now on."""
        seat = self._built_host(host)
        sides = [None if side is None else parse_rate(side) for side in (up, down)]
        delay = self.description.hosts[host].delay if self._delays else None
        links.limit_rate(seat.space, seat.interface, sides[0], delay)
        links.limit_rate(self._switch_space, seat.port, sides[1])

    def quota(self, host: int, processors: float | None) -> None:
        """Let the host use so many cores from now on (None: all)."""
        seat = self._built_host(host)
        if "cpu" not in seat.group.controllers:
            cgroups.find_base("cpu")  # raises, and says why
            raise ResourceError("this lab was built without processor quotas")
        seat.group.limit_processors(processors)
        self._processors[host] = processors
        if processors is not None and host not in self._limited:
            self._limited.add(host)
            seat.group.admit_processes("cpu", lambda: self.processes(host))

    def quota_of(self, host: int) -> float | None:
        """Return the number of cores that the host may use (None: all)."""
        self._built_host(host)
        return self._processors.get(host)

    def start(self, host: int) -> None:
        """Start the launcher of a host that the run left out, or whose launcher has ended."""
        seat = self._built_host(host)
        if self._start_host is None:
            raise UsageError(
                f"no run is under way that {seat.name} could join: start it from a fault of "
                "cluster.run(...)"
            )
        self._start_host(host)

    def crash(self, host: int) -> None:
        """Take a host's power: its link goes down, then all its processes die at once, so that
        no last word is heard.
        """
        self.cut(host)
        left = remains.kill_processes(lambda: self.processes(host))
        if left:
            raise ResourceError(
                f"processes {', '.join(map(str, left))} of {self._built_host(host).name} don't "
                "end; "
                "look at them with ps"
            )

    @contextmanager
    def starting(self, start_host: Any) -> Iterator[None]:
        """Let `start` start a host by this function, while a run is under way."""
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
                "this cluster isn't built (any more): use it inside `with Cluster(...) as cluster:`"
            )

    def _built_host(self, host: int) -> BuiltHost:
        self._check_built()
        if not 0 <= host < len(self.hosts):
            raise UsageError(
                f"there is no host {host}: {self.description.name} has 0 to {len(self.hosts) - 1}"
            )
        return self.hosts[host]

    def _build_hosts(self, held: ExitStack) -> None:
        names = self.folder / "hosts.table"
        # The second form is how torch looks up who has connected; it needs another name, or the
        # host would seem to have two addresses.
        table = [
            (
                f"{links.host_address(index)} {host.name}\n::ffff:{links.host_address(index)} "
                f"{host.name}.lab"
            )
            for index, host in enumerate(self.description.hosts)
        ]
        names.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *table]) + "\n")
        names.chmod(0o644)
        self.secret.touch(mode=0o600)
        self.secret.write_bytes(secret.make_secret())
        self._switch = spaces.NamespaceSet.make_namespaces(["net"])
        held.callback(self._switch.close)
        seats = [
            self._furnish_host(index, names, held) for index in range(len(self.description.hosts))
        ]
        self._start_keeper(seats, held)
        for seat in seats:
            seat.group.make_folders()
        self.hosts = tuple(seats)
        self._connect_hosts()

    def _furnish_host(self, index: int, names: Path, held: ExitStack) -> BuiltHost:
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
        """Write down what has to be removed if this process is killed."""
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
        whose = {
            "identity": self.identity,
            "name": self.description.name,
            "process": process,
            "began": remains.start_ticks(process),
        }
        try:
            return remains.write_record(
                {**whose, "keeper": keeper, "folder": str(self.folder), "hosts": hosts}
            )
        except OSError as error:
            raise ResourceError(
                f"the lab's record can't be written to {error.filename} ({error.strerror}): "
                "make that place yours"
            ) from error

    def _start_keeper(self, seats: Sequence[BuiltHost], held: ExitStack) -> None:
        """Start the keeper, which waits for the death of this process."""
        path = self._write_record(seats, 0)
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(remains.__file__)), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            # so that no other lab gets these networks' numbers
            pass_fds=[fd for seat in seats for fd in seat.space.fds.values()],
        )
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
        description = self.description
        racks = {name: index for index, rack in enumerate(description.racks) for name in rack.hosts}
        links.lay_bridges(self._switch_space, len(description.racks))
        for index, rack in enumerate(description.racks):
            links.limit_rate(self._switch_space, f"top{index}", rack.up)
            links.limit_rate(self._switch_space, f"bottom{index}", rack.down)
        for seat, host in zip(self.hosts, description.hosts, strict=True):
            links.plug_host(self._switch_space, seat.space, seat.number, racks.get(host.name))
            self.limit(seat.number, host.up, host.down)
            if host.processors is not None:
                self.quota(seat.number, host.processors)
            if host.memory is not None:
                seat.group.limit_memory(host.memory)


def _find_bases(processors: float | None, memory: int | None) -> list[cgroups.CgroupBase]:
    """Find the parents of a host's control groups: for the processors wherever possible, since a
    fault may limit them later.
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
    """Tell the keeper that there is nothing left for it."""
    assert keeper.stdin is not None
    try:
        with keeper.stdin as pipe:
            pipe.write(b"done")
    except BrokenPipeError:
        pass  # it was killed
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
        description: In place of `hosts`: a `Description`, the name of a ready-made cluster, or the
            path of a TOML file.
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
    given = [
        name
        for name, value in (("hosts", hosts), ("workers", workers), *each.items())
        if value is not None
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)} and a description are given: write it into the description, or "
            "leave that out"
        )
    chosen = find_cluster(description) if isinstance(description, str) else description
    return Cluster(chosen if placement is None else replace(chosen, placement=placement))

"""The commands of `paceline lab`: each one writes to this terminal, and returns its exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from paceline.cluster.discover import copy_environment
from paceline.cluster.launcher.request import PLACEMENTS, Placement
from paceline.errors import ResourceError, UsageError
from paceline.formatting import format_choices
from paceline.lab import chaos, cleaning, enter, kernel, remains, running
from paceline.lab.description import Description, find_cluster, spell_rate

_SHELL: Final = "/bin/sh"


def run_in_lab(
    cluster: str, placement: str | None, start: running.LabRequest, *, kept: bool = True
) -> int:
    """Build a cluster, run a script on it, and take the cluster down.

    Args:
        cluster: The name or the file of a cluster.
        placement: How ranks are dealt to hosts (None: as the cluster says).
        start: The script and the options of the run.
        kept: The run's folder stays after the run, so its path is printed. Default: True.

    Returns:
        The exit code of `paceline run`.
    """
    description = find_cluster(cluster)
    if placement is not None:
        if placement not in PLACEMENTS:
            raise UsageError(f"--placement is {placement}; {format_choices(placement, PLACEMENTS)}")
        description = replace(description, placement=cast(Placement, placement))
    try:
        outcome = build_and_run(description, start)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if kept and outcome.folder is not None:
        print(
            f"paceline: the run's folder is {_shorten_path(outcome.folder)}",
            file=sys.stderr,
            flush=True,
        )
    return outcome.code


def build_and_run(description: Description, start: running.LabRequest) -> running.Outcome:
    """Build a cluster, run a script on it, and take the cluster down.

    The cluster is described on this terminal if the run is shown there. Ctrl-C raises
    `KeyboardInterrupt`, and SIGTERM and SIGHUP raise `SystemExit`, when everything has ended.
    """
    from paceline.lab.hosts import Cluster

    # Mistakes of the user come first, while nothing is built.
    chaos.list_faults(start.faults, description)
    running.check_request(start)
    kernel.seek_rights()
    with _end_on_signals(), Cluster(description) as built:
        for line in (describe_cluster(description), *built.notes) if start.show else ():
            print(f"paceline: {line}", file=sys.stderr, flush=True)
        return built.perform(start)


def describe_cluster(description: Description) -> str:
    """Describe a cluster in one line.

    An example: `lab two-hosts: 2 hosts, 4 workers dealt in blocks, links of 1gbit`.
    """
    rates = {(host.up, host.down) for host in description.hosts}
    # one rate is named only if it holds for all hosts, up and down
    links = "unequal links"
    if len(rates) == 1 and len(set(*rates)) == 1:
        rate = next(iter(rates))[0]
        links = "unlimited links" if rate is None else f"links of {spell_rate(rate)}"
    racks = f" in {len(description.racks)} racks" if description.racks else ""
    placement = "in blocks" if description.placement == "block" else description.placement
    return (
        f"lab {description.name}: {len(description.hosts)} hosts{racks}, {description.workers} "
        f"workers dealt {placement}, {links}"
    )


def show_abilities() -> int:
    """Show the abilities of this machine; the exit code is 0 if a lab can run here."""
    try:
        print(f"rights: {kernel.seek_rights()}")
    except ResourceError as error:
        print(f"rights: MISSING: {error}\nno lab can run here")
        return 1
    abilities = kernel.try_abilities()
    width = max(len(ability.name) for ability in abilities)
    for ability in abilities:
        state = "yes" if not ability.reason else "MISSING" if ability.needed else "no"
        print(f"{ability.name:{width}}  {state:7}  {ability.reason or ability.purpose}")
    can_run = not any(ability.needed and ability.reason for ability in abilities)
    print("a lab can run here" if can_run else "no lab can run here")
    return 0 if can_run else 1


def remove_leftovers() -> int:
    """Remove what killed labs have left behind, and list it."""
    for line in cleaning.remove_leftovers() or ["nothing is left of any lab"]:
        print(line)
    return 0


def open_shell(host: str, command: Sequence[str], identity: str | None = None) -> NoReturn:
    """Replace this process by a shell on a host of a running lab.

    Args:
        host: The name or the number of the host.
        command: Words that are joined by blanks and read by the shell, as ssh does it, so that
            mpirun can use this as its ssh. Empty: an interactive shell.
        identity: The lab, if more than one runs.

    Raises:
        UsageError: No such lab runs, it has no such host, or it was started with other rights.
    """
    record = _find_running_lab(identity)
    seat = _find_host(record, host)
    process = record["process"]
    namespaces = [f"{kind}=/proc/{process}/fd/{fd}" for kind, fd in seat["fds"].items()]
    # The user namespace is entered first: it gives the right to enter the others.
    try:
        if os.readlink(f"/proc/{process}/ns/user") != os.readlink("/proc/self/ns/user"):
            namespaces.insert(0, f"user=/proc/{process}/ns/user")
    except PermissionError as error:
        raise UsageError(
            f"the lab was started with other rights (process {process}): "
            "open the shell as the same user"
        ) from error
    groups = [f"{folder}/cgroup.procs" for folder in seat["cgroups"]]
    environ = copy_environment()
    shell = environ.get("SHELL", _SHELL)
    program = [shell, "-c", " ".join(command)] if command else [shell]
    environ |= {
        remains.MARK: record["identity"],
        "TMPDIR": f"{record['folder']}/{seat['name']}",
    }
    # A small script enters the namespaces and groups, then becomes the shell.
    entry_command = [
        sys.executable,
        "-I",
        "-S",
        str(Path(enter.__file__)),
        ",".join(namespaces),
        ",".join(groups) or "-",
        *program,
    ]
    sys.stdout.flush()
    os.execve(entry_command[0], entry_command, environ)


def _find_running_lab(identity: str | None) -> dict[str, Any]:
    """Find the record of the lab with this identity, or of the only one that runs."""
    labs = {
        record["identity"]: record for record in remains.read_records() if remains.is_alive(record)
    }
    if identity is not None:
        if identity not in labs:
            raise UsageError(f"no lab {identity} runs; {format_choices(identity, labs)}")
        return labs[identity]
    if not labs:
        raise UsageError(
            "no lab runs: start one in another terminal with `paceline lab run CLUSTER SCRIPT`"
        )
    if len(labs) > 1:
        names = ", ".join(f"{lab} ({record['name']})" for lab, record in labs.items())
        raise UsageError(f"{len(labs)} labs run: {names}; choose one with --lab")
    return next(iter(labs.values()))


def _find_host(record: dict[str, Any], host: str) -> dict[str, Any]:
    seats = {str(seat["name"]): seat for seat in record["hosts"]}
    # a host may be called 1, so a name counts before a number
    if host.isdigit() and int(host) < len(seats) and host not in seats:
        return dict(record["hosts"][int(host)])
    if host not in seats:
        raise UsageError(
            f"lab {record['identity']} ({record['name']}) has no host {host}; "
            f"{format_choices(host, seats)}"
        )
    return dict(seats[host])


def _shorten_path(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def _end_on_signals() -> Iterator[None]:
    """Leave on SIGTERM and SIGHUP as on Ctrl-C, so that the cluster is taken down."""

    def leave(signum: int, frame: object) -> NoReturn:
        sys.exit(128 + signum)

    old_handlers = {
        signum: signal.signal(signum, leave) for signum in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)

"""The commands of `paceline lab`: each returns its exit code, and writes to this terminal."""

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
    """Build the cluster, run it all, take the cluster down; the exit code is the one that `paceline
    run` gives.

    `kept`: the run's folder stays, so it is named.
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
    """Build the cluster, describe it on this terminal where the run is shown there, run it all, and
    take the cluster down.

    Ctrl-C raises `KeyboardInterrupt`, SIGTERM and SIGHUP `SystemExit`, when everything has ended.
    """
    from paceline.lab.hosts import Cluster

    chaos.list_faults(start.faults, description)
    running.check_request(start)
    kernel.seek_rights()
    with _end_on_signals(), Cluster(description) as built:
        for line in (describe_cluster(description), *built.notes) if start.show else ():
            print(f"paceline: {line}", file=sys.stderr, flush=True)
        return built.perform(start)


def describe_cluster(description: Description) -> str:
    """Describe a cluster in a line: `lab two-hosts: 2 hosts, 4 workers dealt in blocks, links of
    1gbit`.
    """
    sides = {(host.up, host.down) for host in description.hosts}
    links = "unequal links"
    if len(sides) == 1 and len(set(*sides)) == 1:
        rate = next(iter(sides))[0]
        links = "unlimited links" if rate is None else f"links of {spell_rate(rate)}"
    racks = f" in {len(description.racks)} racks" if description.racks else ""
    dealt = "in blocks" if description.placement == "block" else description.placement
    return (
        f"lab {description.name}: {len(description.hosts)} hosts{racks}, {description.workers} "
        f"workers dealt {dealt}, {links}"
    )


def show_abilities() -> int:
    """Show what this machine can do; 0 if a lab can run here."""
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
    able = not any(ability.needed and ability.reason for ability in abilities)
    print("a lab can run here" if able else "no lab can run here")
    return 0 if able else 1


def remove_leftovers() -> int:
    """Remove leftovers, and list them."""
    for line in cleaning.remove_leftovers() or ["nothing is left of any lab"]:
        print(line)
    return 0


def open_shell(host: str, command: Sequence[str], identity: str | None = None) -> NoReturn:
    """Become a shell in this host, or let one read this command: its words joined by blanks, as
    ssh does it, so that mpirun is at home.
    """
    record = _find_running_lab(identity)
    seat = _find_host(record, host)
    process = record["process"]
    namespaces = [f"{kind}=/proc/{process}/fd/{fd}" for kind, fd in seat["fds"].items()]
    try:
        if os.readlink(f"/proc/{process}/ns/user") != os.readlink("/proc/self/ns/user"):
            namespaces.insert(0, f"user=/proc/{process}/ns/user")
    except PermissionError as error:
        raise UsageError(
            f"the lab was started with other rights (process {process}): "
            "open the shell as the same user"
        ) from error
    groups = [f"{folder}/cgroup.procs" for folder in seat["cgroups"]]
    surroundings = copy_environment()
    own = surroundings.get("SHELL", _SHELL)
    words = [own, "-c", " ".join(command)] if command else [own]
    surroundings |= {
        remains.MARK: record["identity"],
        "TMPDIR": f"{record['folder']}/{seat['name']}",
    }
    line = [
        sys.executable,
        "-I",
        "-S",
        str(Path(enter.__file__)),
        ",".join(namespaces),
        ",".join(groups) or "-",
        *words,
    ]
    sys.stdout.flush()
    os.execve(line[0], line, surroundings)


def _find_running_lab(identity: str | None) -> dict[str, Any]:
    """Find the record of the lab that runs, or of the one that is asked for."""
    labs = {
        record["identity"]: record for record in remains.read_records() if remains.is_alive(record)
    }
    if identity is not None:
        if identity not in labs:
            raise UsageError(f"no lab {identity} runs; {format_choices(identity, labs)}")
        return labs[identity]
    if not labs:
        raise UsageError(
            "no lab runs: start one in another terminal, with `paceline lab run CLUSTER SCRIPT`"
        )
    if len(labs) > 1:
        names = ", ".join(f"{lab} ({record['name']})" for lab, record in labs.items())
        raise UsageError(f"{len(labs)} labs run: {names}; say which with --lab")
    return next(iter(labs.values()))


def _find_host(record: dict[str, Any], host: str) -> dict[str, Any]:
    seats = {str(seat["name"]): seat for seat in record["hosts"]}
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
    """Take the cluster down on SIGTERM and SIGHUP as on Ctrl-C, also while it is built."""

    def leave(signum: int, frame: object) -> NoReturn:
        sys.exit(128 + signum)

    before = {signum: signal.signal(signum, leave) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

"""The remains of a killed lab, and the keeper that removes them: a process that outlives the lab by
a moment.

Started as a script of its own, with the standard library only: `remains.py RECORD`. Its input is a
pipe from the lab. The end of input without `done` means that the lab was killed. Where the keeper
was killed too, the next lab does its work, or `paceline lab clean`.

A record is a JSON file for each lab that runs: its process, the network of each host, its control
groups and folder.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "PACELINE_LAB"  # in the environment of everything that a lab starts
_PROC = Path("/proc")
_END_SECONDS = 5.0
_LOOK_SECONDS = 0.5  # between two looks at the lab
_ROUND_SECONDS = 0.005


def records_folder() -> Path:
    """Return the folder of records: one place for each user, whatever TMPDIR says, so that labs
    find each other's.
    """
    user = find_outer_user()
    if user == 0 and os.access("/run", os.W_OK):
        return Path("/run/paceline-lab")
    runtime = Path(f"/run/user/{user}")
    return (
        runtime / "paceline-lab"
        if os.access(runtime, os.W_OK)
        else Path(f"/tmp/paceline-lab-{user}")
    )


def find_outer_user() -> int:
    """Return the number of this user outside of the user namespace that a lab may have entered."""
    for line in (_PROC / "self/uid_map").read_text().splitlines():
        inner, outer, count = map(int, line.split())
        if inner <= os.geteuid() < inner + count:
            return outer + os.geteuid() - inner
    return os.geteuid()


def write_record(record: dict[str, Any]) -> Path:
    """Write the record of a lab, in full or not at all; return its path.

    `PermissionError` if the place isn't ours alone.
    """
    folder = records_folder()
    path = folder / f"{record['identity']}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            _check_owner(folder)
            temporary.write_text(json.dumps(record))
            temporary.replace(path)
        except FileNotFoundError:  # another lab that ended has removed the empty folder
            continue
        return path


def read_records() -> list[dict[str, Any]]:
    """Read the records of all labs of this user, alive or not.

    `PermissionError` if another user could have written them.
    """
    known = []
    with suppress(FileNotFoundError):
        _check_owner(records_folder())
    for path in sorted(records_folder().glob("*.json")):
        with suppress(FileNotFoundError):  # it has ended since
            known.append(json.loads(path.read_text()))
    return known


def _check_owner(folder: Path) -> None:
    """Check that records are our own, as they say what is to be ended and removed."""
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise PermissionError(
            errno.EPERM, "it isn't a folder of this user with mode 0700", str(folder)
        )


def drop_partial_records() -> None:
    """Remove records whose writer was killed before they were complete."""
    for path in records_folder().glob("*.[0-9]*"):
        if not start_ticks(int(path.suffix[1:])):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        records_folder().rmdir()


def forget_record(identity: str) -> None:
    """Remove the record of a lab, and the folder of records if it was the last."""
    (records_folder() / f"{identity}.json").unlink(missing_ok=True)
    with suppress(OSError):
        records_folder().rmdir()


def start_ticks(process: int) -> str:
    """Return when a process began, in ticks since the machine did; empty if there is none.

    Numbers are used again, these pairs are not.
    """
    try:
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {"Z", "X"} else fields[19]


def is_alive(record: dict[str, Any]) -> bool:
    """Whether the lab of this record still runs."""
    return (
        bool(start_ticks(record["process"])) and start_ticks(record["process"]) == record["began"]
    )


def processes_inside(networks: Iterable[str]) -> list[int]:
    """List the processes in these networks ("net:[4026532184]"), as far as this one can see
    them.
    """
    wanted = set(networks)
    return [process for process in other_processes() if wanted and _network_of(process) in wanted]


def other_processes() -> list[int]:
    """List all processes but this one."""
    return [
        int(entry) for entry in os.listdir(_PROC) if entry.isdigit() and int(entry) != os.getpid()
    ]


def processes_marked(identity: str) -> list[int]:
    """List the processes that were started by this lab, by their environment."""
    wanted = f"{MARK}={identity}".encode()
    pids = []
    for process in other_processes():
        with suppress(OSError):
            if wanted in (_PROC / str(process) / "environ").read_bytes().split(b"\0"):
                pids.append(process)
    return pids


def processes_in_groups(folders: Iterable[str]) -> list[int]:
    """List the processes in these control groups."""
    pids: list[int] = []
    for folder in folders:
        with suppress(OSError):
            pids += [int(pid) for pid in (Path(folder) / "cgroup.procs").read_text().split()]
    return pids


def kill_processes(find: Any) -> list[int]:
    """Send SIGKILL to all processes that `find()` gives, until it gives none; return those that
    don't end.
    """
    late = time.monotonic() + _END_SECONDS
    while living := [process for process in find() if process != os.getpid()]:
        # stopped first, so that none sees another die, or makes more
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for process in living:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signum)
        if time.monotonic() > late:
            return living
        time.sleep(_ROUND_SECONDS)
    return []


def sweep_lab(record: dict[str, Any], *, trusted: bool) -> list[str]:
    """Remove all that the lab of this record has left; return what couldn't be removed.

    `trusted` says that the networks of the record are still this lab's (the caller holds them):
    their numbers are used again.
    """
    groups = [folder for host in record["hosts"] for folder in host["cgroups"]]
    networks = [host["network"] for host in record["hosts"]] if trusted else []

    def lab() -> set[int]:
        return {
            *processes_inside(networks),
            *processes_in_groups(groups),
            *processes_marked(record["identity"]),
        } - {record["keeper"]}

    left = [f"process {pid}" for pid in kill_processes(lab)]
    for folder in groups:
        if not _remove_group(Path(folder)):
            left.append(folder)
    shutil.rmtree(record["folder"], ignore_errors=True)
    if os.path.exists(record["folder"]):
        left.append(record["folder"])
    if not left:
        forget_record(record["identity"])
    return left


def _remove_group(folder: Path) -> bool:
    late = time.monotonic() + _END_SECONDS
    while time.monotonic() < late:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.EBUSY:
                return False
            time.sleep(_ROUND_SECONDS)
        else:
            return True
    return False


def _network_of(process: int) -> str:
    try:
        return os.readlink(_PROC / str(process) / "ns/net")
    except OSError:
        return ""


def watch_lab(path: Path) -> None:
    """Wait until the lab is done or dead; then sweep what its record, as it is by then, names."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    heard = b""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    lab = json.loads(path.read_text())
    while is_alive(lab):  # a child that it has forked may hold the pipe open
        if poll.poll(1000 * _LOOK_SECONDS):
            data = os.read(0, 1 << 12)
            heard += data
            if not data:
                break
    if b"done" not in heard and path.exists():
        sweep_lab(json.loads(path.read_text()), trusted=True)


if __name__ == "__main__":
    watch_lab(Path(sys.argv[1]))

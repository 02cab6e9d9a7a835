"""The remains of a killed lab, and the keeper that removes them.

The keeper is a process that outlives its lab by a moment. It is started as a script of its own,
with the standard library only: `remains.py RECORD`. Its input is a pipe from the lab:

    lab ends well     writes `done`, closes the pipe       the keeper ends
    lab is killed     the pipe closes without `done`       the keeper removes what the lab has left

If the keeper is killed too, the next lab does its work, or `paceline lab clean`.

Each lab that runs has a record, a JSON file: its process, the network of each host, its control
groups and its folder.
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
    """Find the folder of records.

    Each user has one, whatever TMPDIR says, so that labs find the records of other labs.
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
    """Find this user's number outside of the user namespace that a lab may have entered."""
    for line in (_PROC / "self/uid_map").read_text().splitlines():
        inner, outer, count = map(int, line.split())
        if inner <= os.geteuid() < inner + count:
            return outer + os.geteuid() - inner
    return os.geteuid()


def write_record(record: dict[str, Any]) -> Path:
    """Write the record of a lab, completely or not at all, and return its path.

    Raises `PermissionError` if other users may write to the folder of records.
    """
    folder = records_folder()
    path = folder / f"{record['identity']}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    # A lab that ends removes the folder if it is empty, perhaps between two of these lines. Then
    # they are repeated.
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            _check_owner(folder)
            temporary.write_text(json.dumps(record))
            temporary.replace(path)
        except FileNotFoundError:
            continue
        return path


def read_records() -> list[dict[str, Any]]:
    """Read the records of all labs of this user, running or not.

    Raises `PermissionError` if another user could have written them.
    """
    records = []
    with suppress(FileNotFoundError):
        _check_owner(records_folder())
    for path in sorted(records_folder().glob("*.json")):
        with suppress(FileNotFoundError):  # the lab has ended meanwhile
            records.append(json.loads(path.read_text()))
    return records


def _check_owner(folder: Path) -> None:
    """Check that only this user can write records, because they say what is killed and removed."""
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise PermissionError(
            errno.EPERM, "it isn't a folder of this user with mode 0700", str(folder)
        )


def drop_partial_records() -> None:
    """Remove records whose writer was killed before they were complete."""
    # the name of a file that isn't complete ends with the number of its writer
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
    """Find the start time of a process, in ticks since the machine started; empty if it has ended.

    Process numbers are used again, but a number together with its start time is unique.
    """
    try:
        # The second field is the program's name, which may hold blanks and brackets. Fields are
        # counted from its last bracket on: 0 is the state, 19 the start time.
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
    """List the visible processes in these networks ("net:[4026532184]")."""
    wanted = set(networks)
    return [process for process in other_processes() if wanted and _network_of(process) in wanted]


def other_processes() -> list[int]:
    """List all processes except this one."""
    return [
        int(entry) for entry in os.listdir(_PROC) if entry.isdigit() and int(entry) != os.getpid()
    ]


def processes_marked(identity: str) -> list[int]:
    """List the processes whose environment says that this lab has started them."""
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
    """Kill all processes that `find()` lists, again and again until it lists none.

    Returns the processes that still run after 5 seconds.
    """
    deadline = time.monotonic() + _END_SECONDS
    while alive := [process for process in find() if process != os.getpid()]:
        # All are stopped before one is killed: so none sees another one die, or starts more.
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for process in alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signum)
        if time.monotonic() > deadline:
            return alive
        time.sleep(_ROUND_SECONDS)
    return []


def sweep_lab(record: dict[str, Any], *, trusted: bool) -> list[str]:
    """Remove everything that the lab of this record has left behind.

    Args:
        record: The record of the lab; it is removed too, if nothing else is left.
        trusted: The caller holds the networks of the record. Otherwise their numbers may belong
            to other networks by now, and processes inside them are left alone.

    Returns:
        The processes, control groups and folders that couldn't be removed.
    """
    groups = [folder for host in record["hosts"] for folder in host["cgroups"]]
    networks = [host["network"] for host in record["hosts"]] if trusted else []

    def lab() -> set[int]:
        return {
            *processes_inside(networks),
            *processes_in_groups(groups),
            *processes_marked(record["identity"]),
        } - {record["keeper"]}

    # Processes first: a control group can be removed once no process is inside.
    leftovers = [f"process {pid}" for pid in kill_processes(lab)]
    for folder in groups:
        if not _remove_group(Path(folder)):
            leftovers.append(folder)
    shutil.rmtree(record["folder"], ignore_errors=True)
    if os.path.exists(record["folder"]):
        leftovers.append(record["folder"])
    if not leftovers:
        forget_record(record["identity"])
    return leftovers


def _remove_group(folder: Path) -> bool:
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            # busy: a killed process is still ending
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
    """Wait until the lab has ended, and remove what it has left if it was killed.

    The record is read again at the end, because the lab has added to it.
    """
    # Signals of the lab's terminal reach the keeper too, and it has to outlive the lab.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    received = b""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    lab = json.loads(path.read_text())
    # The pipe alone doesn't tell: a child that the lab has forked may hold it open.
    while is_alive(lab):
        if poll.poll(1000 * _LOOK_SECONDS):
            chunk = os.read(0, 1 << 12)
            received += chunk
            if not chunk:
                break
    if b"done" not in received and path.exists():
        sweep_lab(json.loads(path.read_text()), trusted=True)


if __name__ == "__main__":
    watch_lab(Path(sys.argv[1]))

"""The janitor of a launcher: a process that outlives it by a moment, and ends and removes what it
left behind.

Started as a script of its own, with the standard library only; its arguments are the job's mark,
and its timings as JSON. Its input is a pipe from the launcher: `+N` and `-N` name the process
groups that live. The end of input without `done` means that the launcher was killed.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_SHARED = Path("/dev/shm")
_SERVERS = "paceline-sockets-"
_READERS = "pymp-"
# bytes that the path of a socket leaves for their folder
_SHORT = 107 - len(f"/{_SERVERS}123456789012-12345678/server")
# how multiprocessing and our servers call the folders that they listen in
_FOLDERS = (_READERS, _SERVERS)
_MARKED = 8  # letters of a job's mark that are in the names of its semaphores
# those that are being made, or were before `brand`
_UNBRANDED = re.compile(r"sem\.([A-Za-z0-9]{6}|mp-[a-z0-9_]{8})")
_CLOCK_SECONDS = 0.1  # which the clock of files may be behind
_ROUNDS = 20  # sweeps: a process may fork between two looks


def sockets(mark: str) -> str:
    """Return the prefix of the folders where a job's servers listen: a killed one's are found by
    name, as nobody may have seen it.
    """
    return f"{_SERVERS}{mark[:12]}-"  # not longer: the path of a socket has 107 bytes


def place_of_sockets() -> str:
    """Folder of sockets: the temporary folder, or /tmp if its path is too long for a socket."""
    temporary = tempfile.gettempdir()
    return temporary if len(os.fsencode(temporary)) <= _SHORT else "/tmp"


def folders_of_answers(mark: str) -> str:
    """Return the prefix of the folders that `pl.load` has its runs in, which go when these end."""
    return f"paceline-load-{mark[:12]}-"


def brand(mark: str) -> None:
    """Let semaphores that multiprocessing makes in this process, and in its children, have the
    job's mark in their names from now on.

    The janitor finds them by it where their makers were killed: a file doesn't tell which process
    has made it.
    """
    from multiprocessing import current_process  # here: the janitor does without

    current_process()._config["semprefix"] = f"/mp-{mark[:_MARKED]}"  # type: ignore[attr-defined]


def end_group(group: int, held: set[int]) -> set[int]:
    """Kill all processes of a group, and remove the files that they leave behind.

    An empty group is no error.

    Args:
        group: Number of the process group.
        held: Set to which the semaphores are added that the processes had open (`semaphores`).

    Returns:
        The numbers of the processes.
    """
    if not _signal_group(group, signal.SIGSTOP):  # or they would make more while we look
        return set()
    processes = members(group)
    folders = litter(processes)
    held |= semaphores(processes)
    _signal_group(group, signal.SIGKILL)
    clear(folders)
    return {*processes}


def state(pid: int) -> str:
    """Return the state of a process, as the kernel writes it: "T" was stopped by a signal and
    waits for SIGCONT; "" if unknown.
    """
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _signal_group(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def members(group: int) -> list[int]:
    """Return the processes of a group."""
    pids = []
    for process in processes():
        try:
            if os.getpgid(process) == group:
                pids.append(process)
        except (ProcessLookupError, PermissionError):
            continue
    return pids


def children(process: int) -> list[int]:
    """Return the child processes that the main thread of a process has forked; empty where the
    kernel doesn't say.
    """
    try:
        return [
            int(pid)
            for pid in (_PROC / str(process) / "task" / str(process) / "children")
            .read_text()
            .split()
        ]
    except OSError:
        return []


def processes() -> list[int]:
    """Return all processes that this one can see."""
    return (
        [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
        if _PROC.is_dir()
        else []
    )


def marked(mark: str) -> list[int]:
    """Return the processes that were started with the mark of a job in their environment (this
    one never counts).
    """
    wanted = f"PACELINE_JOB={mark}".encode()
    pids = []
    for process in processes():
        try:
            environ = (_PROC / str(process) / "environ").read_bytes()
        except OSError:
            continue
        if process != os.getpid() and wanted in environ.split(b"\0"):
            pids.append(process)
    return pids


def litter(suspects: list[int]) -> list[Path]:
    """Return the temporary folders where these processes listen (readers, servers); a killed
    process can't remove its own.
    """
    folders = []
    for process in suspects:
        try:
            table = (_PROC / str(process) / "net" / "unix").read_text()
            # nobody on this host listens in one: most often
            if not any(name in table for name in _FOLDERS):
                continue
            held = set(_opened(process))
        except OSError:
            continue
        for line in table.splitlines()[1:]:
            match = re.fullmatch(r"(?:\S+\s+){6}(\d+)\s+(\S+)", line.strip())
            if (
                match
                and f"socket:[{match[1]}]" in held
                and os.path.basename(os.path.dirname(match[2])).startswith(_FOLDERS)
            ):
                folders.append(Path(match[2]).parent)
    return folders


def _opened(process: int) -> Iterator[str]:
    """Yield the files and sockets behind the descriptors of a process."""
    for link in (_PROC / str(process) / "fd").iterdir():
        try:
            yield os.readlink(link)
        except FileNotFoundError:
            continue  # closed since


def semaphores(suspects: list[int]) -> set[int]:
    """Return the named semaphores that these processes have open or mapped, by inode: they may
    never come to take the name away.
    """
    inodes: set[int] = set()
    start = str(_SHARED / "sem.")
    for process in suspects:
        with suppress(OSError):
            mapped = [
                line
                for line in (_PROC / str(process) / "maps").read_text().splitlines()
                if start in line
            ]
            inodes |= {int(line.split(maxsplit=5)[4]) for line in mapped}
            for link in (_PROC / str(process) / "fd").iterdir():
                with suppress(FileNotFoundError):  # closed since
                    if os.readlink(link).startswith(start):
                        inodes.add(link.stat().st_ino)
    return inodes & {entry.inode() for entry in (os.scandir(_SHARED) if inodes else ())}


def sweep(mark: str, groups: list[int], held: set[int], *, seconds: float) -> set[int]:
    """End these groups and every process with the job's mark, then remove their temporary files.

    A killed process that is about to end has no environment any more, but still has its files. So
    this waits until all of them have ended.

    Args:
        mark: The job's mark, which is in the environment of its processes.
        groups: Numbers of process groups.
        held: Set to which the semaphores are added that the processes had open, as in `end_group`.
        seconds: Longest wait for the processes to end.

    Returns:
        The numbers of the processes.
    """
    ended = set(groups).union(*(end_group(group, held) for group in groups))
    for attempt in range(_ROUNDS):
        left = marked(mark)
        ended |= {*left}
        if not left:
            break
        _signal_each(left, signal.SIGSTOP)
        folders = litter(left)
        held |= semaphores(left)
        _signal_each(left, signal.SIGKILL)
        clear(folders)
        time.sleep(0.002 * (attempt + 1))
    for place in {tempfile.gettempdir(), place_of_sockets()}:
        clear(
            [
                found
                for prefix in (sockets(mark), folders_of_answers(mark))
                for found in Path(place).glob(prefix + "*")
            ]
        )
    until = time.monotonic() + seconds
    while not all(map(_ended, ended)) and time.monotonic() < until:
        time.sleep(0.002)
    return ended


def _signal_each(group: list[int], signum: int) -> None:
    for process in group:
        try:
            os.kill(process, signum)
        except (ProcessLookupError, PermissionError):
            continue


def clear(folders: list[Path]) -> None:
    """Remove these folders."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def reclaim(mark: str, killed: set[int], held: set[int], since: float, *, seconds: float) -> None:
    """Remove what the processes of a job had made and not removed yet in the moment when they were
    killed: shared memory, and folders.

    `killed` are all processes that may have been (numbers), `held` the semaphores that they had in
    hand (`semaphores`); `since` is when the first of them was started (time.time()). What others
    may have made stays: they get so many `seconds` to unlink it. A folder whose listeners are all
    dead doesn't tell who made it, and goes.
    """

    def left() -> set[Path]:
        return {*_abandoned(mark, killed, held, since), *_deserted(since)}

    if seen := left():
        time.sleep(seconds)  # what a living process has in hand is unlinked by then
        for path in seen & left():
            clear([path]) if path.is_dir() else path.unlink(missing_ok=True)


def _deserted(since: float) -> Iterator[Path]:
    """Find the folders of multiprocessing that have come since then, in which processes have
    listened and none does any more.

    A reader that is killed soon after it has begun to listen may never have been looked at
    (`litter`).
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_READERS}*"):
        with suppress(OSError):  # removed meanwhile, or another user's
            if (
                _new(folder, since)
                and (found := [*folder.iterdir()])
                and not any(map(_listened_to, found))
            ):
                yield folder


def _listened_to(path: Path) -> bool:
    """Whether a process listens on this socket; what is none counts as if one did."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return True
    with suppress(OSError):
        if str(path) in (_PROC / "self" / "net" / "unix").read_text():
            return True
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            # in another network than this, maybe: there are containers that share a folder
            caller.connect(str(path))
        except OSError as error:
            return not isinstance(error, ConnectionRefusedError)
    return True


def _abandoned(mark: str, killed: set[int], held: set[int], since: float) -> Iterator[Path]:
    """Find files of torch, which have their maker's number in their names; and semaphores of
    multiprocessing with the job's mark (`brand`).

    The maker of a semaphore opens it under a name of six letters, then gives it its own too, and
    takes the first away, at once, and the other where it can: it may be killed in between. Others'
    look the same: without the mark it has to be one that was held.
    """
    states = {
        path: state
        for path in (_SHARED.iterdir() if _SHARED.is_dir() else ())
        if (state := _new(path, since))
    }
    branded = re.compile(rf"sem\.mp-{re.escape(mark[:_MARKED])}-\w{{8}}")
    ours = {state.st_ino for path, state in states.items() if branded.fullmatch(path.name)}
    for path, state in states.items():
        if match := re.fullmatch(r"torch_(\d+)_\d+_\d+", path.name):
            if int(match[1]) in killed and _ended(int(match[1])):
                yield path
        elif state.st_ino in ours or (state.st_ino in held and _UNBRANDED.fullmatch(path.name)):
            yield from () if in_use(path) else (path,)


def _new(path: Path, since: float) -> os.stat_result | None:
    """Return the status of a file of this user that has come or changed its names since then;
    None for others.
    """
    try:
        state = path.lstat()
    except FileNotFoundError:
        return None
    return (
        state if state.st_uid == os.getuid() and state.st_ctime >= since - _CLOCK_SECONDS else None
    )


def _ended(process: int) -> bool:
    return state(process) in {"", "Z", "X"}


def in_use(path: Path) -> bool:
    """Whether a process that this one can see has the file open or mapped."""
    for process in processes():
        try:
            if (
                str(path) in _opened(process)
                or str(path) in (_PROC / str(process) / "maps").read_text()
            ):
                return True
        except OSError:
            continue
    return False


def watch(
    mark: str, *, look: float, close_look: float, young: float, ending: float, unlinking: float
) -> None:
    """Read from standard input which groups live, until the launcher is done or dead.

    The seconds are those of `JanitorTimings`.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    began = time.time()
    groups: set[int] = set()
    known: set[int] = set()
    # readers whose worker was killed may end before they are looked at
    folders: dict[int, list[Path]] = {}
    born: dict[int, float] = {}  # when a process was first seen
    rest = b""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        present = {child for group in groups for child in (group, *children(group))}
        folders |= {
            child: found for child in present - folders.keys() if (found := litter([child]))
        }
        known |= present
        now = time.monotonic()
        close = any(
            now - born.setdefault(process, now) < young for process in present - folders.keys()
        )
        if not poll.poll(1000 * (close_look if close else look)):
            continue
        data = os.read(0, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        if b"done" in lines:
            return
        groups |= {int(line[1:]) for line in lines if line[:1] == b"+"}
        groups -= {int(line[1:]) for line in lines if line[:1] == b"-"}
        if not data:
            break
    held: set[int] = set()
    known |= sweep(mark, sorted(groups), held, seconds=ending)
    clear([folder for found in folders.values() for folder in found])
    reclaim(mark, known, held, began, seconds=unlinking)


if __name__ == "__main__":
    watch(sys.argv[1], **json.loads(sys.argv[2]))

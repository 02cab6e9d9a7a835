"""The janitor of a launcher: a process that outlives it and removes what the job left behind.

    launcher --- pipe: "+N", "-N", "done" ---> janitor
       killed: the pipe ends without "done"      kills the process groups N and all other processes
                                                 of the job, removes their sockets, semaphores,
                                                 shared memory and folders

It is started as a script of its own, so it may use the standard library only. Its arguments are the
job's mark, and its timings as JSON. `+N` and `-N` name process groups that begin and end.

The launcher calls the same functions for its own cleanup.
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

_PROC_FOLDER = Path("/proc")
_SHARED_MEMORY_FOLDER = Path("/dev/shm")
_SERVER_PREFIX = "paceline-sockets-"
# Folders in which processes of multiprocessing, such as a data loader's, listen. If CPython renames
# them, those of killed processes stay behind.
_READER_PREFIX = "pymp-"
# Bytes of the path of a socket that are left for its folder
_MOST_FOLDER_BYTES = 107 - len(f"/{_SERVER_PREFIX}123456789012-12345678/server")
# Prefixes of the folders in which multiprocessing and our servers listen
_FOLDER_PREFIXES = (_READER_PREFIX, _SERVER_PREFIX)
_MARK_LETTERS = 8  # letters of a job's mark that are in the names of its semaphores
# Semaphores that are being made, or that were made before `brand_semaphores`
_UNBRANDED_PATTERN = re.compile(r"sem\.([A-Za-z0-9]{6}|mp-[a-z0-9_]{8})")
_CLOCK_SECONDS = 0.1  # how much the clock of files may be behind
_SWEEP_ROUNDS = 20  # sweeps, as a process may fork between two of them


def get_socket_prefix(mark: str) -> str:
    """Prefix of the folders in which a job's servers listen.

    By it the folders of killed servers are found, even if they were never seen while they listened.
    It has 12 letters of the mark, as the path of a socket has at most 107 bytes.
    """
    return f"{_SERVER_PREFIX}{mark[:12]}-"


def find_socket_parent() -> str:
    """Folder for sockets: the temporary folder, or /tmp if its path is too long for a socket."""
    temporary = tempfile.gettempdir()
    return temporary if len(os.fsencode(temporary)) <= _MOST_FOLDER_BYTES else "/tmp"


def get_answer_prefix(mark: str) -> str:
    """Prefix of the folders for the runs of `pl.load`, which are removed with the job."""
    return f"paceline-load-{mark[:12]}-"


def brand_semaphores(mark: str) -> None:
    """Give semaphores that multiprocessing makes from now on the job's mark in their names.

    That holds for this process and its children. A file doesn't tell which process has made it, so
    the janitor needs the mark to find those of killed processes.
    """
    # Imported here, as the janitor doesn't need it.
    from multiprocessing import current_process

    # A private part of CPython: `_config` is what a process passes to its children. Without this
    # key, semaphores of killed processes would stay in /dev/shm.
    current_process()._config["semprefix"] = f"/mp-{mark[:_MARK_LETTERS]}"  # type: ignore[attr-defined]


def end_group(group: int, held: set[int]) -> set[int]:
    """Kill all processes of a group, and remove the files that they leave behind.

    An empty group is no error.

    Args:
        group: Number of the process group.
        held: Set to which the semaphores are added that the processes had open (`find_semaphores`).

    Returns:
        The numbers of the processes.
    """
    # Stopped processes can't fork, or make more files, while this looks at them.
    if not _signal_group(group, signal.SIGSTOP):
        return set()
    processes = list_group_members(group)
    folders = find_litter(processes)
    held |= find_semaphores(processes)
    _signal_group(group, signal.SIGKILL)
    remove_folders(folders)
    return {*processes}


def read_state(pid: int) -> str:
    """State of a process as the kernel writes it; "" if it is unknown.

    A process in state "T" was stopped by a signal, and waits for SIGCONT.
    """
    try:
        return (_PROC_FOLDER / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _signal_group(group: int, signum: int) -> bool:
    """Send a signal to a process group. False if it has no processes."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def list_group_members(group: int) -> list[int]:
    """List the processes of a group."""
    pids = []
    for process in list_processes():
        try:
            if os.getpgid(process) == group:
                pids.append(process)
        except (ProcessLookupError, PermissionError):
            continue
    return pids


def list_children(process: int) -> list[int]:
    """List the child processes that the main thread of a process has forked.

    Empty if the kernel doesn't tell.
    """
    try:
        return [
            int(pid)
            for pid in (_PROC_FOLDER / str(process) / "task" / str(process) / "children")
            .read_text()
            .split()
        ]
    except OSError:
        return []


def list_processes() -> list[int]:
    """List all processes that this one can see."""
    return (
        [int(entry.name) for entry in _PROC_FOLDER.iterdir() if entry.name.isdigit()]
        if _PROC_FOLDER.is_dir()
        else []
    )


def list_marked_processes(mark: str) -> list[int]:
    """List the other processes that were started with the job's mark in their environment."""
    variable = f"PACELINE_JOB={mark}".encode()
    pids = []
    for process in list_processes():
        try:
            environ = (_PROC_FOLDER / str(process) / "environ").read_bytes()
        except OSError:
            continue
        if process != os.getpid() and variable in environ.split(b"\0"):
            pids.append(process)
    return pids


def find_litter(suspects: list[int]) -> list[Path]:
    """Find the temporary folders in which these processes listen.

    They are data loaders and servers. A killed process can't remove its own folder.
    """
    folders = []
    for process in suspects:
        try:
            socket_table = (_PROC_FOLDER / str(process) / "net" / "unix").read_text()
            # Most often no process on this host listens in such a folder.
            if not any(name in socket_table for name in _FOLDER_PREFIXES):
                continue
            open_files = set(_list_open_files(process))
        except OSError:
            continue
        for line in socket_table.splitlines()[1:]:
            match = re.fullmatch(r"(?:\S+\s+){6}(\d+)\s+(\S+)", line.strip())
            if (
                match
                and f"socket:[{match[1]}]" in open_files
                and os.path.basename(os.path.dirname(match[2])).startswith(_FOLDER_PREFIXES)
            ):
                folders.append(Path(match[2]).parent)
    return folders


def _list_open_files(process: int) -> Iterator[str]:
    """Yield the files and sockets behind the descriptors of a process."""
    for link in (_PROC_FOLDER / str(process) / "fd").iterdir():
        try:
            yield os.readlink(link)
        except FileNotFoundError:
            continue  # closed since


def find_semaphores(suspects: list[int]) -> set[int]:
    """Find the named semaphores that these processes have open or mapped, by inode.

    A killed process can't remove the name.
    """
    inodes: set[int] = set()
    prefix = str(_SHARED_MEMORY_FOLDER / "sem.")
    for process in suspects:
        with suppress(OSError):
            mapped_lines = [
                line
                for line in (_PROC_FOLDER / str(process) / "maps").read_text().splitlines()
                if prefix in line
            ]
            inodes |= {int(line.split(maxsplit=5)[4]) for line in mapped_lines}
            for link in (_PROC_FOLDER / str(process) / "fd").iterdir():
                with suppress(FileNotFoundError):  # closed since
                    if os.readlink(link).startswith(prefix):
                        inodes.add(link.stat().st_ino)
    return inodes & {
        entry.inode() for entry in (os.scandir(_SHARED_MEMORY_FOLDER) if inodes else ())
    }


def sweep_processes(mark: str, groups: list[int], held: set[int], *, seconds: float) -> set[int]:
    """Kill these groups and every process with the job's mark, and remove their temporary files.

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
    # Each round stops all processes that it sees before it kills any, but a process may have forked
    # just before it was stopped.
    for attempt in range(_SWEEP_ROUNDS):
        remaining = list_marked_processes(mark)
        ended |= {*remaining}
        if not remaining:
            break
        _signal_each(remaining, signal.SIGSTOP)
        folders = find_litter(remaining)
        held |= find_semaphores(remaining)
        _signal_each(remaining, signal.SIGKILL)
        remove_folders(folders)
        time.sleep(0.002 * (attempt + 1))
    for parent in {tempfile.gettempdir(), find_socket_parent()}:
        remove_folders(
            [
                folder
                for prefix in (get_socket_prefix(mark), get_answer_prefix(mark))
                for folder in Path(parent).glob(prefix + "*")
            ]
        )
    deadline = time.monotonic() + seconds
    while not all(map(_has_ended, ended)) and time.monotonic() < deadline:
        time.sleep(0.002)
    return ended


def _signal_each(pids: list[int], signum: int) -> None:
    """Send a signal to each of these processes that still exists."""
    for process in pids:
        try:
            os.kill(process, signum)
        except (ProcessLookupError, PermissionError):
            continue


def remove_folders(folders: list[Path]) -> None:
    """Remove these folders."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def reclaim_leftovers(
    mark: str, killed: set[int], held: set[int], since: float, *, seconds: float
) -> None:
    """Remove shared memory and folders that killed processes of a job have left.

    Files that other processes may have made stay. A folder in which all listeners are dead doesn't
    tell who made it, and is removed.

    Args:
        mark: The job's mark.
        killed: Numbers of all processes that may have been killed.
        held: Semaphores that they had open (`find_semaphores`).
        since: Time at which the first of them was started (time.time()).
        seconds: Time for living processes to remove files that they are just making.
    """

    def find_leftovers() -> set[Path]:
        return {*_find_abandoned_files(mark, killed, held, since), *_find_deserted_folders(since)}

    if first_seen := find_leftovers():
        # Living processes unlink theirs soon. What is still here later belonged to killed ones.
        time.sleep(seconds)
        for path in first_seen & find_leftovers():
            remove_folders([path]) if path.is_dir() else path.unlink(missing_ok=True)


def _find_deserted_folders(since: float) -> Iterator[Path]:
    """Find new folders of multiprocessing in which processes have listened, and none does any more.

    A process that was killed soon after it began to listen may never have been seen by
    `find_litter`.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_READER_PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, or another user's
            if (
                _stat_if_new(folder, since)
                and (entries := [*folder.iterdir()])
                and not any(map(_has_listener, entries))
            ):
                yield folder


def _has_listener(path: Path) -> bool:
    """Whether a process listens on this socket. Other files count as if one did."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return True
    with suppress(OSError):
        if str(path) in (_PROC_FOLDER / "self" / "net" / "unix").read_text():
            return True
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            # The listener may be in another network namespace: containers can share a folder.
            caller.connect(str(path))
        except OSError as error:
            return not isinstance(error, ConnectionRefusedError)
    return True


def _find_abandoned_files(
    mark: str, killed: set[int], held: set[int], since: float
) -> Iterator[Path]:
    """Find files of torch and semaphores of multiprocessing that killed processes have left.

    A file of torch has its maker's number in its name. A semaphore has the job's mark
    (`brand_semaphores`), except for a moment: its maker opens it under a name of six letters, gives
    it its own name too, and removes the first one. It may be killed in between. Semaphores of other
    programs look the same, so one without the mark counts only if a process of the job had it open.
    """
    states = {
        path: state
        for path in (_SHARED_MEMORY_FOLDER.iterdir() if _SHARED_MEMORY_FOLDER.is_dir() else ())
        if (state := _stat_if_new(path, since))
    }
    branded = re.compile(rf"sem\.mp-{re.escape(mark[:_MARK_LETTERS])}-\w{{8}}")
    branded_inodes = {
        state.st_ino for path, state in states.items() if branded.fullmatch(path.name)
    }
    for path, state in states.items():
        if match := re.fullmatch(r"torch_(\d+)_\d+_\d+", path.name):
            if int(match[1]) in killed and _has_ended(int(match[1])):
                yield path
        elif state.st_ino in branded_inodes or (
            state.st_ino in held and _UNBRANDED_PATTERN.fullmatch(path.name)
        ):
            yield from () if is_in_use(path) else (path,)


def _stat_if_new(path: Path, since: float) -> os.stat_result | None:
    """Status of a file of this user that was made or renamed since then; None for other files."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return None
    return (
        state if state.st_uid == os.getuid() and state.st_ctime >= since - _CLOCK_SECONDS else None
    )


def _has_ended(process: int) -> bool:
    """Whether a process has ended: it is gone, or a zombie."""
    return read_state(process) in {"", "Z", "X"}


def is_in_use(path: Path) -> bool:
    """Whether a process that this one can see has the file open or mapped."""
    for process in list_processes():
        try:
            if (
                str(path) in _list_open_files(process)
                or str(path) in (_PROC_FOLDER / str(process) / "maps").read_text()
            ):
                return True
        except OSError:
            continue
    return False


def watch_launcher(
    mark: str, *, look: float, close_look: float, young: float, ending: float, unlinking: float
) -> None:
    """Note which groups live, by standard input, and clean up if the launcher dies.

    The seconds are those of `JanitorTimings`.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    began_at = time.time()
    live_groups: set[int] = set()
    seen_processes: set[int] = set()
    # Folders by process, noted while it lives: a data loader whose worker was killed may end before
    # anything else can be found out about it.
    folders: dict[int, list[Path]] = {}
    first_seen_at: dict[int, float] = {}
    partial_line = b""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        # Look often while a process is young: it may begin to listen at any moment.
        present = {child for group in live_groups for child in (group, *list_children(group))}
        folders |= {
            child: listening_folders
            for child in present - folders.keys()
            if (listening_folders := find_litter([child]))
        }
        seen_processes |= present
        now = time.monotonic()
        looks_closely = any(
            now - first_seen_at.setdefault(process, now) < young
            for process in present - folders.keys()
        )
        if not poll.poll(1000 * (close_look if looks_closely else look)):
            continue
        data = os.read(0, 1 << 16)
        *lines, partial_line = (partial_line + data).split(b"\n")
        if b"done" in lines:
            return
        live_groups |= {int(line[1:]) for line in lines if line[:1] == b"+"}
        live_groups -= {int(line[1:]) for line in lines if line[:1] == b"-"}
        if not data:
            break
    held: set[int] = set()
    seen_processes |= sweep_processes(mark, sorted(live_groups), held, seconds=ending)
    remove_folders(
        [folder for listening_folders in folders.values() for folder in listening_folders]
    )
    reclaim_leftovers(mark, seen_processes, held, began_at, seconds=unlinking)


if __name__ == "__main__":
    watch_launcher(sys.argv[1], **json.loads(sys.argv[2]))

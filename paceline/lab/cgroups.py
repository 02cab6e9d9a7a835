"""Control groups of version 1 and 2: how much of the processors and of the memory a host may
use.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import ResourceError

PREFIX: Final = "paceline-lab-"  # of every control group of a lab
_PERIOD: Final = 20_000  # microseconds: short, so that a quota doesn't come as long pauses
_LEAST_QUOTA: Final = 1_000  # microseconds: the kernel refuses less
_REMOVE_SECONDS: Final = 2.0
_ROUNDS: Final = 20  # in which all processes are moved, or more are started than moved


@dataclass(frozen=True)
class KernelMounts:
    """The kernel's lists of mounted file systems and of this process's groups: other files in
    tests.
    """

    cgroup: Path = Path("/proc/self/cgroup")
    mountinfo: Path = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class CgroupBase:
    """The group of this process, or one above it, under which groups with this controller can be
    made.
    """

    controller: str
    version: int
    folder: Path


def find_base(controller: str, mounts: KernelMounts | None = None) -> CgroupBase:
    """Find out where groups with this controller (`cpu` or `memory`) can be made;
    `ResourceError` says why not.
    """
    mounts = mounts or KernelMounts()
    try:
        lines = [line.split(":", 2) for line in mounts.cgroup.read_text().splitlines()]
        table = [_parse_mount(line) for line in mounts.mountinfo.read_text().splitlines()]
    except OSError as error:
        raise ResourceError(
            f"control groups can't be looked up ({error}): quotas need Linux with /proc"
        ) from error
    for _, controllers, path in lines:
        if controller in controllers.split(","):
            for kind, options, root, point in table:
                if kind == "cgroup" and controller in options:
                    return CgroupBase(
                        controller, 1, _check_writable(_find_below(point, root, path), controller)
                    )
    for _, controllers, path in lines:
        if not controllers:
            for kind, _, root, point in table:
                here = _find_below(point, root, path)
                if kind == "cgroup2" and controller in _read_words(
                    point / "cgroup.controllers", here / "cgroup.controllers"
                ):
                    return CgroupBase(
                        controller,
                        2,
                        _check_writable(_find_delegating(point, here, controller), controller),
                    )
    raise ResourceError(
        f"this kernel offers no control group with the {controller} controller: "
        "mount /sys/fs/cgroup, or leave quotas out"
    )


class Cgroup:
    """The control groups of one host, one for each base (one in all if the bases are the same
    folder).
    """

    def __init__(self, name: str, bases: Iterable[CgroupBase]) -> None:
        self._bases = {base.controller: base for base in bases}
        self._folders = {base.controller: base.folder / name for base in self._bases.values()}

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders of these groups."""
        return tuple(dict.fromkeys(self._folders.values()))

    @property
    def controllers(self) -> frozenset[str]:
        """The controllers that can limit this host."""
        return frozenset(self._bases)

    def make_folders(self) -> None:
        """Make the folders."""
        for folder in self.folders:
            try:
                folder.mkdir()
            except OSError as error:
                raise ResourceError(
                    f"the control group {folder} can't be made ({error.strerror}): "
                    "run as root, or without quotas"
                ) from error

    def limit_processors(self, processors: float | None) -> None:
        """Let the host use so many cores at most (None: all)."""
        quota = None if processors is None else max(_LEAST_QUOTA, round(processors * _PERIOD))
        folder = self._folders["cpu"]
        if self._bases["cpu"].version == 2:
            _write_file(folder / "cpu.max", f"{'max' if quota is None else quota} {_PERIOD}")
        else:
            _write_file(folder / "cpu.cfs_period_us", str(_PERIOD))
            _write_file(folder / "cpu.cfs_quota_us", str(-1 if quota is None else quota))

    def limit_memory(self, nbytes: int) -> None:
        """Let the host use so many bytes at most; the kernel ends processes that want more.

        Swap isn't counted where that is off.
        """
        folder = self._folders["memory"]
        if self._bases["memory"].version == 2:
            _write_file(folder / "memory.max", str(nbytes))
            if (folder / "memory.swap.max").exists():
                _write_file(folder / "memory.swap.max", "0")
        else:
            _write_file(folder / "memory.limit_in_bytes", str(nbytes))
            if (folder / "memory.memsw.limit_in_bytes").exists():
                _write_file(folder / "memory.memsw.limit_in_bytes", str(nbytes))

    def list_entry_files(self, controllers: Container[str] = ("cpu", "memory")) -> tuple[Path, ...]:
        """Return the files to which a process writes its number so that these controllers limit
        it.
        """
        wanted = [
            folder for controller, folder in self._folders.items() if controller in controllers
        ]
        return tuple(folder / "cgroup.procs" for folder in dict.fromkeys(wanted))

    def admit_processes(self, controller: str, living: Callable[[], Iterable[int]]) -> None:
        """Let this controller limit processes that run already, and those that they start
        meanwhile.
        """
        (entrance,) = self.list_entry_files((controller,))
        for _ in range(_ROUNDS):
            outside = set(living()) - {int(pid) for pid in entrance.read_text().split()}
            if not outside:
                return
            for process in outside:
                try:
                    entrance.write_text(str(process))
                except ProcessLookupError:
                    continue  # it has ended
                except OSError as error:
                    raise ResourceError(
                        f"process {process} can't be moved to {entrance.parent} "
                        f"({error.strerror}): run as root"
                    ) from error
        raise ResourceError(
            f"processes are started faster than they can be moved to {entrance.parent}: "
            "set the quota before they run"
        )

    def remove_folders(self) -> None:
        """Remove the folders, once no process is inside. Calling it twice is harmless."""
        for folder in self.folders:
            remove_group(folder)


def remove_group(folder: Path) -> None:
    """Remove a group, whose processes may still be ending."""
    end = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            if time.monotonic() > end:
                inside = (folder / "cgroup.procs").read_text().split()
                raise ResourceError(
                    f"the control group {folder} can't be removed: "
                    f"processes {', '.join(inside)} are inside"
                ) from error
            time.sleep(0.01)


def list_orphans(bases: Iterable[CgroupBase]) -> list[Path]:
    """List all groups of this user's labs under these bases.

    Those of other users are theirs, also where no process is inside yet.
    """
    return sorted(
        {folder for base in bases for folder in base.folder.glob(f"{PREFIX}*") if _is_owned(folder)}
    )


def _is_owned(folder: Path) -> bool:
    try:
        state = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()


def _parse_mount(line: str) -> tuple[str, frozenset[str], str, Path]:
    """Parse a line of mountinfo: kind, options of the file system, root and mount point."""
    left, _, right = line.partition(" - ")
    fields, (kind, _, *options) = left.split(), right.split()
    return kind, frozenset(",".join(options).split(",")), fields[3], Path(fields[4])


def _find_below(point: Path, root: str, path: str) -> Path:
    """Return the folder of a group whose hierarchy is mounted at `point`, from its group `root`
    on (in containers that isn't the first).
    """
    inner = Path(path)
    if inner.is_relative_to(root):
        return point / inner.relative_to(root)
    return point


def _find_delegating(point: Path, folder: Path, controller: str) -> Path:
    """Return the nearest group of version 2, from here up, whose children have this controller,
    or may be given it (then they are).
    """
    candidate = folder
    while True:
        switch = candidate / "cgroup.subtree_control"
        if controller in _read_words(switch):
            return candidate
        if controller in _read_words(candidate / "cgroup.controllers"):
            try:
                # refused while processes are inside, but in the first group
                switch.write_text(f"+{controller}")
                return candidate
            except OSError as error:
                reason = error.strerror
        else:
            reason = "not handed down to it"
        if candidate == point or point not in candidate.parents:
            raise ResourceError(
                f"no control group from {folder} up to {point} hands the {controller} controller "
                f"on ({reason}): run as root outside of a "
                "container, or through `systemd-run --scope -p Delegate=yes`"
            )
        candidate = candidate.parent


def _check_writable(folder: Path, controller: str) -> Path:
    if not os.access(folder, os.W_OK):
        raise ResourceError(
            f"the control group {folder} ({controller}) can't be written: quotas need root"
        )
    return folder


def _read_words(*files: Path) -> list[str]:
    words: list[str] = []
    for file in files:
        if file.exists():
            words += file.read_text().split()
    return words


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ResourceError(
            f"{text} can't be written to {path} ({error.strerror}): "
            "choose another quota, or leave it out"
        ) from error

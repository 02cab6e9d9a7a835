"""Control groups of version 1 and 2: they limit the processors and the memory of a host."""

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

PREFIX: Final = "paceline-lab-"  # of the names of all control groups of labs
_PERIOD: Final = 20_000  # microseconds: short, so that a quota doesn't cause long pauses
_LEAST_QUOTA: Final = 1_000  # microseconds: the kernel refuses less
_REMOVE_SECONDS: Final = 2.0
_ROUNDS: Final = 20  # of moving processes, before it is given up because more are started


@dataclass(frozen=True)
class KernelMounts:
    """The kernel's lists of mounted file systems and of this process's groups.

    Tests give other files.
    """

    cgroup: Path = Path("/proc/self/cgroup")
    mountinfo: Path = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class CgroupBase:
    """A group under which groups with this controller can be made.

    It is the group of this process, or one above it.
    """

    controller: str
    version: int
    folder: Path


def find_base(controller: str, mounts: KernelMounts | None = None) -> CgroupBase:
    """Find the group under which groups with a controller (`cpu` or `memory`) can be made.

    Raises `ResourceError`, with the reason, if there is none.
    """
    mounts = mounts or KernelMounts()
    try:
        memberships = [line.split(":", 2) for line in mounts.cgroup.read_text().splitlines()]
        mount_table = [_parse_mount(line) for line in mounts.mountinfo.read_text().splitlines()]
    except OSError as error:
        raise ResourceError(
            f"control groups can't be looked up ({error}): quotas need Linux with /proc"
        ) from error
    # Version 1: the controller has a hierarchy of its own, and is named in its line.
    for _, controllers, path in memberships:
        if controller in controllers.split(","):
            for kind, options, root, point in mount_table:
                if kind == "cgroup" and controller in options:
                    return CgroupBase(
                        controller, 1, _check_writable(_find_below(point, root, path), controller)
                    )
    # Version 2: one hierarchy for all controllers, whose line names none.
    for _, controllers, path in memberships:
        if not controllers:
            for kind, _, root, point in mount_table:
                own_folder = _find_below(point, root, path)
                if kind == "cgroup2" and controller in _read_words(
                    point / "cgroup.controllers", own_folder / "cgroup.controllers"
                ):
                    return CgroupBase(
                        controller,
                        2,
                        _check_writable(
                            _find_delegating(point, own_folder, controller), controller
                        ),
                    )
    raise ResourceError(
        f"this kernel offers no control group with the {controller} controller: "
        "mount /sys/fs/cgroup, or leave quotas out"
    )


class Cgroup:
    """The control groups of one host: one for each base.

    Bases in the same folder share one group.
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
        """Make the folders of these groups."""
        for folder in self.folders:
            try:
                folder.mkdir()
            except OSError as error:
                raise ResourceError(
                    f"the control group {folder} can't be made ({error.strerror}): "
                    "run as root, or without quotas"
                ) from error

    def limit_processors(self, processors: float | None) -> None:
        """Limit the host to this number of cores, which may be a fraction (None: all cores)."""
        quota = None if processors is None else max(_LEAST_QUOTA, round(processors * _PERIOD))
        folder = self._folders["cpu"]
        if self._bases["cpu"].version == 2:
            _write_file(folder / "cpu.max", f"{'max' if quota is None else quota} {_PERIOD}")
        else:
            _write_file(folder / "cpu.cfs_period_us", str(_PERIOD))
            _write_file(folder / "cpu.cfs_quota_us", str(-1 if quota is None else quota))

    def limit_memory(self, nbytes: int) -> None:
        """Limit the memory of the host, in bytes; the kernel ends processes that need more.

        Swap is limited too, unless the kernel doesn't count it.
        """
        folder = self._folders["memory"]
        if self._bases["memory"].version == 2:
            _write_file(folder / "memory.max", str(nbytes))
            # The file is missing if the kernel doesn't count swap.
            if (folder / "memory.swap.max").exists():
                _write_file(folder / "memory.swap.max", "0")
        else:
            _write_file(folder / "memory.limit_in_bytes", str(nbytes))
            if (folder / "memory.memsw.limit_in_bytes").exists():
                _write_file(folder / "memory.memsw.limit_in_bytes", str(nbytes))

    def list_entry_files(self, controllers: Container[str] = ("cpu", "memory")) -> tuple[Path, ...]:
        """List the files for entering: a process writes its number, and is limited from then on."""
        folders = [
            folder for controller, folder in self._folders.items() if controller in controllers
        ]
        return tuple(folder / "cgroup.procs" for folder in dict.fromkeys(folders))

    def admit_processes(self, controller: str, living: Callable[[], Iterable[int]]) -> None:
        """Move running processes into the group of this controller.

        `living` lists the processes of the host. It is called again until all are inside, because
        they may start more meanwhile.
        """
        (entry_file,) = self.list_entry_files((controller,))
        for _ in range(_ROUNDS):
            outside = set(living()) - {int(pid) for pid in entry_file.read_text().split()}
            if not outside:
                return
            for process in outside:
                try:
                    entry_file.write_text(str(process))
                except ProcessLookupError:
                    continue  # it has ended
                except OSError as error:
                    raise ResourceError(
                        f"process {process} can't be moved to {entry_file.parent} "
                        f"({error.strerror}): run as root"
                    ) from error
        raise ResourceError(
            f"processes are started faster than they can be moved to {entry_file.parent}: "
            "set the quota before they run"
        )

    def remove_folders(self) -> None:
        """Remove the folders of these groups, after their processes. A second call does nothing."""
        for folder in self.folders:
            remove_group(folder)


def remove_group(folder: Path) -> None:
    """Remove a group, and wait up to 2 seconds for processes in it that are just ending.

    Raises `ResourceError` if processes are still inside then.
    """
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            if time.monotonic() > deadline:
                processes = (folder / "cgroup.procs").read_text().split()
                raise ResourceError(
                    f"the control group {folder} can't be removed: "
                    f"processes {', '.join(processes)} are inside"
                ) from error
            time.sleep(0.01)


def list_orphans(bases: Iterable[CgroupBase]) -> list[Path]:
    """List all groups of this user's labs under these bases.

    Groups of other users are left alone, even if no process is inside.
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
    """Parse a line of mountinfo: kind and options of the file system, root, and mount point."""
    mount_text, _, filesystem_text = line.partition(" - ")
    fields, (kind, _, *options) = mount_text.split(), filesystem_text.split()
    return kind, frozenset(",".join(options).split(",")), fields[3], Path(fields[4])


def _find_below(point: Path, root: str, path: str) -> Path:
    """Find the folder of the group `path` in a hierarchy that is mounted at `point`.

    `root` is the group that is visible at `point`. In containers it isn't the first one.
    """
    group = Path(path)
    if group.is_relative_to(root):
        return point / group.relative_to(root)
    return point


def _find_delegating(point: Path, folder: Path, controller: str) -> Path:
    """Find the nearest group of version 2, from `folder` upwards, that hands a controller down.

    If a group can hand it down but doesn't yet, the controller is switched on for its children.
    """
    candidate = folder
    while True:
        control_file = candidate / "cgroup.subtree_control"
        if controller in _read_words(control_file):
            return candidate
        if controller in _read_words(candidate / "cgroup.controllers"):
            try:
                # The kernel refuses this while processes are inside, except in the first group.
                control_file.write_text(f"+{controller}")
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

"""Facts about this machine: cores and memory that this process may use, and its fingerprint.

In a container, limits are those of control groups (cgroups), version 1 or 2: the smallest limit of
the group of this process and of all groups that enclose it.
"""

from __future__ import annotations

import hashlib
import math
import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ResourceError

_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_PROCESSOR_FOLDER = Path("/sys/devices/system/cpu")
# Bytes. Control groups of version 1 show more than this if there is no limit.
_UNLIMITED = 1 << 60


def count_cores(proc: Path = Path("/proc/self/cgroup"), mount: Path = _CGROUP_MOUNT) -> int:
    """Count the cores that the affinity mask and CPU quotas allow. At least 1."""
    share = read_cpu_quota(proc, mount)
    return max(
        1,
        count_affinity_cores() if share is None else min(count_affinity_cores(), math.ceil(share)),
    )


def count_affinity_cores() -> int:
    """Count the cores in the affinity mask of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_cpu_quota(
    proc: Path = Path("/proc/self/cgroup"), mount: Path = _CGROUP_MOUNT
) -> float | None:
    """Find the smallest CPU quota of this process, in cores. None if there is none."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has one line, without controllers. Version 1 has a line for each hierarchy,
        # which is mounted under the names of all of its controllers, or of one.
        if not controllers:
            quotas += [
                _read_quota_files(folder / "cpu.max")
                for folder in _list_enclosing_groups(mount, path)
            ]
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                quotas += [
                    _read_quota_files(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
                    for folder in _list_enclosing_groups(mount / name, path)
                ]
    limits = [limit for limit in quotas if limit is not None]
    return min(limits) if limits else None


def read_memory(source: Path = Path("/proc/meminfo"), kind: str = "MemAvailable") -> int | None:
    """Read the bytes of memory available without swapping, or another line of the same file.

    None if the system doesn't tell.
    """
    try:
        lines = [
            line.split() for line in source.read_text().splitlines() if line.startswith(f"{kind}:")
        ]
    except OSError:
        return None
    return 1024 * int(lines[0][1]) if lines else None


class MemorySize(NamedTuple):
    """Memory that this process may use in bytes: in total, and free now. 0 if unknown."""

    total: int
    free: int


def measure_memory(
    source: Path = Path("/proc/meminfo"),
    proc: Path = Path("/proc/self/cgroup"),
    mount: Path = _CGROUP_MOUNT,
) -> MemorySize:
    """Measure the memory of this machine, within the limits of its control groups.

    Inactive file pages of a control group count as free, as the kernel drops them first.
    """
    total, free = read_memory(source, "MemTotal") or 0, read_memory(source) or 0
    # A container shows the memory of the whole machine in /proc/meminfo.
    for limit, used in _iterate_memory_limits(proc, mount):
        total, free = min(total or limit, limit), min(free, max(0, limit - used))
    return MemorySize(total, free)


class ProcessorClock(NamedTuple):
    """Clock of the processor now and at most, in hertz (0 if unknown), and its governor."""

    now: float
    highest: float
    governor: str


def read_clock(folder: Path = _PROCESSOR_FOLDER) -> ProcessorClock:
    """Read the clock of the core that is fastest now. It is one that computes, if others rest."""
    cores = [
        path for path in folder.glob("cpu[0-9]*/cpufreq") if (path / "scaling_cur_freq").exists()
    ]
    try:
        now = max(
            (1e3 * int((core / "scaling_cur_freq").read_text()) for core in cores), default=0.0
        )
        highest = max(
            (1e3 * int((core / "cpuinfo_max_freq").read_text()) for core in cores), default=0.0
        )
        governors = sorted({(core / "scaling_governor").read_text().strip() for core in cores})
    except (OSError, ValueError):
        return ProcessorClock(0.0, 0.0, "")
    return ProcessorClock(now, highest, ", ".join(governors))


def read_processor_name(source: Path = Path("/proc/cpuinfo")) -> str:
    """Read the name of the processor's model. Empty if the system doesn't tell."""
    try:
        lines = [
            line.partition(":")[2].strip()
            for line in source.read_text().splitlines()
            if line.startswith("model name")
        ]
    except OSError:
        return ""
    return lines[0] if lines else ""


def identify_boot() -> str:
    """Identify this boot of the machine, the same for all its processes, also in containers."""
    try:
        mark = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        mark = socket.gethostname()
    return hashlib.sha256(mark.encode()).hexdigest()[:16]


def compute_machine_fingerprint() -> str:
    """Compute a fingerprint that is equal for processes which can share memory.

    They run in the same boot and namespaces, by the same user, and see the same /dev/shm.
    """
    # Containers of one boot differ in their namespaces, or in their mount of /dev/shm.
    parts = [str(os.geteuid())]
    if sys.platform.startswith("linux"):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{space}") for space in ("ipc", "pid", "net")]
        parts.append(str(os.stat("/dev/shm").st_dev) if os.path.isdir("/dev/shm") else "no shm")
    else:
        parts.append(socket.gethostname())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def raise_descriptor_limit(needed: int) -> None:
    """Raise the limit of descriptors (open files, sockets) for this process and its children.

    Raises `ResourceError` if the system doesn't allow as many as needed.
    """
    soft, hard = (
        math.inf if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if hard < needed:
        raise ResourceError(
            f"each process of this job may need {needed} descriptors (open files, sockets), and "
            f"the limit is {hard}: run "
            f"`ulimit -n {needed}` before, or have the limit raised (LimitNOFILE= of systemd, "
            "--ulimit nofile= of docker, limits.conf)"
        )
    if soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )


def _list_enclosing_groups(root: Path, path: str) -> list[Path]:
    """List the folder of a control group, and the folders of all groups that enclose it.

    In a container the path may not exist below the mount. The root is in the list anyway.
    """
    inner = Path(path.lstrip("/"))
    return [root / inner, *(root / parent for parent in inner.parents)]


def _read_quota_files(*files: Path) -> float | None:
    """Read a quota and its period, from one file (`max 100000`) or two, and divide them."""
    try:
        words = [word for file in files for word in file.read_text().split()]
    except OSError:
        return None
    # "max" (version 2) and "-1" (version 1) mean: no limit.
    if len(words) != 2 or words[0] in {"max", "-1"}:
        return None
    return int(words[0]) / int(words[1])


def _iterate_memory_limits(proc: Path, mount: Path) -> Iterator[tuple[int, int]]:
    """Yield the memory limit of each enclosing control group that has one, and the bytes in use."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if not controllers:
            names, root = ("memory.max", "memory.current", "inactive_file"), mount
        elif "memory" in controllers.split(","):
            names, root = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
                mount / "memory",
            )
        else:
            continue
        for folder in _list_enclosing_groups(root, path):
            # A group may have no limit, or not be visible from inside a container.
            try:
                limit, used = ((folder / name).read_text().strip() for name in names[:2])
                if limit != "max" and int(limit) < _UNLIMITED:
                    yield int(limit), int(used) - _read_counter(folder / "memory.stat", names[2])
            except OSError:
                continue


def _read_counter(file: Path, name: str) -> int:
    """Read the number after a name, from a file with one name per line. 0 if it isn't there."""
    return next(
        (int(line.split()[1]) for line in file.read_text().splitlines() if line.split()[0] == name),
        0,
    )

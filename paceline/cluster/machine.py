"""Facts of this machine: the cores that this process may really use, its memory, and its
fingerprint.
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

_MOUNT = Path("/sys/fs/cgroup")
_PROCESSORS = Path("/sys/devices/system/cpu")
_UNLIMITED = 1 << 60  # bytes: control groups of version 1 say so much where nothing is limited


def cores(proc: Path = Path("/proc/self/cgroup"), mount: Path = _MOUNT) -> int:
    """Count the cores, at least 1: what the affinity mask and the CPU quotas of all enclosing
    cgroups (v1 and v2) leave.
    """
    share = quota(proc, mount)
    return max(1, allowed() if share is None else min(allowed(), math.ceil(share)))


def allowed() -> int:
    """Count the cores that the affinity mask leaves."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(proc: Path = Path("/proc/self/cgroup"), mount: Path = _MOUNT) -> float | None:
    """Return the smallest CPU quota that holds for this process, in cores; None where nothing
    limits it.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            quotas += [_limit(folder / "cpu.max") for folder in _enclosing(mount, path)]
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                quotas += [
                    _limit(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
                    for folder in _enclosing(mount / name, path)
                ]
    limits = [limit for limit in quotas if limit is not None]
    return min(limits) if limits else None


def memory(source: Path = Path("/proc/meminfo"), kind: str = "MemAvailable") -> int | None:
    """Return the number of bytes available without swapping, or of another line; None where the
    system doesn't say.
    """
    try:
        lines = [
            line.split() for line in source.read_text().splitlines() if line.startswith(f"{kind}:")
        ]
    except OSError:
        return None
    return 1024 * int(lines[0][1]) if lines else None


class MemorySize(NamedTuple):
    """Bytes of memory that this process may have in all, and that are free; 0 where the system
    doesn't say.
    """

    total: int
    free: int


def memory_size(
    source: Path = Path("/proc/meminfo"),
    proc: Path = Path("/proc/self/cgroup"),
    mount: Path = _MOUNT,
) -> MemorySize:
    """Return the memory of this machine, or what the limits of all enclosing cgroups (v1 and v2)
    leave of it.

    What a cgroup holds of files counts as free where the kernel would drop it before anything else.
    """
    total, free = memory(source, "MemTotal") or 0, memory(source) or 0
    for limit, used in _memory_limits(proc, mount):
        total, free = min(total or limit, limit), min(free, max(0, limit - used))
    return MemorySize(total, free)


class ProcessorClock(NamedTuple):
    """How fast the clocks of the processor go now, and at most (hertz, 0 where the system
    doesn't say), and what chooses that.
    """

    now: float
    highest: float
    governor: str


def clock(folder: Path = _PROCESSORS) -> ProcessorClock:
    """Return the clock of the fastest core now: the one that computes, where others rest."""
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


def processor(source: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor's model; empty where the system doesn't say."""
    try:
        lines = [
            line.partition(":")[2].strip()
            for line in source.read_text().splitlines()
            if line.startswith("model name")
        ]
    except OSError:
        return ""
    return lines[0] if lines else ""


def boot() -> str:
    """Identity of this start of the machine, equal for all its processes, also in containers."""
    try:
        mark = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        mark = socket.gethostname()
    return hashlib.sha256(mark.encode()).hexdigest()[:16]


def fingerprint() -> str:
    """Return the fingerprint of the machine, as far as sharing memory goes; equal for processes
    of one user that see the same /dev/shm.
    """
    parts = [str(os.geteuid())]
    if sys.platform.startswith("linux"):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{space}") for space in ("ipc", "pid", "net")]
        parts.append(str(os.stat("/dev/shm").st_dev) if os.path.isdir("/dev/shm") else "no shm")
    else:
        parts.append(socket.gethostname())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def allow_descriptors(needed: int) -> None:
    """Let this process, and those that it starts, have so many descriptors (open files,
    sockets); `ResourceError` where that can't be.
    """
    soft, hard = (
        math.inf if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if hard < needed:
        raise ResourceError(
            f"each process of this job may need {needed} descriptors (open files, sockets), and "
            f"the limit is {hard}: say "
            f"`ulimit -n {needed}` before, or have the limit raised (LimitNOFILE= of systemd, "
            "--ulimit nofile= of docker, limits.conf)"
        )
    if soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )


def _enclosing(root: Path, path: str) -> list[Path]:
    """Return the cgroup and all that enclose it.

    In a container the path may not exist below the mount: the root is looked at anyway.
    """
    inner = Path(path.lstrip("/"))
    return [root / inner, *(root / parent for parent in inner.parents)]


def _limit(*files: Path) -> float | None:
    """Return quota over period: from one file (`max 100000`) or from two."""
    try:
        words = [word for file in files for word in file.read_text().split()]
    except OSError:
        return None
    if len(words) != 2 or words[0] in {"max", "-1"}:
        return None
    return int(words[0]) / int(words[1])


def _memory_limits(proc: Path, mount: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each enclosing cgroup that has one, and what is used of it, in bytes."""
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
        for folder in _enclosing(root, path):
            try:
                limit, used = ((folder / name).read_text().strip() for name in names[:2])
                if limit != "max" and int(limit) < _UNLIMITED:
                    yield int(limit), int(used) - _counted(folder / "memory.stat", names[2])
            except OSError:
                continue


def _counted(file: Path, name: str) -> int:
    """Return the number beside a name in a file of such lines; 0 where it isn't there."""
    return next(
        (int(line.split()[1]) for line in file.read_text().splitlines() if line.split()[0] == name),
        0,
    )

"""Facts of this machine: the cores that this process may really use, its memory, and its fingerprint."""

from __future__ import annotations

import hashlib
import math
import os
import resource
import socket
import sys
from pathlib import Path

from paceline.errors import ResourceError

_MOUNT = Path("/sys/fs/cgroup")


def cores(proc: Path = Path("/proc/self/cgroup"), mount: Path = _MOUNT) -> int:
    """Count the cores, at least 1: what the affinity mask and the CPU quotas of all enclosing cgroups (v1 and v2) leave."""
    share = quota(proc, mount)
    return max(1, allowed() if share is None else min(allowed(), math.ceil(share)))


def allowed() -> int:
    """Count the cores that the affinity mask leaves."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(proc: Path = Path("/proc/self/cgroup"), mount: Path = _MOUNT) -> float | None:
    """Return the smallest CPU quota that holds for this process, in cores; None where nothing limits it."""
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
                quotas += [_limit(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us") for folder in _enclosing(mount / name, path)]
    limits = [limit for limit in quotas if limit is not None]
    return min(limits) if limits else None


def memory(source: Path = Path("/proc/meminfo")) -> int | None:
    """Return the number of bytes available without swapping; None where the system doesn't say."""
    try:
        lines = [line.split() for line in source.read_text().splitlines() if line.startswith("MemAvailable:")]
    except OSError:
        return None
    return 1024 * int(lines[0][1]) if lines else None


def fingerprint() -> str:
    """Return the fingerprint of the machine, as far as sharing memory goes; equal for processes of one user that see the same /dev/shm."""
    parts = [str(os.geteuid())]
    if sys.platform.startswith("linux"):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{space}") for space in ("ipc", "pid", "net")]
        parts.append(str(os.stat("/dev/shm").st_dev) if os.path.isdir("/dev/shm") else "no shm")
    else:
        parts.append(socket.gethostname())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def allow_descriptors(needed: int) -> None:
    """Let this process, and those that it starts, have so many descriptors (open files, sockets); `ResourceError` where that can't be."""
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if hard < needed:
        raise ResourceError(
            f"each process of this job may need {needed} descriptors (open files, sockets), and the limit is {hard}: say "
            f"`ulimit -n {needed}` before, or have the limit raised (LimitNOFILE= of systemd, --ulimit nofile= of docker, limits.conf)"
        )
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _enclosing(root: Path, path: str) -> list[Path]:
    """Return the cgroup and all that enclose it. In a container the path may not exist below the mount: the root is looked at anyway."""
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

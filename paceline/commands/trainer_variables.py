"""Defaults of `paceline run` from the variables that Kubeflow Trainer gives to each pod.

PET_NPROC_PER_NODE                 --workers      a number, "auto", "gpu" or "cpu"
PET_NNODES                         --hosts
PET_NODE_RANK                      --host-rank    with several hosts
PET_MASTER_ADDR, PET_MASTER_PORT   --join         with several hosts

They are the variables from which torchrun takes its own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.cluster import machine
from paceline.errors import UsageError

_DEVICES = Path("/dev")


class JobShape(NamedTuple):
    """How many workers and hosts a job has, and where they meet, as `paceline run` takes it."""

    workers: int
    hosts: int
    host_rank: int | None
    join: str | None


def choose_job_shape(
    workers: int | None,
    hosts: int | None,
    host_rank: int | None,
    join: str | None,
    *,
    survives: bool,
    environ: Mapping[str, str],
    devices: Path = _DEVICES,
) -> JobShape:
    """Choose the shape of a job: options first, then the variables, then one worker on one host.

    Args:
        workers, hosts, host_rank, join: The options. None if they aren't given.
        survives: Whether --min-workers is given, with which one host has a meeting point as well.
        environ: The environment.
        devices: Folder of device files, for the number of GPUs.

    Raises:
        UsageError: A variable that is used has no sensible value.
    """
    if workers is None:
        workers = _read_worker_count(environ, devices)
    if hosts is None:
        hosts = _read_number(environ, "PET_NNODES", 1, "--hosts") or 1
    if hosts > 1 or survives:
        if host_rank is None:
            host_rank = _read_number(environ, "PET_NODE_RANK", 0, "--host-rank")
        if join is None:
            join = _read_meeting_point(environ)
    return JobShape(workers, hosts, host_rank, join)


def _read_worker_count(environ: Mapping[str, str], devices: Path) -> int:
    text = environ.get("PET_NPROC_PER_NODE", "")
    gpus = len([path for path in devices.glob("nvidia*") if path.name[6:].isdigit()])
    if text == "gpu" and not gpus:
        raise UsageError("PET_NPROC_PER_NODE=gpu, and this host has no GPU: give --workers N")
    if text in {"auto", "gpu"} and gpus:
        return gpus
    if text in {"auto", "cpu"}:
        return machine.count_cores()
    return _read_number(environ, "PET_NPROC_PER_NODE", 1, "--workers") or 1


def _read_meeting_point(environ: Mapping[str, str]) -> str | None:
    """Read the meeting point: HOST:PORT. None if neither variable is set."""
    address, port = environ.get("PET_MASTER_ADDR", ""), environ.get("PET_MASTER_PORT", "")
    if not address and not port:
        return None
    if not address or not port:
        lacking = "PET_MASTER_PORT" if address else "PET_MASTER_ADDR"
        raise UsageError(f"{lacking} isn't set, but its other half is: set it, or give --join")
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"PET_MASTER_PORT={port} isn't a port, 1 to 65535: set it, or give --join")
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _read_number(environ: Mapping[str, str], name: str, least: int, option: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UsageError(
            f"{name}={text} isn't a whole number from {least} on: set it, or give {option}"
        )
    return int(text)

"""The request of one `paceline run`, and what is wrong with it: that is said before anything is
started.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from paceline.cluster import mesh, network, topology_file
from paceline.cluster.launcher import hints
from paceline.cluster.topology import HostRanks, Topology
from paceline.errors import UsageError
from paceline.formatting import choices

Placement = Literal["block", "round-robin"]
Straggler = Literal["warn", "rebalance", "drop", "evict"]
Backend = Literal["paceline"]
PLACEMENTS: Final = get_args(Placement)
STRAGGLERS: Final = get_args(Straggler)
BACKENDS: Final = get_args(Backend)
QUIET: Final = math.inf
_MOST_RESTARTS = 200  # of a whole job: each of its starts is told of all earlier ones


@dataclass(frozen=True)
class LaunchRequest:
    """The request of one `paceline run`.

    `workers` are those of this host; `deadline` is how long hosts wait for each other (seconds).

    `join` is HOST:PORT, the same on all hosts; `threads` is the number of threads of each worker
    (None: cores / workers, or OMP_NUM_THREADS where it is set); `sync`, `mesh`, `cut`, `shares`,
    `name`, `straggler`, `cluster`, `report_to` and `servers` reach `start()` as PACELINE_SYNC and
    so on.
    `placement` says how ranks are dealt to hosts (see `deal`). With `min_workers` the job goes on
    when workers die, as long as there are so many; up to `restarts` of them are started again on
    this host. With fewer it saves, and waits so many seconds (`patience`) for others to come.
    Without `min_workers` the whole job starts again, up to `restarts` times, and waits so long for
    another host in the place of one that is gone. `progress`: seconds between two lines on the
    run's progress where that is no bar; with `QUIET` there are none, and none of the launcher's own
    but on what goes wrong. `backend`: what scripts that use torch.distributed by themselves get in
    the place of Gloo ("paceline"; None: Gloo). `bare`: what workers write is shown at once and as
    it is, without the ranks that wrote it, for commands of which one worker alone speaks. `call`:
    two descriptors that workers inherit, of the file with what they are to call and of the channel
    to who has asked.
    """

    script: str
    args: tuple[str, ...] = ()
    workers: int = 1
    hosts: int = 1
    join: str | None = None
    host_rank: int | None = None
    secret_file: str | Path | None = None
    threads: int | None = None
    deadline: float | None = None
    sync: str | None = None
    name: str | None = None
    placement: str = "block"
    min_workers: int | None = None
    restarts: int = 0
    patience: float = 600.0
    servers: int | None = None
    backend: str | None = None
    mesh: str | None = None
    cut: str | None = None
    straggler: str | None = None
    report_to: str | None = None
    shares: str | None = None
    cluster: str | Path | None = None
    progress: float | None = None
    bare: bool = False
    call: tuple[int, int] | None = None

    @property
    def quiet(self) -> bool:
        """Whether the launcher says nothing of what goes well."""
        return self.bare or self.call is not None or self.progress == QUIET

    @property
    def command(self) -> list[str]:
        """The command of a worker."""
        before = [] if self.backend is None else ["-m", "paceline.backend"]
        return [sys.executable, *before, self.script, *self.args]


def check(job: LaunchRequest) -> None:
    """Raise `UsageError` for a request that makes no sense, before anything is started."""
    _check_script(job)
    counts = (
        ("--workers", job.workers),
        ("--hosts", job.hosts),
        ("--threads", job.threads),
        ("--servers", job.servers),
    )
    for option, value in (*counts, ("--progress", job.progress)):
        if value is not None and value < 1:
            raise UsageError(f"{option} is {value}, and has to be at least 1")
    if job.placement not in PLACEMENTS:
        raise UsageError(f"--placement is {job.placement}; {choices(job.placement, PLACEMENTS)}")
    if job.straggler is not None and job.straggler not in STRAGGLERS:
        raise UsageError(f"--straggler is {job.straggler}; {choices(job.straggler, STRAGGLERS)}")
    if job.straggler == "evict" and job.min_workers is None:
        raise UsageError(
            "--straggler evict has slow workers leave, so say how many workers the job needs: "
            "--min-workers N"
        )
    if job.cluster is not None:
        check_cluster(job.cluster, job.min_workers)
    if job.host_rank is not None and not 0 <= job.host_rank < job.hosts:
        raise UsageError(
            f"--host-rank is {job.host_rank}, and has to be 0 to {job.hosts - 1} (--hosts "
            f"{job.hosts})"
        )
    if job.hosts > 1 and job.join is None:
        raise UsageError(
            f"--hosts {job.hosts} needs --join HOST:PORT: an address of one of them that all "
            "reach, and a free port there"
        )
    if job.min_workers is not None and not 1 <= job.min_workers <= job.workers * job.hosts:
        raise UsageError(
            f"--min-workers is {job.min_workers}, and has to be 1 to {job.workers * job.hosts}"
        )
    if job.mesh is not None and job.hosts == 1:
        everyone = Topology((HostRanks("here", tuple(range(job.workers)), "127.0.0.1"),))
        mesh.choose(job.mesh, everyone, survives=job.min_workers is not None)
    if not job.patience >= 0:
        raise UsageError(f"--patience is {job.patience:g}: give seconds, 0 or more")
    if job.backend is not None and job.backend not in BACKENDS:
        raise UsageError(
            f"--backend is {job.backend}; {choices(job.backend, BACKENDS)}, which scripts get that "
            "ask torch.distributed for Gloo"
        )
    if job.backend is not None and job.min_workers is not None:
        raise UsageError(
            "--backend is for scripts that use torch.distributed, which survives no losses: "
            "leave out --min-workers"
        )
    _check_restarts(job)
    if job.hosts == 1 and job.join is not None and job.min_workers is None:
        raise UsageError(
            f"--join {job.join} needs --hosts N: how many hosts are to meet there (with "
            "--min-workers 1 will do)"
        )


def check_cluster(cluster: str | Path, min_workers: int | None) -> None:
    """Raise `UsageError` for a measured cluster that can't be read, or whose hosts would change."""
    topology_file.read(Path(cluster))
    if min_workers is not None:
        raise UsageError(
            f"--cluster {cluster} says how fast the links of fixed hosts are, and with "
            "--min-workers hosts change: leave one out"
        )


def _check_script(job: LaunchRequest) -> None:
    script = Path(job.script)
    if not script.exists():
        raise UsageError(
            f"the script {job.script} doesn't exist (looked in "
            f"{Path.cwd()}){hints.leftover(job.script, job.args)}"
        )
    if script.is_dir() and not (script / "__main__.py").exists():
        raise UsageError(f"the script {job.script} is a folder without a __main__.py")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {job.script} can't be read: check its mode")


def _check_restarts(job: LaunchRequest) -> None:
    if job.restarts < 0:
        raise UsageError(f"--restarts is {job.restarts}, and has to be 0 or more")
    if job.restarts > _MOST_RESTARTS and job.min_workers is None:
        raise UsageError(
            f"--restarts is {job.restarts}, and a whole job starts again {_MOST_RESTARTS} times at "
            "most: what ends it so often "
            "has a cause; with --min-workers single workers start again as often as you like"
        )


def deal(workers: Sequence[int], placement: str) -> list[list[int]]:
    """Deal ranks to hosts, given the number of workers of each: in blocks, or one to each host in
    turn while it has workers left.

    Example: 2 and 1 workers are [[0, 1], [2]] in blocks, [[0, 2], [1]] round-robin.
    """
    seats = [(host, local) for host, count in enumerate(workers) for local in range(count)]
    if placement == "round-robin":
        seats.sort(key=lambda seat: (seat[1], seat[0]))
    dealt: list[list[int]] = [[] for _ in workers]
    for rank, (host, _) in enumerate(seats):
        dealt[host].append(rank)
    return dealt


def meeting_point(join: str) -> tuple[str, int]:
    """Parse HOST and PORT of `--join`; an IPv6 address is in brackets."""
    host, colon, port = join.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = network.port(port)
    if not colon or not host or not number:
        raise UsageError(f"--join {join} isn't HOST:PORT, such as 10.0.0.1:29400")
    return host, number

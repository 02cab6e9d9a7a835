"""The request of one `paceline run`, and the checks of it before anything is started."""

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
from paceline.formatting import format_choices
from paceline.timings import DEFAULT_TIMINGS

Placement = Literal["block", "round-robin"]
Straggler = Literal["warn", "rebalance", "drop", "evict"]
Backend = Literal["paceline"]
PLACEMENTS: Final = get_args(Placement)
STRAGGLERS: Final = get_args(Straggler)
BACKENDS: Final = get_args(Backend)
QUIET: Final = math.inf
# Restarts of a whole job. Each start is told of all earlier ones, in an environment variable.
_MOST_RESTARTS = 200


@dataclass(frozen=True)
class LaunchRequest:
    """The request of one `paceline run`.

    None is the default of an option, unless it says otherwise.

    Args:
        script: Path of the script, or of a folder with a `__main__.py`.
        args: Arguments of the script.
        workers: Number of workers of this host.
        hosts: Number of hosts that start together.
        join: HOST:PORT of the meeting point, the same on all hosts.
        host_rank: Number that this host wishes for, 0 to hosts - 1. None: the first free one.
        secret_file: File of the secret that all hosts share.
        threads: Threads of each worker. None: OMP_NUM_THREADS if it is set, else cores / workers.
        deadline: Seconds for which hosts wait for each other at the start.
        sync: Reaches `start()` as PACELINE_SYNC. So do `name`, `servers`, `mesh`, `cut`,
            `straggler`, `report_to`, `shares` and `cluster`, each as a variable of its name.
        name: Name of the run.
        placement: Order in which ranks are dealt to hosts, "block" or "round-robin" (see
            `deal_ranks`).
        min_workers: Number of workers that the job needs. It goes on when others die; with fewer it
            saves a checkpoint and waits for others. None: a lost worker ends all workers.
        restarts: With `min_workers`, how many workers this host starts again; otherwise, how often
            the whole job starts again.
        patience: Seconds to wait for another worker or host in the place of one that is gone.
        servers: Number of parameter servers.
        backend: "paceline" for scripts that ask torch.distributed for Gloo. None: they get Gloo.
        horovod: Whether `import horovod` in the script finds paceline's bridge.
        mesh: Axes of the mesh.
        cut: How the model is divided.
        straggler: What to do about slow workers, one of `STRAGGLERS`.
        report_to: Service that the run reports to.
        shares: Shares of the batch.
        cluster: File of a measured cluster.
        plan: File of the plan that the run follows.
        saves_on_term: Whether SIGTERM has the run save a checkpoint before it ends. None: as the
            environment says (see `preemption.saves_on_term`).
        grace_seconds: Seconds for that. Default: 30.
        resumes: Whether the run goes on from the newest checkpoint of an earlier run of its name.
        progress: Seconds between two lines of progress if there is no bar. With `QUIET` the
            launcher prints only messages about problems.
        bare: Show what workers write at once and without their ranks, for commands in which only
            one worker writes.
        call: Two descriptors that workers inherit: the file with the function to call, and the
            channel to the caller.
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
    horovod: bool = False
    mesh: str | None = None
    cut: str | None = None
    straggler: str | None = None
    report_to: str | None = None
    shares: str | None = None
    cluster: str | Path | None = None
    plan: str | Path | None = None
    saves_on_term: bool | None = None
    grace_seconds: float = DEFAULT_TIMINGS.saving.grace
    resumes: bool = False
    progress: float | None = None
    bare: bool = False
    call: tuple[int, int] | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether the launcher prints only messages about problems."""
        return self.bare or self.call is not None or self.progress == QUIET

    @property
    def worker_command(self) -> list[str]:
        """Command line of a worker."""
        before = [] if self.backend is None else ["-m", "paceline.backend"]
        if self.horovod:
            before = ["-m", "paceline.bridges.horovod"]
        return [sys.executable, *before, self.script, *self.args]


def check_request(job: LaunchRequest) -> None:
    """Raise `UsageError` if the request can't be fulfilled, before anything is started."""
    _check_script(job)
    counted_options = (
        ("--workers", job.workers),
        ("--hosts", job.hosts),
        ("--threads", job.threads),
        ("--servers", job.servers),
    )
    for option, value in (*counted_options, ("--progress", job.progress)):
        if value is not None and value < 1:
            raise UsageError(f"{option} is {value}, and has to be at least 1")
    for option, choice, choices in (
        ("--placement", job.placement, PLACEMENTS),
        ("--straggler", job.straggler, STRAGGLERS),
    ):
        if choice is not None and choice not in choices:
            raise UsageError(f"{option} is {choice}; {format_choices(choice, choices)}")
    if job.straggler == "evict" and job.min_workers is None:
        raise UsageError(
            "--straggler evict has slow workers leave, so say how many workers the job needs: "
            "--min-workers N"
        )
    if job.cluster is not None:
        check_cluster(job.cluster, job.min_workers)
    _check_hosts(job)
    if job.min_workers is not None and not 1 <= job.min_workers <= job.workers * job.hosts:
        raise UsageError(
            f"--min-workers is {job.min_workers}, and has to be 1 to {job.workers * job.hosts}"
        )
    # Only a job of one host is known here. With more, workers check the mesh when all have met.
    if job.mesh is not None and job.hosts == 1:
        everyone = Topology((HostRanks("here", tuple(range(job.workers)), "127.0.0.1"),))
        mesh.choose_mesh(job.mesh, everyone, survives=job.min_workers is not None)
    if not job.patience >= 0:
        raise UsageError(f"--patience is {job.patience:g}: give seconds, 0 or more")
    if not 0 < job.grace_seconds < math.inf:
        raise UsageError(f"--grace-seconds is {job.grace_seconds:g}: give seconds above 0")
    if job.backend is not None and job.backend not in BACKENDS:
        raise UsageError(
            f"--backend is {job.backend}; {format_choices(job.backend, BACKENDS)}, which scripts "
            "get that ask torch.distributed for Gloo"
        )
    # A process group of torch.distributed has a fixed size.
    if job.backend is not None and job.min_workers is not None:
        raise UsageError(
            "--backend is for scripts that use torch.distributed, which survives no losses: "
            "leave out --min-workers"
        )
    _check_horovod(job)
    _check_restarts(job)


def _check_horovod(job: LaunchRequest) -> None:
    """Raise `UsageError` for options that a script of Horovod's can't honour."""
    options = {
        "plan": job.plan,
        **{"backend": job.backend, "sync": job.sync, "mesh": job.mesh, "cut": job.cut},
        **{"shares": job.shares, "servers": job.servers, "straggler": job.straggler},
        **{"cluster": job.cluster, "report-to": job.report_to, "name": job.name},
        **{"resume": job.resumes or None, "save-on-term": job.saves_on_term or None},
    }
    refused = [name for name, value in options.items() if value is not None]
    if job.horovod and refused:
        raise UsageError(
            f"--horovod goes without --{refused[0]}: a script that uses Horovod's API has no run "
            "that the option could change"
        )


def _check_hosts(job: LaunchRequest) -> None:
    """Raise `UsageError` for hosts that can't meet."""
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
    # Only an elastic job can begin on one host and take in others later.
    if job.hosts == 1 and job.join is not None and job.min_workers is None:
        raise UsageError(
            f"--join {job.join} needs --hosts N: how many hosts are to meet there (with "
            "--min-workers 1 will do)"
        )


def check_cluster(cluster: str | Path, min_workers: int | None) -> None:
    """Raise `UsageError` if a measured cluster can't be read, or hosts may change in the job."""
    topology_file.read_topology(Path(cluster))
    if min_workers is not None:
        raise UsageError(
            f"--cluster {cluster} says how fast the links of fixed hosts are, and with "
            "--min-workers hosts change: leave one out"
        )


def _check_script(job: LaunchRequest) -> None:
    """Raise `UsageError` if the script can't be run."""
    path = Path(job.script)
    if not path.exists():
        raise UsageError(
            f"the script {job.script} doesn't exist (looked in "
            f"{Path.cwd()}){hints.hint_python_script(job.script, job.args)}"
        )
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"the script {job.script} is a folder without a __main__.py")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {job.script} can't be read: check its mode")


def _check_restarts(job: LaunchRequest) -> None:
    """Raise `UsageError` for a number of restarts that is out of range."""
    if job.restarts < 0:
        raise UsageError(f"--restarts is {job.restarts}, and has to be 0 or more")
    if job.restarts > _MOST_RESTARTS and job.min_workers is None:
        raise UsageError(
            f"--restarts is {job.restarts}, and a whole job starts again {_MOST_RESTARTS} times at "
            "most: what ends it so often "
            "has a cause; with --min-workers single workers start again as often as you like"
        )


def deal_ranks(worker_counts: Sequence[int], placement: str) -> list[list[int]]:
    """Deal ranks to hosts, in blocks or round-robin.

    deal_ranks([2, 1], "block")          [[0, 1], [2]]   consecutive ranks for each host
    deal_ranks([2, 1], "round-robin")    [[0, 2], [1]]   one rank to each host in turn
    """
    places = [
        (host, local_rank)
        for host, count in enumerate(worker_counts)
        for local_rank in range(count)
    ]
    # Sorted by local rank first: the first workers of all hosts, then the second ones, and so on.
    if placement == "round-robin":
        places.sort(key=lambda seat: (seat[1], seat[0]))
    dealt: list[list[int]] = [[] for _ in worker_counts]
    for rank, (host, _) in enumerate(places):
        dealt[host].append(rank)
    return dealt


def parse_meeting_point(join: str) -> tuple[str, int]:
    """Parse the HOST and PORT of `--join`. An IPv6 address is in brackets."""
    host, colon, port = join.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    port_number = network.parse_port(port)
    if not colon or not host or not port_number:
        raise UsageError(f"--join {join} isn't HOST:PORT, such as 10.0.0.1:29400")
    return host, port_number

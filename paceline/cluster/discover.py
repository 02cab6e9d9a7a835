"""Discovers the place of this process in its job, from variables that its launcher has set.

The only module that reads the environment. Launchers are tried in this order; the first one whose
variables are there counts:

    paceline run    torchrun    Slurm    Open MPI    MPICH    other PMI    (none: alone)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, overload

from paceline.cluster import secret as secrets
from paceline.cluster.preemption import saves_on_term
from paceline.cluster.slurm_lists import expand_nodelist, expand_task_counts
from paceline.errors import PlaceError
from paceline.status.live_bar import can_show_bar, reflows_lines
from paceline.timings import DEFAULT_TIMINGS, Timings, parse_timings

Environ = Mapping[str, str]

# Ports derived from a job's id lie below the ephemeral range of Linux (32768...).
_FIRST_PORT, _PORT_COUNT = 20_000, 12_000
_REQUIRED = -(2**63)  # a default that means: the variable has to be set


@dataclass(frozen=True)
class JobStart:
    """One start of a job that may start again, with the run that earlier starts have opened.

    All fields are empty at the first start. `events` holds when each earlier start ended, and why.
    """

    folder: str | None = None
    seed: int = 0
    began: float = 0.0
    events: tuple[tuple[float, str], ...] = ()

    def dump(self) -> str:
        """Format as text, for `load`."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> JobStart:
        """Parse the text of `dump`."""
        fields = json.loads(text)
        # JSON has lists in place of tuples.
        return cls(**{**fields, "events": tuple((when, why) for when, why in fields["events"])})


class CallPlace(NamedTuple):
    """The place of a worker in a call by `pl.launch`: its number, and descriptors it inherits."""

    file: int  # descriptor of the file with the call
    channel: int  # descriptor of the connection to the caller
    number: int  # its rank at the start, or the number of the worker that it replaces

    def dump(self) -> str:
        """Format as text, for `load`."""
        return ",".join(map(str, self))

    @classmethod
    def load(cls, text: str) -> CallPlace:
        """Parse the text of `dump`."""
        return cls(*map(int, text.split(",")))


@dataclass(frozen=True)
class Place:
    """The place of one worker in its job, as its launcher gives it.

    `hosts` and `host_rank` count nodes as the launcher does. `store.discover_hosts` finds out which
    workers share a machine. `host_rank` is None if the launcher doesn't tell it. `meeting` is the
    (host, port) of torch's store.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host_rank: int | None = 0
    hosts: int = 1
    # "paceline" | "torchrun" | "slurm" | "openmpi" | "mpich" | "pmi" | "alone"
    launcher: str = "alone"
    meeting: tuple[str, int] | None = None
    agent_store: bool = False  # a store is already served at the meeting point (torchrun)
    store_fd: int | None = None  # the listening socket that rank 0 inherits (paceline run)
    # the pipe through which a worker of `paceline run` reports that it joined, closed or failed
    report_fd: int | None = None
    attempt: int = 0  # counts the restarts by a launcher that keeps its store
    one_machine: bool = False  # the launcher knows that all of its hosts are this machine
    secret: bytes | None = None
    run_name: str | None = None
    sync: str | None = None  # a strategy in text that replaces the script's own
    mesh: str | None = None  # the workers as a grid, in text
    cut: str | None = None  # cuts in text that replace the script's own
    shares: str | None = None  # shares in text that replace the script's own
    # folder for the parts of the model that each worker would hold, written instead of training
    layout: str | None = None
    profile: str | None = None  # file that asks for measured steps instead of training
    plan: str | None = None  # file of the plan that this run follows
    cluster: str | None = None  # file of the measured cluster that replaces the script's own
    # treatment of slow workers that replaces the script's own
    straggler: str | None = None
    report_to: str | None = None  # trackers that replace the script's own
    folder: str | None = None  # folder of run folders that replaces the script's own
    most_steps: int | None = None  # number of steps after which training stops
    most_seconds: float | None = None  # seconds from the first step, after which it stops
    # number of servers, for a strategy that doesn't set it; None: one on each host
    servers: int | None = None
    interface: str | None = None  # override: a name or an IP address
    deadline: float | None = None  # seconds
    hostname: str = "localhost"
    progress: str | None = None  # the page where this worker writes its progress (paceline run)
    # its number, if the job survives losses (`paceline run --min-workers`)
    worker: int | None = None
    orders_fd: int | None = None  # the pipe through which views and questions come (paceline run)
    joining: bool = False  # whether the other workers train already
    min_workers: int = 1  # workers that are needed to train, if the job survives losses
    run: tuple[str, int] | None = None  # the folder and the seed of the run that it joins
    # the file for its stack, which is written when the launcher asks for it (paceline run)
    stack_fd: int | None = None
    job: str | None = None  # id of its job, which no other job has (paceline run)
    job_start: JobStart | None = None  # if the job may start again (`paceline run --restarts`)
    call: CallPlace | None = None  # of a worker that carries out a call (`pl.launch`)
    # whether a bar may be drawn: by its launcher (paceline run), or by a process that is alone
    bar: bool = False
    # seconds between two lines on the run's progress; infinite: none
    status_every: float | None = None
    breaks: bool = True  # whether the terminal breaks lines again when it becomes narrower
    # Whether SIGTERM makes the run save a checkpoint before it ends, and the seconds for that.
    saves_on_term: bool = False
    grace_seconds: float = DEFAULT_TIMINGS.saving.grace
    # the pipe through which another part of this process asks for the same (Ray)
    save_request_fd: int | None = None
    resumes: bool = False  # go on from an earlier run's checkpoint (`paceline run --resume`)
    timings: Timings = DEFAULT_TIMINGS


def copy_environment() -> dict[str, str]:
    """Copy the environment of this process."""
    return dict(os.environ)


def discover_place(environ: Environ | None = None) -> Place:
    """Discover the place of this process from the variables that its launcher has set.

    Raises `PlaceError` if they make no sense.
    """
    variables = copy_environment() if environ is None else environ
    places = (recognise(variables) for recognise in _LAUNCHERS)
    place = next((place for place in places if place is not None), None) or _make_lone_place(
        variables
    )
    _check_place(place)
    return _add_user_settings(place, variables)


def find_secret(environ: Environ | None = None) -> bytes | None:
    """Find the secret of this process's job. None: it has none."""
    variables = copy_environment() if environ is None else environ
    if "PACELINE_SECRET_FD" in variables:
        return secrets.read_secret_descriptor(_read_integer(variables, "PACELINE_SECRET_FD"))
    text = variables.get("PACELINE_SECRET")
    return None if text is None else secrets.parse_secret(text, "PACELINE_SECRET")


def read_timings(environ: Environ | None = None) -> Timings:
    """Read the timings of this process: the defaults, and changes for tests in PACELINE_TIMINGS."""
    text = (copy_environment() if environ is None else environ).get("PACELINE_TIMINGS")
    try:
        return parse_timings(text) if text else DEFAULT_TIMINGS
    except ValueError as error:
        raise PlaceError(
            f"PACELINE_TIMINGS can't be used ({error}); it is meant for tests: unset it"
        ) from error


def derive_port(*parts: object) -> int:
    """Derive a port from values, so that processes with the same values get the same port."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:8], "big") % _PORT_COUNT


def _recognise_paceline(environ: Environ) -> Place | None:
    """Recognise a worker of `paceline run`."""
    if "PACELINE_STORE" not in environ:
        return None
    place = _read_torch_variables(environ, "paceline")
    host, _, port = environ["PACELINE_STORE"].rpartition(":")
    return replace(
        place,
        meeting=(host, _read_integer({"PACELINE_STORE": port}, "PACELINE_STORE")),
        store_fd=_read_integer(environ, "PACELINE_STORE_FD", None),
        report_fd=_read_integer(environ, "PACELINE_REPORT_FD", None),
        one_machine=environ.get("PACELINE_ONE_MACHINE") == "1",
        secret=find_secret(environ),
        worker=_read_integer(environ, "PACELINE_WORKER", None),
        orders_fd=_read_integer(environ, "PACELINE_ORDERS_FD", None),
        joining=environ.get("PACELINE_JOINING") == "1",
        min_workers=_read_integer(environ, "PACELINE_MIN_WORKERS", 1),
        run=_read_joined_run(environ),
        stack_fd=_read_integer(environ, "PACELINE_STACK_FD", None),
        job=environ.get("PACELINE_JOB") or None,
        job_start=read_job_start(environ),
        call=CallPlace.load(environ["PACELINE_CALL"]) if "PACELINE_CALL" in environ else None,
        bar=environ.get("PACELINE_BAR") == "1",
        status_every=_parse_status_interval(environ.get("PACELINE_STATUS_EVERY")),
    )


def read_job_start(environ: Environ) -> JobStart | None:
    """Read which start of the job this is. None if the job never restarts."""
    return (
        JobStart.load(environ["PACELINE_JOB_START"]) if environ.get("PACELINE_JOB_START") else None
    )


def _read_joined_run(environ: Environ) -> tuple[str, int] | None:
    if "PACELINE_RUN" not in environ:
        return None
    folder, seed = json.loads(environ["PACELINE_RUN"])
    return str(folder), int(seed)


def _recognise_torchrun(environ: Environ) -> Place | None:
    """Recognise a worker of torchrun, or of a script that sets the same variables."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return replace(
        _read_torch_variables(environ, "torchrun"),
        meeting=_read_master_address(environ),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_read_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _read_torch_variables(environ: Environ, launcher: str) -> Place:
    """Read the variables of torch.distributed into a place."""
    size = _read_integer(environ, "WORLD_SIZE")
    local_size = _read_integer(environ, "LOCAL_WORLD_SIZE", 1)
    rank = _read_integer(environ, "RANK")
    return Place(
        rank=rank,
        size=size,
        local_rank=_read_integer(environ, "LOCAL_RANK", 0),
        local_size=local_size,
        host_rank=_read_integer(environ, "GROUP_RANK", rank if local_size == 1 else None),
        hosts=_read_integer(environ, "GROUP_WORLD_SIZE", math.ceil(size / max(1, local_size))),
        launcher=launcher,
    )


def _recognise_slurm(environ: Environ) -> Place | None:
    """Recognise a task that srun itself started.

    A batch script has no step. A process of mpirun has an Open MPI rank, or a PMI rank of its own.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if (
        "SLURM_PROCID" not in environ
        or (step is None and "SLURM_STEP_NODELIST" not in environ)
        or "OMPI_COMM_WORLD_RANK" in environ
    ):
        return None
    rank = _read_integer(environ, "SLURM_PROCID")
    # An MPI that was started through srun numbers its processes itself.
    if environ.get("PMI_RANK", str(rank)) != str(rank):
        return None
    size = _read_integer(environ, "SLURM_STEP_NUM_TASKS", None) or _read_integer(
        environ, "SLURM_NTASKS"
    )
    hosts = _read_integer(environ, "SLURM_STEP_NUM_NODES", None) or _read_integer(
        environ, "SLURM_NNODES", None
    )
    host_rank = _read_integer(environ, "SLURM_NODEID", 0)
    # The step may run on fewer nodes than the job. Older versions of Slurm have other names.
    nodes = environ.get(
        "SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    )
    # No more names than tasks: a hostile or broken list may expand to billions.
    names = list(itertools.islice(expand_nodelist(nodes), size + 1))
    hosts = hosts or max(1, len(names))
    place = Place(
        rank,
        size,
        _read_integer(environ, "SLURM_LOCALID", 0),
        _count_local_tasks(environ, host_rank, size, hosts),
        host_rank,
        hosts,
        "slurm",
    )
    job = (environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", "")), step)
    return replace(
        place,
        meeting=_choose_meeting_point(environ, place, names[0] if names else None, ("slurm", *job)),
    )


def _count_local_tasks(environ: Environ, host_rank: int, size: int, hosts: int) -> int:
    """Read the number of tasks of this node."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    counts = expand_task_counts(text)
    if host_rank < len(counts):
        return counts[host_rank]
    if size % hosts == 0:
        return size // hosts
    raise PlaceError(
        f"Slurm says that {size} tasks run on {hosts} nodes, but not how many run on each: "
        "set SLURM_TASKS_PER_NODE, or start with torchrun"
    )


def _recognise_openmpi(environ: Environ) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    names = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    return _read_mpi_place(environ, "openmpi", names, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))


def _recognise_mpich(environ: Environ) -> Place | None:
    if "PMI_RANK" not in environ or "MPI_LOCALRANKID" not in environ:
        return None
    return _read_mpi_place(
        environ,
        "mpich",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("PMI_JOBID",),
    )


def _recognise_pmi(environ: Environ) -> Place | None:
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    return _read_mpi_place(
        environ,
        "pmi",
        ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
        ("PMI_JOBID", "PMI_ID"),
    )


def _read_mpi_place(
    environ: Environ, launcher: str, names: tuple[str, str, str, str], jobs: tuple[str, ...]
) -> Place:
    """Recognise a process of an MPI.

    Args:
        environ: The environment.
        launcher: Name of the MPI.
        names: Variables of its rank, size, local rank and local size.
        jobs: Variables that may hold an id of the job, the best first.
    """
    rank, size = _read_integer(environ, names[0]), _read_integer(environ, names[1])
    local_rank, local_size = (
        _read_integer(environ, names[2], None),
        _read_integer(environ, names[3], None),
    )
    if local_rank is None or local_size is None:
        if size > 1:
            lacking = " and ".join(name for name in names[2:] if name not in environ)
            raise PlaceError(
                f"{names[0]} is set, but {lacking} isn't: set it to the rank on this host, or "
                "start the workers with torchrun"
            )
        local_rank, local_size = 0, 1
    hosts = _read_integer(environ, "OMPI_MCA_orte_num_nodes", None) or math.ceil(
        size / max(1, local_size)
    )
    # Open MPI counts the nodes of the allocation, which may be more than the job uses.
    hosts = 1 if local_size == size else max(2, hosts)
    place = Place(rank, size, local_rank, local_size, 0 if hosts == 1 else None, hosts, launcher)
    job = next((environ[name] for name in jobs if name in environ), None)
    # Without an id of the job, the parent: all ranks of a host are started by mpirun or its agent.
    return replace(
        place, meeting=_choose_meeting_point(environ, place, None, (launcher, job or os.getppid()))
    )


def _choose_meeting_point(
    environ: Environ, place: Place, first: str | None, job: tuple[object, ...]
) -> tuple[str, int] | None:
    """Choose the meeting point: MASTER_ADDR and MASTER_PORT, if they are set.

    Otherwise it is the first host (or loopback if there is only one), and a port derived from the
    job. None for a job of one worker.
    """
    if place.size == 1:
        return None
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if place.hosts == 1 else first)
    if host is None:
        raise PlaceError(
            f"{place.size} workers run on {place.hosts} hosts, and {place.launcher} doesn't say "
            "where the first one is: "
            "set MASTER_ADDR to the address of rank 0's host, and MASTER_PORT to a port that is "
            "free there, for every worker"
        )
    if place.hosts > 1 and place.launcher != "slurm" and "MASTER_PORT" not in environ:
        raise PlaceError(
            f"MASTER_ADDR is {host}, but MASTER_PORT isn't set: set it to a port that is free "
            "there, for every worker"
        )
    # All workers derive the same port from the id of the job. Two jobs seldom get the same one.
    return host, _read_integer(environ, "MASTER_PORT", None) or derive_port(*job)


def _read_master_address(environ: Environ) -> tuple[str, int] | None:
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if not lacking:
        return environ["MASTER_ADDR"], _read_integer(environ, "MASTER_PORT")
    if environ["WORLD_SIZE"] == "1":
        return None
    raise PlaceError(
        f"RANK and WORLD_SIZE={environ['WORLD_SIZE']} are set, but {' and '.join(lacking)} not: "
        "set them, or start with torchrun"
    )


def _make_lone_place(environ: Environ) -> Place:
    """Make the place of a process without a launcher: a job of one worker."""
    for present, absent in (("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE")):
        if environ.get(present, "1") not in {"0", "1"} and absent not in environ:
            raise PlaceError(
                f"{present}={environ[present]} is set, but {absent} isn't: "
                "set both, remove both, or start with torchrun or `paceline run`"
            )
    return Place(bar=can_show_bar(environ), breaks=reflows_lines(environ))


def _add_user_settings(place: Place, environ: Environ) -> Place:
    """Add the settings that a user can make under any launcher."""
    deadline = environ.get("PACELINE_DEADLINE")
    return replace(
        place,
        secret=find_secret(environ) if place.secret is None else place.secret,
        run_name=environ.get("PACELINE_NAME") or None,
        sync=environ.get("PACELINE_SYNC") or None,
        mesh=environ.get("PACELINE_MESH") or None,
        cut=environ.get("PACELINE_CUT") or None,
        shares=environ.get("PACELINE_SHARES") or None,
        layout=environ.get("PACELINE_LAYOUT") or None,
        profile=environ.get("PACELINE_PROFILE") or None,
        plan=environ.get("PACELINE_PLAN") or None,
        cluster=environ.get("PACELINE_CLUSTER") or None,
        straggler=environ.get("PACELINE_STRAGGLER") or None,
        report_to=environ.get("PACELINE_REPORT_TO") or None,
        folder=environ.get("PACELINE_FOLDER") or None,
        most_steps=_read_count(environ, "PACELINE_STEPS", "steps after which training stops"),
        most_seconds=parse_seconds(environ["PACELINE_SECONDS"], "PACELINE_SECONDS")
        if environ.get("PACELINE_SECONDS")
        else None,
        servers=_read_count(environ, "PACELINE_SERVERS", "parameter servers"),
        interface=environ.get("PACELINE_INTERFACE") or None,
        deadline=None if deadline is None else parse_seconds(deadline, "PACELINE_DEADLINE"),
        hostname=socket.gethostname(),
        progress=environ.get("PACELINE_PROGRESS_PAGE") or None,
        saves_on_term=saves_on_term(environ),
        grace_seconds=parse_seconds(
            environ.get("PACELINE_GRACE_SECONDS") or str(place.grace_seconds),
            "PACELINE_GRACE_SECONDS",
        ),
        save_request_fd=_read_integer(environ, "PACELINE_SAVE_REQUEST_FD", None),
        resumes=environ.get("PACELINE_RESUME") == "1",
        timings=read_timings(environ),
    )


def _read_count(environ: Environ, name: str, things: str) -> int | None:
    if not environ.get(name):
        return None
    count = _read_integer(environ, name)
    if count < 1:
        raise PlaceError(f"{name} is {count}: give the number of {things}, 1 or more")
    return count


def parse_seconds(text: str, name: str) -> float:
    """Parse a positive, finite number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise PlaceError(f"{name}={text} isn't a positive number of seconds")
    return value


def _parse_status_interval(text: str | None) -> float | None:
    """Parse the seconds between two lines of progress. Infinity means no lines."""
    if not text:
        return None
    return math.inf if text == str(math.inf) else parse_seconds(text, "PACELINE_STATUS_EVERY")


def _check_place(place: Place) -> None:
    """Raise `PlaceError` if the numbers of a place are out of range."""
    for name, value, limit in (
        ("rank", place.rank, place.size),
        ("local rank", place.local_rank, place.local_size),
        ("host rank", place.host_rank or 0, place.hosts),
        ("number of local workers", place.local_size - 1, place.size),
    ):
        if not 0 <= value < limit:
            raise PlaceError(
                f"{place.launcher} says: {name} {value}, of {limit}; "
                f"it has to be 0 to {limit - 1}. Check the program that sets these variables"
            )


@overload
def _read_integer(environ: Environ, name: str, default: int = ...) -> int: ...
@overload
def _read_integer(environ: Environ, name: str, default: int | None) -> int | None: ...
def _read_integer(environ: Environ, name: str, default: int | None = _REQUIRED) -> int | None:
    if not environ.get(name):
        if default == _REQUIRED:
            raise PlaceError(
                f"{name} isn't set, though other variables of its launcher are: "
                "set it, or start the workers with torchrun or `paceline run`"
            )
        return default
    try:
        return int(environ[name])
    except ValueError:
        raise PlaceError(f"{name}={environ[name]} isn't a whole number") from None


# The first one that recognises the process counts. `paceline run` sets torchrun's variables too,
# and torchrun may run inside a Slurm job.
_LAUNCHERS: tuple[Callable[[Environ], Place | None], ...] = (
    _recognise_paceline,
    _recognise_torchrun,
    _recognise_slurm,
    _recognise_openmpi,
    _recognise_mpich,
    _recognise_pmi,
)

"""The command and the environment of each worker that a launcher starts."""

from __future__ import annotations

import os
import secrets as random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paceline.cluster import machine, network, secret
from paceline.cluster.control import commands, progress
from paceline.cluster.control.progress import ProgressPage
from paceline.cluster.discover import CallPlace, read_job_start
from paceline.cluster.hosts.peers import Offer
from paceline.cluster.launcher import bar, hints
from paceline.cluster.launcher.host_resources import HostResources
from paceline.cluster.launcher.output import print_message
from paceline.cluster.launcher.request import QUIET, LaunchRequest
from paceline.cluster.launcher.worker import WorkerCommand
from paceline.cluster.preemption import saves_on_term

# Beginnings of the variables that belong to another launcher, or that are made anew for each worker
_NOT_INHERITED_PREFIXES = (
    "TORCHELASTIC_",
    "PACELINE_SECRET",
    "PACELINE_STORE",
    "PACELINE_REPORT_FD",
    "PACELINE_ONE_MACHINE",
    "PACELINE_PROGRESS",
    "PACELINE_ORDERS_FD",
    "PACELINE_WORKER",
    "PACELINE_JOINING",
    "PACELINE_STACK_FD",
    "PACELINE_RUN",
    "PACELINE_CALL",
    "PACELINE_BAR",
    "PACELINE_SAVE_REQUEST_FD",
)


def make_first_commands(
    job: LaunchRequest,
    shared_variables: dict[str, str],
    resources: HostResources,
    ranks: Sequence[int],
) -> list[WorkerCommand]:
    """Make the commands of this host's workers at the start of the job."""
    secret_fd = secret.write_secret_descriptor(resources.secret)
    resources.until_workers_start.callback(os.close, secret_fd)
    worker_commands = []
    for local_rank, rank in enumerate(ranks):
        environ = shared_variables | {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "PACELINE_SECRET_FD": str(secret_fd),
        }
        descriptors = [secret_fd, *(job.call or ())]
        if rank == 0 or resources.agent_listener is not None:
            environ["PACELINE_STORE_FD"] = str(resources.store_listeners[local_rank].fileno())
            descriptors.append(resources.store_listeners[local_rank].fileno())
        page = _make_progress_page(resources.progress_folder, rank, shared_variables)
        environ |= _make_own_variables(job, rank, page)
        worker_number = (
            resources.offer.numbers[local_rank] if resources.agent_listener is not None else None
        )
        worker_commands.append(
            WorkerCommand(
                rank, job.worker_command, environ, tuple(descriptors), page, worker_number
            )
        )
    return worker_commands


@contextmanager
def make_joining_worker(
    job: LaunchRequest,
    shared_variables: Mapping[str, str],
    resources: HostResources,
    run: str,
    rank: int,
) -> Iterator[WorkerCommand]:
    """Make the command of a worker that starts while other workers train.

    It begins as a job of one worker, and learns of the others from the pipe of its launcher.
    `run` are the facts of the run, as JSON.
    """
    address = resources.offer.address
    with ExitStack() as inherited:
        store = inherited.enter_context(network.open_listener(address))
        secret_fd = secret.write_secret_descriptor(resources.secret)
        inherited.callback(os.close, secret_fd)
        port = store.getsockname()[1]
        own_variables = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_WORLD_SIZE": "1",
            "GROUP_RANK": "0",
        }
        own_variables |= {
            "PACELINE_SECRET_FD": str(secret_fd),
            "PACELINE_STORE": f"{address}:{port}",
            "PACELINE_STORE_FD": str(store.fileno()),
        }
        own_variables |= {"PACELINE_JOINING": "1", "PACELINE_RUN": run}
        environ = {**shared_variables, **own_variables}
        page = _make_progress_page(resources.progress_folder, rank, shared_variables)
        environ |= _make_own_variables(job, rank, page)
        worker_number = commands.make_worker_number(random.randbits(32), port)
        descriptors = (secret_fd, store.fileno(), *(job.call or ()))
        yield WorkerCommand(
            rank, job.worker_command, environ, descriptors, page, worker_number, is_joining=True
        )


def _make_own_variables(job: LaunchRequest, rank: int, page: ProgressPage | None) -> dict[str, str]:
    """Environment variables of one worker alone: its progress page, and its place in a call."""
    variables = {} if page is None else {"PACELINE_PROGRESS_PAGE": str(page.file)}
    if job.call is not None:
        variables["PACELINE_CALL"] = CallPlace(*job.call, rank).dump()
    return variables


def _make_progress_page(
    folder: str | None, rank: int, shared_variables: Mapping[str, str]
) -> ProgressPage | None:
    """Make the progress page of a worker; None if the job isn't observed."""
    if not folder:
        return None
    page = ProgressPage(progress.page_path(Path(folder).absolute(), rank))
    # OMP_NUM_THREADS may be a list, one number for each level of nested teams.
    threads = shared_variables["OMP_NUM_THREADS"].partition(",")[0]
    host_rank = int(shared_variables["GROUP_RANK"])
    page.describe_worker(rank, host_rank, int(threads) if threads.isdigit() else 1)
    return page


def make_shared_variables(
    job: LaunchRequest, environ: Mapping[str, str], offers: tuple[Offer, ...], host_rank: int
) -> dict[str, str]:
    """Environment that all workers of this host have in common."""
    own_offer, first_offer = offers[host_rank], offers[0]
    inherited = (name for name in environ if not name.startswith(_NOT_INHERITED_PREFIXES))
    variables = {name: environ[name] for name in inherited}
    workers_here = sum(offer.workers for offer in offers if offer.machine == own_offer.machine)
    start = read_job_start(environ)
    is_first_start = start is None or not start.events
    # Several launchers may run on one machine: the first of them prints the hint.
    if is_first_start and all(offer.machine != own_offer.machine for offer in offers[:host_rank]):
        print_message(hints.hint_crowded_host(workers_here, machine.count_cores(), own_offer.name))
    variables |= {
        "WORLD_SIZE": str(sum(offer.workers for offer in offers)),
        "LOCAL_WORLD_SIZE": str(own_offer.workers),
        "GROUP_RANK": str(host_rank),
        "GROUP_WORLD_SIZE": str(len(offers)),
        "MASTER_ADDR": first_offer.address,
        "MASTER_PORT": str(first_offer.master_port),
        "PACELINE_STORE": f"{first_offer.address}:{first_offer.store_port}",
    }
    if all(offer.machine == own_offer.machine for offer in offers):
        variables["PACELINE_ONE_MACHINE"] = "1"
    if bar.is_bar_drawn(environ, bare=job.bare) and job.progress != QUIET:
        variables["PACELINE_BAR"] = "1"
    if job.threads is not None:
        variables["OMP_NUM_THREADS"] = str(job.threads)
    variables.setdefault("OMP_NUM_THREADS", str(max(1, machine.count_cores() // workers_here)))
    # Python would hold lines back, as its output is a pipe.
    variables.setdefault("PYTHONUNBUFFERED", "1")
    variables.setdefault("PYTHONBREAKPOINT", f"{hints.__name__}.{hints.refuse_breakpoint.__name__}")
    interface = network.find_interface_name(own_offer.address)
    if interface is not None:
        # For scripts that use torch.distributed themselves: Gloo and NCCL would guess the interface
        # from the host's name.
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        variables.setdefault("NCCL_SOCKET_IFNAME", interface)
    variables["PACELINE_SAVE_ON_TERM"] = str(int(decide_saving(job, environ)))
    return variables | _make_option_variables(job)


def decide_saving(job: LaunchRequest, environ: Mapping[str, str]) -> bool:
    """Decide whether SIGTERM has the run save a checkpoint: as requested, else by the environment.

    The caller of `pl.launch` ends its workers by itself.
    """
    if job.saves_on_term is None:
        return job.call is None and saves_on_term(environ)
    return job.saves_on_term


def _make_option_variables(job: LaunchRequest) -> dict[str, str]:
    """Environment variables by which options of the launcher reach `start()`."""
    options = {
        "SYNC": job.sync,
        "MESH": job.mesh,
        "CUT": job.cut,
        "SHARES": job.shares,
        "NAME": job.name,
        "SERVERS": job.servers,
        "STRAGGLER": job.straggler,
        "REPORT_TO": job.report_to,
        "STATUS_EVERY": job.progress,
        "GRACE_SECONDS": job.grace_seconds,
        "RESUME": 1 if job.resumes else None,
        # Workers may change their folder, so they get the whole path.
        "CLUSTER": None if job.cluster is None else Path(job.cluster).absolute(),
        "PLAN": None if job.plan is None else Path(job.plan).absolute(),
    }
    return {f"PACELINE_{name}": str(value) for name, value in options.items() if value is not None}

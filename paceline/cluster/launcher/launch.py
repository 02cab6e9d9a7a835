"""`paceline run`, the launcher of one host.

It checks the request, meets the other launchers, and gives each worker its rank and environment:

    run_job -> _run_restartable_job -> _run_one_start   the whole job starts again after a failure
            -> _take_part_in_job                        otherwise
                 reserve_resources     sockets, ports and the job's secret
                 _prepare_workers      meet the other hosts, write the commands of the workers
                 Supervisor            start the workers, watch them, end them together
"""

from __future__ import annotations

import secrets as random
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial

from paceline.cluster import machine
from paceline.cluster.control import calls
from paceline.cluster.discover import (
    copy_environment,
    parse_seconds,
    read_timings,
)
from paceline.cluster.hosts.admission import MeetingPoint, Point
from paceline.cluster.hosts.channel import Channel
from paceline.cluster.hosts.elastic import ElasticPeers, connect_all_launchers, connect_joining_host
from paceline.cluster.hosts.fixed import FixedPeers
from paceline.cluster.hosts.meeting import Meeting
from paceline.cluster.hosts.membership import HostSeat, View
from paceline.cluster.hosts.peers import NoPeers, Offer, Peers
from paceline.cluster.hosts.rendezvous import Admission, assemble_hosts, seek_admission
from paceline.cluster.hosts.restart_messages import JobStopped, Links
from paceline.cluster.launcher import bar, hints, interrupt
from paceline.cluster.launcher.host_resources import HostResources, reserve_resources
from paceline.cluster.launcher.output import print_message
from paceline.cluster.launcher.replacement import Replacement
from paceline.cluster.launcher.request import (
    PLACEMENTS,
    LaunchRequest,
    check_request,
    deal_ranks,
    parse_meeting_point,
)
from paceline.cluster.launcher.restarts import JobRestarts
from paceline.cluster.launcher.supervisor import RunWatcher, Supervisor
from paceline.cluster.launcher.worker import WorkerCommand
from paceline.cluster.launcher.worker_commands import (
    decide_saving,
    make_first_commands,
    make_joining_worker,
    make_shared_variables,
)
from paceline.errors import PacelineError
from paceline.formatting import format_count
from paceline.timings import DEFAULT_TIMINGS, Timings

# A host that joins later has no ranks yet. Until then it calls its workers
# `host * _LATER_RANK_STEP + local rank`.
_LATER_RANK_STEP = 1000
# Options that must be the same on all hosts.
_SHARED_OPTIONS = (
    *("hosts", "join", "secret_file", "workers", "sync", "mesh", "cut", "shares", "placement"),
    *("min_workers", "servers", "straggler", "cluster", "report_to", "backend", "name"),
    "horovod",
)
# Open files of any process of a job. Each worker of the job adds more, those of its host most.
_BASE_DESCRIPTORS = 64
USAGE_EXIT_CODE = 2  # exit code for a wrong request


def run_job(
    job: LaunchRequest, environ: Mapping[str, str] | None = None, watcher: RunWatcher | None = None
) -> int:
    """Run the workers of this host until all have ended, and return the exit code of the job.

    Call it in the main thread: it handles signals until it returns.

    Args:
        job: The request.
        environ: Environment of the launcher. Default: that of this process.
        watcher: Shows the run to people, if a worker of this host writes it. Default: none.

    Returns:
        0 if all workers ended well; 2 if the request can't be fulfilled (the reason is printed in
        one line); 128+n if the job was ended by signal n; else the exit code of the worker that
        failed first.
    """
    surroundings = copy_environment() if environ is None else dict(environ)
    # All starts of the job have the same mark, so that a later one removes what earlier ones left.
    surroundings["PACELINE_JOB"] = random.token_hex(16)
    try:
        check_request(job)
        machine.raise_descriptor_limit(
            _BASE_DESCRIPTORS + 8 * job.workers + 4 * job.workers * job.hosts
        )
        if job.workers == job.hosts == 1:
            print_message(hints.hint_misplaced_options(job.script, job.args))
        if job.restarts and job.min_workers is None:
            return _run_restartable_job(
                job,
                surroundings,
                JobRestarts(job.restarts, patience=job.patience if job.hosts > 1 else 0.0),
                watcher,
            )
        code, elastic_points, ranks = _take_part_in_job(job, surroundings, watcher)
        # This host was cut off, and the other hosts go on without it: it tries to come back.
        while elastic_points:
            print_message(f"looks for the other hosts for {job.patience:g} s, to take part again")
            try:
                code, elastic_points, ranks = _take_part_in_job(
                    job, surroundings, watcher, elastic_points, ranks
                )
            except PacelineError as error:
                print_message(str(error))
                return code
        return code
    except PacelineError as error:
        print_message(str(error))
        return USAGE_EXIT_CODE
    except JobStopped as job_stopped:
        print_message(
            f"{interrupt.describe_signal(job_stopped.signum)} before its workers started"
            if job_stopped.is_here
            else str(job_stopped)
        )
        return 128 + job_stopped.signum
    except KeyboardInterrupt:
        print_message(interrupt.describe_signal(signal.SIGINT))
        return 128 + signal.SIGINT


def _make_success_message(job: LaunchRequest) -> str:
    return "" if job.is_quiet else f"{format_count(job.workers, 'worker')} ended well"


def _run_restartable_job(
    job: LaunchRequest,
    surroundings: dict[str, str],
    restarts: JobRestarts,
    watcher: RunWatcher | None,
) -> int:
    """Take part in each start of a job that restarts as a whole, and return its exit code."""
    code, links = 0, None
    with interrupt.raise_on_signals():
        while True:
            try:
                code, links = _run_one_start(job, surroundings, restarts, links, watcher)
            except PacelineError as error:
                if not restarts.present_start.events:
                    raise
                print_message(str(error))
                return code
            except JobStopped as stop:
                if links is not None:
                    links.stop_job(stop, read_timings(surroundings).channel.flush)
                raise
            if not restarts.take_due():
                return code


def _run_one_start(
    job: LaunchRequest,
    surroundings: dict[str, str],
    restarts: JobRestarts,
    links: Links | None,
    watcher: RunWatcher | None,
) -> tuple[int, Links | None]:
    """Take part in one start of the job.

    Args:
        job: The request.
        surroundings: Environment of the workers. PACELINE_JOB_START is set in it.
        restarts: How many restarts the job has had, and may have.
        links: Connections to the other launchers from the start before, if there was one.
        watcher: Shows the run to people, if a worker of this host writes it.

    Returns:
        The exit code, and the connections to the other launchers if the job starts again.
    """
    with ExitStack() as until_start_ends, ExitStack() as until_workers_start:
        resources = reserve_resources(job, surroundings, until_start_ends, until_workers_start)
        peers = _meet_for_start(job, surroundings, resources, restarts, links)
        restarts.begin_start(peers)
        surroundings["PACELINE_JOB_START"] = restarts.present_start.dump()
        worker_commands = _make_first_parts(job, surroundings, resources, peers).worker_commands
        supervisor = Supervisor(
            *(resources.offer.name, surroundings["PACELINE_JOB"], peers),
            shown=bar.make_screens(surroundings, bare=job.bare),
            told=calls.make_verdict_sender(job.call),
            restarts=restarts,
            watcher=watcher,
            finished=_make_success_message(job),
            saving_seconds=job.grace_seconds if decide_saving(job, surroundings) else 0.0,
            timings=resources.timings,
        )
        code = supervisor.run_workers(worker_commands, started=until_workers_start.close)
        remaining_links = peers.hand_over_links()
        # The end was asked for after the workers had ended: the others must not start again.
        if remaining_links is not None and remaining_links.channels and not restarts.is_due:
            remaining_links.stop_job(
                JobStopped(code - 128, resources.offer.name), resources.timings.channel.linger
            )
        return code, remaining_links


def _take_part_in_job(
    job: LaunchRequest,
    surroundings: dict[str, str],
    watcher: RunWatcher | None,
    points: Sequence[Point] = (),
    ranks: Sequence[int] = (),
) -> tuple[int, Sequence[Point], Sequence[int]]:
    """Take part in the job until it is over on this host.

    Args:
        job: The request.
        surroundings: Environment of the workers. PACELINE_JOB_START is set in it.
        watcher: Shows the run to people, if a worker of this host writes it.
        points: Addresses of launchers of the running job, if this host was cut off from it before.
        ranks: Ranks by which this host called its workers then. They are called by these again.

    Returns:
        The exit code; the addresses of the other launchers if this host was cut off from them; and
        the ranks of the workers of this host.
    """
    surroundings["PACELINE_JOB_START"] = ""
    with ExitStack() as until_job_ends, ExitStack() as until_workers_start:
        with interrupt.raise_on_signals():
            resources = reserve_resources(job, surroundings, until_job_ends, until_workers_start)
            parts = _prepare_workers(job, surroundings, resources, points, ranks)
        elastic_peers = parts.peers if isinstance(parts.peers, ElasticPeers) else None
        make_replacement = None
        if elastic_peers is not None:
            make_replacement = partial(
                _make_replacement, job, elastic_peers, parts.make_worker, resources.timings
            )
        supervisor = Supervisor(
            *(parts.host, surroundings["PACELINE_JOB"], parts.peers, make_replacement),
            shown=bar.make_screens(surroundings, bare=job.bare),
            told=calls.make_verdict_sender(job.call),
            watcher=watcher,
            finished=_make_success_message(job),
            saving_seconds=job.grace_seconds if decide_saving(job, surroundings) else 0.0,
            timings=resources.timings,
        )
        # The launcher closes its copies of what workers inherit as soon as all have started.
        code = supervisor.run_workers(parts.worker_commands, started=until_workers_start.close)
        own_ranks = [task.rank for task in parts.worker_commands]
        # A host that was cut off tries to come back, unless somebody asked it to end.
        if elastic_peers is None or not elastic_peers.is_cut_off or supervisor.is_asked_to_end:
            return code, [], own_ranks
        return code, elastic_peers.launcher_points if job.patience > 0 else [], own_ranks


def _make_replacement(
    job: LaunchRequest,
    elastic_peers: ElasticPeers,
    make_worker: MakeWorker,
    timings: Timings,
    supervisor: Supervisor,
) -> Replacement:
    """Make the replacement of workers that die. It starts new ones under `supervisor`."""

    def start_replacement(rank: int) -> None:
        assert elastic_peers.run_facts is not None
        with make_worker(elastic_peers.run_facts, rank) as worker_command:
            supervisor.start_worker(worker_command)

    assert job.min_workers is not None
    return Replacement(
        elastic_peers,
        job.min_workers,
        job.restarts,
        job.patience,
        start_replacement,
        supervisor.show_line,
        timings=timings.replacement,
    )


# Makes another worker of a run: from the facts of the run (JSON) and a rank. While the context is
# open, this process holds what the worker inherits.
MakeWorker = Callable[[str, int], AbstractContextManager[WorkerCommand]]


@dataclass(frozen=True)
class _LauncherParts:
    """What a launcher needs to start its workers."""

    worker_commands: list[WorkerCommand]
    peers: Peers
    host: str
    make_worker: MakeWorker


def _prepare_workers(
    job: LaunchRequest,
    environ: dict[str, str],
    resources: HostResources,
    points: Sequence[Point],
    ranks: Sequence[int],
) -> _LauncherParts:
    """Meet the other hosts, agree on addresses and ports, and write the command of each worker.

    With `points` the job already runs there, and `ranks` are those of this host's workers before.
    """
    if resources.agent_listener is not None:
        environ["PACELINE_MIN_WORKERS"] = str(job.min_workers)
        # torch prints a long text for each connection that ends, which is normal here.
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    peers: NoPeers | FixedPeers = NoPeers()
    meeting_deadline = _get_meeting_deadline(job, environ)
    join_point = None if job.join is None else parse_meeting_point(job.join)
    if join_point is not None:
        deadline = job.patience if points else meeting_deadline
        terms = (job.hosts, job.host_rank, deadline, _write_join_command(job))
        meeting = Meeting(
            *(join_point, resources.secret, resources.offer, *terms), timings=resources.timings
        )
        joined = seek_admission(points, meeting) if points else assemble_hosts(meeting)
        if isinstance(joined, Admission):
            return _join_running_job(job, environ, joined, resources, ranks)
        resources.until_job_ends.callback(joined.close)
        peers = joined
    parts = _make_first_parts(job, environ, resources, peers)
    # Launchers of an elastic job leave the meeting point, and connect each with all others.
    if resources.agent_listener is None:
        return parts
    offers, host_rank = _get_offers(resources, peers)
    call_terms = (resources.agent_listener, resources.secret, meeting_deadline)
    channels = connect_all_launchers(
        offers, host_rank, *call_terms, timings=resources.timings.channel
    )
    peers.close()
    elastic_peers = _make_elastic_peers(
        resources, host_rank, _make_first_view(offers), channels, join_point
    )
    return replace(parts, peers=elastic_peers)


def _meet_for_start(
    job: LaunchRequest,
    environ: Mapping[str, str],
    resources: HostResources,
    restarts: JobRestarts,
    links: Links | None,
) -> NoPeers | FixedPeers:
    """Meet the other hosts of a job that may start again as a whole.

    A host keeps its number. For the first start, hosts wait for each other until the usual
    deadline. Later they wait `--patience` seconds for a host that replaces one that is gone.
    """
    if job.join is None:
        return NoPeers()
    deadline, wished_host_rank = _get_meeting_deadline(job, environ), job.host_rank
    if links is not None:
        deadline = job.patience if links.is_host_missing else max(job.patience, deadline)
        wished_host_rank = links.host if wished_host_rank is None else wished_host_rank
    terms = (job.hosts, wished_host_rank, deadline, _write_join_command(job))
    meeting = Meeting(
        *(parse_meeting_point(job.join), resources.secret, resources.offer, *terms),
        timings=resources.timings,
        restarts=restarts.state,
        links=links,
    )
    fixed_peers = assemble_hosts(meeting)
    assert isinstance(fixed_peers, FixedPeers), (
        "a job that survives losses takes in no host of one that doesn't"
    )

    # If this launcher is asked to end between now and its workers' start, the other hosts hear it.
    def pass_on_stop(kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, JobStopped):
            fixed_peers.tell_stopped(error.signum)

    resources.until_job_ends.callback(fixed_peers.close)
    resources.until_job_ends.push(pass_on_stop)
    return fixed_peers


def _get_meeting_deadline(job: LaunchRequest, environ: Mapping[str, str]) -> float:
    """Number of seconds for which hosts wait for each other at the meeting point."""
    return job.deadline or (
        parse_seconds(environ["PACELINE_DEADLINE"], "PACELINE_DEADLINE")
        if "PACELINE_DEADLINE" in environ
        else 30.0
    )


def _get_offers(
    resources: HostResources, peers: NoPeers | FixedPeers
) -> tuple[tuple[Offer, ...], int]:
    """Offers of all hosts, and the number of this host among them."""
    if isinstance(peers, FixedPeers):
        return peers.offers, peers.host_rank
    return (resources.offer,), 0


def _make_first_parts(
    job: LaunchRequest,
    environ: dict[str, str],
    resources: HostResources,
    peers: NoPeers | FixedPeers,
) -> _LauncherParts:
    """Write the commands of the workers of this host at the start of a job."""
    offers, host_rank = _get_offers(resources, peers)
    shared_variables = make_shared_variables(job, environ, offers, host_rank)
    worker_counts = [other.workers for other in offers]
    ranks = deal_ranks(worker_counts, job.placement)[host_rank]
    if len(offers) > 1 and not job.is_quiet:
        print_message(hints.describe_meeting(worker_counts, ranks))
    return _LauncherParts(
        make_first_commands(job, shared_variables, resources, ranks),
        peers,
        resources.offer.name,
        partial(make_joining_worker, job, shared_variables, resources),
    )


def _write_join_command(job: LaunchRequest) -> str:
    """Write the command that starts this job on another host.

    It has only the options that must be the same there, and the number of workers.
    """
    options = {name: getattr(job, name) for name in _SHARED_OPTIONS}
    options["placement"] = None if job.placement == PLACEMENTS[0] else job.placement
    # With --min-workers each host has its own number of restarts, so it is left out.
    options["restarts"] = job.restarts if job.restarts and job.min_workers is None else None
    options |= {"save_on_term": job.saves_on_term, "resume": job.resumes or None}
    if job.grace_seconds != DEFAULT_TIMINGS.saving.grace:
        options["grace_seconds"] = job.grace_seconds
    return hints.write_command_line(job.script, job.args, options)


def _join_running_job(
    job: LaunchRequest,
    environ: Mapping[str, str],
    admission: Admission,
    resources: HostResources,
    ranks: Sequence[int],
) -> _LauncherParts:
    """Join a running job: the workers of this host start while those of other hosts train.

    This launcher calls its workers by `ranks`, or by new ranks if there are none.
    """
    assert job.join is not None
    if not job.is_quiet:
        print_message(
            f"joined the job at {job.join}, which is under way: the workers of this host come in "
            "once they have started"
        )
    channels = connect_joining_host(
        admission.view, admission.host, resources.secret, timings=resources.timings
    )
    seat = (admission.host, admission.view, channels)
    elastic_peers = _make_elastic_peers(
        resources, *seat, parse_meeting_point(job.join), run=admission.run
    )
    shared_variables = make_shared_variables(job, environ, (resources.offer,), 0)
    make_worker = partial(make_joining_worker, job, shared_variables, resources)
    ranks = ranks or [
        _LATER_RANK_STEP * admission.host + local_rank for local_rank in range(job.workers)
    ]
    worker_commands = [
        resources.until_workers_start.enter_context(make_worker(admission.run, rank))
        for rank in ranks
    ]
    return _LauncherParts(worker_commands, elastic_peers, resources.offer.name, make_worker)


def _make_elastic_peers(
    resources: HostResources,
    host: int,
    view: View,
    channels: dict[int, Channel],
    join_point: Point | None,
    *,
    run: str | None = None,
) -> ElasticPeers:
    """Make this launcher's part in a job that survives losses."""
    assert resources.agent_listener is not None
    meeting = MeetingPoint(
        resources.agent_listener, resources.secret, join_point, timings=resources.timings
    )
    return ElasticPeers(host, view, channels, meeting, run=run, timings=resources.timings)


def _make_first_view(offers: Sequence[Offer]) -> View:
    """Make the first view: all hosts, with the workers that they start."""
    seats = [HostSeat(host, offer.numbers, offer.seat_facts) for host, offer in enumerate(offers)]
    return View(1, tuple(seats), len(seats))

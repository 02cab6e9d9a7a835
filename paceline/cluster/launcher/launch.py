"""`paceline run`, the launcher of one host: checks the request, meets the other hosts, and gives
each worker its place.
"""

from __future__ import annotations

import os
import secrets as random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline.cluster import machine, network, secret
from paceline.cluster.control import calls, commands, progress
from paceline.cluster.control.progress import Page
from paceline.cluster.discover import CallPlace, environment, job_start, seconds, timings
from paceline.cluster.hosts.admission import MeetingPoint, Point
from paceline.cluster.hosts.channel import Channel
from paceline.cluster.hosts.elastic import ElasticPeers, connect_all, enter
from paceline.cluster.hosts.fixed import FixedPeers
from paceline.cluster.hosts.membership import HostSeat, View
from paceline.cluster.hosts.peers import NoPeers, Offer, Peers
from paceline.cluster.hosts.rendezvous import Admission, Meeting, assemble, seek
from paceline.cluster.hosts.restart_messages import JobStopped, Links
from paceline.cluster.launcher import bar, hints, interrupt
from paceline.cluster.launcher.replacement import Replacement
from paceline.cluster.launcher.request import (
    PLACEMENTS,
    QUIET,
    LaunchRequest,
    check,
    deal,
    meeting_point,
)
from paceline.cluster.launcher.restarts import JobRestarts
from paceline.cluster.launcher.supervisor import RunWatcher, Supervisor
from paceline.cluster.launcher.worker import WorkerCommand
from paceline.errors import PacelineError
from paceline.formatting import counted
from paceline.timings import Timings

# a host that comes later calls its workers by its number times this, until they have ranks
_LATER = 1000
# what is the same on all hosts
_ALIKE = (
    *(
        "hosts",
        "join",
        "secret_file",
        "workers",
        "sync",
        "mesh",
        "cut",
        "shares",
        "placement",
        "min_workers",
        "servers",
    ),
    *("straggler", "cluster", "report_to", "backend", "name"),
)
_DESCRIPTORS = 64  # of any process of a job; more for each worker of its host, and of all
USAGE = 2  # the exit code for a wrong request
_NOT_INHERITED = (
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
)


def run(
    job: LaunchRequest, environ: Mapping[str, str] | None = None, watcher: RunWatcher | None = None
) -> int:
    """Start the workers of this host, watch them until all are gone, and give the exit code of the
    job.

    `watcher` shows the run to people, if it is written on this host.

    0: all ended well. 2: what was asked for can't be done (said in one line). 128+n: ended by
    signal n. Else the exit code of the worker that failed first. To be called in the main thread:
    signals are handled here until it returns.
    """
    surroundings = environment() if environ is None else dict(environ)
    # the mark of all starts of the job: a later one clears up after those before
    surroundings["PACELINE_JOB"] = random.token_hex(16)
    try:
        check(job)
        machine.allow_descriptors(_DESCRIPTORS + 8 * job.workers + 4 * job.workers * job.hosts)
        if job.workers == job.hosts == 1:
            _say(hints.misplaced(job.script, job.args))
        if job.restarts and job.min_workers is None:
            return _work_again(
                job,
                surroundings,
                JobRestarts(job.restarts, patience=job.patience if job.hosts > 1 else 0.0),
                watcher,
            )
        code, points, ranks = _work(job, surroundings, watcher)
        while points:  # this host was cut off from those that go on
            _say(f"looks for the other hosts for {job.patience:g} s, to take part again")
            try:
                code, points, ranks = _work(job, surroundings, watcher, points, ranks)
            except PacelineError as error:
                _say(str(error))
                return code
        return code
    except PacelineError as error:
        _say(str(error))
        return USAGE
    except JobStopped as stop:
        _say(
            f"{interrupt.words(stop.number)} before its workers started" if stop.here else str(stop)
        )
        return 128 + stop.number
    except KeyboardInterrupt:
        _say(interrupt.words(signal.SIGINT))
        return 128 + signal.SIGINT


def _say(text: str | None) -> None:
    if text is not None:
        print(f"paceline: {text}", file=sys.stderr, flush=True)


def _tell(job: LaunchRequest, text: str) -> None:
    """Say what goes well, unless it is to be quiet."""
    if not job.quiet:
        _say(text)


def _finished(job: LaunchRequest) -> str:
    return "" if job.quiet else f"{counted(job.workers, 'worker')} ended well"


def _work_again(
    job: LaunchRequest,
    surroundings: dict[str, str],
    restarts: JobRestarts,
    watcher: RunWatcher | None,
) -> int:
    """Take part in a job that starts again as a whole, until its last end; the exit code."""
    code, links = 0, None
    with interrupt.stoppable():
        while True:
            try:
                code, links = _start(job, surroundings, restarts, links, watcher)
            except PacelineError as error:
                if not restarts.start.events:
                    raise
                _say(str(error))
                return code
            except JobStopped as stop:
                if links is not None:
                    links.stop(stop, timings(surroundings).channel.flush)
                raise
            if not restarts.take():
                return code


def _start(
    job: LaunchRequest,
    surroundings: dict[str, str],
    restarts: JobRestarts,
    links: Links | None,
    watcher: RunWatcher | None,
) -> tuple[int, Links | None]:
    """Take part in one start of a job: the exit code, and the connections to the other launchers if
    it starts again.

    `links` are those of the start before.
    """
    with ExitStack() as held, ExitStack() as inherited:
        mine = _bring(job, surroundings, held, inherited)
        peers = _meet_again(job, surroundings, mine, restarts, links)
        restarts.begin(peers)
        surroundings["PACELINE_JOB_START"] = restarts.start.dump()
        tasks = _first_parts(job, surroundings, mine, peers).tasks
        mark, shown, told = (
            surroundings["PACELINE_JOB"],
            bar.screens(surroundings, bare=job.bare),
            calls.judge(job.call),
        )
        supervisor = Supervisor(
            *(mine.offer.name, mark, peers),
            shown=shown,
            told=told,
            restarts=restarts,
            watcher=watcher,
            finished=_finished(job),
            timings=mine.timings,
        )
        code = supervisor.run(tasks, started=inherited.close)
        left = peers.links()
        # asked to end when the workers had ended
        if left is not None and left.channels and not restarts.due:
            left.stop(JobStopped(code - 128, mine.offer.name), mine.timings.channel.linger)
        return code, left


def _work(
    job: LaunchRequest,
    surroundings: dict[str, str],
    watcher: RunWatcher | None,
    points: Sequence[Point] = (),
    ranks: Sequence[int] = (),
) -> tuple[int, Sequence[Point], Sequence[int]]:
    """Take part until the job is over here: the exit code, where the others are called if this host
    was cut off from them, and its ranks.

    With `points`, the job runs there already; its workers are called by these `ranks` again.
    """
    surroundings["PACELINE_JOB_START"] = ""
    with ExitStack() as held, ExitStack() as inherited:
        with interrupt.stoppable():
            mine = _bring(job, surroundings, held, inherited)
            ready = _prepare(job, surroundings, mine, points, ranks)
        assembly = ready.peers if isinstance(ready.peers, ElasticPeers) else None
        mending = (
            None
            if assembly is None
            else partial(_mending, job, assembly, ready.again, mine.timings)
        )
        shown, told = bar.screens(surroundings, bare=job.bare), calls.judge(job.call)
        mark = surroundings["PACELINE_JOB"]
        supervisor = Supervisor(
            *(ready.host, mark, ready.peers, mending),
            shown=shown,
            told=told,
            watcher=watcher,
            finished=_finished(job),
            timings=mine.timings,
        )
        # what workers inherit is theirs alone from then on
        code = supervisor.run(ready.tasks, started=inherited.close)
        back = (
            assembly is not None and assembly.cut_off and not supervisor.asked and job.patience > 0
        )
        return (
            code,
            assembly.points if back and assembly is not None else [],
            [task.rank for task in ready.tasks],
        )


def _mending(
    job: LaunchRequest,
    assembly: ElasticPeers,
    again: Again,
    timings: Timings,
    supervisor: Supervisor,
) -> Replacement:
    def begin(rank: int) -> None:
        assert assembly.run is not None
        with again(assembly.run, rank) as task:
            supervisor.begin(task)

    assert job.min_workers is not None
    return Replacement(
        assembly,
        job.min_workers,
        job.restarts,
        job.patience,
        begin,
        supervisor.say,
        timings=timings.replacement,
    )


def shared_secret(job: LaunchRequest, environ: Mapping[str, str]) -> bytes:
    """Get the job's secret: from the file, from PACELINE_SECRET, or, on one host, a new one."""
    if job.secret_file is not None:
        return secret.read(job.secret_file)
    if environ.get("PACELINE_SECRET"):
        return secret.parse(environ["PACELINE_SECRET"], "PACELINE_SECRET")
    if job.join is None:
        return secret.fresh()
    raise secret.missing(
        f"a job of {job.hosts} hosts needs a secret that they share"
        if job.hosts > 1
        else "--join needs a secret that hosts share"
    )


Again = Callable[
    [str, int], AbstractContextManager[WorkerCommand]
]  # another worker of a run, as a rank: its task, and what it inherits until it has started


@dataclass(frozen=True)
class _LauncherParts:
    """The parts of a launcher before it starts its workers."""

    tasks: list[WorkerCommand]
    peers: Peers
    host: str
    again: Again


@dataclass(frozen=True)
class _HostOffer:
    """The offer of this host: the job's secret, its addresses, where its workers serve their
    stores, and where its launcher is called.
    """

    key: bytes
    offer: Offer
    stores: list[socket.socket]
    agent: socket.socket | None  # where losses are survived
    progress: str | None  # the folder of the workers' pages, where they are observed
    timings: Timings
    held: ExitStack  # closed when the job is over here
    inherited: ExitStack  # closed when the workers have started: it is theirs


def _bring(
    job: LaunchRequest, environ: Mapping[str, str], held: ExitStack, inherited: ExitStack
) -> _HostOffer:
    """Choose addresses and ports."""
    key = shared_secret(job, environ)
    _tell(job, hints.starting(job.script, job.workers, job.join))
    interface = environ.get("PACELINE_INTERFACE")
    address = "127.0.0.1" if interface is None else network.override(interface)
    if job.join is not None and interface is None:
        address = network.route(network.resolve(meeting_point(job.join)[0])[0])
    survives = job.min_workers is not None
    stores = [
        inherited.enter_context(network.listen(address))
        for _ in range(job.workers if survives else 1)
    ]
    numbers = (
        tuple(commands.named(random.randbits(32), store.getsockname()[1]) for store in stores)
        if survives
        else ()
    )
    reserved = held.enter_context(network.reserve(address))
    ports = (stores[0].getsockname()[1], reserved.getsockname()[1])
    agent = held.enter_context(network.listen(address)) if survives else None
    called = 0 if agent is None else agent.getsockname()[1]
    offer = Offer(
        socket.gethostname(),
        job.workers,
        address,
        machine.fingerprint(),
        *ports,
        job.placement,
        numbers,
        called,
    )
    return _HostOffer(
        key,
        offer,
        stores,
        agent,
        environ.get("PACELINE_PROGRESS"),
        timings(environ),
        held,
        inherited,
    )


def _prepare(
    job: LaunchRequest,
    environ: dict[str, str],
    mine: _HostOffer,
    points: Sequence[Point],
    ranks: Sequence[int],
) -> _LauncherParts:
    """Meet the other hosts, agree on addresses and ports, and write down the command of each
    worker.
    """
    if mine.agent is not None:
        environ["PACELINE_MIN_WORKERS"] = str(job.min_workers)
        # or torch would tell at length of connections that end
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    peers: NoPeers | FixedPeers = NoPeers()
    given = _deadline(job, environ)
    join = None if job.join is None else meeting_point(job.join)
    if join is not None:
        deadline = job.patience if points else given
        meeting = Meeting(
            join,
            mine.key,
            mine.offer,
            job.hosts,
            job.host_rank,
            deadline,
            _line(job),
            timings=mine.timings,
        )
        joined = seek(points, meeting) if points else assemble(meeting)
        if isinstance(joined, Admission):
            return _enter(job, environ, joined, mine, ranks)
        mine.held.callback(joined.close)
        peers = joined
    parts = _first_parts(job, environ, mine, peers)
    if mine.agent is None:
        return parts
    table, rank = _seats(mine, peers)
    channels = connect_all(table, rank, mine.agent, mine.key, given, timings=mine.timings.channel)
    peers.close()
    return replace(parts, peers=_elastic(mine, rank, _first_view(table), channels, join))


def _meet_again(
    job: LaunchRequest,
    environ: Mapping[str, str],
    mine: _HostOffer,
    restarts: JobRestarts,
    links: Links | None,
) -> NoPeers | FixedPeers:
    """Meet the other hosts of a job that may start again as a whole.

    A host keeps its number. The first time hosts wait for each other as always, later for another
    one in the place of one that is gone.
    """
    if job.join is None:
        return NoPeers()
    deadline, wish = _deadline(job, environ), job.host_rank
    if links is not None:
        deadline = job.patience if links.lost else max(job.patience, deadline)
        wish = links.host if wish is None else wish
    terms = meeting_point(job.join), mine.key, mine.offer, job.hosts, wish, deadline, _line(job)
    joined = assemble(Meeting(*terms, timings=mine.timings, restarts=restarts.state, links=links))
    assert isinstance(joined, FixedPeers), (
        "a job that survives losses takes in no host of one that doesn't"
    )

    def tell(kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, JobStopped):
            joined.tell_stopped(error.number)

    mine.held.callback(joined.close)
    mine.held.push(tell)
    return joined


def _deadline(job: LaunchRequest, environ: Mapping[str, str]) -> float:
    """Return the seconds for which hosts wait for each other."""
    return job.deadline or (
        seconds(environ["PACELINE_DEADLINE"], "PACELINE_DEADLINE")
        if "PACELINE_DEADLINE" in environ
        else 30.0
    )


def _seats(mine: _HostOffer, peers: NoPeers | FixedPeers) -> tuple[tuple[Offer, ...], int]:
    """Return the offers of all hosts, and the number of this one among them."""
    return (peers.table, peers.host_rank) if isinstance(peers, FixedPeers) else ((mine.offer,), 0)


def _first_parts(
    job: LaunchRequest, environ: dict[str, str], mine: _HostOffer, peers: NoPeers | FixedPeers
) -> _LauncherParts:
    """Write down the commands of the workers of this host at the start of a job."""
    table, rank = _seats(mine, peers)
    shared = _shared_variables(job, environ, table, rank)
    workers = [other.workers for other in table]
    ranks = deal(workers, job.placement)[rank]
    if len(table) > 1:
        _tell(job, hints.joined(workers, ranks))
    return _LauncherParts(
        _first_tasks(job, shared, mine, ranks),
        peers,
        mine.offer.name,
        partial(_another, job, shared, mine),
    )


def _line(job: LaunchRequest) -> str:
    """Write the command that starts this job on another host.

    Options that may differ there aren't shown, but the number of workers.
    """
    given = {name: getattr(job, name) for name in _ALIKE}
    given["placement"] = None if job.placement == PLACEMENTS[0] else job.placement
    # else each host has its own
    given["restarts"] = job.restarts if job.restarts and job.min_workers is None else None
    return hints.line(job.script, job.args, given)


def _first_tasks(
    job: LaunchRequest, shared: dict[str, str], mine: _HostOffer, ranks: Sequence[int]
) -> list[WorkerCommand]:
    """Make the commands of this host's workers at the start of the job."""
    lent = secret.lend(mine.key)
    mine.inherited.callback(os.close, lent)
    tasks = []
    for local, rank in enumerate(ranks):
        environ = shared | {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "PACELINE_SECRET_FD": str(lent),
        }
        descriptors = [lent, *(job.call or ())]
        if rank == 0 or mine.agent is not None:
            environ["PACELINE_STORE_FD"] = str(mine.stores[local].fileno())
            descriptors.append(mine.stores[local].fileno())
        page = _page(mine.progress, rank, shared)
        environ |= _own(job, rank, page)
        worker_number = mine.offer.numbers[local] if mine.agent is not None else None
        tasks.append(
            WorkerCommand(rank, job.command, environ, tuple(descriptors), page, worker_number)
        )
    return tasks


def _enter(
    job: LaunchRequest,
    environ: Mapping[str, str],
    place: Admission,
    mine: _HostOffer,
    ranks: Sequence[int],
) -> _LauncherParts:
    """Take part in a job that runs: all workers of this host come while the others train.

    `ranks`: what the launcher calls them.
    """
    assert job.join is not None
    _tell(
        job,
        (
            f"joined the job at {job.join}, which is under way: the workers of this host come in "
            "once they have started"
        ),
    )
    channels = enter(place.view, place.host, mine.key, timings=mine.timings)
    assembly = _elastic(
        mine, place.host, place.view, channels, meeting_point(job.join), run=place.run
    )
    again = partial(_another, job, _shared_variables(job, environ, (mine.offer,), 0), mine)
    ranks = ranks or [_LATER * place.host + local for local in range(job.workers)]
    tasks = [mine.inherited.enter_context(again(place.run, rank)) for rank in ranks]
    return _LauncherParts(tasks, assembly, mine.offer.name, again)


def _elastic(
    mine: _HostOffer,
    host: int,
    view: View,
    channels: dict[int, Channel],
    join: Point | None,
    *,
    run: str | None = None,
) -> ElasticPeers:
    """Make this launcher's part in a job that survives losses."""
    assert mine.agent is not None
    point = MeetingPoint(mine.agent, mine.key, join, timings=mine.timings)
    return ElasticPeers(host, view, channels, point, run=run, timings=mine.timings)


def _first_view(table: Sequence[Offer]) -> View:
    """Make the first view: all hosts, with the workers that they start."""
    seats = [HostSeat(host, offer.numbers, offer.facts) for host, offer in enumerate(table)]
    return View(1, tuple(seats), len(seats))


@contextmanager
def _another(
    job: LaunchRequest, shared: Mapping[str, str], brought: _HostOffer, run: str, rank: int
) -> Iterator[WorkerCommand]:
    """Make the command of a worker that comes while the others train and finds them by its pipe.

    `run`: the facts of the run, as JSON.
    """
    address = brought.offer.address
    with ExitStack() as inherited:
        store = inherited.enter_context(network.listen(address))
        lent = secret.lend(brought.key)
        inherited.callback(os.close, lent)
        port = store.getsockname()[1]
        mine = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_WORLD_SIZE": "1",
            "GROUP_RANK": "0",
        }
        mine |= {
            "PACELINE_SECRET_FD": str(lent),
            "PACELINE_STORE": f"{address}:{port}",
            "PACELINE_STORE_FD": str(store.fileno()),
        }
        environ = {**shared, **mine, "PACELINE_JOINING": "1", "PACELINE_RUN": run}
        page = _page(brought.progress, rank, shared)
        environ |= _own(job, rank, page)
        worker_number = commands.named(random.randbits(32), port)
        given = (lent, store.fileno(), *(job.call or ()))
        yield WorkerCommand(rank, job.command, environ, given, page, worker_number, joining=True)


def _own(job: LaunchRequest, rank: int, page: Page | None) -> dict[str, str]:
    """Return the variables of the worker that the launcher calls by this rank: its page, and its
    place in a call.
    """
    own = {} if page is None else {"PACELINE_PROGRESS_PAGE": str(page.file)}
    return own if job.call is None else own | {"PACELINE_CALL": CallPlace(*job.call, rank).dump()}


def _page(folder: str | None, rank: int, shared: Mapping[str, str]) -> Page | None:
    """Make the page of a worker, where it is observed."""
    if not folder:
        return None
    page = Page(progress.path(Path(folder).absolute(), rank))
    threads = shared["OMP_NUM_THREADS"].partition(",")[0]  # it may list the levels of nested teams
    page.describe(rank, int(shared["GROUP_RANK"]), int(threads) if threads.isdigit() else 1)
    return page


def _shared_variables(
    job: LaunchRequest, environ: Mapping[str, str], table: tuple[Offer, ...], rank: int
) -> dict[str, str]:
    """Return the environment of every worker of this host, but for the variables that tell them
    apart.
    """
    mine, leader = table[rank], table[0]
    kept = {name: value for name, value in environ.items() if not name.startswith(_NOT_INHERITED)}
    here = sum(other.workers for other in table if other.machine == mine.machine)
    start = job_start(environ)
    first = start is None or not start.events
    # one launcher of each machine says it
    if first and all(other.machine != mine.machine for other in table[:rank]):
        _say(hints.crowded(here, machine.cores(), mine.name))
    kept |= {
        "WORLD_SIZE": str(sum(other.workers for other in table)),
        "LOCAL_WORLD_SIZE": str(mine.workers),
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(len(table)),
        "MASTER_ADDR": leader.address,
        "MASTER_PORT": str(leader.master_port),
        "PACELINE_STORE": f"{leader.address}:{leader.store_port}",
    }
    if all(other.machine == mine.machine for other in table):
        kept["PACELINE_ONE_MACHINE"] = "1"
    if bar.is_there(environ, bare=job.bare) and job.progress != QUIET:
        kept["PACELINE_BAR"] = "1"
    if job.threads is not None:
        kept["OMP_NUM_THREADS"] = str(job.threads)
    kept.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores() // here)))
    kept.setdefault("PYTHONUNBUFFERED", "1")  # pipes would hold lines back
    kept.setdefault("PYTHONBREAKPOINT", f"{hints.__name__}.{hints.no_terminal.__name__}")
    carrier = network.carrier(mine.address)
    if carrier is not None:
        # For scripts that use torch.distributed by themselves: Gloo and NCCL would guess from the
        # host's name.
        kept.setdefault("GLOO_SOCKET_IFNAME", carrier)
        kept.setdefault("NCCL_SOCKET_IFNAME", carrier)
    given = {
        "SYNC": job.sync,
        "MESH": job.mesh,
        "CUT": job.cut,
        "SHARES": job.shares,
        "NAME": job.name,
        "SERVERS": job.servers,
    }
    given |= {
        "STRAGGLER": job.straggler,
        "REPORT_TO": job.report_to,
        "STATUS_EVERY": None if job.progress is None else str(job.progress),
    }
    given["CLUSTER"] = None if job.cluster is None else str(Path(job.cluster).absolute())
    return kept | {
        f"PACELINE_{name}": str(value) for name, value in given.items() if value is not None
    }

"""`paceline run`: the launcher of one host. Checks what was asked for, meets the other hosts, and hands each worker its place."""

from __future__ import annotations

import itertools
import os
import secrets as random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.cluster import machine, network, orders, progress, secret
from paceline.cluster.assembly import Assembly, connect_all
from paceline.cluster.crew import Crew
from paceline.cluster.discover import environment, seconds
from paceline.cluster.meeting import Meeting, Offer, assemble
from paceline.cluster.membership import Seat, View
from paceline.cluster.mending import Mending
from paceline.cluster.peers import Nobody, Peers
from paceline.cluster.progress import Page
from paceline.cluster.worker import Task
from paceline.errors import PacelineError, PlaceError, UsageError
from paceline.wording import choices

PLACEMENTS = ("block", "round-robin")
USAGE = 2  # the exit code for what was asked wrongly
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
)


@dataclass(frozen=True)
class Job:
    """What `paceline run` was asked for. `workers` are those of this host; `deadline` is how long hosts wait for each other (seconds).

    `join` is HOST:PORT, the same on all hosts; `threads` is the number of threads of each worker (None: cores / workers, or
    OMP_NUM_THREADS where it is set); `sync` and `name` reach `start()` as PACELINE_SYNC and PACELINE_NAME. `placement` says how ranks are
    dealt to hosts (see `deal`). With `min_workers` the job goes on when workers die, as long as there are so many; up to `restarts` of
    them are started again on this host.
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


def run(job: Job, environ: Mapping[str, str] | None = None) -> int:
    """Start the workers of this host, watch them until all are gone, and give the exit code of the job.

    0: all ended well. 2: what was asked for can't be done (said in one line). 128+n: ended by signal n. Else the exit code of the
    worker that failed first. To be called in the main thread: signals are handled here until it returns.
    """
    surroundings = environment() if environ is None else dict(environ)
    try:
        with ExitStack() as held, ExitStack() as inherited:
            tasks, peers, host, again = _prepare(job, surroundings, held, inherited)
            mending = None
            if isinstance(peers, Assembly):
                mending = partial(_mending, job, peers, again)
            crew = Crew(host, surroundings["PACELINE_JOB"], peers, mending)
            return crew.run(tasks, started=inherited.close)  # what workers inherit is theirs alone from then on
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _mending(job: Job, assembly: Assembly, again: Again, crew: Crew) -> Mending:
    def begin() -> None:
        with again(crew.opened()) as task:
            crew.begin(task)

    assert job.min_workers is not None
    return Mending(assembly, job.min_workers, job.restarts, begin, crew.say)


def check(job: Job) -> None:
    """Raise `UsageError` for what makes no sense, before anything is started."""
    script = Path(job.script)
    if not script.exists():
        raise UsageError(f"the script {job.script} doesn't exist (looked in {Path.cwd()})")
    if script.is_dir() and not (script / "__main__.py").exists():
        raise UsageError(f"the script {job.script} is a folder without a __main__.py")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {job.script} can't be read: check its mode")
    for option, value in (("--workers", job.workers), ("--hosts", job.hosts), ("--threads", job.threads)):
        if value is not None and value < 1:
            raise UsageError(f"{option} is {value}, and has to be at least 1")
    if job.placement not in PLACEMENTS:
        raise UsageError(f"--placement is {job.placement}; {choices(job.placement, PLACEMENTS)}")
    if job.host_rank is not None and not 0 <= job.host_rank < job.hosts:
        raise UsageError(f"--host-rank is {job.host_rank}, and has to be 0 to {job.hosts - 1} (--hosts {job.hosts})")
    if job.hosts > 1 and job.join is None:
        raise UsageError(f"--hosts {job.hosts} needs --join HOST:PORT: an address of one of them that all reach, and a free port there")
    if job.min_workers is not None and not 1 <= job.min_workers <= job.workers * job.hosts:
        raise UsageError(f"--min-workers is {job.min_workers}, and has to be 1 to {job.workers * job.hosts}")
    if job.restarts < 0 or (job.restarts and job.min_workers is None):
        raise UsageError(f"--restarts {job.restarts} needs --min-workers N, and has to be 0 or more")
    if job.hosts == 1 and job.join is not None:
        raise UsageError(f"--join {job.join} needs --hosts N: how many hosts are to meet there")


def deal(workers: Sequence[int], placement: str) -> list[list[int]]:
    """The ranks of each host, from the number of its workers: in blocks, or one to each host in turn while it has workers left.

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
    """HOST and PORT of `--join`; an IPv6 address stands in brackets."""
    host, colon, port = join.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--join {join} isn't HOST:PORT, such as 10.0.0.1:29400")
    return host, int(port)


def shared_secret(job: Job, environ: Mapping[str, str]) -> bytes:
    """The job's secret: from the file, from PACELINE_SECRET, or, on one host, a new one."""
    if job.secret_file is not None:
        return secret.read(job.secret_file)
    if environ.get("PACELINE_SECRET"):
        return secret.parse(environ["PACELINE_SECRET"], "PACELINE_SECRET")
    if job.hosts == 1:
        return secret.fresh()
    raise secret.missing(f"a job of {job.hosts} hosts needs a secret that they share")


Again = Callable[[str], AbstractContextManager[Task]]  # another worker of a run: its task, and what it inherits until it has started


def _prepare(job: Job, environ: dict[str, str], held: ExitStack, inherited: ExitStack) -> tuple[list[Task], Peers, str, Again]:
    """Meet the other hosts, agree on addresses and ports, and write down what each worker is to be told."""
    check(job)
    key = shared_secret(job, environ)
    host = socket.gethostname()
    interface = environ.get("PACELINE_INTERFACE")
    join = None if job.join is None else meeting_point(job.join)
    address = "127.0.0.1" if interface is None else network.override(interface)
    if join is not None and interface is None:
        address = network.route(network.resolve(join[0])[0])
    survives = job.min_workers is not None
    stores = [inherited.enter_context(network.listen(address)) for _ in range(job.workers if survives else 1)]
    numbers = tuple(orders.named(random.randbits(32), store.getsockname()[1]) for store in stores) if survives else ()
    reserved = held.enter_context(_reserve(address))
    ports = (stores[0].getsockname()[1], reserved.getsockname()[1])
    agent = held.enter_context(network.listen(address)) if survives else None
    called = 0 if agent is None else agent.getsockname()[1]
    offer = Offer(host, job.workers, address, machine.fingerprint(), *ports, job.placement, numbers, called)
    peers: Peers = Nobody()
    table: tuple[Offer, ...] = (offer,)
    rank = 0
    given = 30.0
    if join is not None:
        given = job.deadline or (seconds(environ["PACELINE_DEADLINE"], "PACELINE_DEADLINE") if "PACELINE_DEADLINE" in environ else 30.0)
        council = assemble(Meeting(join, key, offer, job.hosts, job.host_rank, given))
        held.callback(council.close)
        peers, table, rank = council, council.table, council.host_rank
    if agent is not None:
        channels = connect_all(table, rank, agent, key, given)
        peers.close()
        peers = Assembly(rank, _first_view(table), channels)
    lent = secret.lend(key)
    inherited.callback(os.close, lent)
    environ["PACELINE_JOB"] = random.token_hex(16)
    if survives:
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or torch would tell at length of connections that end
    shared = _shared_variables(job, environ, table, rank) | {"PACELINE_SECRET_FD": str(lent)}
    tasks = []
    for local, number in enumerate(deal([other.workers for other in table], job.placement)[rank]):
        mine = {"RANK": str(number), "LOCAL_RANK": str(local)}
        descriptors = [lent]
        if number == 0 or survives:
            mine["PACELINE_STORE_FD"] = str(stores[local].fileno())
            descriptors.append(stores[local].fileno())
        page = _page(environ.get("PACELINE_PROGRESS"), number, shared)
        mine |= {} if page is None else {"PACELINE_PROGRESS_PAGE": str(page.file)}
        command = [sys.executable, job.script, *job.args]
        tasks.append(Task(number, command, shared | mine, tuple(descriptors), page, numbers[local] if survives else None))
    labels = itertools.count(sum(other.workers for other in table) + rank, len(table))
    return tasks, peers, host, partial(_another, job, shared, key, address=address, labels=labels)


def _first_view(table: Sequence[Offer]) -> View:
    """All hosts, with the workers that they start."""
    seats = [Seat(host, offer.numbers, {"name": offer.name, "address": offer.address}) for host, offer in enumerate(table)]
    return View(1, tuple(seats), len(seats))


@contextmanager
def _another(job: Job, shared: Mapping[str, str], key: bytes, run: str, *, address: str, labels: Iterator[int]) -> Iterator[Task]:
    """A worker that comes while the others train; it finds them by its orders. `run`: what they have said of it, as JSON."""
    with ExitStack() as inherited:
        store = inherited.enter_context(network.listen(address))
        lent = secret.lend(key)
        inherited.callback(os.close, lent)
        port = store.getsockname()[1]
        mine = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
        mine |= {"PACELINE_SECRET_FD": str(lent), "PACELINE_STORE": f"{address}:{port}", "PACELINE_STORE_FD": str(store.fileno())}
        environ = {**shared, **mine, "PACELINE_JOINING": "1", "PACELINE_RUN": run}
        number = orders.named(random.randbits(32), port)
        yield Task(next(labels), [sys.executable, job.script, *job.args], environ, (lent, store.fileno()), None, number, joining=True)


def _page(folder: str | None, rank: int, shared: Mapping[str, str]) -> Page | None:
    """The page of a worker, where somebody wants to watch it."""
    if not folder:
        return None
    page = Page(progress.path(Path(folder).absolute(), rank))
    threads = shared["OMP_NUM_THREADS"].partition(",")[0]  # it may list the levels of nested teams
    page.describe(rank, int(shared["GROUP_RANK"]), int(threads) if threads.isdigit() else 1)
    return page


def _shared_variables(job: Job, environ: Mapping[str, str], table: tuple[Offer, ...], rank: int) -> dict[str, str]:
    """The environment of every worker of this host, all but what tells them apart."""
    mine, leader = table[rank], table[0]
    kept = {name: value for name, value in environ.items() if not name.startswith(_NOT_INHERITED)}
    here = sum(other.workers for other in table if other.machine == mine.machine)
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
    if job.threads is not None:
        kept["OMP_NUM_THREADS"] = str(job.threads)
    kept.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores() // here)))
    kept.setdefault("PYTHONUNBUFFERED", "1")  # pipes would hold lines back
    carrier = network.carrier(mine.address)
    if carrier is not None:
        # For scripts that use torch.distributed by themselves: Gloo and NCCL would guess from the host's name.
        kept.setdefault("GLOO_SOCKET_IFNAME", carrier)
        kept.setdefault("NCCL_SOCKET_IFNAME", carrier)
    return kept | {name: value for name, value in (("PACELINE_SYNC", job.sync), ("PACELINE_NAME", job.name)) if value is not None}


def _reserve(address: str) -> socket.socket:
    """A port for MASTER_PORT that stays ours: bound but not listening, so that a worker can still bind it (SO_REUSEADDR)."""
    reserved = socket.socket(network.family(address), socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
    except OSError as error:
        reserved.close()
        raise PlaceError(f"no port can be had on {address} ({error.strerror})") from error
    return reserved

"""Runs on threads: the whole session with a ThreadGroup beneath, in milliseconds; and the same
on one worker, to compare with.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.cluster import store
from paceline.cluster.discover import JobStart, Place
from paceline.cluster.mesh import lay_out_mesh, parse_mesh
from paceline.cluster.topology import HostRanks, Topology
from paceline.comm.agreement import Agreement
from paceline.comm.group_protocol import Group
from paceline.comm.rpc import RpcServer, derive_rpc_keys
from paceline.comm.solo import SoloGroup
from paceline.formatting import format_as_call
from paceline.record.folder import RunFolder
from paceline.record.history import RunHistory
from paceline.record.log import MetricsLog, OnNan
from paceline.record.trackers.feed import TrackerFeed
from paceline.record.trackers.tracker import Tracker
from paceline.record.writer import MetricsWriter
from paceline.replicas.compare import Comparison
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.process.main import Server
from paceline.servers.worker.quorum import QuorumSync
from paceline.session.assemble import JoinedWorker, assemble_run
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Strategy
from paceline.sync.context import StepState, SyncContext
from paceline.sync.route_choice import RouteFacts
from paceline.timings import DEFAULT_TIMINGS
from paceline.trace import Trace
from paceline.unequal.shares.quota import ProcessorQuota
from paceline.workers.axes import RunAxes
from paceline.workers.groups import CurrentView, WorkerContext
from tests.harness.thread_groups import spawn

T = TypeVar("T")


def make(
    group: Group,
    strategy: Strategy,
    folder: str,
    say: Callable[[str], None],
    on_nan: OnNan = "warn",
    *,
    hosts: tuple[int, ...] = (),
    comparison: Comparison | None = None,
    mesh: str | None = None,
    start: JobStart | None = None,
    quota: ProcessorQuota | None = None,
    links: RouteFacts | None = None,
    trackers: Iterable[Tracker] = (),
    clock: Callable[[], float] = time.monotonic,
    place_fields: Mapping[str, Any] | None = None,
) -> Run:
    """A run over `group`, as `start` would make it; all on one host, or on the `hosts` of the
    ranks.
    """
    ranks = tuple(range(group.size))
    place = Place(
        rank=group.rank,
        size=group.size,
        local_rank=group.rank,
        local_size=group.size,
        hostname="here",
        job_start=start,
        **(place_fields or {}),
    )
    where = hosts or (0,) * group.size
    dealt = [tuple(rank for rank in ranks if where[rank] == host) for host in sorted(set(where))]
    cluster = Topology(
        tuple(
            HostRanks("here" if len(dealt) == 1 else f"host{n}", mine, "127.0.0.1")
            for n, mine in enumerate(dealt)
        )
    )
    around = WorkerContext(place, store.make_local_store(), cluster, torch.device("cpu"), 20.0, say)
    step_state = StepState(scale=1.0 / group.size)
    agreement = Agreement(group, step=lambda: step_state.step, hosts=cluster.host_names())
    servers = serving(agreement, len(dealt))
    started = {"servers": servers, "table_servers": servers}
    context = SyncContext(
        group,
        agreement,
        step_state,
        Trace(),
        cluster.host_by_rank(),
        say,
        None,
        **started,
        begin_quorum=QuorumSync,
        route_facts=links,
    )

    def open_records(history: RunHistory, adds: bool) -> tuple[RunFolder, MetricsLog]:
        again = start is not None and start.folder is not None
        kept = (
            RunFolder.reopen_folder(Path(folder) / "test", "test")
            if again
            else RunFolder.create_together(agreement, Path(folder), "test", say=say)
        )
        feed = TrackerFeed(
            list(trackers),
            kept,
            history,
            say,
            settings={"sync": format_as_call(strategy)},
            again=again,
            timings=DEFAULT_TIMINGS.trackers,
        )
        agreement.tell_everyone(
            "where the run is reported to", lambda: feed.begin_trackers() or b""
        )
        book = MetricsWriter(kept, adds=adds, feed=feed) if group.rank == 0 else None
        return kept, MetricsLog(
            book, on_nan=on_nan, say=history.announce_event, accounts=context.accounts, clock=clock
        )

    view = CurrentView(around)
    axes = (
        RunAxes.from_replicas(context, lambda: view.cluster)
        if mesh is None
        else RunAxes.from_mesh(lay_out_mesh(parse_mesh(mesh), cluster), context, cluster)
    )
    joined = JoinedWorker(view, axes, quota=quota)
    return assemble_run(
        joined,
        strategy,
        seed=1,
        began=0.0,
        comparison=comparison or Comparison(),
        open_records=open_records,
    )


def serving(agreement: Agreement, hosts: int) -> Callable[[int | None, int], ServerEndpoints]:
    """What starts servers, as threads."""
    found, over, threads = derive_rpc_keys(b"0123456789abcdef", "tests"), threading.Event(), []

    def begin(count: int) -> bytes:
        addresses = []
        for _ in range(count):
            receiver = RpcServer(found, hosts=["127.0.0.1"])
            threads.append(
                threading.Thread(
                    target=lambda r=receiver: (Server(r, over.is_set).run(), r.close()), daemon=True
                )
            )
            threads[-1].start()
            addresses += receiver.addresses
        return json.dumps(addresses).encode()

    def servers(asked: int | None, copies: int) -> ServerEndpoints:
        count = asked or hosts
        addresses = tuple(
            json.loads(agreement.tell_everyone("servers begin", lambda: begin(count)))
        )
        return ServerEndpoints(
            addresses,
            tuple(f"server {number} on here" for number in range(count)),
            found,
            lambda told: None,
            end,
        )

    def end() -> None:
        over.set()
        for thread in threads:
            thread.join()

    return servers


def workers(
    size: int,
    body: Callable[[Run], T],
    *,
    strategy: Strategy | None = None,
    said: list[str] | None = None,
    folder: Path | None = None,
    on_nan: OnNan = "warn",
    delay: Callable[[int], None] | None = None,
    deadline: float = 30.0,
    hosts: tuple[int, ...] = (),
    comparison: Comparison | None = None,
    mesh: str | None = None,
    start: JobStart | None = None,
    quotas: Callable[[int], ProcessorQuota | None] = lambda rank: None,
    links: RouteFacts | None = None,
    trackers: Iterable[Tracker] = (),
    place: Callable[[int], Mapping[str, Any]] = lambda rank: {},
) -> list[T]:
    """What `body(run)` gives on each of `size` workers; runs are kept in `folder` if there is one,
    and `start` again.

    The first reports to `trackers`. `place` gives further fields of the place of a rank.
    """
    with tempfile.TemporaryDirectory() as temporary:

        def work(group: Group) -> T:
            say = said.append if said is not None and group.rank == 0 else _nothing
            among, where = group if size > 1 else SoloGroup(), str(folder or temporary)
            options: dict[str, Any] = {
                "hosts": hosts,
                "comparison": comparison,
                "mesh": mesh,
                "start": start,
                "quota": quotas(group.rank),
            }
            options["place_fields"] = place(group.rank)
            options["links"] = links
            options["trackers"] = trackers if group.rank == 0 else ()
            if options["quota"] is not None:
                options["clock"] = itertools.count(0.0, 10.0).__next__  # all meet after each step
            with make(among, strategy or AllReduce(), where, say, on_nan, **options) as run:
                return body(run)

        return spawn(size, work, delay=delay, deadline=deadline)


def alone(body: Callable[[Run], T]) -> T:
    """What `body(run)` gives on one worker."""
    return workers(1, body)[0]


def _nothing(text: str) -> None:
    """Say it to nobody."""


class Numbered(Dataset[Any]):
    """`count` samples (features, class or target) that depend on their number alone."""

    def __init__(
        self,
        count: int = 40,
        width: int = 6,
        *,
        dtype: torch.dtype = torch.float64,
        classes: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, width, generator=generator, dtype=torch.float64).to(dtype)
        targets = torch.randn(count, 2, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(0, classes, (count,), generator=generator) if classes else targets

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def batches(count: int = 40, batch: int = 8, **options: Any) -> DataLoader[Any]:
    """A shuffled loader over numbered samples; every call draws the same order."""
    return DataLoader(
        Numbered(count, **options),
        batch_size=batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    )


def parameters(*models: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat(
        [p.detach().reshape(-1).to(torch.float64) for model in models for p in model.parameters()]
    )


def distance(a: Tensor, b: Tensor) -> float:
    """How invariant 1 measures two sets of weights: |a - b| / |b|."""
    return float((a - b).norm() / b.norm())


class cut:
    """Shares that are these numbers of a batch of their sum, and in proportion for others (the
    last takes the rest).
    """

    def __init__(self, *ratios: int) -> None:
        self._ratios = ratios

    def __repr__(self) -> str:
        return f"cut{self._ratios}"  # names of tests are made of it: the same in every process

    def __call__(self, batch: int) -> tuple[int, ...]:
        whole = sum(self._ratios)
        edges = [batch * sum(self._ratios[:i]) // whole for i in range(len(self._ratios) + 1)]
        return tuple(b - a for a, b in pairwise(edges))

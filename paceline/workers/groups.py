"""Builds the group of all workers: shared memory inside a host, TCP between hosts, NCCL on GPUs."""

from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.cluster.control.progress import Page
from paceline.cluster.discover import Place
from paceline.cluster.store import Store, address
from paceline.cluster.topology import Topology
from paceline.comm.cancellation import CancelScope
from paceline.comm.group_protocol import Group
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.shm.segment import ORDERED_STORES
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.solo import SoloGroup
from paceline.errors import ResourceError, UsageError
from paceline.sync.context import SyncContext
from paceline.sync.route_choice import RouteFacts
from paceline.trace import Trace
from paceline.workers.replicate import Replicate


@dataclass
class WorkerContext:
    """Place of this worker, and its means to meet the others."""

    place: Place
    store: Store
    cluster: Topology
    device: torch.device
    deadline: float
    say: Callable[[str], None]
    trace: Trace = field(default_factory=Trace)
    natives: int = 0
    replicate: Replicate = "auto"  # how often buddies get copies of what only one worker has
    page: Page | None = None
    # cancels waits of all groups made with this context
    cancel_scope: CancelScope = field(default_factory=CancelScope)
    links: RouteFacts | None = None  # what a measured cluster says of the links between hosts
    # the ranks of these workers in a larger job, by which errors name them (None: they are all)
    names: tuple[int, ...] | None = None

    @property
    def local(self) -> int:
        """Number of this worker among those of its machine."""
        return self.cluster.of(self.place.rank).ranks.index(self.place.rank)

    @property
    def home(self) -> str:
        """Unique name of this worker's launcher; what the launcher has started ends with it."""
        return f"{self.place.hostname}/{os.getppid()}"

    def native(self) -> Group:
        """Make another group of all workers, on torch.distributed. Collective."""
        self.natives += 1
        backend = "nccl" if self.device.type == "cuda" and _own_devices(self) else "gloo"
        return network(self, f"native{self.natives}", backend=backend)


class CurrentView:
    """The place of this worker among the workers that take part now.

    `waits`: it has just joined, and isn't let in yet.
    """

    def __init__(self, worker: WorkerContext) -> None:
        self.worker, self.waits = worker, worker.place.joining

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self.worker.place.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.worker.place.size

    @property
    def cluster(self) -> Topology:
        """The hosts of all workers."""
        return self.worker.cluster

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all workers."""
        return self.rank == 0 and not self.waits

    def move(self, worker: WorkerContext) -> None:
        """Take the place that this worker has in a new view."""
        self.worker = worker

    def enter(self) -> None:
        """Take part from now on."""
        self.waits = False


def first_members(worker_context: WorkerContext) -> tuple[int, ...]:
    """Return the numbers of the workers that this one meets at the start, by rank. Collective."""
    here, place = worker_context.store.sub("workers"), worker_context.place
    here.put(str(place.rank), place.worker)
    return tuple(here.take(str(rank)) for rank in range(place.size))


def choose_device(asked: str | None, local: int) -> torch.device:
    """Choose the device of a worker: the requested one, else a GPU, else the processor.

    GPUs are shared if there are fewer than workers.
    """
    if asked is not None:
        if re.fullmatch(r"cpu|cuda(:\d+)?", str(asked)) is None:
            raise UsageError(
                f"device={asked!r} is not supported; possible are 'cpu' and 'cuda', 'cuda:0', ..."
            )
        device = torch.device(asked)
        count = torch.cuda.device_count()
        if device.type == "cuda" and not count:
            raise UsageError(
                f"device={asked!r} was asked for, but this machine has no CUDA device; "
                "leave device out, or say device='cpu'"
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local % count)
        if device.type == "cuda" and device.index >= count:
            raise UsageError(
                f"device={asked!r} was asked for, but this machine has {count} of them, from "
                "cuda:0 on; leave device out"
            )
    elif torch.cuda.is_available():
        device = torch.device("cuda", local % torch.cuda.device_count())
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def everyone(worker_context: WorkerContext) -> Group:
    """Make the group of all workers. Collective."""
    if worker_context.place.size == 1:
        return SoloGroup()
    if worker_context.device.type == "cuda":
        return network(
            worker_context, "flat", backend="nccl" if _own_devices(worker_context) else "gloo"
        )
    hosts = worker_context.cluster.hosts
    if platform.machine() not in ORDERED_STORES:
        worker_context.say(
            f"on {platform.machine()} workers of one host exchange through the network stack, "
            "slower than shared memory by far"
        )
        return network(worker_context, "flat")
    if len(hosts) == 1:
        try:
            store, place = worker_context.store.sub("host0"), worker_context.place
            return SharedGroup.from_store(
                store,
                place.rank,
                place.size,
                deadline=worker_context.deadline,
                ranks=worker_context.names,
                cancel_scope=worker_context.cancel_scope,
            )
        except ResourceError as error:
            worker_context.say(
                "workers exchange through the network stack, several times slower than shared "
                f"memory: {error}"
            )
            return network(worker_context, "flat")
    return _over_hosts(worker_context)


class Subgroups:
    """Groups that only some runs need beside that of all workers.

    Each is made on first use, and again when the workers change.
    """

    def __init__(self, context: SyncContext, hosts: Callable[[], Topology]) -> None:
        self.norms: Group | None = None
        self.host: Group | None = None
        self._context, self._hosts = context, hosts
        context.local = self.within_host

    def everyone(self) -> Group:
        """Second group of all workers, for exchanges of layers while buckets are under way.

        The first use is collective.
        """
        if self.norms is None:
            self.norms = self._context.group.make_subgroup(range(self._context.group.size))
            assert self.norms is not None
            self._context.extra_groups.append(self.norms)
        return self.norms

    def within_host(self) -> Group:
        """Return the group of the workers of this host. Collective at first."""
        if self.host is None:
            self.host = within_host(self._context.group, self._hosts())
            self._context.extra_groups.append(self.host)
        return self.host

    def forget(self) -> None:
        """Drop the groups, as the workers have changed."""
        self.norms = self.host = None


def within_host(group: Group, cluster: Topology) -> Group:
    """Make a group of the workers of this host alone, through shared memory where `group` has that.

    Collective.
    """
    if isinstance(group, HostsGroup):
        found = group.inner.make_subgroup(range(group.inner.size))
    else:
        subs = [group.make_subgroup(host.ranks) for host in cluster.hosts]
        found = next(sub for sub in subs if sub is not None)
    assert found is not None
    return found


def network(worker_context: WorkerContext, name: str, *, backend: str = "gloo") -> TorchGroup:
    """Make a group of all workers over torch.distributed, under a `name` that no other group has.

    Collective.
    """
    group = TorchGroup.from_store(
        worker_context.store.sub(name),
        worker_context.place.rank,
        worker_context.place.size,
        backend=backend,
        address=address(worker_context.place),
        deadline=worker_context.deadline,
        hosts=worker_context.cluster.where(),
        ranks=worker_context.names,
        cancel_scope=worker_context.cancel_scope,
    )
    group.trace = worker_context.trace
    return group


def _own_devices(worker_context: WorkerContext) -> bool:
    """Whether every worker has a GPU of its own: NCCL refuses two on one."""
    me = worker_context.place.rank
    worker_context.store.put(
        f"device/{me}", [worker_context.cluster.where()[me], worker_context.device.index]
    )
    found = [
        tuple(worker_context.store.take(f"device/{rank}", worker_context.deadline))
        for rank in range(worker_context.place.size)
    ]
    if len(set(found)) == len(found):
        return True
    worker_context.say(
        "several workers share a GPU: gradients travel by Gloo through the processor's memory, "
        "which is slow"
    )
    return False


def _over_hosts(worker_context: WorkerContext) -> Group:
    """Make a group over several hosts.

    It has a group inside each host, one of the hosts' first workers, and one of all.
    """
    place, cluster = worker_context.place, worker_context.cluster
    flat = network(worker_context, "flat")
    if all(len(host.ranks) == 1 for host in cluster.hosts):
        return flat
    mine = cluster.of(place.rank)
    inner: Group = SoloGroup(rank=place.rank)
    error = ""
    if len(mine.ranks) > 1:
        name = f"host{cluster.where()[place.rank]}"
        try:
            inner = SharedGroup.from_store(
                worker_context.store.sub(name),
                mine.ranks.index(place.rank),
                len(mine.ranks),
                deadline=worker_context.deadline,
                ranks=[flat.global_rank(rank) for rank in mine.ranks],
                cancel_scope=worker_context.cancel_scope,
            )
        except ResourceError as caught:
            error = str(caught)
    errors = [
        text for text in flat.gather_objects(error, name="shared memory of the hosts") if text
    ]
    if errors:
        inner.close()
        worker_context.say(
            "workers of one host exchange through the network stack, several times slower than "
            f"shared memory: {errors[0]}"
        )
        return flat
    leaders = [host.ranks[0] for host in cluster.hosts]
    outer = flat.make_subgroup(leaders)
    return HostsGroup(
        inner,
        outer,
        flat,
        cluster.where(),
        deadline=worker_context.deadline,
        trace=worker_context.trace,
    )


def reap(groups: list[Any]) -> None:
    """Close groups that have broken in a thread, so that no caller waits for it."""

    def close() -> None:
        for group in groups:
            group.close()

    threading.Thread(target=close, name="paceline reaper", daemon=True).start()

"""Builds the group of all workers: shared memory inside a host, TCP between hosts, NCCL on GPUs.

one worker                       SoloGroup
GPUs                             TorchGroup: NCCL if each worker has one, else Gloo
one host                         SharedGroup, or TorchGroup (Gloo) if memory can't be shared
hosts of one worker each         TorchGroup (Gloo)
hosts of several workers         HostsGroup: SharedGroup in each host, TorchGroup between them
"""

from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.cluster.control.progress import ProgressPage
from paceline.cluster.discover import Place
from paceline.cluster.store import Store, find_own_address
from paceline.cluster.topology import Topology
from paceline.comm.cancellation import CancelScope
from paceline.comm.group_protocol import Group
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.solo import SoloGroup
from paceline.errors import ResourceError, UsageError
from paceline.native.library import has_library
from paceline.sync.context import SyncContext
from paceline.sync.route_choice import RouteFacts
from paceline.trace import Trace
from paceline.workers.copy_interval import Replicate


@dataclass
class WorkerContext:
    """Place of this worker, and everything that it needs to build groups with others."""

    place: Place
    store: Store
    cluster: Topology
    device: torch.device
    deadline: float
    say: Callable[[str], None]
    trace: Trace = field(default_factory=Trace)
    natives: int = 0  # number of groups that `make_native_group` has made
    replicate: Replicate = "auto"  # how often buddies get copies of state that only one worker has
    page: ProgressPage | None = None
    # cancels waits of all groups made with this context
    cancel_scope: CancelScope = field(default_factory=CancelScope)
    links: RouteFacts | None = None  # facts of a measured cluster about links between hosts
    # ranks of these workers in a larger job, for error messages (None: they are all workers)
    names: tuple[int, ...] | None = None

    @property
    def local_index(self) -> int:
        """Index of this worker among the workers of its host."""
        return self.cluster.host_of(self.place.rank).ranks.index(self.place.rank)

    @property
    def launcher_name(self) -> str:
        """Unique name of this worker's launcher. Workers of one launcher end together."""
        return f"{self.place.hostname}/{os.getppid()}"

    def make_native_group(self) -> Group:
        """Make another group of all workers, on torch.distributed. Collective."""
        self.natives += 1
        backend = "nccl" if self.device.type == "cuda" and _has_own_devices(self) else "gloo"
        return make_network_group(self, f"native{self.natives}", backend=backend)


class CurrentView:
    """The place of this worker among the workers that take part now.

    `waits_for_admission`: whether it has just joined, and hasn't been admitted yet.
    """

    def __init__(self, worker: WorkerContext) -> None:
        self.worker, self.waits_for_admission = worker, worker.place.joining

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.worker.place.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.worker.place.size

    @property
    def cluster(self) -> Topology:
        """Hosts of all workers."""
        return self.worker.cluster

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker."""
        return self.rank == 0 and not self.waits_for_admission

    def move_to_view(self, worker: WorkerContext) -> None:
        """Take this worker's place in a new view."""
        self.worker = worker

    def take_part(self) -> None:
        """Take part from now on."""
        self.waits_for_admission = False


def gather_worker_numbers(worker_context: WorkerContext) -> tuple[int, ...]:
    """Gather the numbers of the workers that meet at the start, by rank. Collective."""
    meeting, place = worker_context.store.open_substore("workers"), worker_context.place
    meeting.put(str(place.rank), place.worker)
    return tuple(meeting.take(str(rank)) for rank in range(place.size))


def choose_device(asked: str | None, local: int) -> torch.device:
    """Choose the device of a worker: the requested one, or a GPU if there is one, or the CPU.

    If there are fewer GPUs than workers on the host, workers share them.

    Args:
        asked: Device that the user asks for. None: none.
        local: Index of the worker on its host.
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
                "leave device out, or give device='cpu'"
            )
        # "cuda" alone: workers of a host take its GPUs in turn.
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local % count)
        if device.type == "cuda" and device.index >= count:
            raise UsageError(
                f"device={asked!r} was asked for, but this machine has {count} CUDA devices, "
                f"cuda:0 to cuda:{count - 1}; give one of these, or leave device out"
            )
    elif torch.cuda.is_available():
        device = torch.device("cuda", local % torch.cuda.device_count())
    else:
        device = torch.device("cpu")
    # NCCL, and code of users that says "cuda", use the current device.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def make_group_of_all(worker_context: WorkerContext) -> Group:
    """Make the group of all workers. Collective."""
    if worker_context.place.size == 1:
        return SoloGroup()
    if worker_context.device.type == "cuda":
        return make_network_group(
            worker_context, "flat", backend="nccl" if _has_own_devices(worker_context) else "gloo"
        )
    hosts = worker_context.cluster.hosts
    if not has_library():
        worker_context.say(
            f"on {platform.system()} workers of one host exchange through the network stack, "
            "much more slowly than through shared memory"
        )
        return make_network_group(worker_context, "flat")
    if len(hosts) == 1:
        try:
            store, place = worker_context.store.open_substore("host0"), worker_context.place
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
            return make_network_group(worker_context, "flat")
    return _make_hosts_group(worker_context)


class Subgroups:
    """Groups that only some runs need, besides the group of all workers.

    Each is made on its first use, and again after the workers have changed.
    """

    def __init__(self, context: SyncContext, hosts: Callable[[], Topology]) -> None:
        self.layer_subgroup: Group | None = None
        self.host_subgroup: Group | None = None
        self._context, self._hosts = context, hosts
        context.local = self.host_group

    def layer_group(self) -> Group:
        """Get a second group of all workers. The first call is collective.

        Layers exchange in it while buckets are under way in the first group.
        """
        if self.layer_subgroup is None:
            self.layer_subgroup = self._context.group.make_subgroup(range(self._context.group.size))
            assert self.layer_subgroup is not None
            self._context.extra_groups.append(self.layer_subgroup)
        return self.layer_subgroup

    def host_group(self) -> Group:
        """Get the group of the workers of this host. The first call is collective."""
        if self.host_subgroup is None:
            self.host_subgroup = make_host_group(self._context.group, self._hosts())
            self._context.extra_groups.append(self.host_subgroup)
        return self.host_subgroup

    def forget_groups(self) -> None:
        """Drop the groups, as the workers have changed."""
        self.layer_subgroup = self.host_subgroup = None


def make_host_group(group: Group, cluster: Topology) -> Group:
    """Make a group of the workers of this host. Collective.

    It uses shared memory if `group` does.
    """
    if isinstance(group, HostsGroup):
        host_group = group.inner.make_subgroup(range(group.inner.size))
    else:
        # All workers call `make_subgroup` for every host, and get None for other hosts.
        subgroups = [group.make_subgroup(host.ranks) for host in cluster.hosts]
        host_group = next(subgroup for subgroup in subgroups if subgroup is not None)
    assert host_group is not None
    return host_group


def make_network_group(
    worker_context: WorkerContext, name: str, *, backend: str = "gloo"
) -> TorchGroup:
    """Make a group of all workers on torch.distributed. Collective.

    Args:
        worker_context: Context of this worker.
        name: Name that no other group has.
        backend: "gloo" or "nccl".
    """
    group = TorchGroup.from_store(
        worker_context.store.open_substore(name),
        worker_context.place.rank,
        worker_context.place.size,
        backend=backend,
        address=find_own_address(worker_context.place),
        deadline=worker_context.deadline,
        hosts=worker_context.cluster.host_by_rank(),
        ranks=worker_context.names,
        cancel_scope=worker_context.cancel_scope,
    )
    group.trace = worker_context.trace
    return group


def _has_own_devices(worker_context: WorkerContext) -> bool:
    """Whether every worker has a GPU of its own. Collective."""
    # NCCL refuses two workers on one GPU.
    own_rank = worker_context.place.rank
    worker_context.store.put(
        f"device/{own_rank}",
        [worker_context.cluster.host_by_rank()[own_rank], worker_context.device.index],
    )
    devices = [
        tuple(worker_context.store.take(f"device/{rank}", worker_context.deadline))
        for rank in range(worker_context.place.size)
    ]
    if len(set(devices)) == len(devices):
        return True
    worker_context.say(
        "several workers share a GPU: gradients travel by Gloo through the processor's memory, "
        "which is slow"
    )
    return False


def _make_hosts_group(worker_context: WorkerContext) -> Group:
    """Make a group over several hosts. Collective.

    It has a group inside each host, a group of the first workers of all hosts, and a group of all
    workers.
    """
    place, cluster = worker_context.place, worker_context.cluster
    flat = make_network_group(worker_context, "flat")
    # With one worker on each host, there is nothing to share inside a host.
    if all(len(host.ranks) == 1 for host in cluster.hosts):
        return flat
    own_host = cluster.host_of(place.rank)
    inner: Group = SoloGroup(rank=place.rank)
    error = ""
    if len(own_host.ranks) > 1:
        name = f"host{cluster.host_by_rank()[place.rank]}"
        try:
            inner = SharedGroup.from_store(
                worker_context.store.open_substore(name),
                own_host.ranks.index(place.rank),
                len(own_host.ranks),
                deadline=worker_context.deadline,
                ranks=[flat.global_rank(rank) for rank in own_host.ranks],
                cancel_scope=worker_context.cancel_scope,
            )
        except ResourceError as caught:
            error = str(caught)
    # All workers have to decide alike, so that one host without shared memory decides for all.
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
    # Between hosts, only the first worker of each host exchanges.
    leaders = [host.ranks[0] for host in cluster.hosts]
    outer = flat.make_subgroup(leaders)
    return HostsGroup(
        inner,
        outer,
        flat,
        cluster.host_by_rank(),
        deadline=worker_context.deadline,
        trace=worker_context.trace,
    )


def close_in_background(groups: list[Any]) -> None:
    """Close broken groups in a thread of their own, so that the caller doesn't wait for it."""

    def close() -> None:
        for group in groups:
            group.close()

    threading.Thread(target=close, name="paceline reaper", daemon=True).start()

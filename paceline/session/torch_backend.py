"""Makes process groups of the backend `paceline` for torch.distributed."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.cluster import network, store_client
from paceline.cluster.discover import Place, discover_place, find_secret
from paceline.cluster.machine import count_cores
from paceline.cluster.store import Store, discover_hosts, find_own_address
from paceline.comm.backend.issue import GroupMembers
from paceline.comm.backend.process_group import GroupBackend
from paceline.comm.group_protocol import Group
from paceline.comm.native import sockets
from paceline.comm.native.default_group import DefaultProcessGroup
from paceline.comm.native.torch_group import TorchGroup
from paceline.errors import DeadlineExceeded, PlaceError, WorkerLost
from paceline.workers.groups import WorkerContext, make_group_of_all

if TYPE_CHECKING:  # torch's stubs have these names only in the module that defines them
    from torch._C._distributed_c10d import PrefixStore, TCPStore
else:
    from torch.distributed import PrefixStore, TCPStore

NAME = "paceline"

LAZY = object()  # option for a group whose ranks don't wait for each other when it is made


def create_process_group(options: Any, chosen: Any = None) -> GroupBackend:
    """Create a process group of all ranks or of some of them, as torch.distributed calls for it.

    `chosen`: options of the group, None or `LAZY`.
    """
    rank, size, seconds = options.group_rank, options.group_size, options.timeout.total_seconds()
    place = replace(_find_place(options.store), rank=rank, size=size, host_rank=None)
    store = Store(options.store, place.secret, path=NAME, deadline=seconds)
    store_client.limit_answer_time(options.store, seconds)

    # called by the first operation of the group, as ranks meet in it
    def meet() -> GroupMembers:
        try:
            cluster = discover_hosts(store, place)
        except DeadlineExceeded as error:
            who = f"the ranks of this process group are, among all, {', '.join(map(str, names))}"
            raise DeadlineExceeded(
                f"{error}; {who}", tuple(names[other] for other in error.missing)
            ) from None
        if len(cluster.hosts) > 1 and place.meeting is None and place.interface is None:
            text = (
                f"these {size} workers are on {len(cluster.hosts)} hosts, and meet at no address "
                "that would tell which interface to use"
            )
            raise PlaceError(
                f"{text}: {network.format_interface_advice()}, or give init_process_group a "
                "TCPStore or "
                "init_method='tcp://...'"
            )
        worker = WorkerContext(
            place, store, cluster, torch.device("cpu"), seconds, _make_announcer(rank), names=names
        )
        # cores are divided among all workers of this host, also those outside of the group
        workers_here = max(place.local_size, len(cluster.host_of(rank).ranks))
        return GroupMembers(
            make_group_of_all(worker), worker.cluster.host_names(), count_cores() / workers_here
        )

    names = tuple(options.global_ranks_in_group) or tuple(range(size))
    return GroupBackend(
        rank,
        names,
        meet,
        options.store,
        pairs=_make_pairs(place, store, names, seconds, lazy=chosen is LAZY),
    )


def _make_pairs(
    place: Place, store: Store, names: tuple[int, ...], seconds: float, *, lazy: bool
) -> Any:
    """Connect pairs of ranks, for messages from one rank to another.

    They connect here, so that a message doesn't wait for earlier work of its receiver.
    """
    # each rank leaves a mark, so that an error can name the ranks that didn't come
    arrival_keys = [f"here/{name}" for name in names]
    store.put(arrival_keys[place.rank], True)
    try:
        return sockets.connect_gloo_unwatched(
            find_own_address(place),
            store.open_substore("pairs").torch,
            place.rank,
            place.size,
            seconds,
            lazy=lazy,
        )
    except RuntimeError as error:
        absent = tuple(
            name for name, key in zip(names, arrival_keys, strict=True) if not store.has_keys([key])
        )
        if not absent:
            raise WorkerLost(
                f"the {place.size} ranks of a process group can't connect: "
                f"{str(error).splitlines()[0]}"
            ) from error
        who = ", ".join(map(str, absent))
        raise DeadlineExceeded(
            (
                f"rank {who} did not come within {seconds:g} s to make a process group of "
                f"{place.size} ranks"
            ),
            absent,
        ) from error


def _find_place(store: Any) -> Place:
    """Place of this process by its launcher; without one, a place that meets at `store`."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    meeting = (store.host, store.port) if isinstance(store, TCPStore) else None
    try:
        place = discover_place()
    except PlaceError:
        # A script that starts its own processes has set some of the variables, and not others.
        place = Place(hostname=socket.gethostname(), secret=find_secret())
    return place if place.meeting is not None else replace(place, meeting=meeting)


def _make_announcer(rank: int) -> Any:
    return (
        (lambda text: print(f"paceline: {text}", file=sys.stderr, flush=True))
        if rank == 0
        else (lambda text: None)
    )


def make_default_group(worker_context: WorkerContext, group: Group) -> DefaultProcessGroup | None:
    """Make torch.distributed's default group; None for groups of one or that may shrink."""
    place = worker_context.place
    if place.size == 1 or place.worker is not None:
        return None
    on_gpu = (
        "cpu:gloo,cuda:nccl"
        if isinstance(group, TorchGroup) and group.backend == "nccl"
        else "gloo"
    )
    backend = NAME if worker_context.device.type == "cpu" else on_gpu
    store, deadline = worker_context.store.open_substore("default").torch, worker_context.deadline
    default = DefaultProcessGroup(
        store,
        place.rank,
        place.size,
        address=find_own_address(place),
        deadline=deadline,
        backend=backend,
        options=LAZY if backend == NAME else None,
    )
    if default.why:
        worker_context.say(default.why)
    return default

"""Makes process groups of the backend `paceline` for torch.distributed, and makes torch.distributed know it."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from paceline.cluster.discover import Place, discover
from paceline.cluster.store import Store, address, hosts
from paceline.comm.backend import GroupBackend
from paceline.comm.group import Group
from paceline.comm.native import sockets
from paceline.errors import PlaceError
from paceline.session.groups import WorkerContext, everyone

NAME = "paceline"


def create(options: Any, _: Any = None) -> GroupBackend:
    """Make the process group that torch.distributed asks for, of all ranks or of some of them. They meet when they first exchange."""
    rank, size, seconds = options.group_rank, options.group_size, options.timeout.total_seconds()
    place = replace(_place(), rank=rank, size=size, host_rank=None)
    store = Store(options.store, place.secret, path=NAME, deadline=seconds)

    def meet() -> Group:
        return everyone(WorkerContext(place, store, hosts(store, place), torch.device("cpu"), seconds, _announce(rank)))

    def peers() -> Any:
        return sockets.connect_lazily(address(place), store.sub("peers").torch, rank, size, seconds)

    names = list(options.global_ranks_in_group) or list(range(size))
    return GroupBackend(rank, names, meet, options.store, timeout=options.timeout, peers=peers)


def _place() -> Place:
    """The place of this process: its launcher's, or none where the script says itself who it is."""
    try:
        return discover()
    except PlaceError:
        return Place(hostname=socket.gethostname())


def _announce(rank: int) -> Any:
    return (lambda text: print(f"paceline: {text}", flush=True)) if rank == 0 else (lambda text: None)


def register() -> None:
    """Make torch.distributed know the backend; calling it twice is harmless."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def replace_gloo() -> None:
    """Make torch.distributed give a group of this backend to whoever asks for Gloo, or for nothing where no GPU is."""
    torch_distributed = dist.distributed_c10d
    make = torch_distributed._new_process_group_helper

    def make_ours(group_size: int, group_rank: int, global_ranks: Any, backend: Any, *args: Any, **options: Any) -> Any:
        asked = str(backend).lower()
        ours = asked in ("gloo", "cpu:gloo") or (asked in ("undefined", "none", "cpu:gloo,cuda:nccl") and not torch.cuda.is_available())
        chosen = dist.Backend(NAME) if ours else backend
        return make(group_size, group_rank, global_ranks, chosen, *args, **options)

    torch_distributed._new_process_group_helper = make_ours  # type: ignore[assignment]

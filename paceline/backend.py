"""Registers paceline as a backend of torch.distributed.

    import paceline.backend
    dist.init_process_group("paceline")

DDP, fully_shard, DTensor and all else that stands on torch.distributed then exchange CPU tensors by paceline's groups: through shared
memory inside a host, one copy per host between hosts. Started by torchrun, `paceline run`, Slurm or MPI, or with ranks of your own.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from paceline.cluster.discover import Place, discover
from paceline.cluster.store import Store, address, hosts
from paceline.comm.backend import GroupBackend
from paceline.comm.native import sockets
from paceline.errors import PlaceError
from paceline.session.groups import WorkerContext, everyone

NAME = "paceline"


def create(options: Any, _: Any = None) -> GroupBackend:
    """Make the process group that torch.distributed asks for: one of all ranks, or of some of them. Collective among those."""
    rank, size, seconds = options.group_rank, options.group_size, options.timeout.total_seconds()
    place = replace(_place(), rank=rank, size=size, host_rank=None)
    store = Store(options.store, place.secret, path=NAME, deadline=seconds)
    context = WorkerContext(place, store, hosts(store, place), torch.device("cpu"), seconds, _announce(rank))
    group = everyone(context)

    def peers() -> Any:
        device, _ = sockets._listen(address(place))
        return sockets.connect(device, store.sub("peers").torch, rank, size, seconds)

    return GroupBackend(group, options.store, timeout=options.timeout, peers=peers)


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


register()

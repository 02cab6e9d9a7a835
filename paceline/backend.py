"""Registers paceline as a backend of torch.distributed.

    import paceline.backend
    dist.init_process_group("paceline")

    python -m paceline.backend train.py        a script that isn't touched: what asks for Gloo gets paceline
    torchrun ... -m paceline.backend train.py
    paceline run --backend paceline train.py

DDP, fully_shard, DTensor and all else that stands on torch.distributed then exchange CPU tensors by paceline's groups: through shared
memory inside a host, one copy per host between hosts. Started by torchrun, `paceline run`, Slurm or MPI, or with ranks of your own.
"""

from __future__ import annotations

import runpy
import socket
import sys
from dataclasses import replace
from pathlib import Path
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
        return sockets.connect_lazily(address(place), store.sub("peers").torch, rank, size, seconds)

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


def replace_gloo() -> None:
    """Make torch.distributed give a group of this backend to whoever asks for Gloo, or for nothing where no GPU is."""
    torch_distributed = dist.distributed_c10d
    make = torch_distributed._new_process_group_helper

    def make_ours(group_size: int, group_rank: int, global_ranks: Any, backend: Any, *args: Any, **options: Any) -> Any:
        asked = str(backend).lower()
        ours = asked in ("gloo", "cpu:gloo") or (asked in ("undefined", "none", "cpu:gloo,cuda:nccl") and not torch.cuda.is_available())
        chosen = dist.Backend(NAME) if ours else backend
        return make(group_size, group_rank, global_ranks, chosen, *args, **options)

    torch_distributed._new_process_group_helper = make_ours


def main(arguments: list[str]) -> None:
    """Run a script as Python would, with this backend in the place of Gloo."""
    if not arguments:
        raise SystemExit("usage: python -m paceline.backend SCRIPT [ARGUMENTS]")
    replace_gloo()
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


register()
if __name__ == "__main__":
    main(sys.argv[1:])

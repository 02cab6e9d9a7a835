"""The store of a view, in which its members meet; its first member serves it.

Each worker can serve one.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError

from paceline.cluster.control.commands import PORTS, Roster
from paceline.cluster.discover import Place
from paceline.cluster.store import Store, address, hosts
from paceline.comm.cancellation import CancelScope
from paceline.comm.native import sockets
from paceline.errors import WorkerLost
from paceline.workers.groups import WorkerContext

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import TCPStore


def serve(place: Place) -> Any:
    """Serve the store for views whose first worker this one is."""
    assert place.store_fd is not None and place.worker is not None
    descriptor = os.dup(place.store_fd)
    where, seconds = (address(place), place.worker % PORTS), timedelta(seconds=30)
    return TCPStore(
        *where,
        None,
        True,
        seconds,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def open_store(worker_context: WorkerContext, roster: Roster, cancel_scope: CancelScope) -> Store:
    """Connect to the store of a view, until `cancel_scope` trips.

    Raises `WorkerLost` if it can't be reached.
    """
    first, place = roster.members[0], worker_context.place
    seconds = place.timings.recovery.connect
    try:
        # torch would be loud about it
        socket.create_connection((first.address, first.port), timeout=seconds).close()
        before = sockets.find_connections(first.address, first.port)
        client = TCPStore(
            first.address,
            first.port,
            None,
            False,
            timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (OSError, DistError) as error:
        raise WorkerLost(
            f"the store of view {roster.number} can't be reached: {str(error).splitlines()[0]}"
        ) from error
    mine = sockets.find_connections(first.address, first.port) - before
    cancel_scope.register_end(lambda error: sockets.sever_connections(mine))
    return Store(
        client, place.secret, path="paceline", deadline=worker_context.deadline, start=roster.mark
    )


def moved(
    worker_context: WorkerContext,
    roster: Roster,
    store: Store,
    members: tuple[int, ...],
    cancel_scope: CancelScope,
) -> WorkerContext:
    """Return this worker's place among these members of a view. Collective."""
    by_worker = {member.worker: member for member in roster.members}
    place = worker_context.place
    assert place.worker is not None
    here = by_worker[place.worker]
    local = [worker for worker in members if by_worker[worker].host == here.host]
    place = replace(
        place,
        rank=members.index(here.worker),
        size=len(members),
        local_rank=local.index(here.worker),
        local_size=len(local),
        host_rank=here.host,
        hosts=len({by_worker[worker].host for worker in members}),
        meeting=(roster.members[0].address, roster.members[0].port),
        joining=False,
    )
    return replace(
        worker_context,
        place=place,
        store=store,
        cluster=hosts(store, place),
        natives=0,
        cancel_scope=cancel_scope,
    )

"""The store of a view, in which its members meet. Its first member serves it.

Each worker serves a store from its start, as it may become the first member of a view.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError

from paceline.cluster.control.commands import PORT_COUNT, Roster
from paceline.cluster.discover import Place
from paceline.cluster.store import Store, discover_hosts, find_own_address
from paceline.comm.cancellation import CancelScope
from paceline.comm.native import sockets
from paceline.errors import WorkerLost
from paceline.workers.groups import WorkerContext

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import TCPStore


def serve_store(place: Place) -> Any:
    """Serve the store for the views in which this worker is the first one."""
    # The launcher has opened the listening socket. The store closes its descriptor at its end, so
    # it gets a copy.
    assert place.store_fd is not None and place.worker is not None
    descriptor = os.dup(place.store_fd)
    where, seconds = (find_own_address(place), place.worker % PORT_COUNT), timedelta(seconds=30)
    return TCPStore(
        *where,
        None,
        True,
        seconds,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def connect_store(
    worker_context: WorkerContext, roster: Roster, cancel_scope: CancelScope
) -> Store:
    """Connect to the store of a view, until `cancel_scope` trips.

    Raises `WorkerLost` if it can't be reached.
    """
    host_member, place = roster.members[0], worker_context.place
    seconds = place.timings.recovery.connect
    try:
        # Try the port first: torch prints long warnings if it can't connect.
        socket.create_connection((host_member.address, host_member.port), timeout=seconds).close()
        sockets_before = sockets.find_connections(host_member.address, host_member.port)
        client = TCPStore(
            host_member.address,
            host_member.port,
            None,
            False,
            timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (OSError, DistError) as error:
        raise WorkerLost(
            f"the store of view {roster.number} can't be reached: {str(error).splitlines()[0]}"
        ) from error
    # torch has no call that ends a blocked TCPStore. So find the sockets of this client, which are
    # the new ones to this port, and sever them when the scope trips.
    client_sockets = (
        sockets.find_connections(host_member.address, host_member.port) - sockets_before
    )
    cancel_scope.register_end(lambda error: sockets.sever_connections(client_sockets))
    return Store(
        client,
        place.secret,
        path="paceline",
        deadline=worker_context.deadline,
        start=roster.unique_text,
    )


def move_to_view(
    worker_context: WorkerContext,
    roster: Roster,
    store: Store,
    members: tuple[int, ...],
    cancel_scope: CancelScope,
) -> WorkerContext:
    """Make the context of this worker in a view with these members. Collective."""
    by_worker = {member.worker: member for member in roster.members}
    place = worker_context.place
    assert place.worker is not None
    own_member = by_worker[place.worker]
    local_workers = [worker for worker in members if by_worker[worker].host == own_member.host]
    place = replace(
        place,
        rank=members.index(own_member.worker),
        size=len(members),
        local_rank=local_workers.index(own_member.worker),
        local_size=len(local_workers),
        host_rank=own_member.host,
        hosts=len({by_worker[worker].host for worker in members}),
        meeting=(roster.members[0].address, roster.members[0].port),
        joining=False,
    )
    return replace(
        worker_context,
        place=place,
        store=store,
        cluster=discover_hosts(store, place),
        natives=0,
        cancel_scope=cancel_scope,
    )

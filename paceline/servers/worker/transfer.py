"""Transfer of whole states: filling servers, reading them to be saved, and filling copies;
parameters and optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.comm.rpc import RpcClient
from paceline.errors import UsageError
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.process.partition import RowRange
from paceline.servers.protocol.message import call
from paceline.servers.protocol.parameters import FillUnit, LoadMemories, PlanShard, ReadMemories
from paceline.servers.protocol.plans import write
from paceline.servers.protocol.recovery import LoadShard, ReadShard
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.units import packed, part, rows, whole
from paceline.state.snapshot import loads, pack
from paceline.sync.base import check_strategy


def fill(link: ServerLink, memories: Sequence[Mapping[str, Any]]) -> None:
    """Fill servers with my parameters, and with the state of their optimizers."""
    for unit in link.layout.units:
        for piece, view in unit.members:
            view.copy_(rows(link.slots[piece.slot].parameter.detach(), piece))
        link.connections.tell(unit.server, FillUnit(unit.number, unit.flat), link.seconds)
    for server, plan in enumerate(link.plans):
        found = [
            part(memories[piece.slot], piece, link.slots[piece.slot].parameter)
            for piece in plan.pieces
        ]
        link.connections.tell(
            server, LoadMemories(packed(pack({"memories": found}).dumps())), link.seconds
        )


def copy(link: ServerLink, shard: int, caller: RpcClient) -> Iterator[None]:
    """Fill a copy of this shard, at the other end of `caller`, from a living one.

    Yields after each piece.
    """
    state = link.connections.ask(shard, ReadShard(), link.seconds)
    call(caller, PlanShard(packed(write(link.plans[shard]))), link.seconds)
    yield
    call(caller, LoadShard(state.chunks), link.seconds)
    yield


def memories(link: ServerLink, slots: int) -> list[dict[str, Any]]:
    """Return the state of optimizers on servers, for each parameter."""
    found: list[list[tuple[RowRange, dict[str, Any]]]] = [[] for _ in range(slots)]
    for server, plan in enumerate(link.plans):
        body = link.connections.ask(server, ReadMemories(), link.seconds).packed.numpy().tobytes()
        for piece, memory in zip(plan.pieces, loads(body).unpack()["memories"], strict=True):
            found[piece.slot].append((piece, memory))
    return [whole(parts) for parts in found]


def saved(states: Sequence[Mapping[str, Any]], slots: int) -> list[Any] | None:
    """Return the `memories` in the states of all workers in a checkpoint.

    Raises `UsageError` for another strategy, or model.
    """
    check_strategy("ParameterServer", states, "memories")
    found = next((state["memories"] for state in states if state["memories"] is not None), None)
    if found is not None and len(found) != slots:
        raise UsageError(
            f"this checkpoint is of a model of {len(found)} parameters, and here are {slots}"
        )
    return found


def replication(link: ServerLink, endpoints: ServerEndpoints) -> ServerReplication | None:
    """Make the replacement of lost servers by copies; None if no copy can be started.

    Copies are filled from other servers. Raises `UsageError` for replicas if none can be started.
    """
    replicas = link.options.replicas
    if endpoints.pool is not None:
        return ServerReplication(
            link.context, endpoints.pool, link.connections, replicas, fill=partial(copy, link)
        )
    if replicas > 1:
        raise UsageError(
            f"replicas={replicas} is for runs that go on when a server is lost: "
            "start them with `paceline run --min-workers N`, or leave it out"
        )
    return None

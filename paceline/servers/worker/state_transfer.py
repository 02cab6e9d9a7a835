"""Transfer of parameters and optimizer state: to servers, to copies, and back to be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.comm.rpc import RpcClient
from paceline.errors import UsageError
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.process.partition import RowRange
from paceline.servers.protocol.message import call_server
from paceline.servers.protocol.parameters import FillUnit, LoadMemories, PlanShard, ReadMemories
from paceline.servers.protocol.plans import pack_plan
from paceline.servers.protocol.recovery import LoadShard, ReadShard
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.transfer_units import (
    bytes_to_tensor,
    join_memories,
    select_rows,
    slice_memory,
)
from paceline.state.snapshot import make_snapshot, snapshot_from_bytes
from paceline.sync.base import check_strategy


def fill_servers(link: ServerLink, memories: Sequence[Mapping[str, Any]]) -> None:
    """Fill servers with this worker's parameters, and with their optimizer state."""
    for unit in link.layout.units:
        for piece, view in unit.members:
            view.copy_(select_rows(link.slots[piece.slot].parameter.detach(), piece))
        link.connections.tell_all_copies(
            unit.server, FillUnit(unit.number, unit.flat), link.deadline
        )
    for server, plan in enumerate(link.shard_plans):
        shard_memories = [
            slice_memory(memories[piece.slot], piece, link.slots[piece.slot].parameter)
            for piece in plan.pieces
        ]
        link.connections.tell_all_copies(
            server,
            LoadMemories(bytes_to_tensor(make_snapshot({"memories": shard_memories}).to_bytes())),
            link.deadline,
        )


def fill_copy(link: ServerLink, shard: int, caller: RpcClient) -> Iterator[None]:
    """Fill a new copy of a shard from a copy that is alive. Yields after each message.

    `caller` is the connection to the new copy.
    """
    state = link.connections.ask_shard(shard, ReadShard(), link.deadline)
    call_server(
        caller, PlanShard(bytes_to_tensor(pack_plan(link.shard_plans[shard]))), link.deadline
    )
    yield
    call_server(caller, LoadShard(state.chunks), link.deadline)
    yield


def read_memories(link: ServerLink, slots: int) -> list[dict[str, Any]]:
    """Read the optimizer state of each parameter from the servers."""
    by_slot: list[list[tuple[RowRange, dict[str, Any]]]] = [[] for _ in range(slots)]
    for server, plan in enumerate(link.shard_plans):
        body = (
            link.connections.ask_shard(server, ReadMemories(), link.deadline)
            .packed.numpy()
            .tobytes()
        )
        for piece, memory in zip(
            plan.pieces, snapshot_from_bytes(body).unpack_state()["memories"], strict=True
        ):
            by_slot[piece.slot].append((piece, memory))
    return [join_memories(pieces) for pieces in by_slot]


def find_saved_memories(states: Sequence[Mapping[str, Any]], slots: int) -> list[Any] | None:
    """Find the optimizer state of all parameters in a checkpoint, among the states of all workers.

    Raises `UsageError` if another strategy or model wrote it.
    """
    check_strategy("ParameterServer", states, "memories")
    saved_memories = next(
        (state["memories"] for state in states if state["memories"] is not None), None
    )
    if saved_memories is not None and len(saved_memories) != slots:
        raise UsageError(
            f"this checkpoint is of a model with {len(saved_memories)} parameters, and this model "
            f"has {slots}: load it into the model that wrote it"
        )
    return saved_memories


def make_replication(link: ServerLink, endpoints: ServerEndpoints) -> ServerReplication | None:
    """Make the object that replaces lost servers by copies; None if no copy can be started.

    Raises `UsageError` if `replicas` asks for copies and none can be started.
    """
    replicas = link.options.replicas
    if endpoints.pool is not None:
        return ServerReplication(
            link.context, endpoints.pool, link.connections, replicas, fill=partial(fill_copy, link)
        )
    if replicas > 1:
        raise UsageError(
            f"replicas={replicas} is for runs that go on when a server is lost: "
            "start them with `paceline run --min-workers N`, or leave it out"
        )
    return None

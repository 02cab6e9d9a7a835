"""What servers begin with, and what they give back to be saved, or to a copy: parameters, and what optimizers remember of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.comm.rpc import RpcClient
from paceline.errors import UsageError
from paceline.server.main import write
from paceline.server.partition import RowRange
from paceline.state.snapshot import loads, pack
from paceline.sync.parameterserver.units import UnitLayout, packed, part, rows, whole

if TYPE_CHECKING:
    from paceline.sync.parameterserver.client import ParameterServerSync


def fill(client: ParameterServerSync, layout: UnitLayout, memories: Sequence[Mapping[str, Any]]) -> None:
    """Servers begin with my parameters, and with what optimizers remember of them."""
    for parcel in layout.parcels:
        for piece, view in parcel.members:
            view.copy_(rows(client.slots[piece.slot].parameter.detach(), piece))
        client.wires.tell(parcel.server, "fill", {"unit": parcel.number}, [parcel.flat], client.seconds)
    for server, plan in enumerate(layout.plans):
        found = [part(memories[piece.slot], piece, client.slots[piece.slot].parameter) for piece in plan.pieces]
        client.wires.tell(server, "remember", {}, [packed(pack({"memories": found}).dumps())], client.seconds)


def copy(client: ParameterServerSync, shard: int, caller: RpcClient) -> Iterator[None]:
    """A copy of this shard, at the other end, becomes what those are that live."""
    state = client.wires.ask(shard, "state", client.seconds)
    caller.call("plan", tensors=[packed(write(client.plans[shard]))], seconds=client.seconds)
    yield
    caller.call("become", tensors=state.tensors, seconds=client.seconds)
    if client.free:
        caller.call("reckon", body={"workers": client.workers}, seconds=client.seconds)
    yield


def memories(client: ParameterServerSync, slots: int) -> list[dict[str, Any]]:
    """What optimizers on servers remember of each parameter."""
    found: list[list[tuple[RowRange, dict[str, Any]]]] = [[] for _ in range(slots)]
    for server, plan in enumerate(client.plans):
        body = client.wires.ask(server, "memories", client.seconds).tensors[0].numpy().tobytes()
        for piece, memory in zip(plan.pieces, loads(body).unpack()["memories"], strict=True):
            found[piece.slot].append((piece, memory))
    return [whole(parts) for parts in found]


def saved(states: Sequence[Mapping[str, Any]], slots: int) -> list[Any] | None:
    """That, from the states of all workers in a checkpoint. Raises `UsageError` for one of another strategy, or model."""
    if any("memories" not in state for state in states):
        raise UsageError("this checkpoint was written with another kind of strategy than ParameterServer; resume with that one")
    found = next((state["memories"] for state in states if state["memories"] is not None), None)
    if found is not None and len(found) != slots:
        raise UsageError(f"this checkpoint is of a model of {len(found)} parameters, and here are {slots}")
    return found

"""Transfer units: the parts of parameters that travel in one message to a server and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.bucket_layout import BucketShape, build_buckets, cut_runs
from paceline.comm.group_protocol import Traffic
from paceline.comm.rpc import RpcClient
from paceline.errors import PacelineError, UsageError, WorkerLost
from paceline.servers.process import optimizers as recipe
from paceline.servers.process.codings import Phases
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.process.partition import RowRange, cut_parameters, deal_pieces
from paceline.servers.process.shard import ShardPlan
from paceline.servers.protocol.message import Acknowledged, Index, SentRequest
from paceline.servers.protocol.samples import Notes
from paceline.state.tensor_version import version_of
from paceline.sync.base import Slot
from paceline.timings import DEFAULT_TIMINGS, ServerTimings


@dataclass
class TransferUnit:
    """A unit of a server, as this worker has it: the memory that travels, and its members."""

    server: int
    number: Index  # on that server
    optimizer: int
    flat: Tensor
    members: list[tuple[RowRange, Tensor]]  # rows of parameters, and their views of `flat`
    # Pushes that were not acknowledged yet.
    pending_pushes: list[SentRequest[Acknowledged]] = field(default_factory=list)
    # Gradients that were pushed for this step, by slot, and their versions at that time.
    pushed_gradients: dict[int, tuple[Tensor | None, int | None]] = field(default_factory=dict)
    ways: Phases = ()  # codings of its pushes

    @property
    def first_slot(self) -> int:
        """The first slot that has a part in this unit."""
        return min(piece.slot for piece, _ in self.members)

    def discard_push(self) -> None:
        """Discard the pushes of this unit."""
        self.pushed_gradients = {}
        self.pending_pushes.clear()

    def view_members(self, flat: Tensor) -> list[Tensor]:
        """View the members in another flat tensor of the same length."""
        start = self.flat.storage_offset()
        return [
            flat.as_strided(view.size(), view.stride(), view.storage_offset() - start)
            for _, view in self.members
        ]

    def pack_gradients(
        self, slots: Sequence[Slot], grads: Mapping[int, Tensor | None], factor: float
    ) -> bytes:
        """Write these gradients, times `factor`, into the memory that travels.

        Returns a flag for each member: whether it has a gradient.
        """
        used = bytearray()
        for piece, view in self.members:
            grad = grads[piece.slot]
            if grad is not None and grad.is_sparse:
                raise UsageError(
                    f"the gradient of {slots[piece.slot].name} is sparse, and ParameterServer "
                    "takes dense ones: leave out sparse=True"
                )
            used.append(grad is not None)
            if grad is None or not factor:
                view.zero_()
            else:
                torch.mul(select_rows(grad, piece), factor, out=view)
        self.pushed_gradients = {slot: (grad, _version(grad)) for slot, grad in grads.items()}
        return bytes(used)

    def has_changed(self, grads: Mapping[int, Tensor | None]) -> bool:
        """Whether these gradients differ from the pushed ones."""
        return not self.pushed_gradients or any(
            grad is not self.pushed_gradients[slot][0]
            or _version(grad) != self.pushed_gradients[slot][1]
            for slot, grad in grads.items()
        )

    def unpack_parameters(self, slots: Sequence[Slot], flat: Tensor) -> None:
        """Copy the values in a flat tensor into the parameters."""
        for (piece, _), values in zip(self.members, self.view_members(flat), strict=True):
            select_rows(slots[piece.slot].parameter.detach(), piece).copy_(values)


class UnitLayout:
    """The layout of parameters over servers: the plan of each server, and its units here.

    Args:
        slots: The parameters.
        optimizers: Their optimizers.
        servers: Number of servers.
        nbytes: Size of a unit in bytes.
        ways: Codings of each slot. Default: none.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        optimizers: Sequence[Optimizer],
        servers: int,
        nbytes: int,
        *,
        ways: Sequence[Phases] = (),
    ) -> None:
        shapes = [BucketShape.of_parameter(slot.parameter) for slot in slots]
        settings = [recipe.read_settings(optimizer) for optimizer in optimizers]
        names = [recipe.get_optimizer_name(optimizer) for optimizer in optimizers]
        # Optimizer and parameter group of each slot.
        self.owners = [_find_owner(slot, optimizers) for slot in slots]
        # Some optimizers need a parameter as a whole. Others let it be cut by rows.
        all_pieces = cut_parameters(
            shapes,
            servers,
            [names[optimizer] in recipe.WHOLE_MATRIX_OPTIMIZERS for optimizer, _ in self.owners],
        )
        ways = ways or [()] * len(slots)
        self.plans: list[ShardPlan] = []
        self.units: list[TransferUnit] = []
        self.units_by_slot: dict[int, list[TransferUnit]] = {}
        for server, indices in enumerate(deal_pieces(all_pieces, servers)):
            shard = [all_pieces[index] for index in indices]
            # Parameters share a unit only if they have the same optimizer and codings.
            kinds = [
                piece.shape._replace(kind=(self.owners[piece.slot][0], ways[piece.slot]))
                for piece in shard
            ]
            # Backward reaches the last parameters first, so units are cut from the end.
            runs = cut_runs(kinds, reversed(range(len(shard))), nbytes)
            owners, coded = (
                [self.owners[piece.slot] for piece in shard],
                [ways[shard[run[0]].slot] for run in runs],
            )
            plan = ShardPlan(shard, runs, owners, list(zip(names, settings, strict=True)), coded)
            self.plans.append(plan)
            for number, (run, bucket) in enumerate(
                zip(runs, build_buckets(plan.piece_layouts, runs, _allocate_flat), strict=True)
            ):
                members = [
                    (shard[index], view) for index, view in zip(run, bucket.views, strict=True)
                ]
                unit = TransferUnit(
                    server,
                    Index(number),
                    owners[run[0]][0],
                    bucket.flat,
                    members,
                    ways=coded[number],
                )
                self.units.append(unit)
                for slot in {piece.slot for piece, _ in members}:
                    self.units_by_slot.setdefault(slot, []).append(unit)


class ServerConnections:
    """Connections to servers, whose traffic counts for the run (a `Sender`)."""

    def __init__(self, *, timings: ServerTimings = DEFAULT_TIMINGS.servers) -> None:
        self._timings = timings
        self.waited = 0.0  # seconds of waiting for slower workers
        self.callers: list[RpcClient] = []
        self.is_leaving = False  # whether this worker leaves a run that may go on
        self._closed_traffic = Traffic()  # of closed connections

    @property
    def traffic(self) -> Traffic:
        return sum((_get_traffic(caller) for caller in self.callers), self._closed_traffic)

    def connect_all(self, endpoints: ServerEndpoints, me: int) -> None:
        """Connect to these servers, as worker number `me`. The loss of one ends all waits."""
        self.callers = [
            RpcClient(address, endpoints.keys, sender=me, who=name, timings=self._timings)
            for address, name in zip(endpoints.addresses, endpoints.names, strict=True)
        ]
        endpoints.watch(self.end_waits)

    def close(self) -> None:
        callers, self.callers = self.callers, []
        for caller in callers:
            self._hang_up(caller)

    def _hang_up(self, caller: RpcClient) -> None:
        self._closed_traffic += _get_traffic(caller)
        caller.close()

    def abort(self) -> None:
        self.is_leaving = True
        self.end_waits(WorkerLost("this worker leaves"))

    def end_waits(self, error: PacelineError) -> None:
        """End all waits with this error. Any thread may call it."""
        for caller in self.callers:
            caller.end_waits(error)


def bytes_to_tensor(body: bytes) -> Tensor:
    """Copy bytes into a uint8 tensor, the form in which messages carry them."""
    # torch.frombuffer refuses an empty buffer.
    return (
        torch.frombuffer(bytearray(body), dtype=torch.uint8)
        if body
        else torch.empty(0, dtype=torch.uint8)
    )


def unpack_notes(notes: Notes) -> list[tuple[int, bytes]]:
    """Unpack the notes that the scheduler passed on: the number of each sender, and the bytes."""
    return [
        (worker, note.numpy().tobytes())
        for worker, note in zip(notes.workers, notes.notes, strict=True)
    ]


def _get_traffic(caller: RpcClient) -> Traffic:
    return Traffic(caller.nbytes, 0) if caller.near else Traffic(0, caller.nbytes)


def _find_owner(slot: Slot, optimizers: Sequence[Optimizer]) -> tuple[int, int]:
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            if any(parameter is slot.parameter for parameter in group["params"]):
                return index, group_index
    raise AssertionError(f"{slot.name} is in no group of its optimizer")


def _allocate_flat(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype)


def select_rows(x: Tensor, piece: RowRange) -> Tensor:
    """Select the rows `piece` of a parameter, or of a tensor of the same shape."""
    return x if piece.whole else x[piece.start : piece.stop]


def slice_memory(memory: Mapping[str, Any], piece: RowRange, parameter: Tensor) -> dict[str, Any]:
    """Cut the optimizer state of some rows out of the state of a whole parameter."""
    return {
        name: select_rows(value, piece).contiguous()
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for name, value in memory.items()
    }


def join_memories(parts: Sequence[tuple[RowRange, Mapping[str, Any]]]) -> dict[str, Any]:
    """Join the optimizer states of the pieces of a parameter."""
    first, memory = parts[0]
    if first.whole:
        return dict(memory)
    ordered = [memory for _, memory in sorted(parts, key=lambda entry: entry[0].start)]
    # State in the shape of the piece has rows. Other state (step counts) is the same for all.
    with_rows = {
        name
        for name, value in memory.items()
        if isinstance(value, Tensor) and value.shape == first.shape.size
    }
    return {
        name: torch.cat([state[name] for state in ordered]) if name in with_rows else value
        for name, value in memory.items()
    }


def _version(grad: Tensor | None) -> int | None:
    """Number that shows if a gradient was clipped or scaled after its push."""
    return None if grad is None else version_of(grad)

"""A worker's link to the servers: it pushes gradients and pulls parameters, unit by unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.rpc import RpcClient
from paceline.errors import RECOVERABLE_ERRORS, DeadlineExceeded, PacelineError, UsageError
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.process.shard import ShardPlan
from paceline.servers.protocol.message import R, Request, SentRequest, send_request
from paceline.servers.protocol.parameters import PullUnit, PushGradient, UnitValues
from paceline.servers.protocol.samples import MissingWorkers
from paceline.servers.worker.clipping import PendingClip, compute_gradient_norm
from paceline.servers.worker.compression import PushPullCodec
from paceline.servers.worker.connections import (
    ReplicaConnections,
    ServerTraffic,
    ServerWait,
    name_missing_workers,
)
from paceline.servers.worker.options import ServerOptions
from paceline.servers.worker.transfer_units import TransferUnit, UnitLayout
from paceline.sync.base import Slot
from paceline.sync.context import SyncContext


class ServerLink:
    """Connections, layout and codec, which the parts of a worker's parameter server client share.

    Optimizers are numbered in the order of `optimizers`: first the ones that have parameters on
    servers, then the ones that have only sparse tables. `optimizers` and `steps_taken` have the
    same length. A unit is pushed at most once in a step, except for gradients that were changed
    afterwards. `_step_share`, `_carried_turn` and
    `_backward_loss` describe the turn under way.

    Args:
        context: The group of workers, its agreement and its deadline.
        options: Options of `ParameterServer`.
        lockstep: Whether all workers take the same steps.
        drops: Whether servers drop gradients that arrive too late.
        alone: Whether each gradient is a step of its own (asynchronous).
    """

    def __init__(
        self,
        context: SyncContext,
        options: ServerOptions,
        *,
        lockstep: bool,
        drops: bool,
        alone: bool,
    ) -> None:
        self.context, self.options = context, options
        self.lockstep, self.drops_late_gradients, self.is_asynchronous = lockstep, drops, alone
        # Servers know a worker by a number that stays the same when others are lost. By rank.
        self.worker_numbers = list(range(context.group.size))
        self.slots: list[Slot] = []
        self.optimizers: list[Optimizer] = []
        self.steps_taken: list[int] = []
        self.clip_factors: dict[int, float] = {}  # by optimizer: the clip factor of its next step
        self.layout = UnitLayout([], [], 1, 1)
        self.connections = ReplicaConnections(timings=context.timings.servers)
        self.codec = PushPullCodec(context, options.codec)
        self._dense_count = 0  # number of optimizers that have parameters on servers
        self._replaces_servers = False  # whether lost servers are replaced
        self._step_share = 0.0  # this worker's share of the step that its gradients are for
        # The last turn in which this worker had no samples, but pushed a sum from `no_sync`.
        self._carried_turn: int | None = None
        self._backward_loss: PacelineError | None = (
            None  # the loss of a server in a backward of this turn
        )
        context.extra_groups.append(ServerTraffic(self.connections))

    @property
    def is_out_of_lockstep(self) -> bool:
        """Whether workers are not in lockstep."""
        return not self.lockstep and (len(self.worker_numbers) > 1 or self.context.survives)

    @property
    def primaries(self) -> list[RpcClient]:
        """Connections to the primary server of each shard."""
        return self.connections.primaries

    @property
    def shard_plans(self) -> list[ShardPlan]:
        """The contents of each shard."""
        return self.layout.plans

    @property
    def deadline(self) -> float:
        """Seconds that a wait may take."""
        return self.context.deadline

    # ---- parameters and their servers

    def attach_slots(self, slots: Sequence[Slot], others: Sequence[Optimizer]) -> None:
        """Take charge of the parameters of these slots.

        `others` are optimizers that step only sparse tables. They come last in `optimizers`.
        """
        self.slots = list(slots)
        dense = list(
            {
                id(slot.optimizer): slot.optimizer for slot in slots if slot.optimizer is not None
            }.values()
        )
        self._dense_count = len(dense)
        self.optimizers = dense + [
            optimizer for optimizer in others if all(optimizer is not other for other in dense)
        ]
        self.steps_taken = [0] * len(self.optimizers)

    def use_servers(self, endpoints: ServerEndpoints) -> None:
        """Connect to these servers, and deal the parameters to them."""
        self._replaces_servers = endpoints.pool is not None
        # Out of lockstep no common call notices that workers have changed, so the scope ends the
        # waits for servers.
        self.connections.set_cancel_scope(
            self.context.cancel_scope if self.is_out_of_lockstep else None
        )
        self.connections.connect_all(endpoints, self.worker_numbers[self.context.group.rank])
        self.layout = UnitLayout(
            self.slots,
            self.optimizers[: self._dense_count],
            len(self.connections.callers_by_shard),
            int(self.options.bucket_mb * 1e6),
            ways=[self.codec.choose_codings(slot) for slot in self.slots],
        )
        self.codec.set_units(self.layout.units)

    def regroup(self, context: SyncContext) -> None:
        """Go on with the workers of this context, and forget a loss in an earlier backward."""
        self.context, self.worker_numbers, self._backward_loss = (
            context,
            list(context.agreement.origins),
            None,
        )
        context.extra_groups.append(ServerTraffic(self.connections))

    def list_units(self, optimizer: int) -> list[TransferUnit]:
        """List the units that carry the parameters of an optimizer."""
        return [unit for unit in self.layout.units if unit.optimizer == optimizer]

    # ---- pushing gradients

    def update_share(self) -> None:
        """Set the weight of the next pushes to this worker's share of the step under way."""
        self._step_share = (
            1.0 if self._carried_turn is not None else self.context.step_state.share_of_step
        )

    def compute_push_factor(self, grad: Tensor, scale: float) -> float:
        """Compute the factor of a gradient that has weight `scale` in the step.

        Pushes are multiplied by the share of the step, so the factor makes up for it.

        A sum from `run.no_sync()` may be exchanged in a turn in which this worker has no samples.
        Its share is then 0, and the sum is pushed with weight 1: the worker's other gradients of
        the turn are zero. Out of lockstep a push has one weight, so this is refused.
        """
        state = self.context.step_state
        if self._carried_turn != state.turn:
            self._carried_turn = None
        if self.lockstep and not state.share_of_step and scale and bool(grad.any()):
            self._carried_turn = state.turn
        self.update_share()
        return state.local_factor(grad, scale) if self._carried_turn is None else scale

    def push_early(self, unit: TransferUnit, grads: Mapping[int, Tensor | None]) -> None:
        """Push a unit while backward runs.

        After a loss nothing more is pushed until the samples of the turn are dealt again.
        """
        try:
            if self._backward_loss is None:
                self._push_unit(unit, grads)
        except RECOVERABLE_ERRORS as error:
            self._backward_loss = error
            # Out of lockstep the gradient is pushed again when the optimizer steps.
            if self.lockstep or not self.context.survives:
                raise

    def _push_unit(self, unit: TransferUnit, grads: Mapping[int, Tensor | None]) -> None:
        """Send these gradients, weighted, in place of an earlier push."""
        # An earlier push may still be sent from the same memory.
        self._await_pushes([unit])
        # Asynchronous servers scale the learning rate by the share, not the gradient.
        weight = self._step_share if not self.is_asynchronous else 1.0 if self._step_share else 0.0
        used = unit.pack_gradients(self.slots, grads, weight)
        sent = self.codec.encode_unit(unit, used, counts=weight > 0 or self.lockstep)
        step = self.steps_taken[unit.optimizer] + 1
        turn, keep = (
            self.context.step_state.turn,
            not self.lockstep and not self.drops_late_gradients,
        )
        push = PushGradient(unit.number, step, turn, used, keep, self.drops_late_gradients, sent)
        try:
            unit.pending_pushes.extend(
                send_request(caller, push, self.deadline)
                for caller in self.connections.callers_by_shard[unit.server]
            )
        except RECOVERABLE_ERRORS:
            unit.discard_push()
            raise

    def _await_pushes(self, units: Sequence[TransferUnit]) -> None:
        """Wait until the servers have acknowledged all pushes of these units."""
        for unit in units:
            while unit.pending_pushes:
                unit.pending_pushes.pop().wait_for_reply(self.deadline)

    def push_final_gradients(self, optimizer: int, *, wait: bool = True) -> list[TransferUnit]:
        """Push the final values of p.grad: units that were not pushed yet or changed since.

        Returns the units of the optimizer.

        With `wait`, returns once the pushes have arrived on all servers but the first. The first
        has the scheduler: messages to it stay in order, so it sees the push before the next
        request. In runs that survive losses it is waited for, too.
        """
        if self._backward_loss is not None:
            raise self._backward_loss
        units = self.list_units(optimizer)
        for unit in units:
            grads = {piece.slot: self.slots[piece.slot].parameter.grad for piece, _ in unit.members}
            if unit.has_changed(grads):
                if self._carried_turn is not None and unit.pushed_gradients:
                    raise UsageError(
                        "p.grad was changed in a turn in which this worker has no samples, after "
                        "it had pushed a sum from run.no_sync(): exchange the sum in a turn with "
                        "a whole batch (drop_last=True), use run.clip, or AllReduce"
                    )
                if optimizer in self.clip_factors:
                    raise UsageError(
                        "p.grad was changed after run.clip, and servers have the sum of all "
                        "workers already: change it before run.clip"
                    )
                self._push_unit(unit, grads)
        if wait:
            self._await_pushes([unit for unit in units if unit.server or self._replaces_servers])
        return units

    def discard_pushes(self) -> None:
        """Discard pushes that are in no step yet."""
        for unit in self.layout.units:
            unit.discard_push()

    def mark_pushes_arrived(self) -> None:
        """Take all pushes as arrived: after a loss their acknowledgements don't come any more."""
        for unit in self.layout.units:
            unit.pending_pushes.clear()

    # ---- requests to servers

    def send_to_shards(
        self, optimizer: int, request: Request[R], *, ask: bool = False
    ) -> list[SentRequest[R]]:
        """Send a request to the servers that keep parameters of an optimizer.

        With `ask`, only the primary of each shard gets it; else all copies do.
        """
        shards = sorted({unit.server for unit in self.list_units(optimizer)})
        callers = [
            caller
            for shard in shards
            for caller in self.connections.callers_by_shard[shard][: 1 if ask else None]
        ]
        return [send_request(caller, request, self.deadline) for caller in callers]

    def await_reply(self, sent: SentRequest[R], what: str, who: Request[MissingWorkers]) -> R:
        """Wait for the reply to a request that servers answer after other workers have arrived.

        Raises `DeadlineExceeded` with the ranks of the missing workers.

        Args:
            sent: The request.
            what: The call of the user that waits, for the message.
            who: A request for the missing workers, which is answered at once.
        """
        try:
            return sent.wait_for_reply(self.deadline)
        except DeadlineExceeded as error:
            raise name_missing_workers(
                error,
                sent.client,
                what,
                who,
                ServerWait(self.context.group.rank, self.worker_numbers, self.deadline),
            ) from error

    # ---- pulling parameters

    def request_units(
        self, units: Sequence[TransferUnit], step: int
    ) -> list[SentRequest[UnitValues]]:
        """Request the parameters in these units, as they are after `step`."""
        requests = dict[int, SentRequest[UnitValues]]()
        # Forward uses the first layers first.
        for index, unit in sorted(enumerate(units), key=lambda entry: entry[1].first_slot):
            pull = PullUnit(unit.number, step, not self.lockstep)
            requests[index] = send_request(self.primaries[unit.server], pull, self.deadline)
        return [requests[index] for index in range(len(units))]

    def receive_units(
        self,
        units: Sequence[TransferUnit],
        requests: Sequence[SentRequest[UnitValues]],
        *,
        stepped: bool = True,
    ) -> None:
        """Set parameters to the replies of `request_units`.

        `stepped` says whether they include this worker's pushes.
        """
        with torch.no_grad():
            for unit, sent in zip(units, requests, strict=True):
                unit.unpack_parameters(self.slots, sent.wait_for_reply(self.deadline).values)
        self._await_pushes(units)
        for unit in units:
            unit.pushed_gradients.clear()
        self.codec.end_pushes(units, stepped=stepped)

    def read_all_units(self, steps: Mapping[int, int]) -> None:
        """Read all parameters as they are now, or after step `steps[optimizer]`."""
        reads = [
            self.request_units([unit], steps.get(unit.optimizer, 0))[0]
            for unit in self.layout.units
        ]
        self.receive_units(self.layout.units, reads, stepped=False)

    # ---- clipping

    def compute_own_norm(self, optimizers: Sequence[int], norm_type: float) -> float:
        """Compute the norm of this worker's own gradients for these optimizers."""
        return compute_gradient_norm(
            [
                slot
                for slot, (owner, _) in zip(self.slots, self.layout.owners, strict=True)
                if owner in optimizers
            ],
            norm_type,
        )

    def set_clip(self, clip: PendingClip, norms: Sequence[float]) -> float:
        """Clip the next steps by the norms of all parts, and return the total norm."""
        total, factor = clip.compute_factor(norms)
        self.clip_factors |= dict.fromkeys(clip.optimizers, factor)
        return total

"""A worker's link to the servers: gradients go there unit by unit, parameters come back, and all
servers can be sent the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.rpc import RpcClient
from paceline.errors import LOSSES, DeadlineExceeded, PacelineError, UsageError
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.process.shard import ShardPlan
from paceline.servers.protocol.message import R, Request, SentRequest, send
from paceline.servers.protocol.parameters import PullUnit, PushGradient, UnitValues
from paceline.servers.protocol.samples import MissingWorkers
from paceline.servers.worker.clipping import PendingClip, own_norm
from paceline.servers.worker.compression import PushPullCodec
from paceline.servers.worker.connections import ReplicaConnections, ServerTraffic, ServerWait, named
from paceline.servers.worker.options import ServerOptions
from paceline.servers.worker.units import TransferUnit, UnitLayout
from paceline.sync.base import Slot
from paceline.sync.context import SyncContext


class ServerLink:
    """Connections, layout and codec that a client's parts share.

    Optimizers are known by their numbers, in the order of `optimizers`.
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
        self.lockstep = lockstep  # all workers are meant to take the same steps
        self.drops = drops  # servers leave out what is pushed too late
        self.alone = alone  # each gradient is a step of its own
        self.workers = list(range(context.group.size))  # numbers of the workers, by rank
        self.slots: list[Slot] = []
        self.optimizers: list[Optimizer] = []
        self.steps_taken: list[int] = []
        self.factors: dict[int, float] = {}  # of optimizers whose next step is clipped
        self.layout = UnitLayout([], [], 1, 1)
        self.connections = ReplicaConnections(timings=context.timings.servers)
        self.codec = PushPullCodec(context, options.codec)
        # the first of the optimizers have parameters on servers, the others nothing but sparse
        # tables
        self._dense = 0
        self._replicated = False  # servers are replaced where they are lost
        self._share = 0.0  # this worker's part of the step that its gradients are for
        # the step for which I last pushed what I had added up, having no samples in its turn
        self._owed: int | None = None
        self._lost: PacelineError | None = None  # the loss of a server in a backward of this turn
        context.extra_groups.append(ServerTraffic(self.connections))

    @property
    def free(self) -> bool:
        """Whether workers are not in lockstep."""
        return not self.lockstep and (len(self.workers) > 1 or self.context.survives)

    @property
    def callers(self) -> list[RpcClient]:
        """Connections to the servers that answer, by shard."""
        return self.connections.primaries

    @property
    def plans(self) -> list[ShardPlan]:
        """The contents of each shard."""
        return self.layout.plans

    @property
    def seconds(self) -> float:
        """How many seconds anything is waited for."""
        return self.context.deadline

    # ---- what lies where

    def attach(self, slots: Sequence[Slot], others: Sequence[Optimizer]) -> None:
        """Take charge of these parameters.

        The optimizers of sparse tables alone are `others`: they come after those of parameters.
        """
        self.slots = list(slots)
        dense = list(
            {
                id(slot.optimizer): slot.optimizer for slot in slots if slot.optimizer is not None
            }.values()
        )
        self._dense = len(dense)
        self.optimizers = dense + [
            known for known in others if all(known is not one for one in dense)
        ]
        self.steps_taken = [0] * len(self.optimizers)

    def enter(self, endpoints: ServerEndpoints) -> None:
        """Connect to these servers, and deal the parameters to them."""
        self._replicated = endpoints.pool is not None
        self.connections.follow(self.context.cancel_scope if self.free else None)
        self.connections.open(endpoints, self.workers[self.context.group.rank])
        ways, nbytes = (
            [self.codec.ways(slot) for slot in self.slots],
            int(self.options.bucket_mb * 1e6),
        )
        self.layout = UnitLayout(
            self.slots, self.optimizers[: self._dense], len(self.connections.of), nbytes, ways=ways
        )
        self.codec.lay_out(self.layout.units)

    def regroup(self, context: SyncContext) -> None:
        """Go on with the workers of this context; a loss in a backward before counts no more."""
        self.context, self.workers, self._lost = context, list(context.agreement.origins), None
        context.extra_groups.append(ServerTraffic(self.connections))

    def units(self, optimizer: int) -> list[TransferUnit]:
        """Return the units in which the parameters of an optimizer travel."""
        return [unit for unit in self.layout.units if unit.optimizer == optimizer]

    # ---- gradients go

    def weigh(self) -> None:
        """Let what is pushed from now on count for my share of the step under way."""
        self._share = 1.0 if self._owed is not None else self.context.step_state.share_of_step

    def factor(self, grad: Tensor, scale: float) -> float:
        """Return by what a gradient that counts `scale` in the step is multiplied before it is
        pushed, for the share that it counts for.

        What was added up under `run.no_sync()` counts for 1 where I have no samples in the turn
        that exchanges it, as all else of mine is zero there. Out of lockstep, where a push has one
        weight, that is refused.
        """
        state = self.context.step_state
        if self._owed != state.turn:
            self._owed = None
        if self.lockstep and not state.share_of_step and scale and bool(grad.any()):
            self._owed = state.turn
        self.weigh()
        return state.local_factor(grad, scale) if self._owed is None else scale

    def push_early(self, unit: TransferUnit, grads: Mapping[int, Tensor | None]) -> None:
        """Push a unit while backward runs.

        After a loss nothing more is pushed until the turn is dealt again.
        """
        try:
            if self._lost is None:
                self._push(unit, grads)
        except LOSSES as error:
            self._lost = error
            if self.lockstep or not self.context.survives:
                raise  # otherwise it is pushed again when the optimizer steps

    def _push(self, unit: TransferUnit, grads: Mapping[int, Tensor | None]) -> None:
        """Send these gradients, weighted, in place of what was pushed before."""
        self._await([unit])  # its memory may still be on its way
        # alone: servers step by the share instead
        weight = self._share if not self.alone else 1.0 if self._share else 0.0
        used = unit.pack(self.slots, grads, weight)
        sent = self.codec.encode(unit, used, counts=weight > 0 or self.lockstep)
        step = self.steps_taken[unit.optimizer] + 1
        turn, keep = self.context.step_state.turn, not self.lockstep and not self.drops
        push = PushGradient(unit.number, step, turn, used, keep, self.drops, sent)
        try:
            unit.sent.extend(
                send(caller, push, self.seconds) for caller in self.connections.of[unit.server]
            )
        except LOSSES:
            unit.forget()
            raise

    def _await(self, units: Sequence[TransferUnit]) -> None:
        """Wait until what was pushed of these units has arrived."""
        for unit in units:
            while unit.sent:
                unit.sent.pop().wait(self.seconds)

    def settle(self, optimizer: int, *, wait: bool = True) -> list[TransferUnit]:
        """Push all that p.grad is now; what was changed since it was pushed, again.

        Returns the units of the optimizer.

        `wait` until it has arrived on all servers but the first, where messages stay in order; on
        all, where losses are survived.
        """
        if self._lost is not None:
            raise self._lost
        units = self.units(optimizer)
        for unit in units:
            grads = {piece.slot: self.slots[piece.slot].parameter.grad for piece, _ in unit.members}
            if unit.changed(grads):
                if self._owed is not None and unit.pushed:
                    raise UsageError(
                        "p.grad was changed where this worker has no samples, but pushed what it "
                        "had added up under run.no_sync(): let the "
                        "turn that exchanges it be of a whole batch (drop_last=True), use "
                        "run.clip, or AllReduce"
                    )
                if optimizer in self.factors:
                    raise UsageError(
                        "p.grad was changed after run.clip, when servers have the sum of all "
                        "workers already: change it before that"
                    )
                self._push(unit, grads)
        if wait:
            self._await([unit for unit in units if unit.server or self._replicated])
        return units

    def release(self) -> None:
        """Discard what was pushed and is in no step."""
        for unit in self.layout.units:
            unit.forget()

    def arrived(self) -> None:
        """Note that what was pushed has arrived: after a loss no answer comes any more."""
        for unit in self.layout.units:
            unit.sent.clear()

    # ---- servers are told, and asked

    def everywhere(
        self, optimizer: int, request: Request[R], *, ask: bool = False
    ) -> list[SentRequest[R]]:
        """Send this to the servers that keep parameters of an optimizer.

        `ask`: to only one of the copies of a shard.
        """
        shards = sorted({unit.server for unit in self.units(optimizer)})
        callers = [
            caller
            for shard in shards
            for caller in self.connections.of[shard][: 1 if ask else None]
        ]
        return [send(caller, request, self.seconds) for caller in callers]

    def wait(self, sent: SentRequest[R], what: str, who: Request[MissingWorkers]) -> R:
        """Return the reply to a request that is answered once other workers have come.

        Raises `DeadlineExceeded` that names them.

        `who`: the request that is answered at once with the workers that are missing.
        """
        try:
            return sent.wait(self.seconds)
        except DeadlineExceeded as error:
            raise named(
                error,
                sent.caller,
                what,
                who,
                ServerWait(self.context.group.rank, self.workers, self.seconds),
            ) from error

    # ---- parameters come

    def ask_for(self, units: Sequence[TransferUnit], step: int) -> list[SentRequest[UnitValues]]:
        """Ask for the parameters in these units, as they are once `step` has been made."""
        asked = dict[int, SentRequest[UnitValues]]()
        # forward uses the first layers first
        for place, unit in sorted(enumerate(units), key=lambda found: found[1].first):
            pull = PullUnit(unit.number, step, not self.lockstep)
            asked[place] = send(self.callers[unit.server], pull, self.seconds)
        return [asked[place] for place in range(len(units))]

    def take_in(
        self,
        units: Sequence[TransferUnit],
        asked: Sequence[SentRequest[UnitValues]],
        *,
        stepped: bool = True,
    ) -> None:
        """Set parameters to the replies. `stepped`: they include what I pushed."""
        with torch.no_grad():
            for unit, sent in zip(units, asked, strict=True):
                unit.give(self.slots, sent.wait(self.seconds).values)
        self._await(units)
        for unit in units:
            unit.pushed.clear()
        self.codec.over(units, stepped=stepped)

    def catch_up(self, steps: Mapping[int, int]) -> None:
        """Take in the servers' parameters of now, or after so many `steps` of an optimizer."""
        reads = [
            self.ask_for([unit], steps.get(unit.optimizer, 0))[0] for unit in self.layout.units
        ]
        self.take_in(self.layout.units, reads, stepped=False)

    # ---- clipping

    def norm(self, numbers: Sequence[int], kind: float) -> float:
        """Return the norm of my own gradients of the parameters of these optimizers."""
        return own_norm(
            [
                slot
                for slot, (owner, _) in zip(self.slots, self.layout.owners, strict=True)
                if owner in numbers
            ],
            kind,
        )

    def clip_by(self, asked: PendingClip, norms: Sequence[float]) -> float:
        """Let the steps still to come be clipped by these norms of all parts, and return the
        norm of the whole.
        """
        total, factor = asked.shrink(norms)
        self.factors |= dict.fromkeys(asked.numbers, factor)
        return total

"""The parameter server, seen from a worker: gradients go to servers while backward runs, steps are taken there, parameters come back.

    backward   g9 g8 | g7 g6 ... | g1 g0 |
    push            ---- unit 0 ---- unit 1 ----     to the server that keeps it, as soon as a unit is complete
    step                                       close | read unit 0, unit 1, ... -> parameters

What counts is p.grad when the optimizer steps: what was changed after it had been pushed is pushed again, in place of the first.
When workers wait for each other, and which gradients make a step, is a matter of the pace (`paces`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.rpc import RpcClient, RpcMessage
from paceline.comm.sample_queue import SampleQueue
from paceline.errors import LOSSES, DeadlineExceeded, PacelineError, UsageError
from paceline.server.endpoints import ServerEndpoints
from paceline.server.main import write
from paceline.server.shard import ShardPlan
from paceline.sync.base import Slot
from paceline.sync.context import SyncContext
from paceline.sync.parameterserver import transfer
from paceline.sync.parameterserver.clipping import PendingClip, covered, own_norm
from paceline.sync.parameterserver.compression import PushPullCodec
from paceline.sync.parameterserver.connections import ReplicaConnections, ServerTraffic, ServerWait, named
from paceline.sync.parameterserver.consistency import Consistency, OutOfLockstep
from paceline.sync.parameterserver.consistency_elastic import ElasticConsistency, paced
from paceline.sync.parameterserver.prefetch import PendingPulls
from paceline.sync.parameterserver.replication import ServerReplication
from paceline.sync.parameterserver.settled import ElasticBulkSynchronous
from paceline.sync.parameterserver.units import TransferUnit, UnitLayout, packed
from paceline.sync.tables.freerows import UnlockedRows
from paceline.trace import Served

if TYPE_CHECKING:
    from paceline.sync.parameterserver.strategy import ParameterServer


class ParameterServerSync:
    """The running side of `ParameterServer`."""

    exchanges_in_backward = False  # backward waits for nobody

    def __init__(self, context: SyncContext, plan: ParameterServer) -> None:
        if context.servers is None:
            raise UsageError("ParameterServer needs servers, and nobody starts any here: start the workers with `paceline run`")
        self.context, self._spec = context, plan
        self._endpoints: ServerEndpoints | None = None
        self._waiting = False  # to be told where servers are
        self.wires = ReplicaConnections()
        context.extra_groups.append(ServerTraffic(self.wires))
        self.slots: list[Slot] = []
        self.optimizers: list[Optimizer] = []
        self._dense = 0  # the first of them have parameters on servers, the others nothing but sparse tables
        self.steps_taken: list[int] = []
        self.factors: dict[int, float] = {}  # of optimizers whose next step is clipped
        self._layout = UnitLayout([], [], 1, 1)
        self._at: dict[int, int] = {}
        self._grads: dict[int, Tensor] = {}
        self._part = 0.0
        self._lost: PacelineError | None = None  # in a backward of this turn
        self.workers = list(range(context.group.size))
        self.clips: dict[int, PendingClip] = {}  # what was asked for, of those
        self.pace: Consistency = paced(self, plan)
        self.rows = UnlockedRows(self)  # what else these optimizers step, where workers are not in lockstep
        self.wrapper = PushPullCodec(context, plan.codec, apart=self.pace.free)
        self._leveled: list[int] = []  # steps taken when I had exactly what servers have
        self.coming = PendingPulls(self)
        self.arriving = self.coming if plan.pull == "forward" else None  # see `RemoteOptimizer.arriving`

    @property
    def replicas_diverge(self) -> bool:
        return self.free

    @property
    def free(self) -> bool:
        """Whether workers are not in lockstep."""
        return self.pace.free and (len(self.workers) > 1 or self.context.survives)

    @property
    def sample_queue(self) -> SampleQueue | None:
        return self.pace.sample_queue if self.free and isinstance(self.pace, OutOfLockstep | ElasticConsistency) else None

    @property
    def lasting(self) -> ElasticBulkSynchronous | ElasticConsistency | None:
        """The pace, where losses are survived."""
        return self.pace if isinstance(self.pace, ElasticBulkSynchronous | ElasticConsistency) else None

    @property
    def callers(self) -> list[RpcClient]:
        """The ends towards those servers that are asked, by shard."""
        return self.wires.primaries

    @property
    def plans(self) -> list[ShardPlan]:
        """What is kept in each shard."""
        return self._layout.plans

    @property
    def seconds(self) -> float:
        """How long anything is waited for."""
        return self.context.deadline

    # ---- what lies where

    def attach(self, slots: Sequence[Slot]) -> None:
        self.coming.arrive()
        if any(self.steps_taken):
            raise UsageError(
                "parameters that were frozen, or have come with another model, are trained now, and servers can't take in more of them "
                "once they have stepped: prepare all of them before, and let them require gradients then, or use AllReduce"
            )
        if any(slot.parameter.device.type != "cpu" for slot in slots):
            raise UsageError("ParameterServer can't serve models on GPUs yet; say start(device='cpu'), or use another strategy")
        self.slots = [slot for slot in slots if slot.optimizer is not None]
        self._at = {n: at for at, n in enumerate(n for n, slot in enumerate(slots) if slot.optimizer is not None)}  # n: as backward counts
        dense = list({id(slot.optimizer): slot.optimizer for slot in self.slots if slot.optimizer is not None}.values())
        self._dense = len(dense)
        self.optimizers = dense + [known for known in self.optimizers if self.rows.has(known) and all(known is not one for one in dense)]
        self.steps_taken = [0] * len(self.optimizers)
        self.wires.dismiss(told=self.context.group.rank == 0)
        assert self.context.servers is not None
        endpoints = self.context.servers(self._spec.servers, self._spec.replicas)
        if endpoints.pool is not None:
            self.pace = self.pace if isinstance(self.pace, ElasticConsistency) else ElasticBulkSynchronous(self)
            filled = partial(transfer.copy, self)
            self.pace.copies = ServerReplication(self.context, endpoints.pool, self.wires, self._spec.replicas, fill=filled)
        elif self._spec.replicas > 1:
            raise UsageError(
                f"replicas={self._spec.replicas} is for runs that go on when a server is lost: start them with `paceline run --min-workers "
                "N`, or leave it out"
            )
        self._waiting = endpoints.pool is not None and not endpoints.addresses
        if not self._waiting:
            self._enter(endpoints)
            self.wrapper.measure(self.wires, self.seconds)
            for server, plan in enumerate(self.plans):
                self.wires.tell(server, "plan", {}, [packed(write(plan))], self.seconds)
            self._hand_over(None)

    def _enter(self, endpoints: ServerEndpoints) -> None:
        self._endpoints = endpoints
        self.wires.follow(self.context.cancel_scope if self.free else None)
        self.wires.open(endpoints, self.workers[self.context.group.rank])
        ways = [self.wrapper.ways(slot) for slot in self.slots]
        self._layout = UnitLayout(
            self.slots, self.optimizers[: self._dense], len(self.wires.of), int(self._spec.bucket_mb * 1e6), ways=ways
        )
        self.wrapper.lay_out(self._layout.parcels)
        self.coming.lay_out()
        self.pace.begin()

    def _hand_over(self, memories: Sequence[Mapping[str, Any]] | None) -> None:
        """Servers begin with the first worker's parameters, and with `memories` (None: what its optimizers remember). Collective."""
        mine = [slot.optimizer.state.pop(slot.parameter, {}) for slot in self.slots if slot.optimizer is not None]
        if self.wires.of and self.context.group.rank == 0:
            transfer.fill(self, self._layout, mine if memories is None else memories)
        self.context.agreement.meet("servers")
        self._leveled = [*self.steps_taken]

    # ---- backward: what is complete leaves

    def ready(self, number: int, grad: Tensor, scale: float) -> None:
        self._part = self.context.step_state.share_of_step
        factor = scale / self._part if self._part else 0.0
        value = torch.zeros_like(grad) if factor == 0.0 else grad if factor == 1.0 else grad * factor
        at = self._at.get(number, ~number)  # what no optimizer steps stays here
        self._grads[at] = self._grads[at] + value if at in self._grads else value
        for parcel in self._layout.of.get(at, ()):
            if self._lost is None and not parcel.pushed and all(piece.slot in self._grads for piece, _ in parcel.members):
                try:
                    self._push(parcel, {piece.slot: self._grads[piece.slot] for piece, _ in parcel.members})
                except LOSSES as error:
                    self._lost = error  # this backward won't be whole; or, if not in lockstep, it is pushed again when the optimizer steps
                    if not isinstance(self.pace, ElasticConsistency):
                        raise

    def backward_done(self, where: str) -> list[tuple[int, Tensor]]:
        self._part = self.context.step_state.share_of_step
        found, self._grads = self._grads, {}
        return [(number, found[at]) for number, at in self._at.items() if at in found] + [(~at, x) for at, x in found.items() if at < 0]

    def _push(self, parcel: TransferUnit, grads: Mapping[int, Tensor | None]) -> None:
        """These gradients, weighted, to the server; in place of what was pushed before."""
        self.coming.arrive(parcel.optimizer)
        self._await([parcel])  # its memory may be on its way still
        self.pace.pushing(parcel.optimizer)
        weight = self.pace.weight(self._part)
        used = parcel.pack(self.slots, grads, weight)
        sent = self.wrapper.encode(parcel, used, counts=weight > 0 or not self.pace.free)
        step = self.steps_taken[parcel.optimizer] + 1
        body = {"unit": parcel.number, "used": used, "step": step, "late": self.pace.drops, "turn": self.context.step_state.step}
        body |= {"keep": self.pace.free and not self.pace.drops}
        callers = self.wires.of[parcel.server]
        parts: dict[str, Any] = {"body": body, "tensors": [sent], "seconds": self.seconds}
        parcel.sent = [(caller, caller.send("push", step=step, **parts)) for caller in callers]

    def _await(self, parcels: Sequence[TransferUnit]) -> None:
        """What was pushed of them has arrived."""
        for parcel in parcels:
            while parcel.sent:
                caller, message = parcel.sent.pop()
                caller.wait(message, self.seconds)

    def settle(self, optimizer: int, *, wait: bool = True) -> list[TransferUnit]:
        """All that p.grad is now is pushed: what was changed since it was, again. Gives the units of the optimizer.

        `wait`: until it has arrived, on all servers but the first, where it comes before what that is asked for after it; on all, where
        losses are survived.
        """
        if self._lost is not None:
            raise self._lost
        self.coming.check(optimizer)
        parcels = self.units(optimizer)
        for parcel in parcels:
            grads = {piece.slot: self.slots[piece.slot].parameter.grad for piece, _ in parcel.members}
            if parcel.changed(grads):
                if optimizer in self.factors:
                    raise UsageError(
                        "p.grad was changed after run.clip, when servers have the sum of all workers already: change it before that"
                    )
                self._push(parcel, grads)
        if wait:
            self._await([parcel for parcel in parcels if parcel.server or self.lasting is not None])
        return parcels

    # ---- a step

    @property
    def attached(self) -> bool:
        return bool(self.slots)

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps on servers."""
        return any(known is optimizer for known in self.optimizers)

    def step(self, optimizer: Optimizer) -> None:
        """Instead of the optimizer's own step: see `ParameterServer`."""
        self.coming.step(next(n for n, known in enumerate(self.optimizers) if known is optimizer), self.pace.step)

    def units(self, optimizer: int) -> list[TransferUnit]:
        """Those in which the parameters of an optimizer travel."""
        return [parcel for parcel in self._layout.parcels if parcel.optimizer == optimizer]

    def norm(self, numbers: Sequence[int], kind: float) -> float:
        """The norm of my own gradients, of the parameters of these optimizers."""
        return own_norm([slot for slot, (owner, _) in zip(self.slots, self._layout.owners, strict=True) if owner in numbers], kind)

    def everywhere(self, kind: str, optimizer: int, step: int, body: dict[str, Any], *, ask: bool = False) -> list[tuple[RpcClient, int]]:
        """Send this to the servers that keep parameters of an optimizer; gives the end to each of them, with the number of the message.

        `ask`: of the copies of a shard to one alone.
        """
        body = {"optimizer": optimizer, "step": step, "turn": self.context.step_state.step, **body}
        shards = sorted({parcel.server for parcel in self.units(optimizer)})
        callers = [caller for shard in shards for caller in self.wires.of[shard][: 1 if ask else None]]
        return [(caller, caller.send(kind, step=step, body=body, seconds=self.seconds)) for caller in callers]

    def ask_for(self, parcels: Sequence[TransferUnit], step: int) -> list[int]:
        """Ask for the parameters in these units, as they are once `step` has been taken; gives the numbers of the messages."""
        messages = dict[int, int]()
        for place, parcel in sorted(enumerate(parcels), key=lambda found: found[1].first):  # forward uses the first layers first
            body = {"unit": parcel.number, "step": step, "copy": self.pace.free, **self.wrapper.asked(parcel)}
            messages[place] = self.callers[parcel.server].send("read", step=step, body=body, seconds=self.seconds)
        return [messages[place] for place in range(len(parcels))]

    def take_in(self, parcels: Sequence[TransferUnit], messages: Sequence[int], *, stepped: bool = True, soon: bool = True) -> None:
        """Parameters are what was asked for. `stepped`: with what I had pushed of them, or void. `soon`: when they are used, perhaps."""
        pulls = list(zip(parcels, messages, strict=True))
        self._give(self.coming.expect(pulls) if soon and self.arriving is not None else pulls)
        for parcel in parcels:
            parcel.pushed = {}
        self._await(parcels)
        self.wrapper.over(parcels, stepped=stepped)

    def _give(self, pulls: Sequence[tuple[TransferUnit, int]]) -> None:
        with torch.no_grad():
            for parcel, message in pulls:
                parcel.give(self.slots, self.wrapper.decode(parcel, self.callers[parcel.server].wait(message, self.seconds)))

    def catch_up(self, steps: Mapping[int, int], *, exactly: bool = False) -> None:
        """Parameters are what servers have now, or once they have taken so many `steps` of an optimizer. `exactly`: not through a codec."""
        self.coming.arrive()
        self.wrapper.unlearn(self._layout.parcels if exactly else ())
        reads = [self.ask_for([parcel], steps.get(parcel.optimizer, 0))[0] for parcel in self._layout.parcels]
        self.take_in(self._layout.parcels, reads, stepped=False, soon=False)

    def wait(self, caller: RpcClient, message: int, what: str, who: tuple[str, dict[str, Any]]) -> RpcMessage:
        """The answer to a message that is answered once other workers have come. Raises `DeadlineExceeded` that names them.

        `who`: the message that is answered at once with those who are missing.
        """
        try:
            return caller.wait(message, self.seconds)
        except DeadlineExceeded as error:
            raise named(error, caller, what, who, ServerWait(self.context.group.rank, self.workers, self.seconds)) from error

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Let the next steps be clipped by the norm of the gradients that make them; gives it."""
        numbers = covered(parameters, self.slots, [owner for owner, _ in self._layout.owners])
        self.clips |= dict.fromkeys(numbers, PendingClip(numbers, max_norm, norm_type))
        return torch.tensor(self.clip_by(self.clips[numbers[0]], self.pace.norms(numbers, norm_type, max_norm)))

    def clip_by(self, asked: PendingClip, norms: Sequence[float]) -> float:
        """Let the steps that are still to come be clipped by these norms, of all its parts; gives that of the whole."""
        total, factor = asked.shrink(norms)
        self.factors |= {number: factor for number in asked.numbers if self.clips.get(number) is asked}
        return total

    def commit(self) -> None:
        self.wrapper.commit()
        self.pace.commit()

    # ---- the rest of the life of a strategy

    def abort(self) -> None:
        self._grads.clear()
        self.wrapper.forget()
        if isinstance(self.pace, ElasticBulkSynchronous):
            self.release()
            self.pace.abort()

    def converge(self) -> None:
        self.coming.arrive()
        if self.free and self.slots and isinstance(self.pace, OutOfLockstep | ElasticConsistency) and self.pace.sample_queue.open:
            self.pace.sample_queue.open = False
            self.context.agreement.meet("servers rest")  # nobody pushes any more
            self.context.agreement.lasting(lambda: self.catch_up({}, exactly=True))
            self.context.agreement.meet("servers are read")  # and nobody again before all have read
        elif self.wrapper.coded and self._leveled != self.steps_taken:
            self.context.agreement.repeat(self._level, what="servers tell all")
            self._leveled = [*self.steps_taken]

    def _level(self) -> None:
        """In lockstep, through a codec: all have, and go on from, exactly what servers have. Collective."""
        self.context.agreement.meet("servers are read")  # nobody waits for what was told before
        for caller in self.wires.callers if self.context.group.rank == 0 else ():
            caller.call("level", seconds=self.seconds)
        self.context.agreement.meet("servers tell all")
        with self.wrapper.uncounted():
            self._give(list(zip(self.wrapper.coded, self.ask_for(self.wrapper.coded, 0), strict=True)))

    def join_info(self) -> Any:
        assert self.lasting is not None
        copies, times = self.lasting.copies, self.pace.sample_queue.times + 1 if isinstance(self.pace, ElasticConsistency) else 0
        return {"room": copies.pool.join_info(), "steps": self.steps_taken, "leveled": self._leveled, "times": times}

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """See `Sync.regroup`. Raises `StateLost` where a server was lost, and nobody else has what it kept."""
        self.context, self.workers = context, list(context.agreement.origins)
        context.extra_groups.append(ServerTraffic(self.wires))
        if not self.slots:
            return
        assert self.lasting is not None
        if self._waiting:
            self._waiting = False
            self._enter(self.lasting.copies.pool.join(layout["room"]))
            self.steps_taken, self._leveled = list(layout["steps"]), list(layout["leveled"])
            if isinstance(self.pace, ElasticConsistency):
                self.pace.sample_queue.times = layout["times"]
        self._lost = None
        self.lasting.regroup()

    def release(self) -> None:
        """What was pushed and is in no step is void."""
        for parcel in self._layout.parcels:
            parcel.forget()

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """See `Sync.load_from_peer`: all there is lies on servers, or came with the parameters."""

    def detach(self) -> None:
        left, pool = self.wires.left, None if self._endpoints is None else self._endpoints.pool
        if self.copies is not None:
            self.copies.close()
        self.wires.dismiss(told=pool is not None and not left and self.context.group.rank == 0)
        if pool is not None and left:
            pool.leave()
        elif self._endpoints is not None:
            self._endpoints.close()

    @property
    def copies(self) -> ServerReplication | None:
        return None if self.lasting is None or self._endpoints is None else self.lasting.copies

    def servers_begun(self) -> list[str]:
        return self.pace.take_begun() if isinstance(self.pace, ElasticConsistency) else []

    def facts(self) -> list[dict[str, Any]]:
        """What each server has done so far, for the summary."""
        return self.context.agreement.lasting(lambda: self.wires.facts(self.seconds))

    def served(self) -> list[Served]:
        return self.wires.served(self.seconds) if self.context.trace.kept else []

    def state_dict(self) -> dict[str, Any]:
        """See `Sync.state_dict`: what optimizers on servers remember of each parameter, on the first worker."""
        kept = self.wrapper.state_dict(self.slots)
        if not self.callers or self.context.group.rank:
            return {"memories": None, **kept}
        return {"memories": transfer.memories(self, len(self.slots)), **kept}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """See `Sync.load_state_dicts`: servers go on from the parameters that are here, and what was saved."""
        self.coming.arrive()
        found = [state for state in states if state]
        self._hand_over(transfer.saved(found, len(self.slots)))
        self.wrapper.load_state_dicts(found)

"""The parameter server, seen from a worker: gradients go out during backward, parameters come back.

    backward   g9 g8 | g7 g6 ... | g1 g0 |
    push            ---- unit 0 ---- unit 1 ----     to its server, as soon as a unit is complete
    step                                       close | read unit 0, unit 1, ... -> parameters

The value of p.grad when the optimizer steps counts: a gradient that was changed after the push is
pushed again, in place of the first. The consistency model decides when workers wait for each other,
and which gradients make a step (`consistency`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sample_queue import SampleQueue
from paceline.errors import UsageError
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.protocol.message import call
from paceline.servers.protocol.parameters import PlanShard
from paceline.servers.protocol.plans import write
from paceline.servers.protocol.recovery import DiscardPushes
from paceline.servers.tables.steps import PerWorkerRowSteps
from paceline.servers.worker import transfer
from paceline.servers.worker.clipping import PendingClip, covered
from paceline.servers.worker.consistency import ConsistencyModel
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.options import ServerOptions
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.units import packed
from paceline.sync.base import Slot
from paceline.sync.context import SyncContext
from paceline.trace import Served


class ParameterServerSync:
    """The running side of `ParameterServer`."""

    exchanges_in_backward = False  # backward doesn't wait

    def __init__(
        self, context: SyncContext, options: ServerOptions, model: ConsistencyModel
    ) -> None:
        if context.servers is None:
            raise UsageError(
                "ParameterServer needs servers, and nobody starts any here: "
                "start the workers with `paceline run`"
            )
        self.context = context
        self.link = ServerLink(
            context, options, lockstep=model.lockstep, drops=model.drops, alone=model.alone
        )
        # what else these optimizers step, where workers are not in lockstep
        self.rows = PerWorkerRowSteps(self.link)
        self.consistency = model.make(self.link, self.rows)
        self._endpoints: ServerEndpoints | None = None
        self._waiting = False  # this worker hasn't been told yet where servers are
        # number of a slot, as backward counts -> its place among the link's slots
        self._at: dict[int, int] = {}
        self._grads: dict[int, Tensor] = {}

    @property
    def replicas_diverge(self) -> bool:
        return self.link.free

    @property
    def sample_queue(self) -> SampleQueue | None:
        return self.consistency.sample_queue if self.link.free else None

    # ---- what lies where

    def attach(self, slots: Sequence[Slot]) -> None:
        link = self.link
        if any(link.steps_taken):
            raise UsageError(
                "parameters that were frozen, or have come with another model, are trained now, "
                "and servers can't take in more of them "
                "once they have stepped: prepare all of them before, and let them require "
                "gradients then, or use AllReduce"
            )
        if any(slot.parameter.device.type != "cpu" for slot in slots):
            raise UsageError(
                "ParameterServer can't serve models on GPUs yet; say start(device='cpu'), or use "
                "another strategy"
            )
        stepped = [slot.optimizer is not None for slot in slots]
        self._at = {
            number: at
            for at, number in enumerate(number for number, some in enumerate(stepped) if some)
        }
        link.attach(
            [slot for slot in slots if slot.optimizer is not None],
            [known for known in link.optimizers if self.rows.has(known)],
        )
        link.connections.dismiss(told=self.context.group.rank == 0)
        assert self.context.servers is not None
        endpoints = self.context.servers(link.options.servers, link.options.replicas)
        if (copies := transfer.replication(link, endpoints)) is not None:
            self.consistency.survive(copies)
        self._waiting = endpoints.pool is not None and not endpoints.addresses
        if not self._waiting:
            self._enter(endpoints)
            link.codec.measure(link.connections, link.seconds)
            for server, plan in enumerate(link.plans):
                link.connections.tell(server, PlanShard(packed(write(plan))), link.seconds)
            self._hand_over(None)

    def _enter(self, endpoints: ServerEndpoints) -> None:
        self._endpoints = endpoints
        self.link.enter(endpoints)
        self.consistency.begin()

    def _hand_over(self, memories: Sequence[Mapping[str, Any]] | None) -> None:
        """Fill servers with the first worker's parameters and `memories` (None: its optimizers'
        state). Collective.
        """
        link = self.link
        mine = [
            slot.optimizer.state.pop(slot.parameter, {})
            for slot in link.slots
            if slot.optimizer is not None
        ]
        if link.connections.of and self.context.group.rank == 0:
            transfer.fill(link, mine if memories is None else memories)
        self.context.agreement.meet("servers")

    # ---- backward: what is complete leaves

    def ready(self, number: int, grad: Tensor, scale: float) -> None:
        factor = self.link.factor(grad, scale)
        value = (
            torch.zeros_like(grad) if factor == 0.0 else grad if factor == 1.0 else grad * factor
        )
        at = self._at.get(number, ~number)  # what no optimizer steps stays here
        self._grads[at] = self._grads[at] + value if at in self._grads else value
        for unit in self.link.layout.of.get(at, ()):
            if not unit.pushed and all(piece.slot in self._grads for piece, _ in unit.members):
                self.consistency.pushing(unit.optimizer)
                self.link.push_early(
                    unit, {piece.slot: self._grads[piece.slot] for piece, _ in unit.members}
                )

    def backward_done(self, where: str) -> list[tuple[int, Tensor]]:
        self.link.weigh()
        found, self._grads = self._grads, {}
        return [(number, found[at]) for number, at in self._at.items() if at in found] + [
            (~at, x) for at, x in found.items() if at < 0
        ]

    # ---- a step

    @property
    def attached(self) -> bool:
        return bool(self.link.slots)

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps on servers."""
        return any(known is optimizer for known in self.link.optimizers)

    def step(self, optimizer: Optimizer) -> None:
        """Make a step of this optimizer on the servers, instead of its own."""
        number = next(n for n, known in enumerate(self.link.optimizers) if known is optimizer)
        began = time.perf_counter()
        self.consistency.step(number)
        self.link.codec.waited(began, time.perf_counter() - began, len(self.link.callers))

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Let the next steps be clipped by the norm of the gradients that make them, and return
        that norm.
        """
        link = self.link
        numbers = covered(parameters, link.slots, [owner for owner, _ in link.layout.owners])
        asked = PendingClip(numbers, max_norm, norm_type)
        return torch.tensor(
            link.clip_by(asked, self.consistency.norms(numbers, norm_type, max_norm))
        )

    def commit(self) -> None:
        self.link.codec.commit()
        self.consistency.commit()

    # ---- the rest of the life of a strategy

    def abort(self) -> None:
        self._grads.clear()
        self.link.codec.forget()
        self.consistency.abort()

    def converge(self) -> None:
        link, agreement, sample_queue = (
            self.link,
            self.context.agreement,
            self.consistency.sample_queue,
        )
        if link.free and link.slots and sample_queue is not None and sample_queue.open:
            sample_queue.rest()
            agreement.meet("servers rest")  # from here on no worker pushes
            # what lost workers had pushed
            if self.context.survives and self.context.group.rank == 0:
                agreement.retry_after_losses(
                    lambda: [call(caller, DiscardPushes(), link.seconds) for caller in link.callers]
                )
            agreement.retry_after_losses(lambda: link.catch_up({}))
            agreement.meet("servers are read")  # no worker pushes again before all have read

    def join_info(self) -> Any:
        recovery, sample_queue = self.consistency.recovery, self.consistency.sample_queue
        assert recovery is not None
        times = 0 if sample_queue is None else sample_queue.times + 1
        return {
            "room": recovery.copies.pool.join_info(),
            "steps": self.link.steps_taken,
            "times": times,
        }

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Go on with the workers and servers that are left.

        Raises `StateLost` where what a lost server kept is nowhere else.
        """
        self.context = context
        self.link.regroup(context)
        if not self.link.slots:
            return
        recovery, sample_queue = self.consistency.recovery, self.consistency.sample_queue
        assert recovery is not None
        if self._waiting:
            self._waiting = False
            self._enter(recovery.copies.pool.join(layout["room"]))
            self.link.steps_taken[:] = layout["steps"]
            if sample_queue is not None:
                sample_queue.join(layout["times"])
        self.consistency.regroup()

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """Do nothing, as all state is on servers or came with the parameters."""

    def detach(self) -> None:
        connections, pool = (
            self.link.connections,
            None if self._endpoints is None else self._endpoints.pool,
        )
        left = connections.left
        if self.copies is not None:
            self.copies.close()
        connections.dismiss(told=pool is not None and not left and self.context.group.rank == 0)
        if pool is not None and left:
            pool.leave()
        elif self._endpoints is not None:
            self._endpoints.close()

    @property
    def copies(self) -> ServerReplication | None:
        recovery = self.consistency.recovery
        return None if recovery is None or self._endpoints is None else recovery.copies

    def facts(self) -> list[dict[str, Any]]:
        """Work of each server so far, for the summary."""
        return self.context.agreement.retry_after_losses(
            lambda: self.link.connections.facts(self.link.seconds)
        )

    def served(self) -> list[Served]:
        return self.link.connections.served(self.link.seconds) if self.context.trace.kept else []

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizers on servers for each parameter, on the first worker; and
        what this worker's codec keeps.
        """
        kept = self.link.codec.state_dict(self.link.slots)
        if not self.link.callers or self.context.group.rank:
            return {"memories": None, **kept}
        return {"memories": transfer.memories(self.link, len(self.link.slots)), **kept}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Let servers go on from the parameters that are here, and the saved state."""
        found = [state for state in states if state]
        self._hand_over(transfer.saved(found, len(self.link.slots)))
        self.link.codec.load_state_dicts(found)

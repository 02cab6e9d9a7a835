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
from paceline.servers.protocol.message import call_server
from paceline.servers.protocol.parameters import PlanShard
from paceline.servers.protocol.plans import pack_plan
from paceline.servers.protocol.recovery import DiscardPushes
from paceline.servers.tables.row_steps import PerWorkerRowSteps
from paceline.servers.worker import state_transfer
from paceline.servers.worker.clipping import PendingClip, find_clipped_optimizers
from paceline.servers.worker.consistency import ConsistencyModel
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.options import ServerOptions
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.transfer_units import bytes_to_tensor
from paceline.sync.base import Slot
from paceline.sync.context import SyncContext
from paceline.trace import ServerWork


class ParameterServerSync:
    """The running side of `ParameterServer`.

    Slots are numbered twice: by the index that backward uses, and by the index among the slots of
    `link`, which has only parameters that an optimizer steps. `_link_slots` maps the first to the
    second. `_gradient_sums` is keyed by the index in `link`; a parameter without an optimizer has
    the key `~index` instead.
    """

    exchanges_in_backward = False  # backward doesn't wait

    def __init__(
        self, context: SyncContext, options: ServerOptions, model: ConsistencyModel
    ) -> None:
        if context.servers is None:
            raise UsageError(
                "ParameterServer needs servers, and this launcher starts none: "
                "start the workers with `paceline run`"
            )
        self.context = context
        self.link = ServerLink(
            context, options, lockstep=model.lockstep, drops=model.drops, alone=model.alone
        )
        # Sparse tables that the same optimizers step, if workers are not in lockstep.
        self.rows = PerWorkerRowSteps(self.link)
        self.consistency = model.make(self.link, self.rows)
        self._endpoints: ServerEndpoints | None = None
        self._awaits_servers = False  # this worker has joined, and has no addresses of servers yet
        self._link_slots: dict[int, int] = {}
        self._gradient_sums: dict[int, Tensor] = {}

    @property
    def replicas_diverge(self) -> bool:
        return self.link.is_out_of_lockstep

    @property
    def sample_queue(self) -> SampleQueue | None:
        return self.consistency.sample_queue if self.link.is_out_of_lockstep else None

    # ---- parameters and their servers

    def attach(self, slots: Sequence[Slot]) -> None:
        link = self.link
        if any(link.steps_taken):
            raise UsageError(
                "parameters that were frozen, or belong to a new model, are trained now, and "
                "servers take no more parameters after the first step: prepare all models "
                "before it, with requires_grad=True, or use AllReduce"
            )
        if any(slot.parameter.device.type != "cpu" for slot in slots):
            raise UsageError(
                "ParameterServer can't serve models on GPUs yet; use start(device='cpu') or "
                "another strategy"
            )
        stepped = [index for index, slot in enumerate(slots) if slot.optimizer is not None]
        self._link_slots = {index: link_index for link_index, index in enumerate(stepped)}
        link.attach_slots(
            [slot for slot in slots if slot.optimizer is not None],
            [optimizer for optimizer in link.optimizers if self.rows.steps_tables(optimizer)],
        )
        # Slots may be attached again, with more parameters: the earlier servers end.
        link.connections.dismiss_servers(told=self.context.group.rank == 0)
        assert self.context.servers is not None
        endpoints = self.context.servers(link.options.servers, link.options.replicas)
        if (copies := state_transfer.make_replication(link, endpoints)) is not None:
            self.consistency.enable_recovery(copies)
        self._awaits_servers = endpoints.pool is not None and not endpoints.addresses
        # A worker that joins later connects in `regroup`, and finds the servers filled.
        if not self._awaits_servers:
            self._connect_servers(endpoints)
            link.codec.measure_link(link.connections, link.deadline)
            for server, plan in enumerate(link.shard_plans):
                link.connections.tell_all_copies(
                    server, PlanShard(bytes_to_tensor(pack_plan(plan))), link.deadline
                )
            self._fill_servers(None)

    def _connect_servers(self, endpoints: ServerEndpoints) -> None:
        self._endpoints = endpoints
        self.link.use_servers(endpoints)
        self.consistency.begin_steps()

    def _fill_servers(self, memories: Sequence[Mapping[str, Any]] | None) -> None:
        """Fill servers with the first worker's parameters and optimizer state. Collective.

        `memories` is the optimizer state of each slot. None: the state of the local optimizers.
        """
        link = self.link
        # Servers keep the state from here on, so the local optimizer forgets it.
        local_memories = [
            slot.optimizer.state.pop(slot.parameter, {})
            for slot in link.slots
            if slot.optimizer is not None
        ]
        if link.connections.callers_by_shard and self.context.group.rank == 0:
            state_transfer.fill_servers(link, local_memories if memories is None else memories)
        self.context.agreement.meet("servers")

    # ---- backward: complete units are pushed

    def take_gradient(self, number: int, grad: Tensor, scale: float) -> None:
        factor = self.link.compute_push_factor(grad, scale)
        # A factor of 0 means zeros, even for gradients that are inf or nan.
        value = (
            torch.zeros_like(grad) if factor == 0.0 else grad if factor == 1.0 else grad * factor
        )
        # The gradient of a parameter that no optimizer steps isn't pushed.
        key = self._link_slots.get(number, ~number)
        self._gradient_sums[key] = (
            self._gradient_sums[key] + value if key in self._gradient_sums else value
        )
        # Push a unit as soon as all of its parameters have a gradient. Later changes of p.grad
        # are pushed again before the step.
        for unit in self.link.layout.units_by_slot.get(key, ()):
            if not unit.pushed_gradients and all(
                piece.slot in self._gradient_sums for piece, _ in unit.members
            ):
                self.consistency.prepare_push(unit.optimizer)
                self.link.push_early(
                    unit, {piece.slot: self._gradient_sums[piece.slot] for piece, _ in unit.members}
                )

    def end_backward(self, where: str) -> list[tuple[int, Tensor]]:
        self.link.update_share()
        sums, self._gradient_sums = self._gradient_sums, {}
        served = [(index, sums[key]) for index, key in self._link_slots.items() if key in sums]
        return served + [(~key, grad) for key, grad in sums.items() if key < 0]

    # ---- a step

    @property
    def attached(self) -> bool:
        return bool(self.link.slots)

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps on servers."""
        return any(other is optimizer for other in self.link.optimizers)

    def step(self, optimizer: Optimizer) -> None:
        """Make a step of this optimizer on the servers, instead of its own."""
        index = next(i for i, other in enumerate(self.link.optimizers) if other is optimizer)
        began = time.perf_counter()
        self.consistency.make_step(index)
        self.link.codec.record_wait(began, time.perf_counter() - began, len(self.link.primaries))

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the next step of these parameters, and return the norm of its gradient.

        The gradient is the one that makes the step: the mean over the workers that take part in it.

        Args:
            parameters: All parameters of one or more optimizers.
            max_norm: Norm that the clipped gradient may have at most.
            norm_type: Order p of the p-norm.
        """
        link = self.link
        indices = find_clipped_optimizers(
            parameters, link.slots, [owner for owner, _ in link.layout.owners]
        )
        pending = PendingClip(indices, max_norm, norm_type)
        return torch.tensor(
            link.set_clip(pending, self.consistency.compute_norms(indices, norm_type, max_norm))
        )

    def commit(self) -> None:
        self.link.codec.commit_residuals()
        self.consistency.commit_turn()

    # ---- the rest of the life of a strategy

    def abort(self) -> None:
        self._gradient_sums.clear()
        self.link.codec.discard_residuals()
        self.consistency.abort_turn()

    def converge(self) -> None:
        link, agreement, sample_queue = (
            self.link,
            self.context.agreement,
            self.consistency.sample_queue,
        )
        # Out of lockstep workers end an epoch with different parameters. All stop pushing, then
        # read the same state of the servers.
        if (
            link.is_out_of_lockstep
            and link.slots
            and sample_queue is not None
            and sample_queue.open
        ):
            sample_queue.end_epoch()
            agreement.meet("servers rest")  # from here on no worker pushes
            # Gradients of lost workers that are in no step yet are dropped.
            if self.context.survives and self.context.group.rank == 0:
                agreement.retry_after_losses(
                    lambda: [
                        call_server(caller, DiscardPushes(), link.deadline)
                        for caller in link.primaries
                    ]
                )
            agreement.retry_after_losses(lambda: link.read_all_units({}))
            agreement.meet("servers are read")  # no worker pushes again before all have read

    def join_info(self) -> Any:
        recovery, sample_queue = self.consistency.recovery, self.consistency.sample_queue
        assert recovery is not None
        times = 0 if sample_queue is None else sample_queue.resumptions + 1
        return {
            "room": recovery.copies.pool.join_info(),
            "steps": self.link.steps_taken,
            "times": times,
        }

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Go on with the remaining workers and servers.

        Raises `StateLost` if no copy of a lost server's state is left.
        """
        self.context = context
        self.link.regroup(context)
        if not self.link.slots:
            return
        recovery, sample_queue = self.consistency.recovery, self.consistency.sample_queue
        assert recovery is not None
        # This worker has just joined: it connects, and takes the counts of the other workers.
        if self._awaits_servers:
            self._awaits_servers = False
            self._connect_servers(recovery.copies.pool.join_pool(layout["room"]))
            self.link.steps_taken[:] = layout["steps"]
            if sample_queue is not None:
                sample_queue.join_epoch(layout["times"])
        self.consistency.regroup()

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """Do nothing: all state is on servers or came with the parameters."""

    def detach(self) -> None:
        connections, pool = (
            self.link.connections,
            None if self._endpoints is None else self._endpoints.pool,
        )
        is_leaving = connections.is_leaving
        if self.copies is not None:
            self.copies.close()
        # Servers of a run that survives losses outlive workers, so the first worker ends them,
        # unless this worker leaves a run that goes on.
        connections.dismiss_servers(
            told=pool is not None and not is_leaving and self.context.group.rank == 0
        )
        if pool is not None and is_leaving:
            pool.leave_pool()
        elif self._endpoints is not None:
            self._endpoints.close()

    @property
    def copies(self) -> ServerReplication | None:
        recovery = self.consistency.recovery
        return None if recovery is None or self._endpoints is None else recovery.copies

    def facts(self) -> list[dict[str, Any]]:
        """Work of each server so far, for the summary of the run."""
        return self.context.agreement.retry_after_losses(
            lambda: self.link.connections.read_facts(self.link.deadline)
        )

    def served(self) -> list[ServerWork]:
        return (
            self.link.connections.read_timelines(self.link.deadline)
            if self.context.trace.keeps_spans
            else []
        )

    def state_dict(self) -> dict[str, Any]:
        """State of this worker's codec and, on the first worker, the optimizer state of servers."""
        codec_state = self.link.codec.state_dict(self.link.slots)
        if not self.link.primaries or self.context.group.rank:
            return {"memories": None, **codec_state}
        return {
            "memories": state_transfer.read_memories(self.link, len(self.link.slots)),
            **codec_state,
        }

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Fill servers with this worker's present parameters and the saved optimizer state."""
        saved_states = [state for state in states if state]
        self._fill_servers(state_transfer.find_saved_memories(saved_states, len(self.link.slots)))
        self.link.codec.load_state_dicts(saved_states)

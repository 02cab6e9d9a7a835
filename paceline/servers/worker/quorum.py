"""Local SGD whose rounds close by a quorum, seen from a worker.

    worker    steps, change --->  the keeper of the rounds, in a server beside the first worker
              wait                waits for a quorum, then for the grace window
              new values    <---  mean change, outer optimizer                  (`quorum_rounds`)

Workers are out of lockstep within an epoch: each takes samples when it is ready, so that a slow or
stopped one doesn't hold the others. At the end of an epoch all come together in a final round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.bucket_layout import scale_copy
from paceline.comm.sample_queue import SampleQueue
from paceline.errors import DeadlineExceeded, UsageError
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.protocol.message import call_server, send_request
from paceline.servers.protocol.parameters import PlanShard
from paceline.servers.protocol.plans import pack_plan
from paceline.servers.protocol.rounds import (
    ListLate,
    OpenRounds,
    ReadOuterState,
    RoundValues,
    SubmitChange,
)
from paceline.servers.worker import state_transfer
from paceline.servers.worker.connections import ServerWait, name_missing_workers
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.recovery import QueueRecovery
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.sample_queue import SampleQueueClient
from paceline.servers.worker.transfer_units import bytes_to_tensor
from paceline.sync.base import Slot, check_strategy
from paceline.sync.context import SyncContext
from paceline.sync.localsgd.options import RoundOptions
from paceline.sync.localsgd.outer import nesterov
from paceline.trace import ServerWork

PIECE_ELEMENTS = 1 << 25  # most elements of a tensor in a message


@dataclass(frozen=True)
class KeeperOptions:
    """Options of the one server that keeps the rounds (`ServerOptions`)."""

    servers: int = 1
    replicas: int = 1
    bucket_mb: float = 4.0
    codec: None = None


class QuorumSync:
    """The running side of `LocalSGD(quorum=...)`.

    Invariants: `_start` has the values with which this worker began its present steps, `_steps` and
    `_weight` count these steps and their samples (in global batches). `_number` counts the changes
    of this worker that are in a round. `_is_equal` is true while nothing was trained since all
    replicas were made equal.
    """

    replicas_diverge = True
    exchanges_in_backward = False
    rows: None = None  # sparse tables are refused

    def __init__(self, context: SyncContext, options: RoundOptions) -> None:
        if context.servers is None:
            raise UsageError(
                "LocalSGD(quorum=...) needs a server that keeps the rounds, and this launcher "
                "starts none: start the workers with `paceline run`"
            )
        assert isinstance(options.every, int) and options.quorum is not None
        self._context, self._options, self._every = context, options, options.every
        self._link = ServerLink(context, KeeperOptions(), lockstep=False, drops=False, alone=False)
        self._queue = SampleQueueClient(self._link)
        self._recovery: QueueRecovery | None = None
        self._endpoints: ServerEndpoints | None = None
        self._awaits_servers = False  # this worker has joined, and has no address of the server yet
        self._slots: list[Slot] = []
        self._grads: dict[int, Tensor] = {}  # by index of the slot
        self._start: list[Tensor] = []
        self._sample_part = 0.0  # this worker's part of the samples of the open step
        self._steps, self._weight, self._number, self._is_equal = 0, 0.0, 0, True

    @property
    def sample_queue(self) -> SampleQueue | None:
        return self._queue if self._link.is_out_of_lockstep else None

    # ---- parameters and the server

    def attach(self, slots: Sequence[Slot]) -> None:
        link, context = self._link, self._context
        if self._number or self._steps:
            raise UsageError(
                "parameters that were frozen, or belong to a new model, are trained now, and "
                "LocalSGD(quorum=...) takes no more after the first step: prepare all models "
                "before it, with requires_grad=True, or leave quorum out"
            )
        if any(slot.parameter.device.type != "cpu" for slot in slots):
            raise UsageError(
                "LocalSGD(quorum=...) can't train models on GPUs yet; use start(device='cpu'), or "
                "leave quorum out"
            )
        self._slots = list(slots)
        # Slots may be attached again, with more parameters: the earlier server ends.
        link.connections.dismiss_servers(told=context.group.rank == 0)
        assert context.servers is not None
        endpoints = context.servers(1, 1)
        if (copies := state_transfer.make_replication(link, endpoints)) is not None:
            self._recovery = QueueRecovery(link, copies, self._queue)
        self._awaits_servers = endpoints.pool is not None and not endpoints.addresses
        if not self._awaits_servers:
            self._connect_server(endpoints)
            for server, plan in enumerate(link.shard_plans):
                link.connections.tell_all_copies(
                    server, PlanShard(bytes_to_tensor(pack_plan(plan))), link.deadline
                )
            self._open_rounds(())

    def _connect_server(self, endpoints: ServerEndpoints) -> None:
        self._endpoints = endpoints
        self._link.use_servers(endpoints)

    def _open_rounds(self, memories: Sequence[Tensor]) -> None:
        """Begin rounds with the first worker's values. Collective; replicas must be equal."""
        options, link, outer = self._options, self._link, self._options.outer
        self._begin_steps(list(self._read_values()))
        if self._context.group.rank == 0:
            lr, momentum = (outer.lr, outer.momentum) if isinstance(outer, nesterov) else (0.0, 0.0)
            assert options.quorum is not None
            request = OpenRounds(
                options.quorum,
                options.longest_grace,
                lr,
                momentum,
                tuple(link.worker_numbers),
                bool(memories),
                (*self._start, *memories),
            )
            call_server(link.primaries[0], request, link.deadline)
        self._is_equal = True
        self._context.agreement.meet("rounds begin")

    def _read_values(self) -> Iterator[Tensor]:
        """Copy all parameters into flat tensors: those of a dtype one after the other, in pieces.

        The tensors have the same order and sizes on all workers.
        """
        parameters = [slot.parameter.detach() for slot in self._slots]
        for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
            flat = torch.cat([x.reshape(-1) for x in parameters if x.dtype == dtype])
            for piece in flat.split(PIECE_ELEMENTS):
                yield piece.clone()

    def _begin_steps(self, values: list[Tensor]) -> None:
        """Begin the next steps from these values, which the parameters have."""
        self._start, self._steps, self._weight = values, 0, 0.0

    def _write_values(self, values: Sequence[Tensor]) -> None:
        by_dtype = {
            dtype: torch.cat([value for value in values if value.dtype == dtype])
            for dtype in {value.dtype for value in values}
        }
        for slot in self._slots:
            parameter = slot.parameter.detach()
            flat = by_dtype[parameter.dtype]
            parameter.copy_(flat[: parameter.numel()].view(parameter.shape))
            by_dtype[parameter.dtype] = flat[parameter.numel() :]

    # ---- a step: nothing travels in backward

    def take_gradient(self, number: int, grad: Tensor, scale: float) -> None:
        value = scale_copy(grad, self._context.step_state.local_factor(grad, scale))
        self._grads[number] = self._grads[number] + value if number in self._grads else value

    def end_backward(self, where: str) -> list[tuple[int, Tensor]]:
        gradients, self._grads = list(self._grads.items()), {}
        self._sample_part = self._context.step_state.share_of_step
        return gradients

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        self._is_equal = False

    def commit(self) -> None:
        """End a step of this worker, and its round if that is due."""
        # A worker that stays alone has nothing to exchange.
        if not self._slots:
            return
        self._steps += 1
        self._weight += self._sample_part
        self._sample_part, self._is_equal = 0.0, False
        if self._steps >= self._every:
            self._join_round(final=False)
            # The samples of these steps are in a round.
            self._queue.note_step()
        if self._queue.open:
            self._queue.complete_turn(math.inf, dropped=False)

    def _join_round(self, *, final: bool) -> None:
        """Send this worker's change, wait until it is in a round, and take the new values."""
        link, begun = self._link, time.perf_counter_ns()
        changes = tuple(
            value.sub_(start) for value, start in zip(self._read_values(), self._start, strict=True)
        )
        request = SubmitChange(self._number + 1, self._weight, final, changes)
        with link.connections.count_waiting():
            answer = link.context.agreement.retry_after_losses(lambda: self._submit(request))
        self._number += 1
        self._write_values(answer.values)
        self._begin_steps(list(answer.values))
        self._context.trace.record_span("round", "exchange", begun, time.perf_counter_ns())

    def _submit(self, request: SubmitChange) -> RoundValues:
        """Submit a change. It counts once, however often it is submitted."""
        link, seconds = self._link, self._link.deadline + self._options.longest_grace
        sent = send_request(link.primaries[0], request, link.deadline)
        try:
            return sent.wait_for_reply(seconds)
        except DeadlineExceeded as error:
            wait = ServerWait(self._context.group.rank, link.worker_numbers, seconds)
            raise name_missing_workers(
                error, sent.client, "the end of a round", ListLate(), wait
            ) from error

    def converge(self) -> None:
        """Make all replicas equal in a final round. Collective."""
        if not self._slots:
            return
        self._queue.end_epoch()
        trained = self._context.agreement.meet("final round", b"" if self._is_equal else b"trained")
        if any(trained):
            self._join_round(final=True)
        self._is_equal = True

    def abort(self) -> None:
        self._grads.clear()
        self._sample_part = 0.0

    # ---- workers that leave and join

    def join_info(self) -> Any:
        assert self._recovery is not None
        return {
            "room": self._recovery.copies.pool.join_info(),
            "times": self._queue.resumptions + 1,
        }

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Go on with the remaining workers. Raises `StateLost` if the server was lost."""
        self._context = context
        self._link.regroup(context)
        if not self._slots:
            return
        assert self._recovery is not None
        if self._awaits_servers:
            self._awaits_servers = False
            self._connect_server(self._recovery.copies.pool.join_pool(layout["room"]))
            self._queue.join_epoch(layout["times"])
        self._recovery.regroup()

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """Begin with the parameters of another worker, which are here by now."""
        self._begin_steps(list(self._read_values()))

    @property
    def copies(self) -> ServerReplication | None:
        recovery = self._recovery
        return None if recovery is None or self._endpoints is None else recovery.copies

    def detach(self) -> None:
        connections = self._link.connections
        pool = None if self._endpoints is None else self._endpoints.pool
        is_leaving = connections.is_leaving
        if self.copies is not None:
            self.copies.close()
        # The server of a run that survives losses outlives workers, so the first worker ends it,
        # unless this worker leaves a run that goes on.
        told = pool is not None and not is_leaving and self._context.group.rank == 0
        connections.dismiss_servers(told=told)
        if pool is not None and is_leaving:
            pool.leave_pool()
        elif self._endpoints is not None:
            self._endpoints.close()

    # ---- reports and checkpoints

    def facts(self) -> list[dict[str, Any]]:
        """Work of the server so far, for the summary of the run: `rounds` counts the rounds."""
        link = self._link
        return link.context.agreement.retry_after_losses(
            lambda: link.connections.read_facts(link.deadline)
        )

    def served(self) -> list[ServerWork]:
        link = self._link
        return (
            link.connections.read_timelines(link.deadline)
            if self._context.trace.keeps_spans
            else []
        )

    def state_dict(self) -> dict[str, Any]:
        """State of the outer optimizer, on the first worker. Replicas must be equal."""
        if self._context.group.rank or not self._link.primaries:
            return {"outer_memories": []}
        answer = call_server(self._link.primaries[0], ReadOuterState(), self._link.deadline)
        return {"outer_memories": list(answer.memories)}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Begin rounds with the present parameters, and with the saved outer optimizer."""
        saved = [state for state in states if state]
        check_strategy("LocalSGD(quorum=...)", saved, "outer_memories")
        memories = saved[0]["outer_memories"] if saved else []
        self._number = 0
        if self._slots:
            self._open_rounds(memories)

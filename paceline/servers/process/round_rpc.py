"""Answers messages about rounds of local SGD (`quorum_rounds`)."""

from __future__ import annotations

import math
import time

from torch import Tensor

from paceline.errors import Mismatch
from paceline.servers.process.quorum_rounds import QuorumRounds, RoundChange
from paceline.servers.process.scheduler import SampleScheduler
from paceline.servers.protocol import rounds
from paceline.servers.protocol.message import Acknowledged, Handlers
from paceline.servers.protocol.samples import MissingWorkers
from paceline.sync.localsgd.outer import average, nesterov


class RoundRpc:
    """Keeps the rounds of a run. `handlers` maps each request to the method that handles it.

    The scheduler knows which workers have steps to make. A worker whose change is in a round has no
    samples left that would be dealt again if it were lost.
    """

    def __init__(self, scheduler: SampleScheduler) -> None:
        self._scheduler = scheduler
        self._rounds: QuorumRounds | None = None
        self._members: set[int] = set()
        self._lost: set[int] = set()
        self.handlers: Handlers = {
            rounds.OpenRounds: self._open_rounds,
            rounds.SubmitChange: self._submit_change,
            rounds.ListLate: self._list_late,
            rounds.ReadOuterState: self._read_memories,
        }

    @property
    def kept_rounds(self) -> QuorumRounds:
        """The rounds, which a worker has opened."""
        if self._rounds is None:
            raise Mismatch("no worker has opened the rounds yet")
        return self._rounds

    @property
    def next_check(self) -> float:
        """Time of the next look at the open round if no message comes before."""
        return math.inf if self._rounds is None else self._rounds.next_check

    def remove_lost_workers(self, survivors: set[int]) -> None:
        """Go on with the survivors alone."""
        self._lost |= self._members - survivors
        self._members &= survivors
        if self._rounds is not None:
            self._rounds.remove_lost_workers(survivors)

    def summarize(self) -> dict[str, object]:
        """Statistics for the summary; nothing if there were no rounds."""
        return {} if self._rounds is None else {"rounds": self._rounds.summarize_rounds()}

    def _open_rounds(self, worker: int, request: rounds.OpenRounds) -> Acknowledged:
        outer = nesterov(request.lr, request.momentum) if request.lr else average()
        tensors = [tensor.clone() for tensor in request.tensors]
        count = len(tensors) // 2 if request.has_memories else len(tensors)
        values = tensors[:count]
        memories: list[Tensor | None] = [outer.begin(value) for value in values]
        if request.has_memories:
            memories = list(tensors[count:])
        self._members = {*request.workers}
        self._rounds = QuorumRounds(
            values,
            memories,
            outer,
            quorum=request.quorum,
            grace_seconds=request.grace_seconds,
        )
        return Acknowledged()

    def _submit_change(
        self, worker: int, request: rounds.SubmitChange
    ) -> rounds.RoundValues | None:
        # A request that was put off may be that of a worker that was lost since.
        if worker in self._lost:
            raise Mismatch(f"worker {worker} was lost: its samples are dealt again")
        # A worker that has joined later comes to its first round.
        if worker not in self._members:
            self._members.add(worker)
            self.kept_rounds.admit_worker(worker)
        contribution = RoundChange(request.number, request.weight, request.changes, request.final)
        self.kept_rounds.submit(worker, contribution)
        running = self._scheduler.running_workers
        merged = self.kept_rounds.close_if_due(running, self._members, time.monotonic())
        for other in merged:
            self._scheduler.settle_pieces(other)
        if not self.kept_rounds.has_answer(worker, request.number):
            return None
        # The answer is sent later, and the values change in the next round.
        values = tuple(value.clone() for value in self.kept_rounds.values)
        return rounds.RoundValues(self.kept_rounds.count, values)

    def _list_late(self, worker: int, request: rounds.ListLate) -> MissingWorkers:
        absent = self.kept_rounds.list_absent(self._members)
        clocks = self._scheduler.clocks
        return MissingWorkers(tuple((other, clocks.get(other, 0)) for other in absent))

    def _read_memories(self, worker: int, request: rounds.ReadOuterState) -> rounds.OuterState:
        return rounds.OuterState(
            tuple(memory.clone() for memory in self.kept_rounds.memories if memory is not None)
        )

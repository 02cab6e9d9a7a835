"""Fencing: after a loss out of lockstep, servers refuse messages of lost workers, and report to the living what has been made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from paceline.errors import Mismatch
from paceline.server.journal import StepJournal, dump_closes
from paceline.server.protocol import recovery, service
from paceline.server.protocol.message import Acknowledged, Handlers, Request
from paceline.server.shard import Shard
from paceline.state.snapshot import byte_tensor

OPEN = (service.CheckAlive, service.EndServer, recovery.FenceWorkers)  # requests that any process with the key may send


class ShardOwner(Protocol):
    """Whatever keeps the shard, as fencing sees it."""

    @property
    def shard(self) -> Shard:
        """The shard that the server keeps."""
        ...


class Fence:
    """Answers the messages of the living after a loss. `clear` discards delayed messages, and what may change.

    `handlers`: what is done for each request of a worker.
    """

    def __init__(self, owner: ShardOwner, journal: StepJournal, clear: Callable[[], None]) -> None:
        self._owner, self._journal, self._clear = owner, journal, clear
        self._workers: frozenset[int] | None = None  # the living; None: no worker has been lost yet
        self.handlers: Handlers = {
            recovery.FenceWorkers: self._fence,
            recovery.ReadClosedSteps: self._closed_steps,
            recovery.DiscardPushes: self._discard,
            recovery.DropSamples: self._drop,
        }

    def check(self, worker: int, request: Request[Any]) -> None:
        """Raise `Mismatch` for a request of a lost worker: it is on its way still, and the living have gone on."""
        if self._workers is not None and worker not in self._workers and not isinstance(request, OPEN):
            raise Mismatch(f"worker {worker} counts as lost: the others have gone on without it")

    def _fence(self, worker: int, request: recovery.FenceWorkers) -> recovery.StepsMade:
        self._workers = frozenset(request.workers)
        self._clear()
        return recovery.StepsMade(tuple(self._owner.shard.steps))

    def _closed_steps(self, worker: int, request: recovery.ReadClosedSteps) -> recovery.ClosedSteps:
        return recovery.ClosedSteps(byte_tensor(dump_closes(self._journal.since(request.optimizer, request.step))))

    def _discard(self, worker: int, request: recovery.DiscardPushes) -> recovery.Journal:
        self._owner.shard.discard()
        return recovery.Journal(byte_tensor(self._journal.dump(closes=False)))

    def _drop(self, worker: int, request: recovery.DropSamples) -> Acknowledged:
        self._journal.drop(request.epoch, request.pieces)
        return Acknowledged()

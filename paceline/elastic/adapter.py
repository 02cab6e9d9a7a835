"""A run as its recovery sees it: the parts that move to new groups, and the state for joiners."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgpack
import torch
from torch import nn

from paceline.checkpoint.state import RunProgress, WorkerState
from paceline.cluster.control import events
from paceline.data.loader import ShareLoader
from paceline.elastic.buddies import BuddyReplication
from paceline.elastic.departure import Departure
from paceline.elastic.recovery import ViewGroups
from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop
from paceline.prepare.registry import Prepared
from paceline.record.call_status import make_status_display
from paceline.record.run_records import RunRecords
from paceline.replicas.compare import ReplicaComparer
from paceline.replicas.contents import own_buffers
from paceline.replicas.step_count import StepCount
from paceline.servers.worker.replication import ServerReplication
from paceline.state.snapshot import Snapshot, loads, pack
from paceline.state.versioned import Stateful
from paceline.sync.abilities import Abilities
from paceline.sync.context import SyncContext
from paceline.workers.groups import CurrentView, reap
from paceline.workers.replicate import Replicate

VERSION = 2  # of the state that a joining worker is given


def check_elastic(device: torch.device, abilities: Abilities) -> None:
    """Raise `UsageError` where a run can't go on when workers are lost."""
    if device.type == "cuda":
        raise UsageError(
            "runs on GPUs can't go on yet when workers are lost; leave out --min-workers, or say "
            "start(device='cpu')"
        )
    if abilities.recoverable is None:
        raise UsageError(
            "with this strategy a run can't go on when workers are lost; leave out --min-workers: "
            "then --restarts has all start again"
        )


def keepers(own: WorkerState, prepared: Prepared) -> list[ServerReplication]:
    """Keepers of the servers and their copies: the optimizer's, and those of sparse tables."""
    keeping = own.abilities.keeping
    found = [None if keeping is None else keeping.copies, prepared.tables.copies]
    return [copies for copies in found if copies is not None]


class ElasticRun:
    """A run that goes on when workers are lost.

    `replicate`: how often buddies get copies of what only one worker has.
    """

    def __init__(
        self,
        context: SyncContext,
        prepared: Prepared,
        loop: TrainingLoop,
        own: WorkerState,
        comparer: ReplicaComparer,
        *,
        records: RunRecords,
        view: CurrentView,
        tally: StepCount,
        leaving: Departure,
        replicate: Replicate,
    ) -> None:
        self._context, self._prepared, self._loop, self._own, self._comparer = (
            context,
            prepared,
            loop,
            own,
            comparer,
        )
        self._records, self._view, self._tally, self._leaving, self._replicate = (
            records,
            view,
            tally,
            leaving,
            replicate,
        )
        assert own.abilities.recoverable is not None
        self._recoverable, self._remote = own.abilities.recoverable, own.abilities.remote
        self.buddies = BuddyReplication(context, own.abilities.unreplicated, loop, replicate)

    def regroup(self, founded: ViewGroups) -> None:
        old = [*self._context.extra_groups, self._context.group]
        try:
            self._move(founded)
        finally:  # another worker may be lost meanwhile
            reap(old)

    def _move(self, founded: ViewGroups) -> None:
        """Move all that exchanges to the groups of a view.

        Collective; begun anew, in later groups, where a worker is lost meanwhile.
        """
        worker_context, context = founded.worker_context, self._context
        context.regroup(
            founded.group,
            worker_context.cluster.where(),
            worker_context.native,
            worker_context.cancel_scope,
        )
        context.agreement.regroup(founded.group, worker_context.cluster.names(), founded.origins)
        self._view.move(worker_context)
        self._tally.doubt()
        if self._view.is_first:
            self._records.log.take_over(make_status_display(worker_context.place))
            events.writes(worker_context.place, str(self._records.folder.path.absolute()))
        self._loop.cut_turn(0 if self._loop.apart else founded.turn)
        self._prepared.regroup()
        layout = founded.layout or {}
        self._leaving.regroup(founded.members, layout.get("leaving", ()))
        self._recoverable.regroup(context, layout.get("sync"))
        self._prepared.tables.regroup(context, layout.get("tables"))
        self.buddies.regroup(founded.members)
        self._loop.settle()

    def lost(self, text: str) -> None:
        self._records.history.announce_event(text)

    def turn(self) -> int:
        return self._loop.steps + 1 if self._loop.led is not None else 0

    def figures(self) -> Any:
        return [self.buddies.figures(), self._leaving.wish]

    def hear(self, all_figures: Sequence[Any], members: tuple[int, ...]) -> None:
        self.buddies.hear([figures for figures, _ in all_figures], members)
        self._leaving.hear([wish for _, wish in all_figures])

    def depart(self) -> None:
        self.buddies.depart()

    def fates(self, before: tuple[int, ...]) -> str:
        return self.buddies.fates(before)

    def servers_lost(self) -> list[str]:
        return [
            name for keeper in keepers(self._own, self._prepared) for name in keeper.take_lost()
        ]

    def join_info(self) -> Any:
        return {
            "sync": self._recoverable.join_info(),
            "tables": self._prepared.tables.join_info(),
            "leaving": self._leaving.join_info(),
        }

    def form(self) -> str:
        digest = hashlib.sha256(
            f"{VERSION} {self._replicate!r} {self._prepared.state.names}".encode()
        )
        digest.update(self._prepared.tables.form().encode())
        for slot in self._prepared.slots:
            digest.update(
                f"{slot.name} {tuple(slot.parameter.shape)} {slot.parameter.dtype}\n".encode()
            )
        return digest.hexdigest()

    def give(self) -> tuple[bytes, str]:
        snapshot = self._prepared.state.snapshot(copy=False)
        facts = {"facts": self._records.collect_facts(), "compared": self._comparer.facts()}
        kept = self._own.sync.state_dict() if self._remote is None else {}  # lies on servers
        mine = {"random": self._own.randomness.state_dict(), "sync": kept, **facts}
        return bytes(msgpack.packb([snapshot.dumps(), pack(mine).dumps()])), self._hash(snapshot)

    def take(self, state: bytes) -> str:
        whole, mine = msgpack.unpackb(state)
        snapshot = loads(whole)
        self._prepared.state.restore(snapshot)
        facts = loads(mine).unpack()
        self._recoverable.load_from_peer(facts["sync"])
        self._own.randomness.load_state_dict(facts["random"])
        self._records.adopt_facts(facts["facts"])
        self._comparer.learn(facts["compared"])
        return self._hash(snapshot)

    def _hash(self, snapshot: Snapshot) -> str:
        """Hash the state that must be equal on all workers.

        Buffers of each worker's own are left out. If replicas diverge, only the models count.
        """
        parts = zip(self._prepared.state.names, self._prepared.state.parts, strict=True)
        models = {name: part for name, part in parts if isinstance(part, nn.Module)}
        own = {
            f"{name}/{buffer}" for name, model in models.items() for buffer in own_buffers(model)
        }
        tensors = {path: tensor for path, tensor in snapshot.tensors.items() if path not in own}
        if not self._own.sync.replicas_diverge:
            return Snapshot(0, snapshot.tree, tensors).sha256()
        tensors = {path: tensor for path, tensor in tensors.items() if path.split("/")[0] in models}
        return Snapshot(0, sorted(tensors), tensors).sha256()

    def parts(self) -> dict[str, Stateful]:
        """Return the state that a turn changes: all but loaders and progress."""
        state = self._prepared.state
        return {
            name: part
            for name, part in zip(state.names, state.parts, strict=True)
            if not isinstance(part, ShareLoader | RunProgress)
        }

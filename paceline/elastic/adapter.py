"""A run as its recovery sees it: parts that move to new groups, and the state for new workers."""

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

VERSION = 2  # version of the state that a new worker gets


def check_elastic(device: torch.device, abilities: Abilities) -> None:
    """Raise `UsageError` if a run can't go on when workers are lost."""
    if device.type == "cuda":
        raise UsageError(
            "runs on GPUs can't go on yet when workers are lost; leave out --min-workers, or use "
            "start(device='cpu')"
        )
    if abilities.recoverable is None:
        raise UsageError(
            "with this strategy a run can't go on when workers are lost; leave out --min-workers: "
            "then --restarts starts all workers again"
        )


def keepers(worker_state: WorkerState, prepared: Prepared) -> list[ServerReplication]:
    """Find the objects that look after servers: that of the optimizer, and that of the tables."""
    keeping = worker_state.abilities.keeping
    candidates = [None if keeping is None else keeping.copies, prepared.tables.copies]
    return [copies for copies in candidates if copies is not None]


class ElasticRun:
    """A run that goes on when workers are lost (a `SurvivingRun`).

    Args:
        context: Groups and settings of the strategy.
        prepared: The models, optimizers and loaders of the run.
        loop: The training loop.
        own: State of this worker alone.
        comparer: Compares replicas.
        records: The log and the history of the run.
        view: The view in use.
        tally: Count of steps that workers agree on.
        leaving: Departure of this worker's host.
        replicate: Steps between two copies of unreplicated state to buddies, "auto" or "off".
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

    def regroup(self, groups: ViewGroups) -> None:
        old_groups = [*self._context.extra_groups, self._context.group]
        try:
            self._move(groups)
        finally:
            # The old groups end also if another worker is lost during the move.
            reap(old_groups)

    def _move(self, groups: ViewGroups) -> None:
        """Move everything that exchanges data to the groups of a view. Collective.

        If a worker is lost meanwhile, this begins again with later groups.
        """
        worker_context, context = groups.worker_context, self._context
        context.regroup(
            groups.group,
            worker_context.cluster.where(),
            worker_context.native,
            worker_context.cancel_scope,
        )
        context.agreement.regroup(groups.group, worker_context.cluster.names(), groups.origins)
        self._view.move(worker_context)
        # The first worker of the view writes the log and the events of the run.
        self._tally.doubt()
        if self._view.is_first:
            self._records.log.take_over(make_status_display(worker_context.place))
            events.writes(worker_context.place, str(self._records.folder.path.absolute()))
        self._loop.cut_turn(0 if self._loop.apart else groups.turn)
        # The order is the same on all workers, as each of these makes collective calls. Buddies
        # come after the strategy, which takes over the state of lost workers.
        self._prepared.regroup()
        join_info = groups.layout or {}
        self._leaving.regroup(groups.members, join_info.get("leaving", ()))
        self._recoverable.regroup(context, join_info.get("sync"))
        self._prepared.tables.regroup(context, join_info.get("tables"))
        self.buddies.regroup(groups.members)
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
        # A strategy with servers keeps its state there.
        sync_state = self._own.sync.state_dict() if self._remote is None else {}
        worker_facts = {"random": self._own.randomness.state_dict(), "sync": sync_state, **facts}
        return bytes(msgpack.packb([snapshot.dumps(), pack(worker_facts).dumps()])), self._hash(
            snapshot
        )

    def take(self, state: bytes) -> str:
        shared, worker_facts = msgpack.unpackb(state)
        snapshot = loads(shared)
        self._prepared.state.restore(snapshot)
        facts = loads(worker_facts).unpack()
        self._recoverable.load_from_peer(facts["sync"])
        self._own.randomness.load_state_dict(facts["random"])
        self._records.adopt_facts(facts["facts"])
        self._comparer.learn(facts["compared"])
        return self._hash(snapshot)

    def _hash(self, snapshot: Snapshot) -> str:
        """Hash the state that must be equal on all workers.

        Buffers that differ between workers are left out. If replicas diverge, only models count.
        """
        parts = zip(self._prepared.state.names, self._prepared.state.parts, strict=True)
        models = {name: part for name, part in parts if isinstance(part, nn.Module)}
        own_paths = {
            f"{name}/{buffer}" for name, model in models.items() for buffer in own_buffers(model)
        }
        tensors = {
            path: tensor for path, tensor in snapshot.tensors.items() if path not in own_paths
        }
        if not self._own.sync.replicas_diverge:
            return Snapshot(0, snapshot.tree, tensors).sha256()
        tensors = {path: tensor for path, tensor in tensors.items() if path.split("/")[0] in models}
        return Snapshot(0, sorted(tensors), tensors).sha256()

    def parts(self) -> dict[str, Stateful]:
        """Objects whose state a turn changes, by name: all but loaders and progress."""
        state = self._prepared.state
        return {
            name: part
            for name, part in zip(state.names, state.parts, strict=True)
            if not isinstance(part, ShareLoader | RunProgress)
        }

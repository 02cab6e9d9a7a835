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
from paceline.comm.agreement import Recovery as Heal
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
from paceline.replicas.contents import find_own_buffers
from paceline.replicas.step_count import StepCount
from paceline.servers.worker.replication import ServerReplication
from paceline.state.snapshot import Snapshot, make_snapshot, snapshot_from_bytes
from paceline.state.versioned import Stateful
from paceline.sync.abilities import Abilities
from paceline.sync.context import SyncContext
from paceline.workers.copy_interval import Replicate
from paceline.workers.groups import CurrentView, close_in_background

JOIN_STATE_VERSION = 2  # version of the state that a new worker gets


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


def find_server_keepers(worker_state: WorkerState, prepared: Prepared) -> list[ServerReplication]:
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
        self._context, self._prepared, self._loop, self._worker_state, self._comparer = (
            context,
            prepared,
            loop,
            own,
            comparer,
        )
        self._records, self._view, self._step_count, self._departure, self._replicate = (
            records,
            view,
            tally,
            leaving,
            replicate,
        )
        assert own.abilities.recoverable is not None
        self._recoverable, self._remote = own.abilities.recoverable, own.abilities.remote
        self.buddies = BuddyReplication(context, own.abilities.unreplicated, loop, replicate)

    def measure_healing(self, recover: Heal) -> Heal:
        return self._records.worker_time.measure_healing(recover)

    def regroup(self, groups: ViewGroups) -> None:
        old_groups = [*self._context.extra_groups, self._context.group]
        try:
            self._move_to_groups(groups)
        finally:
            # The old groups end also if another worker is lost during the move.
            close_in_background(old_groups)

    def _move_to_groups(self, groups: ViewGroups) -> None:
        """Move everything that exchanges data to the groups of a view. Collective.

        If a worker is lost meanwhile, this begins again with later groups.
        """
        worker_context, context = groups.worker_context, self._context
        context.regroup(
            groups.group,
            worker_context.cluster.host_by_rank(),
            worker_context.make_native_group,
            worker_context.cancel_scope,
        )
        context.agreement.regroup(groups.group, worker_context.cluster.host_names(), groups.origins)
        self._view.move_to_view(worker_context)
        # The first worker of the view writes the log and the events of the run.
        self._step_count.skip_comparisons()
        if self._view.is_first:
            self._records.log.take_over(make_status_display(worker_context.place))
            events.report_writer(worker_context.place, str(self._records.folder.path.absolute()))
        self._loop.cut_turn(0 if self._loop.apart else groups.failed_turn)
        # The order is the same on all workers, as each of these makes collective calls. Buddies
        # come after the strategy, which takes over the state of lost workers.
        self._prepared.regroup_layers()
        join_info = groups.join_info or {}
        self._departure.regroup(groups.members, join_info.get("leaving", ()))
        self._recoverable.regroup(context, join_info.get("sync"))
        self._prepared.tables.regroup(context, join_info.get("tables"))
        self.buddies.regroup(groups.members)
        self._loop.settle_state()

    def announce_event(self, text: str) -> None:
        self._records.history.announce_event(text)

    def get_turn(self) -> int:
        return self._loop.steps_made + 1 if self._loop.leading_turn is not None else 0

    def collect_news(self) -> Any:
        return [self.buddies.collect_news(), self._departure.leave_request]

    def hear_news(self, all_figures: Sequence[Any], members: tuple[int, ...]) -> None:
        self.buddies.hear_news([figures for figures, _ in all_figures], members)
        self._departure.note_requests([wish for _, wish in all_figures])

    def finish_sending(self) -> None:
        self.buddies.finish_sending()

    def describe_fates(self, before: tuple[int, ...]) -> str:
        return self.buddies.describe_fates(before)

    def take_lost_servers(self) -> list[str]:
        return [
            name
            for keeper in find_server_keepers(self._worker_state, self._prepared)
            for name in keeper.take_lost_names()
        ]

    def join_info(self) -> Any:
        return {
            "sync": self._recoverable.join_info(),
            "tables": self._prepared.tables.join_info(),
            "leaving": self._departure.join_info(),
        }

    def compute_model_digest(self) -> str:
        digest = hashlib.sha256(
            f"{JOIN_STATE_VERSION} {self._replicate!r} {self._prepared.state.names}".encode()
        )
        digest.update(self._prepared.tables.describe_layout().encode())
        for slot in self._prepared.slots:
            digest.update(
                f"{slot.name} {tuple(slot.parameter.shape)} {slot.parameter.dtype}\n".encode()
            )
        return digest.hexdigest()

    def pack_state(self) -> tuple[bytes, str]:
        snapshot = self._prepared.state.take_snapshot(copy=False)
        facts = {"facts": self._records.collect_facts(), "compared": self._comparer.collect_facts()}
        # A strategy with servers keeps its state there.
        sync_state = self._worker_state.sync.state_dict() if self._remote is None else {}
        worker_facts = {
            "random": self._worker_state.randomness.state_dict(),
            "sync": sync_state,
            **facts,
        }
        return bytes(
            msgpack.packb([snapshot.to_bytes(), make_snapshot(worker_facts).to_bytes()])
        ), self._hash_shared_state(snapshot)

    def load_state(self, state: bytes) -> str:
        shared, worker_facts = msgpack.unpackb(state)
        snapshot = snapshot_from_bytes(shared)
        self._prepared.state.restore_snapshot(snapshot)
        facts = snapshot_from_bytes(worker_facts).unpack_state()
        self._recoverable.load_from_peer(facts["sync"])
        self._worker_state.randomness.load_state_dict(facts["random"])
        self._records.adopt_facts(facts["facts"])
        self._comparer.adopt_facts(facts["compared"])
        return self._hash_shared_state(snapshot)

    def _hash_shared_state(self, snapshot: Snapshot) -> str:
        """Hash the state that must be equal on all workers.

        Buffers that differ between workers are left out. If replicas diverge, only models count.
        """
        parts = zip(self._prepared.state.names, self._prepared.state.parts, strict=True)
        models = {name: part for name, part in parts if isinstance(part, nn.Module)}
        own_paths = {
            f"{name}/{buffer}"
            for name, model in models.items()
            for buffer in find_own_buffers(model)
        }
        tensors = {
            path: tensor for path, tensor in snapshot.tensors.items() if path not in own_paths
        }
        if not self._worker_state.sync.replicas_diverge:
            return Snapshot(0, snapshot.tree, tensors).compute_sha256()
        tensors = {path: tensor for path, tensor in tensors.items() if path.split("/")[0] in models}
        return Snapshot(0, sorted(tensors), tensors).compute_sha256()

    def get_turn_state(self) -> dict[str, Stateful]:
        """Objects whose state a turn changes, by name: all but loaders and progress."""
        state = self._prepared.state
        return {
            name: part
            for name, part in zip(state.names, state.parts, strict=True)
            if not isinstance(part, ShareLoader | RunProgress)
        }

"""The parts of a run: what `session.assemble` builds, and what a `Run` is made of. Nothing of it is for scripts."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.session.axes import RunAxes
from paceline.session.checkpoint.resumption import RunResumption
from paceline.session.checkpoint.saving import CheckpointSaver
from paceline.session.checkpoint.state import RunProgress, WorkerState
from paceline.session.elastic.survival import Survival
from paceline.session.ending import RunEnding
from paceline.session.groups import CurrentView
from paceline.session.loop.turns import TrainingLoop
from paceline.session.prepare.optimizers import OptimizerWatch
from paceline.session.prepare.registry import Prepared
from paceline.session.record.collector import LogCollector
from paceline.session.record.folder import RunFolder
from paceline.session.record.hints import StartupHints
from paceline.session.record.history import RunHistory
from paceline.session.record.log import MetricsLog
from paceline.session.record.total_steps import TotalSteps
from paceline.session.replicas.compare import ReplicaComparer
from paceline.sync.base import Strategy


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run, as `session.assemble` has built them."""

    view: CurrentView
    axes: RunAxes
    strategy: Strategy
    history: RunHistory
    folder: RunFolder
    log: MetricsLog
    loop: TrainingLoop
    prepared: Prepared
    own: WorkerState
    progress: RunProgress
    plan: TotalSteps
    saving: CheckpointSaver
    hints: StartupHints
    watch: OptimizerWatch
    collector: LogCollector
    resumption: RunResumption
    comparer: ReplicaComparer
    survival: Survival | None  # where the run goes on when workers are lost
    ending: RunEnding

"""Lists the parts of a `Run`, which `session.assemble` builds.

Scripts don't use them.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.checkpoint.resumption import RunResumption
from paceline.checkpoint.saving import CheckpointSaver
from paceline.checkpoint.state import RunProgress, WorkerState
from paceline.elastic.survival import Survival
from paceline.loop.turns import TrainingLoop
from paceline.prepare.optimizers import OptimizerWatch
from paceline.prepare.registry import Prepared
from paceline.record.folder import RunFolder
from paceline.record.hints import StartupHints
from paceline.record.history import RunHistory
from paceline.record.log import MetricsLog
from paceline.record.total_steps import TotalSteps
from paceline.replicas.compare import ReplicaComparer
from paceline.session.collector import LogCollector
from paceline.session.ending import RunEnding
from paceline.sync.base import Strategy
from paceline.workers.axes import RunAxes
from paceline.workers.groups import CurrentView


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Parts of one run."""

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
    survival: Survival | None  # only if the run continues when workers are lost
    ending: RunEnding

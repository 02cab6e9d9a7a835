"""In which order parts of a run are told of what happens in the loop."""

from __future__ import annotations

from dataclasses import fields

import pytest

import paceline as pl
from paceline.loop.observers import LoopObservers
from paceline.session.run import Run
from paceline.sync.base import Strategy
from tests.harness.runs import workers

PLAIN = """\
training_begins: _RunAssembly._begin_comparing, WorkerTime.begin_training
epoch_began: LogCollector.leave_lockstep, ShareFollower.epoch_began, RunProgress.loop_began
lead_taken: PolicyCheck.check_leader, TotalSteps.add_leading_loader
first_step: ModelCuts.check_used, MemoryWatch.predict_optimizer, StartupHints.hint_at_missing_gradients
doubled: MemoryWatch.measure_held
turn_failed: WorkerTime.discard_turn
step_ended: MetricsLog.end_step, ReplicaComparer.step_ended, ShareFollower.step_ended, LinkWatch.step_ended, LogCollector.step_ended
ghost_ended: StartupHints.hint_at_ghost_metrics
went_back: MetricsLog.fold_later_steps"""  # noqa: E501
OBSERVING = PLAIN.replace("doubled:", "stepped: {}.note_optimizer_step\ndoubled:")


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (pl.AllReduce(), PLAIN),
        (pl.LocalSGD(2), OBSERVING.format("LocalSGDSync")),
        (pl.Gossip(), OBSERVING.format("GossipSync")),
    ],
    ids=["AllReduce", "LocalSGD", "Gossip"],
)
def test_the_order_of_a_run(strategy: Strategy, expected: str) -> None:
    def order(run: Run) -> str:
        return "\n".join(run._loop.observers.describe_order())

    assert workers(2, order, strategy=strategy) == [expected] * 2


def test_nobody_is_told_of_anything_at_first() -> None:
    assert list(LoopObservers().describe_order()) == []
    assert all(getattr(LoopObservers(), moment.name) == () for moment in fields(LoopObservers))

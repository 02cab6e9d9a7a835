"""The records that a run writes, and when its workers meet to hand them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.record.folder import RunFolder
from paceline.record.history import RunHistory
from paceline.record.log import MetricsLog
from paceline.record.outcome.worker_time import WorkerTime


class LogMeetings:
    """The step after which workers next meet to hand over their logs (`next_step`)."""

    def __init__(self) -> None:
        self.next_step = 1

    def meet_after_step(self, step: int) -> None:
        """Let the workers meet after this step."""
        self.next_step = step


@dataclass(frozen=True)
class RunRecords:
    """The records of a run that a worker continues when it joins later."""

    history: RunHistory
    folder: RunFolder
    log: MetricsLog
    meetings: LogMeetings
    worker_time: WorkerTime

    def collect_facts(self) -> dict[str, Any]:
        """Return the facts that a joining worker needs."""
        return {
            "flush": self.meetings.next_step,
            "log": self.log.ended_steps,
            **self.history.collect_facts(),
        }

    def adopt_facts(self, facts: dict[str, Any]) -> None:
        """Continue where the other workers are."""
        self.meetings.meet_after_step(facts["flush"])
        self.history.adopt_facts(facts)
        self.log.begin_at_step(facts["log"])

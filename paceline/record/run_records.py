"""The records that a run writes, and when its workers meet to hand them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.record.folder import RunFolder
from paceline.record.history import RunHistory
from paceline.record.log import MetricsLog


class LogMeetings:
    """The step after which workers next meet to hand over their logs (`next_step`)."""

    def __init__(self) -> None:
        self.next = 1

    def put(self, step: int) -> None:
        """Let the workers meet after this step."""
        self.next = step


@dataclass(frozen=True)
class RunRecords:
    """The records of a run that a worker continues when it joins later."""

    history: RunHistory
    folder: RunFolder
    log: MetricsLog
    meetings: LogMeetings

    def facts(self) -> dict[str, Any]:
        """Return the facts that a joining worker needs."""
        return {"flush": self.meetings.next, "log": self.log.number, **self.history.facts()}

    def learn(self, facts: dict[str, Any]) -> None:
        """Continue where the other workers are."""
        self.meetings.put(facts["flush"])
        self.history.learn(facts)
        self.log.place(facts["log"])

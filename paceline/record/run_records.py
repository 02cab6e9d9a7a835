"""What a run writes down, and when workers meet to hand it over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.record.folder import RunFolder
from paceline.record.history import RunHistory
from paceline.record.log import MetricsLog


class LogMeetings:
    """When workers meet to hand over what was logged.

    `next`: the step after which they meet next.
    """

    def __init__(self) -> None:
        self.next = 1

    def put(self, step: int) -> None:
        """Have workers meet after this step."""
        self.next = step


@dataclass(frozen=True)
class RunRecords:
    """What a run writes down, as far as a worker that has just come goes on with it."""

    history: RunHistory
    folder: RunFolder
    log: MetricsLog
    meetings: LogMeetings

    def facts(self) -> dict[str, Any]:
        """Return what such a worker has to know."""
        return {"flush": self.meetings.next, "log": self.log.number, **self.history.facts()}

    def learn(self, facts: dict[str, Any]) -> None:
        """Go on where the others are."""
        self.meetings.put(facts["flush"])
        self.history.learn(facts)
        self.log.place(facts["log"])

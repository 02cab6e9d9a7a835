"""All workers that took part in a run, in the order in which they came: where each was, its steps,
and where its time went.

worker 0   [ steps 1 ............................ 320 ]      rank 0 at the end
worker 1   [ steps 1 ............................ 320 ]      rank 1
worker 2   [ steps 1 .... 90 ]                               lost, or gone: no rank any more
worker 3                         [ steps 200 .... 320 ]      rank 2: it came in its place
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.trace import PARTS, SENT

EVERY = 1.0  # seconds between two looks at each worker, at least
PART = 0.002  # of the time so far: looks become rarer, so that those of a day are some thousands


@dataclass
class MemberTotals:
    """What the steps of one worker came to, all or those since the last look.

    `late`: the seconds by which it was later than usual.
    """

    steps: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    late: float = 0.0
    sent: list[int] = field(default_factory=lambda: [0] * len(SENT))
    first: int = 0  # the step it came in, and the last one
    last: int = 0

    def step(self, step: int, seconds: Sequence[float], sent: Sequence[int]) -> None:
        """Add a step."""
        self.steps += 1
        self.first, self.last = self.first or step, step
        for at, value in enumerate(seconds):
            self.seconds[at] += value
        for at, more in enumerate(sent):
            self.sent[at] += more

    def add(self, other: MemberTotals) -> None:
        """Add later steps of the same worker."""
        self.steps, self.late = self.steps + other.steps, self.late + other.late
        self.first, self.last = self.first or other.first, other.last or self.last
        self.seconds = [a + b for a, b in zip(self.seconds, other.seconds, strict=True)]
        self.sent = [a + b for a, b in zip(self.sent, other.sent, strict=True)]


class RunMembers:
    """The members of a run by their numbers, which stay when ranks change."""

    def __init__(self) -> None:
        self._all: dict[int, MemberTotals] = {}
        self._since: dict[int, MemberTotals] = {}  # since the last look
        self._hosts: dict[int, str] = {}
        self._present: tuple[int, ...] = ()  # in the order of ranks
        self._next = 0.0  # when it is time for another look, in seconds since the start of the run

    def meet(self, numbers: Sequence[int], hosts: Sequence[str]) -> None:
        """Take in who takes part now, and on which hosts, in the order of ranks.

        `hosts` is empty where they aren't known.
        """
        self._present = tuple(numbers)
        self._hosts.update(zip(numbers, hosts, strict=False))

    def step(self, number: int, step: int, seconds: Sequence[float], sent: Sequence[int]) -> None:
        """Count a step of a worker: seconds of PARTS, and bytes of SENT."""
        self._of(number).step(step, seconds, sent)

    def late(self, seconds: Mapping[int, float]) -> None:
        """Count the seconds by which workers were late in steps."""
        for number, more in seconds.items():
            self._of(number).late += more

    def _of(self, number: int) -> MemberTotals:
        return self._since.setdefault(number, MemberTotals())

    def _gather(self) -> dict[int, MemberTotals]:
        """Add what was counted since the last look to all there is; return it."""
        found, self._since = self._since, {}
        for number, totals in found.items():
            self._all.setdefault(number, MemberTotals()).add(totals)
        return found

    def look(self, time: float) -> dict[str, list[float]] | None:
        """Return what each worker did since the last look, if it is time for one: steps, the
        seconds of PARTS in them, and of lateness.
        """
        if time < self._next or len(self._since) < 2:  # of one worker each step tells all
            return None
        self._next = time + max(EVERY, PART * time)
        return {
            str(number): [
                totals.steps,
                *(round(value, 6) for value in (*totals.seconds, totals.late)),
            ]
            for number, totals in sorted(self._gather().items())
        }

    def fields(self) -> list[dict[str, Any]]:
        """Return of each its number, host, and rank at the end (None: it had left by then), and
        of a mean step its seconds and bytes.
        """
        whole = {number: MemberTotals() for number in sorted({*self._all, *self._since})}
        for totals in (self._all, self._since):  # looks go on as if nobody had asked
            for number, part in totals.items():
                whole[number].add(part)
        return [
            {
                "worker": number,
                "host": self._hosts.get(number),
                "rank": self._present.index(number) if number in self._present else None,
                "steps": totals.steps,
                "first_step": totals.first,
                "last_step": totals.last,
                "seconds": {
                    part: value / max(totals.steps, 1)
                    for part, value in zip(PARTS, totals.seconds, strict=True)
                },
                "late": totals.late / max(totals.steps, 1),
                "bytes_sent": {
                    where: value / max(totals.steps, 1)
                    for where, value in zip(SENT, totals.sent, strict=True)
                },
            }
            for number, totals in whole.items()
        ]

"""Commands from a launcher to its running workers: above all the view, each time that it changes.

They are lines of JSON through a pipe.

    launcher   {"number": 3, "members": [[worker, host, name, address], ...], "broken": false}
                                       --->  thread of the worker
               {"ask": true}           --->  (it reports its position)
               {"leave": true}         --->  (it leaves after its turn)
               STACK, a signal         --->  (it writes its stacks)

A worker that is missing in the new view won't answer any more, so the thread at once ends the waits
of this worker.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

PORTS = 1 << 16
ASK = b'{"ask": true}\n'
# Scripts have handlers of their own for SIGUSR1 and SIGUSR2 (Slurm sends them, too); nobody uses
# this one. Only a worker that has said that it shows its stack may be sent it: it ends any other.
STACK = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1


def named(serial: int, port: int) -> int:
    """Make the number of a worker, never used twice in a job; it contains the port of its store."""
    return serial * PORTS + port


class Member(NamedTuple):
    """A worker of a view, and where it serves a store."""

    worker: int
    host: int  # the number of its host in the job
    name: str  # of that host
    address: str

    @property
    def port(self) -> int:
        """The port on which the worker serves its store."""
        return self.worker % PORTS


@dataclass(frozen=True)
class Roster:
    """A view as workers get it.

    `broken`: groups of an earlier view can't be used, though the members may be the same.
    """

    number: int
    members: tuple[Member, ...]
    broken: bool = False

    @property
    def workers(self) -> tuple[int, ...]:
        """The numbers of the workers."""
        return tuple(member.worker for member in self.members)

    @property
    def mark(self) -> str:
        """A mark that tells this view of this start of the job from all others: half of a
        worker's number is drawn by chance.
        """
        return f"view {self.number} of {' '.join(map(str, self.workers))}"

    def dump(self) -> bytes:
        """Write as a line."""
        return (
            json.dumps(
                {"number": self.number, "members": self.members, "broken": self.broken}
            ).encode()
            + b"\n"
        )

    @classmethod
    def load(cls, line: bytes) -> Roster:
        """Read from a line."""
        fields = json.loads(line)
        return cls(
            int(fields["number"]),
            tuple(Member(*member) for member in fields["members"]),
            bool(fields["broken"]),
        )


def asked(descriptor: int, seconds: float) -> bool:
    """Whether the launcher asks within so many seconds where this worker is; for workers that
    get no other commands.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(1000 * seconds):
        return False
    data = os.read(descriptor, 1 << 16)
    if not data:
        time.sleep(seconds)  # the launcher is gone, and this worker soon
    return ASK in data


class CommandPipe:
    """The worker's end of the pipe.

    `latest` is the last view that came; `answer` says where this worker is when its launcher asks.
    """

    def __init__(self, descriptor: int, answer: Callable[[], None] = lambda: None) -> None:
        self._descriptor, self._answer = descriptor, answer
        self._changed = threading.Condition()
        self._rosters: dict[int, Roster] = {}
        self._needed: frozenset[int] = frozenset()
        self._since = 0
        self.leaving = False  # whether this worker has been asked to go
        self._trip: Callable[[], None] = lambda: None
        threading.Thread(target=self._listen, name="paceline orders", daemon=True).start()

    @property
    def latest(self) -> int:
        """The number of the newest view."""
        return max(self._rosters, default=0)

    def roster(self, number: int) -> Roster:
        """Return the view with this number, which has come before."""
        return self._rosters[number]

    def arm(self, number: int, needed: frozenset[int], trip: Callable[[], None]) -> None:
        """Call `trip`, once, when a view later than `number` leaves out one of those that are
        `needed`, or says that groups are broken.
        """
        with self._changed:
            self._needed, self._since, self._trip = needed, number, trip
            late = any(self._breaks(roster) for roster in self._rosters.values())
        if late:
            trip()

    def _breaks(self, roster: Roster) -> bool:
        return roster.number > self._since and (
            roster.broken or not self._needed <= {*roster.workers}
        )

    def newer(self, number: int, seconds: float) -> Roster | None:
        """Return the newest view, once there is one after `number`; None when none has come in
        time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.latest > number, seconds)
            return self._rosters[self.latest] if self.latest > number else None

    def breaking(self, seconds: float, known: float = math.inf) -> Roster | None:
        """Return the newest view, once one has come since `arm` that breaks the groups; None when
        none has come in time.

        `known`: None also once any view has come after that one.
        """

        def breaks() -> bool:
            return any(self._breaks(roster) for roster in self._rosters.values())

        with self._changed:
            self._changed.wait_for(lambda: breaks() or self.latest > known, seconds)
            return self._rosters[self.latest] if breaks() else None

    def _listen(self) -> None:
        rest = b""
        while data := os.read(self._descriptor, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if "number" not in command:
                    self.leaving = self.leaving or "leave" in command
                    self._answer() if "ask" in command else None
                    continue
                roster = Roster.load(line)
                with self._changed:
                    trip = self._trip if self._breaks(roster) else None
                if trip is not None:
                    # first: a worker that sees the new view makes new connections, which have to
                    # stay
                    trip()
                with self._changed:
                    self._rosters[roster.number] = roster
                    self._changed.notify_all()
                    later = self._trip if self._breaks(roster) else None
                if later is not None and later is not trip:
                    later()

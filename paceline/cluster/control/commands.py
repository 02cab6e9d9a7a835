"""Commands from a launcher to its running workers, above all each new view.

They are lines of JSON in a pipe.

    launcher   {"number": 3, "members": [[worker, host, name, address], ...], "broken": false}
                                       --->  thread of the worker
               {"ask": true}           --->  (it reports its position)
               {"leave": true}         --->  (it leaves after its turn)
               STACK, a signal         --->  (it writes its stacks)

A worker that is missing in a new view won't answer any more, so the thread at once ends all waits
of its own worker.
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

PORT_COUNT = 1 << 16
ASK_COMMAND = b'{"ask": true}\n'
# SIGUSR1 and SIGUSR2 may have handlers of scripts (Slurm sends them too), but this signal is free.
# It may only be sent to a worker that has reported `shows`: it would end any other process.
STACK_SIGNAL = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1


def make_worker_number(serial: int, port: int) -> int:
    """Make the number of a worker, unique in its job. It contains the port of its store."""
    return serial * PORT_COUNT + port


class Member(NamedTuple):
    """A worker of a view, and the address at which it serves a store."""

    worker: int
    host: int  # number of its host in the job
    name: str  # name of its host
    address: str

    @property
    def port(self) -> int:
        """Port on which the worker serves its store."""
        return self.worker % PORT_COUNT


@dataclass(frozen=True)
class Roster:
    """A view, as workers get it.

    `broken`: groups of earlier views can't be used any more, even if the members are the same.
    """

    number: int
    members: tuple[Member, ...]
    broken: bool = False

    @property
    def workers(self) -> tuple[int, ...]:
        """Numbers of the workers."""
        return tuple(member.worker for member in self.members)

    @property
    def unique_text(self) -> str:
        """Text that no other view has, of this or another start of the job.

        It is unique because half of each worker's number is random.
        """
        return f"view {self.number} of {' '.join(map(str, self.workers))}"

    def dump(self) -> bytes:
        """Format the view as a line of JSON."""
        return (
            json.dumps(
                {"number": self.number, "members": self.members, "broken": self.broken}
            ).encode()
            + b"\n"
        )

    @classmethod
    def load(cls, line: bytes) -> Roster:
        """Parse a line of JSON."""
        fields = json.loads(line)
        return cls(
            int(fields["number"]),
            tuple(Member(*member) for member in fields["members"]),
            bool(fields["broken"]),
        )


def wait_for_question(descriptor: int, seconds: float) -> bool:
    """Wait up to some seconds for the launcher to ask for this worker's position.

    For workers that get no other commands. Returns whether it has asked.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(1000 * seconds):
        return False
    data = os.read(descriptor, 1 << 16)
    if not data:
        # The launcher is gone, and this worker will be soon. A closed pipe is always readable, so
        # the caller would poll it without a pause.
        time.sleep(seconds)
    return ASK_COMMAND in data


class CommandPipe:
    """The worker's end of the pipe, and the thread that reads it.

    `answer` is called when the launcher asks for this worker's position. It runs in the thread, as
    `trip` of `watch_breaking_views` does.
    """

    def __init__(self, descriptor: int, answer: Callable[[], None] = lambda: None) -> None:
        self._descriptor, self._answer = descriptor, answer
        self._changed = threading.Condition()
        self._rosters: dict[int, Roster] = {}
        self._needed_workers: frozenset[int] = frozenset()
        self._watched_since = 0
        self.asked_to_leave = False  # whether the launcher has asked this worker to leave
        self._trip: Callable[[], None] = lambda: None
        threading.Thread(target=self._read_commands, name="paceline orders", daemon=True).start()

    @property
    def latest_view(self) -> int:
        """Number of the newest view."""
        return max(self._rosters, default=0)

    def ask_to_leave(self) -> None:
        """Ask this worker to leave, as its launcher can."""
        self.asked_to_leave = True

    def find_roster(self, number: int) -> Roster:
        """View with this number, which has come before."""
        return self._rosters[number]

    def watch_breaking_views(
        self, number: int, needed: frozenset[int], trip: Callable[[], None]
    ) -> None:
        """Watch for a view that breaks the groups of this worker.

        Args:
            number: Number of the current view. Only later views count.
            needed: Workers of the groups. A view without one of them breaks the groups, and so does
                a view that is marked as broken.
            trip: Function to call once, in the thread or at once.
        """
        with self._changed:
            self._needed_workers, self._watched_since, self._trip = needed, number, trip
            # Such a view may have come before this call.
            late = any(self._breaks_groups(roster) for roster in self._rosters.values())
        if late:
            trip()

    def _breaks_groups(self, roster: Roster) -> bool:
        return roster.number > self._watched_since and (
            roster.broken or not self._needed_workers <= {*roster.workers}
        )

    def wait_for_newer_view(self, number: int, seconds: float) -> Roster | None:
        """Wait for a view after `number`, and return the newest one. None if none comes in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.latest_view > number, seconds)
            return self._rosters[self.latest_view] if self.latest_view > number else None

    def wait_for_breaking_view(self, seconds: float, known: float = math.inf) -> Roster | None:
        """Wait for a view that breaks the groups given to `watch_breaking_views`.

        Args:
            seconds: Time to wait at most.
            known: Number of a view. The wait ends too when any later view has come.

        Returns:
            The newest view. None if no view has broken the groups.
        """

        def breaks() -> bool:
            return any(self._breaks_groups(roster) for roster in self._rosters.values())

        with self._changed:
            self._changed.wait_for(lambda: breaks() or self.latest_view > known, seconds)
            return self._rosters[self.latest_view] if breaks() else None

    def _read_commands(self) -> None:
        """Carry out commands until the launcher closes the pipe. Runs in the thread."""
        rest = b""
        while data := os.read(self._descriptor, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if "number" not in command:
                    self.asked_to_leave = self.asked_to_leave or "leave" in command
                    self._answer() if "ask" in command else None
                    continue
                roster = Roster.load(line)
                with self._changed:
                    trip = self._trip if self._breaks_groups(roster) else None
                if trip is not None:
                    # Before the view is published: a worker that sees it makes new connections,
                    # which must not be ended.
                    trip()
                with self._changed:
                    self._rosters[roster.number] = roster
                    self._changed.notify_all()
                    later = self._trip if self._breaks_groups(roster) else None
                # `watch_breaking_views` may have been called between the two blocks.
                if later is not None and later is not trip:
                    later()

"""Waits for the other processes of a host: yields the core at first, sleeps later, and finds dead,
gone or stuck ranks early.

    up to 200 yields (0.1 ms and more: the others are near), as few as 8 after waits that they did
        not end, none where others use the core
    sleeps of 2 ms, after 20 ms of 10 ms, that end when another rank posts something

Where work is pending in other groups, sleeps are naps of 50 us, later 200 us, and it is pushed
between them: nothing wakes a rank for it. Every 2 ms a look is taken whether the missing can still
come.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgpack

from paceline import callsite
from paceline.comm.shm.bell import Bell
from paceline.comm.waitgraph import GRACE, RankWait, apart, describe
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, ViewChanged, WorkerLost

SPINS, FEW_SPINS = 200, 8  # yields, at most and at least
CROWDED = 50e-6  # seconds that a yield takes where another thread has used the core meanwhile
NAP, LONG_NAP = 50e-6, 200e-6  # seconds
LONG = 20e-3  # seconds after which naps are long
LOOK = 2e-3  # seconds between two looks at the deadline and at the living
REST, LONG_REST = 2e-3, 10e-3  # seconds of a sleep from which a rank is woken
JUDGED = GRACE + 0.1  # seconds: by then all that wait for each other have told it
# why the group has ended: name of an error, its message, the ranks that are gone or missing
Verdict = tuple[str, str, list[int]]


class WaitCondition(NamedTuple):
    """A condition to wait for: whether it holds, which ranks are missing, and which call it is
    on its channel.
    """

    ready: Callable[[], bool]
    missing: Callable[[], list[int]]
    channel: str
    number: int
    what: object  # its str is for messages


class WaitNotes(Protocol):
    """The notes that ranks leave for each other to read."""

    def leave(self) -> None:
        """Mark that this rank does nothing for the group any more."""
        ...

    def left(self, rank: int) -> bool:
        """Whether a rank has left."""
        ...

    def tell(self, text: bytes) -> None:
        """Leave a note for the others (only the last is kept)."""
        ...

    def told(self, rank: int) -> bytes:
        """Read the note of a rank."""
        ...


class RankWaiter:
    """How one rank waits. `made` counts its calls by channel.

    `busy` pushes work that is pending elsewhere, and tells whether there is any. `bell`: wakes this
    rank (None: nothing does). `names` is what the ranks are called in messages and errors. An error
    that ends the group is told to the others, who raise it too.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        notes: WaitNotes,
        *,
        deadline: float,
        bell: Bell | None = None,
    ) -> None:
        self.rank, self.names, self.deadline = rank, tuple(names), deadline
        self.waited = 0.0  # seconds
        self.busy: Callable[[], bool] = lambda: False
        self.made: dict[str, int] = {}
        self.broken: PacelineError | None = None  # why nothing can be waited for any more
        self._notes, self._bell = notes, bell
        self._telling = False
        # twice as many after a wait that yields ended, half as many after one that they didn't
        self._spins = SPINS
        self._pidfds: dict[int, int] = {}
        fine_timer()

    def know(self, pids: Mapping[int, int]) -> None:
        """Watch the processes of the other ranks: from now on their deaths are seen."""
        for rank, pid in pids.items():
            if pid == os.getpid() or not hasattr(os, "pidfd_open"):
                continue
            try:
                self._pidfds[os.pidfd_open(pid)] = rank
            except ProcessLookupError as error:
                name = self.names[rank]
                self._forget()
                raise self.end(
                    WorkerLost(f"rank {name} has died while the group was made", (name,))
                ) from error

    def end(self, error: BaseException) -> PacelineError:
        """Break the group, here and at the others, because of `error`, or of what another found
        first; return that.
        """
        if self.broken is None:
            me = self.names[self.rank]
            why = (
                f"rank {me} broke off in the middle of an exchange ({type(error).__name__}: "
                f"{error})"
            )
            mine = error if isinstance(error, PacelineError) else WorkerLost(why, (me,))
            self.broken = self._ended() or mine
            self._tell(None)
        return self.broken

    def interrupt(self, error: PacelineError) -> None:
        """Break the group here alone; the others are not told. From any thread."""
        self.broken = self.broken or error

    def close(self, error: PacelineError) -> None:
        """Leave in good order; `error` is what later calls raise.

        What ended it before stays the reason.
        """
        if self.broken is None:
            self.broken = error
            self._notes.leave()
        self._forget()

    def _forget(self) -> None:
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()

    def wait(self, awaited: WaitCondition, timeout: float | None = None) -> None:
        """Return when the condition holds.

        Else raise, and end the group: `WorkerLost` when a missing rank has gone, `Mismatch` when
        the missing wait for me, `DeadlineExceeded` at the deadline. After a `timeout` of its own
        only this wait is over.
        """
        started = time.perf_counter()
        ready = awaited.ready
        try:
            since, spins = started, self._spins
            for spun in range(spins):
                if ready():
                    if spun:
                        self._spins = min(SPINS, 2 * spins)
                    return
                os.sched_yield()
                now = time.perf_counter()
                # others want this core: they get it, and whoever is awaited may be one of them
                if now - since > CROWDED:
                    break
                since = now
            self._spins = max(FEW_SPINS, spins // 2)
            self._nap(awaited, started, timeout)
        finally:
            self.waited += time.perf_counter() - started

    def _nap(self, awaited: WaitCondition, started: float, timeout: float | None) -> None:
        looked = 0.0
        try:
            while not awaited.ready():
                if self.broken is not None:
                    raise self.broken
                since = time.perf_counter() - started
                if since - looked > LOOK:
                    looked = since
                    self._look(awaited, since, timeout)
                if self.busy() or self._bell is None:
                    time.sleep(NAP if since < LONG else LONG_NAP)
                else:
                    self._bell.rest(awaited.ready, REST if since < LONG else LONG_REST)
        finally:
            if self._telling:
                self._tell(None)

    def _look(self, awaited: WaitCondition, since: float, timeout: float | None) -> None:
        if since > GRACE and not self._telling:
            self._tell(awaited)
        missing = awaited.missing()
        named = tuple(self.names[rank] for rank in missing)
        who = ", ".join(map(str, named)) or "unknown"
        error = self._ended() or self._hopeless(awaited, missing, since)
        if error is None and since > self.deadline:
            what = f"{awaited.what} (asked by rank {self.names[self.rank]})"
            error = DeadlineExceeded(
                f"rank {who} did not come within {self.deadline:g} s to {what}", named
            )
        if error is not None and not awaited.ready():
            raise self.end(error)
        if timeout is not None and since > timeout and not awaited.ready():
            raise DeadlineExceeded(
                f"rank {who} did not come within {timeout:g} s to {awaited.what}; it may still",
                named,
            )

    def _hopeless(
        self, awaited: WaitCondition, missing: Sequence[int], since: float
    ) -> PacelineError | None:
        """Return why the missing can't come, if they can't."""
        gone = {rank: "has closed its group" for rank in missing if self._notes.left(rank)}
        gone |= {rank: "has died" for rank in self._dead() if rank in missing and rank not in gone}
        if gone:
            text = ", ".join(f"rank {self.names[rank]} {how}" for rank, how in sorted(gone.items()))
            me = self.names[self.rank]
            return WorkerLost(
                f"{text} while rank {me} waits for it in {awaited.what}",
                tuple(self.names[rank] for rank in sorted(gone)),
            )
        stuck = self._stuck() if since > JUDGED else {}
        return describe(stuck, self.names) if self.rank in stuck else None

    def _tell(self, awaited: WaitCondition | None) -> None:
        """Leave a note of what this rank waits for, and of what has ended the group."""
        self._telling = awaited is not None
        wait = None
        if awaited is not None:
            wait = (
                awaited.channel,
                awaited.number,
                str(awaited.what)[:400] + callsite.place(),
                self.made,
            )
        verdict: Verdict | None = None
        if self.broken is not None:
            gone: tuple[int, ...] = getattr(self.broken, "missing", ()) or getattr(
                self.broken, "ranks", ()
            )
            verdict = (type(self.broken).__name__, str(self.broken)[:2000], list(gone))
        self._notes.tell(msgpack.packb((wait, verdict)))

    def _told(self) -> dict[int, tuple[list[Any] | None, Verdict | None]]:
        return {
            rank: tuple(msgpack.unpackb(text))
            for rank in range(len(self.names))
            if (text := self._notes.told(rank))
        }

    def _ended(self) -> PacelineError | None:
        """Return the error that has ended the group at another rank, if one has."""
        for _, verdict in self._told().values():
            if verdict is not None:
                return _judged(*verdict)
        return None

    def _stuck(self) -> dict[int, RankWait]:
        """Return the waits that can never end, if they are the same in two looks."""
        one, other = (
            apart(
                {
                    rank: RankWait(*wait)
                    for rank, (wait, _) in self._told().items()
                    if wait is not None
                }
            )
            for _ in range(2)
        )
        return one if one == other else {}

    def _dead(self) -> Sequence[int]:
        if not self._pidfds:
            return []
        poll = select.poll()
        for fd in tuple(self._pidfds):
            poll.register(fd, select.POLLIN)
        return [self._pidfds[fd] for fd, _ in poll.poll(0)]


def _judged(kind: str, text: str, ranks: Sequence[int]) -> PacelineError:
    if kind == "WorkerLost":
        return WorkerLost(text, tuple(ranks))
    if kind == "DeadlineExceeded":
        return DeadlineExceeded(text, tuple(ranks))
    return Mismatch(text) if kind == "Mismatch" else ViewChanged(text)


def fine_timer() -> None:
    """Let naps of this thread end on time, not up to 50 us late (prctl PR_SET_TIMERSLACK;
    without it naps are longer, nothing else).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(29, 1000, 0, 0, 0)

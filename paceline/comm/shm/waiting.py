"""Waits for other processes of a host: polls at first, sleeps later, and finds lost ranks early.

C polls for up to 0.1 ms, as the other ranks are near, and yields the core in between. It polls for
less time if polling did not end the last waits, or if other processes use the core. Then it sleeps
(native/segment.c). A sleep ends when another rank posts something, or after 2 ms; once a wait has
taken 20 ms, after 10 ms.

A post in another group ends no sleep of this one. So if operations are pending in other groups, the
rank sleeps for 50 us at a time, later 200 us, and advances them in between. Every 2 ms it looks
whether the missing ranks can still come.
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
from paceline.comm.waitgraph import GRACE, RankWait, find_stuck, make_stuck_error
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, ViewChanged, WorkerLost

NAP, LONG_NAP = 50_000, 200_000  # nanoseconds of a nap, and of one after LONG
LONG = 20e-3  # seconds of a wait after which naps and sleeps are longer
LOOK = 2e-3  # seconds between two looks at the deadline and at the missing ranks
REST, LONG_REST = 2_000_000, 10_000_000  # nanoseconds of a sleep, and of one after LONG
JUDGED = GRACE + 0.1  # seconds after which all ranks that wait for each other have left a note
# Why the group has ended: name of an error, its message, and the ranks that are gone or missing.
Verdict = tuple[str, str, list[int]]


class WaitCondition(NamedTuple):
    """A condition to wait for, and the call that waits for it."""

    ready: Callable[[], bool]  # whether it holds
    missing: Callable[[], list[int]]  # lists the ranks that have not come
    # Waits until it may hold, or nanoseconds have passed.
    wait: Callable[[int], object]
    channel: str
    number: int  # of the call on its channel
    what: object  # its str names the call in messages


class WaitNotes(Protocol):
    """Notes that ranks leave for each other."""

    def leave(self) -> None:
        """Mark that this rank takes no more part in the group."""
        ...

    def left(self, rank: int) -> bool:
        """Whether `rank` has left."""
        ...

    def tell(self, text: bytes) -> None:
        """Leave a note for the others. It replaces the one before."""
        ...

    def told(self, rank: int) -> bytes:
        """Read the note of `rank`."""
        ...


class RankWaiter:
    """Waits for the other ranks, on behalf of one rank.

    The first error that ends the group wins: the rank that finds it leaves a note, and all others
    raise the same error when they look. `broken` is set once, and never reset.

    Args:
        rank: This rank.
        names: Rank of each member among all workers, for messages and errors.
        notes: The notes of all ranks.
        deadline: Seconds that a wait may take.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        notes: WaitNotes,
        *,
        deadline: float,
    ) -> None:
        self.rank, self.names, self.deadline = rank, tuple(names), deadline
        self.waited = 0.0  # seconds spent waiting
        # Advances operations of other groups, and says whether any are pending there.
        self.busy: Callable[[], bool] = lambda: False
        self.made: dict[str, int] = {}  # calls of this rank, by channel
        self.broken: PacelineError | None = None  # the error that every later wait raises
        self._notes = notes
        self._has_note = False  # whether a note says what this rank waits for
        self._pidfds: dict[int, int] = {}  # ranks by descriptors of their processes
        set_fine_timer()

    def count_call(self, channel: str) -> int:
        """Count a call of this rank, and return its number on the channel, from 0 on."""
        number = self.made.get(channel, 0)
        self.made[channel] = number + 1
        return number

    def add_wait(self, started: float) -> None:
        """Count the time since `started` (time.perf_counter()) as spent waiting."""
        self.waited += time.perf_counter() - started

    def watch_processes(self, pids: Mapping[int, int]) -> None:
        """Watch the processes of the other ranks, so that their deaths are seen from now on."""
        for rank, pid in pids.items():
            if pid == os.getpid() or not hasattr(os, "pidfd_open"):
                continue
            try:
                self._pidfds[os.pidfd_open(pid)] = rank
            except ProcessLookupError as error:
                name = self.names[rank]
                self._close_pidfds()
                raise self.end_everywhere(
                    WorkerLost(f"rank {name} has died while the group was made", (name,))
                ) from error

    def end_everywhere(self, error: BaseException) -> PacelineError:
        """Break the group on all ranks. Returns the error that all of them raise.

        It is `error`, or the error that another rank found first.
        """
        if self.broken is None:
            me = self.names[self.rank]
            why = (
                f"rank {me} broke off in the middle of an "
                f"exchange ({type(error).__name__}: {error})"
            )
            own_error = error if isinstance(error, PacelineError) else WorkerLost(why, (me,))
            self.broken = self._find_verdict() or own_error
            self._write_note(None)
        return self.broken

    def interrupt(self, error: PacelineError) -> None:
        """Break the group on this rank alone. Any thread may call it, and wake this rank then."""
        self.broken = self.broken or error

    def close(self, error: PacelineError) -> None:
        """Leave in good order. Later calls raise `error`, or the one that broke the group."""
        if self.broken is None:
            self.broken = error
            self._notes.leave()
        self._close_pidfds()

    def _close_pidfds(self) -> None:
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()

    def wait_until_ready(self, awaited: WaitCondition, timeout: float | None = None) -> None:
        """Wait until the condition holds, or raise an error, which ends the group.

        Args:
            awaited: The condition.
            timeout: Seconds after which only this wait ends. Default: the deadline of the group.

        Raises:
            WorkerLost: A missing rank has gone.
            Mismatch: The missing ranks wait for this one.
            DeadlineExceeded: The deadline, or `timeout`, has passed.
        """
        started = time.perf_counter()
        looked = 0.0  # seconds of the wait at the last look
        try:
            while not awaited.ready():
                if self.broken is not None:
                    raise self.broken
                since = time.perf_counter() - started
                if since - looked > LOOK:
                    looked = since
                    self._check_wait(awaited, since, timeout)
                # A post of another group ends no sleep of this one: nap if any is awaited.
                short, long = (NAP, LONG_NAP) if self.busy() else (REST, LONG_REST)
                awaited.wait(short if since < LONG else long)
        finally:
            self.add_wait(started)
            if self._has_note:  # it waits no more
                self._write_note(None)

    def _check_wait(self, awaited: WaitCondition, since: float, timeout: float | None) -> None:
        # Most waits are short, so a note is written late: it is for ranks that look for deadlocks.
        if since > GRACE and not self._has_note:
            self._write_note(awaited)
        missing = awaited.missing()
        named = tuple(self.names[rank] for rank in missing)
        who = ", ".join(map(str, named)) or "unknown"
        error = self._find_verdict() or self._find_hopeless(awaited, missing, since)
        if error is None and since > self.deadline:
            what = f"{awaited.what} (asked by rank {self.names[self.rank]})"
            error = DeadlineExceeded(
                f"rank {who} did not come within {self.deadline:g} s to {what}", named
            )
        # It may have become ready while we looked.
        if error is not None and not awaited.ready():
            raise self.end_everywhere(error)
        if timeout is not None and since > timeout and not awaited.ready():
            raise DeadlineExceeded(
                f"rank {who} did not come within {timeout:g} s to {awaited.what}; it may still",
                named,
            )

    def _find_hopeless(
        self, awaited: WaitCondition, missing: Sequence[int], since: float
    ) -> PacelineError | None:
        """Return an error if the missing ranks can't come any more; None if they may."""
        # A rank that has left or died can't come. Else ranks may wait for each other for ever, but
        # only once all of them have had time to leave a note.
        gone = {rank: "has closed its group" for rank in missing if self._notes.left(rank)}
        gone |= {
            rank: "has died" for rank in self._find_dead() if rank in missing and rank not in gone
        }
        if gone:
            text = ", ".join(f"rank {self.names[rank]} {how}" for rank, how in sorted(gone.items()))
            me = self.names[self.rank]
            return WorkerLost(
                f"{text} while rank {me} waits for it in {awaited.what}",
                tuple(self.names[rank] for rank in sorted(gone)),
            )
        stuck = self._find_stuck() if since > JUDGED else {}
        return make_stuck_error(stuck, self.names) if self.rank in stuck else None

    def _write_note(self, awaited: WaitCondition | None) -> None:
        """Leave a note: the condition this rank waits for, and why the group has ended."""
        self._has_note = awaited is not None
        wait = None
        if awaited is not None:
            wait = (
                awaited.channel,
                awaited.number,
                str(awaited.what)[:400] + callsite.find_user_line(),
                self.made,
            )
        verdict: Verdict | None = None
        if self.broken is not None:
            gone: tuple[int, ...] = getattr(self.broken, "missing", ()) or getattr(
                self.broken, "ranks", ()
            )
            verdict = (type(self.broken).__name__, str(self.broken)[:2000], list(gone))
        self._notes.tell(msgpack.packb((wait, verdict)))

    def _read_notes(self) -> dict[int, tuple[list[Any] | None, Verdict | None]]:
        return {
            rank: tuple(msgpack.unpackb(text))
            for rank in range(len(self.names))
            if (text := self._notes.told(rank))
        }

    def _find_verdict(self) -> PacelineError | None:
        """Return the error with which another rank has ended the group; None if none has."""
        for _, verdict in self._read_notes().values():
            if verdict is not None:
                return _make_error(*verdict)
        return None

    def _find_stuck(self) -> dict[int, RankWait]:
        """Find waits that can never end: the same in two looks, as notes are not read at once."""
        first, second = (
            find_stuck(
                {
                    rank: RankWait(*wait)
                    for rank, (wait, _) in self._read_notes().items()
                    if wait is not None
                }
            )
            for _ in range(2)
        )
        return first if first == second else {}

    def _find_dead(self) -> Sequence[int]:
        if not self._pidfds:
            return []
        # A pidfd becomes readable when its process ends.
        poll = select.poll()
        for fd in tuple(self._pidfds):
            poll.register(fd, select.POLLIN)
        return [self._pidfds[fd] for fd, _ in poll.poll(0)]


def _make_error(kind: str, text: str, ranks: Sequence[int]) -> PacelineError:
    if kind == "WorkerLost":
        return WorkerLost(text, tuple(ranks))
    if kind == "DeadlineExceeded":
        return DeadlineExceeded(text, tuple(ranks))
    return Mismatch(text) if kind == "Mismatch" else ViewChanged(text)


def set_fine_timer() -> None:
    """Let naps of this thread end on time, not up to 50 us late.

    By prctl(PR_SET_TIMERSLACK). Without it naps are longer, nothing else.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(29, 1000, 0, 0, 0)

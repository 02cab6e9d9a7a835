"""Hang detection: if workers wait far longer than usual, launchers show the stacks of the others.

    worker 1: late in call 71  -->  launcher 0  -->  all launchers: where are your workers?
    worker 2: waits, too
    worker 3: has been computing for 8 s  -->  its stack is shown
    worker 4: doesn't answer              -->  the same, as far as it can be had

The workers are asked once more when the waiting ones are about to give up. If losses are survived,
a worker that is late even then is ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.cluster.control import commands
from paceline.cluster.hosts.peers import LateCall, Peers
from paceline.cluster.launcher import janitor
from paceline.cluster.launcher.worker import WorkerProcess
from paceline.timings import DEFAULT_TIMINGS, HangTimings

# Lines of a long stack that are shown: where the worker hangs, and how the script got there
_INNERMOST_LINES, _OUTERMOST_LINES = 10, 5
# Why a process doesn't answer, by its state as the kernel writes it (see proc(5))
_REASON_BY_STATE = {
    "T": "it was stopped by a signal (SIGSTOP); `kill -CONT {pid}` there lets it go on",
    "t": "a debugger holds it",
    "D": "it is stuck in the kernel (a disk, or a network file system)",
}
_UNKNOWN_REASON = "it doesn't answer"


@dataclass(frozen=True)
class _Whereabouts:
    """Where a worker is.

    It has the number of calls that have ended, the name of the last one, how many seconds ago that
    ended, and whether the worker waits in another call.
    """

    ended_calls: int
    call_name: str
    seconds: float
    is_waiting: bool

    @classmethod
    def from_record(cls, record: dict[str, object]) -> _Whereabouts:
        """Read the whereabouts from a worker's record."""
        return cls(
            int(str(record["call"])),
            str(record["what"]),
            float(str(record["seconds"])),
            bool(record["waits"]),
        )

    def describe_place(self) -> str:
        """The whereabouts in words."""
        if self.is_waiting:
            return f"it waits itself, in {self.call_name}"
        return f"its last call was {self.call_name or 'none'}, {self.seconds:.1f} s ago"


@dataclass
class _LateCase:
    """A call in which some workers wait, and the search for the workers that they wait for.

    ask all workers -> answers, or too much time -> culprits: ask for stacks -> show them: is_over
    """

    members: Sequence[WorkerProcess]
    asked_at: float
    answers: dict[int, _Whereabouts] = field(default_factory=dict)  # by process id
    culprits: list[WorkerProcess] = field(default_factory=list)
    stacks_asked_at: float | None = None  # when their stacks were asked for
    is_over: bool = False


@dataclass
class HangSearch:
    """Finds the workers of this host that others wait for.

    Args:
        peers: The launchers of the other hosts.
        host: Name of this host.
        say: Shows a line of text.
        timings: How long to wait for answers and for stacks.
    """

    peers: Peers
    host: str
    say: Callable[[str], None]
    timings: HangTimings = field(default=DEFAULT_TIMINGS.hangs, kw_only=True)
    # By call, and by whether the waiting workers are about to give up
    _cases: dict[tuple[int, bool], _LateCase] = field(default_factory=dict)
    # Workers that were named already (process id), and after how many calls
    _named: set[tuple[int, int]] = field(default_factory=set)

    def handle_messages(self, members: Sequence[WorkerProcess], *, ends: bool) -> None:
        """Handle the messages of workers and of other launchers.

        Args:
            members: Workers of this host that others may wait for.
            ends: Whether a worker that doesn't come can be ended, as the others can go on without
                it.
        """
        now = time.monotonic()
        for worker in members:
            for record in worker.take_records("late"):
                self.peers.tell_late(
                    LateCall(
                        int(str(record["call"])), str(record["what"]), bool(record["given_up"])
                    )
                )
            for record in worker.take_records("where"):
                for case in self._cases.values():
                    case.answers[worker.process.pid] = _Whereabouts.from_record(record)
        for late in self.peers.late_calls.values():
            if (late.call, late.given_up) not in self._cases:
                self._cases[late.call, late.given_up] = _LateCase(members, now)
                for worker in members:
                    worker.send_order(commands.ASK_COMMAND)
            case = self._cases[late.call, late.given_up]
            if not case.is_over:
                self._advance_case(late, case, ends=ends and late.given_up)

    def _advance_case(self, late: LateCall, case: _LateCase, *, ends: bool) -> None:
        """Take a case one step further, if it is time."""
        now = time.monotonic()
        live_members = [worker for worker in case.members if worker.ended_at is None]
        if case.stacks_asked_at is None:
            if now - case.asked_at < self.timings.answer and any(
                worker.process.pid not in case.answers for worker in live_members
            ):
                return
            case.culprits = [
                worker
                for worker in live_members
                if not _is_coming(case.answers.get(worker.process.pid), late.call, strict=ends)
            ]
            case.stacks_asked_at = now
            for worker in case.culprits:
                worker.read_stack()  # drops stacks that were written before
                if worker.has_reported("shows"):
                    os.kill(worker.process.pid, commands.STACK_SIGNAL)
        elif now - case.stacks_asked_at > self.timings.stack_dump:
            case.is_over = True
            for worker in [worker for worker in case.culprits if worker.ended_at is None]:
                self._name_late_worker(worker, late, case.answers.get(worker.process.pid))
                if ends:
                    self.say(f"paceline: rank {worker.rank} is given up, and ended")
                    # Not by `send_signal`: a worker that is sent a signal doesn't count as failed.
                    os.kill(worker.process.pid, signal.SIGKILL)

    def _name_late_worker(
        self, worker: WorkerProcess, late: LateCall, answer: _Whereabouts | None
    ) -> None:
        """Name a worker and show its stack, unless it was named after the same call before."""
        place = (worker.process.pid, late.call if answer is None else answer.ended_calls)
        if place in self._named:
            return
        self._named.add(place)
        pid = worker.process.pid
        whereabouts = (
            _REASON_BY_STATE.get(janitor.read_state(pid), _UNKNOWN_REASON).format(pid=pid)
            if answer is None
            else answer.describe_place()
        )
        lines = _shorten_stack(worker.read_stack())
        self.say(
            f"paceline: others wait for rank {worker.rank} on {self.host} ({late.what}): "
            f"{whereabouts}{'; its stack:' if lines else ''}"
        )
        for line in lines:
            self.say(f"paceline:   {line.strip()}")


def _is_coming(answer: _Whereabouts | None, call: int, *, strict: bool) -> bool:
    """Whether a worker is past this call, or in it.

    A worker that waits for others in an earlier call also counts as coming, unless `strict`.
    """
    if answer is None:
        return False
    return answer.ended_calls > call or (
        answer.is_waiting and (answer.ended_calls == call or not strict)
    )


def _shorten_stack(stack: str) -> list[str]:
    """Lines of a stack, without the middle if it is long."""
    lines = [line for line in stack.splitlines()[1:] if "<frozen importlib" not in line]
    return (
        lines
        if len(lines) <= _INNERMOST_LINES + _OUTERMOST_LINES
        else [*lines[:_INNERMOST_LINES], "...", *lines[-_OUTERMOST_LINES:]]
    )

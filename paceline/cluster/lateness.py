"""Who doesn't come: when workers wait for others far longer than usual, each launcher asks its own where they are, and shows their stacks.

worker 1: late in call 71  -->  launcher 0  -->  all launchers: where are yours?
worker 2: waits, too                             worker 3: computes since 8 s  -->  its stack is shown
                                                 worker 4: says nothing         -->  the same, as far as it answers
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.cluster.assembly import Assembly
from paceline.cluster.worker import Worker

_ANSWER_SECONDS = 1.0  # how long a worker may take to say where it is
_STACK_SECONDS = 0.5  # and to write its stack
_LINES = 15  # of a stack


@dataclass
class _Case:
    """A call that somebody waits in."""

    asked: float
    answers: dict[int, dict[str, object]] = field(default_factory=dict)  # by number of the worker
    culprits: list[Worker] = field(default_factory=list)
    shown: float | None = None  # when their stacks were asked for
    over: bool = False


@dataclass
class Lateness:
    """The cases of this host's workers."""

    assembly: Assembly
    say: Callable[[str], None]
    _cases: dict[int, _Case] = field(default_factory=dict)
    _whats: dict[int, str] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)

    def turn(self, workers: Sequence[Worker]) -> None:
        """Take what workers and other launchers have said."""
        now = time.monotonic()
        for worker in workers:
            for record in worker.take("late"):
                call = int(str(record["call"]))
                self._whats[call] = str(record["what"])
                self.assembly.tell_late(call, given_up=bool(record["given_up"]))
            for record in worker.take("where"):
                for case in self._cases.values():
                    case.answers[worker.number] = record
        members = [worker for worker in workers if worker.ended is None and worker.number in self.assembly.view.workers]
        for call, given_up in self.assembly.late.items():
            if call not in self._cases:
                self._cases[call] = _Case(now)
                for worker in members:
                    worker.order(b'{"ask": true}\n')
            case = self._cases[call]
            self._judge(call, case, members, now)
            if given_up and case.over:
                self._give_up(case)

    def _judge(self, call: int, case: _Case, members: Sequence[Worker], now: float) -> None:
        if case.over or now - case.asked < _ANSWER_SECONDS:
            return
        if case.shown is None:
            case.culprits = [worker for worker in members if not _waits(case.answers.get(worker.number), call)]
            case.shown = now
            for worker in case.culprits:
                worker.stack()  # what was written before is of no interest
                os.kill(worker.process.pid, signal.SIGUSR1)
        elif now - case.shown > _STACK_SECONDS:
            case.over = True
            for worker in case.culprits:
                self._tell(worker, call, case.answers.get(worker.number))

    def _tell(self, worker: Worker, call: int, answer: dict[str, object] | None) -> None:
        if worker.ended is not None:
            return
        seat = self.assembly.view.seat(self.assembly.host)
        host = "this host" if seat is None else seat.facts["name"]
        where = (
            "it doesn't answer"
            if answer is None
            else f"its last call was {answer['what'] or 'none'}, {float(str(answer['seconds'])):.1f} s ago"
        )
        what = f" ({self._whats[call]})" if call in self._whats else ""
        self.say(f"paceline: others wait for rank {worker.rank} on {host}{what}: {where}; its stack:")
        lines = _main_thread(worker.stack())
        for line in lines or ["  (none: the process is stopped, or stuck outside of Python)"]:
            self.say(f"paceline:   {line.strip()}")

    def _give_up(self, case: _Case) -> None:
        for worker in case.culprits:
            if worker.ended is None and worker.number not in self._killed:
                self._killed.add(worker.number)
                self.say(f"paceline: rank {worker.rank} is given up, and ended")
                os.kill(worker.process.pid, signal.SIGKILL)


def _waits(answer: dict[str, object] | None, call: int) -> bool:
    """Whether a worker is in this call, or past it."""
    if answer is None:
        return False
    done = int(str(answer["call"]))
    return done > call or (done == call and bool(answer["waits"]))


def _main_thread(stack: str) -> list[str]:
    """The lines of the main thread: faulthandler writes it last."""
    blocks = stack.strip().split("\n\n")
    return blocks[-1].splitlines()[1 : 1 + _LINES] if stack.strip() else []

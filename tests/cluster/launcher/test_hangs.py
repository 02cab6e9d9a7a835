"""Who others wait for is named by its own launcher, with its stack: real workers that say what
workers say, and real signals.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.cluster.hosts.peers import LateCall, NoPeers, note_late_call
from paceline.cluster.launcher import janitor
from paceline.cluster.launcher.hangs import HangSearch
from paceline.cluster.launcher.output import make_screens
from paceline.cluster.launcher.worker import WorkerCommand, WorkerProcess, start_worker
from paceline.timings import HangTimings
from tests.harness.jobs import PATIENCE, wait_for

LATE = LateCall(7, "backward of step 3", False)
GIVEN_UP = LATE._replace(given_up=True)
PLACE = {"PACELINE_STORE": "127.0.0.1:1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}

# A worker's two threads, as far as its launcher sees them.
WORKER = """
import os, signal, sys, threading, time
from paceline.cluster.control import commands, events
from paceline.cluster.discover import discover_place
place = discover_place()

def answers(done, *, waits):
    def listen():
        while True:
            if commands.wait_for_question(place.orders_fd, 0.05):
                call = f"backward of step {done - 4}"
                events.report_position(place, done, call, 2.5, waits=waits)
    threading.Thread(target=listen, daemon=True).start()

def hangs():
    events.report_ready(place)
    while True:
        time.sleep(0.01)
"""


class Slow(WorkerProcess):
    """A worker whose stack is waited for until it is whole."""

    _asked = False

    def read_stack(self) -> str:
        """What was there before the stack is asked for, and the next time the stack."""
        said = [super().read_stack()]
        if (
            self._asked
            and self.has_reported("shows")
            and janitor.read_state(self.process.pid) != "T"
        ):
            wait_for(
                lambda: (
                    said.append(super(Slow, self).read_stack()) or "in <module>" in "".join(said)
                )
            )
        self._asked = not self._asked
        return "".join(said)


class Host:
    """The workers of one host, and what its launcher says."""

    def __init__(self, answer: float) -> None:
        self.peers, self.said = NoPeers(), list[str]()
        self.workers: list[WorkerProcess] = []
        self.lateness = HangSearch(
            self.peers, "box7", self.said.append, timings=HangTimings(answer=answer, stack_dump=0.2)
        )

    def start(self, body: str) -> WorkerProcess:
        """A worker that has done this, and hangs."""
        rank = str(len(self.workers))
        environ = {**os.environ, **PLACE, "RANK": rank, "LOCAL_RANK": rank}
        command = WorkerCommand(
            int(rank), [sys.executable, "-c", f"{WORKER}\n{body}\nhangs()"], environ, ()
        )
        worker = Slow(**vars(start_worker(command, None, make_screens())))
        self.workers.append(worker)
        self.turn(lambda: worker.has_reported("ready"), ends=False)
        return worker

    def turn(
        self, until: Callable[[], bool], *, ends: bool = False, seconds: float = PATIENCE
    ) -> None:
        """Be the launcher until it is so."""
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, self.said
            for worker in self.workers:
                worker.read_reports()
            self.lateness.handle_messages(
                [worker for worker in self.workers if worker.process.poll() is None], ends=ends
            )
            time.sleep(0.01)

    def judge(self, late: LateCall = LATE, *, ends: bool = False) -> list[str]:
        """What is said of this call."""
        self.peers.tell_late(late)
        cases = self.lateness._cases
        self.turn(
            lambda: (case := cases.get((late.call, late.given_up))) is not None and case.is_over,
            ends=ends,
        )
        return self.said


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A host whose workers all answer, however late; of one that is `silent` one doesn't."""
    found = Host(getattr(request, "param", PATIENCE))
    yield found
    for worker in found.workers:
        worker.process.kill()
        worker.process.wait()
        for descriptor in (
            worker.records_fd,
            worker.orders_fd,
            worker.stack_fd,
            *(stream.descriptor for stream in worker.streams),
        ):
            os.close(descriptor)


silent = pytest.mark.parametrize("host", [0.5], indirect=True, ids=["silent"])


@pytest.mark.jobs
def test_who_computes_while_others_wait_is_shown(host: Host) -> None:
    host.start("answers(7, waits=True); events.register_stack_dump(place)")
    host.start("answers(7, waits=False); events.register_stack_dump(place)")
    host.start("answers(9, waits=False); events.register_stack_dump(place)")  # well past it
    head, *stack = host.judge()
    assert head == (
        "paceline: others wait for rank 1 on box7 (backward of step 3): its last call was backward "
        "of step 3, 2.5 s ago; its stack:"
    )
    assert [line.rpartition(" ")[2] for line in stack] == ["hangs", "<module>"] and all(
        line.startswith("paceline:   File") for line in stack
    )


@pytest.mark.jobs
def test_a_worker_of_this_host_says_that_it_waits(host: Host) -> None:
    host.start("answers(7, waits=False); events.register_stack_dump(place)")
    host.start(
        'answers(7, waits=True); events.report_late_wait(place, 7, "backward of step 3", '
        "given_up=False)"
    )
    host.turn(lambda: len(host.said) > 2)
    assert host.peers.late_calls == {7: LATE} and "rank 0" in host.said[0]


@silent
@pytest.mark.slow
def test_who_does_not_answer_is_shown_as_far_as_that_goes(host: Host) -> None:
    host.start("events.register_stack_dump(place)")
    head, *stack = host.judge()
    assert (
        "rank 0 on box7 (backward of step 3): it doesn't answer; its stack:" in head
        and "in hangs" in stack[0]
    )


@silent
@pytest.mark.slow
def test_of_a_long_stack_both_ends_are_shown(host: Host) -> None:
    host.start(
        "events.register_stack_dump(place)\ndef deep(n): deep(n - 1) if n else hangs()\ndeep(50)"
    )
    _, *stack = host.judge()
    names = [line.split()[-1] for line in stack]
    assert names == ["hangs", *["deep"] * 9, "...", *["deep"] * 4, "<module>"]


@silent
@pytest.mark.slow
def test_of_many_threads_the_main_one_is_shown(host: Host) -> None:
    threads = (
        "for _ in range(150): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    host.start(f"events.register_stack_dump(place)\n{threads}")
    assert host.judge()[1].endswith("in hangs")


@silent
@pytest.mark.slow
def test_only_who_shows_its_stack_is_sent_a_signal(host: Host) -> None:
    """It would end a script that never heard of paceline."""
    worker = host.start("pass")
    assert host.judge() == [
        "paceline: others wait for rank 0 on box7 (backward of step 3): it doesn't answer"
    ]
    assert worker.process.poll() is None


@pytest.mark.jobs
def test_signals_of_a_script_s_own_stay_its_own(host: Host) -> None:
    taken = (
        "for number in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, lambda *_: "
        "os._exit(3))"
    )
    worker = host.start(f"{taken}\nanswers(7, waits=False); events.register_stack_dump(place)")
    assert "in hangs" in host.judge()[1] and worker.process.poll() is None
    worker.process.send_signal(signal.SIGUSR1)
    assert worker.process.wait(PATIENCE) == 3


@silent
@pytest.mark.slow
def test_who_is_stopped_is_named_as_stopped(host: Host) -> None:
    worker = host.start("answers(7, waits=False); events.register_stack_dump(place)")
    worker.process.send_signal(signal.SIGSTOP)
    pid = worker.process.pid
    wait_for(lambda: janitor.read_state(pid) == "T")  # on a busy machine it takes a moment
    why = f"it was stopped by a signal (SIGSTOP); `kill -CONT {pid}` there lets it go on"
    assert host.judge() == [f"paceline: others wait for rank 0 on box7 (backward of step 3): {why}"]
    assert len(host.judge(GIVEN_UP)) == 1  # it hasn't moved
    # it must have, and stands still again
    assert len(host.judge(LateCall(20, "backward of step 16", False))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_who_does_not_come_is_ended_where_others_can_go_on(host: Host, ends: bool) -> None:
    host.start("answers(7, waits=True); events.register_stack_dump(place)")
    worker = host.start("answers(7, waits=False); events.register_stack_dump(place)")
    told = len(host.judge(ends=ends))
    host.judge(GIVEN_UP, ends=ends)
    # its stack was shown
    assert host.said[told:] == (["paceline: rank 1 is given up, and ended"] if ends else [])
    if ends:
        assert worker.process.wait(PATIENCE) == -signal.SIGKILL and not worker.sent_signals
    assert host.workers[0].process.poll() is None


@pytest.mark.slow
def test_who_waits_in_an_earlier_call_is_to_blame_only_where_all_are_in_step(host: Host) -> None:
    """Neighbours of neighbours wait for each other, and one of them for who doesn't come."""
    host.start("answers(6, waits=True); events.register_stack_dump(place)")
    assert host.judge() == []
    host.judge(GIVEN_UP, ends=True)
    assert "it waits itself, in backward of step 2" in host.said[0] and "given up" in host.said[-1]


def test_that_somebody_gives_up_stays_so() -> None:
    known: dict[int, LateCall] = {}
    for late in (LATE, GIVEN_UP, LATE):
        note_late_call(known, late)
    assert known == {7: GIVEN_UP}

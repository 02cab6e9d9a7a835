"""Supervises the workers of this host: starts, watches and ends them together.

The first failure is found and named.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from paceline.cluster.hosts.peers import Failure, Peers
from paceline.cluster.launcher.bar import JobBar
from paceline.cluster.launcher.cleanup import JobCleanup
from paceline.cluster.launcher.hangs import HangSearch
from paceline.cluster.launcher.interrupt import JobEnd
from paceline.cluster.launcher.last_words import error_lines
from paceline.cluster.launcher.output import Screen, screens
from paceline.cluster.launcher.replacement import Replacement
from paceline.cluster.launcher.restarts import JobRestarts
from paceline.cluster.launcher.verdict import FailureSearch
from paceline.cluster.launcher.worker import (
    WorkerCommand,
    WorkerProcess,
    preparation,
    readable,
    start,
)
from paceline.timings import DEFAULTS, SupervisorTimings, Timings


class RunWatcher(Protocol):
    """What shows a run to people while it is under way, beside its workers.

    It raises nothing once they have begun.
    """

    def begin_serving(self) -> None:
        """Begin, as the first worker will be one of this host.

        Raises `UsageError` where that can't be.
        """
        ...

    def follow_run(self, folder: Path) -> None:
        """Show the run in this folder, which a worker of this host writes from now on."""
        ...

    def show_line(self, words: str) -> None:
        """Show this line, too."""
        ...


class Supervisor:
    """Supervises the workers of one host, from their start to the exit code of the job."""

    def __init__(
        self,
        host: str,
        mark: str,
        peers: Peers,
        mending: Callable[[Supervisor], Replacement] | None = None,
        *,
        shown: tuple[Screen, Screen] | None = None,
        told: Callable[[Failure], object] | None = None,
        restarts: JobRestarts | None = None,
        watcher: RunWatcher | None = None,
        finished: str = "",
        timings: Timings = DEFAULTS,
    ) -> None:
        self._peers, self._restarts, self._told, self._watcher = peers, restarts, told, watcher
        self._finished = finished  # what is said last if all end well
        self._timings = timings.supervisor
        self._workers: list[WorkerProcess] = []
        self._out, self._err = screens() if shown is None else shown
        self._bar = JobBar(self._err)
        self._signals: list[int] = []
        self._failure: Failure | None = None  # what failed first on this host
        self._told_at = 0.0  # monotonic: when the other hosts got it
        self._ending_at: float | None = None  # monotonic: the workers are being ended since
        self._asked: int | None = None  # the signal that asked for the end
        self._leaving = False  # this host was asked to go, and the others go on
        self._collected_at = 0.0
        self._job_end = JobEnd(self._workers)
        self._cleanup = JobCleanup(mark, timings=timings.janitor)
        self._search = FailureSearch(
            host, self._workers, lambda: self._verdict() is not None, timings=timings.supervisor
        )
        self._mending = None if mending is None else mending(self)
        self._lateness = HangSearch(peers, host, self.say, timings=timings.hangs)

    def run(
        self, tasks: Sequence[WorkerCommand], started: Callable[[], None] = lambda: None
    ) -> int:
        """Start these workers, watch them until the last is gone, and give the exit code of the
        job.

        `started` is called when all of them have what they inherit.
        """
        wake, waker = os.pipe()
        for descriptor in (wake, waker):
            os.set_blocking(descriptor, False)
        before = {
            signum: signal.signal(signum, self._note)
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        }
        old_wakeup = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._cleanup.start()
        try:
            _begin(tasks, self._watcher)
            self._start(tasks)
            started()
            while not self._over():
                self._turn(wake)
            self._conclude(wake)
        finally:
            self._cleanup.sweep(
                [worker.process for worker in self._workers if worker.ended is None]
            )
            self._peers.close()
            self._cleanup.conclude()
            signal.set_wakeup_fd(old_wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            for descriptor in (wake, waker):
                os.close(descriptor)
        return self._code()

    def _note(self, signum: int, frame: object) -> None:
        if signum != signal.SIGCHLD:
            self._signals.append(signum)

    def _start(self, tasks: Sequence[WorkerCommand]) -> None:
        for task in tasks:
            if self._signals:
                return
            self.begin(task)

    def begin(self, task: WorkerCommand) -> None:
        """Start a worker."""
        self._workers.append(start(task, preparation(os.getpid()), (self._out, self._err)))
        self._cleanup.add(self._workers[-1].process.pid)

    @property
    def asked(self) -> bool:
        """Whether this launcher was asked to end, or to leave."""
        return self._asked is not None or self._leaving

    def say(self, text: str) -> None:
        """Show a line of the launcher's own."""
        self._err.say(text)

    def _over(self) -> bool:
        if any(worker.ended is None for worker in self._workers):
            return False
        if (
            self._mending is not None
            and self._mending.waiting
            and self._asked is None
            and self._verdict() is None
        ):
            return False
        if self._asked is not None or self._peers.all_finished:
            return True
        if self._peers.verdict is not None:
            return self._settled()
        if self._leaving:
            return self._mending is not None and self._mending.parted()
        # Where the job may start again no host goes by itself: one that says nothing is lost, and
        # that is a verdict.
        return (
            self._restarts is None
            and self._failure is not None
            and time.monotonic() - self._told_at > self._timings.verdict
        )

    def _settled(self) -> bool:
        """Whether it is known what follows on the end of all workers."""
        verdict = self._final()
        return (
            self._restarts is None
            or verdict is None
            or self._restarts.settle(verdict, self._workers)
        )

    def _turn(self, wake: int) -> None:
        """Wait for something to happen, and handle it."""
        poll = select.poll()
        callbacks: dict[int, Callable[[], object]] = {wake: partial(_empty, wake)}
        for worker in self._workers:
            if worker.records_fd >= 0:
                callbacks[worker.records_fd] = worker.listen
            callbacks |= {
                stream.descriptor: stream.read
                for stream in worker.streams
                if stream.open and not stream.screen.full
            }
        for descriptor in self._peers.descriptors():
            callbacks[descriptor] = partial(self._peers.hear, descriptor)
        for descriptor in callbacks:
            poll.register(descriptor, select.POLLIN)
        for screen in {self._out, self._err}:
            if screen.pending:
                callbacks[screen.descriptor] = screen.write
                poll.register(screen.descriptor, select.POLLOUT)
        for descriptor, _ in poll.poll(1000 * self._timings.look):
            callbacks[descriptor]()
        now = time.monotonic()
        for worker in self._workers:
            # all of them before one is reaped, which takes time: the order tells the culprit
            worker.look()
        mends = self._mending is not None and self._mending.active(self._workers)
        if self._mending is not None and mends:
            self._mending.look(self._workers)
        members = self._workers if self._mending is None else self._mending.members(self._workers)
        self._lateness.turn([worker for worker in members if worker.ended is None], ends=mends)
        for worker in self._workers:
            if worker.ended is not None and not worker.reaped:
                self._cleanup.end_group(worker.process.pid)
                self._cleanup.drop(worker.process.pid)
                worker.reap(self._timings.drain)
            for stream in worker.streams:
                stream.idle(now)
        self._collect(now)
        _show(self._workers, self._watcher, self._bar, self._job_end)
        self._peers.tick()
        self._decide(now)

    def _collect(self, now: float) -> None:
        """Note what may be left of the workers, now and then, and before they end in haste."""
        asked = self._asked is None and bool(self._signals)
        failed = not self._search.signed and any(worker.said("failed") for worker in self._workers)
        if now - self._collected_at >= self._timings.litter or asked or failed:
            self._collected_at = now
            self._cleanup.collect(self._workers)

    def _decide(self, now: float) -> None:
        """Go from running to failed to ended, as the workers, the other hosts and the user's
        signals ask.
        """
        if self._out.broken:
            self._signals.append(signal.SIGPIPE)
        for signum in self._signals:
            self._ask(signum, now)
        self._signals.clear()
        if self._asked is None and self._peers.stopped is not None:
            signum, host = self._peers.stopped
            self._err.say(
                f"paceline: the launcher on {host} was asked to end the job "
                f"({signal.Signals(signum).name})"
            )
            self._ask(signum, now)
        if self._asked is not None:
            self._end(now, signal.SIGINT, self._timings.asked_term, self._timings.asked_kill)
            return
        if (
            self._verdict() is None
            and self._mending is not None
            and self._mending.active(self._workers)
        ):
            self._condemn(self._mending.turn(self._workers, self._search.suspect), now)
        elif self._verdict() is None:
            self._condemn(self._search.judge(now), now)
        if self._verdict() is not None:
            self._ending_at = self._ending_at or now
            self._end(now, None, 0.0, self._timings.kill)
        elif all(worker.ended is not None for worker in self._workers):
            self._peers.tell_finished()

    def _ask(self, signum: int, now: float) -> None:
        if (
            signum == signal.SIGTERM
            and self._mending is not None
            and not self._leaving
            and self._mending.leave(self._workers)
        ):
            self._leaving = True  # asked again, it ends the job
        elif self._asked is None:
            self._asked, self._ending_at = signum, now
            self._job_end.ask(signum)
            self._peers.tell_stopped(signum)
        else:  # asked twice: at once
            for worker in self._workers:
                worker.send(signal.SIGKILL)

    def _end(self, now: float, first: int | None, term: float, kill: float) -> None:
        assert self._ending_at is not None
        since = now - self._ending_at
        verdict = self._verdict() if first is None else None
        for worker in self._workers:
            if first is not None:
                worker.send(first)
            if since >= term + (
                self._timings.last_words
                if verdict is not None and verdict.rank == worker.rank
                else 0.0
            ):
                worker.send(signal.SIGTERM)
            if since > kill:
                worker.send(signal.SIGKILL)

    def _condemn(self, failure: Failure | None, now: float) -> None:
        """End the job for this failure, if there is one."""
        if failure is not None:
            self._failure, self._told_at = failure, now
            self._peers.tell_failed(failure)

    def _verdict(self) -> Failure | None:
        return self._peers.verdict or self._failure

    def _conclude(self, wake: int) -> None:
        """Say last what ended the job, and write out what is left."""
        _read_out(self._workers, self._bar)
        verdict = self._final()
        if verdict is not None and self._asked is None:
            if self._told is not None:
                self._told(verdict)
            self._repeat(verdict)
            sequel = "" if self._restarts is None else self._restarts.words
            alone = self._restarts is None and self._mending is None and self._told is None
            left = self._job_end.left(verdict, alone=alone) if not sequel else ""
            last = [
                verdict.line(),
                left,
                "its last words are above" if verdict.tail else "",
                sequel,
            ]
            self._err.say("; ".join(filter(None, last)))
            _tell(self._watcher, verdict.line().removeprefix("paceline: "), sequel)
        elif verdict is None and self._asked is None and not self._leaving and self._finished:
            self._err.say(f"paceline: {self._finished}")
        if self._job_end.line is not None:
            self._err.say(self._job_end.line)
        _flush(
            {self._out, self._err},
            wake,
            self._timings,
            lambda: self._asked is not None or bool(self._signals),
        )

    def _repeat(self, verdict: Failure) -> None:
        """Say at the end what the worker that failed said last: of one of this host, whose words
        were shown, the error alone.
        """
        here = any(worker.rank == verdict.rank for worker in self._workers)
        words = error_lines(verdict.tail) if here else verdict.tail.splitlines()
        if words and not self._said_last(verdict):
            self._err.say(f"paceline: what rank {verdict.rank} said last:")
            for line in words:
                self._err.put(
                    -1 if verdict.rank is None else verdict.rank,
                    line.encode(errors="replace") + b"\n",
                )

    def _said_last(self, verdict: Failure) -> bool:
        """Whether the last words of the worker that failed are the last that is shown."""
        said = [
            worker.streams[1].tail().splitlines()
            for worker in self._workers
            if worker.rank == verdict.rank
        ]
        words = verdict.tail.splitlines()
        return self._err.last == verdict.rank and all(
            lines[-len(words) :] == words for lines in said
        )

    def _final(self) -> Failure | None:
        """Return the verdict, with the exit code and the last output of the worker now that it
        has ended.
        """
        verdict = self._verdict()
        own = next(
            (
                worker
                for worker in self._workers
                if verdict is not None and worker.rank == verdict.rank
            ),
            None,
        )
        return verdict if own is None else self._search.suspect(own) or verdict

    def _code(self) -> int:
        if self._asked is not None or self._leaving:
            return 128 + (self._asked or signal.SIGTERM)
        if self._restarts is not None and self._signals and self._restarts.take():
            # asked to end after the workers had ended: the job doesn't start again
            return 128 + self._signals[0]
        verdict = self._final()
        return 0 if verdict is None else verdict.code


def _begin(tasks: Sequence[WorkerCommand], watcher: RunWatcher | None) -> None:
    """Have the run watched from this host, if its first worker is one of these."""
    if watcher is not None and any(task.rank == 0 and not task.joining for task in tasks):
        watcher.begin_serving()


def _read_out(workers: Sequence[WorkerProcess], bar: JobBar) -> None:
    """Leave the bar of workers that have ended as it is, and read what they have left in their
    pipes.
    """
    bar.follow(workers)
    for stream in (stream for worker in workers for stream in worker.streams):
        while stream.open and readable(stream.descriptor, 0) and stream.read():
            continue
        stream.close()


def _show(
    workers: Sequence[WorkerProcess], watcher: RunWatcher | None, bar: JobBar, end: JobEnd
) -> None:
    """Tell who watches the run where it is, and show on the terminal how far."""
    for record in (record for worker in workers for record in worker.take("writes")):
        folder = Path(str(record["folder"]))
        end.follow(folder)
        if watcher is not None:
            watcher.follow_run(folder)
    bar.follow(workers)


def _flush(
    screens: set[Screen], wake: int, timings: SupervisorTimings, hurried: Callable[[], bool]
) -> None:
    """Write out what is left; not for long where nobody reads and the end is asked for."""
    end = time.monotonic() + timings.flush
    for screen in screens:
        while screen.pending:
            poll = select.poll()
            poll.register(screen.descriptor, select.POLLOUT)
            poll.register(wake, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(1000 * timings.look)]
            if screen.descriptor in ready:
                screen.write()
            elif hurried() and time.monotonic() > end:
                screen.drop()
            if wake in ready:
                _empty(wake)


def _tell(watcher: RunWatcher | None, *words: str) -> None:
    if watcher is not None:
        watcher.show_line("; ".join(filter(None, words)))


def _empty(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            continue
    except BlockingIOError:
        return

"""Supervises the workers of this host: starts, watches and ends them together. The first failure is found and named."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from paceline.cluster.hosts.peers import Failure, Peers
from paceline.cluster.launcher import janitor
from paceline.cluster.launcher.hangs import HangSearch
from paceline.cluster.launcher.output import last_words, screens
from paceline.cluster.launcher.replacement import Replacement
from paceline.cluster.launcher.worker import WorkerCommand, WorkerProcess, ending, preparation, start
from paceline.timings import DEFAULTS, Timings


class Supervisor:
    """Supervises the workers of one host, from their start to the exit code of the job."""

    def __init__(
        self,
        host: str,
        mark: str,
        peers: Peers,
        mending: Callable[[Supervisor], Replacement] | None = None,
        *,
        timings: Timings = DEFAULTS,
    ) -> None:
        self._host, self._mark, self._peers = host, mark, peers
        self._timings, self._janitor = timings.supervisor, timings.janitor
        self._workers: list[WorkerProcess] = []
        self._out, self._err = screens()
        self._signals: list[int] = []
        self._signed_at: float | None = None  # monotonic: the first sign of a failure
        self._failure: Failure | None = None  # what failed first on this host
        self._told_at = 0.0  # monotonic: when the other hosts got it
        self._ending_at: float | None = None  # monotonic: the workers are being ended since
        self._asked: int | None = None  # the signal that asked for the end
        self._leaving = False  # this host was asked to go, and the others go on
        self._litter: dict[int, list[Path]] = {}  # by process: what a child that is killed can't remove
        self._littered_at = 0.0
        self._known: set[int] = set()  # workers and their children
        self._held: set[int] = set()  # semaphores that they had in hand when they were ended
        self._began = time.time()
        self._mending = None if mending is None else mending(self)
        self._lateness = HangSearch(peers, host, self.say, timings=timings.hangs)

    def run(self, tasks: Sequence[WorkerCommand], started: Callable[[], None] = lambda: None) -> int:
        """Start these workers, watch them until the last is gone, and give the exit code of the job.

        `started` is called when all of them have what they inherit.
        """
        wake, waker = os.pipe()
        for descriptor in (wake, waker):
            os.set_blocking(descriptor, False)
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)}
        old_wakeup = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        deputy = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(janitor.__file__)), self._mark, json.dumps(asdict(self._janitor))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        try:
            self._start(tasks, deputy)
            started()
            while not self._over():
                self._turn(wake)
            self._conclude(wake)
            return self._code()
        finally:
            left = [worker.process for worker in self._workers if worker.ended is None]
            self._known |= janitor.sweep(self._mark, [process.pid for process in left], self._held, seconds=self._janitor.ending)
            for process in left:
                process.wait()
            janitor.clear([folder for folders in self._litter.values() for folder in folders])
            janitor.reclaim(self._mark, self._known, self._held, self._began, seconds=self._janitor.unlinking)
            self._peers.close()
            self._inform(deputy, "done")
            deputy.communicate()
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            for descriptor in (wake, waker):
                os.close(descriptor)

    def _note(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _start(self, tasks: Sequence[WorkerCommand], deputy: subprocess.Popen[bytes]) -> None:
        self._deputy = deputy
        for task in tasks:
            if self._signals:
                return
            self.begin(task)

    def begin(self, task: WorkerCommand) -> None:
        """Start a worker."""
        worker = start(task, preparation(os.getpid()), (self._out, self._err))
        self._workers.append(worker)
        self._known.add(worker.process.pid)
        self._inform(self._deputy, f"+{worker.process.pid}")

    @property
    def asked(self) -> bool:
        """Whether this launcher was asked to end, or to leave."""
        return self._asked is not None or self._leaving

    def say(self, text: str) -> None:
        """Show a line of the launcher's own."""
        self._err.say(text)

    def _inform(self, deputy: subprocess.Popen[bytes], line: str) -> None:
        assert deputy.stdin is not None
        try:
            deputy.stdin.write(line.encode() + b"\n")
            deputy.stdin.flush()
        except BrokenPipeError:
            return  # the janitor was killed; workers still die with their launcher, by PR_SET_PDEATHSIG

    def _over(self) -> bool:
        if any(worker.ended is None for worker in self._workers):
            return False
        if self._mending is not None and self._mending.waiting and self._asked is None and self._verdict() is None:
            return False
        if self._asked is not None or self._peers.all_finished or self._peers.verdict is not None:
            return True
        if self._leaving:
            return self._mending is not None and self._mending.parted()
        return self._failure is not None and time.monotonic() - self._told_at > self._timings.verdict

    def _turn(self, wake: int) -> None:
        """Wait for something to happen, and handle it."""
        poll = select.poll()
        callbacks: dict[int, Callable[[], object]] = {wake: partial(_empty, wake)}
        for worker in self._workers:
            if worker.records_fd >= 0:
                callbacks[worker.records_fd] = worker.listen
            callbacks |= {stream.descriptor: stream.read for stream in worker.streams if stream.open and not stream.screen.full}
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
            self._look(worker)
        mends = self._mending is not None and self._mending.active(self._workers)
        if self._mending is not None and mends:
            self._mending.look(self._workers)
        members = self._workers if self._mending is None else self._mending.members(self._workers)
        self._lateness.turn([worker for worker in members if worker.ended is None], ends=mends)
        for worker in self._workers:
            self._reap(worker)
            for stream in worker.streams:
                stream.idle(now)
        self._collect(now)
        self._peers.tick()
        self._decide(now)

    def _collect(self, now: float) -> None:
        """Remember where the workers' children listen: a worker that ends in haste kills them before they can clean up."""
        asked = self._asked is None and bool(self._signals)
        failed = self._signed_at is None and any(worker.said("failed") for worker in self._workers)
        if now - self._littered_at < self._timings.litter and not asked and not failed:
            return
        self._littered_at = now
        for worker in self._workers:
            for child in janitor.children(worker.process.pid) if worker.ended is None else ():
                self._known.add(child)
                if child not in self._litter and (folders := janitor.litter([child])):
                    self._litter[child] = folders

    def _look(self, worker: WorkerProcess) -> None:
        """Find out whether a worker has ended; all are looked at before one is reaped, which takes time: the order tells the culprit."""
        if worker.ended is None and os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            worker.ended = time.time()

    def _reap(self, worker: WorkerProcess) -> None:
        """Reap a worker that has ended, with its process group and its last output."""
        if worker.ended is None or worker.reaped:
            return
        worker.reaped = True
        self._known |= janitor.end_group(worker.process.pid, self._held)  # before it is reaped: until then no other process gets its number
        status = worker.process.wait()
        self._inform(self._deputy, f"-{worker.process.pid}")
        worker.code = status if status >= 0 else 128 - status
        end = time.monotonic() + self._timings.drain
        while worker.records_fd >= 0 and _readable(worker.records_fd, 0):
            worker.listen()
        for stream in worker.streams:
            while stream.open and not stream.screen.full and _readable(stream.descriptor, end - time.monotonic()):
                stream.read()
        if worker.records_fd >= 0:
            os.close(worker.records_fd)
            worker.records_fd = -1
        if worker.orders_fd >= 0:
            os.close(worker.orders_fd)
            os.close(worker.stack_fd)
            worker.orders_fd = worker.stack_fd = -1

    def _decide(self, now: float) -> None:
        """Go from running to failed to ended, as the workers, the other hosts and the user's signals ask."""
        if self._out.broken:
            self._signals.append(signal.SIGPIPE)
        for number in self._signals:
            self._ask(number, now)
        self._signals.clear()
        if self._asked is None and self._peers.stopped is not None:
            number, host = self._peers.stopped
            self._err.say(f"paceline: the launcher on {host} was asked to end the job ({signal.Signals(number).name})")
            self._ask(number, now)
        if self._asked is not None:
            self._end(now, signal.SIGINT, self._timings.asked_term, self._timings.asked_kill)
            return
        if self._verdict() is None and self._mending is not None and self._mending.active(self._workers):
            self._mend(now)
        elif self._verdict() is None:
            self._judge(now)
        if self._verdict() is not None:
            self._ending_at = self._ending_at or now
            self._end(now, None, 0.0, self._timings.kill)
        elif all(worker.ended is not None for worker in self._workers):
            self._peers.tell_finished()

    def _ask(self, number: int, now: float) -> None:
        if number == signal.SIGTERM and self._mending is not None and not self._leaving and self._mending.leave(self._workers):
            self._leaving = True  # asked again, it ends the job
        elif self._asked is None:
            self._asked, self._ending_at = number, now
            self._peers.tell_stopped(number)
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
            if since >= term + (self._timings.last_words if verdict is not None and verdict.rank == worker.rank else 0.0):
                worker.send(signal.SIGTERM)
            if since > kill:
                worker.send(signal.SIGKILL)

    def _mend(self, now: float) -> None:
        """Go on without the dead, if that can be."""
        assert self._mending is not None
        failure = self._mending.turn(self._workers, self._suspect)
        if failure is not None:
            self._failure, self._told_at = failure, now
            self._peers.tell_failed(failure)

    def _judge(self, now: float) -> None:
        """Name the worker that failed first, when it has had the time to show itself."""
        if not self._suspects():
            return
        self._signed_at = self._signed_at or now
        # They are asked again: after the first sign, one that left without a word is among them.
        first = _cause(self._suspects(), self._timings.slack)
        grace = self._timings.echo if first.is_echo else self._timings.culprit
        if any(worker.rank == first.rank and worker.ended is None for worker in self._workers):
            grace += self._timings.last_words  # a record comes before the words, which the other hosts shall see too
        if now - self._signed_at > grace or all(worker.ended is not None for worker in self._workers):
            self._failure, self._told_at = first, now
            self._peers.tell_failed(first)

    def _suspects(self) -> list[Failure]:
        return [failure for worker in self._workers if (failure := self._suspect(worker)) is not None]

    def _suspect(self, worker: WorkerProcess) -> Failure | None:
        """Return the failure of this worker, if it has failed: by its own record, its exit code, or its leaving without a word."""
        now = time.time()
        age = 0.0 if worker.ended is None else now - worker.ended + self._timings.slack
        code = 0 if worker.was_sent or worker.ended is None else worker.code
        found = Failure(worker.rank, self._host, code or 1, "", False, age, last_words(worker.streams[1].tail()))
        record = next((record for record in worker.records if record["event"] == "failed"), None)
        if record is not None:
            words = f"failed with exit code {found.code} ({record['type']})"
            return replace(found, words=words, is_echo=bool(record["is_echo"]), age=now - float(str(record["time"])))
        if code:
            # SIGABRT is how libraries answer to another's failure, so it gets no start over records.
            return replace(found, words=ending(code), age=age - (self._timings.slack if code == 128 + signal.SIGABRT else 0.0))
        if (
            worker.ended is not None
            and not worker.was_sent
            and worker.said("joined")
            and not worker.said("closed")
            and self._trains(worker)
        ):
            return replace(
                found, words="left in the middle (exit code 0) while others were training: it joined the run and never closed it"
            )
        return None

    def _trains(self, leaver: WorkerProcess) -> bool:
        """Whether others go on (here, or on hosts that have not finished) well after a worker left."""
        if self._signed_at is not None or self._verdict() is not None:
            return True
        assert leaver.ended is not None
        others = [worker for worker in self._workers if worker.ended is None and worker.said("joined") and not worker.said("closed")]
        ends = [worker.ended for worker in self._workers if worker.ended is not None]
        since = leaver.ended if others else max(ends)
        running = len(ends) < len(self._workers)
        return (bool(others) or not running) and time.time() - since > self._timings.left

    def _verdict(self) -> Failure | None:
        return self._peers.verdict or self._failure

    def _conclude(self, wake: int) -> None:
        """Say last what ended the job, and write out what is left."""
        for worker in self._workers:
            for stream in worker.streams:
                while stream.open and _readable(stream.descriptor, 0) and stream.read():
                    continue
                stream.close()
        verdict = self._final()
        if verdict is not None and self._asked is None:
            if verdict.tail and self._err.last != verdict.rank:
                self._err.say(f"paceline: what rank {verdict.rank} said last:")
                for line in verdict.tail.splitlines():
                    self._err.put(-1 if verdict.rank is None else verdict.rank, line.encode(errors="replace") + b"\n")
            self._err.say(f"{verdict.line()}; its last words are above" if verdict.tail else verdict.line())
        self._flush(wake)

    def _final(self) -> Failure | None:
        """Return the verdict, with the exit code and the last output of the worker now that it has ended."""
        verdict = self._verdict()
        own = next((worker for worker in self._workers if verdict is not None and worker.rank == verdict.rank), None)
        return verdict if own is None else self._suspect(own) or verdict

    def _flush(self, wake: int) -> None:
        end = time.monotonic() + self._timings.flush
        for screen in {self._out, self._err}:
            while screen.pending:
                poll = select.poll()
                poll.register(screen.descriptor, select.POLLOUT)
                poll.register(wake, select.POLLIN)
                ready = [descriptor for descriptor, _ in poll.poll(1000 * self._timings.look)]
                if screen.descriptor in ready:
                    screen.write()
                elif (self._asked is not None or self._signals) and time.monotonic() > end:
                    screen.drop()
                if wake in ready:
                    _empty(wake)

    def _code(self) -> int:
        if self._asked is not None or self._leaving:
            return 128 + (self._asked or signal.SIGTERM)
        verdict = self._final()
        return 0 if verdict is None else verdict.code


def _cause(suspects: list[Failure], slack: float) -> Failure:
    """Return the failure that came first; of several without a record that came together, one by a signal: the others noticed its death."""
    first = min(suspects, key=lambda failure: (failure.is_echo, -failure.age))
    if first.words != ending(first.code):
        return first
    together = [f for f in suspects if f.words == ending(f.code) and first.age - f.age < slack]
    return next((f for f in together if f.code > 128 and f.code != 128 + signal.SIGABRT), first)


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * seconds)))


def _empty(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            continue
    except BlockingIOError:
        return

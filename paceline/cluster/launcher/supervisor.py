"""Supervises the workers of this host: starts, watches and ends them together.

Each turn of the main loop does this, in one thread:

    wait for a pipe, a socket or a signal
    note which workers have ended           before any is reaped: the order tells the first failure
    replace lost workers, look for hangs    only if losses are survived
    reap workers, clean up after them
    decide                                  running -> failed, or asked to end -> all ended
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
from paceline.cluster.launcher.last_words import extract_error_lines
from paceline.cluster.launcher.output import Screen, drain_pipe, flush_screens, make_screens
from paceline.cluster.launcher.replacement import Replacement
from paceline.cluster.launcher.restarts import JobRestarts
from paceline.cluster.launcher.saving_time import SavingTime, pick_end_signal
from paceline.cluster.launcher.verdict import FailureSearch
from paceline.cluster.launcher.worker import (
    WorkerCommand,
    WorkerProcess,
    make_preparation,
    start_worker,
    wait_readable,
)
from paceline.timings import DEFAULT_TIMINGS, Timings


class RunWatcher(Protocol):
    """Shows a run to people while it is under way, in a process or thread of its own.

    It raises nothing once the workers have begun.
    """

    def begin_serving(self) -> None:
        """Begin, before the first worker of the job starts on this host.

        Raises `UsageError` if that isn't possible.
        """
        ...

    def follow_run(self, folder: Path) -> None:
        """Show the run in this folder, which a worker of this host writes from now on."""
        ...

    def show_line(self, words: str) -> None:
        """Show a line of text beside the run."""
        ...


class Supervisor:
    """Supervises the workers of one host, from their start to the exit code of the job.

    Invariants: `_workers` only grows; a worker that was replaced stays in it. `_end_signal` is set
    once, by the first request to end the job, and then decides the exit code. `_own_failure` is
    this host's proposal for the verdict, and `_peers.verdict` is the decision of all hosts.
    `_ending_since` is set as soon as there is either a signal or a verdict, and from then on
    workers are being ended. `_is_leaving` excludes neither: a host that leaves can still be asked
    to end the job.

    Args:
        host: Name of this host, for messages.
        mark: The job's mark, by which its processes are found and cleaned up.
        peers: The launchers of the other hosts.
        mending: Makes the replacement of lost workers, if losses are survived. Default: none.
        shown: Screens of standard output and error. Default: new ones.
        told: Called with the verdict on the failure that ended the job. Default: none.
        restarts: Restarts of the whole job, if it has any.
        watcher: Shows the run to people. Default: none.
        finished: Last line if all workers ended well. Default: none.
        saving_seconds: Time that workers get to save a checkpoint after SIGTERM. Default: none.
        timings: Waits and deadlines.
    """

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
        saving_seconds: float = 0.0,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        self._peers, self._restarts, self._report_failure, self._watcher = (
            peers,
            restarts,
            told,
            watcher,
        )
        self._success_message = finished
        self._timings = timings.supervisor
        self._workers: list[WorkerProcess] = []
        self._out_screen, self._err_screen = make_screens() if shown is None else shown
        self._job_bar = JobBar(self._err_screen)
        self._pending_signals: list[int] = []
        self._own_failure: Failure | None = None  # the first failure on this host
        self._failure_told_at = 0.0  # monotonic: when the other hosts were told of it
        self._ending_since: float | None = None  # monotonic: since when workers are being ended
        self._end_signal: int | None = None  # the signal that asked for the end
        self._is_leaving = False  # this host was asked to go, and the others go on
        self._saving_time = SavingTime(saving_seconds)
        self._litter_collected_at = 0.0
        self._job_end = JobEnd(self._workers)
        self._cleanup = JobCleanup(mark, timings=timings.janitor)
        self._failure_search = FailureSearch(
            host, self._workers, lambda: self._get_verdict() is not None, timings=timings.supervisor
        )
        self._replacement = None if mending is None else mending(self)
        self._hang_search = HangSearch(peers, host, self.show_line, timings=timings.hangs)

    def run_workers(
        self, tasks: Sequence[WorkerCommand], started: Callable[[], None] = lambda: None
    ) -> int:
        """Run these workers until the last one has ended, and return the job's exit code.

        `started` is called as soon as all of them have inherited their descriptors.
        """
        wake_fd, waker_fd = os.pipe()
        for descriptor in (wake_fd, waker_fd):
            os.set_blocking(descriptor, False)
        # Signals only write to the pipe `wake_fd`. The loop handles them, between two events.
        old_handlers = {
            signum: signal.signal(signum, self._note_signal)
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        }
        old_wakeup = signal.set_wakeup_fd(waker_fd, warn_on_full_buffer=False)
        self._cleanup.start_janitor()
        try:
            _begin_serving(tasks, self._watcher)
            self._start_workers(tasks)
            started()
            while not self._is_over():
                self._handle_events(wake_fd)
            self._write_conclusion(wake_fd)
        finally:
            # Also after an error of the launcher itself no worker may stay behind.
            self._cleanup.sweep_job(
                [worker.process for worker in self._workers if worker.ended_at is None]
            )
            self._peers.close()
            self._cleanup.end_janitor()
            signal.set_wakeup_fd(old_wakeup)
            for signum, old_handler in old_handlers.items():
                signal.signal(signum, old_handler)
            for descriptor in (wake_fd, waker_fd):
                os.close(descriptor)
        return self._get_exit_code()

    def _note_signal(self, signum: int, frame: object) -> None:
        if signum != signal.SIGCHLD:
            self._pending_signals.append(signum)

    def _start_workers(self, tasks: Sequence[WorkerCommand]) -> None:
        """Start these workers, unless a signal comes meanwhile."""
        for task in tasks:
            if self._pending_signals:
                return
            self.start_worker(task)

    def start_worker(self, task: WorkerCommand) -> None:
        """Start a worker. The janitor knows it from then on."""
        self._workers.append(
            start_worker(task, make_preparation(os.getpid()), (self._out_screen, self._err_screen))
        )
        self._cleanup.add_group(self._workers[-1].process.pid)

    @property
    def is_asked_to_end(self) -> bool:
        """Whether this launcher was asked to end the job, or to leave it."""
        return self._end_signal is not None or self._is_leaving

    def show_line(self, text: str) -> None:
        """Show a line of the launcher itself."""
        self._err_screen.show_line(text)

    def _is_over(self) -> bool:
        """Whether all workers have ended, and no more of them can come."""
        if any(worker.ended_at is None for worker in self._workers):
            return False
        if (
            self._replacement is not None
            and self._replacement.is_restart_due
            and self._end_signal is None
            and self._get_verdict() is None
        ):
            return False
        # All workers of this host have ended. The job may go on elsewhere.
        if self._end_signal is not None or self._peers.all_finished:
            return True
        if self._peers.verdict is not None:
            return self._is_sequel_settled()
        if self._is_leaving:
            return self._replacement is not None and self._replacement.has_parted()
        # The other hosts may be gone, so this one doesn't wait for a verdict forever. But if the
        # job may start again, no host goes by itself: a silent host counts as lost, and that is a
        # verdict.
        return (
            self._restarts is None
            and self._own_failure is not None
            and time.monotonic() - self._failure_told_at > self._timings.verdict
        )

    def _is_sequel_settled(self) -> bool:
        """Whether all hosts know if the job starts again after this verdict."""
        verdict = self._get_final_verdict()
        return (
            self._restarts is None
            or verdict is None
            or self._restarts.settle_sequel(verdict, self._workers)
        )

    def _handle_events(self, wake_fd: int) -> None:
        """Wait until something happens, and handle it."""
        poll = select.poll()
        # What to call when a descriptor is ready. Workers whose screen is full have to wait: their
        # output stays in the pipe.
        callbacks: dict[int, Callable[[], object]] = {wake_fd: partial(drain_pipe, wake_fd)}
        for worker in self._workers:
            if worker.records_fd >= 0:
                callbacks[worker.records_fd] = worker.read_reports
            callbacks |= {
                stream.descriptor: stream.read_output
                for stream in worker.streams
                if stream.is_open and not stream.screen.is_full
            }
        for descriptor in self._peers.list_descriptors():
            callbacks[descriptor] = partial(self._peers.read_messages, descriptor)
        for descriptor in callbacks:
            poll.register(descriptor, select.POLLIN)
        # A screen is polled only while it has something to write, else poll would return at once.
        for screen in {self._out_screen, self._err_screen}:
            if screen.has_pending:
                callbacks[screen.descriptor] = screen.write_pending
                poll.register(screen.descriptor, select.POLLOUT)
        for descriptor, _ in poll.poll(1000 * self._timings.look):
            callbacks[descriptor]()
        now = time.monotonic()
        # Look at all workers before any is reaped, which takes time: the order of their ends tells
        # which failed first.
        for worker in self._workers:
            worker.check_end()
        survives_losses = self._replacement is not None and self._replacement.is_active(
            self._workers
        )
        if self._replacement is not None and survives_losses:
            self._replacement.report_changes(self._workers)
        members = (
            self._workers
            if self._replacement is None
            else self._replacement.list_members(self._workers)
        )
        self._hang_search.handle_messages(
            [worker for worker in members if worker.ended_at is None], ends=survives_losses
        )
        for worker in self._workers:
            # First the rest of its process group: once it is reaped, its number may be reused.
            if worker.ended_at is not None and not worker.is_reaped:
                self._cleanup.end_group(worker.process.pid)
                self._cleanup.drop_group(worker.process.pid)
                worker.reap(self._timings.drain)
            for stream in worker.streams:
                stream.show_if_idle(now)
        self._collect_litter(now)
        _show_progress(self._workers, self._watcher, self._job_bar, self._job_end)
        self._peers.run_timers()
        self._advance_job(now)

    def _collect_litter(self, now: float) -> None:
        """Note what the workers' children may leave: now and then, and before they end in haste."""
        is_first_request = self._end_signal is None and bool(self._pending_signals)
        is_first_failure = not self._failure_search.has_sign and any(
            worker.has_reported("failed") for worker in self._workers
        )
        if (
            now - self._litter_collected_at >= self._timings.litter
            or is_first_request
            or is_first_failure
        ):
            self._litter_collected_at = now
            self._cleanup.collect_litter(self._workers)

    def _advance_job(self, now: float) -> None:
        """Advance the job from running to failed to ended.

        In this order: the user's signals, a request to end on another host, the failures of this
        host's workers, the verdict of all hosts, and at last the good end of all workers.
        """
        # Nobody reads standard output any more: that ends the job, as it would end any program.
        if self._out_screen.is_broken:
            self._pending_signals.append(signal.SIGPIPE)
        for signum in self._pending_signals:
            self._handle_end_signal(signum, now)
        self._pending_signals.clear()
        if self._end_signal is None and self._peers.stop_request is not None:
            signum, host = self._peers.stop_request
            self._err_screen.show_line(
                f"paceline: the launcher on {host} was asked to end the job "
                f"({signal.Signals(signum).name})"
            )
            self._handle_end_signal(signum, now)
        if self._end_signal is not None:
            if self._saving_time.lasts(now):
                self._ending_since = now
                return
            self._end_workers(
                now, signal.SIGINT, self._timings.asked_term, self._timings.asked_kill
            )
            return
        if (
            self._get_verdict() is None
            and self._replacement is not None
            and self._replacement.is_active(self._workers)
        ):
            self._declare_failure(
                self._replacement.replace_ended_workers(
                    self._workers, self._failure_search.find_failure
                ),
                now,
            )
        elif self._get_verdict() is None:
            self._declare_failure(self._failure_search.find_first_failure(now), now)
        if self._get_verdict() is not None:
            self._ending_since = self._ending_since or now
            self._end_workers(now, None, 0.0, self._timings.kill)
        elif all(worker.ended_at is not None for worker in self._workers):
            self._peers.tell_finished()

    def _handle_end_signal(self, signum: int, now: float) -> None:
        """Handle a signal that asks for the end.

        SIGTERM makes this host leave if others can go on without it. Else the first signal ends the
        job, and the second one kills the workers at once. While they save a checkpoint, the second
        one ends that (but not SIGTERM, which schedulers repeat).
        """
        if (
            signum == signal.SIGTERM
            and self._replacement is not None
            and not self._is_leaving
            and self._replacement.order_leaving(self._workers)
        ):
            self._is_leaving = True
        elif self._end_signal is None:
            self._end_signal, self._ending_since = signum, now
            self._job_end.note_signal(signum)
            self._peers.tell_stopped(signum)
            if signum == signal.SIGTERM and (line := self._saving_time.begin(self._workers, now)):
                self.show_line(line)
        elif signum == signal.SIGTERM and self._saving_time.lasts(now):
            self.show_line(self._saving_time.describe_rest(now))
        elif self._saving_time.lasts(now):
            self._saving_time.end()
        else:
            for worker in self._workers:
                worker.send_signal(signal.SIGKILL)

    def _end_workers(self, now: float, first: int | None, term: float, kill: float) -> None:
        """End the workers, more forcefully as time goes on: call it again until all have ended.

        Args:
            now: Present time (monotonic).
            first: Signal to begin with. Default: none, as workers notice a failure themselves.
            term: Seconds after which they get SIGTERM. The worker of the verdict gets it later, so
                that it can write its last words.
            kill: Seconds after which they get SIGKILL.
        """
        assert self._ending_since is not None
        elapsed = now - self._ending_since
        verdict = self._get_verdict() if first is None else None
        for worker in self._workers:
            if first is not None:
                worker.send_signal(first)
            if elapsed >= term + (
                self._timings.last_words
                if verdict is not None and verdict.rank == worker.rank
                else 0.0
            ):
                worker.send_signal(pick_end_signal(worker))
            if elapsed > kill:
                worker.send_signal(signal.SIGKILL)

    def _declare_failure(self, failure: Failure | None, now: float) -> None:
        """End the job for this failure, if there is one, and tell the other hosts."""
        if failure is not None:
            self._own_failure, self._failure_told_at = failure, now
            self._peers.tell_failed(failure)

    def _get_verdict(self) -> Failure | None:
        """The failure that ends the job: as decided by all hosts, else as seen here."""
        return self._peers.verdict or self._own_failure

    def _write_conclusion(self, wake_fd: int) -> None:
        """Write out all that is left, and last of all what ended the job."""
        _drain_output(self._workers, self._job_bar)
        verdict = self._get_final_verdict()
        if verdict is not None and self._end_signal is None:
            if self._report_failure is not None:
                self._report_failure(verdict)
            self._repeat_last_words(verdict)
            sequel = "" if self._restarts is None else self._restarts.sequel_words
            survives_nothing = (
                self._restarts is None
                and self._replacement is None
                and self._report_failure is None
            )
            leftover = (
                self._job_end.note_failure(verdict, alone=survives_nothing) if not sequel else ""
            )
            clauses = [
                verdict.summary_line(),
                leftover,
                "its last words are above" if verdict.tail else "",
                sequel,
            ]
            self._err_screen.show_line("; ".join(filter(None, clauses)))
            _show_to_watcher(
                self._watcher, verdict.summary_line().removeprefix("paceline: "), sequel
            )
        elif (
            verdict is None
            and self._end_signal is None
            and not self._is_leaving
            and self._success_message
        ):
            self._err_screen.show_line(f"paceline: {self._success_message}")
        if self._job_end.last_line is not None:
            self._err_screen.show_line(self._job_end.last_line)
        flush_screens(
            {self._out_screen, self._err_screen},
            wake_fd,
            self._timings,
            lambda: self._end_signal is not None or bool(self._pending_signals),
        )

    def _repeat_last_words(self, verdict: Failure) -> None:
        """Repeat the last words of the worker that failed.

        If it ran on this host, its output was shown before, and only the lines of the error are
        repeated.
        """
        ran_here = any(worker.rank == verdict.rank for worker in self._workers)
        last_lines = extract_error_lines(verdict.tail) if ran_here else verdict.tail.splitlines()
        if last_lines and not self._is_shown_last(verdict):
            self._err_screen.show_line(f"paceline: what rank {verdict.rank} said last:")
            for line in last_lines:
                self._err_screen.put_line(
                    -1 if verdict.rank is None else verdict.rank,
                    line.encode(errors="replace") + b"\n",
                )

    def _is_shown_last(self, verdict: Failure) -> bool:
        """Whether the last words of the worker that failed are the last lines on the screen."""
        written = [
            worker.streams[1].get_tail().splitlines()
            for worker in self._workers
            if worker.rank == verdict.rank
        ]
        last_lines = verdict.tail.splitlines()
        return self._err_screen.last_writer == verdict.rank and all(
            lines[-len(last_lines) :] == last_lines for lines in written
        )

    def _get_final_verdict(self) -> Failure | None:
        """The verdict, with the exit code and the last words of its worker.

        They are known once the worker has ended, on its own host. Other hosts leave the verdict as
        it is.
        """
        verdict = self._get_verdict()
        failed_worker = next(
            (
                worker
                for worker in self._workers
                if verdict is not None and worker.rank == verdict.rank
            ),
            None,
        )
        return (
            verdict
            if failed_worker is None
            else self._failure_search.find_failure(failed_worker) or verdict
        )

    def _get_exit_code(self) -> int:
        """Exit code of the job."""
        if self._end_signal is not None or self._is_leaving:
            return 128 + (self._end_signal or signal.SIGTERM)
        if self._restarts is not None and self._pending_signals and self._restarts.take_due():
            # The end was asked for after the workers had ended: the job doesn't start again.
            return 128 + self._pending_signals[0]
        verdict = self._get_final_verdict()
        return 0 if verdict is None else verdict.code


def _begin_serving(tasks: Sequence[WorkerCommand], watcher: RunWatcher | None) -> None:
    """Begin to serve the run to people, if its first worker is one of these."""
    if watcher is not None and any(task.rank == 0 and not task.is_joining for task in tasks):
        watcher.begin_serving()


def _drain_output(workers: Sequence[WorkerProcess], bar: JobBar) -> None:
    """Settle the bar, and read what ended workers have left in their pipes."""
    bar.show_progress(workers)
    for stream in (stream for worker in workers for stream in worker.streams):
        while stream.is_open and wait_readable(stream.descriptor, 0) and stream.read_output():
            continue
        stream.close()


def _show_progress(
    workers: Sequence[WorkerProcess], watcher: RunWatcher | None, bar: JobBar, job_end: JobEnd
) -> None:
    """Tell the watcher in which folder the run is, and show its progress on the terminal."""
    for record in (record for worker in workers for record in worker.take_records("writes")):
        folder = Path(str(record["folder"]))
        job_end.note_folder(folder)
        if watcher is not None:
            watcher.follow_run(folder)
    bar.show_progress(workers)


def _show_to_watcher(watcher: RunWatcher | None, *words: str) -> None:
    """Show these words to the people who watch the run, if there is a watcher."""
    if watcher is not None:
        watcher.show_line("; ".join(filter(None, words)))

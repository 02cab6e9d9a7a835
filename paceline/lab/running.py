"""A run in a lab: start the launchers of all hosts, show their output, and end them together."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from paceline.cluster import machine
from paceline.cluster.control import progress
from paceline.cluster.discover import copy_environment
from paceline.cluster.launcher import request
from paceline.cluster.launcher.supervisor import RunWatcher
from paceline.errors import DeadlineExceeded, UsageError
from paceline.lab import remains
from paceline.lab.chaos import absent_hosts
from paceline.lab.chaos import list_faults as plot
from paceline.lab.injector import FaultInjector, FaultTarget, record_events
from paceline.lab.output import LauncherOutput, OutputSorter
from paceline.notation import parse_shares, verify_cuts, verify_strategy
from paceline.record import folder

PORT: Final = 29400  # of the meeting of launchers, on the first host that is present at the start
_LOOK_SECONDS: Final = 0.1  # longest wait for output before signals and deadlines are checked
_IDLE_SECONDS: Final = 0.3  # a line without an end is shown after this time
_PATIENCE_SECONDS: Final = 9.0  # for launchers that were told to end; they need up to 6
# the pipes of an ended launcher are closed after this time without output
_DRAIN_SECONDS: Final = 1.0
_KILL_SECONDS: Final = 4.0  # to write the output that is pending when all processes have ended
# these belong to one machine, and each host of a lab is a machine of its own
_NOT_INHERITED: Final = (
    "PACELINE_INTERFACE",
    "PACELINE_NAME",
    "PACELINE_SECRET",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)


@dataclass(frozen=True)
class LabRequest:
    """The options of one run in a lab.

    `sync`, `mesh`, `cut`, `shares`, `name`, `threads`, `min_workers`, `restarts` and `patience` are
    options of `paceline run`. The others are:

    - `faults`: objects, texts, or lists of both
    - `folder`: the working directory of the launchers (None: the current one)
    - `deadline`: a longer run is ended, and raises `DeadlineExceeded` (seconds)
    - `environ`: variables that are added to the environment of this process
    - `show`: show the output on this terminal
    - `watcher`: is told the run's folder, and shows the run to people
    """

    script: str
    args: tuple[str, ...] = ()
    faults: Any = ()
    sync: str | None = None
    name: str | None = None
    threads: int | None = None
    min_workers: int | None = None
    restarts: int = 0
    patience: float = 600.0
    mesh: str | None = None
    cut: str | None = None
    shares: str | None = None
    folder: str | Path | None = None
    deadline: float | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    show: bool = False
    watcher: RunWatcher | None = None


class RunHost(Protocol):
    """One host, as a run sees it."""

    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def address(self) -> str: ...


class RunTarget(FaultTarget, Protocol):
    """The hosts of a run: a built `Cluster`, as the run sees it."""

    @property
    def hosts(self) -> Sequence[RunHost]: ...
    @property
    def secret(self) -> Path: ...

    def spawn(
        self,
        host: int,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        ...

    def processes(self, host: int) -> list[int]:
        """List the processes that run on a host."""
        ...

    def starting(self, start_host: Any) -> AbstractContextManager[None]:
        """Let faults start launchers through `start_host` while a run is under way."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The end of a run in a lab.

    >>> outcome = cluster.run("train.py")
    >>> print(outcome.code, outcome.folder)

    `code` is the exit code of `paceline run`, and `output` all output of the run. `folder` is the
    run's folder, if it had one. `events` are the faults that were carried out.
    """

    code: int
    output: str
    folder: Path | None
    events: tuple[dict[str, Any], ...] = ()


@dataclass
class _HostLauncher:
    """The process `paceline run` of one host."""

    host: int
    process: subprocess.Popen[bytes]
    sources: dict[int, LauncherOutput]  # by descriptor, while it is open
    heard: float = 0.0  # monotonic time of its last output
    ended: float | None = None  # monotonic time at which its process was first seen to have ended

    @property
    def is_over(self) -> bool:
        return not self.sources and self.process.poll() is not None

    def let_go_of_pipes(self, now: float) -> None:
        """Show an unfinished line, and close pipes that stay open after the launcher has ended."""
        if now - self.heard > _IDLE_SECONDS:
            for source in self.sources.values():
                source.flush_line()
        if self.ended is None and self.process.poll() is not None:
            self.ended = now
        # A process that the launcher has started may have inherited the pipes, so their end can
        # come long after the launcher's, or never. Quiet pipes are closed.
        if self.ended is not None and now - max(self.ended, self.heard) > _DRAIN_SECONDS:
            self.close_pipes()

    def close_pipes(self) -> None:
        """Show the output that is left, and close all pipes."""
        while self.sources:
            descriptor, source = self.sources.popitem()
            source.flush_line()
            os.close(descriptor)


def run_request(cluster: RunTarget, start: LabRequest, folder: Path) -> Outcome:
    """Run a script on every host, and wait until all launchers have ended.

    Args:
        cluster: The built hosts.
        start: The script and the options of the run.
        folder: A new folder for the progress pages of workers; it is made here.

    Returns:
        The exit code, the output, the run's folder and the faults.

    Raises:
        DeadlineExceeded: The run took longer than `start.deadline`.
        KeyboardInterrupt: Ctrl-C was pressed. It is raised when everything has ended.
        SystemExit: SIGTERM or SIGHUP came, or the reader of the output is gone.
    """
    faults = plot(start.faults, cluster.description)
    check_request(start)
    folder.mkdir()
    return _LabRun(cluster, start, folder, absent_hosts(faults)).wait_for_end(faults)


def check_request(start: LabRequest) -> None:
    """Raise `UsageError` for options that make no sense, before anything is built."""
    script = start.script if start.folder is None else str(Path(start.folder) / start.script)
    request.check_request(
        request.LaunchRequest(
            script,
            start.args,
            start.min_workers or 1,
            threads=start.threads,
            min_workers=start.min_workers,
            restarts=start.restarts,
        )
    )
    if start.sync is not None:
        verify_strategy(start.sync)
    if start.cut is not None:
        verify_cuts(start.cut)
    if start.shares is not None:
        parse_shares(start.shares)
    if start.name is not None:
        folder.check_run_name(start.name)
    if start.deadline is not None and not start.deadline > 0:
        raise UsageError(f"deadline is {start.deadline}; give a number of seconds above 0")


class _LabRun:
    """The launchers of one run, from their start to their end.

    One loop reads and shows output, passes signals on and watches the deadline. Faults come from
    a thread of their own: it starts launchers (under `_joining`) and adds to `_remarks`.
    """

    def __init__(
        self, cluster: RunTarget, start: LabRequest, folder: Path, late: frozenset[int]
    ) -> None:
        self._cluster, self._start, self._folder, self._late = cluster, start, folder, late
        self._present = [seat.number for seat in cluster.hosts if seat.number not in late]
        self._launchers: list[_HostLauncher] = []
        self._signals: list[int] = []  # received, and not yet passed on
        self._asked: int | None = None  # the first signal that told the run to end
        self._asked_at = 0.0
        self._joining = threading.Lock()  # guards `_launchers`: faults come from another thread
        ranks_by_host = request.deal_ranks(
            [cluster.hosts[host].workers for host in self._present], cluster.description.placement
        )
        host_of_rank = {
            rank: host
            for host, ranks in zip(self._present, ranks_by_host, strict=True)
            for rank in ranks
        }
        self._desk = OutputSorter(
            [seat.name for seat in cluster.hosts], host_of_rank, show=start.show
        )
        self._remarks: deque[str] = deque()  # added by the thread of faults
        self._watched: Path | None = None  # the folder that the watcher was told last

    def wait_for_end(self, faults: list[Any]) -> Outcome:
        """Start all launchers, and wait until they have ended."""
        started_at = time.monotonic()
        with ExitStack() as cleanup:
            # Left in the reverse order: first no more faults, then no more launchers, then
            # everything is killed, and only then are signals handled as before.
            cleanup.enter_context(self._listen_for_signals())
            cleanup.callback(self._end_processes)
            cleanup.enter_context(self._cluster.starting(self._start_launcher))
            with FaultInjector(
                self._cluster, faults, self._folder, say=self._remarks.append
            ) as chaos:
                cleanup.callback(self._record_faults, chaos)  # however the run ends
                for host in self._present:
                    self._start_launcher(host)
                while not self._is_over():
                    self._handle_events()
                    self._decide_ending(started_at)
            # one more look: the last faults may have left remarks
            self._handle_events()
        self._desk.show_last_words()
        self._flush_output()
        run_folder = progress.read_run_folder(progress.page_path(self._folder, 0))
        outcome = Outcome(self._exit_code(), self._desk.all_text, run_folder, tuple(chaos.events))
        if self._asked == signal.SIGINT:
            raise KeyboardInterrupt
        if self._asked is not None:
            raise SystemExit(128 + self._asked)
        return outcome

    def _record_faults(self, chaos: FaultInjector) -> None:
        """Write the faults that were carried out into the run's folder, if it has one."""
        run_folder = progress.read_run_folder(progress.page_path(self._folder, 0))
        if run_folder is not None and chaos.events:
            record_events(run_folder, chaos.events)

    def _start_launcher(self, host: int) -> None:
        """Start `paceline run` on a host, as a user would on a machine of a cluster."""
        start, cluster = self._start, self._cluster
        if any(
            launcher.host == host and launcher.process.poll() is None
            for launcher in self._launchers
        ):
            raise UsageError(
                f"{cluster.hosts[host].name} is running already: let it join after it crashed, or "
                "leave it out at the start"
            )
        # Only the first launcher of a host names its rank. A later one joins like a new host.
        is_first = host in self._present and not self._was_launched(host)
        rank = self._present.index(host) if is_first else None
        process = cluster.spawn(
            host,
            [*_make_command(start, cluster, self._present, host, rank), start.script, *start.args],
            environ=self._make_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=start.folder,
        )
        # Plain descriptors that don't block: poll says which of them has output, and one read
        # takes all of it. `Popen` would buffer some out of sight of poll.
        sources = {}
        for stream, pipe in ((1, process.stdout), (2, process.stderr)):
            assert pipe is not None
            descriptor = os.dup(pipe.fileno())
            pipe.close()
            os.set_blocking(descriptor, False)
            sources[descriptor] = LauncherOutput(host, self._desk, stream)
        with self._joining:
            self._launchers.append(_HostLauncher(host, process, sources))

    def _was_launched(self, host: int) -> bool:
        """Whether a launcher was started on this host before."""
        return any(launcher.host == host for launcher in self._launchers)

    def _make_environ(self) -> dict[str, str]:
        """Make the environment of launchers: this process's own, without this machine's parts."""
        environ = {
            name: value for name, value in copy_environment().items() if name not in _NOT_INHERITED
        }
        # Hosts without a limit share the cores of this machine, so each worker gets its part.
        if all(host.processors is None for host in self._cluster.description.hosts):
            environ.setdefault(
                "OMP_NUM_THREADS",
                str(max(1, machine.count_cores() // self._cluster.description.workers)),
            )
        start = self._start
        options = {
            "PACELINE_SYNC": start.sync,
            "PACELINE_MESH": start.mesh,
            "PACELINE_CUT": start.cut,
            "PACELINE_SHARES": start.shares,
        }
        # They are variables, not options: they were verified once, and launchers don't do it again.
        variables = {name: text for name, text in options.items() if text is not None}
        return (
            environ
            | {"PACELINE_PROGRESS": str(self._folder)}
            | variables
            | dict(self._start.environ)
        )

    def _is_over(self) -> bool:
        with self._joining:
            return all(launcher.is_over for launcher in self._launchers)

    def _handle_events(self) -> None:
        """Wait a moment for output, read it, and show it."""
        with self._joining:
            launchers = list(self._launchers)
        poll = select.poll()
        launcher_of: dict[int, _HostLauncher] = {}
        # While the screen is full, nothing is read: the pipes fill, and launchers wait.
        if not self._desk.is_full:
            launcher_of = {
                descriptor: launcher for launcher in launchers for descriptor in launcher.sources
            }
        for descriptor in launcher_of:
            poll.register(descriptor, select.POLLIN)
        screens = self._desk.pending_screens()
        for descriptor in screens:
            poll.register(descriptor, select.POLLOUT)
        ready = poll.poll(1000 * _LOOK_SECONDS)
        while self._remarks:
            self._desk.show_lab_lines(f"paceline: fault: {self._remarks.popleft()}")
        self._show_position()
        for descriptor, _ in ready:
            if descriptor in launcher_of:
                _read_output(launcher_of[descriptor], descriptor)
            else:
                screens[descriptor].write_pending()
        now = time.monotonic()
        # Pipes that aren't read look quiet, and must not be closed for it.
        for launcher in launchers if not self._desk.is_full else ():
            launcher.let_go_of_pipes(now)

    def _show_position(self) -> None:
        """Tell the watcher the folder of the run, as soon as it is known or changes."""
        watcher = self._start.watcher
        run_folder = (
            None
            if watcher is None
            else progress.read_run_folder(progress.page_path(self._folder, 0))
        )
        if watcher is not None and run_folder is not None and run_folder != self._watched:
            self._watched = run_folder
            watcher.follow_run(run_folder)

    def _decide_ending(self, started_at: float) -> None:
        """Pass signals on to launchers, and end a run that takes too long.

        Raises `DeadlineExceeded` after the deadline.
        """
        now = time.monotonic()
        if self._start.show and self._desk.is_broken and self._asked is None:
            self._signals.append(signal.SIGPIPE)  # the reader of the output is gone
        # The first signal decides how the run ends, and starts the clock. Launchers get each one.
        for signum in self._signals:
            self._asked_at = self._asked_at if self._asked is not None else now
            self._asked = self._asked or signum
            self._send_signal(signal.SIGTERM if signum == signal.SIGPIPE else signum)
        self._signals.clear()
        # Launchers end their own workers. If they don't manage it in time, everything is killed.
        if self._asked is not None and now - self._asked_at > _PATIENCE_SECONDS:
            self._kill_launchers()
            self._desk.drop_pending()  # its reader is gone, or it would have been written by now
        if (
            self._start.deadline is not None
            and self._asked is None
            and now - started_at > self._start.deadline
        ):
            unfinished = [
                self._cluster.hosts[launcher.host].name
                for launcher in self._launchers
                if not launcher.is_over
            ]
            self._kill_launchers()
            raise DeadlineExceeded(
                f"the run of {self._start.script} has not ended within {self._start.deadline:g} s; "
                f"still running on {', '.join(unfinished)}. "
                f"Last output:\n{self._desk.all_text[-2000:]}"
            )

    def _send_signal(self, signum: int) -> None:
        for launcher in self._launchers:
            if launcher.process.poll() is None:
                launcher.process.send_signal(signum)

    def _kill_launchers(self) -> None:
        remains.kill_processes(
            lambda: [
                process
                for seat in self._cluster.hosts
                for process in self._cluster.processes(seat.number)
            ]
        )

    def _end_processes(self) -> None:
        """End all processes of this run, however it ended."""
        self._kill_launchers()
        for launcher in self._launchers:
            launcher.process.kill()
            launcher.process.wait()
            launcher.close_pipes()

    def _flush_output(self) -> None:
        deadline = time.monotonic() + _KILL_SECONDS
        while (screens := self._desk.pending_screens()) and time.monotonic() < deadline:
            poll = select.poll()
            for descriptor in screens:
                poll.register(descriptor, select.POLLOUT)
            for descriptor, _ in poll.poll(1000 * _LOOK_SECONDS):
                screens[descriptor].write_pending()

    def _exit_code(self) -> int:
        """Find the exit code of the run: the first one that isn't 0, in the order of hosts.

        A launcher that was killed by a signal (its host crashed) doesn't count, unless all were.
        """
        codes = [
            launcher.process.returncode
            for launcher in sorted(self._launchers, key=lambda launcher: launcher.host)
        ]
        exit_codes = [code for code in codes if code >= 0] or [128 - code for code in codes]
        return next((code for code in exit_codes if code != 0), 0)

    @contextmanager
    def _listen_for_signals(self) -> Iterator[None]:
        """Collect SIGINT, SIGTERM and SIGHUP while the run lasts."""
        # Python handles signals in the main thread, and lets no other thread set a handler.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        watched_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old_handlers = {
            signum: signal.signal(signum, lambda signum, frame: self._signals.append(signum))
            for signum in watched_signals
        }
        try:
            yield
        finally:
            for signum, handler in old_handlers.items():
                signal.signal(signum, handler)


def _read_output(launcher: _HostLauncher, descriptor: int) -> None:
    try:
        data = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return
    launcher.heard = time.monotonic()
    # An empty read is the end of the pipe.
    if data:
        launcher.sources[descriptor].take_bytes(data)
        return
    launcher.sources.pop(descriptor).flush_line()
    os.close(descriptor)


def _make_command(
    start: LabRequest, cluster: RunTarget, present: Sequence[int], host: int, rank: int | None
) -> list[str]:
    """Make the command `paceline run` of a host, with its options and without the script.

    `present`: the hosts that the job starts with. `rank`: the rank that this host names, if any.
    """
    command = [sys.executable, "-P", "-m", "paceline", "run"]
    options: dict[str, object] = {"workers": cluster.hosts[host].workers}
    elastic = start.min_workers is not None
    # A host that comes later joins the others, and never runs alone.
    if len(present) > 1 or host not in present or elastic:
        options["hosts"] = len(present) if elastic else max(2, len(present))
        options["join"] = f"{cluster.hosts[present[0]].address}:{PORT}"
        options |= {"secret-file": cluster.secret, "host-rank": rank}
        options["placement"] = cluster.description.placement
    options |= {"name": start.name, "threads": start.threads}
    if elastic or start.restarts:
        options |= {"min-workers": start.min_workers, "restarts": start.restarts}
        options["patience"] = start.patience
    for option, value in options.items():
        command += [] if value is None else [f"--{option}", str(value)]
    return command

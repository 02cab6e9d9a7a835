"""A run in a lab: starts the launchers of all hosts, shows and watches them, and ends them
together.
"""

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

PORT: Final = 29400  # where the launchers meet, on the first host that is there from the start
_LOOK_SECONDS: Final = 0.1  # between two looks at everything
_IDLE_SECONDS: Final = 0.3  # a line without an end is shown after this time
_PATIENCE_SECONDS: Final = 9.0  # for launchers that were asked to end; they need up to 6
# how long the pipes of a launcher that is gone may stay open without a word
_DRAIN_SECONDS: Final = 1.0
_KILL_SECONDS: Final = 4.0  # to read what the killed have left in their pipes
_NOT_INHERITED: Final = (
    "PACELINE_INTERFACE",
    "PACELINE_NAME",
    "PACELINE_SECRET",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)


@dataclass(frozen=True)
class LabRequest:
    """A request for a run.

    `folder` is where (None: here), `deadline` ends a longer run (seconds), `show` shows it on this
    screen.

    `sync`, `mesh`, `cut`, `shares`, `name`, `threads`, `min_workers`, `restarts` and `patience` are
    those of `paceline run`. `environ` holds variables that are added to those of this process.
    `watcher` is told of the run's folder, and shows it to people. `faults` are objects, texts, or
    lists of both.
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
    """What a run has to know of one host."""

    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def address(self) -> str: ...


class RunTarget(FaultTarget, Protocol):
    """The hosts that a run is started on: a built `Cluster`, as the run sees it."""

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

    It has the exit code of `paceline run`, all output, the run's folder if it had one, and the
    faults that were carried out.
    """

    code: int
    output: str
    folder: Path | None
    events: tuple[dict[str, Any], ...] = ()


@dataclass
class _HostLauncher:
    """One host's `paceline run`."""

    host: int
    process: subprocess.Popen[bytes]
    sources: dict[int, LauncherOutput]  # by descriptor, while it is open
    heard: float = 0.0
    ended: float | None = None  # monotonic: when its process was seen to be gone

    @property
    def is_over(self) -> bool:
        return not self.sources and self.process.poll() is not None

    def let_go_of_pipes(self, now: float) -> None:
        """Show an unfinished line; a process that holds the pipes open long after the launcher
        is gone isn't waited for.
        """
        if now - self.heard > _IDLE_SECONDS:
            for source in self.sources.values():
                source.flush_line()
        if self.ended is None and self.process.poll() is not None:
            self.ended = now
        if self.ended is not None and now - max(self.ended, self.heard) > _DRAIN_SECONDS:
            self.close_pipes()

    def close_pipes(self) -> None:
        """Show the rest, and read no more."""
        while self.sources:
            descriptor, source = self.sources.popitem()
            source.flush_line()
            os.close(descriptor)


def run_request(cluster: RunTarget, start: LabRequest, folder: Path) -> Outcome:
    """Run a request on every host and wait for the end; `folder` is for the progress pages of
    workers.

    Ctrl-C raises `KeyboardInterrupt` and SIGTERM `SystemExit` when everything has ended;
    `DeadlineExceeded` when it took too long.
    """
    faults = plot(start.faults, cluster.description)
    check_request(start)
    folder.mkdir()
    return _LabRun(cluster, start, folder, absent_hosts(faults)).wait_for_end(faults)


def check_request(start: LabRequest) -> None:
    """Raise `UsageError` for a request that makes no sense, before anything is built."""
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
        raise UsageError(f"deadline is {start.deadline}, and has to be a number of seconds above 0")


class _LabRun:
    """The launchers of one run."""

    def __init__(
        self, cluster: RunTarget, start: LabRequest, folder: Path, late: frozenset[int]
    ) -> None:
        self._cluster, self._start, self._folder, self._late = cluster, start, folder, late
        self._present = [seat.number for seat in cluster.hosts if seat.number not in late]
        self._launchers: list[_HostLauncher] = []
        self._signals: list[int] = []
        self._asked: int | None = None
        self._asked_at = 0.0
        self._joining = threading.Lock()  # faults come from another thread
        dealt = request.deal_ranks(
            [cluster.hosts[host].workers for host in self._present], cluster.description.placement
        )
        places = {
            rank: host for host, ranks in zip(self._present, dealt, strict=True) for rank in ranks
        }
        self._desk = OutputSorter([seat.name for seat in cluster.hosts], places, show=start.show)
        self._remarks: deque[str] = deque()  # of the injector of faults, in another thread
        self._watched: Path | None = None  # the folder that those who watch the run know

    def wait_for_end(self, faults: list[Any]) -> Outcome:
        """Start all launchers, and stay to the end."""
        began = time.monotonic()
        with ExitStack() as held:
            held.enter_context(self._listen_for_signals())
            held.callback(self._end_processes)
            held.enter_context(self._cluster.starting(self._start_launcher))
            with FaultInjector(
                self._cluster, faults, self._folder, say=self._remarks.append
            ) as chaos:
                held.callback(self._record_faults, chaos)  # however the run ends
                for host in self._present:
                    self._start_launcher(host)
                while not self._is_over():
                    self._handle_events()
                    self._decide_ending(began)
            self._handle_events()
        self._desk.show_last_words()
        self._flush_output()
        path = progress.read_run_folder(progress.page_path(self._folder, 0))
        outcome = Outcome(self._exit_code(), self._desk.all_text, path, tuple(chaos.events))
        if self._asked == signal.SIGINT:
            raise KeyboardInterrupt
        if self._asked is not None:
            raise SystemExit(128 + self._asked)
        return outcome

    def _record_faults(self, chaos: FaultInjector) -> None:
        """Write the faults carried out into the run's folder, where it had one."""
        path = progress.read_run_folder(progress.page_path(self._folder, 0))
        if path is not None and chaos.events:
            record_events(path, chaos.events)

    def _start_launcher(self, host: int) -> None:
        """Start `paceline run` on this host, as a user would there."""
        start, cluster = self._start, self._cluster
        if any(
            launcher.host == host and launcher.process.poll() is None
            for launcher in self._launchers
        ):
            raise UsageError(
                f"{cluster.hosts[host].name} is running already: let it join after it crashed, or "
                "leave it out at the start"
            )
        words = [
            sys.executable,
            "-P",
            "-m",
            "paceline",
            "run",
            "--workers",
            str(cluster.hosts[host].workers),
        ]
        elastic = start.min_workers is not None
        # a host that comes later asks the others, and never runs alone
        if len(self._present) > 1 or host not in self._present or elastic:
            first = cluster.hosts[self._present[0]].address
            words += [
                "--hosts",
                str(len(self._present) if elastic else max(2, len(self._present))),
                "--join",
                f"{first}:{PORT}",
                "--secret-file",
                str(cluster.secret),
            ]
            words += (
                ["--host-rank", str(self._present.index(host))]
                if host in self._present and not self._was_launched(host)
                else []
            )
            words += ["--placement", cluster.description.placement]
        for option in (
            "name",
            "threads",
            *(("min_workers", "restarts", "patience") if elastic or start.restarts else ()),
        ):
            value = getattr(start, option)
            words += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
        process = cluster.spawn(
            host,
            [*words, start.script, *start.args],
            environ=self._make_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=start.folder,
        )
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
        """Whether this host has had a launcher before."""
        return any(launcher.host == host for launcher in self._launchers)

    def _make_environ(self) -> dict[str, str]:
        """Return the environment as here, but for what belongs to this machine; all hosts share
        its cores, so threads are dealt once.
        """
        kept = {
            name: value for name, value in copy_environment().items() if name not in _NOT_INHERITED
        }
        if all(host.processors is None for host in self._cluster.description.hosts):
            kept.setdefault(
                "OMP_NUM_THREADS",
                str(max(1, machine.count_cores() // self._cluster.description.workers)),
            )
        start = self._start
        asked = {
            "PACELINE_SYNC": start.sync,
            "PACELINE_MESH": start.mesh,
            "PACELINE_CUT": start.cut,
            "PACELINE_SHARES": start.shares,
        }
        # proved once, and not by each launcher
        given = {name: text for name, text in asked.items() if text is not None}
        return kept | {"PACELINE_PROGRESS": str(self._folder)} | given | dict(self._start.environ)

    def _is_over(self) -> bool:
        with self._joining:
            return all(launcher.is_over for launcher in self._launchers)

    def _handle_events(self) -> None:
        """Wait for something to happen; read the output, and show it."""
        with self._joining:
            launchers = list(self._launchers)
        poll = select.poll()
        reading: dict[int, _HostLauncher] = {}
        if not self._desk.is_full:
            reading = {
                descriptor: launcher for launcher in launchers for descriptor in launcher.sources
            }
        for descriptor in reading:
            poll.register(descriptor, select.POLLIN)
        writing = self._desk.pending_screens()
        for descriptor in writing:
            poll.register(descriptor, select.POLLOUT)
        ready = poll.poll(1000 * _LOOK_SECONDS)
        while self._remarks:
            self._desk.show_lab_lines(f"paceline: fault: {self._remarks.popleft()}")
        self._show_position()
        for descriptor, _ in ready:
            if descriptor in reading:
                _read_output(reading[descriptor], descriptor)
            else:
                writing[descriptor].write_pending()
        now = time.monotonic()
        for launcher in launchers if not self._desk.is_full else ():
            launcher.let_go_of_pipes(now)

    def _show_position(self) -> None:
        """Tell those who watch the run where it is."""
        watcher = self._start.watcher
        path = (
            None
            if watcher is None
            else progress.read_run_folder(progress.page_path(self._folder, 0))
        )
        if watcher is not None and path is not None and path != self._watched:
            self._watched = path
            watcher.follow_run(path)

    def _decide_ending(self, began: float) -> None:
        """Pass on signals, and end a run that takes too long."""
        now = time.monotonic()
        if self._start.show and self._desk.is_broken and self._asked is None:
            self._signals.append(signal.SIGPIPE)  # the reader of the output is gone
        for signum in self._signals:
            self._asked_at = self._asked_at if self._asked is not None else now
            self._asked = self._asked or signum
            self._send_signal(signal.SIGTERM if signum == signal.SIGPIPE else signum)
        self._signals.clear()
        if self._asked is not None and now - self._asked_at > _PATIENCE_SECONDS:
            self._kill_launchers()
            self._desk.drop_pending()  # the reader is gone, or it would be written by now
        if (
            self._start.deadline is not None
            and self._asked is None
            and now - began > self._start.deadline
        ):
            running = [
                self._cluster.hosts[launcher.host].name
                for launcher in self._launchers
                if not launcher.is_over
            ]
            self._kill_launchers()
            raise DeadlineExceeded(
                f"the run of {self._start.script} has not ended within {self._start.deadline:g} s; "
                f"still running on {', '.join(running)}. "
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
        """End all processes of this run, whatever the reason for leaving."""
        self._kill_launchers()
        for launcher in self._launchers:
            launcher.process.kill()
            launcher.process.wait()
            launcher.close_pipes()

    def _flush_output(self) -> None:
        end = time.monotonic() + _KILL_SECONDS
        while (writing := self._desk.pending_screens()) and time.monotonic() < end:
            poll = select.poll()
            for descriptor in writing:
                poll.register(descriptor, select.POLLOUT)
            for descriptor, _ in poll.poll(1000 * _LOOK_SECONDS):
                writing[descriptor].write_pending()

    def _exit_code(self) -> int:
        """Return the exit code of the launchers; those of hosts that crashed don't count, unless
        all did.
        """
        codes = [
            launcher.process.returncode
            for launcher in sorted(self._launchers, key=lambda launcher: launcher.host)
        ]
        spoken = [code for code in codes if code >= 0] or [128 - code for code in codes]
        return next((code for code in spoken if code != 0), 0)

    @contextmanager
    def _listen_for_signals(self) -> Iterator[None]:
        """Note Ctrl-C and its like while the run lasts; in other threads than the first they
        can't come.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {
            signum: signal.signal(signum, lambda signum, frame: self._signals.append(signum))
            for signum in numbers
        }
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _read_output(launcher: _HostLauncher, descriptor: int) -> None:
    try:
        data = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return
    launcher.heard = time.monotonic()
    if data:
        launcher.sources[descriptor].take_bytes(data)
        return
    launcher.sources.pop(descriptor).flush_line()
    os.close(descriptor)

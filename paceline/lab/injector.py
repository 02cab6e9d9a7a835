"""Fault injection: carries out faults while a job runs in a cluster, and records when.

Each fault is carried out exactly when its worker begins the fault's step.

    worker 2    |-- step 3 --|-- step 4 --|  held before step 5  |-- step 5, if it still can --
    injector                               kill(rank=2, step=5)     next: hold before step 20

The worker of the next fault waits at a breakpoint in its progress page, so no fault misses its
step, however fast the steps are.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from paceline.cluster import machine
from paceline.cluster.control import progress
from paceline.cluster.control.progress import ProgressPage
from paceline.cluster.launcher import request
from paceline.errors import PacelineError, ResourceError
from paceline.lab.chaos import Crash, Cut, Fault, Join, Kill, Link, Slow, Stop, absent_hosts
from paceline.lab.description import Description, Rate
from paceline.record.folder import RunFolder, to_strict_json, write_atomically

_TICK_SECONDS: Final = 0.005
_EVENTS: Final = "events.json"  # holds the events if a run has no summary

Lasts = TypeVar("Lasts", Cut, Slow, Link)


class FaultTarget(Protocol):
    """The cluster in which faults are carried out.

    Hosts are numbered as in the description. Every method may be called twice.
    """

    @property
    def description(self) -> Description:
        """Description of the cluster."""
        ...

    def cut(self, host: int) -> None:
        """Unplug a host's network."""
        ...

    def mend(self, host: int) -> None:
        """Plug a host's network in again."""
        ...

    def limit(self, host: int, up: Rate | None, down: Rate | None) -> None:
        """Change a host's limits of sending and receiving, in bits per second (None: no limit)."""
        ...

    def quota(self, host: int, processors: float | None) -> None:
        """Limit a host to this number of cores (None: all)."""
        ...

    def quota_of(self, host: int) -> float | None:
        """Look up the number of cores that a host may use (None: all)."""
        ...

    def start(self, host: int) -> None:
        """Start a host's launcher."""
        ...

    def crash(self, host: int) -> None:
        """Cut a host's power: its network goes down and its processes are killed."""
        ...


@dataclass
class _LastingFault:
    """A fault that is in force.

    Attributes:
        fault: The fault.
        until: Time of the monotonic clock at which it ends (None: at the end of the run).
        page: Progress page of the worker that was held for it; a `Stop` has stopped this worker.
    """

    fault: Stop | Cut | Slow | Link
    until: float | None
    page: ProgressPage | None = None


class FaultInjector:
    """Carries out the faults of one run.

    >>> with FaultInjector(cluster, faults, folder) as injector:
    ...     ...  # the run, whose launchers have PACELINE_PROGRESS=folder
    >>> injector.events

    At the end, all that can be undone is undone: stopped workers continue, and links and processors
    are as described. If a fault could not be carried out, its error is raised at the end, too.

    Invariants:
        - A thread of its own carries out the faults, so no other thread changes `_due`, `_lasting`
          and `_crashed` until `close` has joined it.
        - A worker whose rank has faults in `_due` has a breakpoint at the step of the first one.

    Args:
        cluster: The cluster in which the job runs.
        faults: The faults, as checked by `chaos.list_faults`.
        folder: Folder of the workers' progress pages; it exists and is empty.
        say: Called with a line of text for each event. Default: prints it to stderr.
    """

    def __init__(
        self,
        cluster: FaultTarget,
        faults: Sequence[Fault],
        folder: Path,
        *,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._cluster, self._folder, self._say = cluster, folder, say or _print_line
        late, hosts = absent_hosts(faults), cluster.description.hosts
        # A host that joins later has no ranks yet.
        workers = [0 if index in late else host.workers for index, host in enumerate(hosts)]
        self._seats = request.deal_ranks(workers, cluster.description.placement)
        self._pages = {
            rank: ProgressPage(progress.page_path(folder, rank))
            for ranks in self._seats
            for rank in ranks
        }
        # Faults that are still to come, by the rank that is held for them, in the order of steps.
        self._due: dict[int, list[Fault]] = {}
        self._lasting: list[_LastingFault] = []
        self._crashed: set[int] = set()
        self._noted: list[tuple[float, dict[str, Any]]] = []  # events with their time.time()
        self._failed: PacelineError | None = None
        self._began = time.time()
        self._joined: float | None = None
        self._quotas = {
            fault.host: cluster.quota_of(fault.host) for fault in faults if isinstance(fault, Slow)
        }
        # Setting the same quota again changes nothing. It raises if this machine has no quotas, so
        # the error comes before the run begins.
        for host, cores in self._quotas.items():
            cluster.quota(host, cores)
        for fault in sorted(faults, key=lambda fault: fault.step):
            self._due.setdefault(self._waiting_rank(fault), []).append(fault)
        for rank, due in self._due.items():
            self._pages[rank].hold_before(due[0].step)
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(1, "paceline-chaos")
        self._watching: Future[None] | None = None

    def __enter__(self) -> FaultInjector:
        if self._due:
            self._watching = self._threads.submit(self._watch_run)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if self._failed is not None and error is None:
            raise self._failed

    def close(self) -> None:
        """Undo all faults that are in force, and note the faults that never came due.

        A second call does nothing.
        """
        # From here on only this thread uses the faults.
        self._over.set()
        self._threads.shutdown()
        while self._lasting:
            self._try_fault(self._end_fault, self._lasting[-1])
        while self._crashed:
            self._try_fault(self._cluster.mend, self._crashed.pop())
        steps = self._read_steps
        # A page has a negative step until a prepared loader has begun.
        if steps > 0:
            reason = f"the run ended after {steps} steps"
        elif steps == 0:
            reason = "the run ended before its first step was over"
        else:
            reason = "the run ended before the first step of a loader that paceline has prepared"
        for fault in sorted(
            (fault for due in self._due.values() for fault in due), key=lambda fault: fault.step
        ):
            self._note_event("fault not carried out", fault, why=reason)
            self._say(f"not carried out: {fault!r}: {reason}")
        self._due.clear()
        if self._watching is not None:
            self._watching.result()  # raises the error that ended the thread, if any

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events so far, in the order of time.

        Each has "time" (seconds since the run began), "step" (steps taken), "event" and "what" (the
        fault), and "why" if a fault failed or was not carried out.
        """
        began = self._began if (joined := self._first_joined()) is None else joined
        return [
            {"time": round(timestamp - began, 6), **event}
            for timestamp, event in sorted(self._noted, key=lambda noted: noted[0])
        ]

    def _first_joined(self) -> float | None:
        """Read the time at which the run began, and keep it (None: not yet).

        It is kept because a worker that is started again writes a new time to the same page.
        """
        self._joined = self._pages[0].began if self._joined is None else self._joined
        return self._joined

    # ---- when faults are due

    def _watch_run(self) -> None:
        """Carry out faults as they come due, until there are no more or the run is over."""
        try:
            while (self._lasting or any(self._due.values())) and not self._over.wait(_TICK_SECONDS):
                self.carry_out_due()
        finally:
            # No fault will be carried out after this, so no worker may wait for one.
            for page in self._pages.values():
                page.release()

    def carry_out_due(self) -> None:
        """Carry out the faults that are due now, and end those whose time is over."""
        self._first_joined()
        for rank, due in self._due.items():
            page = self._pages[rank]
            # A page keeps its last words when its process dies, so the process has to be alive.
            if not due or not page.is_holding or due[0].step > page.step or not page.is_alive:
                continue
            while due and due[0].step <= page.step:
                self._try_fault(self._carry_out, due.pop(0), page)
            # The worker has waited until now. It goes on when its breakpoint moves or disappears.
            if due:
                page.hold_before(due[0].step)
            else:
                page.release()
        now = time.monotonic()
        for lasting in [
            lasting
            for lasting in self._lasting
            if lasting.until is not None and lasting.until <= now
        ]:
            self._try_fault(self._end_fault, lasting)

    def _waiting_rank(self, fault: Fault) -> int:
        """Choose the rank that waits for a fault.

        It is the rank that the fault names, or else the first rank of its host. For a host that
        joins, it is the first rank of the other hosts.
        """
        if isinstance(fault, Kill | Stop):
            return fault.rank
        if self._seats[fault.host] and not isinstance(fault, Join):
            return self._seats[fault.host][0]
        return next(
            (ranks[0] for host, ranks in enumerate(self._seats) if ranks and host != fault.host), 0
        )

    @property
    def _read_steps(self) -> int:
        """Steps taken by the most advanced worker."""
        return max(page.step for page in self._pages.values())

    # ---- how faults are carried out

    def _carry_out(self, fault: Fault, page: ProgressPage) -> None:
        """Carry out a fault while its worker, the one of this page, is held."""
        step = page.step
        match fault:
            case Kill():
                _send_signal(page, signal.SIGKILL)
            case Stop():
                _send_signal(page, signal.SIGSTOP, group=True)
            case Crash():
                self._crashed.add(fault.host)
                self._cluster.crash(fault.host)
            case Join():
                # A crash has unplugged the host, and its new launcher needs the network.
                if fault.host in self._crashed:
                    self._cluster.mend(fault.host)
                    self._crashed.discard(fault.host)
                self._cluster.start(fault.host)
        # Of these kinds several may be in force at once, so the host is set as all of them want it.
        if isinstance(fault, Stop | Cut | Slow | Link):
            until = None if fault.seconds is None else time.monotonic() + fault.seconds
            self._lasting.append(_LastingFault(fault, until, page))
            self._settle_host(fault)
        self._note_event("fault", fault, step)
        self._say(f"{fault!r}: done before step {step}")

    def _end_fault(self, lasting: _LastingFault) -> None:
        """End a fault that is in force.

        The host returns to its described state, or to the state that another fault in force wants.
        """
        # The step is read first, since a worker that continues may soon be further.
        fault, step = lasting.fault, self._read_steps
        self._lasting.remove(lasting)
        # A worker that was stopped twice continues only when the second stop is over, too.
        if (
            isinstance(fault, Stop)
            and lasting.page is not None
            and not self._is_stopped(lasting.page)
        ):
            _send_signal(lasting.page, signal.SIGCONT, group=True, gone=True)
        self._settle_host(fault)
        if lasting.until is not None:
            self._note_event("fault over", fault, step)
            self._say(f"{fault!r}: over")

    def _is_stopped(self, page: ProgressPage) -> bool:
        """Whether a fault in force stops the worker of this page."""
        return any(
            lasting.page is page for lasting in self._lasting if isinstance(lasting.fault, Stop)
        )

    def _settle_host(self, changed: Fault) -> None:
        """Set a host's network or processors as all faults in force want them.

        If two faults contradict each other, the later one wins.
        """
        match changed:
            case Cut(host=host):
                isolated = host in self._crashed or any(
                    fault.host == host for fault in self._faults_in_force(Cut)
                )
                (self._cluster.cut if isolated else self._cluster.mend)(host)
            case Slow(host=host):
                factors = [
                    fault.factor for fault in self._faults_in_force(Slow) if fault.host == host
                ]
                self._cluster.quota(
                    host, self._base_cores(host) * factors[-1] if factors else self._quotas[host]
                )
            case Link(host=host):
                # From the oldest fault to the newest, each sets the directions that it names.
                described = self._cluster.description.hosts[host]
                up, down = described.up, described.down
                for fault in self._faults_in_force(Link):
                    if fault.host == host:
                        new_up, new_down = fault.sides()
                        up = up if new_up is None else new_up
                        down = down if new_down is None else new_down
                self._cluster.limit(host, up, down)

    def _faults_in_force(self, kind: type[Lasts]) -> list[Lasts]:
        """List the faults of this kind that are in force, in the order of their beginning."""
        return [lasting.fault for lasting in self._lasting if isinstance(lasting.fault, kind)]

    def _base_cores(self, host: int) -> float:
        """Compute the number of cores that the factor of a `Slow` multiplies."""
        quota = self._quotas[host]
        if quota is not None:
            return quota
        # Without a quota the host counts as having a core for each thread of its workers. Their
        # pages say how many threads they have, unless the host has no ranks yet.
        threads = (
            sum(max(1, self._pages[rank].threads) for rank in self._seats[host])
            or self._cluster.description.hosts[host].workers
        )
        return min(threads, machine.count_cores())

    # ---- events

    def _try_fault(self, do: Callable[..., None], subject: Any, *more: Any) -> None:
        """Call `do` for a fault, and note the error if it fails.

        The run continues. The first error is raised when the run is over.
        """
        try:
            do(subject, *more)
        except PacelineError as error:
            self._failed = self._failed or error
            fault = subject.fault if isinstance(subject, _LastingFault) else subject
            self._note_event("fault failed", fault, why=str(error))
            self._say(f"{fault!r} failed: {error}")

    def _note_event(self, event: str, fault: object, step: int | None = None, **more: str) -> None:
        """Note an event now; `step` is that of the most advanced worker by default."""
        self._noted.append(
            (
                time.time(),
                {
                    "step": self._read_steps if step is None else step,
                    "event": event,
                    "what": repr(fault),
                    **more,
                },
            )
        )


def record_events(folder: Path, events: Iterable[dict[str, Any]]) -> Path:
    """Write events into the summary of a run, and return the path of the file.

    They are sorted by time, together with the summary's own events. If the run's folder has no
    summary, they are written to `events.json` in it.
    """
    run, new_events = RunFolder(folder), list(events)
    if not run.summary.exists():
        write_atomically(folder / _EVENTS, to_strict_json(new_events, indent=2) + "\n")
        return folder / _EVENTS
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    summary["events"] = sorted(
        [*summary.get("events", []), *new_events], key=lambda event: float(event["time"])
    )
    write_atomically(run.summary, json.dumps(summary, indent=2) + "\n")
    return run.summary


def _send_signal(
    page: ProgressPage, signum: int, *, group: bool = False, gone: bool = False
) -> None:
    """Send a signal to the process of a page, or to its process group.

    The kernel may have given the ID of a dead process to another process, which must not get the
    signal. If the process has ended, this raises `ResourceError`, or does nothing if `gone`.
    """
    if not page.is_alive:
        if gone:
            return
        raise ResourceError(
            f"rank {page.rank} (process {page.pid}) has ended already, so it can't be sent "
            f"{signal.Signals(signum).name}"
        )
    try:
        if group:
            os.killpg(page.pid, signum)
            return
        # The descriptor stays with this one process, even if the ID is used again. If the page is
        # still alive after it was opened, it is the descriptor of the right process.
        descriptor = os.pidfd_open(page.pid)
        try:
            if page.is_alive:
                signal.pidfd_send_signal(descriptor, signum)
        finally:
            os.close(descriptor)
    except ProcessLookupError:
        # The process ended between the check and the signal.
        return


def _print_line(text: str) -> None:
    print(f"paceline: fault: {text}", file=sys.stderr, flush=True)

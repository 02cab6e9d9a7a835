"""Fault injection: carries faults out in a cluster where a job runs, each exactly when its worker
begins its step, and records when.

    worker 2    |-- step 3 --|-- step 4 --|  held before step 5  |-- step 5, if it still can --
    injector                               kill(rank=2, step=5)     next: hold before step 20

The worker that the next fault concerns waits at a breakpoint of its progress page, so a fault
misses no step, however fast.
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
_EVENTS: Final = "events.json"  # beside a summary that was never written

Lasts = TypeVar("Lasts", Cut, Slow, Link)


class FaultTarget(Protocol):
    """The cluster on which faults are carried out.

    Hosts are numbered as in the description; every method may be called twice.
    """

    @property
    def description(self) -> Description:
        """The description of the cluster."""
        ...

    def cut(self, host: int) -> None:
        """Unplug a host's network."""
        ...

    def mend(self, host: int) -> None:
        """Plug a host's network in again."""
        ...

    def limit(self, host: int, up: Rate | None, down: Rate | None) -> None:
        """Change a host's bandwidth (None: unlimited)."""
        ...

    def quota(self, host: int, processors: float | None) -> None:
        """Let a host use so many cores (None: all)."""
        ...

    def quota_of(self, host: int) -> float | None:
        """Return the number of cores that a host may use."""
        ...

    def start(self, host: int) -> None:
        """Start a host's launcher."""
        ...

    def crash(self, host: int) -> None:
        """Take a host's power away."""
        ...


@dataclass
class _LastingFault:
    """A fault that is in force; `until` is a time of the monotonic clock (None: to the end of
    the run).
    """

    fault: Stop | Cut | Slow | Link
    until: float | None
    page: ProgressPage | None = None  # of the worker that is stopped


class FaultInjector:
    """The faults of one run: `with Chaos(cluster, faults, folder): ...` around the run, whose
    launchers have PACELINE_PROGRESS=folder.

    `faults` come from `chaos.list_faults`, which has checked them; `folder` is there and empty.
    `events` says afterwards what happened when. In the end all is undone that can be: stopped
    workers go on, links and processors are as described. A fault that could not be carried out
    raises its error then.
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
        workers = [0 if index in late else host.workers for index, host in enumerate(hosts)]
        # a host that joins later has no ranks yet
        self._seats = request.deal_ranks(workers, cluster.description.placement)
        self._pages = {
            rank: ProgressPage(progress.page_path(folder, rank))
            for ranks in self._seats
            for rank in ranks
        }
        # by the rank that is held for them, the next one first
        self._due: dict[int, list[Fault]] = {}
        self._lasting: list[_LastingFault] = []
        self._crashed: set[int] = set()
        self._noted: list[tuple[float, dict[str, Any]]] = []  # by time.time()
        self._failed: PacelineError | None = None
        self._began = time.time()
        self._joined: float | None = None
        self._quotas = {
            fault.host: cluster.quota_of(fault.host) for fault in faults if isinstance(fault, Slow)
        }
        for host, cores in self._quotas.items():
            # changes nothing; where there are no quotas it raises, before anything runs
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
        """Undo what is in force at the end of the run, and note what never came due.

        Calling it twice is harmless.
        """
        self._over.set()
        self._threads.shutdown()
        while self._lasting:
            self._try_fault(self._end_fault, self._lasting[-1])
        while self._crashed:
            self._try_fault(self._cluster.mend, self._crashed.pop())
        steps = self._read_steps
        when = (
            f"the run ended after {steps} steps"
            if steps > 0
            else "the run ended before its first step was over"
        )
        if steps < 0:
            when = "the run ended before the first step of a loader that paceline has prepared"
        for fault in sorted(
            (fault for due in self._due.values() for fault in due), key=lambda fault: fault.step
        ):
            self._note_event("fault not carried out", fault, why=when)
            self._say(f"not carried out: {fault!r}: {when}")
        self._due.clear()
        if self._watching is not None:
            self._watching.result()  # raises what it has died of

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events so far, in order: "time" (seconds since the run began), "step" (steps
        taken), "event" and "what" (the fault).
        """
        began = self._began if (joined := self._first_joined()) is None else joined
        return [
            {"time": round(when - began, 6), **event}
            for when, event in sorted(self._noted, key=lambda noted: noted[0])
        ]

    def _first_joined(self) -> float | None:
        """Return when the run began: workers that are started again later write to the same
        page.
        """
        self._joined = self._pages[0].began if self._joined is None else self._joined
        return self._joined

    # ---- when

    def _watch_run(self) -> None:
        try:
            while (self._lasting or any(self._due.values())) and not self._over.wait(_TICK_SECONDS):
                self.carry_out_due()
        finally:
            for page in self._pages.values():  # no worker would come any more
                page.release()

    def carry_out_due(self) -> None:
        """Carry out what is due now, and end what has lasted long enough."""
        self._first_joined()
        for rank, due in self._due.items():
            page = self._pages[rank]
            if not due or not page.is_holding or due[0].step > page.step or not page.is_alive:
                continue
            while due and due[0].step <= page.step:
                self._try_fault(self._carry_out, due.pop(0), page)
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
        """Return the rank that waits for the fault: the one named, or the first of its host; for
        a host that joins, of the others.
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
        return max(page.step for page in self._pages.values())

    # ---- what

    def _carry_out(self, fault: Fault, page: ProgressPage) -> None:
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
                if fault.host in self._crashed:
                    self._cluster.mend(fault.host)
                    self._crashed.discard(fault.host)
                self._cluster.start(fault.host)
        if isinstance(fault, Stop | Cut | Slow | Link):
            until = None if fault.seconds is None else time.monotonic() + fault.seconds
            self._lasting.append(_LastingFault(fault, until, page))
            self._settle_host(fault)
        self._note_event("fault", fault, step)
        self._say(f"{fault!r}: done before step {step}")

    def _end_fault(self, lasting: _LastingFault) -> None:
        """End a fault: what it had changed is as it was, or as another one that is still in
        force wants it.
        """
        fault, step = lasting.fault, self._read_steps  # a worker that goes on may soon be further
        self._lasting.remove(lasting)
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
        return any(
            lasting.page is page for lasting in self._lasting if isinstance(lasting.fault, Stop)
        )

    def _settle_host(self, changed: Fault) -> None:
        """Set a host as all faults in force want it; of two that contradict each other the later
        one holds.
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
                described = self._cluster.description.hosts[host]
                up, down = described.up, described.down
                for fault in self._faults_in_force(Link):
                    if fault.host == host:
                        sides = fault.sides()
                        up, down = (
                            up if sides[0] is None else sides[0],
                            down if sides[1] is None else sides[1],
                        )
                self._cluster.limit(host, up, down)

    def _faults_in_force(self, kind: type[Lasts]) -> list[Lasts]:
        return [lasting.fault for lasting in self._lasting if isinstance(lasting.fault, kind)]

    def _base_cores(self, host: int) -> float:
        """Return the number of cores that a factor of the host's processors multiplies."""
        quota = self._quotas[host]
        if quota is not None:
            return quota
        threads = (
            sum(max(1, self._pages[rank].threads) for rank in self._seats[host])
            or self._cluster.description.hosts[host].workers
        )
        return min(threads, machine.count_cores())

    # ---- notes

    def _try_fault(self, do: Callable[..., None], subject: Any, *more: Any) -> None:
        """Carry out a fault, and note its failure; the error is raised when the run is over,
        which goes on until then.
        """
        try:
            do(subject, *more)
        except PacelineError as error:
            self._failed = self._failed or error
            fault = subject.fault if isinstance(subject, _LastingFault) else subject
            self._note_event("fault failed", fault, why=str(error))
            self._say(f"{fault!r} failed: {error}")

    def _note_event(self, event: str, fault: object, step: int | None = None, **more: str) -> None:
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
    """Write events into the summary of a run's folder, by time among its own; without a summary,
    into events.json. Returns the file.
    """
    run, recorded = RunFolder(folder), list(events)
    if not run.summary.exists():
        write_atomically(folder / _EVENTS, to_strict_json(recorded, indent=2) + "\n")
        return folder / _EVENTS
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    summary["events"] = sorted(
        [*summary.get("events", []), *recorded], key=lambda event: float(event["time"])
    )
    write_atomically(run.summary, json.dumps(summary, indent=2) + "\n")
    return run.summary


def _send_signal(
    page: ProgressPage, signum: int, *, group: bool = False, gone: bool = False
) -> None:
    """Send a signal to the page's process (or its whole process group), and to no other with its
    number now; `gone`: it needn't live.
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
        # names the process for ever, so that it can be looked at once more
        descriptor = os.pidfd_open(page.pid)
        try:
            if page.is_alive:
                signal.pidfd_send_signal(descriptor, signum)
        finally:
            os.close(descriptor)
    except ProcessLookupError:
        return  # it has ended this very moment


def _print_line(text: str) -> None:
    print(f"paceline: fault: {text}", file=sys.stderr, flush=True)

"""Begins the operations of a process group in their order, without waiting for other ranks.

    group in shared memory      its calls return at once: they are made by whoever asks
    other groups                compare a call with the other ranks first: a thread makes it, and
                                the caller goes on
    no group yet                the thread makes that, too

Callers of torch.distributed may begin an operation and do something else that other ranks need
before they come to it.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paceline.at_exit import at_exit
from paceline.comm.group import Group, Work, as_begun, begun
from paceline.comm.shm.group import SharedGroup
from paceline.comm.solo import SoloGroup
from paceline.errors import DeadlineExceeded, PacelineError, ViewChanged, WorkerLost

AT_ONCE = (SharedGroup, SoloGroup)  # groups whose calls wait for nobody
FAREWELL = 1.0  # seconds that the thread may take to end


class Members(NamedTuple):
    """What ranks have once they have met: their group, the host of each, and how many cores of
    its host there are for each worker.
    """

    group: Group
    hosts: tuple[str, ...] = ()
    cores: float = math.inf


class Issuer:
    """Begins operations on the group that `meet` makes at the first of them.

    `ranks`: what members are called among all workers.
    """

    def __init__(self, meet: Callable[[], Members], ranks: Sequence[int]) -> None:
        self._meet, self._ranks = meet, tuple(ranks)
        self._met: Members | None = None
        self._broken: BaseException | None = None
        self._direct = False
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[IssuedWork | None] = queue.SimpleQueue()
        self._behind = 0  # operations that the thread has not begun yet
        self._thread: threading.Thread | None = None
        self._unregister: Callable[[], object] = lambda: None

    def begin(self, call: Callable[[Group], Work[Any]]) -> Work[Any]:
        """Begin an operation after those before it."""
        if self._direct and not self._behind:
            assert self._met is not None
            return call(self._met.group)
        issued = IssuedWork(call)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._behind += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._issue, name="paceline backend", daemon=True
                )
                self._thread.start()
                # a thread that is inside torch while Python ends takes the process down with it
                self._unregister = at_exit(self._close)
        self._waiting.put(issued)
        return issued

    def crowded(self) -> bool:
        """Whether calls are made by whoever asks, on a host whose cores all have a worker that
        computes.
        """
        return self._direct and self._met is not None and self._met.cores <= torch.get_num_threads()

    def locate(self, error: BaseException) -> None:
        """Add to an error on which hosts the ranks are that it names."""
        absent = (
            error.missing
            if isinstance(error, DeadlineExceeded)
            else error.ranks
            if isinstance(error, WorkerLost)
            else ()
        )
        hosts = dict(
            zip(self._ranks, self._met.hosts if self._met is not None else (), strict=False)
        )
        if known := [f"rank {rank} is on host {hosts[rank]}" for rank in absent if rank in hosts]:
            error.add_note(f"Of these, {', '.join(known)}.")

    def end(self, act: Callable[[Group], None]) -> None:
        """Begin nothing more, and let `act` end the group."""
        with self._lock:
            self._direct, self._broken = (
                False,
                self._broken or ViewChanged("this process group has been destroyed"),
            )
        if self._met is not None:
            with contextlib.suppress(PacelineError):  # what others have ended already
                act(self._met.group)
        self._close()

    def _close(self) -> None:
        if self._thread is not None:
            self._unregister()
            self._waiting.put(None)
            self._thread.join(FAREWELL)
            self._thread = None

    def _issue(self) -> None:
        while (issued := self._waiting.get()) is not None:
            try:
                if self._met is None:
                    self._met = self._meet()
                issued.issue(self._met.group)
            except BaseException as error:  # noqa: BLE001  raised by whoever waits
                if self._met is None:
                    self._broken = self._broken or error
                issued.fail(error)
            with self._lock:
                self._behind -= 1
                self._direct = (
                    not self._behind
                    and self._broken is None
                    and self._met is not None
                    and isinstance(self._met.group, AT_ONCE)
                )


class IssuedWork:
    """An operation that a thread begins (a `Work`)."""

    def __init__(self, call: Callable[[Group], Work[Any]]) -> None:
        self._call: Callable[[Group], Work[Any]] | None = call
        self._inference = begun()
        self._begun = threading.Event()
        self._work: Work[Any] | None = None
        self._error: BaseException | None = None

    def issue(self, group: Group) -> None:
        """Begin the operation."""
        assert self._call is not None
        with as_begun(self._inference):
            self._work, self._call = self._call(group), None
        self._begun.set()

    def fail(self, error: BaseException) -> None:
        """Note why the operation has not begun."""
        self._error, self._call = error, None
        self._begun.set()

    def wait(self, timeout: float | None = None) -> Any:
        began = time.monotonic()
        if not self._begun.wait(timeout):
            raise DeadlineExceeded(
                f"not all ranks of this process group came to this operation within {timeout:g} s; "
                "they may still"
            )
        if self._error is not None:
            raise self._error
        assert self._work is not None
        return self._work.wait(
            None if timeout is None else max(0.001, timeout - (time.monotonic() - began))
        )

    def done(self) -> bool:
        return self._begun.is_set() and (self._work is None or self._work.done())

    def exception(self) -> BaseException | None:
        return self._error if self._work is None else self._work.exception()

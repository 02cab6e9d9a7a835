"""Begins the operations of a process group in their order, without waiting for other ranks.

    group in shared memory   a call returns at once: the caller makes it
    other groups             a call compares itself with other ranks first: a thread makes it
    no group yet             the thread makes the group, then the call

A caller of torch.distributed may begin an operation, and then do something else that other ranks
need before they begin theirs. So beginning an operation must not wait for them.
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

from paceline.at_exit import call_at_exit
from paceline.comm.group_protocol import Group, Work, needs_inference_mode, resume_mode
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.solo import SoloGroup
from paceline.errors import DeadlineExceeded, PacelineError, ViewChanged, WorkerLost

AT_ONCE = (SharedGroup, SoloGroup)  # groups whose calls return without waiting for other ranks
FAREWELL = 1.0  # seconds that the thread may take to end


class GroupMembers(NamedTuple):
    """A group that has been made, and where its ranks are.

    group: The group.
    hosts: Name of each rank's host.
    cores: Number of processor cores of this host for each of its workers.
    """

    group: Group
    hosts: tuple[str, ...] = ()
    cores: float = math.inf


class Issuer:
    """Begins operations on a group that is made at the first of them.

    An operation begins in the calling thread (`_begins_directly`) only if the group is one of
    AT_ONCE and the thread has begun everything before it (`_not_begun` is 0). Once `_broken` is
    set, nothing begins any more.

    Args:
        meet: Makes the group.
        ranks: Rank of each member among all workers, for errors.
    """

    def __init__(self, meet: Callable[[], GroupMembers], ranks: Sequence[int]) -> None:
        self._meet, self._ranks = meet, tuple(ranks)
        self._met: GroupMembers | None = None
        self._broken: BaseException | None = None
        self._begins_directly = False
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[IssuedWork | None] = queue.SimpleQueue()
        self._not_begun = 0  # operations that the thread has not begun yet
        self._thread: threading.Thread | None = None
        self._unregister: Callable[[], object] = lambda: None

    def begin_call(self, call: Callable[[Group], Work[Any]]) -> Work[Any]:
        """Begin an operation, after all earlier ones. Never waits for other ranks."""
        # The order of operations must not change: only if the thread has nothing left to begin.
        if self._begins_directly and not self._not_begun:
            assert self._met is not None
            return call(self._met.group)
        issued = IssuedWork(call)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._not_begun += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._begin_calls, name="paceline backend", daemon=True
                )
                self._thread.start()
                # A thread that is inside torch while Python ends takes the process down with it.
                self._unregister = call_at_exit(self._end_thread)
        self._waiting.put(issued)
        return issued

    def is_crowded(self) -> bool:
        """Whether callers begin operations themselves, and each core has a worker that computes."""
        return (
            self._begins_directly
            and self._met is not None
            and self._met.cores <= torch.get_num_threads()
        )

    def add_hosts(self, error: BaseException) -> None:
        """Add a note to an error: the hosts of the ranks that it names."""
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
        if places := [f"rank {rank} is on host {hosts[rank]}" for rank in absent if rank in hosts]:
            error.add_note(f"Of these, {', '.join(places)}.")

    def end_operations(self, act: Callable[[Group], None]) -> None:
        """Begin nothing more, and let `act` end the group."""
        with self._lock:
            self._begins_directly, self._broken = (
                False,
                self._broken or ViewChanged("this process group has been destroyed"),
            )
        if self._met is not None:
            with contextlib.suppress(PacelineError):  # another rank has ended the group before
                act(self._met.group)
        self._end_thread()

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._unregister()
            self._waiting.put(None)
            self._thread.join(FAREWELL)
            self._thread = None

    def _begin_calls(self) -> None:
        while (issued := self._waiting.get()) is not None:
            try:
                # The first operation makes the group, as ranks meet in it.
                if self._met is None:
                    self._met = self._meet()
                issued.begin_on(self._met.group)
            except BaseException as error:  # noqa: BLE001  raised in the thread that waits for it
                # Without a group, all later operations fail with the same error.
                if self._met is None:
                    self._broken = self._broken or error
                issued.fail(error)
            # From here on, callers may begin operations themselves.
            with self._lock:
                self._not_begun -= 1
                self._begins_directly = (
                    not self._not_begun
                    and self._broken is None
                    and self._met is not None
                    and isinstance(self._met.group, AT_ONCE)
                )


class IssuedWork:
    """The Work of an operation that a thread will begin."""

    def __init__(self, call: Callable[[Group], Work[Any]]) -> None:
        self._call: Callable[[Group], Work[Any]] | None = call
        self._inference = needs_inference_mode()
        self._begun = threading.Event()
        self._work: Work[Any] | None = None
        self._error: BaseException | None = None

    def begin_on(self, group: Group) -> None:
        """Begin the operation on `group`."""
        assert self._call is not None
        with resume_mode(self._inference):
            self._work, self._call = self._call(group), None
        self._begun.set()

    def fail(self, error: BaseException) -> None:
        """End the operation with `error`: it could not begin."""
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

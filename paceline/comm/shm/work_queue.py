"""The queue of operations under way in a group: generators that any waiting thread advances.

An operation yields when it has posted and other ranks have to come. It has no thread of its own.
Operations of a group end in the order in which they began. A wait in one group also advances the
operations of its relatives (subgroups, and the groups it is a subgroup of), as other ranks may need
them before they come.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.group_protocol import needs_inference_mode, resume_mode
from paceline.comm.shm.segment import BRIEF, OPERATIONS, ControlSegment, Steps
from paceline.comm.shm.waiting import WaitCondition
from paceline.errors import Mismatch, UsageError
from paceline.native.functions import load_functions

CHANNEL = "operations"


class QueuedWork:
    """An operation under way (a `Work`)."""

    number = 0  # of the call on its channel
    target = 0  # the post that all ranks must have reached before its next step
    ended = False
    result: Any = None
    error: BaseException | None = None

    def __init__(
        self, queue: WorkQueue, steps: Steps, call: CallFingerprint, *, inference: bool
    ) -> None:
        self.queue, self.steps, self.call, self.inference = queue, steps, call, inference

    def advance(self) -> bool:
        """Go on until other ranks have to come (False), or to the end (True)."""
        has_reached = self.queue.segment.has_reached
        if not has_reached(self.target):
            return False
        with resume_mode(self.inference):  # the mode of the thread that began it
            try:
                while has_reached(self.target):
                    self.target = next(self.steps)
            except StopIteration as stop:
                self.result = stop.value
                return True
        return False

    def wait(self, timeout: float | None = None) -> Any:
        if not self.ended:
            self.queue.wait_until_ended(self, timeout)
        if self.error is not None:
            raise self.error
        return self.result

    def done(self) -> bool:
        if not self.ended:
            self.queue.advance_all()
        return self.ended

    def exception(self) -> BaseException | None:
        return self.error if self.done() else None


_AnyWork = TypeVar("_AnyWork", bound=QueuedWork)


class WorkQueue:
    """The pending operations of one group, oldest first. `relatives` is shared with its relatives.

    A finalizer or a signal handler may begin and cancel operations while its own thread is inside
    another one. So the lock is reentrant, and `_is_advancing` says that a frame of this thread,
    further up, is advancing an operation: a nested call leaves everything to it.
    """

    def __init__(self, segment: ControlSegment, relatives: list[weakref.ref[WorkQueue]]) -> None:
        self.segment, self.relatives = segment, relatives
        self.native, self._pointer = load_functions(), segment.pointer
        self._pending: deque[QueuedWork] = deque()
        self._lock = threading.RLock()
        self._is_advancing = False
        me = weakref.ref(self)
        relatives[:] = [ref for ref in relatives if ref() is not None] + [me]
        segment.watch.busy = partial(_advance_relatives, relatives, me)

    def start_work(
        self, call: CallFingerprint, steps: Steps, written: Sequence[Tensor] = ()
    ) -> QueuedWork:
        """Append an operation that writes to `written`, and advance it as far as it goes."""
        return self.start(QueuedWork(self, steps, call, inference=needs_inference_mode(*written)))

    def start(self, work: _AnyWork) -> _AnyWork:
        """Append an operation, and advance it as far as it goes."""
        watch = self.segment.watch
        if watch.broken is not None:
            work.steps.close()
            raise watch.broken
        with self._lock:
            work.number = watch.count_call(CHANNEL)
            self._pending.append(work)
            if not self._is_advancing:
                self._advance_oldest()
        return work

    @property
    def has_pending(self) -> bool:
        """Whether there is an operation that has not ended."""
        return bool(self._pending)

    def advance_all(self) -> None:
        """Advance the oldest operations as far as they go. Never blocks."""
        # If another thread has the lock, it advances the operations itself.
        if not self._pending or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._is_advancing:
                self._advance_oldest()
        finally:
            self._lock.release()

    def _advance_oldest(self) -> None:
        watch = self.segment.watch
        self._is_advancing = True
        try:
            while self._pending and watch.broken is None and self._advance_work(self._pending[0]):
                self._pending.popleft()
        finally:
            self._is_advancing = False
        if watch.broken is not None:
            self._cancel_all(watch.broken)

    def _advance_work(self, pending: QueuedWork) -> bool:
        """Advance an operation until it has to wait (False) or has ended (True)."""
        segment = self.segment
        try:
            if not pending.advance():
                return False
        # Found by all ranks at the same place: the operation has failed, and the group goes on.
        except (Mismatch, UsageError) as error:
            pending.error = error
        # An error of torch on this rank alone: the others can't go on, so the group ends.
        except (RuntimeError, ValueError, TypeError) as error:
            pending.error = error
            segment.watch.end_everywhere(error)
        # An interrupt, or no memory: raised in the thread in which it came, and the group ends.
        except BaseException as error:
            pending.error, pending.ended = error, True
            segment.watch.end_everywhere(error)
            raise
        pending.ended = True
        return True

    def finish_small(self, pending: QueuedWork) -> bool:
        """Wait for a moment, and end a small all-reduce if all ranks come meanwhile.

        Only the oldest operation of the queue can end. Returns whether `pending` has.
        """
        started = time.perf_counter()
        # Others are kept from the queue for that moment, at most.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._is_advancing or self.segment.watch.broken is not None:
                return False
            self._is_advancing = True
            try:
                # Another thread may have ended it.
                if pending.ended or not self._pending or self._pending[0] is not pending:
                    return pending.ended and pending.error is None
                if self.native.finish(self.segment.operation, BRIEF):
                    return False
                pending.ended = True
                self._pending.popleft()
            finally:
                self._is_advancing = False
        finally:
            self._lock.release()
        self.segment.watch.add_wait(started)
        self.advance_all()
        return True

    def wait_until_ended(self, pending: QueuedWork, timeout: float | None = None) -> None:
        """Wait for the end of an operation. Raises errors of the wait, not of the operation."""

        # Most waits end here, before the first look at deadlines and at the other ranks.
        watch = self.segment.watch
        started = time.perf_counter()
        self._wait_for_head(BRIEF)
        watch.add_wait(started)
        self.advance_all()
        if pending.ended:
            return

        def ended() -> bool:
            if not pending.ended:
                self.advance_all()
            return pending.ended

        try:
            watch.wait_until_ready(
                WaitCondition(
                    ended,
                    self._missing_ranks,
                    self._wait_for_head,
                    CHANNEL,
                    pending.number,
                    pending.call,
                ),
                timeout,
            )
        finally:
            if watch.broken is not None:
                self.cancel_all()

    def cancel_all(self) -> None:
        """End all operations with the error that broke the group."""
        with self._lock:
            # If a frame further up is advancing one, it ends all of them when it returns.
            if self.segment.watch.broken is not None and not self._is_advancing:
                self._cancel_all(self.segment.watch.broken)

    def _cancel_all(self, error: BaseException) -> None:
        for pending in self._pending:
            if not pending.ended:
                pending.steps.close()
                pending.error, pending.ended = error, True
        self._pending.clear()

    def _wait_for_head(self, nanoseconds: int) -> None:
        """Wait until the oldest operation may go on. Another thread may advance it meanwhile."""
        try:
            target = self._pending[0].target
        except IndexError:  # another thread has ended it
            return
        self.native.wait(self._pointer, OPERATIONS, target, nanoseconds)

    def _missing_ranks(self) -> list[int]:
        head = next(iter(self._pending), None)
        return [] if head is None else self.segment.find_behind(head.target)


def _advance_relatives(
    relatives: list[weakref.ref[WorkQueue]], own: weakref.ref[WorkQueue]
) -> bool:
    """Advance all queues. Returns whether any but `own` has an operation that has not ended."""
    pending = False
    for ref in tuple(relatives):
        queue = ref()
        if queue is not None:
            queue.advance_all()
            pending = pending or (ref is not own and queue.has_pending)
    return pending

"""The queue of operations under way in a group: generators that any waiter pushes forward.

An operation yields when it has posted and the others have to come; no thread belongs to it. The
operations of a group end in the order in which they began; a wait in one group pushes those of its
relatives (subgroups, and what it is a subgroup of) too, as others may need them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.group import as_begun, begun
from paceline.comm.shm.segment import ControlSegment, Steps
from paceline.comm.shm.waiting import WaitCondition
from paceline.errors import Mismatch, UsageError

CHANNEL = "operations"


class QueuedWork:
    """An operation under way (a `Work`)."""

    def __init__(
        self, queue: WorkQueue, steps: Steps, call: CallFingerprint, number: int, *, inference: bool
    ) -> None:
        self.queue, self.steps, self.call, self.number, self.inference = (
            queue,
            steps,
            call,
            number,
            inference,
        )
        self.target = 0  # the post up to which all have to come before its next stretch
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> Any:
        if not self.ended:
            self.queue.finish(self, timeout)
        if self.error is not None:
            raise self.error
        return self.result

    def done(self) -> bool:
        if not self.ended:
            self.queue.push()
        return self.ended

    def exception(self) -> BaseException | None:
        return self.error if self.done() else None


class WorkQueue:
    """The pending operations of one group; `relatives` is shared by those that are pushed together.

    A finalizer, or a handler of a signal, may begin and cancel operations while its thread is in
    the middle of another one.
    """

    def __init__(self, segment: ControlSegment, relatives: list[weakref.ref[WorkQueue]]) -> None:
        self.segment, self.relatives = segment, relatives
        self._pending: deque[QueuedWork] = deque()
        self._lock = threading.RLock()
        self._pushing = False  # by the thread that has the lock
        me = weakref.ref(self)
        relatives[:] = [ref for ref in relatives if ref() is not None] + [me]
        segment.watch.busy = partial(_push_all, relatives, me)

    def start(
        self, call: CallFingerprint, steps: Steps, written: Sequence[Tensor] = ()
    ) -> QueuedWork:
        """Append an operation that writes to `written`, and push it as far as it goes."""
        watch = self.segment.watch
        if watch.broken is not None:
            steps.close()
            raise watch.broken
        with self._lock:
            call_number = watch.made.get(CHANNEL, 0)
            watch.made[CHANNEL] = call_number + 1
            pending = QueuedWork(self, steps, call, call_number, inference=begun(*written))
            self._pending.append(pending)
        self.push()
        return pending

    @property
    def pending(self) -> bool:
        """Whether an operation has not ended."""
        return bool(self._pending)

    def push(self) -> None:
        """Advance the oldest operations as far as they go; never blocks."""
        if not self._pending or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._pushing:
                self._push()
        finally:
            self._lock.release()

    def _push(self) -> None:
        watch = self.segment.watch
        self._pushing = True
        try:
            while self._pending and watch.broken is None and self._advance(self._pending[0]):
                self._pending.popleft()
        finally:
            self._pushing = False
        if watch.broken is not None:
            self._cancel(watch.broken)

    def _advance(self, pending: QueuedWork) -> bool:
        """Continue an operation until it has to wait (False) or has ended."""
        segment = self.segment
        try:
            if not segment.reached(pending.target):
                return False
            with as_begun(pending.inference):  # whoever pushes it
                while segment.reached(pending.target):
                    pending.target = next(pending.steps)
            return False
        except StopIteration as stop:
            pending.result = stop.value
        except (Mismatch, UsageError) as error:
            # found by all ranks at the same place: the group goes on
            pending.error = error
        except (RuntimeError, ValueError, TypeError) as error:
            # of torch, on this rank alone: the others can't go on
            pending.error = error
            segment.watch.end(error)
        except BaseException as error:
            # an interrupt, no memory: raised where it came, and the end of this operation
            pending.error, pending.ended = error, True
            segment.watch.end(error)
            raise
        pending.ended = True
        return True

    def finish(self, pending: QueuedWork, timeout: float | None = None) -> None:
        """Wait for the end of an operation; raises what ends the wait, not what ended the
        operation.
        """

        def ended() -> bool:
            if not pending.ended:
                self.push()
            return pending.ended

        if ended():
            return
        watch = self.segment.watch
        try:
            watch.wait(
                WaitCondition(ended, self._missing, CHANNEL, pending.number, pending.call), timeout
            )
        finally:
            if watch.broken is not None:
                self.cancel()

    def cancel(self) -> None:
        """End all operations with the reason for which the group is broken."""
        with self._lock:
            # else it ends where that does
            if self.segment.watch.broken is not None and not self._pushing:
                self._cancel(self.segment.watch.broken)

    def _cancel(self, error: BaseException) -> None:
        for pending in self._pending:
            if not pending.ended:
                pending.steps.close()
                pending.error, pending.ended = error, True
        self._pending.clear()

    def _missing(self) -> list[int]:
        head = next(iter(self._pending), None)
        return [] if head is None else self.segment.behind(head.target)


def _push_all(relatives: list[weakref.ref[WorkQueue]], own: weakref.ref[WorkQueue]) -> bool:
    """Push all, and tell whether others than `own` have something pending."""
    pending = False
    for ref in tuple(relatives):
        queue = ref()
        if queue is not None:
            queue.push()
            pending = pending or (ref is not own and queue.pending)
    return pending

"""Operations under way as works of torch.distributed, with futures; some end in the background."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work as TorchWork
else:
    from torch.distributed import Work as TorchWork

from paceline.at_exit import call_at_exit
from paceline.comm.backend.pass_thread import PassThread
from paceline.comm.backend.uncompiled import mark_uncompiled
from paceline.comm.backward_pass import call_at_end_of_backward, is_inside_backward
from paceline.comm.group_protocol import Work, needs_inference_mode, resume_mode
from paceline.errors import DeadlineExceeded, PacelineError, WorkerLost

LOOK = 5e-3  # seconds between two looks for operations that no caller waits for
QUIET = 20  # looks without such an operation, after which the thread sleeps until there is one
SHORTEST = 1e-3  # seconds of the shortest wait, as Gloo takes 0 to mean no limit
FAREWELL = 1.0  # seconds that the thread may take to end


@mark_uncompiled
class BackendWork(TorchWork):
    """A Work of torch.distributed over a Work of ours.

    The thread that needs the result advances the operation: the caller in `wait`; if the caller
    has gone on, a thread of the completer. `_lock` lets only one of them end it, so `finish` is
    called once. `ended` and `_error` don't change after that.

    Args:
        work: Our Work.
        finish: Gets the result of `work`, and puts it where the caller wants it.
        outputs: Tensors that the operation fills.
        seconds: Seconds that a wait may take. None: the deadline of the group.
        completer: Ends the operation in the background.
        locate: Adds a note to an error: the hosts of the ranks that it names.
    """

    def __init__(
        self,
        work: Work[Any],
        finish: Callable[[Any], Any] | None,
        outputs: Any,
        seconds: float | None,
        *,
        completer: Completer,
        locate: Callable[[BaseException], None],
    ) -> None:
        super().__init__()
        self._work, self._finish, self._outputs, self._seconds = work, finish, outputs, seconds
        self.completer, self._locate = completer, locate
        self._inference = needs_inference_mode(
            *(x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor))
        )
        self._lock = threading.Lock()
        self.ended = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation has ended, and raise its error if it failed.

        `timeout`: how long to wait at most. None or zero: the deadline of the group.
        """
        self.wait_and_raise(timeout.total_seconds() if timeout else None)
        return True

    def wait_and_raise(self, seconds: float | None = None) -> None:
        """Bring the operation to its end, and raise its error if it failed."""
        if not self.ended:
            self.bring_to_end(seconds)
        if self._error is not None:
            raise self._error

    def bring_to_end(self, seconds: float | None = None) -> None:
        """Bring the operation to its end, without raising its error.

        If `seconds` are given and pass, `DeadlineExceeded` is raised and nothing has ended.
        """
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            raise DeadlineExceeded(
                f"the operation has not ended within {seconds:g} s; it may still"
            )
        try:
            if self.ended:
                return
            try:
                with resume_mode(self._inference):
                    result = self._work.wait(self._seconds if seconds is None else seconds)
                    if self._finish is not None:
                        self._finish(result)
            except BaseException as error:
                self._locate(error)
                # The wait has run out, not the operation: it may be waited for again.
                if self._work.exception() is None and seconds is not None:
                    raise
                self._error = error
            self.ended, self._finish = True, None
            future = self._future
        finally:
            self._lock.release()
        # Outside of the lock: callbacks of the future run in here, and may use this work.
        if future is not None:
            _settle_future(future, self._error, self._outputs)

    def end_in_backward(self) -> None:
        """Bring the operation to its end inside a backward pass, which goes on if it failed.

        The thread that waits for the operation raises its error.
        """
        self.bring_to_end()
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error  # an interrupt, such as Ctrl-C

    def is_completed(self) -> bool:
        """Whether the operation has ended. Never blocks."""
        if not self.ended and self._work.done():
            self.bring_to_end()
        return self.ended

    def done(self) -> bool:
        """Whether the operation has ended, under the name that our own works use."""
        return self.is_completed()

    def is_success(self) -> bool:
        """Whether the operation has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that ended the operation, or None."""
        return self._error

    def result(self) -> Any:
        """Wait, and return the tensors that the operation has filled."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """Wait: on a processor there is no stream that could wait instead."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that the operation fills.

        The completer ends it in the background.
        """
        with self._lock:
            if self._future is None:
                self._future = _Future(self.bring_to_end)
                # If it has ended before, there is nothing left to wait for.
                if self.ended:
                    _settle_future(self._future, self._error, self._outputs)
                else:
                    self.completer.add_work(self, soon=True)
            return self._future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Return the same future as `get_future`."""
        return self.get_future()


class _Future(torch.futures.Future[Any]):
    """The future of an operation. Python code that waits for it ends the operation itself."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def wait(self) -> Any:
        if not self.done():
            self._end()
        return super().wait()


def _settle_future(
    future: torch.futures.Future[Any], error: BaseException | None, outputs: Any
) -> None:
    if error is None:
        future.set_result(outputs)
    elif isinstance(error, Exception):  # an interrupt is raised in its own thread instead
        future.set_exception(error)


class _JointWork:
    """Several works that have ended once all of them have."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = list(works)

    def _share_timeout(self, timeout: float | None) -> Iterator[tuple[Any, float | None]]:
        """Yield each work with the seconds left for it, so that all share one `timeout`."""
        end = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            yield work, None if end is None else max(SHORTEST, end - time.monotonic())

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def exception(self) -> BaseException | None:
        return next(
            (error for work in self._works if (error := work.exception()) is not None), None
        )


class CompositeWork(_JointWork):
    """Several works as one, which gives the list of their results (a `Work`)."""

    def wait(self, timeout: float | None = None) -> list[Any]:
        return [work.wait(seconds) for work, seconds in self._share_timeout(timeout)]


class JoinedWork(_JointWork):
    """Several works of torch's as one of ours (a `Work`)."""

    def wait(self, timeout: float | None = None) -> None:
        for work, seconds in self._share_timeout(timeout):
            work.wait_and_raise(seconds)


class _GlooWork:
    """An operation of Gloo as a Work of ours. `what` and `ranks`: its words and ranks in errors."""

    def __init__(self, work: Any, what: str, ranks: tuple[int, ...]) -> None:
        self._work, self._what, self._ranks = work, what, ranks
        self._error: PacelineError | None = None

    def wait(self, timeout: float | None = None) -> None:
        if self._error is None:
            began = time.monotonic()
            try:
                self._work.wait(*([] if timeout is None else [timedelta(seconds=timeout)]))
            except RuntimeError as error:
                passed = time.monotonic() - began
                if timeout is not None and passed >= timeout:
                    self._error = DeadlineExceeded(
                        f"{self._what} within {timeout:g} s", self._ranks
                    )
                else:
                    self._error = WorkerLost(
                        f"{self._what}, {passed:.1f} s later: {str(error).splitlines()[0]}",
                        self._ranks,
                    )
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._error is not None or bool(self._work.is_completed())

    def exception(self) -> BaseException | None:
        return self._error


class PairWork(_GlooWork):
    """A send or receive of Gloo (a `Work`). Its errors name the other rank."""

    def __init__(self, work: Any, what: str, rank: int) -> None:
        super().__init__(work, what, (rank,))


class GlooResult(_GlooWork):
    """A reduction of Gloo that returns its result: of sparse tensors (a `Work`).

    The result is copied to `tensors`, as torch wants it in place.
    """

    def __init__(self, work: Any, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(work, "a sparse all_reduce has not ended", ())
        self._tensors = tensors

    def wait(self, timeout: float | None = None) -> None:
        super().wait(timeout)
        for x, total in zip(self._tensors, self._work.result(), strict=True):
            if x is not total:
                x.copy_(total)


class Completer:
    """Ends operations whose callers have gone on: other ranks need this one for them.

    A thread looks for such operations every few milliseconds, so an operation that is waited for at
    once costs nothing here. On a host that is `crowded`, an operation that begins in a backward
    pass is left to the end of the pass, unless the thread of the pass falls idle before.
    """

    def __init__(self, crowded: Callable[[], bool] = lambda: False) -> None:
        self._crowded = crowded
        # Operations to end, in their order, with the thread of the pass that will end them.
        self._works: deque[tuple[BackendWork, PassThread | None]] = deque()
        self._wake = threading.Event()
        self._idle = self._closed = False  # idle: the thread sleeps until `_wake`
        self._thread: threading.Thread | None = None
        self._unregister: Callable[[], object] = lambda: None

    def add_work(self, work: BackendWork, *, soon: bool = False) -> None:
        """End a work in the background, after all that were added before.

        `soon`: at once, as a future of it is waited for.
        """
        thread = None
        # In a backward pass on a crowded host the thread of the pass ends it, not ours.
        if is_inside_backward() and self._crowded():
            thread = PassThread()
            if soon:
                call_at_end_of_backward(work.end_in_backward)
        self._works.append((work, thread))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_thread, name="paceline completer", daemon=True
            )
            self._thread.start()
            # A thread that is inside torch while Python ends takes the process down with it.
            self._unregister = call_at_exit(self.close)
        if (soon and thread is None) or self._idle:
            self._wake.set()

    def _run_thread(self) -> None:
        torch.set_num_threads(1)
        quiet = 0  # looks in a row that found no operation
        while not self._closed:
            self._idle = quiet >= QUIET
            # An operation that was added before its caller could see `_idle` did not wake us.
            if self._idle and self._works:
                quiet = 0
                continue
            self._wake.wait(None if self._idle else LOOK)
            self._wake.clear()
            quiet = quiet + 1 if not self._works else 0
            while self._works and not self._closed:
                work, thread = self._works[0]
                # Leave it to the thread of its pass, as long as that computes.
                if thread is not None and not work.ended and thread.is_computing():
                    break
                self._works.popleft()
                work.bring_to_end()

    def close(self) -> None:
        """Stop the thread, and wait at most a second for it.

        Works whose group has ended are ended too, as a caller may wait for their futures.
        """
        if self._thread is not None:
            self._unregister()
            self._closed = True
            self._wake.set()
            if self._thread is not threading.current_thread():
                self._thread.join(FAREWELL)
            for work, _ in tuple(self._works):
                work.is_completed()

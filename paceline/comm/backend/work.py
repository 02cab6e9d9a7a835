"""Operations of the backend under way, as torch.distributed knows them: works with futures,
completed in the background where asked for.
"""

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

from paceline.at_exit import at_exit
from paceline.comm.backend import backward
from paceline.comm.backend.uncompiled import uncompiled
from paceline.comm.group import Work, as_begun, begun
from paceline.errors import DeadlineExceeded, PacelineError, WorkerLost

LOOK = 5e-3  # seconds between two looks for operations whose callers have gone on
QUIET = 20  # looks without any, after which the thread sleeps until there is one
SHORTEST = 1e-3  # seconds of a wait: Gloo takes none for any time
FAREWELL = 1.0  # seconds that the thread may take to end


@uncompiled
class BackendWork(TorchWork):
    """A work of torch.distributed over one of ours.

    `finish` takes the result of ours to where the caller wants it, once.

    Who needs the end pushes the operation: `wait` in the caller, and where the caller has gone on,
    what the `completer` chooses. `seconds`: how long to wait (None: the deadline of the group).
    `locate` adds to an error where the ranks are that it names.
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
        self._inference = begun(*(x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)))
        self._lock = threading.Lock()
        self.ended = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation has ended; at most `timeout` (None or nothing: the deadline
        of the group). Raises what ended it.
        """
        self.complete(timeout.total_seconds() if timeout else None)
        return True

    def complete(self, seconds: float | None = None) -> None:
        """Bring the operation to its end, and raise what ended it."""
        if not self.ended:
            self.end(seconds)
        if self._error is not None:
            raise self._error

    def end(self, seconds: float | None = None) -> None:
        """Bring the operation to its end, without raising what ended it; a wait of `seconds`
        that passes raises and ends nothing.
        """
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            raise DeadlineExceeded(
                f"the operation has not ended within {seconds:g} s; it may still"
            )
        try:
            if self.ended:
                return
            try:
                with as_begun(self._inference):
                    result = self._work.wait(self._seconds if seconds is None else seconds)
                    if self._finish is not None:
                        self._finish(result)
            except BaseException as error:
                self._locate(error)
                if self._work.exception() is None and seconds is not None:
                    raise
                self._error = error
            self.ended, self._finish = True, None
            future = self._future
        finally:
            self._lock.release()
        if future is not None:
            _settle(future, self._error, self._outputs)

    def conclude(self) -> None:
        """Bring the operation to its end in a backward pass, which goes on: the error of an
        operation is raised by who waits for it.
        """
        self.end()
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error  # an interrupt

    def is_completed(self) -> bool:
        """Whether the operation has ended."""
        if not self.ended and self._work.done():
            self.end()
        return self.ended

    def done(self) -> bool:
        """Whether the operation has ended, as works of groups say it."""
        return self.is_completed()

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that ended the operation, if one has."""
        return self._error

    def result(self) -> Any:
        """Wait, and return the tensors that the operation fills."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """Wait, as there is no stream on the processor."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that the operation fills; the thread of the completer
        brings it to its end.
        """
        with self._lock:
            if self._future is None:
                self._future = _Future(self.end)
                if self.ended:
                    _settle(self._future, self._error, self._outputs)
                else:
                    self.completer.add(self, soon=True)
            return self._future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Return the same future."""
        return self.get_future()


class _Future(torch.futures.Future[Any]):
    """The future of an operation, which Python code that waits for it ends itself with `end`."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def wait(self) -> Any:
        if not self.done():
            self._end()
        return super().wait()


def _settle(future: torch.futures.Future[Any], error: BaseException | None, outputs: Any) -> None:
    if error is None:
        future.set_result(outputs)
    elif isinstance(error, Exception):  # an interrupt is raised where it came
        future.set_exception(error)


class _Several:
    """Several works, which end when all of them have."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = list(works)

    def _within(self, timeout: float | None) -> Iterator[tuple[Any, float | None]]:
        """Yield each work, and for how many seconds to wait for it, so that all of them have
        `timeout` together.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            yield work, None if end is None else max(SHORTEST, end - time.monotonic())

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def exception(self) -> BaseException | None:
        return next(
            (error for work in self._works if (error := work.exception()) is not None), None
        )


class CompositeWork(_Several):
    """Several works as one (a `Work`)."""

    def wait(self, timeout: float | None = None) -> list[Any]:
        return [work.wait(seconds) for work, seconds in self._within(timeout)]


class JoinedWork(_Several):
    """Several works of the backend as one of ours (a `Work`)."""

    def wait(self, timeout: float | None = None) -> None:
        for work, seconds in self._within(timeout):
            work.complete(seconds)


class _GlooWork:
    """An operation of Gloo's, whose errors name `ranks`. `what`: the operation, for messages."""

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
    """A send or a receive of Gloo's (a `Work`), whose errors name the other rank."""

    def __init__(self, work: Any, what: str, rank: int) -> None:
        super().__init__(work, what, (rank,))


class GlooResult(_GlooWork):
    """A reduction of Gloo's (a `Work`) that gives its result instead of writing it: of sparse
    tensors. `tensors` get it.
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
    """Brings operations to their end where their callers have gone on: other ranks need this one
    for them.

    A thread looks for them every few milliseconds, so that operations which are waited for right
    away cost nothing here. While the host is `crowded`, what begins in a backward pass is left to
    the end of the pass, unless the thread of that comes to wait for something before.
    """

    def __init__(self, crowded: Callable[[], bool] = lambda: False) -> None:
        self._crowded = crowded
        self._works: deque[tuple[BackendWork, backward.PassThread | None]] = deque()
        self._wake = threading.Event()
        self._idle = self._closed = False
        self._thread: threading.Thread | None = None
        self._unregister: Callable[[], object] = lambda: None

    def add(self, work: BackendWork, *, soon: bool = False) -> None:
        """Complete a work, after those that were added before; `soon`: at once, as a future of
        it is waited for.
        """
        thread = None
        if backward.inside() and self._crowded():
            thread = backward.PassThread()
            if soon:
                backward.at_end(work.conclude)
        self._works.append((work, thread))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="paceline completer", daemon=True
            )
            self._thread.start()
            # a thread that is inside torch while Python ends takes the process down with it
            self._unregister = at_exit(self.close)
        if (soon and thread is None) or self._idle:
            self._wake.set()

    def _run(self) -> None:
        torch.set_num_threads(1)
        quiet = 0  # looks that found nothing
        while not self._closed:
            self._idle = quiet >= QUIET
            if self._idle and self._works:  # added before its caller could see that
                quiet = 0
                continue
            self._wake.wait(None if self._idle else LOOK)
            self._wake.clear()
            quiet = quiet + 1 if not self._works else 0
            while self._works and not self._closed:
                work, thread = self._works[0]
                if thread is not None and not work.ended and thread.computes():
                    break
                self._works.popleft()
                work.end()

    def close(self) -> None:
        """Stop; wait for that at most a second.

        Works whose group has ended end, too, as somebody may wait for their futures.
        """
        if self._thread is not None:
            self._unregister()
            self._closed = True
            self._wake.set()
            if self._thread is not threading.current_thread():
                self._thread.join(FAREWELL)
            for work, _ in tuple(self._works):
                work.is_completed()

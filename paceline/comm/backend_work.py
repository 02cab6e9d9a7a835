"""Operations of the backend under way, as torch.distributed knows them: works with futures, completed in the background where asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work as TorchWork
else:
    from torch.distributed import Work as TorchWork

from paceline.comm.group import Finished, Work
from paceline.errors import DeadlineExceeded, PacelineError, WorkerLost


class BackendWork(TorchWork):
    """A work of torch.distributed over one of ours. `finish` takes the result of ours to where the caller wants it, once.

    Whoever needs the end pushes the operation: `wait` in the caller, and where the caller has gone on, a thread of the `Completer`.
    """

    def __init__(self, work: Work[Any], finish: Callable[[Any], Any] | None, completer: Completer, outputs: Any, seconds: float) -> None:
        super().__init__()
        self._work, self._finish, self._completer, self._outputs, self._seconds = work, finish, completer, outputs, seconds
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation has ended; at most `timeout` (None or nothing: the deadline of the group). Raises what ended it."""
        self.complete(timeout.total_seconds() if timeout else None)
        return True

    def complete(self, seconds: float | None = None) -> None:
        """Bring the operation to its end, and raise what ended it."""
        self.end(seconds)
        if self._error is not None:
            raise self._error

    def end(self, seconds: float | None = None) -> None:
        """Bring the operation to its end, without raising what ended it; a wait of `seconds` that passes raises and ends nothing."""
        with self._lock:
            if self._ended:
                return
            try:
                result = self._work.wait(self._seconds if seconds is None else seconds)
                if self._finish is not None:
                    self._finish(result)
            except BaseException as error:
                if self._work.exception() is None and seconds is not None:
                    raise
                self._error = error
            self._ended, self._finish = True, None
            future = self._future
        if future is not None:
            _settle(future, self._error, self._outputs)

    def is_completed(self) -> bool:
        """Whether the operation has ended."""
        if not self._ended and self._work.done():
            self.end()
        return self._ended

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error that ended the operation, if one has."""
        return self._error

    def result(self) -> Any:
        """The tensors that the operation fills."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """Wait, as there is no stream on the processor."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors that the operation fills; a thread of the backend brings it to its end."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._ended:
                    _settle(self._future, self._error, self._outputs)
                else:
                    self._completer.add(self)
            return self._future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """The same future."""
        return self.get_future()


def _settle(future: torch.futures.Future[Any], error: BaseException | None, outputs: Any) -> None:
    if error is None:
        future.set_result(outputs)
    else:
        future.set_exception(error)


class Composite:
    """Several works as one (a `Work`)."""

    def __init__(self, works: Sequence[Work[Any]]) -> None:
        self._works = list(works)

    def wait(self, timeout: float | None = None) -> list[Any]:
        return [work.wait(timeout) for work in self._works]

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)


class Joined:
    """Several works of the backend as one of ours (a `Work`)."""

    def __init__(self, works: Sequence[BackendWork]) -> None:
        self._works = list(works)

    def wait(self, timeout: float | None = None) -> None:
        for work in self._works:
            work.complete(timeout)

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)


class PairWork:
    """A send or a receive of Gloo's (a `Work`), whose errors name the other rank. `what`: the operation, for messages."""

    def __init__(self, work: Any, what: str) -> None:
        self._work, self._what = work, what
        self._error: PacelineError | None = None

    def wait(self, timeout: float | None = None) -> None:
        if self._error is None:
            try:
                self._work.wait(timedelta(seconds=timeout)) if timeout else self._work.wait()
            except RuntimeError as error:
                late = "imed out" in str(error) or "imeout" in str(error)
                kind, why = (DeadlineExceeded, f"not within {timeout:g} s") if late else (WorkerLost, str(error).splitlines()[0])
                self._error = kind(f"{self._what}: {why}")
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._error is not None or bool(self._work.is_completed())

    def exception(self) -> BaseException | None:
        return self._error


class Completer:
    """A thread that brings operations to their end in their order; begun with the first of them."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[BackendWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: BackendWork) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._complete, name="paceline backend", daemon=True)
            self._thread.start()
        self._works.put(work)

    def _complete(self) -> None:
        while (work := self._works.get()) is not None:
            work.end()

    def close(self) -> None:
        """Stop after the operations that were added; wait for that at most a second."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join(1.0)
            self._thread = None


def ended(completer: Completer) -> BackendWork:
    """Make a work that has ended."""
    return BackendWork(Finished(), None, completer, [], 0.0)

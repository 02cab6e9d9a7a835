"""A staged pipeline executor: each stage is a thread, and tensors pass through the stages in the
order in which they came.

    stage 0   sum 0 | sum 1 | sum 2 | sum 3                      a flow is a generator: what it
                                                                 yields is waited for
    stage 1           net 0 | net 1 | net 2 | net 3              before it goes on, one stage
                                                                 further
    stage 2                   out 0 | out 1 | out 2 | out 3

Every rank has the same flows in the same order, so each stage launches its operations in the same
order everywhere, as long as it has a group (or groups) that no other stage uses. What is between
two stages is bounded.

A job that is waited for as soon as it is started goes through all stages in the thread that waits,
if no other is under way: threads that hand a small tensor to each other take longer than its sum.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.group import Work, as_begun, begun
from paceline.comm.shm.waiting import fine_timer
from paceline.errors import DeadlineExceeded, PacelineError, UsageError, ViewChanged

AHEAD = 4 << 20  # elements that may be between two stages
TICK = 0.1  # seconds after which a wait looks up

Steps = Generator[Work[Any] | None, Any, Any]


class Flow(NamedTuple):
    """The way of one piece through the stages: a generator that yields at each change of the
    stage, and the piece's number of elements.
    """

    steps: Steps
    elements: int


class StagedJob:
    """The Work of one request: its flows, made as the first stage comes to them, and what is done
    after the last one's end.

    They write to `written`.
    """

    def __init__(
        self,
        flows: Callable[[], Iterable[Flow]],
        conclude: Callable[[], Any],
        what: str,
        deadline: float,
        written: Sequence[Tensor] = (),
    ) -> None:
        self.flows, self.conclude, self.what, self.deadline = flows, conclude, what, deadline
        self.inference = begun(*written)
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        # do it in this thread, if it was kept for that
        self.take: Callable[[], None] = lambda: None
        self.give: Callable[[], None] = lambda: None  # let the threads do it then

    def end(self, result: Any) -> None:
        """Finish the job with its result."""
        if not self._ended.is_set():
            self._result = result
            self._ended.set()

    def cancel(self, error: BaseException) -> None:
        """End the job with an error: it will not be done."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def wait(self, timeout: float | None = None) -> Any:
        if timeout is None:
            self.take()
        else:
            self.give()
        seconds = self.deadline if timeout is None else timeout
        limit = time.monotonic() + seconds
        while not self._ended.wait(min(TICK, max(0.0, limit - time.monotonic()))):
            if time.monotonic() > limit:
                raise DeadlineExceeded(f"{self.what} has not ended within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        self.give()
        return self._ended.is_set()

    @property
    def ended(self) -> bool:
        """Whether it has ended, for the executor."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        return self._error if self.done() else None


class _FlowInTransit(NamedTuple):
    """A flow between two stages, with the Work it waits for; without a flow, the end of its job."""

    job: StagedJob
    flow: Flow | None
    awaited: Work[Any] | None

    @property
    def elements(self) -> int:
        return 0 if self.flow is None else self.flow.elements


class _StageQueue:
    """The queue between two stages, in order: at most AHEAD elements, or one piece that has
    more.
    """

    def __init__(self) -> None:
        self._pieces = deque[_FlowInTransit | None]()
        self._elements = 0
        self._changed = threading.Condition()

    def put(self, piece: _FlowInTransit | None) -> None:
        """Wait for room, and append; None is the end."""
        elements = 0 if piece is None else piece.elements
        with self._changed:
            self._changed.wait_for(
                lambda: not elements or not self._elements or self._elements + elements <= AHEAD
            )
            self._elements += elements
            self._pieces.append(piece)
            self._changed.notify_all()

    def first(self) -> _FlowInTransit | None:
        """Wait for the first piece and give it; it stays, and counts, until `drop`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pieces))
            return self._pieces[0]

    def drop(self) -> None:
        """Remove the first piece, which has been dealt with."""
        with self._changed:
            piece = self._pieces.popleft()
            self._elements -= 0 if piece is None else piece.elements
            self._changed.notify_all()


class StagedExecutor:
    """Passes jobs through `stages` threads.

    `spread` is called with an error that ends all, and gives the one that jobs end with.
    """

    def __init__(
        self, name: str, stages: int, spread: Callable[[PacelineError], BaseException]
    ) -> None:
        self.broken: BaseException | None = None
        self._finished = False
        self._spread = spread
        self._jobs: queue.SimpleQueue[StagedJob | None] = queue.SimpleQueue()
        self._belts = [_StageQueue() for _ in range(stages - 1)]
        self._pending: deque[StagedJob] = deque()
        self._turn = threading.Lock()
        self._kept: StagedJob | None = None  # a job that the thread which waits for it does
        self._free = threading.Event()  # no such thread is at it
        self._free.set()
        self._threads = [
            threading.Thread(
                target=self._begin if not stage else self._go_on,
                args=(stage,),
                name=f"paceline {name} {stage}",
                daemon=True,
            )
            for stage in range(stages)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, job: StagedJob, *, soon: bool = False) -> StagedJob:
        """Append a job. `soon`: the caller waits for it before it does anything else."""
        if self.broken is not None:
            raise self.broken
        while self._pending and self._pending[0].ended:
            self._pending.popleft()
        with self._turn:
            self._give_away()
            if soon and not self._pending:
                self._kept = job
                job.take, job.give = partial(self._take, job), partial(self._give, job)
            else:
                self._jobs.put(job)
            self._pending.append(job)
        return job

    def _give_away(self) -> None:
        """Let the threads do a job that was kept for the thread that waits for it, and has not
        come.
        """
        if self._kept is not None:
            self._jobs.put(self._kept)
            self._kept = None

    def _give(self, job: StagedJob) -> None:
        """Let the threads do a job if it was kept: whoever started it does something else before
        it waits.
        """
        with self._turn:
            if self._kept is job:
                self._give_away()

    def _take(self, job: StagedJob) -> None:
        """Do a job here, stage by stage, if it was kept."""
        with self._turn:
            if self._kept is not job:
                return
            self._kept = None
            self._free.clear()
        try:
            self._attempt(job, self._go_through, job)
            self._attempt(job, lambda job: job.end(job.conclude()), job)
        finally:
            self._free.set()

    @staticmethod
    def _go_through(job: StagedJob) -> None:
        for flow in job.flows():
            result = None
            with contextlib.suppress(StopIteration):
                while True:
                    awaited = flow.steps.send(result)
                    result = None if awaited is None else awaited.wait()

    @property
    def idle(self) -> bool:
        """Whether every job has ended."""
        return all(job.ended for job in self._pending)

    def stop(self, error: BaseException) -> None:
        """Take no more jobs, and end those that have not ended with `error`."""
        self.broken = self.broken or error
        self._jobs.put(None)
        for job in self._pending:
            job.cancel(error)

    def finish(self, error: ViewChanged, let_go: Callable[[], None]) -> bool:
        """End with `error`; `let_go` of the groups is called once threads are out of them, or to
        get them out. False if over already.
        """
        if self._finished:
            return False
        self._finished = True
        idle = self.idle
        self.stop(error)
        if idle:
            self.join()
        let_go()
        self.join()
        return True

    def join(self, seconds: float = 1.0) -> None:
        """Wait at most `seconds` for the threads to end."""
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(seconds)

    # ---- the threads

    def _begin(self, stage: int) -> None:
        torch.set_num_threads(1)
        fine_timer()
        while (job := self._jobs.get()) is not None:
            self._free.wait()
            self._attempt(job, self._feed, job)
            self._pass(stage, _FlowInTransit(job, None, None))
        if self._belts:
            self._belts[0].put(None)

    def _feed(self, job: StagedJob) -> None:
        for flow in job.flows():
            self._step(0, _FlowInTransit(job, flow, None))

    def _go_on(self, stage: int) -> None:
        torch.set_num_threads(1)
        fine_timer()
        belt = self._belts[stage - 1]
        while (piece := belt.first()) is not None:
            if piece.flow is None:
                self._pass(stage, piece)
            else:
                self._attempt(piece.job, lambda piece: self._step(stage, piece), piece)
            belt.drop()
        if stage < len(self._belts):
            self._belts[stage].put(None)

    def _step(self, stage: int, piece: _FlowInTransit) -> None:
        """Wait for the Work that a flow has yielded, and run the flow to its next yield."""
        assert piece.flow is not None
        result = None if piece.awaited is None else piece.awaited.wait()
        try:
            awaited = piece.flow.steps.send(result)
        except StopIteration:
            return
        assert stage < len(self._belts), "a flow has more yields than the line has stages"
        self._belts[stage].put(piece._replace(awaited=awaited))

    def _pass(self, stage: int, end: _FlowInTransit) -> None:
        """Note that all flows of a job have left this stage."""
        if stage < len(self._belts):
            self._belts[stage].put(end)
        else:
            self._attempt(end.job, lambda job: job.end(job.conclude()), end.job)

    def _attempt(self, job: StagedJob, act: Callable[[Any], None], subject: Any) -> None:
        """Do a part of a job; its error is kept for the job's waiters: one that ends all as
        `spread` gives it, the same on all ranks.
        """
        if self.broken is not None:
            job.cancel(self.broken)
        if job.ended:
            return
        try:
            with as_begun(job.inference):
                act(subject)
        except (UsageError, RuntimeError, ValueError, TypeError) as error:
            job.cancel(error)
        except PacelineError as error:
            self.broken = self.broken or self._spread(error)
            job.cancel(self.broken)

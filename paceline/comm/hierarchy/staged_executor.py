"""Runs jobs in stages: each stage is a thread, and tensors pass through the stages in their order.

    stage 0   sum 0 | sum 1 | sum 2 | sum 3            a flow is a generator; it yields a Work at
    stage 1           net 0 | net 1 | net 2 | net 3    the end of a stage, and goes on in the next
    stage 2                   out 0 | out 1 | out 2    stage once that Work is done

Invariant: every rank has the same flows in the same order, and no two stages use the same group.
So each group sees its operations in the same order on all ranks, whatever the threads' speeds.
The queues between stages are bounded, in elements.

If a job is waited for right after its start, and no other is under way, the waiting thread takes
it through all stages itself: handing a small tensor from thread to thread takes longer than
summing it.
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

from paceline.comm.group_protocol import Work, needs_inference_mode, resume_mode
from paceline.comm.shm.waiting import set_fine_timer
from paceline.errors import DeadlineExceeded, PacelineError, UsageError, ViewChanged

AHEAD = 4 << 20  # elements that may wait between two stages
TICK = 0.1  # seconds between two looks of a wait at its time limit

Steps = Generator[Work[Any] | None, Any, Any]


class Flow(NamedTuple):
    """One chunk's way through the stages.

    steps: Generator that yields at each change of stage: a Work to wait for, or None.
    elements: Number of elements of the chunk.
    """

    steps: Steps
    elements: int


class StagedJob:
    """The Work of one request.

    Args:
        flows: Makes the flows of the job. It is iterated in the first stage, one flow at a time.
        conclude: Called in the last stage after all flows have ended. It gives the result.
        what: What errors call the job.
        deadline: Seconds that a wait may take by default.
        written: Tensors that the job writes to.
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
        self.inference = needs_inference_mode(*written)
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        # Set by the executor while the job is held back for the thread that waits for it:
        self.run_here: Callable[[], None] = lambda: None  # runs it in the calling thread
        self.hand_to_threads: Callable[[], None] = lambda: None  # hands it to the stage threads

    def set_result(self, result: Any) -> None:
        """End the job with its result."""
        if not self._ended.is_set():
            self._result = result
            self._ended.set()

    def cancel(self, error: BaseException) -> None:
        """End the job with an error. What is left of it is not done."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def wait(self, timeout: float | None = None) -> Any:
        # A wait with a time limit can't run the job itself, as it could not stop in the middle.
        if timeout is None:
            self.run_here()
        else:
            self.hand_to_threads()
        seconds = self.deadline if timeout is None else timeout
        limit = time.monotonic() + seconds
        while not self._ended.wait(min(TICK, max(0.0, limit - time.monotonic()))):
            if time.monotonic() > limit:
                raise DeadlineExceeded(f"{self.what} has not ended within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        self.hand_to_threads()
        return self._ended.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended. Unlike `done`, it never hands the job to the threads."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        return self._error if self.done() else None


class _FlowInTransit(NamedTuple):
    """A flow between two stages, and the Work it waits for. No flow: all flows of the job ended."""

    job: StagedJob
    flow: Flow | None
    awaited: Work[Any] | None

    @property
    def elements(self) -> int:
        return 0 if self.flow is None else self.flow.elements


class _StageQueue:
    """The queue between two stages: at most AHEAD elements, or one piece that is larger."""

    def __init__(self) -> None:
        self._pieces = deque[_FlowInTransit | None]()
        self._elements = 0
        self._changed = threading.Condition()

    def put(self, piece: _FlowInTransit | None) -> None:
        """Append a piece, once there is room. None ends the queue."""
        elements = 0 if piece is None else piece.elements
        with self._changed:
            # A piece larger than AHEAD goes in alone, else it would wait for ever.
            self._changed.wait_for(
                lambda: not elements or not self._elements or self._elements + elements <= AHEAD
            )
            self._elements += elements
            self._pieces.append(piece)
            self._changed.notify_all()

    def wait_for_first(self) -> _FlowInTransit | None:
        """Wait for the first piece, and return it. It stays in the queue until `drop_first`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pieces))
            return self._pieces[0]

    def drop_first(self) -> None:
        """Remove the first piece. Only now is there room for another."""
        with self._changed:
            piece = self._pieces.popleft()
            self._elements -= 0 if piece is None else piece.elements
            self._changed.notify_all()


class StagedExecutor:
    """Passes jobs through threads, one for each stage.

    A job is in one of three places: held back in `_held` for the thread that waits for it, with
    that thread (`_caller_is_done` is then clear), or in `_jobs` and the queues between stages.
    Jobs end in the order of their start: the first stage waits for `_caller_is_done` before it
    begins the next one.

    Args:
        name: Part of the threads' names.
        stages: Number of stages.
        spread: Called with an error that ends everything. It tells other ranks, and returns the
            error that jobs end with, the same on all ranks.
    """

    def __init__(
        self, name: str, stages: int, spread: Callable[[PacelineError], BaseException]
    ) -> None:
        self.broken: BaseException | None = None  # the error that every later job gets
        self._finished = False
        self._spread = spread
        self._jobs: queue.SimpleQueue[StagedJob | None] = queue.SimpleQueue()
        self._queues = [_StageQueue() for _ in range(stages - 1)]
        self._pending: deque[StagedJob] = deque()  # jobs that have not ended, in their order
        self._order_lock = threading.Lock()  # guards `_held` and the order of `_jobs`
        self._held: StagedJob | None = None
        self._caller_is_done = threading.Event()
        self._caller_is_done.set()
        self._threads = [
            threading.Thread(
                target=self._run_first_stage if not stage else self._run_later_stage,
                args=(stage,),
                name=f"paceline {name} {stage}",
                daemon=True,
            )
            for stage in range(stages)
        ]
        for thread in self._threads:
            thread.start()

    def start_job(self, job: StagedJob, *, soon: bool = False) -> StagedJob:
        """Append a job. `soon`: the caller waits for it before it does anything else.

        Raises the error that has ended the executor, if one has.
        """
        if self.broken is not None:
            raise self.broken
        # Jobs end in their order, so the ended ones are in front.
        while self._pending and self._pending[0].has_ended:
            self._pending.popleft()
        with self._order_lock:
            # A job that is held back comes first: all ranks have the same order of jobs.
            self._hand_held_to_threads()
            if soon and not self._pending:
                self._held = job
                job.run_here, job.hand_to_threads = (
                    partial(self._run_held, job),
                    partial(self._hand_to_threads, job),
                )
            else:
                self._jobs.put(job)
            self._pending.append(job)
        return job

    def _hand_held_to_threads(self) -> None:
        """Hand a job that is held back to the threads."""
        if self._held is not None:
            self._jobs.put(self._held)
            self._held = None

    def _hand_to_threads(self, job: StagedJob) -> None:
        """Hand `job` to the threads if it is held back: its caller does something else first."""
        with self._order_lock:
            if self._held is job:
                self._hand_held_to_threads()

    def _run_held(self, job: StagedJob) -> None:
        """Run `job` in this thread, through all stages, if it is held back."""
        with self._order_lock:
            if self._held is not job:
                return
            self._held = None
            self._caller_is_done.clear()
        try:
            self._attempt_part(job, self._run_all_stages, job)
            self._attempt_part(job, lambda job: job.set_result(job.conclude()), job)
        # Whatever happens, the threads may go on.
        finally:
            self._caller_is_done.set()

    @staticmethod
    def _run_all_stages(job: StagedJob) -> None:
        for flow in job.flows():
            # Run the generator to its end; each Work is waited for at once.
            result = None
            with contextlib.suppress(StopIteration):
                while True:
                    awaited = flow.steps.send(result)
                    result = None if awaited is None else awaited.wait()

    @property
    def is_idle(self) -> bool:
        """Whether every job has ended."""
        return all(job.has_ended for job in self._pending)

    def stop(self, error: BaseException) -> None:
        """Take no more jobs, and end all pending ones with `error`."""
        self.broken = self.broken or error
        self._jobs.put(None)
        for job in self._pending:
            job.cancel(error)

    def finish(self, error: ViewChanged, let_go: Callable[[], None]) -> bool:
        """End the executor with `error`. Returns False if it had ended before.

        `let_go` closes or aborts the groups. If all jobs have ended, it is called after the threads
        have left the groups. If not, it is called at once, to get the threads out of them.
        """
        if self._finished:
            return False
        self._finished = True
        # Before `stop`, which ends all jobs.
        idle = self.is_idle
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

    # ---- in the threads

    def _run_first_stage(self, stage: int) -> None:
        torch.set_num_threads(1)  # of this thread: several would take cores from the workers
        set_fine_timer()
        while (job := self._jobs.get()) is not None:
            self._caller_is_done.wait()  # a job that its caller runs comes first
            self._attempt_part(job, self._feed_flows, job)
            self._pass_end(stage, _FlowInTransit(job, None, None))
        if self._queues:
            self._queues[0].put(None)

    def _feed_flows(self, job: StagedJob) -> None:
        for flow in job.flows():
            self._advance_flow(0, _FlowInTransit(job, flow, None))

    def _run_later_stage(self, stage: int) -> None:
        torch.set_num_threads(1)
        set_fine_timer()
        incoming = self._queues[stage - 1]
        # A piece counts until it is dealt with, so that not more than AHEAD elements are in memory.
        while (piece := incoming.wait_for_first()) is not None:
            if piece.flow is None:
                self._pass_end(stage, piece)
            else:
                self._attempt_part(piece.job, lambda piece: self._advance_flow(stage, piece), piece)
            incoming.drop_first()
        if stage < len(self._queues):
            self._queues[stage].put(None)

    def _advance_flow(self, stage: int, piece: _FlowInTransit) -> None:
        """Wait for the Work that a flow has yielded, then run the flow to its next yield."""
        assert piece.flow is not None
        result = None if piece.awaited is None else piece.awaited.wait()
        try:
            awaited = piece.flow.steps.send(result)
        except StopIteration:
            return
        assert stage < len(self._queues), "a flow has more yields than the line has stages"
        self._queues[stage].put(piece._replace(awaited=awaited))

    def _pass_end(self, stage: int, end: _FlowInTransit) -> None:
        """Note that all flows of a job have left this stage; after the last stage, the job ends."""
        if stage < len(self._queues):
            self._queues[stage].put(end)
        else:
            self._attempt_part(end.job, lambda job: job.set_result(job.conclude()), end.job)

    def _attempt_part(self, job: StagedJob, act: Callable[[Any], None], subject: Any) -> None:
        """Run `act(subject)` as a part of a job. The job ends with its error, if there is one.

        Errors of torch and of the arguments end this job alone. Errors of a group end everything,
        with the same error on all ranks.
        """
        # Later parts of a job that has failed are skipped; its flows stay unfinished.
        if self.broken is not None:
            job.cancel(self.broken)
        if job.has_ended:
            return
        try:
            with resume_mode(job.inference):
                act(subject)
        except (UsageError, RuntimeError, ValueError, TypeError) as error:
            job.cancel(error)
        except PacelineError as error:
            self.broken = self.broken or self._spread(error)
            job.cancel(self.broken)

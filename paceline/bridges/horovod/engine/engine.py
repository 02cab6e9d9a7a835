"""The thread that agrees on operations with the other ranks, and runs them.

    engine = OperationEngine(group, deadline=120.0)
    handle = engine.submit("allreduce", [x], name="loss", op="average")       from any thread
    (mean,) = handle.wait().tensors
    engine.shut_down()

Invariants, all under `_lock`: an operation is in `_operations` from `submit` until its handle has
ended; `_fresh` holds those that no cycle has told the other ranks about yet. Once `_ended_by` is
set, both are empty, and nothing can be submitted. Only the thread uses the groups.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.bridges.horovod.common.exceptions import HorovodInternalError
from paceline.bridges.horovod.engine.controller import Agreed, Controller, CycleMessage
from paceline.bridges.horovod.engine.execution import (
    OperationResult,
    ReadyOperation,
    fuse_neighbours,
    run_batch,
)
from paceline.bridges.horovod.engine.requests import SET_KINDS, OperationKey, OperationRequest
from paceline.bridges.horovod.engine.timeline import OperationTimeline
from paceline.comm.group_protocol import Group
from paceline.errors import PacelineError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01  # seconds between two cycles
_WARNING_SECONDS = 60.0  # as Horovod's HOROVOD_STALL_CHECK_TIME_SECONDS has by default
_SHUTDOWN_TEXT = (
    "Horovod has been shut down: {} called shutdown, or has ended. An operation that the other "
    "ranks still wait for, or submit after that, can't be completed"
)


class OperationHandle:
    """An operation under way. It ends with a result or with an error."""

    def __init__(self, finish: Callable[[OperationResult], OperationResult]) -> None:
        self._finish = finish
        self._ended = threading.Event()
        self._result: OperationResult | None = None
        self._error: str | None = None

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._ended.is_set()

    def wait(self) -> OperationResult:
        """Wait for the result. The engine ends the wait at its deadline.

        Raises:
            HorovodInternalError: The operation has failed, on all ranks.
        """
        self._ended.wait()
        if self._error is not None:
            raise HorovodInternalError(self._error)
        assert self._result is not None
        return self._result

    def succeed(self, result: OperationResult) -> None:
        """End with a result."""
        self._result = self._finish(result)
        self._ended.set()

    def fail(self, error: str) -> None:
        """End with an error."""
        self._error = error
        self._ended.set()


@dataclass
class _Operation:
    request: OperationRequest
    tensors: list[Tensor]
    handle: OperationHandle
    submitted: float = field(default_factory=time.monotonic)
    warned: bool = False


class OperationEngine:
    """Named operations in any order and from any thread, on CPU tensors.

    Args:
        group: All ranks. The engine closes it.
        deadline: Seconds that an operation waits for ranks that lack it.
        warn: Shows a warning.
    """

    def __init__(
        self, group: Group, *, deadline: float, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self.rank, self.size = group.rank, group.size
        self.timeline: OperationTimeline | None = None
        self._controller = Controller(group.size, group.rank)
        self._groups: dict[int, Group | None] = {0: group}
        self._deadline, self._warn = deadline, warn
        self._lock = threading.Condition()
        self._operations: dict[OperationKey, _Operation] = {}
        self._fresh: list[OperationRequest] = []
        self._counters: defaultdict[tuple[int, str], itertools.count[int]]
        self._counters = defaultdict(itertools.count)
        self._shutting_down = False
        self._ended_by: str | None = None
        self._progress = time.monotonic()
        self._thread = threading.Thread(
            target=self._run_cycles, name="paceline horovod", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether nothing can be submitted any more."""
        return self._ended_by is not None

    @property
    def cache_hits(self) -> int:
        """Number of operations of this rank that were announced by a number alone."""
        return self._controller.cache_hits

    @property
    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Ranks of each process set, by its id."""
        return dict(self._controller.process_sets)

    def submit(
        self,
        kind: str,
        tensors: Sequence[Tensor] = (),
        *,
        name: str | None = None,
        process_set: int = 0,
        op: str = "",
        root: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        numbers: Sequence[int] = (),
        finish: Callable[[OperationResult], OperationResult] = lambda result: result,
    ) -> OperationHandle:
        """Submit an operation. It runs when all ranks of its process set have submitted it.

        Args:
            kind: See `OperationRequest`; so for `op`, `root`, `prescale`, `postscale`, `numbers`.
            tensors: Tensors on the CPU. They must not change until the operation has ended.
            name: Name by which ranks find each other. Default: "noname" and a number, so that
                ranks submit operations without names in the same order.
            process_set: Id of the process set. Default: 0, all ranks.
            finish: Called with the result, in the thread of the engine. Default: gives it back.

        Raises:
            ValueError: An operation of this name is under way.
            HorovodInternalError: The engine has ended.
        """
        with self._lock:
            if name is None:
                name = f"noname.{next(self._counters[process_set, kind])}"
            key = OperationKey(process_set, kind, name)
            if self._ended_by is not None:
                raise HorovodInternalError(f"{key}: {self._ended_by}")
            if key in self._operations:
                raise ValueError(
                    f"{key}: a tensor with the same name as another tensor that is currently being "
                    "processed. If you want to request another tensor, use a different name"
                )
            request = OperationRequest(
                key,
                tuple(str(x.dtype).removeprefix("torch.") for x in tensors),
                tuple(tuple(x.shape) for x in tensors),
                op,
                root,
                float(prescale),
                float(postscale),
                tuple(map(int, numbers)),
            )
            handle = OperationHandle(finish)
            self._operations[key] = _Operation(request, [*tensors], handle)
            self._fresh.append(request)
            self._lock.notify()
        return handle

    def write_timeline(self, timeline: OperationTimeline | None) -> None:
        """Write what is done from now on; None ends the file."""
        previous, self.timeline = self.timeline, timeline
        if previous is not None:
            previous.close()

    def shut_down(self) -> None:
        """End the engines of all ranks, and the thread of this one. May be called twice."""
        with self._lock:
            self._shutting_down = True
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self.timeline is not None:
            self.timeline.close()

    def _run_cycles(self) -> None:
        reason, pause = "", _SHORTEST_PAUSE
        try:
            while not reason:
                with self._lock:
                    if not (self._fresh or self._shutting_down):
                        self._lock.wait(pause)
                busy, reason = self._run_cycle()
                pause = _SHORTEST_PAUSE if busy else min(2 * pause, _LONGEST_PAUSE)
        except PacelineError as error:
            reason = f"{type(error).__name__}: {error}"
        except BaseException as error:
            reason = f"the engine has failed: {error!r}"
            raise
        finally:
            self._end(reason)

    def _run_cycle(self) -> tuple[bool, str]:
        """Run one cycle. Return whether anything is pending, and why the engine ends: "" if not."""
        group = self._groups[0]
        assert group is not None
        with self._lock:
            message = CycleMessage(self._fresh, self._find_overdue(), self._shutting_down)
            self._fresh = []
        if self.timeline is not None:
            self.timeline.write_cycle()
        decisions = self._controller.decide_cycle(
            group.gather_bytes(self._controller.encode_message(message))
        )
        self._run_decisions(decisions)
        if self._controller.ending:
            ranks = ", ".join(map(str, self._controller.ending))
            return True, _SHUTDOWN_TEXT.format(f"rank {ranks}")
        return bool(decisions or self._controller.pending), ""

    def _run_decisions(self, decisions: Sequence[Agreed]) -> None:
        ready: list[ReadyOperation] = []
        for decision in decisions:
            self._progress = time.monotonic()
            if decision.error:
                self._fail_operation(decision)
            elif decision.key.kind in SET_KINDS:
                self._change_groups(decision)
                self._end_operation(decision.key, OperationResult([]), self._progress)
            elif decision.key.kind == "join":
                # ranks that joined early have submitted fewer operations without names
                self._counters.clear()
                last = torch.tensor(decision.last_joined, dtype=torch.int32)
                self._end_operation(decision.key, OperationResult([last]), self._progress)
            elif self.rank in decision.ranks:
                ready.append(ReadyOperation(decision, self._find_tensors(decision)))
        for batch in fuse_neighbours(ready):
            began = time.monotonic()
            group = self._groups[batch[0].request.key.process_set]
            assert group is not None
            with torch.no_grad():
                results = run_batch(group, batch)
                for operation, result in zip(batch, results, strict=True):
                    self._end_operation(operation.agreed.key, result, began)

    def _find_tensors(self, decision: Agreed) -> list[Tensor]:
        """Find this rank's tensors; zeros if it has joined."""
        own = self._operations.get(decision.key)
        if own is not None:
            return own.tensors
        request = next(iter(decision.requests.values()))
        return [
            torch.zeros(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
        ]

    def _change_groups(self, decision: Agreed) -> None:
        """Make or close the group of a process set. Collective."""
        everyone = self._groups[0]
        assert everyone is not None
        numbers = next(iter(decision.requests.values())).numbers
        if decision.key.kind == "add_process_set":
            number = next(
                key for key, ranks in self._controller.process_sets.items() if ranks == numbers
            )
            self._groups[number] = everyone.make_subgroup(numbers)
        elif (group := self._groups.pop(numbers[0], None)) is not None:
            group.close()

    def _end_operation(self, key: OperationKey, result: OperationResult, began: float) -> None:
        with self._lock:
            operation = self._operations.pop(key, None)
        if operation is not None:
            if self.timeline is not None:
                self.timeline.write_operation(key, operation.submitted, began, time.monotonic())
            operation.handle.succeed(result)

    def _fail_operation(self, decision: Agreed) -> None:
        with self._lock:
            operation = self._operations.pop(decision.key, None)
        if operation is not None:
            operation.handle.fail(decision.error)

    def _find_overdue(self) -> list[OperationKey]:
        """Find operations that other ranks lack for too long, and warn of slow ones."""
        overdue = []
        for key, operation in self._operations.items():
            if key not in self._controller.pending:
                continue  # no other rank knows of it yet
            # a joined rank waits for others that still work: it waits for their next operation
            since = max(operation.submitted, self._progress if key.kind == "join" else 0.0)
            waited = time.monotonic() - since
            if waited > self._deadline:
                overdue.append(key)
            elif waited > _WARNING_SECONDS and not operation.warned:
                operation.warned = True
                missing = self._controller.describe_missing(key)
                self._warn(f"{key} waits for {waited:.0f} s: {missing}")
        return overdue

    def _end(self, reason: str) -> None:
        """Fail what is still under way, and close the groups."""
        with self._lock:
            self._ended_by = reason
            operations, self._operations, self._fresh = [*self._operations.values()], {}, []
        for operation in operations:
            operation.handle.fail(f"{operation.request.key}: {reason}")
        for group in reversed([*self._groups.values()]):
            if group is not None:
                group.close()

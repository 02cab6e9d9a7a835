"""The connections of a group, Gloo and small messages beside it, and the waits on them.

    data      Gloo: collectives of large tensors
    control   messages of our own (`control`): comparisons, agreements, tensors from rank to rank

A wait ends with the result, or with an error of ours that names ranks. A wait of more than a second
is published in the store. It ends early if a connection has ended, or if ranks turn out to wait for
each other; else at the deadline.
"""

from __future__ import annotations

import copy
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from paceline import callsite
from paceline.at_exit import call_at_exit
from paceline.cluster.store import Store, wrap_store
from paceline.comm.cancellation import CancelScope
from paceline.comm.group_protocol import Op, needs_inference_mode, resume_mode
from paceline.comm.native import sockets, waitposts
from paceline.comm.native.control import SMALL, ControlNetwork
from paceline.comm.native.schedule_steps import RankSteps, compile_steps
from paceline.comm.native.waitposts import GroupEnd
from paceline.comm.p2p.connection import SILENCE, ListeningAddress
from paceline.comm.schedule import Schedule
from paceline.comm.waitgraph import GRACE, RankWait, describe_late, find_missing, make_stuck_error
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, ViewChanged, WorkerLost

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import Store as TorchStore

TICK = 0.1  # seconds for which a wait may not notice a signal
FAREWELL = 0.08  # seconds that pending operations get to end once their connections are cut
CHANNELS, MAIL = {"calls": 1, "agree": 2}, 3  # numbers of the channels of control messages
SMALL_MESSAGE = SMALL  # bytes of a tensor that is summed by messages; Gloo sums larger ones
MESSAGES = 16  # first tag of messages between two ranks


class TorchWait(Protocol):
    """An operation that ends at some time."""

    def wait_within(self, seconds: float) -> bool:
        """Wait at most `seconds`. Returns whether it has ended; `RuntimeError` if it has failed."""
        ...

    def is_ready(self) -> bool:
        """Whether `wait_within` would return or raise at once."""
        ...


class GlooWait:
    """A collective of Gloo, whose own wait takes a time limit."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait_within(self, seconds: float) -> bool:
        try:
            # Torch counts milliseconds, and takes 0 to mean no limit.
            self._work.wait(timedelta(seconds=max(seconds, 0.002)))
        except RuntimeError:
            # The same error for a failure and for the limit: tell them apart.
            if not self._work.is_completed():
                return False
            # Raises if it has failed, not if it has just ended.
            self._work.wait(timedelta(seconds=1))
        return True

    def is_ready(self) -> bool:
        return bool(self._work.is_completed())


class _Ended:
    """An operation that has nothing to do."""

    def wait_within(self, seconds: float) -> bool:
        return True

    def is_ready(self) -> bool:
        return True


class StreamWait:
    """An operation in a CUDA stream. A wait orders the current stream behind it, and returns."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait_within(self, seconds: float) -> bool:
        self._work.wait()
        return True

    def is_ready(self) -> bool:
        return bool(self._work.is_completed())


@contextmanager
def _explaining_store_loss(size: int) -> Iterator[None]:
    """Explain the loss of the store: a group was being made."""
    try:
        yield
    except WorkerLost as error:
        raise WorkerLost(
            f"the store is gone while a group of {size} ranks is made ({error})"
        ) from error


class GlooTransport:
    """The connections of one rank with the other ranks of a group. Making them is collective.

    `made` counts the calls on each channel, and `broken` is the error that every later call raises;
    it is set once. `waited` counts the seconds spent in `gather_table`.

    Args:
        store: A part of the store for this group.
        rank: This rank.
        names: Rank of each member among all workers, for messages and errors.
        address: Address of this worker to listen at.
        deadline: Seconds that a wait may take.
        cancel_scope: Ends waits when it trips. Default: none.
    """

    def __init__(
        self,
        store: TorchStore | Store,
        rank: int,
        names: Sequence[int],
        *,
        address: str,
        deadline: float,
        cancel_scope: CancelScope | None = None,
    ) -> None:
        size = len(names)
        self.cancel_scope = CancelScope() if cancel_scope is None else cancel_scope
        self.names = tuple(names)
        self.rank, self.size, self.deadline = rank, size, deadline
        self.waited = 0.0
        self.broken: PacelineError | None = None
        self.made: dict[str, int] = {}
        self._late_error: DeadlineExceeded | None = None
        self._pending: deque[TorchWait] = deque()  # operations that may go on, oldest first
        self._closed = size == 1
        self.data: Any = None
        if size == 1:
            return
        self._control, sealed = ControlNetwork(address, rank, names), wrap_store(store)
        # A thread that is inside torch while Python ends takes the process down with it.
        self._unregister = call_at_exit(self.close)
        try:
            self._connect(sealed, address)
        except BaseException:
            self.close()  # after a loss groups are made again and again, and may fail each time
            raise

    def _connect(self, sealed: Store, address: str) -> None:
        rank, size, deadline = self.rank, self.size, self.deadline
        self._group_sockets = sockets.GroupSockets(address, 1, [self._control.listening.port])
        with _explaining_store_loss(size):
            self._waitposts = waitposts.Waitposts(sealed.open_substore("lookout"), rank, size)
            others = self._group_sockets.announce_listeners(
                sealed, rank, size, deadline, self._control.listening
            )
        self.cancel_scope.register_end(self.interrupt)
        self._control.connect_ranks(
            sealed, [ListeningAddress(*other) for other in others], deadline, self._raise_if_broken
        )
        self.data = sockets.connect_gloo(
            self._group_sockets.devices[0], sealed.open_substore("data").torch, rank, size, deadline
        )
        with _explaining_store_loss(size):
            self._group_sockets.trace_connections(sealed, deadline)

    # ---- operations

    def count_call(self, channel: str) -> int:
        """Count a call on `channel`, and return its number. Raises if the group is broken."""
        self._raise_if_broken()
        call_number = self.made.get(channel, 0)
        self.made[channel] = call_number + 1
        return call_number

    def _raise_if_broken(self) -> None:
        if self.broken is not None:
            raise copy.copy(self.broken)

    def track_wait(self, awaited: TorchWait) -> TorchWait:
        """Remember an operation until it has ended, for `close`."""
        while self._pending and self._pending[0].is_ready():
            self._pending.popleft()
        self._pending.append(awaited)
        return awaited

    def start_messages(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int
    ) -> TorchWait:
        """Begin to send and receive contiguous CPU tensors.

        None of them to or from this rank itself. Tensors of at most SMALL_MESSAGE bytes may be
        written to again when this returns, larger ones when it has ended.
        """
        if not (sends or recvs):
            return _Ended()
        exchange = self._control.start_exchange(
            MAIL,
            tag,
            [(to, _view_memory(x)) for to, x in sends],
            [source for source, _ in recvs],
            [_view_memory(x) for _, x in recvs],
            owners=[x for _, x in (*sends, *recvs)],
        )
        return self.track_wait(exchange)

    def plan_reduction(self, plan: Schedule, numel: int) -> RankSteps:
        """Compile this rank's steps of a schedule, for a tensor of `numel` elements."""
        if self.size == 1:
            return compile_steps(plan, self.rank, numel, ())
        return self._control.plan_reduction(plan, numel)

    def start_reduction(self, steps: RankSteps, tensor: Tensor, op: Op) -> TorchWait:
        """Begin to reduce a contiguous CPU tensor in place, by the steps of a schedule."""
        if self.size == 1:
            return _Ended()
        return self.track_wait(self._control.start_reduction(steps, tensor, op))

    def gather_table(self, channel: str, payload: bytes, text: str) -> list[bytes]:
        """Gather every rank's payload, in rank order, by control messages."""
        if self.size == 1:
            return [payload]
        start = time.monotonic()
        call_number = self.count_call(channel)
        exchange = self._control.gather_payloads(CHANNELS[channel], call_number, payload)
        self.wait_until_ended(self.track_wait(exchange), (channel, call_number, text), None)
        self.waited += time.monotonic() - start
        return [*exchange.answers[: self.rank], payload, *exchange.answers[self.rank :]]

    # ---- waiting

    def wait_until_ended(
        self, awaited: TorchWait, wait: tuple[str, int, str], timeout: float | None
    ) -> None:
        """Wait until `awaited` has ended without an error.

        Args:
            awaited: The operation.
            wait: Its channel, the number of its call there, and the call as text.
            timeout: Seconds to wait. None: the deadline.
        """
        start = time.monotonic()
        limit = start + (self.deadline if timeout is None else timeout)
        grace = start + min(GRACE, self.deadline / 4)
        watched, place = False, ""
        try:
            # In short turns, so that signals are noticed.
            while not self._has_ended(
                awaited, max(0.0, min(TICK, limit - time.monotonic())), wait[2]
            ):
                now = time.monotonic()
                # From here on, tell the others about this wait, and look at theirs.
                if now >= grace:
                    place = place if watched else callsite.find_user_line()
                    watched = True
                    self._waitposts.post_wait(
                        RankWait(wait[0], wait[1], wait[2] + place, dict(self.made))
                    )
                    self._check_other_ranks(wait[2])
                if now >= limit:
                    raise self._make_late_error(wait, now - start)
        finally:
            if watched:
                self._waitposts.clear_wait()

    def _has_ended(self, awaited: TorchWait, seconds: float, text: str) -> bool:
        if self.broken is not None and not awaited.is_ready():
            raise copy.copy(self.broken)
        try:
            return awaited.wait_within(seconds)
        except RuntimeError as error:
            raise self.handle_failure(text, error) from error

    def _check_other_ranks(self, text: str) -> None:
        """Raise if the wait can't end any more."""
        if self._waitposts.stuck:
            raise self.end_everywhere(make_stuck_error(self._waitposts.stuck, self.names))
        if self._group_sockets.find_severed_ranks():
            raise self.handle_failure(text, None)

    def _make_late_error(self, wait: tuple[str, int, str], seconds: float) -> DeadlineExceeded:
        others = dict(self._waitposts.others)
        absent = {
            self.names[r]: others.get(r)
            for r in find_missing(RankWait(*wait, {}), others, self.rank, self.size)
        }
        self._late_error = DeadlineExceeded(describe_late(wait[2], seconds, absent), tuple(absent))
        return self._late_error

    # ---- ends

    def handle_failure(self, text: str, cause: RuntimeError | None) -> PacelineError:
        """Handle a failed operation: find lost ranks, end everything, return the error to raise."""
        if self.broken is None:
            ranks = tuple(self.names[rank] for rank in self._group_sockets.find_severed_ranks())
            who = (
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} "
                f"{'are' if len(ranks) > 1 else 'is'} gone"
            )
            why = f" ({str(cause).splitlines()[0]})" if cause is not None and not ranks else ""
            self.end_everywhere(
                WorkerLost(
                    (
                        f"{who if ranks else 'a worker is gone'}{why}, found by rank "
                        f"{self.names[self.rank]} in {text}"
                    ),
                    ranks,
                )
            )
        assert self.broken is not None
        return copy.copy(self.broken)

    def end_everywhere(self, error: PacelineError, seconds: float = SILENCE) -> PacelineError:
        """End every operation under way on all ranks, and return the error that all of them raise.

        It is `error`, or the error of the rank that was first to publish one, if that can be
        learned within `seconds`.
        """
        if self.broken is None:
            if self.size > 1:
                ranks = (
                    error.missing
                    if isinstance(error, DeadlineExceeded)
                    else getattr(error, "ranks", ())
                )
                verdict = GroupEnd(type(error).__name__, str(error), ranks)
                error = _make_error(self._waitposts.decide_end(verdict, seconds))
            self.broken = error
            # Gloo has no other way to end an operation than the loss of its connections.
            if self.size > 1:
                self._group_sockets.cut_connections()
        return copy.copy(self.broken)

    def interrupt(self, error: PacelineError) -> None:
        """End every operation under way with `error`. Any thread may call it.

        Others are not told, but see their connections end.
        """
        if self.broken is None and not self._closed:
            self.broken = error
            self._group_sockets.cut_connections()

    def close(self) -> None:
        """Free threads and sockets, whatever state the others are in."""
        if self._closed:
            return
        self._closed = True
        self._unregister()
        if self.data is None:
            self._control.close()
            return  # it was never complete
        if any(not awaited.is_ready() for awaited in self._pending) or self.broken is not None:
            me = self.names[self.rank]
            self.end_everywhere(
                self._late_error
                or WorkerLost(f"rank {me} has left the group in the middle of an operation", (me,)),
                seconds=0.2,
            )
            end = time.monotonic() + FAREWELL
            while (
                any(not awaited.is_ready() for awaited in self._pending) and time.monotonic() < end
            ):
                time.sleep(0.001)
        self.broken = ViewChanged("this group has been closed")
        self._waitposts.close()
        self._control.close()
        unfinished = [awaited for awaited in self._pending if not awaited.is_ready()]
        if unfinished:
            # Gloo may lose the wake-up of an operation. Its group can't be deleted before all
            # operations have ended, so a thread holds it until then.
            parked = (unfinished, self.data)
            threading.Thread(
                target=_hold_until_ended, args=(parked,), name="paceline reaper", daemon=True
            ).start()
        self._pending.clear()
        self.data = None
        self._group_sockets.devices.clear()


def _make_error(verdict: GroupEnd) -> PacelineError:
    if verdict.kind == "WorkerLost":
        return WorkerLost(verdict.text, verdict.ranks)
    if verdict.kind == "DeadlineExceeded":
        return DeadlineExceeded(verdict.text, verdict.ranks)
    return Mismatch(verdict.text) if verdict.kind == "Mismatch" else ViewChanged(verdict.text)


def _hold_until_ended(parked: tuple[list[TorchWait], Any]) -> None:
    while not all(awaited.is_ready() for awaited in parked[0]):
        time.sleep(TICK)


def _view_memory(x: Tensor) -> memoryview:
    """View the memory of a contiguous tensor, which must stay alive.

    Through ctypes, as torch does not resize a tensor any more once numpy looks into it.
    """
    return memoryview(
        (ctypes.c_ubyte * (x.numel() * x.element_size())).from_address(x.data_ptr())
    ).cast("B")


def _view_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes: Gloo doesn't know all dtypes."""
    return x.detach().view(-1).view(torch.uint8)


class TransportWork:
    """The Work of one operation of a transport.

    Args:
        fabric: The transport.
        awaited: The operation.
        wait: Its channel, the number of its call there, and the call as text.
        finish: Called once after the operation has ended. It gives the result.
        written: Tensors that `finish` or the operation writes to.
    """

    def __init__(
        self,
        fabric: GlooTransport,
        awaited: TorchWait,
        wait: tuple[str, int, str],
        finish: Callable[[], Any],
        written: Sequence[Tensor] = (),
    ) -> None:
        self._transport, self._awaited, self._wait, self._finish = fabric, awaited, wait, finish
        self._inference = needs_inference_mode(*written)
        self._ended = False
        self._result: Any = None
        self._error: PacelineError | None = None

    def wait(self, timeout: float | None = None) -> Any:
        if not self._ended:
            try:
                self._transport.wait_until_ended(self._awaited, self._wait, timeout)
            except DeadlineExceeded:
                raise  # only this wait has ended, not the operation
            except PacelineError as error:
                self._error = error
            else:
                with resume_mode(self._inference):
                    self._result = self._finish()
            self._ended = True
        if self._error is not None:
            raise copy.copy(self._error)
        return self._result

    def done(self) -> bool:
        return self._ended or self._transport.broken is not None or self._awaited.is_ready()

    def exception(self) -> BaseException | None:
        if not self._ended and self.done():
            try:
                self.wait()
            except PacelineError as error:
                return error
        return self._error

"""A Gloo group, a network of small messages, and the waits on them: a wait ends with the result, or
with an error of ours that names ranks.

data      Gloo: collectives, and messages with tags of their own    a wait of more than a second is
                                                                    told to the others through the
control   small messages: what is about to be called, agreements    store; it ends when a connection
                                                                    is severed, when ranks turn out
          (`control`)                                               to wait for each other, or at
                                                                    the deadline
"""

from __future__ import annotations

import copy
import ctypes
import queue
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
from paceline.at_exit import at_exit
from paceline.cluster.store import Store, over
from paceline.comm.cancellation import CancelScope
from paceline.comm.group import as_begun, begun
from paceline.comm.native import sockets, waitposts
from paceline.comm.native.control import ControlNetwork
from paceline.comm.native.waitposts import GroupEnd
from paceline.comm.p2p.connection import SILENCE, Listening
from paceline.comm.waitgraph import GRACE, RankWait, describe, late, missing
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, ViewChanged, WorkerLost

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import Store as TorchStore

TICK = 0.1  # seconds that a wait may not hear signals
FAREWELL = 0.08  # seconds that pending operations are given to end once their connections are cut
CHANNELS, MAIL = {"calls": 1, "agree": 2}, 3  # of control messages
# bytes of a tensor that goes by control messages: more is better moved by Gloo's threads
SMALL_MESSAGE = 512 << 10
MESSAGES = 16  # tags of messages between ranks begin here


class TorchWait(Protocol):
    """An operation of torch's that ends at some time."""

    def within(self, seconds: float) -> bool:
        """Wait at most so long; whether the operation has ended well.

        RuntimeError when it has failed.
        """
        ...

    def now(self) -> bool:
        """Whether `within` would answer at once."""
        ...


class GlooWait:
    """A Gloo collective: its own wait leaves in time."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def within(self, seconds: float) -> bool:
        try:
            # torch counts milliseconds, and takes 0 for no limit
            self._work.wait(timedelta(seconds=max(seconds, 0.002)))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            # raises if it has failed, not if it ended just now
            self._work.wait(timedelta(seconds=1))
        return True

    def now(self) -> bool:
        return bool(self._work.is_completed())


class StreamWait:
    """An operation in a CUDA stream: waiting orders the current stream behind it, and never
    stops the host.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def within(self, seconds: float) -> bool:
        self._work.wait()
        return True

    def now(self) -> bool:
        return bool(self._work.is_completed())


class MessagesWait:
    """Messages under way.

    Torch's wait for a message can't be left without breaking the connection, so a thread makes it.
    """

    def __init__(self, works: list[Any], tensors: list[Tensor]) -> None:
        self.works, self._tensors = works, tensors
        self.ended = threading.Event()
        self.error: RuntimeError | None = None

    def within(self, seconds: float) -> bool:
        if not self.ended.wait(seconds):
            return False
        if self.error is not None:
            raise self.error
        return True

    def now(self) -> bool:
        return self.ended.is_set()


class WaitForAll:
    """Several operations, that end when the last of them does."""

    def __init__(self, parts: Sequence[TorchWait]) -> None:
        self._parts = parts

    def within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        return all(part.within(max(0.0, end - time.monotonic())) for part in self._parts)

    def now(self) -> bool:
        return all(part.now() for part in self._parts)


def is_small(x: Tensor) -> bool:
    """Whether a message is of the size that goes by control messages: the same on both sides, as
    they agree on what travels.
    """
    return x.numel() * x.element_size() <= SMALL_MESSAGE


class _MessageThread:
    """The thread that waits for messages."""

    def __init__(self) -> None:
        self._tickets: queue.SimpleQueue[MessagesWait | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="paceline exchange", daemon=True)
        self._thread.start()

    def take(self, ticket: MessagesWait) -> None:
        self._tickets.put(ticket)

    def close(self) -> None:
        self._tickets.put(None)
        self._thread.join(FAREWELL)

    def _deliver(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            try:
                for work in ticket.works:
                    work.wait()
            except RuntimeError as error:
                ticket.error = error
            finally:
                ticket.works.clear()
                ticket.ended.set()


@contextmanager
def _needed(size: int) -> Iterator[None]:
    """Say what the store was needed for, where it is gone."""
    try:
        yield
    except WorkerLost as error:
        raise WorkerLost(
            f"the store is gone while a group of {size} ranks is made ({error})"
        ) from error


class GlooTransport:
    """The connections of rank `rank` with the other ranks of one group, made over a store;
    collective.

    `address`: the local address to listen on. `names`: what the ranks are called in messages and
    errors. `made` counts the calls on each channel; `waited` the seconds spent in tables.
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
        self._pending: deque[TorchWait] = deque()
        self._postman: _MessageThread | None = None
        self._closed = size == 1
        self.data: Any = None
        if size == 1:
            return
        self._control, sealed = ControlNetwork(address, rank, names), over(store)
        # a thread that is inside torch while Python ends takes the process down with it
        self._unregister = at_exit(self.close)
        try:
            self._connect(sealed, address)
        except BaseException:
            self.close()  # whoever makes groups anew after a loss may fail often
            raise

    def _connect(self, sealed: Store, address: str) -> None:
        rank, size, deadline = self.rank, self.size, self.deadline
        self._wires = sockets.GroupSockets(address, 1, [self._control.listening.port])
        with _needed(size):
            self._lookout = waitposts.Waitposts(sealed.sub("lookout"), rank, size)
            others = self._wires.announce(sealed, rank, size, deadline, self._control.listening)
        self.cancel_scope.add(self.interrupt)
        self._control.connect(
            sealed, [Listening(*other) for other in others], deadline, self._check
        )
        self.data = sockets.connect(
            self._wires.devices[0], sealed.sub("data").torch, rank, size, deadline
        )
        with _needed(size):
            self._wires.trace(sealed, deadline)

    # ---- operations

    def count(self, channel: str) -> int:
        """Return the number of the next call on `channel`; raises if nothing can be called any
        more.
        """
        self._check()
        call_number = self.made.get(channel, 0)
        self.made[channel] = call_number + 1
        return call_number

    def _check(self) -> None:
        if self.broken is not None:
            raise copy.copy(self.broken)

    def track(self, awaited: TorchWait) -> TorchWait:
        """Remember `awaited` until it has ended, for `close`."""
        while self._pending and self._pending[0].now():
            self._pending.popleft()
        self._pending.append(awaited)
        return awaited

    def messages(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int
    ) -> TorchWait:
        """Start sending and receiving contiguous CPU tensors; none to or from this rank itself.

        Small ones go by control messages.
        """
        if any(is_small(x) for _, x in (*sends, *recvs)):
            out, into = (
                [pair for pair in sends if is_small(pair[1])],
                [pair for pair in recvs if is_small(pair[1])],
            )
            parcels = [(to, _memory(x)) for to, x in out]
            small = self._control.start(
                MAIL, tag, parcels, [source for source, _ in into], [_memory(x) for _, x in into]
            )
            small.keep([x for _, x in into])
            self._control.push()
            self.track(small)
            if len(out) + len(into) == len(sends) + len(recvs):
                return small
            sends, recvs = (
                [pair for pair in side if not is_small(pair[1])] for side in (sends, recvs)
            )
            return WaitForAll((small, self._gloo_messages(sends, recvs, tag)))
        return self._gloo_messages(sends, recvs, tag)

    def _gloo_messages(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int
    ) -> MessagesWait:
        try:
            works = [self.data.recv([_raw(x)], source, tag) for source, x in recvs]
            works += [self.data.send([_raw(x)], to, tag) for to, x in sends]
        except RuntimeError as error:
            raise self.fail(f"exchange with tag {tag}", error) from error
        ticket = MessagesWait(works, [x for _, x in (*sends, *recvs)])
        if works:
            if self._postman is None:
                self._postman = _MessageThread()
            self._postman.take(ticket)
            self.track(ticket)
        else:
            ticket.ended.set()
        return ticket

    def table(self, channel: str, payload: bytes, text: str) -> list[bytes]:
        """Gather every rank's payload, in rank order, by control messages."""
        if self.size == 1:
            return [payload]
        start = time.monotonic()
        call_number = self.count(channel)
        exchange = self._control.gather(CHANNELS[channel], call_number, payload)
        self.wait(self.track(exchange), (channel, call_number, text), None)
        self.waited += time.monotonic() - start
        return [*exchange.answers[: self.rank], payload, *exchange.answers[self.rank :]]

    # ---- waiting

    def wait(self, awaited: TorchWait, wait: tuple[str, int, str], timeout: float | None) -> None:
        """Return when `awaited` has ended well.

        `wait`: the channel, the number of the call on it, and the call as text.
        """
        start = time.monotonic()
        limit = start + (self.deadline if timeout is None else timeout)
        grace = start + min(GRACE, self.deadline / 4)
        watched, place = False, ""
        try:
            while not self._ended(awaited, max(0.0, min(TICK, limit - time.monotonic())), wait[2]):
                now = time.monotonic()
                if now >= grace:
                    place = place if watched else callsite.place()
                    watched = True
                    self._lookout.enter(
                        RankWait(wait[0], wait[1], wait[2] + place, dict(self.made))
                    )
                    self._look(wait[2])
                if now >= limit:
                    raise self._late(wait, now - start)
        finally:
            if watched:
                self._lookout.leave()

    def _ended(self, awaited: TorchWait, seconds: float, text: str) -> bool:
        if self.broken is not None and not awaited.now():
            raise copy.copy(self.broken)
        try:
            return awaited.within(seconds)
        except RuntimeError as error:
            raise self.fail(text, error) from error

    def _look(self, text: str) -> None:
        """Raise if the wait can't end well any more."""
        if self._lookout.stuck:
            raise self.end(describe(self._lookout.stuck, self.names))
        if self._wires.severed():
            raise self.fail(text, None)

    def _late(self, wait: tuple[str, int, str], seconds: float) -> DeadlineExceeded:
        others = dict(self._lookout.others)
        absent = {
            self.names[r]: others.get(r)
            for r in missing(RankWait(*wait, {}), others, self.rank, self.size)
        }
        self._late_error = DeadlineExceeded(late(wait[2], seconds, absent), tuple(absent))
        return self._late_error

    # ---- ends

    def fail(self, text: str, cause: RuntimeError | None) -> PacelineError:
        """Handle a failed operation: find out which ranks are gone, tell the others, and end
        everything. Returns the error to raise.
        """
        if self.broken is None:
            ranks = tuple(self.names[rank] for rank in self._wires.severed())
            who = (
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} "
                f"{'are' if len(ranks) > 1 else 'is'} gone"
            )
            why = f" ({str(cause).splitlines()[0]})" if cause is not None and not ranks else ""
            self.end(
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

    def end(self, error: PacelineError, seconds: float = SILENCE) -> PacelineError:
        """End every operation under way, here and at the others, with `error`, or with that of
        the rank that was first.
        """
        if self.broken is None:
            if self.size > 1:
                ranks = (
                    error.missing
                    if isinstance(error, DeadlineExceeded)
                    else getattr(error, "ranks", ())
                )
                verdict = GroupEnd(type(error).__name__, str(error), ranks)
                error = _judged(self._lookout.verdict(verdict, seconds))
            self.broken = error
            if self.size > 1:
                self._wires.cut()
        return copy.copy(self.broken)

    def interrupt(self, error: PacelineError) -> None:
        """End every operation under way with `error`, from any thread; the others are not told,
        though their connections end.
        """
        if self.broken is None and not self._closed:
            self.broken = error
            self._wires.cut()

    def close(self) -> None:
        """Let go of threads and sockets, whatever state the others are in."""
        if self._closed:
            return
        self._closed = True
        self._unregister()
        if self.data is None:
            self._control.close()
            return  # the group was never complete
        if any(not awaited.now() for awaited in self._pending) or self.broken is not None:
            me = self.names[self.rank]
            self.end(
                self._late_error
                or WorkerLost(f"rank {me} has left the group in the middle of an operation", (me,)),
                seconds=0.2,
            )
            end = time.monotonic() + FAREWELL
            while any(not awaited.now() for awaited in self._pending) and time.monotonic() < end:
                time.sleep(0.001)
        self.broken = ViewChanged("this group has been closed")
        self._lookout.close()
        self._control.close()
        if self._postman is not None:
            self._postman.close()
        left = [awaited for awaited in self._pending if not awaited.now()]
        if left:
            # Gloo may lose the wake-up of an operation, and its group can't be deleted before that
            # has ended
            parked = (left, self.data)
            threading.Thread(
                target=_park, args=(parked,), name="paceline reaper", daemon=True
            ).start()
        self._pending.clear()
        self.data = None
        self._wires.devices.clear()


def _judged(verdict: GroupEnd) -> PacelineError:
    if verdict.kind == "WorkerLost":
        return WorkerLost(verdict.text, verdict.ranks)
    if verdict.kind == "DeadlineExceeded":
        return DeadlineExceeded(verdict.text, verdict.ranks)
    return Mismatch(verdict.text) if verdict.kind == "Mismatch" else ViewChanged(verdict.text)


def _park(parked: tuple[list[TorchWait], Any]) -> None:
    while not all(awaited.now() for awaited in parked[0]):
        time.sleep(TICK)


def _memory(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which has to outlive that: torch doesn't resize
    what an array of numpy looks into.
    """
    return memoryview(
        (ctypes.c_ubyte * (x.numel() * x.element_size())).from_address(x.data_ptr())
    ).cast("B")


def _raw(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor: messages don't care for dtypes."""
    return x.detach().view(-1).view(torch.uint8)


class TransportWork:
    """A Work over a transport: waits for one operation of torch's, then finishes the result,
    which writes to `written`, once.
    """

    def __init__(
        self,
        fabric: GlooTransport,
        awaited: TorchWait,
        wait: tuple[str, int, str],
        finish: Callable[[], Any],
        written: Sequence[Tensor] = (),
    ) -> None:
        self._fabric, self._awaited, self._wait, self._finish = fabric, awaited, wait, finish
        self._inference = begun(*written)
        self._ended = False
        self._result: Any = None
        self._error: PacelineError | None = None

    def wait(self, timeout: float | None = None) -> Any:
        if not self._ended:
            try:
                self._fabric.wait(self._awaited, self._wait, timeout)
            except DeadlineExceeded:
                raise  # only this wait is over
            except PacelineError as error:
                self._error = error
            else:
                with as_begun(self._inference):
                    self._result = self._finish()
            self._ended = True
        if self._error is not None:
            raise copy.copy(self._error)
        return self._result

    def done(self) -> bool:
        return self._ended or self._fabric.broken is not None or self._awaited.now()

    def exception(self) -> BaseException | None:
        if not self._ended and self.done():
            try:
                self.wait()
            except PacelineError as error:
                return error
        return self._error

"""Messages between workers of several hosts, over TCP: one connection for each directed pair, made
when it is first needed.

    sender                                    receiver
    send() --> queue --> a thread writes  --> a thread reads, and puts messages into the inbox,
                                          whether they are waited for or not

`connection` is what each begins with, and what travels.
"""

from __future__ import annotations

import copy
import queue
import secrets as random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from paceline.cluster import network
from paceline.cluster.store import Store
from paceline.comm.group import Finished, Work
from paceline.comm.p2p.connection import (
    STRANGERS,
    CallerCrowd,
    Listening,
    admit,
    call,
    cut,
    frames,
    has_hung_up,
    read,
    send_all,
    send_some,
)
from paceline.comm.p2p.inbox import SLICE, PairInbox, ReceiveWork
from paceline.comm.p2p.memory import MemoryPool
from paceline.errors import DeadlineExceeded, PacelineError, ViewChanged, WorkerLost

# bytes of a message that its sender writes itself, if the network takes them at once
INLINE = 1 << 18
RETRY = 0.02  # seconds until the next caller is let in, where no descriptors are left
GRACE = 1.0  # seconds for a connection of a worker that has left to come to its turn


class _Outgoing:
    """A message that is on its way (a `Work`)."""

    def __init__(self, parts: list[memoryview], way: str, deadline: float) -> None:
        self.parts, self._way, self._deadline = parts, way, deadline
        self._ended = threading.Event()
        self._error: PacelineError | None = None

    def end(self, error: PacelineError | None) -> None:
        self.parts, self._error = [], error
        self._ended.set()

    def wait(self, timeout: float | None = None) -> None:
        seconds = self._deadline if timeout is None else timeout
        if not self._ended.wait(seconds):
            raise DeadlineExceeded(
                f"{self._way} could not be sent within {seconds:g} s: the network, or that host, "
                "takes nothing"
            )
        if self._error is not None:
            raise copy.copy(self._error)

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        return self._error


class NetworkWay:
    """The way to a worker on another host, and from it."""

    def __init__(
        self, end: PairNetwork, peer: int, listening: Listening, *, name: int, host: str
    ) -> None:
        self.name, self.host = name, host
        self._end, self._peer, self._listening = end, peer, listening
        self._pool = MemoryPool()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._waiting = 0  # messages that the thread has to write
        self._writer: threading.Thread | None = None
        self._out: socket.socket | None = None
        self._in: socket.socket | None = None
        self._error: PacelineError | None = None  # why nothing can be sent
        self._ended: PacelineError | None = None  # why nothing more comes
        self._hung_up = 0.0  # when the other was seen to have hung up what leads there

    # ---- sending

    def send(self, header: bytes, tensors: Sequence[Tensor], what: str) -> Work[None]:
        """Send a message: right away if it is small and nothing is before it, else from a
        thread.
        """
        parts = frames(header, tensors)
        with self._lock:
            if self._error is not None:
                return Finished(error=copy.copy(self._error))
            if (
                self._out is not None
                and not self._waiting
                and sum(part.nbytes for part in parts) <= INLINE
            ):
                parts = send_some(self._out, parts)
                if not parts:
                    return Finished()
            work = _Outgoing(
                parts, f"{what} to rank {self.name} on {self.host}", self._end.deadline
            )
            self._waiting += 1
            self._queue.put(work)
        self.open()
        return work

    def open(self) -> None:
        """Begin to connect to the other, unless that was begun."""
        with self._lock:
            if self._writer is None and not self._end.closed:
                self._writer = threading.Thread(
                    target=self._write, name=f"paceline to rank {self.name}", daemon=True
                )
                self._writer.start()

    def _write(self) -> None:
        try:
            connection = self._call()
            with self._lock:
                self._out = connection
        except PacelineError as error:
            self._fail(error)
        while (work := self._queue.get()) is not None:
            try:
                if self._error is None and self._out is not None:
                    send_all(self._out, work.parts)
            except OSError as error:
                self._fail(
                    self._lost(f"the connection to it has ended ({error.strerror or error})")
                )
            work.end(self._error)
            with self._lock:
                self._waiting -= 1
        if self._out is not None:
            self._out.close()

    def _call(self) -> socket.socket:
        end, ranks = self._end, (self._end.rank, self._peer)
        who, key = f"rank {self.name} on {self.host}", end.key(self._listening.token)
        return call(
            self._listening,
            key,
            ranks,
            who=who,
            name=self.name,
            deadline=end.deadline,
            check=end.check,
        )

    def _fail(self, error: PacelineError) -> None:
        with self._lock:
            self._error = error
        self._end.inbox.notify()

    def _lost(self, why: str) -> WorkerLost:
        return WorkerLost(f"rank {self.name} on {self.host} is gone: {why}", (self.name,))

    # ---- receiving

    def enter(self, connection: socket.socket) -> bool:
        """Take what comes over a connection that has proved itself; whether it is the first."""
        with self._lock:
            if self._in is not None:
                return False
            self._in = connection
        return True

    def read(self) -> None:
        """Put all messages that come into the inbox, until no more come."""
        assert self._in is not None
        why = "it has closed its end"
        try:
            with self._in:
                while (found := read(self._in, self._pool)) is not None:
                    self._end.inbox.put(self._peer, *found)
        except (OSError, PacelineError, RuntimeError, MemoryError) as error:
            why = f"its connection has broken ({getattr(error, 'strerror', None) or error})"
        with self._lock:
            self._ended = self._lost(why)
        self._end.inbox.notify()

    def look(self, *, last: bool = False) -> None: ...

    def rest(self, work: ReceiveWork, seconds: float) -> None:
        self._end.rest(work, seconds)

    def gone(self) -> PacelineError | None:
        if self._ended is not None or self._in is not None:
            return self._ended
        self.open()  # it has not called yet: whether it lives shows in a call from here
        if self._error is not None or self._out is None or not has_hung_up(self._out):
            return self._error
        self._hung_up = self._hung_up or time.monotonic()
        return (
            self._lost("it has closed its end")
            if time.monotonic() - self._hung_up > GRACE
            else None
        )

    # ---- the end

    def flush(self) -> None:
        """Ask the thread to end when all is written."""
        self._queue.put(None)

    def close(self, end: float) -> None:
        """Wait for the thread until `end` (time.monotonic()), and let go of the connections."""
        if self._writer is not None:
            self._writer.join(max(0.0, end - time.monotonic()))
        for connection in (self._out, self._in):
            if connection is not None:
                cut(connection)


class PairNetwork:
    """The end of one worker of a network of pairs: its listener, and its ways to the others."""

    def __init__(
        self,
        store: Store,
        address: str,
        rank: int,
        inbox: PairInbox,
        *,
        deadline: float,
        busy: Callable[[], object] | None,
    ) -> None:
        self.rank, self.inbox, self.deadline, self._busy = rank, inbox, deadline, busy
        self.closed = False
        self.ways: dict[int, NetworkWay] = {}
        self._store = store
        self._listener = network.listen(address)
        self._strangers = CallerCrowd(STRANGERS)
        self.listening = Listening(address, self._listener.getsockname()[1], random.token_hex(16))
        store.put(f"listen/{rank}", self.listening)

    def connect(self, names: Mapping[int, int], hosts: Sequence[str]) -> None:
        """Learn where others listen, and begin to answer them.

        `names`: what each is called, by its rank in the group.
        """
        for peer, name in names.items():
            listening = Listening(*self._store.take(f"listen/{peer}", self.deadline))
            self.ways[peer] = NetworkWay(self, peer, listening, name=name, host=hosts[peer])
        threading.Thread(target=self._accept, name="paceline pairs", daemon=True).start()

    def check(self) -> None:
        """Raise once this end has been closed."""
        if self.closed:
            raise ViewChanged("these pairs have been closed")

    def key(self, token: str) -> bytes:
        """Derive the key of connections to the worker that has drawn `token`."""
        return self._store.derive(f"pairs {token}")

    def rest(self, work: ReceiveWork, seconds: float) -> None:
        """Wait until `work` may have its message."""
        if self._busy is None:
            self.inbox.rest(work, seconds)
            return
        self._busy()
        self.inbox.rest(work, min(seconds, SLICE))

    def _accept(self) -> None:
        with self._listener:
            while not self.closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    # no descriptors are left, or the caller has hung up
                    time.sleep(0 if self.closed else RETRY)
                    continue
                self._strangers.enter(connection)
                threading.Thread(
                    target=self._welcome,
                    args=(connection,),
                    name="paceline from a rank",
                    daemon=True,
                ).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            source = admit(connection, self.key(self.listening.token), self.rank, self.ways)
        except OSError:
            source = None
        self._strangers.leave(connection)
        if source is None or not self.ways[source].enter(connection):
            connection.close()
            return
        self.ways[source].read()

    def close(self, end: float) -> None:
        """Leave, once all is written, or at `end` (time.monotonic())."""
        for way in self.ways.values():
            way.flush()
        self.closed = True
        for way in self.ways.values():
            way.close(end)
        cut(self._listener)

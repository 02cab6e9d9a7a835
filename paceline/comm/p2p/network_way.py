"""Messages between workers of several hosts over TCP: one connection for each directed pair.

    sender                                    receiver
    send() --> queue --> a thread writes  --> a thread reads, and puts messages into the inbox

Connections are made when they are first needed. Messages are read whether a receive waits for them
or not, so a sender is never held up. `connection` has the bytes that travel.
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
from paceline.comm.group_protocol import FinishedWork, Work
from paceline.comm.p2p.connection import (
    STRANGERS,
    ListeningAddress,
    UnprovedCallers,
    admit_sender,
    call_worker,
    cut_connection,
    has_hung_up,
    message_frames,
    read_message,
    send_all,
    send_some,
)
from paceline.comm.p2p.memory_pool import MemoryPool
from paceline.comm.p2p.pair_inbox import SLICE, PairInbox, ReceiveWork
from paceline.errors import DeadlineExceeded, PacelineError, ViewChanged, WorkerLost

INLINE = 1 << 18  # bytes of a message up to which its sender tries to write it itself
RETRY = 0.02  # seconds until the next caller is let in if no file descriptors are left
GRACE = 1.0  # seconds for the connection of a worker that has left to come to its turn


class _Outgoing:
    """A message on its way to another host (a `Work`)."""

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
                f"{self._way} could not be sent within {seconds:g} s: the network or that host "
                "takes no data"
            )
        if self._error is not None:
            raise copy.copy(self._error)

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        return self._error


class NetworkWay:
    """The link to a worker on another host, in both directions.

    `_lock` guards the order of messages: the caller writes a message itself only if the thread has
    none to write (`_waiting` is 0). `_error` ends sending, `_ended` ends receiving.
    """

    def __init__(
        self, end: PairNetwork, peer: int, listening: ListeningAddress, *, name: int, host: str
    ) -> None:
        self.name, self.host = name, host
        self._end, self._peer, self._listening = end, peer, listening
        self._pool = MemoryPool()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._waiting = 0  # messages that the thread has not written yet
        self._writer: threading.Thread | None = None
        self._out: socket.socket | None = None  # to the other
        self._in: socket.socket | None = None  # from the other
        self._error: PacelineError | None = None  # why nothing can be sent any more
        self._ended: PacelineError | None = None  # why nothing comes any more
        self._hung_up = 0.0  # time.monotonic() at which the other was first seen to have hung up

    # ---- sending

    def send(self, header: bytes, tensors: Sequence[Tensor], what: str) -> Work[None]:
        """Send a message: at once if it is small and the first, else from a thread."""
        parts = message_frames(header, tensors)
        with self._lock:
            if self._error is not None:
                return FinishedWork(error=copy.copy(self._error))
            if (
                self._out is not None
                and not self._waiting
                and sum(part.nbytes for part in parts) <= INLINE
            ):
                parts = send_some(self._out, parts)
                if not parts:
                    return FinishedWork()
            work = _Outgoing(
                parts, f"{what} to rank {self.name} on {self.host}", self._end.deadline
            )
            self._waiting += 1
            self._queue.put(work)
        self.open_connection()
        return work

    def open_connection(self) -> None:
        """Begin to connect to the other worker, unless that has begun."""
        with self._lock:
            if self._writer is None and not self._end.closed:
                self._writer = threading.Thread(
                    target=self._write_messages, name=f"paceline to rank {self.name}", daemon=True
                )
                self._writer.start()

    def _write_messages(self) -> None:
        try:
            connection = self._call_peer()
            with self._lock:
                self._out = connection
        except PacelineError as error:
            self._fail_sending(error)
        while (work := self._queue.get()) is not None:
            try:
                if self._error is None and self._out is not None:
                    send_all(self._out, work.parts)
            except OSError as error:
                self._fail_sending(
                    self._make_lost_error(
                        f"the connection to it has ended ({error.strerror or error})"
                    )
                )
            work.end(self._error)
            with self._lock:
                self._waiting -= 1
        if self._out is not None:
            self._out.close()

    def _call_peer(self) -> socket.socket:
        end, ranks = self._end, (self._end.rank, self._peer)
        who, key = f"rank {self.name} on {self.host}", end.derive_key(self._listening.token)
        return call_worker(
            self._listening,
            key,
            ranks,
            who=who,
            name=self.name,
            deadline=end.deadline,
            check=end.raise_if_closed,
        )

    def _fail_sending(self, error: PacelineError) -> None:
        with self._lock:
            self._error = error
        self._end.inbox.wake_waiters()

    def _make_lost_error(self, why: str) -> WorkerLost:
        return WorkerLost(f"rank {self.name} on {self.host} is gone: {why}", (self.name,))

    # ---- receiving

    def accept_connection(self, connection: socket.socket) -> bool:
        """Accept a connection that has proved itself. False if there has been one before."""
        with self._lock:
            if self._in is not None:
                return False
            self._in = connection
        return True

    def read_messages(self) -> None:
        """Put all messages that come into the inbox, until the connection ends."""
        assert self._in is not None
        why = "it has closed its end"
        try:
            with self._in:
                while (lane_and_message := read_message(self._in, self._pool)) is not None:
                    self._end.inbox.put_message(self._peer, *lane_and_message)
        except (OSError, PacelineError, RuntimeError, MemoryError) as error:
            why = f"its connection has broken ({getattr(error, 'strerror', None) or error})"
        with self._lock:
            self._ended = self._make_lost_error(why)
        self._end.inbox.wake_waiters()

    def look_for_messages(self, *, last: bool = False) -> None: ...

    def rest_until(self, work: ReceiveWork, seconds: float) -> None:
        self._end.rest_until(work, seconds)

    def find_loss(self) -> PacelineError | None:
        if self._ended is not None or self._in is not None:
            return self._ended
        # The other has not connected yet. A connection from here shows whether it lives.
        self.open_connection()
        if self._error is not None or self._out is None or not has_hung_up(self._out):
            return self._error
        # It has hung up, but its own connection, with its last messages, may be waiting for us to
        # accept it. Give that a moment.
        self._hung_up = self._hung_up or time.monotonic()
        return (
            self._make_lost_error("it has closed its end")
            if time.monotonic() - self._hung_up > GRACE
            else None
        )

    # ---- the end

    def flush(self) -> None:
        """Let the thread end once it has written everything."""
        self._queue.put(None)

    def close(self, end: float) -> None:
        """Wait for the thread until `end` (time.monotonic()), then end both connections."""
        if self._writer is not None:
            self._writer.join(max(0.0, end - time.monotonic()))
        for connection in (self._out, self._in):
            if connection is not None:
                cut_connection(connection)


class PairNetwork:
    """One worker's end of the network: its listener, and its links to the others.

    Args:
        store: Part of the store in which workers publish where they listen.
        address: Address of this worker to listen at.
        rank: Rank of this worker in the group.
        inbox: Where messages go.
        deadline: Seconds that a wait for another worker may take.
        busy: Called while a receive waits, to advance other operations of this process.
    """

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
        self._listener = network.open_listener(address)
        self._strangers = UnprovedCallers(STRANGERS)
        self.listening = ListeningAddress(
            address, self._listener.getsockname()[1], random.token_hex(16)
        )
        store.put(f"listen/{rank}", self.listening)

    def connect_peers(self, names: Mapping[int, int], hosts: Sequence[str]) -> None:
        """Learn where the others listen, and begin to accept their connections.

        Args:
            names: Rank among all workers of each other worker, by its rank in the group.
            hosts: Name of each rank's host.
        """
        for peer, name in names.items():
            listening = ListeningAddress(*self._store.take(f"listen/{peer}", self.deadline))
            self.ways[peer] = NetworkWay(self, peer, listening, name=name, host=hosts[peer])
        threading.Thread(target=self._accept_callers, name="paceline pairs", daemon=True).start()

    def raise_if_closed(self) -> None:
        """Raise `ViewChanged` if this end has been closed."""
        if self.closed:
            raise ViewChanged("these pairs have been closed")

    def derive_key(self, token: str) -> bytes:
        """Derive the key of connections to the worker that has drawn `token`."""
        return self._store.derive_store_key(f"pairs {token}")

    def rest_until(self, work: ReceiveWork, seconds: float) -> None:
        """Sleep until `work` may have its message, or `seconds` pass."""
        if self._busy is None:
            self.inbox.wait_for_change(work, seconds)
            return
        self._busy()
        self.inbox.wait_for_change(work, min(seconds, SLICE))

    def _accept_callers(self) -> None:
        with self._listener:
            while not self.closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    # No descriptors are left, or the caller has hung up already.
                    time.sleep(0 if self.closed else RETRY)
                    continue
                self._strangers.enter(connection)
                threading.Thread(
                    target=self._welcome_caller,
                    args=(connection,),
                    name="paceline from a rank",
                    daemon=True,
                ).start()

    def _welcome_caller(self, connection: socket.socket) -> None:
        # A caller that can't prove itself, or has a connection already, is hung up on.
        try:
            source = admit_sender(
                connection, self.derive_key(self.listening.token), self.rank, self.ways
            )
        except OSError:
            source = None
        self._strangers.leave(connection)
        if source is None or not self.ways[source].accept_connection(connection):
            connection.close()
            return
        self.ways[source].read_messages()

    def close(self, end: float) -> None:
        """Leave once everything is written, or at `end` (time.monotonic())."""
        for way in self.ways.values():
            way.flush()
        self.closed = True
        for way in self.ways.values():
            way.close(end)
        cut_connection(self._listener)

"""Messages between workers of several hosts over TCP: one connection for each directed pair.

    sender                    receiver
    send() --> mesh --> socket --> mesh --> a receive takes all messages that came to the inbox

C moves the bytes (`socket_mesh`). The mesh is eager: its thread reads messages before a receive
waits for them, so a sender is never held up. Connections are made when they are first needed.
"""

from __future__ import annotations

import copy
import secrets as random
import socket
import threading
import time
from collections import deque
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
)
from paceline.comm.p2p.network_message import OutgoingMessage, make_message, read_message
from paceline.comm.p2p.pair_inbox import SLICE, TICK, PairInbox, ReceiveWork
from paceline.comm.p2p.socket_mesh import NOT_SENT, SENT, ArrivedMessage, SocketMesh, give_back
from paceline.errors import DeadlineExceeded, PacelineError, ResourceError, ViewChanged, WorkerLost

INLINE = 1 << 18  # bytes of a message up to which its sender tries to write it itself
RETRY = 0.02  # seconds until the next caller is let in if no file descriptors are left
GRACE = 1.0  # seconds for the connection of a worker that has left to come to its turn


class _Outgoing:
    """A message on its way to another host (a `Work`)."""

    def __init__(self, way: NetworkWay, message: OutgoingMessage, what: str) -> None:
        self._way, self._what = way, what
        self.message: OutgoingMessage | None = message  # None once nothing reads it any more
        # What `SocketMesh.send` has returned. None while there is no link.
        self.number: int | None = None
        self.error: PacelineError | None = None

    def end(self, error: PacelineError | None) -> None:
        self.error, self.message = error, None

    def wait(self, timeout: float | None = None) -> None:
        seconds = self._way.deadline if timeout is None else timeout
        end = time.monotonic() + seconds
        while not self.done():
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self._what} to {self._way.who} could not be sent within {seconds:g} s: "
                    "the network or that host takes no data"
                )
            self._way.wait_for_change(self, min(left, TICK))
        if self.error is not None:
            raise copy.copy(self.error)

    def done(self) -> bool:
        if self.message is not None:
            self._way.settle_messages()
        return self.message is None

    def exception(self) -> BaseException | None:
        return self.error if self.done() else None


class NetworkWay:
    """The link to a worker on another host, in both directions.

    `_unsent` has the messages whose memory the mesh may still read, the oldest first. Messages
    without a number wait for the connection. `_error` ends sending, `_ended` ends receiving.
    `_lock` guards all of them.
    """

    def __init__(
        self, end: PairNetwork, peer: int, listening: ListeningAddress, *, name: int, host: str
    ) -> None:
        self.name, self.host, self.who = name, host, f"rank {name} on {host}"
        self.deadline = end.deadline
        self._end, self._peer, self._listening = end, peer, listening
        self._lock = threading.Lock()
        self._unsent: deque[_Outgoing] = deque()
        self._caller: threading.Thread | None = None
        self._out: int | None = None  # link to the other
        self._in: int | None = None  # link from the other
        self._error: PacelineError | None = None  # why nothing can be sent any more
        self._ended: PacelineError | None = None  # why nothing comes any more
        self._hung_up = 0.0  # time.monotonic() at which the other was first seen to have gone

    # ---- sending

    def send(self, header: bytes, tensors: Sequence[Tensor], what: str) -> Work[None]:
        """Send a message: at once if it is small and the first, else in the background."""
        work = _Outgoing(self, make_message(header, tensors), what)
        self.settle_messages()
        with self._lock:
            if self._error is not None:
                return FinishedWork(error=copy.copy(self._error))
            if self._out is not None:
                self._post(work)
                return work
            self._unsent.append(work)
        self.open_connection()
        return work

    def _post(self, work: _Outgoing) -> None:
        """Hand a message to the mesh. Called with the lock."""
        assert self._out is not None and work.message is not None
        # First it is remembered: an interrupt must not free memory that the mesh still reads.
        self._unsent.append(work)
        work.number = self._end.mesh.send(self._out, work.message.pieces, at_once=INLINE)
        if work.number == SENT:
            self._unsent.pop()
            work.end(None)

    def settle_messages(self) -> None:
        """Let go of the memory of messages that have been sent, or never will be."""
        with self._lock:
            if not self._unsent:
                return
            if self._out is not None and self._error is None:
                # The end first: what was sent before it counts.
                end = self._end.mesh.find_end(self._out)
                sent = self._end.mesh.count_sent(self._out)
                # Everything in front of a message that was sent was sent, too.
                numbers = [work.number or NOT_SENT for work in self._unsent]
                count = max((i for i, n in enumerate(numbers, 1) if 0 < n <= sent), default=0)
                for _ in range(count):
                    self._unsent.popleft().end(None)
                if end:
                    self._error = self._make_lost_error(end)
            while self._unsent and self._error is not None:
                self._unsent.popleft().end(self._error)

    def wait_for_change(self, work: _Outgoing, seconds: float) -> None:
        """Wait until a message may have been sent, or the time is over."""
        # Read the count before looking, so that no change in between is missed.
        seen = self._end.mesh.changes
        if not work.done():
            self._end.mesh.wait_for_change(seen, seconds)

    def open_connection(self) -> None:
        """Begin to connect to the other worker, unless that has begun."""
        if self._caller is not None:
            return
        with self._lock:
            if self._caller is None and not self._end.closed:
                self._caller = threading.Thread(
                    target=self._connect, name=f"paceline to rank {self.name}", daemon=True
                )
                self._caller.start()

    def _connect(self) -> None:
        error: PacelineError | None = None
        try:
            link = self._end.mesh.add_link(self._call_peer())
            with self._lock:
                self._out = link
                waiting, self._unsent = self._unsent, deque()
                for work in waiting:
                    self._post(work)
        except PacelineError as caught:
            error = caught
        with self._lock:
            self._error = self._error or error
        self._end.mesh.wake()

    def _call_peer(self) -> socket.socket:
        end, ranks = self._end, (self._end.rank, self._peer)
        return call_worker(
            self._listening,
            end.derive_key(self._listening.token),
            ranks,
            who=self.who,
            name=self.name,
            deadline=end.deadline,
            check=end.raise_if_closed,
        )

    def _make_lost_error(self, why: str) -> WorkerLost:
        return WorkerLost(f"{self.who} is gone: {why}", (self.name,))

    # ---- receiving

    def accept_connection(self, connection: socket.socket) -> bool:
        """Accept a connection that has proved itself. False if there has been one before."""
        with self._lock:
            if self._in is not None:
                return False
            self._in = self._end.add_link(connection, self)
        self._end.mesh.wake()
        return True

    def look_for_messages(self, *, last: bool = False) -> None:
        self._end.look_for_messages()

    def take_message(self, arrived: ArrivedMessage) -> None:
        """Put a message into the inbox, or note that the other sends nonsense."""
        if self._ended is not None:
            give_back(arrived.address)
            return
        try:
            self._end.inbox.put_message(self._peer, *read_message(arrived))
        except (PacelineError, RuntimeError, MemoryError) as error:
            self._ended = self._make_lost_error(f"its connection has broken ({error})")

    def lose_messages(self, error: BaseException) -> None:
        """Note that messages may have been lost here, by an interrupt."""
        self._ended = self._ended or self._make_lost_error(
            f"messages of it were lost here ({type(error).__name__})"
        )

    def rest_until(self, work: ReceiveWork, seconds: float) -> None:
        self._end.rest_until(work, seconds)

    def find_loss(self) -> PacelineError | None:
        if self._in is not None:
            end = self._end.mesh.find_end(self._in)
            return self._ended or (self._make_lost_error(end) if end else None)
        # The other has not connected yet. A connection from here shows whether it lives.
        self.open_connection()
        has_hung_up = self._out is not None and bool(self._end.mesh.find_end(self._out))
        if self._error is None and not has_hung_up:
            return None
        # It has gone, but its own connection, with its last messages, may be waiting for us to
        # accept it. Give that a moment.
        self._hung_up = self._hung_up or time.monotonic()
        if time.monotonic() - self._hung_up <= GRACE:
            return None
        return self._error or self._make_lost_error("it has closed its end")

    # ---- the end

    def flush(self, end: float) -> None:
        """Wait until everything is sent, or until `end` (time.monotonic())."""
        while (left := end - time.monotonic()) > 0:
            self.settle_messages()
            with self._lock:
                last = self._unsent[-1] if self._unsent else None
            if last is None:
                break
            self.wait_for_change(last, min(left, TICK))


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
        self.mesh = SocketMesh(eager=True)
        self._looking = threading.Lock()  # lets one thread take messages at a time
        self._ways_in: dict[int, NetworkWay] = {}  # by the link over which messages come
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

    def add_link(self, connection: socket.socket, way: NetworkWay) -> int:
        """Add the connection over which the messages of a way come."""
        with self._looking:  # no message is taken before its link is known
            link = self.mesh.add_link(connection)
            self._ways_in[link] = way
        return link

    def raise_if_closed(self) -> None:
        """Raise `ViewChanged` if this end has been closed."""
        if self.closed:
            raise ViewChanged("these pairs have been closed")

    def derive_key(self, token: str) -> bytes:
        """Derive the key of connections to the worker that has drawn `token`."""
        return self._store.derive_store_key(f"pairs {token}")

    def rest_until(self, work: ReceiveWork, seconds: float) -> None:
        """Sleep until `work` may have its message, or `seconds` pass."""
        if self._busy is not None:
            self._busy()
            seconds = min(seconds, SLICE)
        # Read the count before looking, so that no message in between is missed.
        seen = self.mesh.changes
        self.look_for_messages()
        if not work.has_come:
            self.mesh.wait_for_change(seen, seconds)

    def look_for_messages(self) -> None:
        """Put all messages that have come into the inbox."""
        # Another thread that looks has delivered what it took when it lets go of the lock.
        with self._looking:
            try:
                while (arrived := self.mesh.take_message()) is not None:
                    way = self._ways_in.get(arrived.link)
                    if way is None:  # over a connection on which only this worker sends
                        give_back(arrived.address)
                    else:
                        way.take_message(arrived)
            except BaseException as error:  # an interrupt: a message may be lost
                for way in self.ways.values():
                    way.lose_messages(error)
                raise

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
        try:
            if source is None or not self.ways[source].accept_connection(connection):
                connection.close()
        except ResourceError:
            self.mesh.wake()  # this end is closing

    def close(self, end: float) -> None:
        """Leave once everything is written, or at `end` (time.monotonic())."""
        for way in self.ways.values():
            way.flush(end)
        self.closed = True
        self.mesh.close()
        cut_connection(self._listener)

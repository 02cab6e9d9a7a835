"""Small messages between ranks: a TCP connection for each pair, used by the threads that wait.

    rank 2  -- calls, both prove the job's secret -->  ranks 0 and 1     a rank calls lower ranks,
                                                                         and answers higher ones
    a frame:  length of the payload | channel | key | payload           channels share a connection

Workers agree by such messages, and sum small tensors, in every training step. Gloo could carry
them, but would take ten times the processor time. Waiting threads read and write; only bytes that
the network doesn't take at once may be written by a thread of their own.
"""

from __future__ import annotations

import contextlib
import math
import secrets as random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from paceline.cluster import network
from paceline.cluster.store import Store
from paceline.comm.p2p.connection import (
    STRANGERS,
    ListeningAddress,
    UnprovedCallers,
    admit_sender,
    call_worker,
)
from paceline.errors import DeadlineExceeded, PlaceError

FRAME = struct.Struct("<IBQ")  # bytes of the payload, channel, key
CHUNK = 1 << 18  # bytes that are read at a time
TICK = 0.1  # seconds between two looks at the deadline in a wait for callers
Payload: TypeAlias = bytes | memoryview
# Sender, channel and key. Messages that share all three keep their order.
Key: TypeAlias = tuple[int, int, int]


class ControlLink:
    """The connection to one rank, with the bytes of an incomplete frame and those not sent yet."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        connection.setblocking(False)
        self.connection, self.peer = connection, peer
        self.ended = ""  # why the connection has ended; empty while it stands
        self._received, self._unsent = bytearray(), bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._unsent)

    def send(self, *parts: Payload) -> None:
        """Send waiting bytes, then `parts`, as far as the network takes them. Copy the rest."""
        waiting = (self._unsent, *parts) if self._unsent else parts
        sent = 0
        try:
            sent = self.connection.sendmsg(waiting)
        except BlockingIOError:
            pass
        except OSError as error:
            self.ended = error.strerror or str(error)
        rest = bytearray()
        for part in waiting:
            rest += part[sent:]
            sent = max(0, sent - len(part))
        self._unsent = rest

    def receive(self) -> list[tuple[int, int, bytes]]:
        """Read, and return the frames that are complete: channel, key, payload."""
        try:
            chunk = self.connection.recv(CHUNK)
        except BlockingIOError:
            return []
        except OSError as error:
            self.ended = error.strerror or str(error)
            return []
        if not chunk:
            self.ended = "it has hung up"
            return []
        # Take all complete frames; the rest waits for the next chunk.
        self._received += chunk
        frames, at = [], 0
        while len(self._received) >= at + FRAME.size:
            length, channel, key = FRAME.unpack_from(self._received, at)
            stop = at + FRAME.size + length
            if len(self._received) < stop:
                break
            frames.append((channel, key, bytes(memoryview(self._received)[at + FRAME.size : stop])))
            at = stop
        del self._received[:at]
        return frames


class ControlExchange:
    """Messages to and from other ranks. It is complete when all have come, and all are sent."""

    def __init__(
        self,
        end: ControlNetwork,
        targets: Sequence[int],
        awaited: Sequence[Key],
        places: Sequence[memoryview],
    ) -> None:
        # Payloads in the order of `awaited`, if there are no places for them.
        self.answers = [b""] * len(awaited)
        self._end, self._targets, self._awaited, self._places = end, {*targets}, awaited, places
        self._missing = set(range(len(awaited)))
        self._flaw = ""
        self._owners: object = None

    def keep_alive(self, owners: object) -> None:
        """Keep `owners` alive, whose memory the places are, as long as a message may come."""
        self._owners = owners

    def take_payload(self, index: int, payload: bytes) -> None:
        """Take the payload of message `index`."""
        if not self._places:
            self.answers[index] = payload
        elif len(payload) == self._places[index].nbytes:
            self._places[index][:] = payload
        else:
            source = self._end.names[self._awaited[index][0]]
            self._flaw = (
                f"rank {source} sent {len(payload)} bytes, not the {self._places[index].nbytes} "
                "that it should have sent"
            )
        self._missing.discard(index)

    @property
    def is_complete(self) -> bool:
        """Whether everything has come, and everything is sent."""
        return not (
            self._missing
            or self._flaw
            or self._targets & self._end.unsent_ranks
            or self._targets & self._end.unreached_ranks
        )

    @property
    def failure(self) -> str:
        """Why the exchange can't complete any more; empty if it can."""
        if self._flaw or not self._end.ended_ranks or self.is_complete:
            return self._flaw
        # A rank that a message is awaited from, or that some bytes did not reach.
        broken = next(
            (
                rank
                for rank, *_ in map(self._awaited.__getitem__, self._missing)
                if rank in self._end.ended_ranks
            ),
            None,
        )
        broken = (
            next(iter(self._targets & self._end.unreached_ranks), None)
            if broken is None
            else broken
        )
        if broken is None:
            return ""
        return (
            f"the connection to rank {self._end.names[broken]} has ended: "
            f"{self._end.links[broken].ended}"
        )

    def wait_within(self, seconds: float) -> bool:
        """Wait at most `seconds`; whether it is complete then. `RuntimeError` if it has failed."""
        self._end.run_until(lambda: self.is_complete or bool(self.failure), seconds)
        if failure := self.failure:
            raise RuntimeError(failure)
        return self.is_complete

    def is_ready(self) -> bool:
        """Whether `wait_within` would return or raise at once."""
        self._end.run_until(lambda: self.is_complete, 0.0)
        return self.is_complete or bool(self.failure)


class ControlNetwork:
    """One rank's end of the connections between all ranks of a group.

    All state is guarded by the lock of `_changed`. One thread at a time polls the connections, with
    `_polling` set and the lock released. It then serves them under the lock and notifies the
    others, which check whether their exchange is complete. `_waker` interrupts the poll if another
    thread has more to send.

    Args:
        address: Address of this worker to listen at.
        rank: This rank.
        names: Rank of each member among all workers, for errors.
    """

    def __init__(self, address: str, rank: int, names: Sequence[int]) -> None:
        self.rank, self.size, self.names = rank, len(names), tuple(names)
        self.links: dict[int, ControlLink] = {}
        try:
            self._listener = network.open_listener(address)
        except OSError as error:
            raise PlaceError(
                f"can't listen on {address} ({error.strerror or error}): "
                "choose an address of this machine"
            ) from error
        self.listening = ListeningAddress(
            address, self._listener.getsockname()[1], random.token_hex(16)
        )
        self._early: dict[Key, deque[bytes]] = {}  # payloads that came before their exchange began
        # Exchanges that wait for a message, each with the index of the message.
        self._awaited: dict[Key, deque[tuple[ControlExchange, int]]] = {}
        self._poll = select.poll()
        self._by_descriptor: dict[int, ControlLink] = {}
        self._waker, self._woken = socket.socketpair()
        for side in (self._waker, self._woken):
            side.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)
        self._changed = threading.Condition()
        self.unsent_ranks: set[int] = set()  # ranks with bytes that the network has not taken yet
        self.ended_ranks: set[int] = set()  # ranks whose connections have ended
        self.unreached_ranks: set[int] = set()  # of these, ranks that some bytes did not reach
        self._writer: threading.Thread | None = None
        self._closed = False
        self._polling = False

    def connect_ranks(
        self,
        store: Store,
        others: Sequence[ListeningAddress],
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        """Connect to all other ranks. Collective.

        Args:
            store: Part of the store, which keys are derived from.
            others: Address of each rank.
            deadline: Seconds to wait for all.
            check: Raises to give up.

        Raises:
            DeadlineExceeded: Some ranks don't come; names them.
            WorkerLost: A rank has gone.
        """
        end = time.monotonic() + deadline
        # Call the lower ranks.
        for peer in range(self.rank):
            name, key = self.names[peer], store.derive_store_key(f"control {others[peer].token}")
            seconds_left = max(0.0, end - time.monotonic())
            ranks = (self.rank, peer)
            connection = call_worker(
                others[peer],
                key,
                ranks,
                who=f"rank {name}",
                name=name,
                deadline=seconds_left,
                check=check,
            )
            self._add_link(connection, peer, deadline)
        # Let the higher ranks in. Each caller proves itself in a thread, as some may say nothing.
        key, callers = (
            store.derive_store_key(f"control {self.listening.token}"),
            range(self.rank + 1, self.size),
        )
        crowd, news = UnprovedCallers(STRANGERS), select.poll()
        self._listener.settimeout(TICK)
        news.register(self._listener, select.POLLIN)
        news.register(self._woken, select.POLLIN)
        while absent := [peer for peer in callers if peer not in self.links]:
            check()
            if time.monotonic() > end:
                missing = tuple(self.names[peer] for peer in absent)
                raise DeadlineExceeded(
                    (
                        f"ranks {list(missing)} have not connected to rank {self.names[self.rank]} "
                        f"in {deadline:g} s"
                    ),
                    missing,
                )
            for descriptor, _ in news.poll(1000 * TICK):
                if descriptor == self._woken.fileno():
                    self._woken.recv(CHUNK)
                    continue
                with contextlib.suppress(OSError):  # the caller has hung up
                    connection = self._listener.accept()[0]
                    crowd.enter(connection)
                    threading.Thread(
                        target=self._answer_caller,
                        args=(connection, key, absent, deadline, crowd),
                        daemon=True,
                    ).start()

    def _answer_caller(
        self,
        connection: socket.socket,
        key: bytes,
        awaited: Sequence[int],
        deadline: float,
        crowd: UnprovedCallers,
    ) -> None:
        """Let a caller in if it soon proves that it is one of the awaited ranks."""
        try:
            peer = admit_sender(connection, key, self.rank, awaited)
        except OSError:
            peer = None
        crowd.leave(connection)
        # A stranger, a rank that has connected already, or a network that has been closed.
        with self._changed:
            if peer is None or peer in self.links or self._closed:
                connection.close()
                return
            self._add_link(connection, peer, deadline)
            # Wake `connect_ranks`, which then looks for the ranks that are still absent.
            with contextlib.suppress(OSError):
                self._waker.send(b"x")

    def _add_link(self, connection: socket.socket, peer: int, deadline: float) -> None:
        # A connection that is down may come back until the deadline.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * deadline)
            )
        self.links[peer] = self._by_descriptor[connection.fileno()] = ControlLink(connection, peer)
        self._poll.register(connection, select.POLLIN)

    def gather_payloads(self, channel: int, number: int, payload: bytes) -> ControlExchange:
        """Begin to gather every rank's payload, of any length.

        `number`: number of the call on its channel, from 0 on.
        """
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        return self.start_exchange(
            channel, number, [(peer, payload) for peer in peers], sorted(peers)
        )

    def start_exchange(
        self,
        channel: int,
        key: int,
        sends: Sequence[tuple[int, Payload]],
        sources: Sequence[int],
        places: Sequence[memoryview] = (),
    ) -> ControlExchange:
        """Begin an exchange of messages. Payloads may be written to again when this returns.

        Args:
            channel: Number of the channel.
            key: Key of the messages on the channel.
            sends: Pairs (rank, payload).
            sources: Ranks to await a message from.
            places: Memory for each of these, of exactly its size. Default: new memory.
        """
        awaited = [(source, channel, key) for source in sources]
        exchange = ControlExchange(self, [peer for peer, _ in sends], awaited, places)
        with self._changed:
            # Another rank may have sent before this one began to wait.
            for index, message_key in enumerate(awaited):
                early = self._early.get(message_key)
                if early:
                    exchange.take_payload(index, early.popleft())
                    if not early:
                        del self._early[message_key]
                else:
                    self._awaited.setdefault(message_key, deque()).append((exchange, index))
            for peer, payload in sends:
                self._send_frame(self.links[peer], FRAME.pack(len(payload), channel, key), payload)
        return exchange

    def write_in_background(self) -> None:
        """Let a thread write waiting bytes: this rank may not wait, and so not write, for long."""
        if not self.unsent_ranks:
            return
        with self._changed:
            if self._writer is None and not self._closed:
                self._writer = threading.Thread(
                    target=self._write_unsent, name="paceline writer", daemon=True
                )
                self._writer.start()
            self._changed.notify_all()

    def _write_unsent(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.unsent_ranks or self._closed)
                if self._closed:
                    return
            with contextlib.suppress(OSError):  # closed meanwhile
                self.run_until(lambda: not self.unsent_ranks or self._closed, TICK)

    def _send_frame(self, link: ControlLink, *parts: Payload) -> None:
        # Nothing reaches that rank any more: exchanges with it fail.
        if link.ended:
            self.unreached_ranks.add(link.peer)
            return
        link.send(*parts)
        if link.ended:
            self._drop_link(link)
        elif link.has_unsent != (link.peer in self.unsent_ranks):
            (self.unsent_ranks.add if link.has_unsent else self.unsent_ranks.remove)(link.peer)
            self._poll.modify(
                link.connection, select.POLLIN | (select.POLLOUT if link.has_unsent else 0)
            )
            if self._polling and link.has_unsent:
                # The poll under way does not look for room to write yet. A full pipe is fine: the
                # thread will wake up anyway.
                with contextlib.suppress(BlockingIOError):
                    self._waker.send(b"x")

    def _drop_link(self, link: ControlLink) -> None:
        """Stop polling a connection that has ended."""
        self.ended_ranks.add(link.peer)
        if link.has_unsent:
            self.unreached_ranks.add(link.peer)
        self.unsent_ranks.discard(link.peer)
        if self._by_descriptor.pop(link.connection.fileno(), None) is not None:
            self._poll.unregister(link.connection)

    def run_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Send and receive until `done()`, at most `seconds`. Waiting threads take turns."""
        end = time.monotonic() + seconds
        while True:
            with self._changed:
                if done():
                    return
                seconds_left = end - time.monotonic()
                if self._polling:  # another thread polls, and notifies
                    if seconds_left <= 0 or not self._changed.wait(seconds_left):
                        return
                    continue
                self._polling = True
            ready: list[tuple[int, int]] = []
            try:
                ready = self._poll.poll(max(0, math.ceil(1000 * seconds_left)))
            finally:
                with self._changed:
                    self._polling = False
                    for descriptor, events in ready:
                        self._serve_link(descriptor, events)
                    self._changed.notify_all()
            if not ready or seconds_left <= 0:
                return

    def _serve_link(self, descriptor: int, events: int) -> None:
        """Read and write a connection that is ready."""
        link = self._by_descriptor.get(descriptor)
        if link is None:
            if descriptor == self._woken.fileno():
                self._woken.recv(CHUNK)
            return
        if events & select.POLLOUT:
            self._send_frame(link)
        if events & ~select.POLLOUT:
            for channel, key, payload in link.receive():
                self._deliver_payload((link.peer, channel, key), payload)
        if link.ended:
            self._drop_link(link)

    def _deliver_payload(self, key: Key, payload: bytes) -> None:
        """Hand a payload to the first exchange that waits for it, or store it."""
        awaited = self._awaited.get(key)
        if awaited is None:
            self._early.setdefault(key, deque()).append(payload)
            return
        exchange, index = awaited.popleft()
        if not awaited:
            del self._awaited[key]
        exchange.take_payload(index, payload)

    def close(self) -> None:
        """Close all connections."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for link in self.links.values():
                self._drop_link(link)
                link.ended = link.ended or "it has been closed here"
                link.connection.close()
            if self._woken.fileno() >= 0:
                self._poll.unregister(self._woken)
            self._waker.close()
            self._woken.close()
        self._listener.close()

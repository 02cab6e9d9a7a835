"""Small messages between ranks: a TCP connection for each pair, served by a mesh.

    rank 2  -- calls, both prove the job's secret -->  ranks 0 and 1     a rank calls lower ranks,
                                                                         and answers higher ones
    a message:  channel | key | zeros | payload                          channels share a connection

Workers agree by such messages, and sum small tensors, in every training step. The mesh is lazy: a
thread that waits for a message reads it. Gloo could carry them, but would take ten times the
processor time.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from paceline.comm.p2p.socket_mesh import NOT_SENT, SENT, ArrivedMessage, SocketMesh, give_back
from paceline.errors import DeadlineExceeded, PlaceError

HEAD = struct.Struct("<BQ55x")  # channel and key, filled up to a cache line: payloads are aligned
TICK = 0.1  # seconds between two looks at the deadline in a wait for callers
Payload: TypeAlias = bytes | memoryview
# Sender, channel and key. Messages that share all three keep their order.
Key: TypeAlias = tuple[int, int, int]


class ControlExchange:
    """Messages to and from other ranks. It is complete when all have come, and all are sent."""

    def __init__(
        self, end: ControlNetwork, awaited: Sequence[Key], places: Sequence[memoryview]
    ) -> None:
        # Payloads in the order of `awaited`, if there are no places for them.
        self.answers = [b""] * len(awaited)
        self._end, self._awaited, self._places = end, awaited, places
        self._missing = set(range(len(awaited)))
        self._unsent: dict[int, int] = {}  # by rank, the number of the message on its link
        self._unreached: set[int] = set()  # ranks that a message can't reach any more
        self._flaw = ""
        self._owners: object = None

    def keep_alive(self, owners: object) -> None:
        """Keep `owners` alive, whose memory the places are, as long as a message may come."""
        self._owners = owners

    def note_sent(self, rank: int, number: int) -> None:
        """Note what `SocketMesh.send` has returned for the message to a rank."""
        if number == NOT_SENT:
            self._unreached.add(rank)
        elif number != SENT:
            self._unsent[rank] = number

    def take_payload(self, index: int, address: int, nbytes: int) -> None:
        """Copy the payload of message `index`."""
        if not self._places:
            self.answers[index] = ctypes.string_at(address, nbytes)
        elif nbytes == self._places[index].nbytes:
            ctypes.memmove(_address_of(self._places[index]), address, nbytes)
        else:
            source = self._end.names[self._awaited[index][0]]
            self._flaw = (
                f"rank {source} sent {nbytes} bytes, not the {self._places[index].nbytes} "
                "that it should have sent"
            )
        self._missing.discard(index)

    @property
    def is_complete(self) -> bool:
        """Whether everything has come, and everything is sent."""
        if self._missing or self._flaw or self._unreached:
            return False
        self._unsent = {
            rank: number
            for rank, number in self._unsent.items()
            if not self._end.has_sent(rank, number)
        }
        return not self._unsent

    @property
    def failure(self) -> str:
        """Why the exchange can't complete any more; empty if it can."""
        if self._flaw or not self._end.has_ended_links or self.is_complete:
            return self._flaw
        # A rank that a message is awaited from, or that some bytes did not reach.
        sources = {self._awaited[index][0] for index in self._missing}
        for rank in sorted(sources | self._unreached | self._unsent.keys()):
            if reason := self._end.find_end(rank):
                return f"the connection to rank {self._end.names[rank]} has ended: {reason}"
        return ""

    def wait_within(self, seconds: float) -> bool:
        """Wait at most `seconds`; whether it is complete then. `RuntimeError` if it has failed."""
        end = time.monotonic() + seconds
        while True:
            seen = self._end.mesh.changes  # before the look, so that no change is missed
            if self.is_ready():
                break
            seconds_left = end - time.monotonic()
            if seconds_left <= 0:
                return False
            self._end.mesh.wait_for_change(seen, seconds_left)
        if failure := self.failure:
            raise RuntimeError(failure)
        return True

    def is_ready(self) -> bool:
        """Whether `wait_within` would return or raise at once."""
        self._end.look_for_messages()
        return self.is_complete or bool(self.failure)


class ControlNetwork:
    """One rank's end of the connections between all ranks of a group. For any thread.

    `_lock` guards everything but the mesh, which has locks of its own.

    Args:
        address: Address of this worker to listen at.
        rank: This rank.
        names: Rank of each member among all workers, for errors.
    """

    def __init__(self, address: str, rank: int, names: Sequence[int]) -> None:
        self.rank, self.size, self.names = rank, len(names), tuple(names)
        self.mesh = SocketMesh(eager=False)
        self.links: dict[int, int] = {}  # by rank
        self._ranks: dict[int, int] = {}  # by link
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
        # Messages that came before their exchange began.
        self._early: dict[Key, deque[ArrivedMessage]] = {}
        # Exchanges that wait for a message, each with the index of the message.
        self._awaited: dict[Key, deque[tuple[ControlExchange, int]]] = {}
        self._lock = threading.Lock()
        self._waker, self._woken = socket.socketpair()  # ends a wait for callers
        self._closed = False

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
            with self._lock:
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
                    self._woken.recv(STRANGERS)
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
        with self._lock:
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
        self.links[peer] = link = self.mesh.add_link(connection)
        self._ranks[link] = peer

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
        exchange = ControlExchange(self, awaited, places)
        with self._lock:
            # Another rank may have sent before this one began to wait.
            for index, message_key in enumerate(awaited):
                early = self._early.get(message_key)
                if early:
                    _take(exchange, index, early.popleft())
                    if not early:
                        del self._early[message_key]
                else:
                    self._awaited.setdefault(message_key, deque()).append((exchange, index))
            # With the lock, so that messages of one key leave in the order of their exchanges.
            head = HEAD.pack(channel, key)
            for peer, payload in sends:
                pieces = [(_address_of(head), HEAD.size), (_address_of(payload), len(payload))]
                number = self.mesh.send(self.links[peer], pieces, 1 << 62, copies=True)
                exchange.note_sent(peer, number)
        return exchange

    def look_for_messages(self) -> None:
        """Hand messages that have come to the exchanges that wait for them."""
        with self._lock:
            while (arrived := self.mesh.take_message()) is not None:
                channel, key = HEAD.unpack(ctypes.string_at(arrived.address, HEAD.size))
                message_key = self._ranks[arrived.link], channel, key
                awaited = self._awaited.get(message_key)
                if awaited is None:
                    self._early.setdefault(message_key, deque()).append(arrived)
                    continue
                exchange, index = awaited.popleft()
                if not awaited:
                    del self._awaited[message_key]
                _take(exchange, index, arrived)

    def has_sent(self, rank: int, number: int) -> bool:
        """Whether a message to a rank has been handed to the network."""
        return self.mesh.count_sent(self.links[rank]) >= number

    @property
    def has_ended_links(self) -> bool:
        """Whether any connection has ended."""
        return self.mesh.has_ended_links

    def find_end(self, rank: int) -> str:
        """Say why the connection to a rank has ended. Empty if it stands."""
        return self.mesh.find_end(self.links[rank])

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            early, self._early = self._early, {}
            self._waker.close()
            self._woken.close()
        self.mesh.close()
        for messages in early.values():
            for arrived in messages:
                give_back(arrived.address)
        self._listener.close()


def _take(exchange: ControlExchange, index: int, arrived: ArrivedMessage) -> None:
    exchange.take_payload(index, arrived.address + HEAD.size, arrived.nbytes - HEAD.size)
    give_back(arrived.address)


def _address_of(payload: Payload) -> int:
    """Address of memory that stays alive while it is used."""
    if isinstance(payload, bytes):
        return ctypes.cast(ctypes.c_char_p(payload), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(payload)) if payload.nbytes else 0

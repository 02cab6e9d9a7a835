"""Small messages between the ranks of a group: one TCP connection for each pair, read and written
by whoever waits.

    rank 2  -- calls, and both prove the job's secret -->  ranks 0 and 1        each rank calls
                                                           those before it, and answers those after
                                                           it
    a frame:  length of the payload | channel | key | payload                   frames of all
              channels share the connection

Workers agree with such messages, and sum what is small, in every training step. Gloo could carry
them, and takes ten times the processor time for it. What the network doesn't take at once is
written by a thread.
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
from paceline.comm.p2p.connection import STRANGERS, CallerCrowd, Listening, admit, call
from paceline.errors import DeadlineExceeded, PlaceError

FRAME = struct.Struct("<IBQ")  # bytes of payload, channel, key
CHUNK = 1 << 18  # bytes that are read at a time
TICK = 0.1  # seconds in which a wait for callers looks up
Payload: TypeAlias = bytes | memoryview
# sender, channel, key: messages that have the same keep their order
Key: TypeAlias = tuple[int, int, int]


class ControlLink:
    """The connection to one rank: what has come of the next frame, and what the network has not
    taken yet.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        connection.setblocking(False)
        self.connection, self.peer = connection, peer
        self.ended = ""  # why nothing more comes
        self._came, self._unsent = bytearray(), bytearray()

    @property
    def sending(self) -> bool:
        """Whether there is something left to send."""
        return bool(self._unsent)

    def send(self, *parts: Payload) -> None:
        """Send what is left, and these parts, as far as the network takes it; the rest is kept
        as a copy.
        """
        waiting = (self._unsent, *parts) if self._unsent else parts
        sent = 0
        try:
            sent = self.connection.sendmsg(waiting)
        except BlockingIOError:
            pass
        except OSError as error:
            self.ended = error.strerror or str(error)
        left = bytearray()
        for part in waiting:
            left += part[sent:]
            sent = max(0, sent - len(part))
        self._unsent = left

    def receive(self) -> list[tuple[int, int, bytes]]:
        """Return the frames that have come: channel, key, payload."""
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
        self._came += chunk
        frames, at = [], 0
        while len(self._came) >= at + FRAME.size:
            length, channel, key = FRAME.unpack_from(self._came, at)
            stop = at + FRAME.size + length
            if len(self._came) < stop:
                break
            frames.append((channel, key, bytes(memoryview(self._came)[at + FRAME.size : stop])))
            at = stop
        del self._came[:at]
        return frames


class ControlExchange:
    """Messages to and from other ranks: it ends when all that is awaited has come, and all is
    sent.
    """

    def __init__(
        self,
        end: ControlNetwork,
        targets: Sequence[int],
        awaited: Sequence[Key],
        places: Sequence[memoryview],
    ) -> None:
        # what has come, in the order of `awaited`, where no places were given for it
        self.answers = [b""] * len(awaited)
        self._end, self._targets, self._awaited, self._places = end, {*targets}, awaited, places
        self._missing = set(range(len(awaited)))
        self._flaw = ""
        self._kept: object = None

    def keep(self, owners: object) -> None:
        """Hold what the places are the memory of, as long as something may come."""
        self._kept = owners

    def take(self, index: int, payload: bytes) -> None:
        """Note what has come."""
        if not self._places:
            self.answers[index] = payload
        elif len(payload) == self._places[index].nbytes:
            self._places[index][:] = payload
        else:
            source = self._end.names[self._awaited[index][0]]
            self._flaw = (
                f"{len(payload)} bytes came from rank {source} where {self._places[index].nbytes} "
                "were awaited"
            )
        self._missing.discard(index)

    @property
    def complete(self) -> bool:
        """Whether the exchange has ended well."""
        return not (
            self._missing
            or self._flaw
            or self._targets & self._end.sending
            or self._targets & self._end.unreached
        )

    @property
    def failure(self) -> str:
        """Why it can't end well, if so."""
        if self._flaw or not self._end.ended or self.complete:
            return self._flaw
        broken = next(
            (
                rank
                for rank, *_ in map(self._awaited.__getitem__, self._missing)
                if rank in self._end.ended
            ),
            None,
        )
        broken = next(iter(self._targets & self._end.unreached), None) if broken is None else broken
        if broken is None:
            return ""
        return (
            f"the connection to rank {self._end.names[broken]} has ended: "
            f"{self._end.links[broken].ended}"
        )

    def within(self, seconds: float) -> bool:
        """Wait at most so long; whether the exchange has ended well.

        Raises `RuntimeError` when it has failed.
        """
        self._end.run(lambda: self.complete or bool(self.failure), seconds)
        if failure := self.failure:
            raise RuntimeError(failure)
        return self.complete

    def now(self) -> bool:
        """Whether `within` would answer at once."""
        self._end.run(lambda: self.complete, 0.0)
        return self.complete or bool(self.failure)


class ControlNetwork:
    """The end of rank `rank`, which listens on the local `address`.

    `names`: what the ranks are called in errors.
    """

    def __init__(self, address: str, rank: int, names: Sequence[int]) -> None:
        self.rank, self.size, self.names = rank, len(names), tuple(names)
        self.links: dict[int, ControlLink] = {}
        try:
            self._listener = network.listen(address)
        except OSError as error:
            raise PlaceError(
                f"can't listen on {address} ({error.strerror or error}): choose an address of this "
                "machine"
            ) from error
        self.listening = Listening(address, self._listener.getsockname()[1], random.token_hex(16))
        self._early: dict[Key, deque[bytes]] = {}  # what has come before this rank asked for it
        # what this rank has asked for: whose it is, and which of those
        self._awaited: dict[Key, deque[tuple[ControlExchange, int]]] = {}
        self._poll = select.poll()
        self._by_descriptor: dict[int, ControlLink] = {}
        # a thread that looks at the connections learns of it when there is more to look at
        self._waker, self._woken = socket.socketpair()
        for side in (self._waker, self._woken):
            side.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)
        self._changed = threading.Condition()
        self.sending: set[int] = set()  # ranks for which the network has not taken all yet
        self.ended: set[int] = set()  # ranks whose connections have ended
        self.unreached: set[int] = set()  # those of them for which there was something to send
        self._writer: threading.Thread | None = None
        self._closed = False
        self._polling = False  # a thread looks at the connections; others wait for what it finds

    def connect(
        self, store: Store, others: Sequence[Listening], deadline: float, check: Callable[[], None]
    ) -> None:
        """Connect to all other ranks, which do so, too.

        `others`: where each rank listens. `check` raises to give up.

        Raises `DeadlineExceeded` that names the ranks which don't come, `WorkerLost` for one that
        has gone.
        """
        end = time.monotonic() + deadline
        for peer in range(self.rank):
            name, key = self.names[peer], store.derive(f"control {others[peer].token}")
            left = max(0.0, end - time.monotonic())
            ranks = (self.rank, peer)
            connection = call(
                others[peer], key, ranks, who=f"rank {name}", name=name, deadline=left, check=check
            )
            self._enter(connection, peer, deadline)
        key, known = (
            store.derive(f"control {self.listening.token}"),
            range(self.rank + 1, self.size),
        )
        # callers prove themselves side by side: some may say nothing
        crowd, news = CallerCrowd(STRANGERS), select.poll()
        self._listener.settimeout(TICK)
        news.register(self._listener, select.POLLIN)
        news.register(self._woken, select.POLLIN)
        while absent := [peer for peer in known if peer not in self.links]:
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
                        target=self._answer,
                        args=(connection, key, absent, deadline, crowd),
                        daemon=True,
                    ).start()

    def _answer(
        self,
        connection: socket.socket,
        key: bytes,
        awaited: Sequence[int],
        deadline: float,
        crowd: CallerCrowd,
    ) -> None:
        """Let a caller in, if it proves soon that it is one of the awaited ranks."""
        try:
            peer = admit(connection, key, self.rank, awaited)
        except OSError:
            peer = None
        crowd.leave(connection)
        with self._changed:
            if peer is None or peer in self.links or self._closed:
                connection.close()
                return
            self._enter(connection, peer, deadline)
            with contextlib.suppress(OSError):
                self._waker.send(b"x")

    def _enter(self, connection: socket.socket, peer: int, deadline: float) -> None:
        # a link that is down may come back until the deadline
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * deadline)
            )
        self.links[peer] = self._by_descriptor[connection.fileno()] = ControlLink(connection, peer)
        self._poll.register(connection, select.POLLIN)

    def gather(self, channel: int, number: int, payload: bytes) -> ControlExchange:
        """Begin call `number`, from 0 on, of those on a channel in which each rank tells all
        others something of any length.
        """
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        return self.start(channel, number, [(peer, payload) for peer in peers], sorted(peers))

    def start(
        self,
        channel: int,
        key: int,
        sends: Sequence[tuple[int, Payload]],
        sources: Sequence[int],
        places: Sequence[memoryview] = (),
    ) -> ControlExchange:
        """Send messages, and await one from each of `sources`.

        `places`: memory for each, of exactly its size (none: made for them).

        Payloads may be written to again when this returns.
        """
        awaited = [(source, channel, key) for source in sources]
        exchange = ControlExchange(self, [peer for peer, _ in sends], awaited, places)
        with self._changed:
            for index, each in enumerate(awaited):
                early = self._early.get(each)
                if early:
                    exchange.take(index, early.popleft())
                    if not early:
                        del self._early[each]
                else:
                    self._awaited.setdefault(each, deque()).append((exchange, index))
            for peer, payload in sends:
                self._send(self.links[peer], FRAME.pack(len(payload), channel, key), payload)
        return exchange

    def push(self) -> None:
        """Let a thread write what the network has not taken, if there is something: this rank
        may not wait for long.
        """
        if not self.sending:
            return
        with self._changed:
            if self._writer is None and not self._closed:
                self._writer = threading.Thread(
                    target=self._write, name="paceline writer", daemon=True
                )
                self._writer.start()
            self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.sending or self._closed)
                if self._closed:
                    return
            with contextlib.suppress(OSError):  # closed meanwhile
                self.run(lambda: not self.sending or self._closed, TICK)

    def _send(self, link: ControlLink, *parts: Payload) -> None:
        if link.ended:
            self.unreached.add(link.peer)
            return
        link.send(*parts)
        if link.ended:
            self._drop(link)
        elif link.sending != (link.peer in self.sending):
            (self.sending.add if link.sending else self.sending.remove)(link.peer)
            self._poll.modify(
                link.connection, select.POLLIN | (select.POLLOUT if link.sending else 0)
            )
            if self._polling and link.sending:
                with contextlib.suppress(BlockingIOError):  # it has been told often enough
                    self._waker.send(b"x")

    def _drop(self, link: ControlLink) -> None:
        """Look no more at a connection that has ended."""
        self.ended.add(link.peer)
        if link.sending:
            self.unreached.add(link.peer)
        self.sending.discard(link.peer)
        if self._by_descriptor.pop(link.connection.fileno(), None) is not None:
            self._poll.unregister(link.connection)

    def run(self, done: Callable[[], bool], seconds: float) -> None:
        """Send and receive until `done`, at most so long.

        Threads that wait at a time take turns.
        """
        end = time.monotonic() + seconds
        while True:
            with self._changed:
                if done():
                    return
                left = end - time.monotonic()
                if self._polling:
                    if left <= 0 or not self._changed.wait(left):
                        return
                    continue
                self._polling = True
            found: list[tuple[int, int]] = []
            try:
                found = self._poll.poll(max(0, math.ceil(1000 * left)))
            finally:
                with self._changed:
                    self._polling = False
                    for descriptor, events in found:
                        self._serve(descriptor, events)
                    self._changed.notify_all()
            if not found or left <= 0:
                return

    def _serve(self, descriptor: int, events: int) -> None:
        """Do for a connection what it is ready for."""
        link = self._by_descriptor.get(descriptor)
        if link is None:
            if descriptor == self._woken.fileno():
                self._woken.recv(CHUNK)
            return
        if events & select.POLLOUT:
            self._send(link)
        if events & ~select.POLLOUT:
            for channel, key, payload in link.receive():
                self._deliver((link.peer, channel, key), payload)
        if link.ended:
            self._drop(link)

    def _deliver(self, key: Key, payload: bytes) -> None:
        """Give what has come to whoever has asked for it first."""
        awaited = self._awaited.get(key)
        if awaited is None:
            self._early.setdefault(key, deque()).append(payload)
            return
        exchange, index = awaited.popleft()
        if not awaited:
            del self._awaited[key]
        exchange.take(index, payload)

    def close(self) -> None:
        """Let go of the connections."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for link in self.links.values():
                self._drop(link)
                link.ended = link.ended or "it has been closed here"
                link.connection.close()
            if self._woken.fileno() >= 0:
                self._poll.unregister(self._woken)
            self._waker.close()
            self._woken.close()
        self._listener.close()

"""Messages between ranks: a TCP connection for each pair, served by a mesh.

    rank 2  -- calls, both prove the job's secret -->  ranks 0 and 1     a rank calls lower ranks,
                                                                         and answers higher ones
    channels share a connection

Workers agree by such messages, and exchange tensors, in every training step. Gloo could carry
them, but would take ten times the processor time for small ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import secrets as random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from paceline.cluster import network
from paceline.cluster.store import Store
from paceline.comm.group_protocol import Op
from paceline.comm.native.schedule_run import WRONG_BYTES, RunFailure, ScheduleRun
from paceline.comm.native.schedule_steps import RankSteps, compile_steps
from paceline.comm.p2p.connection import (
    STRANGERS,
    ListeningAddress,
    UnprovedCallers,
    admit_sender,
    call_worker,
)
from paceline.comm.p2p.socket_mesh import NOT_SENT, SENT, ArrivedMessage, SocketMesh, give_back
from paceline.comm.schedule import Schedule
from paceline.errors import DeadlineExceeded, PlaceError
from paceline.native.functions import address_of_bytes

TICK = 0.1  # seconds between two looks at the deadline in a wait for callers
SMALL = 512 << 10  # bytes of a payload that is copied: it may be written to again at once
LANDS = 256 << 10  # bytes from which a payload is received right in its place
Payload: TypeAlias = bytes | memoryview
# Sender, channel and key. Messages that share all three keep their order.
Key: TypeAlias = tuple[int, int, int]


class ControlExchange:
    """Messages to and from other ranks. It is complete when all have come, and all are sent."""

    def __init__(
        self,
        end: ControlNetwork,
        sends: Sequence[tuple[int, Payload]],
        awaited: Sequence[Key],
        places: Sequence[memoryview],
        owners: object,
    ) -> None:
        # Payloads in the order of `awaited`, if there are no places for them.
        self.answers = [b""] * len(awaited)
        self._end, self._awaited, self._places = end, awaited, places
        self._missing = set(range(len(awaited)))
        self._unsent: dict[int, int] = {}  # by rank, the number of the message on its link
        self._unreached: set[int] = set()  # ranks that a message can't reach any more
        self._flaw = ""
        self.has_started = False  # whether all messages have been handed to the mesh
        # Memory that is read and written until the exchange is complete.
        self._memory = sends, owners

    def note_sent(self, rank: int, number: int) -> None:
        """Note what `SocketMesh.send` has returned for the message to a rank."""
        if number == NOT_SENT:
            self._unreached.add(rank)
        elif number != SENT:
            self._unsent[rank] = number

    def take_payload(self, index: int, arrived: ArrivedMessage) -> None:
        """Take the payload of message `index`, which is copied unless it has landed."""
        nbytes = arrived.nbytes
        if not self._places:
            self.answers[index] = ctypes.string_at(arrived.address, nbytes)
        elif nbytes == self._places[index].nbytes:
            if not arrived.has_landed:
                ctypes.memmove(_address_of(self._places[index]), arrived.address, nbytes)
        else:
            source = self._end.names[self._awaited[index][0]]
            self._flaw = describe_wrong_size(source, nbytes, self._places[index].nbytes)
        self._missing.discard(index)
        give_back(arrived.address)

    @property
    def is_complete(self) -> bool:
        """Whether everything has come, and everything is sent."""
        if self._missing or self._flaw or self._unreached:
            return False
        return self.is_sent

    @property
    def is_sent(self) -> bool:
        """Whether everything is sent that can be."""
        self._unsent = {
            rank: number
            for rank, number in self._unsent.items()
            if not self._end.has_sent(rank, number)
        }
        return self.has_started and not self._unsent

    @property
    def failure(self) -> str:
        """Why the exchange can't complete any more; empty if it can."""
        if self._flaw or self.is_complete or not (self._end.lost or self._end.has_ended_links):
            return self._flaw
        if self._end.lost:
            return self._end.lost
        # A rank that a message is awaited from, or that some bytes did not reach.
        sources = {self._awaited[index][0] for index in self._missing}
        for rank in sorted(sources | self._unreached | self._unsent.keys()):
            if reason := self._end.find_end(rank):
                # Another thread may have read the last message and the end since the last look.
                self._end.look_for_messages()
                text = f"the connection to rank {self._end.names[rank]} has ended: {reason}"
                return "" if self.is_complete else self._flaw or text
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
        self._sending: list[ControlExchange] = []  # exchanges with payloads that are not sent yet
        # All-reduces that have not ended well: C may write to their tensors until the mesh closes.
        self._runs: list[ScheduleRun] = []
        self._n_runs = 0  # so far; all ranks begin them in the same order
        self.lost = ""  # why messages may be lost; empty if none are
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
        *,
        owners: object = None,
    ) -> ControlExchange:
        """Begin an exchange of messages.

        Payloads of at most SMALL bytes may be written to again when this returns, larger ones when
        the exchange is complete.

        Args:
            channel: Number of the channel.
            key: Key of the messages on the channel.
            sends: Pairs (rank, payload).
            sources: Ranks to await a message from.
            places: Memory for each of these, of exactly its size. Default: new memory.
            owners: Objects to keep alive, whose memory payloads and places are. Default: none.
        """
        awaited = [(source, channel, key) for source in sources]
        exchange = ControlExchange(self, sends, awaited, places, owners)
        with self._lock:
            # Until its payloads are sent, the exchange stays alive, and with it their memory.
            self._sending = [each for each in self._sending if not each.is_sent]
            self._sending.append(exchange)
            for index, message_key in enumerate(awaited):
                # Another rank may have sent before this one began to wait.
                early = self._early.get(message_key)
                if early:
                    exchange.take_payload(index, early.popleft())
                    if not early:
                        del self._early[message_key]
                    continue
                self._awaited.setdefault(message_key, deque()).append((exchange, index))
                if places and places[index].nbytes >= LANDS:
                    address, nbytes = _address_of(places[index]), places[index].nbytes
                    link = self.links[message_key[0]]
                    self.mesh.expect_message(link, channel, key, address, nbytes)
            # With the lock, so that messages of one key leave in the order of their exchanges.
            for peer, payload in sends:
                number = self.mesh.send(
                    self.links[peer],
                    [(_address_of(payload), len(payload))],
                    channel=channel,
                    key=key,
                    copies=len(payload) <= SMALL,
                )
                exchange.note_sent(peer, number)
            exchange.has_started = True
            if exchange.is_sent:
                self._sending.pop()
        return exchange

    def plan_reduction(self, schedule: Schedule, numel: int) -> RankSteps:
        """Compile this rank's steps of a schedule, for a tensor of `numel` elements."""
        links = tuple(self.links.get(rank, -1) for rank in range(self.size))
        return compile_steps(schedule, self.rank, numel, links)

    def start_reduction(self, steps: RankSteps, tensor: Tensor, op: Op) -> ScheduleRun:
        """Begin to reduce a contiguous tensor in place. All ranks begin reductions in one order.

        `steps`: from `plan_reduction`, for the number of elements of the tensor.
        """
        with self._lock:
            self._runs = [run for run in self._runs if not run.has_ended_well]
            self._n_runs += 1
            run = ScheduleRun(
                self.mesh,
                self._n_runs,
                steps,
                tensor,
                op,
                describe_failure=self._describe_failure,
            )
            self._runs.append(run)
        return run

    def _describe_failure(self, failure: RunFailure) -> str:
        source = self.names[self._ranks[failure.link]]
        if failure.state == WRONG_BYTES:
            return describe_wrong_size(source, failure.came, failure.wanted)
        reason = self.mesh.find_end(failure.link)
        return f"the connection to rank {source} has ended: {reason}"

    def look_for_messages(self) -> None:
        """Hand messages that have come to the exchanges that wait for them."""
        with self._lock:
            try:
                while (arrived := self.mesh.take_message()) is not None:
                    self._deliver(arrived)
            except BaseException as error:  # an interrupt: a message may be lost
                self.lost = f"messages were lost here ({type(error).__name__})"
                raise

    def _deliver(self, arrived: ArrivedMessage) -> None:
        message_key = self._ranks[arrived.link], arrived.channel, arrived.key
        awaited = self._awaited.get(message_key)
        if awaited is None:
            self._early.setdefault(message_key, deque()).append(arrived)
            return
        exchange, index = awaited.popleft()
        if not awaited:
            del self._awaited[message_key]
        exchange.take_payload(index, arrived)

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
        self._runs.clear()
        for messages in early.values():
            for arrived in messages:
                give_back(arrived.address)
        self._listener.close()


def describe_wrong_size(source: int, nbytes: int, wanted: int) -> str:
    """Say that a message of rank `source` has another size than it should have."""
    return f"rank {source} sent {nbytes} bytes, not the {wanted} that it should have sent"


def _address_of(payload: Payload) -> int:
    """Address of memory that stays alive while it is used."""
    if isinstance(payload, bytes):
        return address_of_bytes(payload)
    return ctypes.addressof(ctypes.c_char.from_buffer(payload)) if payload.nbytes else 0

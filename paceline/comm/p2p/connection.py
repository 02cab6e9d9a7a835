"""A TCP connection that carries messages one way between two workers, and the proof with which it
begins.

    sender      its rank, nonce a                                      -->
                                    <--   nonce b, MAC(receiver, ranks, a, b)
                MAC(sender, ranks, a, b)                               -->
                                    <--   a byte: it is let in
                length | header | tensor | tensor | length | header ...

Both prove that they know a key: it comes of the job's secret, and of a number that the receiver has
put, signed, into the store.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets as random
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cluster import secret as secrets
from paceline.comm.p2p.memory import SMALLEST, MemoryPool, tensor
from paceline.comm.p2p.message import LONGEST, PairMessage, unpack
from paceline.comm.wire_format import MalformedMessage
from paceline.errors import DeadlineExceeded, PacelineError, SecretError, WorkerLost
from paceline.state.snapshot import raw

MAGIC = b"pacepair"
HELLO = struct.Struct("<8sI16s")  # what it is, rank of the sender, nonce
NONCE = 16
PROOF = 4.0  # seconds that a connection may take to prove itself
SILENCE = 15  # seconds after which a host that doesn't answer counts as lost
WELCOME = b"."  # what the receiver says to a sender that it lets in
LENGTH = struct.Struct("<I")
MOST = 64  # pieces of memory that are sent at a time
RETRY, LONGEST_RETRY = 0.02, 0.5  # seconds between two tries to connect
STRANGERS = 64  # connections at a time that have proved nothing yet
ROOM = 0.1  # seconds to wait for one of them to end by itself
GONE = 1.0  # seconds in which the thread of one that was hung up on lets go of it


class Listening(NamedTuple):
    """Where a worker listens, and the number that is drawn for connections to it."""

    address: str
    port: int
    token: str


class CallerCrowd:
    """Connections that each hold a thread, at most `most`: strangers who keep theirs open make
    no room for others, and are hung up on.
    """

    def __init__(self, most: int) -> None:
        self._most, self._open, self._changed = most, list[socket.socket](), threading.Condition()

    def enter(self, connection: socket.socket) -> None:
        """Count a connection, once there is room: if none has left for a moment, all the others
        are hung up on.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_room, ROOM):
                for other in self._open:
                    cut(other)
                self._changed.wait_for(self._has_room, GONE)
            self._open.append(connection)

    def leave(self, connection: socket.socket) -> None:
        """Count a connection no more. Twice is harmless."""
        with self._changed:
            if connection in self._open:
                self._open.remove(connection)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._open) < self._most


def call(
    listening: Listening,
    key: bytes,
    ranks: tuple[int, int],
    *,
    who: str,
    name: int,
    deadline: float,
    check: Callable[[], None],
) -> socket.socket:
    """Connect to another worker, and prove to each other who is who.

    Tries for `deadline` seconds; `check` raises to give up.

    `ranks`: of the caller, and of `who`, which is called `name` in errors.
    """
    last, nap = time.monotonic() + deadline, RETRY
    while True:
        connection = None
        try:
            connection = socket.create_connection(
                (listening.address, listening.port), max(0.1, min(PROOF, last - time.monotonic()))
            )
            introduce(connection, key, ranks, who)
            _enter(connection, last, check)
            return connection
        except ConnectionRefusedError as error:
            raise WorkerLost(
                f"{who} is gone: nobody listens at {listening.address}:{listening.port} any more",
                (name,),
            ) from error
        except (OSError, PacelineError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, PacelineError):
                raise
            check()
            if time.monotonic() + nap > last:
                text = (
                    f"{who} can't be reached at {listening.address}:{listening.port} within "
                    f"{deadline:g} s ({error})"
                )
                raise DeadlineExceeded(text, (name,)) from error
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_RETRY)


def introduce(connection: socket.socket, key: bytes, ranks: tuple[int, int], who: str) -> None:
    """Prove, as a sender, to the receiver, and have it prove itself.

    Raises `OSError`, and `SecretError` for a stranger.
    """
    _tune(connection)
    end, nonce = time.monotonic() + PROOF, random.token_bytes(NONCE)
    connection.sendall(HELLO.pack(MAGIC, ranks[0], nonce))
    answer = _exactly(connection, NONCE + secrets.MAC_BYTES, end)
    nonces = nonce + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _proof(key, "receiver", ranks, nonces)):
        raise SecretError(
            f"who answers in the place of {who} doesn't know the secret of this job: "
            "another program listens there"
        )
    connection.sendall(_proof(key, "sender", ranks, nonces))


def _enter(connection: socket.socket, last: float, check: Callable[[], None]) -> None:
    """Wait until the receiver has let this sender in.

    Raises `OSError`: a receiver to which the proof came too late has hung up.
    """
    while True:
        try:
            _exactly(connection, len(WELCOME), min(last, time.monotonic() + PROOF))
            break
        except TimeoutError:
            if time.monotonic() >= last:
                raise
            check()
    connection.settimeout(None)


def admit(connection: socket.socket, key: bytes, rank: int, known: Collection[int]) -> int | None:
    """Return the rank of a sender that has called and proved itself; None for anybody else.

    Raises `OSError`.
    """
    end = time.monotonic() + PROOF
    _tune(connection)
    magic, source, nonce = HELLO.unpack(_exactly(connection, HELLO.size, end))
    if magic != MAGIC or source not in known:
        return None
    nonces = nonce + random.token_bytes(NONCE)
    connection.sendall(nonces[NONCE:] + _proof(key, "receiver", (source, rank), nonces))
    mac = _exactly(connection, secrets.MAC_BYTES, end)
    if not hmac.compare_digest(mac, _proof(key, "sender", (source, rank), nonces)):
        return None
    connection.settimeout(None)
    connection.sendall(WELCOME)
    return int(source)


def _proof(key: bytes, side: str, ranks: tuple[int, int], nonces: bytes) -> bytes:
    """Make the proof of one side of a connection. `ranks`: those of the sender and the receiver."""
    return secrets.sign(key, side.encode(), struct.pack("<II", *ranks), nonces)


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", 1000 * SILENCE),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _exactly(connection: socket.socket, nbytes: int, end: float) -> bytes:
    """Read so many bytes until `end` (time.monotonic()). Raises `OSError`."""
    found = b""
    while len(found) < nbytes:
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(nbytes - len(found))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        found += part
    return found


def _fill(connection: socket.socket, into: memoryview) -> int:
    """Read until `into` is full, or nothing more comes; return how many bytes came."""
    at = 0
    while at < into.nbytes and (count := connection.recv_into(into[at:], 0, socket.MSG_WAITALL)):
        at += count
    return at


def read(connection: socket.socket, pool: MemoryPool) -> tuple[int, PairMessage] | None:
    """Read the next message, with its lane, into memory of `pool`; None at the end of all.

    Raises `OSError`, and `MalformedMessage`.
    """
    length = bytearray(LENGTH.size)
    came = _fill(connection, memoryview(length))
    if not came:
        return None
    [nbytes] = LENGTH.unpack(length)
    if came < LENGTH.size or nbytes > LONGEST:
        raise MalformedMessage("what comes is no message")
    text = bytearray(nbytes)
    _whole(connection, memoryview(text))
    header = unpack(bytes(text))
    layout = header.layout
    tensors = [
        _tensor(connection, pool, size, *form)
        for size, form in zip(layout.lengths, layout.forms, strict=True)
    ]
    return header.lane, PairMessage(header.head, tuple(tensors))


def _tensor(
    connection: socket.socket,
    pool: MemoryPool,
    nbytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> Tensor:
    buffer = pool.take(nbytes)
    _whole(connection, memoryview(buffer).cast("B")[:nbytes])
    return tensor(buffer, 0, nbytes, dtype, shape, alone=nbytes < SMALLEST)


def _whole(connection: socket.socket, into: memoryview) -> None:
    if _fill(connection, into) < into.nbytes:
        raise ConnectionResetError("it broke off in the middle of a message")


def frames(header: bytes, tensors: Sequence[Tensor]) -> list[memoryview]:
    """Return the memory of a message, in the order in which it is sent; that of the tensors as
    they lie, where it can be.
    """
    return [
        memoryview(LENGTH.pack(len(header)) + header),
        *(raw(x).numpy().data for x in tensors if x.numel()),
    ]


def send_some(connection: socket.socket, parts: list[memoryview]) -> list[memoryview]:
    """Send what the network takes at once; return the rest.

    A broken connection shows itself to the thread that writes the rest.
    """
    try:
        return _after(parts, connection.sendmsg(parts[:MOST], (), socket.MSG_DONTWAIT))
    except OSError:
        return parts


def send_all(connection: socket.socket, parts: list[memoryview]) -> None:
    """Send all of it. Raises `OSError`."""
    while parts:
        parts = _after(parts, connection.sendmsg(parts[:MOST]))


def _after(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of `parts` when so many bytes are sent."""
    for index, part in enumerate(parts):
        if sent < part.nbytes:
            return [part[sent:], *parts[index + 1 :]]
        sent -= part.nbytes
    return []


def has_hung_up(connection: socket.socket) -> bool:
    """Whether the other side takes nothing more."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def cut(connection: socket.socket) -> None:
    """End a connection, or a listener, at once: whoever waits at it returns.

    Its descriptor stays, as a thread may be using it.
    """
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

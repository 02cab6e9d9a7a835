"""A TCP connection for messages one way between two workers, and the proof it begins with.

    sender      its rank, nonce a                                      -->
                                    <--   nonce b, MAC(receiver, ranks, a, b)
                MAC(sender, ranks, a, b)                               -->
                                    <--   one byte: the sender is let in
                messages, as in native/mesh.h

Both sides prove that they know a key. It is derived from the job's secret and a random token that
the receiver has put into the store, signed. The nonces are fresh on both sides, so a recorded
proof is of no use later.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets as random
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from paceline.cluster import secret as secrets
from paceline.errors import DeadlineExceeded, PacelineError, SecretError, WorkerLost

MAGIC = b"pacepair"
HELLO = struct.Struct("<8sI16s")  # MAGIC, rank of the sender, nonce
NONCE = 16  # bytes
PROOF = 4.0  # seconds that a connection may take to prove itself
SILENCE = 15  # seconds after which a host that doesn't answer counts as lost
WELCOME = b"."  # sent by the receiver when it lets the sender in
RETRY, LONGEST_RETRY = 0.02, 0.5  # seconds between the first, and later, tries to connect
STRANGERS = 64  # connections that may be open at a time without a proof
ROOM = 0.1  # seconds to wait for one of them to end by itself
GONE = 1.0  # seconds in which the thread of a connection that was cut lets go of it


class ListeningAddress(NamedTuple):
    """The address at which a worker listens, and the token of connections to it."""

    address: str
    port: int
    token: str


class UnprovedCallers:
    """Unproved connections, at most `most`, as each holds a thread.

    If strangers keep all of them open, they are hung up on, so that a worker can get in.
    """

    def __init__(self, most: int) -> None:
        self._most, self._open, self._changed = most, list[socket.socket](), threading.Condition()

    def enter(self, connection: socket.socket) -> None:
        """Count a connection once there is room. If none leaves for a moment, cut all others."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, ROOM):
                for other in self._open:
                    cut_connection(other)
                self._changed.wait_for(self._has_room, GONE)
            self._open.append(connection)

    def leave(self, connection: socket.socket) -> None:
        """Count a connection no more. May be called twice."""
        with self._changed:
            if connection in self._open:
                self._open.remove(connection)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._open) < self._most


def call_worker(
    listening: ListeningAddress,
    key: bytes,
    ranks: tuple[int, int],
    *,
    who: str,
    name: int,
    deadline: float,
    check: Callable[[], None],
) -> socket.socket:
    """Connect to another worker, and prove to each other that both know the key.

    Args:
        listening: Address of the other worker.
        key: Key of connections to it.
        ranks: Ranks in the group of the caller and of the other.
        who: Words for the other in errors.
        name: Rank of the other among all workers.
        deadline: Seconds to try.
        check: Called between two tries; raises to give up.

    Raises:
        WorkerLost: The port is closed, so the other has ended.
        DeadlineExceeded: It can't be reached in time.
        SecretError: Another program listens there.
    """
    last, nap = time.monotonic() + deadline, RETRY
    while True:
        connection = None
        try:
            # A refusal means that the port is closed, and the token in the store says that it was
            # open once: the other has ended.
            connection = socket.create_connection(
                (listening.address, listening.port), max(0.1, min(PROOF, last - time.monotonic()))
            )
            prove_as_sender(connection, key, ranks, who)
            _wait_for_welcome(connection, last, check)
            return connection
        except ConnectionRefusedError as error:
            raise WorkerLost(
                (
                    f"{who} is gone: no process listens at "
                    f"{listening.address}:{listening.port} any more"
                ),
                (name,),
            ) from error
        except (OSError, PacelineError) as error:
            # The other may be busy, or have hung up as it was full of strangers: try again.
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


def prove_as_sender(
    connection: socket.socket, key: bytes, ranks: tuple[int, int], who: str
) -> None:
    """Prove this sender to the receiver, after the receiver has proved itself.

    Raises `OSError`, and `SecretError` if the receiver doesn't know the key.
    """
    _tune_connection(connection)
    end, nonce = time.monotonic() + PROOF, random.token_bytes(NONCE)
    connection.sendall(HELLO.pack(MAGIC, ranks[0], nonce))
    answer = _read_exactly(connection, NONCE + secrets.MAC_BYTES, end)
    # The receiver proves itself first, so a stranger at its address gets no proof of ours.
    nonces = nonce + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _make_proof(key, "receiver", ranks, nonces)):
        raise SecretError(
            f"another program listens at the address of {who}: "
            "it doesn't know the secret of this job"
        )
    connection.sendall(_make_proof(key, "sender", ranks, nonces))


def _wait_for_welcome(connection: socket.socket, last: float, check: Callable[[], None]) -> None:
    """Wait until the receiver has let this sender in.

    Raises `OSError`: a receiver that got the proof too late hangs up.
    """
    while True:
        try:
            _read_exactly(connection, len(WELCOME), min(last, time.monotonic() + PROOF))
            break
        except TimeoutError:
            if time.monotonic() >= last:
                raise
            check()
    connection.settimeout(None)


def admit_sender(
    connection: socket.socket, key: bytes, rank: int, allowed: Collection[int]
) -> int | None:
    """Check the proof of a sender that has connected, and return its rank.

    None for a stranger. `allowed`: ranks that may connect. Raises `OSError`.
    """
    end = time.monotonic() + PROOF
    _tune_connection(connection)
    magic, source, nonce = HELLO.unpack(_read_exactly(connection, HELLO.size, end))
    # Nothing is said to a program that doesn't speak this protocol.
    if magic != MAGIC or source not in allowed:
        return None
    nonces = nonce + random.token_bytes(NONCE)
    connection.sendall(nonces[NONCE:] + _make_proof(key, "receiver", (source, rank), nonces))
    mac = _read_exactly(connection, secrets.MAC_BYTES, end)
    if not hmac.compare_digest(mac, _make_proof(key, "sender", (source, rank), nonces)):
        return None
    connection.settimeout(None)
    connection.sendall(WELCOME)
    return int(source)


def _make_proof(key: bytes, side: str, ranks: tuple[int, int], nonces: bytes) -> bytes:
    """Make the proof of one side. `ranks`: of the sender and the receiver."""
    return secrets.sign_parts(key, side.encode(), struct.pack("<II", *ranks), nonces)


def _tune_connection(connection: socket.socket) -> None:
    # Small messages leave at once. A host that is silent for SILENCE seconds ends the connection.
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


def _read_exactly(connection: socket.socket, nbytes: int, end: float) -> bytes:
    """Read exactly `nbytes` until `end` (time.monotonic()). Raises `OSError`."""
    received = b""
    while len(received) < nbytes:
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(nbytes - len(received))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        received += part
    return received


def cut_connection(connection: socket.socket) -> None:
    """End a connection or a listener at once: threads that wait at it return.

    Its descriptor stays open. A thread may be using it, and the number must not be given to
    another file meanwhile.
    """
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

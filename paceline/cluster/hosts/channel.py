"""The authenticated channel between two launchers: signed JSON lines of bounded size.

    server                               client
      hello, nonce_s              ->
                                  <-      hello, nonce_c, MAC(secret; client, nonce_s, nonce_c)
      MAC(secret; server, ...)    ->

Both ends have then proved that they know the secret. From then on each line is preceded by
MAC(session; side, number of the line, line), with session = MAC(secret; session, nonce_s, nonce_c).
"""

from __future__ import annotations

import errno
import json
import re
import secrets as random
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from paceline.cluster import network
from paceline.cluster import secret as secrets
from paceline.errors import PacelineError, PlaceError, SecretError

PROTOCOL_VERSION = 1
_MOST_HELLO_BYTES = 1 << 12  # bytes of a line before the other side has proved anything
_MOST_LINE_BYTES = 1 << 17  # bytes of a line after that
_NONCE = re.compile(r"[0-9a-f]{32}")
# Errors that reading a malformed message may raise
MALFORMED = LookupError, TypeError, ValueError, ArithmeticError, AttributeError


class ChannelBroken(PacelineError):
    """The other side has hung up, or breaks the protocol."""


class HungUp(ChannelBroken):
    """The other side has hung up."""


def wait_ready(reading: Iterable[int], seconds: float, *, writing: Iterable[int] = ()) -> set[int]:
    """Wait for at most `seconds` until some of the descriptors are ready, and return these.

    Unlike with `select.select`, descriptors may have numbers above 1023.
    """
    poll = select.poll()
    for descriptor in reading:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writing:
        poll.register(descriptor, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, 1000 * seconds))}


class Channel:
    """A connection of two launchers that never blocks, except in `wait`.

    `hear` gives the messages that have come. `send` writes as much as the network takes, and
    `flush` the rest.

    Args:
        connection: Connected socket.
        side: "server" or "client", which differ in the introduction.
    """

    def __init__(self, connection: socket.socket, side: str) -> None:
        connection.setblocking(False)
        self.connection, self.side = connection, side
        self.heard_at = time.monotonic()
        self.nonce = random.token_hex(16)
        self._session_key: bytes | None = None  # key of the signatures, once both sides are proved
        self._incoming, self._outgoing = b"", b""
        self._sent_lines, self._received_lines = 0, 0  # signed lines
        self._unread_lines: list[bytes] = []

    def count_silence(self) -> None:
        """Count from now on how long nothing is heard of the other side."""
        self.heard_at = time.monotonic()

    def fileno(self) -> int:
        return self.connection.fileno()

    def make_proof(self, secret: bytes, other: str) -> str:
        """Make the proof that this side knows the secret. `other` is the other side's nonce."""
        return secrets.sign_parts(secret, self.side.encode(), *self._order_nonces(other)).hex()

    def verify_proof(self, secret: bytes, other: str, proof: str) -> bool:
        """Whether the other side has proved that it knows the secret.

        If so, lines are signed from now on. A server answers with its own proof, which is still
        unsigned.
        """
        if not secrets.verify_parts(
            secret, _decode_hex(proof), self._opposite_side(), *self._order_nonces(other)
        ):
            return False
        if self.side == "server":
            self.send({"proof": self.make_proof(secret, other)})
        self._session_key = secrets.sign_parts(secret, b"session", *self._order_nonces(other))
        return True

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, as soon as the network takes it.

        Raises `PlaceError` if it is too long, which happens with too many hosts.
        """
        line = json.dumps(message).encode()
        if self._session_key is not None:
            line = (
                secrets.sign_parts(
                    self._session_key, self.side.encode(), str(self._sent_lines).encode(), line
                )
                .hex()
                .encode()
                + line
            )
        if len(line) >= _MOST_LINE_BYTES:
            raise PlaceError(
                f"a launcher has {len(line):,} bytes to tell another one, and "
                f"{_MOST_LINE_BYTES - 1:,} is "
                "the most: the job has too many hosts "
                "(some 500 can take part) or workers; start fewer hosts with more workers each"
            )
        # The number of a line is signed too, so that none can be left out or sent twice.
        self._sent_lines += self._session_key is not None
        self._outgoing += line + b"\n"
        self.flush()

    def flush(self, seconds: float = 0.0) -> None:
        """Write what is left, for at most `seconds`.

        A broken connection shows in `hear`.
        """
        deadline = time.monotonic() + seconds
        while self._outgoing:
            try:
                self._outgoing = self._outgoing[self.connection.send(self._outgoing) :]
            except BlockingIOError:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not wait_ready((), remaining, writing=[self.fileno()]):
                    return
            except OSError:
                self._outgoing = b""

    def receive_message(self) -> dict[str, Any] | None:
        """The next message, or None if it isn't complete yet.

        Raises `ChannelBroken` if there won't be any.
        """
        if not self._unread_lines:
            self._read_lines()
        if not self._unread_lines:
            return None
        line = self._unread_lines.pop(0)
        self.heard_at = time.monotonic()
        # Each line begins with its signature, in hexadecimal digits.
        if self._session_key is not None:
            mac, line = line[: 2 * secrets.MAC_BYTES], line[2 * secrets.MAC_BYTES :]
            if not secrets.verify_parts(
                self._session_key,
                _decode_hex(mac.decode("ascii", "replace")),
                self._opposite_side(),
                str(self._received_lines).encode(),
                line,
            ):
                raise ChannelBroken("a line isn't signed by the other launcher")
            self._received_lines += 1
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ChannelBroken("what it says isn't JSON") from None
        if not isinstance(message, dict):
            raise ChannelBroken("what it says isn't a message")
        return message

    def wait_for_message(
        self, end: float, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Wait for the next message, and call `meanwhile` twice a second.

        Raises `ChannelBroken` if none has come by `end` (time.monotonic()).
        """
        while (message := self.receive_message()) is None:
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise ChannelBroken("it doesn't say anything")
            meanwhile()
            wait_ready([self.fileno()], min(remaining, 0.5))
        return message

    def close(self) -> None:
        """Close the connection at once. What the other side has not received yet may be lost."""
        self.connection.close()

    def drain_to_close(self) -> bool:
        """Drop what has come in, and write what is left.

        Returns:
            Whether nothing is on its way any more: the other system has acknowledged all bytes, or
            has hung up.
        """
        self.flush()
        # Unread bytes would make the system reset the connection when it is closed.
        try:
            while self.connection.recv(1 << 16):
                pass
        except BlockingIOError:
            return not self._outgoing and not network.count_unacknowledged_bytes(self.connection)
        except OSError:
            pass
        return True

    def _read_lines(self) -> None:
        """Read the lines that have come.

        Raises `HungUp` if the connection is closed, `ChannelBroken` if a line is too long.
        """
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            raise HungUp(f"the connection broke ({error.strerror})") from error
        if not data:
            raise HungUp("it hung up")
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        self._unread_lines += lines
        # A stranger must not be able to fill the memory with a line that never ends.
        longest = _MOST_HELLO_BYTES if self._session_key is None else _MOST_LINE_BYTES
        if any(len(line) > longest for line in (*lines, self._incoming)):
            raise ChannelBroken("a line is too long")

    def _opposite_side(self) -> bytes:
        return b"client" if self.side == "server" else b"server"

    def _order_nonces(self, other: str) -> tuple[bytes, bytes]:
        """The nonces of the server and the client, in this order."""
        own_nonce, other_nonce = self.nonce.encode(), other.encode()
        return (own_nonce, other_nonce) if self.side == "server" else (other_nonce, own_nonce)


def read_channel(
    channels: dict[int, Channel], descriptor: int, take: Callable[[int, dict[str, Any]], None]
) -> tuple[int, ChannelBroken] | None:
    """Pass the messages of the channel with this descriptor to `take`, with the number of the host.

    Returns:
        The host and the reason if the other side has hung up, or sends malformed messages; else
        None.
    """
    for host, channel in list(channels.items()):
        if channel.fileno() != descriptor:
            continue
        try:
            while (message := channel.receive_message()) is not None:
                take(host, message)
        except ChannelBroken as reason:
            return host, reason
        except MALFORMED as error:
            return host, ChannelBroken(
                f"it says what makes no sense ({type(error).__name__}: {error})"
            )
    return None


def close_channels(channels: Iterable[Channel], seconds: float) -> None:
    """Close channels once the other sides have received everything, or after `seconds`.

    If a system closes a connection with unread bytes, it resets it, and drops what is still on its
    way to the other side. So incoming bytes are read and dropped until then.
    """
    deadline, open_channels = time.monotonic() + seconds, [*channels]
    while open_channels:
        for channel in [*open_channels]:
            if channel.drain_to_close() or time.monotonic() > deadline:
                channel.close()
                open_channels.remove(channel)
        # `poll` doesn't report acknowledgements, so this asks again and again.
        time.sleep(0.005 if open_channels else 0.0)


def introduce_launcher(
    connection: socket.socket, secret: bytes, point: str, seconds: float
) -> Channel:
    """Introduce this launcher to another one that it has connected to, and return the channel.

    Args:
        connection: Connected socket.
        secret: Secret of the job.
        point: HOST:PORT of the other launcher, for messages.
        seconds: Longest time that the introduction may take.

    Raises:
        PlaceError: The other side isn't a launcher that waits for hosts.
        SecretError: It has another secret.
        ConnectionResetError: It hangs up at once. Forwarders of ports do so before a server listens
            behind them, and launchers that have too many callers.
    """
    channel = Channel(connection, "client")
    deadline = time.monotonic() + seconds
    greeting: dict[str, Any] = {}
    try:
        greeting = channel.wait_for_message(deadline)
        if greeting.get("paceline") != PROTOCOL_VERSION:
            raise ChannelBroken(
                f"it speaks version {str(greeting.get('paceline'))[:20]!r} and we "
                f"{PROTOCOL_VERSION}"
            )
        other_nonce = _read_nonce(greeting)
        channel.send(
            {
                "paceline": PROTOCOL_VERSION,
                "nonce": channel.nonce,
                "proof": channel.make_proof(secret, other_nonce),
            }
        )
        answer = channel.wait_for_message(deadline)
    except ChannelBroken as error:
        channel.close()
        # The network's error, so that callers try again as if nothing listened there.
        if isinstance(error, HungUp):
            raise ConnectionResetError(errno.ECONNRESET, "it hangs up at once") from error
        raise PlaceError(
            f"what answers at {point} isn't a launcher of paceline that waits for hosts ({error}): "
            "is the port in use?"
        ) from error
    if not channel.verify_proof(secret, other_nonce, str(answer.get("proof"))):
        channel.close()
        raise SecretError(
            f"the launcher at {point} has another secret than this host: "
            "give all hosts the same --secret-file or PACELINE_SECRET"
        )
    return channel


class Introduction:
    """The server's side of the introduction of a caller.

    `late` is the time (monotonic) after which the caller is to be dropped.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, address: str, seconds: float
    ) -> None:
        self.channel = Channel(connection, "server")
        self.address = address
        self.is_trusted = False
        self.deadline = time.monotonic() + seconds
        self._secret = secret
        self.channel.send({"paceline": PROTOCOL_VERSION, "nonce": self.channel.nonce})

    def receive_first_message(self) -> dict[str, Any] | None:
        """Go on with the bytes that have come.

        Returns:
            The first message after the caller has proved itself; None before it has come.

        Raises:
            ChannelBroken: The caller has hung up, or isn't a launcher.
            SecretError: It has another secret.
        """
        message = self.channel.receive_message()
        if message is None or self.is_trusted:
            return message
        if message.get("paceline") != PROTOCOL_VERSION:
            raise ChannelBroken("it isn't a launcher")
        other_nonce = _read_nonce(message)
        if not self.channel.verify_proof(self._secret, other_nonce, str(message.get("proof"))):
            # The caller gets this instead of a proof, so it reports another secret, too.
            self.channel.send({"refused": "secret"})
            raise SecretError(
                f"a launcher at {self.address} came with another secret: "
                "give all hosts the same --secret-file or PACELINE_SECRET"
            )
        self.is_trusted = True
        return self.receive_first_message()


def _read_nonce(message: dict[str, Any]) -> str:
    """Read the other side's nonce. Raises `ChannelBroken` if it is malformed."""
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise ChannelBroken("it isn't a launcher")
    return nonce


def _decode_hex(text: str) -> bytes:
    """Decode hexadecimal digits; empty if they are malformed."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""

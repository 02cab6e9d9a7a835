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

PROTOCOL = 1
_LONGEST_HELLO = 1 << 12  # bytes of a line before the other side has proved anything
_LONGEST = 1 << 17  # bytes of a line after that
_NONCE = re.compile(r"[0-9a-f]{32}")
# Errors that reading a malformed message may raise
SENSELESS = LookupError, TypeError, ValueError, ArithmeticError, AttributeError


class ChannelBroken(PacelineError):
    """The other side has hung up, or breaks the protocol."""


class HungUp(ChannelBroken):
    """The other side has hung up."""


def ready(reading: Iterable[int], seconds: float, *, writing: Iterable[int] = ()) -> set[int]:
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
        self.heard = time.monotonic()
        self.nonce = random.token_hex(16)
        self._session: bytes | None = None  # key of the signatures, once both sides are proved
        self._in, self._out = b"", b""
        self._sent, self._received = 0, 0  # signed lines
        self._lines: list[bytes] = []

    def count_silence(self) -> None:
        """Count from now on how long nothing is heard of the other side."""
        self.heard = time.monotonic()

    def fileno(self) -> int:
        return self.connection.fileno()

    def prove(self, secret: bytes, other: str) -> str:
        """Make the proof that this side knows the secret. `other` is the other side's nonce."""
        return secrets.sign(secret, self.side.encode(), *self._nonces(other)).hex()

    def trust(self, secret: bytes, other: str, proof: str) -> bool:
        """Whether the other side has proved that it knows the secret.

        If so, lines are signed from now on. A server answers with its own proof, which is still
        unsigned.
        """
        if not secrets.verify(secret, _unhex(proof), self._opposite(), *self._nonces(other)):
            return False
        if self.side == "server":
            self.send({"proof": self.prove(secret, other)})
        self._session = secrets.sign(secret, b"session", *self._nonces(other))
        return True

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, as soon as the network takes it.

        Raises `PlaceError` if it is too long, which happens with too many hosts.
        """
        line = json.dumps(message).encode()
        if self._session is not None:
            line = (
                secrets.sign(self._session, self.side.encode(), str(self._sent).encode(), line)
                .hex()
                .encode()
                + line
            )
        if len(line) >= _LONGEST:
            raise PlaceError(
                f"a launcher has {len(line):,} bytes to tell another one, and {_LONGEST - 1:,} is "
                "the most: the job has too many hosts "
                "(some 500 can take part) or workers; start fewer hosts with more workers each"
            )
        # The number of a line is signed too, so that none can be left out or sent twice.
        self._sent += self._session is not None
        self._out += line + b"\n"
        self.flush()

    def flush(self, seconds: float = 0.0) -> None:
        """Write what is left, for at most `seconds`.

        A broken connection shows in `hear`.
        """
        deadline = time.monotonic() + seconds
        while self._out:
            try:
                self._out = self._out[self.connection.send(self._out) :]
            except BlockingIOError:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not ready((), remaining, writing=[self.fileno()]):
                    return
            except OSError:
                self._out = b""

    def hear(self) -> dict[str, Any] | None:
        """The next message, or None if it isn't complete yet.

        Raises `ChannelBroken` if there won't be any.
        """
        if not self._lines:
            self._read()
        if not self._lines:
            return None
        line = self._lines.pop(0)
        self.heard = time.monotonic()
        # Each line begins with its signature, in hexadecimal digits.
        if self._session is not None:
            mac, line = line[: 2 * secrets.MAC_BYTES], line[2 * secrets.MAC_BYTES :]
            if not secrets.verify(
                self._session,
                _unhex(mac.decode("ascii", "replace")),
                self._opposite(),
                str(self._received).encode(),
                line,
            ):
                raise ChannelBroken("a line isn't signed by the other launcher")
            self._received += 1
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ChannelBroken("what it says isn't JSON") from None
        if not isinstance(message, dict):
            raise ChannelBroken("what it says isn't a message")
        return message

    def wait(self, end: float, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait for the next message, and call `meanwhile` twice a second.

        Raises `ChannelBroken` if none has come by `end` (time.monotonic()).
        """
        while (message := self.hear()) is None:
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise ChannelBroken("it doesn't say anything")
            meanwhile()
            ready([self.fileno()], min(remaining, 0.5))
        return message

    def close(self) -> None:
        """Close the connection at once. What the other side has not received yet may be lost."""
        self.connection.close()

    def drain(self) -> bool:
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
            return not self._out and not network.unacknowledged(self.connection)
        except OSError:
            pass
        return True

    def _read(self) -> None:
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
        *lines, self._in = (self._in + data).split(b"\n")
        self._lines += lines
        # A stranger must not be able to fill the memory with a line that never ends.
        longest = _LONGEST_HELLO if self._session is None else _LONGEST
        if any(len(line) > longest for line in (*lines, self._in)):
            raise ChannelBroken("a line is too long")

    def _opposite(self) -> bytes:
        return b"client" if self.side == "server" else b"server"

    def _nonces(self, other: str) -> tuple[bytes, bytes]:
        """The nonces of the server and the client, in this order."""
        own_nonce, other_nonce = self.nonce.encode(), other.encode()
        return (own_nonce, other_nonce) if self.side == "server" else (other_nonce, own_nonce)


def hear_from(
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
            while (message := channel.hear()) is not None:
                take(host, message)
        except ChannelBroken as reason:
            return host, reason
        except SENSELESS as error:
            return host, ChannelBroken(
                f"it says what makes no sense ({type(error).__name__}: {error})"
            )
    return None


def hang_up(channels: Iterable[Channel], seconds: float) -> None:
    """Close channels once the other sides have received everything, or after `seconds`.

    If a system closes a connection with unread bytes, it resets it, and drops what is still on its
    way to the other side. So incoming bytes are read and dropped until then.
    """
    deadline, open_channels = time.monotonic() + seconds, [*channels]
    while open_channels:
        for channel in [*open_channels]:
            if channel.drain() or time.monotonic() > deadline:
                channel.close()
                open_channels.remove(channel)
        # `poll` doesn't report acknowledgements, so this asks again and again.
        time.sleep(0.005 if open_channels else 0.0)


def call(connection: socket.socket, secret: bytes, point: str, seconds: float) -> Channel:
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
        greeting = channel.wait(deadline)
        if greeting.get("paceline") != PROTOCOL:
            raise ChannelBroken(
                f"it speaks version {str(greeting.get('paceline'))[:20]!r} and we {PROTOCOL}"
            )
        other_nonce = _nonce(greeting)
        channel.send(
            {
                "paceline": PROTOCOL,
                "nonce": channel.nonce,
                "proof": channel.prove(secret, other_nonce),
            }
        )
        answer = channel.wait(deadline)
    except ChannelBroken as error:
        channel.close()
        # The network's error, so that callers try again as if nothing listened there.
        if isinstance(error, HungUp):
            raise ConnectionResetError(errno.ECONNRESET, "it hangs up at once") from error
        raise PlaceError(
            f"what answers at {point} isn't a launcher of paceline that waits for hosts ({error}): "
            "is the port in use?"
        ) from error
    if not channel.trust(secret, other_nonce, str(answer.get("proof"))):
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
        self.trusted = False
        self.late = time.monotonic() + seconds
        self._secret = secret
        self.channel.send({"paceline": PROTOCOL, "nonce": self.channel.nonce})

    def step(self) -> dict[str, Any] | None:
        """Go on with the bytes that have come.

        Returns:
            The first message after the caller has proved itself; None before it has come.

        Raises:
            ChannelBroken: The caller has hung up, or isn't a launcher.
            SecretError: It has another secret.
        """
        message = self.channel.hear()
        if message is None or self.trusted:
            return message
        if message.get("paceline") != PROTOCOL:
            raise ChannelBroken("it isn't a launcher")
        other_nonce = _nonce(message)
        if not self.channel.trust(self._secret, other_nonce, str(message.get("proof"))):
            # The caller gets this instead of a proof, so it reports another secret, too.
            self.channel.send({"refused": "secret"})
            raise SecretError(
                f"a launcher at {self.address} came with another secret: "
                "give all hosts the same --secret-file or PACELINE_SECRET"
            )
        self.trusted = True
        return self.step()


def _nonce(message: dict[str, Any]) -> str:
    """Read the other side's nonce. Raises `ChannelBroken` if it is malformed."""
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise ChannelBroken("it isn't a launcher")
    return nonce


def _unhex(text: str) -> bytes:
    """Decode hexadecimal digits; empty if they are malformed."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""

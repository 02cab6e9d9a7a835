"""Remote procedure calls between processes that come and go, over ZeroMQ: a header in msgpack, and
tensors as they lie in memory.

    RpcClient (a worker)                                       RpcServer (a server)
    call(kind, body, tensors)    [head][tensor][tensor] --->   receive() -> RpcMessage
    wait(number) -> RpcMessage      <--- [head][tensor] ...       answer(message, ...)

Between hosts they are encrypted (CURVE), with keys that are derived from the job's secret for each
role, and a guard lets in only clients with the key of the workers. Tensors travel in small frames
there: a stranger, too, may have one begun. Inside a host they go through a socket file that only
its owner can open, each in one frame.

Nothing that comes is believed: a header has at most `HEAD_BYTES`, nests at most `DEPTH` deep, and
says what form each tensor has before one is made of it; what is cut short, repeated or no message
at all is refused with a line in the log, and the receiver lives on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import msgpack
import zmq
from torch import Tensor
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from paceline.cluster.secret import derive
from paceline.comm import wire_format
from paceline.comm.admission import ConnectionGuard
from paceline.comm.cancellation import CancelScope
from paceline.comm.wire_format import MalformedMessage, TensorForm
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, ServerLost
from paceline.state.snapshot import raw
from paceline.timings import DEFAULTS, ServerTimings

HEAD_BYTES = 1 << 16
FRAME = 1 << 16  # bytes of a frame between hosts
DEPTH = 6  # of lists and maps in a header
WAITING = 16  # messages of each side that wait to be read; with more the sender waits
UNREAD = 4000  # answers that wait for a worker to read them: as many as it may ask for at a time
REFUSED = "refused"  # the kind of an answer that says why there is no other
_DOMAIN = "paceline"
_COVER = 1 << 10  # bytes that encryption adds to a frame, and more
_SENDERS = 1 << 12  # connections of which it is known what has come last


class RpcKeys(NamedTuple):
    """The keys of one job, as ZeroMQ writes them (Z85)."""

    server: tuple[bytes, bytes]  # public, secret
    worker: tuple[bytes, bytes]


def keys(secret: bytes, job: str) -> RpcKeys:
    """Derive the keys shared by all processes that know the secret: one pair for the servers of
    this job, one for its workers.
    """

    def pair(role: str) -> tuple[bytes, bytes]:
        private = z85.encode(derive(secret, f"paceline {job} {role}"))
        return zmq.curve_public(private), private

    return RpcKeys(pair("server"), pair("worker"))


@dataclass(frozen=True)
class RpcMessage:
    """A message from one process to another.

    `number` counts what `sender` has sent to this receiver, from 1 on; an answer has the number of
    what it answers. Tensors that have come lie in memory of their own, on the CPU.
    """

    kind: str
    number: int
    sender: int = 0
    view: int = 0
    step: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()
    route: bytes = b""  # the way back

    def dump(self, frame: int | None = None) -> list[Any]:
        """Write as frames: the header, and the memory of each tensor, not copied; in frames of so
        many bytes, or one for each.

        Raises `MalformedMessage` if the header would be too large: a client that asks for too much
        at a time gets that as its answer.
        """
        forms = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in self.tensors]
        head = msgpack.packb(
            [self.kind, self.number, self.sender, self.view, self.step, self.body, forms]
        )
        if len(head) > HEAD_BYTES:
            raise MalformedMessage(
                f"a header of {len(head)} bytes (message {self.kind}) would be refused: "
                "send tensors, or less"
            )
        return [
            head,
            *(part for x in self.tensors for part in wire_format.cut(raw(x).numpy().data, frame)),
        ]

    @classmethod
    def load(
        cls, frames: Sequence[Any], route: bytes = b"", frame: int | None = None
    ) -> RpcMessage:
        """Read frames (anything with the buffer protocol), which `dump` has made.

        Raises `MalformedMessage`.
        """
        kind, numbers, body, forms = _head(memoryview(frames[0]) if frames else memoryview(b""))
        counts = [1 if frame is None else max(1, -(-form.nbytes // frame)) for form in forms]
        if sum(counts) != len(frames) - 1:
            raise MalformedMessage(
                f"its header tells of {len(forms)} tensors in {sum(counts)} frames, and "
                f"{len(frames) - 1} came"
            )
        parts = iter([memoryview(part) for part in frames[1:]])
        tensors = tuple(
            wire_format.tensor(form, [*islice(parts, count)])
            for form, count in zip(forms, counts, strict=True)
        )
        number, sender, view, step = numbers
        return cls(kind, number, sender, view, step, body, tensors, route)


def _head(frame: memoryview) -> tuple[str, list[int], dict[str, Any], list[TensorForm]]:
    if not 0 < frame.nbytes <= HEAD_BYTES:
        raise MalformedMessage(
            f"its header has {frame.nbytes} bytes, and 1 to {HEAD_BYTES} are possible"
        )
    try:
        header = msgpack.unpackb(frame, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"its header is no msgpack ({type(error).__name__})") from error
    if not isinstance(header, list) or len(header) != 7:
        raise MalformedMessage("its header is not of seven parts")
    kind, *numbers, body, forms = header
    if not isinstance(kind, str) or any(
        type(number) is not int or not 0 <= number < 1 << 63 for number in numbers
    ):
        raise MalformedMessage("its header begins with something else than a kind and four numbers")
    if not isinstance(body, dict) or not _shallow(body, DEPTH):
        raise MalformedMessage(f"the body of its header is no map, or nests more than {DEPTH} deep")
    if not isinstance(forms, list):
        raise MalformedMessage("its header has no list of tensors")
    return kind, numbers, body, [wire_format.read(form) for form in forms]


def _shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    return depth > 0 and all(
        _shallow(part, depth - 1) for part in (value.values() if isinstance(value, dict) else value)
    )


def _tune(socket: zmq.Socket[Any], largest: int, timings: ServerTimings) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = WAITING
    socket.maxmsgsize = max(largest, HEAD_BYTES) + _COVER
    socket.handshake_ivl = round(1000 * timings.key)


class RpcServer:
    """A server's end: any process with the key may call.

    Listens on each of the `hosts` (addresses, each at a port that is free: TCP, encrypted) and at
    `path` (a socket file in a folder that only its owner can enter). `largest` is what a tensor may
    have, in bytes. `say` gets what was refused, `LOUD` times for each sort. Everything is called
    from one thread.
    """

    LOUD = 20

    def __init__(
        self,
        keys: RpcKeys,
        *,
        hosts: Sequence[str] = (),
        path: str | None = None,
        largest: int = 1 << 30,
        say: Callable[[str], None] = print,
        timings: ServerTimings = DEFAULTS.servers,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._timings = timings
        self._say, self._said, self._largest = say, 0, largest
        # by connection: who speaks there, and the last number
        self._heard: dict[bytes, tuple[int, int]] = {}
        self._guard = ConnectionGuard(self._context, keys.worker[0], self._refuse)
        self.nbytes = 0  # bytes of all messages received
        self.sent = 0  # bytes of all answers
        self._path = path
        self._sockets: list[zmq.Socket[Any]] = []
        self.addresses: list[str] = []
        self._poller = zmq.Poller()
        self._ways: dict[bytes, zmq.Socket[Any]] = {}
        try:
            for host in hosts:
                socket = self._open(FRAME)
                socket.curve_server, socket.curve_secretkey, socket.zap_domain = (
                    True,
                    keys.server[1],
                    _DOMAIN.encode(),
                )
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without its guard no client gets in
                socket.ipv6, socket.backlog = ":" in host, 512
                self._guard.watch(socket)
                socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
                self.addresses.append(str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0"))
            if path is not None:
                _check_folder(os.path.dirname(path))
                socket = self._open(largest)
                socket.bind(f"ipc://{path}")
                os.chmod(path, 0o600)
                self.addresses.append(f"ipc://{path}")
            self._guard.start()
        except BaseException:
            self.close()
            raise

    def _open(self, largest: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        self._sockets.append(socket)
        _tune(socket, largest, self._timings)
        socket.router_mandatory = True
        # answers are as many as was asked, and their tensors are not copied: no worker's may be
        # dropped
        socket.sndhwm = UNREAD
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def receive(self, seconds: float) -> RpcMessage | None:
        """Receive the next message; None if there is none within so many seconds, or if it was
        refused.
        """
        ready = self._poller.poll(round(1000 * seconds))
        if not ready:
            return None
        socket = ready[0][0]
        route, *frames = socket.recv_multipart(copy=False)
        way = bytes([self._sockets.index(socket)]) + route.bytes
        try:
            message = RpcMessage.load(frames, way, self._frame(way))
            if any(x.nbytes > self._largest for x in message.tensors):
                raise MalformedMessage(f"a tensor in it has more than {self._largest} bytes")
        except MalformedMessage as error:
            self._refuse(f"a message was refused: {error}")
            return None
        self.nbytes += sum(len(frame) for frame in frames)
        # and put in again: the first is the one silent for the longest
        sender, last = self._heard.pop(way, (message.sender, 0))
        self._heard[way] = sender, max(message.number, last)
        if len(self._heard) > _SENDERS:
            del self._heard[next(iter(self._heard))]
        # or one worker could have something kept for any number of them
        if message.sender != sender:
            self._refuse(
                f"a message was refused: {message.sender} speaks over the connection of {sender}"
            )
            return None
        if message.number <= last:
            self._refuse(
                f"a message was refused: number {message.number} of {message.sender} has come "
                "before"
            )
            return None
        return message

    def _frame(self, way: bytes) -> int | None:
        """Return the number of bytes of a frame on this way; None: as large as tensors are."""
        return None if self.addresses[way[0]].startswith("ipc:") else FRAME

    def answer(
        self,
        message: RpcMessage,
        kind: str,
        body: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
    ) -> bool:
        """Answer a message; False if its sender is gone, or reads nothing.

        The tensors have to stay as they are until they have arrived.

        Raises `MalformedMessage` if the answer is none that can be sent.
        """
        said = RpcMessage(
            kind, message.number, 0, message.view, message.step, body or {}, tuple(tensors)
        )
        frames = said.dump(self._frame(message.route))
        try:
            self._sockets[message.route[0]].send_multipart(
                [message.route[1:], *frames], zmq.DONTWAIT, copy=False
            )
        except zmq.Again:
            self._refuse(
                f"an answer to {message.sender} was dropped: it has not read {UNREAD} others"
            )
            return False
        except zmq.ZMQError:
            return False
        self.sent += sum(memoryview(frame).nbytes for frame in frames)
        return True

    def refuse(self, message: RpcMessage, why: str) -> None:
        """Tell the sender, and the log, that a message can't be honoured."""
        self._refuse(f"{message.kind} of {message.sender} was refused: {why}")
        self.answer(message, REFUSED, {"why": why[:1000]})

    def _refuse(self, text: str) -> None:
        self._said += 1
        if self._said <= self.LOUD:
            self._say(
                text + (" (more of the kind are not shown)" if self._said == self.LOUD else "")
            )

    @property
    def refused(self) -> int:
        """How many messages and strangers have been refused."""
        return self._said

    def close(self) -> None:
        """Stop listening; what has not been sent is dropped."""
        for socket in self._sockets:
            socket.close()
        self._guard.leave()
        self._context.term()
        self._guard.join()
        if self._path is not None and os.path.exists(self._path):
            os.unlink(self._path)


def _check_folder(folder: str) -> None:
    state = os.stat(folder)
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise AssertionError(f"{folder} is open to others: a folder for sockets has mode 0700")


class RpcClient:
    """A worker's connection to one server.

    `who` is what the server is called in messages. For any thread, one at a time.

    With `alert` a connection that has broken, or over which nothing has come for so many seconds,
    ends all waits with `ServerLost`.
    """

    def __init__(
        self,
        address: str,
        keys: RpcKeys,
        *,
        sender: int,
        who: str,
        largest: int = 1 << 30,
        alert: float | None = None,
        timings: ServerTimings = DEFAULTS.servers,
    ) -> None:
        self.who = who
        self.near = address.startswith("ipc:")  # on this host
        self._sender, self._number, self._look = sender, 0, timings.wait_look
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._frame = None if self.near else FRAME
        _tune(self._socket, largest if self.near else FRAME, timings)
        self._socket.ipv6 = "[" in address
        if not self.near:
            (
                self._socket.curve_serverkey,
                (self._socket.curve_publickey, self._socket.curve_secretkey),
            ) = keys.server[0], keys.worker
        self._monitor: zmq.Socket[Any] | None = None
        if alert is not None:
            self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = (
                round(250 * alert),
                round(1000 * alert),
            )
            self._monitor = self._socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
        self._socket.connect(address)
        self._lock = threading.RLock()
        self._found: dict[int, RpcMessage] = {}
        # what waits for its answer: its memory may be on its way still
        self._sent: dict[int, tuple[Tensor, ...]] = {}
        self._stood = False  # whether the connection does, as far as the monitor has told
        self._broken: PacelineError | None = None
        self.cancel_scope: CancelScope | None = None  # ends waits while it has tripped
        self.waited = 0.0  # seconds
        self.nbytes = 0  # of all that was sent

    def send(
        self,
        kind: str,
        *,
        view: int = 0,
        step: int = 0,
        body: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
        seconds: float,
    ) -> int:
        """Send a message, and give its number.

        The tensors have to stay as they are until `wait` has returned.

        Raises `DeadlineExceeded` when the server has taken nothing for so many seconds.
        """
        with self._lock:
            self._number += 1
            kept = tuple(tensors)
            frames = RpcMessage(
                kind, self._number, self._sender, view, step, body or {}, kept
            ).dump(self._frame)
            self._poll(zmq.POLLOUT, time.monotonic() + seconds, f"takes no {kind}", seconds)
            self._socket.send_multipart(frames, copy=False)
            self._sent[self._number] = kept
            self.nbytes += sum(memoryview(frame).nbytes for frame in frames)
            return self._number

    def wait(self, number: int, seconds: float) -> RpcMessage:
        """Wait for the answer to message `number`.

        Raises `DeadlineExceeded` when none comes in time, `Mismatch` if it was refused, and what
        `end` was called with.
        """
        return self._wait(number, time.monotonic() + seconds, seconds)

    def _wait(self, number: int, end: float, seconds: float) -> RpcMessage:
        with self._lock:
            while number not in self._found:
                self._poll(zmq.POLLIN, end, f"has not answered message {number}", seconds)
                try:
                    answer = RpcMessage.load(
                        self._socket.recv_multipart(copy=False), b"", self._frame
                    )
                except MalformedMessage as error:
                    raise Mismatch(
                        f"{self.who} answered with something else than a message: {error}"
                    ) from error
                if self._sent.pop(answer.number, None) is not None:
                    self._found[answer.number] = answer
            answer = self._found.pop(number)
        if answer.kind == REFUSED:
            raise Mismatch(f"{self.who} refused it: {answer.body.get('why')}")
        return answer

    def call(self, kind: str, *, seconds: float, **parts: Any) -> RpcMessage:
        """Send a message and wait for its answer."""
        end = time.monotonic() + seconds
        return self._wait(self.send(kind, seconds=seconds, **parts), end, seconds)

    def _poll(self, event: int, end: float, what: str, seconds: float) -> None:
        began = time.monotonic()
        try:
            while True:
                if self.gone:
                    assert self._broken is not None
                    raise self._broken
                if self.cancel_scope is not None and self.cancel_scope.error is not None:
                    raise self.cancel_scope.error
                left = end - time.monotonic()
                if self._socket.poll(round(1000 * max(0.0, min(left, self._look))), event):
                    return
                if left <= 0:
                    raise DeadlineExceeded(f"{self.who} {what} within {seconds:g} s")
        finally:
            self.waited += time.monotonic() - began

    @property
    def gone(self) -> bool:
        """Whether the connection has ended: no answer can be waited for any more."""
        while self._broken is None and self._monitor is not None and self._monitor.poll(0):
            stood = (
                parse_monitor_message(self._monitor.recv_multipart())["event"]
                == zmq.EVENT_HANDSHAKE_SUCCEEDED
            )
            if self._stood and not stood:
                self._broken = ServerLost(f"{self.who} is gone")
            # what breaks before that is tried again: too many may have called at a time
            self._stood = stood
        return self._broken is not None

    def forget(self) -> None:
        """Drop the messages sent so far, as their answers are not needed any more."""
        with self._lock:
            self._sent.clear()
            self._found.clear()

    def end(self, error: PacelineError) -> None:
        """End all waits here, now and later, with `error`. From any thread."""
        self._broken = error

    def close(self) -> None:
        """Close the connection; messages not sent yet are dropped."""
        self._broken = self._broken or Mismatch(f"the connection to {self.who} has been closed")
        with self._lock:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close()
            self._socket.close()
            self._sent.clear()
        self._context.term()

"""Remote procedure calls over ZeroMQ, between processes that come and go.

    RpcClient (a worker)                                       RpcServer (a server)
    call(kind, body, tensors)    [head][tensor][tensor] --->   receive() -> RpcMessage
    wait(number) -> RpcMessage      <--- [head][tensor] ...       answer(message, ...)

The head is msgpack, tensors are sent as they lie in memory.

Between hosts, messages are encrypted (CURVE) with keys that are derived from the job's secret, one
pair for each role. A guard lets in only clients with the workers' key. Tensors travel in small
frames there, as a stranger may begin to send a frame before it is refused. Inside a host, messages
go through a socket file that only its owner can open, with one frame for each tensor.

Nothing that arrives is trusted. A header has at most `HEAD_BYTES`, nests at most `DEPTH` deep, and
describes each tensor before one is made. A message that is cut short, repeated or malformed is
refused with a line in the log, and the receiver goes on.
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

from paceline.cluster.secret import derive_key
from paceline.comm import wire_format
from paceline.comm.admission import ConnectionGuard
from paceline.comm.cancellation import CancelScope
from paceline.comm.wire_format import MalformedMessage, TensorForm
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, ServerLost
from paceline.state.snapshot import view_cpu_bytes
from paceline.timings import DEFAULT_TIMINGS, ServerTimings

HEAD_BYTES = 1 << 16  # most bytes of a header
FRAME = 1 << 16  # bytes of a frame between hosts
DEPTH = 6  # most levels of lists and maps in the body of a header
WAITING = 16  # messages of each side that may wait to be read; with more the sender waits
UNREAD = 4000  # answers that may wait to be read by a worker: as many as it may ask for at a time
REFUSED = "refused"  # kind of an answer that says why the message was refused
_DOMAIN = "paceline"
_COVER = 1 << 10  # bytes that encryption adds to a frame, or more
_SENDERS = 1 << 12  # connections for which the last message is remembered


class RpcKeys(NamedTuple):
    """The keys of one job, in ZeroMQ's notation (Z85): pairs of a public and a secret key."""

    server: tuple[bytes, bytes]
    worker: tuple[bytes, bytes]


def derive_rpc_keys(secret: bytes, job: str) -> RpcKeys:
    """Derive the keys of a job: one pair for its servers, one for its workers.

    All processes that know the secret derive the same.
    """

    def pair(role: str) -> tuple[bytes, bytes]:
        private = z85.encode(derive_key(secret, f"paceline {job} {role}"))
        return zmq.curve_public(private), private

    return RpcKeys(pair("server"), pair("worker"))


@dataclass(frozen=True)
class RpcMessage:
    """A message from one process to another.

    kind: What the message asks for, or what it answers.
    number: Number among the messages of `sender` to this receiver, from 1 on. An answer has the
        number of its question.
    sender: Number of the process that sent it.
    view: Number of the sender's membership.
    step: Step of the sender.
    body: Map of msgpack values.
    tensors: On the CPU. Received ones lie in memory of their own.
    route: The way back to the sender, on a server.
    """

    kind: str
    number: int
    sender: int = 0
    view: int = 0
    step: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()
    route: bytes = b""

    def to_frames(self, frame: int | None = None) -> list[Any]:
        """Write the message as frames: the header, then the memory of each tensor, not copied.

        `frame`: most bytes of a frame of tensors. Default: one frame for each tensor.

        Raises `MalformedMessage` if the header would be too large. A client that asks for too much
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
            *(
                part
                for x in self.tensors
                for part in wire_format.cut_frames(view_cpu_bytes(x).numpy().data, frame)
            ),
        ]

    @classmethod
    def from_frames(
        cls, frames: Sequence[Any], route: bytes = b"", frame: int | None = None
    ) -> RpcMessage:
        """Read frames that `to_frames` has written. Raises `MalformedMessage`.

        Args:
            frames: Objects with the buffer protocol.
            route: The way back to the sender. Default: none.
            frame: Most bytes of a frame of tensors. Default: one frame for each tensor.
        """
        kind, numbers, body, forms = _parse_head(
            memoryview(frames[0]) if frames else memoryview(b"")
        )
        # The header says how many frames each tensor has; a message with others is cut short.
        counts = [1 if frame is None else max(1, -(-form.nbytes // frame)) for form in forms]
        if sum(counts) != len(frames) - 1:
            raise MalformedMessage(
                f"its header tells of {len(forms)} tensors in {sum(counts)} frames, and "
                f"{len(frames) - 1} came"
            )
        parts = iter([memoryview(part) for part in frames[1:]])
        tensors = tuple(
            wire_format.assemble_tensor(form, [*islice(parts, count)])
            for form, count in zip(forms, counts, strict=True)
        )
        number, sender, view, step = numbers
        return cls(kind, number, sender, view, step, body, tensors, route)


def _parse_head(frame: memoryview) -> tuple[str, list[int], dict[str, Any], list[TensorForm]]:
    if not 0 < frame.nbytes <= HEAD_BYTES:
        raise MalformedMessage(
            f"its header has {frame.nbytes} bytes, and 1 to {HEAD_BYTES} are possible"
        )
    try:
        # The one place where foreign bytes are parsed; all types and sizes are checked below.
        header = msgpack.unpackb(frame, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"its header is no msgpack ({type(error).__name__})") from error
    if not isinstance(header, list) or len(header) != 7:
        raise MalformedMessage("its header is not of seven parts")
    kind, *numbers, body, forms = header
    if not isinstance(kind, str) or any(
        type(number) is not int or not 0 <= number < 1 << 63 for number in numbers
    ):
        raise MalformedMessage("its header doesn't begin with a kind and four numbers")
    if not isinstance(body, dict) or not _is_shallow(body, DEPTH):
        raise MalformedMessage(f"the body of its header is no map, or nests more than {DEPTH} deep")
    if not isinstance(forms, list):
        raise MalformedMessage("its header has no list of tensors")
    return kind, numbers, body, [wire_format.read_form(form) for form in forms]


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    return depth > 0 and all(
        _is_shallow(part, depth - 1)
        for part in (value.values() if isinstance(value, dict) else value)
    )


def _tune_socket(socket: zmq.Socket[Any], largest: int, timings: ServerTimings) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = WAITING
    socket.maxmsgsize = max(largest, HEAD_BYTES) + _COVER
    socket.handshake_ivl = round(1000 * timings.key)


class RpcServer:
    """A server's end: any process with the workers' key may call. For one thread.

    Args:
        keys: Keys of the job.
        hosts: Addresses to listen at, each at a free port: TCP, encrypted. Default: none.
        path: Path of a socket file, in a folder that only its owner can enter. Default: none.
        largest: Most bytes of a tensor. Default: 1 GiB.
        say: Gets a line for each refused message, the first `LOUD` of them. Default: print.
        timings: Seconds of handshakes and waits.
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
        timings: ServerTimings = DEFAULT_TIMINGS.servers,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._timings = timings
        self._say, self._refusals, self._largest = say, 0, largest
        # By connection: its sender, and the number of its last message. The most silent is first.
        self._last_numbers: dict[bytes, tuple[int, int]] = {}
        self._guard = ConnectionGuard(self._context, keys.worker[0], self._log_refusal)
        self.nbytes = 0  # bytes of all received messages
        self.sent = 0  # bytes of all answers
        self._path = path
        self._sockets: list[zmq.Socket[Any]] = []
        self.addresses: list[str] = []
        self._poller = zmq.Poller()
        try:
            # Encrypted, each at a port that the system chooses.
            for host in hosts:
                socket = self._open_socket(FRAME)
                socket.curve_server, socket.curve_secretkey, socket.zap_domain = (
                    True,
                    keys.server[1],
                    _DOMAIN.encode(),
                )
                # Without an answer of the guard, no client gets in.
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
                socket.ipv6, socket.backlog = ":" in host, 512
                self._guard.watch_listener(socket)
                socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
                self.addresses.append(str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0"))
            # Without encryption: only the owner of the folder can reach the socket file.
            if path is not None:
                _check_folder(os.path.dirname(path))
                socket = self._open_socket(largest)
                socket.bind(f"ipc://{path}")
                os.chmod(path, 0o600)
                self.addresses.append(f"ipc://{path}")
            self._guard.start()
        except BaseException:
            self.close()
            raise

    def _open_socket(self, largest: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        self._sockets.append(socket)
        _tune_socket(socket, largest, self._timings)
        socket.router_mandatory = True  # an answer to a client that has gone raises an error
        # No answer may be dropped: room for as many as a worker asks for. Tensors are not copied.
        socket.sndhwm = UNREAD
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def receive(self, seconds: float) -> RpcMessage | None:
        """Receive the next message. None if none comes within `seconds`, or if it was refused."""
        ready = self._poller.poll(round(1000 * seconds))
        if not ready:
            return None
        socket = ready[0][0]
        route, *frames = socket.recv_multipart(copy=False)
        # The route begins with the number of the socket, as answers go out over the same one.
        way = bytes([self._sockets.index(socket)]) + route.bytes
        try:
            message = RpcMessage.from_frames(frames, way, self._frame_bytes(way))
            if any(x.nbytes > self._largest for x in message.tensors):
                raise MalformedMessage(f"a tensor in it has more than {self._largest} bytes")
        except MalformedMessage as error:
            self._log_refusal(f"a message was refused: {error}")
            return None
        self.nbytes += sum(len(frame) for frame in frames)
        # Taken out and put in again, so that the connection counts as the last that spoke.
        sender, last = self._last_numbers.pop(way, (message.sender, 0))
        self._last_numbers[way] = sender, max(message.number, last)
        if len(self._last_numbers) > _SENDERS:
            del self._last_numbers[next(iter(self._last_numbers))]
        # Replies are kept by sender: a worker must not be able to claim any number of senders.
        if message.sender != sender:
            self._log_refusal(
                f"a message was refused: {message.sender} speaks over the connection of {sender}"
            )
            return None
        # A number that has come before: a repeated message, by accident or by a stranger.
        if message.number <= last:
            self._log_refusal(
                f"a message was refused: number {message.number} of "
                f"{message.sender} has come before"
            )
            return None
        return message

    def _frame_bytes(self, way: bytes) -> int | None:
        """Most bytes of a frame on this way. None: one frame for each tensor."""
        return None if self.addresses[way[0]].startswith("ipc:") else FRAME

    def answer(
        self,
        message: RpcMessage,
        kind: str,
        body: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
    ) -> bool:
        """Answer a message. False if its sender is gone, or does not read.

        The tensors must not change until they have arrived. Raises `MalformedMessage` if the answer
        can't be sent.
        """
        reply = RpcMessage(
            kind, message.number, 0, message.view, message.step, body or {}, tuple(tensors)
        )
        frames = reply.to_frames(self._frame_bytes(message.route))
        try:
            self._sockets[message.route[0]].send_multipart(
                [message.route[1:], *frames], zmq.DONTWAIT, copy=False
            )
        except zmq.Again:
            self._log_refusal(
                f"an answer to {message.sender} was dropped: it has not read {UNREAD} others"
            )
            return False
        except zmq.ZMQError:
            return False
        self.sent += sum(memoryview(frame).nbytes for frame in frames)
        return True

    def refuse(self, message: RpcMessage, why: str) -> None:
        """Tell the sender, and the log, why a message can't be honoured."""
        self._log_refusal(f"{message.kind} of {message.sender} was refused: {why}")
        self.answer(message, REFUSED, {"why": why[:1000]})

    def _log_refusal(self, text: str) -> None:
        self._refusals += 1
        if self._refusals <= self.LOUD:
            self._say(
                text + (" (more of the kind are not shown)" if self._refusals == self.LOUD else "")
            )

    @property
    def refused_count(self) -> int:
        """Number of messages and strangers that have been refused."""
        return self._refusals

    def close(self) -> None:
        """Stop listening. Answers that are not sent yet are dropped."""
        for socket in self._sockets:
            socket.close()
        self._guard.close_unstarted()
        self._context.term()
        self._guard.join()
        if self._path is not None and os.path.exists(self._path):
            os.unlink(self._path)


def _check_folder(folder: str) -> None:
    state = os.stat(folder)
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise AssertionError(f"{folder} is open to others: a folder for sockets has mode 0700")


class RpcClient:
    """A worker's connection to one server. Any thread may use it, one at a time.

    Args:
        address: Address of the server, one of `RpcServer.addresses`.
        keys: Keys of the job.
        sender: Number of this process, by which the server knows it.
        who: Words for the server in errors.
        largest: Most bytes of a tensor. Default: 1 GiB.
        alert: Seconds of silence after which the server counts as gone: all waits then raise
            `ServerLost`, as they do if the connection breaks. Default: connect again instead.
        timings: Seconds of handshakes and waits.
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
        timings: ServerTimings = DEFAULT_TIMINGS.servers,
    ) -> None:
        self.who = who
        self.near = address.startswith("ipc:")  # whether the server is on this host
        self._sender, self._number, self._look = sender, 0, timings.wait_look
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._frame = None if self.near else FRAME
        _tune_socket(self._socket, largest if self.near else FRAME, timings)
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
        self._answers: dict[int, RpcMessage] = {}  # answers that came before their wait, by number
        # Tensors of messages without an answer yet: ZeroMQ may still be sending their memory.
        self._sent: dict[int, tuple[Tensor, ...]] = {}
        self._is_connected = (
            False  # whether the connection stands, by the last event of the monitor
        )
        self._broken: PacelineError | None = None
        self.cancel_scope: CancelScope | None = None  # waits end once it has tripped
        self.waited = 0.0  # seconds spent waiting
        self.nbytes = 0  # bytes of all sent messages

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
        """Send a message, and return its number.

        Args:
            kind: What the message asks for.
            view: Number of this worker's membership. Default: 0.
            step: Step of this worker. Default: 0.
            body: Map of msgpack values. Default: empty.
            tensors: On the CPU. They must not change until the answer is here. Default: none.
            seconds: Seconds until `DeadlineExceeded` if the server takes nothing.
        """
        with self._lock:
            self._number += 1
            sent_tensors = tuple(tensors)
            frames = RpcMessage(
                kind, self._number, self._sender, view, step, body or {}, sent_tensors
            ).to_frames(self._frame)
            self._poll_socket(zmq.POLLOUT, time.monotonic() + seconds, f"takes no {kind}", seconds)
            self._socket.send_multipart(frames, copy=False)
            self._sent[self._number] = sent_tensors
            self.nbytes += sum(memoryview(frame).nbytes for frame in frames)
            return self._number

    def wait_for_answer(self, number: int, seconds: float) -> RpcMessage:
        """Wait for the answer to message `number`.

        Raises:
            DeadlineExceeded: None came within `seconds`.
            Mismatch: The server refused the message.
            ServerLost: The server is gone.
            PacelineError: The error that `end_waits` was called with.
        """
        return self._wait_until(number, time.monotonic() + seconds, seconds)

    def _wait_until(self, number: int, end: float, seconds: float) -> RpcMessage:
        with self._lock:
            while number not in self._answers:
                self._poll_socket(zmq.POLLIN, end, f"has not answered message {number}", seconds)
                try:
                    answer = RpcMessage.from_frames(
                        self._socket.recv_multipart(copy=False), b"", self._frame
                    )
                except MalformedMessage as error:
                    raise Mismatch(
                        f"{self.who} sent an answer that is no message: {error}"
                    ) from error
                # An answer to a forgotten message is dropped.
                if self._sent.pop(answer.number, None) is not None:
                    self._answers[answer.number] = answer
            answer = self._answers.pop(number)
        if answer.kind == REFUSED:
            raise Mismatch(f"{self.who} refused it: {answer.body.get('why')}")
        return answer

    def call(self, kind: str, *, seconds: float, **parts: Any) -> RpcMessage:
        """Send a message, and wait for its answer. Takes the arguments of `send`."""
        end = time.monotonic() + seconds
        return self._wait_until(self.send(kind, seconds=seconds, **parts), end, seconds)

    def _poll_socket(self, event: int, end: float, what: str, seconds: float) -> None:
        began = time.monotonic()
        try:
            while True:
                if self.is_gone:
                    assert self._broken is not None
                    raise self._broken
                if self.cancel_scope is not None and self.cancel_scope.error is not None:
                    raise self.cancel_scope.error
                seconds_left = end - time.monotonic()
                # In short turns, so that a server that is gone and a tripped scope are noticed.
                if self._socket.poll(round(1000 * max(0.0, min(seconds_left, self._look))), event):
                    return
                if seconds_left <= 0:
                    raise DeadlineExceeded(f"{self.who} {what} within {seconds:g} s")
        finally:
            self.waited += time.monotonic() - began

    @property
    def is_gone(self) -> bool:
        """Whether the connection has ended, so that no answer can come any more."""
        while self._broken is None and self._monitor is not None and self._monitor.poll(0):
            stood = (
                parse_monitor_message(self._monitor.recv_multipart())["event"]
                == zmq.EVENT_HANDSHAKE_SUCCEEDED
            )
            if self._is_connected and not stood:
                self._broken = ServerLost(f"{self.who} is gone")
            # A connection that never stood is tried again: many workers may call at the same time.
            self._is_connected = stood
        return self._broken is not None

    def forget_messages(self) -> None:
        """Forget the messages sent so far: their answers are not needed any more."""
        with self._lock:
            self._sent.clear()
            self._answers.clear()

    def end_waits(self, error: PacelineError) -> None:
        """End all waits, now and later, with `error`. Any thread may call it."""
        self._broken = error

    def close(self) -> None:
        """Close the connection. Messages that are not sent yet are dropped."""
        self._broken = self._broken or Mismatch(f"the connection to {self.who} has been closed")
        with self._lock:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close()
            self._socket.close()
            self._sent.clear()
        self._context.term()

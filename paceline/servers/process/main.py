"""The server process: answers the requests of workers, one message after another.

    shard_rpc       the shard: gradients, steps, parameters          protocol.parameters,
                                                                     protocol.recovery
    table_rpc       the rows of sparse tables                        protocol.rows
    scheduler_rpc   samples, if workers are not in lockstep          protocol.samples
    main            signs of life, statistics, the end               protocol.service

If a request can't be answered yet, it is put off. Requests that were put off are tried again after
each message, and at certain times. Nothing here waits for one worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgpack
import torch

from paceline.cluster.discover import timings as environment_timings
from paceline.cluster.launcher.janitor import place_of_sockets, sockets
from paceline.cluster.launcher.worker import preparation
from paceline.comm.rpc import RpcMessage, RpcServer, derive_rpc_keys
from paceline.errors import PacelineError
from paceline.servers.process.scheduler_rpc import SchedulerRpc
from paceline.servers.process.shard_rpc import ShardRpc
from paceline.servers.process.table_rpc import TableService
from paceline.servers.protocol import service
from paceline.servers.protocol.message import MALFORMED, Acknowledged, Handlers, Request
from paceline.servers.protocol.parameters import PlanShard
from paceline.state.snapshot import byte_tensor
from paceline.timings import DEFAULTS, ServerTimings
from paceline.trace import Trace

# Errors that a senseless message may cause. They refuse the message, and the server goes on.
WRONG = (
    *(LookupError, TypeError, ValueError, ArithmeticError, RuntimeError),
    *(AttributeError, AssertionError, MemoryError, BufferError, struct.error),
)
# Largest number of messages that are put off: in all, and of one connection.
LATER, LATER_EACH = 10_000, 2000
# Number of the last entries that the timeline has.
SPANS = 5000


class Server:
    """Answers messages, until a worker ends the server.

    Args:
        receiver: Receives messages and sends replies.
        over: Called before each message. If it returns True, no worker is left, and the server
            ends.
        timings: Limits in seconds.
    """

    def __init__(
        self,
        receiver: RpcServer,
        over: Callable[[], bool] = lambda: False,
        *,
        timings: ServerTimings = DEFAULTS.servers,
    ) -> None:
        self._receiver, self._over, self._look = receiver, over, timings.look
        # Requests that can't be answered yet, in the order of arrival.
        self._later: list[tuple[RpcMessage, Request[Any]]] = []
        self._ended = False
        self._parameters, self._scheduling, self._tables = (
            ShardRpc(),
            SchedulerRpc(),
            TableService(),
        )
        own: Handlers = {
            service.CheckAlive: lambda worker, request: service.Alive(time.perf_counter_ns()),
            service.Echo: lambda worker, request: service.Echoed(request.tensor),
            service.ReadFacts: self._facts,
            service.ReadTimeline: self._timeline,
            service.EndServer: self._end,
        }
        before_plan: Handlers = {**own, **self._tables.handlers}
        all_handlers = {**before_plan, **self._parameters.handlers, **self._scheduling.handlers}
        self._handlers = {request.kind: (request, act) for request, act in all_handlers.items()}
        # Requests that are answered before there is a shard.
        self._first = {PlanShard.kind, *(request.kind for request in before_plan)}
        self._done_of: Counter[str] = Counter()  # number of messages, by kind
        # Largest number of messages that were put off at a time, and seconds of work.
        self._most, self._busy = 0, 0.0
        self._trace = Trace(SPANS)
        # Time (ns) and number of messages put off, at each change.
        self._waiting: deque[tuple[int, int]] = deque(maxlen=SPANS)

    def run(self) -> None:
        """Serve until a worker ends the server, or no worker is left."""
        while not self._ended and not self._over():
            message = self._receiver.receive(self._scheduling.patience(self._look))
            began, waiting = time.perf_counter_ns(), len(self._later)
            self.take(message)
            self._note(message, began, waiting)

    def take(self, message: RpcMessage | None) -> None:
        """Handle the message that has come, if any, and messages that were put off before."""
        request = None if message is None else self._read(message)
        if message is not None and request is not None and not self._serve(message, request):
            self._put_off(message, request)
        # Every message may be what another one waits for, so all are tried again.
        if self._later:
            self._later = [
                late for late in self._later if late[0] is message or not self._serve(*late)
            ]

    def _note(self, message: RpcMessage | None, began: int, waiting: int) -> None:
        now = time.perf_counter_ns()
        self._busy += (now - began) / 1e9
        if message is not None:
            kind = message.kind if message.kind in self._handlers else "unknown"
            self._done_of[kind] += 1
            self._trace.step = message.step
            self._trace.record(kind, "serve", began, now)
        if len(self._later) != waiting:
            self._waiting.append((now, len(self._later)))

    def _put_off(self, message: RpcMessage, request: Request[Any]) -> None:
        # Counting the messages of a connection takes long, so it is left out while they are few.
        same_connection = (
            sum(late.route == message.route for late, _ in self._later)
            if len(self._later) >= LATER_EACH
            else 0
        )
        if len(self._later) < LATER and same_connection < LATER_EACH:
            self._later.append((message, request))
            self._most = max(self._most, len(self._later))
        else:
            self._receiver.refuse(
                message,
                f"{same_connection or LATER} messages wait here for something that has not come",
            )

    def _read(self, message: RpcMessage) -> Request[Any] | None:
        """Read the request in a message. None if it was refused."""
        kind, _ = self._handlers.get(message.kind, (None, None))
        if kind is None or (not self._parameters.begun and message.kind not in self._first):
            self._receiver.refuse(
                message,
                "no worker has sent the plan of this server yet"
                if kind is not None
                else "there is no such message",
            )
            return None
        try:
            return kind.unpack(message.body, message.tensors)
        except MALFORMED as error:
            self._refuse(message, error)
            return None

    def _serve(self, message: RpcMessage, request: Request[Any]) -> bool:
        """Handle a request. Returns whether it was answered, by a reply or a refusal."""
        try:
            reply = self._handlers[message.kind][1](message.sender, request)
            if reply is not None:
                self._receiver.answer(message, message.kind, *reply.pack())
            return reply is not None
        except (PacelineError, *WRONG) as error:
            self._refuse(message, error)
        return True

    def _refuse(self, message: RpcMessage, error: Exception) -> None:
        if isinstance(error, PacelineError):
            self._receiver.refuse(message, str(error))
            return
        # torch appends a stack trace of its own code, so the text is cut.
        reason = str(error)[:200]
        self._receiver.refuse(
            message,
            f"a part of it is missing, or has a wrong value ({type(error).__name__}: {reason})",
        )

    # ---- about this process

    def _timeline(self, worker: int, request: service.ReadTimeline) -> service.Timeline:
        packed = msgpack.packb([[list(span) for span in self._trace.spans()], list(self._waiting)])
        return service.Timeline(byte_tensor(packed))

    def _facts(self, worker: int, request: service.ReadFacts) -> service.Facts:
        facts = {
            "messages": dict(self._done_of),
            "put_off": self._most,
            "busy_seconds": self._busy,
            "bytes": self._receiver.nbytes,
            "bytes_sent": self._receiver.sent,
            "memory_bytes": self._tables.nbytes + self._parameters.nbytes,
            **(self._scheduling.scheduler.facts() if self._parameters.begun else {}),
            **self._tables.facts(),
        }
        return service.Facts(facts)

    def _end(self, worker: int, request: service.EndServer) -> Acknowledged:
        self._ended = True
        return Acknowledged()


def main() -> None:
    """Run a server process.

    It reads one line of instructions (JSON) from stdin, and prints the addresses where it listens.
    It ends with its parent or its launcher.
    """
    # Ctrl-C reaches the whole process group, but the server has to end after its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    instructions = json.loads(sys.stdin.buffer.readline())
    prepare = preparation(instructions["parent"]) if "parent" in instructions else None
    if prepare is not None:
        prepare()
        # The preparation of a worker has set its own handler.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _warm_up()
    folder = tempfile.mkdtemp(
        prefix=sockets(os.environ.get("PACELINE_JOB", "")), dir=place_of_sockets()
    )
    # The descriptor becomes readable when the process that this server depends on has ended.
    poll = select.poll()
    poll.register(
        sys.stdin.fileno() if "parent" in instructions else os.pidfd_open(instructions["launcher"]),
        select.POLLIN | select.POLLHUP,
    )
    try:
        path = os.path.join(folder, "server")
        timings = environment_timings().servers
        keys = derive_rpc_keys(bytes.fromhex(instructions["secret"]), instructions["job"])
        receiver = RpcServer(
            keys, hosts=instructions["hosts"], path=path, say=_say, timings=timings
        )
        with contextlib.closing(receiver):
            print(json.dumps(receiver.addresses), flush=True)
            Server(receiver, lambda: bool(poll.poll(0)), timings=timings).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _warm_up() -> None:
    """Step an optimizer once, because torch loads modules then, which takes a second or two.

    Otherwise workers would wait for that with the first plan.
    """
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def _say(text: str) -> None:
    # The server may outlive the reader of its output.
    with contextlib.suppress(OSError):
        print(f"paceline: a server: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

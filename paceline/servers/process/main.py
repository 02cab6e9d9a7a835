"""The server process: answers the requests of workers, one message after the other, with what it
keeps.

    shard_rpc       the shard: gradients, steps, parameters        protocol.parameters,
                                                                   protocol.recovery
    table_rpc       the rows of sparse tables                      protocol.rows
    scheduler_rpc   samples, where workers are not in lockstep     protocol.samples
    here            whether it lives, what it has done, its end    protocol.service

What can't be answered yet is put off, and looked at again after each message, and in time; nothing
here waits for one worker alone.
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

WRONG = (  # the errors that a senseless message causes
    *(LookupError, TypeError, ValueError, ArithmeticError, RuntimeError),
    *(AttributeError, AssertionError, MemoryError, BufferError, struct.error),
)
LATER, LATER_EACH = 10_000, 2000  # messages that are put off: in all, and of each connection
SPANS = 5000  # of what it has done last, for the timeline


class Server:
    """Answers messages, until it is asked to end.

    `over` is asked now and then whether no worker is left.
    """

    def __init__(
        self,
        receiver: RpcServer,
        over: Callable[[], bool] = lambda: False,
        *,
        timings: ServerTimings = DEFAULTS.servers,
    ) -> None:
        self._receiver, self._over, self._look = receiver, over, timings.look
        self._later: list[tuple[RpcMessage, Request[Any]]] = []  # what can't be answered yet
        self._ended = False
        self._parameters, self._scheduling, self._tables = (
            ShardRpc(),
            SchedulerRpc(),
            TableService(),
        )
        mine: Handlers = {
            service.CheckAlive: lambda worker, request: service.Alive(time.perf_counter_ns()),
            service.Echo: lambda worker, request: service.Echoed(request.tensor),
            service.ReadFacts: self._facts,
            service.ReadTimeline: self._timeline,
            service.EndServer: self._end,
        }
        first: Handlers = {**mine, **self._tables.handlers}
        every = {**first, **self._parameters.handlers, **self._scheduling.handlers}
        self._handlers = {request.kind: (request, act) for request, act in every.items()}
        # what may come before there is a shard
        self._first = {PlanShard.kind, *(request.kind for request in first)}
        self._done_of: Counter[str] = Counter()  # messages by kind
        self._most, self._busy = 0, 0.0  # messages that were put off at a time; seconds of work
        self._trace = Trace(SPANS)
        # how many are put off, from when on
        self._waiting: deque[tuple[int, int]] = deque(maxlen=SPANS)

    def run(self) -> None:
        """Serve."""
        while not self._ended and not self._over():
            message = self._receiver.receive(self._scheduling.patience(self._look))
            began, waiting = time.perf_counter_ns(), len(self._later)
            self.take(message)
            self._note(message, began, waiting)

    def take(self, message: RpcMessage | None) -> None:
        """Handle a message that has come, if any, and those that were put off before."""
        request = None if message is None else self._read(message)
        if message is not None and request is not None and not self._serve(message, request):
            self._put_off(message, request)
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
        of_it = (
            sum(late.route == message.route for late, _ in self._later)
            if len(self._later) >= LATER_EACH
            else 0
        )
        if len(self._later) < LATER and of_it < LATER_EACH:
            self._later.append((message, request))
            self._most = max(self._most, len(self._later))
        else:
            self._receiver.refuse(
                message, f"{of_it or LATER} messages wait here for something that has not come"
            )

    def _read(self, message: RpcMessage) -> Request[Any] | None:
        """Return the request in a message; None if it was refused."""
        kind, _ = self._handlers.get(message.kind, (None, None))
        if kind is None or (not self._parameters.begun and message.kind not in self._first):
            self._receiver.refuse(
                message,
                "nobody has said yet what is kept here"
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
        """Handle a request; whether it was answered, one way or the other."""
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
        why = str(error)[:200]  # torch adds where in its own code it was
        self._receiver.refuse(
            message,
            f"it lacks something, or has something else there ({type(error).__name__}: {why})",
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
    """Run a server process: reads from stdin where to listen, writes to stdout where it does;
    ends with its parent, or with a launcher.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends after its workers
    asked = json.loads(sys.stdin.buffer.readline())
    prepare = preparation(asked["parent"]) if "parent" in asked else None
    if prepare is not None:
        prepare()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _warm_up()
    folder = tempfile.mkdtemp(
        prefix=sockets(os.environ.get("PACELINE_JOB", "")), dir=place_of_sockets()
    )
    poll = select.poll()
    poll.register(
        sys.stdin.fileno() if "parent" in asked else os.pidfd_open(asked["launcher"]),
        select.POLLIN | select.POLLHUP,
    )
    try:
        path = os.path.join(folder, "server")
        given = environment_timings().servers
        known = derive_rpc_keys(bytes.fromhex(asked["secret"]), asked["job"])
        receiver = RpcServer(known, hosts=asked["hosts"], path=path, say=_say, timings=given)
        with contextlib.closing(receiver):
            print(json.dumps(receiver.addresses), flush=True)
            Server(receiver, lambda: bool(poll.poll(0)), timings=given).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _warm_up() -> None:
    """Load what torch loads with its first optimizer, which takes a second or two: workers may
    wait for the first plan.
    """
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the server may outlive the reader
        print(f"paceline: a server: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

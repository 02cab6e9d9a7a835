"""The server process: answers the requests of workers, one message after another.

    shard_rpc       the shard: gradients, steps, parameters          protocol.parameters,
                                                                     protocol.recovery
    table_rpc       the rows of sparse tables                        protocol.rows
    scheduler_rpc   samples, if workers are not in lockstep          protocol.samples
    round_rpc       rounds of local SGD that close by a quorum       protocol.rounds
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

from paceline.cluster.discover import read_timings as environment_timings
from paceline.cluster.launcher.janitor import find_socket_parent, get_socket_prefix
from paceline.cluster.launcher.worker import make_preparation
from paceline.comm.rpc import RpcMessage, RpcServer, derive_rpc_keys
from paceline.errors import PacelineError
from paceline.servers.process.round_rpc import RoundRpc
from paceline.servers.process.scheduler_rpc import SchedulerRpc
from paceline.servers.process.shard_rpc import ShardRpc
from paceline.servers.process.table_rpc import TableRpc
from paceline.servers.protocol import service
from paceline.servers.protocol.message import MALFORMED_ERRORS, Acknowledged, Handlers, Request
from paceline.servers.protocol.parameters import PlanShard
from paceline.state.snapshot import copy_to_tensor
from paceline.timings import DEFAULT_TIMINGS, ServerTimings
from paceline.trace import Trace

# Errors that a senseless message may cause. They refuse the message, and the server goes on.
MESSAGE_ERRORS = (
    *(LookupError, TypeError, ValueError, ArithmeticError, RuntimeError),
    *(AttributeError, AssertionError, MemoryError, BufferError, struct.error),
)
# Largest number of messages that are put off: in all, and of one connection.
MAX_PUT_OFF, MAX_PUT_OFF_EACH = 10_000, 2000
# Number of the last entries that the timeline has.
TIMELINE_ENTRIES = 5000


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
        timings: ServerTimings = DEFAULT_TIMINGS.servers,
    ) -> None:
        self._receiver, self._is_abandoned, self._check_interval = receiver, over, timings.look
        # Requests that can't be answered yet, in the order of arrival.
        self._waiting_requests: list[tuple[RpcMessage, Request[Any]]] = []
        self._ended = False
        self._shard_rpc, self._scheduler_rpc, self._table_rpc = (
            ShardRpc(),
            SchedulerRpc(),
            TableRpc(),
        )
        self._round_rpc = RoundRpc(self._scheduler_rpc.scheduler)
        self._scheduler_rpc.add_loss_listener(self._round_rpc.remove_lost_workers)
        own: Handlers = {
            service.CheckAlive: lambda worker, request: service.Alive(time.perf_counter_ns()),
            service.Echo: lambda worker, request: service.Echoed(request.tensor),
            service.ReadFacts: self._report_facts,
            service.ReadTimeline: self._report_timeline,
            service.EndServer: self._end_server,
        }
        before_plan: Handlers = {**own, **self._table_rpc.handlers}
        all_handlers = {
            **before_plan,
            **self._shard_rpc.handlers,
            **self._scheduler_rpc.handlers,
            **self._round_rpc.handlers,
        }
        self._handlers = {request.kind: (request, act) for request, act in all_handlers.items()}
        # Requests that are answered before there is a shard.
        self._kinds_before_plan = {PlanShard.kind, *(request.kind for request in before_plan)}
        self._message_counts: Counter[str] = Counter()  # number of messages, by kind
        # Largest number of messages that were put off at a time, and seconds of work.
        self._most_put_off, self._busy_seconds = 0, 0.0
        self._trace = Trace(TIMELINE_ENTRIES)
        # Time (ns) and number of messages put off, at each change.
        self._put_off_counts: deque[tuple[int, int]] = deque(maxlen=TIMELINE_ENTRIES)

    def run(self) -> None:
        """Serve until a worker ends the server, or no worker is left."""
        while not self._ended and not self._is_abandoned():
            # The open round is looked at again when its grace window ends.
            grace = max(self._round_rpc.next_check - time.monotonic(), 0.001)
            most = min(self._check_interval, grace)
            message = self._receiver.receive(self._scheduler_rpc.compute_receive_timeout(most))
            began, waiting = time.perf_counter_ns(), len(self._waiting_requests)
            self.handle_message(message)
            self._record_work(message, began, waiting)

    def handle_message(self, message: RpcMessage | None) -> None:
        """Handle the message that has come, if any, and messages that were put off before."""
        request = None if message is None else self._read_request(message)
        if (
            message is not None
            and request is not None
            and not self._serve_request(message, request)
        ):
            self._put_off_request(message, request)
        # Every message may be what another one waits for, so all are tried again.
        if self._waiting_requests:
            self._waiting_requests = [
                late
                for late in self._waiting_requests
                if late[0] is message or not self._serve_request(*late)
            ]

    def _record_work(self, message: RpcMessage | None, began: int, waiting: int) -> None:
        now = time.perf_counter_ns()
        self._busy_seconds += (now - began) / 1e9
        if message is not None:
            kind = message.kind if message.kind in self._handlers else "unknown"
            self._message_counts[kind] += 1
            self._trace.step = message.step
            self._trace.record_span(kind, "serve", began, now)
        if len(self._waiting_requests) != waiting:
            self._put_off_counts.append((now, len(self._waiting_requests)))

    def _put_off_request(self, message: RpcMessage, request: Request[Any]) -> None:
        # Counting the messages of a connection takes long, so it is left out while they are few.
        same_connection = (
            sum(late.route == message.route for late, _ in self._waiting_requests)
            if len(self._waiting_requests) >= MAX_PUT_OFF_EACH
            else 0
        )
        if len(self._waiting_requests) < MAX_PUT_OFF and same_connection < MAX_PUT_OFF_EACH:
            self._waiting_requests.append((message, request))
            self._most_put_off = max(self._most_put_off, len(self._waiting_requests))
        else:
            self._receiver.refuse(
                message,
                (
                    f"{same_connection or MAX_PUT_OFF} messages wait here for something that has "
                    "not come"
                ),
            )

    def _read_request(self, message: RpcMessage) -> Request[Any] | None:
        """Read the request in a message. None if it was refused."""
        kind, _ = self._handlers.get(message.kind, (None, None))
        if kind is None or (
            not self._shard_rpc.has_shard and message.kind not in self._kinds_before_plan
        ):
            self._receiver.refuse(
                message,
                "no worker has sent the plan of this server yet"
                if kind is not None
                else "there is no such message",
            )
            return None
        try:
            return kind.unpack(message.body, message.tensors)
        except MALFORMED_ERRORS as error:
            self._refuse_message(message, error)
            return None

    def _serve_request(self, message: RpcMessage, request: Request[Any]) -> bool:
        """Handle a request. Returns whether it was answered, by a reply or a refusal."""
        try:
            reply = self._handlers[message.kind][1](message.sender, request)
            if reply is not None:
                self._receiver.answer(message, message.kind, *reply.pack())
            return reply is not None
        except (PacelineError, *MESSAGE_ERRORS) as error:
            self._refuse_message(message, error)
        return True

    def _refuse_message(self, message: RpcMessage, error: Exception) -> None:
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

    def _report_timeline(self, worker: int, request: service.ReadTimeline) -> service.Timeline:
        packed = msgpack.packb(
            [[list(span) for span in self._trace.list_spans()], list(self._put_off_counts)]
        )
        return service.Timeline(copy_to_tensor(packed))

    def _report_facts(self, worker: int, request: service.ReadFacts) -> service.Facts:
        facts = {
            "messages": dict(self._message_counts),
            "put_off": self._most_put_off,
            "busy_seconds": self._busy_seconds,
            "bytes": self._receiver.nbytes,
            "bytes_sent": self._receiver.sent,
            "memory_bytes": self._table_rpc.nbytes + self._shard_rpc.nbytes,
            **(
                self._scheduler_rpc.scheduler.summarize_schedule()
                if self._shard_rpc.has_shard
                else {}
            ),
            **self._table_rpc.summarize_tables(),
            **self._round_rpc.summarize(),
        }
        return service.Facts(facts)

    def _end_server(self, worker: int, request: service.EndServer) -> Acknowledged:
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
    prepare = make_preparation(instructions["parent"]) if "parent" in instructions else None
    if prepare is not None:
        prepare()
        # The preparation of a worker has set its own handler.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _warm_up_torch()
    folder = tempfile.mkdtemp(
        prefix=get_socket_prefix(os.environ.get("PACELINE_JOB", "")), dir=find_socket_parent()
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
            keys, hosts=instructions["hosts"], path=path, say=_print_message, timings=timings
        )
        with contextlib.closing(receiver):
            print(json.dumps(receiver.addresses), flush=True)
            Server(receiver, lambda: bool(poll.poll(0)), timings=timings).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _warm_up_torch() -> None:
    """Step an optimizer once, because torch loads modules then, which takes a second or two.

    Otherwise workers would wait for that with the first plan.
    """
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def _print_message(text: str) -> None:
    # The server may outlive the reader of its output.
    with contextlib.suppress(OSError):
        print(f"paceline: a server: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""A job runs while strangers, and somebody who has its keys, send what makes no sense to all of its
ports: it comes to the same weights.

The ports: a launcher that waits for hosts, one of a job that survives losses, a server, and a
server of sparse tables.
"""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgpack
import psutil
import pytest
import torch
import zmq
from torch import Tensor

from paceline.cluster import network
from paceline.cluster.hosts.admission import MeetingPoint
from paceline.cluster.hosts.channel import Channel, introduce_launcher, wait_ready
from paceline.cluster.hosts.elastic import ElasticPeers
from paceline.cluster.hosts.membership import HostSeat, View
from paceline.comm.rpc import RpcClient, RpcServer, derive_rpc_keys
from paceline.servers.process.main import Server
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness import runs, strangers
from tests.harness.handshakes import HELLO, OFFER, SECRET, offered, senseless, waiting
from tests.harness.jobs import free_port
from tests.harness.tables import Net, loader, served

KEYS = derive_rpc_keys(b"0123456789abcdef", "tests")  # as servers of runs on threads have them
ODD: tuple[Any, ...] = ("x", None, [], {}, 1.5, True, -1, 999, 1 << 40, [0], b"x")
SHAPES: tuple[Any, ...] = (
    [0, 1 << 62, 1 << 62],
    [1 << 62],
    [-1],
    [3, 1 << 62],
    ["x"],
    "x",
    None,
    [1] * 17,
    [2.5],
)
NUMBERS: tuple[Any, ...] = (-1, "1", None, 1.5, [], 1 << 64)
KINDS = {  # of messages, each with what can't be anything else in it than what it is
    "push_gradient": "unit",
    "fill_unit": "unit",
    "pull_unit": "unit",
    "apply_gradient": "optimizer",
    "close_step": "optimizer",
    "read_norm": "optimizer",
    "list_absent": "optimizer",
    "pull_rows": "table",
    "list_pushers": "table",
    "describe_table": "table",
    "digest_table": "table",
    "read_rows": "table",
    "load_rows": "table",
    "clear_table": "table",
}


def nonsense(drawn: random.Random, number: int) -> list[bytes]:
    """A message, or what looks like one, that nobody can mean; with the number of a worker, or
    of nobody.
    """
    sender, step = drawn.choice((0, 1, 2, 7777)), drawn.choice((0, 1, 5))
    kind = drawn.choice(sorted(KINDS))
    body: dict[str, Any] = {
        "unit": 999,
        "optimizer": 999,
        "table": 999,
        "step": step,
        "workers": [sender],
        "used": b"\1",
    }
    body |= {
        "factor": 1.0,
        "settings": [],
        "turn": 0,
        KINDS[kind]: drawn.choice([odd for odd in ODD if odd != [0]]),
    }
    head: list[Any] = [kind, number, sender, 0, step, body, []]
    match drawn.randrange(7):
        case 0:
            head[6] = [[drawn.choice(("float32", "int64", "bool")), drawn.choice(SHAPES)]]
            return [msgpack.packb(head), *([b""] * drawn.randrange(3))]
        case 1:
            head[6] = [[drawn.choice(("float31", "", None, 7, ["float32"])), [1]]]
            return [msgpack.packb(head), b"0000"]
        case 2:
            place = drawn.randrange(1, 5)
            head[place] = drawn.choice([odd for odd in NUMBERS if odd != 1 << 64])
            return [msgpack.packb(head)]
        case 3:
            head[0], head[5] = (
                drawn.choice(("", "x" * 3000, "pushh", "__class__")),
                drawn.choice((body, {})),
            )
            return [msgpack.packb(head)]
        case 4:
            return [drawn.randbytes(drawn.randrange(200)) for _ in range(drawn.randrange(1, 4))]
        case 5:
            return [msgpack.packb(head)[: drawn.randrange(1, 20)]]
        case _:
            return [msgpack.packb(head)]


class Attack:
    """Sends so many messages to everybody, as far as it is let: `upto` may be sent by now, of
    each sort.
    """

    def __init__(self, count: int, points: dict[str, tuple[str, int]]) -> None:
        self.each = count // 4
        self.sent = {(who, name): 0 for who in ("stranger", "holder") for name in points}
        self._points, self._upto, self._over = points, 0, False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._stranger, args=(name,)) for name in points]
        self._threads += [
            threading.Thread(
                target=self._launcher if name.startswith("launcher") else self._server, args=(name,)
            )
            for name in points
        ]
        for thread in self._threads:
            thread.start()

    def until(self, part: float) -> None:
        """Let this part of all be sent, and wait until it is."""
        with self._changed:
            self._upto = max(self._upto, int(self.each * part))
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: min(self.sent.values()) >= self._upto, 170), (
                self.sent
            )

    def close(self) -> None:
        self._over = True
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _loop(self, who: str, name: str) -> Iterator[int]:
        for number in itertools.count(1):
            with self._changed:
                self._changed.wait_for(lambda: self._over or self.sent[who, name] < self._upto)
                if self._over:
                    return
            yield number
            with self._changed:
                self.sent[who, name] += 1
                if self.sent[who, name] >= self._upto:
                    self._changed.notify_all()

    def _stranger(self, name: str) -> None:
        drawn = random.Random(f"stranger of {name}")
        for number in self._loop("stranger", name):
            strangers.call(
                self._points[name], strangers.line(drawn, [HELLO, OFFER]), rudely=number % 2 == 0
            )

    def _launcher(self, name: str) -> None:
        drawn = random.Random(f"holder of {name}")
        for _ in self._loop("holder", name):
            with suppress(OSError):  # it is hung up on before all is written
                channel = self._proven(name)
                channel.send(
                    senseless(
                        drawn,
                        [OFFER],
                        lambda message: offered({**message, "hosts": 2, "host_rank": None}),
                    )
                )
                channel.flush(5.0)
                channel.close()

    def _proven(self, name: str) -> Channel:
        """Strangers push in: it may take more than one call."""
        while True:
            with suppress(OSError):
                return introduce_launcher(
                    socket.create_connection(self._points[name], timeout=20), SECRET, "there", 20.0
                )

    def _server(self, name: str) -> None:
        drawn = random.Random(f"holder of {name}")
        with zmq.Context() as context, context.socket(zmq.DEALER) as found:
            found.linger, found.rcvhwm = 0, 10
            found.curve_serverkey, (found.curve_publickey, found.curve_secretkey) = (
                KEYS.server[0],
                KEYS.worker,
            )
            host, port = self._points[name]
            found.connect(f"tcp://{host}:{port}")
            for number in self._loop("holder", name):
                found.send_multipart(nonsense(drawn, number))
                while found.poll(0):
                    found.recv_multipart()


@contextmanager
def elastic() -> Iterator[tuple[ElasticPeers, tuple[str, int], Callable[[], None]]]:
    """A launcher of a job that survives losses, at work in a thread; its port; and what ends the
    thread.
    """
    listening = network.open_listener("127.0.0.1")
    point = ("127.0.0.1", int(listening.getsockname()[1]))
    facts = {"name": "h0", "address": point[0], "port": point[1]}
    launcher = ElasticPeers(
        0, View(1, (HostSeat(0, (10, 11), facts),), 1), {}, MeetingPoint(listening, SECRET)
    )
    launcher.run_facts = "[]"
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            for descriptor in wait_ready(launcher.list_descriptors(), 0.02):
                launcher.read_messages(descriptor)
            launcher.run_timers()

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)

        def rest() -> None:
            over.set()
            working.result()  # raises what ended it, if something did

        try:
            yield launcher, point, rest
        finally:
            over.set()
    launcher.close()


def train(during: Callable[[list[str]], Callable[[float], None]]) -> list[Tensor]:
    """The weights of each worker after some steps, of what a server and one of tables keep;
    `during` is told where they listen.
    """
    addresses: list[str] = []
    met = threading.Barrier(2)
    told: list[Callable[[float], None]] = []

    class Known(RpcServer):
        def __init__(self, *args: Any, **parts: Any) -> None:
            super().__init__(*args, **parts, say=lambda text: None)
            addresses.extend(self.addresses)

    def body(run: Run) -> Tensor:
        torch.manual_seed(0)
        model = Net(served(servers=1), torch.float64, "sum")
        mine = [*model.first.parameters(), *model.second.parameters()]
        optimizers = torch.optim.SGD(mine, 0.1), torch.optim.SGD(model.dense.parameters(), 0.1)
        model, tables, dense, data = run.prepare(model, *optimizers, loader())
        seen, losses = 0, []
        for _ in run.epochs(2):
            for a, b, y in data:
                if not seen and met.wait(60) == 0:
                    told.append(during(addresses))
                seen += 1
                met.wait(60)
                told[0](seen / (2 * len(data)))
                loss = ((model(a, b) - y) ** 2).mean()
                loss.backward()
                for optimizer in (tables, dense):
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
        assert seen == 2 * len(data)
        return torch.cat(
            [
                *(p.detach().reshape(-1) for p in model.dense.parameters()),
                model.first(torch.arange(60)[:, None]).detach().reshape(-1),
            ]
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "RpcServer", Known)
        return runs.workers(2, body, strategy=ParameterServer(), deadline=300.0)


@pytest.mark.parametrize("count", [1200, pytest.param(100_000, marks=pytest.mark.soak)])
def test_a_job_goes_on_whatever_comes(count: int) -> None:
    alone = train(lambda addresses: lambda part: None)
    begun: list[Attack] = []
    before = psutil.Process().memory_info().rss
    most: list[int] = []

    def told(part: float) -> None:
        begun[0].until(part)
        most.append(psutil.Process().memory_info().rss)

    with ExitStack() as held:
        port = free_port()
        come = held.enter_context(waiting(port))
        launcher, point, rest = held.enter_context(elastic())

        def during(addresses: list[str]) -> Callable[[float], None]:
            assert len(addresses) == 2
            (dense, rows) = (address.removeprefix("tcp://").split(":") for address in addresses)
            points = {"launcher that waits": ("127.0.0.1", port), "launcher that survives": point}
            begun.append(
                Attack(
                    count,
                    points
                    | {"server": (dense[0], int(dense[1])), "tables": (rows[0], int(rows[1]))},
                )
            )
            held.callback(begun[0].close)
            return told

        found = train(during)
        assert min(begun[0].sent.values()) >= count // 4
        begun[0].close()
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
        come()  # who was waited for still gets in
        rest()
        assert (
            launcher.verdict is None
            and launcher.stop_request is None
            and launcher.view.hosts == (0,)
        )
    grown = [round((rss - before) / 1e6) for rss in most]
    assert max(grown) < 50, grown


def test_the_messages_are_refused_and_no_others() -> None:
    """What the test above sends is refused, each of it: else it would show nothing."""
    refused: list[str] = []
    over = threading.Event()
    receiver = RpcServer(KEYS, hosts=["127.0.0.1"], say=refused.append)
    thread = threading.Thread(target=Server(receiver, over.is_set).run)
    thread.start()
    drawn = random.Random(3)
    with zmq.Context() as context, context.socket(zmq.DEALER) as found:
        found.linger = 0
        found.curve_serverkey, (found.curve_publickey, found.curve_secretkey) = (
            KEYS.server[0],
            KEYS.worker,
        )
        found.connect(receiver.addresses[0])
        for number in range(1, 501):
            found.send_multipart(nonsense(drawn, number))
        caller = RpcClient(receiver.addresses[0], KEYS, sender=1, who="server 0")
        strangers.until(
            lambda: receiver.refused_count >= 500, lambda: caller.call("check_alive", seconds=20)
        )
        assert receiver.refused_count == 500
        caller.close()
    over.set()
    thread.join()
    receiver.close()

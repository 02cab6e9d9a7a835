"""Measures a parameter server with large parameters, against a plain echo of pyzmq.

One worker pushes gradients and pulls parameters.

    python benchmarks/servers.py [--mb 100 --repeats 15]

Both go through a socket file and through TCP on the loopback, and take turns in the same run. The
echo sends `--mb` MB in one message and gets them back, without a header, a key or a copy. `ratio`
is the time of the echo on its faster way divided by ours, with its 90 % interval: 0.8 means that
ours takes a quarter longer. `memory` is the highest memory of the server, less that of a server
with tiny parameters, divided by the size of the parameters and one update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
import zmq
from harness import bootstrap

from paceline.comm.bucket_layout import BucketShape, cut_runs
from paceline.comm.rpc import RpcClient, derive_rpc_keys
from paceline.servers.process.partition import RowRange
from paceline.servers.process.shard import ShardPlan
from paceline.servers.protocol.message import Index, call_server, send_request
from paceline.servers.protocol.parameters import CloseStep, PlanShard, PullUnit, PushGradient
from paceline.servers.protocol.plans import pack_plan

SECONDS = 60.0  # deadline of a call
SECRET, JOB = b"0123456789abcdef", "benchmark"
ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
while True:
    socket.send_multipart(socket.recv_multipart(copy=False), copy=False)
"""


class Echo:
    """A process that sends back each message. `where` is the address that it listens at."""

    def __init__(self, where: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ECHO, where], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(self._process.stdout.readline().strip())

    def turn(self, x: torch.Tensor) -> float:
        """Send a tensor and receive it again. Returns seconds."""
        start = time.perf_counter()
        self._socket.send(x.numpy().data, copy=False)
        self._socket.recv(copy=False)
        return time.perf_counter() - start

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._socket.close(0)


class Served:
    """A server with one large parameter.

    Args:
        mb: Size of the parameter in MB.
        unit_mb: Size in MB of the pieces that are pushed and pulled.
    """

    def __init__(self, mb: float, unit_mb: float) -> None:
        command = [sys.executable, "-P", "-m", "paceline.servers.process.main"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {
            "job": JOB,
            "secret": SECRET.hex(),
            "hosts": ["127.0.0.1"],
            "parent": os.getpid(),
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        self.addresses = json.loads(self._process.stdout.readline())
        self.memory = psutil.Process(self._process.pid)
        # A piece has rows of 1000 values.
        rows = int(unit_mb * 1e6) // 4 // 1000
        shape = BucketShape.of_parameter(torch.empty(rows, 1000, device="meta"))._replace(
            device=torch.device("cpu")
        )
        count = round(mb / unit_mb)
        pieces = [
            RowRange(0, index * rows, (index + 1) * rows, shape, False) for index in range(count)
        ]
        plan = ShardPlan(
            pieces,
            cut_runs([piece.shape for piece in pieces], range(count), int(unit_mb * 1e6)),
            [(0, 0)] * count,
            [("SGD", [{"lr": 0.1}])],
        )
        self.units = [torch.zeros(rows * 1000) for _ in range(count)]
        self._plan, self._step = torch.frombuffer(bytearray(pack_plan(plan)), dtype=torch.uint8), 0
        self.most = 0

    @property
    def resident(self) -> int:
        """Resident memory of the server in bytes."""
        return int(self.memory.memory_info().rss)

    def caller(self, address: str, sender: int) -> RpcClient:
        """Connect a worker, the one with the number `sender`, at an address of the server."""
        client = RpcClient(address, derive_rpc_keys(SECRET, JOB), sender=sender, who="the server")
        call_server(client, PlanShard(self._plan), SECONDS)
        return client

    def turn(self, caller: RpcClient, sender: int) -> float:
        """Push all gradients, apply them, and pull all parameters. Returns seconds."""
        self._step += 1
        start = time.perf_counter()
        # All requests are sent before the first reply is waited for, as workers do it.
        pushes = [
            PushGradient(Index(index), self._step, 0, b"\1", False, False, flat)
            for index, flat in enumerate(self.units)
        ]
        for request in [send_request(caller, push, SECONDS) for push in pushes]:
            request.wait_for_reply(SECONDS)
        call_server(caller, CloseStep(Index(0), self._step, 0, (sender,), 1.0, ()), SECONDS)
        pulls = [
            send_request(caller, PullUnit(Index(index), self._step, False), SECONDS)
            for index in range(len(self.units))
        ]
        for pull, flat in zip(pulls, self.units, strict=True):
            flat.copy_(pull.wait_for_reply(SECONDS).values[0])
        seconds = time.perf_counter() - start
        self.most = max(self.most, self.resident)
        return seconds

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--unit-mb", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensor = torch.zeros(int(options.mb * 1e6) // 4)
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        echoes = {"ipc": Echo(f"ipc://{Path(folder, 'echo')}"), "tcp": Echo("tcp://127.0.0.1:*")}
        tiny_server = Served(1.0, 1.0)  # for the memory of a server with almost no parameters
        caller = tiny_server.caller(tiny_server.addresses[-1], 1)
        for _ in range(5):
            tiny_server.turn(caller, 1)
        baseline_nbytes = tiny_server.most
        caller.close()
        tiny_server.close()
        server = Served(options.mb, options.unit_mb)
        callers = {
            "tcp": (server.caller(server.addresses[0], 1), 1),
            "ipc": (server.caller(server.addresses[-1], 2), 2),
        }
        times: dict[str, list[float]] = {}
        for _ in range(options.repeats + 2):
            for way in ("ipc", "tcp"):
                times.setdefault(f"echo {way}", []).append(echoes[way].turn(tensor))
                times.setdefault(f"served {way}", []).append(server.turn(*callers[way]))
        # The first two turns don't count.
        times = {name: values[2:] for name, values in times.items()}
        for caller, _ in callers.values():
            caller.close()
        server.close()
        for echo in echoes.values():
            echo.close()
    # The echo is taken at its faster way, which makes the bar harder.
    quickest = min(("echo ipc", "echo tcp"), key=lambda name: statistics.median(times[name]))
    ratios = [echo / ours for echo, ours in zip(times[quickest], times["served ipc"], strict=True)]
    interval = bootstrap(lambda median: median, ratios)
    medians = {name: round(1e3 * statistics.median(values), 1) for name, values in times.items()}
    print(
        json.dumps(
            {
                "milliseconds": medians,
                "ratio": interval._asdict(),
                "memory": round((server.most - baseline_nbytes) / (2 * 1e6 * options.mb), 2),
            }
        )
    )


if __name__ == "__main__":
    main()

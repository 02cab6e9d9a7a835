"""What a lab could leave on this machine, and how to see from outside what its hosts do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from paceline.cluster.launcher import janitor
from paceline.lab import remains
from paceline.lab.hosts import Cluster
from tests.harness.jobs import PATIENCE, wait_for

GROUPS = Path("/sys/fs/cgroup")
SCRATCH = Path(tempfile.gettempdir())
CHUNK = bytes(1 << 17)


def traces() -> set[str]:
    """Interfaces, named networks, control groups, records, temporary folders, shared memory: all
    that could be a lab's.

    Labs of other programs that run meanwhile are left out.
    """
    others = [
        record
        for record in remains.read_records()
        if remains.is_alive(record) and record["process"] != os.getpid()
    ]
    seen = {f"interface {name}" for _, name in socket.if_nameindex()}
    seen |= {f"network {path}" for path in Path("/run/netns").glob("*")}
    seen |= {f"group {folder}" for folder in GROUPS.glob("**/paceline-lab-*")}
    seen |= {
        f"record {path}"
        for path in (*remains.records_folder().glob("*"), *SCRATCH.glob("paceline-lab-*"))
    }
    seen |= {
        f"shared memory {path}"
        for path in Path("/dev/shm").glob("*")
        if path.name.startswith(("torch_", "paceline", "psm_"))
    }
    names = [name for record in others for name in (record["identity"], record["folder"])]
    return {trace for trace in seen if not any(name in trace for name in names)}


def left(before: set[str], seconds: float = 30.0) -> set[str]:
    """What there is more than before, after at most these seconds."""
    end = time.monotonic() + seconds
    while (
        remaining := {trace for trace in traces() - before if not _used(trace)}
    ) and time.monotonic() < end:
        time.sleep(0.05)
    return remaining


def _used(trace: str) -> bool:
    """Tell whether it is shared memory that some process has: that of a test that runs beside
    this one.
    """
    kind, _, path = trace.rpartition(" ")
    return kind == "shared memory" and janitor.is_in_use(Path(path))


def spaces() -> set[str]:
    """The networks that some process is in."""
    seen = set()
    for process in psutil.pids():
        with suppress(OSError):
            seen.add(os.readlink(f"/proc/{process}/ns/net"))
    return seen


def measure(cluster: Cluster, source: int, target: int, seconds: float = 1.0) -> float:
    """Bits of payload that a TCP connection carries in a second from one host to another, after
    a start of 0.3 s.
    """
    with ExitStack() as held:
        listening = cluster.hosts[target].space.call_inside(socket.socket)
        held.callback(listening.close)
        listening.bind((cluster.hosts[target].address, 0))
        listening.listen()
        sender = cluster.hosts[source].space.call_inside(socket.socket)
        held.callback(sender.close)
        sender.connect(listening.getsockname())
        receiver, _ = listening.accept()
        held.callback(receiver.close)
        thread = threading.Thread(target=_pour, args=(sender,))
        thread.start()
        held.callback(thread.join)
        held.callback(sender.shutdown, socket.SHUT_RDWR)
        _drain(receiver, 0.3)
        began = time.monotonic()
        nbytes = _drain(receiver, seconds)
        return 8 * nbytes / (time.monotonic() - began)


def _pour(sender: socket.socket) -> None:
    with suppress(OSError):
        while True:
            sender.sendall(CHUNK)


def _drain(receiver: socket.socket, seconds: float) -> int:
    """Count what comes in these seconds: nothing, where a link lets nothing pass."""
    buffer, nbytes, end = bytearray(len(CHUNK)), 0, time.monotonic() + seconds
    while (remaining := end - time.monotonic()) > 0:
        receiver.settimeout(remaining)
        with suppress(TimeoutError):
            nbytes += receiver.recv_into(buffer)
    return nbytes


def spin(cluster: Cluster, host: int, seconds: float = 1.0) -> float:
    """How much of a core a process that never rests gets on this host: at most, where the one
    that measures has to wait for a core.
    """
    process = cluster.spawn(host, [sys.executable, "-S", "-c", "while True: pass"])
    seen = psutil.Process(process.pid)
    try:
        wait_for(lambda: sum(seen.cpu_times()[:2]) > 0.1)
        began, used = time.monotonic(), sum(seen.cpu_times()[:2])
        time.sleep(seconds)
        return float((sum(seen.cpu_times()[:2]) - used) / (time.monotonic() - began))
    finally:
        process.kill()
        process.wait()


def ask(cluster: Cluster, host: int, *command: str) -> str:
    """What a command writes on a host."""
    process = cluster.spawn(host, command, stdout=subprocess.PIPE)
    return process.communicate(timeout=PATIENCE)[0].decode().strip()

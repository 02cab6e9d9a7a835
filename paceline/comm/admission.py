"""Admits connections to a server's port: only processes that hold the workers' key, and strangers
take hardly any room.

    accepted ---> [ ... ] at most `MOST` that have proved nothing: with too many the oldest is closed; none may take long
    key shown --> ZeroMQ asks (ZAP, RFC 27), as CURVE by itself lets in everybody who knows the server's public key

What a stranger may send before it has shown a key is limited by what a frame may have, which is why
messages travel in small ones.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

MOST = 128  # connections that have proved nothing
# of Linux's struct tcp_info: how many bytes the other side has taken (tcpi_bytes_acked)
_ACKNOWLEDGED = slice(120, 128)
# bytes that a server has sent to a client that is let in: 64 of greeting, 170 of WELCOME, then
# READY; a refused one gets 12
_READY = 280


class ConnectionGuard:
    """A thread that answers ZeroMQ's authentication requests and counts strangers; it calls
    `refused` for connections with another key.
    """

    def __init__(
        self, context: zmq.Context[Any], allowed: bytes, refused: Callable[[str], None]
    ) -> None:
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._allowed, self._refused = z85.decode(allowed), refused
        self._monitors: list[zmq.Socket[Any]] = []
        # connections that may have proved nothing, the oldest first: descriptor, and the kernel's
        # number
        self._open: dict[int, int] = {}
        self._thread: threading.Thread | None = None

    def watch(self, listening: zmq.Socket[Any]) -> None:
        """Count the connections accepted on this listening socket. Call before `start`."""
        self._monitors.append(
            listening.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        )

    def start(self) -> None:
        """Begin to answer; until then new connections wait."""
        self._thread = threading.Thread(target=self._run, name="paceline guard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, *self._monitors):
            poller.register(each, zmq.POLLIN)
        try:
            while True:
                for ready, _ in poller.poll():
                    if ready is self._socket:
                        self._answer()
                    else:
                        self._count(ready)
        except zmq.ContextTerminated:
            self._close()

    def _answer(self) -> None:
        version, request, _, address, _, mechanism, *credentials = self._socket.recv_multipart()
        right = mechanism == b"CURVE" and credentials == [self._allowed]
        if not right:
            self._refused(
                f"{address.decode(errors='replace')} has not the key of this job's workers"
            )
        status, text = (b"200", b"OK") if right else (b"400", b"no key of this job")
        self._socket.send_multipart(
            [version, request, status, text, b"worker" if right else b"", b""]
        )

    def _count(self, monitor: zmq.Socket[Any]) -> None:
        event = parse_monitor_message(monitor.recv_multipart())
        descriptor = int(event["value"])
        self._open.pop(descriptor, None)
        if event["event"] != zmq.EVENT_ACCEPTED:
            return
        try:
            self._open[descriptor] = os.fstat(descriptor).st_ino
        except OSError:  # the connection is gone already
            return
        if len(self._open) > MOST:
            self._open = {one: inode for one, inode in self._open.items() if _unproved(one, inode)}
        for oldest in [*self._open][: max(0, len(self._open) - MOST)]:
            _hang_up(oldest, self._open.pop(oldest))

    def leave(self) -> None:
        """Close the sockets of a guard that has not begun: the context is about to be
        terminated, and waits for them.
        """
        if self._thread is None:
            self._close()

    def join(self) -> None:
        """Wait until the thread has ended; the context must have been terminated before."""
        if self._thread is not None:
            self._thread.join()

    def _close(self) -> None:
        for each in (self._socket, *self._monitors):
            each.close(0)


def _unproved(descriptor: int, inode: int) -> bool:
    """Whether the descriptor is still that connection, and the connection has not been let in."""
    connection = _borrow(descriptor, inode)
    if connection is None:
        return False
    with connection:
        taken = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.stop)[
            _ACKNOWLEDGED
        ]
    return int.from_bytes(taken, sys.byteorder) < _READY


def _hang_up(descriptor: int, inode: int) -> None:
    connection = _borrow(descriptor, inode)
    if connection is not None:
        with connection, contextlib.suppress(OSError):  # the other side has hung up
            connection.shutdown(socket.SHUT_RDWR)


def _borrow(descriptor: int, inode: int) -> socket.socket | None:
    """Borrow a connection of ZeroMQ's, which stays open; None where it is closed, or its
    descriptor is another's by now.
    """
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    if os.fstat(connection.fileno()).st_ino == inode:
        return connection
    connection.close()
    return None

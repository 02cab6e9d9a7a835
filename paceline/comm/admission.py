"""Admits connections to a server's port: only those of processes that hold the workers' key.

    accepted ---> [ ... ] at most `MOST` without a proof: with more the oldest is closed
    key shown --> ZeroMQ asks this guard (ZAP, RFC 27); CURVE alone lets in every client that
                  knows the server's public key

Strangers take hardly any room: before a key is shown, a frame is all that a connection may send,
and frames are small.
"""

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

MOST = 128  # connections without a proof
# Bytes of Linux's struct tcp_info that say how many bytes the other side has taken
# (tcpi_bytes_acked). Newer kernels only append to the struct.
_ACKNOWLEDGED = slice(120, 128)
# Bytes that ZeroMQ has sent to a client once that is let in: 64 of greeting, 170 of WELCOME, then
# READY. A refused client gets 12 bytes instead of READY.
_READY = 280


class ConnectionGuard:
    """A thread that answers ZeroMQ's authentication requests, and limits unproved connections.

    Args:
        context: Context of the sockets to guard.
        allowed: Public key of the workers, in Z85.
        refused: Called with a line for each connection with another key.
    """

    def __init__(
        self, context: zmq.Context[Any], allowed: bytes, refused: Callable[[str], None]
    ) -> None:
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._allowed, self._refused = z85.decode(allowed), refused
        self._monitors: list[zmq.Socket[Any]] = []
        # Connections that may have proved nothing, the oldest first: descriptor, and inode number.
        self._open: dict[int, int] = {}
        self._thread: threading.Thread | None = None

    def watch_listener(self, listening: zmq.Socket[Any]) -> None:
        """Limit the unproved connections of a listening socket. Call it before `start`."""
        self._monitors.append(
            listening.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        )

    def start(self) -> None:
        """Begin to answer. Connections wait until then."""
        self._thread = threading.Thread(
            target=self._serve_requests, name="paceline guard", daemon=True
        )
        self._thread.start()

    def _serve_requests(self) -> None:
        poller = zmq.Poller()
        for zmq_socket in (self._socket, *self._monitors):
            poller.register(zmq_socket, zmq.POLLIN)
        try:
            while True:
                for ready, _ in poller.poll():
                    if ready is self._socket:
                        self._answer_request()
                    else:
                        self._count_connection(ready)
        except zmq.ContextTerminated:  # the server has closed
            self._close_sockets()

    def _answer_request(self) -> None:
        version, request, _, address, _, mechanism, *credentials = self._socket.recv_multipart()
        is_allowed = mechanism == b"CURVE" and credentials == [self._allowed]
        if not is_allowed:
            self._refused(
                f"{address.decode(errors='replace')} has not the key of this job's workers"
            )
        status, text = (b"200", b"OK") if is_allowed else (b"400", b"no key of this job")
        self._socket.send_multipart(
            [version, request, status, text, b"worker" if is_allowed else b"", b""]
        )

    def _count_connection(self, monitor: zmq.Socket[Any]) -> None:
        event = parse_monitor_message(monitor.recv_multipart())
        descriptor = int(event["value"])
        self._open.pop(descriptor, None)  # the number may have been given to a new connection
        if event["event"] != zmq.EVENT_ACCEPTED:
            return
        try:
            self._open[descriptor] = os.fstat(descriptor).st_ino
        except OSError:  # the connection is gone already
            return
        if len(self._open) > MOST:
            # First forget the connections that have proved themselves, then close the oldest.
            self._open = {
                number: inode for number, inode in self._open.items() if _is_unproved(number, inode)
            }
        for oldest in [*self._open][: max(0, len(self._open) - MOST)]:
            _hang_up_connection(oldest, self._open.pop(oldest))

    def close_unstarted(self) -> None:
        """Close the sockets of a guard that never started: a context waits for them to end."""
        if self._thread is None:
            self._close_sockets()

    def join(self) -> None:
        """Wait until the thread has ended. The context must have been terminated before."""
        if self._thread is not None:
            self._thread.join()

    def _close_sockets(self) -> None:
        for zmq_socket in (self._socket, *self._monitors):
            zmq_socket.close(0)


def _is_unproved(descriptor: int, inode: int) -> bool:
    """Whether the descriptor is still this connection, and it has not been let in."""
    connection = _borrow_connection(descriptor, inode)
    if connection is None:
        return False
    with connection:
        acknowledged = connection.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.stop
        )[_ACKNOWLEDGED]
    return int.from_bytes(acknowledged, sys.byteorder) < _READY


def _hang_up_connection(descriptor: int, inode: int) -> None:
    connection = _borrow_connection(descriptor, inode)
    if connection is not None:
        with connection, contextlib.suppress(OSError):  # the other side has hung up
            connection.shutdown(socket.SHUT_RDWR)


def _borrow_connection(descriptor: int, inode: int) -> socket.socket | None:
    """Duplicate a connection of ZeroMQ, which stays open. None if it has been closed.

    ZeroMQ closes descriptors in its own threads, and the kernel gives the number to another file.
    The inode number tells the two apart.
    """
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    if os.fstat(connection.fileno()).st_ino == inode:
        return connection
    connection.close()
    return None

"""Messages between processes over sockets, moved by C.

native/mesh.h has the format of a message, and native/mesh.c says which thread does what.
"""

from __future__ import annotations

import ctypes
import os
import socket
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from paceline.errors import ResourceError
from paceline.native.functions import address_of, load_functions

OPEN, ENDED, MALFORMED = 0, -1, -2  # states of a link; positive ones are values of errno
SENT, NOT_SENT = 0, -1  # results of `SocketMesh.send` besides the number of a message
NO_LIMIT = 1 << 62  # bytes
LARGEST = 1 << 44  # bytes of the largest message


class _Arrival(ctypes.Structure):
    """A message that has come: `pl_arrival` of native/mesh.h."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("link", ctypes.c_int64),
        ("channel", ctypes.c_int64),
        ("key", ctypes.c_int64),
        ("has_landed", ctypes.c_int64),
    ]


class ArrivedMessage(NamedTuple):
    """A message that has come. Its memory is the caller's until `give_back`.

    If it has landed where it was expected, `nbytes` is there, and nothing at `address`.
    """

    address: int
    nbytes: int
    link: int
    channel: int
    key: int
    has_landed: bool


class SocketMesh:
    """The links of one process, each a socket, and a thread of C. Any thread may use them.

    A link is named by a number. `changes` grows when messages come or have been sent, and when a
    link ends. To wait for a message, read `changes`, look for the message, and call
    `wait_for_change` with the number if the message is not there.

    Args:
        eager: Whether the thread of C reads messages while no thread of Python waits for one. If
            not, only threads that wait read, and it needn't wake up: but a sender is held up if no
            thread takes its messages.
    """

    def __init__(self, *, eager: bool) -> None:
        self._native = load_functions()
        self._address = self._native.mesh_open(eager)
        if not self._address:
            raise ResourceError("the system has no room for another thread or epoll descriptor")
        self._process = os.getpid()
        # The memory must outlive every call: threads that wait hold a reference to this object. So
        # it isn't freed at exit, when threads may still wait.
        finalizer = weakref.finalize(self, _free_mesh, self._address, self._process)
        finalizer.atexit = False

    def add_link(self, connection: socket.socket) -> int:
        """Add a connected socket, which belongs to the mesh from then on."""
        descriptor = connection.detach()
        link = int(self._native.mesh_add(self._address, descriptor, LARGEST))
        if link < 0:
            os.close(descriptor)
            raise ResourceError("a connection can't be used: the mesh is closed, or has no room")
        return link

    def send(
        self,
        link: int,
        pieces: Sequence[tuple[int, int]],
        *,
        channel: int = 0,
        key: int = 0,
        at_once: int = NO_LIMIT,
        copies: bool = False,
    ) -> int:
        """Send a message: what the network takes at once, and the rest in the background.

        Args:
            link: The link.
            pieces: Address and bytes of each piece.
            channel: Number that the receiver gets with the message. Default: 0.
            key: Another such number. Default: 0.
            at_once: Bytes of a message up to which the caller tries to write it itself. Default: no
                limit.
            copies: Whether the rest is copied. Default: no, pieces stay as they are until they have
                been sent.

        Returns:
            SENT; or a number: the message has been sent when `count_sent` reaches it; or NOT_SENT
            if the link has ended.
        """
        # An array of `pl_piece` (native/mesh.h): an address and a number of bytes for each piece.
        array = (ctypes.c_int64 * (2 * len(pieces)))(*chain.from_iterable(pieces))
        return int(
            self._native.mesh_send(
                self._address, link, channel, key, address_of(array), len(pieces), at_once, copies
            )
        )

    def count_sent(self, link: int) -> int:
        """Count the messages that have been handed to the network."""
        return int(self._native.mesh_sent(self._address, link))

    def take_message(self) -> ArrivedMessage | None:
        """Take the oldest message that has come over any link. None if there is none."""
        arrival = _Arrival()
        if not self._native.mesh_take(self._address, address_of(arrival)):
            return None
        return ArrivedMessage(
            arrival.address,
            arrival.nbytes,
            arrival.link,
            arrival.channel,
            arrival.key,
            bool(arrival.has_landed),
        )

    def expect_message(self, link: int, channel: int, key: int, address: int, nbytes: int) -> None:
        """Give a message a place to land in, unless it has begun to come.

        Messages of one channel and key land in the order of these calls. The place must stay as it
        is until the message has come, or the mesh is closed.
        """
        self._native.mesh_expect(self._address, link, channel, key, address, nbytes)

    @property
    def address(self) -> int:
        """Address of the mesh in memory, for other functions of C."""
        return int(self._address)

    @property
    def changes(self) -> int:
        """Number of changes so far."""
        return int(self._native.mesh_changes(self._address))

    def wait_for_change(self, seen: int, seconds: float) -> None:
        """Wait until `changes` is no longer `seen`, or `seconds` pass."""
        self._native.mesh_wait_change(self._address, seen, int(seconds * 1e9))

    def wake(self) -> None:
        """Let all waits for a change return."""
        self._native.mesh_wake(self._address)

    @property
    def has_ended_links(self) -> bool:
        """Whether any link has ended."""
        return bool(self._native.mesh_ended(self._address))

    def find_end(self, link: int) -> str:
        """Say why a link has ended. Empty if it is open."""
        state = self._native.mesh_state(self._address, link)
        if state == OPEN:
            return ""
        if state == ENDED:
            return "it has closed its end"
        reason = "the bytes received are no message" if state == MALFORMED else os.strerror(state)
        return f"its connection has broken ({reason})"

    def close(self) -> None:
        """End all links. Messages that were taken stay valid. Nothing happens in a fork."""
        if os.getpid() == self._process:
            self._native.mesh_close(self._address)


def _free_mesh(address: int, process: int) -> None:
    # A fork shares the sockets with its parent, and has no thread of the mesh.
    if os.getpid() == process:
        load_functions().mesh_free(address)


def give_back(address: int) -> None:
    """Give the memory of a message back to its mesh."""
    load_functions().mesh_give_back(address)

"""Messages between processes over sockets, moved by a thread of C: see native/mesh.h."""

from __future__ import annotations

import ctypes
import os
import socket
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import ResourceError
from paceline.native.functions import address_of, load_functions

OPEN, ENDED, MALFORMED = 0, -1, -2  # states of a link; positive ones are values of errno
REACHED = 0  # result of a wait for something that has come
LARGEST = 1 << 44  # bytes of the largest message


class PieceOfMessage(ctypes.Structure):
    """Memory that is sent: `pl_piece` of native/mesh.h."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_int64)]


class ArrivedMessage(NamedTuple):
    """Memory of a message, which is the caller's until `give_back`."""

    address: int
    nbytes: int


class Mesh:
    """The links of one process, each a socket in one direction, and their thread. For any thread.

    A link is a number. `changes` counts messages that came and links that ended: a thread reads it,
    looks for its message, and calls `wait_for_change` with it if the message is not there.
    """

    def __init__(self) -> None:
        self._native = load_functions()
        self._address = self._native.mesh_open()
        if not self._address:
            raise ResourceError("the system has no room for another thread or epoll descriptor")
        # The memory must outlive every call: threads that wait hold a reference to this object.
        weakref.finalize(self, self._native.mesh_free, self._address)

    def add_link(self, connection: socket.socket) -> int:
        """Add a connected socket, which belongs to the mesh from then on."""
        link = int(self._native.mesh_add(self._address, connection.fileno(), LARGEST))
        if link < 0:
            connection.close()
            raise ResourceError("a connection can't be used: the mesh is closed, or has no room")
        connection.detach()
        return link

    def send(self, link: int, pieces: Sequence[tuple[int, int]], at_once: int) -> int:
        """Send a message, and return its number on the link. 0 if the link has ended.

        Args:
            link: The link.
            pieces: Address and bytes of each piece, which stays as it is until it has been sent.
            at_once: Bytes of a message up to which the caller tries to write it itself.
        """
        array = (PieceOfMessage * len(pieces))(*(PieceOfMessage(*piece) for piece in pieces))
        number = self._native.mesh_send(
            self._address, link, address_of(array), len(pieces), at_once
        )
        return max(0, int(number))

    def count_sent(self, link: int) -> int:
        """Count the messages that have been handed to the network."""
        return int(self._native.mesh_sent(self._address, link))

    def wait_until_sent(self, link: int, number: int, seconds: float) -> None:
        """Wait until a message has been sent, the link has ended, or the time is over."""
        self._native.mesh_wait_sent(self._address, link, number, int(seconds * 1e9))

    def take_message(self, link: int) -> ArrivedMessage | None:
        """Take the oldest message that has come. None if there is none."""
        nbytes = ctypes.c_int64()
        address = self._native.mesh_take(self._address, link, address_of(nbytes))
        return None if address is None else ArrivedMessage(address, nbytes.value)

    @property
    def changes(self) -> int:
        """The number of changes so far."""
        return int(self._native.mesh_changes(self._address))

    def wait_for_change(self, seen: int, seconds: float) -> None:
        """Wait until `changes` is no longer `seen`, or the time is over."""
        self._native.mesh_wait_change(self._address, seen, int(seconds * 1e9))

    def wake(self) -> None:
        """Let all waits for a change return."""
        self._native.mesh_wake(self._address)

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
        """End all links. Messages that were taken stay valid."""
        self._native.mesh_close(self._address)


def give_back(address: int) -> None:
    """Give the memory of a message back to its mesh."""
    load_functions().mesh_give_back(address)

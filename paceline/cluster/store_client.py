"""Clients of torch's store with a limit on the time that they wait for an answer.

Without a limit, a client waits for ever if the process that serves the store is stopped or can't be
reached any more. Signals don't interrupt such a wait.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistError

from paceline.cluster import network
from paceline.errors import PlaceError

# torch's stubs have these names only in the private module that defines them.
if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed import Store as TorchStore


def connect_client(host: str, port: int, seconds: float) -> TCPStore:
    """Make a client, within a number of seconds. Raises `OSError`, or the errors of torch."""
    outcome: list[TCPStore | DistError] = []

    def make() -> None:
        try:
            outcome.append(
                TCPStore(
                    host, port, None, False, timedelta(seconds=seconds), wait_for_workers=False
                )
            )
        except DistError as error:
            outcome.append(error)

    # torch's constructor can't be interrupted. If no answer comes, the thread stays in it, and as a
    # daemon it doesn't keep the process from ending.
    thread = threading.Thread(target=make, name="paceline store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(errno.ETIMEDOUT, "the program that listens there doesn't answer")
    if isinstance(outcome[0], DistError):
        raise outcome[0]
    return outcome[0]


def limit_answer_time(store: TorchStore, seconds: float) -> None:
    """Limit the seconds that clients in this process wait for an answer of a store.

    After that they raise `DistError`. Stores that aren't served over TCP stay as they are.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return
    whole_seconds, fraction = divmod(seconds, 1)
    # torch has no such option, so it is set on the sockets. A copy of a descriptor is the same
    # socket: an option set on it holds for torch's too.
    for connection in _copy_connections_to(store):
        with connection:
            connection.setsockopt(
                socket.SOL_SOCKET,
                socket.SO_RCVTIMEO,
                struct.pack("@ll", int(whole_seconds), int(1e6 * fraction)),
            )


class ServerEndWaiter:
    """Waits for the end of the server of a store.

    It has a copy of a client's connection, which stays open when the client is closed.
    """

    def __init__(self, store: TCPStore) -> None:
        copies = [*_copy_connections_to(store)]
        self._descriptor = copies.pop().detach() if copies else None
        for other in copies:
            other.close()

    def wait(self, seconds: float) -> None:
        """Wait until the server has ended, or a number of seconds has passed.

        Only the first call waits.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            poll = select.poll()
            # No client sends requests on it any more, so the only event is its end.
            poll.register(descriptor, select.POLLIN)
            poll.poll(1e3 * seconds)
        finally:
            os.close(descriptor)


def _copy_connections_to(store: TCPStore) -> Iterator[socket.socket]:
    """Yield copies of this process's connections to the server of a store."""
    try:
        addresses = {*network.resolve_host(store.host)}
    except PlaceError:
        # The name can't be resolved any more.
        return
    for connection in _copy_sockets():
        matches = False
        # It may not be connected, or be closed meanwhile.
        with contextlib.suppress(OSError):
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                address, port, *_ = connection.getpeername()
                # torch's sockets are for both versions of IP, and show IPv4 addresses as IPv6 ones.
                matches = port == store.port and address.removeprefix("::ffff:") in addresses
        if matches:
            yield connection
        else:
            connection.close()


def _copy_sockets() -> Iterator[socket.socket]:
    """Yield copies of all sockets of this process. None if the system isn't Linux."""
    folder = "/proc/self/fd"
    for descriptor in os.listdir(folder) if os.path.isdir(folder) else ():
        # Other threads open and close descriptors meanwhile, so the copy is checked again.
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(descriptor)).st_mode):
                continue
            copy = os.dup(int(descriptor))
            if stat.S_ISSOCK(os.fstat(copy).st_mode):
                yield socket.socket(fileno=copy)
            else:
                os.close(copy)

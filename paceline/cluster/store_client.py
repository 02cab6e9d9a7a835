"""Clients of torch's store that wait for an answer so many seconds at most.

By themselves they wait for ever, and hear no signal, where the process that serves the store is
stopped, or cut off from here.
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

if TYPE_CHECKING:  # torch's stubs know these names only where they come from
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed import Store as TorchStore


def connect(host: str, port: int, seconds: float) -> TCPStore:
    """Make a client within so many `seconds`. Raises `OSError`, or what torch raises."""
    made: list[TCPStore | DistError] = []

    def make() -> None:
        try:
            made.append(
                TCPStore(
                    host, port, None, False, timedelta(seconds=seconds), wait_for_workers=False
                )
            )
        except DistError as error:
            made.append(error)

    # it stays in torch where nobody answers
    thread = threading.Thread(target=make, name="paceline store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise TimeoutError(errno.ETIMEDOUT, "what listens there doesn't answer")
    if isinstance(made[0], DistError):
        raise made[0]
    return made[0]


def limit(store: TorchStore, seconds: float) -> None:
    """Have this process's clients of a store that is served over TCP wait so many seconds for an
    answer, and then raise `DistError`.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return
    whole, rest = divmod(seconds, 1)
    for connection in _connections_to(store):
        with connection:
            connection.setsockopt(
                socket.SOL_SOCKET,
                socket.SO_RCVTIMEO,
                struct.pack("@ll", int(whole), int(1e6 * rest)),
            )


class EndOfServer:
    """Sees when the server of a store ends, by a copy of a client's connection, which outlives
    the client.
    """

    def __init__(self, store: TCPStore) -> None:
        copies = [*_connections_to(store)]
        self._descriptor = copies.pop().detach() if copies else None
        for other in copies:
            other.close()

    def wait(self, seconds: float) -> None:
        """Return when the server has ended, and after so many seconds in any case.

        It can be called once.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            poll = select.poll()
            # nobody reads from it any more, so that what comes is its end
            poll.register(descriptor, select.POLLIN)
            poll.poll(1e3 * seconds)
        finally:
            os.close(descriptor)


def _connections_to(store: TCPStore) -> Iterator[socket.socket]:
    """Yield copies of this process's connections to the server of a store."""
    try:
        addresses = {*network.resolve(store.host)}
    except PlaceError:  # a name that means nothing any more
        return
    for connection in _connections():
        found = False
        with contextlib.suppress(OSError):  # one that is not connected, or is closed meanwhile
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                address, port, *_ = connection.getpeername()
                # torch has sockets for both versions of IP
                found = port == store.port and address.removeprefix("::ffff:") in addresses
        if found:
            yield connection
        else:
            connection.close()


def _connections() -> Iterator[socket.socket]:
    """Yield copies of all sockets of this process; of none where the system doesn't list them
    (not Linux).
    """
    folder = "/proc/self/fd"
    for descriptor in os.listdir(folder) if os.path.isdir(folder) else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.stat(int(descriptor)).st_mode):
                continue
            copy = os.dup(int(descriptor))
            if stat.S_ISSOCK(os.fstat(copy).st_mode):
                yield socket.socket(fileno=copy)
            else:  # another descriptor got its number meanwhile
                os.close(copy)

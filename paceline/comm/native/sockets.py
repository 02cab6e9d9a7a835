"""The TCP connections beneath a Gloo group, and beside it: which rank each leads to, whether it is
alive, and how to cut it.

Gloo's own abort and shutdown do nothing, and its errors name an address, not a rank. Every group
has listeners of its own, so their ports tell its connections from all others in this process:

    rank 0  listens on 39285  <---  57158  rank 1       accepted: local port 39285; the peer is
                                                        found in rank 1's list of ports
    rank 0  60112  --->  listens on 43973  rank 2       made: remote port 43973
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed  # noqa: F401  makes the names below known

from paceline.cluster.store import Store, over
from paceline.errors import DeadlineExceeded, PlaceError, ResourceError, WorkerLost

if TYPE_CHECKING:  # torch's stubs know these names only where they come from
    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import ProcessGroupGloo
    from torch.distributed import Store as TorchStore

ESTABLISHED = 1  # the first byte of TCP_INFO on Linux
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.02  # seconds between two looks at the store


class GroupSockets:
    """`count` listeners of Gloo on `address`, those at `ports` there, and the connections that
    are made with them.
    """

    def __init__(self, address: str, count: int, ports: Sequence[int] = ()) -> None:
        self.address = address
        self.devices: list[Any] = []
        self._ports = [*ports]
        for _ in range(count):
            device, port = _listen(address)
            self.devices.append(device)
            self._ports.append(port)
        self._rank, self._size = 0, 1
        # the rank that each listener or local port belongs to
        self._ranks: dict[tuple[str, int], int] = {}
        self._expected: Counter[int] = Counter()

    def announce(
        self, store: TorchStore | Store, rank: int, size: int, deadline: float, more: Any = None
    ) -> list[Any]:
        """Publish where this rank listens, and `more`; wait for all others, and return what each
        has published as `more`.

        Raises `DeadlineExceeded` naming ranks that never come.
        """
        self._rank, self._size = rank, size
        told = self._everyones(over(store), "listen", [self.address, self._ports, more], deadline)
        for peer, (address, ports, _) in enumerate(told):
            self._ranks.update({(address, port): peer for port in ports})
        return [others for *_, others in told]

    def trace(self, store: TorchStore | Store, deadline: float) -> None:
        """Find out which rank each connection leads to, once all have been made."""
        mine = [local for local, remote, _ in self._open() if local[1] not in self._ports]
        for peer, ends in enumerate(self._everyones(over(store), "ends", mine, deadline)):
            self._ranks.update({(address, port): peer for address, port in ends})
        self._expected = Counter(
            self._ranks[remote] for _, remote, _ in self._open() if remote in self._ranks
        )

    def _everyones(self, store: Store, key: str, mine: Any, deadline: float) -> list[Any]:
        """Collect what each rank has put under `key`; the wait hears signals, and names missing
        ranks.
        """
        store.put(f"{key}/{self._rank}", mine)
        end = time.monotonic() + deadline
        for peer in range(self._size):
            nap = _SHORTEST_NAP
            while not store.has([f"{key}/{peer}"]):
                if time.monotonic() >= end:
                    missing = tuple(r for r in range(self._size) if not store.has([f"{key}/{r}"]))
                    text = (
                        f"a group of {self._size} ranks was to be made, and ranks {list(missing)} "
                        f"have not come within {deadline:g} s"
                    )
                    raise DeadlineExceeded(f"{text}: look at their output", missing)
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
        return [store.take(f"{key}/{peer}") for peer in range(self._size)]

    def severed(self) -> tuple[int, ...]:
        """Return the ranks to which a connection has ended."""
        standing = Counter(
            self._ranks.get(remote, -1) for _, remote, state in self._open() if state == ESTABLISHED
        )
        return tuple(
            sorted(rank for rank, count in self._expected.items() if standing[rank] < count)
        )

    def cut(self) -> None:
        """End all connections at once, here and at the peers: whatever Gloo waits for fails.

        Listeners stay: Gloo dies of their loss.
        """
        for descriptor in _sockets():
            with _borrowed_socket(descriptor) as line:
                try:
                    if self._ours(line.getsockname()[:2], line.getpeername()[:2]):
                        line.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # not connected, or gone meanwhile

    def _open(self) -> list[tuple[tuple[str, int], tuple[str, int], int]]:
        """Return (local, remote, state) of each connection of this group."""
        connections = []
        for descriptor in _sockets():
            with _borrowed_socket(descriptor) as line:
                try:
                    local, remote = line.getsockname()[:2], line.getpeername()[:2]
                    if self._ours(local, remote):
                        connections.append(
                            (
                                local,
                                remote,
                                line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0],
                            )
                        )
                except OSError:
                    continue
        return connections

    def _ours(self, local: Any, remote: Any) -> bool:
        # one that our listener has accepted, or one that leads to a listener (or from a port) of
        # another rank
        return (local[1] in self._ports and local[0] == self.address) or self._ranks.get(
            tuple(remote), self._rank
        ) != self._rank


def leading(address: str, port: int) -> set[str]:
    """Find this process's connections to an address, for `sever`."""
    connections = set()
    for descriptor, name in _sockets().items():
        with _borrowed_socket(descriptor) as line:
            try:
                peer = line.getpeername()
                # torch has sockets for both versions of IP
                if (peer[0].removeprefix("::ffff:"), peer[1]) == (address, port):
                    connections.add(name)
            except OSError:
                continue
    return connections


def sever(connections: set[str]) -> None:
    """End connections: those of a store's client, which torch can't end."""
    for descriptor in _sockets():
        with _borrowed_socket(descriptor) as line:
            try:
                if os.readlink(f"/proc/self/fd/{descriptor}") in connections:
                    line.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _listen(address: str) -> tuple[Any, int]:
    """Make a Gloo device bound to `address`; give it and the port it listens on."""
    for _ in range(10):
        before = _sockets()
        try:
            device = ProcessGroupGloo.create_device(hostname=address)
        except RuntimeError as error:
            raise PlaceError(
                f"can't listen on {address} ({str(error).splitlines()[0]}): "
                "choose an address of this machine"
            ) from error
        ports = []
        fresh = (
            descriptor for descriptor, name in _sockets().items() if before.get(descriptor) != name
        )
        for descriptor in fresh:
            with _borrowed_socket(descriptor) as line:
                try:
                    if (
                        line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        and line.getsockname()[0] == address
                    ):
                        ports.append(line.getsockname()[1])
                except OSError:
                    continue
        if len(ports) == 1:
            return device, ports[0]
        # another thread has begun to listen at the same moment: once more
    raise ResourceError(
        f"can't tell Gloo's listener on {address} from others in this process; "
        "start groups before servers of your own"
    )


def connect(device: Any, store: TorchStore, rank: int, size: int, deadline: float) -> Any:
    """Make a ProcessGroupGloo over `device`."""
    options = _options(device, deadline)
    options._threads = 2  # two operations at a time: one sums while the other is on the wire
    try:
        group = ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise WorkerLost(
            f"a group of {size} ranks could not be made: {str(error).splitlines()[0]}"
        ) from error
    # a backstop only: our own waits are shorter
    group.set_timeout(timedelta(seconds=60 + 10 * deadline))
    return group


def connect_plainly(
    address: str, store: TorchStore, rank: int, size: int, deadline: float, *, lazy: bool
) -> Any:
    """Make a ProcessGroupGloo that nobody watches; `lazy`: ranks connect when both have
    something for each other, and nobody waits here.
    """
    return ProcessGroupGloo(
        store,
        rank,
        size,
        _options(ProcessGroupGloo.create_device(hostname=address, lazy_init=lazy), deadline),
    )


def _options(device: Any, deadline: float) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timedelta(seconds=max(3.0, deadline))
    return options


def _sockets() -> dict[int, str]:
    """List the descriptors of this process that are internet sockets, with the kernel's name of
    each. Others may be closed meanwhile.
    """
    names = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if not name.startswith("socket:"):
                continue
            with _borrowed_socket(int(descriptor)) as line:
                if line.family in (socket.AF_INET, socket.AF_INET6):
                    names[int(descriptor)] = name
        except OSError:
            continue  # closed meanwhile
    return names


class _borrowed_socket:
    """A socket object over a descriptor that belongs to other code, and stays open; an
    unconnected one when it has gone meanwhile.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            self._socket = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            self._socket = socket.socket()

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

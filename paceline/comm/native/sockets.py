"""The TCP connections beneath a Gloo group: finds their ranks, sees which stand, cuts them.

Gloo's own abort and shutdown do nothing, and its errors name an address, not a rank. Every group
has listeners of its own, so their ports tell its connections from all others in this process:

    rank 0  listens on 39285  <---  57158  rank 1    accepted: local port 39285; the peer is the
                                                     rank whose list of ports has 57158
    rank 0  60112  --->  listens on 43973  rank 2    made: remote port 43973
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

from paceline.cluster.store import Store, wrap_store
from paceline.errors import DeadlineExceeded, PlaceError, ResourceError, WorkerLost

if TYPE_CHECKING:  # torch's stubs know these names only where they come from
    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import ProcessGroupGloo
    from torch.distributed import Store as TorchStore

ESTABLISHED = 1  # state of a connection that stands: the first byte of TCP_INFO on Linux
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.02  # seconds between two looks at the store


class GroupSockets:
    """Listeners of one rank of a group, and the connections of the group.

    Args:
        address: Address of this worker.
        count: Number of listeners of Gloo to make.
        ports: Ports of other listeners of this rank. Default: none.
    """

    def __init__(self, address: str, count: int, ports: Sequence[int] = ()) -> None:
        self.address = address
        self.devices: list[Any] = []
        self._ports = [*ports]
        for _ in range(count):
            device, port = _listen_with_gloo(address)
            self.devices.append(device)
            self._ports.append(port)
        self._rank, self._size = 0, 1
        self._ranks: dict[tuple[str, int], int] = {}  # rank of each listener and each local port
        self._expected: Counter[int] = Counter()  # connections to each rank

    def announce_listeners(
        self, store: TorchStore | Store, rank: int, size: int, deadline: float, more: Any = None
    ) -> list[Any]:
        """Publish the addresses of this rank, and wait for those of all others.

        Args:
            store: Part of the store for this group.
            rank: This rank.
            size: Number of ranks.
            deadline: Seconds to wait for all.
            more: JSON to publish besides. Default: nothing.

        Returns:
            The `more` of every rank.

        Raises:
            DeadlineExceeded: Some ranks never come; names them.
        """
        self._rank, self._size = rank, size
        answers = self._gather_values(
            wrap_store(store), "listen", [self.address, self._ports, more], deadline
        )
        for peer, (address, ports, _) in enumerate(answers):
            self._ranks.update({(address, port): peer for port in ports})
        return [others for *_, others in answers]

    def trace_connections(self, store: TorchStore | Store, deadline: float) -> None:
        """Find out which rank each connection leads to. Call it when all have been made."""
        own_ends = [
            local for local, remote, _ in self._open_connections() if local[1] not in self._ports
        ]
        for peer, ends in enumerate(
            self._gather_values(wrap_store(store), "ends", own_ends, deadline)
        ):
            self._ranks.update({(address, port): peer for address, port in ends})
        self._expected = Counter(
            self._ranks[remote]
            for _, remote, _ in self._open_connections()
            if remote in self._ranks
        )

    def _gather_values(self, store: Store, key: str, value: Any, deadline: float) -> list[Any]:
        """Publish `value` under `key`, and collect every rank's."""
        store.put(f"{key}/{self._rank}", value)
        end = time.monotonic() + deadline
        # Ask again and again: a wait inside the store would hear no signals, and name no ranks.
        for peer in range(self._size):
            nap = _SHORTEST_NAP
            while not store.has_keys([f"{key}/{peer}"]):
                if time.monotonic() >= end:
                    missing = tuple(
                        r for r in range(self._size) if not store.has_keys([f"{key}/{r}"])
                    )
                    text = (
                        f"a group of {self._size} ranks was to be made, and ranks {list(missing)} "
                        f"have not come within {deadline:g} s"
                    )
                    raise DeadlineExceeded(f"{text}: look at their output", missing)
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
        return [store.take(f"{key}/{peer}") for peer in range(self._size)]

    def find_severed_ranks(self) -> tuple[int, ...]:
        """List the ranks to which a connection has ended."""
        standing = Counter(
            self._ranks.get(remote, -1)
            for _, remote, state in self._open_connections()
            if state == ESTABLISHED
        )
        return tuple(
            sorted(rank for rank, count in self._expected.items() if standing[rank] < count)
        )

    def cut_connections(self) -> None:
        """End all connections at once: everything that Gloo waits for fails, also at the peers.

        Listeners stay open: Gloo ends the process if it loses one.
        """
        for descriptor in _internet_sockets():
            with _BorrowedSocket(descriptor) as line:
                try:
                    if self._is_ours(line.getsockname()[:2], line.getpeername()[:2]):
                        line.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # not connected, or gone meanwhile

    def _open_connections(self) -> list[tuple[tuple[str, int], tuple[str, int], int]]:
        """List (local, remote, state) of each connection of this group."""
        connections = []
        for descriptor in _internet_sockets():
            with _BorrowedSocket(descriptor) as line:
                try:
                    local, remote = line.getsockname()[:2], line.getpeername()[:2]
                    if self._is_ours(local, remote):
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

    def _is_ours(self, local: Any, remote: Any) -> bool:
        # Accepted by our listener, or made to a listener (or from a port) of another rank.
        return (local[1] in self._ports and local[0] == self.address) or self._ranks.get(
            tuple(remote), self._rank
        ) != self._rank


def find_connections(address: str, port: int) -> set[str]:
    """Find the connections of this process to an address, for `sever_connections`."""
    connections = set()
    for descriptor, name in _internet_sockets().items():
        with _BorrowedSocket(descriptor) as line:
            try:
                peer = line.getpeername()
                # Torch has sockets for both versions of IP.
                if (peer[0].removeprefix("::ffff:"), peer[1]) == (address, port):
                    connections.add(name)
            except OSError:
                continue
    return connections


def sever_connections(connections: set[str]) -> None:
    """End connections. Meant for a client of torch's store, which can't be ended otherwise."""
    for descriptor in _internet_sockets():
        with _BorrowedSocket(descriptor) as line:
            try:
                if os.readlink(f"/proc/self/fd/{descriptor}") in connections:
                    line.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _listen_with_gloo(address: str) -> tuple[Any, int]:
    """Make a device of Gloo that listens on `address`, and find its port.

    Gloo doesn't tell the port, so look which socket is new in this process.
    """
    for _ in range(10):
        before = _internet_sockets()
        try:
            device = ProcessGroupGloo.create_device(hostname=address)
        except RuntimeError as error:
            raise PlaceError(
                f"can't listen on {address} ({str(error).splitlines()[0]}): "
                "choose an address of this machine"
            ) from error
        ports = []
        fresh = (
            descriptor
            for descriptor, name in _internet_sockets().items()
            if before.get(descriptor) != name
        )
        for descriptor in fresh:
            with _BorrowedSocket(descriptor) as line:
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
        # Another thread has begun to listen at the same moment: try once more.
    raise ResourceError(
        f"can't tell Gloo's listener on {address} from others in this process; "
        "start groups before servers of your own"
    )


def connect_gloo(device: Any, store: TorchStore, rank: int, size: int, deadline: float) -> Any:
    """Make a ProcessGroupGloo over `device`."""
    options = _gloo_options(device, deadline)
    # Two operations at a time: one sums while the other is on the network.
    options._threads = 2
    try:
        group = ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise WorkerLost(
            f"a group of {size} ranks could not be made: {str(error).splitlines()[0]}"
        ) from error
    # Only in case our own waits, which are shorter, should fail.
    group.set_timeout(timedelta(seconds=60 + 10 * deadline))
    return group


def connect_gloo_unwatched(
    address: str, store: TorchStore, rank: int, size: int, deadline: float, *, lazy: bool
) -> Any:
    """Make a ProcessGroupGloo without watching its connections.

    `lazy`: ranks connect when both first have messages for each other, so nothing waits here.
    """
    return ProcessGroupGloo(
        store,
        rank,
        size,
        _gloo_options(ProcessGroupGloo.create_device(hostname=address, lazy_init=lazy), deadline),
    )


def _gloo_options(device: Any, deadline: float) -> Any:
    # Private to torch. There is no public way to tell Gloo its listener and its number of threads.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timedelta(seconds=max(3.0, deadline))
    return options


def _internet_sockets() -> dict[int, str]:
    """List the internet sockets of this process: by descriptor, the kernel's name of each.

    Descriptors may be closed by other threads meanwhile, so the name tells whether one is the same.
    """
    names = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if not name.startswith("socket:"):
                continue
            with _BorrowedSocket(int(descriptor)) as line:
                if line.family in (socket.AF_INET, socket.AF_INET6):
                    names[int(descriptor)] = name
        except OSError:
            continue  # closed meanwhile
    return names


class _BorrowedSocket:
    """A socket over a duplicate of a descriptor of other code, whose own stays open.

    Unconnected if the descriptor has been closed meanwhile.
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

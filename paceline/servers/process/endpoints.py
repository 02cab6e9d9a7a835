"""The endpoints of servers: their addresses, and the pool that starts and replaces them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from paceline.comm.rpc import RpcKeys
from paceline.errors import PacelineError


class ServerPool(Protocol):
    """Servers that outlive the workers that have started them.

    `next_server` is the number of the server that is started next, the same on all workers.
    """

    next_server: int

    def join_info(self) -> Any:
        """Get the facts (JSON) that a newcomer needs for `join_pool`."""
        ...

    def join_pool(self, info: Any) -> ServerEndpoints:
        """Connect a newcomer to the servers, with the `join_info` of another worker."""
        ...

    @property
    def host_name(self) -> str:
        """The name of this worker's host, unique among hosts."""
        ...

    def remove_servers(self, numbers: Collection[int]) -> ServerEndpoints:
        """Remove lost servers."""
        ...

    def spawn_server(self, shard: int, *, mine: bool) -> int:
        """Begin to start a server that keeps a copy of this shard. All workers call this.

        `mine`: this worker is the one that starts it.

        Returns:
            The number of the server.
        """
        ...

    def get_spawned_server(self, number: int) -> Any:
        """Get the facts (JSON) about a started server that all workers need for `add_server`.

        Returns:
            The facts once the server has begun; None before; False if it failed.
        """
        ...

    def add_server(self, server: Any) -> ServerEndpoints:
        """Add a server that has begun and holds its copy of a shard."""
        ...

    def make_endpoints_of(self, server: Any) -> ServerEndpoints:
        """Get the endpoints of one server that has begun, but isn't added yet."""
        ...

    def list_homes(self) -> list[tuple[str, int]]:
        """List the host and the shard of each server."""
        ...

    def list_servers_on(self, hosts: Collection[str]) -> list[int]:
        """List the numbers of the servers on these hosts."""
        ...

    def leave_pool(self) -> None:
        """Leave without ending any server."""
        ...


class ServerEndpoints(NamedTuple):
    """The addresses of the servers, and ways to watch and close them."""

    # Empty for a newcomer to a run that survives lost servers, until it has joined the pool.
    addresses: tuple[str, ...]
    names: tuple[str, ...]  # names of the servers in messages
    keys: RpcKeys
    # Registers a callback for a lost server. It is called from another thread.
    watch: Callable[[Callable[[PacelineError], None]], None]
    # Ends the servers that this worker has started.
    close: Callable[[], None]
    numbers: tuple[int, ...] = ()  # number of each server, never used twice
    shards: tuple[int, ...] = ()  # shard that each server keeps
    # Only if the run survives lost servers.
    pool: ServerPool | None = None

"""The endpoints of servers: their addresses, and the pool they come from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from paceline.comm.rpc import RpcKeys
from paceline.errors import PacelineError


class ServerPool(Protocol):
    """Servers that outlive the workers that have started them.

    `next`: the number of the one that is started next, alike on all.
    """

    next_step: int

    def join_info(self) -> Any:
        """Return the facts that a newcomer needs for `join`, as JSON."""
        ...

    def join(self, info: Any) -> ServerEndpoints:
        """Connect a newcomer to the servers, from the `join_info` of the others."""
        ...

    @property
    def here(self) -> str:
        """The name of this worker's host, different from all others."""
        ...

    def lose(self, numbers: Collection[int]) -> ServerEndpoints:
        """Remove these servers, which are lost."""
        ...

    def spawn(self, shard: int, *, mine: bool) -> int:
        """Begin to start a server that keeps a copy of this shard, if it is this worker's task;
        return its number. On all workers.
        """
        ...

    def spawned(self, number: int) -> Any:
        """Return the facts of a started server that all need for `add`, once it has begun
        (JSON); None before; False if it failed.
        """
        ...

    def add(self, server: Any) -> ServerEndpoints:
        """Add a server that has begun and holds its copy."""
        ...

    def at(self, server: Any) -> ServerEndpoints:
        """Return the endpoints of one server that has begun and isn't added yet."""
        ...

    def homes(self) -> list[tuple[str, int]]:
        """Return the host of each server, and its shard."""
        ...

    def on(self, hosts: Collection[str]) -> list[int]:
        """Return the numbers of the servers on these hosts."""
        ...

    def leave(self) -> None:
        """Leave without ending any server."""
        ...


class ServerEndpoints(NamedTuple):
    """The addresses of the servers, and how they are watched and closed."""

    addresses: tuple[str, ...]
    names: tuple[str, ...]  # what they are called in messages
    keys: RpcKeys
    # calls back when a server is lost, from another thread
    watch: Callable[[Callable[[PacelineError], None]], None]
    close: Callable[[], None]  # ends those that this worker has started
    numbers: tuple[int, ...] = ()  # of each server, never used twice
    shards: tuple[int, ...] = ()  # which each of them keeps
    # where losses are survived; `addresses` are empty on a newcomer then
    pool: ServerPool | None = None

"""Where servers are: their addresses, and the pool they come from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.comm.rpc import RpcKeys
from paceline.errors import PacelineError

if TYPE_CHECKING:
    pass


class ServerPool(Protocol):
    """Servers that outlive the workers which have started them. `next`: the number of the one that is started next, alike on all."""

    next: int

    def join_info(self) -> Any:
        """What who has just come has to know for `join`: JSON."""
        ...

    def join(self, told: Any) -> ServerEndpoints:
        """Where servers are, as others have told."""
        ...

    @property
    def here(self) -> str:
        """My host, as no other is called."""
        ...

    def lose(self, numbers: Collection[int]) -> ServerEndpoints:
        """These servers are no more."""
        ...

    def spawn(self, shard: int, *, mine: bool) -> int:
        """Begin to start a server, if it is mine to do, which is to keep a copy of this shard; gives its number. On all workers."""
        ...

    def spawned(self, number: int) -> Any:
        """What all have to know of one that I start, for `add`, once it has begun (JSON); None before that; False if it couldn't begin."""
        ...

    def add(self, told: Any) -> ServerEndpoints:
        """A server has begun, and has what it is to keep."""
        ...

    def at(self, told: Any) -> ServerEndpoints:
        """One that has begun and isn't added yet, by itself."""
        ...

    def homes(self) -> list[tuple[str, int]]:
        """The host of each server, and its shard."""
        ...

    def on(self, hosts: Collection[str]) -> list[int]:
        """The numbers of the servers on these hosts."""
        ...

    def leave(self) -> None:
        """Go without ending any server."""
        ...


class ServerEndpoints(NamedTuple):
    """Where servers are."""

    addresses: tuple[str, ...]
    names: tuple[str, ...]  # what they are called in messages
    keys: RpcKeys
    watch: Callable[[Callable[[PacelineError], None]], None]  # who wants to know when one is lost, from another thread
    close: Callable[[], None]  # ends those that this worker has started
    numbers: tuple[int, ...] = ()  # of each server, never used twice
    shards: tuple[int, ...] = ()  # which each of them keeps
    pool: ServerPool | None = None  # where losses are survived; then `addresses` are empty for who has just come

"""Options of the parameter server's client, as the strategy is written (`ParameterServer` says what each means)."""

from __future__ import annotations

from typing import Protocol

from paceline.codec.codec import Codec
from paceline.codec.coding import Coding


class ServerOptions(Protocol):
    """The arguments of `ParameterServer`."""

    @property
    def servers(self) -> int | None: ...

    @property
    def staleness(self) -> float: ...

    @property
    def backup_workers(self) -> int: ...

    @property
    def replicas(self) -> int: ...

    @property
    def requeue(self) -> bool: ...

    @property
    def bucket_mb(self) -> float: ...

    @property
    def codec(self) -> Codec | Coding | None: ...

    @property
    def pull(self) -> str: ...

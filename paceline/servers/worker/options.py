"""Options of the parameter server's client that don't depend on the consistency model."""

from __future__ import annotations

from typing import Protocol

from paceline.codec.codec import Codec
from paceline.codec.coding import Coding


class ServerOptions(Protocol):
    """The arguments of `ParameterServer`, without the ones that choose a consistency model."""

    @property
    def servers(self) -> int | None: ...

    @property
    def replicas(self) -> int: ...

    @property
    def bucket_mb(self) -> float: ...

    @property
    def codec(self) -> Codec | Coding | None: ...

"""Options of the parameter server's client, whatever the consistency model (`ParameterServer`
says what each means).
"""

from __future__ import annotations

from typing import Protocol

from paceline.codec.codec import Codec
from paceline.codec.coding import Coding


class ServerOptions(Protocol):
    """The arguments of `ParameterServer` but for those that ask for a consistency model."""

    @property
    def servers(self) -> int | None: ...

    @property
    def replicas(self) -> int: ...

    @property
    def bucket_mb(self) -> float: ...

    @property
    def codec(self) -> Codec | Coding | None: ...

"""The options of a parameter server, as plain data: what the worker's side of it is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.codec.codec import Codec
from paceline.codec.coding import Coding
from paceline.errors import UsageError
from paceline.formatting import choices, spell
from paceline.server.codings import check


@dataclass(frozen=True)
class ServerOptions:
    """The arguments of `ParameterServer`, which says what they mean. Raises `UsageError` for those that don't fit."""

    servers: int | None = None
    staleness: float = 0
    backup_workers: int = 0
    replicas: int = 1
    requeue: bool = False
    bucket_mb: float = 4.0
    codec: Codec | Coding | None = None
    pull: Literal["step", "forward"] = "step"

    __repr__ = spell

    def __post_init__(self) -> None:
        check(self.codec)
        if self.servers is not None and self.servers < 1:
            raise UsageError(f"servers={self.servers} is no number of servers; give 1 or more, or leave it out for one on each host")
        if not self.bucket_mb > 0:
            raise UsageError(f"bucket_mb={self.bucket_mb} is not a size; give megabytes above 0, e.g. bucket_mb=4")
        if not (self.staleness == math.inf or (self.staleness >= 0 and self.staleness == int(self.staleness))):
            raise UsageError(f"staleness={self.staleness} is no bound; give 0 (in lockstep), a number of turns, or inf (no bound)")
        if self.backup_workers < 0:
            raise UsageError(f"backup_workers={self.backup_workers} is no number of workers; give 0 or more")
        if self.backup_workers and self.staleness:
            raise UsageError("backup_workers is for steps that workers take together: leave out staleness, or backup_workers")
        if self.replicas < 1:
            raise UsageError(f"replicas={self.replicas} is no number of servers that keep the same; give 1 (no copies) or more")
        if self.pull not in ("step", "forward"):
            raise UsageError(f"pull={self.pull!r} is unknown; {choices(str(self.pull), ('step', 'forward'))}")
        if self.requeue and not self.backup_workers:
            raise UsageError("requeue=True deals again what backup workers have dropped: give backup_workers=1 or more with it")

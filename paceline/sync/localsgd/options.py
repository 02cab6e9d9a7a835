"""Options of local SGD, checked: the length of a round, its exchange, and the outer optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from paceline.codec.auto import auto
from paceline.codec.codec import Codec, plain, to_codec
from paceline.codec.coding import Coding, exact
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice, format_as_call
from paceline.sync.localsgd.fragment import adaptive
from paceline.sync.localsgd.outer import Outer, average, nesterov

Momentum = Literal["kept", "averaged"]
DEFAULT_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class RoundOptions:
    """The options of `LocalSGD`. Its docstring explains them."""

    every: int | adaptive
    outer: Outer = field(default_factory=average)
    codec: Codec | Coding = field(default_factory=exact)
    momentum: Momentum = "kept"
    after: int = 0
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    bucket_mb: float = 8.0
    quorum: float | None = None
    grace_seconds: float | None = None

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        if isinstance(self.codec, auto):
            raise UsageError(
                f"{self.codec!r} works with AllReduce only; give LocalSGD a codec, such as int8()"
            )
        to_codec(self.codec)
        steps = self.every.least if isinstance(self.every, adaptive) else self.every
        if not isinstance(self.every, int | adaptive) or steps < 1:
            raise UsageError(
                f"every={self.every!r} is not a number of steps; give 1 or more, or adaptive(...)"
            )
        if wrong := describe_unknown_choice("momentum", self.momentum, Momentum):
            raise UsageError(wrong)
        if not hasattr(self.outer, "move"):
            raise UsageError(
                f"outer={self.outer!r} is no outer optimizer; "
                "there are average() and nesterov(0.7, 0.9)"
            )
        if (
            self.after < 0
            or self.fragments < 1
            or not 0 <= self.alpha < 1
            or not self.bucket_mb > 0
        ):
            raise UsageError(
                f"{self!r}: after must be 0 or more, fragments 1 or more, alpha from 0 to below 1, "
                "bucket_mb above 0"
            )
        if not 0 <= self.delay < steps:
            raise UsageError(
                f"{self!r}: delay must be 0 or more, and less than the {steps} steps of a round"
            )
        if self.alpha and not self.delay:
            raise UsageError(
                f"{self!r}: alpha mixes delayed means; give delay too, or leave alpha out"
            )
        self._check_quorum()

    @property
    def longest_grace(self) -> float:
        """Seconds for which a round with a quorum waits for others."""
        return DEFAULT_GRACE_SECONDS if self.grace_seconds is None else self.grace_seconds

    def _check_quorum(self) -> None:
        """Raise `UsageError` for a quorum out of its range, and for options that it excludes."""
        if self.quorum is None:
            if self.grace_seconds is not None:
                raise UsageError(
                    f"{self!r}: grace_seconds is the wait for late workers once a quorum has "
                    "come; give quorum too, or leave grace_seconds out"
                )
            return
        if not 0 < self.quorum <= 1:
            raise UsageError(
                f"quorum={self.quorum} is no part of the workers; give more than 0 and at most 1, "
                "e.g. quorum=0.8"
            )
        if not 0 <= self.longest_grace < math.inf:
            raise UsageError(
                f"grace_seconds={self.grace_seconds} is no time to wait; give 0 or more seconds"
            )
        excluded = {
            "every=adaptive(...)": isinstance(self.every, adaptive),
            "codec": not isinstance(to_codec(self.codec), plain),
            "momentum='averaged'": self.momentum != "kept",
            "after": bool(self.after),
            "fragments": self.fragments != 1,
            "delay": bool(self.delay),
            "an outer optimizer of your own": not isinstance(self.outer, average | nesterov),
        }
        if others := [name for name, is_given in excluded.items() if is_given]:
            raise UsageError(
                f"{self!r}: rounds with a quorum send whole changes to a server, each worker at "
                f"its own pace; leave out {' and '.join(others)}, or quorum"
            )

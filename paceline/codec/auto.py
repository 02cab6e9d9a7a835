"""The codec `auto`, which is chosen while training; here as a user types it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.codec.codec import Codec, lift
from paceline.codec.coding import Coding
from paceline.codec.dense import half, int8
from paceline.errors import UsageError
from paceline.formatting import spell


@dataclass(frozen=True)
class auto:
    """Exact at first; after a dozen steps the best of `candidates`, if it promises steps that are
    1.1 times as fast. Announced in one line.

    >>> pl.start(sync=pl.AllReduce(codec=pl.auto((pl.half(), pl.int8(), pl.int4()))))

    The default candidates lose too little for the loss to show it.
    """

    candidates: tuple[Codec | Coding, ...] = field(default_factory=lambda: (half(), int8()))

    __repr__ = spell

    def __post_init__(self) -> None:
        if not isinstance(self.candidates, tuple) or not self.candidates:
            raise UsageError(
                f"{self!r}: give candidates as a tuple of codecs, such as auto((half(), int8()))"
            )
        for candidate in self.candidates:
            lift(candidate)

    @property
    def stages(self) -> int:
        """The largest number of stages of any candidate."""
        return max(lift(candidate).stages for candidate in self.candidates)

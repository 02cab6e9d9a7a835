"""The option `auto`: the codec is chosen during training."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.codec.codec import Codec, to_codec
from paceline.codec.coding import Coding
from paceline.codec.dense import half, int8
from paceline.errors import UsageError
from paceline.formatting import format_as_call


@dataclass(frozen=True)
class auto:
    """Starts without compression, and switches to the best candidate if steps become faster.

    >>> pl.start(sync=pl.AllReduce(codec=pl.auto((pl.half(), pl.int8(), pl.int4()))))

    The choice is made after a dozen steps and announced in one line. A candidate is taken only if
    it promises steps that are at least 1.1 times as fast. The default candidates lose too little
    precision to change the loss visibly.
    """

    candidates: tuple[Codec | Coding, ...] = field(default_factory=lambda: (half(), int8()))

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        if not isinstance(self.candidates, tuple) or not self.candidates:
            raise UsageError(
                f"{self!r}: give candidates as a tuple of codecs, such as auto((half(), int8()))"
            )
        for candidate in self.candidates:
            to_codec(candidate)

    @property
    def stages(self) -> int:
        """The largest number of stages of any candidate."""
        return max(to_codec(candidate).stages for candidate in self.candidates)

"""Where workers that are not in lockstep get their samples, and leave letters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class SampleQueue(Protocol):
    """Deals the global batches of an epoch piece by piece, to whoever is ready for more; and passes letters on to the first worker."""

    open: bool  # an epoch is under way
    paused: bool  # all have stopped taking samples, to come together: `begin` goes on

    def pause(self) -> None:
        """Let all stop taking samples, once their turns are over, and come together; what is left is for later."""
        ...

    def begin(self, epoch: int, first: int, sizes: Sequence[int]) -> None:
        """Deal these global batches, from number `first` of the epoch on. Collective."""
        ...

    def take(self, most: int) -> tuple[int, int, int] | None:
        """My next samples, at most so many: the number of their global batch, the first, and the one after the last; None: no more."""
        ...

    def leave(self) -> None:
        """I take no more turns in this epoch: nobody waits for me."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """All workers are here, in the middle of an epoch: what is inside may be a call of all."""
        ...

    def post(self, body: bytes, *, stop: bool = False) -> list[tuple[int, bytes]]:
        """A letter to the first worker, and perhaps the wish that all stop; gives on the first worker what has come: whose, and letters."""
        ...

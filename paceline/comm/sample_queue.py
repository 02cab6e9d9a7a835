"""The queue from which workers that are not in lockstep take their samples, and by which they
send notes to the first worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class SampleQueue(Protocol):
    """Deals the global batches of an epoch piece by piece to workers that are ready for more;
    passes notes to the first worker.
    """

    open: bool  # an epoch is under way
    paused: bool  # all have stopped taking samples, to come together: `begin` goes on

    def pause(self) -> None:
        """Stop dealing: all workers end their turns and come together; the remaining samples are
        for later.
        """
        ...

    def begin(self, epoch: int, first: int, sizes: Sequence[int]) -> None:
        """Deal these global batches, from number `first` of the epoch on. Collective."""
        ...

    def take(self, most: int) -> tuple[int, int, int] | None:
        """Take at most `most` samples: the number of their global batch, the first, and the one
        after the last; None: no more.
        """
        ...

    def leave(self) -> None:
        """Take no more turns in this epoch: no other worker waits for this one."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Mark that all workers are here, in the middle of an epoch: the code inside may make a
        call of all.
        """
        ...

    def post(self, body: bytes, *, stop: bool = False) -> list[tuple[int, bytes]]:
        """Send a note to the first worker, perhaps with the wish that all stop; return, on that
        worker, the notes received by rank.
        """
        ...

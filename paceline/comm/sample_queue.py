"""Interface of the queue from which workers out of lockstep take their samples and send notes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class SampleQueue(Protocol):
    """Deals the global batches of an epoch, piece by piece, to workers that are ready for more."""

    open: bool  # whether an epoch is under way
    paused: bool  # whether all have stopped taking samples, to come together; `begin` goes on

    def pause(self) -> None:
        """Stop dealing: all workers end their turns and come together. The rest is for later."""
        ...

    def begin(self, epoch: int, first: int, sizes: Sequence[int]) -> None:
        """Deal the global batches of an epoch. Collective.

        Args:
            epoch: Number of the epoch.
            first: Number of the first batch in it.
            sizes: Number of samples of each batch.
        """
        ...

    def take(self, most: int) -> tuple[int, int, int] | None:
        """Take at most `most` samples of one global batch. None if there are no more.

        Returns:
            The number of the batch, its first sample here, and the one after the last.
        """
        ...

    def leave(self) -> None:
        """Take no more turns in this epoch. No other worker waits for this one then."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Mark that all workers are here, so the block may make a call of all of them."""
        ...

    def post(self, body: bytes, *, stop: bool = False) -> list[tuple[int, bytes]]:
        """Send a note to the first worker.

        Args:
            body: The note.
            stop: Whether this worker wishes that all stop. Default: no.

        Returns:
            On the first worker, the notes that have come, each with its rank. Else nothing.
        """
        ...

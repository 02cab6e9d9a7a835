"""Turns that a worker has missed at a loss, and takes as they were dealt before it.

Between two calls of all workers there may be turns without a call: those of a round of local SGD,
or of an evaluation. A worker that has the result of a call goes on until the next call, and learns
there that a worker was lost. A worker that was cut off in the first call is behind by these turns.

    step           4         5         6         7         8
    a     call k-1 |---------|---------|---------|---------| call k, in which a hears of the loss
    b     cut off in call k-1: gets its result from a, and takes steps 5 to 8 as they were dealt;
          then the batches are dealt to the remaining workers

A loader asks before each turn whether the group of workers has changed. The loaders of a worker
that is behind hear about the change only after as many answers as those of the other workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class MissedTurns:
    """Counts the answers to loaders since the last completed call, and the answers to be repeated.

    An answer is the generation of the group of workers.

    Args:
        calls: Returns the number of calls that this worker has completed.
        answer: The answer to be repeated if there was none before.
    """

    def __init__(self, calls: Callable[[], int], *, answer: int = 0) -> None:
        self._count_calls, self._calls_at_answer, self._last_answer = calls, 0, answer
        self._answer_count = self._turns_left = 0
        self.is_admitting = False  # whether this worker is letting new workers in

    @property
    def answers_since_call(self) -> int:
        """Number of answers to loaders since the last completed call."""
        return self._answer_count if self._calls_at_answer == self._count_calls() else 0

    @contextlib.contextmanager
    def mark_admission(self) -> Iterator[None]:
        """Mark that this worker lets new workers in during the block.

        Workers that are behind then have to make the same calls.
        """
        self.is_admitting = True
        try:
            yield
        finally:
            self.is_admitting = False

    def begin_repeating(self, asked: int) -> None:
        """Repeat the last answer this number of times. The last call is completed by now."""
        self._turns_left = asked

    @property
    def is_behind(self) -> bool:
        """Whether the next answer is one that other workers had before they learned of the loss."""
        return self._turns_left > 0

    def repeat_answer(self) -> int:
        """Repeat the answer from before the loss."""
        self._turns_left -= 1
        return self.record_answer(self._last_answer)

    def record_answer(self, generation: int) -> int:
        """Record `generation` as the answer to a loader, and return it."""
        self._answer_count, self._calls_at_answer, self._last_answer = (
            self.answers_since_call + 1,
            self._count_calls(),
            generation,
        )
        return generation

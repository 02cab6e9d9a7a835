"""Turns that a worker still takes as they were dealt before a loss, as others had taken them before
they heard of it.

Between two calls of all workers there may be turns without any: those of a round of local SGD, or
of an evaluation. Workers that have the result of a call go on to the next, and hear there that a
worker was lost; those that were cut off in the first are that many turns behind.

    step           4         5         6         7         8
    a     call k-1 |---------|---------|---------|---------| call k, in which a hears of the loss
    b     cut off in call k-1: gets its result from a, and takes steps 5 to 8 as they were dealt;
          then all deal anew

So loaders, which ask before each turn who takes part, are told of the change when they have asked
as often as those of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class MissedTurns:
    """How often the loaders of one worker have asked since it completed its last call, and how
    often they are still told what was before.

    `calls` returns how many calls this worker has completed; `answer` is what counts as the last
    answer before there is one.
    """

    def __init__(self, calls: Callable[[], int], *, answer: int = 0) -> None:
        self._calls, self._as_of, self._answer = calls, 0, answer
        self._asked = self._left = 0
        self.admits = False  # this worker is letting others in

    @property
    def asked(self) -> int:
        """How often loaders have been answered since the last completed call."""
        return self._asked if self._as_of == self._calls() else 0

    @contextlib.contextmanager
    def admission(self) -> Iterator[None]:
        """Mark that this worker lets others in, in calls that those who are behind have to make,
        too.
        """
        self.admits = True
        try:
            yield
        finally:
            self.admits = False

    def begin(self, asked: int) -> None:
        """Be as many answers behind the others, with this worker's last call completed."""
        self._left = asked

    @property
    def behind(self) -> bool:
        """Whether the next answer is one that the others had before they heard of a loss."""
        return self._left > 0

    def repeat(self) -> int:
        """Return the answer before, as the others had it, too."""
        self._left -= 1
        return self.answer(self._answer)

    def answer(self, generation: int) -> int:
        """Answer of a loader's question, which is counted."""
        self._asked, self._as_of, self._answer = self.asked + 1, self._calls(), generation
        return generation

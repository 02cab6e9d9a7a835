"""A piece of advice: the words, and how much time it would save."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Remark(NamedTuple):
    """Advice in one or several sentences.

    Attributes:
        words: The sentences.
        gain: Part of the time of a step, or of the run, that is saved; None if it isn't known.
        most: Whether `gain` is an upper bound, and not an estimate.
        of: Whether `gain` is a part of a step or of the run.
    """

    words: str
    gain: float | None = None
    most: bool = False
    of: Literal["step", "run"] = "step"

    @property
    def saving_in_words(self) -> str:
        """The gain in words; empty if it isn't known."""
        if self.gain is None:
            return ""
        total = "a step" if self.of == "step" else "the run"
        return f"saves {'at most' if self.most else 'about'} {self.gain:.0%} of {total}"

"""A piece of advice: the words, and how much of the time it would save."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Remark(NamedTuple):
    """What to do, in a sentence or some.

    `gain`: the part of the time of a step, or of the run, that it saves; None where that isn't
    known.

    `most`: it saves so much at most, which is all that is lost there; else about so much.
    """

    words: str
    gain: float | None = None
    most: bool = False
    of: Literal["step", "run"] = "step"

    @property
    def saves(self) -> str:
        """The gain in words; empty where it isn't known."""
        if self.gain is None:
            return ""
        whole = "a step" if self.of == "step" else "the run"
        return f"saves {'at most' if self.most else 'about'} {self.gain:.0%} of {whole}"

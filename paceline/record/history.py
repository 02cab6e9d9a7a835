"""Seed, start and events of a run, for the summary and for workers that join later."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, Final

SAVES: Final = 1000  # checkpoints that are told of, the last ones


class RunHistory:
    """The run's `seed`, when it `began`, its `events` and `saves`; `results` are what the script of
    the first worker adds to the summary.

    An event has at least a `time`, in seconds since the run began, and in `what` the words. `saves`
    are the same of checkpoints, with their `step`.
    """

    def __init__(self, seed: int, began: float, announce: Callable[[str], None]) -> None:
        self.seed, self.began, self._announce = seed, began, announce
        self.events: list[dict[str, Any]] = []
        self.saves: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}
        self._followers: list[Callable[[], None]] = []

    def follow(self, noted: Callable[[], None]) -> None:
        """Call `noted` each time when something was noted."""
        self._followers.append(noted)

    def note(self, what: str) -> None:
        """Note that something happened."""
        self.events.append({"time": time.time() - self.began, "what": what})
        self._noted()

    def saved(self, name: str, step: int, *, background: bool) -> None:
        """Note that a checkpoint of this name was written, or begun in the `background`.

        Of many the last `SAVES` are kept.
        """
        what = f"{name} is being written" if background else f"saved {name}"
        self.saves = [
            *self.saves[1 - SAVES :],
            {"time": time.time() - self.began, "what": what, "step": step},
        ]
        self._noted()

    def _noted(self) -> None:
        for noted in self._followers:
            noted()

    def tell(self, what: str) -> None:
        """Note that something happened, and say so."""
        self.note(what)
        self._announce(what)

    def identity(self, name: str) -> str:
        """Return what tells the run of this name from all others, in all starts of its job and
        on all workers that know of its begin.
        """
        return hashlib.sha256(f"{name} {self.seed} {self.began!r}".encode()).hexdigest()[:12]

    def facts(self) -> dict[str, Any]:
        """Return what a worker that has just joined has to know."""
        return {"events": self.events, "saves": self.saves, "began": self.began, "seed": self.seed}

    def learn(self, facts: dict[str, Any]) -> None:
        """Take over what the `facts` of another worker say."""
        self.events, self.saves, self.began, self.seed = (
            facts["events"],
            facts["saves"],
            facts["began"],
            facts["seed"],
        )

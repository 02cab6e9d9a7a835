"""Seed, start and events of a run, for the summary and for workers that join later."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, Final

# Checkpoints that the history keeps; older ones are forgotten.
MAX_SAVES: Final = 1000


class RunHistory:
    """The seed of a run, when it began, its events and its checkpoints.

    An event has at least `time`, in seconds since the run began, and `what`, a text. `saves` are
    events of checkpoints, with their `step`. `results` is filled by the script of the first worker,
    and goes into the summary.
    """

    def __init__(self, seed: int, began: float, announce: Callable[[str], None]) -> None:
        self.seed, self.began, self._announce = seed, began, announce
        self.events: list[dict[str, Any]] = []
        self.saves: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}
        self._followers: list[Callable[[], None]] = []

    def add_follower(self, follower: Callable[[], None]) -> None:
        """Call `follower` each time something is noted."""
        self._followers.append(follower)

    def note_event(self, what: str) -> None:
        """Add an event, without announcing it."""
        self.events.append({"time": time.time() - self.began, "what": what})
        self._call_followers()

    def note_checkpoint(self, name: str, step: int, *, background: bool) -> None:
        """Add a checkpoint that was written, or whose writing began in the `background`.

        Only the last `MAX_SAVES` are kept.
        """
        what = f"{name} is being written" if background else f"saved {name}"
        self.saves = [
            *self.saves[1 - MAX_SAVES :],
            {"time": time.time() - self.began, "what": what, "step": step},
        ]
        self._call_followers()

    def _call_followers(self) -> None:
        """Call all followers."""
        for follower in self._followers:
            follower()

    def announce_event(self, what: str) -> None:
        """Add an event and announce it."""
        self.note_event(what)
        self._announce(what)

    def make_identity(self, name: str) -> str:
        """Return an identifier of the run called `name`.

        It differs from that of every other run. It is the same in all starts of the run's job, and
        on all workers that know when the run began.
        """
        return hashlib.sha256(f"{name} {self.seed} {self.began!r}".encode()).hexdigest()[:12]

    def collect_facts(self) -> dict[str, Any]:
        """Return the facts that a worker needs when it joins."""
        return {"events": self.events, "saves": self.saves, "began": self.began, "seed": self.seed}

    def adopt_facts(self, facts: dict[str, Any]) -> None:
        """Take over the `facts` of another worker."""
        self.events, self.saves, self.began, self.seed = (
            facts["events"],
            facts["saves"],
            facts["began"],
            facts["seed"],
        )

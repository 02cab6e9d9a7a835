"""Seed, start and events of a run, for the summary and for workers that join later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class RunHistory:
    """The run's `seed`, when it `began`, and its `events`; `results` are what the script of the first worker adds to the summary."""

    def __init__(self, seed: int, began: float, announce: Callable[[str], None]) -> None:
        self.seed, self.began, self._announce = seed, began, announce
        self.events: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}

    def note(self, what: str) -> None:
        """Note that something happened."""
        self.events.append({"time": time.time() - self.began, "what": what})

    def tell(self, what: str) -> None:
        """Note that something happened, and say so."""
        self.note(what)
        self._announce(what)

    def facts(self) -> dict[str, Any]:
        """Return what a worker that has just joined has to know."""
        return {"events": self.events, "began": self.began, "seed": self.seed}

    def learn(self, facts: dict[str, Any]) -> None:
        """Take over what the `facts` of another worker say."""
        self.events, self.began, self.seed = facts["events"], facts["began"], facts["seed"]

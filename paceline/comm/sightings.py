"""Where workers were last seen, and what messages say of those that are missing or elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

SKIPPED = (
    "Skip a step on all workers or on none: decide by what all of them have, such as run.mean(loss)"
)


class Sightings:
    """The call and the step at which each rank was at the last meeting.

    `hosts`: the host of each rank; `names`: what each is called.
    """

    def __init__(self, hosts: tuple[str, ...], names: tuple[int, ...]) -> None:
        self.hosts, self._names = hosts, names
        self._seen: list[tuple[str, int]] = []
        self._met = time.monotonic()

    def knows(self, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks, by name, are among those that meet here."""
        return set(ranks) <= set(self._names)

    def note(self, heads: Sequence[Sequence[Any]]) -> None:
        """Note where each rank is, as all have met."""
        self._seen = [(head[0], head[1]) for head in heads]
        self._met = time.monotonic()

    def missing(self, rank: int, what: str, step: int, ranks: tuple[int, ...]) -> str:
        """Say for which ranks, by name, this one has waited in vain at `what`."""
        waited = time.monotonic() - self._met
        return (
            f"step {step}, {what}: rank {self._names[rank]} waited {waited:.1f} s in vain for "
            f"{self.whereabouts(ranks)}. "
            "If it is only slow, raise start(deadline=seconds); else look at its own output"
        )

    def whereabouts(self, ranks: tuple[int, ...]) -> str:
        """Say where these ranks, by name, were last seen, and when."""
        ago = time.monotonic() - self._met
        texts = []
        for name in ranks:
            rank = self._names.index(name) if name in self._names else len(self._seen)
            seen = self._seen[rank] if rank < len(self._seen) else None
            last = (
                f", last seen at {seen[0]} of step {seen[1]}, {ago:.1f} s ago"
                if seen
                else ", never seen"
            )
            texts.append(f"rank {name}{self._on(rank)}{last}")
        return "; ".join(texts) or "a rank that can't be named"

    def unequal(self, heads: Sequence[Sequence[Any]]) -> str:
        """Say which workers have made fewer or more steps of their optimizers; empty if all
        known counts are the same.
        """
        by_step: dict[int, dict[int, int]] = {}  # of each step the count of each rank
        for rank, head in enumerate(heads):
            at, *counts = head[4] or [0, None, None]
            for step, count in zip((at - 1, at), counts, strict=True):
                if count is not None:
                    by_step.setdefault(step, {})[rank] = count
        for step, counts in sorted(by_step.items()):
            if len(set(counts.values())) > 1:
                sides = (
                    f"rank {self._names[rank]}{self._on(rank)} has made {count}"
                    for rank, count in counts.items()
                )
                return f"in step {step} optimizers have not stepped alike ({'; '.join(sides)})"
        return ""

    def apart(self, heads: Sequence[Sequence[Any]], lines: Sequence[str]) -> str:
        """Say which workers have come to which call; `lines` are where they are in their
        scripts.
        """
        places: dict[str, list[str]] = {}
        for rank, (what, step, where, *_) in enumerate(heads):
            text = f"{what}{f' ({where})' if where else ''} of step {step}{lines[rank]}"
            places.setdefault(text, []).append(f"{self._names[rank]}{self._on(rank)}")
        sides = "; ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} at {text}"
            for text, ranks in places.items()
        )
        unequal = self.unequal(heads)
        why = f"{unequal[0].upper()}{unequal[1:]}. {SKIPPED}" if unequal else ""
        return (
            f"workers have come apart: {sides}. "
            f"{why or 'Every worker has to make the same collective calls in the same order'}"
        )

    def _on(self, rank: int) -> str:
        return f" on {self.hosts[rank]}" if rank < len(self.hosts) else ""

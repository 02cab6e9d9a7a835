"""Where workers were last seen, and the texts about workers that are missing or elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

SKIPPED = (
    "Skip a step on all workers or on none: decide by what all of them have, such as run.mean(loss)"
)


class Sightings:
    """The call and step of each rank at the last meeting.

    Args:
        hosts: Name of each rank's host. May be empty.
        names: Rank of each member among all workers. Messages name ranks by it.
    """

    def __init__(self, hosts: tuple[str, ...], names: tuple[int, ...]) -> None:
        self.hosts, self._names = hosts, names
        self._seen: list[tuple[str, int]] = []
        self._met_at = time.monotonic()  # time of the last meeting

    def knows_ranks(self, ranks: Sequence[int]) -> bool:
        """Whether all of these workers, by name, meet here."""
        return set(ranks) <= set(self._names)

    def note_meeting(self, heads: Sequence[Sequence[Any]]) -> None:
        """Note the call and step of each rank: all have met."""
        self._seen = [(head[0], head[1]) for head in heads]
        self._met_at = time.monotonic()

    def describe_missing(self, rank: int, what: str, step: int, ranks: tuple[int, ...]) -> str:
        """Describe the workers `ranks` that rank `rank` has waited for in vain.

        Args:
            rank: Rank of this worker in the group.
            what: Name of its call.
            step: Its step.
            ranks: The missing workers, by name.
        """
        waited = time.monotonic() - self._met_at
        return (
            f"step {step}, {what}: rank {self._names[rank]} waited {waited:.1f} s in vain for "
            f"{self.describe_whereabouts(ranks)}. "
            "If it is only slow, raise start(deadline=seconds); else look at its own output"
        )

    def describe_whereabouts(self, ranks: tuple[int, ...]) -> str:
        """Describe where these workers, by name, were last seen, and when."""
        ago = time.monotonic() - self._met_at
        texts = []
        for name in ranks:
            # A worker that is not of this group was never seen here.
            rank = self._names.index(name) if name in self._names else len(self._seen)
            seen = self._seen[rank] if rank < len(self._seen) else None
            last = (
                f", last seen at {seen[0]} of step {seen[1]}, {ago:.1f} s ago"
                if seen
                else ", never seen"
            )
            texts.append(f"rank {name}{self._host_suffix(rank)}{last}")
        return "; ".join(texts) or "a rank that can't be named"

    def describe_unequal_steps(self, heads: Sequence[Sequence[Any]]) -> str:
        """Describe the workers whose optimizers made fewer or more steps. Empty if counts agree."""
        by_step: dict[int, dict[int, int]] = {}  # by step, the count of each rank
        for rank, head in enumerate(heads):
            # A head holds the step, and the counts of the step before it and of this one.
            at, *counts = head[4] or [0, None, None]
            for step, count in zip((at - 1, at), counts, strict=True):
                if count is not None:
                    by_step.setdefault(step, {})[rank] = count
        # The earliest step in which they differ says most: later ones follow from it.
        for step, counts in sorted(by_step.items()):
            if len(set(counts.values())) > 1:
                sides = (
                    f"rank {self._names[rank]}{self._host_suffix(rank)} has made {count}"
                    for rank, count in counts.items()
                )
                return f"in step {step} optimizers have not stepped alike ({'; '.join(sides)})"
        return ""

    def describe_apart(self, heads: Sequence[Sequence[Any]], lines: Sequence[str]) -> str:
        """Describe the calls at which workers are. `lines`: the line of the script of each rank."""
        # Ranks that are at the same call of the same step stand together.
        places: dict[str, list[str]] = {}
        for rank, (what, step, where, *_) in enumerate(heads):
            text = f"{what}{f' ({where})' if where else ''} of step {step}{lines[rank]}"
            places.setdefault(text, []).append(f"{self._names[rank]}{self._host_suffix(rank)}")
        sides = "; ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} at {text}"
            for text, ranks in places.items()
        )
        unequal = self.describe_unequal_steps(heads)
        why = f"{unequal[0].upper()}{unequal[1:]}. {SKIPPED}" if unequal else ""
        return (
            f"workers have come apart: {sides}. "
            f"{why or 'Every worker has to make the same collective calls in the same order'}"
        )

    def _host_suffix(self, rank: int) -> str:
        return f" on {self.hosts[rank]}" if rank < len(self.hosts) else ""

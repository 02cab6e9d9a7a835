"""A loader on its way through an epoch."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.data.loader import ShareLoader, Turn
from paceline.session.ghost import Buffers


@dataclass(slots=True)
class Course:
    """One loader on its way: its open turn, and when that and the epoch began (counted in calls)."""

    loader: ShareLoader
    epoch_at: int = 0
    turn_at: int = 0
    turn: Turn | None = None
    kept: Buffers = field(default_factory=list)  # before a ghost's turn
    outer: tuple[int, bool] = (0, False)  # what the turn around this one had exchanged
    gathered: int = 0  # rows that were gathered of this batch: how often
    passed: int = 0  # in this turn, with those that were gathered when it was dealt before
    void: bool = False  # its rows died with a worker: it is dealt again


def innermost(courses: list[Course]) -> Turn | None:
    """The turn under way that no other is inside of. One that was left by `break` counts only where no other is."""
    if len(courses) < 2:
        return courses[0].turn if courses else None
    return next((course for course in reversed(courses) if course.loader.under_way), courses[-1]).turn


def parts(course: Course) -> tuple[float, ...]:
    """The part of the present batch that each worker has; where a batch has weights of its own, or micro-batches, mine alone is known."""
    turn, terms = course.turn, course.loader.terms
    assert turn is not None
    if terms.weigh is not None or terms.shard == "mine" or terms.accumulate > 1:
        return (turn.scale,)
    return tuple(share / turn.global_batch for share in terms.shares(turn.global_batch))

"""A run that is limited from outside stops after so many steps, or so many seconds."""

from __future__ import annotations

import pytest

from paceline.cluster.discover import Place
from paceline.loop.run_limit import RunLimit


@pytest.mark.parametrize(
    ("place", "stops"),
    [
        (Place(most_steps=3), [2, 3, 4, 5, 6, 7]),
        # a step is a second; seconds count from the end of the first one
        (Place(most_seconds=5.0), [5, 6, 7]),
        (Place(most_steps=7, most_seconds=5.0), [5, 6, 7]),
        (Place(most_steps=2, most_seconds=5.0), [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_stops_at_the_first_of_both(place: Place, stops: list[int]) -> None:
    times, stopped, now = iter(range(100, 120)), list[int](), 0
    limit = RunLimit(place, lambda: stopped.append(now), clock=lambda: float(next(times)))
    for now in range(8):
        limit.step_ended(1000 + now, 32, {})  # a run that was resumed begins at a later step
    assert stopped == stops

"""Which way buckets travel, as plain data: by links, and by cores."""

from __future__ import annotations

import math

import pytest

from paceline.comm import schedule
from paceline.sync.route_choice import FAST, SPARE, RouteFacts, choose

TWO, FOUR = (0, 0, 1, 1), (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("rate", "cores", "name"),
    [(FAST, SPARE / 2, "native"), (FAST, SPARE, "hierarchical"), (FAST / 2, SPARE / 2, "hierarchical"), (FAST / 2, SPARE, "hierarchical")],
)
def test_fast_links_and_crowded_cores_take_the_native_way(rate: float, cores: float, name: str) -> None:
    choice = choose(TWO, RouteFacts((rate, rate), 1e-4, cores, 0.25))
    assert (choice.name, choice.across) == (name, None)
    shown = "native" if name == "native" else "auto"
    assert f"via='{shown}'" in choice.why and f"{cores:g} cores" in choice.why and "measured in 0.25 s" in choice.why


def test_the_slowest_link_decides_what_is_fast() -> None:
    assert choose(TWO, RouteFacts((4 * FAST, FAST / 2), 1e-4, 1.0, 0.1)).name == "hierarchical"


def test_uneven_chunks_are_taken_where_they_pay() -> None:
    choice = choose(FOUR, RouteFacts((12.5e7, 12.5e7, 12.5e7, 1.25e7), 1e-4, 8.0, 0.5))
    assert choice.name == "uneven" and choice.across == schedule.uneven((12.5e7, 12.5e7, 12.5e7, 1.25e7))
    assert "links carry 100 Mbit/s to 1 Gbit/s" in choice.why and "1.33 times" in choice.why
    assert choose(FOUR, RouteFacts((1e8, 0.97e8, 1e8, 0.99e8), 1e-4, 8.0, 0.5)).across is None, "as links are when measured"
    assert choose((0, 1, 2), RouteFacts((1e8, 1e8, 1e8), 1e-4, 8.0, 0.5)).name == "native"


def test_chunks_of_a_hierarchy_follow_each_other_in_one_piece() -> None:
    choice = choose((0, 0, 1, 1, 2, 3), RouteFacts((1e8, 1e8, 1e8, 1e7), 1e-4, 8.0, 0.5))
    assert choice.name == "uneven" and choice.across is not None and choice.across.size == 4
    assert len(choice.across.rounds) == 2 and math.isclose(sum(choice.across.chunks), 1)

"""Which way exchanges go between hosts, as plain data: by links, and by cores."""

from __future__ import annotations

import json
import math

import pytest

from paceline.comm import schedule
from paceline.sync.route_choice import (
    ALIKE_RATIO,
    FAST_LINK,
    MAX_HOSTS,
    SPARE_CORES,
    RouteFacts,
    choose_route,
    choose_uneven,
    describe_route,
    is_same_route,
)

TWO, FOUR = (0, 0, 1, 1), (0, 1, 2, 3)
UNEVEN = (12.5e7, 12.5e7, 12.5e7, 1.25e7)


@pytest.mark.parametrize(
    ("rate", "cores", "way"),
    [
        (FAST_LINK, SPARE_CORES / 2, "native"),
        (FAST_LINK, SPARE_CORES, "auto"),
        (FAST_LINK / 2, SPARE_CORES / 2, "auto"),
        (FAST_LINK / 2, SPARE_CORES, "auto"),
    ],
)
def test_fast_links_and_crowded_cores_take_the_native_way(
    rate: float, cores: float, way: str
) -> None:
    choice = choose_route(TWO, RouteFacts((rate, rate), 1e-4, cores))
    assert (choice.way, choice.across) == (way, None)
    assert ("via='native'" if way == "native" else "one copy per host") in choice.why
    assert f"{cores:g} cores" in choice.why and "cluster.json" in choice.why


def test_the_slowest_link_decides_what_is_fast() -> None:
    assert choose_route(TWO, RouteFacts((4 * FAST_LINK, FAST_LINK / 2), 1e-4, 1.0)).way == "auto"


def test_uneven_chunks_are_taken_where_links_differ_and_they_pay() -> None:
    choice = choose_route(FOUR, RouteFacts(UNEVEN, 1e-4, 8.0))
    assert choice.way == "uneven" and choice.across == schedule.build_uneven(UNEVEN)
    assert math.isclose(sum(choice.parts), 1) and len(choice.parts) == 4 and choice.parts[3] == 0
    assert "links carry 100 Mbit/s to 1 Gbit/s" in choice.why and "1.33 times" in choice.why
    assert choose_route((0, 1, 2), RouteFacts((1e8, 1e8, 1e8), 1e-4, 8.0)).way == "auto"
    assert (
        choose_route(FOUR, RouteFacts((1e8 * ALIKE_RATIO, 1e8, 1e8, 1e8), 1e-4, 8.0)).across is None
    ), "no probe is more exact"
    assert choose_route((0, 1), RouteFacts((1e8, 1e7), 1e-4, 8.0)).across is None, (
        "the links of two hosts carry the same"
    )
    many = (1e9, *(1e7,) * MAX_HOSTS)
    assert choose_route(range(len(many)), RouteFacts(many, 1e-4, 8.0)).across is None


def test_chunks_of_a_hierarchy_follow_each_other_in_one_piece() -> None:
    choice = choose_route((0, 0, 1, 1, 2, 3), RouteFacts((1e8, 1e8, 1e8, 1e7), 1e-4, 8.0))
    assert choice.way == "uneven" and choice.across is not None and choice.across.size == 4
    assert len(choice.across.rounds) == 2 and math.isclose(sum(choice.across.chunks), 1)


def test_replicas_on_some_of_the_hosts_are_decided_by_the_links_of_those() -> None:
    facts = RouteFacts((1e7, 1e8, 1e8, 1e8), 1e-4, 8.0)
    assert choose_route((1, 2, 3), facts).across is None
    assert choose_route((0, 1, 2), facts).parts[0] == 0 and facts.rates_of((0, 1, 2)) == (
        1e7,
        1e8,
        1e8,
    )
    assert "decides nothing here" in choose_route((2, 2), facts).why


def test_what_is_kept_of_a_choice_tells_it_from_others() -> None:
    facts = RouteFacts(UNEVEN, 1e-4, 8.0)
    uneven = json.loads(json.dumps(choose_route(FOUR, facts).to_fields()))
    usual = choose_route(FOUR, facts._replace(rates=(1e8,) * 4)).to_fields()
    native = choose_route(TWO, RouteFacts((FAST_LINK, FAST_LINK), 1e-4, 1.0)).to_fields()
    assert (
        is_same_route(None, usual)
        and is_same_route(usual, None)
        and is_same_route(None, None)
        and is_same_route(uneven, choose_route(FOUR, facts).to_fields())
    )
    assert is_same_route(uneven, choose_uneven(FOUR, facts).to_fields()), (
        "who has asked for what is chosen gets the same"
    )
    assert not is_same_route(uneven, None) and not is_same_route(usual, native)
    assert not is_same_route(
        uneven, choose_route(FOUR, facts._replace(rates=(*UNEVEN[:2], 6e7, 1.25e7))).to_fields()
    )
    assert [describe_route(each) for each in (None, usual, native)] == [
        "the usual way",
        "the usual way",
        "via='native'",
    ]
    assert describe_route(uneven) == "via='uneven' with chunks of 0.333, 0.333, 0.333, 0"

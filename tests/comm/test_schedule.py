from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import schedule as s
from paceline.comm.schedule import LinkSpeed, Move, Schedule, ScheduleNetwork
from paceline.errors import UsageError

UNEVEN = [
    [0],
    [0, 0, 1],
    [0, 1, 2],
    [1, 0, 1, 0],
    [0, 1, 1, 1, 1, 2],
    [2, 2, 0, 1, 0, 2, 2],
    [0] * 5 + [1] * 3,
]


def broken(size: int, chunks: tuple[float, ...], rounds: list[list[Move]]) -> Schedule:
    return Schedule("x", size, chunks, tuple(tuple(moves) for moves in rounds))


@pytest.mark.parametrize("name", s.SCHEDULES)
@pytest.mark.parametrize("size", range(1, 18))
def test_every_schedule_is_proved(name: str, size: int) -> None:
    s.check_schedule(s.build_schedule(name, [0] * size))
    s.check_schedule(s.build_schedule(name, [rank % 3 for rank in range(size)]))


@pytest.mark.parametrize("hosts", UNEVEN)
@pytest.mark.parametrize(
    "between", [s.build_direct, s.build_ring, s.build_tree, s.build_halving_doubling]
)
def test_hierarchies_over_uneven_hosts(hosts: list[int], between: object) -> None:
    s.check_schedule(s.build_hierarchical(hosts, between))  # type: ignore[arg-type]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=17), st.randoms())
def test_placement_does_not_matter_between_hosts(hosts: list[int], dice: object) -> None:
    dealt = list(hosts)
    dice.shuffle(dealt)  # type: ignore[attr-defined]
    blocks = s.build_hierarchical(sorted(hosts))
    round_robin = s.build_hierarchical(dealt)
    s.check_schedule(round_robin)
    assert math.isclose(
        s.count_traffic(blocks, 1000, sorted(hosts))[1],
        s.count_traffic(round_robin, 1000, dealt)[1],
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (broken(2, (1.0,), []), "ends with"),
        (broken(2, (1.0,), [[Move(0, 1, 0, True)]]), "ends with"),
        (broken(2, (1.0,), [[Move(0, 1, 0, False)]]), "before it is complete"),
        (broken(2, (1.0,), [[Move(0, 1, 0, True)], [Move(0, 1, 0, True)]]), "counts"),
        (broken(2, (0.5,), [[Move(0, 1, 0, True), Move(1, 0, 0, True)]]), "add up"),
    ],
)
def test_the_proof_finds_what_is_wrong(wrong: Schedule, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        s.check_schedule(wrong)


def test_another_order_of_sums_is_found() -> None:
    # (0+1)+(2+3) on both sides of the swap: the same bits everywhere
    swap = [[Move(1, 0, 0, True), Move(2, 3, 0, True)], [Move(0, 3, 0, True), Move(3, 0, 0, True)]]
    s.check_schedule(broken(4, (1.0,), [*swap, [Move(0, 1, 0, False), Move(3, 2, 0, False)]]))
    # 0+1+2 on rank 0, but (0+1)+2 on rank 2
    apart = [
        [Move(1, 0, 0, True), Move(2, 0, 0, True), Move(0, 1, 0, True)],
        [Move(1, 2, 0, True), Move(2, 1, 0, True)],
    ]
    with pytest.raises(AssertionError, match="rank 1 adds chunk 0 up in another order than rank 0"):
        s.check_schedule(broken(3, (1.0,), apart))


@pytest.mark.parametrize(
    ("name", "rounds"), [("direct", 1), ("ring", 14), ("tree", 6), ("halving-doubling", 6)]
)
def test_rounds_and_traffic_are_those_of_the_papers(name: str, rounds: int) -> None:
    schedule = s.build_schedule(name, [0] * 8)
    assert len(schedule.rounds) == rounds
    sent = s.count_traffic(schedule, 800, [0] * 8)[0]
    assert math.isclose(
        sent, {"direct": 56, "ring": 14, "tree": 14, "halving-doubling": 14}[name] * 800
    )


def test_prices() -> None:
    network = ScheduleNetwork([0, 0, 1, 1], LinkSpeed(0.0, 1e9), LinkSpeed(1e-3, 1e8))
    ring, tall = s.build_ring(4), s.build_hierarchical([0, 0, 1, 1])
    # each of 6 rounds: 25 MB over the slow link
    assert math.isclose(s.predict_seconds(ring, 10**8, network), 6 * (1e-3 + 0.25))
    # 100 MB inside, 50 MB twice over the slow link, 100 MB inside
    assert math.isclose(s.predict_seconds(tall, 10**8, network), 0.1 + 2 * (1e-3 + 0.5) + 0.1)
    assert s.predict_seconds(
        s.build_tree(8), 4, ScheduleNetwork([0] * 8, LinkSpeed(1e-3, 1e9), LinkSpeed(1, 1))
    ) < s.predict_seconds(
        s.build_ring(8), 4, ScheduleNetwork([0] * 8, LinkSpeed(1e-3, 1e9), LinkSpeed(1, 1))
    )
    assert s.predict_seconds(s.build_ring(1), 100, network) == 0


@pytest.mark.parametrize("size", [*range(1, 9), 11, 16])
def test_uneven_chunks_are_proved(size: int) -> None:
    for rates in (
        [1.0] * size,
        [1.0] * (size - 1) + [0.1],
        [float(1 + rank) for rank in range(size)],
    ):
        for pieces in (None, 1, 3):
            s.check_schedule(s.build_uneven(rates, pieces))
        s.check_schedule(s.build_schedule("uneven", [rank // 2 for rank in range(2 * size)], rates))


@settings(max_examples=100)
@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=12))
def test_links_are_busy_for_the_same_time_unless_they_are_too_slow_to_own_anything(
    rates: list[float],
) -> None:
    parts = s.owned_fractions(rates)
    assert math.isclose(sum(parts), 1, abs_tol=1e-9) and min(parts) >= 0
    busy = [(1 + (len(rates) - 2) * part) / rate for part, rate in zip(parts, rates, strict=True)]
    owning = [each for each, part in zip(busy, parts, strict=True) if part > 0]
    assert max(owning) - min(owning) < 1e-6 * max(owning)
    assert all(
        each >= min(owning) * (1 - 1e-9)
        for each, part in zip(busy, parts, strict=True)
        if part == 0
    )


def test_a_slow_link_has_less_to_carry() -> None:
    rates = [1e8, 1e8, 1e8, 1e7]
    network = ScheduleNetwork(
        range(4), LinkSpeed(0, 1e10), LinkSpeed(0, 1e8), [LinkSpeed(0, rate) for rate in rates]
    )
    priced = {
        schedule.name: s.predict_seconds(schedule, 10**7, network)
        for schedule in (s.build_uneven(rates), s.build_ring(4), s.build_owners(4))
    }
    assert math.isclose(priced["ring"], 1.5) and math.isclose(priced["owners"], 1.5)
    # 10 MB at 10 MB/s, and a piece more for the way back
    assert math.isclose(priced["uneven"], 1 + 1 / s.PIECES)
    sent = [
        sum(
            1e7 * schedule.chunks[m.chunk] for moves in schedule.rounds for m in moves if m.src == 3
        )
        for schedule in (s.build_uneven(rates), s.build_ring(4))
    ]
    assert math.isclose(sent[0], 1e7) and math.isclose(sent[1], 1.5e7)
    with pytest.raises(UsageError, match="one above 0 for each of the 4 hosts"):
        s.build_schedule("uneven", [0, 1, 2, 3], [1.0, 1.0])


def test_the_picture() -> None:
    assert s.draw_schedule(s.build_ring(3)).splitlines()[3:] == [
        "       | round 0 | round 1 | round 2 | round 3",
        "rank 0 | 0 +> 1  | 2 +> 1  | 1 -> 1  | 0 -> 1",
        "rank 1 | 1 +> 2  | 0 +> 2  | 2 -> 2  | 1 -> 2",
        "rank 2 | 2 +> 0  | 1 +> 0  | 0 -> 0  | 2 -> 0",
    ]
    assert "0-1 +> 2" in s.draw_schedule(
        s.build_hierarchical([0, 0, 1, 0])
    ) or "0-1 +> 0" in s.draw_schedule(s.build_hierarchical([0, 0, 1, 0]))
    assert (
        s.draw_schedule(s.build_ring(1)).startswith("ring: 1 rank, 1 chunk, 0 rounds")
        and s.draw_schedule(s.build_direct(2)).count("+>") == 3
    )


def test_unknown_names_raise() -> None:
    with pytest.raises(UsageError, match=r"'star'.*ring"):
        s.build_schedule("star", [0, 0])
    with pytest.raises(UsageError, match="at least one"):
        s.build_schedule("ring", [])

from __future__ import annotations

from paceline.comm.waitgraph import (
    RankWait,
    describe_late,
    find_missing,
    find_stuck,
    make_stuck_error,
)


def test_ranks_behind_and_ranks_that_do_not_wait_are_missing() -> None:
    mine = RankWait("data", 3, "all_reduce", {"data": 4})
    others = {
        1: RankWait("data", 3, "all_reduce", {"data": 4}),
        2: RankWait("agree", 0, "agree", {"data": 3, "agree": 1}),
    }
    assert find_missing(mine, others, 0, 4) == (2, 3)
    assert find_missing(RankWait("exchange", 9, "ring", {}), others, 0, 3) == (1, 2)


def test_a_circle_is_found_and_only_a_circle() -> None:
    one = RankWait("agree", 5, "agree", {"agree": 6, "data": 7})
    other = RankWait("data", 7, "all_reduce", {"agree": 5, "data": 8})
    assert find_stuck({0: one, 1: other}) == {0: one, 1: other}
    assert "rank 4 at agree; rank 6 at all_reduce" in str(
        make_stuck_error({0: one, 1: other}, [4, 6])
    )
    late_one = other._replace(made={"agree": 6, "data": 8})  # has been at the agreement: only slow
    assert find_stuck({0: one, 1: late_one}) == {}
    assert find_stuck({0: one}) == {}
    # both at the same call: a third one is missing
    assert find_stuck({0: one, 1: one}) == {}
    # a rank that waits for the circle is in no circle, but never gets out either
    third = RankWait("agree", 5, "agree", {"agree": 6, "data": 7})
    assert set(find_stuck({0: one, 1: other, 2: third})) == {0, 1, 2}


def test_messages_prove_nothing_by_their_number() -> None:
    one = RankWait("agree", 5, "agree", {"agree": 6, "exchange": 2})
    other = RankWait("exchange", 7, "ring", {"agree": 5, "exchange": 8})
    assert find_stuck({0: one, 1: other}) == {}


def test_the_message_says_where_the_missing_ranks_are() -> None:
    text = describe_late(
        "all_reduce of 'w'", 30.04, {2: None, 5: RankWait("agree", 1, "agree", {})}
    )
    assert text == (
        "all_reduce of 'w': 30.0 s have passed and ranks [2, 5] are missing (rank 2 is in no "
        "call; rank 5 is at agree)"
    )

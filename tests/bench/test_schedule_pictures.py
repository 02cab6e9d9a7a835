"""What `paceline bench collectives --draw` prints, and what it refuses."""

from __future__ import annotations

import pytest

from paceline.bench.schedule_pictures import draw_picture, parse_hosts
from paceline.comm.schedule import SCHEDULES
from paceline.errors import UsageError


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn(name: str) -> None:
    drawn = draw_picture(f"{name}:5")
    assert name in drawn and all(f"rank {rank}" in drawn for rank in range(5))


def test_hosts() -> None:
    assert parse_hosts("2+3", "") == [0, 0, 1, 1, 1]
    assert parse_hosts("4", "") == [0] * 4
    assert draw_picture("hierarchical:2+2") != draw_picture("hierarchical:4")


@pytest.mark.parametrize(
    "wrong",
    ["ring", "ring:", "ring:0", "ring:-1", "ring:x", "ring:65", "ring:40+40", "ring:2+", "ring:²"],
)
def test_numbers_that_make_no_sense(wrong: str) -> None:
    with pytest.raises(UsageError, match="after the colon goes the number of workers"):
        draw_picture(wrong)


def test_speeds_of_links() -> None:
    drawn = draw_picture("uneven:1+1+1@4,4,1")
    assert "+> 2" not in drawn and "-> 2" in drawn, "the slow one owns nothing"
    with pytest.raises(UsageError, match="behind the @ go the speeds"):
        draw_picture("uneven:1+1@4,x")
    with pytest.raises(UsageError, match="one above 0 for each of the 2 hosts"):
        draw_picture("uneven:1+1@4")


def test_unknown_schedule() -> None:
    with pytest.raises(
        UsageError, match=r"rnig is not a schedule; possible: .*; did you mean ring\?"
    ):
        draw_picture("rnig:5")

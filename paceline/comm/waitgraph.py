"""The wait-for graph of ranks: finds missing ranks, and ranks that wait for each other.

A waiting rank publishes the channel of its call, the number of the call on that channel, the call
as text, and the number of calls it has made on each channel. Rank r waits for rank q if q has not
made r's call yet. Ranks that wait for each other in a circle have come apart.

    rank 0: in agree 5   (calls made: agree 6, data 7)    0 waits for 1: it has made only 5 agree
    rank 1: in data 7    (calls made: agree 5, data 8)    1 waits for 0: it has made only 7 data
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.comm.fingerprint import describe_sides
from paceline.errors import Mismatch

LOOSE = "exchange"  # channel whose calls may come in any order, so their numbers prove nothing
GRACE = 1.0  # seconds of a wait before it is looked into


class RankWait(NamedTuple):
    """The call in which a rank waits, and the number of calls it has made on each channel."""

    channel: str
    number: int  # of the call on its channel
    text: str  # the call in words
    made: Mapping[str, int]


def find_missing(
    wait: RankWait, waits: Mapping[int, RankWait], rank: int, size: int
) -> tuple[int, ...]:
    """List the ranks that have not come to the call of `rank`.

    A rank is missing if it is behind, or if it waits nowhere.

    Args:
        wait: The call of `rank`.
        waits: The calls of other ranks that wait.
        rank: This rank.
        size: Number of ranks.
    """
    others = (other for other in range(size) if other != rank)
    return tuple(other for other in others if other not in waits or _is_behind(waits[other], wait))


def find_stuck(waits: Mapping[int, RankWait]) -> dict[int, RankWait]:
    """Find the waits that can never end, as their ranks wait for each other. May be empty."""
    stuck = {rank: wait for rank, wait in waits.items() if wait.channel != LOOSE}
    # Drop ranks that wait for no rank in the set, until none can be dropped: a circle is left.
    while True:
        waiting = {
            rank: wait
            for rank, wait in stuck.items()
            if any(_is_behind(other, wait) for q, other in stuck.items() if q != rank)
        }
        if len(waiting) == len(stuck):
            return waiting
        stuck = waiting


def make_stuck_error(stuck: Mapping[int, RankWait], names: Sequence[int]) -> Mismatch:
    """Make the error of ranks that have come apart."""
    texts = [stuck[rank].text if rank in stuck else "" for rank in range(max(stuck) + 1)]
    return Mismatch(
        f"workers have come apart: {describe_sides(texts, names)}. "
        "Every worker has to make the same collective calls in the same order"
    )


def describe_late(what: str, seconds: float, absent: Mapping[int, RankWait | None]) -> str:
    """Write the message of a deadline that has passed. `absent`: the calls of missing ranks."""
    places = "; ".join(
        f"rank {rank} is {'in no call' if wait is None else f'at {wait.text}'}"
        for rank, wait in absent.items()
    )
    return f"{what}: {seconds:.1f} s have passed and ranks {list(absent)} are missing ({places})"


def _is_behind(other: RankWait, wait: RankWait) -> bool:
    if wait.channel == LOOSE:
        return other.channel != LOOSE
    return other.made.get(wait.channel, 0) <= wait.number

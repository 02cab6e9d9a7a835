"""The wait-for graph of ranks: finds the ranks that are missing, and deadlocks of ranks that wait
for each other.

A rank that waits posts where: the channel, the number of the call on it, the call as text, and how
many calls it has made on each channel. Rank r waits for rank q when q has not made r's call yet;
ranks that wait for each other in a circle have come apart.

    rank 0: in agree 5   (calls made: agree 6, data 7)      0 waits for 1: 1 has made only 5 agrees
    rank 1: in data 7    (calls made: agree 5, data 8)      1 waits for 0: 0 has made only 7 data
                                                            calls       -> apart
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.comm.fingerprint import sides
from paceline.errors import Mismatch

# the channel whose calls need not be made in the same order: their numbers prove nothing
LOOSE = "exchange"
GRACE = 1.0  # seconds that a wait may last before it is looked into


class RankWait(NamedTuple):
    """Where a rank waits, and how many calls it has made on each channel."""

    channel: str
    number: int
    text: str
    made: Mapping[str, int]


def missing(wait: RankWait, waits: Mapping[int, RankWait], rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks that have not come to `wait` of `rank`: those that are behind, or that
    are not waiting anywhere.
    """
    others = (other for other in range(size) if other != rank)
    return tuple(other for other in others if other not in waits or _behind(waits[other], wait))


def apart(waits: Mapping[int, RankWait]) -> dict[int, RankWait]:
    """Return the waits that can never end, as their ranks wait for each other; empty when there
    are none.
    """
    stuck = {rank: wait for rank, wait in waits.items() if wait.channel != LOOSE}
    while True:
        left = {
            rank: wait
            for rank, wait in stuck.items()
            if any(_behind(other, wait) for q, other in stuck.items() if q != rank)
        }
        if len(left) == len(stuck):
            return left
        stuck = left


def describe(stuck: Mapping[int, RankWait], names: Sequence[int]) -> Mismatch:
    """Return the error that ranks which have come apart raise."""
    texts = [stuck[rank].text if rank in stuck else "" for rank in range(max(stuck) + 1)]
    return Mismatch(
        f"workers have come apart: {sides(texts, names)}. Every worker has to make the same "
        "collective calls in the same order"
    )


def late(what: str, seconds: float, absent: Mapping[int, RankWait | None]) -> str:
    """Return the message of a deadline that has passed; `absent`: where the ranks are that are
    missing.
    """
    places = "; ".join(
        f"rank {rank} is {'in no call' if wait is None else f'at {wait.text}'}"
        for rank, wait in absent.items()
    )
    return f"{what}: {seconds:.1f} s have passed and ranks {list(absent)} are missing ({places})"


def _behind(other: RankWait, wait: RankWait) -> bool:
    if wait.channel == LOOSE:
        return other.channel != LOOSE
    return other.made.get(wait.channel, 0) <= wait.number

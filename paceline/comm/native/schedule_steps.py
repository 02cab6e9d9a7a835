"""One rank's part of a schedule, as steps that C runs: see native/schedule.h.

schedule (`schedule.py`)       moves of chunks between ranks, round by round
messages (`plan_rounds`)       moves between two ranks joined, as elements of a tensor
steps (here)                   what one rank sends, receives and adds in each round
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from paceline.comm.collectives import ChunkMessage, chunk_edges, plan_rounds
from paceline.comm.schedule import Schedule

SEND, RECEIVE, REPLACE, ADD, TERM, END = range(6)  # kinds of steps
OWN = -1  # the term that is a rank's own part


class Step(NamedTuple):
    """A step: `pl_step` of native/schedule.h."""

    kind: int
    link: int = 0
    message: int = 0
    a: int = 0
    b: int = 0
    n: int = 0


class RankSteps(NamedTuple):
    """The steps of one rank.

    array: The steps, as C reads them.
    n_steps: Number of steps.
    sent: Rank and number of elements of each message that this rank sends.
    adds_at_once: Whether every sum has the parts of all ranks as its terms. Then a sum is complete
        when it has been added, and rounds once.
    rounds: Number of rounds.
    """

    array: Any
    n_steps: int
    sent: tuple[tuple[int, int], ...]
    adds_at_once: bool
    rounds: int


@lru_cache(maxsize=256)
def compile_steps(schedule: Schedule, rank: int, numel: int, links: tuple[int, ...]) -> RankSteps:
    """Compile the steps of `rank` in an all-reduce of `numel` elements. Cached.

    `links`: number of the link to each rank.
    """
    rounds = plan_rounds(schedule)
    steps = list(list_steps(schedule, rank, numel, links))
    sent = [
        (message.dst, _count_elements(message, chunk_edges(schedule.chunks, numel)))
        for messages, _ in rounds
        for message in messages
        if message.src == rank
    ]
    values = [value for step in steps for value in step]
    return RankSteps(
        (ctypes.c_int64 * len(values))(*values),
        len(steps),
        tuple(sent),
        all(_adds_at_once(messages, schedule.size) for messages, _ in rounds),
        len(rounds),
    )


def list_steps(schedule: Schedule, rank: int, numel: int, links: Sequence[int]) -> Iterator[Step]:
    """Yield the steps of `rank`, round by round. Arguments: see `compile_steps`."""
    edges = chunk_edges(schedule.chunks, numel)
    number = 0  # of the round's first message: all ranks count all messages, so that numbers agree
    for messages, _ in plan_rounds(schedule):
        numbered = [
            (number + index, message)
            for index, message in enumerate(messages)
            if _count_elements(message, edges)
        ]
        number += len(messages)
        leaving = [message for _, message in numbered if message.src == rank]
        coming = [(index, message) for index, message in numbered if message.dst == rank]
        for index, message in numbered:
            if message.src == rank:
                begin, end = edges[message.start], edges[message.stop]
                yield Step(SEND, links[message.dst], index, begin, end)
        for index, message in coming:
            begin, end = edges[message.start], edges[message.stop]
            if message.add:
                yield Step(RECEIVE, links[message.src], index, begin, end)
            else:
                # In place at once, unless what is there leaves in the same round.
                leaves = any(m.start < message.stop and message.start < m.stop for m in leaving)
                yield Step(REPLACE, links[message.src], index, begin, end, not leaves)
        yield from _list_sums([message for _, message in coming], edges, rank, len(leaving))
        yield Step(END)


def _list_sums(
    coming: Sequence[ChunkMessage], edges: Sequence[int], rank: int, first: int
) -> Iterator[Step]:
    """Yield the sums of a round: each chunk's own part and the parts received, in rank order.

    `first`: the step of the round that receives the first message of `coming`.
    """
    terms: dict[int, list[tuple[int, Step]]] = {}
    for place, message in enumerate(coming):
        for chunk in range(message.start, message.stop) if message.add else ():
            offset = edges[chunk] - edges[message.start]
            terms.setdefault(chunk, []).append((message.src, Step(TERM, a=offset, n=first + place)))
    for chunk, received in terms.items():
        if edges[chunk + 1] > edges[chunk]:
            ordered = sorted([*received, (rank, Step(TERM, n=OWN))])
            yield Step(ADD, a=edges[chunk], b=edges[chunk + 1], n=len(ordered))
            yield from (term for _, term in ordered)


def _count_elements(message: ChunkMessage, edges: Sequence[int]) -> int:
    return edges[message.stop] - edges[message.start]


def _adds_at_once(messages: Sequence[ChunkMessage], size: int) -> bool:
    """Whether a rank that adds in this round adds the parts of all ranks to a chunk."""
    parts: dict[tuple[int, int], int] = {}
    for message in messages:
        for chunk in range(message.start, message.stop) if message.add else ():
            parts[message.dst, chunk] = parts.get((message.dst, chunk), 0) + 1
    return all(count == size - 1 for count in parts.values())

"""Point-to-point messages through shared memory: each rank writes its stream in windows, and each
receiver copies its stretches out.

    rank 0 sends    | to 1 ..... | to 2 ....... | to all ..... |
    windows         |    0    |    1    |    2    |    3    |

A window is a stage; they are written two ahead of those that are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import Any, NamedTuple

from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.shm.reductions import DEPTH, flow
from paceline.comm.shm.segment import ControlSegment, Steps

ALL = -1  # a message to all ranks
Landing = Sequence[tuple[int, Tensor]]


class WindowMessage(NamedTuple):
    """A message to send: `x` is contiguous, and stays alive with this object."""

    to: int
    x: Tensor

    @property
    def nbytes(self) -> int:
        return self.x.numel() * self.x.element_size()


class MessageStretch(NamedTuple):
    """A part of a message in one window: the stage it lies in, where in it, where in memory, how
    long.
    """

    rank: int
    offset: int
    address: int
    nbytes: int


def deliver(
    segment: ControlSegment,
    outgoing: Sequence[WindowMessage],
    call: CallFingerprint,
    meta: Any,
    land: Callable[[list[Any]], Landing],
) -> Steps:
    """Meet, move all messages, and give the result of `land`.

    `land` is called with every rank's `meta`, and says where what comes in goes: (from, contiguous
    tensor), in the order in which each rank sends.
    """
    departures: dict[int, list[MessageStretch]] = {}
    at = 0
    for message in outgoing:
        _cut(
            departures,
            segment.block,
            MessageStretch(segment.rank, at, message.x.data_ptr(), message.nbytes),
        )
        at += message.nbytes

    def write(window: int) -> None:
        for stretch in departures.get(window, ()):
            memmove(
                segment.stage_at(segment.rank, segment.turn + window) + stretch.offset,
                stretch.address,
                stretch.nbytes,
            )

    for window in range(DEPTH):
        write(window)
    metas = yield from segment.meet(
        call, [[[message.to, message.nbytes] for message in outgoing], meta]
    )
    sent = [messages for messages, _ in metas]
    incoming = land([other for _, other in metas])
    arrivals = _arrivals(segment, incoming, sent)

    def read(window: int) -> None:
        for stretch in arrivals.get(window, ()):
            memmove(
                stretch.address,
                segment.stage_at(stretch.rank, segment.turn + window) + stretch.offset,
                stretch.nbytes,
            )

    longest = max(sum(nbytes for _, nbytes in messages) for messages in sent)
    yield from flow(segment, -(-longest // segment.block), write, read)
    return incoming


def _arrivals(
    segment: ControlSegment, incoming: Landing, sent: Sequence[Any]
) -> dict[int, list[MessageStretch]]:
    expected: dict[int, deque[Tensor]] = {}
    for source, tensor in incoming:
        expected.setdefault(source, deque()).append(tensor)
    cuts: dict[int, list[MessageStretch]] = {}
    for source, messages in enumerate(sent):
        at = 0
        for to, nbytes in messages:
            if to == segment.rank or (to == ALL and source != segment.rank):
                into = expected[source].popleft()
                assert into.numel() * into.element_size() == nbytes, (
                    "what is awaited has been compared with what is sent"
                )
                _cut(cuts, segment.block, MessageStretch(source, at, into.data_ptr(), nbytes))
            at += nbytes
    return cuts


def _cut(cuts: dict[int, list[MessageStretch]], width: int, whole: MessageStretch) -> None:
    """Cut a stretch of a rank's stream, in which its offset counts, into those of each window."""
    rank, at, address, nbytes = whole
    done = 0
    while done < nbytes:
        window, offset = divmod(at + done, width)
        length = min(nbytes - done, width - offset)
        cuts.setdefault(window, []).append(MessageStretch(rank, offset, address + done, length))
        done += length


def plain(x: Tensor) -> bool:
    """Whether the bytes of `x`, as they lie, are its values."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def flat(x: Tensor) -> Tensor:
    """Return the values of `x` in one stretch, 1-D: its own memory where they lie so."""
    return (
        x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if not plain(x)
        else x.detach().view(-1)
    )

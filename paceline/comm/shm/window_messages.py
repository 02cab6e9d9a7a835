"""Messages through shared memory: a rank writes a stream in windows, receivers copy their parts.

    rank 0 sends    | to 1 ..... | to 2 ....... | to all ..... |
    windows         |    0    |    1    |    2    |    3    |

A window is one stage. A rank writes two windows ahead of the one that is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import Any, NamedTuple

from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.shm.segment import ControlSegment, Steps
from paceline.comm.shm.shared_reductions import DEPTH, run_phases

ALL = -1  # receiver of a message to all ranks
Landing = Sequence[tuple[int, Tensor]]  # for each message to come: its sender, and where it goes


class WindowMessage(NamedTuple):
    """A message to send. `x` is contiguous, and stays alive with this object."""

    to: int
    x: Tensor

    @property
    def nbytes(self) -> int:
        return self.x.numel() * self.x.element_size()


class MessageStretch(NamedTuple):
    """A part of a message in one window."""

    rank: int  # of the sender, whose stage it lies in
    offset: int  # in the stage, bytes
    address: int  # in private memory
    nbytes: int


def deliver_messages(
    segment: ControlSegment,
    outgoing: Sequence[WindowMessage],
    call: CallFingerprint,
    meta: Any,
    land: Callable[[list[Any]], Landing],
) -> Steps:
    """Meet, move all messages, and return the result of `land`.

    Args:
        segment: The group's memory.
        outgoing: Messages of this rank.
        call: The call, which is compared.
        meta: Facts of this rank that the others need to receive.
        land: Gets every rank's `meta`. It returns the sender and the contiguous tensor to fill of
            each message to this rank, in the order in which each sender sends.
    """
    # Cut this rank's stream into windows: it is all messages, one after another.
    departures: dict[int, list[MessageStretch]] = {}
    at = 0
    for message in outgoing:
        _cut_stretch(
            departures,
            segment.block,
            MessageStretch(segment.rank, at, message.x.data_ptr(), message.nbytes),
        )
        at += message.nbytes

    def write(window: int) -> None:
        for stretch in departures.get(window, ()):
            memmove(
                segment.stage_address(segment.rank, segment.turn + window) + stretch.offset,
                stretch.address,
                stretch.nbytes,
            )

    # The first windows are written before ranks meet, so that the meeting makes them visible.
    for window in range(DEPTH):
        write(window)
    metas = yield from segment.meet(
        call, [[[message.to, message.nbytes] for message in outgoing], meta]
    )
    lists = [messages for messages, _ in metas]
    incoming = land([rank_meta for _, rank_meta in metas])
    arrivals = _plan_arrivals(segment, incoming, lists)

    def read(window: int) -> None:
        for stretch in arrivals.get(window, ()):
            memmove(
                stretch.address,
                segment.stage_address(stretch.rank, segment.turn + window) + stretch.offset,
                stretch.nbytes,
            )

    longest = max(sum(nbytes for _, nbytes in messages) for messages in lists)
    yield from run_phases(segment, -(-longest // segment.block), write, read)
    return incoming


def _plan_arrivals(
    segment: ControlSegment, incoming: Landing, sent: Sequence[Any]
) -> dict[int, list[MessageStretch]]:
    """List the stretches to read in each window. `sent`: each rank's (receiver, bytes)."""
    expected: dict[int, deque[Tensor]] = {}
    for source, tensor in incoming:
        expected.setdefault(source, deque()).append(tensor)
    cuts: dict[int, list[MessageStretch]] = {}
    for source, messages in enumerate(sent):
        at = 0
        # Walk through the sender's whole stream, as messages to others take room in its windows.
        for to, nbytes in messages:
            if to == segment.rank or (to == ALL and source != segment.rank):
                into = expected[source].popleft()
                assert into.numel() * into.element_size() == nbytes, (
                    "a receive of another size than its send"
                )
                _cut_stretch(
                    cuts, segment.block, MessageStretch(source, at, into.data_ptr(), nbytes)
                )
            at += nbytes
    return cuts


def _cut_stretch(cuts: dict[int, list[MessageStretch]], width: int, whole: MessageStretch) -> None:
    """Cut a stretch of a rank's stream, whose offset counts from the stream's begin, by windows."""
    rank, at, address, nbytes = whole
    done = 0
    while done < nbytes:
        window, offset = divmod(at + done, width)
        length = min(nbytes - done, width - offset)
        cuts.setdefault(window, []).append(MessageStretch(rank, offset, address + done, length))
        done += length


def is_plain(x: Tensor) -> bool:
    """Whether the bytes of `x`, in their order, are its values."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def flatten_values(x: Tensor) -> Tensor:
    """View `x` as one dim; a copy if its bytes in their order are not its values."""
    return (
        x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if not is_plain(x)
        else x.detach().view(-1)
    )

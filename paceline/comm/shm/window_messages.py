"""Messages through shared memory: a rank writes a stream in windows, receivers copy their parts.

    rank 0 sends    | to 1 ..... | to 2 ....... | to all ..... |
    windows         |    0    |    1    |    2    |    3    |

Each window goes through one stage. A rank writes up to two windows ahead of the one that is read. C
copies the messages (native/operations.c).
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.shm.segment import ControlSegment, Steps
from paceline.comm.shm.shared_reductions import advance_to_end
from paceline.native.functions import address_of, load_functions

ALL = -1  # receiver of a message to all ranks
Landing = Sequence[tuple[int, Tensor]]  # for each message to come: its sender, and where it goes


class WindowMessage(NamedTuple):
    """A message to send. `x` is contiguous, and stays alive with this object."""

    to: int
    x: Tensor

    @property
    def nbytes(self) -> int:
        return self.x.numel() * self.x.element_size()


class MessageStretch(ctypes.Structure):
    """A part of a message in one window: `pl_stretch` of native/operations.h.

    `rank` is the sender. The part lies in its stage at byte `offset`, and in private memory at
    `address`.
    """

    _fields_ = [
        ("window", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("address", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
    ]


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
    native = load_functions()
    # Cut this rank's stream into windows: it is all messages, one after another.
    stretches: list[MessageStretch] = []
    at = 0
    for message in outgoing:
        address, nbytes = message.x.data_ptr(), message.nbytes
        stretches += _cut_stretch(segment.block, segment.rank, at, address, nbytes)
        at += nbytes
    departures = (MessageStretch * len(stretches))(*stretches)
    # The first windows are written before ranks meet, so that the meeting makes them visible.
    native.begin_messages(
        segment.operation, segment.pointer, address_of(departures), len(departures)
    )
    metas = yield from segment.meet(
        call, [[[message.to, message.nbytes] for message in outgoing], meta]
    )
    lists = [messages for messages, _ in metas]
    incoming = land([rank_meta for _, rank_meta in metas])
    stretches = _plan_arrivals(segment, incoming, lists)
    arrivals = (MessageStretch * len(stretches))(*stretches)
    longest = max(sum(nbytes for _, nbytes in messages) for messages in lists)
    native.set_arrivals(
        segment.operation, address_of(arrivals), len(arrivals), -(-longest // segment.block)
    )
    yield from advance_to_end(segment)
    return incoming


def _plan_arrivals(
    segment: ControlSegment, incoming: Landing, sent: Sequence[Any]
) -> list[MessageStretch]:
    """List the stretches to read, by window. `sent`: each rank's (receiver, bytes)."""
    expected: dict[int, deque[Tensor]] = {}
    for source, tensor in incoming:
        expected.setdefault(source, deque()).append(tensor)
    stretches: list[MessageStretch] = []
    for source, messages in enumerate(sent):
        at = 0
        # Walk through the sender's whole stream, as messages to others take room in its windows.
        for to, nbytes in messages:
            if to == segment.rank or (to == ALL and source != segment.rank):
                into = expected[source].popleft()
                assert into.numel() * into.element_size() == nbytes, (
                    "a receive of another size than its send"
                )
                stretches += _cut_stretch(segment.block, source, at, into.data_ptr(), nbytes)
            at += nbytes
    return sorted(stretches, key=attrgetter("window"))


def _cut_stretch(
    width: int, rank: int, at: int, address: int, nbytes: int
) -> Iterator[MessageStretch]:
    """Cut a part of a rank's stream, which begins at byte `at`, by windows."""
    done = 0
    while done < nbytes:
        window, offset = divmod(at + done, width)
        length = min(nbytes - done, width - offset)
        yield MessageStretch(window, rank, offset, address + done, length)
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

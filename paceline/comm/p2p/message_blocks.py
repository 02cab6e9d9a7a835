"""Memory on one host in which messages lie: the sender copies them in, the receiver reads them.

segment   | block 0                             | block 1 ...
          | use | header | tensor | tensor |    |
             ^
             written by the receiver: the use of the block that is over

A sender counts the uses of each block, and sends the count with the message. Once no tensor of the
receiver lies in the block any more, the receiver writes that count into it. If the two are equal,
the sender may use the block again. Only one side writes each number, so there is no lock.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.comm.p2p.lent_memory import (
    COPIED,
    LINE,
    block_size,
    lay_out_tensors,
    lend_buffer,
    view_tensor,
)
from paceline.comm.p2p.pair_message import PairMessage, unpack_header
from paceline.comm.p2p.ring import RingEntry
from paceline.comm.shm.shared_segment import SharedSegment
from paceline.comm.shm.window_messages import is_plain
from paceline.native.functions import load_functions

SLAB = 1 << 20  # bytes of a segment of small blocks
TRIES = 8  # used blocks that are looked at before another one is made


@dataclass
class MessageBlock:
    """Room for one message at a time."""

    segment: SharedSegment
    segment_number: int  # of the segment among its sender's
    offset: int  # byte of the segment at which the block begins
    uses: int = 0


class BlockPool:
    """The blocks of one sender for one receiver. `make` makes a segment of a number of bytes."""

    def __init__(self, make: Callable[[int], SharedSegment]) -> None:
        self._make = make
        self._free: defaultdict[int, list[MessageBlock]] = defaultdict(list)  # by size
        # By size, the oldest use first.
        self._used: defaultdict[int, deque[MessageBlock]] = defaultdict(deque)
        self._segments: list[SharedSegment] = []
        self._untold: set[int] = set()  # segments whose address the receiver has not got yet

    def write_message(self, header: bytes, tensors: Sequence[Tensor]) -> RingEntry:
        """Copy a message into a block, and return the entry that leads to it."""
        places, total = lay_out_tensors(
            LINE + len(header), [x.numel() * x.element_size() for x in tensors]
        )
        block = self._take_block(total)
        ctypes.memmove(block.segment.start + block.offset + LINE, header, len(header))
        for x, at in zip(tensors, places, strict=True):
            _copy_tensor(block.segment, block.offset + at, x.detach())
        segment = block.segment
        address = segment.address if block.segment_number in self._untold else ""
        return RingEntry(
            block.segment_number, segment.nbytes, block.offset, block.uses, len(header), address
        )

    def mark_told(self, entry: RingEntry) -> None:
        """Note that an entry has been posted, and with it the address of its segment."""
        self._untold.discard(entry.segment)

    def _take_block(self, nbytes: int) -> MessageBlock:
        wanted = block_size(nbytes)
        # A somewhat larger block will do, if one is free.
        for size in (wanted, *(other for other in self._used if wanted < other <= 2 * wanted)):
            self._reclaim_blocks(size)
            if self._free[size]:
                return self._use_block(self._free[size].pop(), size)
        self._add_segment(wanted)
        return self._use_block(self._free[wanted].pop(), wanted)

    def _use_block(self, block: MessageBlock, size: int) -> MessageBlock:
        block.uses += 1
        self._used[size].append(block)
        return block

    def _reclaim_blocks(self, size: int) -> None:
        """Free blocks that the receiver has left. The oldest uses come first."""
        used = self._used[size]
        for _ in range(min(TRIES, len(used))):
            block = used.popleft()
            if load_functions().load(block.segment.start + block.offset) == block.uses:
                block.segment.seal()  # the receiver has mapped it
                self._free[size].append(block)
            else:
                used.append(block)

    def _add_segment(self, size: int) -> None:
        # Small blocks are made many at a time: mapping a segment costs more than a small message.
        count = max(1, SLAB // size)
        segment = self._make(count * size)
        number = len(self._segments)
        self._segments.append(segment)
        self._untold.add(number)
        self._free[size] += [
            MessageBlock(segment, number, at * size) for at in reversed(range(count))
        ]

    def close(self) -> None:
        """Close the descriptors: the receiver has mapped the segments, or never will."""
        for segment in self._segments:
            segment.seal()


def _copy_tensor(segment: SharedSegment, at: int, x: Tensor) -> None:
    nbytes = x.numel() * x.element_size()
    if x.device.type == "cpu" and is_plain(x):
        ctypes.memmove(segment.start + at, x.data_ptr(), nbytes)
    elif nbytes:
        segment.view_tensor(at, x.shape, x.dtype).copy_(x)


class MessageReader:
    """Reads messages from the blocks of one sender."""

    def __init__(self) -> None:
        self._segments: dict[int, SharedSegment] = {}

    def read_message(self, entry: RingEntry) -> tuple[int, PairMessage]:
        """Read the message that an entry leads to, and its lane.

        Large tensors stay where they are. They keep the block until they are gone.
        """
        if entry.address:
            segment = SharedSegment.open(entry.address, entry.nbytes, alone=True)
            self._segments[entry.segment] = segment
        segment = self._segments[entry.segment]
        start = segment.start + entry.offset
        header = unpack_header(ctypes.string_at(start + LINE, entry.header))
        layout = header.layout
        places, total = lay_out_tensors(LINE + entry.header, layout.lengths)
        memory = lend_buffer(
            start, block_size(total), _release_block, segment, entry.offset, entry.use
        )
        parts = zip(places, layout.lengths, layout.forms, strict=True)
        tensors = tuple(
            view_tensor(memory, at, length, *form, alone=total <= COPIED)
            for at, length, form in parts
        )
        return header.lane, PairMessage(header.head, tensors)


def _release_block(segment: SharedSegment, offset: int, use: int) -> None:
    """Tell the sender that a use of a block is over.

    `segment` is an argument so that it stays mapped until then.
    """
    # A store with release: what was read of the block was read before.
    load_functions().store(segment.start + offset, use)

"""Memory in which messages wait for their receiver, on one host: the sender copies a message in,
the receiver's tensors lie in it.

segment   | block 0                             | block 1 ...
          | use | header | tensor | tensor |    |
             ^
the receiver writes here which use of the block is over, once no tensor lies in it any more: then
the sender uses it again
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.comm.p2p.memory import capacity, lend, tensor
from paceline.comm.p2p.message import PairMessage, unpack
from paceline.comm.p2p.ring import RingEntry
from paceline.comm.shm.memory import SharedSegment
from paceline.comm.shm.messages import plain

LINE = 64  # bytes to which everything in a block is aligned
SLAB = 1 << 20  # bytes of a segment of small blocks
# bytes of a message up to which its tensors are copied out: they may be kept for long
COPIED = 1 << 14
TRIES = 8  # blocks in use that are looked at before another is made


@dataclass
class MessageBlock:
    """A place for one message at a time."""

    segment: SharedSegment
    number: int  # of the segment
    offset: int
    cells: memoryview  # of the segment, as int64
    uses: int = 0


class BlockPool:
    """The blocks of one sender for one receiver. `make` makes a segment of so many bytes."""

    def __init__(self, make: Callable[[int], SharedSegment]) -> None:
        self._make = make
        self._free: defaultdict[int, list[MessageBlock]] = defaultdict(list)
        self._used: defaultdict[int, deque[MessageBlock]] = defaultdict(deque)
        self._segments: list[SharedSegment] = []
        self._unknown: set[int] = set()  # segments that the receiver has not been told of

    def write(self, header: bytes, tensors: Sequence[Tensor]) -> RingEntry:
        """Copy a message into a block, and return where it lies."""
        places, total = _places(len(header), [x.numel() * x.element_size() for x in tensors])
        block = self._take(total)
        ctypes.memmove(block.segment.start + block.offset + LINE, header, len(header))
        for x, at in zip(tensors, places, strict=True):
            _copy(block.segment, block.offset + at, x.detach())
        segment = block.segment
        address = segment.address if block.number in self._unknown else ""
        return RingEntry(
            block.number, segment.nbytes, block.offset, block.uses, len(header), address
        )

    def told(self, entry: RingEntry) -> None:
        """Note that an entry is on its way, and with it the address of its segment."""
        self._unknown.discard(entry.segment)

    def _take(self, nbytes: int) -> MessageBlock:
        wanted = capacity(nbytes)
        for size in (wanted, *(other for other in self._used if wanted < other <= 2 * wanted)):
            self._reclaim(size)
            if self._free[size]:
                return self._use(self._free[size].pop(), size)
        self._grow(wanted)
        return self._use(self._free[wanted].pop(), wanted)

    def _use(self, block: MessageBlock, size: int) -> MessageBlock:
        block.uses += 1
        self._used[size].append(block)
        return block

    def _reclaim(self, size: int) -> None:
        """Find blocks that the receiver has done with, from the one that is used for the longest
        on.
        """
        used = self._used[size]
        for _ in range(min(TRIES, len(used))):
            block = used.popleft()
            if block.cells[block.offset // 8] == block.uses:
                block.segment.seal()  # the receiver has mapped it
                self._free[size].append(block)
            else:
                used.append(block)

    def _grow(self, size: int) -> None:
        count = max(1, SLAB // size)
        segment = self._make(count * size)
        number = len(self._segments)
        self._segments.append(segment)
        self._unknown.add(number)
        cells = segment.cells().cast("q")
        self._free[size] += [
            MessageBlock(segment, number, at * size, cells) for at in reversed(range(count))
        ]

    def close(self) -> None:
        """Let go of the descriptors: the receiver has mapped the segments, or never will."""
        for segment in self._segments:
            segment.seal()


def _places(header: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the byte of a block at which each tensor begins, and the bytes of all."""
    places, at = [], LINE + header
    for length in lengths:
        at = -(-at // LINE) * LINE
        places.append(at)
        at += length
    return places, at


def _copy(segment: SharedSegment, at: int, x: Tensor) -> None:
    nbytes = x.numel() * x.element_size()
    if x.device.type == "cpu" and plain(x):
        ctypes.memmove(segment.start + at, x.data_ptr(), nbytes)
    elif nbytes:
        segment.tensor(at, x.shape, x.dtype).copy_(x)


class MessageReader:
    """The receiver's view of the blocks of one sender."""

    def __init__(self) -> None:
        self._segments: dict[int, tuple[SharedSegment, memoryview]] = {}

    def read(self, entry: RingEntry) -> tuple[int, PairMessage]:
        """Return the lane and the message that an entry tells of; its tensors lie where the
        sender has put them, if they are large.
        """
        if entry.address:
            segment = SharedSegment.open(entry.address, entry.nbytes, alone=True)
            self._segments[entry.segment] = segment, segment.cells().cast("q")
        segment, cells = self._segments[entry.segment]
        start = segment.start + entry.offset
        header = unpack(ctypes.string_at(start + LINE, entry.header))
        layout = header.layout
        places, total = _places(entry.header, layout.lengths)
        memory = lend(
            start, capacity(total), _release, segment, cells, entry.offset // 8, entry.use
        )
        parts = zip(places, layout.lengths, layout.forms, strict=True)
        tensors = tuple(
            tensor(memory, at, length, *form, alone=total <= COPIED) for at, length, form in parts
        )
        return header.lane, PairMessage(header.head, tensors)


def _release(segment: SharedSegment, cells: memoryview, at: int, use: int) -> None:
    """Tell the sender that a use of a block is over.

    The segment is an argument as it has to be mapped until then.
    """
    cells[at] = use

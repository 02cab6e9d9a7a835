"""A queue of short entries in shared memory, from one process to another: it grows, so that posting
never waits.

the pair's cells    | posted | taken | address of the first ring |         posted is written by one
                    side, taken by the other
ring                | 0 | 1 | 2 | ... | 63 |                               entry k lies at (k -
                    start) % capacity
                                   | moved: address of a larger ring |     once nearly full: the next entries lie there
"""  # noqa: E501

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from paceline.comm.shm import futex
from paceline.comm.shm.memory import SharedSegment

CELLS = 512  # bytes of the cells of one pair
POSTED, TAKEN, FIRST = 0, 64, 128  # where they lie; a cache line each
CAPACITY = 64  # entries of the first ring
MOVED = -1  # the segment number of the entry that leads to the next ring
_LAYOUT = struct.Struct("<5q200s")
_ENTRY = 256  # bytes


class RingEntry(NamedTuple):
    """Where a message lies: in which segment of its sender, at which byte; the `use` of that place;
    the length of its header.

    `address` says where a segment of `nbytes` is found, when it is told of for the first time; else
    it is empty.
    """

    segment: int
    nbytes: int
    offset: int
    use: int
    header: int
    address: str = ""


class RingWriter:
    """The end of one pair at which entries are posted.

    `table` has the pair's cells from byte `at` on; `make` makes a segment.
    """

    def __init__(self, table: SharedSegment, at: int, make: Callable[[int], SharedSegment]) -> None:
        self._bytes = table.cells()
        self._cells = self._bytes.cast("q")
        self._at, self._word, self._make = at, table.start + at, make
        self._posted = self._start = 0
        self._ring: SharedSegment | None = None
        self._old: list[SharedSegment] = []
        self._view = self._bytes
        self._capacity = CAPACITY

    @property
    def pending(self) -> bool:
        """Whether entries wait to be taken."""
        return self._posted > self._cells[(self._at + TAKEN) // 8]

    def post(self, entry: RingEntry) -> None:
        """Append an entry, and wake the other side."""
        taken = self._cells[(self._at + TAKEN) // 8]
        if self._ring is None:
            self._ring = self._open(CAPACITY)
            address = self._ring.address.encode()
            self._bytes[self._at + FIRST + 8 : self._at + FIRST + 8 + len(address)] = address
            self._cells[(self._at + FIRST) // 8] = len(address)
        elif self._posted - max(taken, self._start) >= self._capacity - 1:
            self._old.append(self._ring)
            larger = self._make(4 * self._capacity * _ENTRY)
            self._write(RingEntry(MOVED, larger.nbytes, 0, 0, 0, larger.address))
            self._ring, self._capacity, self._start = larger, 4 * self._capacity, self._posted
            self._view = larger.cells()
        elif self._old and taken > self._start:
            self.close()
        self._write(entry)
        futex.wake(self._word)

    def _open(self, capacity: int) -> SharedSegment:
        ring = self._make(capacity * _ENTRY)
        self._view = ring.cells()
        return ring

    def _write(self, entry: RingEntry) -> None:
        _LAYOUT.pack_into(
            self._view,
            (self._posted - self._start) % self._capacity * _ENTRY,
            *entry[:5],
            entry.address.encode(),
        )
        self._posted += 1
        self._cells[(self._at + POSTED) // 8] = self._posted

    def close(self) -> None:
        """Let go of rings that the other side has left, and of the descriptors of all: it has
        mapped them, or never will.
        """
        for ring in self._old:
            ring.seal()
        self._old.clear()
        if self._ring is not None:
            self._ring.seal()


class RingReader:
    """The end of one pair at which entries are taken."""

    def __init__(self, table: SharedSegment, at: int) -> None:
        self._bytes = table.cells()
        self._cells = self._bytes.cast("q")
        self._at, self._word = at, table.start + at
        self._taken = self._start = 0
        self._ring: SharedSegment | None = None
        self._view = self._bytes
        self._capacity = CAPACITY

    def take(self) -> RingEntry | None:
        """Return the next entry, which `confirm` has to follow; None if there is none.

        Raises `ResourceError` where the sender's memory can't be mapped.
        """
        while self._taken < self._cells[(self._at + POSTED) // 8]:
            if self._ring is None:
                length = self._cells[(self._at + FIRST) // 8]
                self._map(
                    bytes(
                        self._bytes[self._at + FIRST + 8 : self._at + FIRST + 8 + length]
                    ).decode(),
                    CAPACITY * _ENTRY,
                )
            at = (self._taken - self._start) % self._capacity * _ENTRY
            segment, length, offset, use, header, text = _LAYOUT.unpack_from(self._view, at)
            entry = RingEntry(
                segment, length, offset, use, header, text.rstrip(b"\0").decode() if text[0] else ""
            )
            if entry.segment != MOVED:
                return entry
            self._map(entry.address, entry.nbytes)
            self.confirm()
            self._start = self._taken
        return None

    def confirm(self) -> None:
        """Tell the sender that an entry was taken, and what it tells of is mapped: until then
        the sender keeps that open.
        """
        self._taken += 1
        self._cells[(self._at + TAKEN) // 8] = self._taken

    def _map(self, address: str, nbytes: int) -> None:
        self._ring = SharedSegment.open(address, nbytes, alone=True)
        self._view, self._capacity = self._ring.cells(), nbytes // _ENTRY

    def rest(self, seconds: float) -> None:
        """Sleep until there may be an entry; at most so long."""
        posted = self._cells[(self._at + POSTED) // 8]
        if posted == self._taken:
            futex.wait(self._word, posted, seconds)

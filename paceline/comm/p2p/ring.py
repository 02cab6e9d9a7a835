"""A queue of short entries in shared memory, from one process to another, which never fills up.

pair's cells   | posted | taken | address of the first ring |   posted: written by the sender alone
ring           | 0 | 1 | 2 | ... | 63 |                         taken: by the receiver alone
                                  | moved: address of a larger ring |

Entry k lies at (k - start) % capacity. A ring that is nearly full gets a last entry that leads to
a larger one, where the next entries lie.

Memory order: the sender writes an entry first, then `posted`; the receiver reads `posted` first,
then the entry. C stores counters with release and loads them with acquire, so the entry is complete
when it is seen, on every processor. `taken` frees an entry's place in the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from paceline.comm.shm.shared_segment import SharedSegment
from paceline.native.functions import load_functions

CELLS = 512  # bytes of the cells of one pair
POSTED, TAKEN, FIRST = 0, 64, 128  # bytes of its cells at which they lie, in a cache line each
CAPACITY = 64  # entries of the first ring
MOVED = -1  # segment number of the entry that leads to the next ring
_LAYOUT = struct.Struct("<5q200s")  # segment, nbytes, offset, use, header, address
_ENTRY = 256  # bytes of an entry's place


class RingEntry(NamedTuple):
    """The place of a message.

    segment: Number of the sender's segment.
    nbytes: Bytes of that segment.
    offset: Byte of the segment at which the message's block begins.
    use: Which use of that block it is, counted from 1.
    header: Bytes of the message's header.
    address: Address of the segment, the first time that it is mentioned; else empty.
    """

    segment: int
    nbytes: int
    offset: int
    use: int
    header: int
    address: str = ""


class RingWriter:
    """The end of one pair at which entries are posted.

    `_old` holds rings that the other side may still have to read: their descriptors stay open
    until it has mapped them.

    Args:
        table: Segment with the cells of all pairs.
        at: Byte of the table at which this pair's cells begin.
        make: Makes a segment of a number of bytes.
    """

    def __init__(self, table: SharedSegment, at: int, make: Callable[[int], SharedSegment]) -> None:
        self._native = load_functions()
        self._bytes = table.view_bytes()
        self._cells = self._bytes.cast("q")
        self._at, self._word, self._make = at, table.start + at, make
        self._posted = self._start = 0
        self._ring: SharedSegment | None = None
        self._old: list[SharedSegment] = []
        self._view = self._bytes
        self._capacity = CAPACITY

    @property
    def has_pending(self) -> bool:
        """Whether entries have not been taken yet."""
        return bool(self._posted > self._native.load(self._word + TAKEN))

    def post_entry(self, entry: RingEntry) -> None:
        """Append an entry, and wake the other side."""
        taken = self._native.load(self._word + TAKEN)
        if self._ring is None:
            self._ring = self._open_ring(CAPACITY)
            address = self._ring.address.encode()
            self._bytes[self._at + FIRST + 8 : self._at + FIRST + 8 + len(address)] = address
            self._cells[(self._at + FIRST) // 8] = len(address)
        # One place is left: it leads to a ring of four times the size.
        elif self._posted - max(taken, self._start) >= self._capacity - 1:
            self._old.append(self._ring)
            larger = self._make(4 * self._capacity * _ENTRY)
            self._write_entry(RingEntry(MOVED, larger.nbytes, 0, 0, 0, larger.address))
            self._ring, self._capacity, self._start = larger, 4 * self._capacity, self._posted
            self._view = larger.view_bytes()
        # The other side has read an entry of the newest ring, so it has mapped that one, too.
        elif self._old and taken > self._start:
            self.close()
        self._write_entry(entry)
        self._native.futex_wake(self._word)

    def _open_ring(self, capacity: int) -> SharedSegment:
        ring = self._make(capacity * _ENTRY)
        self._view = ring.view_bytes()
        return ring

    def _write_entry(self, entry: RingEntry) -> None:
        _LAYOUT.pack_into(
            self._view,
            (self._posted - self._start) % self._capacity * _ENTRY,
            *entry[:5],
            entry.address.encode(),
        )
        self._posted += 1
        # The entry is complete: only now may the other side see it.
        self._native.store(self._word + POSTED, self._posted)

    def close(self) -> None:
        """Close the descriptors of all rings: the other side has mapped them, or never will."""
        for ring in self._old:
            ring.seal()
        self._old.clear()
        if self._ring is not None:
            self._ring.seal()


class RingReader:
    """The end of one pair at which entries are taken."""

    def __init__(self, table: SharedSegment, at: int) -> None:
        self._native = load_functions()
        self._bytes = table.view_bytes()
        self._cells = self._bytes.cast("q")
        self._at, self._word = at, table.start + at
        self._taken = self._start = 0
        self._ring: SharedSegment | None = None
        self._view = self._bytes
        self._capacity = CAPACITY

    def next_entry(self) -> RingEntry | None:
        """Return the next entry; None if there is none. `confirm_entry` must follow.

        Raises `ResourceError` if the sender's memory can't be mapped.
        """
        while self._taken < self._native.load(self._word + POSTED):
            if self._ring is None:
                length = self._cells[(self._at + FIRST) // 8]
                self._map_ring(
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
            self._map_ring(entry.address, entry.nbytes)
            self.confirm_entry()
            self._start = self._taken
        return None

    def confirm_entry(self) -> None:
        """Tell the sender that an entry was taken.

        The segment that it mentions must be mapped by now: the sender may then close it.
        """
        self._taken += 1
        self._native.store(self._word + TAKEN, self._taken)

    def _map_ring(self, address: str, nbytes: int) -> None:
        self._ring = SharedSegment.open(address, nbytes, alone=True)
        self._view, self._capacity = self._ring.view_bytes(), nbytes // _ENTRY

    def sleep_until_posted(self, seconds: float) -> None:
        """Sleep until there may be an entry, or `seconds` pass."""
        posted = self._native.load(self._word + POSTED)
        if posted == self._taken:
            # The kernel compares again before it sleeps, so a post in between is not missed.
            self._native.futex_wait(self._word, posted & 0xFFFFFFFF, int(seconds * 1e9))

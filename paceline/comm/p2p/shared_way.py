"""Messages between two workers of one host through shared memory, without threads.

table   | rank 0: pid, state | rank 1 ... | cells of pair 0 -> 0 | 0 -> 1 | 1 -> 0 | 1 -> 1 |

There is one table for all workers of a host. Each pair has a ring of entries (`ring`) and blocks
with messages (`blocks`), which its sender makes when it first sends. A sender is done when it has
posted an entry; the receiver needs no help from it.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.comm.group_protocol import FinishedWork, Work
from paceline.comm.p2p.message_blocks import BlockPool, MessageReader
from paceline.comm.p2p.pair_inbox import SLICE, PairInbox, ReceiveWork
from paceline.comm.p2p.ring import CELLS, RingReader, RingWriter
from paceline.comm.shm.shared_segment import SHM, SharedSegment, make_shared_segment
from paceline.errors import PacelineError, ResourceError, ViewChanged, WorkerLost
from paceline.native.functions import load_functions

PID, STATE = 0, 64  # bytes of a rank's cells at which they lie
CLOSED, ABORTED = 1, 2  # values of STATE
# Seconds that a receiver polls before it sleeps. It polls only if its last wait was about as short,
# as other processes may need the core.
SPIN = 100e-6


class SharedTable:
    """The cells of all workers of one host. Making it is collective over the group.

    Args:
        ranks: Ranks in the group of the workers of this host.
        rank: Rank of this worker in the group.
        meet: Gathers a word of every rank of the group: takes this rank's, gives all.

    Raises:
        ResourceError: A worker can't share memory; raised on all ranks.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, meet: Callable[[str], Sequence[str]]
    ) -> None:
        self.ranks, self.place, size = tuple(ranks), list(ranks).index(rank), len(ranks)
        segment = make_shared_segment(
            (size + size * size) * CELLS, rank, ranks[0], meet, inside=True, folder=None
        )
        assert segment is not None
        self.segment = segment
        self._native = load_functions()
        self._native.store(segment.start + self.place * CELLS + PID, os.getpid())
        meet("")  # all ranks have written their process ids
        # A pidfd stands for this very process, even if its id is given to another one later. -1: it
        # has ended already.
        self._pidfds: dict[int, int] = {}
        for place in range(size):
            pid = self._native.load(segment.start + place * CELLS + PID)
            if pid != os.getpid() and hasattr(os, "pidfd_open"):
                try:
                    self._pidfds[place] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._pidfds[place] = -1

    def pair_offset(self, source: int, to: int) -> int:
        """Byte at which the cells of a directed pair begin. `source`, `to`: places on this host."""
        size = len(self.ranks)
        return (size + source * size + to) * CELLS

    def make_segment(self, nbytes: int) -> SharedSegment:
        """Make a segment that the others can map, in the same way as this table."""
        return SharedSegment.create(nbytes, folder=SHM if self.segment.named else None)

    def mark_left(self, state: int) -> None:
        """Note for the others that this worker has left, and how: CLOSED or ABORTED."""
        # With release: what this worker has posted is seen before its state.
        state = max(self.read_state(self.place), state)
        self._native.store(self.segment.start + self.place * CELLS + STATE, state)

    def read_state(self, place: int) -> int:
        """State of a worker: CLOSED, ABORTED, or 0 if it has not left."""
        return int(self._native.load(self.segment.start + place * CELLS + STATE))

    def is_dead(self, place: int) -> bool:
        """Whether the process of a worker has ended."""
        fd = self._pidfds.get(place)
        if fd is None or fd < 0:
            return fd is not None
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptors of other processes."""
        for fd in self._pidfds.values():
            if fd >= 0:
                os.close(fd)
        self._pidfds.clear()


class SharedWay:
    """The link to another worker of this host, in both directions.

    Locks: `_sending` orders sends. `_looking` lets one thread read the ring. `_resting` lets one
    thread sleep at the ring; others sleep at the inbox, and are notified by it.

    Args:
        table: Cells of all workers of this host.
        source: Rank of the other worker in the group.
        inbox: Where messages go.
        name: Rank of the other worker among all workers.
        host: Name of its host.
        busy: Called while a receive sleeps, to advance other operations of this process.
    """

    def __init__(
        self,
        table: SharedTable,
        source: int,
        inbox: PairInbox,
        *,
        name: int,
        host: str,
        busy: Callable[[], object] | None = None,
    ) -> None:
        self.name, self.host = name, host
        self._table, self._place, self._source, self._inbox, self._busy = (
            table,
            table.ranks.index(source),
            source,
            inbox,
            busy,
        )
        self._pool = BlockPool(table.make_segment)
        self._writer = RingWriter(
            table.segment, table.pair_offset(table.place, self._place), table.make_segment
        )
        self._blocks = MessageReader()
        self._reader = RingReader(table.segment, table.pair_offset(self._place, table.place))
        self._sending, self._looking, self._resting = (
            threading.Lock(),
            threading.Lock(),
            threading.Lock(),
        )
        self._unreadable: PacelineError | None = None  # why nothing more can be read
        self._brief = True  # whether the last wait was short

    def send(self, header: bytes, tensors: Sequence[Tensor], what: str) -> Work[None]:
        """Copy a message to shared memory, and tell the other worker."""
        # Memory that the other will never read need not be filled.
        state = self._table.read_state(self._place)
        if state:
            return FinishedWork(error=self._make_left_error(state, f": it does not take {what}"))
        with self._sending:
            entry = self._pool.write_message(header, tensors)
            self._writer.post_entry(entry)
            # Only after the post: an error in between must not lose the segment's address.
            self._pool.mark_told(entry)
        return FinishedWork()

    def look_for_messages(self, *, last: bool = False) -> None:
        if self._unreadable is not None or not self._looking.acquire(blocking=last):
            return
        try:
            # Read first, then confirm: the sender may close a segment that was confirmed.
            while (entry := self._reader.next_entry()) is not None:
                lane, message = self._blocks.read_message(entry)
                self._reader.confirm_entry()
                self._inbox.put_message(self._source, lane, message)
        except ResourceError as error:  # the sender's memory went with its process
            self._unreadable = WorkerLost(
                f"messages of rank {self.name} can't be read ({error})", (self.name,)
            )
        except PacelineError as error:
            self._unreadable = error
        finally:
            self._looking.release()

    def rest_until(self, work: ReceiveWork, seconds: float) -> None:
        if not self._resting.acquire(blocking=False):  # another thread sleeps for both
            self._inbox.wait_for_change(work, seconds, self._resting.locked)
            return
        began = time.monotonic()
        try:
            while self._brief and time.monotonic() - began < SPIN:
                self.look_for_messages()
                if work.has_come:
                    return
                os.sched_yield()
            self._sleep_until(work, began + seconds)
        finally:
            self._brief = time.monotonic() - began < 2 * SPIN
            self._resting.release()
            self._inbox.wake_waiters()

    def _sleep_until(self, work: ReceiveWork, end: float) -> None:
        while not work.has_come and (left := end - time.monotonic()) > 0:
            self._reader.sleep_until_posted(left if self._busy is None else min(left, SLICE))
            self.look_for_messages()
            if self._busy is not None:
                self._busy()

    def find_loss(self) -> PacelineError | None:
        if self._unreadable is not None:
            return self._unreadable
        state = self._table.read_state(self._place)
        if state:
            return self._make_left_error(state)
        return (
            WorkerLost(f"rank {self.name} has died", (self.name,))
            if self._table.is_dead(self._place)
            else None
        )

    def _make_left_error(self, state: int, more: str = "") -> PacelineError:
        if state == ABORTED:
            return ViewChanged(f"these pairs have been aborted by rank {self.name}{more}")
        return WorkerLost(f"rank {self.name} has closed its end{more}", (self.name,))

    @property
    def has_pending(self) -> bool:
        """Whether the other can still take messages that it has not taken yet."""
        return self._writer.has_pending and self.find_loss() is None

    def close(self) -> None:
        """Let go of descriptors; what the other has mapped stays."""
        with self._sending:
            self._pool.close()
            self._writer.close()

"""Messages between two workers of one host, through shared memory: no thread, and no help of the
sender once it has sent.

table   | rank 0: pid, state | rank 1 ... | cells of pair 0 -> 0 | 0 -> 1 | 1 -> 0 | 1 -> 1 |
        one for all workers of the host
each pair has a ring of entries (`ring`) and blocks with messages (`blocks`), which its sender makes
when it first sends
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.comm.group import Finished, Work
from paceline.comm.p2p.blocks import BlockPool, MessageReader
from paceline.comm.p2p.inbox import SLICE, PairInbox, ReceiveWork
from paceline.comm.p2p.ring import CELLS, RingReader, RingWriter
from paceline.comm.shm.memory import SHM, SharedSegment, share
from paceline.errors import PacelineError, ResourceError, ViewChanged, WorkerLost

PID, STATE = 0, 64  # bytes of a rank's cells
CLOSED, ABORTED = 1, 2
# seconds that a receiver looks before it sleeps, if its last wait was about as short: else others
# may need the core
SPIN = 100e-6


class SharedTable:
    """The cells of all workers of one host.

    `names` is what they are called among all workers, `rank` which of them this one is.

    `meet` takes this worker's word and gives that of every worker of the group, of which those of
    this host are `ranks`. Collective over the group: raises `ResourceError` on all ranks where one
    of them can't share memory.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, meet: Callable[[str], Sequence[str]]
    ) -> None:
        self.ranks, self.place, size = tuple(ranks), list(ranks).index(rank), len(ranks)
        segment = share(
            (size + size * size) * CELLS, rank, ranks[0], meet, inside=True, folder=None
        )
        assert segment is not None
        self.segment = segment
        self._cells = segment.cells().cast("q")
        self._cells[(self.place * CELLS + PID) // 8] = os.getpid()
        meet("")
        self._pidfds: dict[int, int] = {}
        for place in range(size):
            pid = self._cells[(place * CELLS + PID) // 8]
            if pid != os.getpid() and hasattr(os, "pidfd_open"):
                try:
                    self._pidfds[place] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._pidfds[place] = -1

    def pair(self, source: int, to: int) -> int:
        """Return the byte at which the cells of a directed pair lie; by places on this host."""
        size = len(self.ranks)
        return (size + source * size + to) * CELLS

    def make(self, nbytes: int) -> SharedSegment:
        """Make a segment that the others can map, by the means by which they have mapped this
        table.
        """
        return SharedSegment.create(nbytes, folder=SHM if self.segment.named else None)

    def leave(self, state: int) -> None:
        """Note for the others how this worker has left."""
        at = (self.place * CELLS + STATE) // 8
        self._cells[at] = max(self._cells[at], state)

    def state(self, place: int) -> int:
        """Return how a worker has left: 0 if it hasn't."""
        return int(self._cells[(place * CELLS + STATE) // 8])

    def dead(self, place: int) -> bool:
        """Whether the process of a worker has ended."""
        fd = self._pidfds.get(place)
        if fd is None or fd < 0:
            return fd is not None
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let go of descriptors."""
        for fd in self._pidfds.values():
            if fd >= 0:
                os.close(fd)
        self._pidfds.clear()


class SharedWay:
    """The way to another worker of this host, and from it.

    `source` is its rank in the group, `busy` is called while a receive sleeps.
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
        self._pool = BlockPool(table.make)
        self._writer = RingWriter(table.segment, table.pair(table.place, self._place), table.make)
        self._blocks = MessageReader()
        self._reader = RingReader(table.segment, table.pair(self._place, table.place))
        self._sending, self._looking, self._resting = (
            threading.Lock(),
            threading.Lock(),
            threading.Lock(),
        )
        self._unreadable: PacelineError | None = None
        self._brief = True  # whether the last wait was

    def send(self, header: bytes, tensors: Sequence[Tensor], what: str) -> Work[None]:
        """Copy a message to where the other finds it."""
        state = self._table.state(self._place)
        if state:
            return Finished(error=self._left(state, f": it does not take {what}"))
        with self._sending:
            entry = self._pool.write(header, tensors)
            self._writer.post(entry)
            self._pool.told(entry)
        return Finished()

    def look(self, *, last: bool = False) -> None:
        if self._unreadable is not None or not self._looking.acquire(blocking=last):
            return
        try:
            while (entry := self._reader.take()) is not None:
                lane, message = self._blocks.read(entry)
                self._reader.confirm()
                self._inbox.put(self._source, lane, message)
        except ResourceError as error:  # its memory went with it
            self._unreadable = WorkerLost(
                f"what rank {self.name} has sent can't be read ({error})", (self.name,)
            )
        except PacelineError as error:
            self._unreadable = error
        finally:
            self._looking.release()

    def rest(self, work: ReceiveWork, seconds: float) -> None:
        if not self._resting.acquire(blocking=False):  # another thread sleeps for both
            self._inbox.rest(work, seconds, self._resting.locked)
            return
        began = time.monotonic()
        try:
            while self._brief and time.monotonic() - began < SPIN:
                self.look()
                if work.came:
                    return
                os.sched_yield()
            self._sleep(work, began + seconds)
        finally:
            self._brief = time.monotonic() - began < 2 * SPIN
            self._resting.release()
            self._inbox.notify()

    def _sleep(self, work: ReceiveWork, end: float) -> None:
        while not work.came and (left := end - time.monotonic()) > 0:
            self._reader.rest(left if self._busy is None else min(left, SLICE))
            self.look()
            if self._busy is not None:
                self._busy()

    def gone(self) -> PacelineError | None:
        if self._unreadable is not None:
            return self._unreadable
        state = self._table.state(self._place)
        if state:
            return self._left(state)
        return (
            WorkerLost(f"rank {self.name} has died", (self.name,))
            if self._table.dead(self._place)
            else None
        )

    def _left(self, state: int, more: str = "") -> PacelineError:
        if state == ABORTED:
            return ViewChanged(f"these pairs have been aborted by rank {self.name}{more}")
        return WorkerLost(f"rank {self.name} has closed its end{more}", (self.name,))

    @property
    def pending(self) -> bool:
        """Whether the other has still to take what was sent, and can."""
        return self._writer.pending and self.gone() is None

    def close(self) -> None:
        """Let go of descriptors; what the other has mapped stays."""
        with self._sending:
            self._pool.close()
            self._writer.close()

"""The control segment of a group inside one host: counters, fingerprints, mailboxes and stages, each written by one rank only.

    rank r  | cells: op counter, agree counter, left, pid, marks x 2 | text | meta x 2 | mailbox x 2 | small x 2 | stage x 2 |

The barrier polls the counters: first it yields the core some hundred times (about 0.1 ms: the others are near), then it sleeps in
naps of 50 us, in which it also looks whether the others are still alive.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.memory import Segment
from paceline.errors import DeadlineExceeded, ResourceError, UsageError, WorkerLost

STAGE = 2 << 20  # bytes of each half of a rank's stage: pieces of it stay in the cache of a core
SMALL = 32 << 10  # bytes of each half of a rank's small stage: what every rank sums all by itself
META = 16 << 10
MAIL = 16 << 10
TEXT = 4096
CELLS = 512
BLOCK = CELLS + TEXT + 2 * (META + MAIL + SMALL + STAGE)
OPS, AGREES, LEFT, PID, MARKS = 0, 8, 16, 24, 32  # int64 cells, a cache line each
SPINS = 200
NAP = 50e-6
LOOK = 32  # naps between two looks at the deadline and at the living
LEFT_WORDS = {1: "closed", 2: "aborted"}


class Board:
    """One rank's sight of the control segment. `busy` is called while waiting, so that work pending elsewhere goes on."""

    def __init__(self, segment: Segment, rank: int, size: int, *, deadline: float, folder: str | None = None) -> None:
        self.rank, self.size, self.deadline, self.folder = rank, size, deadline, folder
        self.waited = 0.0
        self.busy: Callable[[], None] = lambda: None
        self._segment = segment
        self._bytes = memoryview(segment.map)
        self._cells = self._bytes.cast("q")
        self._others = [r for r in range(size) if r != rank]
        self._ops = [(r * BLOCK) // 8 + OPS for r in self._others]
        self._agrees = [(r * BLOCK) // 8 + AGREES for r in self._others]
        self._marks = [(r * BLOCK) // 8 + MARKS for r in self._others]
        self._mine = (rank * BLOCK) // 8
        self._agreed = 0
        self._pidfds: dict[int, int] = {}
        self._views: dict[tuple[Any, ...], Tensor] = {}
        self._cells[self._mine + PID] = os.getpid()
        fine_timer()

    @classmethod
    def from_store(cls, store: Any, rank: int, size: int, *, deadline: float, folder: str | None = None) -> Board:
        """Rank 0 makes the segment and puts its address into the store; ends when all have mapped it, or with one error on all."""
        segment, error = None, ""
        try:
            if rank == 0:
                segment = Segment.create(size * BLOCK, folder=folder)
                store.put("shared/address", segment.address)
            else:
                address = store.take("shared/address", deadline)
                if address:
                    segment = Segment.open(address, size * BLOCK)
        except ResourceError as caught:
            error = str(caught)
            if rank == 0:
                store.put("shared/address", "")
        store.put(f"shared/mapped/{rank}", error)
        answers = [store.take(f"shared/mapped/{r}", deadline) for r in range(size)]
        return cls._opened(segment, answers, rank, size, deadline, folder)

    @classmethod
    def _opened(  # noqa: PLR0917
        cls, segment: Segment | None, errors: Sequence[str], rank: int, size: int, deadline: float, folder: str | None
    ) -> Board:
        if segment is not None:
            segment.seal()
        worst = next((error for error in errors if error), "")
        if segment is None or worst:
            raise ResourceError(worst or "the first worker of this host could not make shared memory")
        board = cls(segment, rank, size, deadline=deadline, folder=folder)
        board.agree(b"")  # pids are there
        board._watch()
        return board

    def _watch(self) -> None:
        for r in self._others:
            pid = self._cells[(r * BLOCK) // 8 + PID]
            if pid != os.getpid() and hasattr(os, "pidfd_open"):
                self._pidfds[os.pidfd_open(pid)] = r

    # ---- the lane of operations

    def post(self, value: int) -> None:
        """Raise my counter: all that I wrote before is there for the others."""
        self._cells[self._mine + OPS] = value

    def reached(self, value: int) -> bool:
        """Whether all the others have come up to `value`."""
        cells = self._cells
        for at in self._ops:  # noqa: SIM110 (a generator costs three times as much here)
            if cells[at] < value:
                return False
        return True

    def behind(self, value: int) -> list[int]:
        """The ranks that have not come up to `value`."""
        return [r for r, at in zip(self._others, self._ops, strict=True) if self._cells[at] < value]

    def announce(self, parity: int, mark: int, meta: bytes | None) -> None:
        """Write the fingerprint (and the meta) of my next operation."""
        self._cells[self._mine + MARKS + parity] = mark
        if meta is not None:
            if len(meta) > META - 8:
                raise UsageError(f"one exchange is described by {len(meta)} bytes, at most {META - 8} fit; send fewer messages at a time")
            self._write(self.rank * BLOCK + CELLS + TEXT + parity * META, meta)

    def same(self, parity: int, mark: int) -> bool:
        """Whether all ranks have announced `mark`."""
        return all(self._cells[at + parity] == mark for at in self._marks)

    def metas(self, parity: int) -> list[bytes]:
        """Every rank's meta."""
        return [self._read(r * BLOCK + CELLS + TEXT + parity * META) for r in range(self.size)]

    def describe(self, text: bytes) -> None:
        """Write what I was about to do."""
        self._write(self.rank * BLOCK + CELLS, text)

    def descriptions(self) -> list[bytes]:
        """What every rank was about to do."""
        return [self._read(r * BLOCK + CELLS) for r in range(self.size)]

    def stage(self, rank: int, half: int, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements at byte `offset` of a half of a rank's stage."""
        start = CELLS + TEXT + 2 * (META + MAIL + SMALL) + half * STAGE
        return self._view(rank * BLOCK + start + offset, count, dtype)

    def small(self, rank: int, half: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements of a half of a rank's small stage."""
        return self._view(rank * BLOCK + CELLS + TEXT + 2 * (META + MAIL) + half * SMALL, count, dtype)

    def _view(self, at: int, count: int, dtype: torch.dtype) -> Tensor:
        key = (at, count, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 4096:
                self._views.clear()
            view = self._views[key] = self._segment.tensor(at, (count,), dtype)
        return view

    # ---- the control lane

    def agree(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, of any length."""
        answers = [b""] * self.size
        longest, at, room = len(payload), 0, MAIL - 8
        while True:
            self._agreed += 1
            target, half = self._agreed, self._agreed & 1
            base = CELLS + TEXT + 2 * META + half * MAIL
            self._write(self.rank * BLOCK + base, payload[at : at + room], len(payload))
            self._cells[self._mine + AGREES] = target
            self.wait(lambda target=target: self._met(target), lambda target=target: self._unmet(target), "a meeting of all workers")  # type: ignore[misc]
            for r in range(self.size):
                start = r * BLOCK + base
                total = self._cells[start // 8]
                longest = max(longest, total)
                answers[r] += bytes(self._bytes[start + 8 : start + 8 + max(0, min(total - at, room))])
            at += room
            if at >= longest:
                return answers

    def _met(self, value: int) -> bool:
        cells = self._cells
        for at in self._agrees:  # noqa: SIM110
            if cells[at] < value:
                return False
        return True

    def _unmet(self, value: int) -> list[int]:
        return [r for r, at in zip(self._others, self._agrees, strict=True) if self._cells[at] < value]

    # ---- waiting

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]], what: str, timeout: float | None = None) -> None:
        """Return when `ready()`; raise when a missing rank has gone (`WorkerLost`) or the deadline has passed (`DeadlineExceeded`)."""
        if ready():
            return
        started = time.perf_counter()
        limit = self.deadline if timeout is None else timeout
        for _ in range(SPINS):
            os.sched_yield()
            if ready():
                self.waited += time.perf_counter() - started
                return
        turn = 0
        while not ready():
            time.sleep(NAP)
            self.busy()
            turn += 1
            if turn % LOOK == 0:
                self._look(ready, missing, what, limit, time.perf_counter() - started)
        self.waited += time.perf_counter() - started

    def _look(self, ready: Callable[[], bool], missing: Callable[[], list[int]], what: str, limit: float, waited: float) -> None:
        awaited = missing()
        gone = {r: f"has {LEFT_WORDS[left]} its group" for r in awaited if (left := self._cells[(r * BLOCK) // 8 + LEFT])}
        gone |= {r: "has died" for r in self._dead() if r in awaited}
        if gone and not ready():
            text = ", ".join(f"rank {r} {how}" for r, how in sorted(gone.items()))
            raise WorkerLost(f"{text} while rank {self.rank} waits for it in {what}", tuple(sorted(gone)))
        if waited > limit and not ready():
            names = ", ".join(str(r) for r in awaited) or "unknown"
            raise DeadlineExceeded(f"{what}: rank {names} did not come within {limit:g} s (asked by rank {self.rank})", tuple(awaited))

    def _dead(self) -> list[int]:
        if not self._pidfds:
            return []
        poll = select.poll()
        for fd in self._pidfds:
            poll.register(fd, select.POLLIN)
        return [self._pidfds[fd] for fd, _ in poll.poll(0)]

    # ---- more memory, smaller boards, the end

    def allocate(self, nbytes: int) -> Segment:
        """A new segment mapped by all ranks; `ResourceError` on all when one of them can't."""
        segment, error, address = None, "", ""
        try:
            if self.rank == 0:
                segment = Segment.create(nbytes, folder=self.folder)
                address = segment.address
        except ResourceError as caught:
            error = str(caught)
        address = self.agree(address.encode())[0].decode()
        try:
            if self.rank != 0 and address:
                segment = Segment.open(address, nbytes)
        except ResourceError as caught:
            error = str(caught)
        errors = [answer.decode() for answer in self.agree(error.encode())]
        if segment is not None:
            segment.seal()
        worst = next((e for e in errors if e), "")
        if worst or segment is None:
            raise ResourceError(worst)
        return segment

    def sub(self, ranks: Sequence[int]) -> Board | None:
        """The board of some ranks; all ranks call it with the same list. None on the others."""
        if sorted(set(ranks)) != sorted(ranks) or not ranks or not all(0 <= r < self.size for r in ranks):
            raise UsageError(f"a subgroup needs different ranks between 0 and {self.size - 1}, got {list(ranks)}")
        nbytes, segment, error, address = len(ranks) * BLOCK, None, "", ""
        try:
            if self.rank == ranks[0]:
                segment = Segment.create(nbytes, folder=self.folder)
                address = segment.address
        except ResourceError as caught:
            error = str(caught)
        address = self.agree(address.encode())[ranks[0]].decode()
        inside = self.rank in ranks
        try:
            if inside and segment is None and address:
                segment = Segment.open(address, nbytes)
        except ResourceError as caught:
            error = str(caught)
        errors = [answer.decode() for answer in self.agree(error.encode())]
        if not inside:
            return None
        return self._opened(segment, [errors[r] for r in ranks], list(ranks).index(self.rank), len(ranks), self.deadline, self.folder)

    def leave(self, word: str) -> None:
        """Tell the others that this rank will not come any more."""
        self._cells[self._mine + LEFT] = next(code for code, known in LEFT_WORDS.items() if known == word)
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()

    def _write(self, at: int, data: bytes, total: int | None = None) -> None:
        self._cells[at // 8] = len(data) if total is None else total
        self._bytes[at + 8 : at + 8 + len(data)] = data

    def _read(self, at: int) -> bytes:
        return bytes(self._bytes[at + 8 : at + 8 + self._cells[at // 8]])


def fine_timer() -> None:
    """Naps of this thread end on time, not up to 50 us late (prctl PR_SET_TIMERSLACK; without it naps are longer, nothing else)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(29, 1000, 0, 0, 0)

"""The control segment of a group inside one host: counters, fingerprints, mailboxes and stages,
each written by one rank only.

    rank r  | cells: operations, agrees, left, pid, marks x 2, note, bell | text | note | meta x 2 |
            mailbox x 2 | small x 2 | stage x 4 |

Two channels run over it, each with its own counter: *operations* on tensors, whose ranks post and
go on, and *agree*, which blocks. On x86-64 stores become visible in program order, so what was
written before a counter was raised is there when the counter is seen.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor

from paceline import callsite
from paceline.comm.cancellation import CancelScope
from paceline.comm.fingerprint import OWN, CallFingerprint, compare, digest
from paceline.comm.shm import futex
from paceline.comm.shm.bell import Bell
from paceline.comm.shm.memory import SharedSegment, share
from paceline.comm.shm.waiting import RankWaiter, WaitCondition

# processors on which counters in shared memory are a sound barrier
ORDERED_STORES = ("x86_64", "AMD64")
SLOTS = 4  # stages of a rank, used in turn
STAGE = 2 << 20  # bytes of each
SMALL = 32 << 10  # bytes of each half of a rank's small stage: what every rank sums all by itself
META = 16 << 10
MAIL = 16 << 10
TEXT = 4096  # bytes, also of a note
CELLS = 512
METAS = CELLS + 2 * TEXT
MAILS = METAS + 2 * META
SMALLS = MAILS + 2 * MAIL
STAGES = SMALLS + 2 * SMALL
SPAN = STAGES + SLOTS * STAGE  # bytes of a rank
# int64 cells, a cache line each
OPS, AGREES, LEFT, PID, MARKS, NOTE, BELL = 0, 8, 16, 24, 32, 40, 48
# bytes of a rank's part of a block: large enough for few waits, small enough for the cache of a
# core
PIECE = 384 << 10
# of an operation: yields up to which post the others have to come before it goes on
Steps = Generator[int, None, Any]


class RankNotes:
    """The notes of one rank, and its view of the others' (`waiting.WaitNotes`)."""

    def __init__(self, cells: memoryview, rank: int) -> None:
        self._cells, self._bytes, self._rank = cells, cells.cast("B"), rank

    def leave(self) -> None:
        self._cells[self._rank * SPAN // 8 + LEFT] = 1

    def left(self, rank: int) -> bool:
        return bool(self._cells[rank * SPAN // 8 + LEFT])

    def tell(self, text: bytes) -> None:
        """Leave a note. One that is too long is not left: then only the deadline ends this wait."""
        text = text if len(text) <= TEXT - 8 else b""
        at, turn = self._rank * SPAN + CELLS + TEXT, self._rank * SPAN // 8 + NOTE
        self._cells[turn] += 1  # odd: being written
        self._cells[at // 8] = len(text)
        self._bytes[at + 8 : at + 8 + len(text)] = text
        self._cells[turn] += 1

    def told(self, rank: int) -> bytes:
        at, turn = rank * SPAN + CELLS + TEXT, rank * SPAN // 8 + NOTE
        for _ in range(100):
            before = self._cells[turn]
            text = bytes(self._bytes[at + 8 : at + 8 + self._cells[at // 8]])
            if before & 1 == 0 and self._cells[turn] == before:
                return text
            os.sched_yield()
        return b""  # the writer has died or was stopped in the middle of a note


class ControlSegment:
    """One rank's view of the control segment.

    `names`: what the ranks are called in messages and errors.
    """

    def __init__(
        self,
        segment: SharedSegment,
        rank: int,
        names: Sequence[int],
        *,
        deadline: float,
        folder: str | None = None,
        cancel_scope: CancelScope | None = None,
    ) -> None:
        self.rank, self.size, self.names, self.folder = rank, len(names), tuple(names), folder
        size = self.size
        self.posted = 0  # my counter of the channel of operations
        self.turn = 0  # stages used so far: the next one is turn % SLOTS
        self._segment = segment
        self._bytes = segment.cells()
        self._cells = self._bytes.cast("q")
        self._mine = (rank * SPAN) // 8
        self._others = [r for r in range(size) if r != rank]
        self._ops, self._agrees, self._marks = (
            [(r * SPAN) // 8 + cell for r in self._others] for cell in (OPS, AGREES, MARKS)
        )
        self._met = self._agreed = 0
        self._numbers: dict[CallFingerprint, int] = {}
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._bell = (
            Bell(self._cells, segment.start, [r * SPAN // 8 + BELL for r in range(size)], rank)
            if futex.available()
            else None
        )
        self.watch = RankWaiter(
            rank, names, RankNotes(self._cells, rank), deadline=deadline, bell=self._bell
        )
        self._cancel_scope = CancelScope() if cancel_scope is None else cancel_scope
        self._cancel_scope.add(self.watch.interrupt)
        self._cells[self._mine + PID] = os.getpid()
        self.agree(b"")  # now all pids are there
        self.watch.know({r: self._cells[(r * SPAN) // 8 + PID] for r in self._others})
        # bytes of a block, each rank's part whole cache lines
        self.block = min(STAGE, PIECE * size) // (64 * size) * (64 * size)

    @classmethod
    def from_store(
        cls,
        store: Any,
        rank: int,
        names: Sequence[int],
        *,
        deadline: float,
        folder: str | None = None,
        cancel_scope: CancelScope | None = None,
    ) -> ControlSegment:
        """Make the segment on rank 0, whose address goes through the store; ends when all have
        mapped it, or with one error on all.
        """
        turn = 0

        def meet(word: str) -> list[str]:
            nonlocal turn
            turn += 1
            store.put(f"shared/{turn}/{rank}", word)
            return [store.take(f"shared/{turn}/{r}", deadline) for r in range(len(names))]

        segment = share(len(names) * SPAN, rank, 0, meet, inside=True, folder=folder, at_once=False)
        assert segment is not None
        return cls(
            segment, rank, names, deadline=deadline, folder=folder, cancel_scope=cancel_scope
        )

    @property
    def named(self) -> bool:
        """Whether its memory is a file with a name, where memory without one can't be had or
        wasn't asked for.
        """
        return self._segment.named

    # ---- the channel of operations

    def post(self) -> None:
        """Raise this rank's counter: all that it wrote before is there for the others."""
        self.posted += 1
        self._cells[self._mine + OPS] = self.posted
        if self._bell is not None:
            self._bell.ring()

    def reached(self, value: int) -> bool:
        """Whether all the others have come up to `value`."""
        cells = self._cells
        for at in self._ops:  # noqa: SIM110 (a generator costs three times as much here)
            if cells[at] < value:
                return False
        return True

    def behind(self, value: int) -> list[int]:
        """Return the ranks that have not come up to `value`."""
        return [r for r, at in zip(self._others, self._ops, strict=True) if self._cells[at] < value]

    @property
    def parity(self) -> int:
        """Which half (of marks, metas, small stages) the next `meet` uses."""
        return self._met & 1

    def meet(self, call: CallFingerprint, meta: Any = None) -> Generator[int, None, list[Any]]:
        """Begin an operation: every rank says what it is about to do, which is compared.

        Returns every rank's `meta`.

        Returns the places instead where calls differ in nothing else: some lie in the same
        registered memory, the others have their own.
        """
        packed = b"" if meta is None else msgpack.packb(meta)
        if len(packed) > META - 8:
            call, packed = (
                call._replace(
                    flaw=(
                        f"{len(packed)} bytes describe it and {META - 8} fit; "
                        "exchange fewer tensors at a time"
                    )
                ),
                b"",
            )
        parity, mark = self.parity, self._number(call)
        self._met += 1
        self._write(self._mine * 8 + METAS + parity * META, packed)
        self._cells[self._mine + MARKS + parity] = mark
        self.post()
        yield self.posted
        if call.flaw or any(self._cells[at + parity] != mark for at in self._marks):
            self._write(
                self._mine * 8 + CELLS,
                msgpack.packb(
                    [str(call)[:400], call.flaw[:400], call.place, callsite.place()[-200:]]
                ),
            )
            self.post()
            yield self.posted
            entries = [msgpack.unpackb(self._read(r * SPAN + CELLS)) for r in range(self.size)]
            places = [place for _, _, place, _ in entries]
            meets = all(places) and len({*places, OWN}) <= 2
            calls = [
                (text if meets else f"{text} {place}".strip(), flaw)
                for text, flaw, place, _ in entries
            ]
            compare(calls, self.names, [line for *_, line in entries])
            return places
        if meta is None:
            return []
        return [
            msgpack.unpackb(self._read(r * SPAN + METAS + parity * META)) for r in range(self.size)
        ]

    def stage_at(self, rank: int, turn: int) -> int:
        """Return the address of a rank's stage of this turn."""
        return self._segment.start + rank * SPAN + STAGES + turn % SLOTS * STAGE

    def stage(self, rank: int, turn: int, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return `count` elements from byte `offset` on of a rank's stage of this turn."""
        return self._view(rank * SPAN + STAGES + turn % SLOTS * STAGE + offset, count, dtype)

    def small(self, rank: int, parity: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return `count` elements of a half of a rank's small stage."""
        return self._view(rank * SPAN + SMALLS + parity * SMALL, count, dtype)

    def _view(self, at: int, count: int, dtype: torch.dtype) -> Tensor:
        key = (at, count, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 4096:
                self._views.clear()
            view = self._views[key] = self._segment.tensor(at, (count,), dtype)
        return view

    def _number(self, call: CallFingerprint) -> int:
        digits = self._numbers.get(call)
        if digits is None:
            if len(self._numbers) > 4096:
                self._numbers.clear()
            digits = self._numbers[call] = struct.unpack("q", digest(call)[:8])[0]
        return digits

    # ---- the channel of agreements

    # (a tuple)
    def agree(
        self,
        payload: bytes,
        call: CallFingerprint = CallFingerprint("agree"),  # noqa: B008
    ) -> list[bytes]:
        """Gather every rank's payload, of any length, once all have come to the same `call`; the
        payloads aren't compared.
        """
        call_number = self.watch.made.get("agree", 0)
        self.watch.made["agree"] = call_number + 1
        mark = self._number(call)
        try:
            answers, marks = self._swap(payload, mark, call, call_number)
            if call.flaw or any(other != mark for other in marks):
                texts, _ = self._swap(
                    msgpack.packb([str(call)[:400], call.flaw[:400], callsite.place()[-200:]]),
                    0,
                    call,
                    call_number,
                )
        except BaseException as error:
            self.watch.end(error)  # whatever ended this wait: this channel is out of step now
            raise
        if call.flaw or any(other != mark for other in marks):
            sides = [msgpack.unpackb(text) for text in texts]
            compare(
                [(text, flaw) for text, flaw, _ in sides], self.names, [line for *_, line in sides]
            )
        return answers

    def _swap(
        self, payload: bytes, mark: int, call: CallFingerprint, call_number: int
    ) -> tuple[list[bytes], list[int]]:
        answers, marks = [b""] * self.size, [0] * self.size
        longest, at, room = len(payload), 0, MAIL - 16
        while True:
            self._agreed += 1
            target = self._agreed
            base = MAILS + (target & 1) * MAIL
            self._cells[(self._mine * 8 + base) // 8] = mark
            self._write(self._mine * 8 + base + 8, payload[at : at + room], len(payload))
            self._cells[self._mine + AGREES] = target
            if self._bell is not None:
                self._bell.ring()
            self.watch.wait(self._meeting(target, call, call_number))
            for r in range(self.size):
                start = r * SPAN + base
                marks[r], total = self._cells[start // 8], self._cells[start // 8 + 1]
                longest = max(longest, total)
                answers[r] += bytes(
                    self._bytes[start + 16 : start + 16 + max(0, min(total - at, room))]
                )
            at += room
            if at >= longest:
                return answers, marks

    def _meeting(self, target: int, call: CallFingerprint, call_number: int) -> WaitCondition:
        cells, agrees = self._cells, self._agrees

        def met() -> bool:
            for at in agrees:  # noqa: SIM110
                if cells[at] < target:
                    return False
            return True

        def missing() -> list[int]:
            return [r for r, at in zip(self._others, agrees, strict=True) if cells[at] < target]

        return WaitCondition(met, missing, "agree", call_number, call)

    # ---- more memory, smaller segments

    def allocate(self, nbytes: int, call: CallFingerprint) -> SharedSegment:
        """Make a new segment mapped by all ranks; `ResourceError` on all when one of them can't."""
        segment = share(nbytes, self.rank, 0, self._words(call), inside=True, folder=self.folder)
        assert segment is not None
        return segment

    def sub(self, ranks: Sequence[int], call: CallFingerprint) -> ControlSegment | None:
        """Make the control segment of some ranks, all different; all ranks call it with the same
        list. None on the others.
        """
        words, inside = self._words(call), self.rank in ranks
        segment = share(
            len(ranks) * SPAN,
            self.rank,
            ranks[0],
            words,
            inside=inside,
            folder=self.folder,
            at_once=False,
        )
        if segment is None:
            return None
        names = [self.names[r] for r in ranks]
        rank = list(ranks).index(self.rank)
        return ControlSegment(
            segment,
            rank,
            names,
            deadline=self.watch.deadline,
            folder=self.folder,
            cancel_scope=self._cancel_scope,
        )

    def _words(self, call: CallFingerprint) -> Callable[[str], list[str]]:
        return lambda word: [answer.decode() for answer in self.agree(word.encode(), call)]

    def _write(self, at: int, data: bytes, total: int | None = None) -> None:
        self._cells[at // 8] = len(data) if total is None else total
        self._bytes[at + 8 : at + 8 + len(data)] = data

    def _read(self, at: int) -> bytes:
        return bytes(self._bytes[at + 8 : at + 8 + self._cells[at // 8]])

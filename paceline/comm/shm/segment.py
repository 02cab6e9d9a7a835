"""The control segment of a group inside one host. Each part of it is written by one rank only.

    rank r  | cells: operations, agrees, left, pid, marks x 2, note, bell |
            | text | note | meta x 2 | mailbox x 2 | small x 2 | stage x 4 |

Two channels run over it, each with a counter of every rank: *operations* on tensors, whose ranks
post and go on, and *agree*, which blocks.

Memory order: a rank writes its data first, then raises its counter. On x86-64 stores become visible
in program order, and loads are not reordered with loads. So a rank that sees the counter sees the
data. Other processors need fences, which Python does not have: see ORDERED_STORES.

Marks, metas, mailboxes and small stages exist twice, for even and odd meetings. A rank writes a
half again only after all ranks have posted for the meeting in between, and a rank posts for that
one only after it has read this half. So nothing is overwritten before it is read. Stages exist four
times: see `reductions.run_phases`.
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
from paceline.comm.fingerprint import OWN, CallFingerprint, check_calls_agree, digest_call
from paceline.comm.shm import futex
from paceline.comm.shm.bell import Bell
from paceline.comm.shm.shared_segment import SharedSegment, make_shared_segment
from paceline.comm.shm.waiting import RankWaiter, WaitCondition

ORDERED_STORES = ("x86_64", "AMD64")  # processors on which counters in memory are a sound barrier
SLOTS = 4  # stages of a rank, used in turn
STAGE = 2 << 20  # bytes of a stage
SMALL = 32 << 10  # bytes of each half of a small stage, for tensors that every rank sums by itself
META = 16 << 10  # bytes of each half of a rank's meta
MAIL = 16 << 10  # bytes of each half of a rank's mailbox
TEXT = 4096  # bytes of a rank's text, and of its note
# Where the parts of a rank begin, in bytes from its begin:
CELLS = 512
METAS = CELLS + 2 * TEXT
MAILS = METAS + 2 * META
SMALLS = MAILS + 2 * MAIL
STAGES = SMALLS + 2 * SMALL
SPAN = STAGES + SLOTS * STAGE  # bytes of a rank
# Number of each int64 cell of a rank. Each is on a cache line of its own, so that a rank that polls
# one does not slow down writes to another.
OPS, AGREES, LEFT, PID, MARKS, NOTE, BELL = 0, 8, 16, 24, 32, 40, 48
PIECE = 384 << 10  # bytes of a rank's part of a block: few waits, and it fits a core's cache
Steps = Generator[int, None, Any]  # an operation: yields the post that others must have reached


class RankNotes:
    """The notes of one rank, and its view of the others' notes (a `waiting.WaitNotes`).

    A note is guarded by a counter, which is odd while the note is being written. A reader that sees
    the same even number before and after has read a whole note.
    """

    def __init__(self, cells: memoryview, rank: int) -> None:
        self._cells, self._bytes, self._rank = cells, cells.cast("B"), rank

    def leave(self) -> None:
        self._cells[self._rank * SPAN // 8 + LEFT] = 1

    def left(self, rank: int) -> bool:
        return bool(self._cells[rank * SPAN // 8 + LEFT])

    def tell(self, text: bytes) -> None:
        """Leave a note. A note that is too long is left out: the wait then ends at its deadline."""
        text = text if len(text) <= TEXT - 8 else b""
        at, turn = self._rank * SPAN + CELLS + TEXT, self._rank * SPAN // 8 + NOTE
        self._cells[turn] += 1
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
        return b""  # the writer has died, or was stopped, in the middle of a note


class ControlSegment:
    """One rank's view of the control segment.

    Counters: `posted` and the cell OPS count this rank's posts, `_mail_turns` and the cell AGREES
    its turns of agreements. `_meetings` counts meetings, whose parity picks a half. `turn` counts
    stages used so far; all ranks have the same. A rank's counter is written by that rank alone.

    Args:
        segment: The memory, mapped by all ranks.
        rank: This rank.
        names: Rank of each member among all workers, for messages and errors.
        deadline: Seconds that a wait may take.
        folder: Folder of files in place of memfd. Default: memfd.
        cancel_scope: Ends waits of this segment and its subgroups. Default: a new one.
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
        self.posted = 0
        self.turn = 0  # the next stage is turn % SLOTS
        self._segment = segment
        self._bytes = segment.view_bytes()
        self._cells = self._bytes.cast("q")
        self._own_cell = (rank * SPAN) // 8  # this rank's first cell
        self._others = [r for r in range(size) if r != rank]
        # Cells of the other ranks, by kind.
        self._ops, self._agrees, self._marks = (
            [(r * SPAN) // 8 + cell for r in self._others] for cell in (OPS, AGREES, MARKS)
        )
        self._meetings = self._mail_turns = 0
        self._marks_by_call: dict[CallFingerprint, int] = {}
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._bell = (
            Bell(self._cells, segment.start, [r * SPAN // 8 + BELL for r in range(size)], rank)
            if futex.has_futex()
            else None
        )
        self.watch = RankWaiter(
            rank, names, RankNotes(self._cells, rank), deadline=deadline, bell=self._bell
        )
        self._cancel_scope = CancelScope() if cancel_scope is None else cancel_scope
        self._cancel_scope.register_end(self.watch.interrupt)
        self._cells[self._own_cell + PID] = os.getpid()
        self.gather_bytes(b"")  # from here on all process ids are there
        self.watch.watch_processes({r: self._cells[(r * SPAN) // 8 + PID] for r in self._others})
        # Bytes of a block: each rank's part is a whole number of cache lines.
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
        """Make the segment on rank 0, and send its address to the others through the store.

        Returns when all have mapped it, or raises one error on all.
        """
        turn = 0

        def meet(word: str) -> list[str]:
            nonlocal turn
            turn += 1
            store.put(f"shared/{turn}/{rank}", word)
            return [store.take(f"shared/{turn}/{r}", deadline) for r in range(len(names))]

        segment = make_shared_segment(
            len(names) * SPAN, rank, 0, meet, inside=True, folder=folder, at_once=False
        )
        assert segment is not None
        return cls(
            segment, rank, names, deadline=deadline, folder=folder, cancel_scope=cancel_scope
        )

    @property
    def named(self) -> bool:
        """Whether its memory is a file with a name, in a `folder` or for lack of memfd."""
        return self._segment.named

    # ---- the channel of operations

    def post(self) -> None:
        """Raise this rank's counter: the others now see everything that it wrote before."""
        self.posted += 1
        self._cells[self._own_cell + OPS] = self.posted
        if self._bell is not None:
            self._bell.ring()

    def has_reached(self, value: int) -> bool:
        """Whether all other ranks have posted `value` times."""
        cells = self._cells
        for at in self._ops:  # noqa: SIM110  (a generator costs three times as much here)
            if cells[at] < value:
                return False
        return True

    def find_behind(self, value: int) -> list[int]:
        """List the ranks that have not posted `value` times."""
        return [r for r, at in zip(self._others, self._ops, strict=True) if self._cells[at] < value]

    @property
    def parity(self) -> int:
        """The half of marks, metas and small stages that the next `meet` uses: 0 or 1."""
        return self._meetings & 1

    def meet(self, call: CallFingerprint, meta: Any = None) -> Generator[int, None, list[Any]]:
        """Begin an operation: compare the call of every rank, and exchange metas.

        Returns every rank's `meta`. If calls differ in their place alone, and only by ranks that
        have memory of their own, returns every rank's place instead.
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
        parity, mark = self.parity, self._hash_call(call)
        self._meetings += 1
        # The data first, then the mark, then the counter.
        self._write_bytes(self._own_cell * 8 + METAS + parity * META, packed)
        self._cells[self._own_cell + MARKS + parity] = mark
        self.post()
        yield self.posted
        # The mark is a hash of the call. If marks differ, all ranks see it, and exchange texts.
        if call.flaw or any(self._cells[at + parity] != mark for at in self._marks):
            self._write_bytes(
                self._own_cell * 8 + CELLS,
                msgpack.packb(
                    [str(call)[:400], call.flaw[:400], call.place, callsite.find_user_line()[-200:]]
                ),
            )
            self.post()
            yield self.posted
            entries = [
                msgpack.unpackb(self._read_bytes(r * SPAN + CELLS)) for r in range(self.size)
            ]
            places = [place for _, _, place, _ in entries]
            # One place besides OWN: ranks can go on together, through stages.
            meets = all(places) and len({*places, OWN}) <= 2
            calls = [
                (text if meets else f"{text} {place}".strip(), flaw)
                for text, flaw, place, _ in entries
            ]
            check_calls_agree(calls, self.names, [line for *_, line in entries])
            return places
        if meta is None:
            return []
        return [
            msgpack.unpackb(self._read_bytes(r * SPAN + METAS + parity * META))
            for r in range(self.size)
        ]

    def stage_address(self, rank: int, turn: int) -> int:
        """Address of a rank's stage of a turn."""
        return self._segment.start + rank * SPAN + STAGES + turn % SLOTS * STAGE

    def view_stage(
        self, rank: int, turn: int, offset: int, count: int, dtype: torch.dtype
    ) -> Tensor:
        """View `count` elements of a rank's stage of a turn, from byte `offset` on."""
        return self._view(rank * SPAN + STAGES + turn % SLOTS * STAGE + offset, count, dtype)

    def view_small(self, rank: int, parity: int, count: int, dtype: torch.dtype) -> Tensor:
        """View the first `count` elements of a half of a rank's small stage."""
        return self._view(rank * SPAN + SMALLS + parity * SMALL, count, dtype)

    def _view(self, at: int, count: int, dtype: torch.dtype) -> Tensor:
        key = (at, count, dtype)
        view = self._views.get(key)
        # Making a view costs more than a small sum, so views are kept.
        if view is None:
            if len(self._views) > 4096:
                self._views.clear()
            view = self._views[key] = self._segment.view_tensor(at, (count,), dtype)
        return view

    def _hash_call(self, call: CallFingerprint) -> int:
        """Hash a call to an int64, its mark. Cached, as the same calls come back."""
        digits = self._marks_by_call.get(call)
        if digits is None:
            if len(self._marks_by_call) > 4096:
                self._marks_by_call.clear()
            digits = self._marks_by_call[call] = struct.unpack("q", digest_call(call)[:8])[0]
        return digits

    # ---- the channel of agreements

    # (a tuple)
    def gather_bytes(
        self,
        payload: bytes,
        call: CallFingerprint = CallFingerprint("agree"),  # noqa: B008
    ) -> list[bytes]:
        """Gather every rank's payload, of any length, once all have come to the same `call`.

        Payloads are not compared.
        """
        call_number = self.watch.made.get("agree", 0)
        self.watch.made["agree"] = call_number + 1
        mark = self._hash_call(call)
        try:
            answers, marks = self._swap_mail(payload, mark, call, call_number)
            if call.flaw or any(other != mark for other in marks):
                texts, _ = self._swap_mail(
                    msgpack.packb(
                        [str(call)[:400], call.flaw[:400], callsite.find_user_line()[-200:]]
                    ),
                    0,
                    call,
                    call_number,
                )
        except BaseException as error:
            # Whatever ended this wait, ranks are at different turns of this channel now.
            self.watch.end_everywhere(error)
            raise
        if call.flaw or any(other != mark for other in marks):
            sides = [msgpack.unpackb(text) for text in texts]
            check_calls_agree(
                [(text, flaw) for text, flaw, _ in sides], self.names, [line for *_, line in sides]
            )
        return answers

    def _swap_mail(
        self, payload: bytes, mark: int, call: CallFingerprint, call_number: int
    ) -> tuple[list[bytes], list[int]]:
        """Exchange payloads in turns of a mailbox, as many as the longest payload needs.

        Returns every rank's payload and mark.
        """
        answers, marks = [b""] * self.size, [0] * self.size
        longest, at, room = len(payload), 0, MAIL - 16
        while True:
            self._mail_turns += 1
            target = self._mail_turns
            base = MAILS + (target & 1) * MAIL
            # As in `meet`: the data first, then the counter.
            self._cells[(self._own_cell * 8 + base) // 8] = mark
            self._write_bytes(self._own_cell * 8 + base + 8, payload[at : at + room], len(payload))
            self._cells[self._own_cell + AGREES] = target
            if self._bell is not None:
                self._bell.ring()
            self.watch.wait_until_ready(self._make_condition(target, call, call_number))
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

    def _make_condition(
        self, target: int, call: CallFingerprint, call_number: int
    ) -> WaitCondition:
        cells, agrees = self._cells, self._agrees

        def met() -> bool:
            for at in agrees:  # noqa: SIM110
                if cells[at] < target:
                    return False
            return True

        def missing() -> list[int]:
            return [r for r, at in zip(self._others, agrees, strict=True) if cells[at] < target]

        return WaitCondition(met, missing, "agree", call_number, call)

    # ---- more memory, and segments of subgroups

    def allocate_segment(self, nbytes: int, call: CallFingerprint) -> SharedSegment:
        """Make a new segment that all ranks map. `ResourceError` on all if one of them can't."""
        segment = make_shared_segment(
            nbytes, self.rank, 0, self._make_meet(call), inside=True, folder=self.folder
        )
        assert segment is not None
        return segment

    def make_subsegment(self, ranks: Sequence[int], call: CallFingerprint) -> ControlSegment | None:
        """Make the control segment of a subgroup. All ranks call it with the same ranks.

        None on ranks that are not in it.
        """
        words, inside = self._make_meet(call), self.rank in ranks
        segment = make_shared_segment(
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

    def _make_meet(self, call: CallFingerprint) -> Callable[[str], list[str]]:
        return lambda word: [answer.decode() for answer in self.gather_bytes(word.encode(), call)]

    def _write_bytes(self, at: int, data: bytes, total: int | None = None) -> None:
        self._cells[at // 8] = len(data) if total is None else total
        self._bytes[at + 8 : at + 8 + len(data)] = data

    def _read_bytes(self, at: int) -> bytes:
        return bytes(self._bytes[at + 8 : at + 8 + self._cells[at // 8]])

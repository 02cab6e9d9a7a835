"""The control segment of a group inside one host, and its two channels.

native/segment.h has the layout of the memory, and the order in which it is read and written. Two
channels run over it, and each has a counter of every rank: *operations* on tensors, in which a rank
posts and goes on, and *agreements*, in which it waits.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import msgpack

from paceline import callsite
from paceline.comm.cancellation import CancelScope
from paceline.comm.fingerprint import OWN, CallFingerprint, check_calls_agree, digest_call
from paceline.comm.shm.shared_segment import SharedSegment, make_shared_segment
from paceline.comm.shm.waiting import RankWaiter, WaitCondition
from paceline.errors import PacelineError
from paceline.native.functions import address_of, load_functions

# As in native/segment.h:
SMALL = 256 << 10  # bytes of each half of a small stage, for tensors that every rank sums by itself
ADDED = 1 << 20  # bytes that a rank may add so, from all ranks: a million take some 50 us
META = 16 << 10  # bytes of each half of a rank's meta
MAIL = 16 << 10  # bytes of each half of a rank's mailbox
TEXT = 4096  # bytes of a rank's text, and of its note
TEXTS = 512
METAS = TEXTS + 2 * TEXT
MAILS = METAS + 2 * META
OPERATIONS, AGREEMENTS = 0, 1  # numbers of the channels
BRIEF = 50_000  # nanoseconds of the first part of a wait
REACHED = 0  # result of a wait whose target was reached
Steps = Generator[int, None, Any]  # an operation: yields the post that others must have reached


class SegmentState(ctypes.Structure):
    """This process's view of the segment: `pl_segment` of native/segment.h."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("posted", ctypes.c_int64),
        ("meetings", ctypes.c_int64),
        ("mail_turns", ctypes.c_int64),
        ("turn", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("interrupted", ctypes.c_int64),
    ]


class RankNotes:
    """The notes of one rank, and its view of the others' notes (a `waiting.WaitNotes`)."""

    def __init__(self, state: int) -> None:
        self._state, self._native = state, load_functions()

    def leave(self) -> None:
        self._native.leave(self._state)

    def left(self, rank: int) -> bool:
        return bool(self._native.has_left(self._state, rank))

    def tell(self, text: bytes) -> None:
        """Leave a note. A note that is too long is left out: the wait then ends at its deadline."""
        self._native.write_note(self._state, text, len(text))

    def told(self, rank: int) -> bytes:
        """Read a note. Empty if its writer has died in the middle of it."""
        text = ctypes.create_string_buffer(TEXT)
        nbytes = self._native.read_note(self._state, rank, address_of(text))
        return text.raw[:nbytes]  # after the call, as `raw` copies the buffer


class ControlSegment:
    """One rank's view of the control segment.

    `state` holds this rank's counts of posts, meetings, turns of agreements and stages. C changes
    them. `pointer` is the address of `state`. `operation` is the address of the memory in which C
    holds the state of the operation under way.

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
        self._native = load_functions()
        self.state = SegmentState()
        self.pointer = address_of(self.state)
        self._native.open_segment(self.pointer, segment.start, rank, self.size)
        # One is enough: of the operations in the queue, only the oldest has begun.
        self._operation = ctypes.create_string_buffer(self._native.operation_bytes())
        self.operation = address_of(self._operation)
        self._span = self._native.segment_bytes(1)  # bytes of a rank
        self.block = self.state.block  # bytes of a block
        self.small = min(SMALL, ADDED // self.size)  # most bytes that every rank sums by itself
        self._segment = segment
        self._bytes = segment.view_bytes()
        self._others = [r for r in range(self.size) if r != rank]
        self._heads = (ctypes.c_int64 * (2 * self.size))()  # marks, then lengths, of mail
        self._marks_by_call: dict[CallFingerprint, int] = {}
        self.watch = RankWaiter(rank, names, RankNotes(self.pointer), deadline=deadline)
        self._cancel_scope = CancelScope() if cancel_scope is None else cancel_scope
        self._cancel_scope.register_end(self.interrupt)
        self._native.set_pid(self.pointer, os.getpid())
        self.gather_bytes(b"")  # from here on all process ids are there
        self.watch.watch_processes({r: self._native.get_pid(self.pointer, r) for r in self._others})

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
            load_functions().segment_bytes(len(names)),
            rank,
            0,
            meet,
            inside=True,
            folder=folder,
            at_once=False,
        )
        assert segment is not None
        return cls(
            segment, rank, names, deadline=deadline, folder=folder, cancel_scope=cancel_scope
        )

    @property
    def named(self) -> bool:
        """Whether its memory is a file with a name, in a `folder` or for lack of memfd."""
        return self._segment.named

    def interrupt(self, error: PacelineError) -> None:
        """Break the group on this rank alone. Any thread may call it."""
        self.watch.interrupt(error)
        self._native.interrupt(self.pointer)

    # ---- the channel of operations

    @property
    def posted(self) -> int:
        """Posts of this rank so far."""
        return int(self.state.posted)

    def post(self) -> int:
        """Raise this rank's counter: the others now see everything that it wrote before."""
        return int(self._native.post(self.pointer))

    def has_reached(self, target: int) -> bool:
        """Whether all other ranks have posted `target` times."""
        return bool(self._native.has_reached(self.pointer, OPERATIONS, target))

    def wait(self, channel: int, target: int, nanoseconds: int) -> bool:
        """Wait until all other ranks have reached `target`. Returns whether they have."""
        return bool(self._native.wait(self.pointer, channel, target, nanoseconds) == REACHED)

    def find_behind(self, target: int, channel: int = OPERATIONS) -> list[int]:
        """List the ranks that have not reached `target`."""
        ranks = (ctypes.c_int64 * self.size)()
        count = self._native.find_behind(self.pointer, channel, target, address_of(ranks))
        return list(ranks[:count])

    @property
    def parity(self) -> int:
        """The half of marks, metas and small stages that the next `meet` uses: 0 or 1."""
        return int(self.state.meetings & 1)

    def meet(self, call: CallFingerprint, meta: Any = None) -> Generator[int, None, list[Any]]:
        """Begin an operation: compare the call of every rank, and exchange metas.

        Returns every rank's `meta`. If calls differ in their place alone, and only by ranks that
        have memory of their own, returns every rank's place instead.
        """
        packed = b"" if meta is None else msgpack.packb(meta)
        if len(packed) > META - 8:
            flaw = f"{len(packed)} bytes describe it and {META - 8} fit; "
            call = call._replace(flaw=f"{flaw}exchange fewer tensors at a time")
            packed = b""
        parity, mark = self.parity, self.hash_call(call)
        yield self._native.begin_meeting(self.pointer, mark, packed, len(packed))
        if call.flaw or not self._native.marks_agree(self.pointer, parity, mark):
            return (yield from self.compare_calls(call))
        if meta is None:
            return []
        return [
            msgpack.unpackb(self._read_bytes(r * self._span + METAS + parity * META))
            for r in range(self.size)
        ]

    def compare_calls(self, call: CallFingerprint) -> Generator[int, None, list[Any]]:
        """Exchange the texts of all calls, after a meeting with different marks or a flaw.

        Returns every rank's place if calls differ in nothing else, and ranks can go on together.

        Raises:
            Mismatch: Calls differ; on all ranks.
            UsageError: A rank's call has a flaw; on all ranks.
        """
        self._write_bytes(
            self.rank * self._span + TEXTS,
            msgpack.packb(
                [str(call)[:400], call.flaw[:400], call.place, callsite.find_user_line()[-200:]]
            ),
        )
        yield self.post()
        entries = [
            msgpack.unpackb(self._read_bytes(r * self._span + TEXTS)) for r in range(self.size)
        ]
        places = [place for _, _, place, _ in entries]
        # One place besides OWN: ranks can go on together, through stages.
        meets = all(places) and len({*places, OWN}) <= 2
        calls = [
            (text if meets else f"{text} {place}".strip(), flaw) for text, flaw, place, _ in entries
        ]
        check_calls_agree(calls, self.names, [line for *_, line in entries])
        return places

    def hash_call(self, call: CallFingerprint) -> int:
        """Hash a call to an int64, its mark. Cached, as the same calls come back.

        If marks differ, all ranks see it, and exchange the texts of their calls.
        """
        digits = self._marks_by_call.get(call)
        if digits is None:
            if len(self._marks_by_call) > 4096:
                self._marks_by_call.clear()
            digits = self._marks_by_call[call] = struct.unpack("q", digest_call(call)[:8])[0]
        return digits

    # ---- the channel of agreements

    # The default is a tuple, which nothing can change (B008).
    def gather_bytes(
        self,
        payload: bytes,
        call: CallFingerprint = CallFingerprint("agree"),  # noqa: B008
    ) -> list[bytes]:
        """Gather every rank's payload, of any length, once all have come to the same `call`.

        Payloads are not compared.
        """
        call_number = self.watch.count_call("agree")
        mark = self.hash_call(call)
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
        answers = [b""] * self.size
        longest, at, room = len(payload), 0, MAIL - 16
        heads = address_of(self._heads)
        while True:
            piece = payload[at : at + room]
            turn = self._native.post_mail(self.pointer, mark, piece, len(piece), len(payload))
            started = time.perf_counter()
            # Most waits end here, before the first look at deadlines and at the other ranks.
            came = self.watch.broken is None and self.wait(AGREEMENTS, turn, BRIEF)
            self.watch.add_wait(started)
            if not came:
                self.watch.wait_until_ready(self._make_condition(turn, call, call_number))
            self._native.read_mail_heads(self.pointer, turn, heads, heads + 8 * self.size)
            marks, totals = self._heads[: self.size], self._heads[self.size :]
            for r, total in enumerate(totals):
                start = r * self._span + MAILS + (turn & 1) * MAIL + 16
                answers[r] += bytes(self._bytes[start : start + max(0, min(total - at, room))])
            longest = max(longest, *totals)
            at += room
            if at >= longest:
                return answers, marks

    def _make_condition(
        self, target: int, call: CallFingerprint, call_number: int
    ) -> WaitCondition:
        return WaitCondition(
            partial(self._native.has_reached, self.pointer, AGREEMENTS, target),
            partial(self.find_behind, target, AGREEMENTS),
            partial(self.wait, AGREEMENTS, target),
            "agree",
            call_number,
            call,
        )

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
            self._native.segment_bytes(len(ranks)),
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

    def _write_bytes(self, at: int, data: bytes) -> None:
        self._bytes[at : at + 8] = len(data).to_bytes(8, sys.byteorder)
        self._bytes[at + 8 : at + 8 + len(data)] = data

    def _read_bytes(self, at: int) -> bytes:
        length = int.from_bytes(self._bytes[at : at + 8], sys.byteorder)
        return bytes(self._bytes[at + 8 : at + 8 + length])

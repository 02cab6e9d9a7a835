from __future__ import annotations

import os
import random
import time

import pytest

from paceline.cluster.store import Store
from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.shm.segment import MAIL, META, ControlSegment
from paceline.errors import Mismatch, UsageError
from tests.harness.processes import fork, threads


def join(store: Store, rank: int, size: int) -> ControlSegment:
    return ControlSegment.from_store(store, rank, range(size), deadline=60)


def test_payloads_of_any_length_are_exchanged() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        segment = join(store, rank, size)
        for length in (0, 1, MAIL - 17, MAIL - 16, MAIL - 15, 2 * MAIL, 100_000):
            wanted = [
                os.urandom(0) + bytes([r + length & 255]) * (length * (r + 1) // size)
                for r in range(size)
            ]
            assert segment.gather_bytes(wanted[rank]) == wanted

    for size in (1, 2, 5):
        threads(size, body)
    fork(3, body)


def test_other_calls_of_agree_are_told_apart_and_the_lane_goes_on() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        segment = join(store, rank, size)
        for payload in (b"", b"x" * 3 * MAIL * rank):
            with pytest.raises(
                Mismatch,
                match=r"rank 0 at this \(\S+\); ranks 1, 2 at that of 'w' \(\S+test_segment.py:\d+\)",  # noqa: E501
            ):
                segment.gather_bytes(
                    payload, CallFingerprint("that", "w") if rank else CallFingerprint("this")
                )
            with pytest.raises(UsageError, match=r"that: it is wrong \(rank 2\)"):
                segment.gather_bytes(
                    payload, CallFingerprint("that", flaw="it is wrong" if rank == 2 else "")
                )
            assert segment.gather_bytes(bytes([rank])) == [b"\0", b"\1", b"\2"]

    threads(3, body)


def run(segment: ControlSegment, call: CallFingerprint, meta: object = None) -> list[object]:
    steps = segment.meet(call, meta)
    try:
        while True:
            target = next(steps)
            while not segment.has_reached(target):
                os.sched_yield()
    except StopIteration as stop:
        found: list[object] = stop.value
        return found


def test_meetings_give_every_ranks_meta() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        segment = join(store, rank, size)
        for turn in range(50):
            assert run(segment, CallFingerprint("turn", str(turn)), [rank, turn]) == [
                [r, turn] for r in range(size)
            ]
            assert run(segment, CallFingerprint("turn")) == []
        big = "x" * (META - 50)
        assert run(segment, CallFingerprint("big"), big) == [big] * size
        with pytest.raises(
            UsageError,
            match=(
                rf"big: {META} bytes describe it and {META - 8} fit; exchange fewer tensors at a "
                r"time \(rank 1\)"
            ),
        ):
            run(segment, CallFingerprint("big"), "x" * (META - 3) if rank == 1 else "")
        with pytest.raises(Mismatch, match=r"rank 0 at one \(\S+\); rank 1 at other"):
            run(segment, CallFingerprint("other" if rank else "one"), big)
        assert run(segment, CallFingerprint("again"), rank) == [0, 1]

    fork(2, body)


def test_notes_are_whole_while_their_writer_goes_on() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        notes, other = join(store, rank, size).watch._notes, 1 - rank
        lengths: set[int] = set()
        deadline = time.monotonic() + 60
        while rank == 0 and notes.told(other) != b"seen":
            assert time.monotonic() < deadline
            length = random.randrange(4000)
            notes.tell(bytes([length & 255]) * length)
        while rank == 1 and len(lengths) < 100:
            assert time.monotonic() < deadline
            note = notes.told(other)
            assert set(note) <= {len(note) & 255}
            lengths.add(len(note))
        notes.tell(b"seen")

    fork(2, body)


def test_a_note_that_is_too_long_is_left_out() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        notes = join(store, rank, size).watch._notes
        notes.tell(b"x" * 4088)
        assert notes.told(rank) == b"x" * 4088
        notes.tell(b"x" * 4089)
        assert notes.told(rank) == b""

    fork(1, body)


def test_blocks_are_whole_lines_of_every_part() -> None:
    for size in (1, 2, 3, 5):
        block = threads(size, lambda rank, size, store: join(store, rank, size).block)[0]
        assert block % (64 * size) == 0 and 64 * size < block <= 2 << 20

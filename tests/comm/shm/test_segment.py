from __future__ import annotations

import os

import pytest
import torch

from paceline.cluster.store import Store
from paceline.comm.fingerprint import CallFingerprint
from paceline.comm.shm.segment import MAIL, META, SLOTS, STAGE, ControlSegment
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


def test_every_place_of_the_segment_has_one_writer() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        segment = join(store, rank, size)
        segment.gather_bytes(b"")
        for slot in range(SLOTS):
            segment.view_stage(rank, slot, 0, STAGE, torch.uint8).fill_(10 * rank + slot)
        for half in range(2):
            segment.view_small(rank, half, 8192, torch.float32).fill_(rank - half)
        segment.gather_bytes(b"y" * MAIL)
        run(segment, CallFingerprint("call"), ["z" * 1000])
        for r in range(size):
            assert all(
                bool((segment.view_stage(r, slot, 0, STAGE, torch.uint8) == 10 * r + slot).all())
                for slot in range(SLOTS)
            )
            assert all(
                bool((segment.view_small(r, half, 8192, torch.float32) == r - half).all())
                for half in range(2)
            )
            assert (
                segment.view_stage(r, SLOTS + 1, 64, 1, torch.uint8).data_ptr()
                == segment.stage_address(r, 1) + 64
            )
        segment.gather_bytes(b"")

    fork(3, body)


def test_blocks_are_whole_lines_of_every_part() -> None:
    for size in (1, 2, 3, 5):
        block = threads(size, lambda rank, size, store: join(store, rank, size).block)[0]
        assert block % (64 * size) == 0 and 64 * size < block <= STAGE

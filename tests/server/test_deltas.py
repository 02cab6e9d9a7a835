"""What a server tells: workers that had the last of it have the same bits, the others are given all, and nothing is lost for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.codec.coding import exact, nbytes, parts, room
from paceline.codec.dense import half, int8, sign
from paceline.codec.sparse import randomk, topk
from paceline.comm.bucket_layout import Bucket, BucketShape, build
from paceline.errors import Mismatch
from paceline.server.codings import CodingPhase, at
from paceline.server.deltas import DeltaEncoder
from paceline.state.snapshot import loads, pack

SIZES = ((40, 10), (7,))


def unit(*phases: CodingPhase, dtype: torch.dtype = torch.float32) -> tuple[DeltaEncoder, Bucket]:
    shapes = [BucketShape.of(torch.empty(size, dtype=dtype))._replace(kind="coded") for size in SIZES]
    (bucket,) = build(shapes, [[0, 1]], lambda numel, dtype, device: torch.empty(numel, dtype=dtype))
    bucket.flat.copy_(torch.randn(bucket.flat.numel(), generator=torch.Generator().manual_seed(1)))
    told = DeltaEncoder(phases, bucket, 3)
    told.level()
    return told, bucket


class Worker:
    """Takes in what it is told."""

    def __init__(self, phases: tuple[CodingPhase, ...]) -> None:
        self.phases, self.has, self.copy, self.nbytes = phases, None, torch.empty(0), 0

    def read(self, told: DeltaEncoder, apart: tuple[int, int] | None = None) -> Tensor:
        """`apart`: not in lockstep, as this worker in this turn."""
        body, tensors = told.read(self.has) if apart is None else told.read_apart(apart[0], self.has, apart[1])
        self.nbytes = sum(x.nbytes for x in tensors)
        if body["turn"] is not None:
            found = torch.empty(self.copy.numel())
            coding: Any = at(self.phases, body["turn"]).coding
            coding.decode(parts(coding, found.numel(), tensors[0]), found)
            self.copy = self.copy + found.to(self.copy.dtype)
        elif tensors:
            self.copy = tensors[0].clone()
        self.has = body["number"]
        return self.copy


def step(told: DeltaEncoder, bucket: Bucket, turn: int, size: float = 0.1) -> None:
    told.settle()
    bucket.flat.add_(torch.randn(bucket.flat.numel(), generator=torch.Generator().manual_seed(turn)), alpha=size)
    told.stepped(turn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("coding", [half(), int8(64), sign(), topk(0.1), randomk(0.2)], ids=repr)
def test_workers_have_the_same_and_come_to_the_value(coding: Any, dtype: torch.dtype) -> None:
    phases = (CodingPhase(0, coding),)
    told, bucket = unit(*phases, dtype=dtype)
    one, other, late = Worker(phases), Worker(phases), Worker(phases)
    assert torch.equal(one.read(told), bucket.flat) and torch.equal(other.read(told), bucket.flat)
    for turn in range(12):
        step(told, bucket, turn)
        assert torch.equal(one.read(told), other.read(told))
        assert one.nbytes == other.nbytes == nbytes(coding, bucket.flat.numel()), "nothing else comes"
        assert turn or not torch.equal(one.copy, bucket.flat)
        one.read(told)
        assert one.nbytes == 0, "it has it already"
    assert torch.equal(late.read(told), one.copy) and late.nbytes == bucket.flat.nbytes
    missed = Worker(phases)
    missed.has, missed.copy = one.has, one.copy
    step(told, bucket, 12)
    step(told, bucket, 13)
    assert torch.equal(missed.read(told), late.read(told)) and missed.nbytes == bucket.flat.nbytes, "it has missed one"
    before = float((one.copy.double() - bucket.flat.double()).norm())
    for turn in range(14, 80):
        step(told, bucket, turn, 0.0)
    left = float((late.read(told).double() - bucket.flat.double()).norm())
    assert left < max(0.2 * before, 1e-3 if dtype == torch.bfloat16 else 1e-6), "what is lost comes later"


def test_a_level_is_the_value_itself() -> None:
    phases = (CodingPhase(0, topk(0.05)),)
    told, bucket = unit(*phases)
    one, slow = Worker(phases), Worker(phases)
    for worker in (one, slow):
        worker.read(told)
    step(told, bucket, 0)
    assert not torch.equal(one.read(told), bucket.flat)
    told.level()
    assert torch.equal(one.read(told), bucket.flat) and torch.equal(slow.read(told), bucket.flat)
    step(told, bucket, 1)
    assert torch.equal(one.read(told), slow.read(told)) and one.nbytes < 200, "and they go on from there"


def test_phases() -> None:
    phases = (CodingPhase(0, None), CodingPhase(2, int8(64)), CodingPhase(4, None))
    told, bucket = unit(*phases)
    one = Worker(phases)
    one.read(told)
    for turn in range(6):
        step(told, bucket, turn)
        assert torch.equal(one.read(told), bucket.flat) == (turn not in (2, 3))


def test_whether_somebody_has_read_changes_nothing() -> None:
    phases = (CodingPhase(0, int8(64, "stochastic")),)
    (read, one), (unread, other) = unit(*phases), unit(*phases)
    for turn in range(5):
        step(read, one, turn)
        step(unread, other, turn)
        read.read(None)
    assert torch.equal(read.read(None)[1][0], unread.read(None)[1][0]) and read.read(None)[0] == unread.read(None)[0]
    assert torch.equal(read.read(5)[1][0], unread.read(5)[1][0]) and read.read(5)[0]["turn"] == 4


def test_a_replica_goes_on() -> None:
    phases = (CodingPhase(0, topk(0.1)),)
    told, bucket = unit(*phases)
    one = Worker(phases)
    one.read(told)
    for turn in range(3):
        step(told, bucket, turn)
    one.has, one.copy = 3, told.read(None)[1][0]
    step(told, bucket, 3)
    replica, theirs = unit(*phases)
    theirs.flat.copy_(bucket.flat)
    replica.load_state_dict(loads(pack(told.state_dict()).dumps()).unpack())
    assert torch.equal(replica.read(3)[1][0], told.read(3)[1][0]) and replica.read(None)[0] == told.read(None)[0]
    step(told, bucket, 4)
    step(replica, theirs, 4)
    assert torch.equal(replica.read(None)[1][0], told.read(None)[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("coding", [half(), int8(64), sign(), topk(0.1), randomk(0.2)], ids=repr)
def test_out_of_lockstep_each_is_told_what_it_lacks(coding: Any, dtype: torch.dtype) -> None:
    """However often others read; what is lost comes later."""
    phases = (CodingPhase(0, coding),)
    told, bucket = unit(*phases, dtype=dtype)
    quick, slow = Worker(phases), Worker(phases)
    for turn in range(60):
        bucket.flat.add_(torch.randn(bucket.flat.numel(), generator=torch.Generator().manual_seed(turn)), alpha=0.1 * (turn < 12))
        for number, worker, reads in ((3, quick, True), (5, slow, turn % 4 == 0)):
            if reads:
                worker.read(told, (number, turn))
                assert worker.nbytes == (bucket.flat.nbytes if turn == 0 else nbytes(coding, bucket.flat.numel()))
        if turn == 11:
            before = float((quick.copy.double() - bucket.flat.double()).norm())
    left = float((quick.copy.double() - bucket.flat.double()).norm())
    assert before > 0 and left < max(0.2 * before, 1e-3 if dtype == torch.bfloat16 else 1e-6)
    assert told.nbytes == 2 * bucket.flat.nbytes, "what each has been told"
    slow.has = -1
    assert torch.equal(slow.read(told, (5, 60)), bucket.flat) and slow.nbytes == bucket.flat.nbytes, "what it has isn't what it was told"
    assert torch.equal(slow.read(told, (5, 61)), bucket.flat) and slow.nbytes == nbytes(coding, bucket.flat.numel())


def test_out_of_lockstep_the_bits_are_those_of_the_server() -> None:
    """Nothing that is lost adds up: what the server takes a worker to have is what it has, in any phase."""
    phases = (CodingPhase(0, int8(64, "stochastic")), CodingPhase(5, None), CodingPhase(7, topk(0.1)))
    told, bucket = unit(*phases)
    workers = {number: Worker(phases) for number in (0, 1, 4)}
    for turn in range(10):
        bucket.flat.add_(torch.randn(bucket.flat.numel(), generator=torch.Generator().manual_seed(turn)))
        for number, worker in workers.items():
            assert torch.equal(worker.read(told, (number, turn)), told._apart[number][1])
        assert torch.equal(workers[0].copy, workers[1].copy) == (turn not in (1, 2, 3, 4)), "drawn apart"
    told.forget({0, 4})
    assert sorted(told._apart) == [0, 4]
    assert torch.equal(workers[1].read(told, (1, 10)), bucket.flat), "who is forgotten is given all"


def push(coding: Any, x: Tensor) -> Tensor:
    whole, message = room(coding, x.numel())
    coding.encode(x, message)
    return whole


def test_what_is_pushed_is_decoded_where_it_was_used() -> None:
    told, _ = unit(CodingPhase(0, sign(64)), dtype=torch.float64)
    x = torch.cat([torch.zeros(400), torch.ones(7)])
    found = told.decode(push(sign(64), x), b"\0\1", 0)
    assert found.dtype == torch.float64 and not bool(found[:400].any()) and bool(found[400:].all())
    assert bool(told.decode(push(sign(64), x), b"\1\1", 0)[384:400].all()), "zeros in a block with others have a sign"


def test_what_does_not_fit() -> None:
    told, _ = unit(CodingPhase(0, None), CodingPhase(3, topk(0.1)))
    flat = torch.ones(407)
    right = push(topk(0.1), flat)
    assert told.decode(flat, b"\1\1", 2) is flat, "exact as long as it is"
    assert torch.equal(told.decode(right, b"\1\1", 3).sum(), torch.tensor(41.0))
    for wrong in (flat, right[:-1], right.view(torch.int8), right.view(1, -1), push(topk(0.2), flat), push(exact(), flat), torch.empty(0)):
        with pytest.raises(Mismatch, match=r"topk\(0.1\) of 407 elements is uint8 \[328\]"):
            told.decode(wrong, b"\1\1", 3)
    for place in (407, -1, 2**31 - 1, -(2**31)):
        strange = right.clone()
        parts(topk(0.1), 407, strange)[1][5] = place
        with pytest.raises((LookupError, RuntimeError)):
            told.decode(strange, b"\1\1", 3)

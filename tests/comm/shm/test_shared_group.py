from __future__ import annotations

import gc
import itertools
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cluster.store import Store
from paceline.comm.group_protocol import OPS, Work, piece_bounds
from paceline.comm.reduction_rules import DTYPES, check_operation, reduce_parts
from paceline.comm.shm.segment import META
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import Mismatch, ResourceError, UsageError, ViewChanged
from tests.harness.processes import fork, threads

TINY = 16 << 10  # bytes of a block, so that small tensors have many


def join(store: Store, rank: int, size: int, *, block: int = TINY, **options: Any) -> SharedGroup:
    """A group; `block` makes its blocks small."""
    group = SharedGroup.from_store(store, rank, size, **({"deadline": 20.0} | options))
    group.segment.block = block // (64 * size) * (64 * size)
    return group


def mine(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Different data on every rank, the same in every run."""
    values = (
        torch.randn(
            shape, generator=torch.Generator().manual_seed(97 * seed + rank), dtype=torch.float64
        )
        * 3
    )
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) + rank if values.dim() else values + rank).to(
            dtype
        )
    return (
        values > 0
        if dtype == torch.bool
        else values.to(dtype)
        if dtype.is_floating_point
        else values.abs().to(dtype)
    )


def defined(op: str, dtype: torch.dtype) -> bool:
    try:
        check_operation(op, dtype)
    except UsageError:
        return False
    return True


def same(x: Tensor, wanted: Tensor, op: str = "sum") -> bool:
    """Bit by bit; a product of complex numbers depends on where torch's vectors end."""
    if x.dtype.is_complex and op == "product" and x.dtype == wanted.dtype:
        return torch.allclose(x, wanted, rtol=1e-4)
    return x.dtype == wanted.dtype and x.shape == wanted.shape and torch.equal(x, wanted)


# ---- sums


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(5, marks=pytest.mark.soak)])
def test_every_reduction_of_every_dtype_is_that_of_one_process(size: int) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        for dtype in DTYPES:
            for op in OPS:
                if not defined(op, dtype):
                    continue
                for shape in [(7, 3), (160_088,), (0, 4), ()]:
                    parts = [mine(r, shape, dtype) for r in range(size)]
                    wanted = reduce_parts(op, parts)
                    x = parts[rank].clone()
                    assert same(group.all_reduce(x, op=op).wait(), wanted, op), (op, dtype, shape)
                    assert torch.equal(x, parts[rank])
                    assert group.all_reduce(x, op=op, out=x).wait() is x and same(x, wanted, op), (
                        op,
                        dtype,
                        shape,
                    )
                    # on all ranks
                    assert all(
                        torch.equal(x, other.view(shape))
                        for other in group.all_gather(x.view(1, *shape)).wait()
                    )
                    start, stop = piece_bounds(wanted.numel(), size)[rank]
                    assert same(
                        group.reduce_scatter(parts[rank], op=op).wait(),
                        wanted.reshape(-1)[start:stop],
                        op,
                    ), (op, dtype, shape)
        group.close()

    fork(size, body)


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_of_any_length_with_blocks_of_any_size(size: int) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=60)
        dice = random.Random(5)
        for length in [
            1,
            8191,
            8192,
            8193,
            65_536 * size,
            700_001,
            *(dice.randrange(1, 100_000) for _ in range(4)),
        ]:
            for block in (group.segment.block, 64 * size, 4096 * size):
                if length * 4 > 500 * block:
                    continue
                before, group.segment.block = group.segment.block, block
                parts = [mine(r, (length,), torch.float32) for r in range(size)]
                wanted = reduce_parts("sum", parts)
                out = torch.full((length + 2,), 7.0)
                group.all_reduce(parts[rank], out=out[1:-1]).wait()
                assert torch.equal(out[1:-1], wanted) and out[0] == out[-1] == 7, (length, block)
                group.all_reduce(parts[rank], out=parts[rank]).wait()
                assert torch.equal(parts[rank], wanted), (length, block)
                group.segment.block = before
        group.close()

    fork(size, body)


def test_halves_are_summed_in_float32() -> None:
    # 2048 + 1 is 2048 in float16 and 256 + 1 is 256 in bfloat16: summed in halves, the ones would
    # be lost
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
            for length in (1, 400_000):
                x = torch.full((length,), [big, 1.0, 1.0][rank], dtype=dtype)
                registered = group.empty((length,), dtype).copy_(x)
                for out in (x, registered):
                    result = group.all_reduce(out, out=out).wait()
                    assert result.dtype == dtype and bool((result == big + 2).all())
        group.close()

    threads(3, body)


@pytest.mark.parametrize("shape", [(6, 4), (60, 400)])
def test_strides_conjugates_and_overlaps(shape: tuple[int, int]) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        parts = [mine(r, shape, torch.complex64) for r in range(size)]
        wanted = reduce_parts("sum", parts)
        x = parts[rank].t().contiguous().t()
        assert (
            not x.is_contiguous()
            and group.all_reduce(x, out=x).wait() is x
            and torch.equal(x, wanted)
        )
        out = torch.zeros(*shape, 2, dtype=torch.complex64)[..., 1]
        assert torch.equal(group.all_reduce(parts[rank], out=out).wait(), wanted) and torch.equal(
            out, wanted
        )
        conjugate = parts[rank].clone().conj()
        assert torch.equal(group.all_reduce(conjugate).wait(), wanted.conj())
        assert torch.equal(
            group.all_reduce(parts[rank], out=torch.zeros_like(wanted).conj()).wait(), wanted
        )
        negative = parts[rank].clone().conj().imag  # a view that is negated when read
        assert torch.equal(group.all_reduce(negative).wait(), wanted.conj().imag)
        assert torch.equal(
            torch.stack(group.all_gather(negative).wait()),
            torch.stack([p.conj().imag for p in parts]),
        )
        rows = torch.zeros(shape[0] + 1, shape[1], dtype=torch.complex64)
        rows[:-1] = parts[rank]
        group.all_reduce(rows[:-1], out=rows[1:]).wait()
        assert torch.equal(rows[1:], wanted)
        leaf = torch.nn.Parameter(parts[rank].real.clone())
        assert not group.all_reduce(leaf, op="mean").wait().requires_grad
        group.close()

    threads(2, body)


def test_registered_memory() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        memory = group.empty((300, 401), torch.float32)
        assert memory.shape == (300, 401) and bool((memory == 0).all())
        parts = [mine(r, (300, 401), torch.float32) for r in range(size)]
        for view in (
            memory,
            memory[10:250],
            memory.view(-1)[12_345:100_002],
            memory[:200, :50],
            memory.t(),
        ):
            for op in OPS:
                memory.copy_(parts[rank])
                wanted = [part.clone() for part in parts]
                views = [
                    torch.as_strided(
                        w,
                        view.shape,
                        view.stride(),
                        view.storage_offset() - memory.storage_offset(),
                    )
                    for w in wanted
                ]
                views[rank].copy_(reduce_parts(op, views))
                assert group.all_reduce(view, op=op, out=view).wait() is view
                assert torch.equal(memory, wanted[rank]), (view.shape, op)  # and nothing around it
        memory.copy_(parts[rank])
        assert torch.equal(
            group.all_reduce(memory).wait(), reduce_parts("sum", parts)
        ) and torch.equal(memory, parts[rank])
        group.all_reduce(parts[rank], out=memory).wait()
        assert torch.equal(memory, reduce_parts("sum", parts))
        assert group.empty((), torch.int64).shape == () and group.empty(
            (0, 3), torch.int64
        ).shape == (0, 3)
        group.close()

    fork(2, body)
    fork(3, body)


def test_a_broadcast_of_registered_memory_takes_it_where_it_lies_if_all_ranks_have_it_there() -> (
    None
):
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        for ours in (group, group.make_subgroup(range(size))):
            assert ours is not None
            a, b = group.empty((40_000,), torch.float32), group.empty((40_000,), torch.float32)
            plain = torch.empty(40_000)
            gone = group.empty((40_000,), torch.float32)
            if rank == size - 1:
                group.release(gone)
            cases = [
                (a, a),
                (a[100:30_100], a[100:30_100]),
                (a, plain),
                (plain, a),
                (a, b),
                (a[:30_000], a[5:30_005]),
                (gone, gone),
            ]
            for root, (from_here, to_here) in itertools.product(range(size), cases):
                for memory in (a, b, plain, gone):
                    memory.fill_(-1)
                turn = from_here if rank == root else to_here
                if rank == root:
                    turn.copy_(torch.arange(turn.numel()))
                assert ours.broadcast(turn, root=root).wait() is turn
                assert torch.equal(turn, torch.arange(turn.numel()).float())
                turn.fill_(-1)  # the root's is its own again
                everything = [
                    memory for memory in (a, b, plain, gone) if memory.data_ptr() != turn.data_ptr()
                ]
                assert all(bool((memory == -1).all()) for memory in everything)
        group.close()

    fork(2, body)
    fork(3, body)


def test_a_subgroup_of_all_that_is_closed_leaves_registered_memory_alone() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        memory = group.empty((160_000,), torch.float32)
        hands = group.make_subgroup(range(size))
        assert hands is not None
        hands.close()
        assert group._registered.find_place(memory) is not None
        group.all_reduce(memory.fill_(rank), out=memory).wait()
        assert bool((memory == 1).all())
        group.close()

    threads(2, body)


def test_memory_that_is_released_is_forgotten() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        seen = set()
        for turn in range(12):
            shape = (240_000 + 40_000 * (turn % 2),)
            memory = group.empty(shape, torch.float32)
            seen.add(memory.data_ptr())
            for _ in range(2):
                group.all_reduce(memory.fill_(rank + turn), out=memory).wait()
                assert bool((memory == 2 * turn + 1).all())
            group.release(memory[5:])
            group.all_reduce(memory.fill_(rank), out=memory).wait()  # still good, only slower
            assert bool((memory == 1).all())
            del memory
        assert len(seen) < 12, "no address was used again: this test shows nothing"
        group.close()

    fork(2, body)


def test_memory_registered_in_another_order_or_at_another_place_is_a_mismatch() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        memories = [group.empty((160_000,), torch.float32) for _ in range(2)]
        plain = torch.ones(160_000)
        for mine in (
            memories[rank],
            memories[0][rank : rank + 152_000],
            memories[0] if rank else plain,
        ):
            with pytest.raises(Mismatch, match=r"rank 0 at .*rank 1 at .*registered"):
                group.all_reduce(mine, out=mine).wait()
        assert group.all_reduce(plain, out=plain).wait()[0] == 2
        group.close()

    fork(2, body)


def test_memory_that_stands_in_for_registered_memory_on_some_ranks() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        memory, own = group.empty((160_000,), torch.float32), torch.empty(160_000)
        kept = memory.fill_(-1.0)
        group.stand_in(own)
        for turn, without in enumerate(({0}, {size - 1}, {*range(size)}, set(), {0})):
            parts = [mine(r, (160_000,), torch.float32, turn) for r in range(size)]
            flat = own if rank in without else memory
            for view in (flat, flat[100:120_000]):
                flat.copy_(parts[rank])
                assert group.all_reduce(view, out=view, name=f"bucket {turn}").wait() is view
                low = view.storage_offset() - flat.storage_offset()
                assert torch.equal(view, reduce_parts("sum", parts)[low : low + view.numel()])
                assert torch.equal(flat[:low], parts[rank][:low])
            if rank in without:
                assert bool((kept == -1).all())
            memory.fill_(-1.0)
        flat = own if rank == 0 else memory
        with pytest.raises(Mismatch, match=r"bucket [01].*bucket [01]"):  # as before
            group.all_reduce(flat, out=flat, name=f"bucket {rank % 2}").wait()
        group.release(own)
        with pytest.raises(Mismatch, match="registered"):
            group.all_reduce(flat, out=flat).wait()
        assert group.all_reduce(own.fill_(1.0), out=own).wait()[0] == size
        group.close()

    fork(2, body)
    fork(3, body)


def test_sums_in_and_out_of_inference_mode() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        with torch.inference_mode():
            memory = group.empty((160_000,), torch.float32)
            for length in (3, 160_000):
                assert group.all_reduce(torch.ones(length)).wait()[-1] == 2
            group.all_reduce(memory, out=memory).wait()
        for length in (3, 160_000):
            assert group.all_reduce(torch.ones(length)).wait()[-1] == 2
        group.all_reduce(memory.fill_(1), out=memory).wait()
        assert memory[-1] == 2
        group.close()

    threads(2, body)


# ---- messages


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_messages(size: int) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.uint8):
            for length in (0, 1, 777, 9000):
                gathered = group.all_gather(mine(rank, (length * (rank + 1), 2), dtype)).wait()
                assert (
                    all(
                        same(x, mine(r, (length * (r + 1), 2), dtype))
                        for r, x in enumerate(gathered)
                    )
                    and len(gathered) == size
                )
                dealt = group.all_to_all(
                    [mine(rank, (length + to, 2), dtype, to) for to in range(size)]
                ).wait()
                assert all(
                    same(x, mine(r, (length + rank, 2), dtype, rank)) for r, x in enumerate(dealt)
                )
                x = mine(rank, (length, 3), dtype).t()
                assert group.broadcast(x, root=size - 1).wait() is x and same(
                    x, mine(size - 1, (length, 3), dtype).t()
                )
        scalars = group.all_gather(torch.tensor(rank)).wait()
        assert [x.item() for x in scalars] == list(range(size)) and scalars[0].shape == ()
        group.barrier().wait()
        assert group.gather_objects({"rank": rank, "x": [None, 1.5]}) == [
            {"rank": r, "x": [None, 1.5]} for r in range(size)
        ]
        group.close()

    fork(size, body)


def test_exchange() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        left, right = (rank - 1) % size, (rank + 1) % size
        inbox, strided = torch.zeros(30_000), torch.zeros(4, 2).t()
        sends = [
            (right, torch.full((30_000,), rank)[::1].float()),
            (right, torch.full((2, 4), 10.0 + rank)),
            (rank, torch.tensor([5 + rank])),
        ]
        note = torch.zeros(1, dtype=torch.int64)
        group.exchange(sends, [(left, inbox), (rank, note), (left, strided)], tag=3).wait()
        assert (
            bool((inbox == left).all())
            and bool((strided == 10 + left).all())
            and note.item() == 5 + rank
        )
        group.exchange([], []).wait()
        if rank == 0:
            group.exchange([(2, torch.ones(3))], []).wait()
        else:
            x = torch.zeros(3)
            group.exchange([], [(0, x)] if rank == 2 else []).wait()
            assert x.sum() == (3 if rank == 2 else 0)
        group.close()

    fork(3, body)
    threads(3, body)


# ---- many at once


def test_operations_end_in_the_order_they_began_in_whatever_is_waited_for_first() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        for _ in range(20):
            works: list[Work[Any]] = [
                group.all_reduce(torch.full((length,), float(i)))
                for i, length in enumerate([5, 30_000, 0, 9000])
            ]
            works.append(group.all_gather(torch.tensor([rank])))
            if rank % 2:
                works.append(group.barrier())
                works[-1].wait()
                assert all(work.done() for work in works)
            else:
                assert works[1].wait()[0] == size and works[0].done()
                works.append(group.barrier())
            assert works[3].wait()[0] == 3 * size and torch.cat(works[4].wait()).tolist() == list(
                range(size)
            )
            assert works[0].exception() is None and works[0].wait()[0] == 0
            works[-1].wait()
        group.close()

    fork(3, body)


def test_a_dropped_work_goes_on() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        memory = torch.full((100_000,), float(rank))
        group.all_reduce(memory, out=memory)
        gc.collect()
        group.barrier().wait()
        assert bool((memory == 1).all())
        group.close()

    fork(2, body)


class Story:
    """A random sequence of calls, the same on every rank, with sleeps of its own on each;
    results are checked against one process.
    """

    def __init__(self, group: SharedGroup, seed: int, pause: float) -> None:
        self.group, self.dice, self.sleep = (
            group,
            random.Random(seed),
            random.Random(100 * seed + group.rank),
        )
        self.pause = pause
        self.pending: list[tuple[Work[Any], Callable[[Any], bool]]] = []
        self.memory = group.empty((240_000,), torch.float32)
        self.busy = False  # whether an operation on the registered memory is pending

    def run(self, turns: int) -> None:
        for turn in range(turns):
            if self.sleep.random() < 0.3:
                time.sleep(self.sleep.random() * self.pause)
            choice = self.dice.choice(
                [
                    self.reduce,
                    self.reduce,
                    self.registered,
                    self.gather,
                    self.scatter,
                    self.agree,
                    self.wait,
                    self.broadcast,
                ]
            )
            choice(turn)
            if len(self.pending) > 5:
                self.wait(turn)
        while self.pending:
            self.wait(turns)

    def start(self, work: Work[Any], check: Callable[[Any], bool]) -> None:
        self.pending.append((work, check))

    def data(self, shape: tuple[int, ...], turn: int) -> list[Tensor]:
        return [mine(r, shape, torch.float32, turn) for r in range(self.group.size)]

    def length(self) -> int:
        return self.dice.choice([0, 1, 100, 65_536, 65_537, self.dice.randrange(400_000)])

    def reduce(self, turn: int) -> None:
        parts, op = self.data((self.length(),), turn), self.dice.choice(OPS)
        self.start(
            self.group.all_reduce(parts[self.group.rank].clone(), op=op),
            lambda found: torch.equal(found, reduce_parts(op, parts)),
        )

    def registered(self, turn: int) -> None:
        if self.busy:
            return
        self.busy = True
        low = self.dice.randrange(80_000)
        view = self.memory[low : low + self.dice.randrange(160_000)]
        parts = self.data((view.numel(),), turn)
        view.copy_(parts[self.group.rank])
        self.start(
            self.group.all_reduce(view, out=view),
            lambda found: self.settle() and torch.equal(found, reduce_parts("sum", parts)),
        )

    def settle(self) -> bool:
        self.busy = False
        return True

    def gather(self, turn: int) -> None:
        length = self.length()
        wanted = [mine(r, (length + r,), torch.float32, turn) for r in range(self.group.size)]
        work = self.group.all_gather(wanted[self.group.rank])
        self.start(
            work, lambda found: all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        )

    def broadcast(self, turn: int) -> None:
        parts, root = self.data((self.length(),), turn), self.dice.randrange(self.group.size)
        self.start(
            self.group.broadcast(parts[self.group.rank].clone(), root=root),
            lambda found: torch.equal(found, parts[root]),
        )

    def scatter(self, turn: int) -> None:
        parts = self.data((self.length(),), turn)
        start, stop = piece_bounds(parts[0].numel(), self.group.size)[self.group.rank]
        self.start(
            self.group.reduce_scatter(parts[self.group.rank]),
            lambda found: torch.equal(found, reduce_parts("sum", parts)[start:stop]),
        )

    def agree(self, turn: int) -> None:
        length = self.dice.choice([0, 5, 320_000])
        wanted = [bytes([r + turn & 255]) * (length + r) for r in range(self.group.size)]
        assert self.group.gather_bytes(wanted[self.group.rank]) == wanted

    def wait(self, _: int) -> None:
        if self.pending:
            index = self.sleep.randrange(len(self.pending)) if not self.busy else 0
            if not self.busy and self.sleep.random() < 0.5:
                assert self.pending[index][0].done() in (True, False)
            work, check = self.pending.pop(0)
            assert check(work.wait())


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_random_story(size: int) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        for seed in range(2):
            Story(group, seed, 1e-3).run(60)
        group.close()

    fork(size, body)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_many_random_stories(seed: int) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size, block=(1 + seed % 4) * 64 * 60)
        Story(group, seed, [0, 1e-4, 1e-3, 5e-3][seed % 4]).run(1500)
        group.close()

    fork(2 + seed % 4, body, timeout=300)


# ---- what has come apart


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (
            lambda g: g.all_reduce(torch.ones(3), name="w"),
            lambda g: g.all_reduce(torch.ones(4), name="w"),
            ["[3]", "[4]", "'w'"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(240_000)),
            lambda g: g.all_reduce(torch.ones(240_001)),
            ["[240000]", "[240001]"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(3)),
            lambda g: g.all_reduce(torch.ones(3).double()),
            ["float32", "float64"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(3)),
            lambda g: g.all_reduce(torch.ones(3), op="mean"),
            ["sum", "mean"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(3), name="a"),
            lambda g: g.all_reduce(torch.ones(3), name="b"),
            ["'a'", "'b'"],
        ),
        (lambda g: g.barrier(), lambda g: g.all_gather(torch.ones(3)), ["barrier", "all_gather"]),
        (
            lambda g: g.all_gather(torch.ones(3, 2)),
            lambda g: g.all_gather(torch.ones(3, 4)),
            ["[*, 2]", "[*, 4]"],
        ),
        (
            lambda g: g.reduce_scatter(torch.ones(3)),
            lambda g: g.reduce_scatter(torch.ones(90_000)),
            ["[3]", "[90000]"],
        ),
        (
            lambda g: g.broadcast(torch.ones(1), root=0),
            lambda g: g.broadcast(torch.ones(1), root=1),
            ["root 0", "root 1"],
        ),
        (
            lambda g: g.exchange([], [], tag=1),
            lambda g: g.exchange([], [], tag=2),
            ["tag 1", "tag 2"],
        ),
        (
            lambda g: g.gather_objects(1, name="a"),
            lambda g: g.gather_objects(1),
            ["'a'", "gather_objects"],
        ),
        (
            lambda g: g.gather_bytes(b"x" * 99),
            lambda g: g.gather_objects(1),
            ["agree", "gather_objects"],
        ),
        (
            lambda g: g.empty((3,), torch.int8),
            lambda g: g.empty((4,), torch.int8),
            ["empty", "[3]", "[4]"],
        ),
        (
            lambda g: g.make_subgroup([0]),
            lambda g: g.make_subgroup([0, 1]),
            ["ranks 0", "ranks 0, 1"],
        ),
    ],
)
def test_a_mismatch_is_raised_on_every_rank(first: Any, second: Any, names: list[str]) -> None:
    def body(rank: int, size: int, store: Store) -> str:
        group = join(store, rank, size)
        before, after = group.all_reduce(torch.ones(240_000)), None
        with pytest.raises(Mismatch) as caught:
            work = (first if rank == 0 else second)(group)
            after = group.all_reduce(torch.ones(240_000))
            work.wait()
        assert before.wait()[0] == size and (after is None or after.wait()[0] == size)
        group.barrier().wait()  # the group still works
        assert group.gather_bytes(b"") == [b""] * size
        group.close()
        return str(caught.value)

    for message in threads(3, body):
        assert (
            "rank 0 at" in message
            and "ranks 1, 2 at" in message
            and all(name in message for name in names)
        )


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda g: g.all_reduce(torch.ones(3, dtype=torch.int64), op="mean"), "mean"),
        (lambda g: g.all_reduce(torch.ones(240_000, dtype=torch.int64), op="mean"), "mean"),
        (lambda g: g.reduce_scatter(torch.ones(30_000, dtype=torch.bool)), "bool"),
        (lambda g: g.all_reduce(torch.ones(3, dtype=torch.complex64), op="max"), "complex64"),
        (lambda g: g.all_reduce(torch.ones(3), op="median"), "median"),
        (
            lambda g: g.all_reduce(torch.ones(3), out=torch.ones(2) if g.rank == 1 else None),
            "rank 1",
        ),
        (lambda g: g.all_reduce(torch.ones(240_000), out=torch.ones(240_000).double()), "float64"),
        (lambda g: g.broadcast(torch.ones(3), root=9), "root=9"),
        (lambda g: g.all_to_all([torch.ones(3)]), "1 tensors for 2 ranks"),
        (lambda g: g.all_reduce(torch.eye(3).to_sparse() if g.rank else torch.eye(3)), "sparse"),
        (
            lambda g: g.reduce_scatter(torch.eye(3).to_sparse() if g.rank else torch.eye(3)),
            "sparse",
        ),
        (lambda g: g.all_gather(torch.eye(3).to_sparse()), "sparse"),
        (lambda g: g.all_reduce(torch.ones(3, device="meta")), "meta"),
        (lambda g: g.exchange([(1 - g.rank, torch.ones(3, device="meta"))], []), "meta"),
        (lambda g: g.exchange([(7, torch.ones(3))], []), "rank 7"),
        (lambda g: g.exchange([(g.rank, torch.ones(1)) for _ in range(META)], []), "fewer tensors"),
        (lambda g: g.gather_objects({1, 2} if g.rank else 5), "set is not JSON"),
        (lambda g: g.make_subgroup([0, 0]), "different"),
        (lambda g: g.make_subgroup([2]), "different"),
    ],
)
def test_bad_arguments_raise_on_every_rank(call: Any, names: str) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        with pytest.raises(UsageError, match=names):
            call(group).wait()
        assert group.all_reduce(torch.ones(2)).wait()[0] == size
        group.close()

    threads(2, body)


def test_exchanges_that_do_not_fit_raise_on_all() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        for count, kind in ((2, "float32"), (3, "float64")):
            with pytest.raises(
                Mismatch,
                match=f"rank 0 sends 3 x float32 to rank 1, which expects {count} x {kind}",
            ):
                inbox = torch.ones(count, dtype=getattr(torch, kind))
                group.exchange(
                    [(1, torch.ones(3))] if rank == 0 else [], [(0, inbox)] if rank == 1 else []
                ).wait()
        group.barrier().wait()
        group.close()

    threads(3, body)


# ---- groups within


def test_subgroups_overlap_and_have_subgroups() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        low, high, back, alone = (
            group.make_subgroup([0, 1, 2]),
            group.make_subgroup([1, 2, 3]),
            group.make_subgroup([3, 0]),
            group.make_subgroup([2]),
        )
        assert (low is None, high is None, back is None) == (rank == 3, rank == 0, rank in (1, 2))
        works = [
            (g, g.all_reduce(torch.full((160_000,), 1.0 + rank)))
            for g in (low, high, back)
            if g is not None
        ]
        whole = group.all_reduce(torch.tensor(rank))
        for sub, work in reversed(works):
            assert work.wait()[-1] == sum(1 + sub.global_rank(r) for r in range(sub.size))
        assert whole.wait() == 6
        if back is not None:
            assert back.rank == (0 if rank == 3 else 1)
        if low is not None:
            inner = low.make_subgroup([2, 0])
            if inner is not None:
                assert torch.cat(inner.all_gather(torch.tensor([rank])).wait()).tolist() == [2, 0]
                assert [inner.global_rank(r) for r in range(2)] == [2, 0]
                inner.close()
        if high is not None:
            # as they are called in the whole
            with pytest.raises(
                Mismatch, match=r"rank 1 at barrier \(\S+\); ranks 2, 3 at all_reduce"
            ):
                (high.barrier() if rank == 1 else high.all_reduce(torch.ones(1))).wait()
        if alone is not None:
            assert alone.all_reduce(torch.ones(3)).wait()[0] == alone.size
        for sub in (low, high, back, alone):
            if sub is not None:
                sub.close()
        group.barrier().wait()  # a closed subgroup is no end of the whole
        group.close()

    fork(4, body)


def test_a_wait_in_one_group_pushes_the_pending_operations_of_its_relatives() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        sub = group.make_subgroup([1, 0])
        assert sub is not None
        for _ in range(5):
            work = group.all_reduce(torch.ones(100_000))
            if rank == 0:
                # rank 1 comes only once the sum is done, in which rank 0 has parts to add
                sub.gather_bytes(b"")
            assert work.wait()[0] == 2
            if rank == 1:
                sub.gather_bytes(b"")
            work = sub.all_reduce(torch.ones(100_000))
            if rank == 1:
                group.barrier().wait()
            assert work.wait()[0] == 2
            if rank == 0:
                group.barrier().wait()
        group.close()

    fork(2, body)


def test_many_groups_in_one_process() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        groups = [join(store.open_substore(str(number)), rank, size) for number in range(6)]
        works = [
            group.all_reduce(torch.full((160_000,), float(number)))
            for number, group in enumerate(groups)
        ]
        assert [work.wait()[0].item() for work in works] == [2.0 * number for number in range(6)]
        for group in groups[::2]:
            group.close()
        assert groups[1].all_reduce(torch.tensor(1)).wait() == 2
        for group in groups:
            group.close()
            group.close()
            with pytest.raises(ViewChanged):
                group.barrier()
            with pytest.raises(ViewChanged):
                group.gather_bytes(b"")

    fork(2, body)


def test_agree_beside_pending_operations_in_any_order() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        for seed in range(15):
            dice = random.Random(10 * seed + rank)
            works: list[Any] = []
            agreed: list[Any] = []
            order = [True] * 3 + [False] * 3
            if seed % 3:  # rank by rank another interleaving
                dice.shuffle(order)
            for reducing in order:
                time.sleep(dice.random() * 1e-3 if dice.random() < 0.5 else 0)
                if reducing:
                    works.append(group.all_reduce(torch.ones(320_000)))
                else:
                    agreed.append(group.gather_bytes(bytes([rank] * 3)))
            assert [work.wait()[-1].item() for work in works] == [size] * 3 and agreed == [
                [bytes([r] * 3) for r in range(size)]
            ] * 3
        group.close()

    fork(3, body)


# ---- what is left behind


def held() -> tuple[int, int]:
    """Descriptors and shared mappings of this process."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(
        "memfd:paceline"
    )


def test_no_file_is_made_and_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", None)  # which makes the files in /dev/shm

    def body(rank: int, size: int, store: Store) -> None:
        def use(number: int) -> None:
            group = join(store.open_substore(str(number)), rank, size)
            sub = group.make_subgroup([0, 1])
            assert sub is not None
            memory = group.empty((100_000,), torch.float32)
            group.all_reduce(memory, out=memory).wait()
            sub.all_reduce(torch.ones(100_000)).wait()
            sub.close()
            group.close()

        use(0)
        gc.collect()
        before = held()
        for number in range(1, 6):
            use(number)
        gc.collect()
        assert held() == before

    fork(2, body)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "paceline-test", str(folder)],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("only root can mount a file system of 1 MB")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.jobs
def test_too_little_shared_memory_is_said_on_all_ranks(small: Path, tmp_path: Path) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        with pytest.raises(
            ResourceError,
            match=(
                r"MiB of shared memory can't be had \(No space left on device; "
                r".*small has 1 MiB free\)"
            ),
        ):
            join(store.open_substore("a"), rank, size, folder=str(small))
        group = join(store.open_substore("b"), rank, size, folder=str(tmp_path))
        group.segment.folder = str(small)
        with pytest.raises(ResourceError, match="shm-size"):
            group.empty((10**6,), torch.float32)
        with pytest.raises(ResourceError, match="shm-size"):
            group.make_subgroup([1, 2])
        memory = group.empty((70_000,), torch.float32)  # this fits
        assert (
            group.all_reduce(memory.fill_(1), out=memory).wait()[0] == size
            and os.listdir(small) == []
        )
        group.close()

    fork(3, body)
    assert os.listdir(small) == [] and os.listdir(tmp_path) == ["small"]


def test_traffic_is_counted() -> None:
    def body(rank: int, size: int, store: Store) -> tuple[int, int]:
        group = join(store, rank, size)
        group.all_gather(torch.ones(4)).wait()
        group.all_reduce(torch.ones(30)).wait()
        group.reduce_scatter(torch.ones(30)).wait()
        group.broadcast(torch.ones(2), root=1).wait()
        return group.traffic.within, group.traffic.between

    assert threads(3, body) == [(32 + 160 + 80, 0), (32 + 160 + 80 + 16, 0), (32 + 160 + 80, 0)]

"""Reductions of the backend, over groups in shared memory and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.backend.process_group import GroupBackend
from paceline.comm.backend.recurring import RecurringMemory
from paceline.errors import UsageError
from tests.harness.backends import RUNNERS, SIZES, mine, on_shared_memory, on_threads, reducing

OPS = [
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
]


def total(op: Any, parts: Sequence[Tensor]) -> Tensor:
    """The reduction that torch documents, in rank order."""
    stacked = torch.stack(list(parts))
    return {
        dist.ReduceOp.SUM: lambda: stacked.sum(0),
        dist.ReduceOp.AVG: lambda: stacked.sum(0) / len(parts),
        dist.ReduceOp.PRODUCT: lambda: stacked.prod(0),
        dist.ReduceOp.MIN: lambda: stacked.amin(0),
        dist.ReduceOp.MAX: lambda: stacked.amax(0),
    }[op]()


@RUNNERS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_reductions(run: Any, size: int, op: Any) -> None:
    shapes = [(), (7,), (3, 5), (0,)]

    def body(group: GroupBackend) -> Any:
        rank = group.rank()
        whole = [mine(rank, *shape, seed=i) for i, shape in enumerate(shapes)]
        works = [group.allreduce([x], reducing(op)) for x in whole]
        assert all(work.wait() for work in works) and all(
            work.is_completed() and work.is_success() for work in works
        )
        joined = [mine(rank, *shape, seed=i) for i, shape in enumerate(shapes)]
        group.allreduce_coalesced(joined, reducing(op, dist.AllreduceCoalescedOptions)).wait()
        one = mine(rank, 4, 2)
        group.reduce([one], reducing(op, dist.ReduceOptions, root=size - 1)).wait()
        return whole, joined, one

    for rank, (whole, joined, one) in enumerate(run(size, body)):
        for i, shape in enumerate(shapes):
            wanted = total(op, [mine(r, *shape, seed=i) for r in range(size)])
            torch.testing.assert_close(whole[i], wanted)
            torch.testing.assert_close(joined[i], wanted)
        wanted = (
            total(op, [mine(r, 4, 2) for r in range(size)])
            if rank == size - 1
            else mine(rank, 4, 2)
        )
        torch.testing.assert_close(one, wanted)


@RUNNERS
@pytest.mark.parametrize("size", SIZES)
def test_reductions_of_bits_and_of_complex_numbers(run: Any, size: int) -> None:
    def body(group: GroupBackend) -> Any:
        found = []
        for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
            x = torch.tensor([0b1100, 0b1010, 7]) + group.rank()
            group.allreduce([x], reducing(op)).wait()
            kept = torch.tensor([0b1100, 0b1010, 7]) + group.rank()
            group.reduce([kept], reducing(op, dist.ReduceOptions, root=0)).wait()
            found.append((x, kept))
        z = mine(group.rank(), 5, dtype=torch.complex64)
        group.allreduce([z], reducing()).wait()
        return found, z

    sources = [torch.tensor([0b1100, 0b1010, 7]) + rank for rank in range(size)]
    for rank, (found, z) in enumerate(run(size, body)):
        for (x, kept), function in zip(
            found, (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor), strict=True
        ):
            wanted = sources[0]
            for source in sources[1:]:
                wanted = function(wanted, source)
            assert torch.equal(x, wanted) and torch.equal(
                kept, wanted if rank == 0 else sources[rank]
            )
        torch.testing.assert_close(
            z, torch.stack([mine(r, 5, dtype=torch.complex64) for r in range(size)]).sum(0)
        )


@RUNNERS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
def test_averages_of_integers_are_rounded_towards_zero(
    run: Any, size: int, dtype: torch.dtype
) -> None:
    """As NCCL's are: the sum, divided as C divides."""

    def source(rank: int) -> Tensor:
        return torch.tensor([7 + rank, 3, 70, -5 - rank if dtype.is_signed else 9, 0, 1]).to(dtype)

    def body(group: GroupBackend) -> Any:
        whole, large, piece = (
            source(group.rank()),
            source(group.rank()).repeat(1 << 15),
            torch.empty(6, dtype=dtype),
        )
        group.allreduce([whole], reducing(dist.ReduceOp.AVG)).wait()
        group.allreduce([large], reducing(dist.ReduceOp.AVG)).wait()
        at_root = source(group.rank())
        group.reduce([at_root], reducing(dist.ReduceOp.AVG, dist.ReduceOptions, root=0)).wait()
        group.reduce_scatter_single(
            piece,
            source(group.rank()).repeat(size),
            reducing(dist.ReduceOp.AVG, dist.ReduceScatterOptions),
        ).wait()
        return whole, large, at_root, piece

    sums = sum(source(rank).long() for rank in range(size)).tolist()
    wanted = torch.tensor([int(x / size) for x in sums]).to(dtype)
    for rank, (whole, large, at_root, piece) in enumerate(run(size, body)):
        assert (
            torch.equal(whole, wanted)
            and torch.equal(large, wanted.repeat(1 << 15))
            and torch.equal(piece, wanted)
        )
        assert torch.equal(at_root, wanted if rank == 0 else source(rank))


@RUNNERS
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(run: Any, size: int) -> None:
    uneven = [(2 + rank, 3) for rank in range(size)]

    def body(group: GroupBackend) -> Any:
        rank, options = group.rank(), reducing(dist.ReduceOp.SUM, dist.ReduceScatterOptions)
        single, lists, odd, coalesced = (
            torch.empty(2, 3),
            torch.empty(4),
            torch.empty(uneven[rank]),
            [torch.empty(5), torch.empty(1, 2)],
        )
        group.reduce_scatter_single(single, mine(rank, 2 * size, 3), options).wait()
        group.reduce_scatter(
            [lists], [[mine(rank, 4, seed=r) for r in range(size)]], options
        ).wait()
        group.reduce_scatter(
            [odd], [[mine(rank, *shape, seed=r) for r, shape in enumerate(uneven)]], options
        ).wait()
        group.reduce_scatter_single_coalesced(
            coalesced, [mine(rank, 5 * size), mine(rank, size, 2)], options
        ).wait()
        return single, lists, odd, coalesced

    for rank, (single, lists, odd, coalesced) in enumerate(run(size, body)):
        ranks = range(size)
        torch.testing.assert_close(
            single, sum(mine(r, 2 * size, 3) for r in ranks)[2 * rank : 2 * rank + 2]
        )
        torch.testing.assert_close(lists, sum(mine(r, 4, seed=rank) for r in ranks))
        torch.testing.assert_close(odd, sum(mine(r, *uneven[rank], seed=rank) for r in ranks))
        torch.testing.assert_close(
            coalesced[0], sum(mine(r, 5 * size) for r in ranks)[5 * rank : 5 * rank + 5]
        )
        torch.testing.assert_close(
            coalesced[1], sum(mine(r, size, 2) for r in ranks)[rank : rank + 1]
        )


@pytest.mark.parametrize(
    "out", [torch.empty(3, 3), torch.empty(1, 3), torch.empty(2, 3, dtype=torch.float64)]
)
def test_an_output_that_is_not_like_its_part_of_uneven_ones_is_refused(out: Tensor) -> None:
    """It would have elements of the next rank's, or a part of its own, or another precision."""

    def body(group: GroupBackend) -> None:
        parts = [torch.ones(2, 3), torch.ones(3, 3)]
        if group.rank() == 0:
            with pytest.raises(UsageError, match=r"rank 0 can't get .* of torch.float32 \[2, 3\]"):
                group.reduce_scatter(
                    [out.clone()], [parts], reducing(dist.ReduceOp.SUM, dist.ReduceScatterOptions)
                )

    on_threads(2, body)


def test_an_unknown_reduction_names_those_there_are() -> None:
    def body(group: GroupBackend) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
        with pytest.raises(UsageError, match="there are"):
            group.allreduce([torch.ones(1)], options)

    on_threads(1, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_large_tensors_of_any_dtype_are_reduced_where_they_move(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecurringMemory, "may_move", lambda self, x, caller: True)

    def body(group: GroupBackend) -> bool:
        x = torch.empty(200_001, dtype=dtype)
        for seed in range(3):
            group.allreduce(
                [x.copy_(mine(group.rank(), 200_001, dtype=dtype, seed=seed))], reducing()
            ).wait()
            parts = [mine(rank, 200_001, dtype=dtype, seed=seed) for rank in range(3)]
            wanted = (
                torch.stack([part.float() if dtype == torch.bfloat16 else part for part in parts])
                .sum(0)
                .to(dtype)
            )
            torch.testing.assert_close(
                x, wanted, rtol=0.0 if dtype != torch.complex64 else 1e-6, atol=0.0
            )
        return x.untyped_storage().is_shared()

    assert on_shared_memory(3, body) == [True] * 3

"""The backend: every operation that torch.distributed asks a process group for, over groups in shared memory and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cluster.store import Store
from paceline.comm.backend import GroupBackend
from paceline.comm.group import Group
from paceline.comm.shm.group import SharedGroup
from paceline.comm.threads import spawn
from paceline.errors import DeadlineExceeded, Mismatch, UsageError
from tests.harness.processes import threads

SIZES = [1, 2, 3]
Body = Callable[[GroupBackend], Any]


def backend(group: Group, seconds: float = 20.0) -> GroupBackend:
    def none() -> Any:
        raise AssertionError("nobody sends to one rank alone here")

    return GroupBackend(group.rank, range(group.size), lambda: group, dist.HashStore(), timeout=timedelta(seconds=seconds), peers=none)


def on_threads(size: int, body: Body) -> list[Any]:
    return spawn(size, lambda group: body(backend(group)))


def on_shared_memory(size: int, body: Body) -> list[Any]:
    def run(rank: int, size: int, store: Store) -> Any:
        group = SharedGroup.from_store(store, rank, size, deadline=20)
        try:
            return body(backend(group))
        finally:
            group.close()

    return threads(size, run)


RUNNERS = pytest.mark.parametrize("run", [on_threads, on_shared_memory])


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Different data on every rank, the same in every run."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(97 * seed + rank), dtype=torch.float64) * 3
    return torch.complex(values, values + rank).to(dtype) if dtype.is_complex else values.to(dtype)


def reducing(op: Any = dist.ReduceOp.SUM, kind: Any = dist.AllreduceOptions, root: int | None = None) -> Any:
    options = kind()
    options.reduceOp = op
    if root is not None:
        options.rootRank = root
    return options


def rooted(kind: Any, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options


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


OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]


@RUNNERS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_reductions(run: Any, size: int, op: Any) -> None:
    shapes = [(), (7,), (3, 5), (0,)]

    def body(group: GroupBackend) -> Any:
        rank = group.rank()
        whole = [mine(rank, *shape, seed=i) for i, shape in enumerate(shapes)]
        works = [group.allreduce([x], reducing(op)) for x in whole]
        assert all(work.wait() for work in works) and all(work.is_completed() and work.is_success() for work in works)
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
        wanted = total(op, [mine(r, 4, 2) for r in range(size)]) if rank == size - 1 else mine(rank, 4, 2)
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
        for (x, kept), function in zip(found, (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor), strict=True):
            wanted = sources[0]
            for source in sources[1:]:
                wanted = function(wanted, source)
            assert torch.equal(x, wanted) and torch.equal(kept, wanted if rank == 0 else sources[rank])
        torch.testing.assert_close(z, torch.stack([mine(r, 5, dtype=torch.complex64) for r in range(size)]).sum(0))


@RUNNERS
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(run: Any, size: int) -> None:
    uneven = [(2 + rank, 3) for rank in range(size)]

    def body(group: GroupBackend) -> Any:
        rank, options = group.rank(), reducing(dist.ReduceOp.SUM, dist.ReduceScatterOptions)
        single, lists, odd, coalesced = torch.empty(2, 3), torch.empty(4), torch.empty(uneven[rank]), [torch.empty(5), torch.empty(1, 2)]
        group.reduce_scatter_single(single, mine(rank, 2 * size, 3), options).wait()
        group.reduce_scatter([lists], [[mine(rank, 4, seed=r) for r in range(size)]], options).wait()
        group.reduce_scatter([odd], [[mine(rank, *shape, seed=r) for r, shape in enumerate(uneven)]], options).wait()
        group.reduce_scatter_single_coalesced(coalesced, [mine(rank, 5 * size), mine(rank, size, 2)], options).wait()
        return single, lists, odd, coalesced

    for rank, (single, lists, odd, coalesced) in enumerate(run(size, body)):
        ranks = range(size)
        torch.testing.assert_close(single, sum(mine(r, 2 * size, 3) for r in ranks)[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(lists, sum(mine(r, 4, seed=rank) for r in ranks))
        torch.testing.assert_close(odd, sum(mine(r, *uneven[rank], seed=rank) for r in ranks))
        torch.testing.assert_close(coalesced[0], sum(mine(r, 5 * size) for r in ranks)[5 * rank : 5 * rank + 5])
        torch.testing.assert_close(coalesced[1], sum(mine(r, size, 2) for r in ranks)[rank : rank + 1])


@RUNNERS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64], ids=str)
def test_what_is_gathered_and_dealt(run: Any, size: int, dtype: torch.dtype) -> None:
    def body(group: GroupBackend) -> Any:
        rank, part = group.rank(), lambda *shape, seed=0: mine(group.rank(), *shape, dtype=dtype, seed=seed).abs().to(dtype)
        empty = lambda *shape: torch.zeros(shape, dtype=dtype)  # noqa: E731
        lists, single, apart = [empty(2, 3) for _ in range(size)], empty(2 * size, 3), [empty(2) for _ in range(size)]
        group.allgather([lists], [part(2, 3)]).wait()
        group.all_gather_single(single, part(2, 3)).wait()
        strided = empty(3, 2 * size).t()
        group.all_gather_single(strided, part(2, 3)).wait()
        coalesced = [empty(size), empty(2 * size, 2)]
        group.all_gather_single_coalesced(coalesced, [part(1), part(2, 2)]).wait()
        matrix = [[empty(2), empty(3)] for _ in range(size)]
        group.allgather_coalesced(matrix, [part(2), part(3)]).wait()
        same = part(4) if rank == size - 1 else empty(4)
        group.broadcast([same], rooted(dist.BroadcastOptions, size - 1)).wait()
        group.gather([apart] if rank == 0 else [], [part(2)], rooted(dist.GatherOptions, 0)).wait()
        dealt = empty(2)
        group.scatter(
            [dealt], [[part(2, seed=r) for r in range(size)]] if rank == size - 1 else [], rooted(dist.ScatterOptions, size - 1)
        ).wait()
        return lists, single, strided, coalesced, matrix, same, apart, dealt

    def wanted(rank: int, *shape: int, seed: int = 0) -> Tensor:
        return mine(rank, *shape, dtype=dtype, seed=seed).abs().to(dtype)

    for rank, (lists, single, strided, coalesced, matrix, same, apart, dealt) in enumerate(run(size, body)):
        assert all(torch.equal(x, wanted(r, 2, 3)) for r, x in enumerate(lists))
        assert torch.equal(single, torch.cat([wanted(r, 2, 3) for r in range(size)])) and torch.equal(strided, single)
        assert torch.equal(coalesced[0], torch.cat([wanted(r, 1) for r in range(size)]))
        assert torch.equal(coalesced[1], torch.cat([wanted(r, 2, 2) for r in range(size)]))
        assert all(torch.equal(row[0], wanted(r, 2)) and torch.equal(row[1], wanted(r, 3)) for r, row in enumerate(matrix))
        assert torch.equal(same, wanted(size - 1, 4))
        if rank == 0:
            assert all(torch.equal(x, wanted(r, 2)) for r, x in enumerate(apart))
        assert torch.equal(dealt, wanted(size - 1, 2, seed=rank))


@RUNNERS
@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(run: Any, size: int) -> None:
    """Rank a sends a tensor of a + 2 b + 1 elements to rank b."""

    def length(source: int, to: int) -> int:
        return source + 2 * to + 1

    def body(group: GroupBackend) -> Any:
        rank = group.rank()
        sent = [mine(rank, length(rank, to), seed=to) for to in range(size)]
        received = [torch.empty(length(source, rank)) for source in range(size)]
        group.alltoall(received, sent).wait()
        whole = torch.empty(sum(len(x) for x in received))
        splits = [len(x) for x in received], [len(x) for x in sent]
        group.all_to_all_single(whole, torch.cat(sent), *splits).wait()
        even = torch.empty(2 * size, 2)
        group.all_to_all_single(even, mine(rank, 2 * size, 2), [], []).wait()
        return received, whole, even

    for rank, (received, whole, even) in enumerate(run(size, body)):
        assert all(torch.equal(x, mine(source, length(source, rank), seed=rank)) for source, x in enumerate(received))
        assert torch.equal(whole, torch.cat(received))
        assert torch.equal(even, torch.cat([mine(source, 2 * size, 2)[2 * rank : 2 * rank + 2] for source in range(size)]))


@RUNNERS
def test_futures_end_in_the_background_in_any_order(run: Any) -> None:
    """Nobody waits for the works themselves, as in DDP."""

    def body(group: GroupBackend) -> Any:
        tensors = [mine(group.rank(), 50 + i, seed=i) for i in range(20)]
        works = [group.allreduce([x], reducing()) for x in tensors]
        futures = [work.get_future() for work in works]
        assert works[3].get_future() is futures[3]
        doubled = [future.then(lambda done: done.value()[0] * 2) for future in reversed(futures)]
        found = [future.wait() for future in reversed(doubled)]
        assert all(future.wait()[0] is x for future, x in zip(futures, tensors, strict=True))
        return found

    for found in run(3, body):
        for i, x in enumerate(found):
            torch.testing.assert_close(x, 2 * sum(mine(r, 50 + i, seed=i) for r in range(3)))


@RUNNERS
def test_calls_that_differ_are_named_on_all_ranks(run: Any) -> None:
    def body(group: GroupBackend) -> str:
        x = torch.ones(3 if group.rank() else 4)
        with pytest.raises(Mismatch) as caught:
            group.allreduce([x], reducing()).wait()
        with pytest.raises(Mismatch) as other:
            group.broadcast([x], rooted(dist.BroadcastOptions, 0)).wait() if group.rank() else group.barrier().wait()
        return f"{caught.value} / {other.value}"

    texts = run(2, body)
    assert all("[4]" in text and "[3]" in text and "broadcast" in text and "barrier" in text for text in texts)


@RUNNERS
def test_errors_reach_futures_too(run: Any) -> None:
    def body(group: GroupBackend) -> None:
        future = group.allreduce([torch.ones(3 + group.rank())], reducing()).get_future()
        with pytest.raises(Exception, match="come apart"):
            future.wait()

    run(2, body)


def test_a_rank_that_never_comes_is_named() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=20)
        if rank == 0:
            options = dist.BarrierOptions()
            options.timeout = timedelta(seconds=0.2)
            with pytest.raises(DeadlineExceeded, match="rank 1"):
                backend(group).barrier(options).wait()
            with pytest.raises(DeadlineExceeded, match="rank 1"):
                backend(group).monitored_barrier(timedelta(seconds=0.2))
        store.put(f"done{rank}", True)
        store.take(f"done{1 - rank}", 20)

    threads(2, body)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda group: group.allgather([[torch.empty(2)]], [torch.empty(2)]), "1 tensors for the results of 2 ranks"),
        (lambda group: group.all_gather_single(torch.empty(5), torch.empty(2)), "can't put"),
        (lambda group: group.reduce_scatter_single(torch.empty(5), torch.empty(2)), "can't give"),
        (lambda group: group.reduce_scatter([torch.empty(5)], [[torch.empty(5)]]), "1 tensors for 2 ranks"),
        (lambda group: group.allreduce([torch.empty(1), torch.empty(1)]), "takes one on each rank"),
        (lambda group: group._get_backend(torch.device("cuda")), "processor's memory"),
    ],
)
def test_wrong_arguments_raise_before_anything_moves(call: Body, words: str) -> None:
    def body(group: GroupBackend) -> None:
        with pytest.raises(UsageError, match=words):
            call(group)
        group.barrier().wait()

    on_threads(2, body)


def test_an_unknown_reduction_names_those_there_are() -> None:
    def body(group: GroupBackend) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
        with pytest.raises(UsageError, match="there are"):
            group.allreduce([torch.ones(1)], options)

    on_threads(1, body)


def test_coalesced_calls_end_as_one() -> None:
    def body(group: GroupBackend) -> Any:
        x, y = mine(group.rank(), 3), mine(group.rank(), 4, seed=1)
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([x], reducing())
        group.allreduce([y], reducing())
        group._end_coalescing(torch.device("cpu")).wait()
        group._start_coalescing(torch.device("cpu"))
        assert group._end_coalescing(torch.device("cpu")).wait()  # of nothing
        return x, y

    for x, y in on_threads(3, body):
        torch.testing.assert_close(x, sum(mine(r, 3) for r in range(3)))
        torch.testing.assert_close(y, sum(mine(r, 4, seed=1) for r in range(3)))

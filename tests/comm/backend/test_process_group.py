"""The backend: every operation that torch.distributed asks a process group for, over groups in
shared memory and others.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cluster.store import Store
from paceline.comm.backend.process_group import GroupBackend
from paceline.comm.backend.work import BackendWork, Completer
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import DeadlineExceeded, Mismatch, UsageError
from tests.harness.backends import (
    PATIENCE,
    RUNNERS,
    SIZES,
    Body,
    backend,
    meet,
    mine,
    on_threads,
    reducing,
    rooted,
)
from tests.harness.jobs import wait_for
from tests.harness.processes import threads


@RUNNERS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64], ids=str
)
def test_what_is_gathered_and_dealt(run: Any, size: int, dtype: torch.dtype) -> None:
    def body(group: GroupBackend) -> Any:
        rank, part = (
            group.rank(),
            lambda *shape, seed=0: (
                mine(group.rank(), *shape, dtype=dtype, seed=seed).abs().to(dtype)
            ),
        )
        empty = lambda *shape: torch.zeros(shape, dtype=dtype)  # noqa: E731
        lists, single, apart = (
            [empty(2, 3) for _ in range(size)],
            empty(2 * size, 3),
            [empty(2) for _ in range(size)],
        )
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
            [dealt],
            [[part(2, seed=r) for r in range(size)]] if rank == size - 1 else [],
            rooted(dist.ScatterOptions, size - 1),
        ).wait()
        return lists, single, strided, coalesced, matrix, same, apart, dealt

    def wanted(rank: int, *shape: int, seed: int = 0) -> Tensor:
        return mine(rank, *shape, dtype=dtype, seed=seed).abs().to(dtype)

    for rank, (lists, single, strided, coalesced, matrix, same, apart, dealt) in enumerate(
        run(size, body)
    ):
        assert all(torch.equal(x, wanted(r, 2, 3)) for r, x in enumerate(lists))
        assert torch.equal(
            single, torch.cat([wanted(r, 2, 3) for r in range(size)])
        ) and torch.equal(strided, single)
        assert torch.equal(coalesced[0], torch.cat([wanted(r, 1) for r in range(size)]))
        assert torch.equal(coalesced[1], torch.cat([wanted(r, 2, 2) for r in range(size)]))
        assert all(
            torch.equal(row[0], wanted(r, 2)) and torch.equal(row[1], wanted(r, 3))
            for r, row in enumerate(matrix)
        )
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
        assert all(
            torch.equal(x, mine(source, length(source, rank), seed=rank))
            for source, x in enumerate(received)
        )
        assert torch.equal(whole, torch.cat(received))
        assert torch.equal(
            even,
            torch.cat(
                [mine(source, 2 * size, 2)[2 * rank : 2 * rank + 2] for source in range(size)]
            ),
        )


@RUNNERS
def test_calls_that_differ_are_named_on_all_ranks(run: Any) -> None:
    def body(group: GroupBackend) -> str:
        x = torch.ones(3 if group.rank() else 4)
        with pytest.raises(Mismatch) as caught:
            group.allreduce([x], reducing()).wait()
        with pytest.raises(Mismatch) as other:
            group.broadcast(
                [x], rooted(dist.BroadcastOptions, 0)
            ).wait() if group.rank() else group.barrier().wait()
        return f"{caught.value} / {other.value}"

    texts = run(2, body)
    assert all(
        "[4]" in text and "[3]" in text and "broadcast" in text and "barrier" in text
        for text in texts
    )


def test_a_rank_that_never_comes_is_named() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)
        ours = backend(group)
        meet(ours)
        if rank == 0:
            options = dist.BarrierOptions()
            options.timeout = timedelta(seconds=0.2)
            with pytest.raises(DeadlineExceeded, match="rank 1"):
                ours.barrier(options).wait()
            with pytest.raises(DeadlineExceeded, match="rank 1"):
                ours.monitored_barrier(timedelta(seconds=0.2))
        store.put(f"done{rank}", True)
        store.take(f"done{1 - rank}", PATIENCE)

    threads(2, body)


def test_a_monitored_barrier_names_the_missing_though_the_completer_is_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def complete(completer: Completer, work: BackendWork, *, soon: bool = False) -> None:
        threading.Thread(target=work.bring_to_end, daemon=True).start()
        wait_for(lambda: work._lock.locked() or work.ended)

    monkeypatch.setattr(Completer, "add_work", complete)

    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)
        ours = backend(group)
        meet(ours)
        if rank == 0:
            with pytest.raises(DeadlineExceeded, match=r"rank 1 did not come within 0\.05 s"):
                ours.monitored_barrier(0.05)
            store.put("named", True)
        else:
            store.take("named", PATIENCE)
            ours.monitored_barrier(PATIENCE)  # rank 0 is still in it
        store.put(f"done{rank}", True)
        store.take(f"done{1 - rank}", PATIENCE)
        group.close()

    threads(2, body)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda group: group.allgather([[torch.empty(2)]], [torch.empty(2)]),
            "1 tensors for the results of 2 ranks",
        ),
        (lambda group: group.all_gather_single(torch.empty(5), torch.empty(2)), "can't put"),
        (lambda group: group.reduce_scatter_single(torch.empty(5), torch.empty(2)), "can't give"),
        (
            lambda group: group.reduce_scatter([torch.empty(5)], [[torch.empty(5)]]),
            "1 tensors for 2 ranks",
        ),
        (lambda group: group.allreduce([torch.empty(1), torch.empty(1)]), "takes one on each rank"),
        (lambda group: group.alltoall([torch.empty(2)], [torch.empty(2)] * 2), "2 tensors into 1"),
        (
            lambda group: group.all_to_all_single(torch.empty(3), torch.empty(3), [], []),
            "3 rows can't be dealt evenly",
        ),
        (
            lambda group: group.gather(
                [[torch.empty(2)]], [torch.empty(2)], rooted(dist.GatherOptions, group.rank())
            ),
            "gather: 1 tensors",
        ),
        (
            lambda group: group.scatter(
                [torch.empty(2)], [[torch.empty(2)]], rooted(dist.ScatterOptions, group.rank())
            ),
            "scatter: 1",
        ),
        (
            lambda group: group.reduce(torch.empty(2), rooted(dist.ReduceOptions, 2)),
            "root 2 is not one of the ranks 0 to 1",
        ),
        (lambda group: group._get_backend(torch.device("cuda")), "processor's memory"),
    ],
)
def test_wrong_arguments_raise_before_anything_moves(call: Body, words: str) -> None:
    def body(group: GroupBackend) -> None:
        with pytest.raises(UsageError, match=words):
            call(group)
        group.barrier().wait()

    on_threads(2, body)


def test_the_names_of_older_versions_of_torch_do_the_same() -> None:
    def body(group: GroupBackend) -> Any:
        rank, options = group.rank(), reducing(dist.ReduceOp.SUM, dist.ReduceScatterOptions)
        found = [torch.empty(n) for n in (6, 6, 2, 2, 4)]
        group._allgather_base(found[0], mine(rank, 3)).wait()
        group.allgather_into_tensor_coalesced([found[1]], [mine(rank, 3)]).wait()
        group._reduce_scatter_base(found[2], mine(rank, 4), options).wait()
        group.reduce_scatter_tensor_coalesced([found[3]], [mine(rank, 4)], options).wait()
        group.alltoall_base(found[4], mine(rank, 4), [], []).wait()
        return found

    for rank, found in enumerate(on_threads(2, body)):
        gathered, summed = torch.cat([mine(r, 3) for r in range(2)]), mine(0, 4) + mine(1, 4)
        assert torch.equal(found[0], gathered) and torch.equal(found[1], gathered)
        torch.testing.assert_close(found[2], summed[2 * rank : 2 * rank + 2])
        assert torch.equal(found[2], found[3])
        assert torch.equal(
            found[4], torch.cat([mine(r, 4)[2 * rank : 2 * rank + 2] for r in range(2)])
        )


def test_tensors_and_roots_are_taken_without_lists_and_options() -> None:
    def body(group: GroupBackend) -> Any:
        rank = group.rank()
        summed, largest, same, kept = mine(rank, 3), mine(rank, 3), mine(rank, 3), mine(rank, 3)
        group.allreduce(summed).wait()  # type: ignore[arg-type]
        group.allreduce(largest, dist.ReduceOp.MAX).wait()  # type: ignore[arg-type]
        group.broadcast(same, 1).wait()  # type: ignore[arg-type]
        group.reduce(kept, rooted(dist.ReduceOptions, 1)).wait()  # type: ignore[arg-type]
        return summed, largest, same, kept

    parts = [mine(r, 3) for r in range(2)]
    for rank, (summed, largest, same, kept) in enumerate(on_threads(2, body)):
        assert (
            torch.equal(summed, sum(parts))
            and torch.equal(largest, torch.maximum(*parts))
            and torch.equal(same, parts[1])
        )
        assert torch.equal(kept, sum(parts) if rank == 1 else parts[0])


def test_futures_of_what_is_gathered_hold_its_tensors() -> None:
    """Hooks of DDP read them so."""

    def body(group: GroupBackend) -> Any:
        whole, apart = [torch.zeros(2) for _ in range(2)], [torch.zeros(2) for _ in range(2)]
        at_first = group.gather(
            [apart] if group.rank() == 0 else [],
            [mine(group.rank(), 2)],
            rooted(dist.GatherOptions, 0),
        )
        gathered = group.allgather([whole], [mine(group.rank(), 2)]).get_future().wait()
        return gathered, at_first.get_future().wait()

    (gathered, at_first), (other, _) = on_threads(2, body)
    assert all(
        torch.equal(x, mine(r, 2))
        for found in (gathered, other, at_first)
        for r, x in enumerate(found)
    )


def test_a_monitored_barrier_takes_seconds_too() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)
        ours = backend(group)
        meet(ours)
        ours.monitored_barrier(PATIENCE)
        if rank == 0:
            for none in (0.0, timedelta(0)):
                with pytest.raises(DeadlineExceeded, match="rank 1"):
                    ours.monitored_barrier(none)
        store.put(f"done{rank}", True)
        store.take(f"done{1 - rank}", PATIENCE)
        group.close()

    threads(2, body)

"""Memory that is moved to where all ranks reach it: in place, for all views, and only where all ranks can."""

from __future__ import annotations

import copy
import gc
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cluster.store import Store
from paceline.comm.shm import moving
from paceline.comm.shm.group import SharedGroup
from paceline.comm.shm.moving import MovedStorage, movable
from paceline.errors import Mismatch, WorkerLost
from tests.harness.backends import mine
from tests.harness.processes import fork, threads

COUNT = 300_001
Body = Callable[[SharedGroup], Any]


def on_shared_memory(size: int, body: Body, *, start: Callable[..., list[Any]] = threads, **options: Any) -> list[Any]:
    def run(rank: int, size: int, store: Store) -> Any:
        group = SharedGroup.from_store(store, rank, size, deadline=20, **options)
        try:
            return body(group)
        finally:
            group.close()

    return start(size, run)


def total(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum in rank order."""
    parts = [mine(rank, COUNT, seed=seed, dtype=dtype) for rank in range(size)]
    return sum(parts[1:], parts[0])


def reduce(group: SharedGroup, x: Tensor, *, may_move: bool = True) -> MovedStorage | None:
    """Reduce, and return where `x` lies then."""
    assert group.all_reduce_moving(x, may_move=may_move).wait() is x
    return group._moved.find(x)


@pytest.mark.parametrize("start", [threads, fork], ids=["threads", "processes"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_and_its_views_go_to_memory_that_all_ranks_reach(size: int, start: Any) -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        view, before = x[1000:2000].view(10, 100), x.data_ptr()
        dice = random.Random(group.rank)
        for seed in range(20):
            x.copy_(mine(group.rank, COUNT, seed=seed))
            for _ in range(dice.randrange(3)):
                os.sched_yield()
            assert reduce(group, x) is not None and x.data_ptr() != before, "it has moved at once"
            assert torch.equal(x, total(size, seed)) and torch.equal(view, total(size, seed)[1000:2000].view(10, 100))
        view.fill_(7)
        assert x[1500] == 7
        part = x[5000:205_000].fill_(group.rank + 1)  # reduced where it lies
        assert reduce(group, part) is group._moved.find(x) and bool((part == size * (size + 1) / 2).all()) and x[1500] == 7
        group.barrier().wait()

    on_shared_memory(size, body, start=start)


def test_the_first_reduction_waits_until_all_ranks_have_moved_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank copies its values late."""
    opened = moving._open

    def late(addresses: list[str], nbytes: int, me: int) -> Any:
        for _ in range(2000 * me):
            os.sched_yield()
        return opened(addresses, nbytes, me)

    monkeypatch.setattr(moving, "_open", late)

    def body(group: SharedGroup) -> None:
        for seed in range(5):
            x = mine(group.rank, COUNT, seed=seed)
            assert reduce(group, x) is not None and torch.equal(x, total(3, seed))

    on_shared_memory(3, body)


def test_what_was_there_before_can_still_be_read() -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        held: Any = x.numpy()
        assert reduce(group, x) is not None
        gc.collect()
        assert held.shape == (COUNT,) and float(held[4096:8192].sum()) == 0

    on_shared_memory(2, body)


def test_nothing_moves_unless_all_ranks_allow_it_and_can(monkeypatch: pytest.MonkeyPatch) -> None:
    made = moving._make

    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        before = x.data_ptr()
        assert reduce(group, x, may_move=group.rank != 1) is None and torch.equal(x, total(3, 0))
        x.copy_(mine(group.rank, COUNT, seed=1))
        group.barrier().wait()
        monkeypatch.setattr(moving, "_make", lambda nbytes: made(nbytes) if nbytes < 10 else (None, None))
        assert reduce(group, x) is None and torch.equal(x, total(3, 1)) and x.data_ptr() == before

    on_shared_memory(3, body)


def test_with_files_in_place_of_memory_without_a_name_nothing_moves(tmp_path: Any) -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        assert reduce(group, x) is None and torch.equal(x, total(2, 0))

    on_shared_memory(2, body, folder=str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_tensors_at_other_places_or_of_one_rank_alone_are_reduced_all_the_same() -> None:
    """As those of ranks that have run out of batches, and shadow what the others reduce."""

    def body(group: SharedGroup) -> None:
        a, b = mine(group.rank, COUNT), mine(group.rank, COUNT, seed=1)
        assert reduce(group, a) is not None and reduce(group, b) is not None
        one, other = (a, b) if group.rank == 0 else (b, a)
        one.copy_(mine(group.rank, COUNT, seed=2))
        reduce(group, one, may_move=False)
        assert torch.equal(one, total(2, 2))
        own = mine(group.rank, COUNT, seed=3)
        shadowed = a.copy_(own) if group.rank == 0 else own
        reduce(group, shadowed)
        assert torch.equal(shadowed, total(2, 3))
        assert other is not one and torch.equal(other, total(2, 1) if group.rank == 0 else total(2, 0))

    on_shared_memory(2, body)


def test_calls_that_differ_are_a_mismatch_and_move_nothing() -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT + group.rank)
        with pytest.raises(Mismatch):
            group.all_reduce_moving(x, may_move=True).wait()
        assert group._moved.find(x) is None
        y = mine(group.rank, COUNT)
        assert reduce(group, y) is not None and torch.equal(y, total(2, 0))

    on_shared_memory(2, body)


def test_memory_is_forgotten_when_its_storage_is_gone_or_gets_other_memory() -> None:
    def body(group: SharedGroup) -> None:
        x, y = mine(group.rank, COUNT), mine(group.rank, COUNT, seed=1)
        reduce(group, x), reduce(group, y)
        del x
        gc.collect()
        z = mine(group.rank, COUNT, seed=2)
        assert reduce(group, z) is not None and len(group._moved._storages) == 2
        others: Any = torch.empty(COUNT).untyped_storage()
        z.untyped_storage()._swap_data_ptr_(others)
        assert group._moved.find(z) is None
        z.copy_(mine(group.rank, COUNT, seed=3))
        reduce(group, z, may_move=False)
        assert torch.equal(z, total(2, 3))

    on_shared_memory(2, body)


def test_tensors_outlive_their_group() -> None:
    def body(group: SharedGroup) -> Tensor:
        x = mine(group.rank, COUNT)
        assert reduce(group, x) is not None
        return x

    found = on_shared_memory(2, body)
    gc.collect()
    assert all(torch.equal(x.add_(1), total(2, 0) + 1) for x in found)


def test_what_has_moved_can_be_sent_to_another_process_and_copied() -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        assert reduce(group, x) is not None and torch.equal(copy.deepcopy(x), x)
        storage: Any = x.untyped_storage()
        descriptor, nbytes = storage._share_fd_cpu_()
        assert os.fstat(descriptor).st_size == nbytes == 4 * COUNT

    on_shared_memory(2, body)


def test_only_whole_storages_of_torch_move() -> None:
    x = torch.zeros(100)
    assert movable(x) and movable(x.view(10, 10))
    assert not movable(x[1:]) and not movable(x[:50]) and not movable(x.view(10, 10).t()) and not movable(torch.empty(0))
    assert not movable(torch.nn.Parameter(x)), "somebody else's class"
    assert not movable(torch.frombuffer(bytearray(400), dtype=torch.float32)), "memory of others"
    assert not movable(torch.zeros(100).share_memory_())


def test_a_rank_that_dies_is_named_and_the_memory_stays() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=20)
        x = mine(rank, COUNT)
        assert reduce(group, x) is not None
        if rank == 1:
            store.put("reduced", True)
            os._exit(0)
        store.take("reduced", 20)
        x.fill_(3)
        with pytest.raises(WorkerLost, match="rank 1 has died"):
            group.all_reduce_moving(x, may_move=True).wait()
        assert bool((x == 3).all())

    fork(2, body, mortal=[1])

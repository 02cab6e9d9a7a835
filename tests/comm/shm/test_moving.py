"""Memory that is moved to where all ranks reach it: in place, for all views, and only where all
ranks can.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import functools
import gc
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cluster.store import Store
from paceline.comm.shm import moving
from paceline.comm.shm.moving import MovedStorage, is_movable
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.shm.shared_segment import SharedSegment
from paceline.errors import Mismatch, ViewChanged, WorkerLost
from tests.harness.backends import mine
from tests.harness.jobs import PATIENCE
from tests.harness.processes import fork, threads

COUNT = 300_001
Body = Callable[[SharedGroup], Any]


def on_shared_memory(
    size: int, body: Body, *, start: Callable[..., list[Any]] = threads, **options: Any
) -> list[Any]:
    def run(rank: int, size: int, store: Store) -> Any:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE, **options)
        try:
            return body(group)
        finally:
            group.close()

    return start(size, run)


@functools.cache
def total(size: int, seed: int) -> Tensor:
    """The sum in rank order."""
    parts = [mine(rank, COUNT, seed=seed) for rank in range(size)]
    return sum(parts[1:], parts[0])


def reduce(group: SharedGroup, x: Tensor, *, may_move: bool = True) -> MovedStorage | None:
    """Reduce, and return where `x` lies then."""
    assert group.all_reduce_moving(x, may_move=may_move).wait() is x
    return group._paths.moved.find_moved(x)


@pytest.mark.each_choice
@pytest.mark.parametrize("start", [threads, fork], ids=["threads", "processes"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_and_its_views_go_to_memory_that_all_ranks_reach(size: int, start: Any) -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        view, before = x[1000:2000].view(10, 100), x.data_ptr()
        dice = random.Random(group.rank)
        for seed in range(8):
            x.copy_(mine(group.rank, COUNT, seed=seed))
            for _ in range(dice.randrange(3)):
                os.sched_yield()
            assert reduce(group, x) is not None and x.data_ptr() != before, "it has moved at once"
            assert torch.equal(x, total(size, seed)) and torch.equal(
                view, total(size, seed)[1000:2000].view(10, 100)
            )
        view.fill_(7)
        assert x[1500] == 7
        part = x[5000:205_000].fill_(group.rank + 1)  # reduced where it lies
        assert (
            reduce(group, part) is group._paths.moved.find_moved(x)
            and bool((part == size * (size + 1) / 2).all())
            and x[1500] == 7
        )
        group.barrier().wait()

    on_shared_memory(size, body, start=start)


def test_the_first_reduction_waits_until_all_ranks_have_moved_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last rank copies its values late."""
    opened, others = moving._open, threading.Semaphore(0)

    def late(addresses: list[str], nbytes: int, me: int) -> Any:
        if me < 2:
            segment = opened(addresses, nbytes, me)
            others.release()
            return segment
        for _ in range(2):
            assert others.acquire(timeout=PATIENCE)
        time.sleep(0.01)  # for which they wait
        return opened(addresses, nbytes, me)

    monkeypatch.setattr(moving, "_open", late)

    def body(group: SharedGroup) -> None:
        for seed in range(5):
            x = mine(group.rank, COUNT, seed=seed)
            assert reduce(group, x) is not None and torch.equal(x, total(3, seed))

    on_shared_memory(3, body)


def test_what_was_there_before_can_still_be_read_and_so_when_the_group_is_gone() -> None:
    def body(group: SharedGroup) -> tuple[Tensor, Any]:
        x = mine(group.rank, COUNT)
        held = (ctypes.c_float * COUNT).from_address(x.data_ptr())
        assert reduce(group, x) is not None
        return x, held

    for x, held in on_shared_memory(2, body):
        gc.collect()
        assert sum(held[4096:8192]) == 0
        assert torch.equal(x, total(2, 0))


def test_a_tensor_that_an_array_of_numpy_looks_into_stays() -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        array: Any = x.numpy() if group.rank == 1 else None
        assert reduce(group, x) is None and torch.equal(x, total(2, 0))
        assert array is None or float(array.sum()) == float(x.numpy().sum())

    on_shared_memory(2, body)


def test_nothing_moves_unless_all_ranks_allow_it() -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        before = x.data_ptr()
        assert reduce(group, x, may_move=group.rank != 1) is None and torch.equal(x, total(3, 0))
        x.copy_(mine(group.rank, COUNT, seed=1))
        assert (
            reduce(group, x[:-1]) is None
            and torch.equal(x[:-1], total(3, 1)[:-1])
            and x.data_ptr() == before
        )
        assert reduce(group, x.fill_(1)) is not None and bool((x == 3).all())

    on_shared_memory(3, body)


def test_a_rank_without_room_says_so_once_and_all_go_on_through_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poor, tries, reserve = set[int](), list[int](), os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if nbytes == 4 * COUNT:
            tries.append(threading.get_ident())
            if threading.get_ident() in poor:
                raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def body(group: SharedGroup) -> None:
        if group.rank == 1:
            poor.add(threading.get_ident())
        x = mine(group.rank, COUNT)
        before = x.data_ptr()
        for seed in range(4):
            x.copy_(mine(group.rank, COUNT, seed=seed))
            assert (
                reduce(group, x) is None
                and torch.equal(x, total(3, seed))
                and x.data_ptr() == before
            )

    with pytest.warns(
        UserWarning, match=r"No space left on device.*; sums of this group go on through copies"
    ) as said:
        on_shared_memory(3, body)
    assert len(said) == 1 and len(tries) == 3, "one rank said it, and nobody tried again"


def test_calls_of_another_kind_are_a_mismatch() -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        with pytest.raises(Mismatch, match="all_reduce"):
            (
                group.all_reduce_moving(x, may_move=True)
                if group.rank
                else group.all_reduce(x, out=x)
            ).wait()
        assert reduce(group, x) is not None and torch.equal(x, total(2, 0))

    on_shared_memory(2, body)


@pytest.mark.parametrize("size", [2, 3])
def test_any_mixture_of_tensors_that_have_moved_may_move_and_stay(size: int) -> None:
    """Several are under way at a time, some of which are parts of those that have moved."""

    def body(group: SharedGroup) -> None:
        dice, same = random.Random(group.rank), random.Random(99)
        xs = [torch.empty(COUNT) for _ in range(4)]
        for turn in range(6):
            under_way, cut = [], same.randrange(10_000, COUNT)
            for i, mark in enumerate(dice.sample(range(4), 4) if turn % 2 else range(4)):
                seed, x = 4 * turn + i, xs[mark] if same.random() < 0.7 else torch.empty(COUNT)
                view = x.copy_(mine(group.rank, COUNT, seed=seed))[: cut if i == 1 else None]
                under_way.append(
                    (group.all_reduce_moving(view, may_move=dice.random() < 0.8), view, seed)
                )
            for work, view, seed in under_way:
                work.wait()
                assert torch.equal(view, total(size, seed)[: view.numel()])
        group.barrier().wait()

    on_shared_memory(size, body)


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
        assert other is not one and torch.equal(
            other, total(2, 1) if group.rank == 0 else total(2, 0)
        )

    on_shared_memory(2, body)


def test_calls_that_differ_are_a_mismatch_and_move_nothing() -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT + group.rank)
        with pytest.raises(Mismatch):
            group.all_reduce_moving(x, may_move=True).wait()
        assert group._paths.moved.find_moved(x) is None
        y = mine(group.rank, COUNT)
        assert reduce(group, y) is not None and torch.equal(y, total(2, 0))

    on_shared_memory(2, body)


def test_the_memory_of_a_storage_goes_with_it_everywhere() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)

        def mapped() -> int:
            gc.collect()
            return Path("/proc/self/maps").read_text().count("memfd:paceline")

        before, addresses = mapped(), set()
        for seed in range(12):
            x = mine(rank, COUNT, seed=seed)
            assert reduce(group, x) is not None and torch.equal(x, total(2, seed)), (
                "a storage that is new has not moved yet"
            )
            addresses.add(x.data_ptr())
            assert mapped() == before + 3 and len(group._paths.moved._storages) == 1, (
                "its memory twice, and that of the other"
            )
            del x
            assert mapped() == before and len(group._paths.moved._storages) == 0
        assert len(addresses) < 12, "no address was used again: this test shows nothing"
        group.close()

    fork(2, body)


def fill_above(address: int, nbytes: int) -> list[Any]:
    """Map memory wherever the kernel would map `nbytes` above an address: what lies at the
    address is what it gives next, once unmapped.
    """
    filled: list[Any] = []
    for size in (nbytes, 1 << 16, mmap.PAGESIZE):
        while True:
            filled.append(ctypes.c_char.from_buffer(mmap.mmap(-1, size)))
            if ctypes.addressof(filled[-1]) < address:
                break
    return filled


def test_memory_that_a_storage_gets_later_is_not_taken_for_that_which_it_was_moved_to() -> None:
    """Neither that of another tensor that was moved, nor something that lies at the same address
    since.
    """

    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)
        x, y, z = (mine(rank, COUNT, seed=seed) for seed in range(3))
        assert None not in (reduce(group, x), reduce(group, y), reduce(group, z))
        if rank == 0:
            storages: Any = [each.untyped_storage() for each in (x, y, z)]
            storages[0]._swap_data_ptr_(storages[1])
            assert group._paths.moved.find_moved(x) is group._paths.moved.find_moved(y) is None
            address, own, segment = (
                z.data_ptr(),
                torch.zeros(COUNT),
                SharedSegment.create(4 * COUNT),
            )
            filled = fill_above(address, 4 * COUNT)
            others: Any = own.untyped_storage()
            storages[2]._swap_data_ptr_(others)
            assert group._paths.moved.find_moved(z) is None
            del own, others
            gc.collect()  # what z was moved to is not mapped any more
            kept: list[Any] = [segment.map_again() for _ in range(20)]
            segment.seal()
            later = next(storage for storage in kept if storage.data_ptr() == address)
            del filled
            storages[2]._swap_data_ptr_(later)
            assert (
                z.data_ptr() == address
                and storages[2].is_shared()
                and group._paths.moved.find_moved(z) is None
            )
        for seed, each in enumerate((x, y, z)):
            each.copy_(mine(rank, COUNT, seed=seed + 5))
            reduce(group, each)
            assert torch.equal(each, total(2, seed + 5))
        group.barrier().wait()
        group.close()

    fork(2, body)


def test_tensors_outlive_their_group_and_two_groups_move_their_own() -> None:
    def body(group: SharedGroup) -> tuple[Tensor, Tensor]:
        other = group.make_subgroup(range(group.size))
        assert other is not None
        x, y = mine(group.rank, COUNT), mine(group.rank, COUNT, seed=1)
        work = group.all_reduce_moving(x, may_move=True), other.all_reduce_moving(y, may_move=True)  # type: ignore[attr-defined]
        assert torch.equal(work[1].wait(), total(2, 1)) and torch.equal(work[0].wait(), total(2, 0))
        assert (
            group._paths.moved.find_moved(y) is None
            and other._paths.moved.find_moved(y) is not None
        )  # type: ignore[attr-defined]
        other.all_reduce_moving(x.copy_(mine(group.rank, COUNT, seed=2)), may_move=True).wait()  # type: ignore[attr-defined]
        assert torch.equal(x, total(2, 2)) and group._paths.moved.find_moved(x) is not None
        other.close()
        assert torch.equal(y, total(2, 1)) and y.untyped_storage().is_shared()
        return x, y

    found = on_shared_memory(2, body)
    gc.collect()
    for x, y in found:
        assert torch.equal(x.add_(1), total(2, 2) + 1) and torch.equal(y.add_(1), total(2, 1) + 1)


def test_a_reduction_that_breaks_off_leaves_a_tensor_that_nobody_else_reaches() -> None:
    """The other rank is in the middle of it, and writes to where the tensor was when this one
    has given up.
    """
    given_up, written = threading.Event(), threading.Event()

    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT)
        moved = reduce(group, x)
        assert moved is not None and moved.place is not None
        theirs = moved.place.regions[0]
        group.barrier().wait()
        if group.rank == 0:
            work = group.all_reduce_moving(x, may_move=True)
            group.abort()
            with pytest.raises(ViewChanged):
                work.wait()
            given_up.set()
            assert (
                written.wait(PATIENCE)
                and torch.equal(x, total(2, 0))
                and not x.untyped_storage().is_shared()
            )
        else:
            assert given_up.wait(PATIENCE)
            theirs.fill_(1)
            written.set()

    on_shared_memory(2, body)


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_forked_process_writes_is_its_own(closed: bool) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)
        x = mine(rank, COUNT)
        assert reduce(group, x) is not None
        if closed:
            group.barrier().wait()
            group.close()
        child = os.fork()
        if child == 0:
            seen = torch.equal(x, total(2, 0))
            x.fill_(9)
            os._exit(0 if seen and bool((x == 9).all()) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(x, total(2, 0))
        if not closed:
            assert reduce(group, x.copy_(mine(rank, COUNT, seed=1))) is not None and torch.equal(
                x, total(2, 1)
            )
            group.barrier().wait()
            group.close()

    fork(2, body)


def test_what_autograd_has_saved_moves_too() -> None:
    def body(group: SharedGroup) -> None:
        x = mine(group.rank, COUNT).requires_grad_()
        square = (x * x).sum()
        assert reduce(group, x) is not None and x.requires_grad and x.is_leaf
        square.backward()
        assert (
            x.grad is not None
            and torch.equal(x.grad, 2 * x.detach())
            and torch.equal(x.detach(), total(2, 0))
        )

    on_shared_memory(2, body)


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
    assert is_movable(x) and is_movable(x.view(10, 10))
    assert (
        not is_movable(x[1:])
        and not is_movable(x[:50])
        and not is_movable(x.view(10, 10).t())
        and not is_movable(torch.empty(0))
    )
    assert not is_movable(torch.nn.Parameter(x)), "somebody else's class"
    assert not is_movable(torch.frombuffer(bytearray(400), dtype=torch.float32)), "memory of others"
    assert not is_movable(torch.zeros(100).share_memory_())
    x.numpy()
    assert not is_movable(x), "an array looks into it"


def test_a_rank_that_dies_is_named_the_memory_stays_and_nothing_has_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # which makes the files in /dev/shm that a killed process leaves behind
    monkeypatch.setattr(tempfile, "mkstemp", None)

    def body(rank: int, size: int, store: Store) -> None:
        group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)
        x = mine(rank, COUNT)
        assert reduce(group, x) is not None
        if rank == 1:
            store.put("reduced", True)
            os._exit(0)
        store.take("reduced", 20)
        x.fill_(3)
        with pytest.raises(WorkerLost, match="rank 1 has died"):
            group.all_reduce_moving(x, may_move=True).wait()
        assert bool((x == 3).all()) and not x.untyped_storage().is_shared()

    fork(2, body, mortal=[1])

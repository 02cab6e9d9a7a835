"""What every group can do, in the way that each does best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.cluster.store import Store
from paceline.comm.collectives import all_reduce_by_schedule
from paceline.comm.group_protocol import Group, Work, gather_into, piece_bounds
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.schedule import build_ring
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import UsageError
from tests.harness.hierarchies import made
from tests.harness.processes import fork, threads
from tests.harness.thread_groups import spawn

T = TypeVar("T")


def test_what_is_gathered_lies_where_it_was_asked_for_if_the_group_can_write_there() -> None:
    def body(group: Group) -> list[bool]:
        outs = [torch.zeros(3) for _ in range(group.size)]
        found = gather_into(
            group, torch.full((3,), float(group.rank + 1)), outs, name="what we have"
        ).wait()
        assert torch.equal(torch.stack(found), torch.tensor([[1.0] * 3, [2.0] * 3]))
        return [x is out for x, out in zip(found, outs, strict=True)]

    def shared(rank: int, size: int, store: Store) -> list[bool]:
        group = SharedGroup.from_store(store, rank, size, deadline=20)
        found = body(group)
        group.close()
        return found

    assert threads(2, shared) == [[True, True]] * 2
    assert spawn(2, body) == [[False, False]] * 2


def _on_threads(size: int, body: Callable[[Group], T]) -> list[T]:
    return spawn(size, body)


def _on_hosts(size: int, body: Callable[[Group], T]) -> list[T]:
    return spawn(size, lambda group: body(made(group, (0, 1, 0, 1))))


def _in_shared_memory(size: int, body: Callable[[Group], T]) -> list[T]:
    def run(rank: int, size: int, store: Store) -> T:
        group = SharedGroup.from_store(store, rank, size, deadline=20)
        try:
            return body(group)
        finally:
            group.close()

    return threads(size, run)


def _over_gloo(size: int, body: Callable[[Group], T]) -> list[T]:
    def run(rank: int, size: int, store: Store) -> T:
        group = TorchGroup.from_store(store, rank, size, deadline=20)
        try:
            return body(group)
        finally:
            group.close()

    return fork(size, run)


RUNNERS = pytest.mark.parametrize("run", [_on_threads, _on_hosts, _in_shared_memory, _over_gloo])


def _calls(group: Group, numel: int) -> Iterator[Callable[[Tensor], Work[Any]]]:
    """Calls that write: to new tensors, to their own, to some that don't lie in one stretch, by
    rounds of a schedule.
    """
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    yield group.all_reduce
    yield lambda x: group.all_reduce(x, out=x)
    yield lambda x: group.all_reduce(x[::2], op="mean", out=x[::2])
    yield lambda x: all_reduce_by_schedule(group, x, build_ring(group.size), out=x)
    yield group.reduce_scatter
    yield group.all_gather
    yield lambda x: group.all_to_all([x] * group.size)
    yield lambda x: group.broadcast(x[::2], root=1)
    yield lambda x: group.exchange([(right, torch.ones(len(x[::2])))], [(left, x[::2])])
    yield lambda x: group.all_reduce(group.empty((numel,), torch.float32).copy_(x))


@RUNNERS
def test_what_is_begun_in_inference_mode_or_writes_to_tensors_of_it_ends_well_outside_and_the_other_way_round(  # noqa: E501
    run: Any,
) -> None:
    def body(group: Group) -> None:
        for numel in (7, 9_003):
            for call in _calls(group, numel):
                with torch.inference_mode():
                    x, same = (
                        torch.arange(numel, dtype=torch.float32) + group.rank for _ in range(2)
                    )
                    begun_inside = call(x)
                found = tree_leaves(begun_inside.wait())
                call(same).wait()  # made in inference mode, and used outside of it
                begun_outside = call(torch.arange(numel, dtype=torch.float32) + group.rank)
                with torch.inference_mode():
                    again = tree_leaves(begun_outside.wait())
                for one, other in zip(found, again, strict=True):
                    assert one is None or (torch.equal(one, other) and not other.is_inference())

    run(4 if run is _on_hosts else 2, body)


@RUNNERS
def test_conjugates_on_one_rank_alone_are_exchanged_by_their_values(run: Any) -> None:
    """Torch only marks them: their bytes are those of the numbers themselves."""

    def body(group: Group) -> None:
        me, size = group.rank, group.size
        right, left = (me + 1) % size, (me - 1) % size

        def made(rank: int, numel: int) -> Tensor:
            real, imaginary = torch.randn(2, numel, generator=torch.Generator().manual_seed(rank))
            x = torch.complex(real, imaginary)
            return x.conj() if rank == 0 else x

        for numel in (6, 9_000):
            parts = [made(rank, numel) for rank in range(size)]
            total = torch.stack([part.resolve_conj() for part in parts]).sum(0)
            x = made(me, numel)
            torch.testing.assert_close(group.all_reduce(x, out=x).wait(), total)
            x = made(me, numel)
            # the same bytes, of other values
            torch.testing.assert_close(group.all_reduce(x.conj(), out=x).wait(), total.conj())
            torch.testing.assert_close(
                all_reduce_by_schedule(group, made(me, numel), build_ring(size)).wait(), total
            )
            start, stop = piece_bounds(numel, size)[me]
            torch.testing.assert_close(group.reduce_scatter(parts[me]).wait(), total[start:stop])
            for found in (group.all_gather(parts[me]), group.all_to_all([parts[me]] * size)):
                assert all(
                    torch.equal(one, other) for one, other in zip(found.wait(), parts, strict=True)
                )
            for root in range(size):
                assert torch.equal(group.broadcast(made(me, numel), root=root).wait(), parts[root])
            into = made(me, numel)
            group.exchange([(right, parts[me])], [(left, into)]).wait()
            assert torch.equal(into, parts[left])

    run(4 if run is _on_hosts else 2, body)


@RUNNERS
def test_what_no_result_can_be_written_to_is_refused_on_all_ranks_and_the_group_goes_on(
    run: Any,
) -> None:
    def body(group: Group) -> None:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        x = torch.ones(1).expand(5) if group.rank == 0 else torch.ones(5)
        for call in (
            lambda: group.all_reduce(x, out=x),
            lambda: group.broadcast(x, root=1),
            lambda: group.exchange([(right, torch.ones(5))], [(left, x)]),
        ):
            with pytest.raises(UsageError, match=r"expanded share memory.*\(rank 0\)"):
                call().wait()
        assert group.all_reduce(x).wait().tolist() == [group.size] * 5
        with pytest.raises(UsageError, match=r"device meta has no values"):
            group.all_gather(torch.ones(5, device="meta")).wait()

    run(4 if run is _on_hosts else 2, body)

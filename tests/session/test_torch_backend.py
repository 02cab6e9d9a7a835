"""Process groups of the backend as torch.distributed gets them: who is in them, and what goes
between two ranks.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from paceline.cluster.store import Store
from paceline.cluster.topology import HostRanks, Topology
from paceline.comm.backend.process_group import GroupBackend
from paceline.errors import DeadlineExceeded, PlaceError
from paceline.session import torch_backend
from tests.harness.backends import meet, mine, reducing
from tests.harness.processes import threads


def made(
    rank: int,
    size: int,
    store: Any,
    *,
    seconds: float = 20.0,
    names: list[int] | None = None,
    chosen: Any = None,
) -> GroupBackend:
    options = SimpleNamespace(
        group_rank=rank,
        group_size=size,
        timeout=timedelta(seconds=seconds),
        store=store,
        global_ranks_in_group=names or [],
    )
    return torch_backend.create_process_group(options, chosen)


def on_threads(size: int, body: Any, **options: Any) -> list[Any]:
    """What `body(group, rank)` gives on each rank. Groups are closed once all ranks are through."""

    def run(rank: int, size: int, store: Store) -> Any:
        group = made(rank, size, store.torch, **options)
        try:
            return body(group, rank)
        finally:
            store.put(f"through/{rank}", True)
            for other in range(size):
                store.take(f"through/{other}", 30)
            group.shutdown()

    return threads(size, run)


def test_ranks_meet_and_exchange() -> None:
    def body(group: GroupBackend, rank: int) -> torch.Tensor:
        x = mine(rank, 1000)
        group.allreduce([x], reducing()).wait()
        return x

    wanted = sum(mine(r, 1000) for r in range(3))
    assert all(torch.allclose(x, wanted) for x in on_threads(3, body))


@pytest.mark.parametrize(("have", "crowded"), [(3, True), (6, False)])
def test_a_host_is_crowded_when_its_workers_compute_on_all_cores(
    have: int, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "count_cores", lambda: have)

    def body(group: GroupBackend, rank: int) -> bool:
        before = group._issuer.is_crowded()
        meet(group)
        assert not before
        return group._issuer.is_crowded()

    torch.set_num_threads(1)
    assert on_threads(3, body) == [crowded] * 3


def test_messages_go_between_two_ranks_and_any_of_them() -> None:
    def body(group: GroupBackend, rank: int) -> Any:
        there, back = torch.zeros(3), torch.zeros(3)
        if rank == 0:
            sent = [group.send([mine(0, 3, seed=to)], to, 7) for to in (1, 2)]
            work = group.recv_anysource([back], 8)
            work.wait()
            assert all(each.wait() for each in sent) and torch.equal(
                back, mine(work._source_rank(), 3)
            )
            group.recv([there], 3 - work._source_rank(), 8).wait()
        else:
            group.recv([there], 0, 7).wait()
            group.send([mine(rank, 3)], 0, 8).wait()
        return there

    found = on_threads(3, body)
    assert all(torch.equal(found[rank], mine(0, 3, seed=rank)) for rank in (1, 2))
    assert any(torch.equal(found[0], mine(rank, 3)) for rank in (1, 2))


def test_messages_among_coalesced_calls() -> None:
    """A receive that ends last doesn't hold up what other ranks need from this one."""

    def body(group: GroupBackend, rank: int) -> Any:
        x, other = mine(rank, 1 << 18), torch.zeros(2)
        if rank == 0:
            group._start_coalescing(torch.device("cpu"))
            group.recv([other], 1, 0)
            received = group._end_coalescing(torch.device("cpu"))
            group.allreduce([x], reducing())  # nobody waits for it here
            received.wait()
            assert received.is_success()
        else:
            group.allreduce([x], reducing()).wait()
            group.send([mine(1, 2)], 0, 0).wait()
        group.barrier().wait()
        return x, other

    (x, other), (y, _) = on_threads(2, body)
    assert (
        torch.equal(x, y)
        and torch.equal(x, mine(0, 1 << 18) + mine(1, 1 << 18))
        and torch.equal(other, mine(1, 2))
    )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_are_summed() -> None:
    def body(group: GroupBackend, rank: int) -> torch.Tensor:
        x = torch.sparse_coo_tensor(
            torch.tensor([[rank, 3]]), torch.tensor([1.0 + rank, 10.0]), (4,)
        )
        work = group.allreduce([x], reducing())
        assert work.result()[0] is x
        return x.to_dense()

    assert [x.tolist() for x in on_threads(2, body)] == [[1.0, 2.0, 0.0, 20.0]] * 2


def test_errors_in_a_group_of_some_name_their_ranks_among_all() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = made(rank, size, store.torch, names=[3, 5])
        group.barrier().wait()
        if rank == 0:
            with pytest.raises(DeadlineExceeded, match="rank 5") as caught:
                group.monitored_barrier(timedelta(seconds=0.2))
            assert caught.value.__notes__[0].startswith("Of these, rank 5 is on host ")
            with pytest.raises(
                DeadlineExceeded, match="rank 5 has not sent what is awaited from it"
            ):
                group.recv([torch.zeros(1)], 1).wait(timedelta(seconds=0.2))
        store.put(f"done{rank}", True)
        store.take(f"done{1 - rank}", 20)
        group.shutdown()

    threads(2, body)


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(
        DeadlineExceeded,
        match=r"rank 9 did not come within 0\.1 s to make a process group of 2 ranks",
    ) as caught:
        made(0, 2, HashStore(), seconds=0.1, names=[4, 9])
    assert caught.value.missing == (9,)


def test_a_lazy_group_waits_for_nobody_when_it_is_made() -> None:
    def body(rank: int, size: int, store: Store) -> float:
        if rank == 1:
            store.take("rank 0 has one", 20)
        group = made(rank, size, store.torch, chosen=torch_backend.LAZY)
        store.put("rank 0 has one", True)
        x = mine(rank, 4)
        group.allreduce([x], reducing()).wait()
        group.recv([x], 1).wait() if rank == 0 else group.send([x], 0).wait()
        store.put(f"through/{rank}", True)
        store.take(f"through/{1 - rank}", 20)
        group.shutdown()
        return float(x.sum())

    assert threads(2, body) == [pytest.approx(float((mine(0, 4) + mine(1, 4)).sum()))] * 2


def test_ranks_that_never_use_a_group_are_named_among_all() -> None:
    group = made(0, 2, HashStore(), seconds=0.3, names=[4, 9], chosen=torch_backend.LAZY)
    with pytest.raises(
        DeadlineExceeded, match="the ranks of this process group are, among all, 4, 9"
    ) as caught:
        group.barrier().wait()
    assert caught.value.missing == (9,)
    group.shutdown()


def test_hosts_that_meet_at_no_address_are_told_what_to_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = Topology((HostRanks("left", (0,), "127.0.0.1"), HostRanks("right", (1,), "127.0.0.1")))
    monkeypatch.setattr(torch_backend, "discover_hosts", lambda store, place: apart)
    with pytest.raises(PlaceError, match="on 2 hosts, and meet at no address"):
        made(0, 2, HashStore(), chosen=torch_backend.LAZY).barrier().wait()


def test_the_address_of_a_store_is_where_workers_meet() -> None:
    store = TCPStore("localhost", 0, 1, is_master=True)
    nested = dist.PrefixStore("outer", dist.PrefixStore("inner", store))  # type: ignore[attr-defined]
    assert torch_backend._find_place(nested).meeting == ("localhost", store.port)
    assert torch_backend._find_place(HashStore()).meeting is None

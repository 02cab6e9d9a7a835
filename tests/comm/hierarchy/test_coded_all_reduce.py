from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.group_protocol import Group, Work
from paceline.comm.hierarchy.coded_all_reduce import CodedAllReduce
from paceline.errors import ViewChanged, WorkerLost
from paceline.trace import Trace
from tests.harness.hierarchies import made
from tests.harness.thread_groups import ThreadGroup, spawn

DEALT = [None, (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1, 2), (0, 0), (0, 1)]


def data(rank: int, turn: int, numel: int = 500) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * turn + rank))


def rounded(x: Tensor, groups: tuple[Group, ...]) -> Generator[Work[Any], Any, Tensor]:
    """A way of two stages: everybody's float16, then the maximum of nothing but the total (to
    have a second stage).
    """
    everyones = yield groups[0].all_gather(x.half())
    total = torch.stack([part.float() for part in everyones]).sum(0)
    yield groups[1].barrier()
    return total


@pytest.mark.parametrize("hosts", DEALT)
@pytest.mark.parametrize("stages", [2, 4])
def test_the_way_is_gone_between_hosts_and_the_sum_is_exact_inside(
    hosts: tuple[int, ...] | None, stages: int
) -> None:
    size = 3 if hosts is None else len(hosts)

    def body(group: ThreadGroup) -> list[Tensor]:
        whole: Any = group if hosts is None else made(group, hosts)
        relay = CodedAllReduce(whole, stages)
        flats = [data(group.rank, turn) for turn in range(5)]
        works = [
            relay.all_reduce(flat, rounded, f"bucket {turn}") for turn, flat in enumerate(flats)
        ]
        other = whole.all_reduce(torch.ones(3))  # the group goes on beside it
        for work, flat in zip(works, flats, strict=True):
            assert work.wait() is flat
        assert torch.equal(other.wait(), torch.full((3,), float(size)))
        relay.close()
        relay.close()
        whole.close()
        return flats

    where = tuple(range(size)) if hosts is None else hosts
    results = spawn(size, body, hosts=where)
    for turn in range(5):
        sums = [
            torch.stack([data(r, turn) for r in range(size) if where[r] == host]).sum(0)
            for host in sorted(set(where))
        ]
        wanted = torch.stack([part.half().float() for part in sums]).sum(0)
        for flats in results:
            assert torch.equal(flats[turn], results[0][turn])
            # a sum in another order may round to another half
            torch.testing.assert_close(flats[turn], wanted, rtol=2e-3, atol=2e-3)


def test_other_dtypes_travel_in_float32() -> None:
    def body(group: ThreadGroup) -> list[Tensor]:
        relay = CodedAllReduce(made(group, (0, 0, 1)), 2)
        flats = [
            torch.full((70,), 1.5 + group.rank, dtype=dtype)
            for dtype in (torch.bfloat16, torch.float64)
        ]
        for flat in flats:
            relay.all_reduce(flat, rounded, "x").wait()
        relay.close()
        return flats

    for flats in spawn(3, body):
        assert [flat.dtype for flat in flats] == [torch.bfloat16, torch.float64]
        assert all(bool((flat == 7.5).all()) for flat in flats)


def test_bytes_and_spans() -> None:
    def body(group: ThreadGroup) -> tuple[int, int, set[tuple[str, str]]]:
        trace = Trace(1000)
        relay = CodedAllReduce(made(group, (0, 0, 1, 1)), 2, trace=trace)
        relay.all_reduce(torch.ones(6000), rounded, "bucket 0").wait()
        traffic = relay.traffic
        relay.close()
        return (
            traffic.within,
            traffic.between,
            {(span.name, span.kind) for span in trace.list_spans()},
        )

    results = spawn(4, body, hosts=(0, 0, 1, 1))
    for rank, (within, between, spans) in enumerate(results):
        assert between == (12_000 if rank in (0, 2) else 0) and within > 0
        assert {("sum", "within"), ("hand out", "within")} <= spans
        assert (("bucket 0", "between") in spans) == (rank in (0, 2))


def test_an_error_on_the_way_reaches_all_ranks() -> None:
    def body(group: ThreadGroup) -> str:
        relay = CodedAllReduce(made(group, (0, 0, 1, 1)), 1)

        def way(x: Tensor, groups: tuple[Group, ...]) -> Generator[Work[Any], Any, Tensor]:
            if group.rank == 2:
                raise WorkerLost("rank 9 is gone", (9,))
            yield groups[0].all_gather(x)
            return x

        with pytest.raises((WorkerLost, ViewChanged)) as found:
            relay.all_reduce(torch.ones(9), way, "x").wait()
        relay.close()
        return str(found.value)

    assert len(spawn(4, body, hosts=(0, 0, 1, 1))) == 4

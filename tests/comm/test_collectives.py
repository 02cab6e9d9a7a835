from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import collectives, reduction_rules, schedule
from paceline.comm.group_protocol import OPS, piece_bounds
from paceline.comm.schedule import SCHEDULES, build_schedule
from paceline.errors import DeadlineExceeded, Mismatch, UsageError
from tests.harness.thread_groups import ThreadGroup, spawn


def mine(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Different data on every rank, the same in every run."""
    values = (
        torch.randn(numel, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)
        * 4
    )
    return (torch.complex(values, values - rank) if dtype.is_complex else values).to(dtype)


def jitter(seed: int) -> Callable[[int], None]:
    dice = random.Random(seed)
    return lambda rank: time.sleep(dice.random() * 1e-3)


def wanted(size: int, numel: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    return reduction_rules.reduce_parts(op, [mine(rank, numel, dtype) for rank in range(size)])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_every_schedule_gives_the_sum(name: str, size: int) -> None:
    hosts = [rank % 2 for rank in range(size)]

    def body(group: ThreadGroup) -> list[torch.Tensor]:
        run = build_schedule(name, hosts)
        return [
            collectives.all_reduce_by_schedule(
                group, mine(group.rank, numel, torch.float64), run
            ).wait()
            for numel in (0, 1, 3, 101)
        ]

    results = spawn(size, body, delay=jitter(size))
    for index, numel in enumerate((0, 1, 3, 101)):
        assert all(torch.equal(result[index], results[0][index]) for result in results)
        torch.testing.assert_close(results[0][index], wanted(size, numel, torch.float64, "sum"))


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    hosts=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    numel=st.integers(0, 70),
    op=st.sampled_from(OPS),
    dtype=st.sampled_from(
        [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.complex64]
    ),
)
def test_any_operation_on_any_placement(
    name: str, hosts: list[int], numel: int, op: str, dtype: torch.dtype
) -> None:
    try:
        reduction_rules.check_operation(op, dtype)
    except UsageError:
        return
    size = len(hosts)

    def body(group: ThreadGroup) -> torch.Tensor:
        x = mine(group.rank, numel, dtype)
        return collectives.all_reduce_by_schedule(
            group, x, build_schedule(name, hosts), op, out=x
        ).wait()  # type: ignore[arg-type]

    results = spawn(size, body)
    assert all(torch.equal(result, results[0]) for result in results[1:])
    torch.testing.assert_close(results[0], wanted(size, numel, dtype, op))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    # the ones would be lost if a partial sum were rounded: 4096 + 1 is 4096 in both dtypes
    values = [4096.0, 1.0, 1.0, 1.0, 1.0]
    exact = torch.tensor([4100.0]).to(dtype).item()

    def body(group: ThreadGroup) -> torch.Tensor:
        return collectives.all_reduce_by_schedule(
            group,
            torch.full((11,), values[group.rank], dtype=dtype),
            build_schedule(name, [0, 1, 0, 2, 1]),
        ).wait()

    assert all(bool((result == exact).all()) for result in spawn(5, body))


def test_out_views_and_strides() -> None:
    def body(group: ThreadGroup) -> None:
        x = torch.arange(12.0).reshape(3, 4).t() + group.rank
        before = x.clone()
        out = torch.zeros(3, 4).t()
        assert (
            collectives.all_reduce_by_schedule(group, x, schedule.build_ring(3), out=out).wait()
            is out
        )
        assert torch.equal(x, before) and torch.equal(
            out, torch.arange(12.0).reshape(3, 4).t() * 3 + 3
        )
        leaf = torch.ones(5, requires_grad=True)
        assert (
            collectives.all_reduce_by_schedule(group, leaf, schedule.build_tree(3), "mean")
            .wait()
            .tolist()
            == [1.0] * 5
        )

    spawn(3, body)


def test_several_at_once_end_in_any_order() -> None:
    def body(group: ThreadGroup) -> None:
        lane = collectives.ScheduleQueue(group)
        works = []
        for k in range(4):
            works.append(lane.all_reduce(torch.full((4,), float(k)), schedule.build_ring(3)))
            if group.rank == 1:
                works[0].done()  # pushes its rounds ahead of the others'
        last_first = reversed(works) if group.rank == 2 else works
        assert {work.wait()[0].item() for work in last_first} == {0.0, 3.0, 6.0, 9.0}
        assert all(work.done() and work.exception() is None for work in works)

    for seed in range(5):
        spawn(3, body, delay=jitter(seed))


def test_a_late_rank_is_named_and_the_wait_can_be_taken_up_again() -> None:
    missed = threading.Event()

    def body(group: ThreadGroup) -> None:
        lane = collectives.ScheduleQueue(group)
        if group.rank == 1:
            assert missed.wait(60)
        work = lane.all_reduce(torch.ones(2), schedule.build_ring(2))
        if group.rank == 0:
            with pytest.raises(DeadlineExceeded) as caught:
                work.wait(0.05)
            assert caught.value.missing == (1,)
            missed.set()
        assert work.wait().tolist() == [2.0, 2.0]

    spawn(2, body)


def test_mismatches_and_bad_arguments_raise_on_all() -> None:
    def body(group: ThreadGroup) -> None:
        with pytest.raises(Mismatch, match=r"rank 0 at .*\[3\].*; rank 1 at .*\[4\]"):
            collectives.all_reduce_by_schedule(
                group, torch.ones(3 + group.rank), schedule.build_ring(2)
            )
        with pytest.raises(Mismatch, match=r"ring.*tree"):
            collectives.all_reduce_by_schedule(
                group,
                torch.ones(3),
                schedule.build_tree(2) if group.rank else schedule.build_ring(2),
            )
        with pytest.raises(UsageError, match="schedule of 3 ranks"):
            collectives.all_reduce_by_schedule(group, torch.ones(3), schedule.build_ring(3))
        with pytest.raises(UsageError, match="mean"):
            collectives.all_reduce_by_schedule(
                group, torch.ones(3, dtype=torch.int32), schedule.build_ring(2), "mean"
            )

    spawn(2, body)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_collectives_made_of_exchanges(size: int) -> None:
    def body(group: ThreadGroup) -> None:
        rank = group.rank
        x = mine(rank, 23, torch.bfloat16)
        start, stop = piece_bounds(23, size)[rank]
        assert torch.equal(
            collectives.reduce_scatter_by_exchange(group, x, "mean").wait(),
            wanted(size, 23, torch.bfloat16, "mean")[start:stop],
        )
        rows = collectives.all_gather_by_exchange(
            group, torch.full((rank, 2), rank), [(r, 2) for r in range(size)]
        ).wait()
        assert [row.tolist() for row in rows] == [[[r, r]] * r for r in range(size)]
        dealt = collectives.all_to_all_by_exchange(
            group, [torch.full((to, 1), rank * 10 + to) for to in range(size)], [(rank, 1)] * size
        ).wait()
        assert [part.flatten().tolist() for part in dealt] == [
            [r * 10 + rank] * rank for r in range(size)
        ]

    spawn(size, body, delay=jitter(size))


def test_traffic_is_that_of_the_schedule() -> None:
    hosts = [0, 1, 0, 1]

    def body(group: ThreadGroup) -> tuple[int, int]:
        collectives.all_reduce_by_schedule(
            group, torch.ones(100), build_schedule("hierarchical", hosts)
        ).wait()
        return group.traffic.within, group.traffic.between

    sent = spawn(4, body, hosts=hosts)
    assert [sum(column) for column in zip(*sent, strict=True)] == [1600, 800]

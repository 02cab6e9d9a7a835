"""All-gather and reduce-scatter over hosts: the results are those of one group of all ranks, and
what crosses the network is the least.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cluster.store import Store
from paceline.comm import reduction_rules
from paceline.comm.group_protocol import Op, Work, gather_into, piece_bounds
from paceline.comm.hierarchy import chunks, staged_executor
from paceline.comm.hierarchy import hosts_group as module
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.hierarchy.rails import is_even
from paceline.errors import (
    DeadlineExceeded,
    Mismatch,
    PacelineError,
    UsageError,
    ViewChanged,
    WorkerLost,
)
from paceline.trace import Trace
from tests.harness.hierarchies import made, networked
from tests.harness.jobs import wait_for
from tests.harness.processes import fork
from tests.harness.thread_groups import ThreadGroup, spawn

EVEN = [
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 0, 1, 1, 1),
    (0, 1, 0, 1, 1, 0),
    (0, 0, 1, 1, 2, 2),
    (2, 0, 1, 2, 1, 0),
]
UNEVEN = [(0, 0, 1), (0, 1, 1, 1, 2), (0, 1), (0, 0, 0)]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
LAYOUTS = [
    *((hosts, torch.float32) for hosts in EVEN),
    *((EVEN[n % len(EVEN)], dtype) for n, dtype in enumerate(DTYPES) if n),
]
OPS: tuple[Op, ...] = ("sum", "mean", "min", "max", "product")


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 1)
    monkeypatch.setattr(chunks, "WIDTH", 64)


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers, so that sums are the same in any order; different on each rank."""
    values = torch.randint(
        0, 4, shape, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.int64
    )
    return (values + 1j * values).to(dtype) if dtype.is_complex else values.to(dtype)


def laid(group: HostsGroup) -> bool:
    return group._rails is not None


@pytest.mark.each_choice
@pytest.mark.parametrize(("hosts", "dtype"), LAYOUTS, ids=str)
def test_all_ranks_get_the_pieces_of_all(hosts: tuple[int, ...], dtype: torch.dtype) -> None:
    shapes = [(1,), (7,), (500,), (33, 3), ()]

    def body(group: ThreadGroup) -> None:
        whole = made(group, hosts)
        for shape in shapes:
            wanted = [data(rank, shape, dtype) for rank in range(group.size)]
            found = whole.all_gather(data(group.rank, shape, dtype)).wait()
            outs = [torch.empty(shape, dtype=dtype) for _ in wanted]
            into = whole.all_gather_into(data(group.rank, shape, dtype), outs).wait()
            assert all(one is out for one, out in zip(into, outs, strict=True))
            for each in (found, outs):
                assert [(one.dtype, one.shape) for one in each] == [
                    (dtype, torch.Size(shape))
                ] * group.size
                assert all(torch.equal(one, other) for one, other in zip(each, wanted, strict=True))
        assert laid(whole)
        whole.close()

    spawn(len(hosts), body, hosts=hosts)


@pytest.mark.each_choice
@pytest.mark.parametrize(("hosts", "dtype"), LAYOUTS, ids=str)
def test_each_rank_gets_its_piece_of_the_reduction(
    hosts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """With pieces of all lengths, the lengths by one operation: some ranks have none, and some
    one element more than others.
    """
    shapes = [(500,), (len(hosts),), (7, 43), (2,), (0,)]

    def body(group: ThreadGroup) -> None:
        whole, lengths = made(group, hosts), iter((shapes,))
        for op in OPS:
            try:
                reduction_rules.check_operation(op, dtype)
            except UsageError:
                with pytest.raises(UsageError):
                    whole.reduce_scatter(data(group.rank, (60,), dtype), op=op)
                continue
            for shape in next(lengths, shapes[:1]):
                total = reduction_rules.reduce_parts(
                    op, [data(rank, shape, dtype) for rank in range(group.size)]
                ).flatten()
                start, stop = piece_bounds(total.numel(), group.size)[group.rank]
                x, out = data(group.rank, shape, dtype), torch.empty(stop - start, dtype=dtype)
                assert whole.reduce_scatter_into(x, out, op=op).wait() is out
                for found in (
                    whole.reduce_scatter(x, op=op).wait(),
                    whole.reduce_scatter_agreed(x, op=op).wait(),
                    out,
                ):
                    torch.testing.assert_close(found, total[start:stop])
                assert torch.equal(x, data(group.rank, shape, dtype))
        assert laid(whole)
        whole.close()

    spawn(len(hosts), body, hosts=hosts)


@pytest.mark.parametrize("hosts", UNEVEN)
def test_where_hosts_are_not_even_all_ranks_exchange_at_once(hosts: tuple[int, ...]) -> None:
    assert not is_even(hosts)

    def body(group: ThreadGroup) -> None:
        whole, size = made(group, hosts), group.size
        whole.connect()
        outs = [torch.empty(50) for _ in range(size)]
        whole.all_gather_into(data(group.rank, (50,)), outs).wait()
        assert all(torch.equal(out, data(rank, (50,))) for rank, out in enumerate(outs))
        total = reduction_rules.reduce_parts("mean", [data(rank, (50,)) for rank in range(size)])
        start, stop = piece_bounds(50, size)[group.rank]
        out = torch.empty(stop - start)
        assert whole.reduce_scatter_into(data(group.rank, (50,)), out, op="mean").wait() is out
        for found in (out, whole.reduce_scatter_agreed(data(group.rank, (50,)), op="mean").wait()):
            torch.testing.assert_close(found, total[start:stop])
        assert not laid(whole)
        whole.close()

    spawn(len(hosts), body, hosts=hosts)


def test_even_hosts_are_several_with_several_workers_each() -> None:
    assert all(map(is_even, EVEN))
    assert not is_even((0,))


def test_small_pieces_are_exchanged_by_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 1000)

    def body(group: ThreadGroup) -> list[bool]:
        whole, known = made(group, (0, 0, 1, 1)), []
        for numel in (249, 250):
            assert [len(part) for part in whole.all_gather(torch.ones(numel)).wait()] == [numel] * 4
            known.append(laid(whole))
        whole.close()
        return known

    assert spawn(4, body) == [[False, True]] * 4


def test_pieces_of_different_lengths_are_gathered_by_all_at_once() -> None:
    def body(group: ThreadGroup) -> list[int]:
        whole = made(group, (0, 1, 0, 1))
        found = whole.all_gather(torch.ones(5 + group.rank, 3)).wait()
        assert not laid(whole)
        outs = [torch.zeros(4, 3) for _ in range(4)]
        with pytest.raises(Mismatch, match="ranks bring 4, 4, 4, 5 rows"):
            whole.all_gather_into(torch.ones(4 + (group.rank == 3), 3), outs)
        whole.all_gather_into(torch.ones(4, 3), outs).wait()
        assert all(bool(out.all()) for out in outs)
        whole.close()
        return [len(part) for part in found]

    assert spawn(4, body) == [[5, 6, 7, 8]] * 4


def test_a_piece_may_lie_in_the_results_already_or_be_a_view() -> None:
    def body(group: ThreadGroup) -> None:
        whole = made(group, (0, 0, 1, 1))
        memory = torch.zeros(4, 100)
        memory[group.rank] = group.rank + 1.0
        outs = list(memory)
        assert whole.all_gather_into(outs[group.rank], outs).wait() == outs
        assert torch.equal(memory, torch.arange(1.0, 5).view(4, 1).expand(4, 100))
        turned = (torch.arange(60.0).view(6, 10) + group.rank).t().requires_grad_()
        for rank, part in enumerate(whole.all_gather(turned).wait()):
            assert torch.equal(part, torch.arange(60.0).view(6, 10).t() + rank)
        found = whole.reduce_scatter(turned).wait()
        assert torch.equal(
            found, (torch.arange(60.0).view(6, 10).t().reshape(-1) * 4 + 6)[15 * group.rank :][:15]
        )
        whole.close()

    spawn(4, body)


def test_in_inference_mode() -> None:
    def body(group: ThreadGroup) -> None:
        whole = made(group, (0, 0, 1, 1))
        with torch.inference_mode():
            found = whole.all_gather(torch.full((70,), float(group.rank))).wait()
            assert [float(part.sum()) for part in found] == [0.0, 70.0, 140.0, 210.0]
            assert bool(
                (whole.reduce_scatter(torch.full((70,), float(group.rank))).wait() == 6).all()
            )
        whole.close()

    spawn(4, body)


def test_halves_are_summed_in_float32_and_rounded_once() -> None:
    values = [2048.0, 1.0, 1.0, 0.0]

    def body(group: ThreadGroup) -> tuple[float, float]:
        whole = made(group, (0, 1, 0, 1))
        total = whole.reduce_scatter(
            torch.full((4,), values[group.rank], dtype=torch.float16)
        ).wait()
        mean = whole.reduce_scatter(
            torch.full((4,), 40000.0, dtype=torch.float16), op="mean"
        ).wait()
        assert laid(whole)
        whole.close()
        return float(total), float(mean)

    assert spawn(4, body) == [(2050.0, 40000.0)] * 4


def test_differences_are_named_before_anything_moves() -> None:
    def body(group: ThreadGroup) -> None:
        whole = made(group, (0, 1, 0, 1))
        odd = group.rank == 2
        for call in (
            lambda: whole.all_gather(torch.ones(9, 4 if odd else 5)),
            lambda: whole.all_gather_into(
                torch.ones(9, dtype=torch.float64 if odd else torch.float32), [torch.ones(9)] * 4
            ),
            lambda: whole.reduce_scatter(torch.ones(40 if odd else 41)),
            lambda: whole.reduce_scatter_into(
                torch.ones(40), torch.ones(10), op="max" if odd else "sum"
            ),
            lambda: whole.all_gather(torch.ones(9)) if odd else whole.reduce_scatter(torch.ones(9)),
        ):
            with pytest.raises(Mismatch, match="rank 2"):
                call()
        assert len(whole.all_gather(torch.ones(9)).wait()) == 4
        whole.close()

    spawn(4, body)


def test_a_reduction_that_is_not_compared_waits_for_nobody() -> None:
    """Before rails are laid all ranks exchange at once, and nobody is waited for to lay them."""

    def body(rank: int, size: int, store: Store) -> None:
        group = networked(store, rank, (0, 0, 1, 1))
        for connects in (False, True):
            if connects:
                group.connect()
            works = [group.reduce_scatter_agreed(torch.ones(400) * (rank + 1))] if rank == 0 else []
            group.gather_bytes(b"")  # to which the others come without their calls
            works = works or [group.reduce_scatter_agreed(torch.ones(400) * (rank + 1))]
            assert bool((works[0].wait() == 10).all()) and laid(group) == connects
        group.close()

    fork(4, body)


def test_the_trace_tells_the_phases() -> None:
    def body(group: ThreadGroup) -> Counter[tuple[str, str]]:
        whole = made(group, (0, 0, 1, 1))
        whole.trace = Trace()
        whole.all_gather(torch.ones(3 * 64)).wait()
        whole.reduce_scatter(torch.ones(4 * 2 * 64)).wait()
        whole.close()
        return Counter((span.name, span.kind) for span in whole.trace.list_spans())

    gathered = {("all-gather", "between"): 3, ("hand out", "within"): 3}
    reduced = {("sum", "within"): 2, ("reduce-scatter", "between"): 2}
    assert spawn(4, body) == [{**gathered, **reduced}] * 4


@pytest.mark.parametrize("hosts", EVEN[::3] + EVEN[-1:])
def test_a_piece_crosses_the_network_once_for_each_other_host(hosts: tuple[int, ...]) -> None:
    """(hosts - 1) x workers of a host pieces leave each host, for all-gather and reduce-scatter
    alike.
    """

    def body(rank: int, size: int, store: Store) -> list[int]:
        group = networked(store, rank, hosts)
        group.connect()
        sent = [group.traffic.between]
        for start in (
            lambda: gather_into(group, torch.ones(1000), [torch.empty(1000) for _ in hosts]),
            lambda: group.all_gather(torch.ones(1000)),
            lambda: group.reduce_scatter(torch.ones(1000 * size)),
            lambda: group.reduce_scatter_agreed(torch.ones(1000 * size)),
        ):
            start().wait()
            sent.append(group.traffic.between)
        group.close()
        return [after - before for before, after in itertools.pairwise(sent)]

    others = len(set(hosts)) - 1
    assert fork(len(hosts), body) == [[others * 4000] * 4] * len(hosts)


def _mixed(group: HostsGroup, dice: random.Random, pause: Callable[[], None], rounds: int) -> None:
    """Calls of all kinds, several under way at a time, in an order that is the same on all
    ranks, waited for in one that is not.
    """
    rank, size = group.rank, group.size
    order = random.Random(rounds)
    for turn in range(rounds):
        pending: list[tuple[Work[Any], Any]] = []
        for number in range(order.randint(3, 9)):
            numel, kind = order.choice([5, 90, 700]), order.randrange(6)
            mine = [data(other + 10 * number + 100 * turn, (numel,)) for other in range(size)]
            total = torch.stack(mine).sum(0)
            start, stop = piece_bounds(numel, size)[rank]
            pause()
            if kind == 0:
                pending.append((group.all_reduce(mine[rank]), total))
            elif kind == 1:
                pending.append((group.all_gather(mine[rank]), mine))
            elif kind == 2:
                pending.append(
                    (gather_into(group, mine[rank], [torch.empty(numel) for _ in mine]), mine)
                )
            elif kind == 3:
                pending.append((group.reduce_scatter(mine[rank]), total[start:stop]))
            elif kind == 4:
                pending.append((group.reduce_scatter_agreed(mine[rank]), total[start:stop]))
            else:
                assert group.gather_bytes(bytes([turn])) == [bytes([turn])] * size
                pending.append((group.broadcast(mine[rank].clone(), root=1), mine[1]))
        dice.shuffle(pending)
        for work, wanted in pending:
            pause()
            found = work.wait()
            both = (
                zip(found, wanted, strict=True) if isinstance(wanted, list) else [(found, wanted)]
            )
            assert all(torch.equal(one, other) for one, other in both)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1, 0, 1), (0, 0, 1, 1, 2, 2)])
def test_many_calls_under_way_beside_others_with_delays(
    hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_executor, "AHEAD", 200)  # stages wait for each other

    def body(group: ThreadGroup) -> None:
        whole, dice = made(group, hosts), random.Random(group.rank)
        _mixed(whole, dice, lambda: time.sleep(dice.random() * 1e-3), 4)
        whole.close()

    late = random.Random(5)
    spawn(len(hosts), body, hosts=hosts, delay=lambda rank: time.sleep(late.random() * 1e-3))


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_many_calls_under_way_on_processes(
    hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_executor, "AHEAD", 200)

    def body(rank: int, size: int, store: Store) -> None:
        group, dice = networked(store, rank, hosts), random.Random(rank)
        _mixed(group, dice, lambda: time.sleep(dice.random() * 1e-3), 8)
        group.close()
        wait_for(
            lambda: (
                not [
                    thread.name
                    for thread in threading.enumerate()
                    if thread.name.startswith("paceline hosts")
                ]
            )
        )

    fork(4, body)


CALLS: dict[str, Callable[[HostsGroup], Work[Any]]] = {
    "all_gather": lambda group: group.all_gather(torch.ones(300)),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.ones(1200)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_leaves_is_named_on_all(call: str) -> None:
    def body(group: ThreadGroup) -> tuple[int, ...]:
        whole = made(group, (0, 1, 0, 1))
        CALLS[call](whole).wait()
        if group.rank == 3:
            group.leave("it was shot")
            return ()
        with pytest.raises(WorkerLost, match="rank 3") as caught:
            CALLS[call](whole).wait()
        whole.close()
        return caught.value.ranks

    assert spawn(4, body) == [(3,), (3,), (3,), ()]


@pytest.mark.parametrize(
    ("call", "stage"),
    [
        ("all_gather", "_exchange_on_rail"),
        ("reduce_scatter", "_sum_in_host"),
        ("reduce_scatter", "_exchange_on_rail"),
    ],
)
def test_an_error_of_one_rank_under_way_reaches_all(call: str, stage: str) -> None:
    """The rank that fails inside says so to all, who wait in different groups."""

    def body(group: ThreadGroup) -> None:
        whole = made(group, (0, 0, 1, 1))
        whole.connect()

        def fail(*args: object) -> None:
            raise WorkerLost("rank 9 is gone", (9,))

        if group.rank == 2:
            setattr(whole._rails, stage, fail)
        with pytest.raises(WorkerLost, match="rank 9 is gone"):
            CALLS[call](whole).wait()
        with pytest.raises((WorkerLost, ViewChanged)):
            CALLS[call](whole).wait()
        whole.close()

    spawn(4, body)


@pytest.mark.each_choice
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("end", ["abort", "close"])
def test_whoever_ends_the_group_under_way_ends_it_for_all(call: str, end: str) -> None:
    """Rank 1 keeps the others waiting between hosts, and ends the group."""

    def body(rank: int, size: int, store: Store) -> str:
        group = networked(store, rank, (0, 0, 1, 1), deadline=20)
        group.connect()
        rails = group._rails
        assert rails is not None
        cross, held, goes_on = rails._exchange_on_rail, threading.Event(), threading.Event()

        def later(*args: Any) -> Any:
            held.set()
            goes_on.wait(20)
            return cross(*args)

        if rank == 1:
            rails._exchange_on_rail = later  # type: ignore[method-assign]
        work = CALLS[call](group)
        if rank == 1:
            assert held.wait(20)
            getattr(group, end)()
            goes_on.set()
        with pytest.raises(PacelineError) as caught:
            work.wait(30)
        assert not isinstance(caught.value, DeadlineExceeded)
        group.close()
        wait_for(
            lambda: (
                not any(
                    thread.name.startswith("paceline hosts") for thread in threading.enumerate()
                )
            )
        )
        return type(caught.value).__name__

    found = fork(4, body)
    assert found[1] == "ViewChanged"


@pytest.mark.parametrize("call", CALLS)
def test_a_killed_worker_is_named_on_every_host(call: str) -> None:
    def body(rank: int, size: int, store: Store) -> tuple[int, ...]:
        group = networked(store, rank, (0, 0, 1, 1))
        CALLS[call](group).wait()
        if rank == 3:
            os._exit(1)
        with pytest.raises(WorkerLost) as caught:
            while True:
                CALLS[call](group).wait()
        group.close()
        return caught.value.ranks

    assert fork(4, body, mortal={3}) == [(3,), (3,), (3,), None]

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from paceline.comm import collectives, reduction_rules
from paceline.comm.group_protocol import OPS, piece_bounds
from paceline.comm.native import sockets
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.schedule import SCHEDULES, build_schedule
from paceline.errors import (
    DeadlineExceeded,
    Mismatch,
    PacelineError,
    UsageError,
    ViewChanged,
    WorkerLost,
)
from tests.harness.jobs import PATIENCE
from tests.harness.native_processes import Crew, heard, run, say
from tests.harness.thread_groups import ThreadGroup, spawn

pytestmark = pytest.mark.jobs

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.complex64,
)


def mine(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Different data on every rank, the same in every run."""
    values = (
        torch.randn(shape, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)
        * 3
    )
    if dtype.is_complex:
        return torch.complex(values, values + rank).to(dtype)
    return (values if dtype.is_floating_point else values.abs()).to(dtype)


def _reductions(group: TorchGroup) -> list[bytes]:
    results = []
    for dtype in DTYPES:
        for op in ("sum", "mean", "min", "max", "product"):
            try:
                reduction_rules.check_operation(op, dtype)
            except UsageError:
                continue
            # nothing; a small one; one that Gloo's ring or the owners take
            for shape in ((0,), (7, 3), (9001,)):
                wanted = reduction_rules.reduce_parts(
                    op, [mine(rank, shape, dtype) for rank in range(group.size)]
                )
                x = mine(group.rank, shape, dtype)
                result = group.all_reduce(x, op=op, name="x").wait()  # type: ignore[arg-type]
                assert (
                    result.dtype == dtype
                    and result.shape == x.shape
                    and torch.equal(x, mine(group.rank, shape, dtype))
                )
                torch.testing.assert_close(result, wanted)
                assert group.all_reduce(x, op=op, out=x).wait() is x and torch.equal(x, result)  # type: ignore[arg-type]
                results.append(result.view(-1).view(torch.uint8).numpy().tobytes())
    return results


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_reductions_of_every_dtype_are_bit_equal(size: int) -> None:
    first, *others = run(size, _reductions)
    assert len(first) > 60 and all(other == first for other in others)


def _collectives(group: TorchGroup) -> None:
    rank, size = group.rank, group.size
    rows = group.all_gather(torch.full((rank, 2), rank)).wait()
    assert [row.tolist() for row in rows] == [[[r, r]] * r for r in range(size)]
    assert [x.item() for x in group.all_gather(torch.tensor(rank)).wait()] == list(range(size))
    for shape in ((5,), (300, 70)):
        x = torch.full(shape, float(rank)).t()
        assert group.broadcast(x, root=1).wait() is x and bool((x == 1).all())
    dealt = group.all_to_all([torch.full((to, 1), rank * 10 + to) for to in range(size)]).wait()
    assert [part.flatten().tolist() for part in dealt] == [
        [r * 10 + rank] * rank for r in range(size)
    ]
    start, stop = piece_bounds(10, size)[rank]
    x = mine(rank, (10,), torch.bfloat16)
    wanted = reduction_rules.reduce_parts(
        "mean", [mine(r, (10,), torch.bfloat16) for r in range(size)]
    )
    assert torch.equal(group.reduce_scatter(x, op="mean").wait(), wanted[start:stop])
    group.barrier().wait()
    assert group.gather_objects({"rank": rank, "x": [None, 1.5]}) == [
        {"rank": r, "x": [None, 1.5]} for r in range(size)
    ]
    assert group.gather_bytes(bytes([rank]) * rank * 1000) == [
        bytes([r]) * r * 1000 for r in range(size)
    ]
    inbox = torch.zeros(3, 2).t()
    right, left = (rank + 1) % size, (rank - 1) % size
    group.exchange(
        [(right, torch.full((6,), float(rank))), (rank, torch.ones(1))],
        [(left, inbox), (rank, x[:1].float())],
        tag=4,
    ).wait()
    assert bool((inbox == left).all())
    assert group.empty((2, 3), torch.float16).shape == (2, 3)
    # a view with strides, in place and into another
    x = (torch.arange(30000.0).reshape(100, 300) + rank).t()
    wanted = torch.arange(30000.0).reshape(100, 300).t() * size + sum(range(size))
    out = torch.empty(100, 300).t()
    assert torch.equal(group.all_reduce(x, out=out).wait(), wanted)
    assert torch.equal(group.all_reduce(x, out=x).wait(), wanted)


@pytest.mark.parametrize("size", [2, 4])
def test_the_other_collectives(size: int) -> None:
    run(size, _collectives)


def _halves(group: TorchGroup) -> list[float]:
    values = [4096.0, 1.0, 1.0, 1.0]
    results = []
    for dtype in (torch.float16, torch.bfloat16):
        for numel in (3, 20_000):
            result = group.all_reduce(torch.full((numel,), values[group.rank], dtype=dtype)).wait()
            assert bool((result == result[0]).all())
            results.append(result[0].item())
    return results


def test_halves_are_summed_in_float32() -> None:
    # 4096 + 1 is 4096 in both, 4096 + 3 is rounded to 4100 in float16
    assert run(4, _halves) == [[4100.0, 4100.0, 4096.0, 4096.0]] * 4


def _schedules(group: TorchGroup) -> None:
    wanted = reduction_rules.reduce_parts(
        "sum", [mine(r, (20_001,), torch.float64) for r in range(group.size)]
    )
    for name in SCHEDULES:
        x = mine(group.rank, (20_001,), torch.float64)
        torch.testing.assert_close(
            collectives.all_reduce_by_schedule(
                group, x, build_schedule(name, [0, 1, 0]), out=x
            ).wait(),
            wanted,
        )
    lane = collectives.ScheduleQueue(group)
    works = [
        lane.all_reduce(torch.full((5000,), float(k)), build_schedule("ring", [0] * 3))
        for k in range(5)
    ]
    # beside Gloo's own
    more = [group.all_reduce_agreed(torch.full((50_000,), float(k))) for k in range(5)]
    assert len(group.gather_bytes(b"")) == 3
    assert [work.wait()[7].item() for work in reversed(works)] == [12.0, 9.0, 6.0, 3.0, 0.0]
    assert [work.wait()[7].item() for work in more] == [0.0, 3.0, 6.0, 9.0, 12.0]


def test_schedules_run_beside_native_operations() -> None:
    run(3, _schedules)


def _agree_beside(group: TorchGroup) -> None:
    if group.rank == 0:
        work = group.all_reduce_agreed(torch.ones(100_000))
        assert not work.done()
        group.gather_bytes(b"")
    else:
        group.gather_bytes(b"")
        work = group.all_reduce_agreed(torch.ones(100_000))
    assert work.wait()[0].item() == 2 and work.done() and work.exception() is None


def test_agree_works_beside_pending_operations() -> None:
    run(2, _agree_beside)


def _mismatches(group: TorchGroup) -> list[str]:
    first = group.rank == 0
    calls: list[Any] = [
        lambda: group.all_reduce(torch.ones(3 if first else 50_000), name="w"),
        lambda: group.all_reduce(torch.ones(3, dtype=torch.float32 if first else torch.float64)),
        lambda: group.all_reduce(torch.ones(3), op="sum" if first else "max"),
        lambda: group.barrier() if first else group.all_gather(torch.ones(2)),
        lambda: group.broadcast(torch.ones(3), root=0 if first else 1),
        lambda: group.exchange(
            [(1 - min(group.rank, 1), torch.ones(2))], [(1, torch.ones(5))] if first else []
        ),
    ]
    messages = []
    for call in calls:
        with pytest.raises(Mismatch) as caught:
            call().wait()
        messages.append(str(caught.value))
    assert group.all_reduce(torch.ones(2)).wait().tolist() == [3.0, 3.0]  # the group still works
    return messages


def test_a_mismatch_is_raised_on_every_rank_with_both_sides_named() -> None:
    results = run(3, _mismatches)
    assert results[0] == results[1] == results[2]
    named = [
        ["[3]", "[50000]", "'w'"],
        ["float32", "float64"],
        ["sum", "max"],
        ["barrier", "all_gather"],
        ["root 0", "root 1"],
    ]
    for message, words in zip(results[0][:-1], named, strict=True):
        assert (
            "rank 0 at" in message
            and "ranks 1, 2 at" in message
            and all(word in message for word in words)
        )
    assert "rank 0 sends 2 x float32 to rank 1, which expects nothing" in results[0][-1]


def _mismatch_in_subgroup(group: TorchGroup) -> str:
    if group.rank == 0:
        group.make_subgroup((1, 2))
        return ""
    subgroup = group.make_subgroup((1, 2))
    sends = [(1, torch.ones(2))] if group.rank == 1 else []
    with pytest.raises(Mismatch) as caught:
        subgroup.exchange(sends, [])
    return str(caught.value)


def test_a_mismatch_in_a_subgroup_names_ranks_of_all_workers() -> None:
    message = "exchange: rank 1 sends 2 x float32 to rank 2, which expects nothing"
    assert run(3, _mismatch_in_subgroup) == ["", message, message]


def _bad_arguments(group: TorchGroup) -> None:
    for call in (
        lambda: group.all_reduce(torch.ones(3, dtype=torch.int64), op="mean"),
        lambda: group.all_reduce(torch.ones(3, dtype=torch.bool)),
        lambda: group.all_reduce(torch.ones(3, dtype=torch.complex64), op="max"),
        lambda: group.all_reduce(torch.ones(3), out=torch.ones(2) if group.rank else None),
        lambda: group.all_reduce(torch.eye(3).to_sparse() if group.rank else torch.eye(3)),
        lambda: group.broadcast(torch.ones(3), root=7),
        lambda: group.all_to_all([torch.ones(3)]),
        lambda: group.gather_objects({1, 2}),
        lambda: group.make_subgroup([0, 0]),
    ):
        with pytest.raises(UsageError):
            call().wait()  # type: ignore[union-attr]
    group.barrier().wait()


def test_bad_arguments_raise_on_every_rank() -> None:
    run(2, _bad_arguments)


def _subgroups(group: TorchGroup) -> None:
    odd = group.make_subgroup([3, 1])
    assert (odd is None) == (group.rank % 2 == 0)
    if odd is not None:
        assert odd.global_rank(odd.rank) == group.rank
        assert odd.all_reduce(torch.tensor([group.rank])).wait().item() == 4
        odd.close()
    even = group.make_subgroup([0, 2])
    assert group.all_reduce(torch.ones(1)).wait().item() == 4
    if even is not None:
        assert even.gather_bytes(b"x") == [b"x", b"x"]
        even.close()
        even.close()


def test_subgroups() -> None:
    run(4, _subgroups)


def _traffic(group: TorchGroup, numel: int) -> tuple[int, int]:
    group.all_gather(torch.ones(4)).wait()
    group.all_reduce(torch.ones(numel)).wait()
    return group.traffic.within, group.traffic.between


def test_traffic_is_told_apart_by_host() -> None:
    # of a small tensor, which each sends to both others: as it is for its owner, and as its owner
    # has summed it
    piece = 120_000 // 3
    assert run(3, _traffic, 30_000, hosts=[0, 0, 1]) == [(16 + 2 * piece, 16 + 2 * piece)] * 2 + [
        (0, 32 + 4 * piece)
    ]
    ring = 2 * 2 * 1_200_000 // 3
    assert run(3, _traffic, 300_000, hosts=[0, 0, 1]) == [
        (16 + ring, 16),
        (16, 16 + ring),
        (0, 32 + ring),
    ]


def _reduce_by_every_schedule(
    group: TorchGroup | ThreadGroup, hosts: list[int]
) -> dict[tuple[str, str, str, int], bytes]:
    """Reduce by every schedule, with every operation and dtype. The bits of all results."""
    results = {}
    for name, dtype, op in product(SCHEDULES, reduction_rules.DTYPES, OPS):
        if not reduction_rules.is_allowed(op, dtype):
            continue
        for numel in (0, 1, 11, 301):
            x = mine(group.rank, (numel,), dtype)
            total = collectives.all_reduce_by_schedule_agreed(
                group, x, build_schedule(name, hosts), op
            ).wait()
            results[name, str(dtype), op, numel] = total.view(torch.uint8).numpy().tobytes()
    return results


@pytest.mark.parametrize("hosts", [[0, 1], [0, 1, 0], [0, 0, 1, 1, 0]])
def test_c_and_python_run_schedules_to_the_same_bits(hosts: list[int]) -> None:
    # a group of threads has no connections, so Python runs its schedules
    wanted = spawn(len(hosts), lambda group: _reduce_by_every_schedule(group, hosts))
    found = run(len(hosts), _reduce_by_every_schedule, hosts)
    for rank, results in enumerate(found):
        assert results.keys() == wanted[rank].keys() and results
        assert results == found[0]
        differ = {key[1:3] for key in results if results[key] != wanted[rank][key]}
        # torch multiplies complex numbers in two ways: see native/reduce.h
        assert differ <= {("torch.complex64", "product"), ("torch.complex128", "product")}


def _reduce_while_one_computes(group: TorchGroup) -> float:
    work = collectives.all_reduce_by_schedule_agreed(
        group, torch.full((10,), 1.0 + group.rank), build_schedule("ring", [0] * 3)
    )
    if group.rank == 1:
        heard(group, "the others have their sums")
    total = work.wait()[0].item()
    if group.rank != 1:
        say(group, "has its sum")
    return float(total)


def test_a_rank_passes_sums_on_though_it_does_not_wait() -> None:
    crew = Crew(3, _reduce_while_one_computes)
    for rank in (0, 2):
        crew.heard(rank, "has its sum")
    crew.tell(1, "the others have their sums")
    assert crew.results() == [6.0] * 3


def _killed(group: TorchGroup, how: str) -> tuple[str, tuple[int, ...]]:
    say(group, "ready")
    if group.rank == 2:
        time.sleep(600)
    calls = {
        "check": lambda: group.all_reduce(torch.ones(5)).wait(),
        "native": lambda: group.all_reduce_agreed(torch.ones(100_000)).wait(),
        "schedule": lambda: collectives.all_reduce_by_schedule_agreed(
            group, torch.ones(50), build_schedule("ring", [0] * 4)
        ).wait(),
        "agree": lambda: group.gather_bytes(b""),
    }
    try:
        calls[how]()
        calls[how]()
    except WorkerLost as error:
        with pytest.raises(WorkerLost):
            group.barrier().wait()
        group.close()
        return str(error), error.ranks
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("how", ["check", "native", "schedule", "agree"])
def test_a_killed_peer_is_named(how: str) -> None:
    crew = Crew(4, _killed, how)
    for rank in range(4):
        crew.heard(rank, "ready")
    time.sleep(0.2)
    crew.kill(2)
    results = crew.results()
    assert results[2] is None
    for result in (results[0], results[1], results[3]):
        message, ranks = result
        assert ranks == (2,) and "rank 2 is gone" in message


def _resized(group: TorchGroup) -> None:
    for numel in (10, 100_000, 300_000):  # by our sockets, and by Gloo
        x, y = torch.full((numel,), float(group.rank)), torch.empty(numel)
        group.exchange([(1 - group.rank, x)], [(1 - group.rank, y)]).wait()
        group.all_reduce(x, out=x).wait()
        assert (x == 1).all() and (y == 1 - group.rank).all()
        for each in (x, y):
            each.untyped_storage().resize_(0)


def test_what_was_exchanged_may_be_resized() -> None:
    run(2, _resized)


def _stopped(group: TorchGroup, numel: int) -> tuple[str, tuple[int, ...]]:
    if group.rank == 1:
        say(group, "begun")
        time.sleep(600)
    work = group.all_reduce_agreed(torch.ones(numel))
    say(group, "begun")
    heard(group, "all have begun")
    for _ in range(20):  # until this rank has heard that the other one waits, too
        with pytest.raises(DeadlineExceeded) as caught:
            work.wait(3.0)
        if caught.value.missing == (1,):
            break
    group.close()
    return str(caught.value), caught.value.missing


@pytest.mark.slow
@pytest.mark.parametrize("numel", [100_000, 1_000_000], ids=["by our sockets", "by Gloo"])
def test_a_stopped_peer_is_named_at_the_deadline(numel: int) -> None:
    crew = Crew(3, _stopped, numel)
    for rank in range(3):
        crew.heard(rank, "begun")
    crew.kill(1, signal.SIGSTOP)
    for rank in (0, 2):
        crew.tell(rank, "all have begun")
    for rank in (0, 2):
        assert crew.pipes[rank].poll(PATIENCE)
        kind, found = crew.pipes[rank].recv()
        assert kind == "ended", found
        assert found[1] == (1,) and re.match(
            r"all_reduce: \d+\.\d s have passed and ranks \[1\] are missing", found[0]
        )
    crew.kill(1)
    for process in crew.processes:
        process.join(60)
        assert not process.is_alive()


def _apart(group: TorchGroup) -> str:
    with pytest.raises(Mismatch) as caught:
        if group.rank == 0:
            group.gather_bytes(b"")
        else:
            group.all_reduce(torch.ones(3), name="w").wait()
    return str(caught.value)


def test_ranks_that_wait_for_each_other_are_found_before_the_deadline() -> None:
    for message in run(2, _apart, deadline=60):
        assert re.search(r"rank 0 at agree \(\S+\); rank 1 at all_reduce of 'w'", message), message


def _interrupted(group: TorchGroup) -> None:
    if group.rank == 1:
        heard(group, "interrupted")
        return
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        group.all_reduce_agreed(torch.ones(100_000)).wait()
    say(group, "interrupted")


def told(body: Callable[[TorchGroup], None], text: str) -> None:
    """Run it on two ranks, and tell rank 1 what rank 0 says."""
    crew = Crew(2, body)
    crew.heard(0, text)
    crew.tell(1, text)
    crew.results()


@pytest.mark.slow
def test_a_wait_hears_an_interrupt() -> None:
    told(_interrupted, "interrupted")


def _aborted(group: TorchGroup) -> str:
    if group.rank == 0:
        time.sleep(0.3)
        group.abort()
    try:
        if group.rank == 0:
            group.barrier()
        else:
            group.all_reduce_agreed(torch.ones(100_000)).wait()
    except PacelineError as error:
        return type(error).__name__
    return "nothing"


def test_abort_ends_pending_operations_everywhere() -> None:
    assert run(3, _aborted) == [ViewChanged.__name__] * 3


def _again(group: TorchGroup) -> None:
    if group.rank == 1:
        group.gather_bytes(b"")
        heard(group, "missed")
    work = group.all_reduce_agreed(torch.ones(100_000))
    if group.rank == 0:
        group.gather_bytes(b"")
        with pytest.raises(DeadlineExceeded):
            work.wait(0.05)
        say(group, "missed")
    assert work.wait()[0].item() == 2


def test_a_wait_that_was_too_short_can_be_taken_up_again() -> None:
    told(_again, "missed")


def _descriptors(group: TorchGroup) -> tuple[int, int]:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        child = group.make_subgroup(list(range(group.size)))
        assert child is not None
        child.all_reduce(torch.ones(20_000)).wait()
        group.barrier().wait()
        child.close()
    group.barrier().wait()
    end = time.monotonic() + 30  # their threads end by themselves
    while len(os.listdir("/proc/self/fd")) > before + 1 and time.monotonic() < end:
        time.sleep(0.05)
    return before, len(os.listdir("/proc/self/fd"))


def test_closed_groups_leave_no_descriptor() -> None:
    for before, after in run(2, _descriptors):
        assert after <= before + 1


def test_one_rank_alone() -> None:
    group = TorchGroup.from_store(HashStore(), 0, 1)
    assert group.all_reduce(torch.ones(10_000), op="mean").wait()[0].item() == 1
    assert group.gather_bytes(b"x") == [b"x"] and group.gather_objects([1]) == [[1]]
    assert group.broadcast(torch.ones(2)).wait().tolist() == [1, 1]
    assert group.all_gather(torch.ones(2)).wait()[0].tolist() == [1, 1]
    with pytest.raises(UsageError):
        group.all_reduce(torch.ones(2, dtype=torch.int32), op="mean").wait()
    group.close()


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(DeadlineExceeded, match="have not come") as caught:
        TorchGroup.from_store(HashStore(), 1, 3, deadline=0.3)
    assert caught.value.missing == (0, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "mpi"},
        {"hosts": [0]},
        {"rank": 5},
        {"backend": "nccl"} if not torch.cuda.is_available() else {"rank": -1},
    ],
)
def test_what_cannot_be_honoured_raises(arguments: dict[str, Any]) -> None:
    rank = arguments.pop("rank", 0)
    with pytest.raises(UsageError):
        TorchGroup.from_store(HashStore(), rank, 1 if "backend" in arguments else 2, **arguments)


ENDING = """
import sys, time
import torch
from torch.distributed import FileStore
from paceline.comm.native.torch_group import TorchGroup
rank = int(sys.argv[1])
group = TorchGroup.from_store(FileStore(sys.argv[2], 2), rank, 2, deadline=20)
group.barrier().wait()
if rank == 0:
    work = group.all_reduce_agreed(torch.ones(100_000))
    ring = group.exchange_agreed([], [(1, torch.ones(3))])
else:
    time.sleep(0.5)
"""


@pytest.mark.slow
def test_a_process_that_ends_in_the_middle_of_an_operation_ends_well(tmp_path: Path) -> None:
    line = [sys.executable, "-c", ENDING]
    workers = [
        subprocess.Popen(
            [*line, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=60)
        assert worker.returncode == 0, errors


def test_a_group_that_is_never_complete_leaves_no_socket() -> None:
    before = sockets._internet_sockets()
    with pytest.raises(DeadlineExceeded):
        TorchGroup.from_store(HashStore(), 0, 2, deadline=0.1)
    listening = [
        name for name in sockets._internet_sockets().values() if name not in before.values()
    ]
    assert len(listening) <= 1  # Gloo's own listener goes when its device does

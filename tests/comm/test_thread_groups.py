from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

from paceline.comm.group_protocol import piece_bounds
from paceline.errors import DeadlineExceeded, Mismatch, UsageError, ViewChanged, WorkerLost
from tests.harness.thread_groups import ThreadGroup, spawn

SIZES = (1, 2, 3, 5)


def mine(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Different data on every rank, the same in every run."""
    values = (
        torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 4
    )
    return (
        values.to(dtype) if not dtype.is_complex else torch.complex(values, values + rank).to(dtype)
    )


def jitter(seed: int) -> Callable[[int], None]:
    dice = random.Random(seed)
    return lambda rank: time.sleep(dice.random() * 2e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_all_reduce(size: int, op: str) -> None:
    def body(group: ThreadGroup) -> torch.Tensor:
        return group.all_reduce(mine(group.rank, (7, 3), torch.float64), op=op).wait()  # type: ignore[arg-type]

    stack = torch.stack([mine(rank, (7, 3), torch.float64) for rank in range(size)])
    wanted = {
        "sum": stack.sum(0),
        "mean": stack.mean(0),
        "min": stack.amin(0),
        "max": stack.amax(0),
        "product": stack.prod(0),
    }[op]
    results = spawn(size, body)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32(dtype: torch.dtype) -> None:
    # 2048 + 1 is 2048 in float16 and 256 + 1 is 256 in bfloat16: summed in halves, the ones would
    # be lost
    big = 2048.0 if dtype == torch.float16 else 256.0
    values = [big, 1.0, 1.0]
    [result, *_] = spawn(
        3, lambda group: group.all_reduce(torch.tensor([values[group.rank]], dtype=dtype)).wait()
    )
    assert result.dtype == dtype and result.item() == big + 2


def test_out_may_be_x_and_need_not_be_contiguous() -> None:
    def body(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(6.0).reshape(2, 3).t() + group.rank
        assert group.all_reduce(x, out=x).wait() is x
        return x, group.all_reduce(torch.empty(0, 4)).wait()

    for x, empty in spawn(2, body):
        assert torch.equal(x, torch.arange(6.0).reshape(2, 3).t() * 2 + 1) and empty.shape == (0, 4)


def test_the_other_collectives() -> None:
    def body(group: ThreadGroup) -> None:
        rank, size = group.rank, group.size
        rows = group.all_gather(torch.full((rank, 2), rank)).wait()
        assert [tuple(row.shape) for row in rows] == [(r, 2) for r in range(size)]
        assert all(bool((row == r).all()) for r, row in enumerate(rows))
        x = torch.tensor([rank, rank])
        assert group.broadcast(x, root=1).wait() is x and x.tolist() == [1, 1]
        dealt = group.all_to_all([torch.full((to, 1), rank * 10 + to) for to in range(size)]).wait()
        assert [part.flatten().tolist() for part in dealt] == [
            [r * 10 + rank] * rank for r in range(size)
        ]
        start, stop = piece_bounds(7, size)[rank]
        assert group.reduce_scatter(torch.arange(7) + rank).wait().tolist() == [
            i * size + 3 for i in range(start, stop)
        ]
        group.barrier().wait()
        assert group.gather_objects({"rank": rank, "x": [None, 1.5]}) == [
            {"rank": r, "x": [None, 1.5]} for r in range(size)
        ]
        assert group.gather_bytes(bytes([rank] * rank)) == [bytes([r] * r) for r in range(size)]
        assert group.empty((2, 3), torch.float16).shape == (2, 3)

    for seed in range(3):
        spawn(3, body, delay=jitter(seed))


def test_exchange_and_subgroups() -> None:
    def body(group: ThreadGroup) -> None:
        rank, size = group.rank, group.size
        inbox = torch.zeros(2)
        group.exchange(
            [((rank + 1) % size, torch.tensor([rank, 1.0]))], [((rank - 1) % size, inbox)]
        ).wait()
        assert inbox.tolist() == [(rank - 1) % size, 1.0]
        odd = group.make_subgroup([3, 1])
        assert (odd is None) == (rank % 2 == 0)
        if odd is not None:
            assert odd.global_rank(odd.rank) == rank and odd.rank == (0 if rank == 3 else 1)
            assert odd.all_reduce(torch.tensor(rank)).wait().item() == 4
        group.barrier().wait()

    spawn(4, body, delay=jitter(1))


def test_agree_works_beside_pending_operations() -> None:
    def body(group: ThreadGroup) -> None:
        if group.rank == 0:
            work = group.all_reduce(torch.ones(2))
            assert not work.done()
            assert len(group.gather_bytes(b"0")) == 2
        else:
            group.gather_bytes(b"1")
            work = group.all_reduce(torch.ones(2))
        assert work.wait().tolist() == [2, 2] and work.done() and work.exception() is None

    spawn(2, body)


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (
            lambda g: g.all_reduce(torch.ones(3), name="w"),
            lambda g: g.all_reduce(torch.ones(4), name="w"),
            ["[3]", "[4]", "'w'"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(3)),
            lambda g: g.all_reduce(torch.ones(3).double()),
            ["float32", "float64"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(3)),
            lambda g: g.all_reduce(torch.ones(3), op="mean"),
            ["sum", "mean"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(3), name="a"),
            lambda g: g.all_reduce(torch.ones(3), name="b"),
            ["'a'", "'b'"],
        ),
        (lambda g: g.barrier(), lambda g: g.all_gather(torch.ones(3)), ["barrier", "all_gather"]),
        (
            lambda g: g.all_gather(torch.ones(3, 2)),
            lambda g: g.all_gather(torch.ones(3, 4)),
            ["[*, 2]", "[*, 4]"],
        ),
        (
            lambda g: g.broadcast(torch.ones(1), root=0),
            lambda g: g.broadcast(torch.ones(1), root=1),
            ["root 0", "root 1"],
        ),
    ],
)
def test_a_mismatch_is_raised_on_every_rank(
    first: object, second: object, names: list[str]
) -> None:
    def body(group: ThreadGroup) -> str:
        with pytest.raises(Mismatch) as caught:
            (first if group.rank == 0 else second)(group).wait()  # type: ignore[operator]
        group.barrier().wait()  # the group still works
        return str(caught.value)

    for message in spawn(3, body):
        assert (
            "rank 0 at" in message
            and "ranks 1, 2 at" in message
            and all(name in message for name in names)
        )


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda g: g.all_reduce(torch.ones(3, dtype=torch.int64), op="mean"), "mean"),
        (lambda g: g.all_reduce(torch.ones(3, dtype=torch.bool)), "bool"),
        (lambda g: g.all_reduce(torch.ones(3, dtype=torch.complex64), op="max"), "complex64"),
        (lambda g: g.all_reduce(torch.ones(3), op="median"), "median"),
        (
            lambda g: g.all_reduce(torch.ones(3), out=torch.ones(2) if g.rank == 1 else None),
            "rank 1",
        ),
        (lambda g: g.broadcast(torch.ones(3), root=9), "root=9"),
        (lambda g: g.all_to_all([torch.ones(3)]), "1 tensors for 2 ranks"),
        (lambda g: g.all_reduce(torch.eye(3).to_sparse() if g.rank else torch.eye(3)), "sparse"),
    ],
)
def test_bad_arguments_raise_on_every_rank(call: object, names: str) -> None:
    def body(group: ThreadGroup) -> None:
        with pytest.raises(UsageError, match=names):
            call(group).wait()  # type: ignore[operator]
        group.barrier().wait()

    spawn(2, body)


def test_ranks_that_wait_for_each_other_are_found_before_the_deadline() -> None:
    def body(group: ThreadGroup) -> None:
        with pytest.raises(Mismatch, match=r"rank 0 at agree; rank 1 at barrier"):
            group.gather_bytes(b"") if group.rank == 0 else group.barrier().wait()

    spawn(2, body)


def test_the_missing_rank_is_named_at_the_deadline() -> None:
    named, called = threading.Barrier(3), threading.Barrier(2)

    def body(group: ThreadGroup) -> None:
        if group.rank == 2:
            named.wait(60)
            return
        work = group.all_reduce(torch.ones(1), name="w")
        called.wait(60)
        with pytest.raises(DeadlineExceeded, match="missing") as caught:
            work.wait()
        assert caught.value.missing == (2,) and "'w'" in str(caught.value)
        named.wait(60)

    spawn(3, body, deadline=0.3)


def test_at_the_deadline_the_stack_of_the_missing_rank_is_shown() -> None:
    aside, over = threading.Event(), threading.Event()

    def stand_aside() -> None:
        aside.set()
        over.wait(60)

    def body(group: ThreadGroup) -> None:
        if group.rank == 1:
            stand_aside()
            return
        aside.wait(60)
        group.barrier().wait()

    with pytest.raises(DeadlineExceeded) as caught:
        spawn(2, body, deadline=0.3)
    over.set()
    (note,) = caught.value.__notes__
    assert "rank 1 is at" in note and "stand_aside" in note


def test_a_rank_that_leaves_early_is_named_at_once() -> None:
    def body(group: ThreadGroup) -> None:
        if group.rank == 0:
            group.barrier().wait()

    with pytest.raises(WorkerLost, match=r"rank 1 .its body has returned") as caught:
        spawn(2, body)
    assert caught.value.ranks == (1,)


def test_the_first_error_is_raised_and_ends_the_others() -> None:
    def body(group: ThreadGroup) -> None:
        if group.rank == 1:
            raise KeyError("mine")
        group.make_subgroup([0, 2]) and group.barrier().wait()

    with pytest.raises(KeyError, match="mine"):
        spawn(3, body)


def test_the_error_for_which_a_rank_aborts_is_raised_however_late_it_comes() -> None:
    waits = threading.Event()

    def body(group: ThreadGroup) -> None:
        if group.rank == 0:
            work = group.barrier()
            waits.set()
            work.wait()
        assert waits.wait(60)
        (other,) = (thread for thread in threading.enumerate() if thread.name == "rank 0")
        group.abort()
        other.join(60)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        spawn(2, body)


def test_abort_ends_pending_work() -> None:
    begun = threading.Event()

    def body(group: ThreadGroup) -> None:
        work = group.all_reduce(torch.ones(1)) if group.rank == 0 else None
        if work is None:
            assert begun.wait(60)
            group.abort()
        else:
            begun.set()
            with pytest.raises(ViewChanged, match="rank 1"):
                work.wait()

    spawn(2, body)


def test_exchanges_that_do_not_fit_raise_on_all() -> None:
    def body(group: ThreadGroup) -> None:
        other = 1 - group.rank
        with pytest.raises(
            Mismatch, match="rank 0 sends 3 x float32 to rank 1, which expects 2 x float32"
        ):
            group.exchange([(other, torch.ones(3 - group.rank))], [(other, torch.ones(2))]).wait()

    spawn(2, body)


def test_traffic_is_told_apart_by_host() -> None:
    def body(group: ThreadGroup) -> tuple[int, int]:
        group.all_gather(torch.ones(4)).wait()
        return group.traffic.within, group.traffic.between

    assert spawn(3, body, hosts=[0, 0, 1]) == [(16, 16), (16, 16), (0, 32)]

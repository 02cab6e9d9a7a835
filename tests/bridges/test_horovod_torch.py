"""Horovod's operations on several ranks, with different data on each of them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline.bridges.horovod.torch as hvd
from tests.harness.horovod_ranks import run_ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3])


def numbers(rank: int, *shape: int) -> Tensor:
    """Different whole numbers on each rank."""
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).float() * (rank + 1)


@SIZES
def test_reductions(size: int) -> None:
    def body(rank: int) -> list[Tensor]:
        x = numbers(rank, 2, 3)
        ops = (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product)
        results = [hvd.allreduce(x, op=op) for op in ops]
        assert torch.equal(x, numbers(rank, 2, 3))  # it was not changed
        results.append(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0))
        results.append(hvd.allreduce(x.long(), op=hvd.Average))
        results.append(hvd.allreduce(x, compression=hvd.Compression.fp16))
        assert hvd.allreduce_(x, op=hvd.Sum) is x
        return [*results, x]

    parts = torch.stack([numbers(rank, 2, 3) for rank in range(size)])
    total = parts.sum(0)
    mean = total / size
    expected = [
        total,
        mean,
        parts.amin(0),
        parts.amax(0),
        parts.prod(0),
        6 * total,
        mean.long(),
        mean,
    ]
    for results in run_ranks(size, body):
        for result, right in zip(results, [*expected, total], strict=True):
            torch.testing.assert_close(result, right, rtol=1e-6, atol=0)


@SIZES
def test_moving_rows(size: int) -> None:
    def body(rank: int) -> list[Tensor]:
        gathered = hvd.allgather(numbers(rank, rank + 1, 2))
        copied = hvd.broadcast(numbers(rank, 3), root_rank=size - 1)
        sent = torch.full((size * (size + 1) // 2, 2), float(rank))
        splits = torch.arange(1, size + 1, dtype=torch.int32)
        exchanged, received = hvd.alltoall(sent, splits)
        equal = hvd.alltoall(torch.arange(2.0 * size) + 100 * rank)
        scattered = hvd.reducescatter(numbers(rank, size + 1, 2), op=hvd.Sum)
        flags = hvd.allgather(torch.tensor([rank % 2 == 0]))
        return [gathered, copied, exchanged, received, equal, scattered, flags]

    results = run_ranks(size, body)
    total = sum(numbers(rank, size + 1, 2) for rank in range(size))
    assert isinstance(total, Tensor)
    for rank, (gathered, copied, exchanged, received, equal, scattered, flags) in enumerate(
        results
    ):
        assert torch.equal(gathered, torch.cat([numbers(r, r + 1, 2) for r in range(size)]))
        assert torch.equal(copied, numbers(size - 1, 3))
        assert received.tolist() == [rank + 1] * size
        assert exchanged[:, 0].tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]
        assert equal.tolist() == [100.0 * r + 2 * rank + i for r in range(size) for i in (0, 1)]
        start, rows = (0, 2) if rank == 0 else (rank + 1, 1)  # the first rank gets one row more
        assert torch.equal(scattered, total[start : start + rows])
        assert flags.tolist() == [r % 2 == 0 for r in range(size)]


def test_any_order_and_several_threads() -> None:
    def body(rank: int) -> list[float]:
        names = [f"x{i}" for i in range(40)]
        handles: dict[str, Any] = {}

        def submit(chosen: list[str]) -> None:
            for name in chosen:
                x = torch.tensor([float(name[1:]) + rank])
                handles[name] = hvd.allreduce_async(x, name=name, op=hvd.Sum)

        ordered = names if rank == 0 else names[::-1]
        threads = [threading.Thread(target=submit, args=(ordered[i::3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results = [float(hvd.synchronize(handles[name])) for name in names]
        assert all(hvd.poll(handle) for handle in handles.values())
        return results

    assert run_ranks(2, body) == [[2.0 * i + 1 for i in range(40)]] * 2


def test_groups_travel_together() -> None:
    def body(rank: int) -> list[Any]:
        xs = [numbers(rank, 2), numbers(rank, 1, 3).double()]
        reduced = hvd.grouped_allreduce(xs, op=hvd.Sum)
        gathered = hvd.grouped_allgather(xs)
        scattered = hvd.grouped_reducescatter([numbers(rank, 2), numbers(rank, 4)], op=hvd.Sum)
        hvd.grouped_allreduce_(xs, op=hvd.Sum)
        return [x.tolist() for x in [*reduced, *gathered, *scattered, *xs]]

    both = [[3.0, 6.0], [[3.0, 6.0, 9.0]]]
    gathered = [[1.0, 2.0, 2.0, 4.0], [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]]
    first, second = run_ranks(2, body)
    assert first == [*both, *gathered, [3.0], [3.0, 6.0], *both]
    assert second == [*both, *gathered, [6.0], [9.0, 12.0], *both]


def test_process_sets() -> None:
    def body(rank: int) -> Any:
        pair = hvd.add_process_set([0, 2])
        with pytest.raises(ValueError, match="duplicate process set"):
            hvd.add_process_set([2, 0])
        result = None
        if pair.included():
            x = torch.tensor([float(rank)])
            total = hvd.allreduce(x, op=hvd.Sum, process_set=pair)
            copied = hvd.broadcast(x, root_rank=2, process_set=pair)
            result = pair.size(), pair.rank(), float(total), float(copied)
        else:
            with pytest.raises(ValueError, match="doesn't have this rank"):
                hvd.allreduce(torch.ones(1), process_set=pair)
        assert hvd.remove_process_set(pair)
        assert not hvd.remove_process_set(pair)
        return result

    assert run_ranks(3, body) == [(2, 0, 2.0, 2.0), None, (2, 1, 2.0, 2.0)]


def test_join_gives_zeros_and_the_last_rank() -> None:
    def body(rank: int) -> Any:
        total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="a") if rank else None
        return None if total is None else total.tolist(), hvd.join()

    results = run_ranks(3, body)
    assert [total for total, _ in results] == [None, [2.0, 2.0], [2.0, 2.0]]
    assert len({last for _, last in results}) == 1 and results[0][1] != 0


def test_differences_are_errors_on_all_ranks() -> None:
    def body(rank: int) -> list[str]:
        texts = []
        for call in (
            lambda: hvd.allreduce(torch.ones(2 + rank)),
            lambda: hvd.allreduce(torch.ones(2, dtype=(torch.float32, torch.int32)[rank])),
            lambda: hvd.broadcast(torch.ones(2), root_rank=rank),
            lambda: hvd.allgather(torch.ones(2, 2 + rank)),
        ):
            with pytest.raises(hvd.HorovodInternalError) as caught:
                call()
            texts.append(str(caught.value))
        assert hvd.allreduce(torch.ones(1)).item() == 1.0  # it goes on
        return texts

    first, second = run_ranks(2, body)
    assert first == second
    assert "rank 0 has [2], but rank 1 has [3]" in first[0]
    assert "rank 0 has float32, but rank 1 has int32" in first[1]
    assert "root ranks: rank 0 has 0, but rank 1 has 1" in first[2]


def test_bad_arguments() -> None:
    def body(rank: int) -> None:
        for call, text in (
            (lambda: hvd.allreduce(torch.ones(3, 2).t()), "contiguous"),
            (lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool)), "not supported"),
            (lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), "supersedes"),
            (lambda: hvd.alltoall(torch.ones(3)), "divided evenly"),
            (lambda: hvd.alltoall(torch.ones(3), torch.tensor([2, 2], dtype=torch.int32)), "sum"),
            (lambda: hvd.alltoall(torch.ones(3), torch.tensor([1, 1])), "32-bit"),
        ):
            with pytest.raises(ValueError, match=text):
                call()
        with pytest.raises(NotImplementedError, match="no reduction ADASUM"):
            hvd.reducescatter(torch.ones(3), op=hvd.Adasum)
        if rank == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="twice")
            with pytest.raises(ValueError, match="same name as another tensor"):
                hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.barrier()
        if rank == 1:
            handle = hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.synchronize(handle)

    run_ranks(2, body)


def test_a_stall_names_the_rank_that_lacks_the_operation() -> None:
    def body(rank: int) -> str:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name=("first", "second")[rank])
        return str(caught.value)

    first, second = run_ranks(2, body, deadline=2.0)
    assert "allreduce.first: rank 1 did not submit it" in first
    assert "allreduce.second: rank 0 did not submit it" in second


def test_a_shutdown_ends_what_others_wait_for_and_init_may_follow() -> None:
    def body(rank: int) -> str:
        text = ""
        if rank == 0:
            hvd.shutdown()
            assert not hvd.is_initialized()
        else:
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(torch.ones(1), name="late")
            text = str(caught.value)
        hvd.init()
        assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item() == 1.0
        return text

    assert "rank 0 called shutdown" in run_ranks(2, body)[1]


def test_before_init() -> None:
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
        hvd.rank()


def test_what_is_built_is_told_truthfully() -> None:
    assert (hvd.gloo_built(), hvd.mpi_built(), hvd.nccl_built(), hvd.cuda_built()) == (
        *(True, False),
        *(0, False),
    )


def test_gradients_flow_through_operations() -> None:
    def body(rank: int) -> list[list[float]]:
        grads = []
        for call in (
            lambda x: hvd.allreduce(x, op=hvd.Sum),
            hvd.allgather,
            lambda x: hvd.broadcast(x, root_rank=1),
            hvd.alltoall,
            lambda x: hvd.reducescatter(x, op=hvd.Sum),
        ):
            x = torch.ones(2, requires_grad=True)
            y = call(x)
            y.backward(torch.arange(1.0, len(y) + 1) * (rank + 1))
            assert x.grad is not None
            grads.append(x.grad.tolist())
        return grads

    first, second = run_ranks(2, body)
    assert first == [[3.0, 6.0], [1.5, 3.0], [0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]
    assert second == [[3.0, 6.0], [4.5, 6.0], [1.5, 3.0], [2.0, 4.0], [2.0, 4.0]]


def test_objects() -> None:
    def body(rank: int) -> Any:
        return hvd.broadcast_object({"rank": rank}, root_rank=1), hvd.allgather_object("x" * rank)

    assert run_ranks(3, body) == [({"rank": 1}, ["", "x", "xx"])] * 3


def test_batch_norm_over_all_ranks_equals_one_process() -> None:
    torch.manual_seed(3)
    x, weights = torch.randn(6, 4, 5) * 3 + 2, torch.randn(6, 4, 5)
    parts = [slice(0, 4), slice(4, 6)]

    def body(rank: int) -> list[Tensor]:
        part = x[parts[rank]].clone().requires_grad_()
        norm = hvd.SyncBatchNorm(4)
        y = norm(part)
        (y * weights[parts[rank]]).sum().backward()
        assert part.grad is not None and norm.running_mean is not None
        assert norm.running_var is not None
        return [y.detach(), part.grad, norm.running_mean, norm.running_var]

    whole = x.clone().requires_grad_()
    norm = torch.nn.BatchNorm1d(4)
    y = norm(whole)
    (y * weights).sum().backward()
    assert whole.grad is not None
    for rank, (output, grad, mean, var) in enumerate(run_ranks(2, body)):
        torch.testing.assert_close(output, y.detach()[parts[rank]], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad, whole.grad[parts[rank]], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mean, norm.running_mean)
        torch.testing.assert_close(var, norm.running_var)


def test_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def body(rank: int) -> None:
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(1), name="timed")
        hvd.stop_timeline()

    run_ranks(2, body)
    events = json.loads(path.read_text())
    names = {event.get("name") for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= names
    assert any(event.get("args") == {"name": "allreduce.timed"} for event in events)

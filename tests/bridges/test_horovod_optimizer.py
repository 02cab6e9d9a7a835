"""`DistributedOptimizer` steps as one process does with the batches of all ranks together."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline.bridges.horovod.torch as hvd
from paceline.bridges.horovod.engine import engine as engines
from paceline.bridges.horovod.engine.adasum import combine_pair
from paceline.bridges.horovod.engine.execution import OperationResult
from tests.harness.horovod_ranks import run_ranks

STEPS, BATCH = 4, 4


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def batch(step: int, rank: int) -> Tensor:
    """Another batch in each step, on each rank."""
    return torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def train_alone(size: int, passes: int = 1) -> list[Tensor]:
    """Train one process with the batches of all ranks."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(0, STEPS, passes):
        x = torch.cat([batch(step + i, rank) for i in range(passes) for rank in range(size)])
        optimizer.zero_grad()
        (passes * model(x).square().mean()).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(rank: int, passes: int = 1, **options: Any) -> list[Tensor]:
    """Train one rank, from another model on each."""
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if rank == 0 else 9.0, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if "groups" in options and isinstance(options["groups"], str):
        options["groups"] = [[*model.parameters()][:2]]
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes, **options
    )
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(0, STEPS, passes):
        optimizer.zero_grad()
        for i in range(passes):
            model(batch(step + i, rank)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_equals_one_process_with_all_batches(size: int) -> None:
    for weights in run_ranks(size, train):
        torch.testing.assert_close(weights, train_alone(size), rtol=1e-5, atol=1e-6)


OPTIONS: tuple[tuple[dict[str, Any], float], ...] = (
    ({"compression": hvd.Compression.fp16}, 1e-2),
    ({"groups": 2}, 1e-5),
    ({"groups": "first"}, 1e-5),
    ({"gradient_predivide_factor": 2.0}, 1e-5),
    ({"sparse_as_dense": True}, 1e-5),
)


def test_options_change_the_way_and_not_the_result() -> None:
    def body(rank: int) -> list[list[Tensor]]:
        return [train(rank, **options) for options, _ in OPTIONS]

    for results in run_ranks(2, body):
        for weights, (_, tolerance) in zip(results, OPTIONS, strict=True):
            torch.testing.assert_close(weights, train_alone(2), rtol=tolerance, atol=tolerance)


def test_options_reach_the_operations() -> None:
    def body(rank: int) -> list[set[Any]]:
        told = []
        submit = engines.OperationEngine.submit
        for options, _ in OPTIONS:
            calls = set()

            def note(
                self: Any, kind: str, tensors: Any = (), calls: Any = calls, **more: Any
            ) -> Any:
                if kind == "allreduce":
                    calls.add((len(tensors), tensors[0].dtype, more["prescale"], more["postscale"]))
                return submit(self, kind, tensors, **more)

            engines.OperationEngine.submit = note  # type: ignore[assignment,method-assign]
            train(rank, **options)
            engines.OperationEngine.submit = submit  # type: ignore[method-assign]
            told.append(calls)
        return told

    half, whole = torch.float16, torch.float32
    assert run_ranks(2, body)[0] == [
        {(1, half, 1.0, 1.0)},
        {(2, whole, 1.0, 1.0)},
        {(2, whole, 1.0, 1.0), (1, whole, 1.0, 1.0)},
        {(1, whole, 0.5, 2.0)},
        {(1, whole, 1.0, 1.0)},
    ]


def test_gradients_of_several_passes_add_up() -> None:
    for weights in run_ranks(2, lambda rank: train(rank, passes=2)):
        torch.testing.assert_close(weights, train_alone(2, passes=2), rtol=1e-5, atol=1e-6)


def test_sum_and_a_process_set() -> None:
    def body(rank: int) -> list[Tensor]:
        pair = hvd.add_process_set([0, 1])
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), op=hvd.Sum, process_set=pair
        )
        model(batch(0, rank)).square().mean().backward()
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    model = make_model()
    for rank in (0, 1):
        model(batch(0, rank)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    first, second, third = run_ranks(3, body)
    torch.testing.assert_close(first, [p.detach() for p in model.parameters()])
    torch.testing.assert_close(second, first)
    assert not torch.allclose(third[0], first[0])


def test_sparse_gradients() -> None:
    def body(rank: int) -> list[Tensor]:
        results = []
        for sparse_as_dense in (False, True):
            torch.manual_seed(0)
            table = nn.Embedding(6, 2, sparse=True)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=sparse_as_dense
            )
            table(torch.tensor([rank, 3])).sum().backward()
            optimizer.step()
            results.append(table.weight.detach())
        return results

    torch.manual_seed(0)
    expected = nn.Embedding(6, 2).weight.detach().clone()
    for row, change in ((0, 0.5), (1, 0.5), (3, 1.0)):
        expected[row] -= change
    for results in run_ranks(2, body):
        for weights in results:
            torch.testing.assert_close(weights, expected)


def test_clipping_and_its_warnings() -> None:
    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(batch(0, rank)).square().mean().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            model(batch(0, rank)).square().mean().backward()
        # That backward has added to a gradient which was under way, so begin anew.
        optimizer.synchronize()
        optimizer.zero_grad()
        model(batch(0, rank)).square().mean().backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert hvd.allgather(norm.view(1)).unique().numel() == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()

    run_ranks(2, body)


def test_adasum_combines_changes() -> None:
    def body(rank: int) -> list[Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
        with pytest.raises(AssertionError, match="not supported"):
            optimizer.skip_synchronize()
        model(batch(0, rank)).square().mean().backward()
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    start = [p.detach() for p in make_model().parameters()]
    changes = []
    for rank in (0, 1):
        model = make_model()
        model(batch(0, rank)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        changes.append([p.detach() - s for p, s in zip(model.parameters(), start, strict=True)])
    expected = [s + combine_pair(a, b) for s, a, b in zip(start, *changes, strict=True)]
    for weights in run_ranks(2, body):
        torch.testing.assert_close(weights, expected)


def test_adasum_of_parallel_and_orthogonal_vectors() -> None:
    a, b = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert combine_pair(a, a).tolist() == [2.0, 0.0]
    assert combine_pair(a, b).tolist() == [2.0, 3.0]
    assert combine_pair(a, torch.zeros(2)).tolist() == [2.0, 0.0]

    def body(rank: int) -> Any:
        if hvd.size() == 3:
            with pytest.raises(NotImplementedError, match="power of 2"):
                hvd.allreduce(a, op=hvd.Adasum)
            return None
        x = torch.zeros(4)
        x[rank] = rank + 1.0
        return hvd.allreduce(x, op=hvd.Adasum).tolist()

    assert run_ranks(4, body) == [[1.0, 2.0, 3.0, 4.0]] * 4
    run_ranks(3, body)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"named_parameters": [("a", 0)]}, "not named"),
        ({"named_parameters": [1]}, "tuples"),
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "not supported"),
        ({"groups": 0}, "positive integer"),
        ({"groups": [[1]]}, "must consist"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    twice = [(name, p) for p in model.parameters() for name in ("same",)]
    with pytest.raises(ValueError, match="unique"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), twice)


def test_a_bridge_that_never_reduces_is_noticed() -> None:
    def body(rank: int) -> list[Tensor]:
        run_batch = engines.run_batch

        def keep_own(group: Any, batch: Any) -> Any:
            if batch[0].request.key.kind != "allreduce":
                return run_batch(group, batch)
            return [OperationResult([x.clone() for x in each.tensors]) for each in batch]

        engines.run_batch = keep_own
        return train(rank)

    _, weights = run_ranks(2, body)
    assert not torch.allclose(weights[0], train_alone(2)[0], rtol=1e-3)

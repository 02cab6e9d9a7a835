"""What a script keeps of p.grad is never written again, whichever way gradients travel, and
costs nothing where nobody keeps any.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.cluster.store import Store
from paceline.codec.codec import error_feedback
from paceline.codec.dense import int8
from paceline.codec.sparse import topk
from paceline.comm.bucket_layout import Bucket, BucketShape, build_buckets
from paceline.comm.group_protocol import Group
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.shm.shared_group import SharedGroup
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce, AllReduceSync
from paceline.sync.bucket_memory import BucketCopies, BucketCopy
from paceline.sync.localsgd.strategy import LocalSGD
from paceline.sync.per_axis import Sequence
from tests.harness.models import net
from tests.harness.processes import fork
from tests.harness.runs import alone, batches, distance, make, parameters, workers

WAYS = ["auto", "native", "direct", "ring", "tree", "halving-doubling", "hierarchical"]
MAKES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda g: g,
    "detach": lambda g: g.detach(),
    "view": lambda g: g.view(-1),
    "row": lambda g: g[0],
    "row of a view": lambda g: g.view(-1)[1:],
    "array": lambda g: g.numpy(),
    "array of a view": lambda g: g.detach().view(-1).numpy(),
}


def kept(
    run: Run,
    strategy_says: Callable[[Run], bool] = lambda run: True,
    make: Callable[[Tensor], Any] = lambda g: g,
) -> list[float]:
    """Two losses a step, gradients kept while the next is exchanged, some for several steps; how
    far each had moved by then.
    """
    model = net()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), batches()
    )
    history: list[tuple[Any, np.ndarray[Any, Any]]] = []
    moved = []
    for x, y in loader:
        for loss in (F.mse_loss, F.l1_loss):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            for p in model.parameters():
                if strategy_says(run):
                    held = make(p.grad)
                    history.append((held, np.asarray(held).copy()))
        optimizer.step()
        moved += [float(np.abs(np.asarray(held) - then).max()) for held, then in history]
        history = history[-10:]
    return moved


@pytest.mark.each_choice
@pytest.mark.parametrize("via", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_that_are_kept_stay(size: int, via: str) -> None:
    for moved in workers(size, kept, strategy=AllReduce(via=via)):
        assert moved and max(moved) == 0.0


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_whatever_is_made_of_them_stays(make: Callable[[Tensor], Any]) -> None:
    for moved in workers(2, lambda run: kept(run, make=make)):
        assert moved and max(moved) == 0.0


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduce(codec=int8()),
        AllReduce(codec=error_feedback(topk(0.2))),
        AllReduce(bucket_mb=0.0001),
        LocalSGD(3, after=3),
        LocalSGD(3),
    ],
    ids=str,
)
def test_with_other_strategies(strategy: Any) -> None:
    for moved in workers(2, kept, strategy=strategy):
        assert moved and max(moved) == 0.0


def test_between_hosts_with_strategies_of_their_own() -> None:
    strategy = Sequence((AllReduce(), "local"), (LocalSGD(2), "host"))
    for moved in workers(4, kept, strategy=strategy, hosts=(0, 0, 1, 1)):
        assert moved and max(moved) == 0.0


def test_on_some_workers_only() -> None:
    found = workers(3, lambda run: kept(run, strategy_says=lambda run: run.rank == 1))
    assert max(found[1]) == 0.0 and found[0] == found[2] == []


def surgery(run: Run) -> Tensor:
    """Conflicting parts of two losses' gradients are taken out (Yu et al. 2020, PCGrad)."""
    model = net()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), batches()
    )
    for x, y in loader:
        gradients = []
        for loss in (F.mse_loss, F.l1_loss):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            gradients.append([p.grad for p in model.parameters()])
        for p, one, other in zip(model.parameters(), *gradients, strict=True):
            along = torch.clamp((one * other).sum(), max=0) / (other * other).sum()
            p.grad = one - along * other + other
        optimizer.step()
    return parameters(model)


def changes(run: Run) -> Tensor:
    """The step is longer where gradients of two steps point the same way."""
    model = net()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), batches()
    )
    before: list[Tensor] = []
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        now = [p.grad for p in model.parameters()]
        cosine = (
            sum(float((a * b).sum()) for a, b in zip(now, before, strict=True)) if before else 0.0
        )
        for g in now:
            g.mul_(1.0 + np.tanh(cosine))
        optimizer.step()
        before = now
    return parameters(model)


def unclear(run: Run) -> Tensor:
    """Gradients that are zeroed in place, kept over passes without an exchange, and scaled."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scaler, loader = run.prepare(model, optimizer, scaler, batches())
    first: list[Tensor] = []
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        with run.no_sync():
            scaler.scale(F.l1_loss(model(x), y)).backward()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        if not first:
            first = [p.grad for p in model.parameters()]
            wanted = [g.clone() for g in first]
            for p in model.parameters():
                p.grad = p.grad.clone()
        for p, g in zip(model.parameters(), first, strict=True):
            p.grad.add_(g, alpha=0.1)
        scaler.step(optimizer)
        scaler.update()
    assert all(map(torch.equal, first, wanted))
    return parameters(model)


def fetched_once(run: Run) -> Tensor:
    """Gradients are fetched once, zeroed in place, and read where they were; one of the layers
    has none in every other step.
    """
    model, extra = net(), nn.Linear(6, 2).double()
    nn.init.ones_(extra.weight)
    nn.init.zeros_(extra.bias)
    model, extra, loader = run.prepare(model, extra, batches())
    everything = [*model.parameters(), *extra.parameters()]
    fetched: list[Tensor] = []
    for number, (x, y) in enumerate(loader):
        for g in fetched:
            g.zero_()
        F.mse_loss(model(x) + extra(x) if number % 2 == 0 else model(x), y).backward()
        fetched = fetched or [p.grad for p in everything]
        with torch.no_grad():
            for p, g in zip(everything, fetched, strict=True):
                assert p.grad is g
                p.sub_(g, alpha=0.1)
    return parameters(model, extra)


def summed(run: Run) -> Tensor:
    """Kept without being zeroed it is the sum of both losses, as torch has it."""
    model = net()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), batches()
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        kept = [p.grad.view(-1) for p in model.parameters()]
        F.l1_loss(model(x), y).backward()
        with torch.no_grad():
            for p, g in zip(model.parameters(), kept, strict=True):
                p.sub_(g.view_as(p), alpha=0.05)
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("loop", [surgery, changes, unclear, fetched_once, summed])
def test_loops_that_keep_gradients_train_as_one_worker_does(loop: Callable[[Run], Tensor]) -> None:
    wanted = alone(loop)
    for size in (2, 3):
        for found in workers(size, loop):
            assert distance(found, wanted) < 1e-12


def test_what_is_kept_can_be_read_after_the_run() -> None:
    gradients: list[tuple[Tensor, Tensor]] = []

    def body(run: Run) -> None:
        model = net()
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches()
        )
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            gradients.extend((p.grad, p.grad.clone()) for p in model.parameters())

    workers(2, body)
    gc.collect()
    assert len(gradients) == 2 * 4 * 5 and all(torch.equal(held, then) for held, then in gradients)


def test_a_loop_that_keeps_nothing_has_one_memory_and_one_that_does_gives_it_back() -> None:
    def body(run: Run) -> list[int]:
        model = net()
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches()
        )
        exchange = run._backward.sync
        assert isinstance(exchange, AllReduceSync)
        counts: list[int] = []
        for number, (x, y) in enumerate(loader):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            assert exchange._buckets._memory is not None
            shelf = exchange._buckets._memory._copies_by_bucket[0]
            counts.append(len(shelf._copies))
            assert (shelf.current is shelf._copies[0]) == (number != 2), (
                "the first memory is taken again"
            )
            keep = [p.grad for p in model.parameters()] if number == 1 else []
            if number in (0, 1):
                optimizer.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=False)
            assert len(keep) in (0, 4)
        return counts

    for found in workers(2, body):
        assert found == [1, 1, 2, 2, 2]


# ---- one bucket


class Made:
    """Makes plain memory, and notes what is released."""

    def __init__(self) -> None:
        self.made, self.released = 0, 0

    def allocate_substitute(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.made += 1
        return torch.empty(numel, dtype=dtype)

    def release_memory(self, flat: Tensor) -> None:
        self.released += 1


def bucket(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Bucket, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    (found,) = build_buckets(
        [BucketShape.of_parameter(p) for p in parameters],
        [range(len(shapes))],
        lambda n, dtype, device: torch.empty(n, dtype=dtype),
    )
    return found, parameters


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
    ],
)
def test_memory_of_any_type_knows_who_holds_it(dtype: torch.dtype) -> None:
    found, parameters = bucket((3, 4), (5,), dtype=dtype)
    memory = BucketCopy(0, found, found.flat)
    assert not memory.is_held(parameters)
    assert all(
        a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
        for a, b in zip(memory.views, found.views, strict=True)
    )
    for p, view in zip(parameters, memory.views, strict=True):
        p.grad = view
    del view
    assert not memory.is_held(parameters), "gradients themselves are nobody else's"
    for holds in (lambda g: g, lambda g: g.detach(), lambda g: g[0], lambda g: {"a": [g]}):
        something = holds(parameters[1].grad)
        assert memory.is_held(parameters)
        parameters[1].grad = None
        assert memory.is_held(parameters)
        del something
        assert not memory.is_held(parameters)
        parameters[1].grad = memory.views[1]
    parameters[0].grad = memory.views[1] if dtype is None else None
    other = nn.Parameter(torch.zeros(5, dtype=dtype))
    other.grad = memory.views[1]  # of a model that isn't ours
    parameters[1].grad = None
    assert memory.is_held(parameters)


def test_a_shelf_grows_with_what_is_kept_and_shrinks_to_one_spare() -> None:
    found, parameters = bucket((2, 2), (3,))
    maker = Made()
    shelf = BucketCopies(0, found, parameters, maker)
    first = shelf.current
    assert not shelf.choose_memory() and maker.made == 0
    held = [[view.detach() for view in shelf.current.views]]
    for _ in range(3):
        assert shelf.choose_memory()
        held.append([shelf.current.views[0]])
    assert maker.made == 3 and len(shelf._copies) == 4
    held.clear()
    assert shelf.choose_memory() and shelf.current is first and maker.released == 0
    held = [[shelf.current.views[1]]]
    assert shelf.choose_memory() and shelf.current is not first and maker.made == 3
    assert len(shelf._copies) == 2 and maker.released == 2
    assert not shelf.choose_memory(), "the first is kept, and nothing of the second"
    shelf.close()
    assert maker.released == 4


# ---- in shared memory


def wide() -> nn.Module:
    """Of tensors that are too large for the small stages of a host."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 2)).double()


def shared(group: Group, keeps: set[int], hosts: tuple[int, ...]) -> tuple[bool, list[float]]:
    """Trains, with gradients of some steps kept on some ranks: whether they stayed, also after
    the run, and the weights.
    """
    held: list[tuple[Tensor, Tensor]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        make(group, AllReduce(), folder, lambda text: None, hosts=hosts) as run,
    ):
        model = wide()
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.001), batches(80, 8)
        )
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if group.rank in keeps and number % 3 < 2:
                held += [
                    (g, g.clone())
                    for g in (p.grad[:1] if number % 2 else p.grad for p in model.parameters())
                ]
            optimizer.step()
            if number == 6:
                del held[:3]
        exchange = run._backward.sync
        assert isinstance(exchange, AllReduceSync) and exchange._buckets._memory is not None
        memories = max(len(shelf._copies) for shelf in exchange._buckets._memory._copies_by_bucket)
        assert (memories > 1) == (group.rank in keeps)
    gc.collect()
    return all(torch.equal(g, then) for g, then in held), parameters(model).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [{0}, {1}, {0, 1, 2}])
def test_in_shared_memory_whoever_keeps_and_after_the_run(keeps: set[int]) -> None:
    def body(rank: int, size: int, store: Store) -> tuple[bool, list[float]]:
        return shared(SharedGroup.from_store(store, rank, size, deadline=60), keeps, (0,) * size)

    wanted = alone(trained)
    for stayed, found in fork(3, body):
        assert stayed and distance(torch.tensor(found, dtype=torch.float64), wanted) < 1e-12


@pytest.mark.slow
def test_over_two_hosts() -> None:
    def body(rank: int, size: int, store: Store) -> tuple[bool, list[float]]:
        flat = SharedGroup.from_store(store, rank, size, deadline=60)
        inner = SharedGroup.from_store(
            store.open_substore(f"host{rank // 2}"), rank % 2, 2, deadline=60
        )
        group = HostsGroup(inner, flat.make_subgroup([0, 2]), flat, (0, 0, 1, 1), deadline=60)
        return shared(group, {1, 2}, (0, 0, 1, 1))

    wanted = alone(trained)
    for stayed, found in fork(4, body):
        assert stayed and distance(torch.tensor(found, dtype=torch.float64), wanted) < 1e-12


def trained(run: Run) -> Tensor:
    model = wide()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.001), batches(80, 8)
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return parameters(model)

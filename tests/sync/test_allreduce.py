"""The exchange of gradients in buckets: bit-equal everywhere, whatever comes in which order, and
no more calls than it needs.
"""

from __future__ import annotations

import cProfile
import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.schedule import SCHEDULES
from paceline.errors import Mismatch, UsageError
from paceline.formatting import format_as_call
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce, AllReduceSync
from tests.harness.runs import alone, batches, distance, parameters, workers

TINY = 0.0001  # MB: a bucket of a few parameters


class Forked(nn.Module):
    """Layers that backward reaches in another order than they are declared in; one is left out
    by samples of some workers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last, self.rare, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        chosen = x[:, :1] > 0.8
        if bool(chosen.any()):
            h = torch.where(chosen, h + self.rare(h), h)
        out: Tensor = self.last(h) * self.scale
        return out


def forked() -> nn.Module:
    model = Forked().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def train(
    run: Run,
    *,
    shares: Any = None,
    each: Callable[[nn.Module], Any] = lambda model: None,
    epochs: int = 4,
) -> Tensor:
    model = forked()
    model, opt, loader = run.prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.01), batches(), shares=shares
    )
    for _ in run.epochs(epochs):
        for x, y in loader:
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            each(model)
            opt.step()
    return parameters(model)


def exchange(run: Run) -> AllReduceSync:
    sync = run._backward.sync
    assert isinstance(sync, AllReduceSync)
    return sync


@cache
def reference() -> Tensor:
    """What training comes to on one worker."""
    return alone(train)


VIAS = ["auto", *sorted(SCHEDULES)]


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("size", "via"),
    [
        (2, "auto"),
        *((3, via) for via in VIAS),
        *(pytest.param(2, via, marks=pytest.mark.soak) for via in VIAS[1:]),
        (5, "auto"),
        *(pytest.param(5, via, marks=pytest.mark.soak) for via in VIAS[1:]),
    ],
)
def test_the_mean_is_bit_equal_on_all_workers_for_20_steps(via: str, size: int) -> None:
    seen: list[list[list[Tensor]]] = [[] for _ in range(size)]

    def body(run: Run) -> Tensor:
        def look(model: nn.Module) -> None:
            seen[run.rank].append(
                [p.grad.clone() for p in model.parameters() if p.grad is not None]
            )

        return train(run, each=look)

    found = workers(size, body, strategy=AllReduce(via=via, bucket_mb=TINY))
    assert all(torch.equal(one, found[0]) for one in found)
    assert all(len(steps) == 20 for steps in seen)
    for other in seen[1:]:
        for mine, theirs in zip(seen[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert distance(found[0], reference()) < 1e-9


def test_with_random_delays_repeatedly() -> None:
    draw = random.Random(1)

    def nap(rank: int) -> None:
        if draw.random() < 0.05:
            time.sleep(draw.random() * 0.003)

    wanted = alone(lambda run: train(run, epochs=1))
    for via in ("auto", "ring", "tree"):
        for _ in range(2):
            for found in workers(
                3,
                lambda run: train(run, epochs=1),
                strategy=AllReduce(via=via, bucket_mb=TINY),
                delay=nap,
            ):
                assert distance(found, wanted) < 1e-9


# ---- buckets


@pytest.mark.parametrize("bucket_mb", [1e-9, TINY, 8.0])
def test_buckets_lie_in_the_order_of_the_first_workers_first_backward(bucket_mb: float) -> None:
    def body(run: Run) -> list[list[str]]:
        train(run, epochs=1)
        sync = exchange(run)
        return [
            [sync._slots[number].name for number in bucket.members]
            for bucket in sync._buckets.layout
        ]

    first, second = workers(2, body, strategy=AllReduce(bucket_mb=bucket_mb))
    flat = [name for bucket in first for name in bucket]
    assert first == second and sorted(flat) == sorted(
        name for name, _ in forked().named_parameters()
    )
    assert flat[0] == "scale" and flat.index("last.weight") < flat.index("first.weight")
    assert len(first) == (7 if bucket_mb == 1e-9 else 1 if bucket_mb == 8.0 else len(first))


def test_buckets_leave_before_backward_has_ended() -> None:
    """The exchange of what is done first goes on while the rest is computed."""

    def body(run: Run) -> bool:
        early = []

        class Spy(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                early.append(exchange(run)._buckets.next)
                return grads[0]

        layers = [nn.Linear(6, 6).double() for _ in range(4)]
        model = nn.Sequential(*layers, nn.Linear(6, 2).double())
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches()
        )
        for x, y in loader:
            opt.zero_grad()
            F.mse_loss(model[2:](Spy.apply(model[:2](x))), y).backward()
            opt.step()
        return early[0] == 0 and all(count > 0 for count in early[1:])

    assert workers(2, body, strategy=AllReduce(bucket_mb=TINY)) == [True, True]


def test_gradients_are_views_with_the_strides_of_their_parameters() -> None:
    def body(run: Run) -> None:
        def look(model: nn.Module) -> None:
            flats = {
                bucket.flat.untyped_storage().data_ptr() for bucket in exchange(run)._buckets.layout
            }
            for p in model.parameters():
                if p.grad is not None:
                    assert (
                        p.grad.untyped_storage().data_ptr() in flats
                        and p.grad.stride() == p.stride()
                    )

        train(run, each=look, epochs=1)

    workers(2, body)


# ---- counting


def sent(run: Run) -> int:
    return run._context.traffic.within


def test_no_sync_saves_exchanges() -> None:
    def body(run: Run, quiet: bool) -> int:
        model = forked()
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches(64, 8)
        )
        for _ in range(2):
            before = sent(run)
            for number, (x, y) in enumerate(loader):
                if quiet and number % 4 != 3:
                    with run.no_sync():
                        F.mse_loss(model(x), y).backward()
                    continue
                F.mse_loss(model(x), y).backward()
                if number % 4 == 3:
                    opt.step()
                    opt.zero_grad()
        return sent(run) - before

    loud, quiet = (
        workers(2, lambda run: body(run, False))[0],
        workers(2, lambda run: body(run, True))[0],
    )
    assert loud == pytest.approx(4 * quiet, rel=0.01) and quiet > 0


def test_a_backward_meets_once_and_sends_each_bucket_once() -> None:
    def body(run: Run) -> tuple[int, list[str]]:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(10)), nn.Linear(6, 2)).double()
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches(400, 8)
        )
        names: list[str] = []
        meet = run._agreement.meet

        def counted(what: str, body: bytes = b"", *, where: str = "") -> list[bytes]:
            names.append(what)
            return meet(what, body, where=where)

        rounds = iter(loader)
        for number in range(12):
            x, y = next(rounds)
            if number == 2:
                run._agreement.meet = counted  # type: ignore[method-assign]
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return len(exchange(run)._buckets.layout), [
            name for name in names if name not in ("run.log", "indices", "optimizer.step")
        ]

    count, names = workers(2, body, strategy=AllReduce(bucket_mb=0.001))[0]
    assert count > 1 and names == ["backward"] * 10


def test_python_calls_for_each_parameter_and_step_are_bounded() -> None:
    """Counted, not timed: what a step costs grows by a few calls for each parameter more."""

    def calls(layers: int) -> float:
        def body(run: Run) -> int:
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
            model, opt = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            x = torch.ones(2, 4)
            total = 0
            for step in range(6):
                loss = model(x).sum()
                profile = cProfile.Profile() if step >= 3 and run.rank == 0 else None
                if profile:
                    profile.enable()
                loss.backward()
                if profile:
                    profile.disable()
                    total += sum(entry.callcount for entry in profile.getstats())
                opt.zero_grad()
            return total

        return workers(2, body, strategy=AllReduce(bucket_mb=8))[0] / 3

    few, many = calls(10), calls(60)
    each = (many - few) / 100  # parameters
    assert 0 < each < 25, f"{each:.1f} calls for each parameter"


def test_memory_is_not_allocated_anew_in_each_step() -> None:
    def body(run: Run) -> bool:
        places = []

        def look(model: nn.Module) -> None:
            places.append(tuple(bucket.flat.data_ptr() for bucket in exchange(run)._buckets.layout))

        train(run, each=look)
        return len(set(places)) == 1

    assert workers(2, body) == [True, True]


# ---- the strategy as it is written


def test_notation() -> None:
    assert (
        repr(AllReduce()) == "AllReduce()"
        and format_as_call(AllReduce(via="ring", bucket_mb=2))
        == "AllReduce(via='ring', bucket_mb=2)"
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"via": "rnig"}, r"via='rnig' is unknown; possible: .*ring.*did you mean ring\?"),
        ({"bucket_mb": 0}, "bucket_mb=0 is not a size"),
        ({"bucket_mb": -1.0}, "bucket_mb=-1.0 is not a size"),
        ({"bucket_mb": float("nan")}, "bucket_mb=nan is not a size"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        AllReduce(**options)


def test_workers_that_unfreeze_in_different_orders_are_told_apart() -> None:
    def body(run: Run) -> None:
        model = forked()
        for p in model.parameters():
            p.requires_grad_(False)
        model.scale.requires_grad_(True)
        model, loader = run.prepare(model, batches())
        for number, (x, y) in enumerate(loader):
            if number < 2:
                layer = model.first if (number == 0) == (run.rank == 0) else model.last
                layer.weight.requires_grad_(True)
            F.mse_loss(model(x), y).backward()

    with pytest.raises(Mismatch, match=r"workers train different parameters: (first|last)\.weight"):
        workers(2, body)


def test_the_state_of_another_strategy_is_refused() -> None:
    def body(run: Run) -> None:
        sync = exchange(run)
        assert sync.state_dict() == {}
        sync.load_state_dicts([{}, {}])
        with pytest.raises(UsageError, match="another kind of strategy than AllReduce"):
            sync.load_state_dicts([{"clock": 3}])

    alone(body)

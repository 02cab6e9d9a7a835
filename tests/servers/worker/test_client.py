"""The parameter server in lockstep, in whole runs on threads: the same as AllReduce, and as one
process.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.servers.worker.client import ParameterServerSync
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.parameter_servers import OPTIMIZERS, SERVED_BY, net, train, two
from tests.harness.runs import alone, batches, cut, distance, parameters, workers


def served(
    size: int, servers: int = 2, bucket_mb: float = 0.05, delay: Any = None, **options: Any
) -> Tensor:
    strategy = ParameterServer(servers=servers, bucket_mb=bucket_mb)
    found = workers(size, lambda run: train(run, **options), strategy=strategy, delay=delay)
    assert all(torch.equal(other, found[0]) for other in found), "replicas are equal"
    return found[0]


@pytest.mark.alike(2)
@SERVED_BY
def test_twenty_steps_are_those_of_one_process_and_of_allreduce(
    size: int, servers: int, kind: str
) -> None:
    """20 steps of 8 samples: 3 and 4 workers have uneven shares, or are given them."""
    options = {"kind": kind, "shares": None if size == 1 else cut(*range(1, size + 1))}
    one = alone(lambda run: train(run, kind))
    found = served(size, servers, **options)
    assert distance(found, one) < 1e-9
    assert distance(found, workers(size, lambda run: train(run, **options))[0]) < 1e-9


@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_in_float32(kind: str) -> None:
    assert (
        distance(
            served(3, kind=kind, dtype=torch.float32),
            alone(lambda run: train(run, kind, dtype=torch.float32)),
        )
        < 1e-5
    )


@pytest.mark.parametrize("kind", [pytest.param("adagrad", marks=pytest.mark.slow), "adam"])
def test_schedules_and_clipping(kind: str) -> None:
    """By the norm of all: clipped hard, and in some steps only."""
    free = alone(lambda run: train(run, kind, epochs=2))
    for clip in (0.05, 0.6) if kind == "adam" else (0.6,):
        one = alone(lambda run, clip=clip: train(run, kind, clip=clip, rate=0.7, epochs=2))
        assert distance(served(3, kind=kind, clip=clip, rate=0.7, epochs=2), one) < 1e-9
        assert distance(one, free) > 1e-3


@pytest.mark.slow
def test_with_random_delays_repeatedly() -> None:
    wanted = served(3, kind="adam", epochs=1)
    chance = random.Random(1)
    for _ in range(4):
        assert torch.equal(
            served(3, kind="adam", epochs=1, delay=lambda rank: time.sleep(chance.random() * 0.01)),
            wanted,
        )


def loop(
    each: Any, *, size: int = 3, kind: str = "momentum", strategy: Any = None, model: Any = net
) -> list[Tensor]:
    """Five steps of `each(run, model, optimizer, (x, y), step)`."""

    def body(run: Run) -> Tensor:
        made = model()
        optimizer = OPTIMIZERS[kind](made.parameters())
        made, optimizer, loader = run.prepare(made, optimizer, batches())
        for step, batch in enumerate(loader):
            each(run, made, optimizer, batch, step)
        return parameters(made)

    strategy = ParameterServer(servers=2, bucket_mb=0.05) if strategy is None else strategy
    return workers(size, body, strategy=strategy) if size > 1 else [alone(body)]


def both(each: Any, **options: Any) -> float:
    found, one = loop(each, **options), loop(each, size=1, **options)
    assert all(torch.equal(other, found[0]) for other in found)
    return distance(found[0], one[0])


def test_an_optimizer_that_is_prepared_after_its_model() -> None:
    """It steps on servers, too."""

    def body(run: Run) -> Tensor:
        model = net()
        first, second = (OPTIMIZERS["adam"](model[place].parameters()) for place in (0, 2))
        model, first, loader = run.prepare(model, first, batches())
        second = run.prepare(second)
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return parameters(model)

    found = workers(3, body, strategy=ParameterServer(servers=2, bucket_mb=0.05))
    assert (
        all(torch.equal(other, found[0]) for other in found)
        and distance(found[0], alone(body)) < 1e-9
    )


class TestWhatCounts:
    """p.grad, as it is when the optimizer steps."""

    def test_two_backward_passes(self) -> None:
        def each(run, model, optimizer, batch, step):
            x, y = batch
            F.mse_loss(model(x), y).backward()
            (model(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        assert both(each) < 1e-9

    def test_a_change_after_backward(self) -> None:
        def each(run, model, optimizer, batch, step):
            x, y = batch
            F.mse_loss(model(x), y).backward()
            for p in model.parameters():
                p.grad.mul_(0.5) if step % 2 else None
            model[0].weight.grad = model[0].weight.grad * 3
            optimizer.step()
            optimizer.zero_grad()

        assert both(each) < 1e-9

    def test_a_pass_that_was_thrown_away(self) -> None:
        def each(run, model, optimizer, batch, step):
            x, y = batch
            (model(x) ** 4).mean().backward()
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        assert both(each) < 1e-9

    def test_gradients_that_nobody_cleared_add_up(self) -> None:
        def each(run, model, optimizer, batch, step):
            x, y = batch
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if step == 2:
                optimizer.zero_grad(set_to_none=False)

        assert both(each, kind="adam") < 1e-9

    def test_a_closure(self) -> None:
        def each(run, model, optimizer, batch, step):
            x, y = batch

            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0

        assert both(each) < 1e-9

    def test_parameters_that_some_or_all_leave_out(self) -> None:
        """Unused everywhere: as it was, also by weight decay; unused by some: as zeros there."""

        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.always, self.some, self.never = net(), net(), net()

            def forward(self, x: Tensor, *, some: bool) -> Tensor:
                return self.always(x) + (self.some(x) if some else 0)

        def each(run, model, optimizer, batch, step):
            x, y = batch
            some = step != 2 and (run.size == 1 or run.rank == step % run.size)
            weight = 1.0 if run.size > 1 else 1 / 3
            out = model.always(x)
            loss = F.mse_loss(out, y)
            if some and run.size > 1:
                loss = loss + (model.some(x) ** 2).mean() * 0.0
            elif some:
                loss = loss + (model.some(x) ** 2).mean() * 0.0 * weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        assert both(each, kind="momentum", model=Branches) < 1e-9
        before = parameters(Branches().never)
        found = loop(each, kind="momentum", model=Branches)[0]
        assert torch.equal(found[-len(before) :], before)

    def test_a_change_after_clipping_is_refused(self) -> None:
        def each(run, model, optimizer, batch, step):
            x, y = batch
            F.mse_loss(model(x), y).backward()
            run.clip(model, 1.0)
            model[0].weight.grad.mul_(2)
            optimizer.step()

        with pytest.raises(UsageError, match=r"p\.grad was changed after run\.clip"):
            loop(each)

    def test_clipping_a_part_is_refused(self) -> None:
        def each(run, model, optimizer, batch, step):
            x, y = batch
            F.mse_loss(model(x), y).backward()
            run.clip(model[0], 1.0)

        with pytest.raises(
            UsageError, match=r"run\.clip takes all parameters of an optimizer together"
        ):
            loop(each)


def test_two_optimizers_that_step_by_turns() -> None:
    """As GANs have them."""

    def body(run: Run) -> Tensor:
        one, other, first, second, loader = run.prepare(*two(), batches())
        for _ in run.epochs(2):
            for step, (x, y) in enumerate(loader):
                F.mse_loss(other(one(x).detach()), y).backward()
                second.step()
                second.zero_grad()
                if step % 2:
                    F.mse_loss(other(one(x)), y).backward()
                    first.step()
                    first.zero_grad()
                    second.zero_grad()
        return parameters(one, other)

    found = workers(3, body, strategy=ParameterServer(servers=2))
    assert (
        all(torch.equal(other, found[0]) for other in found)
        and distance(found[0], alone(body)) < 1e-9
    )


def test_preparing_in_two_calls() -> None:
    """Servers that were begun for the first model end, and others begin for both."""

    def body(run: Run) -> Tensor:
        one, other = net(), net()
        first = torch.optim.Adam(one.parameters(), 0.01)
        one, first = run.prepare(one, first)
        second = torch.optim.SGD(other.parameters(), 0.01)
        other, second, loader = run.prepare(other, second, batches())
        for x, y in loader:
            F.mse_loss(one(x) + other(x), y).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return parameters(one, other)

    assert distance(workers(2, body, strategy=ParameterServer(servers=2))[0], alone(body)) < 1e-9


def test_bytes_and_waits_are_told() -> None:
    def body(run: Run) -> tuple[int, float, float]:
        train_once = train(run, epochs=1)
        return run._loop.clock.sent.between, run._context.waited, float(train_once.numel())

    for sent, waited, numel in workers(2, body, strategy=ParameterServer(servers=2)):
        assert 5 * 8 * numel < sent < 5 * 8 * numel * 1.2 and waited > 0


def test_what_optimizers_remember_lies_on_servers_alone() -> None:
    def body(run: Run) -> int:
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, batches())
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(run._backward.sync, ParameterServerSync)
        return len(optimizer.state)

    assert workers(2, body, strategy=ParameterServer()) == [0, 0]


def test_it_begins_with_what_optimizers_remember() -> None:
    """An optimizer that has stepped before it is prepared."""

    def body(run: Run) -> Tensor:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        model, optimizer, loader = run.prepare(model, optimizer, batches())
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters(model)

    assert distance(workers(2, body, strategy=ParameterServer(servers=3))[0], alone(body)) < 1e-9


@pytest.mark.parametrize(("before", "after"), [((2, 2), (3, 1)), ((3, 1), (2, 3))])
def test_a_run_that_is_resumed_goes_on_as_if_nothing_had_been(
    tmp_path: Path, before: Any, after: Any
) -> None:
    """By other numbers of workers and of servers."""

    def body(run: Run, until: int, *, resumes: bool) -> Tensor:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model, optimizer, loader = run.prepare(model, optimizer, batches())
        if resumes:
            assert run.resume(tmp_path / "test")
        for _ in run.epochs(3):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.steps + 1 == until:
                    run.save()
                    return parameters(model)
        return parameters(model)

    one = alone(lambda run: body(run, 0, resumes=False))
    workers(
        before[0],
        lambda run: body(run, 7, resumes=False),
        strategy=ParameterServer(servers=before[1]),
        folder=tmp_path,
    )
    found = workers(
        after[0], lambda run: body(run, 0, resumes=True), strategy=ParameterServer(servers=after[1])
    )
    assert distance(found[0], one) < 1e-9 and torch.equal(found[0], found[-1])


def test_a_checkpoint_of_allreduce(tmp_path: Path) -> None:
    """What its optimizer remembers goes to the servers; the other way round it is refused, as it
    would be lost.
    """

    def body(run: Run, folder: str = "", until: int = 0) -> Tensor:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model, optimizer, loader = run.prepare(model, optimizer, batches())
        assert not folder or run.resume(tmp_path / folder / "test")
        for _ in run.epochs(2):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.steps + 1 == until:
                    run.save()
                    return parameters(model)
        assert not folder or not optimizer.state
        return parameters(model)

    served = ParameterServer(servers=2)
    workers(2, lambda run: body(run, until=4), folder=tmp_path / "reduced")
    found = workers(3, lambda run: body(run, "reduced"), strategy=served)
    assert distance(found[0], alone(body)) < 1e-9
    workers(2, lambda run: body(run, until=3), strategy=served, folder=tmp_path / "served")
    with pytest.raises(UsageError, match="another kind of strategy than AllReduce"):
        workers(2, lambda run: body(run, "served"))


class TestMisuse:
    def test_sparse_gradients(self) -> None:
        def body(run: Run) -> None:
            model = nn.Embedding(10, 3, sparse=True)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model, optimizer = run.prepare(model, optimizer)
            model(torch.tensor([1, 2])).sum().backward()

        with pytest.raises(UsageError, match="the gradient of weight is sparse"):
            workers(2, body, strategy=ParameterServer())

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"servers": 0}, "servers=0 is not a number"),
            ({"bucket_mb": 0}, "bucket_mb=0 is not a size"),
        ],
    )
    def test_of_options(self, options: Any, text: str) -> None:
        with pytest.raises(UsageError, match=text):
            ParameterServer(**options)

    def test_an_optimizer_of_ones_own(self) -> None:
        class Own(torch.optim.SGD):
            pass

        def body(run: Run) -> None:
            model = net()
            run.prepare(model, Own(model.parameters(), 0.1))

        with pytest.raises(UsageError, match="a server makes its own of the same class"):
            workers(2, body, strategy=ParameterServer())

    def test_a_scaler(self) -> None:
        def body(run: Run) -> None:
            run.prepare(torch.amp.GradScaler("cpu"))

        with pytest.raises(UsageError, match="a GradScaler skips a step"):
            workers(2, body, strategy=ParameterServer())

    def test_settings_that_differ(self) -> None:
        def each(run, model, optimizer, batch, step):
            x, y = batch
            F.mse_loss(model(x), y).backward()
            optimizer.param_groups[0]["lr"] = 0.1 if run.rank else 0.2
            optimizer.step()

        with pytest.raises(Exception, match="with different settings"):
            loop(each)

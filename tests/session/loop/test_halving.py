"""Steps that run out of memory on one worker: taken in halves, with the gradient of the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.session.loop.halving import FIRST, give
from tests.harness.models import net, sgd
from tests.harness.runs import alone, batches, distance, parameters, workers

OUT = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"


class Fails(torch.autograd.Function):
    """Fails in its backward, if there are too many rows."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if len(grad) > ctx.most:
            raise RuntimeError(OUT)
        return grad, None


class Small(nn.Module):
    """A model that stands so many rows, forward and backward, from step `since` on; its buffer counts the rows that it saw."""

    def __init__(self, most, back=10**6, since=0, deep=False):
        super().__init__()
        self.net, self.most, self.back, self.since, self.deep, self.calls = net(), most, back, since, deep, 0
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.rows += len(x)
        if self.calls > self.since and len(x) > self.most:
            raise RuntimeError(OUT)
        x = x.clone().requires_grad_() if self.deep else x
        x = Fails.apply(x, self.back) if self.deep else x
        return self.net(x) if self.deep else Fails.apply(self.net(x), self.back)


def train(make, *, epochs=1, plain=False, **options):
    """Weights, losses and the rows that the model saw, of a run of steps; `make` gives the model of a rank."""

    def body(run):
        model = make(run.rank)
        optimizer = sgd(model)
        model, optimizer, loader = run.prepare(model, optimizer, batches(36, 12), **options)
        losses = []
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                if plain:
                    F.mse_loss(model(x), y).backward()
                else:
                    loss = run.step(
                        model, x, y, loss=sums if options.get("loss") == "sum" else weighed if "weigh" in options else F.mse_loss
                    )
                    losses.append(float(run.mean(loss)))
                optimizer.step()
        return parameters(model), losses, float(model.rows)

    return body


def sums(out, y):
    return F.mse_loss(out, y, reduction="sum")


def last_rank(most, **more):
    """Only rank 1 has little memory."""
    return lambda rank: Small(most if rank == 1 else 10**6, **{key: value if rank == 1 else 10**6 for key, value in more.items()})


def weighed(out, y):
    weights = y.abs()
    return (weights * (out - y).square()).sum() / weights.sum()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (last_rank(4), {}),
        (last_rank(1), {}),
        (last_rank(10**6, back=2), {}),
        (last_rank(3), {"shares": [1, 3], "accumulate": 2}),
        (last_rank(3), {"loss": "sum"}),
        (last_rank(3), {"weigh": lambda batch: float(batch[1].abs().sum())}),
    ],
)
def test_a_worker_with_little_memory_takes_its_part_in_halves(make, options, capfd):
    epochs = 2
    wanted = workers(2, train(last_rank(10**6), epochs=epochs, **options))
    found = workers(2, train(make, epochs=epochs, **options))
    assert torch.equal(found[0][0], found[1][0])
    assert distance(found[0][0], wanted[0][0]) < 1e-9
    assert found[0][1] == pytest.approx(wanted[0][1], rel=1e-9)
    assert found[1][2] == found[0][2] or options.get("shares")  # rows of steps that failed are not counted
    said = capfd.readouterr().err
    assert "paceline: rank 1 ran out of memory on" in said and "at a time from now on" in said and "rank 0" not in said


def test_gradients_are_exchanged_once_and_hooks_see_the_sum():
    seen = []

    def body(run):
        model = last_rank(2)(run.rank)
        if run.rank == 1:
            next(model.parameters()).register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        model, _, loader = run.prepare(model, sgd(model), batches(12, 12))
        for x, y in loader:
            run.step(model, x, y, loss=F.mse_loss)
            passes = run._loop.backward.passes
        return passes

    assert workers(2, body) == [1, 1] and len(seen) == 1


def test_memory_that_runs_out_when_gradients_are_on_their_way_ends_the_run_with_advice():
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        alone(train(lambda rank: Small(10**6, back=2, deep=True)))
    assert any('accumulate="auto"' in note and "run.step" in note for note in caught.value.__notes__)


def test_memory_that_runs_out_later_ends_the_run():
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        alone(train(lambda rank: Small(4, since=FIRST), epochs=FIRST))


def test_one_sample_that_does_not_fit_ends_the_run():
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        alone(train(lambda rank: Small(0)))


def test_other_errors_are_the_scripts_own():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        alone(train(lambda rank: nn.Sequential(nn.Linear(5, 2).double())))


def test_a_plain_loop_is_told_what_would_help():
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        alone(train(lambda rank: Small(4), plain=True))
    assert any('accumulate="auto"' in note and "run.step" in note for note in caught.value.__notes__)


def test_gradients_that_are_given_reach_parameters_as_they_are():
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    give([p, q], [torch.tensor([1.0, float("inf"), 3.0]), None])
    assert p.grad.tolist() == [1.0, float("inf"), 3.0] and q.grad is None
    give([q], [None])

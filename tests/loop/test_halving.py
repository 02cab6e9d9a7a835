"""Steps that run out of memory on one worker: taken in halves, with the gradient of the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.loop.halving import FIRST_STEPS, inject_gradients
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
    """A model that stands so many rows, forward and backward, from step `since` on; its buffer
    counts the rows that it saw.
    """

    def __init__(self, most, back=10**6, since=0, deep=False):
        super().__init__()
        self.net, self.most, self.back, self.since, self.deep, self.calls = (
            net(),
            most,
            back,
            since,
            deep,
            0,
        )
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
    """Weights, losses and the rows that the model saw, of a run of steps; `make` gives the model
    of a rank.
    """

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
                    value = (
                        sums
                        if options.get("loss") == "sum"
                        else weighed
                        if "weigh" in options
                        else F.mse_loss
                    )
                    loss = run.step(model, x, y, loss=value, weigh=options.get("weigh"))
                    losses.append(float(run.mean(loss)))
                optimizer.step()
        return parameters(model), losses, float(model.rows)

    return body


def sums(out, y):
    return F.mse_loss(out, y, reduction="sum")


def last_rank(most, **more):
    """Only rank 1 has little memory."""
    return lambda rank: Small(
        most if rank == 1 else 10**6,
        **{key: value if rank == 1 else 10**6 for key, value in more.items()},
    )


def weighed(out, y):
    weights = y.abs()
    return (weights * (out - y).square()).sum() / weights.sum()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (last_rank(4), {}),
        (last_rank(1), {}),
        (last_rank(10**6, back=2), {}),
        (last_rank(3), {"shares": [1, 3]}),
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
    # rows of steps that failed are not counted
    assert found[1][2] == found[0][2] or options.get("shares")
    said = capfd.readouterr().err
    assert (
        "paceline: rank 1 ran out of memory on" in said
        and "at a time from now on" in said
        and "rank 0" not in said
    )


def test_gradients_are_exchanged_once_and_hooks_see_the_sum():
    seen = []

    def body(run):
        model = last_rank(2)(run.rank)
        if run.rank == 1:
            next(model.parameters()).register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.clone())
            )
        model, _, loader = run.prepare(model, sgd(model), batches(12, 12))
        for x, y in loader:
            run.step(model, x, y, loss=F.mse_loss)
            passes = run._loop.backward.passes
        return passes

    assert workers(2, body) == [1, 1] and len(seen) == 1


def test_memory_that_runs_out_when_gradients_are_on_their_way_ends_the_run_with_advice():
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        alone(train(lambda rank: Small(10**6, back=2, deep=True)))
    assert any(
        'micro_batches="auto"' in note and "run.step" in note for note in caught.value.__notes__
    )


def test_memory_that_runs_out_later_ends_the_run():
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        alone(train(lambda rank: Small(4, since=FIRST_STEPS), epochs=FIRST_STEPS))


def test_one_sample_that_does_not_fit_ends_the_run():
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        alone(train(lambda rank: Small(0)))


def test_other_errors_are_the_scripts_own():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        alone(train(lambda rank: nn.Sequential(nn.Linear(5, 2).double())))


def test_a_plain_loop_is_told_what_would_help():
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        alone(train(lambda rank: Small(4), plain=True))
    assert any(
        'micro_batches="auto"' in note and "run.step" in note for note in caught.value.__notes__
    )


def test_gradients_that_are_given_reach_parameters_as_they_are():
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    inject_gradients([p, q], [torch.tensor([1.0, float("inf"), 3.0]), None])
    assert p.grad.tolist() == [1.0, float("inf"), 3.0] and q.grad is None
    inject_gradients([q], [None])


class Norm(Small):
    """A model that stands so many rows, with BatchNorm."""

    def __init__(self, most, train=True):
        super().__init__(most)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64).train(train)

    def forward(self, x):
        return super().forward(self.norm(x))


class Counting(Small):
    """A model that stands so many rows, whose embedding counts words."""

    def __init__(self, most):
        super().__init__(most)
        self.words = nn.Embedding(3, 6, scale_grad_by_freq=True, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x + self.words((x[:, 0] > 0).long()))


class Head(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, out, y):
        return F.mse_loss(out * self.factor, y)


def ends(body, text):
    """`body` runs out of memory, and the error says why it took no halves."""
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        alone(body)
    assert [note for note in caught.value.__notes__ if text in note and "in halves: " in note]


def stepping(make, *, loss=F.mse_loss, given=lambda x: x, prepare=True, **options):
    """A body that takes one step of 12 rows."""

    def body(run):
        model = make()
        optimizer = sgd(model)
        if not prepare:
            model, optimizer = run.prepare(model, optimizer, **options)
            x, y = next(iter(batches(12, 12)))
            return float(run.step(model, given(x), y, loss=loss))
        model, optimizer, loader = run.prepare(model, optimizer, batches(12, 12), **options)
        for x, y in loader:
            run.step(model, given(x), y, loss=loss)
        return len(loader)

    return body


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (stepping(lambda: Small(3), loss=Head()), "no parameters of the model"),
        (
            stepping(lambda: Small(3), given=nn.Linear(6, 6, dtype=torch.float64)),
            "requires gradients",
        ),
        (stepping(lambda: Small(3), given=lambda x: x.requires_grad_()), "requires gradients"),
        (stepping(lambda: Small(3), prepare=False), "a mean or a sum"),
        (stepping(lambda: Norm(3)), "BatchNorm1d takes statistics"),
        (stepping(lambda: Counting(3)), "Embedding counts the words"),
        (
            stepping(lambda: Small(3), weigh=lambda batch: float(len(batch[0]))),
            "give run.step(..., weigh=)",
        ),
        (stepping(lambda: Small(10**6, back=3, deep=True)), "on their way"),
    ],
)
def test_what_halves_would_change_ends_the_run_and_says_why(body, text):
    ends(body, text)


def test_batch_norm_that_is_not_trained_is_no_obstacle():
    assert alone(stepping(lambda: Norm(3, train=False))) == 1


def test_a_worker_that_has_halved_takes_other_losses_as_they_are():
    """The second model's loss has a parameter, and the third gets what requires gradients."""

    def body(run, most):
        model, other, head, encoder = (
            Small(most),
            net(),
            Head(),
            nn.Linear(6, 6, dtype=torch.float64),
        )
        nn.init.eye_(encoder.weight)
        nn.init.zeros_(encoder.bias)
        model, other, head, encoder, loader = run.prepare(
            model, other, head, encoder, batches(12, 12)
        )
        for x, y in loader:
            run.step(model, x, y, loss=F.mse_loss)
            run.step(other, x, y, loss=head)
            run.step(other, encoder(x), y, loss=F.mse_loss)
        return torch.cat(
            [p.grad.flatten() for m in (model, other, head, encoder) for p in m.parameters()]
        )

    wanted, found = workers(2, lambda run: body(run, 100)), workers(2, lambda run: body(run, 3))
    assert distance(found[0], wanted[0]) < 1e-12 and torch.equal(found[0], found[1])


class OnGpu(nn.Parameter):
    """A parameter that seems to be on a GPU."""

    is_cuda = property(lambda self: True)


def test_memory_that_suffices_leaves_a_step_on_a_gpu_as_it_is():
    def body(run):
        model, head = nn.Linear(6, 2, dtype=torch.float64), Head()
        model, head, loader = run.prepare(
            model, head, batches(12, 12), weigh=lambda batch: float(len(batch[0]))
        )
        model.weight.__class__ = OnGpu
        try:
            for x, y in loader:
                run.step(model, x, y, loss=head, weigh=lambda given: 1 / 0)
        finally:
            model.weight.__class__ = nn.Parameter
        return float(head.factor.grad)

    assert alone(body) != 0.0


def test_a_resumed_run_finds_out_again(tmp_path, capfd):
    def body(run):
        model = Small(4)
        model, optimizer, loader = run.prepare(model, sgd(model), batches(144, 12))
        resumed = run.resume()
        for steps, (x, y) in enumerate(loader, 1):
            optimizer.zero_grad()
            run.step(model, x, y, loss=F.mse_loss)
            optimizer.step()
            if not resumed and steps == FIRST_STEPS:
                run.save()
                return resumed, run.steps
        return resumed, run.steps

    workers(1, body, folder=tmp_path)
    ((resumed, steps),) = workers(1, body, folder=tmp_path)
    assert resumed and steps == 12
    assert capfd.readouterr().err.count("takes 3 at a time from now on") == 2

"""Backward passes are announced before they add to gradients, whoever begins them, and torch has
its own engine back afterwards.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from paceline.session.run import Run
from paceline.sync.autograd_engine import add_pass_listener, remove_pass_listener
from tests.harness.runs import batches, distance, parameters, workers


class Recorder:
    """Notes what a gradient is when passes begin."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.seen = x, list[list[float] | None]()
        self.elsewhere = 0

    def handle_pass(self) -> None:
        self.seen.append(None if self.x.grad is None else self.x.grad.tolist())

    def handle_pass_elsewhere(self) -> None:
        self.elsewhere += 1


def test_every_pass_is_announced_before_it_adds_to_gradients() -> None:
    engine, x = Variable._execution_engine, torch.ones(2, requires_grad=True)
    recorder = Recorder(x)
    add_pass_listener(recorder)
    add_pass_listener(recorder)  # harmless
    try:
        x.sum().backward()
        (3 * x).sum().backward()
        torch.autograd.grad(x.sum(), x)
        assert recorder.seen == [None, [1, 1], [4, 4]]
        checkpoint(torch.sin, x * 2, use_reentrant=True).sum().backward()
        assert len(recorder.seen) == 4, "the pass inside of the checkpoint is a part of it"
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).sum().backward()
        x.sum().backward()
        assert (len(recorder.seen), recorder.elsewhere) == (6, 0)
    finally:
        remove_pass_listener(recorder)
    assert Variable._execution_engine is engine
    x.sum().backward()
    assert len(recorder.seen) == 6


def test_a_pass_in_another_thread_may_be_of_any_listener() -> None:
    x = torch.ones(2, requires_grad=True)
    recorder = Recorder(x)
    add_pass_listener(recorder)
    try:
        for own in (False, True):
            thread = threading.Thread(target=passes, args=(x, Recorder(x) if own else None))
            thread.start()
            thread.join()
    finally:
        remove_pass_listener(recorder)
    assert (recorder.seen, recorder.elsewhere) == ([], 1)


def test_a_thread_that_has_the_number_of_an_ended_one_is_another() -> None:
    """The system gives the number to the next thread, so that most of these have the same."""
    x = torch.ones(2, requires_grad=True)
    kept = Recorder(x)
    try:
        for act in (lambda: add_pass_listener(kept), *[x.sum().backward] * 5):
            thread = threading.Thread(target=act)
            thread.start()
            thread.join()
    finally:
        remove_pass_listener(kept)
    assert (kept.seen, kept.elsewhere) == ([], 5)


def passes(x: Tensor, own: Recorder | None) -> None:
    if own is not None:
        add_pass_listener(own)
    x.sum().backward()
    if own is not None:
        remove_pass_listener(own)
        assert (len(own.seen), own.elsewhere) == (1, 0)


def test_what_listens_no_more_is_forgotten() -> None:
    engine, x = Variable._execution_engine, torch.ones(2, requires_grad=True)
    one, other = Recorder(x), Recorder(x)
    add_pass_listener(one)
    add_pass_listener(other)
    remove_pass_listener(one)
    x.sum().backward()
    assert (len(one.seen), len(other.seen)) == (0, 1)
    del other
    gc.collect()
    x.sum().backward()
    remove_pass_listener(one)
    assert Variable._execution_engine is engine


class Two(nn.Module):
    """Two layers, and a loss that reaches the parameters of the first one first, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Linear(6, 5, dtype=torch.float64),
            nn.Linear(5, 2, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x).tanh())
        return out

    def penalty(self) -> Tensor:
        return self.one.weight.square().sum() + self.one.bias.square().sum()


@pytest.mark.parametrize("late", [0, 3])
def test_the_first_pass_that_adds_to_a_gradient_keeps_what_it_held(late: int) -> None:
    """From step `late` on there is a second pass, in another order than all before, over what no
    model gave.
    """

    def body(run: Run) -> Tensor:
        generator, model = torch.Generator().manual_seed(3), Two()
        for p in model.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        model, opt, loader = run.prepare(model, opt, batches())
        for step, (x, y) in enumerate(loader):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            if step >= late:
                model.penalty().backward()
            opt.step()
        return parameters(model)

    (wanted,) = workers(1, body)
    for found in workers(2, body):
        assert distance(found, wanted) < 1e-12

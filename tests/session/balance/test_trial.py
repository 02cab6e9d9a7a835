"""Micro-batches that fit: tried by each worker, agreed by all, with gradients as of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import paceline as pl
from paceline.errors import UsageError
from paceline.session.balance import trial
from paceline.session.balance.trial import MemoryTrial
from tests.harness.runs import Numbered, alone, batches, distance, parameters, workers

WIDE = 1000
SAMPLE = 4 * WIDE * 8  # bytes that one sample takes, about


class Wide(nn.Module):
    """A model in which samples take far more memory than parameters do; it draws numbers and has buffers."""

    def __init__(self, norm=False):
        super().__init__()
        self.up, self.down = nn.Linear(6, 4, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64) if norm else nn.Identity()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.sizes = []
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))

    def forward(self, x):
        self.sizes.append(len(x))
        if self.training:
            self.seen += 1
            torch.rand(1)
        hidden = self.norm(self.up(x)).tanh()
        wide = hidden.mean(1, keepdim=True).expand(-1, WIDE) * 2.0
        return self.down(hidden) + (wide.exp() - wide.exp()).sum(1, keepdim=True)


@pytest.fixture
def limits(monkeypatch):
    """Sets how many samples fit on each rank, about; what optimizers keep is left out."""
    room = {}

    def setting(*samples):
        room.update(enumerate(samples))

    monkeypatch.setattr(trial, "COPIES", 0)
    monkeypatch.setattr(MemoryTrial, "limit", lambda self: round(room[self.optimizers[0].rank] * SAMPLE) + 20_000)
    return setting


class Ranked(torch.optim.SGD):
    """An optimizer that knows whose it is."""

    def __init__(self, rank, parameters):
        super().__init__(parameters, lr=0.1)
        self.rank = rank


def train(norm=False, epochs=2, **options):
    """The micro-batches of each step, the sizes that the model saw, and the weights."""

    def body(run):
        model = Wide(norm)
        before = torch.get_rng_state() if run.size == 1 else None
        model, optimizer, loader = run.prepare(model, Ranked(run.rank, model.parameters()), batches(40, 8), **options)
        turns, buffers = [], []
        for epoch in range(epochs):
            for x, y in loader:
                if not turns:
                    tried = list(model.sizes)
                    model.sizes.clear()
                    buffers = [float(model.seen), None if before is None else torch.equal(before, torch.get_rng_state())]
                    grads = [p.grad for p in model.parameters()]
                turn = run._loop.turn
                turns.append((turn.index, turn.micro, turn.share, turn.last_micro))
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            del epoch
        return turns, tried, buffers, grads, parameters(model), loader.terms.most

    return body


def whole(norm=False):
    """The weights of one process without micro-batches."""
    return alone(train_plain(norm))


def train_plain(norm):
    def body(run):
        model = Wide(norm)
        model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(40, 8))
        for _ in range(2):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return parameters(model)

    return body


@pytest.mark.parametrize(
    ("room", "shares", "micros", "most"),
    [((1.5, 50, 50), None, 3, (1, 8, 8)), ((50, 2.5), [1, 3], 3, (8, 2)), ((50, 50), None, 1, (8, 8)), ((3.2,), None, 3, (3,))],
)
def test_batches_are_cut_into_as_few_micro_batches_as_fit(limits, room, shares, micros, most):
    limits(*room)
    said = []
    found = workers(len(room), train(accumulate="auto", shares=shares), said=said)
    wanted = whole()
    for rank, (turns, tried, _, _, weights, fits) in enumerate(found):
        assert fits == most and len(turns) == 2 * 5 * micros
        assert all(share <= most[rank] for _, _, share, _ in turns)
        assert tried == sorted(tried) and max(tried) <= room[rank]
        assert distance(weights, wanted) < 1e-9
    assert any(f"a batch of 8 is taken in {micros} micro-batches" in text for text in said) is (micros > 1)


def test_a_trial_leaves_no_trace(limits):
    limits(50)
    _, tried, (seen, drawn), grads, _, _ = alone(train(accumulate="auto", epochs=1))
    assert tried == [1, 2, 4, 8] and seen == 0 and drawn and grads == [None] * 4


def test_batch_norm_exchanges_nothing_in_a_trial_and_everything_after_it(limits):
    limits(50, 2.5)
    found = workers(2, train(norm=True, accumulate="auto", epochs=1))
    assert [tried for _, tried, *_ in found] == [[2, 4], [2]]
    assert found[0][5] == (8, 2) and torch.equal(found[0][4], found[1][4])
    assert {turn[1] for turn in found[0][0]} == {0, 1}


def test_batch_norm_is_tried_with_two_samples_where_a_share_is_one(limits):
    limits(50, 1.1)

    def body(run):
        model = nn.Sequential(Wide(norm=True))
        model, _, loader = run.prepare(model, Ranked(run.rank, model.parameters()), batches(8, 2), accumulate="auto")
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
        return loader.terms.most

    assert workers(2, body) == [(2, 1)] * 2


def test_hooks_of_parameters_are_not_called_in_a_trial(limits):
    limits(50)
    seen = []

    def body(run):
        model = Wide()
        model.up.weight.register_hook(seen.append)
        model, _, loader = run.prepare(model, Ranked(0, model.parameters()), batches(16, 8), accumulate="auto")
        for x, y in loader:
            called = len(seen)
            F.mse_loss(model(x), y).backward()
            yield called

    assert alone(lambda run: list(body(run))) == [0, 1] and len(seen) == 2


def test_hooks_of_modules_are_refused_but_for_those_of_torch(limits):
    limits(50)

    def body(run, hooked):
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6, dtype=torch.float64)), Wide())
        if hooked:
            model[1].up.register_forward_hook(lambda *_: None)
        model, _, loader = run.prepare(model, Ranked(0, model.parameters()), batches(8, 8), accumulate="auto")
        next(iter(loader))
        return loader.terms.most

    assert alone(lambda run: body(run, hooked=False)) == (8,)
    with pytest.raises(UsageError, match=r"would call the hooks of module '1.up' for its tries: say accumulate=k"):
        alone(lambda run: body(run, hooked=True))


def test_a_worker_without_memory_for_one_sample_is_named_on_all(limits):
    limits(50, 0, 50)

    def body(run):
        with pytest.raises(UsageError, match=r"rank 1 has no memory for one sample: 19\.7 KB are left"):
            train(accumulate="auto")(run)

    workers(3, body)


def test_memory_that_runs_out_in_a_try_ends_the_search(limits, monkeypatch):
    limits(50)
    forward = Wide.forward

    def failing(self, x):
        if len(x) > 5:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory")
        return forward(self, x)

    monkeypatch.setattr(Wide, "forward", failing)
    turns, *_, most = alone(train(accumulate="auto", epochs=1))
    assert most == (5,) and {share for _, _, share, _ in turns} == {4}


def test_evaluation_is_neither_tried_nor_cut(limits):
    limits(2.5)

    def body(run):
        model = Wide()
        model, _, loader = run.prepare(model, Ranked(0, model.parameters()), batches(40, 8), accumulate="auto")
        with torch.no_grad():
            sizes = [len(x) for x, _ in loader]
        return sizes, model.sizes, loader.terms.most

    assert alone(body) == ([8] * 5, [], None)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbered(8))


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: DataLoader(Stream(), 4), {}, "tries samples of a data set with indices"),
        (lambda: DataLoader(Numbered(8), batch_sampler=[[1, 2]]), {}, "tries samples of a data set with indices"),
        (lambda: DataLoader(Numbered(8), 4), {"cost": lambda sample: 1}, "with cost= they differ"),
    ],
)
def test_what_can_not_be_tried_is_refused(make, options, text):
    with pytest.raises(UsageError, match=text):
        alone(lambda run: run.prepare(make(), accumulate="auto", **options))


def test_workers_out_of_lockstep_are_refused():
    strategy = pl.ParameterServer(servers=1, staleness=2)
    with pytest.raises(UsageError, match="for workers in lockstep"):
        workers(2, lambda run: run.prepare(batches(8, 4), accumulate="auto"), strategy=strategy)


@pytest.mark.parametrize(
    ("models", "text"),
    [
        (lambda: [nn.Linear(6, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.float64)], "tries one model .* and 2 are there"),
        (lambda: [nn.Linear(5, 2, dtype=torch.float64)], "it raised RuntimeError: mat1 and mat2"),
    ],
)
def test_models_that_can_not_be_tried_are_refused(models, text):
    def body(run):
        *_, loader = run.prepare(*models(), batches(8, 4), accumulate="auto")
        with pytest.raises(UsageError, match=text):
            next(iter(loader))

    alone(body)

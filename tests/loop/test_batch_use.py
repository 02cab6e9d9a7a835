"""Batches that are trained on in another turn than their own: refused where they would count
wrongly, and nothing else is.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.runs import Numbered, distance, parameters, workers

FIRST = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


class Named(nn.Module):
    """A model that is given its batch by name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.inner(batch["x"])
        return out


class Step:
    """Trains a model on one batch at a time."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.taken = model, optimizer, 0

    def __call__(self, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        self.taken += 1


Loop = Callable[[Run, Any, Any, Step], None]


def train(
    loop: Loop, samples: int = 19, collate: Any = None
) -> Callable[[Run], tuple[Tensor, int, int]]:
    """The weights after `loop` over two loaders, the number of updates and of steps."""

    def body(run: Run) -> tuple[Tensor, int, int]:
        model = copy.deepcopy(FIRST)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one, two = (
            DataLoader(Numbered(count), 6, collate_fn=collate) for count in (samples, samples)
        )
        model, optimizer, one, two = run.prepare(model, optimizer, one, two)
        step = Step(model, optimizer)
        loop(run, one, two, step)
        return parameters(model), step.taken, run.steps

    return body


def check(loop: Loop, samples: int = 19) -> None:
    """It ends on several workers as on one."""
    ((wanted, taken, steps),) = workers(1, train(loop, samples))
    assert taken > 0
    for size in (2, 3):
        for found in workers(size, train(loop, samples)):
            assert distance(found[0], wanted) < 1e-12 and found[1:] == (taken, steps)


# ---- what is refused


def ahead(run: Run, loader: Any, _: Any, step: Step) -> None:
    it = iter(loader)
    following = next(it)
    while following is not None:
        current, following = following, next(it, None)
        step(*current)


def far_ahead(run: Run, loader: Any, _: Any, step: Step) -> None:
    waiting: deque[Any] = deque()
    for batch in loader:
        waiting.append(batch)
        if len(waiting) == 3:
            step(*waiting.popleft())


def ahead_of_a_generator(run: Run, loader: Any, _: Any, step: Step) -> None:
    def prefetched() -> Iterator[Any]:
        before = None
        for x, y in loader:
            if before is not None:
                yield before
            before = x.float().double(), y  # a copy of one of them
        yield before

    for x, y in prefetched():
        step(x, y)


def ahead_without_hooks(run: Run, loader: Any, _: Any, step: Step) -> None:
    step.model = nn.Sequential(*step.model)  # not the one that was prepared, though its parts are
    ahead(run, loader, _, step)


def sliced(run: Run, loader: Any, _: Any, step: Step) -> None:
    for x, y in list(itertools.islice(loader, 3)):
        step(x, y)


@pytest.mark.parametrize(
    "loop", [ahead, far_ahead, ahead_of_a_generator, ahead_without_hooks, sliced]
)
def test_a_batch_in_the_turn_after_its_own_is_refused(loop: Loop) -> None:
    for size in (2, 3):
        with pytest.raises(
            UsageError,
            match=r"in the turn after its own.*for x, y in loader.*prefetch_factor.*loader\.peek\(\)",  # noqa: E501
        ):
            workers(size, train(loop))


def test_nothing_was_trained_by_then() -> None:
    def loop(run: Run, loader: Any, other: Any, step: Step) -> None:
        before = parameters(step.model)
        with pytest.raises(UsageError, match="in the turn after its own"):
            ahead(run, loader, other, step)
        assert step.taken == 0 and torch.equal(parameters(step.model), before)

    workers(2, train(loop))


def test_dicts_and_bare_tensors_are_seen_too() -> None:
    def dicts(run: Run) -> None:
        model, data = Named(copy.deepcopy(FIRST)), [{"x": x} for x in Numbered(7).x]
        model, loader = run.prepare(model, DataLoader(data, 3))
        it = iter(loader)
        held = [next(it), next(it)]
        with pytest.raises(UsageError, match="in the turn after its own"):
            model(batch=held[0])

    def bare(run: Run) -> None:
        model, loader = run.prepare(copy.deepcopy(FIRST), DataLoader(Numbered(7).x, 3))
        it = iter(loader)
        held = [next(it), next(it)]
        with pytest.raises(UsageError, match="in the turn after its own"):
            model(held[0])

    workers(2, dicts)
    workers(2, bare)


def test_copies_of_batches_are_refused_at_the_latest_when_the_loop_is_over() -> None:
    def loop(run: Run, loader: Any, _: Any, step: Step) -> None:
        def moved(batch: Any) -> Any:
            return None if batch is None else [part.clone() for part in batch]

        it = iter(loader)
        following = moved(next(it))
        while following is not None:
            current, following = following, moved(next(it, None))
            step(*current)

    with pytest.raises(UsageError, match="in the turn after its own"):
        workers(2, train(loop))


def cycled(run: Run, loader: Any, _: Any, step: Step) -> None:
    for x, y in itertools.islice(itertools.cycle(loader), 6):
        step(x, y)


def listed(run: Run, loader: Any, _: Any, step: Step) -> None:
    batches = list(loader)
    for x, y in reversed(batches[:-1]):
        step(x.view(-1, 6), y)


def trained_and_listed(run: Run, loader: Any, _: Any, step: Step) -> None:
    seen = []
    for x, y in loader:
        step(x, y)
        seen.append((x, y))
    step(*seen[1])


def beside_another(run: Run, loader: Any, other: Any, step: Step) -> None:
    for (x, y), (u, v) in zip(itertools.chain(other, other), itertools.cycle(loader), strict=False):
        step(x, y)
        step(u, v)


@pytest.mark.parametrize("loop", [cycled, listed, trained_and_listed, beside_another])
def test_a_batch_of_an_epoch_that_is_over_is_refused(loop: Loop) -> None:
    for size in (2, 3):
        with pytest.raises(
            UsageError, match=r"of an epoch that is over is trained on again.*loader\.peek\(\)"
        ):
            workers(size, train(loop))


def replayed(run: Run, loader: Any, _: Any, step: Step) -> None:
    buffer = []
    for x, y in loader:
        step(x, y)
        buffer.append((x, y))
        step(*buffer[0])


def replayed_in_the_next_epoch(run: Run, loader: Any, _: Any, step: Step) -> None:
    buffer = []
    for x, y in loader:
        step(x, y)
        buffer.append((x, y))
    for number, (x, y) in enumerate(loader):
        step(x, y)
        step(*buffer[number - 1])


@pytest.mark.parametrize("loop", [replayed, replayed_in_the_next_epoch])
def test_a_batch_that_is_replayed_in_a_later_turn_is_refused(loop: Loop) -> None:
    for size in (2, 3):
        with pytest.raises(
            UsageError, match="a batch that was kept is trained on again in a later turn"
        ):
            workers(size, train(loop))


@pytest.mark.parametrize(
    "loop", [ahead, cycled, listed, sliced, replayed, replayed_in_the_next_epoch]
)
def test_where_all_workers_have_equal_shares_of_all_batches_it_is_right(loop: Loop) -> None:
    check(loop, samples=18)


def test_then_it_is_said_what_is_ahead() -> None:
    said: list[str] = []
    workers(2, train(ahead, 18), said=said)
    assert sum("a batch ahead" in text for text in said) == 1


# ---- what is not


def loops(run: Run, loader: Any, other: Any, step: Step) -> None:
    for x, y in loader:
        step(x, y)
    for _, (x, y) in enumerate(loader):
        step(x, y)
    for x, y in itertools.islice(loader, 3):
        step(x, y)
    for (x, y), number in zip(loader, range(10), strict=False):
        step(x, y + number)


def wrapped(run: Run, loader: Any, _: Any, step: Step) -> None:
    def bar(batches: Any) -> Iterator[Any]:
        for batch in batches:  # noqa: UP028
            yield batch

    for batch in bar(loader):
        step(*batch)


def by_hand(run: Run, loader: Any, _: Any, step: Step) -> None:
    it = iter(loader)
    while True:
        try:
            batch = next(it)
        except StopIteration:
            break
        step(*batch)


def skipping(run: Run, loader: Any, _: Any, step: Step) -> None:
    for number, (x, y) in enumerate(loader):
        if number:
            step(x, y)
    step(Numbered(5).x, Numbered(5).y)  # alike on all workers
    for number, (x, y) in enumerate(loader):
        if number in (0, 2):
            continue
        step(x * 1.0, y)
    for number, batch in enumerate(loader):
        if number < 2:
            continue
        step(*batch)
    for x, y in itertools.islice(loader, 2, None):
        step(x, y)


def one_batch(run: Run, loader: Any, _: Any, step: Step) -> None:
    x, y = next(iter(loader))
    for _ in range(5):
        step(x, y)


def side_by_side(run: Run, loader: Any, other: Any, step: Step) -> None:
    for (x, y), (u, v) in zip(loader, other, strict=True):
        step(x, y)
        step(u, v)


def evaluated(run: Run, loader: Any, other: Any, step: Step) -> None:
    for x, y in loader:
        with torch.no_grad():
            for u, _ in other:
                step.model(u)
        step(x, y)


def kept(run: Run, loader: Any, _: Any, step: Step) -> None:
    seen, labels = [], []
    for number, (x, y) in enumerate(loader):
        labels.append(y)
        if number == 1:
            continue
        step(x, y)
        seen.append((x, y))
    for x, y in loader:
        step(x, y)
        seen.append((x, y))
    with torch.no_grad():
        assert all(torch.isfinite(step.model(x)).all() for x, _ in seen)
    for _ in range(2):
        step(Numbered(5).x, Numbered(5).y)  # alike on all workers


def peeked(run: Run, loader: Any, _: Any, step: Step) -> None:
    early = None
    for x, y in loader:
        step(x, y)
        early = loader.peek()
    assert early is None


def compared(run: Run, loader: Any, _: Any, step: Step) -> None:
    """The batch before is looked at beside the present one, which was skipped."""
    before = None
    for number, (x, y) in enumerate(loader):
        if number != 1:
            step(x, y)
        elif before is not None:
            with torch.no_grad():
                step.model(before)
        before = x


def put_aside(run: Run, loader: Any, _: Any, step: Step) -> None:
    """What isn't trained on is kept to be looked at, and what is trained on are copies."""
    aside: list[Any] = []
    for skipped in ((0,), (1,), (0, 2)):
        for number, batch in enumerate(loader):
            if number in skipped:
                aside.append(batch)
            else:
                step(batch[0] * 1.0, batch[1])


LEGAL = [
    put_aside,
    loops,
    wrapped,
    by_hand,
    skipping,
    one_batch,
    side_by_side,
    evaluated,
    kept,
    peeked,
    compared,
]


@pytest.mark.parametrize("loop", LEGAL)
def test_ordinary_loops_are_right(loop: Loop) -> None:
    check(loop)


def test_the_loop_s_variable_may_be_used_after_it() -> None:
    def loop(run: Run, loader: Any, _: Any, step: Step) -> None:
        x = y = None
        for x, y in loader:
            step(x, y)
        step(x, y)

    check(loop, samples=18)


def test_batches_that_a_data_set_holds_itself_are_no_sign() -> None:
    def body(run: Run) -> None:
        data = [(x, y) for x, y in zip(Numbered(4).x, Numbered(4).y, strict=True)]
        model = copy.deepcopy(FIRST)
        model, loader = run.prepare(
            model, DataLoader(data, 1, collate_fn=lambda samples: samples[0])
        )
        for number, (x, y) in enumerate(loader):
            if number:
                F.mse_loss(model(x * 1.0), y).backward()
        F.mse_loss(model(Numbered(5).x), Numbered(5).y).backward()

    workers(2, body)


def test_what_a_backward_outside_of_loops_counts_is_said_once() -> None:
    said: list[str] = []

    def loop(run: Run, loader: Any, _: Any, step: Step) -> None:
        step(Numbered(5).x, Numbered(5).y)
        assert not any("a backward outside" in text for text in said)
        for x, y in loader:
            step(x, y)
        for _ in range(2):
            step(Numbered(5).x, Numbered(5).y)

    workers(2, train(loop), said=said)
    assert (
        sum("a backward outside of the loop over a prepared loader" in text for text in said) == 1
    )

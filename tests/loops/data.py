"""Loops over loaders of all kinds, in all the ways that a loader is iterated."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from tests.loops.collection import (
    BATCH,
    COUNT,
    Mapped,
    Samples,
    batches,
    draws,
    loop,
    mse,
    net,
    parts,
    sgd,
    train,
)


def over(run: Any, data: DataLoader[Any], epochs: int = 2, **options: Any) -> Any:
    """Train plainly over this loader."""
    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), data, **options)
    train(run, model, optimizer, data, epochs)
    return model


def one_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = mse(model, x, y)
    loss.backward()
    optimizer.step()
    return loss


# ---- loaders


@loop
def in_order(run: Any) -> Any:
    return over(run, batches(shuffle=False))


@loop
def last_batch_dropped(run: Any) -> Any:
    return over(run, batches(drop_last=True))


@loop
def larger_batches_than_the_data(run: Any) -> Any:
    return over(run, batches(batch=64))


@loop
def batches_of_two(run: Any) -> Any:
    return over(run, batches(batch=2))


@loop
def a_batch_sampler(run: Any) -> Any:
    return over(
        run,
        DataLoader(
            Samples(),
            batch_sampler=BatchSampler(RandomSampler(Samples(), generator=draws()), BATCH, False),
        ),
    )


@loop
def a_batch_sampler_of_uneven_batches(run: Any) -> Any:
    class Uneven(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0], [1, 2], [3, 4, 5, 6, 7, 8, 9], [10], list(range(11, COUNT)))

        def __len__(self) -> int:
            return 5

    return over(run, DataLoader(Samples(), batch_sampler=Uneven()))


@loop
def a_sampler_of_ones_own(run: Any) -> Any:
    class Backwards(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(COUNT - 1, -1, -1))

        def __len__(self) -> int:
            return COUNT

    return over(run, DataLoader(Samples(), BATCH, sampler=Backwards()))


@loop
def a_sampler_that_knows_the_epoch(run: Any) -> Any:
    class Seeded(Sampler[int]):
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(COUNT, generator=draws(self.epoch)).tolist())

        def __len__(self) -> int:
            return COUNT

    sampler, model = Seeded(), net()
    model, optimizer, data = run.prepare(
        model, sgd(model), DataLoader(Samples(), BATCH, sampler=sampler)
    )
    for epoch in run.epochs(3):
        sampler.epoch = epoch
        for x, y in data:
            run.log(loss=one_step(model, optimizer, x, y))
    return model


@loop
def a_weighted_sampler(run: Any) -> Any:
    weights = torch.linspace(0.1, 2.0, COUNT)
    return over(
        run,
        DataLoader(Samples(), BATCH, sampler=WeightedRandomSampler(weights, 16, generator=draws())),
    )


@loop
def sampling_with_replacement(run: Any) -> Any:
    return over(
        run,
        DataLoader(
            Samples(),
            BATCH,
            sampler=RandomSampler(Samples(), replacement=True, num_samples=13, generator=draws()),
        ),
    )


@loop
def a_subset_sampler(run: Any) -> Any:
    return over(
        run,
        DataLoader(
            Samples(), BATCH, sampler=SubsetRandomSampler(range(3, COUNT), generator=draws())
        ),
    )


@loop
def subsets_and_splits(run: Any) -> Any:
    first, second = random_split(Samples(), [12, COUNT - 12], generator=draws(1))
    return over(run, batches(ConcatDataset([second, Subset(first, range(7))])))


@loop
def a_data_set_of_tensors(run: Any) -> Any:
    return over(run, batches(TensorDataset(Samples().x, Samples().y)))


@loop
def a_list_as_a_data_set(run: Any) -> Any:
    return over(run, batches([Samples()[n] for n in range(COUNT)]))


@loop
def a_data_set_that_takes_many_indices(run: Any) -> Any:
    class Many(Samples):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[n] for n in indices]

    return over(run, batches(Many()))


@loop
def a_sampler_that_gives_batches_of_indices(run: Any) -> Any:
    """batch_size=None: the data set is asked for lists."""

    class Whole(Samples):
        def __getitem__(self, index: Any) -> Any:
            return self.x[index], self.y[index]

    sampler = BatchSampler(SequentialSampler(Samples()), BATCH, False)
    return over(run, DataLoader(Whole(), batch_size=None, sampler=sampler))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Samples()[n] for n in range(COUNT))


@loop
def a_stream(run: Any) -> Any:
    return over(run, batches(Stream(), shuffle=False))


@loop
def a_stream_of_batches(run: Any) -> Any:
    class Ready(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            x, y = Samples().x, Samples().y
            return zip(x.split([6, 4, 1, 8]), y.split([6, 4, 1, 8]), strict=True)

    return over(run, DataLoader(Ready(), batch_size=None))


@loop(threads="DataLoader readers are forked, which threads of a test shouldn't be")
def two_readers(run: Any) -> Any:
    return over(run, batches(num_workers=2))


@loop(threads="DataLoader readers are forked, which threads of a test shouldn't be")
def persistent_readers(run: Any) -> Any:
    return over(run, batches(num_workers=2, persistent_workers=True, prefetch_factor=1), 3)


# ---- what batches are


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@loop
def batches_of_dicts(run: Any) -> Any:
    model = net()
    named = lambda number, x, y: {  # noqa: E731
        "x": x,
        "more": {"y": y, "name": f"sample {number}"},
        "number": number,
        "size": float(number),
    }
    data = batches(Mapped(named))
    model, optimizer, data = run.prepare(model, sgd(model), data)
    numbers = []
    for _ in run.epochs(2):
        for batch in data:
            assert [f"sample {number}" for number in batch["number"].tolist()] == list(
                batch["more"]["name"]
            )
            one_step(model, optimizer, batch["x"], batch["more"]["y"])
            numbers.append(run.gather(batch["number"]))
    return model, numbers


@loop
def batches_of_named_tuples(run: Any) -> Any:
    model = net()
    model, optimizer, data = run.prepare(
        model, sgd(model), batches(Mapped(lambda number, x, y: Pair(x, y)))
    )
    for _ in run.epochs(2):
        for batch in data:
            one_step(model, optimizer, batch.x, batch.y)
    return model


@loop
def batches_as_lists_of_tensors(run: Any) -> Any:
    """As detection models have them: each sample of its own size."""

    def collate(rows: list[Any]) -> Any:
        return [x for x, _ in rows], [{"y": y} for _, y in rows]

    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), batches(collate_fn=collate))
    for _ in run.epochs(2):
        for xs, targets in data:
            one_step(
                model, optimizer, torch.stack(xs), torch.stack([target["y"] for target in targets])
            )
    return model


@loop
def batches_of_one_tensor(run: Any) -> Any:
    model = net(5)
    model, optimizer, data = run.prepare(model, sgd(model), batches(Mapped(lambda number, x, y: x)))
    for _ in run.epochs(2):
        for x in data:
            one_step(model, optimizer, x, x)
    return model


@loop
def batches_from_a_collate_function_with_facts(run: Any) -> Any:
    """Things that aren't rows beside those that are."""

    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return {"x": x, "y": y, "scale": 0.5, "names": ("one", "two"), "nothing": None}

    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), batches(collate_fn=collate))
    for _ in run.epochs(2):
        for batch in data:
            one_step(model, optimizer, batch["x"] * batch["scale"], batch["y"])
    return model


# ---- ways of iterating


@loop
def enumerated(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for epoch in run.epochs(2):
        for number, (x, y) in enumerate(data, start=epoch * len(data)):
            run.log(loss=one_step(model, optimizer, x, y), number=number)
    return model


@loop(counted=False)
def some_of_each_epoch(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(3):
        for x, y in itertools.islice(data, 2):
            one_step(model, optimizer, x, y)
    return model


@loop(counted=False)
def left_by_break(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(3):
        for number, (x, y) in enumerate(data):
            one_step(model, optimizer, x, y)
            if number == 1:
                break
    return model


@loop(counted=False)
def stopped_by_all(run: Any) -> Any:
    model, optimizer, data = parts(run)
    epochs = 0
    for epoch in run.epochs(10):
        for x, y in data:
            one_step(model, optimizer, x, y)
        epochs += 1
        if epoch == 1:
            run.stop()
    return model, epochs


@loop
def stopped_by_patience(run: Any) -> Any:
    model, optimizer, data = parts(run, None, lambda model: sgd(model, 0.4))
    best, bad, epochs = float("inf"), 0, 0
    for _ in run.epochs(12):
        total = 0.0
        for x, y in data:
            total += run.mean(one_step(model, optimizer, x, y)).item()
        epochs += 1
        bad = 0 if total < best else bad + 1
        best = min(best, total)
        if bad == 2:
            break
    return model, best, epochs


@loop
def some_batches_skipped(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            if number == 1:
                continue
            one_step(model, optimizer, x, y)
    return model


@loop
def some_batches_not_stepped(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if number != 2:
                optimizer.step()
    return model


@loop
def bad_batches_skipped_by_all(run: Any) -> Any:
    """A sample that is no number: all agree to leave its batch out."""
    model = net()
    data = batches(Mapped(lambda number, x, y: (x if number != 4 else x / 0, y)))
    model, optimizer, data = run.prepare(model, sgd(model), data)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            if not torch.isfinite(run.mean(loss)):
                continue
            loss.backward()
            optimizer.step()
    return model


@loop
def bad_gradients_skipped(run: Any) -> Any:
    """What everybody does: p.grad is the same everywhere, so all decide alike."""
    model = net()
    data = batches(Mapped(lambda number, x, y: (x if number != 4 else x / 0, y)))
    model, optimizer, data = run.prepare(model, sgd(model), data)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if torch.isfinite(nn_norm(model)):
                optimizer.step()
    return model


def nn_norm(model: Any) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@loop(refused="rank")
def bad_batches_skipped_by_one(run: Any) -> Any:
    model = net()
    data = batches(Mapped(lambda number, x, y: (x if number != 4 else x / 0, y)))
    model, optimizer, data = run.prepare(model, sgd(model), data)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            if not torch.isfinite(loss):
                continue
            loss.backward()
            optimizer.step()
    return model


@loop(counted=False)
def one_batch_again_and_again(run: Any) -> Any:
    model, optimizer, data = parts(run)
    x, y = next(iter(data))
    for _ in range(5):
        one_step(model, optimizer, x, y)
    return model


@loop
def the_last_batch_after_the_loop(run: Any) -> Any:
    """The loop variables are there still, and looked at."""
    model, optimizer, data = parts(run)
    train(run, model, optimizer, data)
    for x, y in data:
        one_step(model, optimizer, x, y)
    with torch.no_grad():
        model(x)
    return model


@loop
def old_batches_kept_to_look_at(run: Any) -> Any:
    model, optimizer, data = parts(run)
    kept = []
    for _ in run.epochs(2):
        for x, y in data:
            kept.append((x, y))
            one_step(model, optimizer, x, y)
    return model, len(kept)


@loop(counted=False, refused="next")
def one_batch_ahead(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in range(2):
        batches = iter(data)
        ahead = next(batches)
        while ahead is not None:
            x, y = ahead
            ahead = next(batches, None)
            one_step(model, optimizer, x, y)
    return model


@loop(counted=False, refused="loader")
def some_batches_ahead(run: Any) -> Any:
    model, optimizer, data = parts(run)
    ahead: deque[Any] = deque()
    for batch in data:
        ahead.append(batch)
        if len(ahead) > 2:
            one_step(model, optimizer, *ahead.popleft())
    while ahead:
        one_step(model, optimizer, *ahead.popleft())
    return model


@loop(counted=False, refused="loader")
def a_list_of_batches(run: Any) -> Any:
    model, optimizer, data = parts(run)
    found = list(data)
    for _ in range(2):
        for x, y in found:
            one_step(model, optimizer, x, y)
    return model


@loop(counted=False, refused="loader")
def batches_in_a_cycle(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for x, y in itertools.islice(itertools.cycle(data), 7):
        one_step(model, optimizer, x, y)
    return model


@loop
def a_cycle_by_hand(run: Any) -> Any:
    def endless(data: Any) -> Iterator[Any]:
        while True:
            yield from data

    model, optimizer, data = parts(run)
    source = endless(data)
    for _ in range(6):
        x, y = next(source)
        one_step(model, optimizer, x, y)
    source.close()
    return model


@loop
def an_iterator_begun_anew(run: Any) -> Any:
    """So many steps, whatever the epochs."""
    model, optimizer, data = parts(run)
    source = iter(data)
    for _ in range(9):
        try:
            x, y = next(source)
        except StopIteration:
            source = iter(data)
            x, y = next(source)
        one_step(model, optimizer, x, y)
    del source
    return model


@loop
def two_loaders_side_by_side(run: Any) -> Any:
    """Labelled and unlabelled data, in batches of one size: no share has another weight in one
    than in the other.
    """
    model = net()
    one, two = batches(drop_last=True), batches(Samples(COUNT, seed=8), drop_last=True)
    model, optimizer, one, two = run.prepare(model, sgd(model), one, two)
    for _ in run.epochs(2):
        for (x, y), (u, _) in zip(one, two, strict=True):
            optimizer.zero_grad()
            (mse(model, x, y) + 0.1 * model(u).square().mean()).backward()
            optimizer.step()
    return model


@loop
def a_second_loader_begun_anew(run: Any) -> Any:
    model = net()
    one, two = batches(drop_last=True), batches(Samples(12, seed=8))
    model, optimizer, one, two = run.prepare(model, sgd(model), one, two)
    others = iter(two)
    for _ in run.epochs(2):
        for x, y in one:
            try:
                u, _ = next(others)
            except StopIteration:
                others = iter(two)
                u, _ = next(others)
            optimizer.zero_grad()
            (mse(model, x, y) + 0.1 * model(u).square().mean()).backward()
            optimizer.step()
    del others
    return model


@loop(counted=False)
def loops_over_two_loaders_nested(run: Any) -> Any:
    """Each outer batch, then a pass over the inner data, each with steps of its own."""
    model = net()
    one, two = batches(), batches(Samples(7, seed=8), 4)
    model, optimizer, one, two = run.prepare(model, sgd(model, 0.05), one, two)
    for x, y in one:
        one_step(model, optimizer, x, y)
        for u, v in two:
            one_step(model, optimizer, u, v)
    return model


@loop
def one_loader_after_the_other(run: Any) -> Any:
    """Trained on one, then tuned on another."""
    model = net()
    model, optimizer, one, two = run.prepare(
        model, sgd(model), batches(), batches(Samples(7, seed=8), 4)
    )
    for data in (one, two, one):
        for x, y in data:
            one_step(model, optimizer, x, y)
    return model


@loop(refused="weighted by both")
def two_loaders_dealt_differently(run: Any) -> Any:
    model = net()
    one, two = batches(batch=6, drop_last=True), batches(Samples(COUNT, seed=8), 5, drop_last=True)
    model, optimizer, one, two = run.prepare(model, sgd(model), one, two)
    for (x, y), (u, _) in zip(one, two, strict=True):
        optimizer.zero_grad()
        (mse(model, x, y) + 0.1 * model(u).square().mean()).backward()
        optimizer.step()
    return model


@loop
def the_same_shares_for_everybody(run: Any) -> Any:
    """A loader that isn't prepared: each worker has the whole of it, and what is reckoned from
    it is the same.
    """
    model, optimizer, data = parts(run)
    probe = next(iter(batches(shuffle=False)))
    sizes = []
    for x, y in data:
        one_step(model, optimizer, x, y)
        with torch.no_grad():
            sizes.append(F.mse_loss(model(probe[0]), probe[1]))
    return model, sizes


@loop
def own_tensors_after_the_loop(run: Any) -> Any:
    """The same on every worker: each counts as one of them."""
    model, optimizer, data = parts(run)
    train(run, model, optimizer, data, 1)
    x, y = Samples().x[:4], Samples().y[:4]
    for _ in range(3):
        one_step(model, optimizer, x, y)
    return model

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.comm.agreement import Agreement
from paceline.data import sampler
from paceline.data.loader import deal_loader
from paceline.data.rng import SampleOrder
from paceline.data.sampler import EpochIndices
from paceline.data.serialization import pack_value, unpack_value
from paceline.errors import DataError, Mismatch
from tests.harness.loaders import Numbers, plain, run, steps, walk
from tests.harness.thread_groups import spawn

SIZES = [1, 2, 3]


def twister(seed=5):
    return torch.Generator().manual_seed(seed)


class ByLength(Sampler):
    """Batches of neighbours in length, in random order, from Python's own generator."""

    def __init__(self, count, seed=0):
        self.count, self.random = count, random.Random(seed)

    def __len__(self):
        return len(range(0, self.count, 7))

    def __iter__(self):
        order = sorted(range(self.count), key=lambda index: (index * 37 % 101, index))
        batches = [order[start : start + 7] for start in range(0, self.count, 7)]
        self.random.shuffle(batches)
        yield from batches


class Growing(Sampler):
    """Batches of variable size; tensors, tuples and generators of indices; numpy's generator,
    batch by batch.
    """

    def __init__(self, count, kind=list):
        self.count, self.kind, self.dice = count, kind, np.random.default_rng(3)

    def __iter__(self):
        start = 0
        while start < self.count:
            stop = min(self.count, start + int(self.dice.integers(1, 9)))
            yield self.kind(range(start, stop))
            start = stop


class Stateful(Sampler):
    """An order that depends on a counter of its own."""

    def __init__(self, count):
        self.count, self.epoch = count, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        self.epoch += 1
        yield from np.random.RandomState(self.epoch).permutation(self.count).tolist()


class Remembering(Stateful):
    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def of_samples(make, batch=8):
    return lambda: DataLoader(Numbers(100), batch, sampler=make())


SAMPLERS = {
    "weighted": of_samples(
        lambda: WeightedRandomSampler(torch.arange(100.0), 90, generator=twister())
    ),
    "subset": of_samples(lambda: SubsetRandomSampler(range(5, 77), generator=twister())),
    "with replacement": of_samples(
        lambda: RandomSampler(range(100), replacement=True, num_samples=333, generator=twister())
    ),
    "remembering": of_samples(lambda: Remembering(100)),
    "by length": lambda: DataLoader(Numbers(100), batch_sampler=ByLength(100)),
    "growing": lambda: DataLoader(Numbers(100), batch_sampler=Growing(100)),
    "tuples": lambda: DataLoader(Numbers(100), batch_sampler=Growing(100, tuple)),
    "tensors": lambda: DataLoader(
        Numbers(100), batch_sampler=Growing(100, lambda span: torch.tensor(list(span)))
    ),
    "arrays": lambda: DataLoader(
        Numbers(100), batch_sampler=Growing(100, lambda span: np.array(list(span)))
    ),
    "generators": lambda: DataLoader(Numbers(100), batch_sampler=Growing(100, iter)),
    "a list of lists": lambda: DataLoader(
        Numbers(100), batch_sampler=[[1, 2, 3], [4], [50, 60, 70, 80]]
    ),
    "lists": lambda: DataLoader(
        Lists(100),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(range(100), generator=twister()), 8, False),
    ),
    "items": lambda: DataLoader(Items(12), batch_size=None, shuffle=True, generator=twister()),
}


class Lists(Numbers):
    """Takes a list of indices at once."""

    def __getitem__(self, index):
        assert isinstance(index, list)
        return torch.tensor(index)


class Items(Numbers):
    """An item is a batch of 1 to 5 rows."""

    def __getitem__(self, index):
        return torch.arange(10 * index, 10 * index + 1 + index % 5)


# by so many readers of each of two workers
READ = {"weighted": 2, "lists": 2, "by length": 1, "tensors": 1, "generators": 1, "items": 1}
BY_READERS = [
    pytest.param(
        name, 2, READ.get(name, 2), marks=pytest.mark.slow if name in READ else pytest.mark.soak
    )
    for name in SAMPLERS
]


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("name", "size", "workers"),
    [*((name, size, 0) for name in SAMPLERS for size in SIZES), *BY_READERS],
)
def test_samplers_are_honoured(name, size, workers):
    def make():
        loader = SAMPLERS[name]()
        loader.num_workers, loader.prefetch_factor = workers, 2 if workers else None
        return loader

    seen = run(size, make, epochs=2)
    assert [steps(seen, 0), steps(seen, 1)] == plain(SAMPLERS[name](), 2)


@pytest.mark.each_choice
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("small", [False, True])
def test_samplers_are_taken_up_where_they_were(name, small, monkeypatch):
    if small:
        monkeypatch.setattr(sampler, "CHUNK_BATCHES", 2)

    def first(group):
        loader = deal_loader(SAMPLERS[name](), Agreement(group))
        walk(loader)
        for _ in loader:
            if loader.turn.index == 1:
                return loader.state_dict()

    def second(group):
        loader = deal_loader(SAMPLERS[name](), Agreement(group))
        loader.load_state_dict(unpack_value(pack_value(states[1])))
        return walk(loader, 2)

    states = spawn(2, first)
    seen = spawn(3, second)
    wanted = plain(SAMPLERS[name](), 3)
    assert steps(seen) == wanted[1][2:]
    assert steps(seen, 1) == wanted[2]


def test_items_that_are_batches_are_announced_once():
    said = []
    run(2, SAMPLERS["items"], say=lambda rank: said.append if rank == 0 else len)
    assert len(said) == 1 and "every worker reads it all" in said[0]


def test_an_order_that_cannot_be_drawn_again_is_refused():
    def make():
        return DataLoader(Numbers(100), 8, sampler=Stateful(100))

    (group,) = spawn(1, lambda group: group)
    loader = deal_loader(make(), Agreement(group))
    walk(loader)
    for _ in loader:
        state = loader.state_dict()
    other = deal_loader(make(), Agreement(group))
    other.load_state_dict(state)
    with pytest.raises(DataError, match="state_dict and load_state_dict"):
        iter(other)


def test_indices_of_any_kind():
    class Keyed(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, key):
            assert key in {("a", 1), ("b", 2), ("c", 3)} or isinstance(key, str)
            return str(key)

    keys = [("a", 1), "two", ("b", 2), "x", ("c", 3)]
    seen = run(2, lambda: DataLoader(Keyed(), 2, sampler=keys), ids=list)
    assert steps(seen) == [[str(("a", 1)), "two"], [str(("b", 2)), "x"], [str(("c", 3))]]


def test_an_index_that_cannot_travel_raises():
    with pytest.raises((DataError, Mismatch), match="which can"):
        run(2, lambda: DataLoader(Numbers(2), batch_sampler=[[object()]]))


def test_the_error_of_a_sampler_is_the_first_workers():
    def failing():
        yield [0, 1]
        raise KeyError("no such sample")

    errors = []

    def body(group):
        try:
            walk(deal_loader(DataLoader(Numbers(2), batch_sampler=failing()), Agreement(group)))
        except (KeyError, Mismatch) as error:
            errors.append((group.rank, error))
            raise

    with pytest.raises((KeyError, Mismatch)):
        spawn(2, body)
    assert [type(error) for _, error in sorted(errors, key=lambda pair: pair[0])] == [
        KeyError,
        Mismatch,
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DistributedSampler(data, 2, 0),
        lambda data: BatchSampler(DistributedSampler(data, 2, 0), 4, False),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_distributed_sampler_raises(make, size):
    kind = make(Numbers(10))
    where = {"batch_sampler": kind} if isinstance(kind, BatchSampler) else {"sampler": kind}
    with pytest.raises(DataError, match="cuts the data by rank already"):
        run(size, lambda: DataLoader(Numbers(10), **where))


def test_data_without_length_raise():
    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(DataError, match="without a length"):
        run(1, lambda: DataLoader(Endless(), 4))


def test_the_other_workers_generators_move_as_the_first_ones():
    def make(generator):
        return DataLoader(
            Numbers(100),
            8,
            sampler=WeightedRandomSampler(torch.ones(100), 50, generator=generator),
            generator=generator,
        )

    def body(group):
        generator = twister()
        walk(deal_loader(make(generator), Agreement(group)))
        return generator.get_state()

    alone = twister()
    plain(make(alone))
    for state in spawn(3, body):
        assert torch.equal(state, alone.get_state())


@pytest.mark.parametrize("ahead", [0, 1, 4, 50])
@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_indices_are_there_before_they_are_asked_for(ahead, chunk, monkeypatch):
    monkeypatch.setattr(sampler, "CHUNK_BATCHES", chunk)

    def body(group):
        loader = DataLoader(Numbers(100), 3)
        indices = EpochIndices(
            loader,
            Agreement(group),
            SampleOrder(),
            ahead=ahead,
            origin={"own": {}, "shared": {}, "seeded": False},
        )
        indices.draw_first()
        seen = []
        for step in range(34):
            indices.fetch_chunk(step)
            seen.append(indices.batch_of(step))
            indices.batch_of(step + ahead)  # never waits, and never finds too little
        assert indices.batch_of(34) is None
        return seen, indices.mark_before(34)

    results = spawn(3, body)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == list(DataLoader(Numbers(100), 3).batch_sampler)

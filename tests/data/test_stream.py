from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.comm.agreement import Agreement
from paceline.data.loader import deal_loader
from paceline.data.serialization import pack_value, unpack_value
from paceline.errors import DataError
from tests.harness.loaders import plain, run, steps, walk
from tests.harness.thread_groups import spawn

SIZES = [1, 2, 3]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Count(IterableDataset):
    """0, 1, ..., dealt to DataLoader workers in turn; the later workers end earlier."""

    def __init__(self, count=100):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        count = self.count - 20 * first
        return (torch.tensor(number) for number in range(first, count, stride))


class Batches(Count):
    """Gives whole batches of 1 to 4 rows."""

    def __init__(self, count=45):
        super().__init__(count)

    def __iter__(self):
        return (
            torch.arange(10 * int(number), 10 * int(number) + 1 + int(number) % 4)
            for number in super().__iter__()
        )


class Remembering(Count):
    """Knows where it is, and counts what is read."""

    def __init__(self, count=100):
        super().__init__(count)
        self.at = 0
        self.reads = 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            self.reads += 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class RememberingIterator(Count):
    """The iterator knows where it is."""

    class Walk:
        def __init__(self, count):
            self.count, self.at = count, 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.at == self.count:
                raise StopIteration
            self.at += 1
            return torch.tensor(self.at - 1)

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def __iter__(self):
        return self.Walk(self.count)


def streams(kind=Count, batch=8, **options):
    return lambda: DataLoader(kind(), batch, **options)


CASES = {
    "alone": streams(),
    "two dataloader workers": streams(num_workers=2),
    "persistent": streams(num_workers=2, persistent_workers=True, prefetch_factor=1),
    "three dataloader workers": streams(num_workers=3),
    "drop_last": streams(batch=7, drop_last=True),
    "whole batches": streams(Batches, None),
    "whole batches of workers": streams(Batches, None, num_workers=2),
    "remembering": streams(Remembering),
    "remembering iterator": streams(RememberingIterator),
}


@functools.cache
def expected(name):
    """What one process reads in two epochs."""
    return plain(CASES[name](), 2)


FORKING = tuple(name for name in CASES if name.endswith("workers") or name == "persistent")


def several(cases, few):
    """All of them; where processes are started it takes longer: those that end as one of `few`
    says, by turns, and the others in a soak.
    """

    def marks(case):
        if case[0] not in FORKING:
            return ()
        rare = case[0] == "two dataloader workers"  # three of them have all that two have
        return (
            pytest.mark.soak
            if rare or case[1:] != few[FORKING.index(case[0]) % len(few)]
            else pytest.mark.slow
        )

    return [pytest.param(*case, marks=marks(case)) for case in cases]


@pytest.mark.each_choice
@pytest.mark.parametrize(("name", "size"), several(product(CASES, SIZES), [(3,), (2,)]))
def test_a_stream_is_dealt_as_one_process_reads_it(name, size):
    seen = run(size, CASES[name], epochs=2)
    assert [steps(seen, 0), steps(seen, 1)] == expected(name)


@pytest.mark.parametrize("shares", [[1, 7], [0, 8]])
def test_shares_of_a_stream(shares):
    seen = run(2, streams(), shares=shares)
    assert steps(seen) == plain(streams()())[0]
    assert [at.share for at, _ in seen[0][0]] == [shares[0]] * 12 + [shares[0]]


def test_evaluation_of_a_stream_has_no_ghosts():
    seen = run(3, lambda: DataLoader(Count(10), 4), train=False)
    assert [ids for _, ids in seen[2][0]] == [[3], [7], []]
    assert steps(seen) == plain(DataLoader(Count(10), 4))[0]


class Sharded(Count):
    """Each rank reads its own part, and the parts are not of one length."""

    def __init__(self, rank, size, lengths=(30, 9, 41)):
        super().__init__()
        self.first, self.length = 1000 * rank, lengths[rank]

    def __iter__(self):
        return (torch.tensor(number) for number in range(self.first, self.first + self.length))


@pytest.mark.parametrize("train", [True, False])
def test_a_stream_that_shards_itself(train):
    def body(group):
        loader = deal_loader(
            DataLoader(Sharded(group.rank, 3), 12), Agreement(group), shard="mine", train=train
        )
        with pytest.raises(TypeError):
            len(loader)
        return walk(loader, 2)

    seen = spawn(3, body)
    for epoch in range(2):
        merged = steps(seen, epoch)
        lengths = (30, 9, 41)
        assert sorted(one for step in merged for one in step) == [
            1000 * rank + number for rank in range(3) for number in range(lengths[rank])
        ]
        assert [len(step) for step in merged] == [12, 12, 9, 8, 8, 8, 8, 6, 4, 4, 1]
    for step in range(11):
        assert sum(
            at.scale for rank in seen for at, _ in rank[0] if at.index == step
        ) == pytest.approx(1)
    assert [(at.ghost, at.weight) for at, _ in seen[1][0] if at.index == 5] == [(True, 0)]


@pytest.mark.parametrize("weigh", [None, len])
def test_all_know_where_somebody_has_a_ghost_and_who_has_samples_then(weigh):
    """Else buffers that a ghost changes are not set back, or not all of the workers meet for
    them.
    """

    def body(group):
        return walk(
            deal_loader(
                DataLoader(Sharded(group.rank, 3), 12), Agreement(group), shard="mine", weigh=weigh
            ),
            1,
        )

    seen = [[at for at, _ in rank[0]] for rank in spawn(3, body)]
    for turns in zip(*seen, strict=True):
        with_samples = [rank for rank, at in enumerate(turns) if not at.ghost]
        assert [at.source for at in turns] == [
            None if len(with_samples) == 3 else with_samples[0]
        ] * 3
    assert any(at.ghost for at in seen[0]) and any(at.ghost for at in seen[1])


def test_a_shard_without_samples_raises():
    def body(group):
        return walk(
            deal_loader(
                DataLoader(Sharded(group.rank, 3, (4, 0, 4)), 12), Agreement(group), shard="mine"
            )
        )

    with pytest.raises(DataError, match="stream of rank 1 has no batch"):
        spawn(3, body)


def test_an_empty_share_of_a_shard_raises():
    def body(group):
        return walk(
            deal_loader(DataLoader(Sharded(group.rank, 3), 2), Agreement(group), shard="mine")
        )

    with pytest.raises(DataError, match="needs all above zero"):
        spawn(3, body)


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("name", "sizes", "stop"),
    several(
        product((name for name in CASES if name != "drop_last"), ((1, 2), (3, 1)), (4, 11)),
        [((1, 2), 11), ((3, 1), 4)],
    ),
)
def test_the_position_of_a_stream_is_exact(name, sizes, stop):
    said = []

    def first(group):
        loader = deal_loader(CASES[name](), Agreement(group))
        walk(loader)
        for _ in loader:
            if loader.turn.index == stop - 1:
                return loader.state_dict(), loader.state_dict(redo=True)

    def second(group, state, epochs):
        loader = deal_loader(
            CASES[name](), Agreement(group), say=said.append if group.rank == 0 else len
        )
        loader.load_state_dict(unpack_value(pack_value(state)))
        return walk(loader, epochs), loader.dataset

    states = spawn(sizes[0], first)
    wanted = expected(name)
    for redo in (0, 1):
        results = spawn(
            sizes[1], lambda group, redo=redo: second(group, states[-1][redo], 2 - redo)
        )
        seen = [result[0] for result in results]
        assert steps(seen) == wanted[1][stop - redo :]
        assert redo or steps(seen, 1) == wanted[0]
    counted = any("has no state_dict" in text for text in said)
    assert counted == (not name.startswith("remembering"))
    if name == "remembering":
        assert results[0][1].reads == 100 - 8 * (stop - 1)


@pytest.mark.parametrize("kind", [Remembering, RememberingIterator])
def test_a_stream_saved_with_its_last_partial_batch_is_over(kind):
    """Having ended, it may be at its start again, and say so."""

    def body(group):
        loader = deal_loader(DataLoader(kind(10), 4), Agreement(group))
        for _ in loader:
            state = loader.state_dict()
        again = deal_loader(DataLoader(kind(10), 4), Agreement(group))
        again.load_state_dict(unpack_value(pack_value(state)))
        return walk(again, 2)

    found = spawn(2, body)
    assert [steps(found, epoch) for epoch in (0, 1)] == [[], plain(DataLoader(kind(10), 4))[0]]


def test_the_position_of_shards_is_exact():
    def make(group):
        return deal_loader(DataLoader(Sharded(group.rank, 3), 12), Agreement(group), shard="mine")

    def first(group):
        loader = make(group)
        seen = []
        for batch in loader:
            seen.append((loader.turn, batch.tolist()))
            if loader.turn.index == 5:
                return [seen], loader.state_dict()

    def second(group):
        loader = make(group)
        loader.load_state_dict(states[0])
        return walk(loader, 2)

    results = spawn(3, first)
    states = [state for _, state in results]
    assert pack_value(states[0]["cursors"]) == pack_value(states[2]["cursors"])
    whole = spawn(3, lambda group: walk(make(group)))
    rest = spawn(3, second)
    assert steps([seen for seen, _ in results]) + steps(rest) == steps(whole) == steps(rest, 1)
    with pytest.raises(DataError, match="saved by 3 workers"):
        spawn(2, second)


def test_another_number_of_dataloader_workers_is_refused():
    (group,) = spawn(1, lambda group: group)
    loader = deal_loader(streams(num_workers=2)(), Agreement(group))
    iterator = iter(loader)
    next(iterator)
    other = deal_loader(streams()(), Agreement(group))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="so give num_workers="):
        iter(other)
    one = deal_loader(streams(num_workers=1)(), Agreement(group))
    none = deal_loader(streams()(), Agreement(group))
    iterator = iter(one)
    next(iterator)
    none.load_state_dict(one.state_dict())
    assert steps([walk(none)]) == plain(streams()())[0][1:]


class Shuffled(Count):
    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def __iter__(self):
        return iter(torch.randperm(100, generator=torch.Generator().manual_seed(self.seed)))


def test_streams_that_differ_between_workers_are_found():
    def body(group):
        return walk(deal_loader(DataLoader(Shuffled(group.rank), 8), Agreement(group)))

    with pytest.raises(DataError, match="not the same on all workers"):
        spawn(2, body)


def test_a_stream_that_cannot_be_read_again_is_refused():
    (group,) = spawn(1, lambda group: group)
    loader = deal_loader(DataLoader(Shuffled(1), 8), Agreement(group))
    iterator = iter(loader)
    next(iterator)
    other = deal_loader(DataLoader(Shuffled(2), 8), Agreement(group))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="gives other samples than before"):
        next(iter(other))


@pytest.mark.parametrize(
    ("workers", "step"),
    [
        *((0, step) for step in (0, 3, 8)),
        *(pytest.param(2, step, marks=pytest.mark.slow) for step in (0, 8)),
    ],
)
def test_reshare_and_again_of_a_stream(workers, step):
    make = streams(num_workers=workers)
    wanted = plain(make(), 2)

    def body(group):
        loader = deal_loader(make(), Agreement(group))
        seen, repeated = [], False
        for batch in loader:
            if loader.turn.index == step and not repeated:
                repeated = True
                loader.repeat_turn([1, 7])
                continue
            seen.append((loader.turn, batch.tolist()))
            if loader.turn.index == step + 1:
                loader.reshare([2, 2])
        return [seen, *walk(loader)]

    seen = spawn(2, body)
    assert [steps(seen, 0), steps(seen, 1)] == wanted
    assert [seen[0][0][index][0].share for index in (step, step + 1, step + 2)][:2] == [1, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_step_of_a_stream_again(workers):
    make = streams(num_workers=workers)
    wanted = plain(make())[0]

    def body(group):
        loader = deal_loader(make(), Agreement(group))
        seen, repeated = [], False
        for batch in loader:
            if loader.turn.index == len(wanted) - 1 and not repeated:
                repeated = True
                loader.repeat_turn()
                continue
            seen.append((loader.turn, batch.tolist()))
        return [seen]

    assert steps(spawn(2, body)) == wanted


def test_a_stream_goes_on_in_another_group():
    def body(group):
        smaller = group.make_subgroup([1, 2])
        loader = deal_loader(streams()(), Agreement(group))
        seen, changed = [], False
        for batch in loader:
            if loader.turn.index == 4 and not changed:
                changed = True
                if group.rank == 0:
                    return seen, None
                loader.regroup(Agreement(smaller))
                continue
            seen.append((loader.turn, batch.tolist()))
        return seen[:4], seen[4:]

    seen = spawn(3, body)
    assert steps(seen) + steps(seen[1:], 1) == plain(streams()())[0]


def test_worker_init_functions_find_the_stream():
    def begin(worker):
        get_worker_info().dataset.count = 10 + worker

    def make():
        return DataLoader(Count(), 4, num_workers=2, worker_init_fn=begin)

    assert steps(run(2, make)) == plain(make())[0]


def test_costs_are_announced_once():
    said = []
    run(2, streams(), epochs=2, say=lambda rank: said.append if rank == 0 else len)
    assert len(said) == 1 and "read 2 times" in said[0]


def shard_fields(**fields):
    stream = Count()
    vars(stream).update(fields)
    return stream


class Config:
    rank, world_size = 1, 4


def split_by_node(source):
    return source


@pytest.mark.parametrize(
    "fields",
    [
        {"_distributed": Config()},
        {"rank": 0, "world_size": 2},
        {"inner": shard_fields(rank=1, num_replicas=3)},
        {"pipeline": [Count(), split_by_node]},
    ],
)
def test_a_stream_that_looks_sharded_raises(fields):
    def make():
        return DataLoader(shard_fields(**fields), 8)

    with pytest.raises(DataError, match="shards itself by rank"):
        run(2, make)
    assert steps(run(2, make, shard="none")) == plain(make())[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard": "yours"}, "shard='yours' is unknown; possible: mine, none"),
    ],
)
def test_terms_of_a_stream_that_make_no_sense_raise(options, said):
    with pytest.raises(DataError, match=said):
        run(2, streams(), **options)


@pytest.mark.parametrize("size", [1, 2])
def test_an_empty_stream_raises(size):
    with pytest.raises(DataError, match="has no batch"):
        run(size, lambda: DataLoader(Count(0), 8))
    with pytest.raises(DataError, match="has no batch"):
        run(size, lambda: DataLoader(Count(5), 8, drop_last=True))


def test_the_seeds_of_dataloader_workers_are_the_same_for_all_readers():
    class Rolling(Count):
        def __iter__(self):
            return iter(torch.randperm(50))

    def body(group):
        generator = torch.Generator().manual_seed(group.rank)
        return walk(
            deal_loader(
                DataLoader(Rolling(), 8, num_workers=2, generator=generator), Agreement(group)
            )
        )

    assert (
        steps(spawn(2, body))
        == plain(
            DataLoader(Rolling(), 8, num_workers=2, generator=torch.Generator().manual_seed(0))
        )[0]
    )

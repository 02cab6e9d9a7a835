from __future__ import annotations

import gc
import multiprocessing
import random
import time
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

import paceline as pl
from paceline.comm.agreement import Agreement
from paceline.data import indexed
from paceline.data.loader import NoObserver, deal_loader
from paceline.errors import DataError
from tests.harness.jobs import wait_for
from tests.harness.loaders import Numbers, plain, run, steps, walk
from tests.harness.thread_groups import spawn

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def seeded(count=1003, batch=64, **options):
    return lambda: DataLoader(
        Numbers(count), batch, shuffle=True, generator=torch.Generator().manual_seed(7), **options
    )


@pytest.mark.parametrize(
    ("size", "shares"),
    [
        (1, None),
        (2, None),
        (3, None),
        (4, None),
        (8, None),
        (2, [1, 7]),
        (2, [0, 8]),
        (3, [3, 3, 2]),
    ],
)
def test_every_sample_of_an_epoch_once_in_the_order_of_one_process(size, shares):
    wanted = plain(seeded()(), 2)
    seen = run(size, seeded(), epochs=2, shares=shares)
    for epoch in range(2):
        assert steps(seen, epoch) == wanted[epoch]
        assert sorted(one for batch in steps(seen, epoch) for one in batch) == list(range(1003))


def test_weights_of_a_partial_batch_sum_to_one():
    seen = run(3, seeded(), shares=[3, 3, 2])
    for turn in range(16):
        assert sum(rank[0][turn][0].scale for rank in seen) == pytest.approx(1)
    last = [rank[0][-1][0] for rank in seen]
    assert [(at.global_batch, at.share, at.weight, at.total) for at in last] == [
        (43, 16, 16, 43),
        (43, 16, 16, 43),
        (43, 11, 11, 43),
    ]


def test_an_empty_share_is_a_ghost_of_the_first_sample():
    seen = run(2, seeded(), shares=[0, 8])
    wanted = plain(seeded()())[0]
    for (turn, ids), batch in zip(seen[0][0], wanted, strict=True):
        assert turn.ghost and turn.weight == 0 and turn.scale == 0 and ids == batch[:1]


def test_evaluation_has_no_ghosts_and_no_padding():
    def body(group):
        loader = deal_loader(DataLoader(Numbers(10), 4), Agreement(group))
        with torch.no_grad():
            dark = [(loader.turn.train, batch.shape, batch.tolist()) for batch in loader]
        light = [loader.turn.train for _ in loader]
        told = deal_loader(DataLoader(Numbers(10), 4), Agreement(group), train=False)
        return dark, light, [loader.turn for loader.turn in [told.turn for _ in told]]

    dark = [result[0] for result in spawn(3, body)]
    assert [batch[2] for batch in dark[2]] == [[3], [7], []]
    assert dark[2][2][1] == (0,)
    assert [one for step in range(3) for rank in dark for one in rank[step][2]] == list(range(10))
    for _, light, told in spawn(3, body):
        assert light == [True] * 3
        assert [turn.train for turn in told] == [False] * 3


def test_one_worker_yields_what_a_plain_loader_yields_from_the_global_generator():
    def make():
        return DataLoader(Numbers(50), 8, shuffle=True)

    torch.manual_seed(3)
    wanted, after = plain(make(), 2), torch.rand(1)
    torch.manual_seed(3)
    seen = run(1, make, epochs=2)
    assert [steps(seen, 0), steps(seen, 1)] == wanted
    assert torch.equal(after, torch.rand(1))


class DrawsLate(Sampler):
    """Draws an index at a time, from torch's generator."""

    def __iter__(self):
        for _ in range(50):
            yield int(torch.randint(50, ()))


ORDERS = {
    "shuffled": lambda: DataLoader(Numbers(50), 8, shuffle=True),
    "weighted": lambda: DataLoader(
        Numbers(50), 8, sampler=WeightedRandomSampler(torch.ones(50), 50)
    ),
    "late": lambda: DataLoader(Numbers(50), 8, sampler=DrawsLate()),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_what_else_is_drawn_changes_no_order(kind):
    def body(group, noise):
        loader = deal_loader(ORDERS[kind](), Agreement(group))
        seen = []
        for _ in range(3):
            seen.append([(batch.tolist(), torch.rand(noise))[0] for batch in loader])
        return seen

    torch.manual_seed(3)
    wanted = plain(ORDERS[kind](), 3)
    for noise in (0, 1, 7):
        torch.manual_seed(3)
        assert spawn(1, lambda group, noise=noise: body(group, noise)) == [wanted]


@pytest.mark.parametrize("seeds", [[3, 4, 5], [3, 3, 3], [3, None, 3]])
def test_who_seeds_torch_anew_has_the_order_of_that_seed(seeds):
    def epochs(loader):
        seen = []
        for seed in seeds:
            if seed is not None:
                torch.manual_seed(seed)
            seen.append([batch.tolist() for batch in loader])
            torch.rand(5)
        return seen

    make = ORDERS["shuffled"]
    (found,) = spawn(1, lambda group: epochs(deal_loader(make(), Agreement(group))))
    wanted = epochs(make())
    anew = [epoch for epoch, seed in enumerate(seeds) if seed is not None]
    assert [found[epoch] for epoch in anew] == [wanted[epoch] for epoch in anew]


@pytest.mark.parametrize(("size", "persistent"), [(1, True), (2, False), (2, True)])
def test_dataloader_workers_change_nothing(size, persistent):
    wanted = plain(seeded()(), 1)[0]
    make = seeded(num_workers=2, persistent_workers=persistent, prefetch_factor=3)
    seen = run(size, make, epochs=2)
    assert steps(seen, 0) == wanted
    assert sorted(one for batch in steps(seen, 1) for one in batch) == list(range(1003))
    if persistent:
        assert steps(seen, 1) == plain(make(), 2)[1]


def test_dataloader_workers_end_with_their_loader_and_not_with_a_search_for_garbage():
    """A search may come in any thread, and would keep it for as long as workers take to end:
    five seconds each, at most.
    """
    make = seeded(20, 4, num_workers=1, persistent_workers=True)

    def body(group):
        loader = deal_loader(make(), Agreement(group))
        walk(loader)
        pipeline, worked = weakref.ref(loader._pipeline), len(multiprocessing.active_children())
        del loader
        return pipeline() is None, worked - len(multiprocessing.active_children())

    gc.collect()
    gc.disable()
    try:
        assert spawn(1, body) == [(True, 1)]
    finally:
        gc.enable()


def test_dataloader_workers_have_the_seeds_of_a_plain_loader():
    class Rolls(Numbers):
        def __getitem__(self, index):
            return torch.randint(1 << 30, ())

    def make():
        return DataLoader(Rolls(24), 4, num_workers=2, generator=torch.Generator().manual_seed(1))

    assert steps(run(1, make)) == plain(make())[0]


def test_readers_of_different_workers_draw_different_numbers(monkeypatch):
    """What they take their seed from is looked at, in place of processes."""
    begun = []

    def watched(loader, feed, seeds, **options):
        begun.append((feed.terms.rank, seeds.initial_seed()))
        return indexed_like(loader, feed, seeds, **options)

    indexed_like = indexed.make_loader_like
    monkeypatch.setattr(indexed, "make_loader_like", watched)
    run(
        3,
        lambda: DataLoader(
            Numbers(8), 4, num_workers=0, generator=torch.Generator().manual_seed(1)
        ),
    )
    first, *others = dict(sorted(begun)).values()
    assert first == 1 and len({first, *others}) == 3


def test_weights_are_what_weigh_says():
    seen = run(3, lambda: DataLoader(Numbers(10), 6), weigh=lambda batch: float(batch.sum()))
    first = [at for rank in seen for at, _ in rank[0] if at.index == 0]
    assert {at.total for at in first} == {15.0}
    assert sum(at.weight for at in first) == 15
    last = [at for rank in seen for at, _ in rank[0] if at.index == 1]
    assert sum(at.scale for at in last) == pytest.approx(1)


class Padded(Dataset):
    """Sequences of labels of different lengths, padded with what losses ignore."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"labels": torch.tensor([1] * (index + 1) + [-100] * (8 - index))}


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, 1), ({"weigh": pl.tokens("labels")}, 0), ({"loss": "sum"}, 0), ({"train": False}, 0)],
)
def test_labels_that_a_mean_leaves_out_are_noticed_once(options, said):
    texts = []
    run(
        2,
        lambda: DataLoader(Padded(), 4),
        2,
        ids=lambda batch: [],
        say=lambda rank: texts.append if rank == 0 else print,
        **options,
    )
    assert len([text for text in texts if "pl.tokens('labels')" in text]) == said


def test_a_sum_is_not_scaled_but_for_ghosts():
    seen = run(2, seeded(), loss="sum", shares=[0, 1])
    assert {at.scale for at, _ in seen[0][0]} == {0.0}
    assert {at.scale for at, _ in seen[1][0]} == {1.0}


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_no_weights_raise(weight):
    with pytest.raises(DataError, match="zero or more"):
        run(1, seeded(), weigh=lambda batch: weight)


def test_all_weights_zero_scale_nothing():
    (seen,) = run(1, lambda: DataLoader(Numbers(4), 2), weigh=lambda batch: 0.0)
    assert [(at.total, at.scale, at.ghost) for at, _ in seen[0]] == [(0, 0, False)] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_reshare_deals_again_what_was_prefetched(workers):
    def body(group):
        loader = deal_loader(seeded(100, 8, num_workers=workers)(), Agreement(group))
        seen = []
        for batch in loader:
            seen.append((loader.turn, batch.tolist()))
            if loader.turn.index == 3:
                loader.reshare([1, 3])
            if loader.turn.index == 6:
                loader.reshare([0, 8])
        return [seen]

    seen = spawn(2, body)
    assert steps(seen) == plain(seeded(100, 8)())[0]
    shares = [
        [sum(at.share for at, _ in rank[0] if at.index == step) for rank in seen]
        for step in range(13)
    ]
    assert (
        shares[:4] == [[4, 4]] * 4
        and shares[4:7] == [[2, 6]] * 3
        and shares[7:] == [[0, 8]] * 5 + [[0, 4]]
    )


@pytest.mark.parametrize(
    ("workers", "persistent", "step"),
    [
        *((0, False, step) for step in (0, 3, 12)),
        (2, False, 3),
        *(pytest.param(2, True, step, marks=pytest.mark.slow) for step in (0, 12)),
    ],
)
def test_again_gives_the_same_global_batch_by_new_shares(workers, persistent, step):
    def body(group):
        loader = deal_loader(
            seeded(100, 8, num_workers=workers, persistent_workers=persistent)(), Agreement(group)
        )
        seen, repeated = [], 0
        for batch in loader:
            if loader.turn.index == step and repeated < 2:
                repeated += 1
                loader.repeat_turn([1, 7] if repeated == 1 else None)
                assert loader.state_dict()["step"] == step
                continue
            seen.append((loader.turn, batch.tolist()))
        assert repeated == 2
        return [seen, [(loader.turn, batch.tolist()) for batch in loader]]

    seen = spawn(2, body)
    wanted = plain(seeded(100, 8, num_workers=workers, persistent_workers=persistent)(), 2)
    assert [steps(seen), steps(seen, 1)] == wanted
    assert [at.share for at, _ in seen[0][0][step:]] == [1] * (13 - step)


def test_again_from_the_watcher():
    class Once(NoObserver):
        def __init__(self):
            self.calls = []

        def begin_epoch(self, loader):
            self.calls.append("epoch")

        def begin_turn(self, loader, turn):
            self.calls.append(turn.index)

        def end_turn(self, loader):
            if loader.turn.index == 1 and self.calls.count(1) == 1:
                loader.repeat_turn()

        def end_epoch(self, loader):
            self.calls.append("end")

    hooks = Once()
    loader = deal_loader(
        DataLoader(Numbers(9), 4), Agreement(spawn(1, lambda group: group)[0]), hooks=hooks
    )
    seen = [batch.tolist() for batch in loader]
    assert hooks.calls == ["epoch", 0, 1, 1, 2, "end"]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [8]]


def test_break_ends_the_epoch_for_all():
    def body(group):
        loader = deal_loader(seeded()(), Agreement(group))
        for _ in loader:
            if loader.turn.index == 2:
                break
        assert loader.epoch == 1
        return walk(loader)

    alone = seeded()()
    for step, _ in enumerate(alone):
        if step == 2:
            break
    seen = spawn(2, body)
    assert {at.epoch for at, _ in seen[0][0]} == {1}
    assert steps(seen) == plain(alone)[0]


def test_a_turn_and_an_epoch_can_be_ended_without_another_batch():
    """As by loops that count batches: the position is that of the next epoch, as after `for`."""

    def body(group):
        hooks = Watcher()
        loader = deal_loader(seeded(count=9, batch=4)(), Agreement(group), hooks=hooks)
        batches, seen = iter(loader), []
        for _ in range(len(loader)):
            seen.append(next(batches).tolist())
            assert not loader.end_turn() and not loader.end_turn()  # a second call does nothing
            assert loader.turn is None and loader.under_way
        loader.end_epoch()
        assert not loader.under_way and loader.ran_through
        assert hooks.calls == ["epoch", 0, 1, 2, "end"]
        state = loader.state_dict()
        with pytest.raises(DataError, match="newer iter"):
            next(batches)
        other = deal_loader(seeded(count=9, batch=4)(), Agreement(group))
        other.load_state_dict(state)
        return seen, [batch.tolist() for batch in other]

    class Watcher(NoObserver):
        def __init__(self):
            self.calls = []

        def begin_epoch(self, loader):
            self.calls.append("epoch")

        def begin_turn(self, loader, turn):
            self.calls.append(turn.index)

        def end_epoch(self, loader):
            self.calls.append("end")

    parts = spawn(2, body)
    alone = deal_loader(seeded(count=9, batch=4)(), Agreement(spawn(1, lambda group: group)[0]))
    for epoch in range(2):
        expected = [batch.tolist() for batch in alone]
        found = [a + b for a, b in zip(*(part[epoch] for part in parts), strict=True)]
        assert found[:2] == expected[:2] and found[2][:1] == expected[2]  # the last has a ghost


def test_ending_a_turn_that_has_failed_deals_it_again():
    class Repeating(NoObserver):
        def end_turn(self, loader):
            if loader.turn.index == 1 and not repeated:
                repeated.append(loader.repeat_turn())

    repeated = []
    loader = deal_loader(
        DataLoader(Numbers(9), 4), Agreement(spawn(1, lambda group: group)[0]), hooks=Repeating()
    )
    seen = []
    for batch in loader:
        seen.append((batch.tolist(), loader.end_turn()))
    assert [again for _, again in seen] == [False, True, False, False]
    assert [batch[0] for batch, _ in seen] == [0, 4, 4, 8]


def test_an_older_iterator_has_ended():
    (loader,) = spawn(1, lambda group: deal_loader(seeded()(), Agreement(group)))
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    with pytest.raises(DataError, match="newer iter"):
        next(old)
    assert len(next(new)) == 64


SIZES_AND_READERS = [((1, 0), (3, 2)), ((3, 2), (2, 0)), ((2, 0), (1, 2))]
# in a soak at each of them for all
STOPS = {1: [SIZES_AND_READERS[1]], 5: [], 12: SIZES_AND_READERS, 13: [SIZES_AND_READERS[2]]}
PLACES = [(*sizes, stop) for stop in STOPS for sizes in SIZES_AND_READERS]


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("before", "after", "stop"),
    [pytest.param(*at, marks=() if at[:2] in STOPS[at[2]] else pytest.mark.soak) for at in PLACES],
)
def test_the_position_is_exact_for_other_numbers_of_workers(before, after, stop):
    size, workers = before

    def first(group):
        loader = deal_loader(seeded(100, 8, num_workers=workers)(), Agreement(group))
        walk(loader)
        for _ in loader:
            if loader.turn.index == stop - 1:
                return loader.state_dict(), loader.state_dict(redo=True)

    def second(group, state, epochs):
        loader = deal_loader(seeded(100, 8, num_workers=after[1])(), Agreement(group))
        loader.load_state_dict(state)
        assert loader.state_dict() is not None
        return walk(loader, epochs)

    states = spawn(size, first)
    wanted = plain(seeded(100, 8, num_workers=0)(), 3)
    for redo in (0, 1):
        seen = spawn(after[0], lambda group, redo=redo: second(group, states[-1][redo], 2 - redo))
        assert steps(seen) == wanted[1][stop - redo :]
        assert redo or steps(seen, 1) == wanted[2]


def test_the_position_between_epochs_is_exact():
    def first(group):
        loader = deal_loader(seeded(20, 8)(), Agreement(group))
        walk(loader, 2)
        return loader.state_dict()

    states = spawn(2, first)

    def second(group):
        loader = deal_loader(seeded(20, 8)(), Agreement(group))
        loader.load_state_dict(states[1])
        return walk(loader)

    assert steps(spawn(3, second)) == plain(seeded(20, 8)(), 3)[2]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_position_with_the_global_generator(persistent):
    def make(workers=2):
        return DataLoader(
            Numbers(40),
            8,
            shuffle=True,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
        )

    torch.manual_seed(11)
    wanted = plain(make(), 3)
    torch.manual_seed(11)
    (group,) = spawn(1, lambda group: group)
    loader = deal_loader(make(), Agreement(group))
    walk(loader)
    for _ in loader:
        if loader.turn.index == 1:
            break_state, generator = loader.state_dict(), torch.get_rng_state()
            break
    torch.manual_seed(99)
    other = deal_loader(make(0), Agreement(group))
    other.load_state_dict(break_state)
    torch.set_rng_state(generator)
    assert steps([walk(other)]) == wanted[1][2:]
    if not persistent:
        assert steps([walk(other)]) == wanted[2]


def test_a_state_of_another_order_is_refused():
    (group,) = spawn(1, lambda group: group)
    loader = deal_loader(seeded(100, 8)(), Agreement(group))
    for _ in loader:
        if loader.turn.index == 3:
            state = loader.state_dict()
    for other in (seeded(99, 8), seeded(100, 4)):
        changed = deal_loader(other(), Agreement(group))
        changed.load_state_dict(state)
        with pytest.raises(DataError, match="does not draw again"):
            iter(changed)
    with pytest.raises(DataError, match="same sampler"):
        plainly = deal_loader(DataLoader(Numbers(100), 8), Agreement(group))
        plainly.load_state_dict(state)
        iter(plainly)


def test_the_loader_goes_on_in_another_group():
    def body(group):
        smaller = group.make_subgroup([1, 2])
        loader = deal_loader(seeded(100, 8)(), Agreement(group))
        seen, changed = [], False
        for batch in loader:
            if loader.turn.index == 4 and not changed:
                changed = True
                if group.rank == 0:  # the first worker is lost
                    return seen, None, None
                loader.regroup(Agreement(smaller))
                continue
            seen.append((loader.turn, batch.tolist()))
        return seen[:4], seen[4:], *walk(loader)

    seen = spawn(3, body)
    wanted = plain(seeded(100, 8)(), 2)
    assert steps(seen) == wanted[0][:4]
    assert [steps(seen[1:], 1), steps(seen[1:], 2)] == [wanted[0][4:], wanted[1]]


def test_attributes_and_length_are_those_of_the_users_loader():
    (loader,) = spawn(1, lambda group: deal_loader(seeded(drop_last=True)(), Agreement(group)))
    assert loader.batch_size == 64 and len(loader.dataset) == 1003 and len(loader) == 15
    assert len(list(loader)) == 15
    with pytest.raises(AttributeError):
        _ = loader.nothing


class Own(DataLoader):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (
            lambda: DataLoader(Numbers(3), 4, drop_last=True),
            {},
            "no batch: 3 samples, batch size 4",
        ),
        (lambda: DataLoader(Numbers(0), 4), {}, "no batch"),
        (lambda: DataLoader(Numbers(9), 4, in_order=False), {}, "in_order"),
        (lambda: Own(Numbers(9)), {}, "plain torch.utils.data.DataLoader"),
        (seeded(), {"loss": "max"}, "possible: mean, sum"),
        (seeded(), {"loss": "sum", "weigh": len}, "leave one of them out"),
        (seeded(), {"shard": "mine"}, "for streams"),
        (seeded(), {"shares": [1, 2, 3, 4, 5]}, "5 numbers for"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_dealt_raises(make, options, said, size):
    with pytest.raises(DataError, match=said):
        run(size, make, **options)


@pytest.mark.parametrize(
    ("name", "values"),
    [("shares", ([1, 1], [1, 3])), ("loss", ("mean", "sum")), ("train", (True, False))],
)
def test_different_terms_are_found(name, values):
    def body(group):
        return walk(deal_loader(seeded()(), Agreement(group), **{name: values[group.rank]}))

    with pytest.raises(DataError, match=f"{name} is .* on rank 1"):
        spawn(2, body)


def test_a_mutant_that_gives_all_to_all_would_fail():
    seen = run(2, seeded())
    counts = Counter(one for rank in seen for _, ids in rank[0] for one in ids)
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (1, 3)])
def test_workers_may_read_ahead_to_different_depths(workers, monkeypatch):
    monkeypatch.setattr("paceline.data.sampler.CHUNK_BATCHES", 1)

    def body(group):
        make = seeded(
            100,
            4,
            num_workers=workers[group.rank],
            prefetch_factor=3 if workers[group.rank] else None,
        )
        return walk(deal_loader(make(), Agreement(group)))

    assert steps(spawn(2, body)) == plain(seeded(100, 4)())[0]


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 0), (2, 2)])
def test_a_broken_epoch_leaves_generators_as_if_nothing_was_drawn_ahead(size, workers):
    def make():
        sampler = RandomSampler(
            range(1000), replacement=True, generator=torch.Generator().manual_seed(2)
        )
        return DataLoader(Numbers(1000), 16, sampler=sampler, num_workers=workers)

    def twice(loader):
        for step, _ in enumerate(loader):
            if step == 3:
                break
        return [batch.tolist() for batch in loader]

    def body(group):
        loader = deal_loader(make(), Agreement(group))
        for _ in loader:
            if loader.turn.index == 3:
                break
        return walk(loader)

    wanted = make()
    wanted.num_workers, wanted.prefetch_factor = 0, None
    assert steps(spawn(size, body)) == twice(wanted)


@pytest.mark.slow
def test_options_of_the_dataloader_reach_it(capfd):
    out = []

    def begin(worker):
        print(f"worker {worker} begins", flush=True)

    def said(text):
        out.append(capfd.readouterr().out)
        return text in "".join(out)

    (group,) = spawn(1, lambda group: group)
    loader = deal_loader(
        DataLoader(
            Slow(6),
            2,
            num_workers=1,
            worker_init_fn=begin,
            timeout=0.2,
            multiprocessing_context="fork",
        ),
        Agreement(group),
    )
    with pytest.raises(RuntimeError, match="timed out after"):
        list(loader)
    wait_for(lambda: said("worker 0 begins"))


class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(1.5)


@pytest.mark.slow
def test_workers_that_are_spawned():
    seen = run(
        1, lambda: DataLoader(Numbers(12), 4, num_workers=1, multiprocessing_context="spawn")
    )
    assert steps(seen) == plain(DataLoader(Numbers(12), 4))[0]


@dataclass
class Batch:
    ids: torch.Tensor
    words: list[str]


def as_object(samples):
    return Batch(torch.stack(samples), [str(int(sample)) for sample in samples])


def as_dict(samples):
    return {"ids": torch.stack(samples), "words": [str(int(sample)) for sample in samples]}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("collate", [as_object, as_dict])
def test_what_collate_fn_gives_is_what_comes(collate, train):
    def ids(batch):
        fields = batch if isinstance(batch, dict) else vars(batch)
        assert fields["words"] == [str(number) for number in fields["ids"].tolist()]
        return fields["ids"].tolist()

    seen = run(3, lambda: DataLoader(Numbers(10), 4, collate_fn=collate), ids=ids, train=train)
    assert steps(seen) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_empty_evaluation_batch_of_what_cannot_be_cut_raises():
    with pytest.raises(DataError, match="empty share of an evaluation batch"):
        run(
            2,
            lambda: DataLoader(Numbers(3), 2, collate_fn=len),
            ids=lambda batch: [0] * batch,
            train=False,
        )


@pytest.mark.parametrize("seed", range(4))
def test_late_workers_change_nothing(seed, monkeypatch):
    monkeypatch.setattr("paceline.data.sampler.CHUNK_BATCHES", 2)
    dice = random.Random(seed)

    def body(group):
        return walk(
            deal_loader(
                seeded(100, 8, num_workers=group.rank % 2)(),
                Agreement(group),
                shares=[3, 0, 1],
                weigh=lambda batch: 2.0 * len(batch),
            ),
            2,
        )

    seen = spawn(3, body, delay=lambda rank: time.sleep(dice.random() * 0.004))
    assert [steps(seen), steps(seen, 1)] == plain(seeded(100, 8)(), 2)


def test_finish_ends_the_epoch_after_the_turn_and_the_next_one_is_whole():
    def body(group):
        loader = deal_loader(DataLoader(Numbers(40), batch_size=4), Agreement(group))
        seen = []
        for batch in loader:
            seen.append(len(batch))
            if len(seen) == 3:
                loader.finish_epoch()
        return len(seen), sum(len(batch) for batch in loader), loader.epoch

    assert spawn(2, body) == [(3, 20, 2)] * 2


@pytest.mark.parametrize(
    ("workers", "options"),
    [(0, {}), (2, {}), (0, {"shares": [0, 1, 4]}), (2, {"shares": [0, 1, 4]}), (0, {"weigh": len})],
)
def test_who_peeks_sees_what_comes_next_and_changes_nothing(workers, options, monkeypatch):
    """Also where what was read ahead is dealt again, by other shares or from the next epoch on."""
    monkeypatch.setattr("paceline.data.sampler.CHUNK_BATCHES", 1)

    # what comes is the same without processes that read: the loader that nobody peeks into has none
    def body(group, *, peeks):
        loader = deal_loader(
            seeded(100, 8, num_workers=workers if peeks else 0)(), Agreement(group), **options
        )
        epochs, seen, known, right = [], [], None, 0
        for _ in range(2):
            for batch in loader:
                right += known is not None and known.tolist() == batch.tolist()
                seen.append((loader.turn, batch.tolist()))
                known = loader.peek() if peeks and loader.turn.index % 5 != 4 else None
                assert known is None or torch.equal(known, loader.peek())
                if loader.turn.index == 6 and not epochs:
                    loader.reshare([1, 1, 2])
                if loader.turn.index == 10 and epochs:
                    break
            assert loader.peek() is None
            epochs, seen = [*epochs, seen], []
        return epochs, right

    found, wanted = (
        spawn(3, lambda group, peeks=peeks: body(group, peeks=peeks)) for peeks in (True, False)
    )
    for epoch in range(2):
        assert steps([seen for seen, _ in found], epoch) == steps(
            [seen for seen, _ in wanted], epoch
        )
    assert all(right >= 16 for _, right in found) and not any(right for _, right in wanted)


def test_a_checkpoint_after_a_peek_is_the_same():
    def body(group, *, peeks):
        loader = deal_loader(seeded(100, 8)(), Agreement(group))
        for _ in loader:
            if peeks:
                loader.peek()
            if loader.turn.index == 4:
                return loader.state_dict()

    for size in (1, 2):
        one, other = (
            spawn(size, lambda group, p=p: body(group, peeks=p))[0] for p in (True, False)
        )
        assert one["step"] == other["step"] == 5 and one["check"] == other["check"]


def test_what_is_read_as_a_stream_can_not_be_seen_ahead():
    class Count(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(20))

    def body(group):
        loader = deal_loader(DataLoader(Count(), 4), Agreement(group))
        return [loader.peek() for _ in loader]

    assert spawn(2, body) == [[None] * 5] * 2


def test_who_has_samples_is_told_of_the_shares_that_a_step_was_cut_by():
    def body(group):
        loader = deal_loader(DataLoader(Numbers(12), 4), Agreement(group))
        seen = []
        for _ in loader:
            seen.append((loader.turn.share, loader.turn.source))
            if len(seen) == 1:
                loader.reshare([1, 0])
        return seen

    assert spawn(2, body) == [[(2, None)] + [(4, 0)] * 2, [(2, None)] + [(0, 0)] * 2]

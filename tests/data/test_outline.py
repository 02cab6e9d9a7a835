from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
)

from paceline.comm.agreement import Agreement, SliceAgreement
from paceline.data import outline as outlines
from paceline.data.loader import deal_loader
from paceline.data.outline import describe_difference, outline_dataset
from paceline.errors import DataError
from tests.harness.loaders import Numbers, walk
from tests.harness.thread_groups import spawn


class Files(Numbers):
    """Samples that have names, and whatever else an object may hold."""

    def __init__(self, count=6, **fields):
        super().__init__(count)
        self.__dict__.update(fields)


class Untold(Dataset):
    def __len__(self):
        raise RuntimeError("not yet")

    def __getitem__(self, index):
        return torch.tensor(int(index))


class Stream(IterableDataset):
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        return iter(self.files)


NAMES = [f"{place}.jpg" for place in "abcdef"]
ORDER = [4, 2, 0, 5, 1, 3]
MIXED = [NAMES[place] for place in ORDER]


def epochs(*datasets, count=1, **options):
    """Deal a loader of each of these data sets to a rank of its own."""

    def body(group):
        loader = deal_loader(DataLoader(datasets[group.rank], 2, **options), Agreement(group))
        return walk(loader, count)

    return spawn(len(datasets), body)


def found(*datasets):
    """The difference that the outlines of these data sets show."""
    return describe_difference([outline_dataset(data) for data in datasets])


DIFFERENT = {
    "length": (Numbers(16), Numbers(14), "len(loader.dataset) is 14 on rank 1 and 16 on rank 0"),
    "indices": (
        Subset(Numbers(9), ORDER),
        Subset(Numbers(9), ORDER[::-1]),
        "loader.dataset.indices has other entries on rank 1 than on rank 0",
    ),
    "array": (
        Subset(Numbers(9), np.array(ORDER)),
        Subset(Numbers(9), np.arange(6)),
        "loader.dataset.indices has other",
    ),
    "tensor": (
        Subset(Numbers(9), torch.arange(6)),
        Subset(Numbers(9), torch.tensor(ORDER)),
        "loader.dataset.indices has other",
    ),
    "nested": (
        Subset(Subset(Numbers(9), ORDER), [0, 1]),
        Subset(Subset(Numbers(9), range(6)), [0, 1]),
        "loader.dataset.dataset.indices has",
    ),
    "joined": (
        ConcatDataset([Numbers(2), Subset(Numbers(9), [0, 1])]),
        ConcatDataset([Numbers(2), Subset(Numbers(9), [2, 1])]),
        "loader.dataset.datasets[1].indices has",
    ),
    "parts": (
        ConcatDataset([Numbers(2), Numbers(3)]),
        ConcatDataset([Numbers(3), Numbers(2)]),
        "len(loader.dataset.datasets[0]) is 3 on",
    ),
    "many parts": (
        ConcatDataset([*[Numbers(1)] * 20, Numbers(2), Numbers(3)]),
        ConcatDataset([*[Numbers(1)] * 20, Numbers(3), Numbers(2)]),
        "loader.dataset.cumulative_sizes has other entries",
    ),
    "stacked": (
        StackDataset(x=Subset(Numbers(9), [1, 0]), y=Numbers(2)),
        StackDataset(x=Subset(Numbers(9), [0, 1]), y=Numbers(2)),
        "loader.dataset.datasets['x'].indices has",
    ),
    "wrapped": (
        Files(base=Subset(Numbers(9), ORDER)),
        Files(base=Subset(Numbers(9), range(6))),
        "loader.dataset.base.indices has",
    ),
    "names": (
        Files(files=NAMES),
        Files(files=MIXED),
        "loader.dataset.files has the same names in another order on rank 1 than on rank 0",
    ),
    "others": (
        Files(files=NAMES),
        Files(files=[*NAMES[:5], "z.jpg"]),
        "loader.dataset.files has other entries on rank 1 than on rank 0",
    ),
    "paths": (
        Files(files=tuple(map(Path, NAMES))),
        Files(files=tuple(map(Path, MIXED))),
        "loader.dataset.files has the same names",
    ),
    "array of names": (
        Files(files=np.array(NAMES)),
        Files(files=np.array(MIXED)),
        "loader.dataset.files has the same names",
    ),
    "pairs": (
        Files(samples=[(name, 0) for name in NAMES]),
        Files(samples=[(name, int(name == "a.jpg")) for name in NAMES]),
        "loader.dataset.samples has other entries",
    ),
    "shards": (
        Files(99, shards=NAMES),
        Files(99, shards=MIXED),
        "loader.dataset.shards has the same names in another order",
    ),
    "texts": (
        Files(texts=[f"a text of {n} words" for n in range(6)]),
        Files(texts=[f"a text of {n} words" for n in ORDER]),
        "loader.dataset.texts has the same names in another order",
    ),
    "list of names": (NAMES, MIXED, "loader.dataset has the same names"),
    "names of a list": (
        Subset(NAMES, [0, 1]),
        Subset(MIXED, [0, 1]),
        "loader.dataset.dataset has the same names",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_data_sets_that_differ_are_told_apart(case):
    first, second, said = DIFFERENT[case]
    assert str(found(first, second)).startswith(said)
    assert found(first, first) is None and found(second, second) is None


@pytest.mark.parametrize("case", ["length", "indices", "names"])
def test_loaders_of_data_sets_that_differ_are_refused(case):
    first, second, said = DIFFERENT[case]
    raised = []

    def body(group):
        loader = deal_loader(
            DataLoader((first, first, second)[group.rank], 2, shuffle=True), Agreement(group)
        )
        with pytest.raises(DataError) as error:
            walk(loader)
        raised.append(str(error.value))

    spawn(3, body)
    assert raised[0] == raised[1] == raised[2]
    assert (
        said.replace("rank 1", "rank 2") in raised[0]
        and "Use the same seed for a random split on all workers" in raised[0]
    )


SAME = {
    "folders": (
        Files(files=[f"/data/{n}" for n in NAMES]),
        Files(files=[Path("/mnt/disk2/copy") / n for n in NAMES]),
    ),
    "kinds of lists": (
        Subset(Numbers(9), list(range(6))),
        Subset(Numbers(9), np.arange(6, dtype=np.int32)),
    ),
    "kinds of indices": (Subset(Numbers(9), range(6)), Subset(Numbers(9), list(torch.arange(6)))),
    "roots": (Files(99, roots=["/data/one", "/data/two"]), Files(99, roots=["/mnt/x"])),
    "host files": (
        Files(99, caches=["/tmp/a1.db", "/tmp/b1.db"]),
        Files(99, caches=["/tmp/a2.db", "/tmp/b2.db"]),
    ),
    "options": (
        Files(99, extensions=[".jpg", ".tar.gz"]),
        Files(99, extensions=[".tar.gz", ".jpg"]),
    ),
    "augmented texts": (
        Files(texts=[f"say {n}" for n in range(6)]),
        Files(texts=[f"do say {n}" for n in range(6)]),
    ),
    "numbers": (Files(noise=[0.1] * 6), Files(noise=[0.2] * 6)),
    "labels": (
        Files(labels=["cat", "cat", "cat", "cat", "dog", "dog"]),
        Files(labels=["cat", "cat", "cat", "dog", "dog", "dog"]),
    ),
    "mixing partners": (
        Files(pool=Subset(Numbers(9), [1, 2])),
        Files(pool=Subset(Numbers(9), [2, 1])),
    ),
    "handles": (Files(handle=open), Files(handle=None)),
    "wrapped on one": (Subset(Files(), range(6)), Files()),
    "unknown": (Untold(), Numbers(6)),
    "untold": (Untold(), Untold()),
    "ragged": (
        Files(samples=[("a.jpg", 0)] * 5 + [("b.jpg",)]),
        Files(samples=[("b.jpg", 0)] * 5 + [("a.jpg",)]),
    ),
    "odd": (
        Files(samples=[("a.jpg", 0.5)] * 6, more=[(), []], none=[], text=["\ud800.jpg"]),
        Files(samples=[("a.jpg", 0.1)] * 6),
    ),
    "keys": (Subset(Numbers(9), [(0, 1), (1, 2)]), Subset(Numbers(9), [(0, 2), (1, 2)])),
    "streams": (Stream(NAMES), Stream(MIXED)),
}


@pytest.mark.parametrize("case", SAME)
def test_what_may_differ_is_no_difference(case):
    assert found(*SAME[case]) is None


def test_an_outline_is_that_of_the_start_and_a_data_set_may_change():
    class Growing(Subset):
        pass

    def body(group):
        data = Growing(Numbers(20), [0, 1, 2, 3])
        loader = deal_loader(DataLoader(data, 2), Agreement(group))
        first = walk(loader)
        data.indices = [4, 5, 6, 7, 8, 9]
        second = walk(loader)
        return [len(seen[0]) for seen in (first, second)]

    assert spawn(2, body) == [[2, 3], [2, 3]]


def test_a_worker_that_joins_compares_what_it_began_with():
    def body(group):
        data = Subset(Numbers(20), list(range(8)) if group.rank < 2 else list(range(1, 9)))
        older = group.make_subgroup([0, 1])
        if group.rank < 2:
            loader = deal_loader(DataLoader(data, 2), Agreement(older))
            turns = iter(loader)
            next(turns)
            data.indices = [9] * 8  # of all workers, as a script that goes on may have it
            with pytest.raises(
                DataError,
                match=r"loader.dataset.indices has other entries on rank 2 than on rank 0",
            ):
                loader.regroup(Agreement(group))
        else:
            with pytest.raises(DataError, match="on rank 2 than on rank 0"):
                iter(deal_loader(DataLoader(data, 2), Agreement(group)))

    spawn(3, body)


def test_slices_of_a_mesh_compare_with_each_other():
    def body(group):
        parts = [group.make_subgroup([rank]) for rank in range(2)]
        mine = SliceAgreement(parts[group.rank], Agreement(group), step=lambda: 0, hosts=("a",))
        with pytest.raises(
            DataError, match=r"len\(loader.dataset\) is 7 on rank 1 and 8 on rank 0"
        ):
            iter(deal_loader(DataLoader(Numbers(8 - group.rank), 2), mine))

    spawn(2, body)


def test_one_worker_alone_looks_at_nothing(monkeypatch):
    monkeypatch.setattr(outlines, "_outline_part", lambda *_: pytest.fail("looked"))
    assert len(epochs(Numbers(4))[0][0]) == 2


def test_long_lists_are_sampled(monkeypatch):
    monkeypatch.setattr(outlines, "LISTED", 100)
    monkeypatch.setattr(outlines, "NAMED", 100)
    monkeypatch.setattr(outlines, "SAMPLED", 50)
    order = random.Random(0).sample(range(1000), 1000)
    names = [f"{place}.jpg" for place in range(1000)]
    data = Subset(Numbers(1000), range(1000))
    assert (
        found(data, Subset(Numbers(1000), order)) is not None
        and found(data, Subset(Numbers(1000), list(range(1000)))) is None
    )
    assert (
        found(Files(1000, files=names), Files(1000, files=[names[place] for place in order]))
        is not None
    )
    assert found(Files(1000, files=names), Files(1000, files=tuple(names))) is None

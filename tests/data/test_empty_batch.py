from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from paceline.data.batches import cut_rows
from paceline.data.empty_batch import collate_empty, empty_rows
from paceline.errors import DataError
from tests.harness.loaders import run

Pair = namedtuple("Pair", ["x", "y"])
ANCHORS = torch.ones(9, 4)


class Mode(Enum):
    ONE = 1


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


def make(count):
    return {
        "x": torch.ones(count, 2),
        "pair": Pair(torch.arange(count), [np.ones((3, count)), ["a"] * count]),
        "names": ("a",) * count,
        "boxes": [{"box": torch.ones(3, 4)}] * count,
        "edges": [torch.ones(2, 5 * count), torch.tensor(range(count + 1))],
        "object": Frozen(torch.ones(7 * count)),
        "ordered": OrderedDict(
            n=count, size=(3, 3), scale=2.5, mode=Mode.ONE, missing=float("nan")
        ),
        "anchors": ANCHORS.clone(),
    }


def test_what_grows_from_one_sample_to_two_are_rows():
    none = empty_rows(make(1), make(2))
    assert none["x"].shape == (0, 2) and none["pair"].x.shape == (0,) and type(none["pair"]) is Pair
    assert none["pair"].y[0].shape == (3, 0) and none["pair"].y[1] == []
    assert none["names"] == () and none["boxes"] == []
    assert none["edges"][0].shape == (2, 0) and none["edges"][1].tolist() == [0]
    assert none["object"].x.shape == (0,)
    assert (
        type(none["ordered"]) is OrderedDict
        and none["ordered"]["n"] == 0
        and none["ordered"]["size"] == (3, 3)
    )
    assert none["ordered"]["mode"] is Mode.ONE and none["ordered"]["scale"] == 2.5
    assert torch.equal(none["anchors"], ANCHORS)


class Bag:
    __slots__ = ("rows",)


WRONG = {
    "Tensor": lambda count: [torch.ones(count), torch.full((3,), float(count))],
    "PackedSequence": lambda count: pack_sequence([torch.ones(3)] * count),
    "str": lambda count: [torch.ones(count), "a" * count],
    "dict": lambda count: {number: torch.ones(1) for number in range(count)},
    "set": lambda count: [torch.ones(count), {"a"}],
    "Bag": lambda count: [torch.ones(count), Bag()],
    "list": lambda count: [1.0, "a"],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_emptied_is_refused_with_its_type(name):
    with pytest.raises(DataError, match=rf"can't be made from a {name}: .*pad=True"):
        empty_rows(WRONG[name](1), WRONG[name](2))


def test_a_collate_function_that_takes_its_samples_apart():
    def collate(samples):
        labels = [sample.pop("label") for sample in samples]
        return {**default_collate(samples), "label": torch.tensor(labels)}

    sample = {"x": torch.ones(2), "label": 3}
    none = collate_empty(collate, sample)
    assert none["x"].shape == (0, 2) and none["label"].shape == (0,) and sample["label"] == 3


def test_tuples_of_strings_are_cut():
    assert cut_rows([torch.arange(3), ("a", "b", "c"), (3, 3, 3)], 1, 3, 3)[1:] == [
        ("b", "c"),
        (3, 3, 3),
    ]


class Scenes(Dataset):
    """As many boxes in each image as its number says, and a name."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        index = int(index)
        return (
            torch.full((3, 4 + index, 5), float(index)),
            {"boxes": torch.ones(index, 4), "id": torch.tensor(index)},
            f"image {index}",
        )


class Passing(IterableDataset):
    def __iter__(self):
        return (Scenes(4)[index] for index in range(4))


def detection(samples):
    return tuple(zip(*samples, strict=True))


def listed(samples):
    return [list(column) for column in zip(*samples, strict=True)]


@pytest.mark.parametrize("data", [Scenes(4), Passing()])
@pytest.mark.parametrize("collate", [detection, listed])
def test_an_empty_share_of_a_detection_loader_has_no_images(data, collate):
    def ids(batch):
        images, targets, names = batch
        found = [int(target["id"]) for target in targets]
        assert names == type(names)(f"image {number}" for number in found)
        assert [int(image[0, 0, 0]) for image in images] == found
        return found

    seen = run(2, lambda: DataLoader(data, 3, collate_fn=collate), ids=ids, train=False)
    assert [[found for _, found in rank[0]] for rank in seen] == [[[0, 1], [3]], [[2], []]]


@pytest.mark.parametrize("workers", [0, 1])
def test_strings_of_torch_s_own_collate_function(workers):
    class Named(Scenes):
        def __getitem__(self, index):
            return torch.tensor([int(index)]), f"name {int(index)}"

    def ids(batch):
        x, names = batch
        assert list(names) == [f"name {number}" for number in x[:, 0].tolist()]
        return x[:, 0].tolist()

    seen = run(2, lambda: DataLoader(Named(4), 3, num_workers=workers), ids=ids, train=False)
    assert [[found for _, found in rank[0]] for rank in seen] == [[[0, 1], [3]], [[2], []]]


def test_pad_gives_a_ghost():
    seen = run(
        2,
        lambda: DataLoader(Scenes(4), 3, collate_fn=detection),
        ids=lambda batch: len(batch[0]),
        train=False,
        pad=True,
    )
    (turn, rows) = seen[1][0][-1]
    assert rows == 1 and turn.ghost and turn.weight == 0 and turn.share == 0 and not turn.train


def test_what_was_peeked_at_has_no_rows_either():
    from paceline.comm.agreement import Agreement
    from paceline.data.loader import deal_loader
    from tests.harness.thread_groups import spawn

    def body(group):
        loader = deal_loader(
            DataLoader(Scenes(4), 3, collate_fn=detection), Agreement(group), train=False
        )
        return [(copy.copy(loader.peek()), len(images)) for images, _, _ in loader]

    (first, second) = spawn(2, body)
    assert len(first[0][0][0]) == 1 and second[0][0] == ((), (), ()) and second[1] == (None, 0)

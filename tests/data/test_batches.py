from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.data.batches import count_rows, cut_rows, find_unevenly_ignored
from paceline.errors import DataError

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


def make():
    return {
        "x": torch.arange(6).reshape(3, 2),
        "pair": Pair(torch.arange(3), [np.arange(3), ["a", "b", "c"]]),
        "scale": torch.tensor(2.0),
        "n": 3,
        "s": "abc",
    }


def test_rows_are_those_of_all_tensors():
    assert count_rows(make()) == 3
    assert count_rows(Frozen(torch.ones(4, 2))) == 4
    for wrong in ((torch.ones(2), torch.ones(3)), "text", {"n": 3}, torch.tensor(1.0)):
        with pytest.raises(DataError, match="can't be cut along dim 0"):
            count_rows(wrong)
        assert count_rows(wrong, missing=1) == 1


def test_a_cut_keeps_the_structure():
    part = cut_rows(make(), 1, 3, 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert type(part["pair"]) is Pair and part["pair"].x.tolist() == [1, 2]
    assert part["pair"].y[0].tolist() == [1, 2] and part["pair"].y[1] == ["b", "c"]
    assert part["scale"] == 2 and part["n"] == 3 and part["s"] == "abc"
    assert cut_rows(Frozen(torch.arange(3)), 0, 1, 3).x.tolist() == [0]


def labelled(*rows_of_labels: list[int]) -> torch.Tensor:
    return torch.tensor(rows_of_labels)


def test_tokens_count_what_a_loss_counts() -> None:
    y = labelled([5, 6, 7], [8, -100, -100])
    assert pl.tokens("labels")({"labels": y}) == 4.0
    assert pl.tokens(1)((torch.zeros(2), y)) == 4.0
    assert pl.tokens("labels", ignore=8)(UserDict(labels=y)) == 5.0
    assert pl.tokens("x")(Frozen(y)) == 4.0
    assert pl.tokens("labels", shift=True)({"labels": y}) == 2.0
    assert pl.tokens("labels")({"labels": y[:, 0]}) == 2.0


def test_tokens_leave_out_the_first_label_of_each_row_where_labels_are_the_input() -> None:
    """As causal language models of transformers take them, which shift labels by themselves."""
    x, y = labelled([5, 6, 7], [8, 0, 0]), labelled([5, 6, 7], [8, -100, -100])
    assert pl.tokens("labels")({"input_ids": x, "labels": y}) == 2.0
    assert pl.tokens("labels", shift=False)({"input_ids": x, "labels": y}) == 4.0
    assert pl.tokens("labels")({"input_ids": x, "labels": y.roll(-1, 1)}) == 4.0


@pytest.mark.parametrize(
    ("key", "batch"),
    [
        ("labels", {"label": torch.zeros(2, dtype=torch.int64)}),
        (2, (1, 2)),
        ("y", Frozen(torch.ones(1))),
        ("x", Frozen(torch.ones(1))),
    ],
)
def test_tokens_say_where_they_looked_for_labels(key, batch) -> None:
    with pytest.raises(DataError, match="labels"):
        pl.tokens(key)(batch)


def test_labels_that_are_ignored_unevenly_are_found() -> None:
    even, uneven = labelled([5, -100], [-100, 6]), labelled([5, 6], [7, -100])
    assert find_unevenly_ignored({"x": torch.ones(2), "labels": uneven}) == "labels"
    assert find_unevenly_ignored((torch.ones(2), uneven)) == 1
    assert find_unevenly_ignored({"labels": even[:1]}) == "labels"  # of one sample it isn't known
    for other in (even, uneven.float(), uneven - 1, uneven.abs(), uneven[:0], torch.tensor(-100)):
        assert find_unevenly_ignored({"labels": other}) is None
    assert find_unevenly_ignored("text") is None

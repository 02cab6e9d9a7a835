from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.data.batches import cut, rows
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
    assert rows(make()) == 3
    assert rows(Frozen(torch.ones(4, 2))) == 4
    for wrong in ((torch.ones(2), torch.ones(3)), "text", {"n": 3}, torch.tensor(1.0)):
        with pytest.raises(DataError, match="can't be cut along dim 0"):
            rows(wrong)
        assert rows(wrong, missing=1) == 1


def test_a_cut_keeps_the_structure():
    part = cut(make(), 1, 3, 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert type(part["pair"]) is Pair and part["pair"].x.tolist() == [1, 2]
    assert part["pair"].y[0].tolist() == [1, 2] and part["pair"].y[1] == ["b", "c"]
    assert part["scale"] == 2 and part["n"] == 3 and part["s"] == "abc"
    assert cut(Frozen(torch.arange(3)), 0, 1, 3).x.tolist() == [0]

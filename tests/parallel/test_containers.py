"""Tensors are found and changed in whatever layers take and return, which stays of the kind that
it is.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.parallel.containers import find_hidden_tensors, tree_leaves, tree_map, tree_map_only


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    inner: Any = None
    count: int = 1


@dataclass(slots=True)
class Slotted:
    parts: list[Any] = field(default_factory=list)


class Named(NamedTuple):
    x: Tensor


class Texts(dict[str, Any]):
    pass


class Pair(tuple[Any, ...]):
    pass


X = torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [
        X,
        (X,),
        [X],
        {"a": X},
        OrderedDict(a=X),
        Named(X),
        Frozen(X),
        Slotted([X]),
        Texts(a=X),
        UserDict(a=X),
        Pair([X]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_container(value: Any) -> None:
    for outer in (value, {"outer": Frozen(X, [value])}):
        tensors = [leaf for leaf in tree_leaves(outer) if isinstance(leaf, Tensor)]
        assert tensors == [X] * len(tensors) and all(x is X for x in tensors)
        changed = tree_map_only(Tensor, lambda x: x + 1, outer)
        assert [leaf.tolist() for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)] == [
            [2.0, 2.0]
        ] * len(tensors)
        assert type(changed) is type(outer) and tree_leaves(outer)[0] is X


def test_containers_of_which_nothing_changes_stay_the_same() -> None:
    given = Frozen(X)
    assert tree_map(lambda leaf: leaf, given) is given


def test_a_container_that_holds_itself() -> None:
    loop = Slotted()
    loop.parts += [X, loop]
    assert tree_leaves(loop)[0] is X
    changed = tree_map_only(Tensor, lambda x: x + 1, loop)
    assert changed.parts[0].tolist() == [2.0, 2.0]


def test_tensors_in_attributes_of_other_objects() -> None:
    normal = torch.distributions.Independent(torch.distributions.Normal(X, 1.0), 1)
    assert [x.tolist() for x in find_hidden_tensors({"a": [normal]})] == [[1.0, 1.0], [1.0, 1.0]]
    assert not any(isinstance(leaf, Tensor) for leaf in tree_leaves(normal))
    assert list(find_hidden_tensors([X, torch.nn.Linear(2, 2), Tensor, lambda: X, 3])) == []

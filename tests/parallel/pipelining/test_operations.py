"""Operations as data: what they read, and what stands for values in their arguments."""

from __future__ import annotations

import operator
from typing import NamedTuple

import pytest
import torch
from torch import nn

from paceline.parallel.pipelining.operations import (
    ByMode,
    ModelPath,
    Operation,
    ValueRef,
    find_foreign_type,
    merge_modes,
)

pytestmark = pytest.mark.unit


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def test_an_operation_tells_what_it_reads_and_uses() -> None:
    args = ([ValueRef("x"), (ModelPath("weight"),)], slice(ValueRef("stop")))
    operation = Operation(
        "call", "function", print, args, {"by": ByMode(ValueRef("y"), {"deep": ValueRef("z")})}
    )
    assert set(operation.value_names()) == {"x", "stop", "y", "z"}
    assert list(operation.model_paths()) == ["weight"]
    assert list(Operation("call", "module", "blocks.0", (), {}).model_paths()) == ["blocks.0"]


def test_values_stand_where_their_names_were() -> None:
    model = nn.Linear(3, 2)
    item = Operation(
        "item",
        "function",
        operator.getitem,
        (ModelPath("weight"), (slice(None, ValueRef("stop")), ValueRef("column"))),
        {},
    )
    assert torch.equal(item.run_operation({"stop": 1, "column": 2}, model), model.weight[:1, 2])
    mode = Operation("mode", "function", operator.add, (ValueRef("x"), ByMode(1, 2)), {})
    assert [mode.run_operation({"x": 1}, model.train(way)) for way in (True, False)] == [2, 3]
    assert (
        Operation("up", "method", "upper", (ValueRef("x"),), {}).run_operation({"x": "a"}, model)
        == "A"
    )


def test_a_chained_module_is_given_a_tuple_as_arguments() -> None:
    model = nn.ModuleDict({"both": nn.Bilinear(2, 2, 1)})
    x = torch.randn(3, 2)
    assert Operation("both", "chained", "both", (ValueRef("x"),), {}).run_operation(
        {"x": (x, x)}, model
    ).shape == (3, 1)


def test_arguments_of_two_modes_differ_where_they_differ() -> None:
    assert merge_modes((1, [True, {"p": 0.5}]), (1, [False, {"p": 0.0}])) == (
        1,
        [ByMode(True, False), {"p": ByMode(0.5, 0.0)}],
    )
    assert merge_modes((1, 2), (1,)) == ByMode((1, 2), (1,))
    assert merge_modes(1, True) == ByMode(1, True)  # equal numbers, but not the same argument


def test_what_cannot_be_sent_is_found() -> None:
    assert (
        find_foreign_type(
            {
                "a": [torch.ones(1), None, 2, (True, 0.5)],
                "b": Pair(torch.ones(1), 3),
                "c": torch.Size([1]),
            }
        )
        is None
    )
    assert find_foreign_type({"a": [object()]}) is object
    assert find_foreign_type(lambda: 1) is not None

"""Values that stages send each other come out as they went in."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.errors import UsageError
from paceline.parallel.pipelining.stage_messages import (
    find_differentiable,
    pack_gradients,
    pack_values,
    unpack_gradients,
    unpack_values,
)


def test_nested_values_come_out_as_they_went_in() -> None:
    x, ids = torch.randn(2, 3, requires_grad=True), torch.arange(4)
    values = {"a": (x * 2, None, [ids]), "b": {"length": 7, "name": "n", "flag": True, "rate": 0.5}}
    head, tensors = pack_values(values, "stage 0")
    found, entries = unpack_values(
        json.loads(json.dumps(head)), [tensor.clone() for tensor in tensors]
    )
    assert found["b"] == values["b"]
    assert (
        found["a"][1] is None
        and torch.equal(found["a"][2][0], ids)
        and torch.equal(found["a"][0], x * 2)
    )
    assert [entry is found["a"][0] for entry in entries] == [True]
    assert len(find_differentiable(values)) == 1 and not found["a"][2][0].requires_grad


def test_nothing_needs_gradients_where_they_are_off() -> None:
    head, tensors = pack_values({"x": torch.ones(2, requires_grad=True)}, "stage 0")
    with torch.no_grad():
        found, entries = unpack_values(head, tensors)
    assert not entries and not found["x"].requires_grad


def test_what_cant_travel_is_named() -> None:
    with pytest.raises(UsageError, match="stage 3 gives a Generator"):
        pack_values({"x": torch.Generator()}, "stage 3")


def test_gradients_may_be_missing() -> None:
    grads = [None, torch.ones(2), None, torch.zeros(1)]
    found = unpack_gradients(*pack_gradients(grads))
    assert [grad is None for grad in found] == [True, False, True, False]
    assert found[1] is grads[1]

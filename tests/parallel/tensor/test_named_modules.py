"""Tests modules that a plan names: which are found, and the regions that they lie in."""

from __future__ import annotations

import pytest
from torch import nn

from paceline.errors import UsageError
from paceline.parallel.tensor.named_modules import (
    describe_nearest,
    find_named_modules,
    find_summed_modules,
    map_regions,
    name_module_kind,
    refuse_uncuttable,
)
from paceline.parallel.tensor.styles import column, sequence, summed


def make_block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU())


def test_modules_are_found_once_in_the_order_of_the_model() -> None:
    model = nn.ModuleDict({"a": make_block(), "b": make_block()})
    named = find_named_modules(model, {"*.1": column(), "a": sequence()})
    assert [(each.name, each.style) for each in named] == [
        ("a", sequence()),
        ("a.1", column()),
        ("b.1", column()),
    ]


def test_a_region_has_all_modules_inside_of_it() -> None:
    model = nn.ModuleDict({"a": make_block(), "b": make_block()})
    named = find_named_modules(model, {"*.1": column(), "a": sequence()})
    regions = map_regions(named)
    assert {name for name, part in model.named_modules() if id(part) in regions} == {
        "a",
        "a.0",
        "a.1",
        "a.2",
    }
    assert {region.name for region in regions.values()} == {"a"}


def test_a_region_in_a_region_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(make_block())})
    named = find_named_modules(model, {"a": sequence(), "a.0": sequence()})
    with pytest.raises(UsageError, match=r"a\.0 lies in the region a"):
        map_regions(named)


def test_modules_with_whole_parameters_are_summed() -> None:
    model = make_block()
    (norm,) = find_named_modules(model, {"0": summed()})
    assert find_summed_modules([norm], set()) == [("0", model[0])]
    assert find_summed_modules([norm], {id(model[0])}) == []


def test_a_style_names_the_kinds_that_it_cuts() -> None:
    model = make_block()
    assert [name_module_kind(part) for part in model] == ["", "Linear", ""]
    (named,) = find_named_modules(model, {"0": column()})
    with pytest.raises(UsageError, match=r"0 is a LayerNorm, .* it cuts Linear, Conv1D"):
        refuse_uncuttable(named, model)


def test_the_nearest_names_are_listed() -> None:
    assert describe_nearest("block", ["blocks", "head"]) == "the nearest are blocks"
    assert describe_nearest("block", []) == "it has no modules inside"

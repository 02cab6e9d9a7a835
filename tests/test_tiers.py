"""Tests: a test with several workers is told from one without by its code."""

from __future__ import annotations

import types
from typing import Any

import pytest

from paceline.comm import threads
from paceline.comm.solo import SoloGroup
from paceline.comm.threads import spawn
from tests.harness import processes, runs, tiers
from tests.harness.runs import workers as many


def names_it() -> Any:
    return spawn(2, lambda group: group.rank)


def in_an_inner_function() -> Any:
    def inner() -> Any:
        return [many(2, lambda run: run.rank) for _ in range(1)]

    return inner()


def by_a_module() -> Any:
    return processes.fork(2, lambda rank, size, store: rank)


def by_a_helper() -> Any:
    return in_an_inner_function()


def by_an_import() -> Any:
    from tests.harness.runs import workers

    return workers


class Crew:
    def __init__(self) -> None:
        by_a_helper()


def by_a_class() -> Any:
    return Crew()


class Variant:
    """A variant of a test, as far as it matters how tests are thinned out."""

    def __init__(self, name: str, *marks: Any) -> None:
        self.nodeid, self.own_markers = name, list(marks)

    def add_marker(self, name: str) -> None:
        self.own_markers.append(getattr(pytest.mark, name).mark)

    def iter_markers(self) -> Any:
        return iter(self.own_markers)

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.own_markers if mark.name == name), None)


def alone() -> Any:
    return SoloGroup(), runs.distance, runs.Numbered


def a_type_only(group: threads.ThreadGroup) -> int:
    return group.rank


@pytest.mark.parametrize("function", [names_it, in_an_inner_function, by_a_module, by_a_helper, by_an_import, by_a_class])
def test_several_workers_are_found_by_code(function: types.FunctionType) -> None:
    assert tiers.calls_workers(function)


@pytest.mark.parametrize("function", [alone, a_type_only])
def test_one_worker_is_of_the_unit_tier(function: types.FunctionType) -> None:
    assert not tiers.calls_workers(function)


def test_tests_are_thinned_out_without_what_is_of_a_soak_anyhow() -> None:
    thinned, soak = pytest.mark.thinned(3).mark, pytest.mark.soak.mark
    items = [Variant(f"{name}[{number}]", thinned, *([soak] if number == 2 else [])) for name in "ab" for number in range(6)]
    items += [Variant(f"c[{number}]") for number in range(3)]
    tiers.thin(items)  # type: ignore[arg-type]
    always = [item.nodeid for item in items if tiers.tier(item) != "soak"]  # type: ignore[arg-type]
    assert always == ["a[0]", "a[4]", "b[0]", "b[4]", "c[0]", "c[1]", "c[2]"]

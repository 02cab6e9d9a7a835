"""Tests: a test with several workers is told from one without by its code."""

from __future__ import annotations

import types
from typing import Any

import pytest

from paceline.comm.solo import SoloGroup
from tests.harness import processes, runs, thread_groups, tiers
from tests.harness.runs import workers as many
from tests.harness.thread_groups import spawn


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
    """A variant of a test, as far as it matters for which of them always run."""

    def __init__(self, name: str, *marks: Any, **params: int) -> None:
        self.nodeid, self.own_markers, self.callspec = (
            f"{name}[{params}]",
            list(marks),
            types.SimpleNamespace(params=params),
        )

    def add_marker(self, name: str) -> None:
        self.own_markers.append(getattr(pytest.mark, name).mark)

    def iter_markers(self) -> Any:
        return iter(self.own_markers)

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.own_markers if mark.name == name), None)


def alone() -> Any:
    return SoloGroup(), runs.distance, runs.Numbered


def a_type_only(group: thread_groups.ThreadGroup) -> int:
    return group.rank


@pytest.mark.parametrize(
    "function", [names_it, in_an_inner_function, by_a_module, by_a_helper, by_an_import, by_a_class]
)
def test_several_workers_are_found_by_code(function: types.FunctionType) -> None:
    assert tiers.calls_workers(function)


@pytest.mark.parametrize("function", [alone, a_type_only])
def test_one_worker_is_of_the_unit_tier(function: types.FunctionType) -> None:
    assert not tiers.calls_workers(function)


def test_each_value_of_each_parameter_always_runs_and_other_combinations_are_of_a_soak() -> None:
    marked, soak = pytest.mark.each_choice.mark, pytest.mark.soak.mark
    crossed = [Variant("crossed", marked, a=a, b=b) for a in range(3) for b in range(2)]
    single = [Variant("single", marked, a=a) for a in range(3)]
    partly = [
        Variant("partly", marked, *([soak] if a == b else []), a=a, b=b)
        for a in range(2)
        for b in range(2)
    ]
    plain = [Variant("plain", a=a, b=b) for a in range(2) for b in range(2)]
    alike = [
        Variant("alike", pytest.mark.alike(2).mark, *([soak] if a == 0 else []), a=a)
        for a in range(5)
    ]
    tiers.thin([*crossed, *single, *partly, *plain, *alike])  # type: ignore[list-item]

    def always(variants: list[Variant]) -> list[tuple[int, ...]]:
        return [
            tuple(one.callspec.params.values()) for one in variants if tiers.tier(one) != "soak"
        ]  # type: ignore[arg-type]

    assert always(crossed) == [(0, 0), (1, 1), (2, 0)]
    assert always(single) == [(0,), (1,), (2,)]
    assert always(partly) == [(0, 1), (1, 0)]
    assert len(always(plain)) == 4
    assert always(alike) == [(1,), (2,)]

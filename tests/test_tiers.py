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

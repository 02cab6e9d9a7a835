"""Sorts tests into tiers: by their markers, by the fixtures that they use, and by whether their
code calls for several workers.

Most variants of a test that is marked `each_choice` are of the tier soak, and all but the first of
one that is marked `alike`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

JOBS = {"job", "launch", "alone"}  # fixtures that start programs
LAB = {"able"}  # the fixture that all clusters of the lab need
SEVERAL = {  # what runs several workers: as threads, or as forks
    "tests.harness.thread_groups": {"ThreadGroup", "spawn"},
    "tests.harness.processes": {"fork", "threads"},
    "tests.harness.runs": {"workers"},
    "multiprocessing.context": {"Process", "ForkProcess"},
}


def tier(item: pytest.Item) -> str:
    """Name the tier of a test."""
    names, fixtures = uses(item)
    if "soak" in names:
        return "soak"
    if "lab" in names or fixtures & LAB:
        return "lab"
    if names & {"jobs", "slow"} or fixtures & JOBS:
        return "jobs"
    return "workers" if any(calls_workers(function) for function in _functions(item)) else "unit"


def thin(items: Sequence[pytest.Item]) -> None:
    """Leave variants of tests marked `each_choice` to a soak, but for a few with each value of each
    parameter.

    Variants that are marked `soak` themselves stay there, and a value that only these have is of
    the soak too. Of tests marked `alike(n)` the first n variants always run: what the others add is
    seen by tests of other modules too.
    """
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("each_choice") is not None and "soak" not in uses(item)[0]:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rest in variants.values():
        missing = set().union(*map(_values, rest))
        while missing:
            # the first of those with most
            kept = max(rest, key=lambda item: len(missing & _values(item)))
            missing -= _values(kept)
            rest.remove(kept)
        for item in rest:
            item.add_marker("soak")
    seen = Counter[str]()
    for item in items:
        if (mark := item.get_closest_marker("alike")) is not None and "soak" not in uses(item)[0]:
            seen[name := item.nodeid.partition("[")[0]] += 1
            if seen[name] > mark.args[0]:
                item.add_marker("soak")


def _values(item: pytest.Item) -> set[tuple[str, int]]:
    """Return the names of a variant's parameters, each with what tells its value from others,
    which may have no hash.
    """
    return {(name, id(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]


def uses(item: pytest.Item) -> tuple[set[str], set[str]]:
    """Return the names of a test's markers and of its fixtures."""
    return {mark.name for mark in item.iter_markers()}, set(getattr(item, "fixturenames", ()))


def _functions(item: pytest.Item) -> Iterator[Callable[..., Any]]:
    """Give the function of a test and those of its fixtures."""
    if (function := getattr(item, "function", None)) is not None:
        yield function
    info = getattr(item, "_fixtureinfo", None)
    for definitions in info.name2fixturedefs.values() if info is not None else ():
        yield definitions[-1].func


def calls_workers(function: Callable[..., Any]) -> bool:
    """Whether the code of a function, or of what it names in the tests, names something that
    runs several workers.
    """
    function = getattr(function, "__func__", function)
    return isinstance(function, types.FunctionType) and _reaches(function)


@functools.cache
def _reaches(function: types.FunctionType) -> bool:
    """Whether something that runs several workers can be reached from a function."""
    seen, ahead = {function}, [function]
    while ahead:
        for found in _named(ahead.pop()):
            if found.__name__ in SEVERAL.get(found.__module__, ()):
                return True
            if isinstance(found, type):
                more = [
                    method
                    for method in vars(found).values()
                    if isinstance(method, types.FunctionType)
                ]
            else:
                more = [found]
            fresh = [each for each in more if each not in seen]
            seen.update(fresh)
            ahead += fresh
    return False


def _named(function: types.FunctionType) -> Iterator[Any]:
    """Give the functions and classes of tests, and what runs workers, that a function's code
    names.
    """
    names = set(_names(function.__code__))
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    for found in (
        [function.__globals__.get(name) for name in names]
        + cells
        + [sys.modules.get(name) for name in names]
    ):
        whole = (
            [getattr(found, name, None) for name in names]
            if isinstance(found, types.ModuleType) and _ours(found.__name__)
            else [found]
        )
        for each in whole:
            each = getattr(each, "__wrapped__", each)
            if isinstance(each, types.FunctionType | type) and (
                _ours(each.__module__) or each.__module__ in SEVERAL
            ):
                yield each


def _names(code: types.CodeType) -> Iterator[str]:
    """Give all names that code uses, also in functions that it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _filled(cell: types.CellType) -> bool:
    """Whether a variable of an outer function has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _ours(module: str) -> bool:
    """Whether a module belongs to the tests."""
    return module.split(".", maxsplit=1)[0] == "tests" or module in SEVERAL

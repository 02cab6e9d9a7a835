"""The section on how a run was set up: its strategy, the mesh as a picture, shares of the batch,
and what was asked for.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing.figures import find
from paceline.observe.page.drawing.html_tables import table
from paceline.observe.page.markup import Child, Markup, element, join
from paceline.observe.page.subjects import workers

MOST = 256  # workers of a mesh that are drawn


def section(data: Mapping[str, Any]) -> Markup | None:
    """Write how one run was set up; None where that isn't known."""
    rows = list(_rows(data))
    parts = [table(("setting", ""), rows)] if rows else []
    parts += [*_mesh(data), *workers.shares(data), *_results(data)]
    return join(*parts) if parts else None


def settings(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a run in words, arguments of its script by their names."""
    found: dict[str, str] = {}
    if find(data, "sync") is not None:
        found["strategy"] = str(find(data, "sync"))
        found["workers"] = (
            f"{find(data, 'workers')} on {find(data, 'hosts')} "
            f"host{'' if find(data, 'hosts') == 1 else 's'}"
        )
    mesh = find(data, "mesh")
    if mesh:
        found["mesh"] = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    given: Mapping[str, Any] = find(data, "settings") or {}
    for name, value in given.items():
        if name == "arguments":
            found |= _arguments(value)
        elif name == "optimizers":
            found |= {
                f"optimizer{'' if not at else f' {at + 1}'}": _optimizer(each)
                for at, each in enumerate(value)
            }
        else:
            found[name.replace("_", " ")] = str(value) if name == "seed" else _words(value)
    readers = find(data, "loader", "num_workers")
    return found if readers is None else {**found, "readers of each worker": str(readers)}


def _rows(data: Mapping[str, Any]) -> Iterator[tuple[str, Child]]:
    for name, words in settings(data).items():
        yield (
            name,
            element("code", None, words)
            if name in ("strategy", "cut", "script", "optimizer") or name.startswith("-")
            else words,
        )


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000
        else str(value)
    )


def _optimizer(fields: Mapping[str, Any]) -> str:
    given = (f"{name}={_words(value)}" for name, value in fields.items() if name != "name")
    return f"{fields.get('name')}({', '.join(given)})"


def _arguments(given: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a script by the names of its options; all others together."""
    found, rest = dict[str, str](), list[str]()
    at = 0
    while at < len(given):
        name, equals, value = str(given[at]).partition("=")
        if not name.startswith("-"):
            rest.append(str(given[at]))
        elif equals:
            found[name] = value
        elif at + 1 < len(given) and not str(given[at + 1]).startswith("--"):
            at += 1
            found[name] = str(given[at])
        else:
            found[name] = "yes"
        at += 1
    return {**found, **({"arguments": shlex.join(rest)} if rest else {})}


def _mesh(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the grid of workers: columns along the last axis, rows along all others."""
    mesh: Mapping[str, int] = find(data, "mesh") or {}
    places: Sequence[Mapping[str, int]] = find(data, "places") or ()
    if not mesh or not places or len(places) > MOST:
        return
    *others, last = mesh
    head = (" ", *(f"{last} {at}" for at in range(mesh[last])))
    rows = dict[tuple[int, ...], dict[int, int]]()
    for rank, place in enumerate(places):
        rows.setdefault(tuple(place[axis] for axis in others), {})[place[last]] = rank
    cells = (
        (
            ", ".join(f"{axis} {at}" for axis, at in zip(others, where, strict=True)) or "workers",
            *(
                element("span", {"class": "worker"}, f"rank {row[at]}" if at in row else "")
                for at in range(mesh[last])
            ),
        )
        for where, row in sorted(rows.items())
    )
    yield element("h3", None, "Mesh")
    yield element("div", {"class": "mesh"}, table(head, cells, "Which worker is where on the mesh"))


def _results(data: Mapping[str, Any]) -> Iterator[Markup]:
    results: Mapping[str, Any] = find(data, "results") or {}
    if results:
        yield element("h3", None, "Results")
        yield table(("result", ""), ((name, str(value)) for name, value in results.items()))

"""The section on the setup of a run: settings, mesh, shares of the batch, and results."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing.figures import find
from paceline.observe.page.drawing.html_tables import table
from paceline.observe.page.markup import Child, Markup, element, join
from paceline.observe.page.subjects import workers

# Most workers of a mesh that is drawn.
MOST = 256


def section(data: Mapping[str, Any]) -> Markup | None:
    """Draw the setup of one run; None if it isn't known."""
    rows = list(_rows(data))
    blocks = [table(("setting", ""), rows)] if rows else []
    blocks += [*_mesh(data), *workers.shares(data), *_results(data)]
    return join(*blocks) if blocks else None


def settings(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a run in words, with arguments of its script by name."""
    words: dict[str, str] = {}
    if find(data, "sync") is not None:
        words["strategy"] = str(find(data, "sync"))
        words["workers"] = (
            f"{find(data, 'workers')} on {find(data, 'hosts')} "
            f"host{'' if find(data, 'hosts') == 1 else 's'}"
        )
    mesh = find(data, "mesh")
    if mesh:
        words["mesh"] = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    recorded: Mapping[str, Any] = find(data, "settings") or {}
    for name, value in recorded.items():
        if name == "arguments":
            words |= _arguments(value)
        elif name == "optimizers":
            words |= {
                f"optimizer{'' if not at else f' {at + 1}'}": _optimizer(each)
                for at, each in enumerate(value)
            }
        else:
            words[name.replace("_", " ")] = str(value) if name == "seed" else _words(value)
    num_workers = find(data, "loader", "num_workers")
    return words if num_workers is None else {**words, "readers of each worker": str(num_workers)}


def _rows(data: Mapping[str, Any]) -> Iterator[tuple[str, Child]]:
    """Yield the rows of the table of settings."""
    for name, words in settings(data).items():
        yield (
            name,
            element("code", None, words)
            if name in ("strategy", "cut", "script", "optimizer") or name.startswith("-")
            else words,
        )


def _words(value: Any) -> str:
    """Format a value of a setting."""
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000
        else str(value)
    )


def _optimizer(fields: Mapping[str, Any]) -> str:
    """Format an optimizer with its hyperparameters."""
    arguments = (f"{name}={_words(value)}" for name, value in fields.items() if name != "name")
    return f"{fields.get('name')}({', '.join(arguments)})"


def _arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a script by option name, and all others together."""
    by_option, others = dict[str, str](), list[str]()
    index = 0
    while index < len(arguments):
        name, equals, value = str(arguments[index]).partition("=")
        # Without knowing the script's options: `-x VALUE`, `--x=VALUE`, or a flag if an option
        # follows.
        if not name.startswith("-"):
            others.append(str(arguments[index]))
        elif equals:
            by_option[name] = value
        elif index + 1 < len(arguments) and not str(arguments[index + 1]).startswith("--"):
            index += 1
            by_option[name] = str(arguments[index])
        else:
            by_option[name] = "yes"
        index += 1
    return {**by_option, **({"arguments": shlex.join(others)} if others else {})}


def _mesh(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the grid of workers: columns along the last axis, rows along all others."""
    mesh: Mapping[str, int] = find(data, "mesh") or {}
    places: Sequence[Mapping[str, int]] = find(data, "places") or ()
    if not mesh or not places or len(places) > MOST:
        return
    *other_axes, last = mesh
    head = (" ", *(f"{last} {at}" for at in range(mesh[last])))
    rows = dict[tuple[int, ...], dict[int, int]]()
    for rank, place in enumerate(places):
        rows.setdefault(tuple(place[axis] for axis in other_axes), {})[place[last]] = rank
    cells = (
        (
            ", ".join(f"{axis} {at}" for axis, at in zip(other_axes, row_key, strict=True))
            or "workers",
            *(
                element("span", {"class": "worker"}, f"rank {row[at]}" if at in row else "")
                for at in range(mesh[last])
            ),
        )
        for row_key, row in sorted(rows.items())
    )
    yield element("h3", None, "Mesh")
    yield element("div", {"class": "mesh"}, table(head, cells, "Which worker is where on the mesh"))


def _results(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the results that the script has recorded."""
    results: Mapping[str, Any] = find(data, "results") or {}
    if results:
        yield element("h3", None, "Results")
        yield table(("result", ""), ((name, str(value)) for name, value in results.items()))

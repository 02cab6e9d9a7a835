"""The section on the setup of a run: settings, mesh, shares of the batch, and results."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing.figures import find_field
from paceline.observe.page.drawing.html_tables import make_table
from paceline.observe.page.markup import Child, Markup, element, join_markup
from paceline.observe.page.subjects import lateness_section

# Most workers of a mesh that is drawn.
MAX_DRAWN_WORKERS = 256


def draw_setup(data: Mapping[str, Any]) -> Markup | None:
    """Draw the setup of one run; None if it isn't known."""
    rows = list(_setting_rows(data))
    blocks = [make_table(("setting", ""), rows)] if rows else []
    blocks += [*_draw_mesh(data), *lateness_section.draw_shares(data), *_draw_results(data)]
    return join_markup(*blocks) if blocks else None


def describe_settings(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a run in words, with arguments of its script by name."""
    words: dict[str, str] = {}
    if find_field(data, "sync") is not None:
        words["strategy"] = str(find_field(data, "sync"))
        words["workers"] = (
            f"{find_field(data, 'workers')} on {find_field(data, 'hosts')} "
            f"host{'' if find_field(data, 'hosts') == 1 else 's'}"
        )
    mesh = find_field(data, "mesh")
    if mesh:
        words["mesh"] = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    recorded: Mapping[str, Any] = find_field(data, "settings") or {}
    for name, value in recorded.items():
        if name == "arguments":
            words |= _parse_arguments(value)
        elif name == "optimizers":
            words |= {
                f"optimizer{'' if not at else f' {at + 1}'}": _format_optimizer(each)
                for at, each in enumerate(value)
            }
        else:
            words[name.replace("_", " ")] = str(value) if name == "seed" else _format_value(value)
    num_workers = find_field(data, "loader", "num_workers")
    return words if num_workers is None else {**words, "readers of each worker": str(num_workers)}


def _setting_rows(data: Mapping[str, Any]) -> Iterator[tuple[str, Child]]:
    """Yield the rows of the table of settings."""
    for name, words in describe_settings(data).items():
        yield (
            name,
            element("code", None, words)
            if name in ("strategy", "cut", "script", "optimizer") or name.startswith("-")
            else words,
        )


def _format_value(value: Any) -> str:
    """Format a value of a setting."""
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000
        else str(value)
    )


def _format_optimizer(fields: Mapping[str, Any]) -> str:
    """Format an optimizer with its hyperparameters."""
    arguments = (
        f"{name}={_format_value(value)}" for name, value in fields.items() if name != "name"
    )
    return f"{fields.get('name')}({', '.join(arguments)})"


def _parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
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


def _draw_mesh(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the grid of workers: columns along the last axis, rows along all others."""
    mesh: Mapping[str, int] = find_field(data, "mesh") or {}
    places: Sequence[Mapping[str, int]] = find_field(data, "places") or ()
    if not mesh or not places or len(places) > MAX_DRAWN_WORKERS:
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
    yield element(
        "div", {"class": "mesh"}, make_table(head, cells, "Which worker is where on the mesh")
    )


def _draw_results(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the results that the script has recorded."""
    results: Mapping[str, Any] = find_field(data, "results") or {}
    if results:
        yield element("h3", None, "Results")
        yield make_table(("result", ""), ((name, str(value)) for name, value in results.items()))

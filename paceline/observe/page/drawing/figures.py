"""Numbers on a page that say where they are from: each is an element with the field of
summary.json, and the value that it has there.

<data class="figure" data-field="rank_seconds.0.compute" value="0.0123">12.3 ms</data>
<data class="figure" data-field="step_seconds.wait" data-per="step_seconds" value="0.25">25%</data>      a part of what is there in all
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.observe.page.drawing.scales import Words
from paceline.observe.page.markup import Markup, element

Data = Mapping[str, Any]
Field = tuple[str | int, ...]

NONE = "–"  # in the place of what isn't known


def find(data: Data, *field: str | int) -> Any:
    """Return a field of the summary of a run; None where it has none."""
    found: Any = data["summary"]
    for key in field:
        if isinstance(found, Mapping):
            found = found.get(str(key))
        elif isinstance(found, list) and isinstance(key, int) and key < len(found):
            found = found[key]
        else:
            return None
    return found


def number(data: Data, *field: str | int) -> float:
    """Return a number of the summary of a run, 0 where it has none or where it is no number."""
    return _number(find(data, *field))


def total(value: Any) -> float:
    """Return the sum of all numbers in a field."""
    if isinstance(value, Mapping):
        return sum(map(total, value.values()))
    return sum(map(total, value)) if isinstance(value, list) else _number(value)


def figure(data: Data, field: Field, words: Words) -> Markup:
    """Write a number of the summary."""
    value = find(data, *field)
    if value is None or isinstance(value, Mapping | list):
        return element("span", {"class": "figure"}, NONE)
    text = words(float(value)) if math.isfinite(float(value)) else str(value)
    return element(
        "data", {"class": "figure", "data-field": _dotted(field), "value": repr(value)}, text
    )


def summed(data: Data, field: Field, words: Words) -> Markup:
    """Write the sum of all numbers in a field of the summary."""
    found = find(data, *field)
    if found is None:
        return element("span", {"class": "figure"}, NONE)
    value = total(found)
    return element(
        "data",
        {"class": "figure", "data-field": _dotted(field), "data-sum": "", "value": repr(value)},
        words(value),
    )


def share(data: Data, field: Field, per: Field) -> Markup:
    """Write which part a field of the summary, or the sum of its numbers, is of those in
    another.
    """
    whole = total(find(data, *per))
    value = total(find(data, *field)) / whole if whole > 0 else 0.0
    given = {
        "class": "figure",
        "data-field": _dotted(field),
        "data-per": _dotted(per),
        "value": repr(value),
    }
    return element("data", given, f"{value:.0%}")


def _dotted(field: Field) -> str:
    return ".".join(map(str, field))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return 0.0
    try:
        found = float(value)
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0

"""Numbers of a page that name their source: the field of summary.json, and its exact value there.

<data class="figure" data-field="rank_seconds.0.compute" value="0.0123">12.3 ms</data>

A share also names the field that it is a part of:

<data class="figure" data-field="step_seconds.wait" data-per="step_seconds" value="0.25">25%</data>
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.observe.page.drawing.scales import NumberFormat
from paceline.observe.page.markup import Markup, element

Data = Mapping[str, Any]
Field = tuple[str | int, ...]

# Stands in place of a value that isn't known.
UNKNOWN = "–"


def find_field(data: Data, *field: str | int) -> Any:
    """Return a field of the summary of a run; None if it has none."""
    value: Any = data["summary"]
    for key in field:
        if isinstance(value, Mapping):
            value = value.get(str(key))
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def read_number(data: Data, *field: str | int) -> float:
    """Return a number of the summary; 0 if it is missing or not a finite number."""
    return _to_number(find_field(data, *field))


def sum_numbers(value: Any) -> float:
    """Return the sum of all numbers in a field."""
    if isinstance(value, Mapping):
        return sum(map(sum_numbers, value.values()))
    return sum(map(sum_numbers, value)) if isinstance(value, list) else _to_number(value)


def draw_figure(data: Data, field: Field, words: NumberFormat) -> Markup:
    """Draw a number of the summary."""
    value = find_field(data, *field)
    if value is None or isinstance(value, Mapping | list):
        return element("span", {"class": "figure"}, UNKNOWN)
    text = words(float(value)) if math.isfinite(float(value)) else str(value)
    return element(
        "data", {"class": "figure", "data-field": _dotted_path(field), "value": repr(value)}, text
    )


def draw_sum(data: Data, field: Field, words: NumberFormat) -> Markup:
    """Draw the sum of all numbers in a field of the summary."""
    numbers = find_field(data, *field)
    if numbers is None:
        return element("span", {"class": "figure"}, UNKNOWN)
    value = sum_numbers(numbers)
    return element(
        "data",
        {
            "class": "figure",
            "data-field": _dotted_path(field),
            "data-sum": "",
            "value": repr(value),
        },
        words(value),
    )


def draw_share(data: Data, field: Field, per: Field) -> Markup:
    """Draw a field of the summary, or its sum, as a share of another field."""
    total_per = sum_numbers(find_field(data, *per))
    value = sum_numbers(find_field(data, *field)) / total_per if total_per > 0 else 0.0
    attributes = {
        "class": "figure",
        "data-field": _dotted_path(field),
        "data-per": _dotted_path(per),
        "value": repr(value),
    }
    return element("data", attributes, f"{value:.0%}")


def _dotted_path(field: Field) -> str:
    """Return the path of a field, with dots."""
    return ".".join(map(str, field))


def _to_number(value: Any) -> float:
    """Convert a value to a finite number; 0 if it isn't one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return 0.0
    try:
        converted = float(value)
    except ValueError:
        return 0.0
    return converted if math.isfinite(converted) else 0.0

"""The section on loss: its curve, and those of all else that was logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.observe.page import scales
from paceline.observe.page.markup import Markup, element
from paceline.observe.page.plots import Curve, Plot, draw, finite


def of_one(data: Mapping[str, Any]) -> Markup | None:
    """Draw what one run has logged over its steps."""
    plots = [_logged(name, values) for name, values in data["values"].items()]
    return element("div", None, plots) if plots else None


def _logged(name: str, values: Mapping[str, Any]) -> Markup:
    every = finite([values["low"], values["high"]])
    x = scales.scale(min(values["step"]), max(values["step"]), scales.short, whole=True)
    y = scales.scale(min(every, default=0.0), max(every, default=1.0), scales.plain)
    curve = Curve(name, values["step"], values["mean"], values["low"], values["high"])
    return element("div", None, element("h3", None, name), draw(Plot(f"{name} over steps", [curve], x, y, "step")))

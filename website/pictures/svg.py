"""Pictures as SVG: boxes, arrows and words, in colours that colour-blind people tell apart, and
that follow a page from light to dark.

Coordinates are in pixels, from the upper left corner.
"""

from __future__ import annotations

from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]

STYLE = """
.drawing { --ink: #1b1f24; --soft: #57606a; --faint: #eef1f4; --line: #c4ccd4; font: 13px system-ui, -apple-system, "Segoe UI", sans-serif }
@media (prefers-color-scheme: dark) { .drawing { --ink: #e6e9ee; --soft: #a4adb8; --faint: #2d333d; --line: #4c5561 } }
.drawing .ink { fill: var(--ink) } .drawing .soft { fill: var(--soft) } .drawing .faint { fill: var(--faint) }
.drawing .blue { fill: #0072b2 } .drawing .orange { fill: #e69f00 } .drawing .green { fill: #009e73 } .drawing .purple { fill: #a85a8a }
.drawing .line { stroke: var(--line) }
.drawing .to-blue { stroke: #2a8fd0 } .drawing .to-green { stroke: #12a97f }
.drawing .on-dark { fill: #ffffff } .drawing .on-light { fill: #1b1f24 }
.drawing .bold { font-weight: 600 } .drawing .small { font-size: 11px }
"""  # noqa: E501


class Drawing:
    """A picture that grows by what is put into it."""

    def __init__(self, title: str) -> None:
        self._title, self._parts = title, list[str]()
        self._width = self._height = 0.0

    def box(
        self, x: float, y: float, width: float, height: float, look: str, *, part: float = 1.0
    ) -> None:
        """Draw a box; `look` are its classes, `part` how opaque it is."""
        opacity = "" if part == 1.0 else f' opacity="{_number(part)}"'
        place = (
            f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        )
        self._add(f'<rect {place} rx="2" class="{look}"{opacity}/>', x + width, y + height)

    def say(
        self, x: float, y: float, text: str, look: str = "ink", *, anchor: Anchor = "start"
    ) -> None:
        """Write a line of text whose baseline is at `y`."""
        placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
        wide = {"start": 7.2 * len(text), "middle": 3.6 * len(text), "end": 0.0}[anchor]
        self._add(
            f'<text x="{_number(x)}" y="{_number(y)}"{placed} class="{look}">{escape(text)}</text>',
            x + wide,
            y + 4,
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], look: str) -> None:
        """Draw an arrow between two points."""
        (x, y), (u, v) = start, end
        length = max(((u - x) ** 2 + (v - y) ** 2) ** 0.5, 1e-9)
        a, b = (u - x) / length, (v - y) / length  # along the arrow
        left, right = (u - 6 * a + 3 * b, v - 6 * b - 3 * a), (u - 6 * a - 3 * b, v - 6 * b + 3 * a)
        route = " ".join(f"{_number(p)} {_number(q)}" for p, q in (left, end, right))
        path = f"M{_number(x)} {_number(y)}L{_number(u)} {_number(v)}M{route}"
        self._add(
            f'<path d="{path}" fill="none" stroke-width="1.5" class="{look}"/>',
            max(x, u),
            max(y, v),
        )

    def rule(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw a thin line."""
        points = (
            f'x1="{_number(start[0])}" y1="{_number(start[1])}" x2="{_number(end[0])}" '
            f'y2="{_number(end[1])}"'
        )
        self._add(f'<line {points} class="line"/>', *end)

    def text(self) -> str:
        """Return the SVG."""
        size = f"0 0 {_number(self._width + 8)} {_number(self._height + 8)}"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" '
            f'width="{_number(self._width + 8)}" class="drawing" role="img">'
        )
        return "\n".join(
            [
                head,
                f"<title>{escape(self._title)}</title>",
                f"<style>{STYLE}</style>",
                *self._parts,
                "</svg>",
                "",
            ]
        )

    def _add(self, part: str, right: float, bottom: float) -> None:
        self._parts.append(part)
        self._width, self._height = max(self._width, right), max(self._height, bottom)


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")

"""A bar at the bottom of a terminal: what draws it, and what takes it away for as long as other
text is written.

    [1] loaded 3 files                                  what scripts print goes up
    epoch 2/3  ━━━━━━━━━━╸━━━━━━━━━  step 361/800  loss 2.346 █▆▅▄▃▂▁▁  0:12 left
    1,234 samples/s  compute 60% exchange 20% wait 10% data 10%  rank 2 on c late 41%: data loading

Nothing here writes: it gives characters to those that do.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TextIO

from paceline.formatting import spoken
from paceline.status.run_status import RunStatus, shares, sparkline

if TYPE_CHECKING:
    from rich.text import Text

Size = Callable[[], tuple[int, int]]  # columns and lines of the terminal, as it is now
SIZE: Final = (80, 24)  # of a terminal that doesn't say
_GAP: Final = "  "
_LINES: Final = 5  # at most
_COLOURS: Final = ("green", "cyan", "yellow", "magenta")  # of the parts of a step, in their order
_BESIDE: Final = 8  # signs of a curve on a line of its own
# of the line with the bar: whether it has the loss (1), and the time left too (2); the width of the
# bar, from and to; that of the curve
_CHOICES: Final = (
    *((2, 20, 60, 16), (2, 12, 20, 12), (2, 8, 12, 8), (2, 6, 10, 0)),
    *((1, 8, 12, 8), (1, 6, 10, 0), (0, 6, 20, 0)),
)


def capable(environ: Mapping[str, str]) -> bool:
    """Whether a terminal in these surroundings can have a bar: not a dumb one, nor one whose
    output a CI keeps.
    """
    return environ.get("TERM", "dumb") not in ("", "dumb", "unknown") and not environ.get("CI")


def reflows(environ: Mapping[str, str]) -> bool:
    """Whether the terminal breaks lines anew when it becomes narrower; all do but xterm and
    screen.
    """
    return "XTERM_VERSION" not in environ and "STY" not in environ


def bar_on(stream: TextIO, *, breaks: bool = True) -> LiveBar:
    """Make the bar of the terminal that `stream` writes to. `breaks`: as for `LiveBar`."""

    def size() -> tuple[int, int]:
        try:
            found = os.get_terminal_size(stream.fileno())
        except (OSError, ValueError):  # it is none that the system knows, or was closed
            return SIZE
        return found.columns or SIZE[0], found.lines or SIZE[1]

    return LiveBar(
        size,
        breaks=breaks,
        plain="utf" not in (getattr(stream, "encoding", None) or "utf-8").lower(),
    )


class LiveBar:
    """What is drawn at the bottom of one terminal.

    `size`: of the terminal; `plain`: its encoding has ASCII alone.
    """

    def __init__(self, size: Size, *, breaks: bool = True, plain: bool = False) -> None:
        self._size, self._breaks, self._plain = size, breaks, plain
        self._status: RunStatus | None = None
        # how it looks on a terminal of this size
        self._made: tuple[tuple[int, int], list[tuple[int, str]]] | None = None
        self._drawn: list[int] = []  # how wide each line is that is there
        # a line of other text is under way; and it went back to its own start
        self._open = self._returned = False

    def follow(self, status: RunStatus) -> None:
        """Show this status from the next drawing on."""
        self._status, self._made = status, None

    def wrote(self, data: bytes) -> None:
        """Note that other text was written."""
        if b"\n" in data:
            self._open = self._returned = False
        rest = data.rpartition(b"\n")[2]
        self._open |= bool(rest)
        self._returned |= b"\r" in rest

    def away(self) -> str:
        """Take the bar away, so that other text can be written."""
        if not self._drawn:
            return ""
        columns = max(self._size()[0], 1)
        rows = (
            sum(max(1, math.ceil(cells / columns)) for cells in self._drawn)
            if self._breaks
            else len(self._drawn)
        )
        self._drawn = []
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[J"

    def back(self, *, insist: bool = False) -> str:
        """Draw the bar where there is something to draw, and no line of other text is under way.

        `insist`: end such a line, unless it is one that its own program draws again and again (as a
        bar of the script's own).
        """
        if self._status is None or self._drawn or (self._open and (self._returned or not insist)):
            return ""
        begin, self._open = "\n" if self._open else "", False
        size = self._size()
        # once for each status, however much is written above it
        if self._made is None or self._made[0] != size:
            self._made = (
                size,
                draw(
                    self._status, size[0] - 1, max(1, min(_LINES, size[1] - 1)), plain=self._plain
                ),
            )
        found = self._made[1]
        self._drawn = [cells for cells, _ in found]
        return begin + "\n".join(text for _, text in found)

    def again(self) -> str:
        """Draw the bar anew."""
        return self.away() + self.back(insist=True)

    def leave(self) -> str:
        """Leave the bar where it is, as text above all that comes."""
        last = self.again() if self._status is not None else self.away()
        left, self._drawn, self._status = bool(self._drawn), [], None
        return f"{last}\n" if left else last


def draw(
    status: RunStatus, columns: int, lines: int, *, plain: bool = False
) -> list[tuple[int, str]]:
    """Draw a status in at most so many lines, none wider than `columns`: how wide each is, and
    its characters.
    """
    # here: it takes as long to import as all of paceline, and only a terminal needs it
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        width=max(columns, 1),
        highlight=False,
        legacy_windows=False,
    )
    found = []
    for text in list(_laid_out(status, columns, plain=plain))[:lines]:
        text.truncate(columns, overflow="ellipsis" if not plain else "crop")
        with console.capture() as capture:
            console.print(text, end="", no_wrap=True, crop=False)
        found.append((text.cell_len, capture.get()))
    return found


def _laid_out(status: RunStatus, columns: int, *, plain: bool) -> Iterator[Text]:
    """Lay a status out: first the line with the bar, then what found no room there, and the
    rest.
    """
    from rich.text import Text

    values = [
        Text.assemble(name, " ", (f"{value:.4g}", "bold")) for name, value in status.values.items()
    ]
    left = [] if status.left is None else [Text(f"{spoken(status.left)} left")]
    first, there = _first_line(status, values[:1], left, columns, plain=plain)
    yield first
    rest = _with_curve(values[:1], status, 0 if plain else _BESIDE) if there < 1 else []
    rest += left if there < 2 else []
    rest += [] if status.rate is None else [Text(f"{status.rate:,.0f} samples/s")]
    rest += [_shares(status.parts, columns)] if status.parts else []
    rest += [Text(text, "yellow") for text in (status.late, status.remark) if text]
    yield from _flow([*rest, *values[1:]], columns)


def _first_line(
    status: RunStatus, value: list[Text], left: list[Text], columns: int, *, plain: bool
) -> tuple[Text, int]:
    """Write the line with the bar, and say how many of `value` and `left` are in it: as many as
    leave room for a bar.
    """
    from rich.text import Text

    head = (
        [Text(f"epoch {status.epoch}/{status.epochs}", "bold")] if status.epoch is not None else []
    )
    step = Text(
        f"step {status.step}" if status.steps is None else f"step {status.step}/{status.steps}"
    )
    done = min(max(status.step / status.steps, 0.0), 1.0) if status.steps else None
    for there, least, most, curve in _CHOICES:
        tail = [
            *(_with_curve(value, status, 0 if plain else curve) if there > 0 else []),
            *(left if there > 1 else []),
        ]
        whole = [*head, step, *tail]
        room = columns - sum(text.cell_len + len(_GAP) for text in whole)
        if done is None and room >= -len(_GAP):
            return _joined(whole), there
        if done is not None and room >= least:
            return _joined([*head, _bar(done, min(room, most), plain=plain), step, *tail]), there
    both = _joined([*head, step])
    return both if both.cell_len <= columns else step, 0


def _with_curve(value: list[Text], status: RunStatus, width: int) -> list[Text]:
    """Put the curve beside its value, where there is one."""
    from rich.text import Text

    signs = sparkline(status.curve, width) if width and value else ""
    return [Text.assemble(value[0], " ", (signs, "cyan"))] if signs else value


def _bar(done: float, width: int, *, plain: bool) -> Text:
    from rich.text import Text

    halves = round(2 * width * done)
    whole, half = ("#", "") if plain else ("━", "╸" * (halves % 2))
    full = whole * (halves // 2) + half
    return Text.assemble((full, "cyan"), (("-" if plain else "━") * (width - len(full)), "dim"))


def _shares(parts: Mapping[str, float], columns: int) -> Text:
    from rich.text import Text

    long = len(shares(parts)) <= columns
    pieces = [
        (f"{part if long else part[0]} {share:.0%}", _COLOURS[at % len(_COLOURS)])
        for at, (part, share) in enumerate(parts.items())
    ]
    return Text(" ").join(Text(text, colour) for text, colour in pieces)


def _flow(pieces: list[Text], columns: int) -> Iterator[Text]:
    """Put pieces beside each other, as many as there is room for in a line."""
    held: list[Text] = []
    for piece in pieces:
        if held and _joined([*held, piece]).cell_len > columns:
            yield _joined(held)
            held = []
        held.append(piece)
    if held:
        yield _joined(held)


def _joined(pieces: list[Text]) -> Text:
    from rich.text import Text

    return Text(_GAP).join(pieces)

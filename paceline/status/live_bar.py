"""A bar at the bottom of a terminal. It is erased while other text is written, and drawn again.

    [1] loaded 3 files                                  text of scripts scrolls up
    epoch 2/3  ━━━━━━━━━━╸━━━━━━━━━  step 361/800  loss 2.346 █▆▅▄▃▂▁▁  0:12 left
    1,234 samples/s  compute 60% exchange 20% wait 10% data 10%  rank 2 on c late 41%: data loading

Nothing in this module writes to the terminal: its functions return characters for the caller.

    erase_bar() --> "up, erase"      the caller's text      draw_bar() --> "the bar"
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TextIO

from paceline.formatting import format_duration
from paceline.status.run_status import RunStatus, draw_sparkline, format_part_shares

if TYPE_CHECKING:
    from rich.text import Text

Size = Callable[[], tuple[int, int]]  # gives the columns and lines of the terminal now
DEFAULT_SIZE: Final = (80, 24)  # size of a terminal that doesn't tell
_GAP: Final = "  "
_MAX_LINES: Final = 5  # lines of the bar at most
_PART_COLOURS: Final = (
    "green",
    "cyan",
    "yellow",
    "magenta",
)  # of the parts of a step, in their order
_CURVE_WIDTH: Final = 8  # characters of a curve that isn't on the line with the bar
# Layouts of the line with the bar, from wide to narrow. Number of values on it (1: the loss, 2: the
# time left too), smallest and largest width of the bar, and width of the curve.
_LAYOUTS: Final = (
    *((2, 20, 60, 16), (2, 12, 20, 12), (2, 8, 12, 8), (2, 6, 10, 0)),
    *((1, 8, 12, 8), (1, 6, 10, 0), (0, 6, 20, 0)),
)


def can_show_bar(environ: Mapping[str, str]) -> bool:
    """Whether the terminal can show a bar. A dumb terminal can't, and a CI keeps all output."""
    return environ.get("TERM", "dumb") not in ("", "dumb", "unknown") and not environ.get("CI")


def reflows_lines(environ: Mapping[str, str]) -> bool:
    """Whether the terminal breaks lines again when it becomes narrower.

    All terminals do, except xterm and screen.
    """
    return "XTERM_VERSION" not in environ and "STY" not in environ


def make_bar(stream: TextIO, *, breaks: bool = True) -> LiveBar:
    """Make the bar of the terminal to which a stream writes. `breaks` is that of `LiveBar`."""

    def size() -> tuple[int, int]:
        try:
            terminal = os.get_terminal_size(stream.fileno())
        except (OSError, ValueError):
            # The stream isn't a terminal for the system, or is closed.
            return DEFAULT_SIZE
        return terminal.columns or DEFAULT_SIZE[0], terminal.lines or DEFAULT_SIZE[1]

    return LiveBar(
        size,
        breaks=breaks,
        plain="utf" not in (getattr(stream, "encoding", None) or "utf-8").lower(),
    )


class LiveBar:
    """The bar at the bottom of one terminal.

    It is on the screen if `_drawn_widths` isn't empty, and only then. It is never there while
    another line of text is unfinished.

    Args:
        size: Function that gives the size of the terminal.
        breaks: Whether the terminal breaks lines again when it becomes narrower.
        plain: Whether its encoding has only ASCII.
    """

    def __init__(self, size: Size, *, breaks: bool = True, plain: bool = False) -> None:
        self._size, self._reflows, self._plain = size, breaks, plain
        self._status: RunStatus | None = None
        # Lines of the bar for the current status, and the size of the terminal for which they are.
        self._layout: tuple[tuple[int, int], list[tuple[int, str]]] | None = None
        # Width of each line that is on the screen.
        self._drawn_widths: list[int] = []
        # Whether a line of other text is unfinished, and whether it has gone back to its start.
        self._line_unfinished = self._line_returned = False

    def set_status(self, status: RunStatus) -> None:
        """Show a status from the next drawing on."""
        self._status, self._layout = status, None

    def note_output(self, data: bytes) -> None:
        """Note other text that was written."""
        if b"\n" in data:
            self._line_unfinished = self._line_returned = False
        rest = data.rpartition(b"\n")[2]
        # A carriage return moves to the start of the line, to draw it again.
        self._line_unfinished |= bool(rest)
        self._line_returned |= b"\r" in rest

    def erase_bar(self) -> str:
        """Erase the bar, so that other text can be written."""
        if not self._drawn_widths:
            return ""
        columns = max(self._size()[0], 1)
        # If the terminal has become narrower since, a line may take several rows now.
        rows = (
            sum(max(1, math.ceil(cells / columns)) for cells in self._drawn_widths)
            if self._reflows
            else len(self._drawn_widths)
        )
        self._drawn_widths = []
        # To the start of the first row, then erase to the end of the screen.
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[J"

    def draw_bar(self, *, insist: bool = False) -> str:
        """Draw the bar, unless a line of other text is unfinished.

        With `insist` such a line is ended, unless its program redraws it again and again, as a
        progress bar of the script does.
        """
        if (
            self._status is None
            or self._drawn_widths
            or (self._line_unfinished and (self._line_returned or not insist))
        ):
            return ""
        begin, self._line_unfinished = "\n" if self._line_unfinished else "", False
        size = self._size()
        # Laid out once for each status, however much text is written above it.
        if self._layout is None or self._layout[0] != size:
            self._layout = (
                size,
                draw_status(
                    self._status,
                    size[0] - 1,
                    max(1, min(_MAX_LINES, size[1] - 1)),
                    plain=self._plain,
                ),
            )
        lines = self._layout[1]
        self._drawn_widths = [cells for cells, _ in lines]
        return begin + "\n".join(text for _, text in lines)

    def redraw_bar(self) -> str:
        """Erase the bar, and draw it again."""
        return self.erase_bar() + self.draw_bar(insist=True)

    def leave_on_screen(self) -> str:
        """Leave the bar on the screen, as text above later text."""
        last_drawing = self.redraw_bar() if self._status is not None else self.erase_bar()
        stays, self._drawn_widths, self._status = bool(self._drawn_widths), [], None
        return f"{last_drawing}\n" if stays else last_drawing


def draw_status(
    status: RunStatus, columns: int, lines: int, *, plain: bool = False
) -> list[tuple[int, str]]:
    """Draw a status as lines of text.

    Args:
        status: The status.
        columns: Largest width of a line.
        lines: Largest number of lines.
        plain: Whether to use only ASCII.

    Returns:
        Width and characters of each line.
    """
    # Not at the top: it takes as long to import as all of paceline, and only a terminal needs it.
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        width=max(columns, 1),
        highlight=False,
        legacy_windows=False,
    )
    drawing = []
    for text in list(_lay_out_status(status, columns, plain=plain))[:lines]:
        text.truncate(columns, overflow="ellipsis" if not plain else "crop")
        with console.capture() as capture:
            console.print(text, end="", no_wrap=True, crop=False)
        drawing.append((text.cell_len, capture.get()))
    return drawing


def _lay_out_status(status: RunStatus, columns: int, *, plain: bool) -> Iterator[Text]:
    """Lay out a status: the line with the bar, then pieces that didn't fit there, and the rest."""
    from rich.text import Text

    values = [
        Text.assemble(name, " ", (f"{value:.4g}", "bold")) for name, value in status.values.items()
    ]
    time_left = [] if status.left is None else [Text(f"{format_duration(status.left)} left")]
    first, shown = _lay_out_first_line(status, values[:1], time_left, columns, plain=plain)
    yield first
    rest = _add_curve(values[:1], status, 0 if plain else _CURVE_WIDTH) if shown < 1 else []
    rest += time_left if shown < 2 else []
    rest += [] if status.rate is None else [Text(f"{status.rate:,.0f} samples/s")]
    rest += [_make_shares_text(status.parts, columns)] if status.parts else []
    rest += [Text(text, "yellow") for text in (status.late, status.remark) if text]
    yield from _fill_lines([*rest, *values[1:]], columns)


def _lay_out_first_line(
    status: RunStatus, value: list[Text], time_left: list[Text], columns: int, *, plain: bool
) -> tuple[Text, int]:
    """Lay out the line with the bar, with as many values as leave room for a bar.

    Args:
        status: The status.
        value: The loss, or nothing.
        time_left: The time left, or nothing.
        columns: Width of the line.
        plain: Whether to use only ASCII.

    Returns:
        The line, and the number of values in it: 1 for the loss, 2 for the time left too.
    """
    from rich.text import Text

    head = (
        [Text(f"epoch {status.epoch}/{status.epochs}", "bold")] if status.epoch is not None else []
    )
    step = Text(
        f"step {status.step}" if status.steps is None else f"step {status.step}/{status.steps}"
    )
    done = min(max(status.step / status.steps, 0.0), 1.0) if status.steps else None
    # The first layout that fits. Without a number of steps there is no bar.
    for shown, least, most, curve in _LAYOUTS:
        tail = [
            *(_add_curve(value, status, 0 if plain else curve) if shown > 0 else []),
            *(time_left if shown > 1 else []),
        ]
        pieces = [*head, step, *tail]
        room = columns - sum(text.cell_len + len(_GAP) for text in pieces)
        if done is None and room >= -len(_GAP):
            return _join_pieces(pieces), shown
        if done is not None and room >= least:
            return _join_pieces(
                [*head, _make_bar_text(done, min(room, most), plain=plain), step, *tail]
            ), shown
    without_bar = _join_pieces([*head, step])
    return without_bar if without_bar.cell_len <= columns else step, 0


def _add_curve(value: list[Text], status: RunStatus, width: int) -> list[Text]:
    """Put the curve next to its value, if there is one."""
    from rich.text import Text

    curve = draw_sparkline(status.curve, width) if width and value else ""
    return [Text.assemble(value[0], " ", (curve, "cyan"))] if curve else value


def _make_bar_text(done: float, width: int, *, plain: bool) -> Text:
    from rich.text import Text

    # In Unicode the bar grows by half a character.
    halves = round(2 * width * done)
    cell, half_cell = ("#", "") if plain else ("━", "╸" * (halves % 2))
    full = cell * (halves // 2) + half_cell
    return Text.assemble((full, "cyan"), (("-" if plain else "━") * (width - len(full)), "dim"))


def _make_shares_text(parts: Mapping[str, float], columns: int) -> Text:
    from rich.text import Text

    # Names of parts become one letter if there is no room.
    fits = len(format_part_shares(parts)) <= columns
    pieces = [
        (f"{part if fits else part[0]} {share:.0%}", _PART_COLOURS[index % len(_PART_COLOURS)])
        for index, (part, share) in enumerate(parts.items())
    ]
    return Text(" ").join(Text(text, colour) for text, colour in pieces)


def _fill_lines(pieces: list[Text], columns: int) -> Iterator[Text]:
    """Fill lines with pieces, as many as fit into each."""
    line: list[Text] = []
    for piece in pieces:
        if line and _join_pieces([*line, piece]).cell_len > columns:
            yield _join_pieces(line)
            line = []
        line.append(piece)
    if line:
        yield _join_pieces(line)


def _join_pieces(pieces: list[Text]) -> Text:
    from rich.text import Text

    return Text(_GAP).join(pieces)

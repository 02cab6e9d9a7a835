"""A terminal that shows what is written to it: it breaks long lines, scrolls, and obeys the few
commands that bars need.
"""

from __future__ import annotations

import io
import re

_PIECES = re.compile(r"\x1b\[(\d*)([A-Za-z])|(\n)|(\r)|([^\x1b\n\r])")


class TerminalScreen:
    """Rows of characters, those that have scrolled away among them; every character is one cell
    wide.
    """

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.columns, self.lines = columns, lines
        self._rows: list[list[str]] = [[]]
        self._goes_on: list[bool] = [False]  # whether the next row belongs to the same line
        self._row = self._column = 0

    def size(self) -> tuple[int, int]:
        """Columns and lines, as a bar asks for them."""
        return self.columns, self.lines

    def feed(self, text: str) -> None:
        """Show a text."""
        for match in _PIECES.finditer(text):
            number, command, newline, back, letter = match.groups()
            if newline:
                self._column = 0
                self._down(goes_on=False)
            elif back:
                self._column = 0
            elif letter:
                self._put(letter)
            elif command == "A":
                self._row = max(self._row - int(number or 1), len(self._rows) - self.lines, 0)
            elif command == "J":
                self._rows[self._row :] = [self._rows[self._row][: self._column]]
                self._goes_on[self._row :] = [False]
            else:
                assert command == "m", match[0]
        assert text == "" or _PIECES.sub("", text) == "", f"an unknown command in {text!r}"

    def _put(self, letter: str) -> None:
        if self._column == self.columns:
            self._column = 0
            self._down(goes_on=True)
        row = self._rows[self._row]
        row.extend(" " * (self._column - len(row)))
        row[self._column : self._column + 1] = [letter]
        self._column += 1

    def _down(self, *, goes_on: bool) -> None:
        self._goes_on[self._row] = goes_on
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])
            self._goes_on.append(False)

    def resize(self, columns: int, lines: int | None = None) -> None:
        """Become wider or narrower: lines are broken anew."""
        rows: list[list[str]] = []
        goes_on: list[bool] = []
        whole: list[str] = []
        at = None  # of the cursor, in the line under way
        where = (0, 0)
        for number, row in enumerate(self._rows):
            at = len(whole) + self._column if number == self._row else at
            whole += row
            if self._goes_on[number]:
                continue
            pieces = [
                whole[begin : begin + columns] for begin in range(0, len(whole), columns)
            ] or [[]]
            if at is not None:
                inside = min(at // columns, len(pieces) - 1)
                where, at = (len(rows) + inside, at - inside * columns), None
            rows += pieces
            goes_on += [True] * (len(pieces) - 1) + [False]
            whole = []
        self._rows, self._goes_on, self.columns, self.lines = (
            rows,
            goes_on,
            columns,
            lines or self.lines,
        )
        self._row, self._column = where

    def text(self) -> list[str]:
        """All lines, whole ones, without blank ends."""
        found, under_way = list[str](), ""
        for row, goes_on in zip(self._rows, self._goes_on, strict=True):
            under_way += "".join(row)
            if not goes_on:
                found.append(under_way.rstrip())
                under_way = ""
        return found

    def rows(self) -> list[str]:
        """What is to be seen now."""
        return ["".join(row) for row in self._rows[-self.lines :]]


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and shows what is written to it."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        super().__init__()
        self.screen = TerminalScreen(columns, lines)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.screen.feed(text)
        return len(text)

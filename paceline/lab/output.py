"""The output of many launchers on one screen.

Each line has its host and rank in front. The reason of a failure is shown once, at the end:

    [host0 0] step 10 loss 2.31
    [host1 2] step 10 loss 2.31
    paceline: what rank 2 said last:
    [host1 2] RuntimeError: ...
    paceline: rank 2 on host1 ...
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from paceline.cluster.launcher.output import Screen

Who: TypeAlias = tuple[int, int | None]  # host and rank; None for the host's launcher itself

_RANK: Final = re.compile(rb"\[(\d+)\] ")
_CLOSING: Final = re.compile(rb"paceline: what rank (\d+) said last:")
# remarks of each launcher on its own start and end; a lab shows none of them
_WAITING: Final = re.compile(
    rb"paceline: (waits at|nobody answers at|has come to|starting|joined|\d+ workers? ended well)\b"
)
_VERDICT: Final = re.compile(rb"paceline: (rank \d+ on|host) \S+ .*")


class OutputSorter:
    """Sorts the output of all launchers, and shows it.

    After a failure every launcher says the same last words. They are held back, and shown once.

    Args:
        names: The names of the hosts.
        places: The host of each rank.
        show: Show the output on this terminal; else it is only remembered.
    """

    def __init__(self, names: Sequence[str], places: Mapping[int, int], *, show: bool) -> None:
        self._names, self._places = names, places
        self._shown: list[bytes] = []
        standard_output = Screen(1, self._make_prefix, self._shown.append)
        # Both outputs are often the same terminal. One screen then keeps their lines apart.
        one_screen = not show or os.path.sameopenfile(1, 2)
        self.screens = {
            1: standard_output,
            2: standard_output if one_screen else Screen(2, self._make_prefix, self._shown.append),
        }
        standard_output.is_broken = not show  # a broken screen only remembers its lines
        self._said: dict[bytes, int] = {}  # lines of launchers, with the first host that said them
        self._closings: defaultdict[int, list[bytes]] = defaultdict(list)
        self._verdicts: dict[int, bytes] = {}

    @property
    def all_text(self) -> str:
        """All output so far, as text."""
        return b"".join(self._shown).decode(errors="replace")

    @property
    def is_broken(self) -> bool:
        """Whether the reader of the output is gone."""
        return any(screen.is_broken for screen in self.screens.values())

    @property
    def is_full(self) -> bool:
        """Whether launchers have to wait until more has been read."""
        return any(screen.is_full for screen in self.screens.values())

    def pending_screens(self) -> dict[int, Screen]:
        """List the screens that have something to write, by descriptor."""
        return {screen.descriptor: screen for screen in self.screens.values() if screen.has_pending}

    def drop_pending(self) -> None:
        """Drop all output that has not been written yet."""
        for screen in self.screens.values():
            screen.drop_pending()

    def show_lab_lines(self, text: str) -> None:
        """Show lines of the lab itself."""
        self.screens[2].show_line(text)

    def show_piece(self, who: Who, piece: bytes, descriptor: int) -> None:
        """Show a line, or a piece of one.

        A line without a rank comes from a launcher itself. If all launchers say the same line, it
        is shown once.
        """
        host, rank = who
        if _WAITING.match(piece) and rank is None:
            return
        # Last words come on standard error: a heading, the lines of the rank that failed, and a
        # verdict. From the heading on, this host's standard error is held back.
        if _CLOSING.match(piece) and rank is None:
            self._closings[host] = [piece]
        elif _VERDICT.match(piece) and rank is None:
            self._verdicts[host] = piece
        elif host in self._closings and descriptor == 2:
            self._closings[host].append(b"" if rank is None else piece)
        elif rank is not None or self._said.setdefault(piece, host) == host:
            self.screens[descriptor].put_line(who, piece)

    def show_last_words(self) -> None:
        """Show the last words of one launcher, which were held back."""
        closing = next((lines for lines in self._closings.values() if lines), None)
        if closing is not None and self._verdicts:
            heading = _CLOSING.match(closing[0])
            assert heading is not None
            rank = int(heading[1])
            self.show_lab_lines(closing[0].decode(errors="replace").rstrip("\n"))
            for line in closing[1:]:
                self.screens[2].put_line((self._places.get(rank, 0), rank), line)
        verdict = next(iter(self._verdicts.values()), None)
        if verdict is not None:
            self.show_lab_lines(verdict.decode(errors="replace").rstrip("\n"))

    def _make_prefix(self, who: Who) -> bytes:
        host, rank = who
        return f"[{self._names[host]}{'' if rank is None else f' {rank}'}] ".encode()


class LauncherOutput:
    """Standard output or standard error of one launcher, cut into lines for the sorter."""

    PIECES: Final = re.compile(rb"[^\r\n]*[\r\n]")

    def __init__(self, host: int, desk: OutputSorter, descriptor: int) -> None:
        self._host, self._desk, self._descriptor = host, desk, descriptor
        self._rest = b""
        self._fresh = True  # at the start of a line
        self._rank: int | None = None  # of the line under way

    def take_bytes(self, data: bytes) -> None:
        """Pass all complete lines on, and keep the rest for the next bytes."""
        data = self._rest + data
        end = 0
        for match in self.PIECES.finditer(data):
            self._pass_piece(match[0])
            end = match.end()
        self._rest = data[end:]

    def flush_line(self) -> None:
        """Pass on a line that has no end yet."""
        if self._rest:
            self._pass_piece(self._rest)
            self._rest = b""

    def _pass_piece(self, piece: bytes) -> None:
        if self._fresh:
            match = _RANK.match(piece)
            # A bare end of line belongs to the line before, and so to its rank.
            if piece not in {b"\n", b"\r"}:
                self._rank = None if match is None else int(match[1])
            piece = piece if match is None else piece[match.end() :]
        self._fresh = piece[-1:] in {b"\n", b"\r"}
        if piece:
            self._desk.show_piece((self._host, self._rank), piece, self._descriptor)

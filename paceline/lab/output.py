"""The output of many launchers on one screen: each line with its host and rank, and the reason
of a failure once, at the end.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from paceline.cluster.launcher.output import Screen

Who: TypeAlias = tuple[int, int | None]  # host, and rank; the launcher of the host has None

_RANK: Final = re.compile(rb"\[(\d+)\] ")
_CLOSING: Final = re.compile(rb"paceline: what rank (\d+) said last:")
# to users
_WAITING: Final = re.compile(
    rb"paceline: (waits at|nobody answers at|has come to|starting|joined|\d+ workers? ended well)\b"
)
_VERDICT: Final = re.compile(rb"paceline: (rank \d+ on|host) \S+ .*")


class OutputSorter:
    """Sorts the output of launchers on to the screen.

    Every launcher ends with the same last words: they are kept, and shown once.

    `names` are those of the hosts; `places` says on which host each rank is.
    """

    def __init__(self, names: Sequence[str], places: Mapping[int, int], *, show: bool) -> None:
        self._names, self._places = names, places
        self._shown: list[bytes] = []
        first = Screen(1, self._make_prefix, self._shown.append)
        same = not show or os.path.sameopenfile(1, 2)  # then there is one, so that lines don't mix
        self.screens = {
            1: first,
            2: first if same else Screen(2, self._make_prefix, self._shown.append),
        }
        first.is_broken = not show  # not shown: it is only remembered
        self._said: dict[bytes, int] = {}  # lines of launchers, and which said them first
        self._closings: defaultdict[int, list[bytes]] = defaultdict(list)
        self._verdicts: dict[int, bytes] = {}

    @property
    def all_text(self) -> str:
        """All that was shown."""
        return b"".join(self._shown).decode(errors="replace")

    @property
    def is_broken(self) -> bool:
        """Whether the output isn't read any more."""
        return any(screen.is_broken for screen in self.screens.values())

    @property
    def is_full(self) -> bool:
        """Whether launchers have to wait until more has been read."""
        return any(screen.is_full for screen in self.screens.values())

    def pending_screens(self) -> dict[int, Screen]:
        """Return the screens that have something to write, by descriptor."""
        return {screen.descriptor: screen for screen in self.screens.values() if screen.has_pending}

    def drop_pending(self) -> None:
        """Forget what has not been written."""
        for screen in self.screens.values():
            screen.drop_pending()

    def show_lab_lines(self, text: str) -> None:
        """Show lines of the lab itself."""
        self.screens[2].show_line(text)

    def show_piece(self, who: Who, piece: bytes, descriptor: int) -> None:
        """Show a line, or a part of one.

        A launcher's own lines are without a rank; lines that all of them say are shown once.
        """
        host, rank = who
        if _WAITING.match(piece) and rank is None:
            return
        if _CLOSING.match(piece) and rank is None:
            self._closings[host] = [piece]
        elif _VERDICT.match(piece) and rank is None:
            self._verdicts[host] = piece
        elif host in self._closings and descriptor == 2:
            self._closings[host].append(b"" if rank is None else piece)
        elif rank is not None or self._said.setdefault(piece, host) == host:
            self.screens[descriptor].put_line(who, piece)

    def show_last_words(self) -> None:
        """Show the last words that were kept."""
        closing = next((lines for lines in self._closings.values() if lines), None)
        if closing is not None and self._verdicts:
            head = _CLOSING.match(closing[0])
            assert head is not None
            rank = int(head[1])
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
    """One output of one launcher, in pieces that the sorter can sort."""

    PIECES: Final = re.compile(rb"[^\r\n]*[\r\n]")

    def __init__(self, host: int, desk: OutputSorter, descriptor: int) -> None:
        self._host, self._desk, self._descriptor = host, desk, descriptor
        self._rest = b""
        self._fresh = True  # at the start of a line
        self._rank: int | None = None  # of the line under way

    def take_bytes(self, data: bytes) -> None:
        """Take some more bytes."""
        data = self._rest + data
        end = 0
        for match in self.PIECES.finditer(data):
            self._pass_piece(match[0])
            end = match.end()
        self._rest = data[end:]

    def flush_line(self) -> None:
        """Show a line whose end doesn't come."""
        if self._rest:
            self._pass_piece(self._rest)
            self._rest = b""

    def _pass_piece(self, piece: bytes) -> None:
        if self._fresh:
            match = _RANK.match(piece)
            if piece not in {b"\n", b"\r"}:  # else it ends what the line before has left
                self._rank = None if match is None else int(match[1])
            piece = piece if match is None else piece[match.end() :]
        self._fresh = piece[-1:] in {b"\n", b"\r"}
        if piece:
            self._desk.show_piece((self._host, self._rank), piece, self._descriptor)
